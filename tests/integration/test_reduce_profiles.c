/*
 * Every reduce profile, in every dtype, on every number of ranks, with passes that reduce,
 * accumulate and defer in all mixtures: what arrives in the gradient shards, bit for bit
 * against a scalar evaluation (lib/reduce_model.h). Gradients are seen through SGD with lr 1
 * on parameters that are -0, of which it makes -gradient, also where that is a zero.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "convert.h"
#include "core/check.h"
#include "gpufix.h"
#include "longform.h"
#include "reduce_model.h"

TestSuite(reduce_profiles, .timeout = 300);

enum { N = 77, MAX_UNITS = 512 };

/* One tensor that no number of ranks divides; with dim-0 layout rows that few ranks have. */
static struct shardd_unit_spec spec_of(const struct model_unit *m)
{
	return (struct shardd_unit_spec){
		.gradient_dtype = (enum shardd_dtype)m->gradient,
		.reduce_dtype = (enum shardd_dtype)m->reduce,
		.reduce_profile = (enum shardd_reduce_profile)m->profile,
		.strategy = (enum shardd_strategy)m->strategy,
		.shard_ranks = m->shard_ranks,
		.pre_divide = m->pre,
		.post_divide = m->post,
		.divide_factor = m->factor,
		.force_sum = m->force,
		.div_mode = (enum shardd_div_mode)m->div_mode,
		.optimizer = { .kind = SHARDD_SGD, .lr = 1 },
	};
}

static enum dtype dtype_of(const struct model_unit *m)
{
	return m->gradient ? m->gradient : DTYPE_FP32;
}

/* N of them, for init_broadcast. Return: 0 but on rank 0, which frees it. */
static uint64_t negative_zeros(shardd_client *c, const struct trainer *t)
{
	uint64_t buffer = 0;
	float x[N];
	void *data;

	for (size_t i = 0; i < N; i++)
		x[i] = -0.0f;
	if (t->rank)
		return 0;
	TRAIN_OK(shardd_alloc(c, sizeof(x), &buffer, &data, &train_err));
	train_write(c, data, x, sizeof(x));
	return buffer;
}

/* All at once: what they own is in few slabs then. @ret: @n. */
static void make_units(shardd_client *c, const struct model_unit *m, unsigned n,
		       enum shardd_layout layout, uint64_t zeros, shardd_unit *ret)
{
	const uint64_t elements = N;
	const struct shardd_tensor tensor = { .name = "weight", .shape = &elements, .dims = 1 };
	struct shardd_unit_spec *specs = train_alloc(n * sizeof(*specs));
	struct shardd_unit_info *info = train_alloc(n * sizeof(*info));
	char(*names)[32] = train_alloc(n * sizeof(*names));

	for (unsigned k = 0; k < n; k++) {
		snprintf(names[k], sizeof(names[k]), "unit %u", k);
		specs[k] = spec_of(&m[k]);
		specs[k].size = sizeof(specs[k]);
		specs[k].name = names[k];
		specs[k].layout = layout;
		specs[k].tensors = &tensor;
		specs[k].n_tensors = 1;
	}
	TRAIN_OK(shardd_register(c, specs, n, info, &train_err));
	for (unsigned k = 0; k < n; k++) {
		ret[k] = info[k].unit;
		TRAIN_OK(shardd_init_broadcast(c, info[k].unit, 0, zeros, &train_err));
	}
	free(names);
	free(info);
	free(specs);
}

static void fill(shardd_client *c, shardd_unit u, const struct model_unit *m, uint32_t rank,
		 unsigned pass)
{
	float x[N];

	for (size_t i = 0; i < N; i++)
		x[i] = model_number(m, rank, pass, i);
	train_fill_gradient(c, u, dtype_of(m), x, N);
}

static void run_pass(shardd_client *c, shardd_unit u, const struct model_unit *m, uint32_t rank,
		     unsigned pass)
{
	char kind = m->passes[pass];
	bool idle = kind == 'm' && rank % 2 == 0;

	if (kind != 'r' && !idle)
		fill(c, u, m, rank, pass);
	if (kind == 's' || kind == 'r')
		TRAIN_OK(shardd_reduce(c, u, &train_err));
	else if (kind == 'd')
		TRAIN_OK(shardd_reduce_with(c, SHARDD_OPTIONS(reduce, .unit = u, .deferred = true),
					    NULL, &train_err));
	else if (!idle)
		TRAIN_OK(shardd_accumulate(c, u, &train_err));
}

static bool same(float a, float b)
{
	return f32_bits(a) == f32_bits(b) || (isnan(a) && isnan(b));
}

