/*
 * The arithmetic of one element, as kernels.h defines it, in the form the CUDA kernels
 * use. nvcc and a C compiler both read it: every operation that rounds has a name, which
 * is the intrinsic of that rounding on a device and plain C on the host, so that a test
 * runs this very code against kernels/ref without a GPU.
 *
 * Loads, stores and conversions of what is in memory are in device.cuh.
 */
#ifndef SHARDD_CUDA_ELEMENT_H
#define SHARDD_CUDA_ELEMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_kernels.h"
#include "kernels.h"

#ifdef __CUDACC__
#define EL_FN             static __device__ __forceinline__
#define EL_BITS(x)        __float_as_uint(x)
#define EL_FLOAT(u)       __uint_as_float(u)
#define EL_ADD(x, y)      __fadd_rn(x, y)
#define EL_SUB(x, y)      __fsub_rn(x, y)
#define EL_MUL(x, y)      __fmul_rn(x, y)
#define EL_DIV(x, y)      __fdiv_rn(x, y)
#define EL_SQRT(x)        __fsqrt_rn(x)
#define EL_FMA(x, y, z)   __fmaf_rn(x, y, z)
#define EL_FMA64(x, y, z) __fma_rn(x, y, z)
#define EL_ADD64(x, y)    __dadd_rn(x, y)
#define EL_SUB64(x, y)    __dsub_rn(x, y)
#define EL_MUL64(x, y)    __dmul_rn(x, y)
#define EL_DIV64(x, y)    __ddiv_rn(x, y)
#define EL_SQRT64(x)      __dsqrt_rn(x)
#define EL_NARROW64(x)    __double2float_rn(x)
#define EL_POW64(x, p)    pow(x, p)
#define EL_ABS64(x)       fabs(x)

/* The processor's conversions round to nearest even and keep NaN a NaN. */
static __device__ __forceinline__ float el_round_bf16(float f)
{
	uint16_t half;

	asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(f));
	return __uint_as_float(static_cast<uint32_t>(half) << 16);
}

static __device__ __forceinline__ float el_round_fp16(float f)
{
	uint16_t half;

	asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(f));
	asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(half));
	return f;
}
#define EL_ROUND_BF16(x) el_round_bf16(x)
#define EL_ROUND_FP16(x) el_round_fp16(x)
#else
#include <math.h>

#include "convert.h"
#define EL_FN             static inline
#define EL_BITS(x)        f32_bits(x)
#define EL_FLOAT(u)       f32_from_bits(u)
#define EL_ADD(x, y)      ((x) + (y))
#define EL_SUB(x, y)      ((x) - (y))
#define EL_MUL(x, y)      ((x) * (y))
#define EL_DIV(x, y)      ((x) / (y))
#define EL_SQRT(x)        sqrtf(x)
#define EL_FMA(x, y, z)   fmaf(x, y, z)
#define EL_FMA64(x, y, z) fma(x, y, z)
#define EL_ADD64(x, y)    ((x) + (y))
#define EL_SUB64(x, y)    ((x) - (y))
#define EL_MUL64(x, y)    ((x) * (y))
#define EL_DIV64(x, y)    ((x) / (y))
#define EL_SQRT64(x)      sqrt(x)
#define EL_NARROW64(x)    ((float)(x))
#define EL_POW64(x, p)    pow(x, p)
#define EL_ABS64(x)       fabs(x)
#define EL_ROUND_BF16(x)  bf16_to_f32(bf16_from_f32(x))
#define EL_ROUND_FP16(x)  fp16_to_f32(fp16_from_f32(x))
#endif

#define EL_ABS_MASK  0x7fffffffu
#define EL_INF_BITS  0x7f800000u
#define EL_MANTISSA  0x007fffffu
#define EL_EXP_SHIFT 23

/* A division by @by. Where it is a power of two with an inverse in fp32, x/by and
 * x*inverse are the same real number, rounded once: the same bits, and ten times cheaper. */
struct el_divisor {
	float by, inverse;
	bool exact;
};

EL_FN struct el_divisor el_divisor(float by)
{
	uint32_t bits = EL_BITS(by), exp = (bits & EL_INF_BITS) >> EL_EXP_SHIFT;
	struct el_divisor d;

	d.by = by;
	d.inverse = EL_DIV(1.0f, by);
	d.exact = !(bits & EL_MANTISSA) && exp >= 1 && exp <= 254;
	return d;
}

/* NONE is a division by one. */
EL_FN struct el_divisor el_factor(struct cuda_factor f)
{
	struct el_divisor d = el_divisor(f.how == K_FACTOR_DIV ? f.value : 1.0f);

	if (f.how == K_FACTOR_MUL)
		d.inverse = f.value;
	return d;
}

