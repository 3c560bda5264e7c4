#include "unit/reduce_plan.h"

#include <math.h>

#include "core/check.h"

/* A division that XLA compiles is a true division. If @by is a power of two both give the same. */
static bool reduce_plan_takes_inverse(const struct reduce_setting *s)
{
	if (s->div_mode)
		return s->div_mode == DIV_MODE_RECIPROCAL;
	return s->device == REDUCE_AS_ON_GPU && s->profile != PROFILE_XLA;
}

static struct k_factor reduce_plan_multiply_by(double by, enum dtype t, float rounded_by)
{
	return by == 1 ? k_divide_by(1, t)
		       : (struct k_factor){ .how = K_FACTOR_MUL, .dtype = t, .value = rounded_by };
}

struct k_factor reduce_divide_by(const struct reduce_setting *s, double by, enum dtype t)
{
	double inverse = 1 / (double)(float)by;

	return reduce_plan_takes_inverse(s) ? reduce_plan_multiply_by(inverse, t, (float)inverse)
					    : k_divide_by((float)by, t);
}

/* The systems divide only by factors above 1; FSDP2 divides by every factor but 1. */
static struct k_factor reduce_plan_divide_above_one(const struct reduce_setting *s, double by,
						    enum dtype t)
{
	return reduce_divide_by(s, by > 1 ? by : 1, t);
}

static float reduce_plan_rounded(double x, enum dtype t)
{
	float wide = (float)x, back;
	uint16_t narrow[2];
	struct k_cast to = { narrow, &wide, t, DTYPE_FP32, false };
	struct k_cast from = { &back, narrow, DTYPE_FP32, t, false };

	if (t == DTYPE_FP32)
		return wide;
	kernels_ref()->cast(&to, 0, 1);
	kernels_ref()->cast(&from, 0, 1);
	return back;
}

/* As NCCL multiplies: by a constant of the tensor's type. */
static struct k_factor reduce_plan_premultiply(double by, enum dtype t)
{
	return reduce_plan_multiply_by(by, t, reduce_plan_rounded(by, t));
}

/* ÷pre, added and ÷post in one type. */
static void reduce_plan_fairscale(const struct reduce_setting *s, struct reduce_plan *p)
{
	p->pre = reduce_plan_divide_above_one(s, s->pre_divide, s->reduce_dtype);
	p->post = reduce_plan_divide_above_one(s, s->post_divide, s->reduce_dtype);
}

/* Factors of 1 and 1 that are not the default make the collective itself divide. */
static void reduce_plan_xla(const struct reduce_setting *s, struct reduce_plan *p)
{
	p->pre = reduce_plan_divide_above_one(s, s->pre_divide, s->gradient_dtype);
	p->post = reduce_plan_divide_above_one(s, s->post_divide, DTYPE_FP32);
	if (s->pre_divide == 1 && s->post_divide == 1)
		p->post = reduce_plan_premultiply(1.0 / s->ranks, s->reduce_dtype);
}

/* One collective of @n that averages: on its inputs, or on its sum. */
static void reduce_plan_average(const struct reduce_setting *s, uint32_t n, struct k_factor *before,
				struct k_factor *after)
{
	if (s->device == REDUCE_AS_ON_GPU)
		*before = reduce_plan_premultiply(1.0 / n, s->reduce_dtype);
	else
		*after = k_divide_by((float)n, s->reduce_dtype);
}

static void reduce_plan_fsdp2_average(const struct reduce_setting *s, struct reduce_plan *p)
{
	if (s->divide_factor == 0) {
		reduce_plan_average(s, s->shard_ranks, &p->pre, &p->partial);
		reduce_plan_average(s, s->ranks / s->shard_ranks, &p->replica, &p->post);
	} else if (s->divide_factor == s->shard_ranks) {
		reduce_plan_average(s, s->shard_ranks, &p->pre, &p->partial);
	} else if (s->shard_ranks > 1) {
		p->pre = reduce_plan_premultiply(1 / s->divide_factor, s->reduce_dtype);
	}
}

/* fp16 is divided half before, like the factors of the others, and half after. */
static void reduce_plan_fsdp2_sum(const struct reduce_setting *s, struct reduce_plan *p)
{
	double factor = s->divide_factor != 0 ? s->divide_factor : s->ranks, pre = 1;

	while (s->reduce_dtype == DTYPE_FP16 && fmod(factor, pre) == 0 && factor / pre > pre)
		pre *= 2;
	p->pre = reduce_divide_by(s, pre, s->reduce_dtype);
	p->post = reduce_divide_by(s, factor / pre, s->reduce_dtype);
}

