/* Every op. */
#ifndef SHARDD_OP_TABLE_H
#define SHARDD_OP_TABLE_H

#include "ddp/ops.h"
#include "gather/ops.h"
#include "reduce/ops.h"
#include "step/ops.h"
#include "unitio/ops.h"

#endif
