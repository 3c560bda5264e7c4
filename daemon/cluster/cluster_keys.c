/*
 * Where members of communicators meet (rendezvous.h), between the nodes of an epoch: the leader keeps what
 * they set, and sends it to those that ask for it. All else of a communicator needs no leader.
 *
 * So a key costs one message from the node that sets it, and two for each node that wants it.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/log.h"

/* The keys of an epoch that the leader keeps for other nodes: enough for 230 groups of 1,024 ranks on GPUs, each
 * with two communicators, by far more than GPUs have memory for. */
#define CLUSTER_MAX_KEY_BYTES (128u << 20)
/* Of the entry of a key, and of a node that waits for it, with what malloc adds. */
#define CLUSTER_KEY_COST    112u
#define CLUSTER_WAITER_COST 48u

/* Where @name of a message is among the keys of all jobs. */
static void cluster_keys_full(const struct cluster_job *cj, const char *name,
			      char ret[CLUSTER_FULL_KEY_BYTES])
{
	char prefix[CLUSTER_KEY_BYTES];

	cluster_prefix(cj, prefix);
	snprintf(ret, CLUSTER_FULL_KEY_BYTES, "%s%s", prefix, name);
}

/* @bytes more are kept until the epoch ends. */
static bool cluster_keys_charge(struct cluster_job *cj, struct peer *from, uint64_t bytes)
{
	if (!from)
		return true;
	cj->epoch.key_bytes += bytes;
	if (cj->epoch.key_bytes <= CLUSTER_MAX_KEY_BYTES)
		return true;
	peer_end(from, "its job's communicators have more than 128 MiB of keys");
	return false;
}

static uint64_t cluster_keys_cost(struct cluster_job *cj, const char *full, uint64_t more)
{
	return more +
	       (rendezvous_is_known(cj->c->rendezvous, full) ? 0 : strlen(full) + CLUSTER_KEY_COST);
}

static void cluster_keys_lost(const struct cluster_job *cj)
{
	log_error("cluster", "a key of a communicator is too long, or there is no memory job=%s",
		  cj->label);
}

/* ------------------------------------------------------------------- values of keys */

/* Return: whether the value is there, and was sent. */
static bool cluster_keys_send(struct cluster_job *cj, struct peer *to, const char *full,
			      const char *name)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobKey key = SHARDD__V1__JOB_KEY__INIT;

	key.value.data = (uint8_t *)rendezvous_find(cj->c->rendezvous, full, &key.value.len);
	if (!key.value.data)
		return false;
	key.key = (char *)name;
	m.epoch = cj->epoch.number;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_SET;
	m.set = &key;
	cluster_send(cj, to, &m);
	return true;
}

static void cluster_keys_on_set(struct cluster_job *cj, struct peer *from,
				const Shardd__V1__JobKey *k)
{
	struct rendezvous *r = cj->c->rendezvous;
	char full[CLUSTER_FULL_KEY_BYTES];
	unsigned node;

	cluster_keys_full(cj, k->key, full);
	if (!cluster_keys_charge(cj, from, cluster_keys_cost(cj, full, k->value.len)))
		return;
	if (rendezvous_put(r, full, k->value.data, k->value.len) < 0)
		cluster_keys_lost(cj);
	while (rendezvous_next_waiter(r, full, &node))
		if (!cluster_keys_send(cj, cj->epoch.peers[node], full, k->key))
			return;
}

static void cluster_keys_on_get(struct cluster_job *cj, struct peer *from, unsigned node,
				const Shardd__V1__JobKey *k)
{
	char full[CLUSTER_FULL_KEY_BYTES];

	cluster_keys_full(cj, k->key, full);
	if (cluster_keys_send(cj, from, full, k->key) ||
	    !cluster_keys_charge(cj, from, cluster_keys_cost(cj, full, CLUSTER_WAITER_COST)))
		return;
	if (rendezvous_await(cj->c->rendezvous, full, node) == -ENOMEM)
		cluster_keys_lost(cj);
}

void cluster_on_key(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobMessage *m)
{
	unsigned node = 0;

	if (m->epoch != cj->epoch.number || !m->epoch ||
	    (from && !cluster_node_of(cj, from, &node)))
		return;
	if (m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_SET)
		cluster_keys_on_set(cj, from, m->set);
	else if (from && cj->epoch.peers)
		cluster_keys_on_get(cj, from, node, m->get);
}

/* -------------------------------------------------------------- what threads here do */

/* Of a key "UID/NAME/INCARNATION/EPOCH/REST". */
static struct cluster_job *cluster_keys_job(struct cluster *c, const char *key,
					    const char **ret_rest)
{
	struct cluster_job *cj, *tmp;
	char prefix[CLUSTER_KEY_BYTES];

	list_for_each (cj, tmp, &c->all, link) {
		size_t n = cluster_prefix(cj, prefix);

		if (strncmp(key, prefix, n) != 0)
			continue;
		*ret_rest = key + n;
		return cj;
	}
	return NULL;
}

/* To the leader, which may be this node. */
static void cluster_keys_tell(struct cluster_job *cj, Shardd__V1__JobMessage *m)
{
	m->epoch = cj->epoch.number;
	if (cj->epoch.peers)
		cluster_on_key(cj, NULL, m);
	else
		cluster_send(cj, cluster_to_leader(cj), m);
}

void cluster_keys_set(void *userdata, const char *key, const void *value, size_t bytes)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobKey k = SHARDD__V1__JOB_KEY__INIT;
	const char *rest;
	struct cluster_job *cj = cluster_keys_job(userdata, key, &rest);

	if (!cj)
		return;
	k.key = (char *)rest;
	k.value = (ProtobufCBinaryData){ bytes, (uint8_t *)value };
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_SET;
	m.set = &k;
	cluster_keys_tell(cj, &m);
}

void cluster_keys_get(void *userdata, const char *key)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobKey k = SHARDD__V1__JOB_KEY__INIT;
	const char *rest;
	struct cluster_job *cj = cluster_keys_job(userdata, key, &rest);

	if (!cj)
		return;
	k.key = (char *)rest;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_GET;
	m.get = &k;
	cluster_keys_tell(cj, &m);
}
