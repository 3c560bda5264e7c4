/* Epochs: who wants to join, when all do, and what ends one. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/fnv.h"
#include "core/log.h"
#include "core/text.h"
#include "job/history.h"
#include "job/launched.h"

/* So long a rank that comes when all ranks of its node have left waits for those of other nodes. */
#define LEAVES_US 5000000u

/* ------------------------------------------------------------------ an epoch is made */

void cluster_refused(struct cluster_job *cj, const struct fault *f)
{
	struct job *job = cluster_job_of(cj);

	log_warn("cluster", "job refused job=%s why=\"%s\"", cj->label, f->text);
	cj->refusal = cj->refused = *f;
	cj->n_wishes = 0;
	if (job)
		job_settle(job); /* those that wait ask again, and get it */
	cj->refusal = FAULT_NULL;
}

void cluster_refuse_all(struct cluster_job *cj, const struct fault *f)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobEnd end = SHARDD__V1__JOB_END__INIT;
	struct cluster_node *n, *tmp;

	end.code = f->code;
	end.text = (char *)f->text;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_REFUSAL;
	m.refusal = &end;
	cluster_elastic_together(cj);
	list_for_each (n, tmp, &cj->nodes, link) {
		cluster_send(cj, n->peer, &m);
		cluster_wish_node_free(n);
	}
	cluster_refused(cj, f);
}

/* Its nodes in the order of their ranks. */
static void cluster_epoch_sort_nodes(struct cluster_job *cj)
{
	struct list sorted = LIST_INIT(sorted);

	while (!list_empty(&cj->nodes)) {
		struct cluster_node *n, *tmp, *first = NULL;

		list_for_each (n, tmp, &cj->nodes, link)
			if (!first || n->ranks[0] < first->ranks[0])
				first = n;
		list_unlink(&first->link);
		list_append(&sorted, &first->link);
	}
	list_take_all(&cj->nodes, &sorted);
}

static uint32_t cluster_epoch_world(struct cluster_job *cj)
{
	struct cluster_node *n, *tmp;
	uint32_t world = 0;

	list_for_each (n, tmp, &cj->nodes, link)
		world = n->holding.world > world ? n->holding.world : world;
	return world;
}

/* "2, 3, 7" */
static void cluster_epoch_say_missing(struct cluster_job *cj, uint32_t world)
{
	bool there[CLUSTER_MAX_RANKS] = { false };
	struct cluster_node *n, *tmp;
	char text[160] = "";
	uint32_t missing = 0;
	size_t at = 0;

	CHECK(world <= CLUSTER_MAX_RANKS);
	list_for_each (n, tmp, &cj->nodes, link)
		for (uint32_t i = 0; i < n->n; i++)
			there[n->ranks[i]] = true;
	for (uint32_t r = 0; r < world; r++)
		if (!there[r] && missing++ < 6)
			at += (size_t)snprintf(text + at, sizeof(text) - at, "%s%u", at ? ", " : "",
					       r);
	cluster_say(cj, "%u of %u ranks have not joined on any node: %s%s%s", missing, world, text,
		    missing > 6 ? "..." : "", cluster_elastic_lacks(cj));
}

/* Does a rank of another node come between it and the one before it, on its node, or is it not the one that
 * comes next? */
static bool cluster_epoch_is_out(struct cluster_job *cj, const struct cluster_node *n, uint32_t i,
				 uint32_t next)
{
	struct cluster_node *m, *tmp;

	if (!n->holding.grace_ms)
		return n->ranks[i] != next;
	list_for_each (m, tmp, &cj->nodes, link)
		for (uint32_t k = 0; m != n && k < m->n; k++)
			if (m->ranks[k] >= next && m->ranks[k] <= n->ranks[i])
				return true;
	return false;
}

/* Return: the first node that has @rank. One has. */
static const struct cluster_node *cluster_epoch_node_of(struct cluster_job *cj, uint32_t rank)
{
	struct cluster_node *n, *tmp;

	list_for_each (n, tmp, &cj->nodes, link)
		for (uint32_t i = 0; i < n->n; i++)
			if (n->ranks[i] == rank)
				return n;
	return NULL;
}

