#include "ref/ref.h"

void ref_clamp(const struct k_clamp *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++) {
		float x = a->x[i] < a->lo ? a->lo : a->x[i];

		a->x[i] = x > a->hi ? a->hi : x;
	}
}
