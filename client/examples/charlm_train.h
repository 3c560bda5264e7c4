/*
 * Training charlm data-parallel through shardd: joins the job of the environment,
 * one unit a layer, and goes from step to step until the last one is committed,
 * through as many epochs as that takes.
 */
#ifndef CHARLM_TRAIN_H
#define CHARLM_TRAIN_H

#include <shardd/shardd.h>

#include <stdbool.h>
#include <stdint.h>

#define TRAIN_NO_RANK    UINT64_MAX
#define TRAIN_UNFINISHED 3 /* a signal ended it before the last step; the job stays */

struct train_options {
	const char *data; /* file */
	uint64_t steps;   /* the last one */
	uint64_t seed;
	uint64_t batch; /* samples of all ranks together */
	uint64_t context, embed, hidden;
	double lr;
	double clip; /* largest norm of the gradients; 0: not clipped */
	enum shardd_dtype dtype;
	bool json;
	uint64_t kill_at;   /* this process kills itself in that step, 0: never */
	uint64_t kill_rank; /* TRAIN_NO_RANK: none */
};

/* Train. Prints to stdout, errors as one sentence to stderr.
 * Return: 0 (the last step is committed, or the job or the daemon drained), 1 if the training could
 * not be done, or TRAIN_UNFINISHED. Blocks until the end. */
int train_run(const struct train_options *options);

#endif
