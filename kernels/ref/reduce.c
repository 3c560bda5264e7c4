#include "ref/ref.h"

static float divide(float x, float by)
{
	return by == 1 ? x : x / by;
}

void ref_reduce(const struct k_reduce *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++) {
		float t = divide(ref_load(a->in[0], a->in_dtype, i), a->pre);

		for (unsigned j = 1; j < a->k; j++)
			t += divide(ref_load(a->in[j], a->in_dtype, i), a->pre);
		t = divide(t, a->post);
		a->out[i] = a->accumulate ? a->out[i] + t : t;
	}
}
