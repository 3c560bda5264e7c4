#include "random.h"
#include "ref/ref.h"

/* Elements 4 * @group to 4 * @group + 3, which are made of the same four words. */
static void fill_group(const struct k_fill *a, uint64_t group, float of[4])
{
	uint32_t w[4];
	double z[4];

	if (a->kind == FILL_CONSTANT) {
		for (unsigned k = 0; k < 4; k++)
			of[k] = (float)a->a;
		return;
	}
	random_words(a->seed, a->stream, group, w);
	if (a->kind == FILL_NORMAL) {
		random_normals(&w[0], &z[0]);
		random_normals(&w[2], &z[2]);
	}
	for (unsigned k = 0; k < 4; k++)
		of[k] = (float)(a->kind == FILL_NORMAL ? a->a + a->b * z[k]
						       : a->a + (a->b - a->a) * random_unit(w[k]));
}

void ref_fill(const struct k_fill *a, size_t begin, size_t end)
{
	float of[4];

	for (size_t i = begin; i < end; i++) {
		uint64_t index = a->first + i;

		if (i == begin || index % 4 == 0)
			fill_group(a, index / 4, of);
		a->dst[i] = of[index % 4];
	}
}
