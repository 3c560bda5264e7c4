#include "op/stall.h"

#include "op/op.h"
#include "op/op_util.h"

/* For readers, or for memory or communicators. What else it may wait for is work of devices or of other ops. */
static bool stall_is_blocked(const struct op *op)
{
	const struct condition *on = waiter_on(op->runner ? op->runner : &op->waiter);

	return (op->state == OP_BLOCKED || op->state == OP_RUN) &&
	       (on == &op->m->job->readers.writers || on == &op->m->job->node->changed);
}

/* The time at which it began to wait; 0: it does not. */
static uint64_t stall_wait_of(const struct op *op)
{
	if (op->answered || (!op_waits_for_ranks(op) && !stall_is_blocked(op)))
		return 0;
	return op->active_us ? op->active_us : op->announced_us;
}

static const struct op *stall_longest(const struct job *job)
{
	const struct op *longest = NULL;

	for (uint32_t r = 0; r < job->rec->world_size; r++) {
		struct member *m = job->ranks[r];
		struct op *op, *tmp;

		if (!m || !m->pending)
			continue;
		list_for_each (op, tmp, &m->ops, link)
			if (stall_wait_of(op) &&
			    (!longest || stall_wait_of(op) < stall_wait_of(longest)))
				longest = op;
	}
	return longest;
}

void stall_tick(struct job *job, uint64_t now_us, uint64_t stall_after_us)
{
	const struct op *op = stall_after_us ? stall_longest(job) : NULL;
	const uint64_t since = op ? stall_wait_of(op) : 0;
	const bool stalls = op && now_us >= since && now_us - since >= stall_after_us;
	const bool did = job->ops.stalled_us;

	if (stalls && !did) {
		job->ops.stalled_us = since;
		job->ops.counts.stalls++;
	}
	if (stalls != did && job->jobs->ops.stall)
		job->jobs->ops.stall(job, stalls);
	if (stalls)
		return;
	if (did)
		job->ops.counts.stalled_us += now_us - job->ops.stalled_us;
	job->ops.stalled_us = 0;
	job->ops.stalled[0] = '\0';
}

const struct op *stall_op(const struct job *job, uint64_t *ret_since_us)
{
	const struct op *op = job->ops.stalled_us ? stall_longest(job) : NULL;

	*ret_since_us = op ? stall_wait_of(op) : 0;
	return op;
}
