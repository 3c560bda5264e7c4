/* Nodes with ranks that want to join a job, as its leader knows them. */
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/clock.h"
#include "core/fnv.h"
#include "core/text.h"
#include "job/launched.h"

#define CLUSTER_MAX_EPOCH (UINT64_MAX / 2) /* of what a node has: it never wraps */

/* ------------------------------------------------------------------- nodes of a leader */

/* Also one that comes into a later epoch. Return: NULL: there is none. */
static struct cluster_node *cluster_wish_node_find(struct cluster_job *cj, const char *name)
{
	struct cluster_node *n, *tmp;

	list_for_each (n, tmp, &cj->nodes, link)
		if (strcmp(n->name, name) == 0)
			return n;
	list_for_each (n, tmp, &cj->later, link)
		if (strcmp(n->name, name) == 0)
			return n;
	return NULL;
}

void cluster_wish_node_free(struct cluster_node *n)
{
	list_unlink(&n->link);
	cluster_holding_deinit(&n->holding);
	free(n->ranks);
	free(n->devices);
	free(n->are_members);
	free(n);
}

void cluster_forget_nodes(struct cluster_job *cj)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobNotLeader not_leader = SHARDD__V1__JOB_NOT_LEADER__INIT;
	struct cluster_node *n, *tmp;

	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_NOT_LEADER;
	m.not_leader = &not_leader;
	cluster_elastic_together(cj);
	list_for_each (n, tmp, &cj->nodes, link) {
		cluster_send(cj, n->peer, &m);
		cluster_wish_node_free(n);
	}
}

/* Room for @n ranks of node @name. */
static struct cluster_node *cluster_wish_node_set(struct cluster_job *cj, const char *name,
						  struct peer *peer, uint32_t n)
{
	struct cluster_node *node = cluster_wish_node_find(cj, name);
	bool told = node && node->told;

	if (node)
		cluster_wish_node_free(node);
	node = calloc(1, sizeof(*node));
	if (!node)
		return NULL;
	list_init(&node->link);
	text_copy(node->name, sizeof(node->name), name);
	node->peer = peer;
	node->told = told;
	node->n = n;
	node->ranks = calloc(n + 1, sizeof(*node->ranks));
	node->devices = calloc(n + 1, sizeof(*node->devices));
	node->are_members = calloc(n + 1, sizeof(*node->are_members));
	if (!node->ranks || !node->devices || !node->are_members) {
		cluster_wish_node_free(node);
		return NULL;
	}
	list_append(&cj->nodes, &node->link);
	return node;
}

/* The device of the @i-th process that wants to join here. A process that has no rank yet gets the device that
 * the daemon chooses for it. */
static uint32_t cluster_wish_device_of(const struct cluster_job *cj, const struct job *job,
				       uint32_t i)
{
	uint32_t rank;

	if (launched_rank(job, cj->wishes[i], &rank))
		return job->placed[rank] ? job->placed[rank]->index : 0;
	return job_place_default(job, i, cj->n_wishes)->index;
}

static bool cluster_wish_is_member(const struct job *job, uint32_t number)
{
	uint32_t rank;

	return launched_rank(job, number, &rank);
}

/* Which ranks of a node want to join. Return: 0: none. */
static uint64_t cluster_wish_wanted(struct cluster_job *cj, const char *node)
{
	const struct cluster_node *n = cluster_wish_node_find(cj, node);
	uint64_t h = n ? FNV_BEGIN : 0;

	for (uint32_t i = 0; n && i < n->n; i++)
		h = fnv_add(h, n->ranks[i]);
	return h;
}

/* An elastic job waits for the others from the last news on: a node says the same again when its leader asks
 * whether it leads still. */
static void cluster_wish_note_news(struct cluster_job *cj, const char *node, uint64_t wanted)
{
	if (cluster_wish_wanted(cj, node) != wanted)
		cj->changed_us = clock_now_us();
}

static void cluster_wish_here(struct cluster_job *cj, const struct job *job)
{
	uint64_t wanted = cluster_wish_wanted(cj, cj->c->node);
	struct cluster_node *n = cluster_wish_node_set(cj, cj->c->node, NULL, cj->n_wishes);

	if (!n || cluster_holding_of(job, &n->holding) < 0) {
		if (n)
			cluster_wish_node_free(n);
		cluster_say(cj, "there is no memory for the ranks that want to join");
		return;
	}
	text_copy(n->at, sizeof(n->at), cj->c->at);
	for (uint32_t i = 0; i < cj->n_wishes; i++) {
		n->ranks[i] = cj->wishes[i];
		n->devices[i] = (uint16_t)cluster_wish_device_of(cj, job, i);
		n->are_members[i] = n->holding.units && cluster_wish_is_member(job, cj->wishes[i]);
		n->members += n->are_members[i];
	}
	cluster_wish_note_news(cj, cj->c->node, wanted);
	cluster_form(cj);
}

