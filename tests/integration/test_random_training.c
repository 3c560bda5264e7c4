/*
 * Trainings drawn by lot (lib/random_case.h), each against what it must come to, tensor by
 * tensor (lib/train_model.h): parameters bit for bit after every step. One process is all
 * ranks, so that a case is cheap.
 *
 *   SHARDD_TEST_SEED=N   the first case's seed; the next ones count on
 *   SHARDD_TEST_CASES=N  how many
 */
#include <criterion/criterion.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "train_model.h"
#include "trainfix.h"

TestSuite(random_training, .timeout = 8000);

/* One case under way. */
struct play {
	struct random_case rc;
	struct train_model model;
	uint64_t lot; /* of what does not matter: who does what, in which order */
	shardd_client *c[CASE_MAX_RANKS]; /* by index in the group */
	shardd_group group;
	shardd_ddp ddp; /* of the units in buckets; 0: there are none */
	shardd_unit units[CASE_MAX_UNITS];
	struct shardd_unit_info info[CASE_MAX_UNITS];
	struct shardd_tensor_place places[CASE_MAX_UNITS][CASE_MAX_TENSORS];
};

static uint32_t any_rank(struct play *p)
{
	return random_below(&p->lot, p->rc.world);
}

static const struct case_unit *unit_of(const struct play *p, unsigned u)
{
	return &p->rc.units[u];
}

/* ------------------------------------------------------- ops of all the ranks */

struct all {
	shardd_ticket t[CASE_MAX_RANKS];
	struct shardd_result result[CASE_MAX_RANKS];
};

static void wait_all(struct play *p, struct all *a)
{
	for (uint32_t r = 0; r < p->rc.world; r++)
		TRAIN_OK(shardd_wait(p->c[r], a->t[r], -1, &a->result[r], &train_err));
}

/* The op @verb of every rank at once; @rank may be in @options. */
#define ALL_WITH(p, a, verb, options)                                                         \
	do {                                                                                  \
		for (uint32_t rank = 0; rank < (p)->rc.world; rank++)                         \
			TRAIN_OK(shardd_submit_##verb((p)->c[rank], (options), &(a)->t[rank], \
						      &train_err));                           \
		wait_all((p), (a));                                                           \
	} while (0)
#define ALL(p, a, verb, ...) ALL_WITH(p, a, verb, SHARDD_OPTIONS(verb, __VA_ARGS__))

/* ----------------------------------------------------------------- the model */

static void fill_tensor(const struct play *p, unsigned u, unsigned t, struct shardd_tensor *ret)
{
	const struct case_tensor *from = &unit_of(p, u)->tensors[t];

	*ret = (struct shardd_tensor){ .name = from->name,
				       .shape = from->shape,
				       .dims = from->dims,
				       .frozen = from->frozen,
				       .has_weight_decay = from->has_weight_decay,
				       .weight_decay = from->weight_decay,
				       .has_lr_factor = from->has_lr_factor,
				       .lr_factor = from->lr_factor };
	if (from->n)
		return;
	ret->alias_of = unit_of(p, (unsigned)from->of_unit)->tensors[from->of].name;
	ret->alias_unit = from->of_unit == (int)u ? NULL : p->rc.units[from->of_unit].name;
}

static void fill_unit(const struct play *p, unsigned u, const struct shardd_tensor *tensors,
		      struct shardd_unit_spec *ret)
{
	const struct case_unit *from = unit_of(p, u);
	const struct model_unit *m = &from->reduce;

	*ret = (struct shardd_unit_spec){
		.size = sizeof(*ret),
		.name = from->name,
		.tensors = tensors,
		.n_tensors = from->n_tensors,
		.group = p->group,
		.compute_dtype = (enum shardd_dtype)from->compute,
		.gradient_dtype = (enum shardd_dtype)m->gradient,
		.shard_multiple = from->multiple,
		.pre_divide = m->pre,
		.post_divide = m->post,
		.optimizer = from->optimizer,
		.layout = from->layout,
		.strategy = (enum shardd_strategy)m->strategy,
		.shard_ranks = m->shard_ranks,
		.reduce_dtype = (enum shardd_dtype)m->reduce,
		.reduce_profile = (enum shardd_reduce_profile)m->profile,
		.divide_factor = m->factor,
		.force_sum = m->force,
		.guarded = from->guarded,
		.reshard = from->reshard,
	};
}

static void read_places(struct play *p)
{
	for (unsigned u = 0; u < p->rc.n_units; u++)
		TRAIN_OK(shardd_tensor_places(p->c[0], p->units[u], p->places[u],
					      unit_of(p, u)->n_tensors, &train_err));
}

