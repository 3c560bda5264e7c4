/*
 * What is done to a job on all its nodes: it is deleted, or drains. The node that is asked finds the job's
 * leader, or becomes it, and asks it. The leader has each node that the job was on do its part, and says
 * which of them it has not reached. A job that trainers are in is deleted only by force: so the leader
 * counts them on all nodes first, and forms no epoch from then on.
 *
 *   SEEKS --we lead--> FINDS --where they are--> COUNTS --nobody is in it--> DOES --> over
 *     '--another leads--> ASKED --its answer--> over
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/text.h"
#include "job/base.h"
#include "job/saving.h"

/* All of it takes less than a call of shardctl may take. */
#define ACT_SEEK_US  4000000u
#define ACT_ASKED_US 8000000u
#define ACT_STAGE_US 2000000u

enum act_stage { ACT_SEEKS, ACT_ASKED, ACT_FINDS, ACT_COUNTS, ACT_DOES };

/* A node other than this one. */
struct act_node {
	char name[SPAN_NAME_BYTES], at[CLUSTER_AT_BYTES];
	bool asked, dialled, answered;
	char why[256];  /* it has not done its part; "": it has, or will */
	char said[256]; /* why not yet: the end of its epoch is under way to it */
};

struct cluster_act {
	struct cluster_job *cj;
	uint64_t id;
	char origin[SPAN_NAME_BYTES]; /* the node that was asked; "": this one */
	uint64_t origin_id;           /* its number of it */
	char leader[SPAN_NAME_BYTES]; /* ASKED: the node that leads the job */
	bool drain, force;
	bool gone;     /* the job is deleted here: the leader has said so, or a call */
	uint8_t stage; /* enum act_stage */
	uint64_t until_us;
	struct act_node *nodes; /* owned */
	size_t n;
	struct coord_call call;
	struct list waits; /* of struct cluster_acting */
	struct fault f;
	uint32_t ranks;
	uint64_t bytes;
};

static const char *cluster_act_verb(const struct cluster_act *a)
{
	return a->drain ? "drain" : "delete";
}

/* --------------------------------------------------------------------------- its nodes */

static struct act_node *cluster_act_node(const struct cluster_act *a, const char *name)
{
	for (size_t i = 0; i < a->n; i++)
		if (strcmp(a->nodes[i].name, name) == 0)
			return &a->nodes[i];
	return NULL;
}

static struct act_node *cluster_act_add(struct cluster_job *cj, struct cluster_act *a,
					const char *name)
{
	struct act_node *n = cluster_act_node(a, name), *grown;

	if (n || a->n == SPAN_MAX_NODES || strcmp(name, cj->c->node) == 0)
		return n;
	grown = realloc(a->nodes, (a->n + 1) * sizeof(*grown));
	if (!grown) {
		fault_errno(&a->f, -ENOMEM, "noting a job's nodes");
		return NULL;
	}
	a->nodes = grown;
	n = &a->nodes[a->n++];
	*n = (struct act_node){ 0 };
	text_copy(n->name, sizeof(n->name), name);
	return n;
}

/* The nodes of its last epoch, and those that want to be in the next one. */
static void cluster_act_list(struct cluster_job *cj, struct cluster_act *a)
{
	const struct job *job = cluster_job_of(cj);
	const struct span *span = job ? job->across.span : NULL;
	struct cluster_node *n, *tmp;

	for (unsigned i = 0; span && i < span->n_nodes; i++)
		(void)cluster_act_add(cj, a, span->nodes[i].name);
	for (unsigned i = 0; i < cj->epoch.n_nodes && cj->epoch.names; i++)
		(void)cluster_act_add(cj, a, cj->epoch.names[i]);
	list_for_each (n, tmp, &cj->nodes, link)
		(void)cluster_act_add(cj, a, n->name);
	if (*a->origin)
		(void)cluster_act_add(cj, a, a->origin);
}

/* ----------------------------------------------------------------------------- the end */

static void cluster_act_free(struct cluster_act *a)
{
	coord_cancel(&a->call);
	free(a->nodes);
	free(a);
}

