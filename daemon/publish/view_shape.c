/* The shape of a tensor that a rule makes, and its boxes. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "publish/view_impl.h"

#define VIEW_SHAPE_SLICE ".slice"

/* Shape and place of a part of a source. */
struct view_part {
	uint32_t source;
	uint32_t dims;
	uint64_t shape[VIEW_MAX_DIMS], strides[VIEW_MAX_DIMS];
	uint64_t from;
	/* Of its dimension with this stride only so many are left, from number cut_first on. */
	uint64_t cut_stride, cut_first, cut_count; /* cut_count 0: it is whole */
};

/* A fault of the field @field of source @k of the rule. */
static void view_shape_field(char *buf, size_t bytes, const struct view_match *m, unsigned k,
			     const char *field)
{
	snprintf(buf, bytes, "rules[%u].sources[%u]%s", m->number, k, field);
}

static int view_shape_part(const struct view_build *b, uint32_t source, struct view_part *ret)
{
	const struct view_source *s = &b->sources[source];
	uint64_t stride = 1;

	*ret = (struct view_part){ .source = source, .dims = s->dims };
	if (s->dims > VIEW_MAX_DIMS)
		return fault_set(b->f, FAULT_UNIMPLEMENTED, "rules",
				 "'%.200s' has %u dimensions; at most %u can be published", s->name,
				 s->dims, VIEW_MAX_DIMS);
	for (uint32_t d = s->dims; d-- > 0;) {
		ret->shape[d] = s->shape[d];
		ret->strides[d] = s->strides ? s->strides[d] : stride;
		stride *= s->shape[d];
	}
	return 0;
}

static int view_shape_transpose(const struct view_build *b, const struct view_match *m, unsigned k,
				struct view_part *part)
{
	uint64_t rows = part->shape[0], stride = part->strides[0];
	char field[64];

	if (part->dims != 2) {
		view_shape_field(field, sizeof(field), m, k, ".transpose");
		return fault_set(b->f, FAULT_INVALID, field,
				 "'%.200s' has %u dimensions; only a matrix is transposed",
				 b->sources[part->source].name, part->dims);
	}
	part->shape[0] = part->shape[1];
	part->strides[0] = part->strides[1];
	part->shape[1] = rows;
	part->strides[1] = stride;
	return 0;
}

/* Which of how many parts @s is. */
static int view_shape_which(const struct view_build *b, const Shardd__V1__PublishedSlice *s,
			    const char *field, uint32_t *ret_part, uint32_t *ret_parts)
{
	uint32_t size = b->p->tp_size ? b->p->tp_size : 1, most = s->parts_at_most;

	if (s->parts && most)
		return fault_set(b->f, FAULT_INVALID, field,
				 "parts %u and parts_at_most %u exclude each other", s->parts,
				 most);
	if (!s->parts && s->optional_part_case)
		return fault_set(b->f, FAULT_INVALID, field, "part is %u, and parts is not given",
				 s->part);
	if (s->parts && !s->optional_part_case)
		return fault_set(
			b->f, FAULT_INVALID, field,
			"parts is %u, and part is not given: name the part, or leave out parts, "
			"and the reader gets part tp_rank of tp_size",
			s->parts);
	if (s->parts && s->part >= s->parts)
		return fault_set(b->f, FAULT_INVALID, field, "part %u is out of range (0..%u)",
				 s->part, s->parts - 1);
	if (most && size > most && size % most)
		return fault_set(b->f, FAULT_INVALID, field,
				 "tp_size is %u, which is not a multiple of parts_at_most, %u",
				 size, most);
	*ret_parts = s->parts ? s->parts : most && most < size ? most : size;
	*ret_part = s->parts ? s->part : (uint32_t)((uint64_t)b->p->tp_rank * *ret_parts / size);
	return 0;
}

