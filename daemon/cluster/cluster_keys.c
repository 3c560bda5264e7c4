/*
 * Where members of communicators meet (rendezvous.h), between the nodes of an epoch: the leader keeps what
 * they set, and sends it to those that ask for it. All else of a communicator needs no leader.
 *
 * So a key costs one message from the node that sets it, and two for each node that wants it. An exchange costs two
 * for each node: its members' values to the leader, and those of all from it. If all are more than
 * CLUSTER_PART_BYTES, they come in several messages.
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

/* An exchange, and a member of it besides its value. */
#define CLUSTER_EXCHANGE_COST 464u
#define CLUSTER_MEMBER_COST   4u
/* Of values in one message: so that a link has room for other messages between them. */
#define CLUSTER_PART_BYTES (256u << 10)

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

/* ------------------------------------------------------------------------ exchanges */

static void cluster_keys_fill_part(Shardd__V1__JobExchange *e, const struct rendezvous_all *all,
				   unsigned first)
{
	const size_t most = CLUSTER_PART_BYTES / all->bytes;
	const size_t n = all->size - first < most ? all->size - first : most;

	e->first = first;
	e->values.data = (uint8_t *)all->values + first * all->bytes;
	e->values.len = n * all->bytes;
}

/* All values are there. */
static void cluster_keys_send_all(struct cluster_job *cj, struct peer *to, const char *name,
				  const struct rendezvous_all *all)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobExchange e = SHARDD__V1__JOB_EXCHANGE__INIT;

	e.key = (char *)name;
	e.members = all->size;
	m.epoch = cj->epoch.number;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_EXCHANGE;
	m.exchange = &e;
	for (unsigned i = 0; i < all->size; i += (unsigned)(e.values.len / all->bytes)) {
		cluster_keys_fill_part(&e, all, i);
		cluster_send(cj, to, &m);
	}
}

/* To each node once, whatever the number of its members. */
static void cluster_keys_finish(struct cluster_job *cj, const char *full, const char *name,
				const struct rendezvous_all *all)
{
	struct order_nodes told = { 0 };

	for (unsigned i = 0; i < all->size; i++) {
		unsigned node = rendezvous_from(cj->c->rendezvous, full, i);

		if (node < cj->epoch.n_nodes && order_nodes_add(&told, node))
			cluster_keys_send_all(cj, cj->epoch.peers[node], name, all);
	}
}

/* @from: NULL: this node. */
static void cluster_keys_say_missing(struct cluster_job *cj, struct peer *from, const char *full,
				     const char *name, const struct rendezvous_all *all)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobExchange e = SHARDD__V1__JOB_EXCHANGE__INIT;

	if (!from) {
		rendezvous_take(cj->c->rendezvous, full, all->size, all->missing, NULL, 0);
		return;
	}
	e.key = (char *)name;
	e.members = all->size;
	e.first = all->missing;
	m.epoch = cj->epoch.number;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_EXCHANGE;
	m.exchange = &e;
	cluster_send(cj, from, &m);
}

/* The leader: a value of a member of @node. @from: NULL: this node, which knows it. */
static int cluster_keys_give(struct cluster_job *cj, struct peer *from, unsigned node,
			     const char *full, const Shardd__V1__JobExchange *e)
{
	const struct rendezvous_gift gift = { full, e->members, e->first, e->values.data,
					      e->values.len };
	struct rendezvous *r = cj->c->rendezvous;
	struct rendezvous_all all;
	int got = from ? rendezvous_give(r, &gift, node) : 0;

	if (got < 0 || got == RENDEZVOUS_E_WRONG)
		return got;
	if (!rendezvous_see(r, full, &all))
		return 0;
	if (rendezvous_finish(r, full))
		cluster_keys_finish(cj, full, e->key, &all);
	else if (from && all.n == all.size)
		cluster_keys_send_all(cj, from, e->key, &all);
	else if (!from || got == RENDEZVOUS_E_KNOWN)
		cluster_keys_say_missing(cj, from, full, e->key, &all);
	return 0;
}

static void cluster_keys_on_exchange(struct cluster_job *cj, struct peer *from, unsigned node,
				     const Shardd__V1__JobExchange *e)
{
	const uint64_t members = e->members < RENDEZVOUS_MEMBERS ? e->members : RENDEZVOUS_MEMBERS;
	const uint64_t more = members * (e->values.len + CLUSTER_MEMBER_COST);
	char full[CLUSTER_FULL_KEY_BYTES];
	struct rendezvous_all all;
	int got;

	cluster_keys_full(cj, e->key, full);
	if (!cj->epoch.peers)
		got = rendezvous_take(cj->c->rendezvous, full, e->members, e->first, e->values.data,
				      e->values.len);
	else if (rendezvous_see(cj->c->rendezvous, full, &all) || /* it was charged */
		 cluster_keys_charge(cj, from, more + CLUSTER_EXCHANGE_COST))
		got = cluster_keys_give(cj, from, node, full, e);
	else
		return;
	if (got == -ENOMEM)
		cluster_keys_lost(cj);
	else if (got > 0 && from)
		peer_end(from, "what it has sent of a communicator's members contradicts what "
			       "others have sent, or is too large");
}

void cluster_on_key(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobMessage *m)
{
	unsigned node = 0;

	if (m->epoch != cj->epoch.number || !m->epoch ||
	    (from && !cluster_node_of(cj, from, &node)))
		return;
	if (m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_SET)
		cluster_keys_on_set(cj, from, m->set);
	else if (m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_EXCHANGE)
		cluster_keys_on_exchange(cj, from, node, m->exchange);
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

void cluster_keys_give_here(void *userdata, const struct rendezvous_gift *g)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobExchange e = SHARDD__V1__JOB_EXCHANGE__INIT;
	const char *rest;
	struct cluster_job *cj = cluster_keys_job(userdata, g->key, &rest);

	if (!cj)
		return;
	e.key = (char *)rest;
	e.members = g->size;
	e.first = g->member;
	e.values = (ProtobufCBinaryData){ g->bytes, (uint8_t *)g->value };
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_EXCHANGE;
	m.exchange = &e;
	cluster_keys_tell(cj, &m);
}
