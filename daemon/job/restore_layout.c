/* Of a restore: the job gets the ranks and the units that it will have. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "job/job_journal.h"
#include "job/registration.h"
#include "job/restore_impl.h"
#include "job/span.h"

void restore_layout_deinit(struct restore *r)
{
	for (size_t i = 0; i < r->n_units; i++)
		state_unit_free(r->units[i]);
	free(r->units);
	free(r->numbers);
	free(r->ids);
	r->units = NULL;
	r->numbers = r->ids = NULL;
	r->n_units = 0;
}

/* ------------------------------------------------------------------------- what is to go */

/* Are the ranks here on the devices that the span says? */
static bool restore_layout_devices_stay(const struct job *job, const struct span *s)
{
	const struct span_node *here = &s->nodes[s->self];

	for (uint32_t i = 0; i < here->n; i++) {
		const struct device *d = job->placed[here->first + i];

		if (d && d != &job->node->devices[here->devices[i]])
			return false;
	}
	return true;
}

/* Does memory of the job stay where it is? */
static bool restore_layout_stays(const struct job *job, const struct span *s)
{
	const struct span *was = job->across.span;

	if (s->world != job->rec->world_size || !restore_layout_devices_stay(job, s))
		return false;
	for (uint32_t i = 0; i < job->n_groups; i++)
		if (job->groups[i]->n_devices)
			return job_is_across(job) ? span_same(was, s) : s->n_nodes == 1;
	return true;
}

static struct unit *restore_layout_find(const struct job *job, const state_unit *spec)
{
	return htab_find(&job->unit_names, spec->name);
}

/* Its copies, and what reads them, too. */
static void restore_layout_drop(struct job *job, struct unit *u)
{
	if (job->jobs->ops.rolled_back)
		job->jobs->ops.rolled_back(job, u);
	job_give_full(job, u);
	for (unsigned d = 0; d < u->n_parts; d++)
		reads_deinit(&u->parts[d].reads);
	job_drop_unit(job, u);
	u->rec->group = 0; /* it only keeps its number; what is in the record must fit the world */
	u->rec->shard_ranks = 1;
	u->rec->sets = false;
}

/* Those that hold them unmap them. */
static void restore_layout_let_go(struct job *job)
{
	struct slab_list gone = { .ids = calloc(job->mem.n_slabs + 1, sizeof(*gone.ids)) };

	job_units_dropped(job, gone.ids ? &gone : NULL);
	for (uint32_t i = 0; i < job->rec->world_size; i++)
		if (job->ranks[i])
			member_slabs_gone(job->ranks[i], gone.ids, (uint32_t)gone.n);
	free(gone.ids);
}

/* --------------------------------------------------------------------------- the new list */

/* Does a unit of the job stay as it is, for @spec, whose group is already the job's? */
static bool restore_layout_fits(const struct job *job, const state_unit *spec)
{
	const struct unit *u = restore_layout_find(job, spec);
	struct fault differs = FAULT_NULL;

	return u && unit_same_spec(u->rec, spec, &differs);
}

static int restore_layout_compare(const void *a, const void *b, void *job)
{
	const struct unit *x = restore_layout_find(job, *(state_unit *const *)a);
	const struct unit *y = restore_layout_find(job, *(state_unit *const *)b);
	uint32_t is = x ? x->id : UINT32_MAX, than = y ? y->id : UINT32_MAX;

	return is < than ? -1 : is > than;
}

/* Of all specs that concern this node: first those whose units are replaced, in the order of their numbers.
 * @stays: units that fit stay. */
static void restore_layout_list(struct restore *r, bool stays)
{
	struct job *job = r->job;
	state_job *specs = r->specs;
	size_t n = 0, kept = 0;

	for (int pass = 0; pass < 2; pass++)
		for (size_t i = 0; i < specs->n_units; i++) {
			state_unit *u = specs->units[i];
			bool replaced = u && restore_layout_find(job, u) &&
					!(stays && restore_layout_fits(job, u));

			if (!u || htab_find(&r->elsewhere, u->name) || (!pass && !replaced))
				continue;
			r->units[n++] = STEAL_PTR(specs->units[i]);
			r->n_numbers += !pass;
		}
	r->n_units = n;
	qsort_r(r->units, r->n_numbers, sizeof(*r->units), restore_layout_compare, job);
	for (uint32_t i = 0; i < r->n_numbers; i++)
		r->numbers[i] = restore_layout_find(job, r->units[i])->id;
	for (size_t i = 0; i < specs->n_units; i++)
		if (specs->units[i])
			specs->units[kept++] = specs->units[i];
	specs->n_units = kept;
}

