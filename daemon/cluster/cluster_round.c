/* Checkpoints that the nodes of a job save or load together, connected to the job and to the links. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "cluster/cluster_impl.h"
#include "cluster/round.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/fnv.h"
#include "core/log.h"
#include "core/text.h"
#include "job/loading.h"
#include "job/policy.h"
#include "job/saving.h"

struct cluster_round {
	struct round *round; /* owned */
	struct list link;    /* cluster->rounds */
	struct cluster *c;
	char label[JOB_LABEL_MAX + 1];
	struct work begin;
	bool begins;    /* it is in the loop queue */
	bool waits;     /* for the end of a replica, to begin */
	uint64_t epoch; /* in which it began */
	char from[SPAN_NAME_BYTES], from_at[CLUSTER_AT_BYTES]; /* of a replica: the node before */
	struct replica *replica;   /* owned ref: of that node, while it is copied */
	struct cluster_copy *copy; /* borrowed until its end; NULL: none */
	struct work copied;        /* it could not begin */
	bool posted;               /* @copied is */
	struct fault f;
	unsigned n;          /* of @peers: the leader: by node; NULL: this one, or it is gone */
	struct peer **peers; /* owned; else: the leader's alone */
};

/* -------------------------------------------------------------------------------- which */

static struct cluster_round *cluster_round_of(const struct round *r)
{
	struct cluster_round *cr, *tmp;

	list_for_each (cr, tmp, &the_cluster->rounds, link)
		if (cr->round == r)
			return cr;
	CHECK_NOT_REACHED();
}

static struct cluster_round *cluster_round_by_id(struct cluster *c, const char *label, uint64_t id)
{
	struct cluster_round *cr, *tmp;

	list_for_each (cr, tmp, &c->rounds, link)
		if (cr->round->id == id && cr->round->state != ROUND_OVER &&
		    strcmp(cr->label, label) == 0)
			return cr;
	return NULL;
}

/* One of the job that is not over. Return: NULL: none but of replicas. */
static struct cluster_round *cluster_round_running(struct cluster *c, const struct job *job,
						   bool loads)
{
	struct cluster_round *cr, *tmp;

	list_for_each (cr, tmp, &c->rounds, link)
		if (cr->round->job == job && cr->round->loads == loads && !cr->round->memory &&
		    cr->round->state != ROUND_OVER)
			return cr;
	return NULL;
}

/* Does one of replicas go on? */
static bool cluster_round_replicates(struct cluster *c, const struct job *job)
{
	struct cluster_round *cr, *tmp;

	list_for_each (cr, tmp, &c->rounds, link)
		if (cr->round->job == job && cr->round->memory && cr->round->state != ROUND_OVER)
			return true;
	return false;
}

static unsigned cluster_round_node(const struct cluster_round *cr, const struct peer *p)
{
	for (unsigned i = 0; i < cr->n; i++)
		if (cr->peers[i] == p)
			return i;
	return cr->n;
}

/* ----------------------------------------------------------------------------- its ops */

static void cluster_round_reply(struct peer *to, const char *label, Shardd__V1__JobMessage *m)
{
	Shardd__V1__PeerMessage message = SHARDD__V1__PEER_MESSAGE__INIT;

	m->job = (char *)label;
	message.body_case = SHARDD__V1__PEER_MESSAGE__BODY_JOB;
	message.job = m;
	peer_send(to, &message);
}

static void cluster_round_send(struct round *r, unsigned node, Shardd__V1__JobMessage *m)
{
	struct cluster_round *cr = cluster_round_of(r);
	struct peer *to = cr->peers[r->leads ? node : 0];

	if (to)
		cluster_round_reply(to, cr->label, m);
}

static void cluster_round_hold(struct round *r, bool on)
{
	const struct cluster_round *cr = cluster_round_of(r);
	struct cluster_job *cj = cluster_find(the_cluster, cr->label);

	if (cj && cj->epoch.number == cr->epoch) /* else that hold has ended with its epoch */
		cluster_order_hold(cj, on);
}