/* Return: the second one of two nodes that have the same rank; NULL: there are none. */
static const struct cluster_node *cluster_epoch_twice(struct cluster_job *cj, uint32_t *ret_rank,
						      const struct cluster_node **ret_first)
{
	struct cluster_node *n, *tmp;

	list_for_each (n, tmp, &cj->nodes, link)
		for (uint32_t i = 0; i < n->n; i++) {
			*ret_rank = n->ranks[i];
			*ret_first = cluster_epoch_node_of(cj, n->ranks[i]);
			if (*ret_first != n)
				return n;
		}
	return NULL;
}

/* Node @n has @rank where @next belongs. */
static int cluster_epoch_refuse_rank(struct cluster_job *cj, const struct cluster_node *n,
				     uint32_t rank, uint32_t next, struct fault *f)
{
	const struct cluster_node *first, *second;
	uint32_t twice;

	second = cluster_epoch_twice(cj, &twice, &first); /* others may come with it */
	if (second)
		return fault_set(f, FAULT_INVALID, "rank",
				 "rank %u of job '%s' has joined on node %s and on node %s: start "
				 "each rank once",
				 twice, cj->label, first->name, second->name);
	return fault_set(f, FAULT_INVALID, "rank",
			 "the ranks of a node must follow each other: node %s has rank %u of job "
			 "'%s', where rank %u is expected",
			 n->name, rank, cj->label, next);
}

/* Are the ranks of each node side by side, and each rank on one node? All are there. */
static int cluster_epoch_check_ranks(struct cluster_job *cj, struct fault *f)
{
	struct cluster_node *n, *tmp, *before = NULL;
	uint32_t next = 0;

	list_for_each (n, tmp, &cj->nodes, link) {
		bool elastic = n->holding.grace_ms; /* some may be missing */

		for (uint32_t i = 0; i < n->n; i++, next = n->ranks[i - 1] + 1)
			if (elastic && !i ? n->ranks[i] < next
					  : cluster_epoch_is_out(cj, n, i, next))
				return cluster_epoch_refuse_rank(cj, n, n->ranks[i], next, f);
		if (before && cluster_holding_check_job(cj, before, n, f))
			return f->code;
		before = n;
	}
	return 0;
}

static uint64_t cluster_epoch_next_epoch(struct cluster_job *cj)
{
	struct cluster_node *n, *tmp;
	uint64_t last = cj->known.epoch;

	list_for_each (n, tmp, &cj->nodes, link)
		last = n->holding.epoch > last ? n->holding.epoch : last;
	return last + 1;
}

static void cluster_epoch_on_decided(struct decide *d, enum decide_outcome outcome,
				     int64_t revision, const char *why);

static int cluster_epoch_decide_epoch(struct cluster_job *cj, uint64_t epoch)
{
	char key[CLUSTER_KEY_BYTES], leader[CLUSTER_KEY_BYTES];
	struct decide_what what = {
		.key = key, .leader = leader, .token = cj->token, .last = cj->epoch_revision
	};
	char *value = cluster_placed_new(cj, epoch);

	if (!value)
		return -ENOMEM;
	cluster_key(cj, "epoch", key);
	cluster_key(cj, "leader", leader);
	free(cj->placed);
	cj->placed = value;
	what.value = value;
	what.bytes = strlen(value);
	cj->known.epoch = epoch;
	return decide_begin(&cj->epoch_decision, cj->c->coord, &what, cluster_epoch_on_decided);
}

/* Return: all ranks are there, once each. Else it says what is missing, or has refused all. */
static bool cluster_epoch_is_whole(struct cluster_job *cj)
{
	uint32_t world = cluster_epoch_world(cj), n_ranks = 0;
	struct cluster_node *n, *tmp, *first = list_first(&cj->nodes, struct cluster_node, link);
	struct fault f = FAULT_NULL;

	list_for_each (n, tmp, &cj->nodes, link)
		if (n->holding.world != first->holding.world)
			(void)cluster_holding_check_job(cj, first, n, &f);
	if (f.code) {
		cluster_refuse_all(cj, &f);
		return false;
	}

	list_for_each (n, tmp, &cj->nodes, link)
		n_ranks += n->n;
	if (!world || (n_ranks < world && !cluster_elastic_is_due(cj, world, n_ranks))) {
		cluster_epoch_say_missing(cj, world);
		return false;
	}
	cluster_epoch_sort_nodes(cj);
	if (cluster_epoch_check_ranks(cj, &f) == 0 && cluster_holding_incarnation(cj, &f) == 0)
		return true;
	cluster_refuse_all(cj, &f);
	return false;
}