static void reduce_plan_fsdp2(const struct reduce_setting *s, struct reduce_plan *p)
{
	p->accumulate_dtype = s->reduce_dtype;
	if (s->force_sum || s->reduce_dtype == DTYPE_FP16)
		reduce_plan_fsdp2_sum(s, p);
	else
		reduce_plan_fsdp2_average(s, p);
	/* in place of a reduce-scatter of one rank, regardless of other divisions */
	if (s->shard_ranks == 1 && s->divide_factor != 0)
		p->partial = reduce_divide_by(s, s->divide_factor, s->reduce_dtype);
}

/* Only a rounding: the result of a hook is copied into the bucket, which has the gradient's
 * type. */
static struct k_factor reduce_plan_back_to_bucket(const struct reduce_setting *s)
{
	bool narrows = s->gradient_dtype != DTYPE_FP32 && s->gradient_dtype != s->reduce_dtype;

	return narrows ? (struct k_factor){ .how = K_FACTOR_MUL,
					    .dtype = s->gradient_dtype,
					    .value = 1 }
		       : k_divide_by(1, s->gradient_dtype);
}

/* Where FSDP1 (NO_SHARD, or one rank) and fairscale (one rank) do not shard, the reduced gradient
 * is where autograd adds the next one. For 16-bit gradients it is wider than the accumulated
 * gradient here: those are added as in the sharded case. */
static bool reduce_plan_is_whole(const struct reduce_setting *s)
{
	return s->shard_ranks == 1 && s->gradient_dtype == DTYPE_FP32 &&
	       (s->profile == PROFILE_FSDP1_HOOK || s->ranks == 1);
}

void reduce_plan_make(const struct reduce_setting *s, struct reduce_plan *ret)
{
	struct reduce_plan p = { .sum_dtype = s->reduce_dtype,
				 .accumulate_dtype = s->gradient_dtype };
	double inverse = 1.0 / s->ranks;

	switch (s->profile) {
	case PROFILE_XLA:
		reduce_plan_xla(s, &p);
		break;
	case PROFILE_FSDP2:
		reduce_plan_fsdp2(s, &p);
		break;
	case PROFILE_DDP: /* by a scalar of the type of the arithmetic, not the tensor's */
		p.pre = reduce_plan_multiply_by(inverse, s->gradient_dtype, (float)inverse);
		p.adds_before = true;
		break;
	case PROFILE_DDP_HOOK:
		p.post = reduce_plan_back_to_bucket(s);
		/* fall through */
	case PROFILE_DDP_BUCKET_VIEW:
		p.pre = reduce_divide_by(s, s->ranks, s->reduce_dtype);
		p.adds_before = true;
		break;
	case PROFILE_FAIRSCALE:
	case PROFILE_FSDP1_HOOK:
	case _PROFILE_N:
		reduce_plan_fairscale(s, &p);
		p.adds_before = reduce_plan_is_whole(s);
		break;
	}
	*ret = p;
}

struct k_factor reduce_either(struct k_factor a, struct k_factor b)
{
	CHECK(!a.how || !b.how);
	return a.how ? a : b;
}

struct reduce_setting reduce_setting_of(const state_unit *rec, uint32_t ranks,
					enum reduce_device device)
{
	return (struct reduce_setting){ .profile = (enum reduce_profile)rec->reduce_profile,
					.gradient_dtype = (enum dtype)rec->gradient_dtype,
					.reduce_dtype = (enum dtype)rec->reduce_dtype,
					.ranks = ranks,
					.shard_ranks = rec->shard_ranks,
					.pre_divide = rec->pre_divide,
					.post_divide = rec->post_divide,
					.divide_factor = rec->divide_factor,
					.force_sum = rec->force_sum,
					.device = device,
					.div_mode = (enum unit_div_mode)rec->div_mode };
}

struct reduce_setting reduce_setting_now(const struct unit *u, uint32_t ranks,
					 enum reduce_device device)
{
	struct reduce_setting s = reduce_setting_of(u->rec, ranks, device);

	if (!u->factors.given)
		return s;
	s.pre_divide = u->factors.pre_divide;
	s.post_divide = u->factors.post_divide;
	s.divide_factor = u->factors.divide_factor;
	s.force_sum = u->factors.force_sum;
	return s;
}
