/*
 * What a unit is, as a number: nodes that have parts of one unit compare it. Of the record; what changes
 * while it is trained (settings of the optimizer, where its memory is) is not in it.
 */
#ifndef SHARDD_UNIT_DEFINITION_H
#define SHARDD_UNIT_DEFINITION_H

#include <stdint.h>

#include "store/state.h"

uint64_t definition_hash(const state_unit *rec);

#endif
