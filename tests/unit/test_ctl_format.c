#include <criterion/criterion.h>

#include "core/check.h"
#include "ctl/format.h"
#include "fdcheck.h"

TestSuite(ctl_format, .timeout = 10, .init = fdcheck_begin, .fini = fdcheck_end);

Test(ctl_format, bytes_have_three_digits_that_count)
{
	static const struct {
		uint64_t bytes;
		const char *text;
	} cases[] = {
		{ 0, "0 B" },
		{ 1023, "1023 B" },
		{ 1024, "1.00 KiB" },
		{ 1536, "1.50 KiB" },
		{ 10 * 1024 + 512, "10.5 KiB" },
		{ 123u << 20, "123 MiB" },
		{ 3ull << 30, "3.00 GiB" },
		{ UINT64_MAX, "16.0 EiB" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
		cr_expect_str_eq(format_bytes(cases[i].bytes).text, cases[i].text);
}

Test(ctl_format, times_choose_their_unit)
{
	cr_expect_str_eq(format_us(0).text, "0 us");
	cr_expect_str_eq(format_us(850).text, "850 us");
	cr_expect_str_eq(format_us(1200).text, "1.20 ms");
	cr_expect_str_eq(format_us(3400000).text, "3.40 s");
	cr_expect_str_eq(format_us(302000000).text, "5m02s");
	cr_expect_str_eq(format_seconds(59).text, "59s");
	cr_expect_str_eq(format_seconds(3 * 3600 + 7 * 60).text, "3h07m");
	cr_expect_str_eq(format_seconds(2 * 86400 + 4 * 3600).text, "2d04h");
	cr_expect_str_eq(format_percent(1, 8).text, "12.5%");
	cr_expect_str_eq(format_percent(1, 0).text, "-");
}

Test(ctl_format, sizes_are_read_with_their_suffix)
{
	static const struct {
		const char *text;
		uint64_t bytes;
	} cases[] = {
		{ "0", 0 },
		{ "4096", 4096 },
		{ "64K", 65536 },
		{ "64kB", 65536 },
		{ "2GiB", 2ull << 30 },
		{ "1T", 1ull << 40 },
		{ "12B", 12 },
		{ "18446744073709551615", UINT64_MAX },
	};
	static const char *const bad[] = { "",
					   "K",
					   "-1",
					   " 1",
					   "1.5M",
					   "1X",
					   "1KK",
					   "1iB",
					   "1K ",
					   "18446744073709551616",
					   "99999999999T" };
	uint64_t bytes = 7;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		cr_expect(format_parse_bytes(cases[i].text, &bytes), "%s", cases[i].text);
		cr_expect_eq(bytes, cases[i].bytes, "%s", cases[i].text);
	}
	bytes = 7;
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		cr_expect_not(format_parse_bytes(bad[i], &bytes), "%s", bad[i]);
	cr_expect_eq(bytes, 7);
}

Test(ctl_format, numbers_have_a_limit)
{
	uint64_t n = 0;

	cr_expect(format_parse_number("4096", 4096, &n));
	cr_expect_eq(n, 4096);
	cr_expect_not(format_parse_number("4097", 4096, &n));
	cr_expect_not(format_parse_number("+1", 4096, &n));
	cr_expect_not(format_parse_number("1 ", 4096, &n));
	cr_expect_not(format_parse_number("", 4096, &n));
	cr_expect_eq(n, 4096);
}
