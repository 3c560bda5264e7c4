/*
 * ReduceSparse: rows of a tensor's gradient, of every rank in their order. Which rows comes in
 * the message and is checked there; the values are in the rank's buffer. Also what a bucket
 * of a sparse tensor is.
 */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op_ddp.h"
#include "unit/optim.h"
#include "unit/reduce_plan.h"

static uint64_t rows_of(const struct unit *u, uint32_t tensor)
{
	return u->rec->tensors[tensor]->shape[0];
}

/* Elements of a row. */
static uint64_t width_of(const struct unit *u, uint32_t tensor)
{
	const state_tensor *t = u->rec->tensors[tensor];
	uint64_t n;

	CHECK(layout_numel(t->shape, (uint32_t)t->n_shape, &n));
	return n / t->shape[0];
}

static size_t size_of(const struct unit *u)
{
	return dtype_size((enum dtype)u->rec->gradient_dtype);
}

int op_sparse_check(const struct unit *u, uint32_t tensor, const int64_t *rows, size_t n,
		    struct fault *f)
{
	const state_tensor *t = tensor < u->rec->n_tensors ? u->rec->tensors[tensor] : NULL;

	if (!t || !t->n_shape || t->n_strides || t->frozen || *t->alias_of)
		return fault_set(f, FAULT_INVALID, "tensor",
				 "unit '%.100s': tensor %u has no rows with gradients",
				 u->rec->name, tensor);
	for (size_t i = 0; i < n; i++)
		if (rows[i] < 0 || (uint64_t)rows[i] >= t->shape[0])
			return fault_set(f, FAULT_INVALID, "rows.rows",
					 "row %zu is %lld: tensor '%.64s' of unit '%.64s' has 0 to "
					 "%llu",
					 i, (long long)rows[i], t->name, u->rec->name,
					 (unsigned long long)t->shape[0] - 1);
	return 0;
}

static int decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__ReduceSparseRequest *r = (const Shardd__V1__ReduceSparseRequest *)msg;
	const Shardd__V1__SparseRows *rows = r->rows;

	op->touches = TOUCH_GRADS;
	op->args.sparse.tensor = r->tensor;
	if (op_take_unit(op, r->unit, f))
		return f->code;
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	if (op_sparse_check(op->unit, r->tensor, rows ? rows->rows : NULL, rows ? rows->n_rows : 0,
			    f))
		return f->code;
	if (!rows || !rows->n_rows)
		return 0;
	op->buffer = rows->buffer;
	op->args.sparse.rows = rows->rows;
	op->args.sparse.n = rows->n_rows;
	op->args.sparse.values_offset = rows->values_offset;
	return 0;
}

static int check_values(struct op *op, struct fault *f)
{
	uint64_t width = width_of(op->unit, op->args.sparse.tensor);
	size_t size = size_of(op->unit);

	if (op->args.sparse.values_offset % size)
		return fault_set(f, FAULT_INVALID, "rows.values_offset",
				 "values_offset is %llu: a multiple of %zu is allowed",
				 (unsigned long long)op->args.sparse.values_offset, size);
	if (op->args.sparse.n > LAYOUT_MAX_ELEMENTS / width ||
	    !op_buffer_at(op, op->args.sparse.values_offset, op->args.sparse.n * width * size, f))
		return fault_set(f, FAULT_INVALID, "rows", "values of %llu rows are too many",
				 (unsigned long long)op->args.sparse.n);
	return 0;
}

static int check(struct op *op, struct fault *f)
{
	const struct unit *u = op->unit;

	if (op_check_not_torn(op, f) || op_check_initialised(op, f))
		return f->code;
	if (op->args.sparse.n && check_values(op, f))
		return f->code;
	if (unit_pools_gradient(u->rec))
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' is stepped in backward or by the trainer: it takes "
				 "no sparse "
				 "gradients",
				 u->rec->name);
	op_print(op, "ReduceSparse of tensor '%.64s' of unit '%.64s'",
		 u->rec->tensors[op->args.sparse.tensor]->name, u->rec->name);
	op->entry.print.words[2] = op->args.sparse.tensor;
	op->entry.print.words[3] = op->args.sparse.d ? op->args.sparse.d->id : 0;
	return 0;
}

/* -------------------------------------------------------------------- running */

/* Noted at the start: if the epoch ends meanwhile, the members give their buffers back, and
 * the memory stays until we are done. */
struct work {
	struct unit_run run; /* what the device has of the tensor */
	uint64_t all;        /* rows of all ranks */
	int64_t *rows;       /* in the ranks' order, on the device */
	const void *values[];
};

static const struct op *first_of(const struct coll *c)
{
	return c->ops[0];
}

static float *at(const struct coll *c)
{
	const struct work *w = c->work;

	return optim_at(&c->unit->parts[0].grads, w->run.at);
}

/* Beside buckets a unit has a gradient as a whole: what got none is 0. */
static void has_gradient(struct unit *u, const struct op *op)
{
	if (op->args.sparse.d) {
		unit_got_gradient(u, op->args.sparse.tensor);
		return;
	}
	if (!u->has_gradient)
		u->some_lack = false;
	else if (u->lacks)
		u->lacks[op->args.sparse.tensor] = 0;
	u->has_gradient = true;
}

