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

/* Has the node memory as @h, of a node of the last epoch, has? Then ranks of it are members of the job. */
static bool cluster_elastic_is_of(const struct cluster_node *n, const struct cluster_holding *h)
{
	return n->holding.units && n->holding.layout == h->layout;
}

/* Ranks of the last epoch that are there. */
static uint32_t cluster_elastic_members(struct cluster_job *cj, const struct cluster_holding *h)
{
	struct cluster_node *n, *tmp;
	uint32_t members = 0;

	list_for_each (n, tmp, &cj->nodes, link)
		members += cluster_elastic_is_of(n, h) ? n->members : 0;
	return members;
}

/* Would the job have nothing to go back to, or much less than it has? The copies of a node whose daemon was
 * started again are gone. */
static bool cluster_elastic_lacks_copies(struct cluster_job *cj, const struct cluster_holding *h)
{
	const struct cluster_part *copy = cluster_restore_newest(cj);

	return !copy || (h->has_commit && !h->n_replicas && copy->epoch < h->begun);
}

const char *cluster_elastic_lacks(struct cluster_job *cj)
{
	const struct cluster_holding *h = cluster_elastic_of(cj);

	if (!h || !h->grace_ms)
		return "";
	if (!cj->epoch_revision) /* others may have gone on since, in epochs that nobody knows of */
		return "; the store knows nothing of the job: only all of them begin again";
	if (h->begun < cj->known.commit.epoch)
		return "; the ranks that made the last commit, without the memory that is here, "
		       "are among them";
	if (cluster_elastic_members(cj, h) != h->ranks && cluster_elastic_lacks_copies(cj, h))
		return "; the last commit is in no copies here: those that made it go on first";
	return "";
}

bool cluster_elastic_is_due(struct cluster_job *cj, uint32_t launched, uint32_t n)
{
	const struct cluster_holding *h = cluster_elastic_of(cj);

	if (!h || !h->grace_ms || n < h->min_ranks || n > launched)
		return false; /* at its first start a job waits for all */
	if (*cluster_elastic_lacks(cj))
		return false;
	return cluster_elastic_members(cj, h) == h->ranks ||
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

/* -------------------------------------------------------------- who comes into a later epoch */

/* What it has when its commit in doubt, if there is one, is settled as the store says. */
static struct cluster_holding cluster_elastic_settled(const struct cluster_job *cj,
						      const struct cluster_holding *h)
{
	struct cluster_holding settled = *h;

	cluster_holding_settle(&settled, &cj->known.commit);
	return settled;
}

/* Has a node of the last epoch what the last commit, or a step behind it, has left, as @h has? Both settled. */
static bool cluster_elastic_is_with(const struct cluster_holding *is,
				    const struct cluster_holding *h)
{
	return !is->torn && is->has_position && is->has_commit == h->has_commit &&
	       is->step == h->step;
}

/* Are all ranks of the last epoch there, and others, and is what they have in no replicas? The job would go back
 * to others, or nowhere. */
static bool cluster_elastic_are_apart(struct cluster_job *cj, const struct cluster_holding *newest)
{
	const struct cluster_holding h = cluster_elastic_settled(cj, newest);
	const struct cluster_part *copy = cluster_restore_newest(cj);
	struct cluster_node *n, *tmp;
	uint32_t all = 0;

	if (copy && copy->epoch >= h.begun && copy->id.step >= h.step)
		return false;
	list_for_each (n, tmp, &cj->nodes, link) {
		const struct cluster_holding is = cluster_elastic_settled(cj, &n->holding);

		all += n->n;
		if (cluster_elastic_is_of(n, &h) && !cluster_elastic_is_with(&is, &h))
			return false;
	}
	return cluster_elastic_members(cj, &h) == h.ranks && all > h.ranks;
}

/* The others ask again, when the epoch has begun. */
static void cluster_elastic_keep_members(struct cluster_node *n)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; i < n->n; i++) {
		if (!n->are_members[i])
			continue;
		n->ranks[kept] = n->ranks[i];
		n->devices[kept] = n->devices[i];
		n->are_members[kept++] = true;
	}
	n->n = kept;
}

void cluster_elastic_set_apart(struct cluster_job *cj)
{
	const struct cluster_holding *h = cluster_elastic_of(cj);
	struct cluster_node *n, *tmp;

	if (!h || !h->grace_ms || !cluster_elastic_are_apart(cj, h))
		return;
	list_for_each (n, tmp, &cj->nodes, link) {
		if (n->members && cluster_elastic_is_of(n, h)) {
			cluster_elastic_keep_members(n);
			continue;
		}
		list_unlink(&n->link);
		list_append(&cj->later, &n->link);
	}
}

void cluster_elastic_together(struct cluster_job *cj)
{
	while (!list_empty(&cj->later)) {
		struct cluster_node *n = list_first(&cj->later, struct cluster_node, link);

		list_unlink(&n->link);
		list_append(&cj->nodes, &n->link);
	}
}

void cluster_elastic_taken(struct cluster_job *cj)
{
	struct cluster_node *n, *tmp;

	list_for_each (n, tmp, &cj->nodes, link)
		n->waits = false;
	list_for_each (n, tmp, &cj->later, link)
		n->waits = cj->grows = true;
	cluster_elastic_together(cj);
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

/* ---------------------------------------------------------------- who takes a leader's place */

/* A leader to which there was no link has so long beyond the job's grace to begin an epoch. */
#define ELASTIC_BEGIN_US UINT64_C(2000000)

/* Since when has the leader not been reached? */
static uint64_t cluster_elastic_missed(struct cluster_job *cj)
{
	if (!cj->dials.since_us || cj->dials.token != cj->token) {
		cj->dials.token = cj->token;
		cj->dials.since_us = clock_now_us();
	}
	return cj->dials.since_us;
}

bool cluster_elastic_may_replace(struct cluster_job *cj, bool had_link)
{
	const struct job *job = cluster_job_of(cj);
	uint64_t since = cluster_elastic_missed(cj);

	if (!job || !job->rec->join_grace_ms || !cj->known.epoch)
		return true;
	if (cj->known.epoch > cluster_holding_begun(job->rec)) {
		cluster_say(
			cj,
			"node %s, which leads epoch %llu of the job, cannot be reached, and the "
			"epoch was decided without this node: it is dialled again",
			cj->leader, (unsigned long long)cj->known.epoch);
		return false;
	}
	return had_link || clock_now_us() >= since + job->rec->join_grace_ms * UINT64_C(1000) +
						     ELASTIC_BEGIN_US;
}
