#include "store/change.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"

state_job change_head(const state_job *rec)
{
	state_job head = *rec;

	head.n_units = head.n_slabs = head.n_pooled = head.n_blobs = 0;
	head.units = NULL;
	head.slabs = NULL;
	head.pooled = NULL;
	head.blobs = NULL;
	head.doubt = NULL;
	return head;
}

state_progress change_progress(const state_job *rec)
{
	state_progress p;

	shardd__state__v1__progress__init(&p);
	p.epoch = rec->epoch;
	p.has_commit = rec->has_commit;
	p.step = rec->step;
	p.uncommitted_steps = rec->uncommitted_steps;
	p.committed_unix_s = rec->committed_unix_s;
	p.applying = rec->applying;
	p.torn = rec->torn;
	p.redo = rec->redo;
	p.anchor = rec->anchor;
	p.anchored = rec->anchored;
	p.steps_since = rec->steps_since;
	p.regular = rec->regular;
	p.partial = rec->partial;
	p.altered = rec->altered;
	p.skips_since = rec->skips_since;
	p.kept = rec->kept;
	p.rollback = rec->rollback;
	p.n_applied = rec->n_applied;
	p.applied = rec->applied;
	return p;
}

int change_base(struct journal *r, const state_all *s)
{
	size_t bytes = shardd__state__v1__state__get_packed_size(s);
	void *at = journal_base_begin(r, bytes);

	if (!at)
		return -ENOMEM;
	CHECK(shardd__state__v1__state__pack(s, at) == bytes);
	journal_base_end(r, bytes);
	return 0;
}

int change_append(struct journal *r, const state_change *c)
{
	size_t bytes = shardd__state__v1__change__get_packed_size(c);
	void *at = journal_begin(r, bytes);

	if (!at)
		return -ENOMEM;
	CHECK(shardd__state__v1__change__pack(c, at) == bytes);
	journal_end(r, bytes);
	return 0;
}

/* -------------------------------------------------------------------- applying */

static int change_damaged(struct fault *f, const char *what, uint32_t job)
{
	return fault_set(f, FAULT_INVALID, "journal",
			 "the journal of the previous daemon is damaged: %s (job number %u)", what,
			 job);
}

static size_t change_find_job(const state_all *s, uint32_t number)
{
	size_t i = 0;

	while (i < s->n_jobs && s->jobs[i]->number != number)
		i++;
	return i;
}

static int change_add_job(state_all *s, state_job *j)
{
	state_job **grown = realloc(s->jobs, (s->n_jobs + 1) * sizeof(*grown));

	if (!grown)
		return -ENOMEM;
	s->jobs = grown;
	s->jobs[s->n_jobs++] = j;
	return 0;
}

static void change_drop_job(state_all *s, size_t i)
{
	state_job_free(s->jobs[i]);
	s->jobs[i] = s->jobs[--s->n_jobs];
}

/* The head replaces all that it has; units, slabs and blobs stay the old record's, but for blobs of
 * ranks that there are no more. */
static void change_apply_head(state_job **at, state_job *head)
{
	state_job *old = *at;
	uint64_t bytes;
	uint32_t gone;

	head->n_units = old->n_units;
	head->units = STEAL_PTR(old->units);
	head->n_slabs = old->n_slabs;
	head->slabs = STEAL_PTR(old->slabs);
	head->n_pooled = old->n_pooled;
	head->pooled = STEAL_PTR(old->pooled);
	head->n_blobs = old->n_blobs;
	head->blobs = STEAL_PTR(old->blobs);
	head->doubt = STEAL_PTR(old->doubt);
	old->n_units = old->n_slabs = old->n_pooled = old->n_blobs = 0;
	state_job_drop_blobs(head, head->world_size, &gone, &bytes);
	state_job_free(old);
	*at = head;
}

