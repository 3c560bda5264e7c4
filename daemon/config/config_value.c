/* One value from and to text, with units. */
#include "config/config_keys.h"

#include <ctype.h>
#include <errno.h>
#include <grp.h>
#include <inttypes.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"

struct unit_name {
	const char *name;
	uint64_t factor;
};

/* Largest first: formatting takes the first that divides. */
static const struct unit_name byte_units[] = {
	{ "TiB", 1ull << 40 },
	{ "GiB", 1ull << 30 },
	{ "MiB", 1ull << 20 },
	{ "KiB", 1ull << 10 },
	{ "B", 1 },
	{ NULL, 0 },
};
static const struct unit_name milli_units[] = {
	{ "d", 86400000 }, { "h", 3600000 }, { "min", 60000 },
	{ "s", 1000 },     { "ms", 1 },      { NULL, 0 },
};
static const struct unit_name second_units[] = {
	{ "d", 86400 }, { "h", 3600 }, { "min", 60 }, { "s", 1 }, { NULL, 0 },
};

static const struct unit_name *config_value_units_of(const struct config_key *k)
{
	static const struct unit_name none[] = { { NULL, 0 } };

	switch (k->type) {
	case CONFIG_BYTES:
		return byte_units;
	case CONFIG_MILLIS:
		return milli_units;
	case CONFIG_SECONDS:
		return second_units;
	default:
		return none;
	}
}

/* "64MiB" from a count of the key's unit. */
static void config_value_format_amount(const struct config_key *k, uint64_t n, char *buf,
				       size_t bytes)
{
	for (const struct unit_name *u = config_value_units_of(k); u->name; u++) {
		if (n != 0 && n % u->factor == 0) {
			snprintf(buf, bytes, "%" PRIu64 "%s", n / u->factor, u->name);
			return;
		}
	}
	snprintf(buf, bytes, "%" PRIu64, n);
}

static const char *config_value_what_kind(const struct config_key *k)
{
	switch (k->type) {
	case CONFIG_BYTES:
		return "bytes, with a unit such as KiB, MiB, GiB or TiB if it has one,";
	case CONFIG_MILLIS:
		return "milliseconds, or a time with ms, s, min, h or d,";
	case CONFIG_SECONDS:
		return "seconds, or a time with s, min, h or d,";
	default:
		return "a whole number,";
	}
}

static int config_value_refuse_amount(const struct config_key *k, const char *text, struct fault *f)
{
	char min[32], max[32];

	config_value_format_amount(k, k->zero && k->min == 1 ? 0 : k->min, min, sizeof(min));
	config_value_format_amount(k, k->max, max, sizeof(max));
	return fault_set(f, FAULT_INVALID, k->name, "%s is '%.64s'; it must be %s %s%s to %s",
			 k->name, text, config_value_what_kind(k),
			 k->zero && k->min > 1 ? "0 or from " : "from ", min, max);
}

static bool config_value_in_range(const struct config_key *k, uint64_t n)
{
	return (n >= k->min && n <= k->max) || (n == 0 && k->zero);
}

/* Digits only: no sign, no blank, no other base. Return: what follows, or NULL. */
static const char *config_value_parse_digits(const char *s, uint64_t *ret)
{
	uint64_t n = 0;

	if (!isdigit((unsigned char)*s))
		return NULL;
	for (; isdigit((unsigned char)*s); s++)
		if (__builtin_mul_overflow(n, 10u, &n) ||
		    __builtin_add_overflow(n, (uint64_t)(*s - '0'), &n))
			return NULL;
	*ret = n;
	return s;
}

bool config_parse_amount(const struct config_key *k, const char *text, uint64_t *ret)
{
	uint64_t n;
	const char *rest = config_value_parse_digits(text, &n);

	if (!rest)
		return false;
	rest += strspn(rest, " ");
	if (*rest) {
		const struct unit_name *u = config_value_units_of(k);

		while (u->name && strcmp(u->name, rest) != 0)
			u++;
		if (!u->name || __builtin_mul_overflow(n, u->factor, &n))
			return false;
	}
	*ret = n;
	return config_value_in_range(k, n);
}

static int config_value_set_amount(struct config *c, const struct config_key *k, const char *text,
				   struct fault *f)
{
	uint64_t n;

	if (!config_parse_amount(k, text, &n))
		return config_value_refuse_amount(k, text, f);
	if (k->type == CONFIG_BYTES)
		*(uint64_t *)config_key_field(c, k) = n;
	else
		*(uint32_t *)config_key_field(c, k) = (uint32_t)n;
	return 0;
}

static int config_value_set_mode(struct config *c, const struct config_key *k, const char *text,
				 struct fault *f)
{
	/* 0o660 is how YAML 1.2 writes it */
	const char *digits = strncmp(text, "0o", 2) == 0 ? text + 2 : text;
	size_t n = strlen(digits);

