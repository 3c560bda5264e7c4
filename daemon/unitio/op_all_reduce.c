/* AllReduce: elements of each member's buffer become the same on all. Inside a device one
 * kernel in the group's order; between devices see below. */
#include "core/check.h"
#include "op/op.h"
#include "op/op_util.h"
#include "op/op_list.h"
#include "work/chain.h"
#include "work/coll.h"
#include "shardd.pb-c.h"
#include "unitio/buf_args.h"

static int op_all_reduce_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__AllReduceRequest *r = (const Shardd__V1__AllReduceRequest *)msg;
	enum dtype dtype = (enum dtype)r->dtype;
	size_t size = dtype_is_stored(dtype) ? dtype_size(dtype) : 0;

	op->buffer = r->buffer;
	buf_args(op)->offset = r->offset;
	buf_args(op)->count = r->count;
	buf_args(op)->bytes = r->count * size;
	buf_args(op)->dtype = dtype;
	buf_args(op)->op = (enum reduce_op)r->op;
	if (!size)
		return fault_set(f, FAULT_INVALID, "dtype",
				 "dtype is %d; it must be FP32, BF16 or FP16", r->dtype);
	if (buf_args(op)->op <= REDUCE_NONE || buf_args(op)->op >= _REDUCE_N)
		return fault_set(f, FAULT_INVALID, "op",
				 "op is %d; it must be SUM, AVG, MAX or MIN", r->op);
	if (!r->count || r->count > LAYOUT_MAX_ELEMENTS)
		return fault_set(f, FAULT_INVALID, "count", "count is %llu; it must be 1 to 2^48",
				 (unsigned long long)r->count);
	if (r->offset % size)
		return fault_set(f, FAULT_INVALID, "offset",
				 "offset is %llu; it must be a multiple of %zu",
				 (unsigned long long)r->offset, size);
	return op_take_group(op, r->group, f);
}

static const char *op_all_reduce_word_of(enum reduce_op op)
{
	static const char *const words[_REDUCE_N] = { [REDUCE_SUM] = "sum",
						      [REDUCE_AVG] = "avg",
						      [REDUCE_MAX] = "max",
						      [REDUCE_MIN] = "min" };

	return words[op];
}

static int op_all_reduce_check(struct op *op, struct fault *f)
{
	if (!op_buffer_at(op, buf_args(op)->offset, buf_args(op)->bytes, f))
		return f->code;
	op_print(op, "AllReduce of %llu %s (%s)", (unsigned long long)buf_args(op)->count,
		 dtype_name(buf_args(op)->dtype), op_all_reduce_word_of(buf_args(op)->op));
	op->entry.print.words[2] = buf_args(op)->count;
	op->entry.print.words[3] = buf_args(op)->dtype;
	op->entry.print.words[4] = buf_args(op)->op;
	if (buf_args(op)->op == REDUCE_SUM || buf_args(op)->op == REDUCE_AVG)
		op_print_order(op);
	return 0;
}

static void *op_all_reduce_address(const struct coll *c, uint32_t i)
{
	const struct op *op = c->ops[i];
	struct fault f = FAULT_NULL;
	void *at = op_buffer_at((struct op *)op, buf_args(op)->offset, buf_args(op)->bytes, &f);

	CHECK(at); /* the op holds it since it was checked */
	return at;
}

static struct chain *op_all_reduce_chain_of(const struct coll *c)
{
	return coll_own(c, sizeof(struct chain));
}

/* The buffer of a part's member @i, of the first one. Noted at the start: the ops hold their
 * buffers until it ends. */
static void *op_all_reduce_buffer_of(const struct coll_part *p, uint32_t i)
{
	return (void *)p->inputs[i];
}

static void *op_all_reduce_first_of(const struct coll_part *p)
{
	return op_all_reduce_buffer_of(p, 0);
}

/* The first member's buffer on each device holds the result: to the others. */
static enum res op_all_reduce_spread(struct coll *c)
{
	RES_TRY(coll_need_launches(c, c->n));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];

		for (uint32_t i = 1; i < p->n; i++)
			coll_launch(p, LAUNCH_COPY, buf_args(c->ops[0])->bytes)->copy =
				(struct k_copy){ op_all_reduce_buffer_of(p, i),
						 op_all_reduce_first_of(p) };
	}
	return coll_kernels(c);
}

static void op_all_reduce_fill_inputs(struct coll *c)
{
	for (unsigned d = 0; d < c->n_parts; d++)
		for (uint32_t i = 0; i < c->parts[d].n; i++)
			c->parts[d].inputs[i] = op_all_reduce_address(c, c->parts[d].members[i]);
}

/* -- one device: one kernel, in the group's order ----------------------------- */

