#include "reduce/reduce_ddp.h"

#include <string.h>

#include "core/check.h"
#include "work/coll.h"

/* Of ranks on this node. */
static bool reduce_ddp_any_active(const struct coll *c)
{
	for (uint32_t i = 0; i < c->n; i++)
		if (!c->ops[i]->surrogate)
			return true;
	return false;
}

struct ddp *reduce_ddp_stand_in(const struct op *op, uint64_t number, uint64_t layout,
				struct fault *f)
{
	for (unsigned i = 0; i < JOB_MAX_DDPS; i++) {
		struct ddp *d = op->m->job->ddps[i];

		if (!d || d->group != op->group || d->number != number || d->epoch != op->m->epoch)
			continue;
		/* as DdpForward of a rank with inputs does */
		if (layout == 1 && d->n_layouts == 1 && d->n_arrived == d->n && ddp_rebuild(d) < 0)
			fault_set(f, FAULT_EXHAUSTED, NULL, "no memory for new buckets");
		else if (layout >= d->n_layouts)
			fault_set(f, FAULT_STATE, NULL, "ddp %u has no buckets of assignment %llu",
				  d->id, (unsigned long long)layout);
		return f->code ? NULL : d;
	}
	fault_set(f, FAULT_STATE, NULL, "this node has no ddp of the DdpCreate at number %llu",
		  (unsigned long long)number);
	return NULL;
}

void reduce_ddp_begins_pass(const struct coll *c, struct ddp *d, uint32_t bucket)
{
	if (!bucket && !reduce_ddp_any_active(c))
		d->stood_in++;
}

bool reduce_ddp_unit_is_whole(const struct coll *c, struct ddp *d, uint32_t tensor)
{
	struct unit *u = d->tensors[tensor].unit;

	if (c->ops[0]->m->epoch != c->job->rec->epoch || !ddp_reduced(d, tensor))
		return false;
	if (!u->has_gradient) /* no rank used any of it */
		job_give_grads(c->job, u);
	return u->has_gradient;
}

void reduce_ddp_surrogates_passed(const struct coll *c, struct ddp *d, unsigned layout,
				  uint32_t bucket)
{
	if (bucket + 1 != d->layouts[layout].n)
		return;
	CHECK(c->n == d->n_ranks);
	for (uint32_t i = 0; i < c->n; i++)
		d->ranks[i].passes += c->ops[i]->surrogate;
}

/* @order counts if it is known. */
struct arrival {
	uint32_t known;
	uint32_t order[];
};

uint64_t reduce_ddp_arrival_bytes(const struct coll *c, const struct ddp *d, unsigned layout,
				  uint32_t bucket)
{
	uint64_t bytes = sizeof(struct arrival) + d->n * sizeof(uint32_t);

	if (!group_spans(c->group) || !ddp_rebuilds(d) || layout || bucket + 1 != d->layouts[0].n)
		return 0;
	return (bytes + sizeof(double) - 1) / sizeof(double) * sizeof(double);
}

void reduce_ddp_arrival_fill(const struct ddp *d, void *slot)
{
	struct arrival *a = slot;

	a->known = d->has_first && d->n_arrived == d->n;
	if (a->known)
		memcpy(a->order, d->arrival, d->n * sizeof(a->order[0]));
}

enum res reduce_ddp_arrival_take(struct coll *c, struct ddp *d, const void *slot)
{
	const struct arrival *a = slot;
	int r = a->known ? ddp_arrived_elsewhere(d, a->order) : 0;

	return r < 0 ? coll_fail(c, r) : RES_DONE;
}
