/*
 * Tensors of a unit that some ranks use, or none: who has no gradient hands in zeros, and what
 * no rank has used is left alone with its optimizer state and its count of steps, as a parameter of
 * PyTorch whose grad is None. Bit for bit against kernels/ref, tensor by tensor.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "trainfix.h"

TestSuite(unused_tensors, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { WORLD = 2, TENSORS = 3, STEPS = 8, REDUCES = 2, MOST = 1301, ALL = 7, NO = 8 };

/* Rows that do not divide, a tensor in two shards, and one that is smaller than a vector. */
static const uint64_t shapes[TENSORS][2] = { { 37, 13 }, { MOST, 1 }, { 5, 1 } };

/* Bits: the tensors that a rank uses, in each reduce of a step. NO: there is no such reduce. */
static const unsigned used[STEPS][REDUCES][WORLD] = {
	{ { ALL, ALL }, { NO } }, { { 1, 1 }, { NO } },     { { 2, 5 }, { NO } },
	{ { 4, 4 }, { 1, 1 } },   { { 0, 0 }, { NO } },     { { 3, 1 }, { NO } },
	{ { 6, 2 }, { 6, 4 } },   { { ALL, ALL }, { NO } },
};

struct way {
	const char *name;
	struct shardd_optimizer o;
	enum shardd_layout layout;
};

/* A tensor, and what its optimizer has of it. */
struct model {
	uint64_t n;
	unsigned steps;
	float p[MOST], g[MOST], s1[MOST], s2[MOST], s3[MOST];
};

/* ------------------------------------------------------------------- the model */

static float *numbers(unsigned step, unsigned reduce, uint32_t rank, unsigned tensor)
{
	return train_numbers(MOST, step * 1009ull + reduce * 101ull + rank * 11ull + tensor);
}

static bool is_used(unsigned step, unsigned reduce, unsigned tensor)
{
	return (used[step][reduce][0] | used[step][reduce][1]) >> tensor & 1;
}

/* Add what the ranks bring to the gradient, or begin it. */
static void model_reduce(struct model *m, unsigned step, unsigned reduce, unsigned tensor, bool add)
{
	float *in[WORLD];
	struct k_reduce r = { .out = m->g,
			      .in = (const void **)in,
			      .k = WORLD,
			      .in_dtype = DTYPE_FP32,
			      .out_dtype = DTYPE_FP32,
			      .sum_dtype = DTYPE_FP32,
			      .pre = train_divide_by(WORLD, DTYPE_FP32),
			      .accumulate = add };

	for (uint32_t rank = 0; rank < WORLD; rank++) {
		in[rank] = numbers(step, reduce, rank, tensor);
		if (!(used[step][reduce][rank] >> tensor & 1))
			memset(in[rank], 0, MOST * sizeof(float));
	}
	kernels_ref()->reduce(&r, 0, m->n);
	for (uint32_t rank = 0; rank < WORLD; rank++)
		free(in[rank]);
}

static void model_adam(struct model *m, const struct shardd_optimizer *o)
{
	double t = m->steps;
	const struct k_adamw w = { .p = m->p,
				   .g = m->g,
				   .m = m->s1,
				   .v = m->s2,
				   .decay = (float)(1 - o->lr * o->weight_decay),
				   .w1 = (float)(1 - o->beta1),
				   .b1 = (float)o->beta1,
				   .b2 = (float)o->beta2,
				   .w2 = (float)(1 - o->beta2),
				   .step_size = (float)(o->lr / (1 - pow(o->beta1, t))),
				   .sq = (float)sqrt(1 - pow(o->beta2, t)),
				   .eps = (float)o->eps,
				   .vmax = o->amsgrad ? m->s3 : NULL };
	const struct k_adam a = { .p = m->p,
				  .g = m->g,
				  .m = m->s1,
				  .v = m->s2,
				  .wd = (float)o->weight_decay,
				  .w1 = w.w1,
				  .b2 = w.b2,
				  .w2 = w.w2,
				  .step_size = w.step_size,
				  .sq = w.sq,
				  .eps = w.eps,
				  .vmax = w.vmax };

	if (o->kind == SHARDD_ADAMW)
		kernels_ref()->adamw(&w, 0, m->n);
	else
		kernels_ref()->adam(&a, 0, m->n);
}

static void model_step(struct model *m, const struct shardd_optimizer *o)
{
	const struct k_sgd sgd = { .p = m->p,
				   .g = m->g,
				   .buf = o->momentum != 0 ? m->s1 : NULL,
				   .lr = (float)o->lr,
				   .wd = (float)o->weight_decay,
				   .mu = (float)o->momentum,
				   .dampening = o->dampening,
				   .first = m->steps == 0 };

	m->steps++;
	if (o->kind == SHARDD_SGD)
		kernels_ref()->sgd(&sgd, 0, m->n);
	else
		model_adam(m, o);
}