/* To the node that has asked. */
static void cluster_act_answer(struct cluster_job *cj, const struct cluster_act *a)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobActed acted = SHARDD__V1__JOB_ACTED__INIT;
	Shardd__V1__JobMissed *missed = calloc(a->n + 1, sizeof(*missed));
	Shardd__V1__JobMissed **list = calloc(a->n + 1, sizeof(*list));

	for (size_t i = 0; missed && list && i < a->n; i++) {
		if (!*a->nodes[i].why)
			continue;
		list[acted.n_missed] = &missed[acted.n_missed];
		shardd__v1__job_missed__init(list[acted.n_missed]);
		list[acted.n_missed]->node = a->nodes[i].name;
		list[acted.n_missed++]->why = (char *)a->nodes[i].why;
	}
	acted.id = a->origin_id;
	acted.what = SHARDD__V1__JOB_ACT_WHAT__JOB_ACT_WHAT_ALL;
	acted.code = a->f.code;
	acted.text = (char *)a->f.text;
	acted.ranks = a->ranks;
	acted.bytes = a->bytes;
	acted.missed = list;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ACTED;
	m.acted = &acted;
	if (missed && list) /* else its deadline ends it */
		cluster_send(cj, peers_find(cj->c->peers, a->origin), &m);
	free(list);
	free(missed);
}

/* To those that wait here. */
static void cluster_act_tell(const struct cluster_act *a, struct list *waits)
{
	struct cluster_missed *missed = calloc(a->n + 1, sizeof(*missed));
	size_t n = 0;

	for (size_t i = 0; missed && i < a->n; i++)
		if (*a->nodes[i].why)
			missed[n++] = (struct cluster_missed){ a->nodes[i].name, a->nodes[i].why };
	while (!list_empty(waits)) {
		struct cluster_acting *w = list_first(waits, struct cluster_acting, link);

		list_unlink(&w->link);
		w->f = a->f;
		if (!missed && !w->f.code)
			fault_errno(&w->f, -ENOMEM, "noting the nodes that were not reached");
		w->ranks = a->ranks;
		w->bytes = a->bytes;
		w->missed = missed;
		w->n_missed = n;
		w->done(w);
	}
	free(missed);
}

static void cluster_act_end(struct cluster_job *cj)
{
	struct list waits = LIST_INIT(waits);
	struct cluster_act *a = cj->act;

	cj->act = NULL;
	list_take_all(&waits, &a->waits);
	if (*a->origin)
		cluster_act_answer(cj, a);
	cluster_act_tell(a, &waits);
	cluster_act_free(a);
}

void cluster_act_drop(struct cluster_job *cj)
{
	if (!cj->act)
		return;
	fault_set(&cj->act->f, FAULT_UNAVAILABLE, NULL, "the daemon is shutting down");
	*cj->act->origin = '\0';
	cluster_act_end(cj);
}

/* ----------------------------------------------------------------------- a node's part */

/* Return: 0 or a fault code. */
static int cluster_act_do(struct cluster *c, const char *label, bool drain, bool force,
			  uint32_t *ret_ranks, uint64_t *ret_bytes, struct fault *f)
{
	struct job *job = htab_find(&c->jobs->names, label);

	*ret_ranks = 0;
	*ret_bytes = 0;
	if (!job)
		return 0; /* it is gone already */
	if (drain) {
		*ret_ranks = job_drain(job);
		return 0;
	}
	if (base_check_delete(job, force, f))
		return f->code;
	if (force || !job->present)
		saving_cancel(job);
	return job_delete(job, force, ret_bytes, f);
}

/* Here. */
static void cluster_act_here(struct cluster_job *cj, struct cluster_act *a)
{
	uint32_t ranks;
	uint64_t bytes;

	if (!a->drain && !cluster_job_of(cj)) /* this node leads the job, and has no part of it */
		cluster_erase(cj);
	(void)cluster_act_do(cj->c, cj->label, a->drain, a->force, &ranks, &bytes, &a->f);
	a->ranks += ranks;
	a->bytes += bytes;
}

/* Does @from lead the job, as far as this node knows? It has read in the store that it does. Between epochs this
 * node may still know one that has led it before. */
static bool cluster_act_may(const struct cluster_job *cj, const struct peer *from)
{
	const struct peer *leader = cj ? cluster_to_leader(cj) : NULL;

	if (!cj || !cj->epoch.number)
		return true;
	return !cj->epoch.peers && (!leader || strcmp(peer_name(leader), peer_name(from)) == 0);
}

