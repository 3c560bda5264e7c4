/*
 * Fast packing and unpacking of large messages: entries of a list are packed one by one, and an
 * unpacked message uses memory that is allocated in large pieces and freed as a whole.
 */
#ifndef SHARDD_CLIENT_WIRE_H
#define SHARDD_CLIENT_WIRE_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Write the key and the length of an entry of the list @field (below 16), whose @bytes come
 * next. @at: room for 11 bytes. Return: bytes written. */
size_t wire_entry(uint8_t *at, unsigned field, size_t bytes);

struct wire_chunk;
struct wire_arena {
	struct wire_chunk *chunks;
	size_t left; /* of the newest */
	bool failed; /* there was no memory */
};

#define WIRE_ARENA_NULL ((struct wire_arena){ .chunks = NULL })

/* For protobuf-c; what it makes goes with the arena. */
ProtobufCAllocator wire_allocator(struct wire_arena *arena);
/* Safe twice. */
void wire_arena_deinit(struct wire_arena *arena);

#endif
