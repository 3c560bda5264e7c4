#include "rpc/arena.h"

#include <stdalign.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES 65536u

struct arena_block {
	struct arena_block *next;
	size_t used;
	size_t size;
	alignas(max_align_t) char data[];
};

void *arena_take(struct arena *a, size_t bytes)
{
	size_t need =
		(bytes + alignof(max_align_t) - 1) / alignof(max_align_t) * alignof(max_align_t);
	struct arena_block *b = a->blocks;
	void *piece;

	if (!b || b->size - b->used < need) {
		size_t size = need > BLOCK_BYTES ? need : BLOCK_BYTES;

		b = calloc(1, sizeof(*b) + size);
		if (!b) {
			a->failed = true;
			return NULL;
		}
		b->size = size;
		b->next = a->blocks;
		a->blocks = b;
	}
	piece = b->data + b->used;
	b->used += need;
	return piece;
}

char *arena_string(struct arena *a, const char *s)
{
	size_t n = strlen(s) + 1;
	char *copy = arena_take(a, n);

	if (copy)
		memcpy(copy, s, n);
	return copy;
}

void arena_free(struct arena *a)
{
	while (a->blocks) {
		struct arena_block *next = a->blocks->next;

		free(a->blocks);
		a->blocks = next;
	}
	a->failed = false;
}