/* COUNT, DO: from the leader. */
static void cluster_act_part(struct cluster *c, struct cluster_job *cj, struct peer *from,
			     const Shardd__V1__JobMessage *order)
{
	struct cluster_job none = { .c = c };
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobActed acted = SHARDD__V1__JOB_ACTED__INIT;
	const Shardd__V1__JobAct *act = order->act;
	const struct job *job = htab_find(&c->jobs->names, order->job);
	struct fault f = FAULT_NULL;

	text_copy(none.label, sizeof(none.label), order->job);
	acted.id = act->id;
	acted.what = act->what;
	if (!cluster_act_may(cj, from)) {
		fault_set(&f, FAULT_UNAVAILABLE, NULL, "on this node another node leads the job");
	} else if (act->what == SHARDD__V1__JOB_ACT_WHAT__JOB_ACT_WHAT_COUNT) {
		acted.ranks = job ? job->present : 0;
	} else {
		(void)cluster_act_do(c, order->job, act->drain, act->force, &acted.ranks,
				     &acted.bytes, &f);
		log_info("cluster", "%s job=%s by=%s forced=%s ranks=%u bytes=%llu why=\"%s\"",
			 act->drain ? "draining" : "deleted", none.label, peer_name(from),
			 act->force ? "yes" : "no", acted.ranks, (unsigned long long)acted.bytes,
			 f.text);
	}
	acted.code = f.code;
	acted.text = f.text;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ACTED;
	m.acted = &acted;
	cluster_send(&none, from, &m);
}

/* ------------------------------------------------------------------------- the leader's */

static void cluster_act_order(struct cluster_job *cj, struct peer *to, Shardd__V1__JobActWhat what)
{
	const struct cluster_act *a = cj->act;
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobAct act = SHARDD__V1__JOB_ACT__INIT;

	act.id = a->id;
	act.what = what;
	act.drain = a->drain;
	act.force = a->force;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ACT;
	m.act = &act;
	cluster_send(cj, to, &m);
}

/* Ask @n, or dial it. */
static void cluster_act_reach(struct cluster_job *cj, struct act_node *n)
{
	struct peer *p =
		cluster_survey_peer(cj, n->name); /* on which the end of its epoch comes later */
	struct fault f = FAULT_NULL;

	if (!p)
		p = peers_find(cj->c->peers, n->name);
	if (p) {
		n->asked = true;
		cluster_act_order(cj, p,
				  cj->act->stage == ACT_COUNTS
					  ? SHARDD__V1__JOB_ACT_WHAT__JOB_ACT_WHAT_COUNT
					  : SHARDD__V1__JOB_ACT_WHAT__JOB_ACT_WHAT_DO);
	} else if (!*n->at) {
		text_copy(n->why, sizeof(n->why),
			  "it is no member of the cluster now. What it has, if it comes back, is "
			  "refused beside other nodes of a job of that name");
	} else if (!n->dialled) {
		n->dialled = true;
		if (cluster_seek_connect(cj->c, n->name, n->at, &f))
			text_copy(n->why, sizeof(n->why), f.text);
	}
}

/* Return: all have answered, or will not. */
static bool cluster_act_reach_all(struct cluster_job *cj, uint64_t now_us)
{
	struct cluster_act *a = cj->act;
	bool all = true;

	for (size_t i = 0; i < a->n; i++) {
		struct act_node *n = &a->nodes[i];

		if (!n->asked && !*n->why)
			cluster_act_reach(cj, n);
		if (!n->answered && !*n->why && now_us >= a->until_us)
			text_copy(n->why, sizeof(n->why),
				  *n->said ? n->said : "it has not answered within 2 s");
		all = all && (n->answered || *n->why);
	}
	return all;
}

static void cluster_act_next(struct cluster_job *cj, enum act_stage stage)
{
	struct cluster_act *a = cj->act;

	a->stage = stage;
	a->until_us = clock_now_us() + ACT_STAGE_US;
	for (size_t i = 0; i < a->n; i++)
		a->nodes[i].asked = a->nodes[i].answered = false;
	if (stage != ACT_DOES)
		return;
	(void)cluster_act_reach_all(cj, 0); /* before the end of its epoch here */
	cluster_act_here(cj, a);
}

