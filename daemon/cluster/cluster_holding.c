/* What the nodes of a job have of it, what is in doubt, and the ruling on that (docs/nodes.md). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "cluster/cluster_impl.h"
#include "core/fnv.h"
#include "job/kept.h"
#include "job/launched.h"
#include "job/policy.h"

static uint64_t cluster_holding_settings(const state_job *rec)
{
	uint64_t h = FNV_BEGIN;

	h = fnv_add(h, rec->lifetime);
	h = fnv_add(h, rec->resume);
	h = fnv_add(h, rec->allow_torn);
	h = fnv_add(h, rec->ipc);
	h = fnv_add(h, rec->min_ranks);
	h = fnv_add(h, rec->max_ranks);
	h = fnv_add(h, rec->join_grace_ms);
	return fnv_add(h, rec->is_private);
}

void cluster_holding_deinit(struct cluster_holding *h)
{
	free(h->applied);
	h->applied = NULL;
	h->n_applied = 0;
}

/* Those of the last epoch with any. Return: 0 or -ENOMEM. */
static int cluster_holding_note_applied(const state_job *rec, struct cluster_holding *h)
{
	uint64_t last = 0;

	h->applied = calloc(rec->n_applied + 1, sizeof(*h->applied));
	for (size_t i = 0; h->applied && i < rec->n_applied; i++)
		last = rec->applied[i]->epoch > last ? rec->applied[i]->epoch : last;
	for (size_t i = 0; h->applied && last && i < rec->n_applied; i++) {
		const state_applied *a = rec->applied[i];

		if (a->epoch == last)
			h->applied[h->n_applied++] =
				(struct job_step_id){ a->epoch, a->group, a->number };
	}
	return h->applied ? 0 : -ENOMEM;
}

/* The newest ones, if there are more. */
static void cluster_holding_replicas(const struct job *job, struct cluster_holding *ret)
{
	struct list *all = (struct list *)&job->across.replicas;
	struct replica *r, *tmp;

	list_for_each (r, tmp, all, link) {
		struct cluster_part *to = &ret->replicas[ret->n_replicas];

		if (!r->whole)
			continue;
		if (ret->n_replicas == CLUSTER_MAX_REPLICAS)
			memmove(ret->replicas, ret->replicas + 1,
				--ret->n_replicas * sizeof(*ret->replicas)),
				to--;
		to->id = (struct replica_id){ r->step, r->layout, r->part, r->parts };
		to->epoch = r->epoch;
		memcpy(to->bytes, r->bytes, sizeof(to->bytes));
		ret->n_replicas++;
	}
}

/* A record of an earlier version does not say it. */
uint64_t cluster_holding_begun(const state_job *rec)
{
	return rec->begun ? rec->begun : rec->epoch;
}

int cluster_holding_of(const struct job *job, struct cluster_holding *ret)
{
	const state_job *rec = job->rec;

	*ret = (struct cluster_holding){ .world = launched_world(job),
					 .ranks = rec->world_size,
					 .min_ranks = rec->min_ranks,
					 .grace_ms = rec->join_grace_ms,
					 .units = job_units_alive(job),
					 .epoch = rec->epoch,
					 .begun = cluster_holding_begun(rec),
					 .incarnation = rec->incarnation,
					 .settings = cluster_holding_settings(rec),
					 .has_commit = rec->has_commit,
					 .step = rec->has_commit ? rec->step : 0,
					 .torn = rec->torn,
					 .gpus = node_has_gpus(job->node) };
	ret->policy = policy_hash(rec->checkpoints);
	if (ret->units && job->across.span)
		ret->layout = job_layout(job);
	cluster_holding_replicas(job, ret);
	ret->has_position = ret->units && doubt_position_dropped(job, &ret->position);
	doubt_open_of(job, &ret->doubt);
	if (kept_at_commits(job)) /* without its commit it is dropped: doubt_resolve */
		ret->doubt.has_prepared = false;
	ret->has_after = ret->doubt.has_prepared && doubt_position_applied(job, &ret->after);
	return cluster_holding_note_applied(rec, ret);
}

/* What is in doubt, a commit or a step, may be ruled to have taken effect. */
bool cluster_holding_is_at(const struct cluster_holding *h, uint64_t step, uint64_t layout)
{
	return h->units && !h->torn && !h->doubt.has_commit && !h->doubt.has_prepared &&
	       h->has_position && h->position == step && h->has_commit && h->step == step &&
	       h->layout == layout;
}

static bool cluster_holding_has_applied(const struct cluster_holding *h,
					const struct job_step_id *step)
{
	const struct doubt_ruling all = { .applied = h->applied, .n_applied = h->n_applied };

	return step->epoch && doubt_is_applied(&all, step);
}

