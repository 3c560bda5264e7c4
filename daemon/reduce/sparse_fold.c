/*
 * ReduceSparse where the order in which ranks are added shows: as if every rank had brought
 * the gradient of the whole tensor, 0 where it has no rows, and Reduce had taken them
 * (reduce_run.h). One table on each device serves its ranks in turn:
 *
 *   0 --the rank's rows, in fp32--> table --pre--> its replica's sum, in sum_dtype
 *
 * and when all have had theirs the sums go the way of Reduce's:
 *
 *   --partial--> --replica--> added over replicas and devices --post--> added to the gradient
 *
 * Where replicas have a factor of their own, or a set of devices, and ranks on several devices,
 * each replica's sum is added between the devices first, those without a rank of it adding -0
 * (reduce_replicas.c).
 */
#include "core/check.h"
#include "job/mesh.h"
#include "op/op.h"
#include "reduce/reduce_run.h"
#include "reduce/sparse.h"
#include "work/coll.h"

bool sparse_folds(const struct unit *u, const struct reduce_plan *plan)
{
	const state_unit *rec = u->rec;

	return rec->reduce_profile < PROFILE_DDP &&
	       (rec->strategy == STRATEGY_HYBRID || plan->sum_dtype != DTYPE_FP32);
}

static uint32_t sparse_fold_partials_on(const struct coll *c, const struct sparse_work *w,
					unsigned d)
{
	if (w->crossed)
		return coll_size(c) / c->unit->rec->shard_ranks;
	return w->whole ? c->parts[d].n / c->unit->rec->shard_ranks : 1;
}

void sparse_fold_init(const struct coll *c, struct sparse_work *w)
{
	uint64_t bytes = w->elements * dtype_size(w->plan.sum_dtype);

	w->whole = reduce_whole_replicas(c);
	w->crossed = !w->whole && coll_size(c) > c->unit->rec->shard_ranks &&
		     (w->plan.partial.how || w->plan.replica.how || mesh_is_needed(c->unit));
	for (unsigned d = 0; d < c->n_parts; d++) {
		uint32_t here = sparse_fold_partials_on(c, w, d);

		w->here = here > w->here ? here : w->here;
	}
	CHECK(w->here > 0);
	w->stride = (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
}

uint64_t sparse_fold_scratch(const struct coll *c, unsigned which)
{
	const struct sparse_work *w = sparse_of(c);

	if (which == SPARSE_PARTIALS)
		return w->here * w->stride;
	return which == SPARSE_SUMS ? w->stride : 0;
}

static char *sparse_fold_sums(const struct coll *c, unsigned d)
{
	return region_addr(&c->parts[d].scratch[SPARSE_SUMS]);
}

static char *sparse_fold_partial(const struct coll *c, unsigned d, uint32_t j)
{
	CHECK(j < sparse_of(c)->here);
	return (char *)region_addr(&c->parts[d].scratch[SPARSE_PARTIALS]) +
	       j * sparse_of(c)->stride;
}

/* Sums from sums. */
static struct k_reduce sparse_fold_of_sums(const struct sparse_work *w, void *out, const void **in,
					   unsigned k)
{
	return (struct k_reduce){ .out = out,
				  .out_dtype = w->plan.sum_dtype,
				  .in = in,
				  .k = k,
				  .in_dtype = w->plan.sum_dtype,
				  .sum_dtype = w->plan.sum_dtype };
}

/* -------------------------------------------------------------------- the end */

static enum res sparse_fold_add_to_gradient(struct coll *c)
{
	struct sparse_work *w = sparse_of(c);

	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct unit_run run = sparse_run(c, d);
		struct k_reduce r = sparse_fold_of_sums(w, sparse_gradient(c, d), &w->tables[d], 1);

		w->tables[d] = sparse_fold_sums(c, d) + run.first * dtype_size(w->plan.sum_dtype);
		r.out_dtype = DTYPE_FP32;
		r.post = w->plan.post;
		r.accumulate = true;
		if (run.n)
			coll_launch(&c->parts[d], LAUNCH_REDUCE, run.n)->reduce = r;
	}
	return coll_kernels(c);
}

