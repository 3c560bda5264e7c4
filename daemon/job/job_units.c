/* The units of a job: their memory, and rebuilding them from a record. */
#include "job/job.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "job/aliases.h"
#include "job/job_journal.h"
#include "job/units_impl.h"

void job_drop_spare(struct job *job)
{
	while (job->mem.n_spare)
		slab_unref(job->mem.spare[--job->mem.n_spare]);
	free(job->mem.spare);
	job->mem.spare = NULL;
}

uint64_t job_spare_bytes(const struct job *job)
{
	uint64_t bytes = 0;

	for (unsigned i = 0; i < job->mem.n_spare; i++)
		bytes += job->mem.spare[i]->bytes;
	return bytes;
}

static int job_units_compare_slab(const void *a, const void *b)
{
	const struct slab *x = *(struct slab *const *)a, *y = *(struct slab *const *)b;

	return x->id < y->id ? -1 : x->id > y->id;
}

int job_add_slabs(struct job *job, struct slab *const *slabs, size_t n)
{
	size_t before = job->rec->n_slabs;
	struct slab **grown = realloc(job->mem.slabs, (job->mem.n_slabs + n + 1) * sizeof(*grown));

	if (!grown)
		return -ENOMEM;
	job->mem.slabs = grown;
	for (size_t i = 0; i < n; i++) {
		if (state_job_add_slab(job->rec, slabs[i]) == 0)
			continue;
		state_job_drop_slabs(job->rec, job->rec->n_slabs - before);
		return -ENOMEM;
	}
	for (size_t i = 0; i < n; i++)
		job->mem.slabs[job->mem.n_slabs++] = slab_ref(slabs[i]);
	qsort(job->mem.slabs, job->mem.n_slabs, sizeof(*job->mem.slabs), job_units_compare_slab);
	state_job_sort_slabs(job->rec);
	job_journal_mark(job, JOB_JOURNAL_SLABS);
	return 0;
}

static void job_units_use(const struct region *r)
{
	if (r->slab)
		r->slab->used = true;
}

static void job_units_use_all(const struct job *job)
{
	for (uint32_t i = 0; i < job->n_units; i++) {
		const struct unit *u = job->units[i];

		for (unsigned d = 0; d < u->n_parts; d++) {
			const struct unit_part *p = &u->parts[d];

			job_units_use(&p->params);
			job_units_use(&p->grads);
			job_units_use(&p->state1);
			job_units_use(&p->state2);
			job_units_use(&p->state3);
			job_units_use(&p->kept);
		}
		for (uint32_t k = 0; u->buffers && k < group_size(job->groups[u->rec->group]); k++)
			job_units_use(&u->buffers[k]);
	}
}

uint32_t job_units_alive(const struct job *job)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < job->n_units; i++)
		n += !job->units[i]->rec->dropped;
	return n;
}

static int job_units_compare(const void *a, const void *b)
{
	const uint32_t *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

static bool job_units_has(const uint32_t *units, size_t n, uint32_t id)
{
	return bsearch(&id, units, n, sizeof(*units), job_units_compare);
}

/* The unit that tensor @t of @u needs: the next one of a chain of aliases, whose names are followed
 * when the daemon is restarted. 0: none. */
static uint32_t job_units_needed_by(const struct job *job, const struct unit *u, uint32_t t)
{
	const struct unit *next =
		u->tensors[t].alias ? htab_find(&job->unit_names, u->rec->tensors[t]->alias_unit)
				    : NULL;

	return next ? next->id : 0;
}

const struct unit *job_unit_tied_to(const struct job *job, const uint32_t *units, size_t n,
				    uint32_t *ret_of)
{
	for (uint32_t i = 0; i < job->n_units; i++) {
		const struct unit *u = job->units[i];

		if (u->rec->dropped || job_units_has(units, n, u->id))
			continue;
		for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
			*ret_of = job_units_needed_by(job, u, t);
			if (*ret_of && job_units_has(units, n, *ret_of))
				return u;
		}
	}
	return NULL;
}

static void job_units_forget_parts(struct unit *u)
{
	for (unsigned d = 0; d < u->n_parts; d++) {
		struct unit_part *p = &u->parts[d];

		CHECK(!p->full.slab && !p->partials.slab);
		p->params = p->grads = p->state1 = p->state2 = p->state3 = p->kept = REGION_NULL;
	}
	free(u->buffers);
	u->buffers = NULL;
}

void job_note_dropped(struct job *job, uint32_t number)
{
	struct job_dropped *d = &job->dropped;

	if (d->n == d->room) {
		uint32_t room = d->room ? d->room * 2 : 64;
		uint32_t *grown = realloc(d->numbers, room * sizeof(*grown));

		if (!grown)
			return; /* it is never used again */
		d->numbers = grown;
		d->room = room;
	}
	d->numbers[d->n++] = number;
}

uint32_t job_take_dropped(const struct job *job, uint32_t *ret, uint32_t most)
{
	const struct job_dropped *d = &job->dropped;
	uint32_t n = 0;

	for (uint32_t i = 0; i + JOB_DROPPED_KEPT < d->n && n < most; i++)
		if (!job->units[d->numbers[i] - 1]->ops)
			ret[n++] = d->numbers[i];
	qsort(ret, n, sizeof(*ret), job_units_compare);
	return n;
}

void job_forget_dropped(struct job *job)
{
	struct job_dropped *d = &job->dropped;
	uint32_t kept = 0;

	for (uint32_t i = 0; i < d->n; i++)
		if (job->units[d->numbers[i] - 1]->rec->dropped)
			d->numbers[kept++] = d->numbers[i];
	d->n = kept;
}

