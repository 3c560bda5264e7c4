#include "ref/ref.h"
#include "undo.h"

void ref_scale(const struct k_scale *a, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++) {
		if (a->undo)
			k_undo_save(a->undo, (float *const[]){ a->x }, 1, i, 1);
		a->x[i] *= a->factor;
	}
}
