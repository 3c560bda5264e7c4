/*
 * DistributedDataParallel: buckets of gradients, held against a scalar evaluation.
 *
 * What the units got is seen through the optimizer: SGD with lr 1 and nothing else on
 * parameters that are 0 leaves p = -gradient.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

enum { TENSORS = 7, UNITS = 2, BIGGEST = 700 };

/* Two units, four and three tensors. */
static const uint64_t numels[TENSORS] = { 300, 5, 1, 700, 64, 3, 129 };
static const unsigned first_of[UNITS + 1] = { 0, 4, 7 };
enum { bucket_bytes = 1024, first_bucket_bytes = 256 };

struct variant {
	enum shardd_reduce_profile profile;
	enum dtype gradient, reduce; /* reduce: 0: the profile's own */
};

struct model {
	shardd_client *c;
	shardd_unit units[UNITS];
	uint64_t elements[UNITS];
	shardd_ddp ddp;
	struct variant v;
	struct shardd_ddp_view views[TENSORS];
};

static const struct variant plain = { SHARDD_PROFILE_DDP_BUCKET_VIEW, DTYPE_FP32, 0 };

static void register_model(struct model *m, const char *prefix)
{
	struct shardd_tensor tensors[TENSORS] = { 0 };
	struct shardd_unit_spec specs[UNITS] = { 0 };
	struct shardd_unit_info info[UNITS];
	char names[TENSORS][16], units[UNITS][32];

	for (unsigned i = 0; i < TENSORS; i++) {
		snprintf(names[i], sizeof(names[i]), "t%u", i);
		tensors[i] =
			(struct shardd_tensor){ .name = names[i], .shape = &numels[i], .dims = 1 };
	}
	for (unsigned u = 0; u < UNITS; u++) {
		snprintf(units[u], sizeof(units[u]), "%s%u", prefix, u);
		specs[u] = (struct shardd_unit_spec){
			.size = sizeof(specs[u]),
			.name = units[u],
			.tensors = &tensors[first_of[u]],
			.n_tensors = first_of[u + 1] - first_of[u],
			.strategy = SHARDD_REPLICATE,
			.gradient_dtype = (enum shardd_dtype)m->v.gradient,
			.reduce_dtype = (enum shardd_dtype)m->v.reduce,
			.reduce_profile = m->v.profile,
			.optimizer = { .kind = SHARDD_SGD, .lr = 1 },
		};
	}
	TRAIN_OK(shardd_register(m->c, specs, UNITS, info, &train_err));
	for (unsigned u = 0; u < UNITS; u++) {
		m->units[u] = info[u].unit;
		m->elements[u] = info[u].elements;
		TRAIN_OK(shardd_init_seed(m->c, m->units[u], 1, &train_err));
	}
}

static struct shardd_ddp_create_options spec_of(const struct model *m)
{
	return (struct shardd_ddp_create_options){ .size = sizeof(struct shardd_ddp_create_options),
						   .units = m->units,
						   .n_units = UNITS,
						   .bucket_bytes = bucket_bytes,
						   .first_bucket_bytes = first_bucket_bytes };
}

static void make_ddp(struct model *m, bool find_unused, bool static_graph)
{
	struct shardd_ddp_create_options spec = spec_of(m);
	uint32_t n = 0;

	spec.find_unused = find_unused;
	spec.static_graph = static_graph;
	TRAIN_OK(shardd_ddp_create(m->c, &spec, &m->ddp, &n, &train_err));
	TRAINER_CHECK(n == TENSORS);
}

static struct model test_ddp_begin(const struct trainer *t, bool find_unused, bool static_graph)
{
	struct model m = { .c = train_join(t), .v = plain };

	register_model(&m, "unit");
	make_ddp(&m, find_unused, static_graph);
	return m;
}

static void forward(struct model *m)
{
	TRAIN_OK(shardd_ddp_forward(m->c, m->ddp, m->views, TENSORS, &train_err));
	for (unsigned i = 0; i < TENSORS; i++)
		TRAINER_CHECK(m->views[i].elements == numels[i] && m->views[i].data);
}

/* What rank @rank has for tensor @i in pass @pass, in the gradients' dtype. */
static void gradient_of(const struct variant *v, uint32_t rank, unsigned i, unsigned pass, void *to)
{
	float *x = train_numbers(numels[i], rank * 1009 + i * 31 + pass * 7 + 1);
	struct k_cast cast = { to, x, v->gradient, DTYPE_FP32, false };

	x[0] = rank % 2 ? -0.0f : 0x1p-147f;
	kernels_ref()->cast(&cast, 0, numels[i]);
	free(x);
}

static void write_gradient(struct model *m, const struct trainer *t, unsigned i, unsigned pass)
{
	uint8_t values[BIGGEST * sizeof(float)];

	gradient_of(&m->v, t->rank, i, pass, values);
	train_write(m->c, m->views[i].data, values, numels[i] * dtype_size(m->v.gradient));
}