static bool cluster_holding_completes_commit(const struct cluster_holding *h,
					     const struct doubt_ruling *r)
{
	const struct doubt_open *d = &h->doubt;

	return d->has_commit && r->has_commit && d->step == r->step && d->epoch == r->epoch;
}

/* What the node has when the ruling has ended its doubts, as doubt_resolve does. */
void cluster_holding_settle(struct cluster_holding *h, const struct doubt_ruling *r)
{
	const struct doubt_open *d = &h->doubt;

	if (cluster_holding_completes_commit(h, r)) {
		h->has_commit = h->has_position = true;
		h->step = h->position = d->step;
	} else if (d->has_prepared && doubt_is_applied(r, &d->prepared)) {
		h->has_position = h->has_after;
		h->position = h->after;
	}
}

static void cluster_holding_describe(const struct cluster_node *n, char *buf, size_t bytes)
{
	const struct cluster_holding *h = &n->holding;

	if (!h->units)
		snprintf(buf, bytes, "node %s has nothing of it", n->name);
	else if (h->torn || !h->has_position)
		snprintf(buf, bytes, "node %s has %u units at no known step", n->name, h->units);
	else
		snprintf(buf, bytes, "node %s has %u units at step %llu", n->name, h->units,
			 (unsigned long long)h->position);
}

/* Can they go on together? Return: 0 or a fault code. */
int cluster_holding_check_job(const struct cluster_job *cj, const struct cluster_node *a,
			      const struct cluster_node *b, struct fault *f)
{
	const struct cluster_holding *x = &a->holding, *y = &b->holding;

	if (x->gpus != y->gpus)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' has ranks on GPUs of node %s, and in host memory of "
				 "node %s: no engine connects them; start the daemons of both with "
				 "the same backend",
				 cj->label, (x->gpus ? a : b)->name, (x->gpus ? b : a)->name);
	if (x->world != y->world)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' has world size %u on node %s, and %u on node %s",
				 cj->label, x->world, a->name, y->world, b->name);
	if (x->settings != y->settings)
		return fault_set(
			f, FAULT_STATE, NULL,
			"job '%s' has other settings (lifetime, resume, allow_torn, ipc, "
			"private, min_ranks, max_ranks, join_grace_ms) on node %s than on node %s",
			cj->label, a->name, b->name);
	/* a node that has nothing of the job has no policy: that is not what is wrong with it */
	if (x->policy != y->policy && !x->units == !y->units)
		return fault_set(f, FAULT_STATE, NULL,
				 "job '%s' has another policy of checkpoints on node %s than on "
				 "node %s: set the same one on both (shardctl checkpoint policy)",
				 cj->label, a->name, b->name);
	return 0;
}

/* Are they at the same step, with the ruling? Return: 0 or a fault code. */
static int cluster_holding_check_step(const struct cluster_job *cj, const struct cluster_node *a,
				      const struct cluster_node *b, struct fault *f)
{
	const struct cluster_holding *x = &a->holding, *y = &b->holding;
	char has[2][160];

	if (x->units == y->units && x->torn == y->torn && x->has_commit == y->has_commit &&
	    x->step == y->step && x->has_position == y->has_position &&
	    (!x->has_position || x->position == y->position))
		return 0;
	cluster_holding_describe(a, has[0], sizeof(has[0]));
	cluster_holding_describe(b, has[1], sizeof(has[1]));
	return fault_set(f, FAULT_STATE, NULL,
			 "the nodes of job '%s' are not at the same step: %s, %s; delete the job "
			 "(shardctl job delete, on any of its nodes) and start it again",
			 cj->label, has[0], has[1]);
}

/* What is left of another job has numbers of epochs, and a doubt, that say nothing of this one. */
static bool cluster_holding_counts(const struct cluster_holding *h)
{
	return h->incarnation &&
	       (h->units || h->has_commit || h->doubt.has_commit || h->n_replicas);
}

static int cluster_holding_other_job(const struct cluster_job *cj, const char *node,
				     struct fault *f)
{
	return fault_set(
		f, FAULT_STATE, NULL,
		"node %s has the memory of an earlier job '%s', which was deleted on other "
		"nodes: delete it there, too (shardctl job delete), and start again",
		node, cj->label);
}

int cluster_holding_incarnation(struct cluster_job *cj, struct fault *f)
{
	struct cluster_node *n, *tmp;
	uint64_t is = cj->incarnation;

	list_for_each (n, tmp, &cj->nodes, link) {
		if (!cluster_holding_counts(&n->holding))
			continue;
		is = is ? is : n->holding.incarnation;
		if (is != n->holding.incarnation)
			return cluster_holding_other_job(cj, n->name, f);
	}
	while (!is)
		if (getrandom(&is, sizeof(is), 0) != sizeof(is))
			is = 0;
	cj->incarnation = is;
	return 0;
}

