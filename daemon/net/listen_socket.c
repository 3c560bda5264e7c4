#include "net/listen_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <libgen.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "core/check.h"
#include "core/cleanup.h"

enum { BACKLOG = 4096, LOCK_ATTEMPTS = 200, LOCK_WAIT_MS = 10 };

enum file_kind { FILE_ABSENT, FILE_NOT_SOCKET, FILE_DEAD, FILE_ALIVE };

static int listen_socket_stream_socket(void)
{
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	return fd < 0 ? -errno : fd;
}

static int listen_socket_set_address(struct sockaddr_un *a, const char *path, struct fault *f)
{
	*a = (struct sockaddr_un){ .sun_family = AF_UNIX };
	if (!path || path[0] == '\0')
		return fault_set(f, FAULT_INVALID, "socket", "the socket path is empty");
	if (strlen(path) >= sizeof(a->sun_path))
		return fault_set(f, FAULT_INVALID, "socket",
				 "the socket path has %zu bytes; the maximum is %zu: %s",
				 strlen(path), sizeof(a->sun_path) - 1, path);
	strcpy(a->sun_path, path);
	return 0;
}

/* The system's error for @path, with advice for a person. */
static int listen_socket_path_fault(struct fault *f, int e, const char *path)
{
	enum fault_code code = FAULT_INTERNAL;
	const char *hint = "";

	if (e == EACCES || e == EPERM || e == EROFS) {
		code = FAULT_DENIED;
		hint = " (the daemon must be able to write to its directory)";
	} else if (e == ENOENT || e == ENOTDIR || e == ELOOP || e == ENAMETOOLONG) {
		code = FAULT_INVALID;
		hint = " (its directory must exist)";
	}
	if (code == FAULT_INTERNAL)
		return fault_errno(f, -e, path);
	fault_set(f, code, "socket", "cannot make the socket %s: %s%s", path, strerror(e), hint);
	f->domain = FAULT_DOMAIN_OS;
	f->native = e;
	return f->code;
}

/* Does a process accept on the socket file behind @file (an O_PATH descriptor)? A full backlog also
 * means an owner. Return: FILE_DEAD, FILE_ALIVE, negative errno. */
static int listen_socket_probe_socket(int file)
{
	_cleanup_(fd_closep) int fd = listen_socket_stream_socket();
	struct sockaddr_un a = { .sun_family = AF_UNIX };

	if (fd < 0)
		return fd;
	snprintf(a.sun_path, sizeof(a.sun_path), "/proc/self/fd/%d", file);
	if (connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0 || errno == EAGAIN)
		return FILE_ALIVE;
	/* EPROTOTYPE: served, by another kind of socket. */
	if (errno == EPROTOTYPE || errno == EACCES || errno == EPERM)
		return FILE_ALIVE;
	return errno == ECONNREFUSED ? FILE_DEAD : -errno;
}

/* Return: enum file_kind or negative errno. */
static int listen_socket_probe_path(const char *path)
{
	_cleanup_(fd_closep) int fd = open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	struct stat st;

	if (fd < 0)
		return errno == ENOENT ? FILE_ABSENT : -errno;
	if (fstat(fd, &st) < 0)
		return -errno;
	return S_ISSOCK(st.st_mode) ? listen_socket_probe_socket(fd) : FILE_NOT_SOCKET;
}

static int listen_socket_kind_fault(int kind, const char *path, struct fault *f)
{
	switch (kind) {
	case FILE_NOT_SOCKET:
		return fault_set(f, FAULT_INVALID, "socket",
				 "%s exists and is not a socket; it was left alone", path);
	case FILE_ALIVE:
		return fault_set(f, FAULT_STATE, "socket", "another daemon serves the socket %s",
				 path);
	default:
		return listen_socket_path_fault(f, -kind, path);
	}
}

/* Take turns with other daemons that start: between the check of a dead file and its replacement,
 * and between bind and listen, when our socket still looks dead.
 * Return: a descriptor that holds the lock until it is closed; -1: without. */
static int listen_socket_lock_directory(const char *path)
{
	_cleanup_(freep) char *copy = strdup(path);
	_cleanup_(fd_closep) int fd = -1;

	if (!copy)
		return -1;
	fd = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	for (int i = 0; i < LOCK_ATTEMPTS; i++) {
		if (flock(fd, LOCK_EX | LOCK_NB) == 0)
			return STEAL_FD(fd);
		if (errno != EWOULDBLOCK)
			return -1;
		poll(NULL, 0, LOCK_WAIT_MS);
	}
	return -1;
}

