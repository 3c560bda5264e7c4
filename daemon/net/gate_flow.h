/*
 * One gRPC connection as its gate sees it: which streams are open, how much of a message has
 * arrived, and whether the next frame may pass.
 *
 * Fed with both directions in pieces of any size; the verdict does not depend on how
 * the bytes are cut. A frame is judged when its head is complete, before any of its
 * body is passed on. No I/O, no clock of its own; one thread at a time.
 */
#ifndef SHARDD_NET_GATE_FLOW_H
#define SHARDD_NET_GATE_FLOW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "net/gate_frames.h"
#include "net/gate_limits.h"

/* A frame of an incomplete message costs core at least this: even a small frame keeps the buffer
 * alive in which it was read. */
#define GATE_FRAME_COST 4096u

enum gate_verdict {
	GATE_PASS,  /* all bytes may pass */
	GATE_STALL, /* the rest waits: for bytes or streams to be given back */
	GATE_CLOSE, /* the rest must not pass: see gate_flow.breach */
};

/* Calls that a client may open ahead of their answers: GATE_OPEN_AHEAD at once, then one in
 * GATE_OPEN_US. Core takes about 100 us for each, during which it serves no other call. Each answer
 * makes room for one more, so a client that waits for answers is never delayed. */
#define GATE_OPEN_AHEAD 64u
#define GATE_OPEN_US    250u
/* Bytes of headers that cost as much as a call: each may be a field of its own. */
#define GATE_OPEN_BYTES 1024u

/* Why it stalls. */
enum gate_wait {
	GATE_WAIT_NONE,
	GATE_WAIT_PACE,   /* for a moment: it opens calls too fast */
	GATE_WAIT_OWN,    /* for a stream or a message of this connection to end */
	GATE_WAIT_OTHERS, /* for messages of others, of this user or of all */
};

/* A stream that the client opened and neither side has ended. */
struct gate_stream {
	uint32_t id;
	uint32_t left;    /* bytes of its message that are still to come */
	uint64_t charged; /* to the connection and both purses */
	uint64_t since_us;
	uint8_t n_prefix; /* bytes of the five before the message that have come */
	bool whole;       /* its message has come */
	bool more;        /* and bytes follow it, which stay charged until the stream ends */
};

struct gate_flow {
	const struct gate_limits *limits; /* borrowed */
	struct gate_purse *user, *total;  /* borrowed */
	bool attached;
	bool goaway; /* the client has said that it ends */
	struct gate_breach breach;

	struct gate_stream *streams; /* ordered by id; owned */
	uint32_t n_streams, room;
	uint32_t n_waiting; /* streams whose message is not whole */
	uint32_t last_id;
	uint64_t charged; /* sum over @streams */

	struct gate_frames up, down;
	uint8_t n_preface;    /* bytes of the preface that have come */
	uint32_t block;       /* stream of the header block under way; 0: none */
	uint32_t block_bytes; /* of its frames */
	uint32_t block_continuations;
	uint32_t padding; /* of the DATA frame under way: bytes at its end */

	uint64_t opened_us; /* when its opened calls are paid for, in time and answers */
	struct gate_rate resets, pings, settings, control;
	uint64_t down_bytes; /* not yet converted to tokens for control frames */
	uint64_t last_us;    /* of the last byte of either side */

	enum gate_wait wait;
	const char *wait_limit; /* what it waits for: the key and its value */
	uint64_t wait_value;
	uint64_t wait_since_us;
};

/* @limits, @user, @total: borrowed until deinit. */
void gate_flow_init(struct gate_flow *f, const struct gate_limits *limits, struct gate_purse *user,
		    struct gate_purse *total, uint64_t now_us);

/* Returns its charges. */
void gate_flow_deinit(struct gate_flow *f);

/* The session exists: other limits apply. */
void gate_flow_attach(struct gate_flow *f);

/* The next @n bytes from the client. @ret_passed: how many of them may be passed on; after
 * GATE_STALL the caller passes the rest again. Return: GATE_PASS means all of them. */
enum gate_verdict gate_flow_up(struct gate_flow *f, const uint8_t *data, size_t n, uint64_t now_us,
			       size_t *ret_passed);

/* The next @n bytes from core, which is trusted. */
void gate_flow_down(struct gate_flow *f, const uint8_t *data, size_t n, uint64_t now_us);

/* Forget stream @id: the gate has ended it itself. */
void gate_flow_drop(struct gate_flow *f, uint32_t id);

/* Is a deadline over? Return: GATE_PASS or GATE_CLOSE. */
enum gate_verdict gate_flow_tick(struct gate_flow *f, uint64_t now_us);

#endif
