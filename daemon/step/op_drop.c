/*
 * DropGradients: tensors of a unit lose their reduced gradient. It becomes zeros, so that clipping
 * and a further Reduce do not count it, and the step skips the tensors as if no rank had used them.
 */
#include <errno.h>
#include <string.h>

#include "core/check.h"
#include "core/fnv.h"
#include "op/op.h"
#include "op/op_list.h"
#include "op/op_util.h"
#include "step/apply.h"
#include "unit/optim.h"
#include "unit/runs.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

struct drop_args {
	const uint32_t *tensors; /* the request's; valid until done */
	size_t n;
};

static inline struct drop_args *drop_args(const struct op *op)
{
	_Static_assert(sizeof(struct drop_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

static int op_drop_check_tensor(const struct op *op, size_t i, struct fault *f)
{
	const state_unit *rec = op->unit->rec;
	const uint32_t *tensors = drop_args(op)->tensors;

	if (tensors[i] >= rec->n_tensors)
		return fault_set(f, FAULT_INVALID, "tensors",
				 "tensor %u of unit '%.100s' is out of range (0..%zu)", tensors[i],
				 rec->name, rec->n_tensors - 1);
	if (!unit_trains(op->unit, tensors[i]))
		return fault_set(f, FAULT_INVALID, "tensors",
				 "tensor '%.100s' of unit '%.100s' is not trained: list trained "
				 "tensors only",
				 rec->tensors[tensors[i]]->name, rec->name);
	if (i && tensors[i] <= tensors[i - 1])
		return fault_set(f, FAULT_INVALID, "tensors",
				 "tensors has %u after %u; its numbers must ascend", tensors[i],
				 tensors[i - 1]);
	return 0;
}

static int op_drop_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__DropGradientsRequest *r = (const Shardd__V1__DropGradientsRequest *)msg;

	op->touches = TOUCH_GRADS;
	drop_args(op)->tensors = r->tensors;
	drop_args(op)->n = r->n_tensors;
	if (op_take_unit(op, r->unit, f))
		return f->code;
	op->group = job_group_by_id(op->m->job, op->unit->rec->group);
	if (!r->n_tensors)
		return fault_set(f, FAULT_INVALID, "tensors",
				 "tensors is empty; name at least one tensor");
	for (size_t i = 0; i < r->n_tensors; i++)
		if (op_drop_check_tensor(op, i, f))
			return f->code;
	return 0;
}

static int op_drop_check(struct op *op, struct fault *f)
{
	uint64_t hash = FNV_BEGIN;

	if (op_check_not_torn(op, f))
		return f->code;
	for (size_t i = 0; i < drop_args(op)->n; i++)
		hash = fnv_add(hash, drop_args(op)->tensors[i]);
	op_print(op, "DropGradients of %zu tensors of unit '%.64s'", drop_args(op)->n,
		 op->unit->rec->name);
	op->entry.print.words[2] = hash;
	return 0;
}

static int op_drop_check_gradient(const struct unit *u, struct fault *f)
{
	if (!u->has_gradient || u->step != UNIT_STEP_NONE)
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' has no reduced gradient to drop: reduce it first, "
				 "with an optimizer that steps later",
				 u->rec->name);
	if (u->shards_left)
		return fault_set(f, FAULT_STATE, NULL,
				 "the gradient of unit '%.100s' is with the trainers: its last "
				 "Reduce is over",
				 u->rec->name);
	return 0;
}

static void op_drop_zero_part(struct coll *c, unsigned d)
{
	const struct drop_args *a = drop_args(c->ops[0]);
	const struct unit_part *p = &c->unit->parts[d];
	struct unit_run run;

	CHECK(p->device == c->parts[d].device);
	for (size_t i = 0; i < a->n; i++)
		if (unit_part_run(c->unit, p, a->tensors[i], &run) && run.n)
			coll_launch(&c->parts[d], LAUNCH_FILL, run.n)->fill =
				(struct k_fill){ .dst = optim_at(&p->grads, run.at),
						 .kind = FILL_CONSTANT };
}

static enum res op_drop_zero(struct coll *c)
{
	RES_TRY(coll_need_launches(c, drop_args(c->ops[0])->n));
	if (unit_track_gradients(c->unit) < 0)
		return coll_fail(c, -ENOMEM);
	for (unsigned d = 0; d < c->n_parts; d++)
		op_drop_zero_part(c, d);
	return coll_kernels(c);
}

static void op_drop_note(struct coll *c)
{
	const struct drop_args *a = drop_args(c->ops[0]);
	struct unit *u = c->unit;

	CHECK(u->lacks);
	if (!u->has_gradient) /* an epoch has ended meanwhile */
		return;
	if (!u->some_lack)
		memset(u->lacks, 0, u->rec->n_tensors);
	u->some_lack = true;
	for (size_t i = 0; i < a->n; i++)
		u->lacks[a->tensors[i]] = 1;
}

enum op_drop_stage { DROP_APPLY, DROP_ZERO, DROP_NOTE };

static enum res op_drop_tick(struct coll *c)
{
	switch ((enum op_drop_stage)c->stage) {
	case DROP_APPLY:
		c->stage = DROP_ZERO;
		RES_TRY(apply_wait(c->job, &c->waiter));
		fallthrough;
	case DROP_ZERO:
		RES_TRY(coll_check_epoch(c, true));
		if (op_drop_check_gradient(c->unit, c->fault))
			return RES_FAILED;
		c->stage = DROP_NOTE;
		return op_drop_zero(c);
	case DROP_NOTE:
		op_drop_note(c);
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

const struct op_type op_drop = {
	.name = "DropGradients",
	.collective = true,
	.request = &shardd__v1__drop_gradients_request__descriptor,
	.decode = op_drop_decode,
	.check = op_drop_check,
	.coll_tick = op_drop_tick,
	.reply = &shardd__v1__drop_gradients_response__descriptor,
	.move = MOVE_NEEDS_IDLE,
};
