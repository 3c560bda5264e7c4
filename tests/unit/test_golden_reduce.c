/*
 * The daemon's plans of a reduction, and the kernel that carries them out, against FSDP2,
 * FSDP1, DDP, fairscale and XLA: tests/golden/reduce.safetensors, which make_reduce.py writes and describes.
 *
 * With up to two ranks a collective has one order in which to add, so the real systems' own
 * results are compared, bit for bit; with more their own code with the collective replaced
 * by our order. What gloo itself gave then is compared too, with a bound: two orders of
 * adding W numbers differ by roundings only, each at most half a unit of the sum of
 * magnitudes, so this is what the difference is measured in.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "golden.h"
#include "unit/layout.h"
#include "unit/reduce_plan.h"

#define MAX_N        256
#define MAX_RANKS    8
#define MAX_REPLICAS 4
#define MAX_PASSES   3

struct run {
	const char *name, *about;
	const struct kernels *k;
	unsigned ranks, replicas; /* of one replica; how many there are */
	size_t n;
	enum dtype grad, out;
	char passes[8];
	struct reduce_plan plan;
	double divide; /* by which all divides, for the bound */
	struct safetensors_tensor in;
	float kept[MAX_RANKS][MAX_N]; /* unreduced; rounded to the plan's accumulate_dtype */
	bool has_kept;
	float partial[MAX_REPLICAS][MAX_N]; /* of the replicas, not all-reduced yet; of sum_dtype */
	bool has_partial;
	float result[MAX_N]; /* or of a 16-bit type */
	bool has_result;
};

/* ------------------------------------------------------------------ settings */

static void fairscale_setting(const struct run *r, unsigned p, struct reduce_setting *s)
{
	(void)p;
	s->profile = golden_is(r->about, "system", "xla") ? PROFILE_XLA : PROFILE_FAIRSCALE;
	if (golden_number(r->about, "fp32_reduce_scatter") != 0)
		s->reduce_dtype = DTYPE_FP32;
	if (golden_number(r->about, "pre") == 0)
		return;
	s->pre_divide = golden_number(r->about, "pre");
	s->post_divide = golden_number(r->about, "post");
}

static void fsdp1_setting(const struct run *r, unsigned p, struct reduce_setting *s)
{
	enum dtype hook = golden_dtype(r->about, "hook"), t = golden_dtype(r->about, "reduce");

	(void)p;
	s->profile = PROFILE_FSDP1_HOOK;
	s->reduce_dtype = hook ? hook : t ? t : r->grad;
	if (golden_is(r->about, "form", "all-reduce"))
		s->shard_ranks = 1;
}

/* With gradient_as_bucket_view a gradient is the bucket from the second pass on, as long as
 * it is not set to None; with batched_grad_copy it never is, but the bucket is divided alike. */
static bool divides_the_bucket(const struct run *r, unsigned p)
{
	return golden_is(r->about, "view", "alias") || golden_is(r->about, "view", "batched") ||
	       (golden_is(r->about, "view", "view") && p);
}

static void ddp_setting(const struct run *r, unsigned p, struct reduce_setting *s)
{
	bool plain = golden_is(r->about, "hook", "none");

	s->profile = !plain                     ? PROFILE_DDP_HOOK
		     : divides_the_bucket(r, p) ? PROFILE_DDP_BUCKET_VIEW
						: PROFILE_DDP;
	if (!plain && !golden_is(r->about, "hook", "allreduce"))
		s->reduce_dtype = golden_dtype(r->about, "hook");
}

static void fsdp2_setting(const struct run *r, unsigned p, struct reduce_setting *s)
{
	enum dtype t = golden_dtype(r->about, "reduce");

	(void)p;
	s->profile = PROFILE_FSDP2;
	s->reduce_dtype = t ? t : r->grad;
	s->divide_factor = golden_number(r->about, "factor");
	s->force_sum = golden_number(r->about, "force_sum") != 0;
	s->device = golden_is(r->about, "comm", "nccl") ? REDUCE_AS_ON_GPU : REDUCE_AS_ON_CPU;
}