static bool cluster_round_last(struct round *r, uint64_t *ret_step)
{
	const struct cluster_job *cj = cluster_find(the_cluster, cluster_round_of(r)->label);
	const state_job *rec = r->job->rec;

	*ret_step = cj && cj->epoch.commits ? cj->epoch.last_step : rec->step;
	return (cj && cj->epoch.commits) || rec->has_commit;
}

static bool cluster_round_left(struct round *r)
{
	const struct cluster_job *cj = cluster_find(the_cluster, cluster_round_of(r)->label);

	return cj && cj->epoch.is_left;
}

static void cluster_round_on_paused(struct work *w)
{
	struct cluster_round *cr = CONTAINER_OF(w, struct cluster_round, copied);
	struct cluster_job *cj = cluster_find(cr->c, cr->label);
	struct job *job = cj ? cluster_job_of(cj) : NULL;

	cr->posted = false;
	if (job && cj->epoch.number && cj->epoch.number == cr->epoch)
		cluster_elastic_grow(cj, job);
}

/* Of a replica: also if it has failed the job trains on. */
static void cluster_round_replicated(struct cluster_round *cr, const struct fault *f)
{
	struct cluster_job *cj = cluster_find(cr->c, cr->label);
	const struct round *r = cr->round;
	struct job *job;
	bool again;

	if (cr->copy)
		cluster_copy_cancel(cr->copy);
	job = htab_find(&cr->c->jobs->names, cr->label);
	if (job != r->job) /* it was deleted before it began here */
		job = NULL;
	again = f && job && strcmp(job->across.replica_why, f->text) == 0;
	if (job)
		text_copy(job->across.replica_why, sizeof(job->across.replica_why),
			  f ? f->text : "");
	if (!r->leads)
		return;
	if (!f) {
		log_debug("cluster", "replicas made job=%s step=%llu", cr->label,
			  (unsigned long long)r->step);
		if (cj && r->pauses) { /* not from inside the round */
			cr->posted = true;
			loopq_post(cr->c->loopq, &cr->copied, cluster_round_on_paused);
		}
		return;
	}
	if (!again)
		log_warn("cluster", "replicas not made job=%s step=%llu why=\"%s\"", cr->label,
			 (unsigned long long)r->step, f->text);
	if (cj && f->code != FAULT_ABORTED) /* it would fail again */
		cj->replicas.again_us = clock_now_us() + CLUSTER_REPLICA_AGAIN_US;
}

static void cluster_round_over(struct round *r, const struct fault *f)
{
	struct cluster_round *cr = cluster_round_of(r);

	log_debug("cluster", "round over job=%s id=%016llx", cr->label, (unsigned long long)r->id);
	if (r->memory)
		cluster_round_replicated(cr, f);
}

/* ------------------------------------------------------------------------ copies of parts */

static void cluster_round_end_copy(struct cluster_round *cr, uint64_t bytes, const struct fault *f)
{
	struct fault g = f ? *f : FAULT_NULL;

	if (cr->replica && !g.code && !cr->replica->job)
		fault_set(&g, FAULT_ABORTED, NULL, "job '%s' was deleted", cr->label);
	if (cr->replica && !g.code)
		(void)replica_is_whole(cr->replica, &g);
	if (cr->replica && g.code)
		replica_drop(cr->replica);
	cr->replica = replica_unref(cr->replica);
	if (cr->round->state != ROUND_OVER)
		round_copied(cr->round, bytes, g.code ? &g : NULL);
}

static void cluster_round_on_copied(void *userdata, uint64_t bytes, const struct fault *f)
{
	struct cluster_round *cr = userdata;

	cr->copy = NULL;
	cluster_round_end_copy(cr, bytes, f);
}

static void cluster_round_on_not_copied(struct work *w)
{
	struct cluster_round *cr = CONTAINER_OF(w, struct cluster_round, copied);

	cr->posted = false;
	cluster_round_end_copy(cr, 0, &cr->f);
}

