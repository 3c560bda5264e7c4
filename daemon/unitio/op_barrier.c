/* Barrier: all members are here, and what each of them asked for before is over. */
#include "op/op.h"
#include "op/op_util.h"
#include "op/op_list.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

static int op_barrier_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	op->touches = TOUCH_ALL;
	return op_take_group(op, ((const Shardd__V1__BarrierRequest *)msg)->group, f);
}

static int op_barrier_check(struct op *op, struct fault *f)
{
	(void)f;
	op_print(op, "Barrier");
	return 0;
}

static enum res op_barrier_tick(struct coll *c)
{
	(void)c;
	return RES_DONE;
}

const struct op_type op_barrier = {
	.name = "Barrier",
	.collective = true,
	.surrogates = true,
	.request = &shardd__v1__barrier_request__descriptor,
	.decode = op_barrier_decode,
	.check = op_barrier_check,
	.coll_tick = op_barrier_tick,
	.reply = &shardd__v1__barrier_response__descriptor,
};
