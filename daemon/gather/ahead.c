#include "gather/ahead.h"

#include "copies/full.h"
#include "core/check.h"
#include "op/op.h"
#include "gather/gather.h"
#include "gather/turn.h"

/* Whose parameters may be read now, by nobody's wish? */
static bool ahead_is_possible(const struct member *m, const struct unit *u)
{
	const struct job *job = m->job;
	uint32_t index;

	return u->rec->initialised && !u->summoned_ranks && u->step != UNIT_STEP_DUE &&
	       u->step != UNIT_STEP_STEPPING && !u->shards_left && !u->shard_writes && !u->torn &&
	       !job->life.torn && job->step.state == JOB_STEP_NONE &&
	       list_empty(&job->copies.drains) &&
	       group_index(job->groups[u->rec->group], m->rank, &index);
}

/* Those that somebody waits for come first. */
static bool ahead_is_room(const struct job *job)
{
	return full_may_begin(job) && list_empty(&job->copies.turns);
}

static void ahead_begin(const struct op *op, struct unit *u)
{
	struct member *m = op->m;
	struct member_unit *mu = member_unit(m, u);
	struct fault f = FAULT_NULL;

	CHECK(u->rec->group < m->job->n_groups);
	if (!mu || unit_is_direct(u) || !ahead_is_possible(m, u))
		return;
	mu->expected = true;
	if (unit_is_copying(u) || full_valid(u))
		return;
	if (turn_is_needed(m->job, u)) {
		turn_want(m->job, u);
		m->ahead.started++;
		return;
	}
	if (ahead_is_room(m->job) && full_begin(m->job, u, op->deadline_us, NULL, &f) == RES_DONE)
		m->ahead.started++;
	else
		m->ahead.skipped++;
}

static prefetch_use ahead_use_of(const struct op *op)
{
	return prefetch_use_of(op->unit->id, pass_args(op)->kind);
}

void ahead_asked(struct op *op)
{
	const struct unit *u = op->unit;
	const struct member_unit *mu = member_unit_find(op->m, u);

	CHECK(op->state == OP_BLOCKED); /* before its copy is looked for or begun */
	if (pass_args(op)->asked)
		return;
	pass_args(op)->asked = true;
	pass_args(op)->there = u->copy == UNIT_COPY_CASTING || full_valid(u) || (mu && mu->held);
}

/* It may have been dropped since the list was made. */
static void ahead_begin_unit(const struct op *op, uint32_t id)
{
	struct unit *u = job_unit_by_id(op->m->job, id);

	if (u)
		ahead_begin(op, u);
}

/* A step of which the order is known, or is given: was this what should have been begun? */
static void ahead_count(struct op *op, struct member_unit *mu, bool known)
{
	struct member_ahead *a = &op->m->ahead;

	if (mu->expected && pass_args(op)->there)
		a->hits++;
	else if (mu->expected || (known && !pass_args(op)->there))
		a->misses++;
	mu->expected = false;
}

void ahead_used(struct op *op)
{
	struct member_ahead *a = &op->m->ahead;
	struct member_unit *mu = member_unit_find(op->m, op->unit);
	const struct member_list *list = NULL;
	bool known = a->lists || a->learned.mode == PREFETCH_FOLLOWING;

	CHECK(mu && mu->gathers > 0); /* it has just been given the copy */
	if (pass_args(op)->kind)
		list = mu->ahead[pass_args(op)->kind == PASS_KIND_BACKWARD];
	if (!unit_is_direct(op->unit)) {
		ahead_count(op, mu, known);
		(void)prefetch_used(&a->learned, ahead_use_of(op));
	}
	for (uint32_t i = 0; list && i < list->n; i++)
		ahead_begin_unit(op, list->units[i]);
	ahead_next(op);
}

void ahead_next(const struct op *op)
{
	const struct member_ahead *a = &op->m->ahead;
	prefetch_use next = a->lists ? 0 : prefetch_next(&a->learned);

	if (next)
		ahead_begin_unit(op, prefetch_unit(next));
}
