/* The types of all ops that are methods, by proto/methods.h. */
#ifndef SHARDD_OP_OP_LIST_H
#define SHARDD_OP_OP_LIST_H

#include "op/op.h"
#include "methods.h"

#define OP_LIST_NONE(...)
#define OP_LIST_TYPE(Service, Name, number, carried, type) extern const struct op_type type;
METHODS(OP_LIST_NONE, OP_LIST_TYPE)
#undef OP_LIST_TYPE

#endif