	if (n < 3 || n > 5 || strspn(digits, "01234567") != n || strtoul(digits, NULL, 8) > k->max)
		return fault_set(f, FAULT_INVALID, k->name,
				 "%s is '%.64s'; it must be octal permissions such as 0660, at "
				 "most 0777",
				 k->name, text);
	*(uint32_t *)config_key_field(c, k) = (uint32_t)strtoul(digits, NULL, 8);
	return 0;
}

static bool config_value_has_control(const char *s)
{
	for (; *s; s++)
		if (iscntrl((unsigned char)*s))
			return true;
	return false;
}

static int config_value_set_text(struct config *c, const struct config_key *k, const char *text,
				 struct fault *f)
{
	size_t n = strlen(text);

	if (n < k->min || n > k->max || config_value_has_control(text))
		return fault_set(f, FAULT_INVALID, k->name,
				 "%s has %zu characters; it must have %u to %u, none of them a "
				 "control character",
				 k->name, n, (unsigned)k->min, (unsigned)k->max);
	if (k->type == CONFIG_PATH && n > 0 && text[0] != '/')
		return fault_set(f, FAULT_INVALID, k->name,
				 "%s is '%.64s'; it must be an absolute path%s", k->name, text,
				 k->min == 0 ? " or empty" : "");
	memset(config_key_field(c, k), 0, k->bytes);
	memcpy(config_key_field(c, k), text, n);
	return 0;
}

/* Characters that no notation treats as its own: a word is quoted as it is. */
static bool config_value_is_word(const char *s)
{
	for (; *s; s++)
		if (!isgraph((unsigned char)*s) || strchr("\"\\,", *s))
			return false;
	return true;
}

static int config_value_set_words(struct config *c, const struct config_key *k, const char *text,
				  struct fault *f)
{
	_cleanup_(freep) char *copy = strdup(text);
	char list[CONFIG_VALUE_MAX] = "";
	size_t used = 0, n = 0;

	if (!copy)
		return fault_errno(f, -ENOMEM, k->name);
	for (char *save = NULL, *item = strtok_r(copy, ", ", &save); item;
	     item = strtok_r(NULL, ", ", &save)) {
		if (!config_value_is_word(item))
			return fault_set(f, FAULT_INVALID, k->name,
					 "%s has '%.64s'; an entry must be printable characters "
					 "other than blanks, quotes and backslashes",
					 k->name, item);
		if (n++ == CONFIG_MAX_IDS || used + strlen(item) + 1 > k->max)
			return fault_set(f, FAULT_INVALID, k->name,
					 "%s is too long; it must have at most %d entries and %u "
					 "characters",
					 k->name, CONFIG_MAX_IDS, (unsigned)k->max);
		used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", used ? "," : "",
					 item);
	}
	CHECK(used < k->bytes);
	memset(config_key_field(c, k), 0, k->bytes);
	memcpy(config_key_field(c, k), list, used);
	return 0;
}

/* Is @text one of the words of "a|b|c"? */
static bool config_value_is_choice(const char *choices, const char *text)
{
	size_t n = strlen(text);

	while (*choices) {
		size_t word = strcspn(choices, "|");

		if (word == n && memcmp(choices, text, n) == 0)
			return true;
		choices += word;
		choices += *choices == '|';
	}
	return false;
}

static int config_value_set_choice(struct config *c, const struct config_key *k, const char *text,
				   struct fault *f)
{
	if (!config_value_is_choice(k->choices, text))
		return fault_set(f, FAULT_INVALID, k->name, "%s is '%.64s'; it must be one of %s",
				 k->name, text, k->choices);
	CHECK(strlen(text) < k->bytes);
	memset(config_key_field(c, k), 0, k->bytes);
	memcpy(config_key_field(c, k), text, strlen(text));
	return 0;
}

/* Return: there is such a user. */
static bool config_value_find_user(const char *name, uint32_t *ret)
{
	char buf[4096];
	struct passwd pw, *found = NULL;

	if (getpwnam_r(name, &pw, buf, sizeof(buf), &found) != 0 || !found)
		return false;
	*ret = found->pw_uid;
	return true;
}

/* Return: there is such a group. Its members may need a large buffer. */
static bool config_value_find_group(const char *name, uint32_t *ret)
{
	_cleanup_(freep) char *buf = NULL;
	struct group gr, *found = NULL;
	int r = ERANGE;

	for (size_t bytes = 4096; r == ERANGE && bytes <= 4u << 20; bytes *= 4) {
		free(buf);
		buf = malloc(bytes);
		if (!buf)
			return false;
		r = getgrnam_r(name, &gr, buf, bytes, &found);
	}
	if (r != 0 || !found)
		return false;
	*ret = found->gr_gid;
	return true;
}

