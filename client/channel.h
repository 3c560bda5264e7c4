/*
 * The client's end of the local channel, SHD1. The client asks for slabs by number and receives
 * their descriptors; likewise those of the session's ring.
 *
 * One exchange at a time. A caller that must not block leaves the exchange unfinished, and the
 * next caller continues it. A slab that has arrived stays here until it is installed. The channel
 * has no lock: its owner must serialise the calls.
 */
#ifndef SHARDD_CLIENT_CHANNEL_H
#define SHARDD_CLIENT_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "local_abi.h"
#include "shardd/shardd.h"

#define CHANNEL_TIMEOUT_MS 10000

struct channel {
	int fd;         /* -1: none, or it broke */
	char why[160];  /* why there is none */
	uint32_t tag;   /* of the last request */
	uint32_t asked; /* the slab under way, with @waiting or @arrived */
	bool forwarded; /* what came has no descriptor: a relay is in between */
	bool waiting;   /* an answer is due */
	bool arrived;   /* its frame is in @in, its descriptor in @in_fd */
	union {
		struct shd1_header h;
		struct shd1_welcome welcome;
		struct shd1_slab slab;
		struct shd1_ring ring;
		struct shd1_error error;
		uint8_t bytes[SHD1_MAX_FRAME];
	} in;        /* a frame, complete up to @have */
	size_t have; /* bytes in @in */
	int in_fd;   /* came with it; -1: none */
};

/* Not open; channel_deinit is safe from here on, also twice. */
void channel_init(struct channel *c);
void channel_deinit(struct channel *c);

/* Connect to @path and bind the channel to the session of @token. Blocks at most
 * CHANNEL_TIMEOUT_MS. Return: 0 or a negative shardd_code. */
int channel_open(struct channel *c, const char *path, const uint8_t token[SHD1_TOKEN_BYTES],
		 uint64_t session, struct shardd_error *err);

/* Continue the current exchange, or begin one for @slab, until a slab has arrived:
 * c->asked says which. Call this only while no slab has arrived. @deadline: of clock_now_us.
 * Return: 0, -SHARDD_DEADLINE_EXCEEDED with native EAGAIN (not yet), or another negative
 * shardd_code: of c->asked, or of the channel, which then is closed. */
int channel_exchange(struct channel *c, uint32_t slab, uint64_t deadline, struct shardd_error *err);

/* The slab that arrived is done with. */
void channel_installed(struct channel *c);

/* Fetch a part of the session's ring (enum shd1_ring_part), while no exchange is in progress.
 * @ret_fd: belongs to the caller. @ret_bytes: size of its memory. Blocks at most
 * CHANNEL_TIMEOUT_MS. Return: 0 or a negative shardd_code. */
int channel_ring(struct channel *c, uint32_t part, int *ret_fd, uint64_t *ret_bytes,
		 struct shardd_error *err);

/* "Not yet": the error that says so. */
int channel_again(struct shardd_error *err);

#endif
