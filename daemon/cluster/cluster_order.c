/* The order of a job's collectives, connected to the job and to the links. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/check.h"
#include "core/log.h"
#include "gather/turn.h"
#include "job/policy.h"
#include "op/op.h"
#include "op/op_list.h"
#include "op/uneven_nodes.h"
#include "step/apply.h"
#include "step/commit.h"
#include "step/external.h"
#include "unitio/writes.h"

/* Orders are freed behind their own callbacks. */
struct cluster_ended {
	struct list link;
	struct order *order;
};

static void cluster_order_end_job(struct cluster_job *cj, const struct fault *f)
{
	struct job *job = cluster_job_of(cj);

	if (job && cj->epoch.number)
		job_epoch_end(job, f);
}

static struct group *cluster_order_group_of(struct job *job, uint64_t key)
{
	for (uint32_t i = 0; i < job->n_groups; i++)
		if (group_key(job->groups[i]) == key)
			return job->groups[i];
	return NULL;
}

struct unit *cluster_order_unit_of(struct job *job, uint64_t key)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		if (!job->units[i]->rec->dropped && job->units[i]->key == key)
			return job->units[i];
	return NULL;
}

/* -------------------------------------------------------------- what the order says */

static void cluster_order_send(void *userdata, uint32_t node, const struct order_msg *msg)
{
	struct cluster_job *cj = userdata;
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	uint8_t bytes[ORDER_MSG_MAX];

	m.epoch = cj->epoch.number;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ORDER;
	m.order.data = bytes;
	m.order.len = order_pack(msg, bytes);
	cluster_send(cj, cj->epoch.peers ? cj->epoch.peers[node] : cluster_to_leader(cj), &m);
}

/* What every step has with other settings, as the learning rate, is no reason to leave a schedule. A
 * Barrier has no operation between nodes that would wait for them. */
static uint32_t cluster_order_flags_of(const struct op *op)
{
	if (op->type == &op_commit)
		return ORDER_DECISION | ORDER_MARK;
	if (op->type == &op_step || op->type == &op_plan || op->type == &op_barrier)
		return ORDER_JOINT;
	return 0;
}

/* A schedule starts what is not joint on each node by itself. */
static bool cluster_order_start_collective(const struct cluster_job *cj, struct job *job,
					   const struct order_started *s)
{
	struct group *g = cluster_order_group_of(job, s->key.group);
	const struct match_slot *slot = g ? match_slot(&g->match, s->key.number) : NULL;
	bool joint;

	if (!g)
		return writes_start(job, s->key.group, s->key.number);
	if (!g->here)
		return true;
	joint = slot && slot->first &&
		cluster_order_flags_of(CONTAINER_OF(slot->first, struct op, entry));
	uneven_starts(g, s->key.number, joint || !order_is_recorded(cj->epoch.order));
	return match_start(&g->match, s->key.number, s->fingerprint);
}

static bool cluster_order_start_apply(struct job *job, const struct order_key *key)
{
	apply_allow(job, key->group, key->number);
	return true;
}

/* What any node asks for and all do: a gather; or that a unit has tensors that are left out. */
static bool cluster_order_start_gather(struct job *job, const struct order_started *s)
{
	struct unit *u = cluster_order_unit_of(job, s->key.group);
	struct unit *other =
		u ? NULL : cluster_order_unit_of(job, unit_leaves_out_key(s->key.group));

	if (other) {
		other->turns.leaves_out = true;
		return true;
	}
	return u && u->turns.n + 1 == s->key.number &&
	       turn_start(job, u, s->position, s->fingerprint) == 0;
}

/* Does it follow a recorded step now, and did not before; or the other way round? */
static void cluster_order_note(struct cluster_job *cj)
{
	struct cluster_epoch *e = &cj->epoch;

	if (!e->order || order_is_recorded(e->order) == e->recorded)
		return;
	e->recorded = !e->recorded;
	log_info("cluster", "order job=%s epoch=%llu recorded=%s", cj->label,
		 (unsigned long long)e->number, e->recorded ? "yes" : "no");
}

