/*
 * Reductions in which replicas have ranks on several devices, and what a replica comes to has a
 * factor of its own: FSDP2 averages twice, and between the two it rounds. The devices' sums
 * cannot stand for the replicas' there. So the replicas' ranks are added between all devices, one
 * replica after the other; who has no rank of it adds nothing:
 *
 *   its ranks here --fold--> sums --pack--> (between devices) --> segment --partial--> partials
 *   ... the next replica ...      partials, when all are there --replica, fold, post--> shards
 *
 * On each device the partials are of the segment of the sum that the device gets.
 */
#include "core/check.h"
#include "reduce/reduce_run.h"
#include "unit/pack.h"
#include "unit/runs.h"
#include "work/coll.h"

/* ------------------------------------------------------------ between devices */

uint64_t reduce_segment(const struct coll *c)
{
	return c->unit->spread == 1 ? c->unit->layout.elements : unit_part_elements(c->unit);
}

enum res reduce_check_chain(struct coll *c)
{
	const struct reduce_run *run = reduce_of(c)->run;

	if (!run->chained)
		return RES_DONE;
	RES_TRY(chain_check(c));
	if ((!run->apart && !run->crossed && !reduce_tail(c).how) || run->sets ||
	    !chain_is_wanted(c->group))
		return RES_DONE;
	c->everywhere = true;
	fault_set(c->fault, FAULT_UNIMPLEMENTED, NULL,
		  "Reduce of unit '%.100s': order: ranks is not possible for it, since its "
		  "replicas are "
		  "summed by themselves, or its all-reduce is deferred: set order: devices on all "
		  "nodes",
		  c->unit->rec->name);
	return RES_FAILED;
}

/* Element @first of the sum, which has the parts one behind the other, in a gradient: the piece of a
 * tensor, or the gap before the next one. */
static const void *reduce_replicas_packed(const struct chain *ch, const char *in, uint64_t first,
					  uint64_t *n)
{
	const struct unit *u = ch->c->unit;
	uint64_t part = unit_part_elements(u), at = first % part, end = part;
	struct unit_run run;

	for (uint32_t t = 0; t < u->rec->n_tensors; t++) {
		if (u->tensors[t].frozen ||
		    !unit_position_run(u, (unsigned)(first / part), t, &run))
			continue;
		if (at >= run.at && at < run.at + run.n) {
			uint64_t left = run.at + run.n - at;

			*n = left < *n ? left : *n;
			return in + (run.full + at - run.at) * dtype_size(ch->in_dtype);
		}
		if (run.at > at && run.at < end)
			end = run.at;
	}
	*n = end - at < *n ? end - at : *n;
	return NULL;
}

static const void *reduce_replicas_source(const struct chain *ch, unsigned d, uint32_t k,
					  uint64_t first, uint64_t *n, struct k_factor *pre)
{
	const char *in = ch->c->parts[d].inputs[k];

	(void)pre;
	return unit_is_packed(ch->c->unit) ? reduce_replicas_packed(ch, in, first, n)
					   : in + first * dtype_size(ch->in_dtype);
}

static void reduce_replicas_chain(struct coll *c, void *const *recv)
{
	struct chain *ch = &reduce_of(c)->run->chain;

	*ch = (struct chain){ .c = c,
			      .source = reduce_replicas_source,
			      .in_dtype = reduce_input_dtype(c),
			      .sum_dtype = reduce_of(c)->run->plan.sum_dtype,
			      .pre = reduce_head(c),
			      .post = reduce_tail(c) };
	chain_talk(ch, recv, reduce_segment(c), c->unit->spread == 1);
}

/* Small reductions between nodes come right behind each other, and none waits until the one before is over.
 * What reads gradients waits for the ops; but not a gather, which must not see parameters that are stepped
 * in backward on some nodes only. Large ones would take much memory at once. */
bool reduce_lets_others_talk(const struct coll *c)
{
	return group_spans(c->group) && c->unit->rec->optimizer->when == OPTIM_AT_STEP &&
	       unit_gradient_bytes(c->unit) <= c->job->node->limits.reduce_batch_bytes;
}

/* Where every device has all of the unit it gets all of the sum; else, in place, its own
 * segment of it. */
enum res reduce_talk(struct coll *c)
{
	enum dtype dtype = reduce_of(c)->run->plan.sum_dtype;
	const void *send[NODE_MAX_DEVICES];
	void *recv[NODE_MAX_DEVICES];

	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++) {
		send[d] = region_addr(&c->parts[d].scratch[reduce_sums(c)]);
		recv[d] = (char *)send[d] + c->unit->parts[d].begin * dtype_size(dtype);
		c->parts[d].sums = recv[d];
	}
	if (reduce_of(c)->run->sets)
		coll_talks_over(c, COLL_OVER_SETS);
	if (reduce_of(c)->run->chained)
		reduce_replicas_chain(c, recv);
	else if (c->unit->spread == 1)
		coll_all_reduce(c, recv, reduce_segment(c), dtype, REDUCE_SUM);
	else
		coll_reduce_scatter(c, send, recv, reduce_segment(c), dtype);
	return RES_WAIT;
}

/* ------------------------------------------------------------- one replica */

/* -0: whatever is added to it stays what it is, +0 and -0 too. Of 16 bits two in one. */
static void reduce_replicas_fill_nothing(struct coll *c, struct coll_part *p, void *to)
{
	enum dtype t = reduce_of(c)->run->plan.sum_dtype;
	uint64_t n = c->unit->layout.elements;

	coll_launch(p, LAUNCH_FILL, t == DTYPE_FP32 ? n : (n + 1) / 2)->fill = (struct k_fill){
		.dst = to, .kind = FILL_CONSTANT, .a = t == DTYPE_FP32 ? -0.0 : -0x1p-134
	};
}

