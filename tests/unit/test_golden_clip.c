/*
 * Gradient clipping against torch, FSDP2, FSDP1, fairscale and XLA:
 * tests/golden/clip.safetensors, which make_clip.py writes and describes.
 *
 * Totals: maxima are equal; sums are added in fp32 by torch, in the order of its vectors, per
 * tensor and per rank, and in fp64 here, so they are close. Clipped gradients: bit for bit,
 * from the total that the system had. All in fp32: that is what gradient shards hold here,
 * whatever type the gradients were handed in and added in, and what the systems' shards
 * hold with mixed precision. The gradients of a model that is in 16 bits altogether the systems
 * clip in 16 bits: nothing here is to equal that.
 */
#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "golden.h"
#include "unit/norm.h"

#define MAX_N 512

static struct safetensors_tensor input(const struct safetensors *f, const char *about)
{
	struct safetensors_tensor t;
	char kind[32], name[64];

	snprintf(name, sizeof(name), "in/%s/fp32", golden_text(about, "kind", kind, sizeof(kind)));
	t = golden_tensor(f, name);
	cr_assert(t.dtype == DTYPE_FP32 && t.elements <= MAX_N);
	return t;
}

static struct clip asked(const char *about)
{
	struct clip c = {
		.max_norm = golden_number(about, "max"),
		.type = golden_number(about, "p"),
		.profile = golden_is(about, "system", "fairscale") ? CLIP_FAIRSCALE
			   : golden_is(about, "system", "xla")     ? CLIP_XLA
								   : CLIP_TORCH,
		.error_if_nonfinite = true,
	};

	return c;
}

/* Of flat shards on so many @ranks, of which the last may have less, or nothing. */
static double total_of(const struct kernels *k, const float *x, size_t n, double p, unsigned ranks)
{
	size_t each = (n + ranks - 1) / ranks;
	double sum = 0;

	for (size_t at = 0; at < n; at += each) {
		double partial = 0;
		struct k_norm a = { x + at, &partial, p };

		k->norm(&a, 0, at + each < n ? each : n - at);
		sum = norm_add(sum, partial, p);
	}
	return norm_of(sum, p);
}

/* Each of torch's roundings is half a unit: of the sum of a tensor, of its root, of the powers
 * and the sum of the norms of tensors and ranks, and the last root. A root divides what
 * was wrong before by p. Powers that are below what fp32 has are lost. */
static void expect_total(const char *name, double got, double want, size_t n, double p)
{
	double relative = (2 * (20 + p) / p + 4) * 0x1p-24;
	double lost = 2 * pow((double)n * 0x1p-149, 1 / p);

	if (isinf(p) || !isfinite(got))
		cr_assert(isnan(want) ? isnan(got) : (float)got == (float)want,
			  "%s: norm %a, not %a", name, got, want);
	else if (isinf(want)) /* of elements that are finite: a power of them is not, in fp32 */
		cr_assert_gt(pow(got, p), FLT_MAX / 2, "%s: norm %a, not %a", name, got, want);
	else
		cr_assert_leq(fabs(got - want), relative * want + lost, "%s: norm %a, not %a", name,
			      got, want);
}

static void expect_clipped(const struct safetensors *f, const struct kernels *k, const char *name,
			   const struct clip *clip, double total,
			   const struct safetensors_tensor *in)
{
	struct safetensors_tensor want = golden_part(f, name, "g");
	float x[MAX_N], factor = 1;

	memcpy(x, in->data, in->elements * sizeof(float));
	if (clip_factor(clip, total, &factor)) {
		struct k_scale a = { x, factor };

		k->scale(&a, 0, in->elements);
	}
	cr_assert_eq(want.elements, in->elements);
	golden_expect(name, x, want.data, DTYPE_FP32, in->elements);
}

static void check_norm(const struct safetensors *f, const struct kernels *k, const char *name,
		       const char *about)
{
	struct safetensors_tensor total = golden_part(f, name, "total"), in = input(f, about);
	struct clip clip = asked(about);
	double want = (double)golden_at(total.data, DTYPE_FP32, 0);
	struct fault fault = FAULT_NULL;
	unsigned ranks = (unsigned)golden_number(about, "ranks");
	bool refused = clip_check(&clip, want, &fault) != 0;

	if (golden_is(about, "system", "torch"))
		cr_assert_eq(refused, golden_number(about, "error") != 0, "%s", name);
	expect_total(name, total_of(k, in.data, in.elements, clip.type, ranks), want, in.elements,
		     clip.type);
	expect_clipped(f, k, name, &clip, want, &in);
}

static void check_value(const struct safetensors *f, const struct kernels *k, const char *name,
			const char *about)
{
	struct safetensors_tensor in = input(f, about), want = golden_part(f, name, "g");
	float most = (float)golden_number(about, "max"), x[MAX_N];
	struct k_clamp a = { x, -most, most };

	memcpy(x, in.data, in.elements * sizeof(float));
	k->clamp(&a, 0, in.elements);
	golden_expect(name, x, want.data, DTYPE_FP32, in.elements);
}

static void check_system(const char *system, unsigned least)
{
	_cleanup_(safetensors_freep) struct safetensors *f = golden_open("clip.safetensors");
	const struct kernels *both[2] = { kernels_ref(), kernels_host() };
	const char *name, *about;
	void *iter = NULL;
	unsigned cases = 0;

	while (safetensors_next(f, &iter, &name, &about)) {
		if (!golden_is(about, "system", system))
			continue;
		for (unsigned i = 0; i < 2; i++) {
			if (golden_is(about, "system", "value"))
				check_value(f, both[i], name, about);
			else
				check_norm(f, both[i], name, about);
		}
		cases++;
	}
	cr_assert_geq(cases, least, "%u cases of %s", cases, system);
}

#define GOLDEN_CLIP(name, system, least)                                                   \
	Test(golden_clip, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60) \
	{                                                                                  \
		check_system(system, least);                                               \
	}

GOLDEN_CLIP(torch, "torch", 45)
GOLDEN_CLIP(fsdp2, "fsdp2", 160)
GOLDEN_CLIP(fsdp1, "fsdp1", 190)
GOLDEN_CLIP(fairscale, "fairscale", 190)
GOLDEN_CLIP(xla, "xla", 190)
GOLDEN_CLIP(by_value, "value", 18)
