/* Of a restore: which parts of a checkpoint this node needs. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "job/restore_impl.h"
#include "job/saving.h"
#include "job/span.h"
#include "unit/runs.h"

struct restore_needs {
	const struct restore_plan *plan;
	const struct index *x;
	bool *parts;
};

/* Has the unit any of elements [begin, end) of tensor @t on this node? */
static bool restore_needs_elements(const struct unit *u, uint32_t t, uint64_t begin, uint64_t end)
{
	struct unit_run run;

	for (unsigned d = 0; d < u->n_parts; d++)
		if (unit_part_run(u, &u->parts[d], t, &run) && begin < run.first + run.n &&
		    run.first < end)
			return true;
	return false;
}

static void restore_needs_array(const struct restore_needs *n, const struct unit *u, uint32_t t,
				enum index_array array)
{
	const char *tensor = u->rec->tensors[t]->name;
	size_t i = index_find(n->x, u->rec->name, tensor, array);

	for (; i < n->x->n_pieces && index_is_of(&n->x->pieces[i], u->rec->name, tensor, array);
	     i++) {
		const struct index_piece *p = &n->x->pieces[i];

		if (restore_needs_elements(u, t, p->begin, p->begin + p->elements))
			n->parts[p->file] = true;
	}
}

static void restore_needs_tensors(const struct restore_needs *n, const struct unit *u)
{
	for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
		unsigned arrays = u->tensors[t].frozen ? 0 : unit_state_arrays(u->rec);

		for (unsigned k = 0; !u->tensors[t].alias && k <= arrays; k++)
			restore_needs_array(n, u, t, saving_array(u->rec, k));
	}
}

/* The pieces of a buffer, from @first on, are in the order of ranks. Those of a rank that has none are those of
 * the first one (loading_place.c). */
static void restore_needs_buffer(const struct restore_needs *n, const struct unit *u,
				 const char *name, uint32_t rank)
{
	size_t first = index_find(n->x, u->rec->name, name, INDEX_BUFFER), found = first;

	for (size_t i = first;
	     i < n->x->n_pieces && index_is_of(&n->x->pieces[i], u->rec->name, name, INDEX_BUFFER);
	     i++)
		if (n->x->pieces[i].rank == rank)
			found = i;
	if (found < n->x->n_pieces)
		n->parts[n->x->pieces[found].file] = true;
}

static void restore_needs_buffers(const struct restore_needs *n, const struct unit *u)
{
	const struct group *g = n->plan->job.groups[u->rec->group];

	for (size_t b = 0; b < u->rec->n_buffers; b++)
		for (uint32_t k = 0; k < g->here; k++)
			restore_needs_buffer(n, u, u->rec->buffers[b]->name,
					     g->rec->ranks[group_member_here(g, k)]);
}

static void restore_needs_blobs(const struct restore_needs *n)
{
	const struct span *s = n->plan->job.across.span;

	for (size_t i = 0; i < n->x->n_pieces && n->x->pieces[i].array == INDEX_BLOB; i++)
		if (n->x->pieces[i].rank < s->world && span_is_here(s, n->x->pieces[i].rank))
			n->parts[n->x->pieces[i].file] = true;
}

static int restore_needs_all(const struct restore_needs *n, struct fault *f)
{
	const struct job *job = &n->plan->job;

	for (size_t i = 0; i < job->rec->n_units; i++) {
		state_unit *rec = job->rec->units[i];
		struct unit *u = NULL;

		if (!job->groups[rec->group]->here)
			continue;
		if (restore_plan_unit(n->plan, rec, &u, f))
			return f->code;
		restore_needs_tensors(n, u);
		restore_needs_buffers(n, u);
		unit_free(u);
	}
	restore_needs_blobs(n);
	return 0;
}

static int restore_needs_merge(const struct job *job, const struct restore_options *o,
			       struct index *x, struct fault *f)
{
	struct parts_memory *parts = calloc(o->n_parts + 1, sizeof(*parts));

	if (!parts)
		return fault_errno(f, -ENOMEM, "restoring a job");
	for (unsigned i = 0; i < o->n_parts; i++)
		parts[i] = (struct parts_memory){ -1, o->parts[i].index, o->parts[i].index_bytes };
	parts_merge(parts, o->n_parts, job->rec->name, o->step, x, f);
	free(parts);
	return f->code;
}

int restore_needs(struct job *job, const struct restore_options *o, bool *ret_needed,
		  struct fault *f)
{
	struct index x = INDEX_NULL;
	struct restore_plan p = { 0 };
	state_job *specs = NULL;
	const struct restore_needs n = { &p, &x, ret_needed };

	memset(ret_needed, 0, o->n_parts * sizeof(*ret_needed));
	if (restore_check_span(job, o->span, f) == 0 && restore_needs_merge(job, o, &x, f) == 0 &&
	    restore_plan_decode(job, o, &specs, f) == 0 &&
	    restore_plan_init(&p, job, specs, o->span, f) == 0) {
		restore_plan_renumber(specs, o->numbers, o->span->world, &x);
		restore_needs_all(&n, f);
	}
	restore_plan_deinit(&p);
	state_job_free(specs);
	index_deinit(&x);
	return f->code;
}
