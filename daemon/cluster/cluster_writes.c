/* Parameters that a rank writes by itself, in a unit whose group spans nodes (unitio/writes.h). */
#include <stdio.h>

#include "cluster/cluster_impl.h"
#include "job/across_write.h"
#include "unitio/writes.h"

/* All nodes have announced it when it starts, also in a schedule. */
static void cluster_writes_fill(const struct job *job, const struct across_write *w,
				struct order_nodes *nodes, struct order_print *print,
				struct order_entry *e)
{
	*print = (struct order_print){ .words = { w->unit->key, w->rank } };
	snprintf(print->text, sizeof(print->text), "CopyShard of rank %u into unit '%.64s'",
		 w->rank, w->unit->rec->name);
	*e = (struct order_entry){
		.key = { ORDER_COLLECTIVE, w->key, w->number },
		.flags = ORDER_JOINT,
		.nodes = cluster_order_nodes_of(job->groups[w->unit->rec->group], nodes),
		.print = print,
		.rank = w->rank,
	};
}

/* The leader allows it if @f is NULL, else refuses it. */
static void cluster_writes_decide(struct job *job, const struct across_write *w,
				  const struct fault *f)
{
	struct cluster_job *cj = cluster_order_running(job);
	struct order_nodes nodes;
	struct order_print print;
	struct order_entry e;

	if (!cj)
		return;
	cluster_writes_fill(job, w, &nodes, &print, &e);
	if (f)
		(void)order_refuse(cj->epoch.order, &e, f);
	else
		cluster_order_tell(cj, job, &e);
}

void cluster_write_allowed(struct job *job, const struct across_write *w)
{
	cluster_writes_decide(job, w, NULL);
}

void cluster_write_refused(struct job *job, const struct across_write *w, const struct fault *f)
{
	cluster_writes_decide(job, w, f);
}

void cluster_writes(struct job *job, const struct across_write *w)
{
	struct cluster_job *cj = cluster_order_running(job);
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobWrite write = SHARDD__V1__JOB_WRITE__INIT;

	if (!cj)
		return;
	write.unit = w->unit->key;
	write.rank = w->rank;
	write.number = w->number;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_WRITE;
	m.write = &write;
	cluster_tell_others(cj, &m, NULL);
	cluster_write_allowed(job, w);
}

void cluster_on_write(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobMessage *m)
{
	struct job *job = cluster_job_of(cj);
	const Shardd__V1__JobWrite *w = m->write;
	struct group *g;
	struct unit *u;
	unsigned node = 0;

	if (!cluster_node_of(cj, from, &node))
		return; /* it has no part in the epoch */
	u = job ? cluster_order_unit_of(job, w->unit) : NULL;
	if (!u || !job_is_across(job) || job->across.span->over)
		return;
	g = job->groups[u->rec->group];
	if (!group_spans(g) || !cluster_is_rank_of(cj, g, node, w->rank) ||
	    span_is_here(job->across.span, w->rank)) {
		peer_end(from, "it has sent that a rank writes parameters which it does not have");
		return;
	}
	if (cj->epoch.peers)
		cluster_tell_others(cj, (Shardd__V1__JobMessage *)m, from);
	if (g->here)
		writes_asked_elsewhere(job, u, w->rank, w->number);
}