static void cluster_act_begin(struct cluster_job *cj)
{
	cluster_act_next(cj, cj->act->drain || cj->act->force ? ACT_DOES : ACT_COUNTS);
}

static void cluster_act_on_members(struct coord_call *call, const struct coord_reply *r)
{
	struct cluster_act *a = CONTAINER_OF(call, struct cluster_act, call);

	for (size_t i = 0; r->status == COORD_OK && i < r->n; i++) {
		const struct coord_kv *kv = &r->kvs[i];
		struct act_node *n = cluster_act_node(a, kv->key + strlen("members/"));

		if (n && kv->bytes < sizeof(n->at)) {
			memcpy(n->at, kv->value, kv->bytes);
			n->at[kv->bytes] = '\0';
		}
	}
	a->until_us = 0; /* the next tick goes on */
}

/* Nodes that the job has left have trainers of it no more, but may have a part. */
static void cluster_act_read_epoch(struct cluster_job *cj, const struct coord_kv *kv)
{
	char *value = strndup((const char *)kv->value, kv->bytes), name[SPAN_NAME_BYTES];
	const char *next = value ? cluster_placed_begin(value) : "";
	uint32_t ranks;

	while (cluster_placed_next(&next, name, &ranks))
		if (ranks || !cj->act->drain)
			(void)cluster_act_add(cj, cj->act, name);
	free(value);
}

/* The nodes of the last epoch are known: where are those that have no link? */
static void cluster_act_on_epoch(struct coord_call *call, const struct coord_reply *r)
{
	struct cluster_act *a = CONTAINER_OF(call, struct cluster_act, call);
	struct coord_txn t = { .read = "members/", .prefix = true };
	struct cluster *c = a->cj->c;
	bool linked = true;

	if (r->status == COORD_OK && r->n)
		cluster_act_read_epoch(a->cj, &r->kvs[0]);
	for (size_t i = 0; i < a->n; i++)
		linked = linked && peers_find(c->peers, a->nodes[i].name);
	a->call.done = cluster_act_on_members;
	if (linked || coord_txn(c->coord, &a->call, &t, ACT_STAGE_US / 1000) < 0)
		a->until_us = 0;
}

/* This node leads the job. */
static void cluster_act_lead(struct cluster_job *cj)
{
	char epoch[CLUSTER_KEY_BYTES];
	struct coord_txn t = { .read = epoch };
	struct cluster_act *a = cj->act;

	cluster_act_list(cj, a);
	cluster_key(cj, "epoch", epoch);
	a->stage = ACT_FINDS;
	a->until_us = clock_now_us() + ACT_STAGE_US;
	a->call.done = cluster_act_on_epoch;
	if (coord_txn(cj->c->coord, &a->call, &t, ACT_STAGE_US / 1000) < 0)
		a->until_us = 0;
}

/* Trainers are in it. */
static bool cluster_act_is_refused(struct cluster_job *cj)
{
	const struct job *job = cluster_job_of(cj);
	struct cluster_act *a = cj->act;
	uint32_t ranks = a->ranks + (job ? job->present : 0);

	a->ranks = 0;
	if (!ranks)
		return false;
	fault_set(&a->f, FAULT_STATE, NULL,
		  "job '%s' has %u trainers on its nodes: drain it first, or force the deletion",
		  cj->label, ranks);
	return true;
}

/* ------------------------------------------------------------- the node that is asked */

/* No leader was found: what is here is done. */
static void cluster_act_alone(struct cluster_job *cj)
{
	struct cluster_act *a = cj->act;
	struct act_node *n;

	cluster_act_list(cj, a);
	for (size_t i = 0; i < a->n; i++) {
		n = &a->nodes[i];
		snprintf(n->why, sizeof(n->why), "it was not asked: %.200s", cj->why);
	}
	cluster_act_here(cj, a);
	cluster_act_end(cj);
}

