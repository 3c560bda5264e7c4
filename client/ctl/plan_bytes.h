/*
 * What a job would take, by the formulas of docs/semantics.md (Memory; core/formula.h), for units of one size with FLAT
 * layout. Any thread.
 */
#ifndef SHARDD_CTL_PLAN_BYTES_H
#define SHARDD_CTL_PLAN_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* With these no sum exceeds 64 bits. */
#define PLAN_MAX_PARAMS UINT64_C(10000000000000)
#define PLAN_MAX_UNITS  65536u
#define PLAN_MAX_RANKS  65536u
#define PLAN_MAX_HERE   1024u /* ranks of a node */

enum plan_resume { PLAN_RESUME_APPLIED, PLAN_RESUME_COMMITTED, PLAN_RESUME_NO_COPY };

struct plan_model {
	uint64_t trained, frozen; /* parameters */
	uint32_t units;           /* which share them */
	unsigned storage_bytes;   /* of one parameter */
	unsigned compute_bytes;
	unsigned gradient_bytes;
	bool casts;      /* the two dtypes differ */
	unsigned states; /* arrays of optimizer state */
	bool early;      /* the optimizer runs in backward, or is the trainers' own */
	bool external;   /* the latter */
	bool clips;
	enum plan_resume resume;
};

struct plan_place {
	uint32_t ranks, nodes, replicas;
	uint32_t devices;  /* of a node */
	bool is_staggered; /* they are host memory */
};

/* As `shardctl memory` names them. */
enum plan_class { PLAN_SHARD, PLAN_FULL, PLAN_GRAD, PLAN_CONTROL, _PLAN_CLASSES };

enum plan_item {
	PLAN_PARAMS,
	PLAN_GRADIENTS,
	PLAN_STATES,
	PLAN_COPY,
	PLAN_GATHERED,
	PLAN_SCRATCH,
	PLAN_BUFFERS,
	PLAN_POOLED,
	PLAN_LENT,
	PLAN_BLOBS,
	PLAN_CHECKPOINT,
	_PLAN_ITEMS,
};

/* Bytes of a node. */
struct plan_bytes {
	uint64_t
		least; /* one unit at a time is gathered, or has gradients; no checkpoint is written */
	uint64_t most; /* all units at once; all of a checkpoint is copied */
};

struct plan {
	struct plan_bytes items[_PLAN_ITEMS];
	struct plan_bytes all;
};

/* @m, @p: checked by the caller: nodes divide ranks, devices a node's ranks, replicas all ranks. */
void plan_bytes(const struct plan_model *m, const struct plan_place *p, struct plan *ret);

/* Static strings. */
const char *plan_bytes_name(enum plan_item i);
enum plan_class plan_bytes_class(enum plan_item i);
const char *plan_bytes_class_name(enum plan_class c);

/* Parse a number of things: "7e9", "7B", "1.3B", "350M", "4096"; K, M, B or G, T are powers of 1000.
 * Return: false if it is no whole number from 1 to @max. */
bool plan_bytes_parse(const char *text, uint64_t max, uint64_t *ret);

#endif