static void register_all(struct play *p)
{
	struct shardd_tensor tensors[CASE_MAX_UNITS][CASE_MAX_TENSORS];
	struct shardd_unit_spec specs[CASE_MAX_UNITS];

	for (unsigned u = 0; u < p->rc.n_units; u++) {
		for (unsigned t = 0; t < unit_of(p, u)->n_tensors; t++)
			fill_tensor(p, u, t, &tensors[u][t]);
		fill_unit(p, u, tensors[u], &specs[u]);
	}
	for (uint32_t r = 0; r < p->rc.world; r++)
		TRAIN_OK(shardd_register(p->c[r], specs, p->rc.n_units, p->info, &train_err));
	for (unsigned u = 0; u < p->rc.n_units; u++)
		p->units[u] = p->info[u].unit;
	read_places(p);
}

/* The model's parameters into the daemon: from one rank, or each its own shard. */
static void initialise(struct play *p, unsigned u)
{
	uint64_t bytes = p->info[u].packed_elements * sizeof(float), at = 0;
	uint32_t root = any_rank(p);
	bool own = random_below(&p->lot, 2);
	uint64_t buffer[CASE_MAX_RANKS] = { 0 };
	float *values = train_alloc(bytes);
	struct all a;

	for (unsigned t = 0; t < unit_of(p, u)->n_tensors; t++) {
		uint64_t n = unit_of(p, u)->tensors[t].n;

		memcpy(values + at, p->model.tensors[u][t].p, n * sizeof(float));
		at += n;
	}
	TRAINER_CHECK(at * sizeof(float) == bytes);
	for (uint32_t r = 0; r < p->rc.world; r++) {
		void *data;

		if (!own && r != root)
			continue;
		TRAIN_OK(shardd_alloc(p->c[r], bytes, &buffer[r], &data, &train_err));
		train_write(p->c[r], data, values, bytes);
	}
	if (own)
		ALL(p, &a, init, .unit = p->units[u], .buffer = buffer[rank],
		    .from = SHARDD_FROM_OWN);
	else
		ALL(p, &a, init, .unit = p->units[u], .root = p->rc.ranks[root],
		    .buffer = buffer[rank], .from = SHARDD_FROM_ROOT);
	for (uint32_t r = 0; r < p->rc.world; r++)
		if (buffer[r])
			TRAIN_OK(shardd_free(p->c[r], buffer[r], &train_err));
	free(values);
}

/* ---------------------------------------------------------------- comparing */

static bool same(float a, float b)
{
	return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof(a)) == 0;
}

static void compare_tensor(struct play *p, unsigned u, unsigned t, const float *got,
			   enum dtype dtype)
{
	const struct case_tensor *tensor = &unit_of(p, u)->tensors[t];
	const struct train_tensor *want = &p->model.tensors[u][t];
	struct k_cast narrow = { .src = want->p, .src_dtype = DTYPE_FP32, .dst_dtype = dtype };
	struct k_cast widen = { .src_dtype = dtype, .dst_dtype = DTYPE_FP32 };
	float *expected = train_alloc(tensor->n * sizeof(float));

	widen.src = narrow.dst = train_alloc(tensor->n * sizeof(float));
	widen.dst = expected;
	kernels_ref()->cast(&narrow, 0, tensor->n);
	kernels_ref()->cast(&widen, 0, tensor->n);
	for (uint64_t i = 0; i < tensor->n; i++) {
		if (same(got[i], expected[i]))
			continue;
		fprintf(stderr, "step %u, %s of %s, element %llu: %a instead of %a\n",
			p->model.step, tensor->name, unit_of(p, u)->name, (unsigned long long)i,
			(double)got[i], (double)expected[i]);
		TRAINER_CHECK(!"equal");
	}
	free(narrow.dst);
	free(expected);
}

/* @data: what gather or summon handed to rank @r. */
static void compare_unit(struct play *p, unsigned u, uint32_t r, const void *data, enum dtype dtype)
{
	uint64_t n = p->info[u].elements;
	void *copy = train_copy(p->c[r], data, n * dtype_size(dtype));
	struct k_cast widen = { .dst = train_alloc(n * sizeof(float)),
				.src = copy,
				.dst_dtype = DTYPE_FP32,
				.src_dtype = dtype };

	kernels_ref()->cast(&widen, 0, n);
	for (unsigned t = 0; t < unit_of(p, u)->n_tensors; t++)
		if (unit_of(p, u)->tensors[t].n)
			compare_tensor(p, u, t, (float *)widen.dst + p->places[u][t].offset, dtype);
	free(widen.dst);
	free(copy);
}

