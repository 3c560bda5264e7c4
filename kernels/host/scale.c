#include "host/host.h"
#include "undo.h"

static inline void range(float *x, float factor, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++)
		x[i] *= factor;
}

void HOST(scale)(const struct k_scale *a, size_t begin, size_t end)
{
	float *const arrays[] = { a->x };

	if (!a->undo) {
		range(a->x, a->factor, begin, end);
		return;
	}
	for (size_t next; begin < end; begin = next) {
		next = end - begin < K_UNDO_BLOCK ? end : begin + K_UNDO_BLOCK;
		k_undo_save(a->undo, arrays, 1, begin, next - begin);
		range(a->x, a->factor, begin, next);
	}
}
