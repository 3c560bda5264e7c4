#include "host/host.h"

void HOST(clamp)(const struct k_clamp *a, size_t begin, size_t end)
{
	float *x = a->x;
	float lo = a->lo, hi = a->hi;

	for (size_t i = begin; i < end; i++) {
		float y = x[i] < lo ? lo : x[i];

		x[i] = y > hi ? hi : y;
	}
}
