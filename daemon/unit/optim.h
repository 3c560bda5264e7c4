/*
 * The kernels that initialise a unit and that step its optimizer: fills launch
 * arrays, runs nothing. Loop thread only.
 */
#ifndef SHARDD_UNIT_OPTIM_H
#define SHARDD_UNIT_OPTIM_H

#include "backend/backend.h"
#include "unit/settings.h"
#include "unit/unit.h"

/* Launches of the optimizer step number rec->steps + 1 of part @p of @u on its gradient, at
 * @rates, or as the unit was registered: one for each stretch whose tensors have equal settings, in their order;
 * with profile FUSED one for each of what PyTorch would step as one tensor. Scalars are
 * computed in double and rounded once, as in PyTorch's eager single-tensor path (semantics
 * 4.17). @launches: room for as many as a call with NULL returns.
 * Return: how many; 0 if the unit has no optimizer, or the part no elements. */
size_t optim_step_launches(const struct unit *u, const struct unit_part *p,
			   const struct step_rates *rates, struct launch *launches);

/* Launches that multiply the gradient of @p, but not the padding (0 times NaN). @launches: as above. */
size_t optim_scale_launches(const struct unit *u, const struct unit_part *p, float factor,
			    struct launch *launches);

/* Launches that fill the piece of every tensor on @p by its initialiser from @seed. @to: FP32, where
 * elements are as in p->params, or these themselves if they are FP32.
 * @launches: room for rec->n_tensors. Return: how many. */
unsigned optim_seed_launches(const struct unit *u, const struct unit_part *p,
			     const struct region *to, uint64_t seed, struct launch *launches);

/* Launches that zero the optimizer state of @p: at most UNIT_MAX_STATES. Return: how many. */
unsigned optim_zero_launches(const struct unit_part *p, struct launch *launches);

/* Address of element @i of one of the unit's arrays. */
float *optim_at(const struct region *r, uint64_t i);

#endif
