/* A pass of a ddp: DdpBackward begins it, DdpReady says which gradients are there, DdpFinish
 * waits for the buckets. What they do depends on their order in the session alone, so it is
 * done when they get their turn. */
#include <stdlib.h>

#include "core/check.h"
#include "ddp/op_ddp.h"
#include "op/op_list.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "reduce/sparse.h"
#include "shardd.pb-c.h"

int op_ddp_take(struct op *op, uint32_t id, struct fault *f)
{
	struct member *m = op->m;
	struct ddp *d = ddp_by_id(m->job, id, m->epoch);
	struct ddp_rank *rank = d ? ddp_rank_of(d, m->rank) : NULL;

	if (!d)
		return fault_set(f, FAULT_NOT_FOUND, "ddp",
				 "there is no ddp %u in this epoch of job '%s'", id,
				 m->job->rec->name);
	if (!rank)
		return fault_set(f, FAULT_INVALID, "ddp", "rank %u is no member of ddp %u", m->rank,
				 id);
	ddp_args(op)->d = d;
	ddp_args(op)->rank = rank;
	return 0;
}

static int op_ddp_pass_check_list(const struct op *op, const uint32_t *list, size_t n,
				  const char *field, struct fault *f)
{
	const struct ddp *d = ddp_args(op)->d;

	for (size_t i = 0; i < n; i++)
		if (list[i] >= d->n)
			return fault_set(
				f, FAULT_INVALID, field,
				"%s names tensor %u of ddp %u, which is out of range (0..%u)",
				field, list[i], d->id, d->n - 1);
	return 0;
}

void op_ddp_follow(struct op *op)
{
	op->buffer = ddp_args(op)->rank->buffer;
	op->touches |= TOUCH_GRADS | (ddp_args(op)->d->in_backward ? TOUCH_PARAMS : 0);
}

static int op_ddp_pass_check(struct op *op, struct fault *f)
{
	return op_check_not_torn(op, f);
}

static enum res op_ddp_pass_end_now(struct op *op)
{
	op_begin_run(op);
	return RES_DONE;
}

/* -------------------------------------------------------------- DdpBackward */

static int op_ddp_pass_backward_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__DdpBackwardRequest *r = (const Shardd__V1__DdpBackwardRequest *)msg;

	ddp_args(op)->first = r->unused;
	ddp_args(op)->n_first = r->n_unused;
	ddp_args(op)->second = r->unused_kept;
	ddp_args(op)->n_second = r->n_unused_kept;
	if (op_ddp_take(op, r->ddp, f) ||
	    op_ddp_pass_check_list(op, r->unused, r->n_unused, "unused", f))
		return f->code;
	return op_ddp_pass_check_list(op, r->unused_kept, r->n_unused_kept, "unused_kept", f);
}

static void op_ddp_pass_backward_enter(struct op *op)
{
	struct ddp_rank *rank = ddp_args(op)->rank;

	if (ddp_backward(rank, ddp_args(op)->first, ddp_args(op)->n_first, ddp_args(op)->second,
			 ddp_args(op)->n_second, &op->fault) == 0 &&
	    ddp_wait(rank, op->after, op->n_after, &op->fault) == 0)
		op_ddp_launch(op); /* a bucket of nothing but unused tensors */
}

const struct op_type op_ddp_backward = {
	.name = "DdpBackward",
	.request = &shardd__v1__ddp_backward_request__descriptor,
	.decode = op_ddp_pass_backward_decode,
	.enter = op_ddp_pass_backward_enter,
	.check = op_ddp_pass_check,
	.tick = op_ddp_pass_end_now,
	.reply = &shardd__v1__ddp_backward_response__descriptor,
};

/* ----------------------------------------------------------------- DdpReady */

/* They are needed until the bucket is launched, when the request may be gone. */
static int op_ddp_pass_take_rows(struct op *op, const Shardd__V1__DdpReadyRequest *r,
				 struct fault *f)
{
	const Shardd__V1__SparseRows *rows = r->rows;
	const struct ddp_tensor *t = &ddp_args(op)->d->tensors[r->n_tensors ? r->tensors[0] : 0];

	if (r->n_tensors != 1)
		return fault_set(
			f, FAULT_INVALID, "rows",
			"rows are given with %zu tensors; give rows with exactly one tensor",
			r->n_tensors);
	if (op_sparse_check_rows(t->unit, t->tensor, rows->rows, rows->n_rows, f) ||
	    ddp_rows_copy(op->m->job, rows->rows, rows->n_rows, &ddp_args(op)->rows, f))
		return f->code;
	ddp_args(op)->rows.buffer = rows->buffer;
	ddp_args(op)->rows.values_offset = rows->values_offset;
	ddp_args(op)->has_rows = true;
	return 0;
}

static int op_ddp_pass_check_rows(struct op *op, const Shardd__V1__DdpReadyRequest *r,
				  struct fault *f)
{
	const struct ddp *d = ddp_args(op)->d;
	char name[140];

