/* What waits, for what, for how long. */
#include "op/op_time.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "job/elastic.h"
#include "job/span.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/queue_task.h"
#include "op/stall.h"

static void op_append(char *buf, size_t bytes, size_t *at, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));

static void op_append(char *buf, size_t bytes, size_t *at, const char *fmt, ...)
{
	va_list ap;
	int n;

	if (*at >= bytes)
		return;
	va_start(ap, fmt);
	n = vsnprintf(buf + *at, bytes - *at, fmt, ap);
	va_end(ap);
	*at += n > 0 ? (size_t)n : 0;
}

/* "rank 2 (pid 44, last op Gather of unit 'x'), rank 3 (not joined)" */
static void op_missing_ranks(const struct op *op, char *buf, size_t bytes)
{
	struct match_slot *s = match_slot(&op->group->match, op->entry.number);
	struct job *job = op->m->job;
	unsigned told = 0;
	size_t at = 0;

	for (uint32_t i = 0; s && s->entries && i < op->group->match.size; i++) {
		uint32_t rank = op->group->rec->ranks[group_member_here(op->group, i)];
		struct member *m = job->ranks[rank];

		if (s->entries[i])
			continue;
		if (++told > 4) {
			op_append(buf, bytes, &at, "%s", ", ...");
			return;
		}
		op_append(buf, bytes, &at, "%srank %u ", told > 1 ? ", " : "", rank);
		if (m && m->state == MEMBER_JOINED)
			op_append(buf, bytes, &at, "(pid %d, last op %s%s%s)", member_pid(m),
				  m->last.op, m->last.unit[0] ? " of unit " : "", m->last.unit);
		else
			op_append(buf, bytes, &at, "(not joined)");
	}
}

/* What the job does about ranks that do not come back. */
static void op_append_elastic(const struct job *job, char *buf, size_t bytes)
{
	size_t at = strlen(buf);
	char waits[256];
	uint64_t ms;

	if (job->joined == span_ranks_here(job->across.span, job->rec->world_size))
		return;
	elastic_describe(job, waits, sizeof(waits), &ms);
	if (*waits)
		op_append(buf, bytes, &at, "; the job: %s", waits);
}

/* Can readers keep it waiting, or the step that it waits for? */
static bool op_may_wait_for_readers(const struct op *op)
{
	if (op->state == OP_BLOCKED && op->m->job->step.state == JOB_STEP_APPLYING)
		return true;
	return op->type->waits_for_readers && op->type->waits_for_readers(op);
}

void op_waits_for(const struct op *op, char *buf, size_t bytes)
{
	const struct job *job = op->m->job;
	const struct condition *on;

	buf[0] = '\0';
	if ((op->state == OP_BLOCKED || op->state == OP_RUN) &&
	    !condition_is_idle(&job->readers.writers) && op_may_wait_for_readers(op)) {
		readers_holding(job, buf, bytes);
		return;
	}
	switch (op->state) {
	case OP_HELD:
		snprintf(buf, bytes, "this session's op with seq %llu",
			 (unsigned long long)op->m->next_seq);
		break;
	case OP_DEPS:
		snprintf(buf, bytes, "%u earlier ops of this session", op->deps);
		break;
	case OP_WAIT:
		op_missing_ranks(op, buf, bytes);
		op_append_elastic(job, buf, bytes);
		if (!*buf && group_is_ordered(op->group) && job->jobs->ops.across.waits)
			job->jobs->ops.across.waits(op->group, op->entry.number, buf, bytes);
		break;
	case OP_BLOCKED:
	case OP_RUN:
		on = waiter_on(op->runner ? op->runner : &op->waiter);
		snprintf(buf, bytes, "%s", on ? on->what : "work on its devices");
		break;
	case OP_DONE:
	case _OP_N:
		break;
	}
}

void op_describe(const struct op *op, char *buf, size_t bytes)
{
	char waits[400];

	op_waits_for(op, waits, sizeof(waits));
	snprintf(buf, bytes, "%s%s%.64s%s of rank %u (number %llu) waits for %s", op->type->name,
		 op->unit ? " of unit '" : "", op->unit ? op->unit->rec->name : "",
		 op->unit ? "'" : "", op->m->rank, (unsigned long long)op->entry.number, waits);
}

/* The first op of @ops whose deadline has passed. */
static struct op *op_find_late(struct list *ops, uint64_t now_us)
{
	struct op *op, *tmp;

	list_for_each (op, tmp, ops, link)
		if (op->state != OP_RUN && !op->answered && op->deadline_us <= now_us)
			return op;
	return NULL;
}

static void op_tick_member(struct member *m, uint64_t now_us)
{
	struct op *op;
	char text[512];

	while ((op = op_find_late(&m->ops, now_us)) || (op = op_find_late(&m->held, now_us))) {
		op_describe(op, text, sizeof(text));
		op_cancel(op, FAULT_DEADLINE, text);
	}
}

void ops_tick(struct jobs *jobs, uint64_t now_us, uint64_t stall_after_us)
{
	struct job *job, *tmp;

	list_for_each (job, tmp, &jobs->all, link) {
		queue_tasks_tick(job, now_us);
		for (uint32_t r = 0; r < job->rec->world_size; r++)
			if (job->ranks[r] && job->ranks[r]->pending)
				op_tick_member(job->ranks[r], now_us);
		stall_tick(job, now_us, stall_after_us);
	}
	list_for_each (job, tmp, &jobs->zombies, link)
		queue_tasks_tick(job, now_us); /* what they left on devices must end too */
}
