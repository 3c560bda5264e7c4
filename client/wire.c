#include "wire.h"

#include <stdalign.h>
#include <stdlib.h>

#define CHUNK_BYTES (256u << 10)

struct wire_chunk {
	struct wire_chunk *next;
	size_t bytes;
	alignas(max_align_t) char data[];
};

size_t wire_entry(uint8_t *at, unsigned field, size_t bytes)
{
	size_t n = 0;

	at[n++] = (uint8_t)(field << 3 | 2);
	for (; bytes > 127; bytes >>= 7)
		at[n++] = (uint8_t)(bytes | 128);
	at[n++] = (uint8_t)bytes;
	return n;
}

static bool wire_add_chunk(struct wire_arena *a, size_t bytes)
{
	size_t size = bytes > CHUNK_BYTES ? bytes : CHUNK_BYTES;
	struct wire_chunk *c = malloc(sizeof(*c) + size);

	if (!c)
		return false;
	c->next = a->chunks;
	c->bytes = size;
	a->chunks = c;
	a->left = size;
	return true;
}

static void *wire_take(void *data, size_t bytes)
{
	struct wire_arena *a = data;
	size_t size = (bytes + alignof(max_align_t) - 1) & ~(alignof(max_align_t) - 1);
	char *piece;

	if (size < bytes || ((size > a->left || !a->chunks) && !wire_add_chunk(a, size))) {
		a->failed = true;
		return NULL;
	}
	piece = a->chunks->data + (a->chunks->bytes - a->left);
	a->left -= size;
	return piece;
}

static void wire_give(void *data, void *piece)
{
	(void)data; /* the arena goes as a whole */
	(void)piece;
}

ProtobufCAllocator wire_allocator(struct wire_arena *arena)
{
	return (ProtobufCAllocator){ wire_take, wire_give, arena };
}

void wire_arena_deinit(struct wire_arena *a)
{
	while (a->chunks) {
		struct wire_chunk *c = a->chunks;

		a->chunks = c->next;
		free(c);
	}
	a->left = 0;
}
