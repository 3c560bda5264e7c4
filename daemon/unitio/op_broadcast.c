/* Broadcast: bytes of the root's buffer into everybody's. */
#include "core/check.h"
#include "op/op.h"
#include "op/op_util.h"
#include "op/op_list.h"
#include "work/coll.h"
#include "shardd.pb-c.h"
#include "unitio/buf_args.h"

static int op_broadcast_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__BroadcastRequest *r = (const Shardd__V1__BroadcastRequest *)msg;
	uint32_t index;

	op->buffer = r->buffer;
	buf_args(op)->offset = r->offset;
	buf_args(op)->bytes = r->bytes;
	buf_args(op)->root = r->root;
	if (op_take_group(op, r->group, f))
		return f->code;
	if (!r->bytes)
		return fault_set(f, FAULT_INVALID, "bytes", "bytes is 0; it must be at least 1");
	if (!group_index(op->group, r->root, &index))
		return fault_set(f, FAULT_INVALID, "root",
				 "root is %u; it must be a rank of group '%.64s'", r->root,
				 op->group->rec->name);
	return 0;
}

static int op_broadcast_check(struct op *op, struct fault *f)
{
	if (!op_buffer_at(op, buf_args(op)->offset, buf_args(op)->bytes, f))
		return f->code;
	op_print(op, "Broadcast of %llu bytes from rank %u",
		 (unsigned long long)buf_args(op)->bytes, buf_args(op)->root);
	op->entry.print.words[2] = buf_args(op)->bytes;
	op->entry.print.words[3] = buf_args(op)->root;
	return 0;
}

/* Noted at the start: the ops hold their buffers until it ends. */
static void op_broadcast_fill_inputs(struct coll *c)
{
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];

		for (uint32_t i = 0; i < p->n; i++) {
			struct op *op = c->ops[p->members[i]];
			struct fault f = FAULT_NULL;

			p->inputs[i] =
				op_buffer_at(op, buf_args(op)->offset, buf_args(op)->bytes, &f);
			CHECK(p->inputs[i]); /* the op holds it since it was checked */
		}
	}
}

/* Whose buffer on a device gets it first: the root's, or the first member's. */
static uint32_t op_broadcast_first_on(const struct coll *c, const struct coll_part *p)
{
	uint32_t root = coll_index(c, buf_args(c->ops[0])->root);

	for (uint32_t i = 0; i < p->n; i++)
		if (p->members[i] == root)
			return i;
	return 0;
}

static enum res op_broadcast_to_others(struct coll *c)
{
	RES_TRY(coll_need_launches(c, c->n));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];
		uint32_t first = op_broadcast_first_on(c, p);

		for (uint32_t i = 0; i < p->n; i++)
			if (i != first)
				coll_launch(p, LAUNCH_COPY, buf_args(c->ops[0])->bytes)->copy =
					(struct k_copy){ (void *)p->inputs[i], p->inputs[first] };
	}
	return coll_kernels(c);
}

static enum res op_broadcast_to_other_devices(struct coll *c)
{
	const struct op *op = c->ops[0];
	void *data[NODE_MAX_DEVICES];

	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++)
		data[d] = (void *)c->parts[d].inputs[op_broadcast_first_on(c, &c->parts[d])];
	coll_broadcast(c, data, buf_args(op)->bytes, coll_device_of(c, buf_args(op)->root));
	return RES_WAIT;
}

enum op_broadcast_stage { BROADCAST_BEGIN, BROADCAST_BETWEEN, BROADCAST_SPREAD, BROADCAST_DONE };

static enum res op_broadcast_tick(struct coll *c)
{
	switch ((enum op_broadcast_stage)c->stage) {
	case BROADCAST_BEGIN:
		RES_TRY(coll_check_epoch(c, false));
		RES_TRY(coll_ready(c));
		RES_TRY(coll_need_launches(c, 0));
		op_broadcast_fill_inputs(c);
		c->stage = BROADCAST_BETWEEN;
		return coll_kernels(c); /* none: for the streams that filled the buffers */
	case BROADCAST_BETWEEN:
		c->stage = BROADCAST_SPREAD;
		return op_broadcast_to_other_devices(c);
	case BROADCAST_SPREAD:
		c->stage = BROADCAST_DONE;
		return op_broadcast_to_others(c);
	case BROADCAST_DONE:
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

const struct op_type op_broadcast = {
	.name = "Broadcast",
	.collective = true,
	.request = &shardd__v1__broadcast_request__descriptor,
	.decode = op_broadcast_decode,
	.check = op_broadcast_check,
	.coll_tick = op_broadcast_tick,
	.reply = &shardd__v1__broadcast_response__descriptor,
	.reads_inputs = true,
};