static void cluster_round_copy(struct round *r, unsigned from, uint64_t tensors, uint64_t tail)
{
	struct cluster_round *cr = cluster_round_of(r);
	struct job *job = r->job;
	const struct replica_id id = { r->step, r->layout, from, r->n };
	struct cluster_copy_want want = {
		.label = cr->label, .node = cr->from, .at = cr->from_at, .bytes = { tensors, tail }
	};

	if (tensors > REPLICA_MAX_BYTES || tail > REPLICA_MAX_BYTES || !tensors || !tail)
		fault_set(&cr->f, FAULT_INVALID, NULL, "node %s has sent the size of no part",
			  cr->from);
	else if (replica_new(job, &id, tensors + tail, &want.replica, &cr->f) == 0) {
		want.replica->epoch = cr->epoch;
		cr->replica = replica_ref(want.replica);
	}
	if (!cr->f.code &&
	    cluster_copy_begin(cr->c, &want, cluster_round_on_copied, cr, &cr->copy, &cr->f) == 0)
		return;
	cr->posted = true;
	loopq_post(cr->c->loopq, &cr->copied, cluster_round_on_not_copied);
}

static const struct round_ops cluster_round_ops = { .send = cluster_round_send,
						    .hold = cluster_round_hold,
						    .last = cluster_round_last,
						    .left = cluster_round_left,
						    .copy = cluster_round_copy,
						    .over = cluster_round_over };

/* -------------------------------------------------------------------------- its begin */

static void cluster_round_free(struct cluster_round *cr)
{
	list_unlink(&cr->link);
	round_free(cr->round);
	replica_unref(cr->replica);
	free(cr->peers);
	free(cr);
}

/* @n: peers; the round is set by the caller. Return: NULL without memory. */
static struct cluster_round *cluster_round_new(struct cluster *c, const char *label, unsigned n)
{
	struct cluster_round *cr = calloc(1, sizeof(*cr));

	if (!cr)
		return NULL;
	list_init(&cr->link);
	cr->c = c;
	text_copy(cr->label, sizeof(cr->label), label);
	cr->n = n;
	cr->peers = calloc(n, sizeof(struct peer *));
	if (cr->peers)
		return cr;
	free(cr);
	return NULL;
}

/* Of what its folders are named by. */
static uint64_t cluster_round_owner(const struct cluster *c, const char *label)
{
	uint64_t h = FNV_BEGIN;

	for (const char *at = c->name; *at; at++)
		h = fnv_add(h, (unsigned char)*at);
	h = fnv_add(h, '/');
	for (const char *at = label; *at; at++)
		h = fnv_add(h, (unsigned char)*at);
	return h | 1;
}

/* All nodes of the epoch take part. Return: NULL without memory. */
static struct cluster_round *cluster_round_lead(struct cluster_job *cj, struct job *job,
						struct round_options *o)
{
	struct cluster_round *cr = cluster_round_new(cj->c, cj->label, cj->epoch.n_nodes);

	if (!cr)
		return NULL;
	memcpy(cr->peers, cj->epoch.peers, cr->n * sizeof(struct peer *));
	cr->epoch = cj->epoch.number;
	o->ops = &cluster_round_ops;
	o->n = cr->n;
	o->self = cj->epoch.self;
	o->leader = cj->epoch.self;
	cr->round = round_lead(job, o, cj->epoch.names, cluster_round_owner(cj->c, cj->label));
	if (cr->round) {
		list_append(&cj->c->rounds, &cr->link);
		return cr;
	}
	cluster_round_free(cr);
	return NULL;
}

/* Of a replica: whose part is copied here, also when the epoch has ended meanwhile. */
static void cluster_round_note_before(struct cluster_round *cr, const struct cluster_job *cj)
{
	const struct cluster_epoch *e = &cj->epoch;
	unsigned before = (e->self + e->n_nodes - 1) % e->n_nodes;

	text_copy(cr->from, sizeof(cr->from), e->names[before]);
	text_copy(cr->from_at, sizeof(cr->from_at), e->ats[before]);
}