/* A step that @n has prepared and another node has applied. Invariant 5: all nodes of its group have it
 * prepared, or have applied it. */
static void cluster_holding_find_applied(struct cluster_job *cj, const struct cluster_node *n)
{
	const struct job_step_id *prepared = &n->holding.doubt.prepared;
	struct doubt_ruling *r = &cj->ruling;
	struct cluster_node *m, *tmp;
	bool found = false;

	if (!n->holding.doubt.has_prepared || cluster_holding_completes_commit(&n->holding, r))
		return;
	list_for_each (m, tmp, &cj->nodes, link)
		found = found || cluster_holding_has_applied(&m->holding, prepared);
	if (found && !doubt_is_applied(r, prepared))
		cj->ruled[r->n_applied++] = *prepared;
}

/* "STEP EPOCH" */
struct doubt_ruling cluster_holding_read_step(const struct coord_kv *kv)
{
	unsigned long long step, epoch;
	char text[64] = "";

	if (!kv || kv->bytes >= sizeof(text))
		return (struct doubt_ruling){ 0 };
	memcpy(text, kv->value, kv->bytes);
	if (sscanf(text, "%llu %llu", &step, &epoch) != 2)
		return (struct doubt_ruling){ 0 };
	return (struct doubt_ruling){ .has_commit = true, .step = step, .epoch = epoch };
}

static void cluster_holding_pack_step(const struct job_step_id *id, Shardd__V1__JobStep *ret)
{
	shardd__v1__job_step__init(ret);
	ret->epoch = id->epoch;
	ret->group = id->group;
	ret->number = id->number;
}

Shardd__V1__JobStep **cluster_holding_pack_steps(const struct job_step_id *ids, size_t n)
{
	Shardd__V1__JobStep **list = calloc(n + 1, sizeof(*list) + sizeof(**list));
	Shardd__V1__JobStep *steps = list ? (Shardd__V1__JobStep *)(list + n + 1) : NULL;

	for (size_t i = 0; list && i < n; i++) {
		list[i] = &steps[i];
		cluster_holding_pack_step(&ids[i], list[i]);
	}
	return list;
}

static void cluster_holding_pack_replicas(const struct cluster_holding *h,
					  Shardd__V1__JobHolding *at, struct cluster_packed *with)
{
	for (unsigned i = 0; i < h->n_replicas; i++) {
		const struct cluster_part *from = &h->replicas[i];
		Shardd__V1__JobReplica *to = &with->replicas[i];

		shardd__v1__job_replica__init(to);
		to->step = from->id.step;
		to->layout = from->id.layout;
		to->part = from->id.part;
		to->parts = from->id.parts;
		to->epoch = from->epoch;
		to->tensors = from->bytes[REPLICA_TENSORS];
		to->tail = from->bytes[REPLICA_TAIL];
		with->list[i] = to;
	}
	at->n_replicas = h->n_replicas;
	at->replicas = with->list;
}

void cluster_holding_pack(const struct cluster_holding *h, Shardd__V1__JobHolding *at,
			  struct cluster_packed *with, Shardd__V1__JobStep **applied)
{
	shardd__v1__job_holding__init(at);
	cluster_holding_pack_step(&h->doubt.prepared, &with->prepared);
	cluster_holding_pack_replicas(h, at, with);
	at->layout = h->layout;
	at->ranks = h->ranks;
	at->min_ranks = h->min_ranks;
	at->grace_ms = h->grace_ms;
	at->world = h->world;
	at->epoch = h->epoch;
	at->begun = h->begun;
	at->incarnation = h->incarnation;
	at->settings = h->settings;
	at->policy = h->policy;
	at->units = h->units;
	at->has_commit = h->has_commit;
	at->step = h->step;
	at->torn = h->torn;
	at->has_position = h->has_position;
	at->position = h->position;
	at->gpus = h->gpus;
	at->doubt_commit = h->doubt.has_commit;
	at->doubt_step = h->doubt.step;
	at->doubt_epoch = h->doubt.epoch;
	at->prepared = h->doubt.has_prepared ? &with->prepared : NULL;
	at->has_after = h->has_after;
	at->after = h->after;
	at->n_applied = h->n_applied;
	at->applied = applied;
}

static struct job_step_id cluster_holding_unpack_step(const Shardd__V1__JobStep *s)
{
	return s ? (struct job_step_id){ s->epoch, s->group, s->number }
		 : (struct job_step_id){ 0 };
}

/* Return: an array of the caller's; NULL without memory. */
static struct job_step_id *cluster_holding_unpack_steps(Shardd__V1__JobStep *const *steps, size_t n)
{
	struct job_step_id *ids = calloc(n + 1, sizeof(*ids));