/* The view's and the hooks' is a division, whose form is the device's; the copy's a product. */
static struct k_factor factor_of(const struct variant *v, uint32_t world)
{
	enum dtype t = v->reduce ? v->reduce : v->gradient;

	if (v->profile == SHARDD_PROFILE_DDP && world > 1)
		return (struct k_factor){ K_FACTOR_MUL, t, (float)(1.0 / world) };
	return train_divide_by((float)world, t);
}

/* Average of tensor @i: in fp32, and as it stands in the views. @users: bit mask of ranks. */
static void model_average(const struct variant *v, uint32_t world, unsigned users, unsigned i,
			  unsigned pass, float *wide, void *narrow)
{
	enum dtype sum = v->reduce ? v->reduce : v->gradient;
	uint8_t in[4][BIGGEST * sizeof(float)] = { 0 };
	const void *pointers[4] = { in[0], in[1], in[2], in[3] };
	struct k_reduce r = { .out = wide,
			      .out_dtype = DTYPE_FP32,
			      .in = pointers,
			      .k = world,
			      .in_dtype = v->gradient,
			      .sum_dtype = sum };
	struct k_cast cast = { narrow, wide, v->gradient, DTYPE_FP32, false };

	r.pre = factor_of(v, world);
	for (uint32_t rank = 0; rank < world; rank++)
		if (users >> rank & 1)
			gradient_of(v, rank, i, pass, in[rank]);
	kernels_ref()->reduce(&r, 0, numels[i]);
	kernels_ref()->cast(&cast, 0, numels[i]);
}

static void check_tensor(struct model *m, uint32_t world, unsigned users, unsigned i, unsigned pass)
{
	float wide[BIGGEST];
	uint8_t narrow[BIGGEST * sizeof(float)];

	model_average(&m->v, world, users, i, pass, wide, narrow);
	TRAIN_HAS(m->c, m->views[i].data, narrow, numels[i] * dtype_size(m->v.gradient));
}

/* Params before minus params after are the gradients. @users: by tensor. */
static void check_step(struct model *m, uint32_t world, const unsigned *users, unsigned pass)
{
	float before[TENSORS * BIGGEST], after[TENSORS * BIGGEST];
	float wide[BIGGEST], want[BIGGEST];
	uint8_t narrow[BIGGEST * sizeof(float)];

	for (unsigned u = 0; u < UNITS; u++)
		train_params(m->c, m->units[u], before + u * 4 * BIGGEST,
			     m->elements[u] * sizeof(float));
	TRAIN_OK(shardd_step(m->c, SHARDD_WORLD, NULL, &train_err));
	for (unsigned u = 0; u < UNITS; u++) {
		size_t at = u * 4 * BIGGEST;

		train_params(m->c, m->units[u], after + at, m->elements[u] * sizeof(float));
		for (unsigned i = first_of[u]; i < first_of[u + 1]; at += numels[i++]) {
			struct k_sgd sgd = { .p = want, .g = wide, .lr = 1 };

			model_average(&m->v, world, users ? users[i] : ~0u, i, pass, wide, narrow);
			memcpy(want, before + at, numels[i] * sizeof(float));
			if (!users || users[i])
				kernels_ref()->sgd(&sgd, 0, numels[i]);
			TRAIN_SAME(after + at, want, numels[i] * sizeof(float));
		}
	}
}

/* One pass of all tensors; each rank marks them in an order of its own. */
static void whole_pass(struct model *m, const struct trainer *t, unsigned pass)
{
	shardd_ticket tickets[TENSORS];

	forward(m);
	TRAIN_OK(shardd_ddp_backward(m->c, m->ddp, NULL, 0, NULL, 0, &train_err));
	for (uint32_t k = 0; k < TENSORS; k++) {
		uint32_t i = (2 * TENSORS - 1 - k + t->rank) % TENSORS;

		write_gradient(m, t, i, pass);
		TRAIN_OK(shardd_submit_ddp_ready(m->c,
						 SHARDD_OPTIONS(ddp_ready, .ddp = m->ddp,
								.tensors = &i, .n_tensors = 1),
						 &tickets[k], &train_err));
	}
	for (unsigned k = 0; k < TENSORS; k++)
		TRAIN_OK(shardd_wait(m->c, tickets[k], -1, NULL, &train_err));
	TRAIN_OK(shardd_ddp_finish(m->c, m->ddp, NULL, 0, &train_err));
	for (unsigned i = 0; i < TENSORS; i++)
		check_tensor(m, t->world, ~0u, i, pass);
	check_step(m, t->world, NULL, pass);
}

