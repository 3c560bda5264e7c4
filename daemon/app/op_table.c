#include "ddp/op_ddp.h"
#include "op/op_list.h"

#define OP_TABLE_LINE(Service, Name, number, carried, type) &type,

const struct op_type *const op_table[] = {
	&op_ddp_bucket,                      /* no method: DdpReady submits it */
	METHODS(OP_LIST_NONE, OP_TABLE_LINE) /* the others */
	NULL,
};
