#include "random.h"
#include "ref/ref.h"

static float normal(const struct k_fill *a, const uint32_t w[4], unsigned k)
{
	double z[2];

	random_normals(&w[k & 2], z);
	return (float)(a->a + a->b * z[k & 1]);
}

static float element(const struct k_fill *a, uint64_t index)
{
	uint32_t w[4];
	unsigned k = index % 4;

	if (a->kind == FILL_CONSTANT)
		return (float)a->a;
	random_words(a->seed, a->stream, index / 4, w);
	if (a->kind == FILL_NORMAL)
		return normal(a, w, k);
	return (float)(a->a + (a->b - a->a) * random_unit(w[k]));
}

void ref_fill(const struct k_fill *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++)
		a->dst[i] = element(a, a->first + i);
}
