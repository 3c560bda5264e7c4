#include "ref/ref.h"

void ref_unscale(const struct k_unscale *a, size_t begin, size_t end)
{
	struct k_found_inf look = { a->x, a->found, DTYPE_FP32 };
	struct k_scale scale = { a->x, a->inv, NULL };

	ref_found_inf(&look, begin, end);
	if (a->inv != 1)
		ref_scale(&scale, begin, end);
}
