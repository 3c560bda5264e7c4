/* What the ranks of all nodes of a job do, as the nodes have said when they were asked. */
#include <string.h>

#include "cluster/cluster.h"
#include "core/check.h"
#include "rpc/status_blame.h"
#include "rpc/status_fill.h"

/* Of every rank: the op that it waits in. */
static void status_told_op(struct arena *a, const Shardd__V1__JobRankTold *from,
			   Shardd__V1__RankStatus *to)
{
	to->op = status_text(a, from->op);
	to->op_on = status_text(a, from->on);
	to->op_number = from->number;
	to->op_us = from->op_us;
	to->op_waits_for = status_text(a, from->waits_for);
	to->idle_us = from->idle_us;
	to->process_state = status_text(a, from->process_state);
}

/* Of those on other nodes: the rest, too. */
static void status_told_rank(struct arena *a, const Shardd__V1__JobRankTold *from,
			     Shardd__V1__RankStatus *to)
{
	status_told_op(a, from, to);
	if (to->state != SHARDD__V1__RANK_STATE__RANK_STATE_ELSEWHERE)
		return;
	to->state = STATUS_STATE(RankState, rank_state, from->state);
	to->pid = from->pid;
	to->device = status_text(a, from->device);
	to->last_op = status_text(a, from->last_op);
	to->pending_ops = from->pending;
	to->next_number = from->next_number;
	to->waited_us = from->waited_us;
	to->late_us = from->late_us;
}

/* What @node, which has the ranks from @first on, has said. */
static void status_told_take(struct arena *a, struct status_blame *b, Shardd__V1__JobStatus *j,
			     const Shardd__V1__JobTold *told, uint32_t first, uint32_t n)
{
	b->told[b->n_told++] = told;
	for (size_t i = 0; i < told->n_ranks; i++) {
		const Shardd__V1__JobRankTold *r = told->ranks[i];

		if (r->rank < first || r->rank - first >= n || r->rank >= j->n_ranks)
			continue;
		b->ranks[r->rank] = r;
		status_told_rank(a, r, j->ranks[r->rank]);
	}
}

static void status_told_node(struct arena *a, const struct job *job, struct status_blame *b,
			     Shardd__V1__JobStatus *j, Shardd__V1__JobNodeStatus *node)
{
	const char *why;
	const Shardd__V1__JobTold *told = node->here ? NULL : cluster_told(job, node->name, &why);

	for (uint32_t r = node->first; r < node->first + node->ranks && r < b->world; r++)
		b->nodes[r] = node->name;
	if (told) {
		status_told_take(a, b, j, told, node->first, node->ranks);
		return;
	}
	if (node->here)
		return;
	node->error = status_text(a, why);
	for (uint32_t r = node->first; r < node->first + node->ranks && r < b->world; r++)
		b->why[r] = node->error;
}

/* Only the leader knows which ranks are missing. */
static void status_told_waits(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j)
{
	const char *why, *leader = cluster_job_leader(job);
	const Shardd__V1__JobTold *told = *leader ? cluster_told(job, leader, &why) : NULL;

	if (told && *told->waits)
		j->waits = status_text(a, told->waits);
}

void status_fill_told(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j)
{
	struct status_blame b = { .world = (uint32_t)j->n_ranks };
	Shardd__V1__JobTold *here = cluster_told_here(job);

	b.ranks = arena_take(a, (b.world + 1) * sizeof(*b.ranks));
	b.nodes = arena_take(a, (b.world + 1) * sizeof(*b.nodes));
	b.why = arena_take(a, (b.world + 1) * sizeof(*b.why));
	b.told = arena_take(a, (j->n_nodes + 1) * sizeof(*b.told));
	if (!here)
		a->failed = true;
	for (uint32_t r = 0; b.nodes && b.why && r < b.world; r++) {
		b.nodes[r] = "";
		b.why[r] = "";
	}
	if (!a->failed) {
		status_told_take(a, &b, j, here, 0, b.world);
		for (size_t i = 0; i < j->n_nodes; i++)
			status_told_node(a, job, &b, j, j->nodes[i]);
		status_told_waits(a, job, j);
		status_blame(a, &b, j);
	}
	if (here)
		shardd__v1__job_told__free_unpacked(here, NULL);
}
