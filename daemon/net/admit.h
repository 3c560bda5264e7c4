/*
 * Admission: lists of uids and gids, and the peer's credentials. Root and the daemon's own uid are
 * always admitted; with both lists empty, so is every process that the mode of the socket file lets
 * in. Loop thread only.
 */
#ifndef SHARDD_NET_ADMIT_H
#define SHARDD_NET_ADMIT_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>

struct admit {
	uid_t *uids; /* owned */
	size_t n_uids;
	gid_t *gids; /* owned */
	size_t n_gids;
};

#define ADMIT_NULL ((struct admit){ .n_uids = 0 })

/* Replace the lists by copies. Return: 0, or -ENOMEM: nothing changed. */
int admit_set(struct admit *a, const uid_t *uids, size_t n_uids, const gid_t *gids, size_t n_gids);

/* @cred: of the peer of @sock; its supplementary groups are read if the rest does not decide. */
bool admit_peer(const struct admit *a, int sock, const struct ucred *cred);

/* All groups of the peer of @sock, its primary one first: malloc'ed, the caller's. Return: NULL
 * without memory. */
gid_t *admit_groups(int sock, const struct ucred *cred, size_t *ret_n);

/* Safe after ADMIT_NULL and twice. */
void admit_deinit(struct admit *a);

#endif
