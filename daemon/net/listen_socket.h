/*
 * The listening socket itself: made at a path of ours, or inherited.
 *
 * A socket file is known to be dead by connecting to it, through /proc, so that the tested file is
 * the judged file. Of daemons that start at the same moment one gets the path: they take turns by a
 * lock on the directory, which leaves no file behind. Any user may lock a directory that he can
 * read. So the wait for the lock is short, and a daemon that does not get it continues without.
 * Loop thread only; blocks for a few file system calls, and at most two seconds.
 */
#ifndef SHARDD_NET_LISTEN_SOCKET_H
#define SHARDD_NET_LISTEN_SOCKET_H

#include <sys/types.h>

#include "core/fault.h"

struct listen_socket {
	int fd;     /* -1: none */
	char *path; /* owned; NULL: inherited, nothing to unlink */
	dev_t dev;  /* of the file at @path when we made it */
	ino_t ino;
};

#define LISTEN_SOCKET_NULL ((struct listen_socket){ .fd = -1 })

/* Bind @path with @mode and @group (NULL or "": unchanged) and listen.
 * Return: 0 or a fault code; then nothing of ours is left at @path. */
int listen_socket_bind(struct listen_socket *s, const char *path, unsigned mode, const char *group,
		       struct fault *f);

/* Take over @fd, a listening unix stream socket; consumed on success only.
 * Return: 0 or a fault code. */
int listen_socket_inherit(struct listen_socket *s, int fd, struct fault *f);

/* Close, and unlink the file if it is still the one we made. Safe after
 * LISTEN_SOCKET_NULL and twice. */
void listen_socket_deinit(struct listen_socket *s);

#endif