static enum res sparse_fold_between(struct coll *c)
{
	const struct sparse_work *w = sparse_of(c);
	void *data[NODE_MAX_DEVICES];

	if (coll_is_alone(c) || w->crossed)
		return RES_DONE;
	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++)
		data[d] = sparse_fold_sums(c, d);
	coll_all_reduce(c, data, w->elements, w->plan.sum_dtype, REDUCE_SUM);
	return RES_WAIT;
}

/* The replicas of a device. */
static enum res sparse_fold_add_replicas(struct coll *c)
{
	struct sparse_work *w = sparse_of(c);

	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct k_reduce r =
			sparse_fold_of_sums(w, sparse_fold_sums(c, d), &w->partials[d * w->here],
					    sparse_fold_partials_on(c, w, d));

		r.pre = w->plan.replica;
		coll_launch(&c->parts[d], LAUNCH_REDUCE, w->elements)->reduce = r;
	}
	return coll_kernels(c);
}

/* Each replica's sum, in place. */
static enum res sparse_fold_finish_partials(struct coll *c)
{
	struct sparse_work *w = sparse_of(c);

	RES_TRY(coll_need_launches(c, w->here));
	for (unsigned d = 0; d < c->n_parts; d++) {
		for (uint32_t j = 0; j < sparse_fold_partials_on(c, w, d); j++) {
			const void **in = &w->partials[d * w->here + j];
			struct k_reduce r =
				sparse_fold_of_sums(w, sparse_fold_partial(c, d, j), in, 1);

			*in = sparse_fold_partial(c, d, j);
			r.post = w->plan.partial;
			if (r.post.how != K_FACTOR_NONE)
				coll_launch(&c->parts[d], LAUNCH_REDUCE, w->elements)->reduce = r;
		}
	}
	return coll_kernels(c);
}

/* What is between two partials is added too, and not looked at. */
static enum res sparse_fold_between_replicas(struct coll *c)
{
	const struct sparse_work *w = sparse_of(c);
	size_t size = dtype_size(w->plan.sum_dtype);
	void *data[NODE_MAX_DEVICES];

	CHECK(size > 0);
	if (!w->crossed)
		return RES_DONE;
	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++)
		data[d] = sparse_fold_partial(c, d, 0);
	coll_all_reduce(c, data, w->here * w->stride / size, w->plan.sum_dtype, REDUCE_SUM);
	return RES_WAIT;
}

/* -0 in all partials: whatever is added to it stays what it is. Of 16 bits two in one. */
static enum res sparse_fold_fill_partials(struct coll *c)
{
	const struct sparse_work *w = sparse_of(c);
	double nothing = w->plan.sum_dtype == DTYPE_FP32 ? -0.0 : -0x1p-134;

	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++)
		coll_launch(&c->parts[d], LAUNCH_FILL, w->here * w->stride / sizeof(float))->fill =
			(struct k_fill){ .dst = (float *)sparse_fold_partial(c, d, 0),
					 .kind = FILL_CONSTANT,
					 .a = (float)nothing };
	return coll_kernels(c);
}

/* ------------------------------------------------------------- rank after rank */

/* Which of the device's partials is that of the member whose turn it is, and whether it is
 * the first that is added to it there. */
static uint32_t sparse_fold_partial_of(const struct coll *c, unsigned d, bool *ret_first)
{
	const struct coll_part *p = &c->parts[d];
	uint32_t shard_ranks = c->unit->rec->shard_ranks,
		 k = p->n / sparse_fold_partials_on(c, sparse_of(c), d), replica;

	if (!sparse_of(c)->crossed) {
		*ret_first = c->turn % k == 0;
		return c->turn / k;
	}
	replica = group_member_here(c->group, p->members[c->turn]) / shard_ranks;
	*ret_first = c->turn == 0 ||
		     group_member_here(c->group, p->members[c->turn - 1]) / shard_ranks != replica;
	return replica;
}

