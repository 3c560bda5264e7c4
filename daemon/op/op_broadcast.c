/* Broadcast: bytes of the root's buffer into everybody's. */
#include "core/check.h"
#include "op/op_impl.h"

static int decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__BroadcastRequest *r = (const Shardd__V1__BroadcastRequest *)msg;
	uint32_t index;

	op->buffer = r->buffer;
	op->args.buf.offset = r->offset;
	op->args.buf.bytes = r->bytes;
	op->args.buf.root = r->root;
	if (op_take_group(op, r->group, f))
		return f->code;
	if (!r->bytes)
		return fault_set(f, FAULT_INVALID, "bytes", "bytes is 0: 1 or more is allowed");
	if (!group_index(op->group, r->root, &index))
		return fault_set(f, FAULT_INVALID, "root",
				 "root is %u: a rank of group '%.64s' is allowed", r->root,
				 op->group->rec->name);
	return 0;
}

static int check(struct op *op, struct fault *f)
{
	if (!op_buffer_at(op, op->args.buf.offset, op->args.buf.bytes, f))
		return f->code;
	op_print(op, "Broadcast of %llu bytes from rank %u", (unsigned long long)op->args.buf.bytes,
		 op->args.buf.root);
	op->entry.print.words[2] = op->args.buf.bytes;
	op->entry.print.words[3] = op->args.buf.root;
	return 0;
}

static void done(struct coll *c)
{
	coll_end(c, NULL);
}

static void to_others(struct coll *c)
{
	uint32_t root = coll_index(c, c->ops[0]->args.buf.root);
	unsigned n = 0;

	if (!coll_need_kops(c, c->n))
		return;
	for (uint32_t i = 0; i < c->n; i++) {
		if (i == root)
			continue;
		c->kops[n] = (struct kop){ .kind = KOP_COPY, .n = c->ops[0]->args.buf.bytes };
		c->kops[n++].copy = (struct k_copy){ (void *)c->inputs[i], c->inputs[root] };
	}
	coll_kernels(c, n, done);
}

static void run(struct coll *c)
{
	const struct op *op = c->ops[0];
	struct fault f = FAULT_NULL;

	for (uint32_t i = 0; i < c->n; i++)
		c->inputs[i] = op_buffer_at(c->ops[i], c->ops[i]->args.buf.offset,
					    c->ops[i]->args.buf.bytes, &f);
	CHECK(!f.code);
	/* one device: this member is the root's */
	comm_broadcast(c->job->node->comm, coll_comm(c, to_others),
		       (void *)c->inputs[coll_index(c, op->args.buf.root)], op->args.buf.bytes, 0);
}

static void encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__BroadcastReply reply = SHARDD__V1__BROADCAST_REPLY__INIT;

	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_broadcast = {
	.name = "Broadcast",
	.collective = true,
	.request = &shardd__v1__broadcast_request__descriptor,
	.decode = decode,
	.check = check,
	.run = run,
	.encode = encode,
};
