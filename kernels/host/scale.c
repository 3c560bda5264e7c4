#include "host/host.h"

void HOST(scale)(const struct k_scale *a, size_t begin, size_t end)
{
	float *x = a->x;
	float factor = a->factor;

	for (size_t i = begin; i < end; i++)
		x[i] *= factor;
}