/* What a user of the system would have asked of the daemon; its plan for that in pass @p. */
static void make_plan(struct run *r, unsigned p)
{
	static const struct {
		const char *system;
		void (*set)(const struct run *r, unsigned p, struct reduce_setting *s);
	} systems[] = { { "fairscale", fairscale_setting },
			{ "xla", fairscale_setting },
			{ "fsdp1", fsdp1_setting },
			{ "ddp", ddp_setting },
			{ "fsdp2", fsdp2_setting } };
	struct reduce_setting s = { .gradient_dtype = r->grad,
				    .reduce_dtype = r->grad,
				    .ranks = r->ranks * r->replicas,
				    .shard_ranks = r->ranks,
				    .div_mode = DIV_MODE_TRUE }; /* of tensors on a CPU */

	layout_divide_factors(s.ranks, &s.pre_divide, &s.post_divide);
	for (size_t i = 0; i < sizeof(systems) / sizeof(systems[0]); i++)
		if (golden_is(r->about, "system", systems[i].system))
			systems[i].set(r, p, &s);
	cr_assert_neq(s.profile, 0, "%s", r->name);
	reduce_plan_make(&s, &r->plan);
	r->divide = s.profile == PROFILE_FSDP2 && s.divide_factor != 0 ? s.divide_factor
		    : s.profile == PROFILE_FAIRSCALE ? s.pre_divide * s.post_divide
						     : s.ranks;
}

/* ------------------------------------------------------------------ passes */

/* Element @i that @rank's backward pass @p gave. A gradient that is the bucket was zero and
 * has been added to: -0 is then +0. */
static float given(const struct run *r, unsigned p, unsigned rank, size_t i)
{
	unsigned world = r->ranks * r->replicas;
	float x = golden_at(r->in.data, r->grad, ((size_t)p * world + rank) * r->n + i);

	return golden_is(r->about, "system", "ddp") && golden_is(r->about, "view", "alias")
		       ? x + 0.0f
		       : x;
}

/* The unreduced gradient of @rank with that of pass @p, added up in the type in which it is
 * kept. */
static float added_up(const struct run *r, unsigned p, unsigned rank, size_t i)
{
	float x = given(r, p, rank, i);

	return r->has_kept ? golden_round(r->kept[rank][i] + x, r->plan.accumulate_dtype) : x;
}

/* A pass without communication. */
static void keep(struct run *r, unsigned p)
{
	for (unsigned rank = 0; rank < r->ranks * r->replicas; rank++)
		for (size_t i = 0; i < r->n; i++)
			r->kept[rank][i] =
				golden_round(added_up(r, p, rank, i), r->plan.accumulate_dtype);
	r->has_kept = true;
}

static void run_reduce(const struct run *r, void *out, enum dtype out_dtype, const void *const *in,
		       unsigned k, enum dtype in_dtype, struct k_factor pre, struct k_factor post,
		       bool accumulate)
{
	struct k_reduce a = {
		.out = out,
		.out_dtype = out_dtype,
		.in = in,
		.k = k,
		.in_dtype = in_dtype,
		.pre = pre,
		.sum_dtype = r->plan.sum_dtype,
		.post = post,
		.accumulate = accumulate,
	};

	r->k->reduce(&a, 0, r->n);
}

static void narrow(const struct run *r, void *dst, const float *src, enum dtype t)
{
	struct k_cast a = { dst, src, t, DTYPE_FP32, false };

	r->k->cast(&a, 0, r->n);
}

/* What the ranks of one replica give to the collective. Return: the type they have it in. */
static enum dtype inputs(struct run *r, unsigned p, unsigned replica, float (*buf)[MAX_N],
			 const void **in)
{
	enum dtype t = r->has_kept ? r->plan.accumulate_dtype : r->grad;

	for (unsigned j = 0; j < r->ranks; j++) {
		float x[MAX_N];

		for (size_t i = 0; i < r->n; i++)
			x[i] = added_up(r, p, replica * r->ranks + j, i);
		narrow(r, buf[j], x, t);
		in[j] = buf[j];
	}
	return t;
}

