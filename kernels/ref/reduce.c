#include "ref/ref.h"

static float term(const struct k_reduce *a, unsigned j, size_t i)
{
	return ref_round(a->sum_dtype, ref_factor(&a->pre, ref_load(a->in[j], a->in_dtype, i)));
}

float ref_reduce_element(const struct k_reduce *a, size_t i)
{
	float t = term(a, 0, i);

	for (unsigned j = 1; j < a->k; j++)
		t = ref_round(a->sum_dtype, t + term(a, j, i));
	t = ref_factor(&a->post, t);
	return a->accumulate ? ref_load(a->out, a->out_dtype, i) + t : t;
}

void ref_reduce(const struct k_reduce *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++)
		ref_store(a->out, a->out_dtype, i, ref_reduce_element(a, i));
}