bool cluster_round_replicate(struct cluster_job *cj, struct job *job)
{
	const struct saving_options save = {
		.path = "", .deadline_us = UINT64_MAX, .next = true, .memory = true
	};
	struct round_options o = { .save = &save };
	struct cluster_round *cr;

	if (clock_now_us() < cj->replicas.again_us || saving_is_busy(job) || job->generation ||
	    cluster_round_running(cj->c, job, false) || cluster_round_replicates(cj->c, job) ||
	    getrandom(&o.id, sizeof(o.id), 0) != sizeof(o.id))
		return false;
	o.id |= 1;
	cr = cluster_round_lead(cj, job, &o);
	if (!cr)
		return false;
	cluster_round_note_before(cr, cj);
	cr->round->pauses = cj->grows;
	round_begin(cr->round);
	return true;
}

/* A replica and a checkpoint are not made at once. */
static void cluster_round_begin(struct cluster_round *cr)
{
	cr->waits = cluster_round_replicates(cr->c, cr->round->job);
	if (!cr->waits && cr->round->state != ROUND_OVER)
		round_begin(cr->round);
}

static void cluster_round_on_begin(struct work *w)
{
	struct cluster_round *cr = CONTAINER_OF(w, struct cluster_round, begin);

	cr->begins = false;
	cluster_round_begin(cr);
}

/* Its part here is told of the end by a callback, which must not come before the request is taken. */
static void cluster_round_begin_soon(struct cluster_round *cr)
{
	cr->begins = true;
	loopq_post(cr->c->loopq, &cr->begin, cluster_round_on_begin);
}

static struct cluster_round *cluster_round_ask(struct cluster_job *cj, struct job *job,
					       struct round_options *o)
{
	struct cluster_round *cr = cluster_round_new(cj->c, cj->label, 1);

	if (!cr)
		return NULL;
	cr->peers[0] = cluster_to_leader(cj);
	o->ops = &cluster_round_ops;
	o->n = cj->epoch.n_nodes;
	o->self = cj->epoch.self;
	o->leader = cj->epoch.leader;
	list_append(&cj->c->rounds, &cr->link);
	cr->round = round_new_asked(job, o);
	if (!cr->round) {
		cluster_round_free(cr);
		return NULL;
	}
	round_ask(cr->round);
	return cr;
}

/* The job, if an epoch of several nodes runs. Return: NULL: @f is filled. */
static struct cluster_job *cluster_round_epoch(struct job *job, struct fault *f)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;

	if (cj && cj->state == CLUSTER_RUNS && cj->epoch.order &&
	    (cj->epoch.peers || cluster_to_leader(cj)))
		return cj;
	fault_set(f, FAULT_STATE, NULL,
		  "job '%s' has ranks on %u nodes, and no epoch: its nodes save and load "
		  "checkpoints together, from when all of its ranks have joined on",
		  job->rec->name, job->across.span->n_nodes);
	return NULL;
}

static int cluster_round_start(struct job *job, struct round_options *o, bool at_once,
			       struct fault *f)
{
	struct cluster_job *cj = cluster_round_epoch(job, f);
	struct cluster_round *cr;

	if (!cj)
		return f->code;
	if (getrandom(&o->id, sizeof(o->id), 0) != sizeof(o->id))
		return fault_errno(f, -errno, "beginning a checkpoint");
	o->id |= 1;
	o->asked = true;
	cr = cj->epoch.peers ? cluster_round_lead(cj, job, o) : cluster_round_ask(cj, job, o);
	if (!cr)
		return fault_errno(f, -ENOMEM, "beginning a checkpoint");
	if (cr->round->leads && at_once)
		cluster_round_begin(cr);
	else if (cr->round->leads)
		cluster_round_begin_soon(cr);
	return 0;
}

int cluster_save(struct job *job, const struct saving_options *o, struct fault *f)
{
	struct round_options ro = { .save = o };

	return cluster_round_start(job, &ro, o->next, f);
}

int cluster_load(struct job *job, const struct loading_options *o, struct fault *f)
{
	struct round_options ro = { .loads = true, .load = o };

	return cluster_round_start(job, &ro, false, f);
}

