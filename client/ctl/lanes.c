#include "ctl/lanes.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"

int lanes_lay(struct lane_span *spans, size_t n, size_t *ret_n)
{
	_cleanup_(freep) uint64_t *free_at = calloc(n ? n : 1, sizeof(*free_at));
	size_t used = 0;

	if (!free_at)
		return -ENOMEM;
	for (size_t i = 0; i < n; i++) {
		struct lane_span *s = &spans[i];

		CHECK(s->end >= s->begin && (!i || s->begin >= spans[i - 1].begin));
		s->lane = 0;
		while (s->lane < used && free_at[s->lane] > s->begin)
			s->lane++;
		if (s->lane == used)
			used++;
		free_at[s->lane] = s->end;
	}
	*ret_n = used;
	return 0;
}