static void compare(shardd_client *c, shardd_unit u, const struct model_unit *m,
		    const struct model_world *w, unsigned number)
{
	float got[N];

	train_params(c, u, got, sizeof(got));
	for (size_t i = 0; i < N; i++) {
		float want = -model_gradient(m, w, i);

		if (same(got[i], want))
			continue;
		fprintf(stderr,
			"unit %u: profile %u, %s, reduce %s, strategy %u/%u, passes %s, %u ranks "
			"on "
			"%u devices: element %zu is %a, not %a\n",
			number, m->profile, dtype_name(dtype_of(m)),
			m->reduce ? dtype_name(m->reduce) : "open", m->strategy, m->shard_ranks,
			m->passes, w->ranks, w->devices, i, (double)got[i], (double)want);
		TRAINER_CHECK(!"differs");
	}
}

struct scene {
	unsigned devices;
	bool in_turn; /* ranks on the devices; else in blocks */
	enum shardd_layout layout;
	/* the units for so many ranks; room for MAX_UNITS */
	unsigned (*make)(uint32_t ranks, struct model_unit *ret);
};

static shardd_client *join(const struct trainer *t, struct model_world *w)
{
	const struct scene *s = t->arg;

	model_world_init(w, t->world, s->devices, !train_on_host());
	for (uint32_t r = 0; s->in_turn && r < t->world; r++)
		w->device_of[r] = r % s->devices;
	return s->in_turn ? gpu_join(t, t->rank % s->devices) : train_join(t);
}

static int trainer(const struct trainer *t)
{
	const struct scene *s = t->arg;
	struct model_unit *m = train_alloc(MAX_UNITS * sizeof(*m));
	shardd_unit *u = train_alloc(MAX_UNITS * sizeof(*u));
	unsigned n = s->make(t->world, m);
	struct model_world w;
	shardd_client *c = join(t, &w);
	uint64_t zeros = negative_zeros(c, t);

	TRAINER_CHECK(n <= MAX_UNITS);
	make_units(c, m, n, s->layout, zeros, u);
	for (unsigned k = 0; k < n; k++)
		for (unsigned pass = 0; m[k].passes[pass]; pass++)
			run_pass(c, u[k], &m[k], t->rank, pass);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	for (unsigned k = 0; k < n; k++)
		compare(c, u[k], &m[k], &w, k);
	if (zeros)
		TRAIN_OK(shardd_free(c, zeros, &train_err));
	train_leave(c);
	free(m);
	free(u);
	return 0;
}

/* Eight ranks last: on GPUs, where their threads take turns, in the long form only. */
static const uint32_t worlds[] = { 1, 2, 3, 4, 6, 8 };

static void run_scene(const struct scene *like)
{
	size_t skipped = train_on_host() || longform_asked() ? 0 : 1;
	struct scene *s = trainer_shared(sizeof(*s));
	char job[32];

	*s = *like;
	for (size_t i = 0; i < ARRAY_SIZE(worlds) - skipped; i++) {
		if (s->in_turn && worlds[i] < s->devices)
			continue;
		snprintf(job, sizeof(job), "w%u-%d-%d", worlds[i], s->in_turn, s->layout);
		trainers_run(&trainfix, job, worlds[i], trainer, s, 120);
	}
}

static void run_worlds(unsigned devices, unsigned (*make)(uint32_t, struct model_unit *))
{
	const struct scene s = { .devices = devices, .make = make };

	run_scene(&s);
}

/* -------------------------------------------------------------------- units */

static const enum dtype dtypes[] = { DTYPE_FP32, DTYPE_BF16, DTYPE_FP16 };

/* The profile's own dtype of the sum is the gradient's: no other is allowed. */
static bool has_own_dtype(unsigned profile)
{
	return profile == SHARDD_PROFILE_DDP || profile == SHARDD_PROFILE_DDP_BUCKET_VIEW;
}

/* Every profile and both dtypes, reduced twice. */
static unsigned make_profiles(uint32_t ranks, struct model_unit *ret)
{
	unsigned n = 0;

	(void)ranks;
	for (unsigned profile = 1; profile <= SHARDD_PROFILE_DDP_BUCKET_VIEW; profile++)
		for (size_t g = 0; g < ARRAY_SIZE(dtypes); g++)
			for (unsigned r = 0; r <= ARRAY_SIZE(dtypes); r++)
				if (!r || !has_own_dtype(profile))
					ret[n++] = (struct model_unit){ .profile = profile,
									.gradient = dtypes[g],
									.reduce = r ? dtypes[r - 1]
										    : DTYPE_NONE,
									.passes = "ss" };
	return n;
}