static bool cluster_order_start_unit(struct job *job, const struct order_key *key)
{
	struct unit *u = cluster_order_unit_of(job, key->group);

	return u && external_start(job, u, key->number);
}

static bool cluster_order_start_kind(const struct cluster_job *cj, struct job *job,
				     const struct order_started *s)
{
	switch ((enum order_kind)s->key.kind) {
	case ORDER_COLLECTIVE:
		return cluster_order_start_collective(cj, job, s);
	case ORDER_GATHER:
		return cluster_order_start_gather(job, s);
	case ORDER_APPLY:
		return cluster_order_start_apply(job, &s->key);
	case ORDER_APPLY_UNIT:
		return cluster_order_start_unit(job, &s->key);
	case _ORDER_KIND_N:
		break;
	}
	return false;
}

static void cluster_order_start(void *userdata, const struct order_started *s)
{
	struct cluster_job *cj = userdata;
	struct job *job = cluster_job_of(cj);
	struct fault f = FAULT_NULL;
	bool started = false;

	cluster_order_note(cj);
	if (job)
		started = cluster_order_start_kind(cj, job, s);
	if (started)
		return;
	fault_set(&f, FAULT_ABORTED, NULL,
		  "node %s cannot start entry %llu of group %016llx of job '%s', which the leader "
		  "has "
		  "started",
		  cj->c->node, (unsigned long long)s->key.number, (unsigned long long)s->key.group,
		  cj->label);
	cluster_order_end_job(cj, &f);
}

static void cluster_order_fail(void *userdata, const struct order_key *key, const struct fault *f)
{
	struct cluster_job *cj = userdata;
	struct job *job = cluster_job_of(cj);
	struct group *g = job ? cluster_order_group_of(job, key->group) : NULL;

	if (g && key->kind == ORDER_COLLECTIVE)
		match_fail(&g->match, key->number, f);
	else if (job && key->kind == ORDER_COLLECTIVE)
		(void)writes_fail(job, key->group, key->number, f);
}

static void cluster_order_ended(void *userdata, const struct fault *f)
{
	cluster_order_end_job(userdata, f);
}

/* ------------------------------------------------------------------------- commits */

static void cluster_order_on_committed(struct decide *d, enum decide_outcome outcome,
				       int64_t revision, const char *why)
{
	struct cluster_job *cj = CONTAINER_OF(d, struct cluster_job, commit);
	struct order_key key = cj->committing;
	struct fault f = FAULT_NULL;

	if (outcome == DECIDE_DONE) {
		cj->step_revision = revision;
		order_decided(cj->epoch.order, &key, true, NULL);
		return;
	}
	fault_set(&f, FAULT_ABORTED, NULL, "the commit of job '%s' was not decided: %.300s",
		  cj->label, why);
	cluster_order_end_job(cj, &f);
}

/* The step of the commit at @key: this node has announced it, too. */
static bool cluster_order_step_of(const struct cluster_job *cj, const struct order_key *key,
				  uint64_t *ret)
{
	struct job *job = cluster_job_of(cj);
	struct group *g = job ? cluster_order_group_of(job, key->group) : NULL;
	struct match_slot *s = g ? match_slot(&g->match, key->number) : NULL;

	if (!s || !s->first)
		return false;
	*ret = s->first->print.words[2]; /* op_commit_check */
	return true;
}

/* From here on it is the last one; checkpoints that begin with it hear of it before it starts. */
static void cluster_order_note_commit(struct cluster_job *cj, const struct order_key *key)
{
	uint64_t step;

	if (!cluster_order_step_of(cj, key, &step))
		return;
	policy_committing(cluster_job_of(cj), step);
	cj->epoch.last_step = step;
	cj->epoch.commits = true;
}

