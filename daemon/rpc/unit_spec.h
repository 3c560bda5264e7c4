/* A UnitSpec from the wire to a record, every field checked. */
#ifndef SHARDD_RPC_UNIT_SPEC_H
#define SHARDD_RPC_UNIT_SPEC_H

#include "core/fault.h"
#include "shardd.pb-c.h"
#include "store/state.h"

/* @ret: state_unit_free. Return: 0 or a fault code naming the field. */
int unit_spec_decode(const Shardd__V1__UnitSpec *spec, size_t index, state_unit **ret,
		     struct fault *f);

/* 1 to @max printable bytes (no control characters). @field for the text. */
int unit_spec_name(const char *name, size_t max, const char *field, struct fault *f);

#endif
