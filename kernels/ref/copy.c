#include "ref/ref.h"

void ref_copy(const struct k_copy *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++)
		((uint8_t *)a->dst)[i] = ((const uint8_t *)a->src)[i];
}