/* The sum inside each replica, with what was put off before. */
static void reduce_inside(struct run *r, unsigned p)
{
	float buf[MAX_RANKS][MAX_N];
	const void *in[MAX_RANKS];

	for (unsigned replica = 0; replica < r->replicas; replica++) {
		enum dtype t = inputs(r, p, replica, buf, in);

		run_reduce(r, r->partial[replica], r->plan.sum_dtype, in, r->ranks, t, r->plan.pre,
			   r->plan.partial, r->has_partial);
	}
	r->has_kept = false;
	r->has_partial = true;
}

static void reduce_between(struct run *r)
{
	const void *in[MAX_REPLICAS];

	for (unsigned i = 0; i < r->replicas; i++)
		in[i] = r->partial[i];
	run_reduce(r, r->result, r->out, in, r->replicas, r->plan.sum_dtype, r->plan.replica,
		   r->plan.post, r->has_result);
	r->has_partial = false;
	r->has_result = true;
}

/* Can one kernel do it all? */
static bool at_once(const struct run *r)
{
	return r->replicas == 1 && !r->plan.replica.how &&
	       !(r->plan.partial.how && r->plan.post.how);
}

/* In two steps, and at once where that goes: the same. */
static void synchronise(struct run *r, unsigned p)
{
	struct k_factor post = r->plan.partial.how ? r->plan.partial : r->plan.post;
	float buf[MAX_RANKS][MAX_N], result[MAX_N];
	const void *in[MAX_RANKS];

	memcpy(result, r->result, sizeof(result));
	if (at_once(r)) {
		enum dtype t = inputs(r, p, 0, buf, in);

		run_reduce(r, result, r->out, in, r->ranks, t, r->plan.pre, post, r->has_result);
	}
	reduce_inside(r, p);
	reduce_between(r);
	if (at_once(r))
		golden_expect(r->name, result, r->result, r->out, r->n);
}

/* DDP: what a reduction left is what every rank adds its next gradient to. */
static void give_back(struct run *r)
{
	for (unsigned rank = 0; rank < r->ranks; rank++)
		for (size_t i = 0; i < r->n; i++)
			r->kept[rank][i] = golden_at(r->result, r->out, i);
	r->has_kept = true;
	r->has_result = false;
}

static void run_passes(struct run *r)
{
	for (unsigned p = 0; r->passes[p]; p++) {
		make_plan(r, p);
		if (r->passes[p] == 'n')
			keep(r, p);
		else if (r->passes[p] == 'd')
			reduce_inside(r, p);
		else
			synchronise(r, p);
		if (r->plan.adds_before && r->passes[p] == 's')
			give_back(r);
	}
}

/* ------------------------------------------------------------------ comparison */

/* Half a unit of 1, and the distance of the numbers below the normal ones. */
static double unit_of(enum dtype t)
{
	return t == DTYPE_FP32 ? 0x1p-24 : t == DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
}

static double least_of(enum dtype t)
{
	return t == DTYPE_FP32 ? 0x1p-149 : t == DTYPE_BF16 ? 0x1p-133 : 0x1p-24;
}

static double most_of(enum dtype t)
{
	return t == DTYPE_FP16 ? 65504 : 0x1.fep127;
}

/* What gloo gave, or rounds_elsewhere says: each of the roundings of either side, W and a few a pass, is at most the
 * half unit of the sum of magnitudes. Sums that may overflow on the way, in one order but
 * not in the other, are left out. */
static void expect_close(const struct run *r, const void *want)
{
	unsigned world = r->ranks * r->replicas, passes = (unsigned)strlen(r->passes);
	double unit = fmax(unit_of(r->plan.sum_dtype), unit_of(r->grad));
	double least = fmax(least_of(r->plan.sum_dtype), least_of(r->grad));
	double most = fmin(most_of(r->plan.sum_dtype), most_of(r->grad));

	for (size_t i = 0; i < r->n; i++) {
		float got = golden_at(r->result, r->out, i), real = golden_at(want, r->out, i);
		double sum = 0, bound;

		for (unsigned p = 0; p < passes; p++)
			for (unsigned rank = 0; rank < world; rank++)
				sum += fabs((double)given(r, p, rank, i));
		if (isfinite(sum) && sum > most)
			continue;
		if (!isfinite(sum)) {
			cr_assert(isnan(got) ? isnan(real) : got == real, "%s: element %zu",
				  r->name, i);
			continue;
		}
		bound = 2 * passes * (world + 3) * (unit * sum / r->divide + least);
		cr_assert_leq(fabs((double)got - (double)real), bound, "%s: element %zu is %a, %a",
			      r->name, i, (double)got, (double)real);
	}
}