void cluster_give_up(struct job *job, bool loads)
{
	struct cluster_round *cr =
		the_cluster ? cluster_round_running(the_cluster, job, loads) : NULL;

	if (cr)
		round_give_up(cr->round);
}

void cluster_checkpoint_waits(const struct job *job, bool loads, char *buf, size_t bytes)
{
	const struct cluster_round *cr =
		the_cluster ? cluster_round_running(the_cluster, job, loads) : NULL;

	*buf = '\0';
	if (cr)
		round_waits(cr->round, buf, bytes);
}

/* ---------------------------------------------------------------------------- messages */

static bool cluster_round_plan_is_valid(const Shardd__V1__JobRoundPlan *p)
{
	if (p && p->memory)
		return !*p->path && !p->loads;
	return p && *p->path == '/' && strlen(p->path) < PATH_MAX;
}

/* This node has no part in it. */
static void cluster_round_decline(struct peer *to, const char *label,
				  const Shardd__V1__JobRoundPhase *phase, const struct fault *f)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobRoundAnswer answer = SHARDD__V1__JOB_ROUND_ANSWER__INIT;

	round_decline(phase, f, &answer);
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ANSWER;
	m.round_answer = &answer;
	cluster_round_reply(to, label, &m);
}

/* The leader cannot begin it. */
static void cluster_round_refuse(struct peer *to, const char *label, uint64_t id,
				 const struct fault *f)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobRoundEnd end = SHARDD__V1__JOB_ROUND_END__INIT;

	end.id = id;
	end.code = f->code;
	end.text = (char *)f->text;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ROUND_END;
	m.round_end = &end;
	cluster_round_reply(to, label, &m);
}

/* The leader: a node asks for one. */
static struct cluster_round *cluster_round_lead_for(struct cluster_job *cj, struct peer *from,
						    const Shardd__V1__JobRoundAsk *m,
						    struct fault *f)
{
	struct job *job = cluster_job_of(cj);
	const Shardd__V1__JobRoundPlan *p = m->plan;
	const struct saving_options save = {
		.path = p->path,
		.bytes_per_s = p->bytes_per_s,
		.keep = p->keep,
		.deadline_us = m->timeout_ms && m->timeout_ms < UINT32_MAX
				       ? clock_now_us() + m->timeout_ms * 1000u
				       : UINT64_MAX,
	};
	const struct loading_options load = { p->path, p->has_step, p->step };
	struct round_options o = { .id = m->id, .loads = p->loads, .save = &save, .load = &load };
	struct cluster_round *cr = NULL;

	if (!job || !cj->epoch.order || !cj->epoch.peers || !cluster_has_part(cj, from))
		fault_set(f, FAULT_ABORTED, NULL, "node %s does not lead an epoch of job '%s' now",
			  cj->c->node, cj->label);
	else if (cluster_round_running(cj->c, job, p->loads))
		fault_set(f, FAULT_STATE, NULL,
			  "a checkpoint of job '%s' is being %s: wait for its end (shardctl status "
			  "shows how far it is)",
			  cj->label, p->loads ? "loaded" : "made");
	else if (!(cr = cluster_round_lead(cj, job, &o)))
		fault_errno(f, -ENOMEM, "beginning a checkpoint");
	return cr;
}

static void cluster_round_on_ask(struct cluster_job *cj, struct peer *from,
				 const Shardd__V1__JobRoundAsk *m)
{
	struct fault f = FAULT_NULL;
	struct cluster_round *cr;

	if (!m->id || !cluster_round_plan_is_valid(m->plan) || m->plan->memory) {
		peer_end(from, "it has asked for a checkpoint that cannot be");
		return;
	}
	cr = cluster_round_lead_for(cj, from, m, &f);
	if (cr)
		cluster_round_begin(cr);
	else
		cluster_round_refuse(from, cj->label, m->id, &f);
}