static void job_units_turns_since(struct unit_turns *t, const struct unit_turns *earlier)
{
	t->n = earlier->n > t->n ? earlier->n : t->n;
	t->given = earlier->given > t->given ? earlier->given : t->given;
}

void job_continue_turns(const struct job *job, struct unit *u)
{
	job_units_turns_since(&u->turns, &job->across.replaced);
	for (uint32_t i = 0; i < job->dropped.n; i++) {
		const struct unit *old = job->units[job->dropped.numbers[i] - 1];

		if (old->key == u->key)
			job_units_turns_since(&u->turns, &old->turns);
	}
}

void job_units_replaced(struct job *job, const struct unit *old)
{
	job_units_turns_since(&job->across.replaced, &old->turns);
}

void job_drop_unit(struct job *job, struct unit *u)
{
	CHECK(!u->gathered_ranks && !u->summoned_ranks && !u->shard_writes && !u->rec->dropped);
	CHECK(u->copy == UNIT_COPY_NONE && u->step != UNIT_STEP_STEPPING);
	regcache_drop(job);
	unit_pass_end(u);
	job_give_grads(job, u);
	job_give_partials(job, u);
	job_units_forget_parts(u);
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r])
			member_forget_unit(job->ranks[r], u);
	htab_remove(&job->unit_names, u->rec->name);
	state_unit_drop(u->rec);
	u->has_gradient = u->torn = false;
	job_journal_mark_unit(job, u);
	job->readers.changes++;
	job_note_dropped(job, u->id);
}

void job_units_dropped(struct job *job, struct slab_list *gone)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r])
			member_units_forgotten(job->ranks[r]);
	job_drop_unused_slabs(job, gone);
}

/* The journal says that they are gone before they are: a successor must not find them empty. */
void job_drop_unused_slabs(struct job *job, struct slab_list *gone)
{
	uint32_t kept = 0, n = job->mem.n_slabs;

	CHECK(job->mem.n_slabs == job->rec->n_slabs);
	for (uint32_t i = 0; i < n; i++)
		job->mem.slabs[i]->used = false;
	job_units_use_all(job);
	for (uint32_t i = 0; i < n; i++) {
		struct slab *s = job->mem.slabs[i];

		if (!s->used) {
			if (gone && s->exported && !s->writable)
				gone->ids[gone->n++] = s->id;
			state_job_drop_slab(job->rec, kept);
			continue;
		}
		job->mem.slabs[i] = job->mem.slabs[kept];
		job->mem.slabs[kept++] = s;
	}
	job->mem.n_slabs = kept;
	job_journal_mark(job, JOB_JOURNAL_SLABS);
	job_journal_write(job);
	while (n > kept)
		slab_unref(job->mem.slabs[--n]);
}

unsigned job_device_of(const struct job *job, uint32_t rank)
{
	return job->placed[rank] ? job->placed[rank]->index : 0;
}

int job_units_grow(struct job *job, size_t units)
{
	void *grown = realloc(job->units, (job->n_units + units) * sizeof(struct unit *));

	if (!grown)
		return -ENOMEM;
	job->units = grown;
	return 0;
}

int job_units_resolve_aliases(struct job *job, uint32_t first, struct fault *f)
{
	struct aliases a;

	aliases_init(&a, job);
	for (uint32_t i = first; !f->code && i < job->n_units; i++)
		if (!job->units[i]->rec->dropped)
			aliases_resolve(&a, job->units[i], f);
	aliases_deinit(&a);
	return f->code;
}

void job_units_free(struct job *job)
{
	regcache_drop(job);
	for (uint32_t i = 0; i < job->n_units; i++)
		unit_free(job->units[i]);
	free(job->units);
	free(job->dropped.numbers);
	job->dropped = (struct job_dropped){ 0 };
	job->units = NULL;
	job->n_units = 0;
	for (uint32_t i = 0; i < job->mem.n_slabs; i++)
		slab_unref(job->mem.slabs[i]);
	free(job->mem.slabs);
	job->mem.slabs = NULL;
	job->mem.n_slabs = 0;
}

static void job_units_is_that(struct slab *s, void *arg)
{
	struct slab **looked_for = arg;

	if (s == *looked_for)
		*looked_for = NULL;
}

/* Slabs of parameters are for all ranks of their device; gradients and optimizer state
 * are not; buffers are for their rank alone. */
static bool job_units_holds_params(const struct job *job, const struct slab *s)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		for (unsigned d = 0; d < job->units[i]->n_parts; d++)
			if (job->units[i]->parts[d].params.slab == s)
				return true;
	return false;
}

struct slab *job_slab_for(struct member *m, uint32_t id)
{
	struct job *job = m->job;
	struct slab *s = slab_find(m->device, id);
	struct slab *own = s;

	if (!s || m->state == MEMBER_DEAD || m->state == MEMBER_LEFT)
		return NULL;
	if (s == m->device->ready || s == member_signals_slab(m))
		return s;
	if (s->payer != &job->quota || s->device != m->device)
		return NULL;
	if (s->class == MEM_FULL)
		return s;
	if (s->class == MEM_SHARD)
		return job_units_holds_params(job, s) ||
				       (s->writable && s->owner_rank == (int)m->rank)
			       ? s
			       : NULL;
	pool_each_slab(&m->pool, job_units_is_that, &own);
	return own ? NULL : s;
}