/* The first of a replica is what the others are added to. */
static enum res sparse_fold_rank(struct coll *c)
{
	struct sparse_work *w = sparse_of(c);

	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];
		struct k_reduce r = sparse_fold_of_sums(w, NULL, &w->tables[d], 1);
		bool first;

		if (c->turn >= p->n)
			continue;
		w->tables[d] = region_addr(&p->scratch[SPARSE_TABLE]);
		r.out = sparse_fold_partial(c, d, sparse_fold_partial_of(c, d, &first));
		r.in_dtype = DTYPE_FP32;
		r.pre = w->plan.pre;
		r.accumulate = !first;
		coll_launch(p, LAUNCH_REDUCE, w->elements)->reduce = r;
	}
	c->turn++;
	return coll_kernels(c);
}

static enum res sparse_fold_add_rows(struct coll *c)
{
	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++)
		sparse_add_rows(c, d);
	return coll_kernels(c);
}

/* For the next rank of each device. Return: RES_DONE: there is none. */
static enum res sparse_fold_clear_table(struct coll *c)
{
	bool any = false;

	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];

		if (c->turn >= p->n)
			continue;
		any = true;
		coll_launch(p, LAUNCH_FILL, sparse_of(c)->elements)->fill =
			(struct k_fill){ .dst = region_addr(&p->scratch[SPARSE_TABLE]),
					 .kind = FILL_CONSTANT };
	}
	return any ? coll_kernels(c) : RES_DONE;
}

enum sparse_fold_stage {
	FOLD_BEGIN,
	FOLD_CLEAR,
	FOLD_ROWS,
	FOLD_RANK,
	FOLD_BETWEEN_REPLICAS,
	FOLD_PARTIALS,
	FOLD_REPLICAS,
	FOLD_BETWEEN,
	FOLD_GRADIENT,
	FOLD_DONE
};

/* CLEAR to RANK once for each rank of a device. */
enum res sparse_fold_tick(struct coll *c)
{
	struct sparse_work *w = sparse_of(c);

	switch ((enum sparse_fold_stage)w->fold_stage) {
	case FOLD_BEGIN:
		c->turn = 0;
		w->fold_stage = FOLD_CLEAR;
		if (w->crossed)
			return sparse_fold_fill_partials(c);
		fallthrough;
	case FOLD_CLEAR:
		w->fold_stage = FOLD_ROWS;
		RES_TRY(sparse_fold_clear_table(c));
		w->fold_stage = FOLD_BETWEEN_REPLICAS;
		return sparse_fold_tick(c);
	case FOLD_ROWS:
		w->fold_stage = FOLD_RANK;
		return sparse_fold_add_rows(c);
	case FOLD_RANK:
		w->fold_stage = FOLD_CLEAR;
		return sparse_fold_rank(c);
	case FOLD_BETWEEN_REPLICAS:
		w->fold_stage = FOLD_PARTIALS;
		RES_TRY(sparse_fold_between_replicas(c));
		fallthrough;
	case FOLD_PARTIALS:
		w->fold_stage = FOLD_REPLICAS;
		return sparse_fold_finish_partials(c);
	case FOLD_REPLICAS:
		w->fold_stage = FOLD_BETWEEN;
		return sparse_fold_add_replicas(c);
	case FOLD_BETWEEN:
		w->fold_stage = FOLD_GRADIENT;
		RES_TRY(sparse_fold_between(c));
		fallthrough;
	case FOLD_GRADIENT:
		w->fold_stage = FOLD_DONE;
		return sparse_fold_add_to_gradient(c);
	case FOLD_DONE:
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}
