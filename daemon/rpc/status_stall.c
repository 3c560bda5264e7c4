#include "rpc/status_stall.h"

#include <stdio.h>
#include <stdlib.h>

#include "cluster/cluster.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/text.h"
#include "op/op.h"
#include "op/op_time.h"
#include "op/op_util.h"
#include "op/stall.h"
#include "rpc/status_fill.h"

/* Of a job whose ranks are all here. Return: NULL: no rank holds it up. */
static Shardd__V1__BlameStatus *status_stall_culprit(struct arena *a, const struct job *job,
						     const Shardd__V1__JobStatus *j)
{
	Shardd__V1__JobStatus own = SHARDD__V1__JOB_STATUS__INIT;

	own.ranks = STATUS_MESSAGES(a, j->n_ranks, RankStatus, rank_status);
	own.n_ranks = own.ranks ? j->n_ranks : 0;
	status_fill_told(a, job, &own);
	return own.n_blame ? own.blame[0] : NULL;
}

/* The sentence of @blame is about what stalls: not another op, which waits for a rank since a moment. */
static bool status_stall_is_blamed(const struct job *job, const Shardd__V1__BlameStatus *blame,
				   const struct op *op)
{
	return blame && blame->wait_us >= job->node->limits.stall_after_ms * UINT64_C(1000) &&
	       (op ? op_waits_for_ranks(op) : blame->rank >= 0);
}

/* Its data may be on their way: nobody is known to hold it up. */
static bool status_stall_is_work(const struct op *op)
{
	return op && op->state == OP_RUN && op_waits_for_ranks(op);
}

void status_fill_stall(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j)
{
	Shardd__V1__BlameStatus *blame = j->n_blame ? j->blame[0] : NULL;
	Shardd__V1__StallStatus **messages;
	uint64_t since;
	const struct op *op = stall_op(job, &since);
	char text[512];
	bool blamed;

	if (op && !blame && !j->n_nodes)
		blame = status_stall_culprit(a, job, j);
	blamed = status_stall_is_blamed(job, blame, op);
	if (status_stall_is_work(op) && !(blamed && blame->rank >= 0) && !*job->ops.stalled)
		return;
	if (!op && !blamed)
		return;
	messages = STATUS_MESSAGES(a, 1, StallStatus, stall_status);
	if (!messages)
		return;
	j->stall = messages[0];
	j->stall->wait_us = op ? clock_now_us() - since : blame->wait_us;
	if (blamed) {
		j->stall->text = blame->text;
		j->stall->culprit = blame->rank >= 0 ? blame : NULL;
	} else if (*job->ops.stalled) {
		j->stall->text = status_text(a, job->ops.stalled);
	} else {
		op_describe(op, text, sizeof(text));
		j->stall->text = status_text(a, text);
	}
}

/* ------------------------------------------------------------------------ the log */

/* A wait for what the other nodes say. */
struct status_stall_ask {
	struct cluster_ask ask;
	struct jobs *jobs;
	char label[JOB_LABEL_MAX + 1]; /* the job may go meanwhile */
	status_stall_cb told;
};

static void status_stall_tell(struct job *job, status_stall_cb told)
{
	Shardd__V1__JobStatus j = SHARDD__V1__JOB_STATUS__INIT;
	struct arena a = ARENA_NULL;

	status_fill_job(&a, job, &j);
	status_fill_told(&a, job, &j);
	status_fill_stall(&a, job, &j);
	if (a.failed)
		told(job, "no memory to tell why");
	else if (j.stall)
		told(job, j.stall->text);
	arena_free(&a);
}

/* Another op may be the one that waits longest by now. */
static bool status_stall_is_on(const struct job *job)
{
	uint64_t since;

	return stall_op(job, &since) && !*job->ops.stalled &&
	       clock_now_us() - since >= job->node->limits.stall_after_ms * UINT64_C(1000);
}

static void status_stall_on_told(struct cluster_ask *a)
{
	struct status_stall_ask *s = CONTAINER_OF(a, struct status_stall_ask, ask);
	struct job *job = htab_find(&s->jobs->names, s->label);

	if (job && status_stall_is_on(job))
		status_stall_tell(job, s->told);
	free(s);
}

void status_stall_ask(struct job *job, status_stall_cb told)
{
	struct status_stall_ask *s = malloc(sizeof(*s));

	if (!s) {
		told(job, "no memory to tell why");
		return;
	}
	*s = (struct status_stall_ask){ .ask = { .done = status_stall_on_told },
					.jobs = job->jobs,
					.told = told };
	text_copy(s->label, sizeof(s->label), job->label);
	if (cluster_ask(&s->ask, job))
		status_stall_on_told(&s->ask);
}
