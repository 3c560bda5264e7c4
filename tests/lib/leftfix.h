/* A job as one daemon leaves it behind for the next: packed records and descriptors. */
#ifndef SHARDD_TESTS_LEFTFIX_H
#define SHARDD_TESTS_LEFTFIX_H

#include "nodefix.h"

#define LEFT_ELEMENTS  1000
#define LEFT_MAX_SLABS 8
/* Of unit "rich": an int64 and three bf16. */
#define LEFT_BUFFER_BYTES 70

/* Job "job" of 2 ranks: unit "u", unit "rich" (DIM0; a tensor of 7, a frozen one of 5 x 2, one
 * tied to "u"'s, not initialised; buffers full of 1 and 2), group "one", step 5 committed with blobs of 20 and 21
 * bytes. */
struct left {
	uint8_t *bytes;
	size_t n;
	int fds[LEFT_MAX_SLABS];
	unsigned n_fds;
	float params[LEFT_ELEMENTS];
};

/* Make the job on a node of its own, train a step, take everything along. */
void left_behind(struct left *l);
/* The same of @job of a test's own, which has LEFT_MAX_SLABS slabs at most; without params. */
void left_keep(struct left *l, struct job *job);
void left_forget(struct left *l);

/* Decode @bytes and restore its jobs on @n with the descriptors of @l.
 * Return: 0 or a fault code. */
int left_take_over(struct nodefix *n, const struct left *l, const uint8_t *bytes, size_t len);

/* A gradient of ones, a step, its commit under @step; by both ranks of the job. */
void left_train(struct nodefix *n, struct member **m, struct unit *u, uint64_t step);

#endif
