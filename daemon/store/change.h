/*
 * Changes of the state, as entries of the journal: packing them, and applying them to the state that
 * a journal begins with.
 *
 * Loop thread only.
 */
#ifndef SHARDD_STORE_CHANGE_H
#define SHARDD_STORE_CHANGE_H

#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "store/journal.h"
#include "store/state.h"

typedef Shardd__State__V1__Change state_change;
typedef Shardd__State__V1__Progress state_progress;
typedef Shardd__State__V1__Stepped state_stepped;
typedef Shardd__State__V1__UnitsAt state_units_at;

/* Borrows all of @rec but units, slabs, those of pools, and blobs. */
state_job change_head(const state_job *rec);
/* No pointers. */
state_progress change_progress(const state_job *rec);

/* Replace all of @r by @s. Return: 0, or -ENOMEM: the journal is as it was. */
int change_base(struct journal *r, const state_all *s);
/* Append @c to @r. Return: 0, or -ENOMEM: nothing was appended. */
int change_append(struct journal *r, const state_change *c);

/* The state that @r says: its base with all changes applied, not checked (state_check does that).
 * @ret: state_free. Return: 0, FAULT_INVALID, or another fault code. */
int change_read(const struct journal *r, state_all **ret, struct fault *f);

#endif
