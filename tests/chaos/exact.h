/*
 * chaos-exact: a trainer whose masters of each step can be computed by anybody. Parameters begin as 0; gradients are a
 * function of step, rank and element; SGD takes them. The mean of two ranks, the momentum and the rate are powers of
 * two, so each operation has one rounding at most, and all orders and fused forms give the same bits.
 *
 * Three units: root and layers.0 without momentum, of which each step changes an eighth of the elements, and layers.1
 * with momentum, of which it changes all.
 */
#ifndef CHAOS_EXACT_H
#define CHAOS_EXACT_H

#include <stdbool.h>
#include <stdint.h>

#define EXACT_RATE     0.25
#define EXACT_MOMENTUM 0.5

enum { EXACT_RANKS = 2, EXACT_UNITS = 3, EXACT_MOST_TENSORS = 7, EXACT_EVERY = 8, EXACT_LOOKS = 4 };

struct exact_tensor {
	const char *name;       /* NULL: there are no more */
	uint64_t rows, columns; /* columns 0: it has one dimension */
};

struct exact_unit {
	const char *name;
	bool momentum;
	struct exact_tensor tensors[EXACT_MOST_TENSORS + 1];
};

extern const struct exact_unit exact_units[EXACT_UNITS];

uint64_t exact_elements(const struct exact_tensor *t);
uint64_t exact_unit_elements(const struct exact_unit *u);

/* The first element of unit @u that has a gradient in @step, and how many further it is to each next one. */
uint64_t exact_first(unsigned u, uint64_t step, uint64_t *ret_stride);

/* Of element @i of unit @u, which has one. Those of half the elements have few bits, so that many parameters are halfway
 * between two numbers of a shorter type. */
float exact_gradient(uint64_t step, unsigned rank, unsigned u, uint64_t i);

/* Write what the publication of the engine's rank @rank has at each of @n @steps, which ascend, to stdout: for each
 * tensor the line STEP NAME TYPE SHAPE BYTES, then the bytes. Nothing of it calls the daemon or its kernels.
 * Return: an exit code. */
int exact_publish(unsigned rank, const uint64_t *steps, int n);

#endif
