/* What etcd logs: one JSON object a line (--logger zap), or any text of the run-time library of Go. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coord/embedded_impl.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/log_format.h"
#include "core/text.h"

/* Reads in a turn of the loop: a pipe holds 64 KiB. */
#define LOG_READS 16
/* etcd has bound its ports before; now its member knows a leader and answers. The rest of the sentence
 * says whether it is encrypted. */
#define LOG_SERVES "serving client traffic"

static enum log_level embedded_log_level(const char *name)
{
	if (strcmp(name, "info") == 0 || strcmp(name, "debug") == 0)
		return LOG_DEBUG;
	return strcmp(name, "warn") == 0 ? LOG_INFO : LOG_WARN;
}

static const char *embedded_log_field(const json_t *o, const char *name)
{
	const char *text = json_string_value(json_object_get(o, name));

	return text ? text : "";
}

static void embedded_log_tell(struct embedded_log *l, enum log_level level, char *text)
{
	log_clean(text);
	if (level == LOG_WARN)
		text_copy(l->error, sizeof(l->error), text);
	if (l->e)
		embedded_on_line(l->e, level, text);
}

static void embedded_log_tell_json(struct embedded_log *l, const json_t *o)
{
	const char *message = embedded_log_field(o, "msg"), *error = embedded_log_field(o, "error");
	char text[EMBEDDED_LINE_BYTES];
	bool serves = strncmp(message, LOG_SERVES, strlen(LOG_SERVES)) == 0;

	snprintf(text, sizeof(text), "%s%s%s", message, *error ? ": " : "", error);
	embedded_log_tell(l, embedded_log_level(embedded_log_field(o, "level")), text);
	if (serves && l->e)
		embedded_on_serving(l->e);
}

static void embedded_log_line(struct embedded_log *l)
{
	char text[EMBEDDED_LINE_BYTES];
	json_t *o;

	l->line[l->n] = '\0';
	o = json_loadb(l->line, l->n, JSON_REJECT_DUPLICATES, NULL);
	if (o) {
		embedded_log_tell_json(l, o);
		json_decref(o);
	} else if (l->n) {
		text_copy(text, sizeof(text), l->line);
		/* a trace of the stack has many such lines: the first says what happened */
		embedded_log_tell(l, *l->error ? LOG_DEBUG : LOG_WARN, text);
	}
	l->n = 0;
}

static void embedded_log_take(struct embedded_log *l, const char *bytes, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (bytes[i] == '\n')
			embedded_log_line(l);
		else if (l->n < sizeof(l->line) - 1)
			l->line[l->n++] = bytes[i];
	}
}

/* Return: more may be there at once. */
static bool embedded_log_read(struct embedded_log *l)
{
	char bytes[EMBEDDED_READ_BYTES];
	ssize_t n = read(l->fd, bytes, sizeof(bytes));

	if (n > 0)
		embedded_log_take(l, bytes, (size_t)n);
	else if (n == 0 || (errno != EAGAIN && errno != EINTR))
		uv_poll_stop(&l->poll);
	return n > 0;
}

static void embedded_log_on_closed(uv_handle_t *handle)
{
	struct embedded_log *l = handle->data;

	fd_close(l->fd);
	free(l);
}

static void embedded_log_on_readable(uv_poll_t *poll, int status, int events)
{
	struct embedded_log *l = poll->data;

	(void)status;
	(void)events;
	for (unsigned i = 0; i < LOG_READS && l->e; i++)
		if (!embedded_log_read(l))
			break;
}

int embedded_log_open(struct embedded *e, int fd, struct embedded_log **ret)
{
	struct embedded_log *l = calloc(1, sizeof(*l));
	int r = l ? uv_poll_init(e->loop, &l->poll, fd) : -ENOMEM;

	if (r < 0) {
		fd_close(fd);
		free(l);
		return r;
	}
	l->e = e;
	l->fd = fd;
	l->poll.data = l;
	r = uv_poll_start(&l->poll, UV_READABLE, embedded_log_on_readable);
	CHECK(r == 0);
	*ret = l;
	return 0;
}

void embedded_log_drain(struct embedded_log *l)
{
	for (unsigned i = 0; i < LOG_READS + 1; i++)
		if (!embedded_log_read(l))
			break;
	embedded_log_line(l);
}

struct embedded_log *embedded_log_close(struct embedded_log *l)
{
	if (!l)
		return NULL;
	l->e = NULL;
	uv_close((uv_handle_t *)&l->poll, embedded_log_on_closed);
	return NULL;
}
