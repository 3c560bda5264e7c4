#include "rpc/status_stall.h"

#include <stdio.h>
#include <stdlib.h>

#include "cluster/cluster.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/text.h"
#include "op/op.h"
#include "op/op_time.h"
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

/* Since when an op waits, here or, as the others have told, on another node. Return: 0: none does. */
static uint64_t status_stall_wait(const struct job *job, const Shardd__V1__JobStatus *j,
				  const struct op **ret_op)
{
	const uint64_t after = job->node->limits.stall_after_ms * UINT64_C(1000);
	uint64_t since;

	*ret_op = stall_op(job, &since);
	if (*ret_op)
		return clock_now_us() - since;
	return after && j->n_blame && j->blame[0]->wait_us >= after ? j->blame[0]->wait_us : 0;
}

void status_fill_stall(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j)
{
	Shardd__V1__BlameStatus *blame = j->n_blame ? j->blame[0] : NULL;
	const struct op *op;
	const uint64_t wait = status_stall_wait(job, j, &op);
	Shardd__V1__StallStatus **messages;
	char text[512] = "";

	if (!wait)
		return;
	if (!blame && !j->n_nodes)
		blame = status_stall_culprit(a, job, j);
	messages = STATUS_MESSAGES(a, 1, StallStatus, stall_status);
	if (!messages)
		return;
	j->stall = messages[0];
	if (op)
		op_describe(op, text, sizeof(text));
	j->stall->wait_us = wait;
	j->stall->text = blame ? blame->text : status_text(a, text);
	j->stall->culprit = blame && blame->rank >= 0 ? blame : NULL;
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
	told(job, j.stall && !a.failed ? j.stall->text : "no memory to tell why");
	arena_free(&a);
}

static void status_stall_on_told(struct cluster_ask *a)
{
	struct status_stall_ask *s = CONTAINER_OF(a, struct status_stall_ask, ask);
	struct job *job = htab_find(&s->jobs->names, s->label);

	if (job && job->ops.stalled_us)
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
