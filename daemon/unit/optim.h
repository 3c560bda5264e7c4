/*
 * The kernels that initialise a unit and that step its optimizer: fills kop
 * arrays, runs nothing. Loop thread only.
 */
#ifndef SHARDD_UNIT_OPTIM_H
#define SHARDD_UNIT_OPTIM_H

#include "backend/backend.h"
#include "unit/settings.h"
#include "unit/unit.h"

/* Kops of the optimizer step number rec->steps + 1 of part @p of @u on its gradient, at
 * @rates, or as the unit was registered: one for each stretch whose tensors have equal settings, in their order;
 * with profile FUSED one for each of what PyTorch would step as one tensor. Scalars are
 * computed in double and rounded once, as in PyTorch's eager single-tensor path (semantics
 * 4.17). @kops: room for as many as a call with NULL returns.
 * Return: how many; 0 if the unit has no optimizer, or the part no elements. */
size_t optim_step_kops(const struct unit *u, const struct unit_part *p,
		       const struct step_rates *rates, struct kop *kops);

/* Kops that multiply the gradient of @p, but not the padding (0 times NaN). @kops: as above. */
size_t optim_scale_kops(const struct unit *u, const struct unit_part *p, float factor,
			struct kop *kops);

/* Kops that fill the piece of every tensor on @p by its initialiser from @seed.
 * @kops: room for rec->n_tensors. Return: how many. */
unsigned optim_seed_kops(const struct unit *u, const struct unit_part *p, uint64_t seed,
			 struct kop *kops);

/* Kops that zero the optimizer state of @p: at most UNIT_MAX_STATES. Return: how many. */
unsigned optim_zero_kops(const struct unit_part *p, struct kop *kops);

/* Address of element @i of one of the unit's arrays. */
float *optim_at(const struct region *r, uint64_t i);

#endif
