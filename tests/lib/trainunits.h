/*
 * A small model for tests in which somebody dies: three units with three optimizers, whose
 * gradients depend on step and rank only, so that two trainings end alike, bit for bit.
 */
#ifndef SHARDD_TESTS_TRAINUNITS_H
#define SHARDD_TESTS_TRAINUNITS_H

#include <shardd/shardd.h>
#include <stdbool.h>
#include <stdint.h>

enum { TRAINUNITS = 3, TRAINUNITS_ELEMENTS = 5000 };

/* Register AdamW, SGD with momentum, and AdamW with parameters gathered as bf16. */
void trainunits_register(shardd_client *c, shardd_unit units[TRAINUNITS]);
/* The same, stepped at another time. */
void trainunits_register_when(shardd_client *c, shardd_unit units[TRAINUNITS],
			      enum shardd_optimizer_when when);
void trainunits_init(shardd_client *c, const shardd_unit units[TRAINUNITS]);
void trainunits_reduce(shardd_client *c, const shardd_unit units[TRAINUNITS], uint32_t rank,
		       uint64_t step);
/* Reduce, step and commit; the blob is { step, rank } in two uint64_t. */
void trainunits_step(shardd_client *c, const shardd_unit units[TRAINUNITS], uint32_t rank,
		     uint64_t step);
/* Is @m after that commit, with @rank's blob? */
bool trainunits_is_at(const struct shardd_membership *m, uint32_t rank, uint64_t step);
/* The parameters as they are gathered; of the last unit the first half of the room is used. */
void trainunits_read(shardd_client *c, const shardd_unit units[TRAINUNITS],
		     float ret[TRAINUNITS][TRAINUNITS_ELEMENTS]);

#endif
