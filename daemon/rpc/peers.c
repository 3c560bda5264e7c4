#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "rpc/rpc_server_impl.h"

#define BASE 1024
#define SPAN 16384 /* descriptor numbers that are used in turn */

void peer_table_init(struct peer_table *t)
{
	struct rlimit limit = { .rlim_cur = 2 * BASE };

	getrlimit(RLIMIT_NOFILE, &limit);
	*t = (struct peer_table){ .base = BASE };
	if (limit.rlim_cur < 2 * BASE)
		t->base = (int)limit.rlim_cur / 2;
	t->hint = t->base;
}

void peer_table_deinit(struct peer_table *t)
{
	free(t->by_fd);
	*t = (struct peer_table){ .base = BASE, .hint = BASE };
}

int peer_table_dup(struct peer_table *t, int fd)
{
	int r = -1;

	if (t->hint < t->base + SPAN)
		r = fcntl(fd, F_DUPFD_CLOEXEC, t->hint);
	if (r < 0) /* past the span, or past the limit of the process */
		r = fcntl(fd, F_DUPFD_CLOEXEC, t->base);
	/* EINVAL: the limit has been lowered below our base. */
	if (r < 0)
		return errno == EINVAL ? -EMFILE : -errno;
	t->hint = r + 1;
	return r;
}

static int peers_grow(struct peer_table *t, size_t n)
{
	size_t wanted = t->n ? t->n : 64;
	struct peer **by_fd;

	while (wanted < n)
		wanted *= 2;
	by_fd = realloc(t->by_fd, wanted * sizeof(struct peer *));
	if (!by_fd)
		return -ENOMEM;
	for (size_t i = t->n; i < wanted; i++)
		by_fd[i] = NULL;
	t->by_fd = by_fd;
	t->n = wanted;
	return 0;
}

int peer_table_set(struct peer_table *t, struct peer *p)
{
	size_t i = (size_t)(p->fd - t->base);

	CHECK(p->fd >= t->base);
	if (i >= t->n && peers_grow(t, i + 1))
		return -ENOMEM;
	/* An existing entry belongs to a connection that core has closed, but of whose end the loop
	 * does not know yet. */
	t->by_fd[i] = p;
	return 0;
}

struct peer *peer_table_find(const struct peer_table *t, int fd)
{
	if (fd < t->base || (size_t)(fd - t->base) >= t->n)
		return NULL;
	return t->by_fd[fd - t->base];
}

void peer_table_clear(struct peer_table *t, const struct peer *p)
{
	if (peer_table_find(t, p->fd) == p)
		t->by_fd[p->fd - t->base] = NULL;
}
