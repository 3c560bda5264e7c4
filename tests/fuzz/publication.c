/*
 * A declaration of a publication as an enemy writes it, as JSON. What is accepted makes a view whose boxes stay
 * inside their sources and inside the generation, and in which no two tensors have one name. What is of type e4m3
 * has as many scales as tiles.
 */
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "json/json_message.h"
#include "publish/view.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint64_t shapes[][3] = { { 8, 6, 0 }, { 4, 6, 0 }, { 12, 0, 0 }, { 2, 3, 4 }, { 0 } };

/* "n" is stored otherwise in memory; "tied" is "l.0.q". */
static const uint64_t strides[] = { 1, 8 };
static const struct view_source sources[] = {
	{ .name = "l.0.q", .shape = shapes[0], .dims = 2, .dtype = DTYPE_FP32 },
	{ .name = "l.0.k", .shape = shapes[1], .dims = 2, .dtype = DTYPE_FP32 },
	{ .name = "l.1.q", .shape = shapes[0], .dims = 2, .dtype = DTYPE_FP32 },
	{ .name = "l.1.k", .shape = shapes[1], .dims = 2, .dtype = DTYPE_BF16 },
	{ .name = "e.0.w1", .shape = shapes[3], .dims = 3, .dtype = DTYPE_FP32 },
	{ .name = "e.1.w1", .shape = shapes[3], .dims = 3, .dtype = DTYPE_FP32 },
	{ .name = "norm", .shape = shapes[2], .dims = 1, .dtype = DTYPE_FP16 },
	{ .name = "n", .shape = shapes[0], .strides = strides, .dims = 2, .dtype = DTYPE_FP32 },
	{ .name = "scalar", .shape = shapes[4], .dims = 0, .dtype = DTYPE_FP32 },
	{ .name = "tied",
	  .shape = shapes[0],
	  .dims = 2,
	  .dtype = DTYPE_FP32,
	  .alias = true,
	  .of = 0 },
};

static uint64_t elements(const uint64_t *shape, uint32_t dims)
{
	uint64_t n = 1;

	for (uint32_t d = 0; d < dims; d++)
		n *= shape[d];
	return n;
}

static void check_box(const struct view_tensor *t, const struct view_box *x)
{
	const struct view_source *s = &sources[x->source];
	uint64_t from = x->from, to = x->at;

	CHECK(x->source < ARRAY_SIZE(sources) && x->n[0] && x->n[1] && x->n[2]);
	for (unsigned d = 0; d < 3; d++) { /* the last element of all */
		from += (x->n[d] - 1) * x->src_stride[d];
		to += (x->n[d] - 1) * (d < 2 ? x->dst_stride[d] : 1);
	}
	CHECK(from < elements(s->shape, s->dims));
	CHECK(to < t->elements);
}

/* As many as there are tiles. Another name of them follows another name of theirs. */
static void check_scales(const struct view_tensor *of, const struct view_tensor *t)
{
	const struct view_tiles *x = &of->tiles;

	CHECK(of->dtype == DTYPE_E4M3 && t->dtype == DTYPE_FP32 && !t->n_boxes && !t->gaps);
	CHECK(x->rows && x->columns && x->tile_rows && x->tile_columns);
	CHECK(of->elements % (x->rows * x->columns) == 0);
	CHECK(t->elements == of->elements / (x->rows * x->columns) *
				     ((x->rows + x->tile_rows - 1) / x->tile_rows) *
				     ((x->columns + x->tile_columns - 1) / x->tile_columns));
}

static void check_tensor(const struct view *v, uint32_t i)
{
	const struct view_tensor *t = &v->tensors[i];
	uint64_t boxed = 0;

	CHECK(t->elements == elements(t->shape, t->dims));
	CHECK(t->bytes == t->elements * dtype_size(t->dtype));
	CHECK(t->offset % VIEW_ALIGN == 0 && t->offset <= v->bytes &&
	      t->bytes <= v->bytes - t->offset);
	CHECK(t->same <= i && v->tensors[t->same].offset == t->offset);
	for (uint32_t b = t->first_box; b < t->first_box + t->n_boxes; b++) {
		check_box(t, &v->boxes[b]);
		boxed += v->boxes[b].n[0] * v->boxes[b].n[1] * v->boxes[b].n[2];
	}
	if (t->scales)
		check_scales(t - 1, t);
	else
		CHECK(t->gaps ? boxed < t->elements : boxed == t->elements);
	CHECK(t->dtype != DTYPE_E4M3 || v->tensors[t->same + 1].scales);
	for (uint32_t k = 0; k < i; k++)
		CHECK(strcmp(v->tensors[k].name, t->name) != 0);
}

static void check_view(const Shardd__V1__Publication *p)
{
	struct fault f = FAULT_NULL;
	struct view *v = NULL;

	if (view_new(p, sources, ARRAY_SIZE(sources), &v, &f)) {
		CHECK(!v && f.code && f.text[0]);
		return;
	}
	CHECK(f.code == FAULT_NONE && v->n);
	for (uint32_t i = 0; i < v->n; i++)
		check_tensor(v, i);
	view_free(v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	_cleanup_(freep) char *text = malloc(size + 1);
	ProtobufCMessage *m = NULL;
	struct fault f = FAULT_NULL;

	CHECK(text);
	memcpy(text, data, size);
	text[size] = '\0';
	if (json_message(text, "json", &shardd__v1__publication__descriptor, &m, &f))
		CHECK(!m && f.code == FAULT_INVALID && f.text[0]);
	else
		check_view((const Shardd__V1__Publication *)m);
	protobuf_c_message_free_unpacked(m, NULL);
	return 0;
}