/* Factors of the user, and every way to divide by them. */
static unsigned make_factors(uint32_t ranks, struct model_unit *ret)
{
	static const double pairs[][2] = { { 1, 1 }, { 3, 1.5 }, { 1, 3 }, { 2, 0 }, { 0, 5 } };
	static const unsigned with[] = { SHARDD_PROFILE_FAIRSCALE, SHARDD_PROFILE_XLA,
					 SHARDD_PROFILE_FSDP1_HOOK };
	const double own[] = { 0, 3, 8, ranks };
	unsigned n = 0;

	for (size_t d = 0; d < ARRAY_SIZE(dtypes); d++) {
		for (size_t p = 0; p < ARRAY_SIZE(with) * ARRAY_SIZE(pairs); p++)
			ret[n++] = (struct model_unit){ .profile = with[p / ARRAY_SIZE(pairs)],
							.gradient = dtypes[d],
							.pre = pairs[p % ARRAY_SIZE(pairs)][0],
							.post = pairs[p % ARRAY_SIZE(pairs)][1],
							.passes = "s" };
		for (size_t k = 0; k < 2 * ARRAY_SIZE(own); k++)
			ret[n++] = (struct model_unit){ .profile = SHARDD_PROFILE_FSDP2,
							.gradient = dtypes[d],
							.factor = own[k / 2],
							.force = k % 2,
							.passes = "s" };
	}
	for (unsigned k = 0; k < n; k++) /* their number is no multiple of 3 */
		ret[k].div_mode = k % (1 + SHARDD_DIV_RECIPROCAL);
	return n;
}

/* Passes that reduce and passes that do not, in all profiles; where FSDP2 accumulates in
 * another dtype than that of the gradient, too. */
static unsigned make_accumulations(uint32_t ranks, struct model_unit *ret)
{
	static const char *const passes[] = { "ns", "nr", "nns", "snsns", "nnrss", "mns", "ms" };
	static const struct {
		unsigned profile;
		enum dtype gradient, reduce;
	} kinds[] = {
		{ SHARDD_PROFILE_FAIRSCALE, DTYPE_FP32, 0 },
		{ SHARDD_PROFILE_FAIRSCALE, DTYPE_BF16, 0 },
		{ SHARDD_PROFILE_XLA, DTYPE_BF16, DTYPE_FP32 },
		{ SHARDD_PROFILE_FSDP1_HOOK, DTYPE_FP32, DTYPE_FP16 },
		{ SHARDD_PROFILE_FSDP2, DTYPE_FP32, 0 },
		{ SHARDD_PROFILE_FSDP2, DTYPE_BF16, DTYPE_FP32 },
		{ SHARDD_PROFILE_FSDP2, DTYPE_FP32, DTYPE_BF16 },
		{ SHARDD_PROFILE_FSDP2, DTYPE_FP32, DTYPE_FP16 },
		{ SHARDD_PROFILE_FSDP2, DTYPE_FP16, DTYPE_BF16 },
		{ SHARDD_PROFILE_FSDP2, DTYPE_BF16, DTYPE_FP16 },
		{ SHARDD_PROFILE_DDP, DTYPE_FP32, 0 },
		{ SHARDD_PROFILE_DDP, DTYPE_BF16, 0 },
		{ SHARDD_PROFILE_DDP_HOOK, DTYPE_FP32, DTYPE_BF16 },
		{ SHARDD_PROFILE_DDP_BUCKET_VIEW, DTYPE_FP16, 0 },
	};
	unsigned n = 0;

	(void)ranks;
	for (size_t k = 0; k < ARRAY_SIZE(kinds); k++)
		for (size_t p = 0; p < ARRAY_SIZE(passes); p++)
			ret[n++] = (struct model_unit){ .profile = kinds[k].profile,
							.gradient = kinds[k].gradient,
							.reduce = kinds[k].reduce,
							.passes = passes[p] };
	return n;
}

/* Replicas of every size, with and without a deferred all-reduce. */
static unsigned make_replicas(uint32_t ranks, struct model_unit *ret)
{
	static const char *const passes[] = { "s", "ss", "ds", "dds", "dns", "nds", "sdsds" };
	static const struct {
		unsigned profile;
		enum dtype gradient, reduce;
		double factor;
	} kinds[] = {
		{ SHARDD_PROFILE_FAIRSCALE, DTYPE_BF16, 0, 0 },
		{ SHARDD_PROFILE_FSDP1_HOOK, DTYPE_BF16, 0, 0 },
		{ SHARDD_PROFILE_XLA, DTYPE_FP16, 0, 0 },
		{ SHARDD_PROFILE_FSDP2, DTYPE_BF16, 0, 0 },
		{ SHARDD_PROFILE_FSDP2, DTYPE_FP32, 0, 0 },
		{ SHARDD_PROFILE_FSDP2, DTYPE_BF16, 0, 5 },
		{ SHARDD_PROFILE_FSDP2, DTYPE_FP32, DTYPE_FP16, 6 },
	};
	unsigned n = 0;

	for (uint32_t shard = 1; shard <= ranks; shard++)
		for (size_t k = 0; ranks % shard == 0 && k < ARRAY_SIZE(kinds); k++)
			for (size_t p = 0; p < (shard < ranks ? ARRAY_SIZE(passes) : 2); p++)
				ret[n++] = (struct model_unit){
					.profile = kinds[k].profile,
					.gradient = kinds[k].gradient,
					.reduce = kinds[k].reduce,
					.factor = kinds[k].factor,
					.strategy = shard == 1 && p % 2 ? SHARDD_REPLICATE
									: SHARDD_HYBRID,
					.shard_ranks = shard == 1 && p % 2 ? 0 : shard,
					.passes = passes[p]
				};
	return n;
}