static int averages_trainer(const struct trainer *t)
{
	static const struct variant variants[] = {
		{ SHARDD_PROFILE_DDP, DTYPE_FP32, 0 },
		{ SHARDD_PROFILE_DDP, DTYPE_BF16, 0 },
		{ SHARDD_PROFILE_DDP_BUCKET_VIEW, DTYPE_FP32, 0 },
		{ SHARDD_PROFILE_DDP_BUCKET_VIEW, DTYPE_FP16, 0 },
		{ SHARDD_PROFILE_DDP_HOOK, DTYPE_FP32, DTYPE_BF16 },
		{ SHARDD_PROFILE_DDP_HOOK, DTYPE_FP32, DTYPE_FP16 },
	};
	struct model m = { .c = train_join(t) };
	char prefix[16];

	for (unsigned k = 0; k < ARRAY_SIZE(variants); k++) {
		m.v = variants[k];
		snprintf(prefix, sizeof(prefix), "v%u.", k);
		register_model(&m, prefix);
		make_ddp(&m, k % 2, false);
		for (unsigned pass = 0; pass < 3; pass++)
			whole_pass(&m, t, pass);
	}
	train_leave(m.c);
	return 0;
}

Test(ddp, averages_of_one_rank, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(1, averages_trainer, NULL);
}

Test(ddp, averages_of_two_ranks, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(2, averages_trainer, NULL);
}

Test(ddp, averages_of_three_ranks, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(3, averages_trainer, NULL);
}

/* What is added in different dtypes is in different buckets. */
static int mixed_trainer(const struct trainer *t)
{
	static const struct variant variants[UNITS] = {
		{ SHARDD_PROFILE_DDP_HOOK, DTYPE_FP32, DTYPE_BF16 },
		{ SHARDD_PROFILE_DDP_HOOK, DTYPE_FP32, DTYPE_FP16 },
	};
	struct model of[UNITS] = { { .c = train_join(t), .v = variants[0] } }, m;

	of[1] = (struct model){ .c = of[0].c, .v = variants[1] };
	register_model(&of[0], "bf");
	register_model(&of[1], "fp");
	m = of[0];
	m.units[1] = of[1].units[1];
	make_ddp(&m, false, false);
	for (unsigned pass = 0; pass < 3; pass++) {
		forward(&m);
		for (unsigned i = 0; i < 4; i++)
			for (unsigned k = 4; k < TENSORS; k++)
				TRAINER_CHECK(m.views[i].bucket != m.views[k].bucket);
		TRAIN_OK(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err));
		for (uint32_t i = 0; i < TENSORS; i++) {
			m.v = variants[i >= 4];
			write_gradient(&m, t, i, pass);
			TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, &i, 1, &train_err));
		}
		TRAIN_OK(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err));
		for (unsigned i = 0; i < TENSORS; i++) {
			m.v = variants[i >= 4];
			check_tensor(&m, t->world, ~0u, i, pass);
		}
	}
	train_leave(m.c);
	return 0;
}

Test(ddp, units_with_different_reduce_dtypes, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, mixed_trainer, NULL);
}

/* ------------------------------------------------------------------- buckets */

static const uint64_t usual[] = { first_bucket_bytes, bucket_bytes };

/* @n_limits: 0: none. */
static void check_limits(const struct model *m, const uint32_t *order, const uint64_t *limits,
			 unsigned n_limits, bool reversed)
{
	struct shardd_bucket_tensor t[TENSORS];
	uint32_t tensors[TENSORS], sizes[TENSORS], n, at = 0;

	for (unsigned k = 0; k < TENSORS; k++)
		t[k] = (struct shardd_bucket_tensor){ numels[order ? order[k] : k] * 4, 1, false };
	TRAIN_OK(shardd_ddp_buckets(t, TENSORS, limits, n_limits, order, tensors, sizes, &n,
				    &train_err));
	for (uint32_t b = 0; b < n; b++)
		for (uint32_t k = 0; k < sizes[b]; k++, at++)
			TRAINER_CHECK(m->views[tensors[at]].bucket == (reversed ? n - 1 - b : b));
}

/* @limits: two, or NULL: none. */
static void check_buckets(const struct model *m, const uint32_t *order, const uint64_t *limits,
			  bool reversed)
{
	check_limits(m, order, limits, limits ? 2 : 0, reversed);
}

