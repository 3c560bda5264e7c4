/* Shared by the unit_spec*.c files. */
#ifndef SHARDD_RPC_UNIT_SPEC_IMPL_H
#define SHARDD_RPC_UNIT_SPEC_IMPL_H

#include "rpc/unit_spec.h"

/* A finite number in [lo, hi]. Return: 0 or a fault code naming @field. */
int unit_spec_number(double x, double lo, double hi, const char *unit, const char *field,
		     struct fault *f);

/* The optimizer, and the tensors and buffers, into @u. Return: 0 or a fault code. */
int unit_spec_optimizer(state_unit *u, const Shardd__V1__Optimizer *o, struct fault *f);
int unit_spec_tensors(state_unit *u, const Shardd__V1__UnitSpec *spec, struct fault *f);

#endif