/* Return: which tensors have a gradient; their squares are added up in @ret_norm. */
static unsigned model_pass(struct model *m, unsigned step, double *ret_norm)
{
	unsigned has = 0;

	*ret_norm = 0;
	for (unsigned i = 0; i < TENSORS; i++) {
		for (unsigned r = 0; r < REDUCES && used[step][r][0] != NO; r++) {
			if (is_used(step, r, i))
				model_reduce(&m[i], step, r, i, has >> i & 1);
			has |= (unsigned)is_used(step, r, i) << i;
		}
		for (uint64_t k = 0; has >> i & 1 && k < m[i].n; k++)
			*ret_norm += (double)m[i].g[k] * m[i].g[k];
	}
	*ret_norm = sqrt(*ret_norm);
	return has;
}

/* ------------------------------------------------------------------ the trainer */

struct scene {
	shardd_client *c;
	uint32_t rank;
	const struct way *way;
	shardd_unit u;
	uint64_t elements, gradient_elements;
	struct shardd_tensor_place at[TENSORS];
	struct model *m;
};

static void test_unused_tensors_begin(struct scene *s)
{
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = s->way->name,
					 .n_tensors = TENSORS,
					 .layout = s->way->layout,
					 .optimizer = s->way->o };
	struct shardd_tensor tensors[TENSORS];
	struct shardd_unit_info info;

	for (unsigned i = 0; i < TENSORS; i++)
		tensors[i] = (struct shardd_tensor){ .name = (const char *[]){ "a", "b", "c" }[i],
						     .shape = shapes[i],
						     .dims = 2,
						     .init = SHARDD_INIT_NORMAL,
						     .b = 0.5 };
	spec.tensors = tensors;
	TRAIN_OK(shardd_register(s->c, &spec, 1, &info, &train_err));
	s->u = info.unit;
	s->elements = info.elements;
	s->gradient_elements = info.gradient_elements;
	TRAIN_OK(shardd_tensor_places(s->c, s->u, s->at, TENSORS, &train_err));
	TRAIN_OK(shardd_init_seed(s->c, s->u, 99, &train_err));
}

/* The parameters, tensor by tensor; @check: are the model's? Else they become that. */
static void look(struct scene *s, bool check)
{
	float *all = train_alloc(s->elements * sizeof(float));

	train_params(s->c, s->u, all, s->elements * sizeof(float));
	for (unsigned i = 0; i < TENSORS; i++) {
		if (check)
			TRAIN_SAME(all + s->at[i].offset, s->m[i].p, s->m[i].n * sizeof(float));
		else
			memcpy(s->m[i].p, all + s->at[i].offset, s->m[i].n * sizeof(float));
	}
	free(all);
}

static void fill(struct scene *s, unsigned step, unsigned reduce)
{
	float *data, *all = train_alloc(s->gradient_elements * sizeof(float));

	for (unsigned i = 0; i < TENSORS; i++) {
		float *values = numbers(step, reduce, s->rank, i);

		if (used[step][reduce][s->rank] >> i & 1)
			memcpy(all + s->at[i].offset, values, s->m[i].n * sizeof(float));
		free(values);
	}
	TRAIN_OK(shardd_gradient(s->c, s->u, (void **)&data, &train_err));
	train_write(s->c, data, all, s->gradient_elements * sizeof(float));
	free(all);
}

static void reduce(struct scene *s, unsigned step, unsigned r)
{
	bool last = r + 1 == REDUCES || used[step][r + 1][0] == NO, unused[TENSORS];
	struct shardd_reduce_options o = { .size = sizeof(o), .more = !last };
	struct shardd_result result;
	uint32_t mine[TENSORS];

	o.unused = mine;
	for (uint32_t i = 0; i < TENSORS; i++)
		if (!(used[step][r][s->rank] >> i & 1))
			mine[o.n_unused++] = i;
	fill(s, step, r);
	o.unit = s->u;
	TRAIN_OK(shardd_reduce_with(s->c, &o, &result, &train_err));
	TRAINER_CHECK(result.skipped == !(used[step][r][0] | used[step][r][1]));
	TRAIN_OK(shardd_unit_unused(s->c, s->u, unused, TENSORS, &train_err));
	for (unsigned i = 0; i < TENSORS; i++)
		TRAINER_CHECK(unused[i] == !is_used(step, r, i));
}

/* A norm that clips nothing: it counts what has a gradient, and nothing else. */
static void check_norm(struct scene *s, double want)
{
	const struct shardd_clip_options clip = { .size = sizeof(clip),
						  .max_norm = 1e30,
						  .norm_type = 2 };
	double got;

	TRAIN_OK(shardd_clip(s->c, &clip, &got, &train_err));
	TRAINER_CHECK(fabs(got - want) <= 1e-6 * want);
}

static void one_step(struct scene *s, unsigned step)
{
	double norm;
	unsigned has = model_pass(s->m, step, &norm);

	for (unsigned r = 0; r < REDUCES && used[step][r][0] != NO; r++)
		reduce(s, step, r);
	if (s->way->o.when != SHARDD_OPTIM_IN_BACKWARD)
		check_norm(s, norm);
	TRAIN_OK(shardd_step(s->c, SHARDD_WORLD, NULL, &train_err));
	for (unsigned i = 0; i < TENSORS; i++)
		if (has >> i & 1)
			model_step(&s->m[i], &s->way->o);
	look(s, true);
}