static void change_apply_progress(state_job *j, state_progress *p)
{
	j->epoch = p->epoch;
	j->has_commit = p->has_commit;
	j->step = p->step;
	j->uncommitted_steps = p->uncommitted_steps;
	j->committed_unix_s = p->committed_unix_s;
	j->applying = p->applying;
	j->torn = p->torn;
	j->redo = p->redo;
	j->anchor = p->anchor;
	j->anchored = p->anchored;
	j->steps_since = p->steps_since;
	j->regular = p->regular;
	j->partial = p->partial;
	j->altered = p->altered;
	j->skips_since = p->skips_since;
	if (p->kept && !j->kept)
		state_job_keep(j);
	j->kept = p->kept;
	j->rollback = p->rollback;
	SWAP(j->n_applied, p->n_applied); /* @p is freed with the old ones */
	SWAP(j->applied, p->applied);
}

/* Takes it. */
static void change_apply_doubt(state_job *j, state_doubt *d)
{
	state_doubt_free(j->doubt);
	j->doubt = d;
	if (d->epoch)
		return;
	state_doubt_free(d);
	j->doubt = NULL;
}

/* Takes the units. */
static int change_apply_units(state_job *j, state_units_at *at, struct fault *f)
{
	for (size_t i = 0; i < at->n_units; i++) {
		size_t index = (size_t)at->first + i;

		if (index > j->n_units)
			return change_damaged(f, "a unit is missing", j->number);
		if (index < j->n_units) {
			state_unit_free(j->units[index]);
			j->units[index] = STEAL_PTR(at->units[i]);
		} else if (state_job_add_unit(j, at->units[i]) == 0) {
			at->units[i] = NULL;
		} else {
			return fault_errno(f, -ENOMEM, "reading the journal");
		}
	}
	at->n_units = 0; /* what is in the array is the job's */
	return 0;
}

static int change_apply_stepped(state_job *j, const state_stepped *run, struct fault *f)
{
	if (run->first > j->n_units || run->n > j->n_units - run->first)
		return change_damaged(f, "a step of a unit that is missing", j->number);
	for (uint32_t i = 0; i < run->n; i++) {
		if (!j->units[run->first + i]->optimizer)
			return change_damaged(f, "a step of a unit without optimizer", j->number);
		j->units[run->first + i]->optimizer->steps = run->steps;
	}
	return 0;
}

static int change_apply_slab_gone(state_job *j, uint32_t id, struct fault *f)
{
	for (size_t i = 0; i < j->n_slabs; i++)
		if (j->slabs[i]->id == id) {
			state_job_drop_slab(j, i);
			return 0;
		}
	return change_damaged(f, "a slab was freed that it had not", j->number);
}

/* Takes the slabs. */
static int change_apply_slabs(state_job *j, state_change *c, struct fault *f)
{
	for (size_t i = 0; !f->code && i < c->n_slabs_gone; i++)
		change_apply_slab_gone(j, c->slabs_gone[i], f);
	for (size_t i = 0; !f->code && i < c->n_slabs_added; i++) {
		if (state_job_take_slab(j, c->slabs_added[i]) < 0)
			return fault_errno(f, -ENOMEM, "reading the journal");
		c->slabs_added[i] = NULL;
	}
	if (!f->code)
		c->n_slabs_added = 0;
	state_job_sort_slabs(j);
	return f->code;
}

static void change_apply_pooled_gone(state_job *j, uint32_t id)
{
	for (size_t i = 0; i < j->n_pooled; i++)
		if (j->pooled[i]->slab && j->pooled[i]->slab->id == id) {
			state_job_drop_pooled(j, i);
			return;
		}
}

/* Takes the slabs. */
static int change_apply_pooled(state_job *j, state_change *c, struct fault *f)
{
	for (size_t i = 0; i < c->n_pooled_gone; i++)
		change_apply_pooled_gone(j, c->pooled_gone[i]);
	for (size_t i = 0; i < c->n_pooled_added; i++) {
		if (state_job_take_pooled(j, c->pooled_added[i]) < 0)
			return fault_errno(f, -ENOMEM, "reading the journal");
		c->pooled_added[i] = NULL;
	}
	c->n_pooled_added = 0;
	return 0;
}

/* Takes the blobs. */
static int change_apply_blobs(state_job *j, state_change *c, struct fault *f)
{
	for (size_t i = 0; i < c->n_blobs; i++)
		if (state_job_take_blob(j, &c->blobs[i]) < 0)
			return fault_errno(f, -ENOMEM, "reading the journal");
	return 0;
}