/* Has this node a rank in the epoch that is to begin? */
static bool cluster_epoch_has_own(struct cluster_job *cj)
{
	struct cluster_node *n, *tmp;
	bool own = false;

	list_for_each (n, tmp, &cj->nodes, link)
		own = own || !n->peer;
	return own;
}

/* An elastic job goes on without this node's ranks: one that has some leads it. Those that are told
 * remove this node's key and seek; this node does not, since it wants nothing. */
static void cluster_epoch_resign(struct cluster_job *cj)
{
	log_info("cluster", "gives up the lead job=%s why=\"no rank of this node is there\"",
		 cj->label);
	cluster_forget_nodes(cj);
	cluster_seek(cj);
	cj->again_us = clock_now_us() + CLUSTER_PAUSE_US; /* it may want to be in a later one */
}

void cluster_form(struct cluster_job *cj)
{
	int r;

	if (cj->state != CLUSTER_LEADS || cluster_act_is_here(cj) || list_empty(&cj->nodes) ||
	    !cluster_epoch_is_whole(cj))
		return;
	cluster_elastic_set_apart(cj);
	if (!cluster_epoch_has_own(cj)) {
		cluster_epoch_resign(cj);
		return;
	}
	cluster_state_move(cj, CLUSTER_DECIDING);
	cluster_say(cj, "all ranks are there: the store decides the epoch");
	r = cluster_epoch_decide_epoch(cj, cluster_epoch_next_epoch(cj));
	if (r < 0) {
		cluster_say(cj, "the epoch cannot be decided: %s", strerror(-r));
		cluster_seek(cj);
		cj->again_us = clock_now_us() + CLUSTER_PAUSE_US;
	}
}

/* ------------------------------------------------------------------ an epoch begins */

void cluster_epoch_free(struct cluster_job *cj)
{
	struct cluster_epoch *e = &cj->epoch;

	cluster_order_end(cj);
	free(e->names);
	free(e->ats);
	free(e->name_list);
	free(e->peers);
	free(e->left);
	*e = (struct cluster_epoch){ 0 };
}

static int cluster_epoch_names(struct cluster_job *cj, const Shardd__V1__JobBegin *b)
{
	struct cluster_epoch *e = &cj->epoch;

	e->n_nodes = (unsigned)b->n_nodes;
	e->leader = b->leader;
	e->self = e->n_nodes;
	e->names = calloc(e->n_nodes, sizeof(*e->names));
	e->ats = calloc(e->n_nodes, sizeof(*e->ats));
	e->name_list = calloc(e->n_nodes, sizeof(*e->name_list));
	if (!e->names || !e->ats || !e->name_list)
		return -ENOMEM;
	for (unsigned i = 0; i < e->n_nodes; i++) {
		text_copy(e->names[i], sizeof(e->names[i]), b->nodes[i]->name);
		text_copy(e->ats[i], sizeof(e->ats[i]), b->nodes[i]->at);
		e->name_list[i] = e->names[i];
		if (strcmp(e->names[i], cj->c->node) == 0 && e->self != e->n_nodes)
			return -EINVAL; /* twice */
		if (strcmp(e->names[i], cj->c->node) == 0)
			e->self = i;
	}
	if (e->self == e->n_nodes || e->leader >= e->n_nodes)
		return -EINVAL;
	return (e->leader == e->self) == (e->peers != NULL) ? 0 : -EINVAL;
}