/* The range that @s is; @extent: of the dimension. */
static int view_shape_range(const struct view_build *b, const Shardd__V1__PublishedSlice *s,
			    const char *field, const char *name, uint64_t extent)
{
	if (s->parts || s->parts_at_most || s->optional_part_case)
		return fault_set(b->f, FAULT_INVALID, field, "a range (first, count) has no parts");
	if (!s->count)
		return fault_set(b->f, FAULT_INVALID, field, "first %" PRIu64 " needs count",
				 s->first);
	if (s->first >= extent || s->count > extent - s->first)
		return fault_set(b->f, FAULT_INVALID, field,
				 "dimension %u of '%.200s' is %" PRIu64 "; %" PRIu64
				 " from %" PRIu64 " on are out of range",
				 s->dim, name, extent, s->count, s->first);
	return 0;
}

/* Where the slice begins, and how much of the dimension it has. */
static int view_shape_extent(const struct view_build *b, const Shardd__V1__PublishedSlice *s,
			     const char *field, const char *name, uint64_t extent,
			     uint64_t *ret_first, uint64_t *ret_count)
{
	uint32_t which = 0, parts = 1;

	if (s->optional_first_case || s->count) {
		*ret_first = s->first;
		*ret_count = s->count;
		return view_shape_range(b, s, field, name, extent);
	}
	if (view_shape_which(b, s, field, &which, &parts))
		return b->f->code;
	if (extent % parts)
		return fault_set(b->f, FAULT_INVALID, field,
				 "dimension %u of '%.200s' is %" PRIu64
				 ", which is not a multiple of %u parts",
				 s->dim, name, extent, parts);
	*ret_count = extent / parts;
	*ret_first = which * *ret_count;
	return 0;
}

/* @field: of the slice. */
static int view_shape_slice(const struct view_build *b, const Shardd__V1__PublishedSlice *s,
			    const char *field, struct view_part *part)
{
	const char *name = b->sources[part->source].name;
	uint64_t first = 0, count = 0;

	if (s->dim >= part->dims)
		return fault_set(b->f, FAULT_INVALID, field,
				 "'%.200s' has %u dimensions; there is no "
				 "dimension %u",
				 name, part->dims, s->dim);
	if (view_shape_extent(b, s, field, name, part->shape[s->dim], &first, &count))
		return b->f->code;
	part->from += first * part->strides[s->dim];
	part->shape[s->dim] = count;
	part->cut_stride = part->strides[s->dim];
	part->cut_first = first;
	part->cut_count = count;
	return 0;
}

/* Source number @i of the match: transposed and cut. */
static int view_shape_source(const struct view_build *b, const struct view_match *m, uint32_t i,
			     struct view_part *ret)
{
	unsigned k = i % m->each;
	const view_rule_source *s = m->rule->sources[k];
	char field[64];

	if (view_shape_part(b, m->sources[i], ret))
		return b->f->code;
	if (s->transpose && view_shape_transpose(b, m, k, ret))
		return b->f->code;
	if (!s->slice || view_shape_slice(b, s->slice, VIEW_SHAPE_SLICE, ret) == 0)
		return 0;
	/* not for each slice before: there are a million */
	view_shape_field(field, sizeof(field), m, k, VIEW_SHAPE_SLICE);
	snprintf(b->f->field, sizeof(b->f->field), "%s", field);
	return b->f->code;
}

static void view_shape_text(char *buf, size_t bytes, const uint64_t *shape, uint32_t dims)
{
	size_t at = 0;

	buf[0] = '\0';
	for (uint32_t d = 0; d < dims && at < bytes; d++)
		at += (size_t)snprintf(buf + at, bytes - at, "%s%" PRIu64, d ? "x" : "", shape[d]);
}

/* Can @part follow what has the shape @shape, along @dim (dims: of the same shape)? */
static bool view_shape_fits(const struct view_part *part, const uint64_t *shape, uint32_t dims,
			    uint32_t dim)
{
	for (uint32_t d = 0; d < dims && part->dims == dims; d++)
		if (d != dim && part->shape[d] != shape[d])
			return false;
	return part->dims == dims;
}