static void cluster_act_seek(struct cluster_job *cj, uint64_t now_us)
{
	struct peer *leader = cluster_to_leader(cj);
	struct cluster_act *a = cj->act;

	if (cj->epoch.peers || cj->state == CLUSTER_LEADS) {
		cluster_act_lead(cj);
	} else if (leader && (cj->state == CLUSTER_FOLLOWS || cj->state == CLUSTER_RUNS)) {
		a->stage = ACT_ASKED;
		text_copy(a->leader, sizeof(a->leader), peer_name(leader));
		cluster_act_order(cj, leader, SHARDD__V1__JOB_ACT_WHAT__JOB_ACT_WHAT_ALL);
	} else if (now_us >= a->until_us - (ACT_ASKED_US - ACT_SEEK_US)) {
		cluster_act_alone(cj);
	}
}

static void cluster_act_await(struct cluster_job *cj, uint64_t now_us)
{
	struct cluster_act *a = cj->act;

	if (now_us >= a->until_us) {
		fault_set(&a->f, FAULT_DEADLINE, NULL,
			  "node %s, which leads job '%s', has not said within %u s that it is "
			  "%s: ask again, and look on each node (shardctl jobs)",
			  a->leader, cj->label, ACT_ASKED_US / 1000000,
			  a->drain ? "draining" : "deleted");
		cluster_act_end(cj);
	} else if (!cluster_to_leader(cj) && !a->gone) {
		a->stage = ACT_SEEKS; /* it is gone: the next one is asked */
	}
}

void cluster_act_tick(struct cluster_job *cj, uint64_t now_us)
{
	switch (cj->act ? cj->act->stage : -1) {
	case ACT_SEEKS:
		cluster_act_seek(cj, now_us);
		break;
	case ACT_ASKED:
		cluster_act_await(cj, now_us);
		break;
	case ACT_FINDS:
		if (now_us < cj->act->until_us)
			break;
		coord_cancel(&cj->act->call);
		cluster_act_begin(cj);
		break;
	case ACT_COUNTS:
		if (!cluster_act_reach_all(cj, now_us))
			break;
		if (cluster_act_is_refused(cj))
			cluster_act_end(cj);
		else
			cluster_act_next(cj, ACT_DOES);
		break;
	case ACT_DOES:
		if (cluster_act_reach_all(cj, now_us))
			cluster_act_end(cj);
		break;
	default:
		break;
	}
}

void cluster_act_job_gone(struct cluster_job *cj)
{
	if (cj->act)
		cj->act->gone = true;
}

bool cluster_act_seeks(const struct cluster_job *cj)
{
	return cj->act && cj->act->stage == ACT_SEEKS;
}

bool cluster_act_is_here(const struct cluster_job *cj)
{
	return cj->act && cj->act->stage >= ACT_FINDS;
}

static struct cluster_act *cluster_act_new(struct cluster_job *cj, bool drain, bool force)
{
	static uint64_t last;
	struct cluster_act *a = calloc(1, sizeof(*a));

	if (!a)
		return NULL;
	list_init(&a->waits);
	a->cj = cj;
	a->id = ++last;
	a->drain = drain;
	a->force = force;
	a->until_us = clock_now_us() + ACT_ASKED_US;
	cj->act = a;
	return a;
}

static int cluster_act_busy(const struct cluster_job *cj, struct fault *f)
{
	return fault_set(f, FAULT_STATE, NULL, "another call is about to %s job '%s': ask again",
			 cluster_act_verb(cj->act), cj->label);
}

enum res cluster_act(struct cluster_acting *w, struct job *job, struct fault *f)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;
	struct cluster_act *a = cj ? cj->act : NULL;

	list_init(&w->link);
	if (!the_cluster || the_cluster->closing || (!cj && !job->rec->incarnation))
		return RES_DONE;
	if (a && (*a->origin || a->drain != w->drain || a->force != w->force))
		return res_of(cluster_act_busy(cj, f));
	if (!cj)
		cj = cluster_job_new(the_cluster, job->label);
	if (cj && !a)
		a = cluster_act_new(cj, w->drain, w->force);
	if (!a)
		return res_of(fault_errno(f, -ENOMEM, "asking the nodes of a job"));
	list_append(&a->waits, &w->link);
	return RES_WAIT;
}

void cluster_act_cancel(struct cluster_acting *w)
{
	list_unlink(&w->link);
}

/* ------------------------------------------------------------------------- messages */