/* What anyone gathers, and sometimes what is stored. */
static void compare(struct play *p, unsigned u)
{
	bool write = random_below(&p->lot, 2);
	uint32_t r = any_rank(p);
	const void *data;
	struct all a;

	TRAIN_OK(shardd_gather(p->c[r], p->units[u], &data, &train_err));
	compare_unit(p, u, r, data, unit_of(p, u)->compute);
	TRAIN_OK(shardd_release(p->c[r], p->units[u], &train_err));
	if (unit_of(p, u)->compute == DTYPE_FP32 && random_below(&p->lot, 4))
		return;
	ALL(p, &a, summon, .unit = p->units[u]);
	r = any_rank(p);
	compare_unit(p, u, r, a.result[r].data, DTYPE_FP32);
	ALL(p, &a, return, .unit = p->units[u], .write = write);
}

/* ------------------------------------------------------------------- a pass */

static void fill_gradient(struct play *p, unsigned u, uint32_t r, unsigned pass)
{
	uint64_t n = p->info[u].gradient_elements;
	float *values = train_alloc(n * sizeof(float));

	for (unsigned t = 0; t < unit_of(p, u)->n_tensors; t++) {
		const struct case_tensor *tensor = &unit_of(p, u)->tensors[t];

		for (uint64_t i = 0; !tensor->frozen && i < tensor->n; i++)
			values[p->places[u][t].offset + i] =
				train_model_number(&p->model, u, t, r, p->model.step, pass, i);
	}
	train_fill_gradient(p->c[r], p->units[u], unit_of(p, u)->reduce.gradient, values, n);
	free(values);
}

static bool is_last(const struct play *p, unsigned pass)
{
	return pass + 1 == p->rc.n_passes[p->model.step];
}

/* Of one rank, in a pass of its own: forward, then into backward. */
static void begin_passes(struct play *p, unsigned u, uint32_t r)
{
	const void *data;

	TRAIN_OK(shardd_begin_pass(p->c[r], p->units[u], SHARDD_FORWARD, &data, &train_err));
	compare_unit(p, u, r, data, unit_of(p, u)->compute);
	TRAIN_OK(shardd_end_pass(p->c[r], p->units[u], SHARDD_FORWARD, false, &train_err));
	TRAIN_OK(shardd_begin_pass(p->c[r], p->units[u], SHARDD_BACKWARD, &data, &train_err));
	compare_unit(p, u, r, data, unit_of(p, u)->compute);
}

static void unit_pass(struct play *p, unsigned u, unsigned pass)
{
	char kind = unit_of(p, u)->passes[p->model.step][pass];
	bool sync = kind != 'n' && kind != 'm';
	struct all a;

	for (uint32_t r = 0; unit_of(p, u)->guarded && r < p->rc.world; r++)
		begin_passes(p, u, r);
	for (uint32_t r = 0; r < p->rc.world; r++) {
		if (kind == 'r' || (kind == 'm' && r % 2 == 0))
			continue;
		fill_gradient(p, u, r, pass);
		if (kind == 'n' || kind == 'm')
			TRAIN_OK(shardd_accumulate(p->c[r], p->units[u], &train_err));
	}
	if (kind == 'd')
		ALL(p, &a, reduce, .unit = p->units[u], .deferred = true);
	else if (sync && is_last(p, pass))
		ALL(p, &a, reduce, .unit = p->units[u]);
	else if (sync)
		ALL(p, &a, reduce, .unit = p->units[u], .more = true);
	if (unit_of(p, u)->guarded)
		ALL(p, &a, end_pass, .unit = p->units[u], .pass = SHARDD_BACKWARD, .sync = sync);
}

/* ------------------------------------------------------------- in buckets */

enum { MAX_BUCKET_TENSORS = CASE_MAX_UNITS * CASE_MAX_TENSORS };

/* What waits for the other ranks before it answers: each has a thread of its own. */
struct own_thread {
	struct play *p;
	uint32_t rank;
	pthread_t thread;
};

static void in_threads(struct play *p, void *(*fn)(void *arg))
{
	struct own_thread own[CASE_MAX_RANKS];

	for (uint32_t r = 0; r < p->rc.world; r++) {
		own[r] = (struct own_thread){ .p = p, .rank = r };
		TRAINER_CHECK(pthread_create(&own[r].thread, NULL, fn, &own[r]) == 0);
	}
	for (uint32_t r = 0; r < p->rc.world; r++)
		TRAINER_CHECK(pthread_join(own[r].thread, NULL) == 0);
}