/* The first phase, at a node that has not asked for it. */
static struct cluster_round *cluster_round_follow(struct cluster_job *cj, struct peer *from,
						  const Shardd__V1__JobRoundPhase *m)
{
	struct job *job = cluster_job_of(cj);
	struct cluster_round *cr, *other;
	struct fault f = FAULT_NULL;

	if (!job || !job_is_across(job) || from != cluster_to_leader(cj) || !m->plan)
		return NULL;
	other = cluster_round_running(cj->c, job, m->plan->loads);
	fault_set(&f, FAULT_STATE, NULL,
		  "another checkpoint of job '%s' is being %s: wait for its end (shardctl status "
		  "shows how far it is)",
		  cj->label, m->plan->loads ? "loaded" : "made");
	if (!m->plan->memory && other && other->round->state == ROUND_ASKED)
		round_end_here(other->round, &f);
	cr = cluster_round_new(cj->c, cj->label, 1);
	if (!cr)
		return NULL;
	cr->peers[0] = from;
	cr->epoch = cj->epoch.number;
	cluster_round_note_before(cr, cj);
	cr->round = round_follow(job, &cluster_round_ops, cj->epoch.leader, m);
	if (cr->round) {
		list_append(&cj->c->rounds, &cr->link);
		return cr;
	}
	cluster_round_free(cr);
	return NULL;
}

static bool cluster_round_phase_is_valid(const struct cluster_job *cj,
					 const Shardd__V1__JobRoundPhase *m)
{
	const struct job *job = cluster_job_of(cj);
	const struct span *s = job ? job->across.span : NULL;

	return m->id && (!m->plan || cluster_round_plan_is_valid(m->plan)) && s &&
	       cj->epoch.number && m->nodes == cj->epoch.n_nodes && m->nodes == s->n_nodes &&
	       m->self == s->self;
}

static void cluster_round_on_phase(struct cluster *c, struct cluster_job *cj, struct peer *from,
				   const char *label, const Shardd__V1__JobRoundPhase *m)
{
	struct cluster_round *cr = cluster_round_by_id(c, label, m->id);
	struct fault f = FAULT_NULL;

	if (cr && (cr->round->leads || cr->peers[0] != from))
		return;
	if (!cr || cr->round->state == ROUND_ASKED) {
		if (!cj || !cluster_round_phase_is_valid(cj, m)) {
			fault_set(&f, FAULT_ABORTED, NULL, "it is not in this epoch of the job");
			cluster_round_decline(from, label, m, &f);
			return;
		}
		cr = cr ? cr : cluster_round_follow(cj, from, m);
	}
	if (cr)
		round_on_phase(cr->round, m);
}

void cluster_on_round(struct cluster *c, struct peer *from, const Shardd__V1__JobMessage *m)
{
	struct cluster_job *cj = cluster_find(c, m->job);
	struct cluster_round *cr = NULL;
	unsigned node;

	switch (m->body_case) {
	case SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ASK:
		if (cj)
			cluster_round_on_ask(cj, from, m->round_ask);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_ROUND_PHASE:
		cluster_round_on_phase(c, cj, from, m->job, m->round_phase);
		return;
	case SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ANSWER:
		cr = cluster_round_by_id(c, m->job, m->round_answer->id);
		break;
	default:
		cr = cluster_round_by_id(c, m->job, m->round_end->id);
		break;
	}
	node = cr ? cluster_round_node(cr, from) : 0;
	if (!cr || node == cr->n)
		return;
	if (m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_ROUND_ANSWER)
		round_on_answer(cr->round, node, m->round_answer);
	else
		round_on_end(cr->round, node, m->round_end);
}

/* ------------------------------------------------------------------- what may happen */

void cluster_rounds_peer_gone(struct cluster *c, const struct peer *p, const char *why)
{
	struct cluster_round *cr, *tmp;

	list_for_each (cr, tmp, &c->rounds, link) {
		unsigned node = cluster_round_node(cr, p);

		if (node == cr->n)
			continue;
		cr->peers[node] = NULL;
		round_lost(cr->round, cr->round->leads ? node : cr->round->leader, why);
	}
}

