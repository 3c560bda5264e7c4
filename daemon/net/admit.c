#include "net/admit.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/cleanup.h"

#ifndef SO_PEERGROUPS
#define SO_PEERGROUPS 59 /* Linux 4.13 */
#endif

static void *admit_copy_of(const void *data, size_t bytes)
{
	void *p = malloc(bytes ? bytes : 1);

	if (p && bytes)
		memcpy(p, data, bytes);
	return p;
}

int admit_set(struct admit *a, const uid_t *uids, size_t n_uids, const gid_t *gids, size_t n_gids)
{
	_cleanup_(freep) uid_t *new_uids = admit_copy_of(uids, n_uids * sizeof(*uids));
	_cleanup_(freep) gid_t *new_gids = admit_copy_of(gids, n_gids * sizeof(*gids));

	if (!new_uids || !new_gids)
		return -ENOMEM;
	admit_deinit(a);
	*a = (struct admit){ STEAL_PTR(new_uids), n_uids, STEAL_PTR(new_gids), n_gids };
	return 0;
}

static bool admit_has_uid(const struct admit *a, uid_t uid)
{
	for (size_t i = 0; i < a->n_uids; i++)
		if (a->uids[i] == uid)
			return true;
	return false;
}

static bool admit_has_gid(const struct admit *a, gid_t gid)
{
	for (size_t i = 0; i < a->n_gids; i++)
		if (a->gids[i] == gid)
			return true;
	return false;
}

/* The kernel tells the needed size. Return: malloc'ed, the caller's; NULL: no groups, or they
 * cannot be read, which is treated the same: the groups admit nobody. */
static gid_t *admit_peer_groups(int sock, size_t *ret_n)
{
	socklen_t len = 0;
	gid_t *groups;

	if (getsockopt(sock, SOL_SOCKET, SO_PEERGROUPS, NULL, &len) == 0 || errno != ERANGE)
		return NULL;
	groups = malloc(len);
	if (!groups)
		return NULL;
	if (getsockopt(sock, SOL_SOCKET, SO_PEERGROUPS, groups, &len) < 0) {
		free(groups);
		return NULL;
	}
	*ret_n = len / sizeof(*groups);
	return groups;
}

static bool admit_has_group_of(const struct admit *a, int sock)
{
	size_t n = 0;
	_cleanup_(freep) gid_t *groups = admit_peer_groups(sock, &n);

	for (size_t i = 0; i < n; i++)
		if (admit_has_gid(a, groups[i]))
			return true;
	return false;
}

bool admit_peer(const struct admit *a, int sock, const struct ucred *cred)
{
	if (cred->uid == 0 || cred->uid == geteuid())
		return true;
	if (a->n_uids == 0 && a->n_gids == 0)
		return true;
	if (admit_has_uid(a, cred->uid) || admit_has_gid(a, cred->gid))
		return true;
	return a->n_gids > 0 && admit_has_group_of(a, sock);
}

gid_t *admit_groups(int sock, const struct ucred *cred, size_t *ret_n)
{
	size_t n = 0;
	_cleanup_(freep) gid_t *more = admit_peer_groups(sock, &n);
	gid_t *all = malloc((n + 1) * sizeof(*all));

	if (!all)
		return NULL;
	all[0] = cred->gid;
	if (n)
		memcpy(all + 1, more, n * sizeof(*all));
	*ret_n = n + 1;
	return all;
}

void admit_deinit(struct admit *a)
{
	free(a->uids);
	free(a->gids);
	*a = ADMIT_NULL;
}