static void *create_ddp(void *arg)
{
	struct own_thread *own = arg;
	const struct play *p = own->p;
	struct shardd_ddp_tensor sparse[MAX_BUCKET_TENSORS];
	shardd_unit units[CASE_MAX_UNITS];
	struct shardd_ddp_create_options spec = { .size = sizeof(spec),
						  .group = p->group,
						  .units = units,
						  .sparse = sparse,
						  .bucket_bytes = p->rc.bucket_bytes,
						  .static_graph = p->rc.static_graph };
	shardd_ddp ddp;

	for (unsigned u = 0; u < p->rc.n_units; u++) {
		if (!unit_of(p, u)->in_buckets)
			continue;
		units[spec.n_units++] = p->units[u];
		for (uint32_t t = 0; t < unit_of(p, u)->n_tensors; t++)
			if (unit_of(p, u)->tensors[t].sparse)
				sparse[spec.n_sparse++] =
					(struct shardd_ddp_tensor){ p->units[u], t };
	}
	TRAIN_OK(shardd_ddp_create(p->c[own->rank], &spec, &ddp, NULL, &train_err));
	if (own->rank == 0)
		own->p->ddp = ddp;
	return NULL;
}

static void *finish_ddp(void *arg)
{
	struct own_thread *own = arg;

	TRAIN_OK(shardd_ddp_finish(own->p->c[own->rank], own->p->ddp, NULL, 0, &train_err));
	return NULL;
}

/* A rank's gradients of a pass: where they are, and the values of the sparse ones. */
struct handed {
	struct shardd_ddp_view views[MAX_BUCKET_TENSORS];
	uint64_t buffers[MAX_BUCKET_TENSORS];
	uint32_t n;
};

static unsigned index_of_unit(const struct play *p, shardd_unit id)
{
	unsigned u = 0;

	while (p->units[u] != id)
		u++;
	return u;
}

/* Elements of row @row, or of all of it, in the dtype of the gradients; +0 in no row. */
static void numbers_of(const struct play *p, unsigned u, unsigned t, uint32_t r, uint64_t first,
		       uint64_t n, void *to)
{
	float *x = train_alloc(n * sizeof(*x));
	const struct k_cast cast = { .dst = to,
				     .src = x,
				     .dst_dtype = unit_of(p, u)->reduce.gradient,
				     .src_dtype = DTYPE_FP32 };

	for (uint64_t i = 0; i < n; i++)
		x[i] = train_model_number(&p->model, u, t, r, p->model.step, 0, first + i);
	kernels_ref()->cast(&cast, 0, n);
	free(x);
}

static void hand_over_rows(struct play *p, struct handed *h, uint32_t i, uint32_t r)
{
	unsigned u = index_of_unit(p, h->views[i].unit), t = h->views[i].tensor;
	const struct case_tensor *tensor = &unit_of(p, u)->tensors[t];
	uint64_t rows = tensor->shape[0], each = tensor->n / rows;
	size_t size = dtype_size(unit_of(p, u)->reduce.gradient), n = 0;
	uint32_t turn = random_below(&p->lot, (uint32_t)rows);
	char *values = train_alloc(tensor->n * size);
	int64_t present[16];
	void *data;

	for (uint64_t k = 0; k < rows; k++) {
		uint64_t row = (k + turn) % rows;

		if (!random_case_has_row(&p->rc, u, t, p->model.step, row))
			continue;
		numbers_of(p, u, t, r, row * each, each, values + n * each * size);
		present[n++] = (int64_t)row;
	}
	TRAIN_OK(shardd_alloc(p->c[r], tensor->n * size, &h->buffers[i], &data, &train_err));
	train_write(p->c[r], data, values, tensor->n * size);
	TRAIN_OK(shardd_ddp_ready_rows(p->c[r], p->ddp, i, present, n, h->buffers[i], 0,
				       &train_err));
	free(values);
}

static void hand_over(struct play *p, struct handed *h, uint32_t i, uint32_t r)
{
	unsigned u = index_of_unit(p, h->views[i].unit), t = h->views[i].tensor;
	uint64_t n = unit_of(p, u)->tensors[t].n;
	size_t bytes = n * dtype_size(unit_of(p, u)->reduce.gradient);
	void *values;

	if (unit_of(p, u)->tensors[t].sparse) {
		hand_over_rows(p, h, i, r);
		return;
	}
	TRAINER_CHECK(h->views[i].elements == n);
	values = train_alloc(bytes);
	numbers_of(p, u, t, r, 0, n, values);
	train_write(p->c[r], h->views[i].data, values, bytes);
	TRAIN_OK(shardd_ddp_ready(p->c[r], p->ddp, &i, 1, &train_err));
	free(values);
}