/* Do two ranks at most meet in any collective? */
static bool has_one_order(const struct run *r)
{
	return !golden_is(r->about, "comm", "gloo") || (r->ranks <= 2 && r->replicas <= 2);
}

/* FSDP1's NO_SHARD, and FSDP1 and fairscale on one rank, leave the reduced gradient where
 * autograd adds the next, and reduce it again with that. With 16-bit gradients the daemon adds
 * to the reduced gradient, as the sharded strategies do: the same sum, rounded elsewhere. */
static bool rounds_elsewhere(const struct run *r)
{
	bool whole = golden_is(r->about, "system", "fsdp1")
			     ? golden_is(r->about, "form", "all-reduce") || r->ranks == 1
			     : golden_is(r->about, "system", "fairscale") && r->ranks == 1;

	return whole && r->grad != DTYPE_FP32 && strchr(r->passes, 's') != strrchr(r->passes, 's');
}

/* The other systems have none. */
static unsigned replicas_of(const char *about)
{
	return golden_is(about, "system", "fsdp2") || golden_is(about, "system", "fsdp1")
		       ? (unsigned)golden_number(about, "replicas")
		       : 1;
}

static void test_golden_reduce_check(const struct safetensors *f, const struct kernels *k,
				     const char *name, const char *about)
{
	_cleanup_(freep) struct run *r = calloc(1, sizeof(*r));
	struct safetensors_tensor want = golden_tensor(f, name);
	char input[64];

	cr_assert_not_null(r);
	r->name = name;
	r->about = about;
	r->k = k;
	r->ranks = (unsigned)golden_number(about, "ranks");
	r->replicas = replicas_of(about);
	r->grad = golden_dtype(about, "grad");
	r->out = golden_dtype(about, "out");
	golden_text(about, "passes", r->passes, sizeof(r->passes));
	r->in = golden_tensor(f, golden_text(about, "input", input, sizeof(input)));
	r->n = want.elements;
	cr_assert(want.dtype == r->out && r->in.dtype == r->grad && r->in.dims == 3);
	cr_assert(r->ranks * r->replicas == r->in.shape[1] && r->n == r->in.shape[2]);
	cr_assert(r->in.shape[0] <= MAX_PASSES && r->in.shape[1] <= MAX_RANKS && r->n <= MAX_N);
	cr_assert_leq(r->replicas, MAX_REPLICAS);
	run_passes(r);
	if (has_one_order(r) && !rounds_elsewhere(r))
		golden_expect(name, r->result, want.data, r->out, r->n);
	else
		expect_close(r, want.data);
}

/* Every case of @system; at least @least of them, so that none is lost unseen. */
static void check_system(const char *system, unsigned least)
{
	_cleanup_(safetensors_freep) struct safetensors *f = golden_open("reduce.safetensors");
	const char *name, *about;
	void *iter = NULL;
	unsigned cases = 0;

	while (safetensors_next(f, &iter, &name, &about)) {
		if (!golden_is(about, "system", system))
			continue;
		test_golden_reduce_check(f, kernels_ref(), name, about);
		test_golden_reduce_check(f, kernels_host(), name, about);
		cases++;
	}
	cr_assert_geq(cases, least, "%u cases of %s", cases, system);
}

#define GOLDEN_REDUCE(system, least)                                                           \
	Test(golden_reduce, system, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60) \
	{                                                                                      \
		check_system(#system, least);                                                  \
	}

GOLDEN_REDUCE(fsdp2, 1518)
GOLDEN_REDUCE(fsdp1, 790)
GOLDEN_REDUCE(ddp, 770)
GOLDEN_REDUCE(fairscale, 332)
GOLDEN_REDUCE(xla, 210)
