/*
 * Outgoing answers of a local channel: whole frames, in order, at most one descriptor each, which
 * is sent with the frame's first byte and never again. Frames are queued only while the socket is
 * full. Loop thread only.
 */
#ifndef SHARDD_NET_LOCAL_OUT_H
#define SHARDD_NET_LOCAL_OUT_H

#include <stddef.h>

#include "core/list.h"
#include "local_abi.h"

enum { LOCAL_OUT_MAX = 64 };

struct local_out {
	struct list frames; /* of struct out_frame, the next first */
	size_t n;
};

enum {
	LOCAL_OUT_E_FULL = 1, /* the peer does not read: LOCAL_OUT_MAX wait already */
};

void local_out_init(struct local_out *o);

/* Send @frame (its header says how long it is; copied) with @fd (consumed; -1:
 * none) on @sock, or queue it. Return: 0, LOCAL_OUT_E_FULL, negative errno: the
 * socket or memory failed. */
int local_out_put(struct local_out *o, int sock, const struct shd1_header *frame, int fd);

/* Send what the socket takes. Return: 0 or negative errno. */
int local_out_flush(struct local_out *o, int sock);

/* Forget the rest and close its descriptors. Safe to call twice. */
void local_out_deinit(struct local_out *o);

#endif
