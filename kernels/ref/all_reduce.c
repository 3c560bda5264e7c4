#include "ref/ref.h"

#include <math.h>

static float fold(enum reduce_op op, float t, float x)
{
	if (op == REDUCE_MAX)
		return x > t || isnan(x) ? x : t;
	if (op == REDUCE_MIN)
		return x < t || isnan(x) ? x : t;
	return t + x;
}

void ref_all_reduce(const struct k_all_reduce *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++) {
		float t = ref_load(a->in[0], a->dtype, i);

		for (unsigned j = 1; j < a->k; j++)
			t = fold(a->op, t, ref_load(a->in[j], a->dtype, i));
		if (a->op == REDUCE_AVG)
			t /= (float)a->k;
		ref_store(a->out, a->dtype, i, t);
	}
}