static int view_shape_unfit(const struct view_build *b, const struct view_match *m,
			    const struct view_part *part, const uint64_t *shape, uint32_t dims)
{
	char one[96], other[96], field[32];

	view_shape_text(one, sizeof(one), part->shape, part->dims);
	view_shape_text(other, sizeof(other), shape, dims);
	snprintf(field, sizeof(field), "rules[%u]", m->number);
	return fault_set(b->f, FAULT_INVALID, field,
			 "'%.150s' gives %s, which does not fit what comes before it, %s, along "
			 "dimension %u",
			 b->sources[part->source].name, one, other, m->rule->join_dim);
}

/* Of one tensor. */
static bool view_shape_overlap(const struct view_part *a, const struct view_part *b)
{
	if (!a->cut_count || !b->cut_count || a->cut_stride != b->cut_stride)
		return true;
	return a->cut_first < b->cut_first + b->cut_count &&
	       b->cut_first < a->cut_first + a->cut_count;
}

/* Slices of one tensor that are joined have nothing in common. @parts: of the sources from @from on, up to number @i. */
static int view_shape_check_overlap(const struct view_build *b, const struct view_match *m,
				    uint32_t from, uint32_t i, const struct view_part *parts)
{
	const struct view_part *part = &parts[i - from];
	char field[64];

	for (uint32_t k = from; k < i; k++) {
		if (m->sources[k] != m->sources[i] || (!m->rule->sources[k % m->each]->slice &&
						       !m->rule->sources[i % m->each]->slice))
			continue;
		if (!view_shape_overlap(part, &parts[k - from]))
			continue;
		view_shape_field(field, sizeof(field), m, i % m->each, VIEW_SHAPE_SLICE);
		return fault_set(
			b->f, FAULT_INVALID, field,
			"it overlaps what source %u takes of '%.200s': slices of one tensor "
			"that are joined must have no element in common",
			k % m->each, b->sources[part->source].name);
	}
	return 0;
}

/* The shape of what is joined, of sources @from on. */
static int view_shape_join(const struct view_build *b, const struct view_match *m, uint32_t from,
			   uint32_t *ret_dims, uint64_t ret[VIEW_MAX_DIMS])
{
	uint32_t dim = m->rule->join_dim;
	struct view_part parts[VIEW_MAX_SOURCES];

	CHECK(m->each <= VIEW_MAX_SOURCES);
	for (uint32_t i = from; i < from + m->each; i++) {
		struct view_part *part = &parts[i - from];

		if (view_shape_source(b, m, i, part) ||
		    view_shape_check_overlap(b, m, from, i, parts))
			return b->f->code;
		if (i == from) {
			*ret_dims = part->dims;
			memcpy(ret, part->shape, sizeof(part->shape));
			continue;
		}
		if (dim >= *ret_dims || !view_shape_fits(part, ret, *ret_dims, dim))
			return view_shape_unfit(b, m, part, ret, *ret_dims);
		ret[dim] += part->shape[dim];
	}
	return 0;
}

/* All stacked ones have one shape. @shape: of the first one. */
static int view_shape_check_stack(const struct view_build *b, const struct view_match *m,
				  const uint64_t *shape, uint32_t dims)
{
	char field[32];

	snprintf(field, sizeof(field), "rules[%u].stack", m->number);
	if (dims + 1 > VIEW_MAX_DIMS)
		return fault_set(b->f, FAULT_INVALID, field, "a tensor has at most %u dimensions",
				 VIEW_MAX_DIMS);
	for (uint32_t e = 1; e < m->stacked; e++) {
		uint64_t other[VIEW_MAX_DIMS];
		uint32_t n;

		if (view_shape_join(b, m, e * m->each, &n, other))
			return b->f->code;
		if (n != dims || memcmp(other, shape, dims * sizeof(*shape)) != 0)
			return fault_set(b->f, FAULT_INVALID, field,
					 "'%.200s' and '%.200s' have different shapes",
					 b->sources[m->sources[e * m->each]].name,
					 b->sources[m->sources[0]].name);
	}
	return 0;
}

