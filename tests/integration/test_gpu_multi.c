/*
 * Several devices: a unit's parts lie on different ones, ranks in blocks or in turn. What
 * a job gets is what one device would give, bit for bit where the order of additions is
 * the same, and in the documented order else: the ranks of a device first, in the order of
 * the group, then the devices, in the order of their first rank.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "gpufix.h"
#include "longform.h"

TestSuite(gpu_multi, .timeout = 300);

enum { MAX_WORLD = 8, MAX_DEVICES = 8 };

/* What all trainers of a job are told. */
struct scene {
	struct gpu_layout l;
	void *arg;
};

/* Placed in blocks and in turn; so that devices have equal numbers of ranks, and not. */
static const struct gpu_layout layouts[] = {
	{ 1, 1, false }, { 1, 2, false }, { 1, 4, false }, /* */
	{ 2, 2, false }, { 2, 4, false }, { 2, 4, true },  { 2, 3, false },
	{ 2, 3, true },  { 3, 3, false }, { 3, 6, true },  { 4, 4, false },
	{ 4, 8, false }, { 4, 8, true },  { 8, 8, false },
};

static void run(const struct gpu_layout *l, trainer_fn fn, void *arg)
{
	struct scene *s = trainer_shared(sizeof(*s));
	char job[64];

	*s = (struct scene){ *l, arg };
	snprintf(job, sizeof(job), "d%u-w%u-%s", l->devices, l->world,
		 l->in_turn ? "turn" : "block");
	fprintf(stderr, "# job %s\n", job);
	trainers_run(&trainfix, job, l->world, fn, s, 120);
}

/* @fn on every layout of so many devices; with the address sanitizer on the last of these. */
static void run_all(unsigned devices, trainer_fn fn, void *arg)
{
	const size_t n = ARRAY_SIZE(layouts);

	for (size_t i = 0; i < n; i++) {
		bool last = i + 1 == n || layouts[i + 1].devices != devices;

		if (layouts[i].devices == devices && (last || !longform_cut()))
			run(&layouts[i], fn, arg);
	}
}

static shardd_client *join(const struct trainer *t)
{
	const struct scene *s = t->arg;

	return gpu_join(t, gpu_of(&s->l, t->rank));
}

/* One test for each number of devices. */
#define ON_DEVICES(topic, fn, make_arg) \
	ON_N(topic, fn, make_arg, 1)    \
	ON_N(topic, fn, make_arg, 2)    \
	ON_N(topic, fn, make_arg, 3)    \
	ON_N(topic, fn, make_arg, 4)    \
	ON_N(topic, fn, make_arg, 8)
