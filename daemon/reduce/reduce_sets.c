/*
 * Reductions of a unit whose replicas have sets of devices of their own (unit/layout.h), as HSDP makes
 * them: a replica's ranks are added between the devices of its set, each of which gets its segment,
 * and then the replicas between the devices that have the same segment:
 *
 *   sums of a device's ranks --(in each set)--> segment --partial--> partial
 *                                                           (deferred: that is all)
 *     partial --replica--> segment --(over all sets)--> sum --post--> shards
 *
 * Without factors, and if nothing was deferred, there is no partial.
 */
#include "core/check.h"
#include "reduce/reduce_run.h"
#include "work/coll.h"

static void *reduce_sets_partial(const struct coll *c, unsigned d)
{
	const struct region *kept = &c->unit->parts[d].partials;

	return region_addr(kept->slab ? kept : &c->parts[d].scratch[REDUCE_PARTIALS]);
}

static void reduce_sets_keep(struct coll *c, unsigned d)
{
	reduce_keep(c, d, reduce_sets_partial(c, d));
}

/* What it brings to the others, where its segment was. */
static void reduce_sets_bring(struct coll *c, unsigned d)
{
	const struct reduce_run *run = reduce_of(c)->run;
	struct coll_part *p = &c->parts[d];

	p->inputs[p->n] = reduce_sets_partial(c, d);
	coll_launch(p, LAUNCH_REDUCE, reduce_segment(c))->reduce =
		(struct k_reduce){ .out = (void *)p->sums,
				   .out_dtype = run->plan.sum_dtype,
				   .in = &p->inputs[p->n],
				   .k = 1,
				   .in_dtype = run->plan.sum_dtype,
				   .pre = run->plan.replica,
				   .sum_dtype = run->plan.sum_dtype };
}

static enum res reduce_sets_kernels(struct coll *c, void (*fill)(struct coll *c, unsigned d))
{
	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++)
		fill(c, d);
	return coll_kernels(c);
}

static enum res reduce_sets_talk(struct coll *c)
{
	void *data[NODE_MAX_DEVICES];

	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++)
		data[d] = (void *)c->parts[d].sums;
	if (reduce_lets_others_talk(c))
		coll_talks_last(c);
	coll_talks_over(c, COLL_OVER_LIKE);
	coll_all_reduce(c, data, reduce_segment(c), reduce_of(c)->run->plan.sum_dtype, REDUCE_SUM);
	return RES_WAIT;
}

enum reduce_sets_stage { SETS_BEGIN, SETS_KEEP, SETS_BRING, SETS_TALK, SETS_DONE };

enum res reduce_sets_tick(struct coll *c)
{
	struct reduce_run *run = reduce_of(c)->run;

	switch ((enum reduce_sets_stage)run->replica_stage) {
	case SETS_BEGIN:
		CHECK(run->sets && !coll_is_alone(c) && !run->plan.adds_before);
		run->replica_stage = run->apart ? SETS_KEEP : SETS_TALK;
		return reduce_talk(c);
	case SETS_KEEP:
		run->replica_stage = run->defer ? SETS_DONE : SETS_BRING;
		return reduce_sets_kernels(c, reduce_sets_keep);
	case SETS_BRING:
		run->replica_stage = SETS_TALK;
		return reduce_sets_kernels(c, reduce_sets_bring);
	case SETS_TALK:
		run->replica_stage = SETS_DONE;
		return reduce_sets_talk(c);
	case SETS_DONE:
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}