static int view_shape_pad(const struct view_build *b, const struct view_match *m,
			  struct view_tensor *t)
{
	uint32_t dim = m->rule->pad_dim, multiple = m->rule->pad_multiple;
	uint64_t rest;
	char field[40];

	snprintf(field, sizeof(field), "rules[%u].pad_dim", m->number);
	if (dim >= t->dims)
		return fault_set(b->f, FAULT_INVALID, field,
				 "'%.200s' has %u dimensions; there is no dimension %u", t->name,
				 t->dims, dim);
	rest = t->shape[dim] % multiple;
	t->gaps = rest;
	t->shape[dim] += rest ? multiple - rest : 0;
	return 0;
}

/* What is padded counts for the size, too. */
static int view_shape_size(struct view_build *b, struct view_tensor *t)
{
	t->elements = 1;
	for (uint32_t d = 0; d < t->dims; d++)
		if (__builtin_mul_overflow(t->elements, t->shape[d], &t->elements) ||
		    t->elements > UINT64_C(1) << 44)
			return fault_set(b->f, FAULT_INVALID, "rules", "'%.200s' is too large",
					 t->name);
	t->bytes = t->elements * dtype_size(t->dtype);
	return 0;
}

/* ------------------------------------------------------------------------------- boxes */

/* Loops over a part, from the outermost one in: what goes on without a gap in both is one loop. */
struct view_loops {
	unsigned n;
	uint64_t count[VIEW_MAX_DIMS + 1], src[VIEW_MAX_DIMS + 1], dst[VIEW_MAX_DIMS + 1];
};

static void view_shape_add_loop(struct view_loops *l, uint64_t count, uint64_t src, uint64_t dst)
{
	unsigned last = l->n - 1;

	if (count == 1)
		return;
	if (l->n && l->src[last] == count * src && l->dst[last] == count * dst) {
		l->count[last] *= count;
		l->src[last] = src;
		l->dst[last] = dst;
		return;
	}
	l->count[l->n] = count;
	l->src[l->n] = src;
	l->dst[l->n++] = dst;
}

/* @dst: strides of the tensor that it comes to. */
static void view_shape_loops(const struct view_part *part, const uint64_t *dst,
			     struct view_loops *ret)
{
	*ret = (struct view_loops){ 0 };
	for (uint32_t d = 0; d < part->dims; d++)
		view_shape_add_loop(ret, part->shape[d], part->strides[d], dst[d]);
	/* the innermost one is along the tensor */
	if (!ret->n || ret->dst[ret->n - 1] != 1) {
		ret->count[ret->n] = ret->src[ret->n] = ret->dst[ret->n] = 1;
		ret->n++;
	}
}

static int view_shape_new_box(struct view_build *b, struct view_box **ret)
{
	struct view *v = b->v;

	if (v->n_boxes >= VIEW_MAX_BOXES)
		return fault_set(b->f, FAULT_INVALID, "rules",
				 "the publication has more than %u pieces of tensors",
				 VIEW_MAX_BOXES);
	if (v->n_boxes == b->boxes_room) {
		uint32_t room = b->boxes_room ? 2 * b->boxes_room : 64;
		struct view_box *more = realloc(v->boxes, room * sizeof(*more));

		if (!more)
			return fault_errno(b->f, -ENOMEM, "a publication");
		v->boxes = more;
		b->boxes_room = room;
	}
	*ret = &v->boxes[v->n_boxes++];
	return 0;
}