	for (size_t i = 0; i < r->n_tensors; i++) {
		uint32_t t = r->tensors[i];

		if (d->tensors[t].sparse && (!r->rows || r->n_tensors != 1))
			return fault_set(f, FAULT_INVALID, "rows",
					 "tensor '%s' has a sparse gradient: name it alone and "
					 "give its rows",
					 ddp_tensor_name(d, t, name, sizeof(name)));
		if (r->rows && !d->tensors[t].sparse)
			return fault_set(f, FAULT_INVALID, "rows",
					 "tensor '%s' has no sparse gradient: rows must be absent",
					 ddp_tensor_name(d, t, name, sizeof(name)));
	}
	return r->rows ? op_ddp_pass_take_rows(op, r, f) : 0;
}

static int op_ddp_pass_ready_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__DdpReadyRequest *r = (const Shardd__V1__DdpReadyRequest *)msg;

	ddp_args(op)->first = r->tensors;
	ddp_args(op)->n_first = r->n_tensors;
	if (op_ddp_take(op, r->ddp, f) ||
	    op_ddp_pass_check_list(op, r->tensors, r->n_tensors, "tensors", f))
		return f->code;
	return op_ddp_pass_check_rows(op, r, f);
}

static void op_ddp_pass_ready_enter(struct op *op)
{
	struct ddp_rank *rank = ddp_args(op)->rank;

	/* streams first: what cannot be waited for is not ready */
	if (ddp_wait(rank, op->after, op->n_after, &op->fault) == 0 &&
	    ddp_ready(rank, ddp_args(op)->first, ddp_args(op)->n_first,
		      ddp_args(op)->has_rows ? &ddp_args(op)->rows : NULL, &op->fault) == 0)
		op_ddp_launch(op);
}

static void op_ddp_pass_ready_leave(struct op *op)
{
	if (ddp_args(op)->has_rows)
		ddp_rows_deinit(op->m->job, &ddp_args(op)->rows); /* unless they were taken */
}

const struct op_type op_ddp_ready = {
	.name = "DdpReady",
	.request = &shardd__v1__ddp_ready_request__descriptor,
	.decode = op_ddp_pass_ready_decode,
	.enter = op_ddp_pass_ready_enter,
	.leave = op_ddp_pass_ready_leave,
	.check = op_ddp_pass_check,
	.tick = op_ddp_pass_end_now,
	.reply = &shardd__v1__ddp_ready_response__descriptor,
};

/* ---------------------------------------------------------------- DdpFinish */

static int op_ddp_pass_finish_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__DdpFinishRequest *r = (const Shardd__V1__DdpFinishRequest *)msg;
	const struct ddp *d;

	if (op_ddp_take(op, r->ddp, f))
		return f->code;
	d = ddp_args(op)->d;
	if (r->untouched_room && r->untouched_room < d->n)
		return fault_set(f, FAULT_INVALID, "untouched_room",
				 "there is room to mark %u tensors, but ddp %u has %u",
				 r->untouched_room, r->ddp, d->n);
	return 0;
}

static void op_ddp_pass_finish_enter(struct op *op)
{
	struct ddp_rank *rank = ddp_args(op)->rank;

	if (ddp_finish(rank, &op->fault) || ddp_wait(rank, op->after, op->n_after, &op->fault))
		return;
	ddp_end_first_static(rank);
	op_ddp_launch(op);
	rank->open = false;
	rank->finishing = true;
	rank->passes++;
	ddp_args(op)->holds = true;
	op_ddp_follow(op);
}

static void op_ddp_pass_finish_leave(struct op *op)
{
	if (!ddp_args(op)->holds)
		return;
	CHECK(ddp_args(op)->rank->finishing);
	ddp_args(op)->rank->finishing = false;
}

/* Its buckets are ordered by now; without a stream they must have been executed. */
static enum res op_ddp_pass_finish_start(struct op *op)
{
	struct ddp_rank *rank = ddp_args(op)->rank;

	CHECK(!rank->under_way); /* they come before it */
	RES_TRY(op_wait_for_memory(op));
	op_begin_run(op);
	if (rank->fault.code) {
		op->fault = rank->fault;
		CHECK(rank->passes > 0);
		rank->passes--; /* perhaps its alone: no reason for new buckets */
	}
	if (op->m->executing)
		op->result.ready = op->m->ready;
	return op->fault.code ? RES_FAILED : RES_DONE;
}

static void op_ddp_pass_finish_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__DdpFinishResponse reply = SHARDD__V1__DDP_FINISH_RESPONSE__INIT;
	const struct ddp *d = ddp_args(op)->d;

	reply.untouched = d->untouched_of;
	for (uint32_t i = 0; i < d->n; i++)
		if (d->untouched[i])
			reply.untouched[reply.n_untouched++] = i;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_ddp_finish = {
	.name = "DdpFinish",
	.request = &shardd__v1__ddp_finish_request__descriptor,
	.decode = op_ddp_pass_finish_decode,
	.enter = op_ddp_pass_finish_enter,
	.leave = op_ddp_pass_finish_leave,
	.check = op_ddp_pass_check,
	.tick = op_ddp_pass_finish_start,
	.encode = op_ddp_pass_finish_encode,
};
