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
 */
#include "core/check.h"
#include "op/reduce_run.h"
#include "op/sparse.h"

static struct sparse_work *work_of(const struct coll *c)
{
	return c->work;
}

bool sparse_folds(const struct unit *u, const struct reduce_plan *plan)
{
	const state_unit *rec = u->rec;

	return rec->reduce_profile < PROFILE_DDP &&
	       (rec->strategy == STRATEGY_HYBRID || plan->sum_dtype != DTYPE_FP32);
}

static uint32_t partials_on(const struct coll *c, const struct sparse_work *w, unsigned d)
{
	return w->whole ? c->parts[d].n / c->unit->rec->shard_ranks : 1;
}

void sparse_fold_init(const struct coll *c, struct sparse_work *w)
{
	uint64_t bytes = w->elements * dtype_size(w->plan.sum_dtype);

	w->whole = reduce_whole_replicas(c);
	for (unsigned d = 0; d < c->n_parts; d++) {
		uint32_t here = partials_on(c, w, d);

		w->here = here > w->here ? here : w->here;
	}
	CHECK(w->here > 0);
	w->stride = (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
}

uint64_t sparse_fold_scratch(const struct coll *c, unsigned which)
{
	const struct sparse_work *w = work_of(c);

	if (which == SPARSE_PARTIALS)
		return w->here * w->stride;
	return which == SPARSE_SUMS ? w->stride : 0;
}

static char *sums(const struct coll *c, unsigned d)
{
	return region_addr(&c->parts[d].scratch[SPARSE_SUMS]);
}

static char *partial(const struct coll *c, unsigned d, uint32_t j)
{
	return (char *)region_addr(&c->parts[d].scratch[SPARSE_PARTIALS]) + j * work_of(c)->stride;
}

/* Sums from sums. */
static struct k_reduce of_sums(const struct sparse_work *w, void *out, const void **in, unsigned k)
{
	return (struct k_reduce){ .out = out,
				  .out_dtype = w->plan.sum_dtype,
				  .in = in,
				  .k = k,
				  .in_dtype = w->plan.sum_dtype,
				  .sum_dtype = w->plan.sum_dtype };
}

/* -------------------------------------------------------------------- the end */

static void add_to_gradient(struct coll *c)
{
	struct sparse_work *w = work_of(c);

	if (!coll_need_kops(c, 1))
		return;
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct unit_run run = sparse_run(c, d);
		struct k_reduce r = of_sums(w, sparse_gradient(c, d), &w->tables[d], 1);

		w->tables[d] = sums(c, d) + run.first * dtype_size(w->plan.sum_dtype);
		r.out_dtype = DTYPE_FP32;
		r.post = w->plan.post;
		r.accumulate = true;
		if (run.n)
			coll_kop(&c->parts[d], KOP_REDUCE, run.n)->reduce = r;
	}
	coll_kernels(c, w->done);
}

static void between(struct coll *c)
{
	const struct sparse_work *w = work_of(c);
	void *data[NODE_MAX_DEVICES];

	if (c->n_parts == 1) {
		add_to_gradient(c);
		return;
	}
	if (!coll_can_talk(c))
		return;
	for (unsigned d = 0; d < c->n_parts; d++)
		data[d] = sums(c, d);
	comm_all_reduce(coll_between(c), coll_comm(c, add_to_gradient), data, w->elements,
			w->plan.sum_dtype, REDUCE_SUM);
}

/* The replicas of a device. */
static void add_replicas(struct coll *c)
{
	struct sparse_work *w = work_of(c);

	if (!coll_need_kops(c, 1))
		return;
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct k_reduce r =
			of_sums(w, sums(c, d), &w->partials[d * w->here], partials_on(c, w, d));

		r.pre = w->plan.replica;
		coll_kop(&c->parts[d], KOP_REDUCE, w->elements)->reduce = r;
	}
	coll_kernels(c, between);
}

/* Each replica's sum, in place. */
static void finish_partials(struct coll *c)
{
	struct sparse_work *w = work_of(c);

	if (!coll_need_kops(c, w->here))
		return;
	for (unsigned d = 0; d < c->n_parts; d++) {
		for (uint32_t j = 0; j < partials_on(c, w, d); j++) {
			const void **in = &w->partials[d * w->here + j];
			struct k_reduce r = of_sums(w, partial(c, d, j), in, 1);

			*in = partial(c, d, j);
			r.post = w->plan.partial;
			if (r.post.how != K_FACTOR_NONE)
				coll_kop(&c->parts[d], KOP_REDUCE, w->elements)->reduce = r;
		}
	}
	coll_kernels(c, add_replicas);
}

/* ------------------------------------------------------------- rank after rank */

static void next_rank(struct coll *c);

/* The first of a replica is what the others are added to. */
static void fold_rank(struct coll *c)
{
	struct sparse_work *w = work_of(c);

	if (!coll_need_kops(c, 1))
		return;
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];
		uint32_t k = p->n / partials_on(c, w, d);
		struct k_reduce r = of_sums(w, NULL, &w->tables[d], 1);

		if (c->turn >= p->n)
			continue;
		w->tables[d] = region_addr(&p->scratch[SPARSE_TABLE]);
		r.out = partial(c, d, c->turn / k);
		r.in_dtype = DTYPE_FP32;
		r.pre = w->plan.pre;
		r.accumulate = c->turn % k;
		coll_kop(p, KOP_REDUCE, w->elements)->reduce = r;
	}
	c->turn++;
	coll_kernels(c, next_rank);
}

static void add_rows(struct coll *c)
{
	if (!coll_need_kops(c, 1))
		return;
	for (unsigned d = 0; d < c->n_parts; d++)
		sparse_add_rows(c, d);
	coll_kernels(c, fold_rank);
}

static void next_rank(struct coll *c)
{
	bool any = false;

	if (!coll_need_kops(c, 1))
		return;
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];

		if (c->turn >= p->n)
			continue;
		any = true;
		coll_kop(p, KOP_FILL, work_of(c)->elements)->fill =
			(struct k_fill){ .dst = region_addr(&p->scratch[SPARSE_TABLE]),
					 .kind = FILL_CONSTANT };
	}
	if (any)
		coll_kernels(c, add_rows);
	else
		finish_partials(c);
}

void sparse_fold(struct coll *c, void (*done)(struct coll *c))
{
	work_of(c)->done = done;
	c->turn = 0;
	next_rank(c);
}