/* The three innermost loops are a box; the ones around them are as many boxes as they have turns. */
static int view_shape_box(struct view_build *b, const struct view_part *part,
			  const struct view_loops *l, unsigned outer, uint64_t from, uint64_t at)
{
	struct view_box *box = NULL;

	if (l->n - outer > 3) {
		for (uint64_t i = 0; i < l->count[outer]; i++)
			if (view_shape_box(b, part, l, outer + 1, from + i * l->src[outer],
					   at + i * l->dst[outer]))
				return b->f->code;
		return 0;
	}
	if (view_shape_new_box(b, &box))
		return b->f->code;
	*box = (struct view_box){
		.source = part->source, .from = from, .n = { 1, 1, 1 }, .at = at
	};
	for (unsigned i = 0; i < l->n - outer; i++) {
		unsigned to = 3 - (l->n - outer) + i;

		box->n[to] = l->count[outer + i];
		box->src_stride[to] = l->src[outer + i];
		if (to < 2)
			box->dst_stride[to] = l->dst[outer + i];
	}
	return 0;
}

/* Where the part begins in the joined tensor. */
static int view_shape_boxes(struct view_build *b, const struct view_match *m, struct view_tensor *t)
{
	uint32_t lead = m->stacked ? 1 : 0, dim = m->rule->join_dim;
	uint64_t strides[VIEW_MAX_DIMS], stride = 1, along = 0;

	for (uint32_t d = t->dims; d-- > 0; stride *= t->shape[d])
		strides[d] = stride;
	t->first_box = b->v->n_boxes;
	for (uint32_t i = 0; i < m->each * (m->stacked ? m->stacked : 1); i++) {
		struct view_part part;
		struct view_loops loops;
		uint64_t at = m->stacked ? i / m->each * strides[0] : 0;

		if (view_shape_source(b, m, i, &part))
			return b->f->code;
		along = i % m->each ? along : 0;
		at += m->each > 1 ? along * strides[lead + dim] : 0;
		along += m->each > 1 ? part.shape[dim] : 0;
		view_shape_loops(&part, strides + lead, &loops);
		if (view_shape_box(b, &part, &loops, 0, part.from, at))
			return b->f->code;
	}
	t->n_boxes = b->v->n_boxes - t->first_box;
	return 0;
}

static enum dtype view_shape_type(const struct view_build *b, uint32_t source,
				  Shardd__V1__PublishedType type)
{
	static const enum dtype types[] = {
		[SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_FP32] = DTYPE_FP32,
		[SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_BF16] = DTYPE_BF16,
		[SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_FP16] = DTYPE_FP16,
		[SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_E4M3] = DTYPE_E4M3,
	};

	type = type ? type : b->p->type;
	return type ? types[type] : b->sources[source].dtype;
}

/* Without a type the tensor has that of its sources, which must be one. */
static int view_shape_check_types(const struct view_build *b, const struct view_match *m)
{
	const struct view_source *first = &b->sources[m->sources[0]];
	uint32_t n = m->each * (m->stacked ? m->stacked : 1);
	char field[32];

	snprintf(field, sizeof(field), "rules[%u].type", m->number);
	for (uint32_t i = 1; i < n && !m->rule->type && !b->p->type; i++) {
		const struct view_source *s = &b->sources[m->sources[i]];

		if (s->dtype != first->dtype)
			return fault_set(
				b->f, FAULT_INVALID, field,
				"'%.150s' is stored as %s and '%.150s' as %s: name the type "
				"of the published tensor",
				first->name, dtype_name(first->dtype), s->name,
				dtype_name(s->dtype));
	}
	return 0;
}

/* The tiles of a tensor of type e4m3: without a block it is one of one row. */
static int view_shape_tiles(const struct view_build *b, const struct view_match *m,
			    struct view_tensor *t)
{
	const view_rule *r = m->rule;
	bool own = r->n_scale_block || r->type;
	size_t n = own ? r->n_scale_block : b->p->n_scale_block;
	const uint32_t *block = own ? r->scale_block : b->p->scale_block;
	char field[40];

