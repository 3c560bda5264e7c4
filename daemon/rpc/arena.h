/*
 * Memory for one reply: taken piece by piece, freed at once. A piece is zeroed and
 * lives until arena_free. Loop thread only.
 */
#ifndef SHARDD_RPC_ARENA_H
#define SHARDD_RPC_ARENA_H

#include <stdbool.h>
#include <stddef.h>

struct arena_block;

struct arena {
	struct arena_block *blocks;
	bool failed; /* memory ran out: the reply is incomplete */
};

#define ARENA_NULL ((struct arena){ 0 })

/* @bytes, aligned for anything. Return: NULL (and @failed) without memory. */
void *arena_take(struct arena *a, size_t bytes);

/* A copy of @s. */
char *arena_string(struct arena *a, const char *s);

void arena_free(struct arena *a);

#endif
