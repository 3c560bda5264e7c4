#include "ref/ref.h"
#include "step.h"

static void step(const struct k_step *s)
{
	if (s->kind == K_STEP_ADAMW)
		ref_adamw(&s->adamw, 0, 1);
	else if (s->kind == K_STEP_ADAM)
		ref_adam(&s->adam, 0, 1);
	else
		ref_sgd(&s->sgd, 0, 1);
}

void ref_reduce_step(const struct k_reduce_step *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++) {
		float g = ref_reduce_element(&a->reduce, a->first + i);
		struct k_step one = k_step_at(&a->step, i, &g);

		step(&one);
	}
}