static void cluster_epoch_span_node(const Shardd__V1__JobNode *from, struct span_node *to,
				    uint16_t *devices)
{
	text_copy(to->name, sizeof(to->name), from->name);
	to->first = from->first;
	to->n = (uint32_t)from->n_devices;
	to->devices = devices;
	for (size_t i = 0; i < from->n_devices; i++)
		devices[i] = (uint16_t)from->devices[i];
}

static struct span *cluster_epoch_make_span(struct cluster_job *cj, const Shardd__V1__JobBegin *b,
					    struct fault *f)
{
	const struct comm_store store = rendezvous_store(cj->c->rendezvous);
	struct span_node *nodes = calloc(b->n_nodes, sizeof(*nodes));
	uint16_t *devices, *at;
	struct span *span = NULL;
	size_t world = 0;
	char prefix[CLUSTER_KEY_BYTES];

	for (size_t i = 0; i < b->n_nodes; i++)
		world += b->nodes[i]->n_devices;
	at = devices = calloc(world + 1, sizeof(*devices));
	if (nodes && devices) {
		for (size_t i = 0; i < b->n_nodes; i++) {
			cluster_epoch_span_node(b->nodes[i], &nodes[i], at);
			at += b->nodes[i]->n_devices;
		}
		prefix[cluster_prefix(cj, prefix) - 1] = '\0'; /* the '/' */
		span_new(nodes, (unsigned)b->n_nodes, cj->epoch.self, prefix, &store, &span, f);
	} else {
		fault_errno(f, -ENOMEM, "noting a job's nodes");
	}
	free(devices);
	free(nodes);
	return span;
}

/* Return: 0 or a fault code: nothing has begun. */
static int cluster_epoch_begin(struct cluster_job *cj, struct job *job,
			       const Shardd__V1__JobBegin *b, struct fault *f)
{
	struct span *span;
	int r = cluster_epoch_names(cj, b);

	if (r < 0)
		return fault_errno(f, r, "beginning an epoch");
	span = cluster_epoch_make_span(cj, b, f);
	job->rec->incarnation = b->incarnation;
	if (!span || job_set_span(job, span, cj->epoch.number, f))
		return f->code;
	if ((cj->epoch.n_nodes > 1 || job_is_alone(job)) && cluster_order_begin(cj) < 0) {
		fault_errno(f, -ENOMEM, "beginning an epoch");
		job_span_failed(job, f);
		return f->code;
	}
	if (cluster_holding_resolve(job, b) == 0)
		return 0; /* ranks may join from here */
	fault_errno(f, -ENOMEM, "beginning an epoch");
	job_span_failed(job, f);
	return f->code;
}

static void cluster_epoch_send_end(struct cluster_job *cj, uint64_t epoch, const struct fault *f)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobEnd end = SHARDD__V1__JOB_END__INIT;

	end.code = f->code;
	end.text = (char *)f->text;
	m.epoch = epoch;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_END;
	m.end = &end;
	for (unsigned i = 0; cj->epoch.peers && i < cj->epoch.n_nodes; i++)
		cluster_send(cj, cj->epoch.peers[i], &m);
	if (!cj->epoch.peers)
		cluster_send(cj, cluster_to_leader(cj), &m);
}

/* Those that were in it say what they have, when they want to join again. */
static void cluster_epoch_drop_nodes(struct cluster_job *cj)
{
	struct cluster_node *n, *tmp;

	list_for_each (n, tmp, &cj->nodes, link)
		if (!n->waits)
			cluster_wish_node_free(n);
}

/* From here on ranks join it. */
static void cluster_epoch_run(struct cluster_job *cj, uint64_t epoch, const Shardd__V1__JobBegin *b)
{
	struct job *job = cluster_job_of(cj);
	struct fault f = FAULT_NULL;

	cj->epoch.number = epoch;
	cj->epoch.incarnation = b->incarnation;
	cluster_state_move(cj, CLUSTER_RUNS);
	if (!job)
		fault_set(&f, FAULT_ABORTED, NULL, "job '%s' was deleted on node %s", cj->label,
			  cj->c->node);
	else
		(void)cluster_epoch_begin(cj, job, b, &f);
	if (f.code) {
		cluster_epoch_send_end(cj, epoch, &f);
		cluster_refused(cj, &f);
		cluster_drop_keys(cj);
		cluster_epoch_free(cj);
		cluster_epoch_drop_nodes(cj);
		cluster_seek(cj);
		return;
	}
	log_info("cluster", "epoch begins job=%s epoch=%llu nodes=%u leader=%s", cj->label,
		 (unsigned long long)epoch, cj->epoch.n_nodes, cj->epoch.names[cj->epoch.leader]);
	cj->n_wishes = 0;
	cj->replicas.again_us = 0; /* the last ones may have failed with a node of the last epoch */
	*cj->why = '\0';
	job_settle(job);
}

