#include "op/guard.h"

#include <errno.h>

#include "op/table.h"

/* ------------------------------------------------------------------- checks */

static bool is_pass(const struct op *op)
{
	return op->type == &op_begin_pass || op->type == &op_end_pass;
}

static const char *pass_of(const struct op *op)
{
	if (!is_pass(op))
		return "";
	return op->args.pass.kind == PASS_KIND_FORWARD ? "(FORWARD)" : "(BACKWARD)";
}

static int refuse(const struct op *op, enum pass_move move, const struct unit *u, enum pass_state s,
		  struct fault *f)
{
	char allowed[160];

	passes_allowed(move, allowed, sizeof(allowed));
	return fault_set(f, FAULT_STATE, NULL,
			 "%s%s: unit '%.100s' is in state %s on rank %u: %s is allowed",
			 op->type->name, pass_of(op), u->rec->name, pass_state_name(s), op->m->rank,
			 allowed);
}

static int check_unit(const struct op *op, struct fault *f)
{
	struct unit *u = op->unit;
	struct member_unit *mu;
	enum pass_state to;

	if (!u->rec->guarded && is_pass(op))
		return fault_set(f, FAULT_STATE, NULL,
				 "%s: unit '%.100s' is not guarded: gather and release it, or "
				 "register it with guarded",
				 op->type->name, u->rec->name);
	if (!u->rec->guarded)
		return 0;
	mu = member_unit(op->m, u);
	if (!mu)
		return fault_errno(f, -ENOMEM, "entering a pass");
	return passes_move(mu->pass, op->move, &to) ? 0 : refuse(op, op->move, u, mu->pass, f);
}

static int check_all(const struct op *op, struct fault *f)
{
	struct member *m = op->m;

	for (uint32_t i = 0; m->in_pass && i < m->n_units; i++)
		if (m->units[i].pass != PASS_IDLE)
			return refuse(op, op->move, m->job->units[i], m->units[i].pass, f);
	return 0;
}

/* --------------------------------------------------------------- letting go */

enum unit_reshard guard_reshard(const struct op *op)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);

	return (enum unit_reshard)(mu && mu->reshard ? mu->reshard : op->unit->rec->reshard);
}

/* Is another rank still to come to where this one has been, or is this unit what comes next? */
static bool is_wanted(const struct job *job, const struct unit *u, uint32_t uses)
{
	const struct group *g = job->groups[u->rec->group];

	for (uint32_t i = 0; i < group_size(g); i++) {
		struct member *m = job->ranks[g->rec->ranks[i]];
		const struct member_unit *mu = m ? member_unit_find(m, u) : NULL;

		if (m && m->state == MEMBER_JOINED && (!mu || mu->uses < uses || mu->expected))
			return true;
	}
	return false;
}

void guard_let_go(struct member *m, struct unit *u)
{
	struct member_unit *mu = member_unit_find(m, u);

	if (!mu || !mu->held)
		return;
	mu->held = false;
	mu->uses++;
	u->drop = !is_wanted(m->job, u, mu->uses);
	member_released(m, u, mu);
	backward_released(m->job, u);
}

void guard_drop(struct job *job, struct unit *u)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++) {
		struct member *m = job->ranks[r];
		struct member_unit *mu = m ? member_unit_find(m, u) : NULL;

		if (!mu)
			continue;
		mu->expected = false; /* of these parameters */
		if (mu->pass == PASS_IDLE)
			guard_let_go(m, u);
		mu->uses = 0;
	}
}

void guard_step(struct job *job, uint32_t group)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		if (job->units[i]->rec->guarded && job->units[i]->rec->group == group)
			guard_drop(job, job->units[i]);
}

/* -------------------------------------------------------------------- the op */

/* The trainer has computed what it hands over: it needs the parameters no more. */
static int end_use(struct op *op, bool sync, struct fault *f)
{
	if (!op->unit->rec->guarded ||
	    !passes_let_go(op->unit->rec, guard_reshard(op), PASS_KIND_BACKWARD, sync))
		return 0;
	if (op_note_reads(op) < 0)
		return fault_errno(f, -ENOMEM, "noting how long a unit is read");
	guard_let_go(op->m, op->unit);
	return 0;
}

int guard_check(struct op *op, struct fault *f)
{
	if (op->move == MOVE_NONE)
		return 0;
	return op->unit ? check_unit(op, f) : check_all(op, f);
}

int guard_refuse(const struct op *op, enum pass_move move, struct fault *f)
{
	return refuse(op, move, op->unit, member_unit_find(op->m, op->unit)->pass, f);
}

int guard_begin(struct op *op, struct fault *f)
{
	if (op->move == MOVE_BEGIN_BACKWARD)
		member_unit_find(op->m, op->unit)->ddp_passes =
			ddp_unit_passes(op->m->job, op->unit, op->m->rank);
	if (op->move == MOVE_REDUCE || op->move == MOVE_ACCUMULATE)
		return end_use(op, op->move == MOVE_REDUCE, f);
	return 0;
}

/* A rank that was lost meanwhile is in no pass any more. */
void guard_done(struct op *op)
{
	struct member *m = op->m;
	struct member_unit *mu;
	enum pass_state to;

	if (op->type == &op_step || op->type == &op_commit)
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
	m->in_pass += (to != PASS_IDLE) - (mu->pass != PASS_IDLE);
	mu->pass = to;
}