static int trainer(const struct trainer *t)
{
	static const struct way ways[] = {
		{ "sgd",
		  { .kind = SHARDD_SGD, .lr = 0.1, .weight_decay = 0.1 },
		  SHARDD_LAYOUT_FLAT },
		{ "momentum",
		  { .kind = SHARDD_SGD,
		    .lr = 0.1,
		    .weight_decay = 0.1,
		    .momentum = 0.9,
		    .dampening = 0.5 },
		  SHARDD_LAYOUT_DIM0 },
		{ "adamw",
		  { .kind = SHARDD_ADAMW,
		    .lr = 0.1,
		    .weight_decay = 0.1,
		    .beta1 = 0.9,
		    .beta2 = 0.99,
		    .eps = 1e-6 },
		  SHARDD_LAYOUT_DIM0 },
		{ "adam",
		  { .kind = SHARDD_ADAM,
		    .lr = 0.1,
		    .weight_decay = 0.1,
		    .beta1 = 0.9,
		    .beta2 = 0.99,
		    .eps = 1e-6,
		    .amsgrad = true },
		  SHARDD_LAYOUT_FLAT },
		{ "in backward",
		  { .kind = SHARDD_ADAMW,
		    .lr = 0.1,
		    .weight_decay = 0.1,
		    .beta1 = 0.9,
		    .beta2 = 0.99,
		    .eps = 1e-6,
		    .when = SHARDD_OPTIM_IN_BACKWARD },
		  SHARDD_LAYOUT_DIM0 },
		{ "momentum in backward",
		  { .kind = SHARDD_SGD,
		    .lr = 0.1,
		    .weight_decay = 0.1,
		    .momentum = 0.9,
		    .when = SHARDD_OPTIM_IN_BACKWARD },
		  SHARDD_LAYOUT_FLAT },
	};
	struct scene s = { .c = train_join(t), .rank = t->rank };

	for (size_t w = 0; w < ARRAY_SIZE(ways); w++) {
		s.way = &ways[w];
		s.m = train_alloc(TENSORS * sizeof(*s.m));
		for (unsigned i = 0; i < TENSORS; i++)
			s.m[i].n = shapes[i][0] * shapes[i][1];
		test_unused_tensors_begin(&s);
		look(&s, false);
		for (unsigned step = 0; step < STEPS; step++)
			one_step(&s, step);
		free(s.m);
	}
	train_leave(s.c);
	return 0;
}

Test(unused_tensors, keep_parameters_state_and_count)
{
	trainfix_run(WORLD, trainer, NULL);
}

/* What was accumulated, or is told to be of another kind, is of all tensors. */
static int accumulated_trainer(const struct trainer *t)
{
	static const struct way way = { "unit",
					{ .kind = SHARDD_SGD, .lr = 1, .weight_decay = 0.5 },
					SHARDD_LAYOUT_DIM0 };
	const uint32_t b[] = { 1 }, wrong[] = { 1, 1 };
	struct shardd_reduce_options o = { .size = sizeof(o), .unused = b, .n_unused = 1 };
	struct scene s = { .c = train_join(t), .rank = t->rank, .way = &way };
	bool unused[TENSORS];

	s.m = train_alloc(TENSORS * sizeof(*s.m));
	for (unsigned i = 0; i < TENSORS; i++)
		s.m[i].n = shapes[i][0] * shapes[i][1];
	test_unused_tensors_begin(&s);
	look(&s, false);
	fill(&s, 4, 0); /* zeros */
	if (t->rank == 0)
		TRAIN_OK(shardd_accumulate(s.c, s.u, &train_err));
	o.unit = s.u;
	TRAIN_OK(shardd_reduce_with(s.c, &o, NULL, &train_err));
	TRAIN_OK(shardd_unit_unused(s.c, s.u, unused, TENSORS, &train_err));
	TRAINER_CHECK(!unused[0] && !unused[1] && !unused[2]);
	TRAIN_OK(shardd_step(s.c, SHARDD_WORLD, NULL, &train_err));
	for (unsigned i = 0; i < TENSORS;
	     i++) /* by its decay alone, which a gradient of 0 lets in */
		model_step(&s.m[i], &way.o);
	look(&s, true);

	fill(&s, 4, 0);
	o = (struct shardd_reduce_options){ .size = sizeof(o), .unused = wrong, .n_unused = 2 };
	o.unit = s.u;
	TRAIN_FAILS(shardd_reduce_with(s.c, &o, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	o.unused = NULL;
	o.unit = s.u;
	TRAIN_FAILS(shardd_reduce_with(s.c, &o, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_unit_unused(s.c, s.u, unused, TENSORS - 1, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_OK(shardd_reduce(s.c, s.u, &train_err));
	free(s.m);
	train_leave(s.c);
	return 0;
}

Test(unused_tensors, are_used_if_anything_was_accumulated)
{
	trainfix_run(WORLD, accumulated_trainer, NULL);
}
