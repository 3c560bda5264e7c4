#include "job/relayout.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "job/job.h"
#include "mem/stagger.h"

struct region *relayout_array(struct unit_part *p, unsigned i)
{
	struct region *const arrays[RELAYOUT_ARRAYS] = { &p->params, &p->grads, &p->state1,
							 &p->state2, &p->state3 };

	CHECK(i < RELAYOUT_ARRAYS);
	return arrays[i];
}

static state_region **relayout_field(state_part *p, unsigned i)
{
	state_region **const fields[RELAYOUT_ARRAYS] = { &p->params, &p->grads, &p->state1,
							 &p->state2, &p->state3 };

	return fields[i];
}

int relayout_set_array(struct unit_part *p, state_part *rec, unsigned i, const struct region *r)
{
	*relayout_array(p, i) = *r;
	return r->slab ? state_region_set(relayout_field(rec, i), r) : 0;
}

void relayout_deinit(struct relayout *x)
{
	unit_free(x->fresh);
	x->fresh = NULL;
	for (size_t i = 0; i < x->rec.n_parts; i++)
		shardd__state__v1__part__free_unpacked(x->rec.parts[i], NULL);
	free(x->rec.parts);
	x->rec.parts = NULL;
	x->rec.n_parts = 0;
}

uint64_t relayout_array_bytes(const struct unit *u, unsigned i)
{
	return i ? unit_array_bytes(&u->layout, u->spread)
		 : unit_params_bytes(u->rec, &u->layout, u->spread);
}

static uint64_t relayout_room(const struct unit *u, unsigned d, unsigned i)
{
	return stagger_room(u->parts[d].device, relayout_array_bytes(u, i));
}

bool relayout_has_array(const struct relayout *x, unsigned i)
{
	if (!i)
		return true;
	if (!x->fresh->layout.shard_elements)
		return false;
	return i == 1 ? !unit_pools_gradient(&x->rec) : i - 2 < unit_state_arrays(&x->rec);
}

static uint64_t relayout_kept_bytes(const struct relayout *x)
{
	uint64_t bytes = 0;

	for (unsigned i = 0; x->copied && i < RELAYOUT_ARRAYS; i++)
		if (i != 1 && relayout_has_array(x, i))
			bytes += relayout_array_bytes(x->fresh, i);
	return bytes;
}

void relayout_sum(const struct relayout *x, struct relayout_memory *m)
{
	for (unsigned d = 0; d < x->fresh->n_parts; d++) {
		uint64_t *bytes = m->on[x->fresh->parts[d].device->index].bytes;

		for (unsigned i = 0; i < RELAYOUT_ARRAYS; i++)
			if (relayout_has_array(x, i))
				bytes[i > 0] += relayout_array_bytes(x->fresh, i) +
						relayout_room(x->fresh, d, i);
		bytes[RELAYOUT_KEPT] += relayout_kept_bytes(x);
	}
}

int relayout_take_slab(struct job *job, struct device *d, uint64_t bytes, struct slab **ret)
{
	int r = slab_new(d, &job->quota, MEM_SHARD, job_share(job), bytes, job->rec->name, -1, ret);

	while (slab_is_short(r) && job_evict(job, UINT64_MAX))
		r = slab_new(d, &job->quota, MEM_SHARD, job_share(job), bytes, job->rec->name, -1,
			     ret);
	return job_evict_later(job, r);
}

int relayout_take(struct job *job, struct relayout_memory *m)
{
	bool later = false;
	int r = 0;

	for (unsigned i = 0; r == 0 && i < RELAYOUT_SLABS * job->node->n_devices; i++) {
		unsigned d = i / RELAYOUT_SLABS, k = i % RELAYOUT_SLABS;
		uint64_t bytes = m->on[d].bytes[k];
		struct slab **s = &m->on[d].slabs[k];

		if (bytes && !*s)
			r = slab_note_later(
				relayout_take_slab(job, &job->node->devices[d], bytes, s), &later);
	}
	return r || !later ? r : SLAB_E_LATER;
}

uint64_t relayout_bytes(const struct relayout_memory *m)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < RELAYOUT_SLABS * NODE_MAX_DEVICES; i++)
		sum += m->on[i / RELAYOUT_SLABS].bytes[i % RELAYOUT_SLABS];
	return sum;
}

static int relayout_place_kept(const struct relayout *x, struct relayout_memory *m,
			       struct unit_part *p, state_part *rec)
{
	unsigned on = p->device->index;
	struct region r = { m->on[on].slabs[RELAYOUT_KEPT], m->on[on].at[RELAYOUT_KEPT],
			    relayout_kept_bytes(x) };

	if (!x->copied)
		return 0;
	m->on[on].at[RELAYOUT_KEPT] += r.bytes;
	CHECK(r.slab && m->on[on].at[RELAYOUT_KEPT] <= m->on[on].bytes[RELAYOUT_KEPT]);
	p->kept = r;
	return state_region_set(&rec->kept, &r);
}

static int relayout_place_part(struct relayout *x, struct relayout_memory *m, unsigned d)
{
	struct unit_part *p = &x->fresh->parts[d];
	state_part *rec = state_unit_add_part(&x->rec);
	unsigned on = p->device->index;

	if (!rec)
		return -ENOMEM;
	for (unsigned i = 0; i < RELAYOUT_ARRAYS; i++) {
		uint64_t *at = &m->on[on].at[i > 0], bytes = relayout_array_bytes(x->fresh, i);
		struct region r = { m->on[on].slabs[i > 0],
				    *at + stagger_by(p->device, bytes, STAGGER_ARRAY(i)), bytes };

		if (!relayout_has_array(x, i))
			continue;
		*at += bytes + relayout_room(x->fresh, d, i);
		CHECK(*at <= m->on[on].bytes[i > 0] && m->on[on].slabs[i > 0]);
		if (relayout_set_array(p, rec, i, &r) < 0)
			return -ENOMEM;
	}
	return relayout_place_kept(x, m, p, rec);
}

int relayout_place(struct relayout *x, struct relayout_memory *m)
{
	int r = 0;

	CHECK(!x->rec.n_parts);
	for (unsigned d = 0; r == 0 && d < x->fresh->n_parts; d++)
		r = relayout_place_part(x, m, d);
	return r;
}

int relayout_enter(struct job *job, const struct relayout_memory *m)
{
	struct slab *all[RELAYOUT_SLABS * NODE_MAX_DEVICES];
	unsigned n = 0;

	for (unsigned i = 0; i < RELAYOUT_SLABS * NODE_MAX_DEVICES; i++)
		if (m->on[i / RELAYOUT_SLABS].slabs[i % RELAYOUT_SLABS])
			all[n++] = m->on[i / RELAYOUT_SLABS].slabs[i % RELAYOUT_SLABS];
	return job_add_slabs(job, all, n);
}

void relayout_memory_deinit(struct relayout_memory *m)
{
	for (unsigned d = 0; d < NODE_MAX_DEVICES; d++)
		for (unsigned k = 0; k < RELAYOUT_SLABS; k++)
			m->on[d].slabs[k] = slab_unref(m->on[d].slabs[k]);
}
