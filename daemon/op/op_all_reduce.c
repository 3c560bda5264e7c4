/* AllReduce: elements of each member's buffer become the same on all. */
#include "core/check.h"
#include "op/op_impl.h"

static int decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__AllReduceRequest *r = (const Shardd__V1__AllReduceRequest *)msg;
	size_t size = dtype_size((enum dtype)r->dtype);

	op->buffer = r->buffer;
	op->args.buf.offset = r->offset;
	op->args.buf.count = r->count;
	op->args.buf.bytes = r->count * size;
	op->args.buf.dtype = (enum dtype)r->dtype;
	op->args.buf.op = (enum reduce_op)r->op;
	if (!size)
		return fault_set(f, FAULT_INVALID, "dtype",
				 "dtype is %d: FP32, BF16 or FP16 is allowed", r->dtype);
	if (op->args.buf.op <= REDUCE_NONE || op->args.buf.op >= _REDUCE_N)
		return fault_set(f, FAULT_INVALID, "op",
				 "op is %d: SUM, AVG, MAX or MIN is allowed", r->op);
	if (!r->count || r->count > LAYOUT_MAX_ELEMENTS)
		return fault_set(f, FAULT_INVALID, "count", "count is %llu: 1 to 2^48 is allowed",
				 (unsigned long long)r->count);
	if (r->offset % size)
		return fault_set(f, FAULT_INVALID, "offset",
				 "offset is %llu: a multiple of %zu is allowed",
				 (unsigned long long)r->offset, size);
	return op_take_group(op, r->group, f);
}

static const char *word_of(enum reduce_op op)
{
	static const char *const words[_REDUCE_N] = { [REDUCE_SUM] = "sum",
						      [REDUCE_AVG] = "avg",
						      [REDUCE_MAX] = "max",
						      [REDUCE_MIN] = "min" };

	return words[op];
}

static int check(struct op *op, struct fault *f)
{
	if (!op_buffer_at(op, op->args.buf.offset, op->args.buf.bytes, f))
		return f->code;
	op_print(op, "AllReduce of %llu %s (%s)", (unsigned long long)op->args.buf.count,
		 dtype_name(op->args.buf.dtype), word_of(op->args.buf.op));
	op->entry.print.words[2] = op->args.buf.count;
	op->entry.print.words[3] = op->args.buf.dtype;
	op->entry.print.words[4] = op->args.buf.op;
	return 0;
}

static void *address(const struct coll *c, uint32_t i)
{
	return (void *)c->inputs[i];
}

static void done(struct coll *c)
{
	coll_end(c, NULL);
}

/* The first member's buffer holds the result: to the others. */
static void spread(struct coll *c)
{
	if (!coll_need_kops(c, c->n))
		return;
	for (uint32_t i = 1; i < c->n; i++) {
		c->kops[i - 1] = (struct kop){ .kind = KOP_COPY, .n = c->ops[0]->args.buf.bytes };
		c->kops[i - 1].copy = (struct k_copy){ address(c, i), address(c, 0) };
	}
	coll_kernels(c, c->n - 1, done);
}

static void to_other_devices(struct coll *c)
{
	const struct op *op = c->ops[0];

	comm_all_reduce(c->job->node->comm, coll_comm(c, spread), address(c, 0), op->args.buf.count,
			op->args.buf.dtype, op->args.buf.op);
}

static void run(struct coll *c)
{
	const struct op *op = c->ops[0];
	struct fault f = FAULT_NULL;

	for (uint32_t i = 0; i < c->n; i++)
		c->inputs[i] = op_buffer_at(c->ops[i], c->ops[i]->args.buf.offset,
					    c->ops[i]->args.buf.bytes, &f);
	CHECK(!f.code); /* checked when announced, and nothing of the buffer since */
	if (!coll_need_kops(c, 1))
		return;
	c->kops[0] = (struct kop){ .kind = KOP_ALL_REDUCE, .n = op->args.buf.count };
	c->kops[0].all_reduce = (struct k_all_reduce){ .out = address(c, 0),
						       .in = c->inputs,
						       .k = c->n,
						       .dtype = op->args.buf.dtype,
						       .op = op->args.buf.op };
	coll_kernels(c, 1, to_other_devices);
}

static void encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__AllReduceReply reply = SHARDD__V1__ALL_REDUCE_REPLY__INIT;

	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_all_reduce = {
	.name = "AllReduce",
	.collective = true,
	.request = &shardd__v1__all_reduce_request__descriptor,
	.decode = decode,
	.check = check,
	.run = run,
	.encode = encode,
};