/* Its ranks on device @d, which are there side by side. */
static void reduce_replicas_fold_here(struct coll *c, unsigned d)
{
	const struct reduce_run *run = reduce_of(c)->run;
	struct coll_part *p = &c->parts[d];
	void *to = region_addr(&p->scratch[REDUCE_SUMS]);
	uint32_t first = 0, n = 0;

	for (uint32_t i = 0; i < p->n; i++) {
		uint32_t replica = group_member_here(c->group, p->members[i]) / run->shard_ranks;

		first += replica < run->replica;
		n += replica == run->replica;
	}
	CHECK(first + n <= p->n && n <= run->shard_ranks);
	if (n)
		coll_launch(p, LAUNCH_REDUCE, c->unit->layout.elements)->reduce =
			(struct k_reduce){ .out = to,
					   .out_dtype = run->plan.sum_dtype,
					   .in = &p->inputs[first],
					   .k = n,
					   .in_dtype = reduce_input_dtype(c),
					   .pre = run->plan.pre,
					   .sum_dtype = run->plan.sum_dtype };
	else
		reduce_replicas_fill_nothing(c, p, to);
}

static char *reduce_replicas_partial(const struct coll *c, unsigned d, uint32_t replica)
{
	const struct region *kept = &c->unit->parts[d].partials;
	char *at = region_addr(kept->slab ? kept : &c->parts[d].scratch[REDUCE_PARTIALS]);

	CHECK(replica < reduce_of(c)->run->replicas);
	return at + replica * reduce_of(c)->run->stride;
}

void reduce_keep(struct coll *c, unsigned d, void *partial)
{
	const struct reduce_run *run = reduce_of(c)->run;
	struct coll_part *p = &c->parts[d];

	p->inputs[p->n] = p->sums;
	coll_launch(p, LAUNCH_REDUCE, reduce_segment(c))->reduce =
		(struct k_reduce){ .out = partial,
				   .out_dtype = run->plan.sum_dtype,
				   .in = &p->inputs[p->n],
				   .k = 1,
				   .in_dtype = run->plan.sum_dtype,
				   .sum_dtype = run->plan.sum_dtype,
				   .post = run->plan.partial,
				   .accumulate = run->had_partials };
}

static void reduce_replicas_keep_here(struct coll *c, unsigned d)
{
	reduce_keep(c, d, reduce_replicas_partial(c, d, reduce_of(c)->run->replica));
}

/* All of them, over the replicas. */
static void reduce_replicas_fold_partials(struct coll *c, unsigned d)
{
	const struct reduce_run *run = reduce_of(c)->run;
	const void **in = &reduce_of(c)->run->partials[d * run->here];
	const struct region *grads = &c->unit->parts[d].grads;
	const struct k_reduce r = { .out = grads->slab ? region_addr(grads) : NULL,
				    .out_dtype = DTYPE_FP32,
				    .in = in,
				    .k = run->replicas,
				    .in_dtype = run->plan.sum_dtype,
				    .pre = run->plan.replica,
				    .sum_dtype = run->plan.sum_dtype,
				    .post = run->plan.post,
				    .accumulate = run->accumulate };

	for (uint32_t i = 0; i < run->replicas; i++)
		in[i] = reduce_replicas_partial(c, d, i);
	reduce_by_span(c, d, &r);
}

/* -------------------------------------------------------------------- stages */

static enum res reduce_replicas_fill(struct coll *c, void (*fill)(struct coll *c, unsigned d))
{
	RES_TRY(coll_need_launches(c, reduce_of(c)->run->launches));
	for (unsigned d = 0; d < c->n_parts; d++)
		fill(c, d);
	return RES_DONE;
}

enum reduce_replicas_stage {
	REPLICAS_BEGIN,
	REPLICAS_FOLD,
	REPLICAS_PACK,
	REPLICAS_TALK,
	REPLICAS_KEEP,
	REPLICAS_DONE
};

/* FOLD to KEEP once for each replica. */
enum res reduce_replicas_tick(struct coll *c)
{
	struct reduce_run *run = reduce_of(c)->run;

	switch ((enum reduce_replicas_stage)run->replica_stage) {
	case REPLICAS_BEGIN:
		CHECK(run->crossed && !coll_is_alone(c) && !run->plan.adds_before);
		run->replica_stage = REPLICAS_FOLD;
		fallthrough;
	case REPLICAS_FOLD:
		if (run->replica == run->replicas) {
			run->replica_stage = REPLICAS_DONE;
			if (run->defer)
				return RES_DONE;
			RES_TRY(reduce_replicas_fill(c, reduce_replicas_fold_partials));
			return reduce_kernels(c);
		}
		RES_TRY(reduce_replicas_fill(c, reduce_replicas_fold_here));
		run->replica_stage = unit_is_packed(c->unit) ? REPLICAS_PACK : REPLICAS_TALK;
		return coll_kernels(c);
	case REPLICAS_PACK:
		RES_TRY(reduce_replicas_fill(c, reduce_pack));
		run->replica_stage = REPLICAS_TALK;
		return coll_kernels(c);
	case REPLICAS_TALK:
		run->replica_stage = REPLICAS_KEEP;
		return reduce_talk(c);
	case REPLICAS_KEEP:
		RES_TRY(reduce_replicas_fill(c, reduce_replicas_keep_here));
		run->replica++;
		run->replica_stage = REPLICAS_FOLD;
		return coll_kernels(c);
	case REPLICAS_DONE:
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}
