/* SetReshard: when this session's rank lets go of units, from here on. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "op/op_impl.h"

static int check_units(const struct op *op, struct fault *f)
{
	for (size_t i = 0; i < op->args.policy.n; i++) {
		const struct unit *u = job_unit_by_id(op->m->job, op->args.policy.units[i]);

		if (!u)
			return fault_set(f, FAULT_NOT_FOUND, "units",
					 "there is no unit %u in job '%s': it has 1 to %u",
					 op->args.policy.units[i], op->m->job->rec->name,
					 op->m->job->n_units);
		if (!u->rec->guarded)
			return fault_set(f, FAULT_INVALID, "units",
					 "unit '%.100s' is not guarded: units with guarded are "
					 "allowed",
					 u->rec->name);
	}
	return 0;
}

static int decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__SetReshardRequest *r = (const Shardd__V1__SetReshardRequest *)msg;

	op->touches = TOUCH_PARAMS;
	op->args.policy.reshard = (uint32_t)r->reshard;
	if ((int)r->reshard < 0 || (int)r->reshard >= _RESHARD_N)
		return fault_set(f, FAULT_INVALID, "reshard",
				 "reshard is %d: AFTER_FORWARD, AFTER_BACKWARD or NEVER is allowed",
				 (int)r->reshard);
	if (!r->n_units || r->n_units > op->m->job->n_units)
		return fault_set(f, FAULT_INVALID, "units",
				 "units has %zu entries: 1 to the job's %u units are allowed",
				 r->n_units, op->m->job->n_units);
	op->args.policy.units = malloc(r->n_units * sizeof(*r->units));
	if (!op->args.policy.units)
		return fault_errno(f, -ENOMEM, "setting a policy");
	memcpy(op->args.policy.units, r->units, r->n_units * sizeof(*r->units));
	op->args.policy.n = r->n_units;
	return check_units(op, f);
}

static int check(struct op *op, struct fault *f)
{
	for (size_t i = 0; i < op->args.policy.n; i++) {
		const struct unit *u = job_unit_by_id(op->m->job, op->args.policy.units[i]);

		if (!member_unit(op->m, u))
			return fault_errno(f, -ENOMEM, "setting a policy");
	}
	return 0;
}

static void start(struct op *op)
{
	op_begin_run(op);
	for (size_t i = 0; i < op->args.policy.n; i++) {
		const struct unit *u = job_unit_by_id(op->m->job, op->args.policy.units[i]);

		member_unit_find(op->m, u)->reshard = (uint8_t)op->args.policy.reshard;
	}
	op_end(op);
}

static void forget(struct op *op)
{
	free(op->args.policy.units);
}

static void encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__SetReshardReply reply = SHARDD__V1__SET_RESHARD_REPLY__INIT;

	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_set_reshard = {
	.name = "SetReshard",
	.request = &shardd__v1__set_reshard_request__descriptor,
	.decode = decode,
	.check = check,
	.start = start,
	.encode = encode,
	.forget = forget,
};