static int change_apply_to_job(state_job **at, state_change *c, struct fault *f)
{
	if (c->head)
		change_apply_head(at, STEAL_PTR(c->head));
	if (c->progress)
		change_apply_progress(*at, c->progress);
	if (c->doubt)
		change_apply_doubt(*at, STEAL_PTR(c->doubt));
	for (size_t i = 0; !f->code && i < c->n_units; i++)
		change_apply_units(*at, c->units[i], f);
	for (size_t i = 0; !f->code && i < c->n_stepped; i++)
		change_apply_stepped(*at, c->stepped[i], f);
	if (!f->code && change_apply_slabs(*at, c, f) == 0 && change_apply_pooled(*at, c, f) == 0)
		change_apply_blobs(*at, c, f);
	return f->code;
}

static int change_apply(state_all *s, state_change *c, struct fault *f)
{
	size_t i = change_find_job(s, c->job);

	if (c->next_slab)
		s->next_slab = c->next_slab;
	if (i == s->n_jobs && (!c->head || c->gone))
		return change_damaged(f, "a change of a job that it does not have", c->job);
	if (c->gone) {
		change_drop_job(s, i);
		return 0;
	}
	if (i == s->n_jobs) {
		if (c->head->number != c->job)
			return change_damaged(f, "a job with another number", c->job);
		if (change_add_job(s, c->head) < 0)
			return fault_errno(f, -ENOMEM, "reading the journal");
		c->head = NULL;
	}
	return change_apply_to_job(&s->jobs[i], c, f);
}

/* With pointers that were taken out of arrays whose count still has them. */
static void change_free(state_change *c)
{
	size_t slabs = 0, pooled = 0, blobs = 0;

	for (size_t k = 0; k < c->n_units; k++) {
		size_t kept = 0;

		for (size_t i = 0; i < c->units[k]->n_units; i++)
			if (c->units[k]->units[i])
				c->units[k]->units[kept++] = c->units[k]->units[i];
		c->units[k]->n_units = kept;
	}
	for (size_t i = 0; i < c->n_slabs_added; i++)
		if (c->slabs_added[i])
			c->slabs_added[slabs++] = c->slabs_added[i];
	c->n_slabs_added = slabs;
	for (size_t i = 0; i < c->n_pooled_added; i++)
		if (c->pooled_added[i])
			c->pooled_added[pooled++] = c->pooled_added[i];
	c->n_pooled_added = pooled;
	for (size_t i = 0; i < c->n_blobs; i++)
		if (c->blobs[i])
			c->blobs[blobs++] = c->blobs[i];
	c->n_blobs = blobs;
	shardd__state__v1__change__free_unpacked(c, NULL);
}

static int change_apply_entry(state_all *s, const void *data, size_t bytes, struct fault *f)
{
	state_change *c = shardd__state__v1__change__unpack(NULL, bytes, data);

	if (!c)
		return fault_set(f, FAULT_INVALID, "journal",
				 "the journal of the previous daemon is damaged: an entry of %zu "
				 "bytes cannot be unpacked",
				 bytes);
	change_apply(s, c, f);
	change_free(c);
	return f->code;
}

int change_read(const struct journal *r, state_all **ret, struct fault *f)
{
	state_all *s;
	const void *data;
	size_t bytes;
	uint64_t at = 0;

	if (!journal_next(r, &at, &data, &bytes))
		return fault_set(f, FAULT_INVALID, "journal",
				 "the journal of the previous daemon is damaged: it is empty");
	s = shardd__state__v1__state__unpack(NULL, bytes, data);
	if (!s)
		return fault_set(f, FAULT_INVALID, "journal",
				 "the journal of the previous daemon is damaged: its base of %zu "
				 "bytes cannot be unpacked",
				 bytes);
	while (!f->code && journal_next(r, &at, &data, &bytes))
		change_apply_entry(s, data, bytes, f);
	if (f->code) {
		state_free(s);
		return f->code;
	}
	*ret = s;
	return 0;
}
