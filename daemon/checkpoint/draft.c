#include "checkpoint/draft.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"

#define DRAFT_CHUNK_BYTES ((size_t)256 << 10) /* longer than any name or shape */

struct draft_chunk {
	struct draft_chunk *next;
	uint64_t data[DRAFT_CHUNK_BYTES / sizeof(uint64_t)];
};

/* @bytes bytes, aligned. Return: NULL without memory. */
static void *draft_room(struct draft *d, size_t bytes)
{
	size_t need = (bytes + 7) / 8 * 8;
	struct draft_chunk *c = d->chunks;

	if (need > sizeof(c->data))
		return NULL;
	if (!c || d->used + need > sizeof(c->data)) {
		c = malloc(sizeof(*c));
		if (!c)
			return NULL;
		c->next = d->chunks;
		d->chunks = c;
		d->used = 0;
	}
	d->used += need;
	return (char *)c->data + d->used - need;
}

static char *draft_text(struct draft *d, const char *text)
{
	size_t bytes = strlen(text) + 1;
	char *copy = draft_room(d, bytes);

	return copy ? memcpy(copy, text, bytes) : NULL;
}

static bool draft_grow(struct draft *d)
{
	size_t room = d->room ? 2 * d->room : 1024;
	struct index_piece *pieces;

	if (d->n < d->room)
		return true;
	pieces = reallocarray(d->pieces, room, sizeof(*pieces));
	if (!pieces)
		return false;
	d->pieces = pieces;
	d->room = room;
	return true;
}

int draft_add(struct draft *d, const struct index_piece *p)
{
	uint64_t *shape = draft_room(d, p->dims * sizeof(*shape) + 1);

	if (!d->unit || p->unit != d->unit_from)
		d->unit = draft_text(d, p->unit);
	if (!d->tensor || p->tensor != d->tensor_from)
		d->tensor = draft_text(d, p->tensor);
	if (!shape || !d->unit || !d->tensor || !draft_grow(d))
		return -ENOMEM;
	d->unit_from = p->unit;
	d->tensor_from = p->tensor;
	if (p->dims)
		memcpy(shape, p->shape, p->dims * sizeof(*shape));
	d->pieces[d->n] = *p;
	d->pieces[d->n].unit = d->unit;
	d->pieces[d->n].tensor = d->tensor;
	d->pieces[d->n++].shape = shape;
	return 0;
}

int draft_finish(const struct draft *d, struct index *x, struct fault *f)
{
	for (size_t i = 0; !f->code && i < d->n; i++)
		index_add(x, &d->pieces[i], f);
	return f->code;
}

void draft_deinit(struct draft *d)
{
	while (d->chunks) {
		struct draft_chunk *next = d->chunks->next;

		free(d->chunks);
		d->chunks = next;
	}
	free(d->pieces);
	*d = DRAFT_NULL;
}