/* The order of gradients on rank 0 decides for all. */
static int rebuild_trainer(const struct trainer *t)
{
	const uint32_t order[] = { 6, 4, 5, 3, 0, 2, 1 };
	struct model m = test_ddp_begin(t, false, false), late = { .c = m.c, .v = plain };
	uint8_t untouched[TENSORS];
	float kept[BIGGEST];

	forward(&m);
	check_buckets(&m, NULL, NULL, true); /* one, until the order is known */
	TRAIN_OK(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err));
	for (unsigned k = 0; k < TENSORS; k++) {
		uint32_t i = t->rank ? k : order[k];

		write_gradient(&m, t, i, 0);
		TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, &i, 1, &train_err));
	}
	/* too little room to say which were untouched: refused, and nothing is done */
	TRAIN_FAILS(shardd_ddp_finish(m.c, m.ddp, untouched, TENSORS - 1, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strstr(train_err.text, "room to mark 6 tensors, but ddp 1 has 7"));
	TRAIN_FAILS(shardd_ddp_finish(m.c, m.ddp, untouched, 0, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_ddp_finish(m.c, m.ddp, NULL, TENSORS, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_OK(shardd_ddp_finish(m.c, m.ddp, untouched, TENSORS, &train_err));
	train_read(m.c, kept, m.views[3].data, numels[3] * sizeof(float));
	forward(&m);
	check_buckets(&m, order, usual, false);
	TRAIN_HAS(m.c, m.views[3].data, kept, numels[3] * sizeof(float)); /* it has moved */
	whole_pass(&m, t, 1);
	forward(&m);
	check_buckets(&m, order, usual, false); /* once */

	register_model(&late, "late");
	make_ddp(&late, true, false); /* never: tensors may be missing */
	whole_pass(&late, t, 2);
	forward(&late);
	check_buckets(&late, NULL, usual, true);
	train_leave(m.c);
	return 0;
}

Test(ddp, buckets_are_rebuilt_in_order_of_arrival, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, rebuild_trainer, NULL);
}

/* A limit of the user's is the first bucket's, too, unless that has its own. */
static int first_trainer(const struct trainer *t)
{
	static const uint64_t same[] = { bucket_bytes, bucket_bytes };
	struct model m = { .c = train_join(t), .v = plain };
	struct shardd_ddp_create_options spec;

	register_model(&m, "unit");
	spec = spec_of(&m);
	spec.first_bucket_bytes = 0;
	spec.find_unused = true; /* limits hold at once */
	TRAIN_OK(shardd_ddp_create(m.c, &spec, &m.ddp, NULL, &train_err));
	forward(&m);
	check_buckets(&m, NULL, same, true);
	TRAINER_CHECK(m.views[0].bucket != m.views[TENSORS - 1].bucket);
	spec.bucket_bytes = 0; /* 1 MiB, which all of them fit */
	TRAIN_OK(shardd_ddp_create(m.c, &spec, &m.ddp, NULL, &train_err));
	forward(&m);
	TRAINER_CHECK(m.views[0].bucket == m.views[TENSORS - 1].bucket);
	train_leave(m.c);
	return 0;
}

Test(ddp, a_limit_of_the_users_is_the_first_buckets_too, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(1, first_trainer, NULL);
}

/* One limit a bucket: from the first pass on, and in the order of arrival. */
static int list_trainer(const struct trainer *t)
{
	static const uint64_t limits[] = { 200, 2000, 100, 1 };
	const uint32_t order[] = { 6, 5, 4, 3, 2, 1, 0 };
	struct model m = { .c = train_join(t), .v = plain };
	struct shardd_ddp_create_options spec;

	register_model(&m, "unit");
	spec = spec_of(&m);
	spec.bucket_limits = limits;
	spec.n_bucket_limits = ARRAY_SIZE(limits);
	TRAIN_FAILS(shardd_ddp_create(m.c, &spec, &m.ddp, NULL, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strcmp(train_err.field, "bucket_limits") == 0);
	spec.bucket_bytes = spec.first_bucket_bytes = 0;
	spec.bucket_limits = (const uint64_t[]){ 1, 0 };
	spec.n_bucket_limits = 2;
	TRAIN_FAILS(shardd_ddp_create(m.c, &spec, &m.ddp, NULL, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	spec.bucket_limits = t->rank ? (const uint64_t[]){ 1, 2 } : (const uint64_t[]){ 1, 3 };
	TRAIN_FAILS(shardd_ddp_create(m.c, &spec, &m.ddp, NULL, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "bucket_limits"));
	spec.bucket_limits = limits;
	spec.n_bucket_limits = ARRAY_SIZE(limits);
	TRAIN_OK(shardd_ddp_create(m.c, &spec, &m.ddp, NULL, &train_err));
	forward(&m);
	check_limits(&m, NULL, limits, ARRAY_SIZE(limits), true);
	TRAIN_OK(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err));
	for (unsigned k = 0; k < TENSORS; k++) {
		write_gradient(&m, t, order[k], 0);
		TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, &order[k], 1, &train_err));
	}
	TRAIN_OK(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err));
	forward(&m);
	check_limits(&m, order, limits, ARRAY_SIZE(limits), false);
	whole_pass(&m, t, 1);
	train_leave(m.c);
	return 0;
}

Test(ddp, every_bucket_has_its_own_limit, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, list_trainer, NULL);
}

/* ---------------------------------------------------------------- wrong passes */

