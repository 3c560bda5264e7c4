#include "core/log_format.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"

/* Topics are short constants of our own; a longer one is cut. */
#define TOPIC_MAX 32

/* Bytes of the well-formed, printable UTF-8 character at @s, 0 if there is none.
 * Reads no further than the terminating 0. */
static size_t log_format_utf8_length(const unsigned char *s)
{
	static const uint32_t smallest[5] = { 0, 0, 0x80, 0x800, 0x10000 };
	size_t n = s[0] < 0x80 ? 1 : (s[0] & 0xe0) == 0xc0 ? 2 : (s[0] & 0xf0) == 0xe0 ? 3 : 4;
	uint32_t c;

	if (n == 1)
		return s[0] >= 0x20 && s[0] != 0x7f;
	if (n == 4 && (s[0] & 0xf8) != 0xf0)
		return 0;
	c = s[0] & (0xffu >> (n + 1));
	for (size_t i = 1; i < n; i++) {
		if ((s[i] & 0xc0) != 0x80)
			return 0;
		c = c << 6 | (s[i] & 0x3f);
	}
	if (c < smallest[n] || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff))
		return 0;
	/* C1 controls; line and paragraph separator; overrides of the writing direction */
	if (c < 0xa0 || c == 0x2028 || c == 0x2029 || (c >= 0x202a && c <= 0x202e))
		return 0;
	return n;
}

void log_clean(char *text)
{
	while (*text) {
		size_t n = log_format_utf8_length((const unsigned char *)text);

		if (n == 0) {
			*text = '?';
			n = 1;
		}
		text += n;
	}
}

void log_message(char *buf, const char *fmt, va_list ap)
{
	int n = vsnprintf(buf, LOG_MESSAGE_MAX, fmt, ap);

	if (n < 0)
		snprintf(buf, LOG_MESSAGE_MAX, "(a message that cannot be printed)");
	if (n >= LOG_MESSAGE_MAX)
		memcpy(buf + LOG_MESSAGE_MAX - 4, "...", 4);
	log_clean(buf);
}

/* 2026-01-31T12:00:00.123456Z */
static void log_format_time(char *buf, size_t bytes, const struct timespec *ts)
{
	struct tm tm;
	size_t n;

	gmtime_r(&ts->tv_sec, &tm);
	n = strftime(buf, bytes, "%Y-%m-%dT%H:%M:%S", &tm);
	snprintf(buf + n, bytes - n, ".%06ldZ", ts->tv_nsec / 1000);
}

size_t log_format_text(char *buf, const struct log_record *r)
{
	char time[48];
	int n;

	log_format_time(time, sizeof(time), &r->time);
	n = snprintf(buf, LOG_LINE_MAX, "%s %-5s %.*s %s\n", time, log_level_name(r->level),
		     TOPIC_MAX, r->topic, r->message);
	CHECK(n > 0 && n < LOG_LINE_MAX);
	return (size_t)n;
}

const char *log_format_priority(enum log_level level)
{
	static const char *const priorities[_LOG_N] = {
		[LOG_ERROR] = "<3>", [LOG_WARN] = "<4>", [LOG_INFO] = "<6>", [LOG_DEBUG] = "<7>"
	};

	return priorities[level];
}

size_t log_format_prefixed(char *buf, const struct log_record *r)
{
	int n = snprintf(buf, LOG_LINE_MAX, "%s%.*s %s\n", log_format_priority(r->level), TOPIC_MAX,
			 r->topic, r->message);

	CHECK(n > 0 && n < LOG_LINE_MAX);
	return (size_t)n;
}

/* One key=value of a message; a quoted value's quotes are not part of it. */
struct pair {
	const char *key;
	size_t key_bytes;
	const char *value;
	size_t value_bytes;
};

/* Read the pair at @s. Return: what follows it and its blanks, or NULL: no pair. */
static const char *log_format_read_pair(const char *s, struct pair *p)
{
	p->key = s;
	while (islower((unsigned char)*s) || isdigit((unsigned char)*s) || *s == '_')
		s++;
	p->key_bytes = (size_t)(s - p->key);
	if (p->key_bytes == 0 || *s++ != '=')
		return NULL;
	if (*s == '"') {
		p->value = ++s;
		s = strchr(s, '"');
		if (!s || (s[1] != '\0' && s[1] != ' '))
			return NULL;
		p->value_bytes = (size_t)(s++ - p->value);
	} else {
		p->value = s;
		s += strcspn(s, " ");
		p->value_bytes = (size_t)(s - p->value);
	}
	return s + strspn(s, " ");
}

