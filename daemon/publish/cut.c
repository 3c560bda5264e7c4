#include "publish/cut.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

#include "core/check.h"

#define CUT_DIMS 3u

void cut_deinit(struct cut_boxes *to)
{
	free(to->all);
	*to = CUT_BOXES_NULL;
}

static int cut_add(struct cut_boxes *to, const struct view_box *x)
{
	uint32_t room = to->room ? 2 * to->room : 16;
	struct view_box *more;

	if (to->n == to->room) {
		more = realloc(to->all, room * sizeof(*more));
		if (!more)
			return -ENOMEM;
		to->all = more;
		to->room = room;
	}
	to->all[to->n++] = *x;
	return 0;
}

/* From its first element to its last one. */
static uint64_t cut_span(const struct view_box *x)
{
	uint64_t span = 0;

	for (unsigned d = 0; d < CUT_DIMS; d++)
		span += (x->n[d] - 1) * x->src_stride[d];
	return span;
}

/* The dimension with the largest stride, of those with more than one element. */
static unsigned cut_outer(const struct view_box *x)
{
	unsigned outer = CUT_DIMS;

	for (unsigned d = 0; d < CUT_DIMS; d++)
		if (x->n[d] > 1 && (outer == CUT_DIMS || x->src_stride[d] > x->src_stride[outer]))
			outer = d;
	CHECK(outer < CUT_DIMS);
	return outer;
}

/* Elements [begin, begin + n) of dimension @d. */
static struct view_box cut_range(const struct view_box *x, unsigned d, uint64_t begin, uint64_t n)
{
	struct view_box part = *x;

	part.n[d] = n;
	part.from += begin * x->src_stride[d];
	part.at += begin * (d < 2 ? x->dst_stride[d] : 1);
	return part;
}

/* How many slices along @d begin below @bound. */
static uint64_t cut_count(const struct view_box *x, unsigned d, uint64_t bound)
{
	uint64_t n;

	if (x->from >= bound)
		return 0;
	n = (bound - x->from + x->src_stride[d] - 1) / x->src_stride[d];
	return n < x->n[d] ? n : x->n[d];
}

int cut_append(struct cut_boxes *to, const struct view_box *x, uint64_t first, uint64_t n)
{
	uint64_t span = cut_span(x), end = first + n, inner, some, from, whole, behind;
	struct view_box part;
	unsigned d;
	int r = 0;

	if (x->from >= end || x->from + span < first)
		return 0;
	if (x->from >= first && x->from + span < end)
		return cut_add(to, x);
	d = cut_outer(x);
	inner = span - (x->n[d] - 1) * x->src_stride[d]; /* of a slice */
	/* slices in front of the range; that begin in front of it; that end in it; that begin in front of its end */
	some = first > inner ? cut_count(x, d, first - inner) : 0;
	from = cut_count(x, d, first);
	whole = end > inner ? cut_count(x, d, end - inner) : 0;
	behind = cut_count(x, d, end);
	if (whole > from) {
		part = cut_range(x, d, from, whole - from);
		r = cut_add(to, &part);
	} else {
		whole = from;
	}
	for (uint64_t i = some; i < from && r == 0; i++) {
		part = cut_range(x, d, i, 1);
		r = cut_append(to, &part, first, n);
	}
	for (uint64_t i = whole; i < behind && r == 0; i++) {
		part = cut_range(x, d, i, 1);
		r = cut_append(to, &part, first, n);
	}
	return r;
}
