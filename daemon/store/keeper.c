#include "store/keeper.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"

struct keeper_drop {
	struct list link;
	char name[KEEPER_NAME_MAX + 1];
};

/* An abstract address begins with '@'. Return: 0, or -EINVAL (not a Unix socket). */
static int keeper_address(const char *path, struct sockaddr_un *ret, socklen_t *ret_bytes)
{
	size_t n = strlen(path);

	if ((*path != '/' && *path != '@') || n < 2 || n > sizeof(ret->sun_path))
		return -EINVAL;
	*ret = (struct sockaddr_un){ .sun_family = AF_UNIX };
	memcpy(ret->sun_path, path, n);
	if (*path == '@')
		ret->sun_path[0] = '\0';
	*ret_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
	return 0;
}

int keeper_init(struct keeper *k)
{
	const char *path = getenv("NOTIFY_SOCKET"), *most = getenv("FDSTORE");
	_cleanup_(fd_closep) int fd = -1;
	struct sockaddr_un address;
	socklen_t bytes;
	int r;

	k->fd = -1;
	k->used = 0;
	k->most = most ? (uint32_t)strtoul(most, NULL, 10) : 0;
	list_init(&k->drops);
	if (!path || !k->most)
		return 0;
	r = keeper_address(path, &address, &bytes);
	if (r < 0)
		return r;
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0 || connect(fd, (struct sockaddr *)&address, bytes) < 0)
		return -errno;
	k->fd = STEAL_FD(fd);
	k->address = address;
	k->address_bytes = bytes;
	return 0;
}

void keeper_deinit(struct keeper *k)
{
	k->fd = fd_close(k->fd);
	while (!list_empty(&k->drops)) {
		struct keeper_drop *d = list_first(&k->drops, struct keeper_drop, link);

		list_unlink(&d->link);
		free(d);
	}
}

bool keeper_is_there(const struct keeper *k)
{
	return k->fd >= 0;
}

bool keeper_has_ended(const struct keeper *k)
{
	_cleanup_(fd_closep) int fd = -1;

	if (!keeper_is_there(k))
		return false;
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	return fd >= 0 && connect(fd, (const struct sockaddr *)&k->address, k->address_bytes) < 0 &&
	       (errno == ECONNREFUSED || errno == ENOENT);
}

void keeper_has(struct keeper *k, uint32_t n)
{
	k->used += n;
}

uint32_t keeper_room(const struct keeper *k)
{
	return k->used < k->most ? k->most - k->used : 0;
}

/* @fd: -1: none. Return: 0, -EAGAIN, or another negative errno. */
static int keeper_send(const struct keeper *k, const char *text, int fd)
{
	struct iovec part = { (void *)(uintptr_t)text, strlen(text) };
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct msghdr msg = { .msg_iov = &part, .msg_iovlen = 1 };

	if (fd >= 0) {
		msg.msg_control = &control;
		msg.msg_controllen = sizeof(control);
		control.head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
						 .cmsg_level = SOL_SOCKET,
						 .cmsg_type = SCM_RIGHTS };
		memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
	}
	if (sendmsg(k->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
		return 0;
	/* of the receiver's queue, and of descriptors in it */
	if (errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS || errno == EINTR)
		return -EAGAIN;
	return -errno;
}

int keeper_add(struct keeper *k, const char *name, int fd)
{
	char text[64 + KEEPER_NAME_MAX];
	int r;

	CHECK(keeper_is_there(k) && strlen(name) <= KEEPER_NAME_MAX);
	if (k->used >= k->most)
		return -ENOSPC;
	keeper_tick(k); /* in order */
	if (!list_empty(&k->drops))
		return -EAGAIN;
	snprintf(text, sizeof(text), "FDSTORE=1\nFDNAME=%s\nFDPOLL=0", name);
	r = keeper_send(k, text, fd);
	k->used += r == 0;
	return r;
}

void keeper_drop(struct keeper *k, const char *name)
{
	struct keeper_drop *d;

	if (!keeper_is_there(k))
		return;
	CHECK(strlen(name) <= KEEPER_NAME_MAX && k->used > 0);
	d = malloc(sizeof(*d));
	if (!d)
		return; /* it takes a place until the daemon starts again */
	list_init(&d->link);
	snprintf(d->name, sizeof(d->name), "%s", name);
	list_append(&k->drops, &d->link);
}

void keeper_tick(struct keeper *k)
{
	while (keeper_is_there(k) && !list_empty(&k->drops)) {
		struct keeper_drop *d = list_first(&k->drops, struct keeper_drop, link);
		char text[64 + KEEPER_NAME_MAX];

		snprintf(text, sizeof(text), "FDSTOREREMOVE=1\nFDNAME=%s", d->name);
		if (keeper_send(k, text, -1) == -EAGAIN)
			return;
		list_unlink(&d->link);
		free(d);
		k->used--;
	}
}
