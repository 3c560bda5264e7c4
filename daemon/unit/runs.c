#include "unit/runs.h"

#include "core/check.h"

unsigned unit_runs(const struct unit *u, const struct unit_part *p, struct unit_run *ret)
{
	uint64_t at = 0, part_end = p->begin + p->n;
	unsigned n_runs = 0;

	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		const state_tensor *t = u->rec->tensors[i];
		uint64_t n, begin, end;

		CHECK(layout_numel(t->shape, (uint32_t)t->n_shape, &n));
		begin = at > p->begin ? at : p->begin;
		end = at + n < part_end ? at + n : part_end;
		if (begin < end)
			ret[n_runs++] = (struct unit_run){ .tensor = i,
							   .first = begin - at,
							   .at = begin - p->begin,
							   .full = begin,
							   .n = end - begin };
		at += n;
	}
	return n_runs;
}