void cluster_rounds_epoch_ended(struct cluster_job *cj, const char *why)
{
	struct cluster_round *cr, *tmp;

	cj->epoch.held = false; /* it is not begun any more */
	list_for_each (cr, tmp, &cj->c->rounds, link)
		if (strcmp(cr->label, cj->label) == 0)
			round_epoch_ended(cr->round, why);
}

/* The job goes back to replicas: none are made meanwhile. */
void cluster_rounds_restore(struct cluster_job *cj)
{
	struct cluster_round *cr, *tmp;
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "job '%s' goes back to its last replicas", cj->label);
	list_for_each (cr, tmp, &cj->c->rounds, link)
		if (cr->round->memory && strcmp(cr->label, cj->label) == 0)
			round_end_here(cr->round, &f);
}

void cluster_rounds_tick(struct cluster *c, uint64_t now_us)
{
	struct cluster_round *cr, *tmp;

	list_for_each (cr, tmp, &c->rounds, link)
		if (cr->round->state == ROUND_OVER && !cr->begins && !cr->copy && !cr->posted) {
			cluster_round_free(cr);
		} else {
			if (cr->waits)
				cluster_round_begin(cr);
			if (cr->copy)
				cr->round->copied = cluster_copy_bytes(cr->copy);
			round_tick(cr->round, now_us);
		}
}

void cluster_rounds_end(struct cluster *c)
{
	struct cluster_round *cr, *tmp;
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_UNAVAILABLE, NULL, "the daemon is shutting down");
	list_for_each (cr, tmp, &c->rounds, link)
		round_end_here(cr->round, &f);
}

void cluster_rounds_free(struct cluster *c)
{
	while (!list_empty(&c->rounds))
		cluster_round_free(list_first(&c->rounds, struct cluster_round, link));
}

/* ------------------------------------------------------------------------- the policy */

static void cluster_round_fill_policy(const struct job *job, Shardd__V1__JobPolicy *ret)
{
	const state_checkpoints *c = job->rec->checkpoints;

	ret->off = !c;
	if (!c)
		return;
	ret->path = c->path;
	ret->every_steps = c->every_steps;
	ret->every_s = c->every_s;
	ret->keep = c->keep;
	ret->bytes_per_s = c->bytes_per_s;
}

void cluster_policy(struct job *job)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobPolicy policy = SHARDD__V1__JOB_POLICY__INIT;

	if (!cj || !cj->epoch.order)
		return;
	cluster_round_fill_policy(job, &policy);
	m.epoch = cj->epoch.number;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_POLICY;
	m.policy = &policy;
	for (unsigned i = 0; cj->epoch.peers && i < cj->epoch.n_nodes; i++)
		cluster_send(cj, cj->epoch.peers[i], &m);
	if (!cj->epoch.peers)
		cluster_send(cj, cluster_to_leader(cj), &m);
}

void cluster_on_policy(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobMessage *m)
{
	state_checkpoints c = SHARDD__STATE__V1__CHECKPOINTS__INIT;
	struct job *job = cluster_job_of(cj);
	struct fault f = FAULT_NULL;

	if (!job || !m->epoch || m->epoch != cj->epoch.number || !cluster_has_part(cj, from))
		return;
	if (!m->policy->off && (*m->policy->path != '/' || strlen(m->policy->path) >= PATH_MAX)) {
		peer_end(from, "it has sent a policy of checkpoints that cannot be");
		return;
	}
	c.path = m->policy->path;
	c.every_steps = m->policy->every_steps;
	c.every_s = m->policy->every_s;
	c.keep = m->policy->keep;
	c.bytes_per_s = m->policy->bytes_per_s;
	if (policy_take(job, m->policy->off ? NULL : &c, &f)) {
		log_error("cluster", "policy not taken job=%s why=\"%s\"", cj->label, f.text);
		job_epoch_end(job, &f); /* the nodes compare theirs when they join again */
	} else if (cj->epoch.peers) {
		cluster_policy(job);
	}
}
