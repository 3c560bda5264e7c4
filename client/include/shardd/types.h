/*
 * Errors, handles and enums that the other headers use. Part of shardd/shardd.h, which includes it
 * and describes what holds for all calls.
 */
#ifndef SHARDD_TYPES_H
#define SHARDD_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SHARDD_API __attribute__((visibility("default")))

/* ------------------------------------------------------------------ errors */

/* Numbers are those of gRPC status codes. Functions return them negated. */
enum shardd_code {
	SHARDD_OK = 0,
	SHARDD_CANCELLED = 1,
	SHARDD_UNKNOWN = 2,
	SHARDD_INVALID_ARGUMENT = 3,  /* the text says field, value and what is allowed */
	SHARDD_DEADLINE_EXCEEDED = 4, /* the text says what was waited for */
	SHARDD_NOT_FOUND = 5,
	SHARDD_ALREADY_EXISTS = 6,
	SHARDD_PERMISSION_DENIED = 7,
	SHARDD_RESOURCE_EXHAUSTED = 8,  /* the text says who holds what */
	SHARDD_FAILED_PRECONDITION = 9, /* the text names the state */
	SHARDD_ABORTED = 10,            /* a peer died or left: call shardd_join again */
	SHARDD_UNIMPLEMENTED = 12,
	SHARDD_INTERNAL = 13,
	SHARDD_UNAVAILABLE = 14, /* the daemon has ended, is about to end, or cannot be reached */
	SHARDD_DATA_LOSS = 15,   /* the daemon was restarted: the job's state is lost */
};

struct shardd_error {
	int code;        /* enum shardd_code, positive */
	int native;      /* the domain's own number, such as errno; 0: none */
	char domain[16]; /* shardd, os, cuda, nccl */
	char field[96];  /* INVALID_ARGUMENT: the field of the message */
	char text[512];  /* one sentence */
};

/* ----------------------------------------------------------------- handles */

typedef struct shardd_client shardd_client;

typedef uint32_t shardd_group;
#define SHARDD_WORLD ((shardd_group)0)

typedef uint32_t shardd_unit;

typedef uint64_t shardd_ticket;

/* ------------------------------------------------------------------- enums */

enum shardd_dtype {
	SHARDD_FP32 = 1,
	SHARDD_BF16 = 2,
	SHARDD_FP16 = 3,
	SHARDD_E4M3 = 8, /* only of published tensors: 8 bits without infinities, float8_e4m3fn */
};

/* How a unit's elements are divided into shards. */
enum shardd_layout {
	SHARDD_LAYOUT_FLAT = 1, /* as one flat parameter; with shard_multiple as in PyTorch/XLA */
	SHARDD_LAYOUT_DIM0 = 2, /* every tensor by its rows, as in FSDP2 */
};

enum shardd_strategy {
	SHARDD_SHARD = 1,     /* over all ranks of the group */
	SHARDD_REPLICATE = 2, /* a full copy on every rank, as in DDP */
	SHARDD_HYBRID = 3,    /* sharded over each shard_ranks consecutive ranks, else replicated */
};

/* When a gathered unit is released. */
enum shardd_reshard {
	SHARDD_RESHARD_AFTER_FORWARD = 1,  /* released after forward, gathered for backward */
	SHARDD_RESHARD_AFTER_BACKWARD = 2, /* kept from forward to the end of backward */
	SHARDD_RESHARD_NEVER = 3,          /* kept until the parameters change */
	/* released after forward, gathered again for backward, then kept as with NEVER */
	SHARDD_RESHARD_AFTER_FORWARD_ONLY = 4,
};

#endif