void cluster_on_begin(struct cluster_job *cj, const Shardd__V1__JobMessage *m)
{
	bool valid = m->begin->n_nodes && m->begin->n_nodes <= SPAN_MAX_NODES;

	for (size_t i = 0; valid && i < m->begin->n_nodes; i++)
		valid = m->begin->nodes[i]->n_devices &&
			m->begin->nodes[i]->n_devices <= CLUSTER_MAX_RANKS;
	if (!valid)
		peer_end(cj->follows->peer, "it has sent an epoch that cannot be");
	else if (cj->state == CLUSTER_FOLLOWS)
		cluster_epoch_run(cj, m->epoch, m->begin);
}

Shardd__V1__JobNode **cluster_list_nodes(struct cluster_job *cj, size_t *ret_n, void **ret_block)
{
	struct cluster_node *n, *tmp;
	size_t nodes = 0, ranks = 0, i = 0;
	Shardd__V1__JobNode **list, *all;
	uint32_t *devices, first = 0;

	list_for_each (n, tmp, &cj->nodes, link) {
		nodes++;
		ranks += n->n;
	}
	list = calloc(1, nodes * (sizeof(*list) + sizeof(*all)) + ranks * sizeof(*devices));
	*ret_block = list;
	*ret_n = nodes;
	if (!list)
		return NULL;
	all = (Shardd__V1__JobNode *)(list + nodes);
	devices = (uint32_t *)(all + nodes);
	list_for_each (n, tmp, &cj->nodes, link) {
		shardd__v1__job_node__init(&all[i]);
		all[i].name = n->name;
		all[i].at = n->at;
		all[i].first = first;
		all[i].n_numbers = n->n;
		all[i].numbers = n->ranks;
		first += n->n;
		all[i].n_devices = n->n;
		all[i].devices = devices;
		for (uint32_t k = 0; k < n->n; k++)
			devices[k] = n->devices[k];
		devices += n->n;
		list[i] = &all[i];
		i++;
	}
	return list;
}

static struct peer **cluster_epoch_list_peers(struct cluster_job *cj, unsigned *ret_self)
{
	struct cluster_node *n, *tmp;
	struct peer **peers;
	unsigned i = 0;

	list_for_each (n, tmp, &cj->nodes, link)
		i++;
	peers = calloc(i + 1, sizeof(*peers));
	i = 0;
	list_for_each (n, tmp, &cj->nodes, link) {
		if (!n->peer)
			*ret_self = i;
		if (peers)
			peers[i] = n->peer;
		i++;
	}
	return peers;
}

/* The store has decided it. */
static void cluster_epoch_announce_epoch(struct cluster_job *cj)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobBegin b = SHARDD__V1__JOB_BEGIN__INIT;
	unsigned self = 0;
	void *block;

	b.nodes = cluster_list_nodes(cj, &b.n_nodes, &block);
	cj->epoch.peers = cluster_epoch_list_peers(cj, &self);
	cj->epoch.left = calloc(b.n_nodes + 1, sizeof(*cj->epoch.left));
	b.applied = cluster_holding_pack_steps(cj->ruled, cj->ruling.n_applied);
	if (!b.nodes || !cj->epoch.peers || !cj->epoch.left || !b.applied) {
		free(block);
		free(b.applied);
		cluster_epoch_free(cj);
		cluster_seek(cj);
		return;
	}
	b.leader = self;
	cluster_elastic_taken(cj);
	b.incarnation = cj->incarnation;
	b.has_commit = cj->ruling.has_commit;
	b.step = cj->ruling.step;
	b.commit_epoch = cj->ruling.epoch;
	b.n_applied = cj->ruling.n_applied;
	m.epoch = cj->known.epoch;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_BEGIN;
	m.begin = &b;
	cj->epoch.n_nodes = (unsigned)b.n_nodes;
	for (size_t i = 0; i < b.n_nodes; i++)
		cluster_send(cj, cj->epoch.peers[i], &m);
	if (!cj->dials.key.c)
		cluster_seek_watch_key(cj); /* it has changed while the epoch was decided */
	cluster_epoch_run(cj, cj->known.epoch, &b);
	free(b.applied);
	free(block);
}

