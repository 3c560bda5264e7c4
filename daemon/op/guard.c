#include "op/guard.h"

#include <errno.h>

#include "core/check.h"
#include "job/base.h"
#include "op/op.h"

/* ------------------------------------------------------------------- checks */

int guard_check_there(const struct op *op, const struct unit *u, struct fault *f)
{
	if (!u->rec->dropped)
		return 0;
	return fault_set(f, FAULT_NOT_FOUND, "unit",
			 "there is no unit %u in job '%s': it was '%.100s', which was dropped "
			 "(DropUnits)",
			 u->id, op->m->job->rec->name, u->rec->name);
}

static int guard_refuse_move(const struct op *op, enum pass_move move, const struct unit *u,
			     enum pass_state s, struct fault *f)
{
	char allowed[160];

	passes_allowed(move, allowed, sizeof(allowed));
	return fault_set(f, FAULT_STATE, NULL,
			 "%s%s: unit '%.100s' is in state %s on rank %u; it must be %s",
			 op->type->name, op->type->detail ? op->type->detail(op) : "", u->rec->name,
			 pass_state_name(s), op->m->rank, allowed);
}

static int guard_check_unit(const struct op *op, struct fault *f)
{
	struct unit *u = op->unit;
	struct member_unit *mu;
	enum pass_state to;

	if (!u->rec->guarded && op->type->is_pass)
		return fault_set(f, FAULT_STATE, NULL,
				 "%s: unit '%.100s' is not guarded: gather and release it, or "
				 "register it with guarded",
				 op->type->name, u->rec->name);
	if (!u->rec->guarded)
		return 0;
	mu = member_unit(op->m, u);
	if (!mu)
		return fault_errno(f, -ENOMEM, "entering a pass");
	return passes_move(mu->pass, op->move, &to)
		       ? 0
		       : guard_refuse_move(op, op->move, u, mu->pass, f);
}

static int guard_check_all(const struct op *op, struct fault *f)
{
	struct member *m = op->m;

	for (uint32_t i = 0; m->now.in_pass && i < m->n_units; i++)
		if (m->units[i].pass != PASS_IDLE)
			return guard_refuse_move(op, op->move, m->job->units[i], m->units[i].pass,
						 f);
	return 0;
}

/* -------------------------------------------------------------------- the op */

int guard_check(struct op *op, struct fault *f)
{
	if (op->unit && guard_check_there(op, op->unit, f))
		return f->code;
	if (op->type->waits_for_readers && base_check_change(op->m->job, "nothing may write it", f))
		return f->code;
	if (op->move == MOVE_NONE)
		return 0;
	return op->unit ? guard_check_unit(op, f) : guard_check_all(op, f);
}

int guard_refuse(const struct op *op, enum pass_move move, struct fault *f)
{
	return guard_refuse_move(op, move, op->unit, member_unit_find(op->m, op->unit)->pass, f);
}

/* A rank that was lost meanwhile is in no pass any more. */
void guard_done(struct op *op)
{
	struct member *m = op->m;
	struct member_unit *mu;
	enum pass_state to;

	if (op->type->ends_step)
		prefetch_step(&m->ahead.learned);
	if (op->move == MOVE_NONE || !op->unit || !op->unit->rec->guarded ||
	    m->state != MEMBER_JOINED)
		return;
	mu = member_unit_find(m, op->unit);
	if (!mu || !passes_move(mu->pass, op->move, &to))
		return;
	if (op->move == MOVE_ACCUMULATE)
		mu->added = true;
	else if (op->move == MOVE_REDUCE || op->move == MOVE_BEGIN_BACKWARD)
		mu->added = false;
	CHECK(mu->pass == PASS_IDLE || m->now.in_pass > 0);
	m->now.in_pass += (to != PASS_IDLE) - (mu->pass != PASS_IDLE);
	mu->pass = to;
}
