#include "host/host.h"

void HOST(adamw)(const struct k_adamw *a, size_t begin, size_t end)
{
	struct adam_step s = adam_step_of_adamw(a);

	HOST(adam_step)(&s, begin, end);
}
