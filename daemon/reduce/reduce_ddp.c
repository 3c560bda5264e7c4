#include "reduce/reduce_ddp.h"

#include "core/check.h"
#include "work/coll.h"

static uint32_t reduce_ddp_first_active(const struct coll *c)
{
	uint32_t i = 0;

	while (c->ops[i]->surrogate)
		CHECK(++i < c->n); /* there is none without an op of a peer */
	return i;
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

void reduce_ddp_surrogates_passed(const struct coll *c, struct ddp *d, uint32_t bucket)
{
	if (bucket + 1 != ddp_buckets_of(&d->ranks[reduce_ddp_first_active(c)])->n)
		return;
	CHECK(c->n == d->n_ranks);
	for (uint32_t i = 0; i < c->n; i++)
		d->ranks[i].passes += c->ops[i]->surrogate;
}