static void cluster_order_decide(void *userdata, const struct order_key *key)
{
	struct cluster_job *cj = userdata;
	char step_key[CLUSTER_KEY_BYTES], leader[CLUSTER_KEY_BYTES], epoch[CLUSTER_KEY_BYTES];
	char value[64];
	struct decide_what what = { .key = step_key,
				    .leader = leader,
				    .token = cj->token,
				    .last = cj->step_revision,
				    .also = epoch,
				    .also_last = cj->epoch_revision };
	struct fault f = FAULT_NULL;
	uint64_t step;
	int r = -EINVAL;

	cluster_key(cj, "step", step_key);
	cluster_key(cj, "leader", leader);
	cluster_key(cj, "epoch", epoch);
	cj->committing = *key;
	cj->epoch.held = cj->epoch.holds;
	if (cj->epoch.held)
		return; /* cluster_order_hold */
	cluster_order_note_commit(cj, key);
	if (cj->commit.state == DECIDE_IDLE && cluster_order_step_of(cj, key, &step)) {
		what.value = value;
		what.bytes = (size_t)snprintf(value, sizeof(value), "%llu %llu",
					      (unsigned long long)step,
					      (unsigned long long)cj->epoch.number);
		r = decide_begin(&cj->commit, cj->c->coord, &what, cluster_order_on_committed);
	}
	if (r == 0)
		return;
	if (r == -EINVAL)
		fault_set(
			&f, FAULT_INTERNAL, NULL,
			"a commit of job '%s' cannot be decided: node %s has not announced it, or "
			"another one is being decided",
			cj->label, cj->c->node);
	else
		fault_errno(&f, r, "deciding a commit");
	cluster_order_end_job(cj, &f);
}

void cluster_order_hold(struct cluster_job *cj, bool on)
{
	const struct order_key key = cj->committing;
	bool held = cj->epoch.held;

	cj->epoch.holds = on;
	if (on || !held || !cj->epoch.order)
		return;
	cj->epoch.held = false;
	cluster_order_decide(cj, &key);
}

/* -------------------------------------------------------------- its beginning and end */

/* Entries that a node may announce ahead: all ops of all ranks, and a gather of each unit. */
uint32_t cluster_order_ahead(const struct job *job)
{
	const struct node_limits *limits = &job->node->limits;
	uint64_t n = (uint64_t)job->rec->world_size * limits->max_inflight_ops +
		     limits->max_units_per_job;

	return n < UINT32_MAX / 4 ? (uint32_t)n : UINT32_MAX / 4;
}

int cluster_order_begin(struct cluster_job *cj)
{
	static const struct order_ops ops = { .send = cluster_order_send,
					      .start = cluster_order_start,
					      .fail = cluster_order_fail,
					      .decide = cluster_order_decide,
					      .ended = cluster_order_ended };
	const struct order_options o = { .n_nodes = cj->epoch.n_nodes,
					 .self = cj->epoch.self,
					 .leader = cj->epoch.leader,
					 .names = cj->epoch.name_list,
					 .max_ahead = cluster_order_ahead(cluster_job_of(cj)),
					 .max_recorded = CLUSTER_MAX_RECORDED,
					 .no_schedules =
						 !cj->c->schedules || cj->epoch.n_nodes == 1,
					 .patience_us = CLUSTER_PATIENCE_US,
					 .stuck_us = CLUSTER_STUCK_US };

	return order_new(&o, &ops, cj, &cj->epoch.order);
}

void cluster_order_tick(struct cluster_job *cj, uint64_t now_us)
{
	if (cj->epoch.order)
		order_tick(cj->epoch.order, now_us);
	cluster_order_note(cj);
}

/* It may be in one of its callbacks. */
void cluster_order_end(struct cluster_job *cj)
{
	struct cluster_ended *e;

	if (!cj->epoch.order)
		return;
	order_end(cj->epoch.order);
	e = calloc(1, sizeof(*e));
	if (e) {
		list_init(&e->link);
		e->order = cj->epoch.order;
		list_append(&cj->c->ended, &e->link);
	} else {
		log_error("cluster", "no memory: the order of an epoch is not freed job=%s",
			  cj->label);
	}
	cj->epoch.order = NULL;
}

