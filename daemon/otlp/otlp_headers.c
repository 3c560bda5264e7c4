#include "otlp/otlp_headers.h"

#include <ctype.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"

/* A value that is shorter is no secret, such as a number of a tenant. */
#define OTLP_HEADERS_SECRET_BYTES 4u

/* Those that gRPC sets itself. */
static const char *const otlp_headers_own[] = { "content-type", "te", "user-agent", "host",
						"connection" };

static int otlp_headers_refuse(unsigned line, const char *why, struct fault *f)
{
	return fault_set(f, FAULT_INVALID, "otlp_headers_file",
			 "line %u of otlp_headers_file %s; write lines such as "
			 "\"authorization: Bearer TOKEN\", at most %u",
			 line, why, OTLP_HEADERS_MAX);
}

static bool otlp_headers_is_own(const char *name)
{
	for (size_t i = 0; i < ARRAY_SIZE(otlp_headers_own); i++)
		if (strcmp(name, otlp_headers_own[i]) == 0)
			return true;
	return strncmp(name, "grpc-", 5) == 0;
}

/* Of HTTP/2 and gRPC: small letters. A name that ends in -bin has a binary value. */
static const char *otlp_headers_check_name(char *name)
{
	size_t n = strlen(name);

	for (char *at = name; *at; at++) {
		*at = (char)tolower((unsigned char)*at);
		if (!islower((unsigned char)*at) && !isdigit((unsigned char)*at) &&
		    !strchr("-_.", *at))
			return "has a name with other characters than letters, digits, '-', '_' "
			       "and '.'";
	}
	if (!n)
		return "has no name before the colon";
	if (n > 4 && strcmp(name + n - 4, "-bin") == 0)
		return "has a name that ends in -bin, which gRPC keeps for binary values";
	return otlp_headers_is_own(name) ? "has a name that gRPC uses itself" : NULL;
}

static const char *otlp_headers_check_value(const char *value)
{
	for (; *value; value++)
		if (*value < ' ' || *value > '~')
			return "has a value with other characters than printable ASCII";
	return NULL;
}

/* @line: a whole line, cut here into a name and a value. Return: what is wrong, or NULL. */
static const char *otlp_headers_take(struct otlp_headers *h, char *line)
{
	char *value = strchr(line, ':');
	const char *why;

	if (!value)
		return "has no colon";
	if (h->n == OTLP_HEADERS_MAX)
		return "is one header too many";
	*value++ = '\0';
	value += strspn(value, " \t");
	for (size_t n = strlen(value); n && strchr(" \t\r", value[n - 1]); n--)
		value[n - 1] = '\0';
	why = otlp_headers_check_name(line);
	why = why ? why : otlp_headers_check_value(value);
	h->list[h->n].name = line;
	h->list[h->n++].value = value;
	return why;
}

int otlp_headers_parse(const char *text, struct otlp_headers *ret, struct fault *f)
{
	struct otlp_headers h = { .bytes = strlen(text) + 1 };
	const char *why = NULL;
	unsigned number = 1;

	h.text = strdup(text);
	if (!h.text)
		return fault_errno(f, -ENOMEM, "reading otlp_headers_file");
	for (char *line = h.text, *next; line && !why; line = next, number++) {
		next = strchr(line, '\n');
		if (next)
			*next++ = '\0';
		line += strspn(line, " \t");
		if (*line && *line != '#' && *line != '\r')
			why = otlp_headers_take(&h, line);
	}
	if (why) {
		otlp_headers_deinit(&h);
		return otlp_headers_refuse(number - 1, why, f);
	}
	*ret = h;
	return 0;
}

static void otlp_headers_hide_word(const char *word, char *text)
{
	const size_t n = strlen(word);

	if (n < OTLP_HEADERS_SECRET_BYTES)
		return;
	for (; (text = strstr(text, word)); text += n)
		memset(text, '*', n);
}

/* Of "Bearer TOKEN" the token is the secret. */
void otlp_headers_hide(const char *value, char *text)
{
	const char *blank = strrchr(value, ' ');

	otlp_headers_hide_word(value, text);
	if (blank)
		otlp_headers_hide_word(blank + 1, text);
}

void otlp_headers_deinit(struct otlp_headers *h)
{
	if (h->text)
		explicit_bzero(h->text, h->bytes);
	free(h->text);
	*h = OTLP_HEADERS_NULL;
}
