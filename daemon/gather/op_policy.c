/*
 * SetReshard: when this session's rank lets go of units, from here on. SetPrefetch: what it
 * begins to gather as soon as it has a unit.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "op/op_list.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "shardd.pb-c.h"

struct policy_args {
	uint32_t *units; /* owned */
	size_t n;
	uint32_t reshard;
	enum pass_kind kind;
};

static inline struct policy_args *policy_args(const struct op *op)
{
	_Static_assert(sizeof(struct policy_args) <= OP_ARGS_BYTES, "room in struct op");
	return op_args(op);
}

static struct unit *op_policy_unit_at(const struct op *op, size_t i)
{
	return job_unit_by_id(op->m->job, policy_args(op)->units[i]);
}

static int op_policy_not_guarded(const struct unit *u, const char *field, struct fault *f)
{
	return fault_set(f, FAULT_INVALID, field,
			 "unit '%.100s' is not guarded: register it with guarded", u->rec->name);
}

/* The request's units, all of which must be there. */
static int op_policy_take_units(struct op *op, const uint32_t *units, size_t n, struct fault *f)
{
	policy_args(op)->units = malloc(n * sizeof(*units));
	if (!policy_args(op)->units)
		return fault_errno(f, -ENOMEM, "setting a policy");
	memcpy(policy_args(op)->units, units, n * sizeof(*units));
	policy_args(op)->n = n;
	for (size_t i = 0; i < n; i++)
		if (!op_policy_unit_at(op, i))
			return fault_set(f, FAULT_NOT_FOUND, "units",
					 "there is no unit %u in job '%s': its units are 1 to %u",
					 units[i], op->m->job->rec->name, op->m->job->n_units);
	return 0;
}

static void op_policy_forget(struct op *op)
{
	free(policy_args(op)->units);
}

/* ----------------------------------------------------------------- SetReshard */

static int op_policy_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__SetReshardRequest *r = (const Shardd__V1__SetReshardRequest *)msg;

	op->touches = TOUCH_PARAMS;
	policy_args(op)->reshard = (uint32_t)r->reshard;
	if ((int)r->reshard < 0 || (int)r->reshard >= _RESHARD_N)
		return fault_set(
			f, FAULT_INVALID, "reshard",
			"reshard is %d; it must be AFTER_FORWARD, AFTER_BACKWARD, NEVER or "
			"AFTER_FORWARD_ONLY",
			(int)r->reshard);
	if (!r->n_units || r->n_units > op->m->job->n_units)
		return fault_set(f, FAULT_INVALID, "units",
				 "units has %zu entries; it must have 1 to the job's %u",
				 r->n_units, op->m->job->n_units);
	if (op_policy_take_units(op, r->units, r->n_units, f))
		return f->code;
	for (size_t i = 0; i < r->n_units; i++)
		if (!op_policy_unit_at(op, i)->rec->guarded)
			return op_policy_not_guarded(op_policy_unit_at(op, i), "units", f);
	return 0;
}

static int op_policy_check(struct op *op, struct fault *f)
{
	if (op_check_all_there(op, policy_args(op)->units, policy_args(op)->n, f))
		return f->code;
	for (size_t i = 0; i < policy_args(op)->n; i++)
		if (!member_unit(op->m, op_policy_unit_at(op, i)))
			return fault_errno(f, -ENOMEM, "setting a policy");
	return 0;
}

static enum res op_policy_start(struct op *op)
{
	op_begin_run(op);
	for (size_t i = 0; i < policy_args(op)->n; i++) {
		struct member_unit *mu = member_unit_find(op->m, op_policy_unit_at(op, i));

		CHECK(mu); /* made by the check */
		mu->reshard = (uint8_t)policy_args(op)->reshard;
	}
	return RES_DONE;
}

const struct op_type op_set_reshard = {
	.name = "SetReshard",
	.request = &shardd__v1__set_reshard_request__descriptor,
	.decode = op_policy_decode,
	.check = op_policy_check,
	.tick = op_policy_start,
	.reply = &shardd__v1__set_reshard_response__descriptor,
	.forget = op_policy_forget,
};

/* ---------------------------------------------------------------- SetPrefetch */

static int op_policy_decode_prefetch(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__SetPrefetchRequest *r = (const Shardd__V1__SetPrefetchRequest *)msg;

	op->touches = TOUCH_PARAMS;
	policy_args(op)->kind = (enum pass_kind)r->pass;
	if ((int)r->pass != PASS_KIND_FORWARD && (int)r->pass != PASS_KIND_BACKWARD)
		return fault_set(f, FAULT_INVALID, "pass",
				 "pass is %d; it must be FORWARD or BACKWARD", (int)r->pass);
	if (op_take_unit(op, r->unit, f))
		return f->code;
	if (!op->unit->rec->guarded)
		return op_policy_not_guarded(op->unit, "unit", f);
	if (r->n_units > MEMBER_MAX_AHEAD)
		return fault_set(f, FAULT_INVALID, "units",
				 "units has %zu entries; the maximum is %u", r->n_units,
				 MEMBER_MAX_AHEAD);
	return r->n_units ? op_policy_take_units(op, r->units, r->n_units, f) : 0;
}

static enum res op_policy_start_prefetch(struct op *op)
{
	struct member_unit *mu = member_unit(op->m, op->unit);
	int r = -ENOMEM;

	op_begin_run(op);
	if (mu)
		r = member_set_ahead(op->m, mu, policy_args(op)->kind == PASS_KIND_BACKWARD,
				     policy_args(op)->units, (uint32_t)policy_args(op)->n);
	if (r)
		op_memory_fault(op->m->job, r == QUOTA_E_LIMIT ? SLAB_E_QUOTA : r,
				sizeof(struct member_list), "a list of units", &op->fault);
	return r ? RES_FAILED : RES_DONE;
}

const struct op_type op_set_prefetch = {
	.name = "SetPrefetch",
	.request = &shardd__v1__set_prefetch_request__descriptor,
	.decode = op_policy_decode_prefetch,
	.tick = op_policy_start_prefetch,
	.reply = &shardd__v1__set_prefetch_response__descriptor,
	.forget = op_policy_forget,
};
