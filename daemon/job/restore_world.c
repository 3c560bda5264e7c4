/* Of a restore: the ranks and groups that the job will have. */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "job/launched.h"
#include "job/restore_impl.h"
#include "job/span.h"

/* What the job will have by rank, and its groups. Owned. */
struct restore_world {
	state_group *rec; /* of the world; NULL: it has the size that it had */
	struct group **groups;
	uint32_t n_groups;
	struct member **ranks;
	struct device **placed;
	const char **names;
	uint32_t *from;
};

static void restore_world_deinit(struct restore_world *w)
{
	while (w->n_groups)
		group_free(w->groups[--w->n_groups]);
	state_group_free(w->rec);
	free(w->groups);
	free(w->ranks);
	free(w->placed);
	free(w->names);
	free(w->from);
}

/* As which process rank @i will be. */
static uint32_t restore_world_number(const struct restore *r, uint32_t i)
{
	return r->started ? r->started[i] : i;
}

bool restore_world_is_renumbered(const struct restore *r)
{
	const struct job *job = r->job;

	for (uint32_t i = 0; r->started && i < job->rec->world_size && i < r->world; i++)
		if (launched_number(job, i) != r->started[i])
			return true;
	return r->started && launched_world(job) != r->launched;
}

static int restore_world_place(struct restore_world *w, const struct restore *r)
{
	const struct span *s = r->span;
	const struct span_node *here = &s->nodes[s->self];
	const struct job *job = r->job;

	w->ranks = calloc(s->world, sizeof(struct member *));
	w->placed = calloc(s->world, sizeof(struct device *));
	w->names = calloc(s->world, sizeof(*w->names));
	w->from = calloc(s->world, sizeof(*w->from));
	if (!w->ranks || !w->placed || !w->names || !w->from)
		return -ENOMEM;
	for (uint32_t i = 0; i < s->world; i++) {
		w->names[i] = "";
		if (!launched_rank(job, restore_world_number(r, i), &w->from[i]))
			w->from[i] = STATE_NEW_RANK;
	}
	for (uint32_t i = 0; i < here->n; i++) {
		struct device *d = &job->node->devices[here->devices[i]];

		w->placed[here->first + i] = d;
		w->names[here->first + i] = backend_lasting_name(d->backend);
	}
	return 0;
}

/* With the span in place. */
static int restore_world_groups(struct restore_world *w, struct job *job)
{
	size_t n = w->rec ? 1 : job->rec->n_groups;
	int e = 0;

	w->groups = calloc(n, sizeof(struct group *));
	for (size_t i = 0; w->groups && e == 0 && i < n; i++) {
		e = group_new(job, (uint32_t)i, w->rec ? w->rec : job->rec->groups[i],
			      job->jobs->ops.complete, job->jobs->ops.failed, &w->groups[i]);
		w->n_groups += e == 0;
	}
	return w->groups ? e : -ENOMEM;
}

/* Return: 0 or negative errno: nothing has changed. */
static int restore_world_init(struct restore_world *w, struct restore *r)
{
	struct span *was = r->job->across.span;
	struct job *job = r->job;
	int e = restore_world_place(w, r);

	if (e == 0 && (r->span->world != job->rec->world_size || restore_world_is_renumbered(r))) {
		const state_group *world = r->specs->groups[0]; /* it has that size */

		w->rec = state_group_new(world->name, world->ranks, world->n_ranks);
		e = w->rec ? 0 : -ENOMEM;
	}
	job->across.span = r->span; /* group_new asks for it */
	if (e == 0)
		e = restore_world_groups(w, job);
	job->across.span = was;
	return e;
}

/* Their ranks are not here any more. */
static void restore_world_leave_out(struct job *job, struct member *m)
{
	struct fault f = FAULT_NULL;

	if (m->state != MEMBER_STALE)
		return;
	fault_set(&f, FAULT_ABORTED, NULL,
		  "job '%s' goes on with other ranks on this node, without this process (rank %u): "
		  "join again",
		  job->rec->name, m->rank);
	job_leave_out(m, &f);
}

/* @was: so many ranks. */
static void restore_world_members(struct restore_world *w, struct job *job, const struct span *s,
				  uint32_t was)
{
	for (uint32_t i = 0; i < s->world; i++) {
		uint32_t from = w->from[i];

		if (from == STATE_NEW_RANK || !job->ranks[from] || !span_is_here(s, i) ||
		    job->ranks[from]->device != w->placed[i])
			continue;
		w->ranks[i] = STEAL_PTR(job->ranks[from]);
		if (from != i)
			member_renumber(w->ranks[i], i);
	}
	for (uint32_t i = 0; i < was; i++) {
		if (!job->ranks[i])
			continue;
		restore_world_leave_out(job, job->ranks[i]);
		member_unref(job->ranks[i]);
	}
	free(job->ranks);
	job->ranks = STEAL_PTR(w->ranks);
}

static int restore_world_record(struct restore_world *w, const struct restore *r)
{
	const struct state_size to = { .world = w->rec,
				       .devices = w->names,
				       .from = w->from,
				       .launched = r->started ? r->launched : 0,
				       .numbers = r->started };
	struct job *job = r->job;
	uint32_t world = r->span->world;
	uint64_t before = job_own_bytes(job, job->n_units, 0), bytes = 0;
	uint32_t gone = 0;
	int e = 0;

	for (uint32_t i = 0; !w->rec && e == 0 && i < world; i++)
		e = state_job_set_device(job->rec, i, w->names[i]);
	if (!w->rec)
		return e;
	e = state_job_resize(job->rec, &to, &gone, &bytes);
	if (e)
		return e;
	w->rec = NULL;
	CHECK(!bytes); /* loading_empty has freed them */
	/* as in a resize */
	(void)user_charge_resize(
		&job->memory, job->memory.n - before + job_own_bytes(job, job->n_units, 0), NULL);
	return 0;
}

int restore_world_change(struct restore *r)
{
	struct restore_world w = { 0 };
	struct job *job = r->job;
	uint32_t was = job->rec->world_size;
	int e = restore_world_init(&w, r);

	CHECK(!job_units_alive(job));
	if (e == 0)
		e = restore_world_record(&w, r);
	if (e == 0) {
		ddps_free(job);
		restore_world_members(&w, job, r->span, was);
		SWAP(job->placed, w.placed);
		SWAP(job->groups, w.groups);
		SWAP(job->n_groups, w.n_groups);
	}
	restore_world_deinit(&w);
	return e;
}

int restore_world_keep(struct job *job, const struct span *s)
{
	const struct span_node *here = &s->nodes[s->self];

	for (uint32_t i = 0; i < here->n; i++) {
		struct device *d = &job->node->devices[here->devices[i]];

		if (state_job_set_device(job->rec, here->first + i,
					 backend_lasting_name(d->backend)) < 0)
			return -ENOMEM;
		job->placed[here->first + i] = d;
	}
	return 0;
}
