#include "outer.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define OUTER_WAIT_S 10

static int outer_close(int fd, int error)
{
	close(fd);
	errno = error;
	return -1;
}

static int outer_socket(const char *path, struct sockaddr_un *ret)
{
	*ret = (struct sockaddr_un){ .sun_family = AF_UNIX };
	if (strlen(path) >= sizeof(ret->sun_path)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	strcpy(ret->sun_path, path);
	return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
}

/* A keeper that hangs must not hang the daemon for ever. */
static bool outer_limit(int fd)
{
	struct timeval most = { .tv_sec = OUTER_WAIT_S };

	return setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof(most)) == 0 &&
	       setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof(most)) == 0;
}

/* A socket that nobody serves is of a keeper that has ended. Return: whether nothing is at @path; errno. */
static bool outer_make_room(const char *path, const struct sockaddr_un *address)
{
	struct stat st;
	int fd, error = EADDRINUSE;

	if (lstat(path, &st) < 0)
		return errno == ENOENT;
	if (!S_ISSOCK(st.st_mode)) {
		errno = EEXIST;
		return false;
	}
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return false;
	if (connect(fd, (const struct sockaddr *)address, sizeof(*address)) < 0)
		error = errno == ECONNREFUSED ? 0 : EADDRINUSE;
	close(fd);
	errno = error;
	return error == 0 && unlink(path) == 0;
}

int outer_listen(const char *path)
{
	struct sockaddr_un address;
	int fd = outer_socket(path, &address);
	mode_t mask;
	int r;

	if (fd < 0)
		return -1;
	if (!outer_make_room(path, &address))
		return outer_close(fd, errno);
	mask = umask(0177);
	r = bind(fd, (struct sockaddr *)&address, sizeof(address));
	umask(mask);
	return r < 0 || listen(fd, 8) < 0 ? outer_close(fd, errno) : fd;
}

int outer_accept(int listener)
{
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	struct ucred peer = { 0 };
	socklen_t bytes = sizeof(peer);

	if (fd < 0)
		return -1;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) < 0 || !outer_limit(fd))
		return outer_close(fd, errno);
	return peer.uid == geteuid() ? fd : outer_close(fd, EPERM);
}

int outer_connect(const char *path)
{
	struct sockaddr_un address;
	int fd = outer_socket(path, &address);

	if (fd < 0)
		return -1;
	if (!outer_limit(fd) || connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
		return outer_close(fd, errno);
	return fd;
}

bool outer_send(int link, const char *text, int fd)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct iovec part = { (void *)(size_t)text, strlen(text) };
	struct msghdr msg = { .msg_iov = &part, .msg_iovlen = 1 };
	ssize_t sent;

	if (fd >= 0) {
		control.head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
						 .cmsg_level = SOL_SOCKET,
						 .cmsg_type = SCM_RIGHTS };
		memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
		msg.msg_control = &control;
		msg.msg_controllen = sizeof(control);
	}
	do
		sent = sendmsg(link, &msg, MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
	return sent == (ssize_t)part.iov_len;
}

bool outer_send_kept(int link, const struct stash_one *one)
{
	char text[STASH_NAME_MAX + 32];

	snprintf(text, sizeof(text), "FDSTORE=1\nFDNAME=%s", one->name);
	return outer_send(link, text, one->fd);
}

bool outer_send_drop(int link, const char *name)
{
	char text[STASH_NAME_MAX + 32];

	snprintf(text, sizeof(text), "FDSTOREREMOVE=1\nFDNAME=%s", name);
	return outer_send(link, text, -1);
}

bool outer_send_all(int link, const struct stash *k, bool is_ready)
{
	char ready[64];

	for (size_t i = 0; i < k->n; i++)
		if (!outer_send_kept(link, &k->all[i]))
			return false;
	snprintf(ready, sizeof(ready), "READY=1\n" OUTER_MOST "=%zu", k->most);
	return !is_ready || outer_send(link, ready, -1);
}

int outer_receive(int link, bool is_waiting, char *text, int *ret_fd)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec part = { text, STASH_TEXT_MAX };
	struct msghdr msg = { .msg_iov = &part,
			      .msg_iovlen = 1,
			      .msg_control = &control,
			      .msg_controllen = sizeof(control) };
	ssize_t bytes;

	*ret_fd = -1;
	do
		bytes = recvmsg(link, &msg, MSG_CMSG_CLOEXEC | (is_waiting ? 0 : MSG_DONTWAIT));
	while (bytes < 0 && errno == EINTR);
	if (bytes <= 0)
		return (int)bytes;
	text[bytes] = '\0';
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
			memcpy(ret_fd, CMSG_DATA(c), sizeof(*ret_fd));
	return (int)bytes;
}

void outer_obey(struct stash *k, const char *text, int fd)
{
	char name[STASH_NAME_MAX + 1];
	bool has_name = stash_value(text, "FDNAME", name) && stash_is_name(name);

	if (stash_is_set(text, OUTER_CLEAR))
		stash_clear(k);
	if (stash_is_set(text, "FDSTOREREMOVE") && has_name)
		stash_drop(k, name);
	if (fd < 0)
		return;
	if (stash_is_set(text, "FDSTORE") && has_name)
		stash_add(k, fd, name);
	else
		close(fd);
}
