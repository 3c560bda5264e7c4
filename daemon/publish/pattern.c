#include "publish/pattern.h"

#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/utf8.h"

/* So many bytes that a placeholder passes by cost a step. */
#define PATTERN_STEP_BYTES 16u

/* Literal text, or a placeholder, at the begin of a pattern. */
struct pattern_piece {
	const char *text; /* the literal, or the key */
	size_t bytes;     /* of it */
	size_t all;       /* of the piece in the pattern */
	bool placeholder, many;
};

#define PATTERN_MANY "..."

static struct pattern_piece pattern_next(const char *p)
{
	struct pattern_piece piece = { .text = p };
	size_t many = strlen(PATTERN_MANY);

	if (*p != '{') {
		piece.bytes = piece.all = strcspn(p, "{");
		return piece;
	}
	piece.placeholder = true;
	piece.text = p + 1;
	piece.bytes = strcspn(p + 1, "}");
	piece.all = piece.bytes + 2;
	if (piece.bytes > many && !strncmp(piece.text + piece.bytes - many, PATTERN_MANY, many)) {
		piece.many = true;
		piece.bytes -= many;
	}
	return piece;
}

static bool pattern_is_key(const char *text, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		if (!((text[i] >= 'a' && text[i] <= 'z') || (text[i] >= 'A' && text[i] <= 'Z') ||
		      (text[i] >= '0' && text[i] <= '9') || text[i] == '_'))
			return false;
	return bytes > 0;
}

static int pattern_check_braces(const char *pattern, const char *field, struct fault *f)
{
	bool open = false;

	for (const char *p = pattern; *p; p++) {
		if ((*p == '{' && open) || (*p == '}' && !open))
			break;
		if (*p == '{' || *p == '}')
			open = !open;
		if (!p[1] && !open)
			return 0;
	}
	return fault_set(f, FAULT_INVALID, field,
			 "'%.200s': each { needs its }, as in layers.{i}.weight", pattern);
}

/* @many: how many {x...} there are; @same: does a component have two placeholders? */
static int pattern_check_count(const char *pattern, unsigned n, unsigned many, bool same,
			       const char *field, struct fault *f)
{
	if (n > PATTERN_MAX)
		return fault_set(f, FAULT_INVALID, field,
				 "'%.200s' has %u placeholders; at most %u are possible", pattern,
				 n, PATTERN_MAX);
	if (many > 1)
		return fault_set(
			f, FAULT_INVALID, field,
			"'%.200s' has %u placeholders for several components; one is possible",
			pattern, many);
	if (same)
		return fault_set(f, FAULT_INVALID, field,
				 "'%.200s': two placeholders need a dot between them", pattern);
	return 0;
}

/* Readers of all kinds get the name, as text. */
static int pattern_check_text(const char *pattern, const char *field, struct fault *f)
{
	size_t length;

	for (const char *at = pattern; *at; at += length) {
		length = utf8_length(at);
		if (!length)
			return fault_set(
				f, FAULT_INVALID, field,
				"a name has %s 0x%02x at byte %zu; only printable text is allowed",
				(unsigned char)*at < 0x80 ? "the control character"
							  : "invalid UTF-8,",
				(unsigned char)*at, (size_t)(at - pattern));
	}
	return 0;
}

int pattern_check(const char *pattern, const char *field, struct fault *f)
{
	unsigned n = 0, many = 0;
	bool same = false, inside = false; /* a placeholder in this component */

	if (!*pattern || strlen(pattern) > PATTERN_MAX_BYTES)
		return fault_set(f, FAULT_INVALID, field,
				 "a name has 1 to %u bytes; this one has %zu", PATTERN_MAX_BYTES,
				 strlen(pattern));
	if (pattern_check_text(pattern, field, f) || pattern_check_braces(pattern, field, f))
		return f->code;
	for (const char *p = pattern; *p;) {
		struct pattern_piece piece = pattern_next(p);

		if (piece.placeholder && !pattern_is_key(piece.text, piece.bytes))
			return fault_set(
				f, FAULT_INVALID, field,
				"'%.200s': a placeholder is letters, digits and '_', with '...' "
				"behind them for several components",
				pattern);
		n += piece.placeholder;
		many += piece.many;
		same |= piece.placeholder && inside;
		inside = piece.placeholder || (inside && !memchr(piece.text, '.', piece.bytes));
		p += piece.all;
	}
	return pattern_check_count(pattern, n, many, same, field, f);
}

