#include "publish/delta.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "crc32c.h"
#include "delta_abi.h"
#include "mem/slab.h"
#include "publish/assembly.h"

static_assert(KERNEL_DELTA_ELEMENTS == DELTA_BLOCK_ELEMENTS, "a position has 16 bits");

/* Where the payload begins. */
static uint64_t delta_payload(const struct assembly *a)
{
	uint64_t bytes =
		sizeof(struct delta_head) + (uint64_t)a->n_blocks * sizeof(struct delta_block);

	return (bytes + 63) / 64 * 64;
}

void delta_clear(struct delta *d)
{
	free(d->blocks);
	d->blocks = NULL;
	d->made = false;
	d->base = d->bytes = d->changed = d->elements = d->used = 0;
}

void delta_free(struct delta *d)
{
	delta_clear(d);
	d->slab = slab_unref(d->slab);
}

static int delta_take(struct delta *d, const struct board_payer *payer, uint64_t bytes)
{
	int r = 0;

	if (d->slab && d->slab->bytes < bytes)
		d->slab = slab_unref(d->slab);
	if (!d->slab)
		r = slab_new(payer->device, payer->quota, MEM_PUBLISHED, BACKEND_SHARE_FD, bytes,
			     payer->job, -1, &d->slab);
	if (r == 0 && !d->slab->exported)
		r = backend_seal(payer->device->backend, d->slab->mem);
	if (r < 0)
		d->slab = slab_unref(d->slab);
	return r;
}

int delta_begin(struct delta *d, const struct assembly *a, const struct board_payer *payer,
		const void *base, const void *made)
{
	uint64_t payload = delta_payload(a), room = a->delta_room;
	int r;

	delta_clear(d);
	r = delta_take(d, payer, payload + room);
	if (r < 0)
		return r;
	d->blocks = calloc((size_t)a->n_blocks + 1, sizeof(*d->blocks));
	if (!d->blocks)
		return -ENOMEM;
	d->kernel = (struct k_delta){ .base = base,
				      .made = made,
				      .out = (char *)backend_addr(d->slab->mem) + payload,
				      .room = room,
				      .used = &d->used,
				      .blocks = d->blocks };
	return 0;
}

/* Return: false: it has no room in the payload. */
static bool delta_fill_block(struct delta *d, const struct assembly *a, uint32_t i,
			     struct delta_block *to)
{
	const struct k_assemble_block *b = &a->blocks[i];
	const struct k_delta_block *from = &d->blocks[i];

	if (from->at == KERNEL_DELTA_NONE)
		return false;
	*to = (struct delta_block){
		.first = b->first,
		.at = from->at,
		.tensor = b->tensor,
		.n = b->n,
		.changed = from->changed,
		.crc = from->crc,
		.dense = from->dense,
		.size = (uint32_t)dtype_size(a->tensors[b->tensor].dst_dtype),
	};
	return true;
}

static void delta_count(struct delta *d, const struct assembly *a)
{
	d->changed = d->elements = 0;
	for (uint32_t i = 0; i < a->n_blocks; i++) {
		d->changed += d->blocks[i].changed;
		d->elements += a->blocks[i].n;
	}
}

static bool delta_fill(struct delta *d, const struct assembly *a, const struct delta_end *base,
		       const struct delta_end *made)
{
	struct delta_head *head = backend_addr(d->slab->mem);
	struct delta_block *blocks = (struct delta_block *)(head + 1);

	for (uint32_t i = 0; i < a->n_blocks; i++)
		if (!delta_fill_block(d, a, i, &blocks[i]))
			return false;
	d->base = base->number;
	d->bytes = delta_payload(a) + d->used;
	*head = (struct delta_head){ .magic = DELTA_MAGIC,
				     .version = DELTA_VERSION,
				     .number = made->number,
				     .step = made->step,
				     .base_number = base->number,
				     .base_step = base->step,
				     .layout = a->layout,
				     .checksum = made->checksum,
				     .base_checksum = base->checksum,
				     .bytes = d->bytes,
				     .changed = d->changed,
				     .elements = d->elements,
				     .blocks = a->n_blocks,
				     .payload = delta_payload(a) };
	head->crc = crc32c_add(0, head, sizeof(*head) + a->n_blocks * sizeof(*blocks));
	return true;
}

bool delta_finish(struct delta *d, const struct assembly *a, const struct delta_end *base,
		  const struct delta_end *made)
{
	bool fits;

	delta_count(d, a);
	fits = delta_fill(d, a, base, made);
	free(d->blocks);
	d->blocks = NULL;
	d->made = fits;
	return fits;
}
