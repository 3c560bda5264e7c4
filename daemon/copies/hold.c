#include "copies/hold.h"

#include <errno.h>

#include "core/check.h"
#include "op/op.h"

enum unit_reshard hold_reshard(const struct op *op)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);

	return (enum unit_reshard)(mu && mu->reshard ? mu->reshard : op->unit->rec->reshard);
}

/* Is another rank still to come to where this one has been, or is this unit what comes next? */
static bool hold_is_wanted(const struct job *job, const struct unit *u, uint32_t uses)
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

void hold_let_go(struct member *m, struct unit *u)
{
	struct member_unit *mu = member_unit_find(m, u);

	if (!mu || !mu->held)
		return;
	CHECK(mu->gathers > 0);
	mu->held = false;
	mu->uses++;
	u->drop = !hold_is_wanted(m->job, u, mu->uses);
	member_released(m, u, mu);
	job_unit_released(m->job, u);
}

void hold_drop(struct job *job, struct unit *u)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++) {
		struct member *m = job->ranks[r];
		struct member_unit *mu = m ? member_unit_find(m, u) : NULL;

		if (!mu)
			continue;
		mu->expected = false; /* of these parameters */
		if (mu->pass == PASS_IDLE)
			hold_let_go(m, u);
		mu->uses = 0;
	}
}

void hold_step(struct job *job, uint32_t group)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		if (job->units[i]->rec->guarded && job->units[i]->rec->group == group)
			hold_drop(job, job->units[i]);
}

int hold_note_reads(struct op *op)
{
	int r = 0;

	for (unsigned i = 0; r == 0 && i < op->n_after; i++)
		r = reads_add(&unit_part_on(op->unit, op->m->device)->reads, &op->after[i]);
	return r;
}

/* The trainer has computed what it hands over: it needs the parameters no more. */
int hold_end_use(struct op *op, bool sync, struct fault *f)
{
	if (!op->unit->rec->guarded ||
	    !passes_let_go(op->unit->rec, hold_reshard(op), PASS_KIND_BACKWARD, sync))
		return 0;
	if (hold_note_reads(op) < 0)
		return fault_errno(f, -ENOMEM, "noting how long a unit is read");
	hold_let_go(op->m, op->unit);
	return 0;
}