void cluster_orders_free(struct cluster *c)
{
	while (!list_empty(&c->ended)) {
		struct cluster_ended *e = list_first(&c->ended, struct cluster_ended, link);

		list_unlink(&e->link);
		order_free(e->order);
		free(e);
	}
}

void cluster_on_order(struct cluster_job *cj, struct peer *from, const ProtobufCBinaryData *bytes)
{
	struct order_msg msg;
	unsigned node = cj->epoch.leader;

	for (unsigned i = 0; cj->epoch.peers && i < cj->epoch.n_nodes; i++)
		if (cj->epoch.peers[i] == from)
			node = i;
	if (!cj->epoch.order ||
	    (cj->epoch.peers ? cj->epoch.peers[node] : cluster_to_leader(cj)) != from)
		return;
	if (order_unpack(bytes->data, bytes->len, &msg)) {
		peer_end(from, "it has sent a message of the order that cannot be read");
		return;
	}
	order_receive(cj->epoch.order, node, &msg);
}

/* -------------------------------------------------------------- what the job says */

struct cluster_job *cluster_order_running(const struct job *job)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;

	return cj && cj->epoch.order ? cj : NULL;
}

/* The nodes that have members of @g. Return: NULL: all. */
const struct order_nodes *cluster_order_nodes_of(const struct group *g, struct order_nodes *ret)
{
	const struct span *s = g->job->across.span;
	unsigned n = 0;

	*ret = (struct order_nodes){ 0 };
	for (uint32_t i = 0; i < group_size(g); i++)
		n += order_nodes_add(ret, span_node_of(s, g->rec->ranks[i]));
	return n == s->n_nodes ? NULL : ret;
}

static void cluster_order_fill_entry(const struct group *g, uint64_t number,
				     const struct order_nodes *nodes, struct order_entry *e)
{
	*e = (struct order_entry){ .key = { ORDER_COLLECTIVE, group_key(g), number },
				   .nodes = nodes };
}

void cluster_order_tell(struct cluster_job *cj, const struct job *job, const struct order_entry *e)
{
	struct fault f = FAULT_NULL;
	int r = order_announce(cj->epoch.order, e);

	if (r != ORDER_E_AHEAD)
		return;
	fault_set(&f, FAULT_EXHAUSTED, NULL,
		  "node %s is %u operations ahead of the other nodes of job '%s': set "
		  "max_inflight_ops alike on all nodes, and join again",
		  cj->c->node, cluster_order_ahead(job), cj->label);
	cluster_order_end_job(cj, &f);
}

void cluster_announce(struct group *g, uint64_t number, const struct match_entry *first)
{
	struct cluster_job *cj = cluster_order_running(g->job);
	const struct op *op = CONTAINER_OF(first, struct op, entry);
	struct order_nodes nodes;
	struct order_print print;
	struct order_entry e;
	struct fault f = FAULT_NULL;

	if (!cj)
		return;
	if (op->type == &op_commit && commit_check(g->job, &f)) {
		match_refuse(&g->match, (struct match_entry *)first, &f);
		return;
	}
	if (op->type == &op_commit)
		doubt_announces(g->job);
	cluster_order_fill_entry(g, number, cluster_order_nodes_of(g, &nodes), &e);
	_Static_assert(sizeof(print.words) == sizeof(first->print.words), "the same fingerprint");
	memcpy(print.words, first->print.words, sizeof(print.words));
	snprintf(print.text, sizeof(print.text), "%s", first->print.text);
	e.print = &print;
	e.rank = first->rank;
	e.pid = first->pid;
	e.flags = cluster_order_flags_of(op);
	uneven_announces(g, number);
	cluster_order_tell(cj, g->job, &e);
}