static void cluster_epoch_give_up(struct cluster_job *cj, const char *why, bool later)
{
	log_info("cluster", "epoch not begun job=%s why=\"%s\"", cj->label, why);
	cluster_seek(cj);
	cj->again_us = later ? clock_now_us() + CLUSTER_PAUSE_US : 0;
}

/* No commit of an earlier epoch can be decided any more: this is the last one. */
static void cluster_epoch_on_step(struct coord_call *call, const struct coord_reply *reply)
{
	struct cluster_job *cj = CONTAINER_OF(call, struct cluster_job, call);
	struct fault f = FAULT_NULL, newer = FAULT_NULL;

	CHECK(cj->state == CLUSTER_DECIDING);
	if (reply->status != COORD_OK || !cluster_epoch_is_whole(cj) ||
	    !cluster_epoch_has_own(cj) || !cluster_placed_is_true(cj)) {
		cluster_epoch_give_up(cj, reply->why ? reply->why : "its nodes have changed", true);
		return;
	}
	if (cluster_holding_rule(cj, reply, &f) == 0)
		(void)cluster_elastic_check_layout(cj, &f);
	if (cluster_holding_check_newer(cj, &newer)) {
		cluster_refuse_all(cj, &newer);
		cluster_seek(cj);
		return;
	}
	if (!f.code) {
		cluster_epoch_announce_epoch(cj);
		return;
	}
	if (cluster_restore_begin(cj, &f))
		return;
	cluster_refuse_all(cj, &f);
	cluster_seek(cj);
}

static void cluster_epoch_on_decided(struct decide *d, enum decide_outcome outcome,
				     int64_t revision, const char *why)
{
	struct cluster_job *cj = CONTAINER_OF(d, struct cluster_job, epoch_decision);
	char step[CLUSTER_KEY_BYTES];
	struct coord_txn t = { .read = step };

	CHECK(cj->state == CLUSTER_DECIDING);
	if (outcome != DECIDE_DONE) {
		cluster_epoch_give_up(cj, why, outcome == DECIDE_REFUSED);
		return;
	}
	cj->epoch_revision = revision;
	cluster_key(cj, "step", step);
	cluster_say(cj, "the store is asked for the last committed step");
	cj->call.done = cluster_epoch_on_step;
	if (coord_txn(cj->c->coord, &cj->call, &t, CLUSTER_ANSWER_MS) < 0)
		cluster_epoch_give_up(cj, "there is no memory for a call", true);
}

/* ------------------------------------------------------------------ an epoch ends */

/* An ephemeral job is gone with its last rank. */
static void cluster_epoch_all_left(struct cluster_job *cj)
{
	struct job *job = cluster_job_of(cj);
	struct fault f = FAULT_NULL;

	cj->epoch.is_left = true;
	if (!job)
		return;
	job->life.finished = !job->present && job->rec->lifetime == JOB_EPHEMERAL;
	if (job->life.finished)
		job->life.why = HISTORY_FINISHED;
	if (job->life.finished)
		(void)job_delete(job, false, NULL, &f);
	else
		job_settle(job); /* its next ranks wait for this */
}

