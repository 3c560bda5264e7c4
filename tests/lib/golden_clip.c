#include "golden_clip.h"

#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdio.h>

struct safetensors_tensor golden_clip_input(const struct safetensors *f, const char *about)
{
	struct safetensors_tensor t;
	char kind[32], name[64];

	snprintf(name, sizeof(name), "in/%s/fp32", golden_text(about, "kind", kind, sizeof(kind)));
	t = golden_tensor(f, name);
	cr_assert(t.dtype == DTYPE_FP32 && t.elements <= GOLDEN_CLIP_MAX_N);
	return t;
}

/* Each of torch's roundings is half a unit: of the sum of a tensor, of its root, of the powers
 * and the sum of the norms of tensors and ranks, and the last root. A root divides what
 * was wrong before by p. Powers that are below what fp32 has are lost. */
bool golden_clip_is_near(double got, double want, size_t n, double p)
{
	double relative = (2 * (20 + p) / p + 4) * 0x1p-24;
	double lost = 2 * pow((double)n * 0x1p-149, 1 / p);

	if (isinf(p) || !isfinite(got))
		return isnan(want) ? isnan(got) : (float)got == (float)want;
	if (isinf(want)) /* of elements that are finite: a power of them is not, in fp32 */
		return pow(got, p) > (double)FLT_MAX / 2;
	return fabs(got - want) <= relative * want + lost;
}