static enum res op_all_reduce_between_one(struct coll *c)
{
	const struct op *op = c->ops[0];
	void *data[] = { op_all_reduce_first_of(&c->parts[0]) };

	RES_TRY(coll_can_talk(c));
	coll_all_reduce(c, data, buf_args(op)->count, buf_args(op)->dtype, buf_args(op)->op);
	return RES_WAIT;
}

static void op_all_reduce_fold(struct coll *c, struct coll_part *p)
{
	const struct op *op = c->ops[0];

	coll_launch(p, LAUNCH_ALL_REDUCE, buf_args(op)->count)->all_reduce =
		(struct k_all_reduce){ .out = op_all_reduce_first_of(p),
				       .in = p->inputs,
				       .k = p->n,
				       .dtype = buf_args(op)->dtype,
				       .op = buf_args(op)->op };
}

/* -- several devices, sum and average: fp32 sums travel, narrowed once at the end ---- */

static enum res op_all_reduce_narrow(struct coll *c)
{
	const struct op *op = c->ops[0];
	bool average = buf_args(op)->op == REDUCE_AVG;

	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];

		coll_launch(p, LAUNCH_CAST, buf_args(op)->count)->cast =
			(struct k_cast){ .dst = op_all_reduce_first_of(p),
					 .src = region_addr(&p->scratch[average]),
					 .dst_dtype = buf_args(op)->dtype,
					 .src_dtype = DTYPE_FP32 };
	}
	return coll_kernels(c);
}

static enum res op_all_reduce_divide(struct coll *c)
{
	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];

		p->inputs[p->n] = region_addr(&p->scratch[0]);
		coll_launch(p, LAUNCH_REDUCE, buf_args(c->ops[0])->count)->reduce =
			(struct k_reduce){ .out = region_addr(&p->scratch[1]),
					   .in = &p->inputs[p->n],
					   .k = 1,
					   .in_dtype = DTYPE_FP32,
					   .out_dtype = DTYPE_FP32,
					   .sum_dtype = DTYPE_FP32,
					   .post = k_divide_by((float)coll_size(c), DTYPE_FP32) };
	}
	return coll_kernels(c);
}

static const void *op_all_reduce_source(const struct chain *ch, unsigned d, uint32_t k,
					uint64_t first, uint64_t *n, struct k_factor *pre)
{
	(void)n;
	(void)pre;
	return (const char *)ch->c->parts[d].inputs[k] + first * dtype_size(ch->in_dtype);
}

static enum res op_all_reduce_add_between(struct coll *c)
{
	struct chain *ch = op_all_reduce_chain_of(c);
	void *sums[NODE_MAX_DEVICES];

	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++)
		sums[d] = region_addr(&c->parts[d].scratch[0]);
	if (chain_is_wanted(c->group)) {
		*ch = (struct chain){ .c = c,
				      .source = op_all_reduce_source,
				      .in_dtype = buf_args(c->ops[0])->dtype,
				      .sum_dtype = DTYPE_FP32 };
		chain_talk(ch, sums, buf_args(c->ops[0])->count, true);
		return RES_WAIT;
	}
	coll_all_reduce(c, sums, buf_args(c->ops[0])->count, DTYPE_FP32, REDUCE_SUM);
	return RES_WAIT;
}

static void op_all_reduce_add_inside(struct coll *c, struct coll_part *p)
{
	const struct op *op = c->ops[0];

	coll_launch(p, LAUNCH_REDUCE, buf_args(op)->count)->reduce =
		(struct k_reduce){ .out = region_addr(&p->scratch[0]),
				   .in = p->inputs,
				   .k = p->n,
				   .in_dtype = buf_args(op)->dtype,
				   .out_dtype = DTYPE_FP32,
				   .sum_dtype = DTYPE_FP32 };
}

/* -- several devices, maximum and minimum: every device folds what all of them found, so
 * that NaN and zeros of either sign come out as on one device ------------------------ */

static enum res op_all_reduce_fold_all(struct coll *c)
{
	const struct op *op = c->ops[0];

	RES_TRY(coll_need_found(c));
	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];

		for (unsigned k = 0; k < coll_devices(c); k++)
			p->found[k] = (char *)region_addr(&p->scratch[0]) + k * buf_args(op)->bytes;
		coll_launch(p, LAUNCH_ALL_REDUCE, buf_args(op)->count)->all_reduce =
			(struct k_all_reduce){ .out = op_all_reduce_first_of(p),
					       .in = p->found,
					       .k = coll_devices(c),
					       .dtype = buf_args(op)->dtype,
					       .op = buf_args(op)->op };
	}
	return coll_kernels(c);
}