	for (size_t i = 0; ids && i < n; i++)
		ids[i] = cluster_holding_unpack_step(steps[i]);
	return ids;
}

int cluster_holding_unpack(struct cluster_node *n, const Shardd__V1__JobHolding *s)
{
	n->holding = (struct cluster_holding){ .world = s->world,
					       .units = s->units,
					       .epoch = s->epoch,
					       .begun = s->begun ? s->begun : s->epoch,
					       .incarnation = s->incarnation,
					       .settings = s->settings,
					       .policy = s->policy,
					       .step = s->step,
					       .position = s->position,
					       .has_commit = s->has_commit,
					       .torn = s->torn,
					       .has_position = s->has_position,
					       .gpus = s->gpus,
					       .doubt = { .has_commit = s->doubt_commit,
							  .step = s->doubt_step,
							  .epoch = s->doubt_epoch,
							  .has_prepared = s->prepared,
							  .prepared = cluster_holding_unpack_step(
								  s->prepared) },
					       .has_after = s->has_after,
					       .layout = s->layout,
					       .ranks = s->ranks,
					       .min_ranks = s->min_ranks,
					       .grace_ms = s->grace_ms,
					       .after = s->after };
	for (size_t i = 0; i < s->n_replicas && i < CLUSTER_MAX_REPLICAS; i++) {
		const Shardd__V1__JobReplica *r = s->replicas[i];

		n->holding.replicas[n->holding.n_replicas++] = (struct cluster_part){
			{ r->step, r->layout, r->part, r->parts }, r->epoch, { r->tensors, r->tail }
		};
	}
	n->holding.applied = cluster_holding_unpack_steps(s->applied, s->n_applied);
	n->holding.n_applied = n->holding.applied ? s->n_applied : 0;
	return n->holding.applied ? 0 : -ENOMEM;
}

int cluster_holding_resolve(struct job *job, const Shardd__V1__JobBegin *b)
{
	struct job_step_id *steps = cluster_holding_unpack_steps(b->applied, b->n_applied);
	const struct doubt_ruling r = { .has_commit = b->has_commit,
					.step = b->step,
					.epoch = b->commit_epoch,
					.applied = steps,
					.n_applied = b->n_applied };

	if (!steps)
		return -ENOMEM;
	doubt_resolve(job, &r);
	free(steps);
	return 0;
}

static size_t cluster_holding_count(struct cluster_job *cj)
{
	struct cluster_node *n, *tmp;
	size_t count = 0;

	list_for_each (n, tmp, &cj->nodes, link)
		count++;
	return count;
}

int cluster_holding_rule(struct cluster_job *cj, const struct coord_reply *reply, struct fault *f)
{
	struct cluster_node *n, *tmp, *before = NULL;

	cj->ruling = cluster_holding_read_step(reply->n ? &reply->kvs[0] : NULL);
	cj->step_revision = reply->n ? reply->kvs[0].modified : 0;
	free(cj->ruled);
	cj->ruled = calloc(cluster_holding_count(cj) + 1, sizeof(*cj->ruled));
	if (!cj->ruled)
		return fault_errno(f, -ENOMEM, "settling what nodes are in doubt about");
	cj->ruling.applied = cj->ruled;
	list_for_each (n, tmp, &cj->nodes, link)
		cluster_holding_find_applied(cj, n);
	list_for_each (n, tmp, &cj->nodes, link) {
		cluster_holding_settle(&n->holding, &cj->ruling);
		if (before && !f->code)
			(void)cluster_holding_check_step(cj, before, n, f);
		before = n;
	}
	return f->code;
}

const struct cluster_node *cluster_holding_newest(struct cluster_job *cj)
{
	const struct cluster_node *newest = NULL;
	struct cluster_node *n, *tmp;

	list_for_each (n, tmp, &cj->nodes, link)
		if (n->holding.units && (!newest || n->holding.begun > newest->holding.begun))
			newest = n;
	return newest;
}

int cluster_holding_check_newer(struct cluster_job *cj, struct fault *f)
{
	const struct cluster_node *newest = cluster_holding_newest(cj);
	uint64_t begun = newest ? newest->holding.begun : 0;

	if (!newest || !cj->ruling.has_commit || begun >= cj->ruling.epoch)
		return 0;
	return fault_set(f, FAULT_STATE, NULL,
			 "the last commit of job '%s', step %llu in epoch %llu, was made without "
			 "the memory that is here: node %s was in none after epoch %llu. Start the "
			 "ranks of the nodes that made it, too, or delete the job and load a "
			 "checkpoint",
			 cj->label, (unsigned long long)cj->ruling.step,
			 (unsigned long long)cj->ruling.epoch, newest->name,
			 (unsigned long long)begun);
}
