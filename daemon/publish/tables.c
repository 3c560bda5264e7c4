#include "publish/tables.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "mem/slab.h"

#define TABLES_ALIGN 64u

/* Where the arrays are, from the begin of the memory. */
struct tables_plan {
	uint64_t tensors, boxes, scales, amax, cleared, measured, blocks, crc;
	uint64_t used, deltas, out; /* of a delta */
	uint64_t bytes;
};

static uint64_t tables_put(uint64_t *bytes, uint64_t n, uint64_t size)
{
	uint64_t at = *bytes;

	*bytes = (at + n * size + TABLES_ALIGN - 1) / TABLES_ALIGN * TABLES_ALIGN;
	return at;
}

/* The checksums are behind what is copied. */
static struct tables_plan tables_plan(const struct tables_source *s, uint64_t *ret_copied)
{
	struct tables_plan p = { 0 };

	p.tensors = tables_put(&p.bytes, s->n_tensors, sizeof(*s->tensors));
	p.boxes = tables_put(&p.bytes, s->n_boxes, sizeof(*s->boxes));
	p.scales = tables_put(&p.bytes, s->n_scales, sizeof(*s->scales));
	p.cleared = tables_put(&p.bytes, s->n_cleared, sizeof(*s->cleared));
	p.measured = tables_put(&p.bytes, s->n_measured, sizeof(*s->measured));
	p.blocks = tables_put(&p.bytes, s->n_blocks, sizeof(*s->blocks));
	*ret_copied = p.bytes;
	p.amax = tables_put(&p.bytes, s->n_amax, sizeof(*s->amax));
	p.crc = tables_put(&p.bytes, s->n_blocks, sizeof(uint32_t));
	p.used = tables_put(&p.bytes, s->delta_room ? 1 : 0, sizeof(uint64_t));
	p.deltas =
		tables_put(&p.bytes, s->delta_room ? s->n_blocks : 0, sizeof(struct k_delta_block));
	p.out = tables_put(&p.bytes, s->delta_room, 1);
	return p;
}

/* What @array of the host has at @of is at the same place behind @at. NULL stays NULL. */
static void *tables_moved(const void *of, const void *array, uint64_t at)
{
	return of ? (void *)(uintptr_t)(at + (uint64_t)((const char *)of - (const char *)array))
		  : NULL;
}

static void tables_copy(char *image, uint64_t at, const void *from, uint64_t n, uint64_t size)
{
	if (n)
		memcpy(image + at, from, n * size);
}

/* The tables with addresses of the device, where @base is. */
static void tables_fill(char *image, const struct tables_source *s, const struct tables_plan *p,
			uint64_t base)
{
	struct k_assemble_tensor *tensors = (void *)(image + p->tensors);
	struct k_assemble_scales *scales = (void *)(image + p->scales);

	tables_copy(image, p->tensors, s->tensors, s->n_tensors, sizeof(*s->tensors));
	tables_copy(image, p->boxes, s->boxes, s->n_boxes, sizeof(*s->boxes));
	tables_copy(image, p->scales, s->scales, s->n_scales, sizeof(*s->scales));
	tables_copy(image, p->cleared, s->cleared, s->n_cleared, sizeof(*s->cleared));
	tables_copy(image, p->measured, s->measured, s->n_measured, sizeof(*s->measured));
	tables_copy(image, p->blocks, s->blocks, s->n_blocks, sizeof(*s->blocks));
	for (uint64_t i = 0; i < s->n_tensors; i++) {
		tensors[i].boxes = tables_moved(tensors[i].boxes, s->boxes, base + p->boxes);
		tensors[i].scales = tables_moved(tensors[i].scales, s->scales, base + p->scales);
	}
	for (uint64_t i = 0; i < s->n_scales; i++)
		scales[i].amax = tables_moved(scales[i].amax, s->amax, base + p->amax);
}

int tables_take(struct tables *t, const struct tables_source *s, const struct board_payer *payer)
{
	uint64_t copied;
	struct tables_plan p = tables_plan(s, &copied);
	uint64_t base;
	int r;

	if (t->slab)
		return 0;
	r = slab_new(payer->device, payer->quota, MEM_PUBLISHED, BACKEND_SHARE_FD, p.bytes,
		     payer->job, -1, &t->slab);
	if (r < 0)
		return r;
	t->image = calloc(1, copied);
	if (!t->image) {
		t->slab = slab_unref(t->slab);
		return -ENOMEM;
	}
	base = (uint64_t)(uintptr_t)backend_addr(t->slab->mem);
	tables_fill(t->image, s, &p, base);
	t->bytes = copied;
	t->tensors = (const void *)(uintptr_t)(base + p.tensors);
	t->cleared = (const void *)(uintptr_t)(base + p.cleared);
	t->measured = (const void *)(uintptr_t)(base + p.measured);
	t->blocks = (const void *)(uintptr_t)(base + p.blocks);
	t->crc = (void *)(uintptr_t)(base + p.crc);
	if (s->delta_room)
		t->delta = (struct k_delta){ .out = (void *)(uintptr_t)(base + p.out),
					     .room = s->delta_room,
					     .used = (void *)(uintptr_t)(base + p.used),
					     .blocks = (void *)(uintptr_t)(base + p.deltas) };
	return 0;
}

void tables_are_there(struct tables *t)
{
	t->there = true;
	free(t->image);
	t->image = NULL;
}

void tables_free(struct tables *t)
{
	t->slab = slab_unref(t->slab);
	free(t->image);
	*t = (struct tables){ 0 };
}
