/*
 * The frames of one direction of an HTTP/2 connection, found in pieces of any size.
 *
 * A frame is nine bytes of head and a body of the length that the head names
 * (RFC 9113, 4.1). The gate needs no more than that: it decodes no headers and keeps only the
 * stream states that it counts. nghttp2 does not fit: it does both, and it produces its own frames
 * instead of passing on the received ones. This reader has no table, no allocation and no I/O.
 */
#ifndef SHARDD_NET_GATE_FRAMES_H
#define SHARDD_NET_GATE_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GATE_HEAD_BYTES 9u

enum gate_frame_type {
	GATE_DATA = 0,
	GATE_HEADERS = 1,
	GATE_PRIORITY = 2,
	GATE_RST = 3,
	GATE_SETTINGS = 4,
	GATE_PUSH_PROMISE = 5,
	GATE_PING = 6,
	GATE_GOAWAY = 7,
	GATE_WINDOW_UPDATE = 8,
	GATE_CONTINUATION = 9,
};

enum {
	GATE_FLAG_ACK = 1,        /* SETTINGS, PING */
	GATE_FLAG_END_STREAM = 1, /* DATA, HEADERS */
	GATE_FLAG_END_HEADERS = 4,
	GATE_FLAG_PADDED = 8,
};

struct gate_frame {
	uint32_t bytes; /* of the body, at most 2^24 - 1 */
	uint8_t type;   /* enum gate_frame_type, or one that is unknown */
	uint8_t flags;
	uint32_t stream; /* without the reserved bit */
};

enum gate_step {
	GATE_STEP_MORE, /* all bytes are taken */
	GATE_STEP_HEAD, /* a head is complete: @frame */
	GATE_STEP_BODY, /* bytes of the body of @frame */
};

struct gate_frames {
	uint8_t head[GATE_HEAD_BYTES];
	uint8_t n_head;          /* bytes of @head that are there */
	uint32_t left;           /* bytes of the body that are still to come */
	struct gate_frame frame; /* the latest one whose head was complete */
};

#define GATE_FRAMES_NULL ((struct gate_frames){ .n_head = 0 })

/* Take the next part of the @n bytes at @data. A copy of @r made before the call can restore the
 * reader. Pure; any thread.
 * @ret_used: how many bytes the part has; at GATE_STEP_BODY they are at @data.
 * Return: what it is. */
enum gate_step gate_frames_next(struct gate_frames *r, const uint8_t *data, size_t n,
				size_t *ret_used);

/* Is the last frame whole? True after a head without a body. */
static inline bool gate_frames_whole(const struct gate_frames *r)
{
	return r->left == 0 && r->n_head == 0;
}

#endif
