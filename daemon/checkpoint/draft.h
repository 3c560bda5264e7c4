/*
 * A draft of an index: its pieces, noted fast, so that a thread that must not be busy for long can
 * make it, and another one the index of it (checkpoint/index.h). Texts and shapes are copied into a
 * few large chunks; those that follow one another are copied once. One thread at a time, any.
 */
#ifndef SHARDD_CHECKPOINT_DRAFT_H
#define SHARDD_CHECKPOINT_DRAFT_H

#include "checkpoint/index.h"

struct draft_chunk;

struct draft {
	struct index_piece *pieces; /* owned; what they point to is in @chunks */
	size_t n, room;
	struct draft_chunk *chunks; /* owned */
	size_t used;                /* bytes of the first of them */
	/* the last ones that were copied, and their copies */
	const char *unit_from, *tensor_from;
	char *unit, *tensor;
};

#define DRAFT_NULL ((struct draft){ 0 })

/* Append a piece, as index_add. The texts of two calls in a row are equal if their addresses are.
 * Return: 0 or -ENOMEM. */
int draft_add(struct draft *d, const struct index_piece *p);
/* Append all pieces to @x, which has the files that they are in. Return: 0 or a fault code. */
int draft_finish(const struct draft *d, struct index *x, struct fault *f);
/* Safe after DRAFT_NULL and twice. */
void draft_deinit(struct draft *d);

#endif
