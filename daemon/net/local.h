/*
 * The local channel (SHD1): small frames, descriptors by slab number.
 *
 * One per local connection. Reads whole frames, answers them in order. A frame
 * that breaks the protocol (magic, size, type, a descriptor where none belongs)
 * gets a fatal SHD1_ERROR and the connection ends; so it does after a frame that stays incomplete
 * for the hello timeout, and for a peer that does not read its answers (more than 64 unsent). Loop
 * thread only.
 */
#ifndef SHARDD_NET_LOCAL_H
#define SHARDD_NET_LOCAL_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"
#include "local_abi.h"
#include "net/conn.h"

struct local;

/* A slab that is handed out. */
struct local_slab {
	int fd; /* consumed by the caller */
	bool writable;
	bool lasts; /* it is the same one in a daemon that takes over */
	bool pages; /* memory of the host */
	uint64_t bytes;
};

struct local_ops {
	/* A token came: which session? @ret_session: its number. Return: 0 or a fault
	 * code (the channel ends). */
	int (*hello)(struct local *l, const uint8_t token[SHD1_TOKEN_BYTES], void *userdata,
		     uint64_t *ret_session, struct fault *f);
	/* A descriptor for @slab, for the session this channel is bound to.
	 * Return: 0 or a fault code (the channel stays). */
	int (*get_slab)(struct local *l, uint32_t slab, void *userdata, struct local_slab *ret,
			struct fault *f);
	/* A descriptor of part @part of the session's ring. @ret_fd: consumed by the caller. */
	int (*get_ring)(struct local *l, uint32_t part, void *userdata, int *ret_fd,
			uint64_t *ret_bytes, struct fault *f);
	/* The channel is gone; called once, then it is freed. */
	void (*closed)(struct local *l, void *userdata);
};

/* Take over @c (uses its descriptor and its closed callback). @ops: static.
 * @frame_timeout_us: for an incomplete frame and for the first one.
 * Return: 0 or negative errno (then @c is closed). */
int local_new(uv_loop_t *loop, struct conn *c, const struct local_ops *ops, void *userdata,
	      uint64_t frame_timeout_us, struct local **ret);

struct conn *local_conn(struct local *l); /* borrowed */

/* End it; closed follows from the loop. Safe to call twice. */
void local_close(struct local *l);

#endif