/* Units that are replaced, or that the parts do not have. */
static int restore_layout_drop_units(struct restore *r)
{
	struct htab stay = HTAB_NULL;
	struct job *job = r->job;
	bool any = false;
	int e = 0;

	for (size_t i = r->n_numbers; e == 0 && i < r->n_units; i++)
		e = htab_add(&stay, r->units[i]->name, r->units[i]);
	for (uint32_t i = 0; e == 0 && i < job->n_units; i++) {
		if (job->units[i]->rec->dropped || htab_find(&stay, job->units[i]->rec->name))
			continue;
		restore_layout_drop(job, job->units[i]);
		any = true;
	}
	htab_deinit(&stay);
	if (any) { /* what names them goes, too: ranks make it again */
		ddps_free(job);
		restore_layout_let_go(job);
	}
	return e;
}

/* ------------------------------------------------------------------------------ in turn */

/* The job's own numbers of the specs' groups, which it gets if it does not have them. */
static int restore_layout_map_groups(struct restore *r)
{
	uint32_t *ids = calloc(r->specs->n_groups + 1, sizeof(*ids));

	if (!ids)
		return fault_errno(&r->f, -ENOMEM, "restoring a job");
	for (size_t i = 0; !r->f.code && i < r->specs->n_groups; i++) {
		const state_group *g = r->specs->groups[i];
		struct group *have = NULL;

		if (job_group(r->job, g->name, g->ranks, g->n_ranks, &have, &r->f) == 0)
			ids[i] = have->id;
	}
	for (size_t i = 0; !r->f.code && i < r->specs->n_units; i++)
		r->specs->units[i]->group = ids[r->specs->units[i]->group];
	free(ids);
	return r->f.code;
}

static int restore_layout_new_list(struct restore *r)
{
	size_t n = r->specs->n_units + 1;

	r->units = calloc(n, sizeof(*r->units));
	r->numbers = calloc(n, sizeof(*r->numbers));
	r->ids = calloc(n, sizeof(*r->ids));
	return r->units && r->numbers && r->ids ? 0 : -ENOMEM;
}

/* Ranks, groups and memory stay. Groups come before units, which are compared by their numbers. */
static int restore_layout_keep(struct restore *r)
{
	int e = restore_world_keep(r->job, r->span);

	if (e < 0)
		return fault_errno(&r->f, e, "restoring a job");
	if (job_install_span(r->job, STEAL_PTR(r->span), &r->f) || restore_layout_map_groups(r))
		return r->f.code;
	restore_layout_list(r, true);
	return restore_layout_drop_units(r) ? fault_errno(&r->f, -ENOMEM, "restoring a job") : 0;
}

static int restore_layout_move(struct restore *r)
{
	int e;

	/* units are found by their names as long as they are there; groups are made when they are not */
	restore_layout_list(r, false);
	e = restore_layout_drop_units(r);
	if (e == 0)
		e = restore_world_change(r);
	if (e < 0)
		return fault_errno(&r->f, e, "restoring a job");
	if (job_install_span(r->job, STEAL_PTR(r->span), &r->f))
		return r->f.code;
	/* the list is the specs' again, for the numbers of their groups */
	SWAP(r->specs->units, r->units);
	SWAP(r->specs->n_units, r->n_units);
	restore_layout_map_groups(r);
	SWAP(r->specs->units, r->units);
	SWAP(r->specs->n_units, r->n_units);
	return r->f.code;
}

int restore_make_room(struct restore *r)
{
	struct job *job = r->job;

	if (restore_layout_new_list(r) < 0)
		return fault_errno(&r->f, -ENOMEM, "restoring a job");
	if (restore_layout_stays(job, r->span) && !restore_world_is_renumbered(r)
		    ? restore_layout_keep(r)
		    : restore_layout_move(r))
		return r->f.code;
	job->readers.changes++;
	job_journal_mark(job, JOB_JOURNAL_HEAD | JOB_JOURNAL_BLOBS | JOB_JOURNAL_SLABS);
	job_journal_write(job);
	return 0;
}

enum res restore_register(struct restore *r)
{
	struct registration *reg = NULL;
	enum res res = RES_FAILED;
	uint64_t charged;

	if (registration_new(r->job, r->units, r->n_units, r->ids, &reg) < 0) {
		job_drop_spare(r->job);
		return res_of(fault_errno(&r->f, -ENOMEM, "restoring a job"));
	}
	registration_between_epochs(reg, r->numbers, r->n_numbers);
	if (registration_check(reg, SIZE_MAX, &r->f) == 0)
		res = registration_build(reg, &charged, &r->f);
	else
		job_drop_spare(r->job);
	registration_free(reg);
	if (res == RES_WAIT)
		condition_wait(&r->job->node->changed, &r->waiter);
	return res;
}