/* The leader: the ranks of node @node have left. */
static void cluster_epoch_node_left(struct cluster_job *cj, unsigned node)
{
	struct fault none = FAULT_NULL;

	cj->epoch.left[node] = true;
	for (unsigned i = 0; i < cj->epoch.n_nodes; i++)
		if (!cj->epoch.left[i])
			return;
	cluster_epoch_send_end(cj, cj->epoch.number, &none);
	cluster_epoch_all_left(cj);
}

void cluster_left(struct job *job)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;
	struct fault none = FAULT_NULL;

	if (!cj || !cj->epoch.number)
		return;
	cj->epoch.left_us = clock_now_us();
	if (cj->epoch.left)
		cluster_epoch_node_left(cj, cj->epoch.self);
	else
		cluster_epoch_send_end(cj, cj->epoch.number, &none);
}

enum res cluster_leaves(const struct job *job)
{
	const struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;

	return cj && cj->epoch.left_us && !cj->epoch.is_left ? RES_WAIT : RES_DONE;
}

void cluster_epoch_tick(struct cluster_job *cj, uint64_t now_us)
{
	struct job *job = cluster_job_of(cj);

	if (!cj->epoch.left_us || now_us - cj->epoch.left_us < LEAVES_US)
		return;
	cj->epoch.left_us = 0;
	if (job && !cj->epoch.is_left)
		job_settle(job);
}

/* @node: the number of the one that has sent it; the leader's, at a node that follows. Nothing has
 * failed. */
static void cluster_epoch_on_left(struct cluster_job *cj, unsigned node)
{
	if (cj->epoch.left)
		cluster_epoch_node_left(cj, node);
	else
		cluster_epoch_all_left(cj);
}

void cluster_epoch_ended(struct job *job, const struct fault *why)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;

	if (!cj || !cj->epoch.number)
		return;
	log_info("cluster", "epoch ends job=%s epoch=%llu why=\"%s\"", cj->label,
		 (unsigned long long)cj->epoch.number, why->text);
	if (!cj->epoch.is_left)
		cluster_epoch_send_end(cj, cj->epoch.number, why);
	cluster_rounds_epoch_ended(cj, why->text);
	cluster_drop_keys(cj);
	decide_cancel(&cj->commit);
	cj->grows = false;
	cluster_epoch_free(cj);
	cluster_epoch_drop_nodes(cj);
	cluster_seek(cj);
}

void cluster_on_end(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobMessage *m)
{
	struct job *job = cluster_job_of(cj);
	bool known = from == cluster_to_leader(cj);
	struct fault f = FAULT_NULL;
	unsigned node = 0;

	for (unsigned i = 0; cj->epoch.peers && i < cj->epoch.n_nodes; i++)
		if (cj->epoch.peers[i] == from) {
			known = true;
			node = i;
		}
	if (!known || !m->epoch || m->epoch != cj->epoch.number || !job)
		return;
	if (!m->end->code) {
		cluster_epoch_on_left(cj, node);
		return;
	}
	fault_set(&f, m->end->code && m->end->code < _FAULT_N ? m->end->code : FAULT_ABORTED, NULL,
		  "%s", m->end->text);
	job_epoch_end(job, &f);
}

void cluster_node_gone(struct cluster_job *cj, struct peer *p, const char *why)
{
	struct job *job = cluster_job_of(cj);
	struct cluster_node *n, *tmp;
	struct fault f = FAULT_NULL;
	bool ran = false;

	fault_set(&f, FAULT_ABORTED, NULL, "node %s of job '%s' is gone: %.300s", peer_name(p),
		  cj->label, why);
	for (unsigned i = 0; cj->epoch.peers && i < cj->epoch.n_nodes; i++) {
		if (cj->epoch.peers[i] != p)
			continue;
		cj->epoch.peers[i] = NULL;
		ran = true;
	}
	list_for_each (n, tmp, &cj->nodes, link)
		if (n->peer == p)
			cluster_wish_node_free(n);
	list_for_each (n, tmp, &cj->later, link)
		if (n->peer == p)
			cluster_wish_node_free(n);
	if (ran && job)
		job_epoch_end(job, &f);
	else if (cj->state == CLUSTER_LEADS || cj->state == CLUSTER_RESTORING)
		cluster_seek(cj); /* the other end may have taken its place */
}