size_t pattern_prefix(const char *pattern)
{
	return strcspn(pattern, "{");
}

bool pattern_has(const char *pattern, const char *key, size_t bytes)
{
	for (const char *p = pattern; *p;) {
		struct pattern_piece piece = pattern_next(p);

		if (piece.placeholder && piece.bytes == bytes && !memcmp(piece.text, key, bytes))
			return true;
		p += piece.all;
	}
	return false;
}

const char *pattern_lacks(const char *pattern, const char *of, size_t *ret_bytes)
{
	for (const char *p = pattern; *p;) {
		struct pattern_piece piece = pattern_next(p);

		if (piece.placeholder && !pattern_has(of, piece.text, piece.bytes)) {
			*ret_bytes = piece.bytes;
			return piece.text;
		}
		p += piece.all;
	}
	return NULL;
}

const struct pattern_value *pattern_find(const struct pattern_values *values, const char *key,
					 size_t bytes)
{
	for (unsigned i = 0; i < values->n; i++)
		if (values->all[i].key_bytes == bytes && !memcmp(values->all[i].key, key, bytes))
			return &values->all[i];
	return NULL;
}

static bool pattern_match_from(const char *pattern, const char *name,
			       struct pattern_values *values);

/* The placeholder stands for the first @bytes of @name; does the rest match? */
static bool pattern_try(const struct pattern_piece *piece, const char *rest, const char *name,
			size_t bytes, struct pattern_values *values)
{
	const struct pattern_value *known = pattern_find(values, piece->text, piece->bytes);
	unsigned n = values->n;

	if (known)
		return known->value_bytes == bytes && !memcmp(known->value, name, bytes) &&
		       pattern_match_from(rest, name + bytes, values);
	CHECK(n < PATTERN_MAX);
	values->all[values->n++] = (struct pattern_value){ piece->text, name, piece->bytes, bytes };
	if (pattern_match_from(rest, name + bytes, values))
		return true;
	values->n = n;
	return false;
}

/* The shortest value first: what follows it is literal text or the end. */
static bool pattern_match_placeholder(const struct pattern_piece *piece, const char *rest,
				      const char *name, struct pattern_values *values)
{
	for (size_t bytes = 1; name[bytes - 1]; bytes++) {
		if (name[bytes - 1] == '.' && (!piece->many || bytes == 1))
			return false;
		values->steps += bytes % PATTERN_STEP_BYTES == 0;
		/* literal text behind it begins with this byte, or the name ends here */
		if (*rest != '{' && *rest != name[bytes])
			continue;
		if (pattern_try(piece, rest, name, bytes, values))
			return true;
	}
	return false;
}

static bool pattern_match_from(const char *pattern, const char *name, struct pattern_values *values)
{
	struct pattern_piece piece;

	values->steps++;
	if (!*pattern)
		return !*name;
	piece = pattern_next(pattern);
	if (piece.placeholder)
		return pattern_match_placeholder(&piece, pattern + piece.all, name, values);
	return !strncmp(pattern, name, piece.bytes) &&
	       pattern_match_from(pattern + piece.all, name + piece.bytes, values);
}

bool pattern_match(const char *pattern, const char *name, struct pattern_values *values)
{
	return pattern_match_from(pattern, name, values);
}

/* Text or value of a piece. */
static const char *pattern_piece_text(const struct pattern_piece *piece,
				      const struct pattern_values *values, size_t *ret_bytes)
{
	const struct pattern_value *v;

	*ret_bytes = piece->bytes;
	if (!piece->placeholder)
		return piece->text;
	v = pattern_find(values, piece->text, piece->bytes);
	CHECK(v);
	*ret_bytes = v->value_bytes;
	return v->value;
}

char *pattern_expand(const char *pattern, const struct pattern_values *values)
{
	size_t all = 0, bytes;
	char *ret, *to;

	for (const char *p = pattern; *p;) {
		struct pattern_piece piece = pattern_next(p);

		pattern_piece_text(&piece, values, &bytes);
		all += bytes;
		p += piece.all;
	}
	ret = to = malloc(all + 1);
	for (const char *p = pattern; ret && *p;) {
		struct pattern_piece piece = pattern_next(p);
		const char *text = pattern_piece_text(&piece, values, &bytes);

		memcpy(to, text, bytes);
		to += bytes;
		p += piece.all;
	}
	if (ret)
		*to = '\0';
	return ret;
}
