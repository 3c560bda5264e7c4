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
#include <stdio.h>
#include <string.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "golden_clip.h"
#include "unit/norm.h"

#define MAX_N GOLDEN_CLIP_MAX_N

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

static void expect_clipped(const struct safetensors *f, const struct kernels *k, const char *name,
			   const struct clip *clip, double total,
			   const struct safetensors_tensor *in)
{
	struct safetensors_tensor want = golden_part(f, name, "g");
	float x[MAX_N], factor = 1;

	memcpy(x, in->data, in->elements * sizeof(float));
	if (norm_clip_factor(clip, total, &factor)) {
		struct k_scale a = { x, factor, NULL };

		k->scale(&a, 0, in->elements);
	}
	cr_assert_eq(want.elements, in->elements);
	golden_expect(name, x, want.data, DTYPE_FP32, in->elements);
}

static void check_norm(const struct safetensors *f, const struct kernels *k, const char *name,
		       const char *about)
{
	struct safetensors_tensor in = golden_clip_input(f, about);
	struct clip clip = asked(about);
	double want = (double)golden_at(golden_part(f, name, "total").data, DTYPE_FP32, 0), total;
	struct fault fault = FAULT_NULL;
	unsigned ranks = (unsigned)golden_number(about, "ranks");
	bool refused = norm_clip_check(&clip, want, &fault) != 0;

	if (golden_is(about, "system", "torch"))
		cr_assert_eq(refused, golden_number(about, "error") != 0, "%s", name);
	total = total_of(k, in.data, in.elements, clip.type, ranks);
	cr_assert(golden_clip_is_near(total, want, in.elements, clip.type), "%s: norm %a, not %a",
		  name, total, want);
	expect_clipped(f, k, name, &clip, want, &in);
}

static void check_value(const struct safetensors *f, const struct kernels *k, const char *name,
			const char *about)
{
	struct safetensors_tensor in = golden_clip_input(f, about),
				  want = golden_part(f, name, "g");
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