/* The place from which @message consists only of pairs; its end if there are none. */
static const char *log_format_find_pairs(const char *message)
{
	const char *start = message, *s = message;

	while (*s) {
		struct pair p;
		const char *next = log_format_read_pair(s, &p);

		if (!next) {
			next = s + strcspn(s, " ");
			next += strspn(next, " ");
			start = next;
		}
		s = next;
	}
	return start;
}

struct out {
	char *buf;
	size_t used;
};

static void log_format_put(struct out *o, const char *s, size_t bytes)
{
	CHECK(o->used + bytes < LOG_LINE_MAX);
	memcpy(o->buf + o->used, s, bytes);
	o->used += bytes;
}

static void log_format_put_text(struct out *o, const char *s)
{
	log_format_put(o, s, strlen(s));
}

/* A JSON string; the input is clean, so only two characters need escapes. */
static void log_format_put_string(struct out *o, const char *s, size_t bytes)
{
	log_format_put_text(o, "\"");
	for (size_t i = 0; i < bytes; i++) {
		if (s[i] == '"' || s[i] == '\\')
			log_format_put_text(o, "\\");
		log_format_put(o, &s[i], 1);
	}
	log_format_put_text(o, "\"");
}

static void log_format_put_pairs(struct out *o, const char *pairs)
{
	const char *separator = ",\"fields\":{";

	while (*pairs) {
		struct pair p;

		pairs = log_format_read_pair(pairs, &p);
		CHECK(pairs);
		log_format_put_text(o, separator);
		log_format_put_string(o, p.key, p.key_bytes);
		log_format_put_text(o, ":");
		log_format_put_string(o, p.value, p.value_bytes);
		separator = ",";
	}
	log_format_put_text(o, "}");
}

size_t log_format_json(char *buf, const struct log_record *r)
{
	struct out o = { .buf = buf };
	const char *pairs = log_format_find_pairs(r->message);
	size_t bytes = (size_t)(pairs - r->message);
	char time[48];

	while (bytes > 0 && r->message[bytes - 1] == ' ')
		bytes--;
	log_format_time(time, sizeof(time), &r->time);
	log_format_put_text(&o, "{\"time\":\"");
	log_format_put_text(&o, time);
	log_format_put_text(&o, "\",\"level\":\"");
	log_format_put_text(&o, log_level_name(r->level));
	log_format_put_text(&o, "\",\"topic\":");
	log_format_put_string(&o, r->topic, strnlen(r->topic, TOPIC_MAX));
	log_format_put_text(&o, ",\"message\":");
	log_format_put_string(&o, r->message, bytes);
	if (*pairs)
		log_format_put_pairs(&o, pairs);
	log_format_put_text(&o, "}\n");
	return o.used;
}

/* "SHARDD_KEY=value\n", unless there is no room for it: MESSAGE has it, too. */
static void log_format_put_field(struct out *o, const struct pair *p)
{
	if (o->used + sizeof("SHARDD_=\n") + p->key_bytes + p->value_bytes > LOG_LINE_MAX)
		return;
	log_format_put_text(o, "SHARDD_");
	for (size_t i = 0; i < p->key_bytes; i++)
		log_format_put(o, &(char){ (char)toupper((unsigned char)p->key[i]) }, 1);
	log_format_put_text(o, "=");
	log_format_put(o, p->value, p->value_bytes);
	log_format_put_text(o, "\n");
}

size_t log_format_journal(char *buf, const struct log_record *r)
{
	const char *pairs = log_format_find_pairs(r->message);
	struct out o = { .buf = buf };
	char head[160];

	snprintf(head, sizeof(head),
		 "PRIORITY=%c\nSYSLOG_IDENTIFIER=shardd\nSHARDD_TOPIC=%.*s\nMESSAGE=%.*s ",
		 log_format_priority(r->level)[1], TOPIC_MAX, r->topic, TOPIC_MAX, r->topic);
	log_format_put_text(&o, head);
	log_format_put_text(&o, r->message);
	log_format_put_text(&o, "\n");
	while (*pairs) {
		struct pair p;

		pairs = log_format_read_pair(pairs, &p);
		CHECK(pairs);
		log_format_put_field(&o, &p);
	}
	return o.used;
}