/* @exact: the value of d.exact. */
EL_FN float el_divide(float x, struct el_divisor d, bool exact)
{
	return exact ? EL_MUL(x, d.inverse) : EL_DIV(x, d.by);
}

/* To a type and back. */
EL_FN float el_round(uint32_t t, float x)
{
	return t == DTYPE_BF16 ? EL_ROUND_BF16(x) : t == DTYPE_FP16 ? EL_ROUND_FP16(x) : x;
}

/* @d: el_factor(f). */
EL_FN float el_apply(struct cuda_factor f, struct el_divisor d, float x)
{
	if (f.how == K_FACTOR_NONE)
		return x;
	return el_round(f.dtype, el_divide(el_round(f.dtype, x), d, d.exact));
}

/* convert.h's e4m3_from_f32_abs, e4m3_divided and e4m3_scale. */
EL_FN uint32_t el_e4m3_abs(uint32_t abs)
{
	const uint32_t most = abs < 0x43e00000u ? abs : 0x43e00000u; /* 448 */
	const uint32_t small = EL_BITS(EL_ADD(EL_FLOAT(most), 16384.0f)) - 0x46800000u;
	const uint32_t normal = (most - 0x3c000000u + 0x7ffff + ((most >> 20) & 1)) >> 20;

	return abs > EL_INF_BITS ? 0x7f : most < 0x3c800000u ? small : normal;
}

EL_FN uint8_t el_e4m3_divided(float x, float scale)
{
	const uint32_t u = EL_BITS(x);
	const float y = EL_DIV(EL_FLOAT(u & EL_ABS_MASK), scale);

	return (uint8_t)(el_e4m3_abs(EL_BITS(y) & EL_ABS_MASK) | ((u >> 24) & 0x80));
}

EL_FN float el_e4m3_scale(uint32_t amax)
{
	const float scale = EL_DIV(EL_FLOAT(amax), 448.0f);

	if (amax > EL_INF_BITS)
		return EL_FLOAT(0x7fc00000u);
	return scale == 0 ? 1.0f : scale;
}

/* Before the first input of a fold: -0 + x is x for every x, -0 too. */
#define EL_SUM_NOTHING (-0.0f)

/* t is the value so far, x the next input. */
EL_FN float el_sum(float t, float x)
{
	return EL_ADD(t, x);
}

/* The first input replaces the initial value: -inf, which is equal only to itself. */
EL_FN float el_max(float t, float x)
{
	return x > t || x != x ? x : t;
}

EL_FN float el_min(float t, float x)
{
	return x < t || x != x ? x : t;
}

/* (op) is SUM, AVG, MAX or MIN. */
EL_FN float el_fold_nothing(enum reduce_op op)
{
	return op == REDUCE_MAX   ? EL_FLOAT(EL_INF_BITS | ~EL_ABS_MASK)
	       : op == REDUCE_MIN ? EL_FLOAT(EL_INF_BITS)
				  : EL_SUM_NOTHING;
}

EL_FN float el_fold(enum reduce_op op, float t, float x)
{
	return op == REDUCE_MAX ? el_max(t, x) : op == REDUCE_MIN ? el_min(t, x) : el_sum(t, x);
}

EL_FN float el_accumulate(bool accumulate, float old, float t)
{
	return accumulate ? EL_ADD(old, t) : t;
}

EL_FN float el_scale(float x, float factor)
{
	return EL_MUL(x, factor);
}

EL_FN float el_clamp(float x, float lo, float hi)
{
	x = x < lo ? lo : x;
	return x > hi ? hi : x;
}

/* An inverse of one leaves even a NaN as it is. */
EL_FN float el_unscale(float x, float inv)
{
	return inv == 1.0f ? x : EL_MUL(x, inv);
}

EL_FN float el_lerp(float from, float to, float w)
{
	bool small = (EL_BITS(w) & EL_ABS_MASK) < EL_BITS(0.5f);
	float d = EL_SUB(to, from);

	return small ? EL_FMA(w, d, from) : EL_FMA(EL_SUB(w, 1.0f), d, to);
}

EL_FN double el_lerp64(double from, double to, double w)
{
	double d = EL_SUB64(to, from);

	return EL_ABS64(w) < 0.5 ? EL_FMA64(w, d, from) : EL_FMA64(EL_SUB64(w, 1.0), d, to);
}

/* The common part of Adam and AdamW, from the gradient and the parameter after decay. */
EL_FN float el_moments(float p, float g, float *m, float *v, float w1, float b2, float w2,
		       float step_size, float sq, float eps)
{
	float denom;

	*m = el_lerp(*m, g, w1);
	*v = EL_FMA(EL_MUL(w2, g), g, EL_MUL(*v, b2));
	denom = EL_ADD(EL_DIV(EL_SQRT(*v), sq), eps);
	return EL_SUB(p, EL_DIV(EL_MUL(step_size, *m), denom));
}