/* Bind, over a dead socket file if there is one. */
static int listen_socket_bind_path(int fd, const struct sockaddr_un *a, struct fault *f)
{
	const struct sockaddr *address = (const struct sockaddr *)a;
	int kind;

	if (bind(fd, address, sizeof(*a)) == 0)
		return 0;
	if (errno != EADDRINUSE)
		return listen_socket_path_fault(f, errno, a->sun_path);
	kind = listen_socket_probe_path(a->sun_path);
	if (kind != FILE_DEAD && kind != FILE_ABSENT)
		return listen_socket_kind_fault(kind, a->sun_path, f);
	if (kind == FILE_DEAD && unlink(a->sun_path) < 0 && errno != ENOENT)
		return listen_socket_path_fault(f, errno, a->sun_path);
	if (bind(fd, address, sizeof(*a)) == 0)
		return 0;
	/* only a daemon that did not wait for its turn can have been faster */
	return errno == EADDRINUSE ? listen_socket_kind_fault(FILE_ALIVE, a->sun_path, f)
				   : listen_socket_path_fault(f, errno, a->sun_path);
}

/* Return: 0 or a fault code. @group: a name or a number. */
static int listen_socket_find_group(const char *group, gid_t *ret, struct fault *f)
{
	struct group *g = getgrnam(group);
	char *end;
	unsigned long number;

	if (g) {
		*ret = g->gr_gid;
		return 0;
	}
	errno = 0;
	number = strtoul(group, &end, 10);
	if (errno || group[0] < '0' || group[0] > '9' || *end != '\0' || number >= (gid_t)-1)
		return fault_set(f, FAULT_INVALID, "socket_group", "there is no group \"%s\"",
				 group);
	*ret = (gid_t)number;
	return 0;
}

/* @gid: (gid_t)-1: unchanged. */
static int listen_socket_set_access(const char *path, unsigned mode, gid_t gid, struct fault *f)
{
	if (gid != (gid_t)-1 && lchown(path, (uid_t)-1, gid) < 0)
		return fault_set(f, FAULT_DENIED, "socket_group",
				 "cannot give the socket %s to group %u: %s", path, gid,
				 strerror(errno));
	/* after chown, which may clear bits */
	return chmod(path, mode) < 0 ? listen_socket_path_fault(f, errno, path) : 0;
}

static bool listen_socket_file_is_ours(const struct listen_socket *s)
{
	struct stat st;

	return lstat(s->path, &st) == 0 && st.st_dev == s->dev && st.st_ino == s->ino;
}

/* The file exists, but no process can connect yet: record it as ours and set its permissions. */
static int listen_socket_publish(struct listen_socket *s, unsigned mode, gid_t gid, struct fault *f)
{
	struct stat st;
	int r;

	if (lstat(s->path, &st) < 0)
		return listen_socket_path_fault(f, errno, s->path);
	s->dev = st.st_dev;
	s->ino = st.st_ino;
	r = listen_socket_set_access(s->path, mode, gid, f);
	if (r)
		return r;
	if (listen(s->fd, BACKLOG) < 0)
		return listen_socket_path_fault(f, errno, s->path);
	/* A daemon that starts at the same time without the lock has seen our socket as dead until
	 * now. */
	return listen_socket_file_is_ours(s) ? 0 : listen_socket_kind_fault(FILE_ALIVE, s->path, f);
}

int listen_socket_bind(struct listen_socket *s, const char *path, unsigned mode, const char *group,
		       struct fault *f)
{
	_cleanup_(fd_closep) int fd = -1, lock = -1;
	_cleanup_(freep) char *copy = NULL;
	gid_t gid = (gid_t)-1;
	struct sockaddr_un a;
	int r;

	*s = LISTEN_SOCKET_NULL;
	r = listen_socket_set_address(&a, path, f);
	if (r == 0 && group && group[0] != '\0')
		r = listen_socket_find_group(group, &gid, f);
	if (r)
		return r;
	copy = strdup(path);
	fd = listen_socket_stream_socket();
	if (!copy || fd < 0)
		return fault_errno(f, copy ? fd : -ENOMEM, "the listening socket");
	lock = listen_socket_lock_directory(path);
	r = listen_socket_bind_path(fd, &a, f);
	if (r)
		return r;
	s->fd = STEAL_FD(fd);
	s->path = STEAL_PTR(copy);
	r = listen_socket_publish(s, mode, gid, f);
	if (r)
		listen_socket_deinit(s);
	return r;
}

static int listen_socket_get_option(int fd, int name)
{
	int value = -1;
	socklen_t len = sizeof(value);

	return getsockopt(fd, SOL_SOCKET, name, &value, &len) < 0 ? -1 : value;
}

int listen_socket_inherit(struct listen_socket *s, int fd, struct fault *f)
{
	CHECK(fd >= 0);
	*s = LISTEN_SOCKET_NULL;
	if (listen_socket_get_option(fd, SO_DOMAIN) != AF_UNIX ||
	    listen_socket_get_option(fd, SO_TYPE) != SOCK_STREAM ||
	    listen_socket_get_option(fd, SO_ACCEPTCONN) != 1)
		return fault_set(f, FAULT_INVALID, "socket",
				 "the inherited descriptor %d is not a listening unix stream "
				 "socket (ListenStream=)",
				 fd);
	if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
		return fault_errno(f, -errno, "the inherited socket");
	s->fd = fd;
	return 0;
}

void listen_socket_deinit(struct listen_socket *s)
{
	if (s->path && listen_socket_file_is_ours(s))
		unlink(s->path);
	s->fd = fd_close(s->fd);
	freep(&s->path);
}
