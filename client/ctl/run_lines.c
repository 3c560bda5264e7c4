#include "ctl/run_lines.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"

/* A grandchild may hold the pipe and never stop writing. */
#define FINISH_READS 64u

void run_lines_init(struct run_lines *l, int from, int to, const char *prefix)
{
	l->from = from;
	l->to = to;
	l->prefix = prefix;
	l->have = 0;
}

/* Write all of @iov; drop it if the output has no reader any more. */
static void run_lines_write_all(int fd, struct iovec *iov, int n)
{
	while (n > 0) {
		struct pollfd p = { .fd = fd, .events = POLLOUT };
		ssize_t done = writev(fd, iov, n);

		if (done < 0 && errno == EAGAIN)
			poll(&p, 1, -1);
		else if (done < 0 && errno != EINTR)
			return;
		for (; n > 0 && done >= (ssize_t)iov->iov_len; iov++, n--)
			done -= (ssize_t)iov->iov_len;
		if (n > 0 && done > 0) {
			iov->iov_base = (char *)iov->iov_base + done;
			iov->iov_len -= (size_t)done;
		}
	}
}

static void run_lines_write_line(const struct run_lines *l, char *line, size_t bytes)
{
	struct iovec iov[] = {
		{ (char *)l->prefix, strlen(l->prefix) },
		{ line, bytes },
		{ "\n", 1 },
	};

	run_lines_write_all(l->to, iov, ARRAY_SIZE(iov));
}

/* Write the complete lines and keep the rest. */
static void run_lines_write_lines(struct run_lines *l)
{
	char *at = l->line;
	char *end = l->line + l->have;
	char *newline;

	while ((newline = memchr(at, '\n', (size_t)(end - at)))) {
		run_lines_write_line(l, at, (size_t)(newline - at));
		at = newline + 1;
	}
	l->have = (size_t)(end - at);
	memmove(l->line, at, l->have);
	if (l->have == sizeof(l->line)) {
		run_lines_write_line(l, l->line, l->have);
		l->have = 0;
	}
}

/* Return: true if there may be more. */
static bool run_lines_read_once(struct run_lines *l)
{
	ssize_t n = read(l->from, l->line + l->have, sizeof(l->line) - l->have);

	if (n < 0 && errno == EINTR)
		return true;
	if (n < 0 && errno == EAGAIN)
		return false;
	if (n <= 0) {
		l->from = fd_close(l->from);
		return false;
	}
	l->have += (size_t)n;
	run_lines_write_lines(l);
	return true;
}

void run_lines_pump(struct run_lines *l)
{
	if (l->from < 0)
		return;
	run_lines_read_once(l);
	if (l->from < 0)
		run_lines_finish(l);
}

void run_lines_finish(struct run_lines *l)
{
	for (unsigned i = 0; l->from >= 0 && i < FINISH_READS && run_lines_read_once(l); i++)
		continue;
	l->from = fd_close(l->from);
	if (l->have)
		run_lines_write_line(l, l->line, l->have);
	l->have = 0;
}
