/*
 * What reductions give, one number at a time, written from what the systems do and not from
 * what the daemon does: for tests of Reduce and Accumulate. Elementwise; plain floats.
 */
#ifndef SHARDD_TESTS_REDUCE_MODEL_H
#define SHARDD_TESTS_REDUCE_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels.h"

enum { MODEL_MAX_RANKS = 16 };

/* As shardd_unit_spec has them; 0: left open. */
struct model_unit {
	unsigned profile; /* enum shardd_reduce_profile */
	enum dtype gradient, reduce;
	unsigned strategy;    /* enum shardd_strategy */
	uint32_t shard_ranks; /* HYBRID */
	double pre, post, factor;
	bool force;
	unsigned div_mode; /* enum shardd_div_mode */
	/* One letter a pass: s Reduce, d Reduce with its all-reduce deferred, n Accumulate, m
	 * Accumulate on odd ranks, nothing on the others, r Reduce of what was accumulated. */
	const char *passes;
};

struct model_world {
	uint32_t ranks;
	unsigned devices;
	bool nccl; /* GPUs: averages are NCCL's, divisions CUDA's; else gloo's and a CPU's */
	uint32_t device_of[MODEL_MAX_RANKS];
};

/* Ranks in blocks on the devices. */
void model_world_init(struct model_world *w, uint32_t ranks, unsigned devices, bool nccl);

/* Element @i of what rank @rank has in pass @pass, as its buffer holds it. Among the first
 * some are special: they overflow, vanish, are infinite or no number. */
float model_number(const struct model_unit *u, uint32_t rank, unsigned pass, size_t i);

/* The gradient of element @i after all passes. */
float model_gradient(const struct model_unit *u, const struct model_world *w, size_t i);

#endif
