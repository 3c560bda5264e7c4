/* What a trainer of charlm was asked to do. */
#ifndef CHARLM_OPTIONS_H
#define CHARLM_OPTIONS_H

#include <shardd/shardd.h>

#include <stdbool.h>
#include <stdint.h>

#define TRAIN_NO_RANK UINT64_MAX

struct train_options {
	const char *data; /* file */
	const char *load; /* folder of checkpoints, or NULL */
	uint64_t steps;   /* the last one */
	uint64_t seed;
	uint64_t batch; /* samples of all ranks together */
	uint64_t context, embed, hidden;
	double lr;
	double clip; /* largest norm of the gradients; 0: not clipped */
	enum shardd_dtype dtype;
	uint64_t commit_every; /* steps; above 1 the job resumes at its commits */
	uint64_t shard_ranks;  /* of a replica; 0: all */
	bool in_backward;      /* the optimizer */
	bool json;
	uint64_t kill_at;   /* this process kills itself in that step, 0: never */
	uint64_t kill_rank; /* TRAIN_NO_RANK: none */
};

#endif