static void mark_from(struct model *m, const struct trainer *t, uint32_t first, unsigned pass)
{
	for (uint32_t i = first; i < TENSORS; i++) {
		write_gradient(m, t, i, pass);
		TRAIN_OK(shardd_ddp_ready(m->c, m->ddp, &i, 1, &train_err));
	}
}

static int wrong_trainer(const struct trainer *t)
{
	struct model m = test_ddp_begin(t, false, false);
	const uint32_t one = 1, twice[] = { 2, 2 }, outside = TENSORS, both[] = { 1, 2 };

	TRAIN_FAILS(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	forward(&m);
	TRAIN_FAILS(shardd_ddp_ready(m.c, m.ddp, &one, 1, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_FAILS(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_FAILS(shardd_ddp_backward(m.c, m.ddp, &one, 1, NULL, 0, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_ddp_forward(m.c, m.ddp + 1, m.views, TENSORS, &train_err),
		    SHARDD_NOT_FOUND);
	TRAIN_OK(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err));
	TRAIN_FAILS(shardd_ddp_ready(m.c, m.ddp, &outside, 1, &train_err), SHARDD_INVALID_ARGUMENT);
	write_gradient(&m, t, 1, 0);
	TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, &one, 1, &train_err));
	TRAIN_FAILS(shardd_ddp_ready(m.c, m.ddp, both, 2, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "'unit0.t1'") && !strstr(train_err.text, "t2"));
	TRAIN_FAILS(shardd_ddp_ready(m.c, m.ddp, twice, 2, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "'unit0.t2'"));
	write_gradient(&m, t, 2, 0);
	TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, &both[1], 1, &train_err)); /* nothing has changed */
	mark_from(&m, t, 4, 0);
	TRAIN_FAILS(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "2 tensors") && strstr(train_err.text, "'unit0.t0'") &&
		      strstr(train_err.text, "'unit0.t3'"));
	TRAIN_FAILS(shardd_ddp_forward(m.c, m.ddp, m.views, TENSORS, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "'unit0.t3'"));
	for (uint32_t i = 0; i < 4; i += 3) {
		write_gradient(&m, t, i, 0);
		TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, &i, 1, &train_err));
	}
	TRAIN_FAILS(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err));
	check_step(&m, t->world, NULL, 0);
	whole_pass(&m, t, 1);
	train_leave(m.c);
	return 0;
}

Test(ddp, a_wrong_pass_is_refused_with_names, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, wrong_trainer, NULL);
}

/* ---------------------------------------------------------------------- unused */

/* Tensor 0: rank 0 alone has it; 3: nobody; 5: rank 1 keeps what it has from before. */
static int unused_trainer(const struct trainer *t)
{
	const unsigned all = (1u << t->world) - 1;
	unsigned users[TENSORS] = { 1, all, all, 0, all, all, all };
	struct model m = test_ddp_begin(t, true, false);
	const uint32_t unused[] = { 3, 0 }, kept[] = { 5 };
	const float mark = 42;
	uint8_t untouched[TENSORS];

	whole_pass(&m, t, 0);
	for (unsigned pass = 1; pass < 3; pass++) {
		forward(&m);
		train_poke(m.c, m.views[3].data, mark);
		if (t->rank == 1)
			write_gradient(&m, t, 5, pass);
		TRAIN_OK(shardd_ddp_backward(m.c, m.ddp, unused, t->rank ? 2 : 1, kept,
					     t->rank == 1, &train_err));
		for (uint32_t i = 0; i < TENSORS; i++) {
			if (i == 3 || (i == 0 && t->rank) || (i == 5 && t->rank == 1))
				continue;
			write_gradient(&m, t, i, pass);
			TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, &i, 1, &train_err));
		}
		TRAIN_OK(shardd_ddp_finish(m.c, m.ddp, untouched, TENSORS, &train_err));
		for (unsigned i = 0; i < TENSORS; i++) {
			TRAINER_CHECK(untouched[i] == (i == 3));
			if (i != 3)
				check_tensor(&m, t->world, users[i], i, pass);
		}
		TRAINER_CHECK(train_peek(m.c, m.views[3].data) == mark);
		check_step(&m, t->world, users, pass);
	}
	TRAIN_FAILS(shardd_ddp_backward(m.c, m.ddp, unused, 2, unused, 1, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	train_leave(m.c);
	return 0;
}

/* The step leaves alone what has no gradient: it does not decay, and has no momentum. */
static int lacking_trainer(const struct trainer *t)
{
	const uint64_t n = 20;
	const struct shardd_tensor tensors[] = {
		{ .name = "a", .shape = &n, .dims = 1, .init = SHARDD_INIT_CONSTANT, .a = 8 },
		{ .name = "b", .shape = &n, .dims = 1, .init = SHARDD_INIT_CONSTANT, .a = 8 },
		{ .name = "c", .shape = &n, .dims = 1, .init = SHARDD_INIT_CONSTANT, .a = 8 },
	};
	struct shardd_unit_spec spec = {
		.size = sizeof(spec),
		.name = "unit",
		.tensors = tensors,
		.n_tensors = 3,
		.strategy = SHARDD_REPLICATE,
		.reduce_profile = SHARDD_PROFILE_DDP,
		.optimizer = { .kind = SHARDD_SGD, .lr = 1, .weight_decay = 0.5, .momentum = 0.5 },
	};
	const uint32_t unused = 1, used[] = { 0, 2 };
	/* from 8: what decay and momentum alone make of it in two steps, and in one */
	const float all[] = { 8, 4, 0 };
	struct shardd_unit_info info;
	struct shardd_ddp_view views[3];
	struct shardd_ddp_create_options ddp = { .size = sizeof(ddp),
						 .n_units = 1,
						 .find_unused = true };
	shardd_client *c = train_join(t);
	float params[60], zeros[20] = { 0 };
	shardd_ddp d;

	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
	ddp.units = &info.unit;
	TRAIN_OK(shardd_ddp_create(c, &ddp, &d, NULL, &train_err));
	for (unsigned pass = 0; pass < 2; pass++) {
		TRAIN_OK(shardd_ddp_forward(c, d, views, 3, &train_err));
		TRAIN_OK(shardd_ddp_backward(c, d, &unused, pass == 1, NULL, 0, &train_err));
		for (unsigned i = 0; i < 3; i++)
			train_write(c, views[i].data, zeros, sizeof(zeros));
		TRAIN_OK(shardd_ddp_ready(c, d, used, 2, &train_err));
		if (pass == 0)
			TRAIN_OK(shardd_ddp_ready(c, d, &unused, 1, &train_err));
		TRAIN_OK(shardd_ddp_finish(c, d, NULL, 0, &train_err));
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	}
	train_params(c, info.unit, params, sizeof(params));
	for (unsigned i = 0; i < 60; i++)
		TRAINER_CHECK(params[i] == (i / 20 == 1 ? all[1] : all[2]));
	train_leave(c);
	return 0;
}

Test(ddp, a_step_leaves_alone_what_has_no_gradient, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, lacking_trainer, NULL);
}

