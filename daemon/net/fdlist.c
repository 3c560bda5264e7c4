#include "net/fdlist.h"

#include <errno.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"

int fdlist_init_consume(struct fdlist *l, const int *fds, size_t n)
{
	*l = FDLIST_NULL;
	if (n > FDLIST_MAX) {
		for (size_t i = 0; i < n; i++)
			fd_close(fds[i]);
		return -E2BIG;
	}
	for (size_t i = 0; i < n; i++)
		l->fds[i] = fds[i];
	l->n = n;
	return 0;
}

void fdlist_deinit(struct fdlist *l)
{
	CHECK(l->n <= FDLIST_MAX);
	for (size_t i = 0; i < l->n; i++)
		fd_close(l->fds[i]);
	*l = FDLIST_NULL;
}

size_t fdlist_count(const struct fdlist *l)
{
	return l->n;
}

size_t fdlist_control(const struct fdlist *l, void *control)
{
	struct cmsghdr *c = control;

	if (l->n == 0)
		return 0;
	for (size_t i = 0; i < l->n; i++)
		CHECK(l->fds[i] >= 0);
	memset(control, 0, FDLIST_CONTROL_BYTES);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int) * l->n);
	memcpy(CMSG_DATA(c), l->fds, sizeof(int) * l->n);
	return CMSG_SPACE(sizeof(int) * l->n);
}
