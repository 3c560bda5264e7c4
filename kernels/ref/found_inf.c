#include "ref/ref.h"

#include <math.h>

void ref_found_inf(const struct k_found_inf *a, size_t begin, size_t end)
{
	float one = 1;

	for (size_t i = begin; i < end; i++)
		if (!isfinite(ref_load(a->x, a->dtype, i)))
			__atomic_store(a->found, &one, __ATOMIC_RELAXED);
}
