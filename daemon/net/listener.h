/*
 * The listening socket: bind or inherit, accept, admit, peek.
 *
 * First the credentials are checked: SO_PEERCRED, admission by uid and gid (root and the daemon's
 * own uid always pass). Then the socket waits for its first four bytes, at most hello_timeout,
 * using no resource but its descriptor; "PRI " is gRPC, SHD1_MAGIC the local channel, anything else
 * is closed. Then a pidfd is opened and the connection handed out. Loop thread only.
 */
#ifndef SHARDD_NET_LISTENER_H
#define SHARDD_NET_LISTENER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <uv.h>

#include "core/fault.h"
#include "net/conn.h"

struct listener;

struct listener_options {
	const char *path;             /* bind here; ignored with inherited_fd */
	int inherited_fd;             /* from systemd: listening already, never unlinked; consumed
				   * on success; -1: none */
	unsigned mode;                /* of the socket file, 0660 */
	const char *group;            /* owner group of the socket file; NULL or "": unchanged */
	unsigned max_connections;     /* further ones are closed at once; 0: no limit */
	unsigned reserved;            /* of these, for root and the daemon's user; half of them
				   * also for channels of sessions that have none yet */
	struct users *users;          /* borrowed: the payers; NULL: nobody pays */
	unsigned max_pending_per_uid; /* that have not said hello yet: one user cannot take all
				       * the room; 0: no limit */
	uint64_t hello_timeout_us;
	const uid_t *allow_uids; /* copied; both lists empty: all that may open the socket */
	size_t n_allow_uids;
	const gid_t *allow_gids; /* primary and supplementary groups of the peer */
	size_t n_allow_gids;
};

/* A new connection, already watched; the callee installs conn_on_closed. */
typedef void (*listener_conn_cb)(struct conn *c, void *userdata);

/* Bind and listen, or take the inherited socket. A stale socket file (nobody
 * accepts) is replaced; one that a living daemon serves is FAULT_STATE; another
 * kind of file, a path too long, a directory that is not writable: @f describes each. Return: 0 or
 * a fault code. */
int listener_new(uv_loop_t *loop, const struct listener_options *options, listener_conn_cb fn,
		 void *userdata, struct listener **ret, struct fault *f);

/* New limits and lists (SIGHUP); path, mode and group stay. */
void listener_reconfigure(struct listener *l, const struct listener_options *options);

/* Open connections, including those still unknown. */
unsigned listener_connections(const struct listener *l);

/* Count the end of a connection that was handed out. NULL is allowed: connections may outlive the
 * listener. */
void listener_conn_ended(struct listener *l);

/* Stop accepting, close those still unknown, unlink a socket file that is ours
 * and still the one we made. Memory is freed by the loop. NULL is allowed.
 * Return: NULL. */
struct listener *listener_close(struct listener *l);

#endif