bool config_parse_id(bool group, const char *name, uint32_t *ret)
{
	uint64_t n;
	const char *rest = config_value_parse_digits(name, &n);

	if (rest && *rest == '\0' && n < UINT32_MAX) {
		*ret = (uint32_t)n;
		return true;
	}
	if (isdigit((unsigned char)name[0]) || name[0] == '\0')
		return false;
	return group ? config_value_find_group(name, ret) : config_value_find_user(name, ret);
}

_Static_assert(sizeof(uid_t) == sizeof(uint32_t) && sizeof(gid_t) == sizeof(uint32_t),
	       "one array type serves both lists");

static int config_value_parse_ids(const struct config_key *k, char *text, uint32_t *ids,
				  uint32_t *ret_n, struct fault *f)
{
	uint32_t n = 0;

	for (char *save = NULL, *item = strtok_r(text, ", ", &save); item;
	     item = strtok_r(NULL, ", ", &save)) {
		if (n == CONFIG_MAX_IDS)
			return fault_set(f, FAULT_INVALID, k->name,
					 "%s has more than %d entries; list a group instead",
					 k->name, CONFIG_MAX_IDS);
		if (!config_parse_id(k->type == CONFIG_GIDS, item, &ids[n]))
			return fault_set(f, FAULT_INVALID, k->name,
					 "%s has '%.64s'; an entry must be a number up to %" PRIu64
					 " or the name of a %s on this machine",
					 k->name, item, k->max,
					 k->type == CONFIG_UIDS ? "user" : "group");
		n++;
	}
	*ret_n = n;
	return 0;
}

static int config_value_set_ids(struct config *c, const struct config_key *k, const char *text,
				struct fault *f)
{
	_cleanup_(freep) char *copy = strdup(text);
	uint32_t ids[CONFIG_MAX_IDS] = { 0 }, n = 0;
	int r;

	if (!copy)
		return fault_errno(f, -ENOMEM, k->name);
	r = config_value_parse_ids(k, copy, ids, &n, f);
	if (r)
		return r;
	memcpy(config_key_field(c, k), ids, sizeof(ids));
	memcpy((char *)c + k->count_offset, &n, sizeof(n));
	return 0;
}

int config_key_parse(struct config *c, const struct config_key *k, const char *text,
		     struct fault *f)
{
	switch (k->type) {
	case CONFIG_TEXT:
	case CONFIG_PATH:
		return config_value_set_text(c, k, text, f);
	case CONFIG_CHOICE:
		return config_value_set_choice(c, k, text, f);
	case CONFIG_MODE:
		return config_value_set_mode(c, k, text, f);
	case CONFIG_UIDS:
	case CONFIG_GIDS:
		return config_value_set_ids(c, k, text, f);
	case CONFIG_LIMITS:
		return config_limits_parse(c, k, text, f);
	case CONFIG_WORDS:
		return config_value_set_words(c, k, text, f);
	default:
		return config_value_set_amount(c, k, text, f);
	}
}

static void config_value_format_ids(const struct config *c, const struct config_key *k, char *buf)
{
	const uint32_t *ids = config_key_value(c, k);
	uint32_t n;
	size_t used = 0;

	memcpy(&n, (const char *)c + k->count_offset, sizeof(n));
	CHECK(n <= CONFIG_MAX_IDS);
	buf[0] = '\0';
	for (uint32_t i = 0; i < n; i++)
		used += (size_t)snprintf(buf + used, CONFIG_VALUE_MAX - used, "%s%" PRIu32,
					 i ? "," : "", ids[i]);
	CHECK(used < CONFIG_VALUE_MAX);
}

void config_key_format(const struct config *c, const struct config_key *k, char *buf)
{
	const void *value = config_key_value(c, k);

	switch (k->type) {
	case CONFIG_TEXT:
	case CONFIG_PATH:
	case CONFIG_CHOICE:
	case CONFIG_WORDS:
		snprintf(buf, CONFIG_VALUE_MAX, "%s", (const char *)value);
		break;
	case CONFIG_MODE:
		snprintf(buf, CONFIG_VALUE_MAX, "%04" PRIo32, *(const uint32_t *)value);
		break;
	case CONFIG_UIDS:
	case CONFIG_GIDS:
		config_value_format_ids(c, k, buf);
		break;
	case CONFIG_LIMITS:
		config_limits_format(c, buf);
		break;
	case CONFIG_BYTES:
		config_value_format_amount(k, *(const uint64_t *)value, buf, CONFIG_VALUE_MAX);
		break;
	default:
		config_value_format_amount(k, *(const uint32_t *)value, buf, CONFIG_VALUE_MAX);
	}
}

bool config_key_equal(const struct config *a, const struct config *b, const struct config_key *k)
{
	char x[CONFIG_VALUE_MAX], y[CONFIG_VALUE_MAX];

	config_key_format(a, k, x);
	config_key_format(b, k, y);
	return strcmp(x, y) == 0;
}
