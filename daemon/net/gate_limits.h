/*
 * The resource limits of one gRPC connection: limits, rates, and bytes of shared budgets. Used by
 * net/gate_flow.c; no I/O.
 */
#ifndef SHARDD_NET_GATE_LIMITS_H
#define SHARDD_NET_GATE_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

/* A second's worth of each rate, times this, may come at once. */
#define GATE_BURST 4u

/* The keys of the configuration (described in config/config_keys.c), and two values that follow from
 * others. */
struct gate_limits {
	uint32_t header_bytes;       /* of the frames of one header block */
	uint32_t continuations;      /* CONTINUATION frames of one header block */
	uint32_t frame_bytes;        /* of a frame's body: what core advertises */
	uint32_t streams;            /* open at once, what core advertises */
	uint32_t unattached_streams; /* the same before Attach: more wait */
	uint64_t unattached_bytes;   /* of messages that are not complete, before Attach */
	uint64_t connection_bytes;   /* the same after Attach */
	uint64_t total_bytes;        /* the same of all connections */
	uint32_t message_timeout_ms; /* from the start of a call to the end of its message */
	uint32_t idle_timeout_ms;    /* without a byte, before Attach */
	uint32_t resets_per_s;       /* RST_STREAM; a tenth of it before Attach */
	uint32_t pings_per_s;        /* PING */
	uint32_t settings_per_s;     /* SETTINGS */
	uint32_t control_per_s;      /* frames that carry nothing for a call */
};

/* A limit that was exceeded. */
struct gate_breach {
	const char *limit; /* the key; "http2" for a frame that HTTP/2 does not allow */
	uint64_t value;    /* of the limit */
	const char *what;  /* half a sentence */
};

/* ---------------------------------------------------------------- rates */

/* Tokens that come back with time: @level in millionths of one. */
struct gate_rate {
	uint64_t level;
	uint64_t last_us;
};

/* Full. */
void gate_rate_init(struct gate_rate *r, uint32_t per_s, uint64_t now_us);

/* Take one token. Return: false if there is none. */
bool gate_rate_take(struct gate_rate *r, uint32_t per_s, uint64_t now_us);

/* Give @n back, at most to full. */
void gate_rate_add(struct gate_rate *r, uint32_t per_s, uint64_t n);

/* --------------------------------------------------------------- budgets */

/*
 * Bytes that several connections share. When it is used up, one connection at a time may continue:
 * the one that has the turn, up to its own limit. So a started message can always end, regardless
 * of who holds the rest, and no two connections wait for each other.
 */
struct gate_purse {
	uint64_t used;
	uint64_t limit;   /* of a user's; that of all connections is gate_limits.total_bytes */
	uint64_t returns; /* how often bytes were given back: tells when to try again */
	const void *turn; /* the owner that may exceed it; NULL: none */
};

/* May @who add @bytes to a purse of @limit? Takes the turn if that is needed and free. */
bool gate_purse_admits(struct gate_purse *p, uint64_t limit, uint64_t bytes, const void *who);

/* @who no longer holds any of it. */
void gate_purse_leave(struct gate_purse *p, const void *who);

#endif
