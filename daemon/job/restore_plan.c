/* Of a restore: the records of the units as they will be, and where they will be. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "job/restore_impl.h"
#include "job/span.h"
#include "unit/reduce_plan.h"

/* ------------------------------------------------------------------------- the records */

/* Of a unit without a state. */
static void restore_plan_clear(state_unit *u)
{
	u->initialised = u->kept_initialised = false;
	u->optimizer->steps = u->optimizer->kept_steps = 0;
	for (size_t i = 0; i < u->n_tensors; i++)
		u->tensors[i]->missed = u->tensors[i]->kept_missed = 0;
}

static state_group *restore_plan_world(const char *name, uint32_t world)
{
	uint32_t *ranks = calloc(world, sizeof(*ranks));
	state_group *g;

	for (uint32_t i = 0; ranks && i < world; i++)
		ranks[i] = i;
	g = ranks ? state_group_new(name, ranks, world) : NULL;
	free(ranks);
	return g;
}

/* As they are with @world ranks: what was left open is resolved again, as in a resize. */
static int restore_plan_resize(state_job *specs, uint32_t world, struct fault *f)
{
	state_group *g;

	for (size_t i = 0; i < specs->n_units; i++) {
		state_unit *u = specs->units[i];

		if (u->group)
			return fault_set(f, FAULT_INVALID, "units.group",
					 "unit '%.100s' belongs to group '%.64s': with %u ranks in "
					 "place of %u there is no such group",
					 u->name, specs->groups[u->group]->name, world,
					 specs->world_size);
		if (u->strategy != STRATEGY_HYBRID)
			u->shard_ranks = 0;
		reduce_reopen_factors(u, specs->world_size);
	}
	g = restore_plan_world(specs->groups[0]->name, world);
	if (!g)
		return fault_errno(f, -ENOMEM, "restoring a job");
	while (specs->n_groups)
		state_group_free(specs->groups[--specs->n_groups]);
	specs->groups[specs->n_groups++] = g;
	specs->world_size = world;
	return 0;
}

int restore_plan_decode(const struct job *job, const struct restore_options *o, state_job **ret,
			struct fault *f)
{
	state_job *specs = NULL;

	if (state_specs_decode(o->specs, o->specs_bytes, &specs, f))
		return f->code;
	if (strcmp(specs->name, job->rec->name) != 0)
		fault_set(f, FAULT_INVALID, "specs", "units of job '%.64s' are not of job '%s'",
			  specs->name, job->rec->name);
	for (size_t i = 0; i < specs->n_units; i++)
		restore_plan_clear(specs->units[i]);
	if (!f->code && specs->world_size != o->span->world)
		restore_plan_resize(specs, o->span->world, f);
	if (f->code)
		state_job_free(specs);
	else
		*ret = specs;
	return f->code;
}

/* Those of ranks that there are no more are of none of the new ones. */
static uint32_t restore_plan_rank(const state_job *specs, const uint32_t *numbers, uint32_t world,
				  uint32_t saved)
{
	uint32_t number = saved < specs->n_numbers ? specs->numbers[saved] : saved;

	for (uint32_t i = 0; i < world; i++)
		if (numbers[i] == number)
			return i;
	return saved > UINT32_MAX - world ? UINT32_MAX : saved + world;
}

void restore_plan_renumber(const state_job *specs, const uint32_t *numbers, uint32_t world,
			   struct index *x)
{
	if (!numbers)
		return;
	for (size_t i = 0; i < x->n_pieces; i++) {
		struct index_piece *p = &x->pieces[i];

		if (p->array == INDEX_BLOB || p->array == INDEX_BUFFER)
			p->rank = restore_plan_rank(specs, numbers, world, p->rank);
	}
	index_sort(x);
}

/* -------------------------------------------------------------------- where they will be */

void restore_plan_deinit(struct restore_plan *p)
{
	while (p->job.n_groups)
		group_free(p->job.groups[--p->job.n_groups]);
	free(p->job.groups);
	free(p->job.placed);
	p->job.groups = NULL;
	p->job.placed = NULL;
}