/* ------------------------------------------------------------------ many at once */

enum { MANY = 40 };

/* All units of the model before any is waited for: those that wait run together. */
static int many_trainer(const struct trainer *t)
{
	const struct scene *s = t->arg;
	struct model_unit *m = train_alloc(MAX_UNITS * sizeof(*m));
	shardd_client *c = train_join(t);
	shardd_ticket ticket[MANY];
	uint64_t zeros = negative_zeros(c, t);
	struct model_world w;
	shardd_unit u[MANY];

	TRAINER_CHECK(s->make(t->world, m) >= MANY);
	model_world_init(&w, t->world, s->devices, !train_on_host());
	make_units(c, m, MANY, SHARDD_LAYOUT_FLAT, zeros, u);
	for (unsigned pass = 0; pass < 2; pass++) {
		for (unsigned k = 0; k < MANY; k++)
			fill(c, u[k], &m[k], t->rank, pass);
		for (unsigned k = 0; k < MANY; k++)
			TRAIN_OK(shardd_submit_reduce(c, SHARDD_OPTIONS(reduce, .unit = u[k]),
						      &ticket[k], &train_err));
		for (unsigned k = 0; k < MANY; k++)
			TRAIN_OK(shardd_wait(c, ticket[k], -1, NULL, &train_err));
	}
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	for (unsigned k = 0; k < MANY; k++)
		compare(c, u[k], &m[k], &w, k);
	if (zeros)
		TRAIN_OK(shardd_free(c, zeros, &train_err));
	train_leave(c);
	free(m);
	return 0;
}

static void run_many(unsigned devices)
{
	struct scene *s = trainer_shared(sizeof(*s));

	*s = (struct scene){ .devices = devices, .make = make_profiles };
	trainers_run(&trainfix, "many", 4, many_trainer, s, 120);
}

/* --------------------------------------------------------------------- tests */

static void on_one(unsigned (*make)(uint32_t, struct model_unit *))
{
	trainfix_begin();
	run_worlds(1, make);
	trainfix_end();
}

Test(reduce_profiles, dtypes)
{
	on_one(make_profiles);
}

Test(reduce_profiles, factors_of_the_user)
{
	on_one(make_factors);
}

Test(reduce_profiles, accumulation_is_mixed_with_reductions)
{
	on_one(make_accumulations);
}

Test(reduce_profiles, replicas_and_a_deferred_all_reduce)
{
	on_one(make_replicas);
}

Test(reduce_profiles, many_at_once)
{
	trainfix_begin();
	run_many(1);
	trainfix_end();
}

static void on_several(unsigned devices)
{
	gpu_begin(devices, NULL);
	run_many(devices);
	run_worlds(devices, make_profiles);
	run_worlds(devices, make_factors);
	run_worlds(devices, make_accumulations);
	run_worlds(devices, make_replicas);
	gpu_end();
}

Test(reduce_profiles, two_devices)
{
	on_several(2);
}

Test(reduce_profiles, three_devices)
{
	on_several(3);
}

/* Replicas on fewer, as many and more devices than there are of them; in turn every replica has
 * ranks on all devices. */
static void replicas_on(unsigned devices)
{
	gpu_begin(devices, NULL);
	for (int i = 0; i < 4; i++) {
		const struct scene s = { .devices = devices,
					 .make = make_replicas,
					 .in_turn = i / 2,
					 .layout =
						 i % 2 ? SHARDD_LAYOUT_DIM0 : SHARDD_LAYOUT_FLAT };

		run_scene(&s);
	}
	gpu_end();
}

Test(reduce_profiles, replicas_on_two_devices)
{
	replicas_on(2);
}

Test(reduce_profiles, replicas_on_three_devices)
{
	replicas_on(3);
}

Test(reduce_profiles, replicas_on_four_devices)
{
	replicas_on(4);
}