static uint32_t bucket_tensors(const struct play *p)
{
	uint32_t n = 0;

	for (unsigned u = 0; u < p->rc.n_units; u++)
		for (unsigned t = 0; unit_of(p, u)->in_buckets && t < unit_of(p, u)->n_tensors; t++)
			n += unit_of(p, u)->tensors[t].n && !unit_of(p, u)->tensors[t].frozen;
	return n;
}

static void each_in_passes(struct play *p, uint32_t r,
			   void (*fn)(struct play *p, unsigned u, uint32_t r))
{
	for (unsigned u = 0; u < p->rc.n_units; u++)
		if (unit_of(p, u)->in_buckets && unit_of(p, u)->guarded)
			fn(p, u, r);
}

static void end_passes(struct play *p, unsigned u, uint32_t r)
{
	TRAIN_OK(shardd_end_pass(p->c[r], p->units[u], SHARDD_BACKWARD, true, &train_err));
}

/* All units in buckets at once: gradients get ready in an order that is each rank's own. */
static void bucket_pass(struct play *p)
{
	struct handed h[CASE_MAX_RANKS] = { 0 };
	uint32_t n = bucket_tensors(p);

	for (uint32_t r = 0; r < p->rc.world; r++) {
		uint32_t turn = random_below(&p->lot, n);

		TRAIN_OK(shardd_ddp_forward(p->c[r], p->ddp, h[r].views, n, &train_err));
		each_in_passes(p, r, begin_passes);
		TRAIN_OK(shardd_ddp_backward(p->c[r], p->ddp, NULL, 0, NULL, 0, &train_err));
		for (uint32_t i = 0; i < n; i++)
			hand_over(p, &h[r], (i + turn) % n, r);
	}
	for (uint32_t r = 0; r < p->rc.world; r++) /* not before: it waits for rows on their way */
		each_in_passes(p, r, end_passes);
	in_threads(p, finish_ddp);
	for (uint32_t r = 0; r < p->rc.world; r++)
		for (uint32_t i = 0; i < n; i++)
			if (h[r].buffers[i])
				TRAIN_OK(shardd_free(p->c[r], h[r].buffers[i], &train_err));
}

static void backward(struct play *p)
{
	if (p->ddp)
		bucket_pass(p);
	for (unsigned pass = 0; pass < p->rc.n_passes[p->model.step]; pass++) {
		unsigned first = random_below(&p->lot, p->rc.n_units);

		for (unsigned i = 0; i < p->rc.n_units; i++) {
			unsigned u = (first + i) % p->rc.n_units;

			if (unit_of(p, u)->trained && !unit_of(p, u)->in_buckets)
				unit_pass(p, u, pass);
		}
	}
}

static const struct case_step *step_of(const struct play *p)
{
	return &p->rc.steps[p->model.step];
}

static struct shardd_clip_options clip_of(const struct play *p)
{
	return (struct shardd_clip_options){ .size = sizeof(struct shardd_clip_options),
					     .max_norm = step_of(p)->max_norm,
					     .norm_type = step_of(p)->norm_type,
					     .profile = step_of(p)->profile };
}

/* What becomes of the gradients, said before there are any. */
static void plan(struct play *p)
{
	const struct case_step *s = step_of(p);
	struct shardd_clip_options clip = clip_of(p);
	const struct shardd_plan_backward_options it = { .size = sizeof(it),
							 .group = p->group,
							 .clip = s->max_norm != 0 ? &clip : NULL,
							 .inv_scale = s->inv_scale,
							 .lr = s->has_lr ? &s->lr : NULL };
	struct all a;

	if (s->planned)
		ALL_WITH(p, &a, plan_backward, &it);
}

/* Equal but for the order of additions. */
static void check_norm(double got, double want)
{
	if ((isnan(got) && isnan(want)) || got == want || fabs(got - want) <= 1e-12 * want)
		return;
	fprintf(stderr, "norm %.17g instead of %.17g\n", got, want);
	TRAINER_CHECK(!"the norm");
}