EL_FN void el_adamw(const struct cuda_adamw *a, float *p, float g, float *m, float *v)
{
	*p = el_moments(EL_MUL(*p, a->decay), g, m, v, a->w1, a->b2, a->w2, a->step_size, a->sq,
			a->eps);
}

EL_FN void el_adam(const struct cuda_adam *a, float *p, float g, float *m, float *v)
{
	if (a->wd != 0.0f)
		g = EL_FMA(*p, a->wd, g);
	*p = el_moments(*p, g, m, v, a->w1, a->b2, a->w2, a->step_size, a->sq, a->eps);
}

/* Adam and AdamW, with all options. @vmax: only read and written with amsgrad.
 * @tail: the element is of the tail of a fused step. */
EL_FN void el_adam_any(const struct cuda_adam_any *a, float *p, float g, float *m, float *v,
		       float *vmax, bool tail)
{
	float x, denom;

	if (a->maximize)
		g = -g;
	if (a->decoupled)
		*p = EL_MUL(*p, a->decay);
	else if (a->wd != 0.0f)
		g = EL_FMA(*p, a->wd, g);
	*m = el_lerp(*m, g, a->w1);
	x = EL_MUL(a->w2, g);
	x = tail ? EL_FMA(*v, a->b2, EL_MUL(x, g)) : EL_FMA(x, g, EL_MUL(*v, a->b2));
	*v = x;
	if (a->vmax) {
		x = x > *vmax || (!tail && x != x) ? x : *vmax;
		*vmax = x;
	}
	denom = EL_ADD(EL_DIV(EL_SQRT(x), a->sq), a->eps);
	*p = EL_SUB(*p, EL_DIV(EL_MUL(a->step_size, *m), denom));
}

EL_FN void el_adam_f64(const struct cuda_adam_f64 *a, float *p, float g32, float *m32, float *v32,
		       float *vmax)
{
	double g = a->maximize ? -(double)g32 : (double)g32, x = (double)*p, m, v;

	if (a->decoupled)
		x = EL_MUL64(x, a->decay);
	else if (a->wd != 0.0)
		g = EL_FMA64(x, a->wd, g);
	m = el_lerp64((double)*m32, g, a->w1);
	v = EL_FMA64(EL_MUL64(a->w2, g), g, EL_MUL64((double)*v32, a->b2));
	*m32 = EL_NARROW64(m);
	*v32 = EL_NARROW64(v);
	if (a->vmax) {
		double old = (double)*vmax;

		v = v > old || v != v ? v : old;
		*vmax = EL_NARROW64(v);
	}
	v = EL_ADD64(EL_DIV64(EL_SQRT64(v), a->sq), a->eps);
	*p = EL_NARROW64(EL_SUB64(x, EL_DIV64(EL_MUL64(a->step_size, m), v)));
}

/* @buf is read unless this is the first step, and both only when mu is not 0. */
EL_FN void el_sgd(const struct cuda_sgd *a, float *p, float g, float *buf, bool tail)
{
	float d = a->maximize ? -g : g;

	if (a->wd != 0.0f)
		d = EL_FMA(*p, a->wd, d);
	if (a->mu != 0.0f) {
		*buf = a->first ? d
		       : tail   ? EL_FMA(*buf, a->mu, EL_MUL(d, a->w))
				: EL_FMA(d, a->w, EL_MUL(a->mu, *buf));
		d = a->nesterov ? EL_FMA(*buf, a->mu, d) : *buf;
	}
	*p = EL_FMA(d, -a->lr, *p);
}

/* The square of an fp32 is exact in fp64: fused or not, one rounding. */
EL_FN double el_add_square(double sum, float x)
{
	return EL_FMA64((double)x, (double)x, sum);
}

/* |x|^p; @p is neither 2 nor infinite. */
EL_FN double el_add_power(double sum, float x, double p)
{
	double abs = EL_ABS64((double)x);

	return EL_ADD64(sum, p == 1.0 ? abs : EL_POW64(abs, p));
}

/* Bits of |x| compare as the numbers do, and those of a NaN are above infinity's. */
EL_FN uint32_t el_max_abs(uint32_t max, float x)
{
	uint32_t abs = EL_BITS(x) & EL_ABS_MASK;

	return abs > max ? abs : max;
}

/* Infinite or NaN, from the bits of a 16-bit element in the low half, or of an fp32. */
EL_FN bool el_not_finite(enum dtype t, uint32_t bits)
{
	uint32_t mask = t == DTYPE_FP32 ? EL_INF_BITS : t == DTYPE_BF16 ? 0x7f80u : 0x7c00u;

	return (bits & mask) == mask;
}

#endif
