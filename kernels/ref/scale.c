#include "ref/ref.h"

void ref_scale(const struct k_scale *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++)
		a->x[i] *= a->factor;
}