Test(ddp, unused_tensors_count_as_zero_or_not_at_all, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, unused_trainer, NULL);
}

/* ---------------------------------------------------------------- static graph */

/* Tensor 1 gets its gradient twice a pass, 3 never. */
static void static_pass(struct model *m, const struct trainer *t, unsigned pass)
{
	const unsigned all = (1u << t->world) - 1;
	const unsigned users[TENSORS] = { all, all, all, 0, all, all, all };
	const uint32_t again = 1;

	forward(m);
	TRAIN_OK(shardd_ddp_backward(m->c, m->ddp, NULL, 0, NULL, 0, &train_err));
	TRAIN_OK(shardd_ddp_ready(m->c, m->ddp, &again, 1, &train_err));
	for (uint32_t i = TENSORS; i--;) {
		if (i == 3)
			continue;
		write_gradient(m, t, i, pass);
		TRAIN_OK(shardd_ddp_ready(m->c, m->ddp, &i, 1, &train_err));
	}
	TRAIN_OK(shardd_ddp_finish(m->c, m->ddp, NULL, 0, &train_err));
	for (unsigned i = 0; i < TENSORS; i++)
		if (i != 3)
			check_tensor(m, t->world, ~0u, i, pass);
	check_step(m, t->world, users, pass);
}

static int static_trainer(const struct trainer *t)
{
	struct model m = test_ddp_begin(t, false, true);
	const uint32_t never = 3, again = 1, order[] = { 3, 6, 5, 4, 2, 1, 0 };
	uint32_t rest[] = { 0, 1, 2, 4, 5, 6 };

	static_pass(&m, t, 0);
	forward(&m);
	check_buckets(&m, NULL, NULL, true);
	static_pass(&m, t, 1);
	forward(&m);
	check_buckets(&m, order, usual, false);
	static_pass(&m, t, 2);

	forward(&m);
	TRAIN_OK(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err));
	TRAIN_FAILS(shardd_ddp_ready(m.c, m.ddp, &never, 1, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "the graph has changed") &&
		      strstr(train_err.text, "'unit0.t3'"));
	TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, rest, 6, &train_err));
	TRAIN_FAILS(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "'unit0.t1'"));
	TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, &again, 1, &train_err));
	TRAIN_FAILS(shardd_ddp_ready(m.c, m.ddp, &again, 1, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err));
	train_leave(m.c);
	return 0;
}

Test(ddp, a_static_graph_counts_once, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(2, static_trainer, NULL);
}

/* --------------------------------------------------------------- making, models */