/* The same, said afterwards. Return: the norm. */
static double treat(struct play *p, double want)
{
	const struct case_step *s = step_of(p);
	struct shardd_clip_options clip = clip_of(p);
	double total = want;
	struct all a;

	if (s->inv_scale != 0) {
		ALL(p, &a, unscale, .group = p->group, .inv_scale = s->inv_scale);
		for (uint32_t r = 0; r < p->rc.world; r++)
			TRAINER_CHECK(a.result[r].found_inf == p->model.found_inf);
	}
	if (s->max_norm != 0) {
		clip.group = p->group;
		ALL_WITH(p, &a, clip, &clip);
		total = a.result[any_rank(p)].total_norm;
		check_norm(total, want);
	}
	if (s->clamp != 0)
		ALL(p, &a, clip, .group = p->group, .value = s->clamp, .units = NULL, .n_units = 0,
		    .by_value = true);
	return total;
}

static void step_shard(shardd_client *c, const struct shardd_shard *shard)
{
	size_t bytes = shard->elements * sizeof(float);
	float *x = train_copy(c, shard->params, bytes), *g = train_copy(c, shard->gradient, bytes);

	for (uint64_t i = 0; i < shard->elements; i++)
		x[i] -= CASE_OWN_RATE * g[i];
	train_write(c, shard->params, x, bytes);
	free(x);
	free(g);
}

/* The trainers' own optimizer, on what each of them has of a unit. */
static void step_own(struct play *p, uint32_t r)
{
	struct shardd_shard shard;

	TRAIN_OK(shardd_next_shard(p->c[r], p->group, &shard, &train_err));
	if (shard.elements)
		step_shard(p->c[r], &shard);
	TRAIN_OK(shardd_shard_done(p->c[r], shard.unit, &train_err));
}

static void step_all_own(struct play *p)
{
	for (unsigned u = 0; u < p->rc.n_units; u++)
		for (uint32_t r = 0; unit_of(p, u)->own_optimizer && r < p->rc.world; r++)
			if (unit_of(p, u)->trained)
				step_own(p, r);
}

/* Return: the norm. */
static double step_group(struct play *p, double want)
{
	const struct case_step *s = step_of(p);
	double total = s->planned ? want : treat(p, want);
	const struct shardd_step_options o = { .size = sizeof(o),
					       .group = p->group,
					       .lr = s->has_lr && !s->planned ? &s->lr : NULL,
					       .skip_if_found = s->inv_scale != 0 && !s->planned,
					       .discard = s->discard };
	struct all a;

	ALL_WITH(p, &a, step, &o);
	TRAINER_CHECK(a.result[0].skipped == train_model_skips(&p->model));
	if (!s->planned || s->max_norm == 0)
		return total;
	TRAINER_CHECK(a.result[0].has_total_norm == !s->discard);
	if (s->discard)
		return total;
	check_norm(a.result[0].total_norm, want);
	return a.result[0].total_norm;
}

/* What reductions divide by from here on. */
static void set_factors(struct play *p)
{
	for (unsigned u = 0; u < p->rc.n_units; u++) {
		const struct case_factors *f = &unit_of(p, u)->factors[p->model.step];
		struct shardd_set_factors_options to = { .size = sizeof(to),
							 .unit = p->units[u],
							 .pre_divide = f->pre,
							 .post_divide = f->post,
							 .divide_factor = f->factor,
							 .force_sum = f->force };
		struct all a;

		if (f->given)
			ALL_WITH(p, &a, set_factors, &to);
	}
}

/* Lists of any guarded units, or none any more: each rank's own. They change no number. */
static void set_lists(struct play *p, unsigned u)
{
	for (uint32_t r = 0; r < p->rc.world; r++)
		for (int pass = SHARDD_FORWARD; pass <= SHARDD_BACKWARD; pass++) {
			shardd_unit list[CASE_MAX_UNITS];
			size_t n = 0;

			for (unsigned i = 0; i < p->rc.n_units; i++)
				if (unit_of(p, i)->guarded && random_below(&p->lot, 3))
					list[n++] = p->units[i];
			TRAIN_OK(shardd_set_prefetch(p->c[r], p->units[u], (enum shardd_pass)pass,
						     list, n, &train_err));
		}
}

static void train_step(struct play *p)
{
	double total;

	set_factors(p);
	for (unsigned u = 0; p->rc.prefetch && u < p->rc.n_units; u++)
		if (unit_of(p, u)->guarded && random_below(&p->lot, 2))
			set_lists(p, u);
	plan(p);
	backward(p);
	step_all_own(p);
	total = step_group(p, train_model_backward(&p->model));
	train_model_step(&p->model, total);
	for (unsigned u = 0; u < p->rc.n_units; u++)
		compare(p, u);
}