static void pass_on(const struct coll *c, const struct work *w)
{
	struct ddp *d = first_of(c)->args.sparse.d;
	uint32_t i = first_of(c)->args.sparse.index, k = 0;

	while (c->ops[k]->shadow)
		k++;
	d->untouched[i] = !w->all;
	op_ddp_shadows_passed(c, d, ddp_buckets_of(&d->ranks[k])->of[i]);
}

static void done(struct coll *c)
{
	const struct op *op = first_of(c);
	const struct work *w = c->work;

	if (op->args.sparse.d)
		pass_on(c, w);
	if (op->m->epoch == c->job->rec->epoch && (w->all || !op->args.sparse.d))
		has_gradient(c->unit, op);
	coll_end(c, NULL);
}

/* One rank after the other: entries of several may name the same row. */
static void add_next(struct coll *c)
{
	struct work *w = c->work;
	uint64_t width = width_of(c->unit, first_of(c)->args.sparse.tensor);
	struct reduce_setting s =
		reduce_setting_of(c->unit->rec, op_ddp_divide_by(c), REDUCE_AVERAGE_OF_GLOO);
	struct reduce_plan plan;
	const struct op *op;

	while (c->turn < c->n && !c->ops[c->turn]->args.sparse.n)
		c->turn++;
	if (c->turn == c->n) {
		done(c);
		return;
	}
	if (!coll_need_kops(c, 1))
		return;
	reduce_plan_make(&s, &plan);
	op = c->ops[c->turn];
	coll_kop(&c->parts[0], KOP_ADD_ROWS, width)->add_rows =
		(struct k_add_rows){ .out = at(c),
				     .row_elements = width,
				     .rows = w->rows,
				     .n_rows = op->args.sparse.n,
				     .values = w->values[c->turn],
				     .dtype = (enum dtype)c->unit->rec->gradient_dtype,
				     .pre = plan.pre,
				     .row_limit = rows_of(c->unit, op->args.sparse.tensor) };
	w->rows += op->args.sparse.n;
	c->turn++;
	coll_kernels(c, add_next);
}

/* What the gradients are added to, and the rows to where the device reads them. */
static void prepare(struct coll *c)
{
	const struct op *op = first_of(c);
	struct coll_part *p = &c->parts[0];
	struct work *w = c->work;
	const struct unit_part *up = &c->unit->parts[0];
	int64_t *to = w->all ? region_addr(&p->scratch[0]) : NULL;
	bool all = !op->args.sparse.d && !c->unit->has_gradient;

	if (!coll_need_kops(c, (size_t)c->n + 1))
		return;
	if (all)
		coll_kop(p, KOP_FILL, up->n)->fill =
			(struct k_fill){ .dst = optim_at(&up->grads, 0), .kind = FILL_CONSTANT };
	else if (unit_lacks_gradient(c->unit, op->args.sparse.tensor) ||
		 (op->args.sparse.d && w->all))
		coll_kop(p, KOP_FILL, w->run.n)->fill =
			(struct k_fill){ .dst = at(c), .kind = FILL_CONSTANT };
	w->rows = to;
	for (uint32_t i = 0; i < c->n; i++) {
		uint64_t n = c->ops[i]->args.sparse.n;

		if (n)
			coll_kop(p, KOP_COPY, n * sizeof(*to))->copy =
				(struct k_copy){ to, c->ops[i]->args.sparse.rows };
		to += n;
	}
	c->turn = 0;
	coll_kernels(c, add_next);
}

static int begin_work(struct coll *c, struct fault *f)
{
	struct work *w = calloc(1, sizeof(*w) + c->n * sizeof(void *));

	if (!w)
		return fault_errno(f, -ENOMEM, "ReduceSparse");
	c->work = w;
	for (uint32_t i = 0; i < c->n; i++) {
		struct op *op = c->ops[i];

		w->all += op->args.sparse.n;
		if (!op->args.sparse.n)
			continue;
		w->values[i] = op_buffer_at(op, op->args.sparse.values_offset, 0, f);
		CHECK(w->values[i]); /* checked when announced, and nothing of it since */
	}
	CHECK(unit_part_run(c->unit, &c->unit->parts[0], first_of(c)->args.sparse.tensor, &w->run));
	return 0;
}

static void start(struct parked *parked)
{
	struct coll *c = CONTAINER_OF(parked, struct coll, parked);
	struct fault f = FAULT_NULL;
	struct work *w;

	if (coll_overtaken(c, true) || !coll_ready(c, start))
		return;
	if (c->n_parts > 1)
		fault_set(&f, FAULT_STATE, NULL,
			  "ReduceSparse: group '%.64s' is on %u devices: one is allowed",
			  c->group->rec->name, c->n_parts);
	else if (!c->work)
		(void)begin_work(c, &f);
	if (f.code) {
		coll_end(c, &f);
		return;
	}
	w = c->work;
	if (w->all && !coll_need_scratch(c, 0, w->all * sizeof(int64_t), start))
		return;
	prepare(c);
}

static void run(struct coll *c)
{
	/* a prepared step still needs the gradients that this one would change */
	if (apply_ensure(c->job, &c->parked, start))
		start(&c->parked);
}

static void encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__ReduceSparseReply reply = SHARDD__V1__REDUCE_SPARSE_REPLY__INIT;

	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_sparse = {
	.name = "ReduceSparse",
	.collective = true,
	.shadowed = true,
	.request = &shardd__v1__reduce_sparse_request__descriptor,
	.decode = decode,
	.check = check,
	.run = run,
	.encode = encode,
};