	snprintf(field, sizeof(field), "rules[%u].scale_block", m->number);
	if (n && t->dims < 2)
		return fault_set(b->f, FAULT_INVALID, own ? field : "scale_block",
				 "'%.200s' has %u dimensions: it has no rows and columns to cut "
				 "into blocks of %ux%u. Give it a rule with another type, or "
				 "without scale_block",
				 t->name, t->dims, block[0], block[1]);
	t->tiles = n ? (struct view_tiles){ t->shape[t->dims - 2], t->shape[t->dims - 1], block[0],
					    block[1] }
		     : (struct view_tiles){ 1, t->elements, 1, t->elements };
	return 0;
}

static int view_shape_make(struct view_build *b, const struct view_match *m, struct view_tensor *t)
{
	uint64_t shape[VIEW_MAX_DIMS] = { 0 };
	uint32_t dims = 0, lead = m->stacked ? 1 : 0;

	t->dtype = view_shape_type(b, m->sources[0], m->rule->type);
	if (view_shape_check_types(b, m) || view_shape_join(b, m, 0, &dims, shape) ||
	    (m->stacked && view_shape_check_stack(b, m, shape, dims)))
		return b->f->code;
	t->dims = dims + lead;
	t->shape[0] = m->stacked;
	memcpy(t->shape + lead, shape, dims * sizeof(*shape));
	if (m->rule->pad_multiple && view_shape_pad(b, m, t))
		return b->f->code;
	if (view_shape_size(b, t) || (t->dtype == DTYPE_E4M3 && view_shape_tiles(b, m, t)))
		return b->f->code;
	return view_shape_boxes(b, m, t);
}

/* Tiles of @each along @n. */
static uint64_t view_shape_count(uint64_t n, uint64_t each)
{
	return (n + each - 1) / each;
}

int view_append(struct view_build *b, struct view_tensor *t)
{
	struct view *v = b->v;

	if (v->n >= VIEW_MAX_TENSORS) {
		free(t->name);
		return fault_set(b->f, FAULT_INVALID, "rules",
				 "the publication has more than %u tensors", VIEW_MAX_TENSORS);
	}
	if (v->n == b->room) {
		uint32_t room = b->room ? 2 * b->room : 64;
		struct view_tensor *more = realloc(v->tensors, room * sizeof(*more));

		if (!more) {
			free(t->name);
			return fault_errno(b->f, -ENOMEM, "a publication");
		}
		v->tensors = more;
		b->room = room;
	}
	v->tensors[v->n++] = *t;
	v->name_bytes += strlen(t->name) + 1;
	return 0;
}

int view_add(struct view_build *b, const struct view_match *m, char *name)
{
	struct view_tensor t = { .name = name, .same = b->v->n };

	if (view_shape_make(b, m, &t)) {
		free(name);
		return b->f->code;
	}
	return view_append(b, &t);
}

int view_add_scales(struct view_build *b, const struct view_match *m, char *name)
{
	const struct view_tensor *of = &b->v->tensors[b->v->n - 1];
	struct view_tensor t = { .name = name,
				 .same = b->v->n,
				 .dtype = DTYPE_FP32,
				 .scales = true,
				 .first_box = b->v->n_boxes };
	bool cut = m->rule->n_scale_block || (!m->rule->type && b->p->n_scale_block);

	if (cut) {
		t.dims = of->dims;
		memcpy(t.shape, of->shape, sizeof(t.shape));
		t.shape[t.dims - 2] = view_shape_count(of->tiles.rows, of->tiles.tile_rows);
		t.shape[t.dims - 1] = view_shape_count(of->tiles.columns, of->tiles.tile_columns);
	}
	if (view_shape_size(b, &t)) {
		free(name);
		return b->f->code;
	}
	return view_append(b, &t);
}