/* Convert the layout of a unit: no number changes. */
static void convert(struct play *p)
{
	unsigned u = random_below(&p->lot, p->rc.n_units);
	const struct model_unit *m = &unit_of(p, u)->reduce;
	bool rows = random_below(&p->lot, 2);
	struct shardd_convert_options to = {
		.size = sizeof(to),
		.units = &p->units[u],
		.n_units = 1,
		.layout = rows ? SHARDD_LAYOUT_DIM0 : SHARDD_LAYOUT_FLAT,
		.shard_multiple = rows ? 0 : 1 + random_below(&p->lot, 5),
		.strategy = (enum shardd_strategy)m->strategy,
		.shard_ranks = m->shard_ranks,
	};
	struct all a;

	if (random_below(&p->lot, 4))
		return;
	ALL_WITH(p, &a, convert, &to);
	p->rc.units[u].layout = to.layout;
	p->rc.units[u].multiple = to.shard_multiple;
	register_all(p); /* they are found, and as they are now */
}

/* A client stays on the device of its first job: the ranks of a case may be anywhere. Devices
 * count in the order of their first rank. */
static void read_placement(struct play *p, struct model_world *w)
{
	struct shardd_info on[CASE_MAX_RANKS];

	model_world_init(w, p->rc.world, 1, !train_on_host());
	w->devices = 0;
	for (uint32_t r = 0; r < p->rc.world; r++) {
		uint32_t same = 0;

		on[r] = (struct shardd_info){ .size = sizeof(on[r]) };
		TRAIN_OK(shardd_get_info(p->c[r], &on[r], &train_err));
		while (strcmp(on[same].device.id, on[r].device.id) != 0)
			same++;
		w->device_of[r] = same < r ? w->device_of[same] : w->devices++;
	}
}

static void make_group(struct play *p)
{
	for (uint32_t r = 0; p->rc.grouped && r < p->rc.world; r++)
		TRAIN_OK(shardd_group_create(p->c[r], "group", p->rc.ranks, p->rc.world, &p->group,
					     &train_err));
}

static void play(shardd_client *const *c, uint64_t seed)
{
	struct play p = { .lot = ~seed };
	struct model_world world;
	char name[32];

	random_case_draw(seed, &p.rc);
	snprintf(name, sizeof(name), "case%llu", (unsigned long long)seed);
	for (uint32_t r = 0; r < p.rc.job_world; r++)
		train_join_as(c[r],
			      &(struct trainer){ .job = name, .rank = r, .world = p.rc.job_world },
			      SHARDD_EPHEMERAL);
	for (uint32_t r = 0; r < p.rc.world; r++)
		p.c[r] = c[p.rc.ranks[r]];
	make_group(&p);
	read_placement(&p, &world);
	train_model_init(&p.model, &p.rc, &world);
	register_all(&p);
	for (unsigned u = 0; u < p.rc.n_units; u++)
		initialise(&p, u);
	if (bucket_tensors(&p))
		in_threads(&p, create_ddp);
	for (unsigned i = 0; i < p.rc.n_steps; i++) {
		train_step(&p);
		convert(&p);
	}
	for (uint32_t r = 0; r < p.rc.job_world; r++)
		TRAIN_OK(shardd_leave(c[r], &train_err));
	train_model_deinit(&p.model);
}

/* -------------------------------------------------------------------- cases */

/* A process keeps what it has mapped, and the daemon with it, until it ends: one plays no
 * more cases than this. */
#define CASES_OF_ONE 100u

struct run {
	uint64_t seed; /* of the case under way */
	uint64_t end;  /* of this process */
};

static int play_all(const struct trainer *t)
{
	struct run *run = t->arg;
	shardd_client *c[CASE_MAX_RANKS];

	for (uint32_t r = 0; r < CASE_MAX_RANKS; r++)
		c[r] = train_connect(t);
	for (; run->seed < run->end; run->seed++)
		play(c, run->seed);
	for (uint32_t r = 0; r < CASE_MAX_RANKS; r++)
		shardd_close(c[r]);
	return 0;
}

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 10) : otherwise;
}

static bool is_long(void)
{
	const char *text = getenv("SHARDD_TEST_LONG");

	return text && strcmp(text, "1") == 0;
}

