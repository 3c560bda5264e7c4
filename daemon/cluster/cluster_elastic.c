/*
 * Elastic jobs over several nodes: they go on with the ranks that are there.
 *
 * A rank is known by the number that its process was started with; the ranks of an epoch have new numbers, in
 * the order of these. When ranks are missing, and no other has come for the job's join_grace_ms, those
 * that are there begin an epoch. Others that come later wait: at the next commit replicas are made, no
 * further commit begins, and the epoch ends, so that no step is made twice. Each time the state is laid out
 * for the new ranks from replicas (cluster_restore.c).
 */
#include <stdio.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/clock.h"
#include "core/fnv.h"
#include "job/launched.h"

/* A node that has units, as they are now. Return: NULL: none has. */
static const struct cluster_holding *cluster_elastic_of(struct cluster_job *cj)
{
	const struct cluster_node *n = cluster_holding_newest(cj);

	return n ? &n->holding : NULL;
}

static unsigned cluster_elastic_nodes(struct cluster_job *cj)
{
	struct cluster_node *node, *tmp;
	unsigned n = 0;

	list_for_each (node, tmp, &cj->nodes, link)
		n++;
	return n;
}

bool cluster_elastic_is_alone(struct cluster_job *cj)
{
	const struct cluster_holding *h = cluster_elastic_of(cj);

	return h && h->grace_ms && cluster_elastic_nodes(cj) == 1;
}

bool cluster_elastic_is_due(struct cluster_job *cj, uint32_t launched, uint32_t n)
{
	const struct cluster_holding *h = cluster_elastic_of(cj);
	struct cluster_node *node, *tmp;
	uint32_t members = 0;

	if (!h || !h->grace_ms || n < h->min_ranks || n > launched)
		return false; /* at its first start a job waits for all */
	if (cluster_elastic_is_alone(cj))
		return false; /* its commits would be its own: both sides of a cut could make them */
	list_for_each (node, tmp, &cj->nodes, link)
		members += node->members;
	return members == h->ranks ||
	       clock_now_us() >= cj->changed_us + h->grace_ms * UINT64_C(1000);
}

/* As job_layout of an elastic job, with the ranks that want to join. */
static uint64_t cluster_elastic_layout(struct cluster_job *cj)
{
	struct cluster_node *n, *tmp;
	uint64_t h = FNV_BEGIN;

	list_for_each (n, tmp, &cj->nodes, link)
		h = span_layout_add(h, n->name, n->n, n->devices);
	list_for_each (n, tmp, &cj->nodes, link)
		for (uint32_t i = 0; i < n->n; i++)
			h = fnv_add(h, n->ranks[i]);
	return h;
}

int cluster_elastic_check_layout(struct cluster_job *cj, struct fault *f)
{
	const struct cluster_holding *h = cluster_elastic_of(cj);
	uint64_t layout = cluster_elastic_layout(cj);
	struct cluster_node *n, *tmp;

	if (!h || !h->grace_ms)
		return 0; /* a node whose ranks are elsewhere says so itself */
	list_for_each (n, tmp, &cj->nodes, link)
		if (n->holding.layout != layout)
			return fault_set(f, FAULT_STATE, NULL,
					 "job '%s' has other ranks than its memory is laid out "
					 "for, and there are "
					 "no replicas of it on the nodes that are there: start all "
					 "of its ranks "
					 "where they were, or delete the job and load a checkpoint",
					 cj->label);
	return 0;
}

bool cluster_elastic_waits(struct cluster_job *cj, const Shardd__V1__JobWish *w)
{
	struct job *job = cluster_job_of(cj);
	uint32_t rank;

	if (!job || !job->across.elastic || !cj->epoch.peers)
		return false;
	for (size_t i = 0; i < w->n_ranks; i++)
		if (launched_rank(job, w->ranks[i]->rank, &rank))
			return false; /* it is in the epoch, and joins again */
	cj->grows = true;
	return true;
}

void cluster_elastic_taken(struct cluster_job *cj)
{
	struct cluster_node *n, *tmp;

	list_for_each (n, tmp, &cj->nodes, link)
		n->waits = false;
}

/* Does anybody wait still? */
static bool cluster_elastic_grows(struct cluster_job *cj)
{
	struct cluster_node *n, *tmp;
	bool any = cj->n_wishes;

	list_for_each (n, tmp, &cj->nodes, link)
		any = any || n->waits;
	return any;
}

void cluster_elastic_grow(struct cluster_job *cj, struct job *job)
{
	struct fault f = FAULT_NULL;

	cj->grows = cluster_elastic_grows(cj);
	if (!cj->grows) {
		cluster_order_hold(cj, false);
		return;
	}
	fault_set(&f, FAULT_ABORTED, NULL,
		  "other ranks of job '%s' have come: epoch %llu has ended, join again",
		  job->rec->name, (unsigned long long)job->rec->epoch);
	job_epoch_end(job, &f);
}
