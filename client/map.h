/*
 * The local channel of a client and the slabs that came over it.
 *
 * A slab is mapped once, at the first op that names it, and stays until the
 * client is closed: addresses handed out stay what they are. Frames are exchanged
 * one at a time under the lock; a caller that must not block looks again later,
 * and whoever comes next goes on with the exchange that is under way.
 */
#ifndef SHARDD_CLIENT_MAP_H
#define SHARDD_CLIENT_MAP_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "local_abi.h"
#include "shardd/shardd.h"

struct mapping {
	uint32_t slab;
	bool writable;
	uint8_t *base; /* unmapped by map_deinit */
	uint64_t bytes;
};

struct map {
	pthread_mutex_t lock;
	int fd;         /* the channel; -1: none, or it broke */
	char why[160];  /* why it broke */
	uint32_t tag;   /* of the last request */
	uint32_t asked; /* the slab under way, with @waiting */
	bool waiting;   /* an answer is due */
	union {
		struct shd1_header h;
		struct shd1_welcome welcome;
		struct shd1_slab slab;
		struct shd1_error error;
		uint8_t bytes[SHD1_MAX_FRAME];
	} in;         /* a frame, complete up to @have */
	size_t have;  /* bytes in @in */
	int in_fd;    /* came with it; -1: none */
	size_t count; /* of @items, which are in the order of their slabs */
	size_t room;
	struct mapping *items;
};

/* Where something is, as the daemon said. */
struct map_place {
	uint32_t slab;
	uint64_t offset; /* bytes */
	uint64_t bytes;
	bool writable; /* must the client be able to write? */
};

/* No channel yet; map_deinit is safe from here on. */
void map_init(struct map *m);

/* Connect to @path and bind the channel to the session of @token. Blocks at most
 * 10 s. Return: 0 or a negative shardd_code. */
int map_open(struct map *m, const char *path, const uint8_t token[SHD1_TOKEN_BYTES],
	     uint64_t session, struct shardd_error *err);

/* The address of @p, fetching and mapping its slab if it is not there yet.
 * @timeout_ms: -1: as long as the channel may take (10 s); 0: do not block.
 * @ret: valid until map_deinit.
 * Return: 0, -SHARDD_DEADLINE_EXCEEDED with native EAGAIN (not yet: ask again), or
 * another negative shardd_code. Any thread. */
int map_address(struct map *m, const struct map_place *p, int timeout_ms, void **ret,
		struct shardd_error *err);

/* Close the channel and unmap all. Safe twice. No other thread may be using it. */
void map_deinit(struct map *m);

#endif