/* A node asks this one, which leads the job as it believes. */
static void cluster_act_on_all(struct cluster *c, struct cluster_job *cj, struct peer *from,
			       const Shardd__V1__JobMessage *m)
{
	struct cluster_act refused = { .origin_id = m->act->id }, *a = NULL;

	text_copy(refused.origin, sizeof(refused.origin), peer_name(from));
	if (!cj || !cluster_leads(cj)) {
		cluster_deny(c, from, m->job); /* it asks the next one */
		return;
	}
	if (cj->act)
		(void)cluster_act_busy(cj, &refused.f);
	else if (!(a = cluster_act_new(cj, m->act->drain, m->act->force)))
		fault_errno(&refused.f, -ENOMEM, "asking the nodes of a job");
	if (a) {
		text_copy(a->origin, sizeof(a->origin), peer_name(from));
		a->origin_id = m->act->id;
		return; /* the next tick begins */
	}
	cluster_act_answer(cj, &refused);
}

void cluster_on_act(struct cluster *c, struct peer *from, const Shardd__V1__JobMessage *m)
{
	struct cluster_job *cj = cluster_find(c, m->job);

	if (m->act->what == SHARDD__V1__JOB_ACT_WHAT__JOB_ACT_WHAT_ALL)
		cluster_act_on_all(c, cj, from, m);
	else if (m->act->what == SHARDD__V1__JOB_ACT_WHAT__JOB_ACT_WHAT_COUNT ||
		 m->act->what == SHARDD__V1__JOB_ACT_WHAT__JOB_ACT_WHAT_DO)
		cluster_act_part(c, cj, from, m);
	else
		peer_end(from, "it wants something done to a job that nobody knows");
}

/* The leader's answer to this node. */
static void cluster_act_over(struct cluster_job *cj, const Shardd__V1__JobActed *acted)
{
	struct cluster_act *a = cj->act;

	for (size_t i = 0; i < acted->n_missed; i++) {
		struct act_node *n = cluster_act_add(cj, a, acted->missed[i]->node);

		if (n)
			snprintf(n->why, sizeof(n->why), "%.250s",
				 *acted->missed[i]->why ? acted->missed[i]->why : "no reason");
	}
	a->ranks = acted->ranks;
	a->bytes = acted->bytes;
	if (acted->code)
		fault_set(&a->f, acted->code < _FAULT_N ? acted->code : FAULT_INTERNAL, NULL, "%s",
			  acted->text);
	cluster_act_end(cj);
}

void cluster_on_acted(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobActed *acted)
{
	struct cluster_act *a = cj->act;
	bool all = acted->what == SHARDD__V1__JOB_ACT_WHAT__JOB_ACT_WHAT_ALL;
	struct act_node *n = a ? cluster_act_node(a, peer_name(from)) : NULL;

	if (!a || a->id != acted->id)
		return; /* it is late */
	if (all && a->stage == ACT_ASKED && strcmp(a->leader, peer_name(from)) == 0) {
		cluster_act_over(cj, acted);
		return;
	}
	if (all || a->stage < ACT_COUNTS || !n || !n->asked || n->answered || *n->why ||
	    (acted->what == SHARDD__V1__JOB_ACT_WHAT__JOB_ACT_WHAT_COUNT) !=
		    (a->stage == ACT_COUNTS))
		return;
	if (acted->code == FAULT_UNAVAILABLE) {
		/* the next tick asks again, until its time is up */
		snprintf(n->said, sizeof(n->said), "%.250s", acted->text);
		n->asked = false;
		return;
	}
	n->answered = true;
	a->ranks += acted->ranks;
	a->bytes += acted->bytes;
	if (acted->code)
		snprintf(n->why, sizeof(n->why), "%.250s",
			 *acted->text ? acted->text : "no reason");
}

void cluster_acts_peer_gone(struct cluster *c, const struct peer *p, const char *why)
{
	struct cluster_job *cj, *tmp;

	list_for_each (cj, tmp, &c->all, link) {
		struct act_node *n = cj->act ? cluster_act_node(cj->act, peer_name(p)) : NULL;

		if (n && cj->act->stage >= ACT_COUNTS && (n->asked || n->dialled) && !n->answered &&
		    !*n->why && !peers_find(c->peers, n->name))
			snprintf(n->why, sizeof(n->why), "%.250s", why);
	}
}