static int differs_trainer(const struct trainer *t)
{
	struct model m = { .c = train_join(t), .v = plain };
	struct shardd_ddp_create_options spec;
	shardd_unit other[UNITS];
	shardd_unit sharded;

	register_model(&m, "unit");
	TRAIN_OK(shardd_verify_model(m.c, SHARDD_WORLD, &train_err));
	spec = spec_of(&m);
	other[0] = m.units[1];
	other[1] = m.units[0];
	if (t->rank)
		spec.units = other;
	TRAIN_FAILS(shardd_ddp_create(m.c, &spec, &m.ddp, NULL, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "position 0: rank 0") &&
		      strstr(train_err.text, "'unit0', rank 1") &&
		      strstr(train_err.text, "'unit1'"));
	spec = spec_of(&m);
	spec.find_unused = t->rank;
	TRAIN_FAILS(shardd_ddp_create(m.c, &spec, &m.ddp, NULL, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	spec = spec_of(&m);
	sharded = train_register(m.c, "sharded", 10, NULL).unit;
	spec.units = &sharded;
	spec.n_units = 1;
	TRAIN_FAILS(shardd_ddp_create(m.c, &spec, &m.ddp, NULL, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	train_register(m.c, t->rank ? "b" : "a", 10, NULL);
	train_register(m.c, t->rank ? "a" : "b", 10, NULL);
	TRAIN_FAILS(shardd_verify_model(m.c, SHARDD_WORLD, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "position 3") && strstr(train_err.text, "'a'") &&
		      strstr(train_err.text, "'b'"));
	make_ddp(&m, false, false);
	whole_pass(&m, t, 0);
	train_leave(m.c);
	return 0;
}

Test(ddp, the_first_difference_is_named, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, differs_trainer, NULL);
}

/* Strides are compared too; row-major ones need not be said. */
static int strides_trainer(const struct trainer *t)
{
	const uint64_t shape[] = { 2, 3, 4, 5 }, last[] = { 60, 1, 15, 3 };
	const uint64_t plain_ones[] = { 60, 20, 5, 1 }, gap[] = { 120, 20, 5, 1 };
	struct shardd_tensor tensor = { .name = "t", .shape = shape, .dims = 4, .strides = last };
	struct shardd_unit_spec spec = {
		.size = sizeof(spec), .name = "a", .tensors = &tensor, .n_tensors = 1
	};
	shardd_client *c = train_join(t);

	TRAIN_OK(shardd_register(c, &spec, 1, NULL, &train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	tensor.strides = t->rank ? NULL : plain_ones;
	TRAIN_FAILS(shardd_register(c, &spec, 1, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "strides of tensor 't'"));
	spec.name = "b";
	TRAIN_OK(shardd_register(c, &spec, 1, NULL, &train_err));
	spec.name = "c";
	tensor.strides = gap;
	TRAIN_FAILS(shardd_register(c, &spec, 1, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	tensor.strides = (const uint64_t[]){ 1, 2, 6, 24 };
	spec.layout = SHARDD_LAYOUT_DIM0;
	TRAIN_FAILS(shardd_register(c, &spec, 1, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_OK(shardd_verify_model(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(ddp, strides_are_compared, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(2, strides_trainer, NULL);
}

/* -------------------------------------------------------------------- death */

static int dying_trainer(const struct trainer *t)
{
	struct model m = test_ddp_begin(t, false, false);
	struct shardd_membership ms;
	shardd_ticket ticket;
	uint32_t i = 6;

	whole_pass(&m, t, 0);
	forward(&m);
	TRAIN_OK(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err));
	write_gradient(&m, t, i, 1);
	TRAIN_OK(shardd_barrier(m.c, SHARDD_WORLD, &train_err));
	if (t->rank == 1) {
		TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, &i, 1, &train_err));
		_exit(0);
	}
	for (i = 0; i < TENSORS; i++) {
		/* the news may come before any of them */
		int r = shardd_submit_ddp_ready(
			m.c, SHARDD_OPTIONS(ddp_ready, .ddp = m.ddp, .tensors = &i, .n_tensors = 1),
			&ticket, &train_err);

		if (r == 0)
			(void)shardd_wait(m.c, ticket, -1, NULL, &train_err);
	}
	TRAIN_FAILS(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err), SHARDD_ABORTED);
	ms = train_join_as(m.c, t, SHARDD_EPHEMERAL);
	TRAINER_CHECK(ms.epoch > 1);
	TRAIN_FAILS(shardd_ddp_forward(m.c, m.ddp, m.views, TENSORS, &train_err), SHARDD_NOT_FOUND);
	train_leave(m.c);
	return 0;
}

Test(ddp, a_rank_that_dies_ends_the_pass_of_all, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, dying_trainer, NULL);
}

/* ------------------------------------------------------------------ no more inputs */

/* Rank r has r + 1 inputs. Those who have none contribute zeros. */
static int join_trainer(const struct trainer *t)
{
	const bool by_active = t->arg;
	struct model m = test_ddp_begin(t, false, false);
	uint32_t last = UINT32_MAX;
	uint64_t surrogates = 0;

	for (unsigned pass = 0; pass <= t->rank; pass++) {
		unsigned users = ((1u << t->world) - 1) & ~((1u << pass) - 1);

		forward(&m);
		TRAIN_OK(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err));
		mark_from(&m, t, 0, pass);
		TRAIN_OK(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err));
		for (unsigned i = 0; i < TENSORS; i++) {
			uint8_t in[4][BIGGEST * sizeof(float)] = { 0 };
			const void *pointers[4] = { in[0], in[1], in[2], in[3] };
			const uint32_t by = by_active ? t->world - pass : t->world;
			float want[BIGGEST];
			struct k_reduce r = { .out = want,
					      .out_dtype = DTYPE_FP32,
					      .in = pointers,
					      .k = t->world,
					      .in_dtype = DTYPE_FP32,
					      .pre = factor_of(&m.v, by),
					      .sum_dtype = DTYPE_FP32 };

			for (uint32_t rank = 0; rank < t->world; rank++)
				if (users >> rank & 1)
					gradient_of(&m.v, rank, i, pass, in[rank]);
			kernels_ref()->reduce(&r, 0, numels[i]);
			TRAIN_HAS(m.c, m.views[i].data, want, numels[i] * sizeof(float));
		}
		TRAIN_OK(shardd_step(m.c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_barrier(m.c, SHARDD_WORLD, &train_err));
	}
	TRAIN_OK(shardd_join_uneven(m.c, SHARDD_WORLD, by_active, &last, &surrogates, &train_err));
	TRAINER_CHECK(last == t->world - 1);
	TRAINER_CHECK(t->rank == t->world - 1 ? !surrogates : surrogates > 0);
	for (unsigned pass = 7; pass < 9; pass++) { /* all are there again, with the same buckets */
		forward(&m);
		TRAIN_OK(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err));
		mark_from(&m, t, 0, pass);
		TRAIN_OK(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err));
		for (unsigned i = 0; i < TENSORS; i++)
			check_tensor(&m, t->world, ~0u, i, pass);
	}
	TRAIN_OK(shardd_join_uneven(m.c, SHARDD_WORLD, by_active, &last, &surrogates, &train_err));
	TRAIN_OK(shardd_barrier(m.c, SHARDD_WORLD, &train_err));
	train_leave(m.c);
	return 0;
}

Test(ddp, one_rank_joins_alone, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(1, join_trainer, NULL);
}

Test(ddp, two_ranks_with_uneven_inputs, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(2, join_trainer, NULL);
}

Test(ddp, three_ranks_with_uneven_inputs, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, join_trainer, NULL);
}

Test(ddp, divides_by_the_ranks_that_have_inputs, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(3, join_trainer, (void *)1);
}

static int dies_joined_trainer(const struct trainer *t)
{
	struct model m = test_ddp_begin(t, false, false);
	shardd_ticket ticket;

	forward(&m);
	if (t->rank)
		TRAIN_OK(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err));
	TRAIN_OK(shardd_barrier(m.c, SHARDD_WORLD, &train_err));
	if (t->rank == 1)
		_exit(0);
	if (t->rank == 0) {
		TRAIN_OK(shardd_submit_join_uneven(m.c, SHARDD_OPTIONS(join_uneven), &ticket,
						   &train_err));
		TRAIN_FAILS(shardd_wait(m.c, ticket, -1, NULL, &train_err), SHARDD_ABORTED);
	} else {
		TRAIN_FAILS(shardd_barrier(m.c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	}
	train_join_as(m.c, t, SHARDD_EPHEMERAL);
	train_leave(m.c);
	return 0;
}

Test(ddp, a_death_ends_a_join, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(3, dies_joined_trainer, NULL);
}

/* ------------------------------------------------------------ parameters at the start */

static int broadcast_trainer(const struct trainer *t)
{
	struct model m = { .c = train_join(t), .v = plain };
	const void *data[UNITS];
	uint64_t bytes[UNITS];
	float *mine[UNITS], got[4 * BIGGEST];

	register_model(&m, "unit");
	for (unsigned u = 0; u < UNITS; u++) {
		data[u] = mine[u] = train_numbers(m.elements[u], u + 1);
		bytes[u] = m.elements[u] * sizeof(float);
	}
	TRAIN_OK(shardd_init_broadcast_all(m.c, m.units, bytes, UNITS, 1,
					   t->rank == 1 ? data : NULL, &train_err));
	for (unsigned u = 0; u < UNITS; u++) {
		train_params(m.c, m.units[u], got, m.elements[u] * sizeof(float));
		TRAIN_SAME(got, mine[u], m.elements[u] * sizeof(float));
		free(mine[u]);
	}
	train_leave(m.c);
	return 0;
}

Test(ddp, a_model_is_broadcast_at_once, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(2, broadcast_trainer, NULL);
}
