#include "format.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"

/* Three digits that count: 1.23, 12.3, 123. */
static int format_decimals(double value)
{
	return value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
}

struct format format_bytes(uint64_t bytes)
{
	static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
	struct format f;
	double value = (double)bytes;
	size_t unit = 0;

	for (; value >= 1024 && unit + 1 < ARRAY_SIZE(units); unit++)
		value /= 1024;
	snprintf(f.text, sizeof(f.text), "%.*f %s", unit ? format_decimals(value) : 0, value,
		 units[unit]);
	return f;
}

struct format format_us(uint64_t us)
{
	struct format f;
	double value = us < 1000000 ? (double)us / 1e3 : (double)us / 1e6;

	if (us < 1000)
		snprintf(f.text, sizeof(f.text), "%u us", (unsigned)us);
	else if (us < 60000000)
		snprintf(f.text, sizeof(f.text), "%.*f %s", format_decimals(value), value,
			 us < 1000000 ? "ms" : "s");
	else
		f = format_seconds(us / 1000000);
	return f;
}

struct format format_seconds(uint64_t s)
{
	struct format f;
	unsigned long long n = s;

	if (n < 60)
		snprintf(f.text, sizeof(f.text), "%llus", n);
	else if (n < 3600)
		snprintf(f.text, sizeof(f.text), "%llum%02llus", n / 60, n % 60);
	else if (n < 86400)
		snprintf(f.text, sizeof(f.text), "%lluh%02llum", n / 3600, n / 60 % 60);
	else
		snprintf(f.text, sizeof(f.text), "%llud%02lluh", n / 86400, n / 3600 % 24);
	return f;
}

struct format format_percent(uint64_t part, uint64_t whole)
{
	struct format f = { "-" };

	if (whole)
		snprintf(f.text, sizeof(f.text), "%.1f%%", 100.0 * (double)part / (double)whole);
	return f;
}

/* strtoull without sign and blanks. Return: where the digits end, or NULL. */
static const char *format_digits(const char *text, uint64_t *ret)
{
	char *end;

	if (!isdigit((unsigned char)*text))
		return NULL;
	errno = 0;
	*ret = strtoull(text, &end, 10);
	return errno ? NULL : end;
}

bool format_parse_number(const char *text, uint64_t max, uint64_t *ret)
{
	uint64_t number;
	const char *end = format_digits(text, &number);

	if (!end || *end || number > max)
		return false;
	*ret = number;
	return true;
}

bool format_parse_bytes(const char *text, uint64_t *ret)
{
	static const char suffixes[] = "KMGT";
	uint64_t number;
	const char *end = format_digits(text, &number);
	const char *suffix;
	unsigned shift = 0;

	if (!end)
		return false;
	suffix = *end ? strchr(suffixes, toupper((unsigned char)*end)) : NULL;
	if (suffix) {
		shift = 10 * (unsigned)(suffix - suffixes + 1);
		end++;
		if (*end == 'i')
			end++;
	}
	if (*end == 'B')
		end++;
	if (*end || number > UINT64_MAX >> shift)
		return false;
	*ret = number << shift;
	return true;
}