#define ON_N(topic, fn, make_arg, n)      \
	Test(gpu_multi, topic##_##n)      \
	{                                 \
		gpu_begin(n, NULL);       \
		run_all(n, fn, make_arg); \
		gpu_end();                \
	}

/* ------------------------------------------------------------------ the values */

static const size_t sizes[] = { 1, 2, 5, 1000, 20011 };

enum { N_SIZES = 5, MAX_N = 20011 + 10006, DTYPES = 3 };

/* Of a job of one rank on one device. */
struct seen {
	float x[N_SIZES][DTYPES][MAX_N];
};

static shardd_unit register_two(shardd_client *c, size_t i, unsigned d, uint64_t *ret_n)
{
	uint64_t first = sizes[i], second = sizes[i] / 2 + 1;
	const struct shardd_tensor tensors[] = {
		{ .name = "uniform",
		  .shape = &first,
		  .dims = 1,
		  .init = SHARDD_INIT_UNIFORM,
		  .a = -3,
		  .b = 5 },
		{ .name = "normal",
		  .shape = &second,
		  .dims = 1,
		  .init = SHARDD_INIT_NORMAL,
		  .a = 2,
		  .b = 0.5 },
	};
	char name[32];
	const struct shardd_unit_spec spec = { .size = sizeof(spec),
					       .name = name,
					       .tensors = tensors,
					       .n_tensors = 2,
					       .compute_dtype = (enum shardd_dtype)(d + 1) };
	struct shardd_unit_info info;

	snprintf(name, sizeof(name), "%zu of type %u", sizes[i], d + 1);
	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	*ret_n = info.elements;
	return info.unit;
}

static int values_trainer(const struct trainer *t)
{
	const struct scene *s = t->arg;
	struct seen *seen = s->arg;
	shardd_client *c = join(t);

	for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
		for (unsigned d = 0; d < DTYPES; d++) {
			uint64_t n;
			shardd_unit u = register_two(c, i, d, &n);
			size_t bytes = n * dtype_size((enum dtype)(d + 1));
			void *got = train_alloc(bytes);

			TRAIN_OK(shardd_init_seed(c, u, 77, &train_err));
			train_params(c, u, got, bytes);
			if (strcmp(t->job, "single") == 0)
				memcpy(seen->x[i][d], got, bytes);
			TRAIN_SAME(got, seen->x[i][d], bytes);
			free(got);
		}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

static struct seen *seen_by_one(void)
{
	struct seen *seen = trainer_shared(sizeof(*seen));
	struct scene *s = trainer_shared(sizeof(*s));

	*s = (struct scene){ { 1, 1, false }, seen };
	trainers_run(&trainfix, "single", 1, values_trainer, s, 60);
	return seen;
}

ON_DEVICES(seed_and_gather, values_trainer, seen_by_one())

/* ------------------------------------------------------------------- gradients */

/* fairscale's rule. */
static void default_factors(uint32_t world, float *ret_pre, float *ret_post)
{
	uint32_t f = 1;

	while (world % f == 0 && world / f > f)
		f *= 2;
	*ret_pre = (float)f;
	*ret_post = (float)world / (float)f;
}

/* The ranks of a group in its order. */
struct ranks {
	uint32_t rank[MAX_WORLD];
	uint32_t n;
};

static struct ranks all_ranks(uint32_t world)
{
	struct ranks r = { .n = world };

	for (uint32_t i = 0; i < world; i++)
		r.rank[i] = i;
	return r;
}

static bool is_member(const struct ranks *r, uint32_t rank)
{
	for (uint32_t i = 0; i < r->n; i++)
		if (r->rank[i] == rank)
			return true;
	return false;
}

/* Devices in the order of their first rank. Return: how many. */
static unsigned devices_of(const struct gpu_layout *l, const struct ranks *r,
			   unsigned ret[MAX_DEVICES])
{
	unsigned n = 0;

	for (uint32_t i = 0; i < r->n; i++) {
		unsigned d = gpu_of(l, r->rank[i]), k = 0;

		while (k < n && ret[k] != d)
			k++;
		if (k == n)
			ret[n++] = d;
	}
	return n;
}

/* What rank @rank hands in: random numbers, with integers where the order must not
 * matter. */
static float *numbers(uint32_t rank, unsigned micro, size_t n, bool integers)
{
	float *x = train_numbers(n, rank * 1000003ull + micro * 7919ull + n);

	for (size_t i = 0; integers && i < n; i++)
		x[i] = roundf(x[i] * 8);
	return x;
}

/* The same as it stands in a buffer of @dtype. */
static void *input(uint32_t rank, unsigned micro, size_t n, bool integers, enum dtype dtype)
{
	struct k_cast cast = { .dst = train_alloc(n * dtype_size(dtype)),
			       .src = numbers(rank, micro, n, integers),
			       .dst_dtype = dtype,
			       .src_dtype = DTYPE_FP32 };

	kernels_ref()->cast(&cast, 0, n);
	free((void *)cast.src);
	return cast.dst;
}

struct gradient {
	size_t n;
	enum dtype dtype;
	unsigned micro; /* batches that are added up */
	bool integers;
};

/* What the ranks of one device contribute. */
static float *model_partial(const struct gpu_layout *l, const struct ranks *r, unsigned device,
			    const struct gradient *g, unsigned micro, float pre)
{
	const void *in[MAX_WORLD];
	struct k_reduce k = { .out = train_alloc(g->n * sizeof(float)),
			      .in = in,
			      .in_dtype = g->dtype,
			      .out_dtype = DTYPE_FP32,
			      .sum_dtype = DTYPE_FP32,
			      .pre = train_divide_by(pre, DTYPE_FP32) };

	for (uint32_t i = 0; i < r->n; i++)
		if (gpu_of(l, r->rank[i]) == device)
			in[k.k++] = input(r->rank[i], micro, g->n, g->integers, g->dtype);
	kernels_ref()->reduce(&k, 0, g->n);
	for (unsigned i = 0; i < k.k; i++)
		free((void *)in[i]);
	return k.out;
}

/* The gradient of the group, all of it. The caller's to free. */
static float *model_gradient(const struct gpu_layout *l, const struct ranks *r,
			     const struct gradient *g)
{
	unsigned devices[MAX_DEVICES], n = devices_of(l, r, devices);
	const void *in[MAX_DEVICES];
	struct k_reduce k = { .out = train_alloc(g->n * sizeof(float)),
			      .in = in,
			      .k = n,
			      .in_dtype = DTYPE_FP32,
			      .out_dtype = DTYPE_FP32,
			      .sum_dtype = DTYPE_FP32 };
	float pre, post;

	default_factors(r->n, &pre, &post);
	k.post = train_divide_by(post, DTYPE_FP32);
	for (unsigned m = 0; m < g->micro; m++) {
		for (unsigned d = 0; d < n; d++)
			in[d] = model_partial(l, r, devices[d], g, m, pre);
		k.accumulate = m > 0;
		kernels_ref()->reduce(&k, 0, g->n);
		for (unsigned d = 0; d < n; d++)
			free((void *)in[d]);
	}
	return k.out;
}

static void hand_in(shardd_client *c, const struct trainer *t, shardd_unit u,
		    const struct gradient *g)
{
	for (unsigned m = 0; m < g->micro; m++) {
		float *x = numbers(t->rank, m, g->n, g->integers);

		train_reduce(c, u, g->dtype, x, g->n);
		free(x);
	}
}

/* SGD with lr 1 on parameters that are 0 leaves p = -gradient. */
static void check_gradient(shardd_client *c, const struct trainer *t, const struct ranks *r,
			   shardd_group group, const struct gradient *g, const char *name)
{
	const struct scene *s = t->arg;
	const struct shardd_unit_spec like = { .group = group,
					       .gradient_dtype = (enum shardd_dtype)g->dtype,
					       .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	shardd_unit u = train_zero_unit(c, name, g->n, &like);
	float *want = train_alloc(g->n * sizeof(float)), *got = train_alloc(g->n * sizeof(float));
	float *sum = model_gradient(&s->l, r, g);
	const struct k_sgd sgd = { .p = want, .g = sum, .lr = 1 };

	hand_in(c, t, u, g);
	TRAIN_OK(shardd_step(c, group, NULL, &train_err));
	kernels_ref()->sgd(&sgd, 0, g->n);
	train_params(c, u, got, g->n * sizeof(float));
	TRAIN_SAME(got, want, g->n * sizeof(float));
	free(sum);
	free(want);
	free(got);
}

static int reduce_trainer(const struct trainer *t)
{
	shardd_client *c = join(t);
	struct ranks world = all_ranks(t->world);
	char name[64];

	for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
		for (unsigned d = 1; d <= DTYPES; d++)
			for (unsigned micro = 1; micro <= 3; micro += 2) {
				struct gradient g = { sizes[i], (enum dtype)d, micro, micro == 1 };

				snprintf(name, sizeof(name), "%zu of type %u, %u", sizes[i], d,
					 micro);
				check_gradient(c, t, &world, SHARDD_WORLD, &g, name);
				g.integers = !g.integers;
				strcat(name, " again");
				check_gradient(c, t, &world, SHARDD_WORLD, &g, name);
			}
	train_leave(c);
	return 0;
}

ON_DEVICES(reduce, reduce_trainer, NULL)

/* ------------------------------------------------------------------ collectives */

/* Small integers: exact in every type, in whatever order they are added. Two zeros of
 * different signs come first, and one number in which all are equal. */
static float contribution(uint32_t rank, size_t i)
{
	uint32_t x = (rank * 2654435761u) ^ (uint32_t)i * 40503u;

	if (i < 2)
		return i == 0 ? 3 : 0;
	return (float)((x >> 7) % 31) - 15;
}

static float model_element(const struct ranks *r, enum reduce_op op, size_t i)
{
	float x = contribution(r->rank[0], i);

	for (uint32_t k = 1; k < r->n; k++) {
		float y = contribution(r->rank[k], i);

		x = op == REDUCE_MAX ? fmaxf(x, y) : op == REDUCE_MIN ? fminf(x, y) : x + y;
	}
	return op == REDUCE_AVG ? x / (float)r->n : x;
}

static void *narrow(float *x, enum dtype dtype, size_t n)
{
	struct k_cast cast = { .dst = train_alloc(n * dtype_size(dtype)),
			       .src = x,
			       .dst_dtype = dtype,
			       .src_dtype = DTYPE_FP32 };

	kernels_ref()->cast(&cast, 0, n);
	free(x);
	return cast.dst;
}

/* In the middle of a buffer, whose other bytes must stay. */
static void check_all_reduce(shardd_client *c, const struct trainer *t, const struct ranks *r,
			     shardd_group group, enum dtype dtype, enum reduce_op op, size_t n)
{
	size_t bytes = n * dtype_size(dtype), offset = 24, all = bytes + 60;
	float *x = train_alloc(n * sizeof(*x)), *y = train_alloc(n * sizeof(*y));
	uint8_t *want = train_alloc(all);
	uint64_t buffer;
	void *at, *in, *out;

	for (size_t i = 0; i < n; i++) {
		x[i] = contribution(t->rank, i);
		y[i] = model_element(r, op, i);
	}
	in = narrow(x, dtype, n);
	out = narrow(y, dtype, n);
	memset(want, 0x5a, all);
	memcpy(want + offset, out, bytes);
	TRAIN_OK(shardd_alloc(c, all, &buffer, &at, &train_err));
	train_set(c, at, 0x5a, all);
	train_write(c, (uint8_t *)at + offset, in, bytes);
	TRAIN_OK(shardd_all_reduce(c, group, buffer, offset, n, (enum shardd_dtype)dtype,
				   (enum shardd_reduce_op)op, &train_err));
	TRAIN_HAS(c, at, want, all);
	TRAIN_OK(shardd_free(c, buffer, &train_err));
	free(in);
	free(out);
	free(want);
}

static void check_broadcast(shardd_client *c, const struct trainer *t, uint32_t root)
{
	enum { BYTES = 100003 };
	uint8_t *want = train_alloc(BYTES);
	uint64_t buffer;
	void *at;

	memset(want, (int)t->rank + 1, BYTES);
	memset(want + 7, (int)root + 1, BYTES - 14);
	TRAIN_OK(shardd_alloc(c, BYTES, &buffer, &at, &train_err));
	train_set(c, at, (uint8_t)(t->rank + 1), BYTES);
	TRAIN_OK(shardd_broadcast(c, SHARDD_WORLD, buffer, 7, BYTES - 14, root, &train_err));
	TRAIN_HAS(c, at, want, BYTES);
	TRAIN_OK(shardd_free(c, buffer, &train_err));
	free(want);
}

/* From @root's buffer, then each rank its own shard from its own. */
static void check_initialise(shardd_client *c, const struct trainer *t, size_t n, uint32_t root)
{
	size_t bytes = n * sizeof(float), shard = (n + t->world - 1) / t->world;
	float *mine = train_numbers(n, t->rank), *want = train_numbers(n, root);
	float *got = train_alloc(bytes);
	char name[64];
	uint64_t buffer;
	shardd_unit u;
	void *at;

	snprintf(name, sizeof(name), "%zu from %u", n, root);
	u = train_register(c, name, n, NULL).unit;
	TRAIN_OK(shardd_alloc(c, bytes, &buffer, &at, &train_err));
	train_write(c, at, mine, bytes);
	TRAIN_OK(shardd_init_broadcast(c, u, root, t->rank == root ? buffer : 0, &train_err));
	train_params(c, u, got, bytes);
	TRAIN_SAME(got, want, bytes);
	for (uint32_t r = 0; r < t->world && r * shard < n; r++) {
		size_t end = (r + 1) * shard < n ? (r + 1) * shard : n;
		float *x = train_numbers(n, r);

		memcpy(want + r * shard, x + r * shard, (end - r * shard) * sizeof(float));
		free(x);
	}
	TRAIN_OK(shardd_init_own(c, u, buffer, &train_err));
	train_params(c, u, got, bytes);
	TRAIN_SAME(got, want, bytes);
	TRAIN_OK(shardd_free(c, buffer, &train_err));
	free(mine);
	free(want);
	free(got);
}

static int collectives_trainer(const struct trainer *t)
{
	static const size_t counts[] = { 1, 2, 63, 4099 };
	shardd_client *c = join(t);
	struct ranks world = all_ranks(t->world);

	for (unsigned d = 1; d <= DTYPES; d++)
		for (unsigned op = REDUCE_SUM; op < _REDUCE_N; op++)
			for (size_t i = 0; i < ARRAY_SIZE(counts); i++)
				check_all_reduce(c, t, &world, SHARDD_WORLD, (enum dtype)d,
						 (enum reduce_op)op, counts[i]);
	for (uint32_t root = 0; root < t->world; root++) {
		check_broadcast(c, t, root);
		for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
			check_initialise(c, t, sizes[i], root);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

ON_DEVICES(collectives, collectives_trainer, NULL)

/* ---------------------------------------------------------------------- groups */

/* Groups of some of the devices only, and of all of them in another order. */
static int groups_trainer(const struct trainer *t)
{
	shardd_client *c = join(t);
	struct ranks even = { .n = 0 }, turned = { .n = t->world }, odd = { .n = 0 };
	const struct {
		const char *name;
		struct ranks *r;
	} groups[] = { { "even", &even }, { "odd", &odd }, { "turned", &turned } };

	for (uint32_t r = 0; r < t->world; r++) {
		struct ranks *half = r % 2 ? &odd : &even;

		half->rank[half->n++] = r;
		turned.rank[r] = t->world - 1 - r;
	}
	for (size_t i = 0; i < ARRAY_SIZE(groups); i++) {
		const struct ranks *r = groups[i].r;
		struct gradient g = { 3001, DTYPE_BF16, 2, false };
		shardd_group group;

		if (r->n == 0)
			continue;
		TRAIN_OK(shardd_group_create(c, groups[i].name, r->rank, r->n, &group, &train_err));
		if (!is_member(r, t->rank)) {
			uint64_t n = g.n;
			const struct shardd_unit_spec like = { .group = group,
							       .gradient_dtype = SHARDD_BF16,
							       .optimizer = { .kind = SHARDD_SGD,
									      .lr = 1 } };

			/* all ranks register the same */
			train_register(c, groups[i].name, n, &like);
			continue;
		}
		check_gradient(c, t, r, group, &g, groups[i].name);
		for (unsigned op = REDUCE_SUM; op < _REDUCE_N; op++)
			check_all_reduce(c, t, r, group, DTYPE_FP16, (enum reduce_op)op, 1001);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

/* Communicators of every set of devices stay; the second time there are no new ones. */
#define GROUPS_ON(n)                              \
	Test(gpu_multi, groups_##n)               \
	{                                         \
		gpu_begin(n, NULL);               \
		run_all(n, groups_trainer, NULL); \
		failfix_again();                  \
		run_all(n, groups_trainer, NULL); \
		gpu_end();                        \
	}
GROUPS_ON(1)
GROUPS_ON(2)
GROUPS_ON(3)
GROUPS_ON(4)
GROUPS_ON(8)

/* ------------------------------------------------------------- clip and steps */

enum { OPT_N = 3001, STEPS = 6 };

struct model {
	struct shardd_optimizer o;
	unsigned steps;
	float p[OPT_N], s1[OPT_N], s2[OPT_N];
};

static void model_step(struct model *m, const float *g)
{
	double t = ++m->steps, lr = m->o.lr;
	const struct k_adamw a = { .p = m->p,
				   .g = g,
				   .m = m->s1,
				   .v = m->s2,
				   .decay = (float)(1 - lr * m->o.weight_decay),
				   .w1 = (float)(1 - m->o.beta1),
				   .b1 = (float)m->o.beta1,
				   .b2 = (float)m->o.beta2,
				   .w2 = (float)(1 - m->o.beta2),
				   .step_size = (float)(lr / (1 - pow(m->o.beta1, t))),
				   .sq = (float)sqrt(1 - pow(m->o.beta2, t)),
				   .eps = (float)m->o.eps };
	const struct k_sgd s = { .p = m->p,
				 .g = g,
				 .buf = m->s1,
				 .lr = (float)lr,
				 .wd = (float)m->o.weight_decay,
				 .mu = (float)m->o.momentum,
				 .nesterov = m->o.nesterov,
				 .first = m->steps == 1 };

	if (m->o.kind == SHARDD_ADAMW)
		kernels_ref()->adamw(&a, 0, OPT_N);
	else
		kernels_ref()->sgd(&s, 0, OPT_N);
}

/* One norm over the units' gradients; they are scaled when it is above @max_norm. */
static double clip(shardd_client *c, float *const *g, unsigned n, double max_norm)
{
	double total, sum = 0;

	for (unsigned u = 0; u < n; u++)
		for (size_t i = 0; i < OPT_N; i++)
			sum += (double)g[u][i] * g[u][i];
	TRAIN_OK(shardd_clip_grad_norm(c, SHARDD_WORLD, max_norm, 2, &total, &train_err));
	TRAINER_CHECK(fabs(total - sqrt(sum)) <= 1e-12 * sqrt(sum));
	for (unsigned u = 0; total > max_norm && u < n; u++) {
		const struct k_scale s = { g[u], (float)max_norm / ((float)total + 1e-6f), NULL };

		kernels_ref()->scale(&s, 0, OPT_N);
	}
	return total;
}

static int steps_trainer(const struct trainer *t)
{
	static const struct shardd_optimizer kinds[] = {
		{ SHARDD_ADAMW, .lr = 1e-2, .weight_decay = 0.01, .beta1 = 0.9, .beta2 = 0.99,
		  .eps = 1e-8 },
		{ SHARDD_SGD, .lr = 0.05, .weight_decay = 0.1, .momentum = 0.9, .nesterov = true },
	};
	const struct scene *s = t->arg;
	struct ranks world = all_ranks(t->world);
	shardd_client *c = join(t);
	struct model *m[ARRAY_SIZE(kinds)];
	shardd_unit u[ARRAY_SIZE(kinds)];
	float *g[ARRAY_SIZE(kinds)], got[OPT_N];

	for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
		struct shardd_unit_spec like = { .optimizer = kinds[i] };

		m[i] = train_alloc(sizeof(*m[i]));
		m[i]->o = kinds[i];
		u[i] = train_zero_unit(c, i ? "sgd" : "adamw", OPT_N, &like);
	}
	for (unsigned step = 0; step < STEPS; step++) {
		for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
			struct gradient what = { OPT_N, DTYPE_FP32, 1 + step % 2, false };

			hand_in(c, t, u[i], &what);
			g[i] = model_gradient(&s->l, &world, &what);
		}
		clip(c, g, ARRAY_SIZE(kinds), step % 3 ? 1.0 : 1e6);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		if (step % 2) /* applied by the commit, else by the gather */
			TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
		for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
			model_step(m[i], g[i]);
			train_params(c, u[i], got, sizeof(got));
			TRAIN_SAME(got, m[i]->p, sizeof(got));
			free(g[i]);
		}
	}
	for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
		free(m[i]);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

ON_DEVICES(clip_and_steps, steps_trainer, NULL)