static enum res op_all_reduce_show_between(struct coll *c)
{
	const void *send[NODE_MAX_DEVICES];
	void *recv[NODE_MAX_DEVICES];

	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++) {
		send[d] = op_all_reduce_first_of(&c->parts[d]);
		recv[d] = region_addr(&c->parts[d].scratch[0]);
	}
	coll_all_gather(c, send, recv, buf_args(c->ops[0])->count, buf_args(c->ops[0])->dtype);
	return RES_WAIT;
}

/* ------------------------------------------------------------------ the op */

static enum res op_all_reduce_need_scratch(struct coll *c)
{
	const struct op *op = c->ops[0];
	uint64_t sums = buf_args(op)->count * sizeof(float);

	if (coll_is_alone(c))
		return RES_DONE;
	if (buf_args(op)->op == REDUCE_MAX || buf_args(op)->op == REDUCE_MIN)
		return coll_need_scratch(c, 0, buf_args(op)->bytes * coll_devices(c));
	RES_TRY(coll_need_scratch(c, 0, sums));
	return buf_args(op)->op == REDUCE_AVG ? coll_need_scratch(c, 1, sums) : RES_DONE;
}

static enum res op_all_reduce_inside(struct coll *c, bool add)
{
	CHECK(coll_is_alone(c) || (c->group->nc && c->parts[0].scratch[0].slab));
	RES_TRY(coll_need_launches(c, 1));
	op_all_reduce_fill_inputs(c);
	for (unsigned d = 0; d < c->n_parts; d++) {
		if (!coll_is_alone(c) && add)
			op_all_reduce_add_inside(c, &c->parts[d]);
		else
			op_all_reduce_fold(c, &c->parts[d]);
	}
	return coll_kernels(c);
}

enum op_all_reduce_stage {
	ALL_REDUCE_BEGIN,
	ALL_REDUCE_BETWEEN_ONE, /* one device */
	ALL_REDUCE_ADD,         /* several: sum and average */
	ALL_REDUCE_DIVIDE,
	ALL_REDUCE_NARROW,
	ALL_REDUCE_SHOW, /* several: maximum and minimum */
	ALL_REDUCE_FOLD,
	ALL_REDUCE_SPREAD, /* all: from the first member of each device */
	ALL_REDUCE_DONE
};

static enum res op_all_reduce_tick(struct coll *c)
{
	enum reduce_op op = buf_args(c->ops[0])->op;
	bool add = op == REDUCE_SUM || op == REDUCE_AVG;

	switch ((enum op_all_reduce_stage)c->stage) {
	case ALL_REDUCE_BEGIN:
		RES_TRY(coll_check_epoch(c, false));
		RES_TRY(coll_ready(c));
		RES_TRY(op_all_reduce_need_scratch(c));
		if (add && chain_is_wanted(c->group)) {
			RES_TRY(chain_check(c));
			op_all_reduce_fill_inputs(c);
			c->stage = ALL_REDUCE_ADD;
			return op_all_reduce_tick(c);
		}
		c->stage = coll_is_alone(c) ? ALL_REDUCE_BETWEEN_ONE
			   : add            ? ALL_REDUCE_ADD
					    : ALL_REDUCE_SHOW;
		return op_all_reduce_inside(c, add);
	case ALL_REDUCE_BETWEEN_ONE:
		c->stage = ALL_REDUCE_SPREAD;
		return op_all_reduce_between_one(c);
	case ALL_REDUCE_ADD:
		c->stage = op == REDUCE_AVG ? ALL_REDUCE_DIVIDE : ALL_REDUCE_NARROW;
		return op_all_reduce_add_between(c);
	case ALL_REDUCE_DIVIDE:
		c->stage = ALL_REDUCE_NARROW;
		return op_all_reduce_divide(c);
	case ALL_REDUCE_NARROW:
		c->stage = ALL_REDUCE_SPREAD;
		return op_all_reduce_narrow(c);
	case ALL_REDUCE_SHOW:
		c->stage = ALL_REDUCE_FOLD;
		return op_all_reduce_show_between(c);
	case ALL_REDUCE_FOLD:
		c->stage = ALL_REDUCE_SPREAD;
		return op_all_reduce_fold_all(c);
	case ALL_REDUCE_SPREAD:
		c->stage = ALL_REDUCE_DONE;
		return op_all_reduce_spread(c);
	case ALL_REDUCE_DONE:
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

const struct op_type op_all_reduce = {
	.name = "AllReduce",
	.collective = true,
	.request = &shardd__v1__all_reduce_request__descriptor,
	.decode = op_all_reduce_decode,
	.check = op_all_reduce_check,
	.coll_tick = op_all_reduce_tick,
	.coll_bytes = sizeof(struct chain),
	.reply = &shardd__v1__all_reduce_response__descriptor,
	.reads_inputs = true,
};