static int restore_plan_group(struct restore_plan *p, const state_group *rec, struct fault *f)
{
	struct job *job = &p->job;
	struct group *g = NULL;
	int r = group_new(job, job->n_groups, rec, job->jobs->ops.complete, job->jobs->ops.failed,
			  &g);

	if (r == -EINVAL)
		return fault_set(f, FAULT_INVALID, "group",
				 "the ranks of group '%.64s' on this node would not be side by "
				 "side in it",
				 rec->name);
	if (r < 0)
		return fault_errno(f, r, "restoring a job");
	job->groups[job->n_groups++] = g;
	if (g->here && group_place(g, f) != RES_DONE)
		return f->code;
	return 0;
}

int restore_plan_init(struct restore_plan *p, const struct job *job, state_job *specs,
		      struct span *span, struct fault *f)
{
	const struct span_node *here = &span->nodes[span->self];

	*p = (struct restore_plan){ .job = { .jobs = job->jobs,
					     .node = job->node,
					     .rec = specs,
					     .across.span = span,
					     .owner.user = job->owner.user } };
	p->job.placed = calloc(span->world, sizeof(struct device *));
	p->job.groups = calloc(specs->n_groups, sizeof(struct group *));
	if (!p->job.placed || !p->job.groups)
		return fault_errno(f, -ENOMEM, "restoring a job");
	for (uint32_t i = 0; i < here->n; i++)
		p->job.placed[here->first + i] = &job->node->devices[here->devices[i]];
	for (size_t i = 0; !f->code && i < specs->n_groups; i++)
		restore_plan_group(p, specs->groups[i], f);
	return f->code;
}

int restore_plan_unit(const struct restore_plan *p, state_unit *rec, struct unit **ret,
		      struct fault *f)
{
	const struct group *g = p->job.groups[rec->group];
	struct unit_place place;
	struct layout l;

	if (unit_resolve(rec, group_size(g), f))
		return f->code;
	rec->sets = false;
	if (ret)
		group_set_replicas(g, rec);
	if (!unit_layout(rec, group_size(g), &l) || !unit_buffers_fit(rec))
		return fault_set(f, FAULT_INVALID, "units.tensors",
				 "unit '%.100s' cannot be laid out for %u ranks", rec->name,
				 group_size(g));
	if (!ret)
		return 0;
	place = group_unit_place(g);
	return unit_new(1, rec, &l, &place, ret) < 0 ? fault_errno(f, -ENOMEM, "restoring a job")
						     : 0;
}

static int restore_plan_check(const struct restore_plan *p, struct htab *elsewhere, struct fault *f)
{
	const state_job *specs = p->job.rec;

	for (size_t i = 0; !f->code && i < specs->n_units; i++) {
		state_unit *u = specs->units[i];
		int r = 0;

		restore_plan_unit(p, u, NULL, f);
		if (!f->code && !p->job.groups[u->group]->here)
			r = htab_add(elsewhere, u->name, u);
		if (r == -EEXIST)
			fault_set(f, FAULT_INVALID, "units.name", "unit '%.100s' is listed twice",
				  u->name);
		else if (r < 0)
			fault_errno(f, r, "restoring a job");
	}
	return f->code;
}

int restore_plan(struct job *job, const struct restore_options *o, state_job **ret_specs,
		 struct htab *elsewhere, struct fault *f)
{
	struct restore_plan p;
	state_job *specs = NULL;

	if (restore_plan_decode(job, o, &specs, f))
		return f->code;
	if (restore_plan_init(&p, job, specs, o->span, f) == 0)
		restore_plan_check(&p, elsewhere, f);
	restore_plan_deinit(&p);
	if (!f->code) {
		*ret_specs = specs;
		return 0;
	}
	state_job_free(specs);
	htab_deinit(elsewhere);
	return f->code;
}