void cluster_prepared(struct group *g, uint64_t number)
{
	struct cluster_job *cj = cluster_order_running(g->job);
	struct order_print print = { 0 };
	struct order_nodes nodes;
	struct order_entry e;

	if (!cj)
		return;
	cluster_order_fill_entry(g, number, cluster_order_nodes_of(g, &nodes), &e);
	e.key.kind = ORDER_APPLY;
	e.print = &print;
	snprintf(print.text, sizeof(print.text), "the application of a Step");
	cluster_order_tell(cj, g->job, &e);
}

void cluster_leave_out(struct job *job, struct unit *u)
{
	struct cluster_job *cj = cluster_order_running(job);
	struct order_nodes nodes;
	const struct order_entry e = { .key = { ORDER_GATHER, unit_leaves_out_key(u->key), 1 },
				       .nodes = cluster_order_nodes_of(job->groups[u->rec->group],
								       &nodes) };

	if (cj)
		cluster_order_tell(cj, job, &e);
}

void cluster_give(struct job *job, struct unit *u, uint64_t turn)
{
	struct cluster_job *cj = cluster_order_running(job);
	const struct order_print print = { .text = "the step of a unit" };
	struct order_nodes nodes;
	struct order_entry e = { .key = { ORDER_APPLY_UNIT, u->key, turn },
				 .nodes =
					 cluster_order_nodes_of(job->groups[u->rec->group], &nodes),
				 .print = &print };

	if (cj)
		cluster_order_tell(cj, job, &e);
}

void cluster_refuse(struct group *g, uint64_t number, const struct fault *fault)
{
	struct cluster_job *cj = cluster_order_running(g->job);
	struct order_nodes nodes;
	struct order_entry e;
	struct order_print print = { 0 };

	if (!cj)
		return;
	uneven_refuses(g, number);
	cluster_order_fill_entry(g, number, cluster_order_nodes_of(g, &nodes), &e);
	e.print = &print;
	(void)order_refuse(cj->epoch.order, &e,
			   fault); /* or it has started, or the epoch has ended */
}

void cluster_op_waits(const struct group *g, uint64_t number, char *buf, size_t bytes)
{
	const struct cluster_job *cj = cluster_order_running(g->job);
	const struct order_key *deciding = cj ? &cj->committing : NULL;
	const struct cluster_epoch *e = cj ? &cj->epoch : NULL;

	*buf = '\0';
	if (!cj)
		return;
	if (cj->commit.state != DECIDE_IDLE && deciding->group == group_key(g) &&
	    deciding->number == number)
		snprintf(buf, bytes, "the store, which decides the commit%s%s",
			 *cj->commit.why ? ": " : "", cj->commit.why);
	else if (e->held && deciding->group == group_key(g) && deciding->number == number)
		snprintf(buf, bytes, "copies of the last commit, for ranks that have come");
	else if (e->self == e->leader)
		snprintf(buf, bytes, "%s", e->n_nodes > 1 ? "ranks on other nodes" : "");
	else
		snprintf(buf, bytes, "node %s, which leads the job, or ranks on other nodes",
			 e->names[e->leader]);
}

void cluster_want(struct job *job, struct unit *u, uint64_t turn)
{
	struct cluster_job *cj = cluster_order_running(job);
	const struct order_entry e = { .key = { ORDER_GATHER, u->key, turn } };

	if (cj && order_announce(cj->epoch.order, &e) == ORDER_E_AHEAD)
		u->turns.wanted = false; /* whoever wants it asks again */
}

void cluster_asked(struct job *job, struct unit *u, uint64_t turn)
{
	struct cluster_job *cj = cluster_order_running(job);
	const struct order_key key = { ORDER_GATHER, u->key, turn };

	if (cj)
		order_asked(cj->epoch.order, &key);
}

void cluster_made(struct job *job, uint64_t position)
{
	struct cluster_job *cj = cluster_order_running(job);

	if (cj)
		order_done(cj->epoch.order, position);
}