/* To the leader. */
static int cluster_wish_send(struct cluster_job *cj, const struct job *job)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobWish w = SHARDD__V1__JOB_WISH__INIT;
	Shardd__V1__JobStep **applied;
	struct cluster_packed packed;
	Shardd__V1__JobHolding holding;
	Shardd__V1__JobRank *ranks = calloc(cj->n_wishes + 1, sizeof(*ranks));
	Shardd__V1__JobRank **list = calloc(cj->n_wishes + 1, sizeof(*list));
	struct cluster_holding h;
	int r = cluster_holding_of(job, &h);

	applied = cluster_holding_pack_steps(h.applied, h.n_applied);
	for (uint32_t i = 0; ranks && list && i < cj->n_wishes; i++) {
		shardd__v1__job_rank__init(&ranks[i]);
		ranks[i].rank = cj->wishes[i];
		ranks[i].device = cluster_wish_device_of(cj, job, i);
		ranks[i].member = h.units && cluster_wish_is_member(job, cj->wishes[i]);
		list[i] = &ranks[i];
	}
	cluster_holding_pack(&h, &holding, &packed, applied);
	w.n_ranks = cj->n_wishes;
	w.ranks = list;
	w.state = &holding;
	w.at = cj->c->at;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_WISH;
	m.wish = &w;
	r = r == 0 && ranks && list && applied ? 0 : -ENOMEM;
	if (r == 0)
		cluster_send(cj, cluster_to_leader(cj), &m);
	cluster_holding_deinit(&h);
	free(applied);
	free(list);
	free(ranks);
	return r;
}

/* None of its ranks wants to join any more. */
static void cluster_wish_drop_node(struct cluster_job *cj, const char *name)
{
	struct cluster_node *n = cluster_wish_node_find(cj, name);

	if (n)
		cluster_wish_node_free(n);
	cluster_restore_look(cj);
}

void cluster_tell_wishes(struct cluster_job *cj)
{
	const struct job *job = cluster_job_of(cj);
	bool waits = cj->state == CLUSTER_RUNS && job && job->across.elastic;
	bool leads = cj->state == CLUSTER_LEADS || cj->state == CLUSTER_DECIDING ||
		     cj->state == CLUSTER_RESTORING;

	if (!job || !cj->n_wishes) {
		if (leads)
			cluster_wish_drop_node(cj, cj->c->node);
		cluster_withdraw(cj);
		return;
	}
	if (leads)
		cluster_wish_here(cj, job);
	else if (waits && cj->epoch.peers)
		cj->grows = true;
	else if ((cj->state == CLUSTER_FOLLOWS || waits) && cluster_wish_send(cj, job) < 0)
		cluster_say(cj, "there is no memory for a message to the leader");
}

static bool cluster_wish_is_valid(const Shardd__V1__JobWish *w)
{
	bool valid = !w->n_ranks ||
		     (w->state && w->n_ranks <= CLUSTER_MAX_RANKS &&
		      w->state->world <= CLUSTER_MAX_RANKS && w->state->epoch <= CLUSTER_MAX_EPOCH);

	for (size_t i = 0; valid && i < w->n_ranks; i++)
		valid = w->ranks[i]->rank < w->state->world && w->ranks[i]->device <= UINT16_MAX &&
			(!i || w->ranks[i]->rank > w->ranks[i - 1]->rank);
	return valid;
}

static void cluster_wish_end_epoch(struct cluster_job *cj, const char *name)
{
	struct job *job = cluster_job_of(cj);
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL,
		  "ranks of job '%s' join on node %s: epoch %llu has ended, join again", cj->label,
		  name, (unsigned long long)cj->epoch.number);
	if (job)
		job_epoch_end(job, &f);
}

void cluster_on_wish(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobWish *w)
{
	uint64_t wanted = cluster_wish_wanted(cj, peer_name(from));
	struct cluster_node *n;
	bool waits;

	if (!cluster_wish_is_valid(w)) {
		peer_end(from, "it has sent ranks that no job can have");
		return;
	}
	if (!w->n_ranks) {
		cluster_wish_drop_node(cj, peer_name(from));
		return;
	}
	waits = cj->epoch.number && cluster_elastic_waits(cj, w);
	if (cj->epoch.number && !waits)
		cluster_wish_end_epoch(cj, peer_name(from));
	n = cluster_wish_node_set(cj, peer_name(from), from, (uint32_t)w->n_ranks);
	if (!n || cluster_holding_unpack(n, w->state) < 0) {
		if (n)
			cluster_wish_node_free(n);
		peer_end(from, "there is no memory for its ranks");
		return;
	}
	text_copy(n->at, sizeof(n->at), w->at);
	n->waits = waits;
	for (size_t i = 0; i < w->n_ranks; i++) {
		n->ranks[i] = w->ranks[i]->rank;
		n->devices[i] = (uint16_t)w->ranks[i]->device;
		n->are_members[i] = w->ranks[i]->member;
		n->members += n->are_members[i];
	}
	cluster_wish_note_news(cj, peer_name(from), wanted);
	if (cj->state == CLUSTER_DIALS || cj->state == CLUSTER_FOLLOWS)
		cluster_forget_nodes(cj); /* tells it that another leads */
	else
		cluster_form(cj);
}
