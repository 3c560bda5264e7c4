#include "ref/ref.h"

void ref_adamw(const struct k_adamw *a, size_t begin, size_t end)
{
	struct adam_step s = adam_step_of_adamw(a);

	ref_adam_step(&s, begin, end);
}