Test(random_training, is_that_of_the_model, .init = trainfix_begin, .fini = trainfix_end)
{
	struct run *run = trainer_shared(sizeof(*run));
	uint64_t first = from_environment("SHARDD_TEST_SEED", 1);
	uint64_t end = first + from_environment("SHARDD_TEST_CASES", is_long() ? 20000
								     : getenv("SHARDD_TEST_BACKEND")
									     ? 200
									     : 1000);
	struct random_case rc;
	int status = 0;

	fprintf(stderr, "cases of seeds %llu to %llu\n", (unsigned long long)first,
		(unsigned long long)end - 1);
	for (run->seed = first; status == 0 && run->seed < end;) {
		run->end = end - run->seed < CASES_OF_ONE ? end : run->seed + CASES_OF_ONE;
		status = trainer_wait(trainer_start(&trainfix, "none", 0, 1, play_all, run), 600);
	}
	if (status == 0)
		return;
	random_case_draw(run->seed, &rc);
	random_case_print(&rc);
	cr_assert_fail("again with SHARDD_TEST_SEED=%llu SHARDD_TEST_CASES=1",
		       (unsigned long long)run->seed);
}

/* The draws reach what they are for: a generator that always draws the same tests little. */
struct drawn {
	unsigned worlds, profiles, kinds, whens, clips, forms, letters;
	unsigned dim0, frozen, aliases, far_aliases, settings, low, planned, scaled, discarded;
	unsigned factors, lists, parts, orders, buckets, sparse, static_graphs, in_passes;
};

static void count_unit(struct drawn *d, const struct case_unit *x, unsigned u)
{
	d->profiles |= 1u << x->reduce.profile;
	d->kinds |= 1u << x->optimizer.kind;
	d->whens |= 1u << x->optimizer.when;
	d->forms |= 1u << x->optimizer.profile;
	d->dim0 += x->layout == SHARDD_LAYOUT_DIM0;
	d->low += x->compute != DTYPE_FP32;
	for (unsigned i = 0; i < CASE_MAX_STEPS; i++)
		d->factors += x->factors[i].given;
	d->buckets += x->in_buckets;
	d->in_passes += x->in_buckets && x->guarded;
	for (const char *p = x->passes[0]; *p; p++)
		d->letters |= 1u << (strchr("sdnmr", *p) - "sdnmr");
	for (unsigned t = 0; t < x->n_tensors; t++) {
		d->frozen += x->tensors[t].frozen;
		d->aliases += !x->tensors[t].n;
		d->far_aliases += !x->tensors[t].n && x->tensors[t].of_unit != (int)u;
		d->settings += x->tensors[t].has_weight_decay;
		d->sparse += x->tensors[t].sparse;
	}
}

static void count(struct drawn *d, const struct random_case *rc)
{
	d->worlds |= 1u << rc->world;
	for (unsigned i = 0; i < rc->n_steps; i++) {
		d->clips |= rc->steps[i].max_norm != 0 ? 1u << rc->steps[i].profile : 0;
		d->planned += rc->steps[i].planned;
		d->scaled += rc->steps[i].inv_scale != 0;
		d->discarded += rc->steps[i].discard;
	}
	d->lists += rc->prefetch;
	d->parts += rc->job_world > rc->world;
	d->orders += rc->grouped && rc->ranks[0] > rc->ranks[rc->world - 1];
	for (unsigned u = 0; u < rc->n_units; u++) {
		d->static_graphs += rc->static_graph && rc->units[u].in_buckets;
		count_unit(d, &rc->units[u], u);
	}
}

Test(random_training, draws_of_all_kinds)
{
	struct drawn d = { 0 };
	struct random_case rc;

	for (uint64_t seed = 1; seed <= 1000; seed++) {
		random_case_draw(seed, &rc);
		count(&d, &rc);
	}
	cr_assert_eq(d.worlds, 0x1fe);  /* 1 to 8 ranks */
	cr_assert_eq(d.profiles, 0xfe); /* all reduce profiles */
	cr_assert_eq(d.kinds, 0xf);     /* none, SGD, AdamW, Adam */
	cr_assert_eq(d.whens & 0xe, 0xe);
	cr_assert_eq(d.forms, 0x17); /* all but FUSED, whose last elements depend on the cut */
	cr_assert_eq(d.clips, 0xe);
	cr_assert_eq(d.letters, 0x1f);
	cr_assert(d.dim0 > 100 && d.frozen > 100 && d.aliases > 100 && d.far_aliases > 20);
	cr_assert(d.settings > 100 && d.low > 100 && d.planned > 50);
	cr_assert(d.scaled > 50 && d.discarded > 20);
	cr_assert(d.factors > 100 && d.lists > 100 && d.parts > 100 && d.orders > 50);
	cr_assert(d.buckets > 200 && d.sparse > 100 && d.static_graphs > 50 && d.in_passes > 50);
}
