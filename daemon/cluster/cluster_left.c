/* Ranks that leave an epoch cleanly, and ranks that give up before one has begun. */
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/log.h"

/* ----------------------------------------------------------- they leave an epoch */

/* To all nodes but @except, from the leader; else to the leader. */
static void cluster_left_tell(struct cluster_job *cj, Shardd__V1__JobLeft *l,
			      const struct peer *except)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;

	m.epoch = cj->epoch.number;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_LEFT;
	m.left = l;
	for (unsigned i = 0; cj->epoch.peers && i < cj->epoch.n_nodes; i++)
		if (cj->epoch.peers[i] != except)
			cluster_send(cj, cj->epoch.peers[i], &m);
	if (!cj->epoch.peers)
		cluster_send(cj, cluster_to_leader(cj), &m);
}

void cluster_rank_left(struct job *job, const struct member *m)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;
	Shardd__V1__JobLeft l = SHARDD__V1__JOB_LEFT__INIT;
	Shardd__V1__JobLast *last;

	if (!cj || !cj->epoch.number)
		return;
	l.last = calloc(job->n_groups, sizeof(struct Shardd__V1__JobLast *));
	last = calloc(job->n_groups, sizeof(*last));
	for (uint32_t i = 0; l.last && last && i < job->n_groups; i++) {
		const struct group *g = job->groups[i];
		uint32_t index;

		if (!group_index_here(g, m->rank, &index))
			continue;
		l.last[l.n_last] = &last[l.n_last];
		shardd__v1__job_last__init(&last[l.n_last]);
		last[l.n_last].group = group_key(g);
		last[l.n_last++].number = g->match.next[index];
	}
	l.rank = m->rank;
	l.pid = member_pid(m);
	if (l.last && last)
		cluster_left_tell(cj, &l, NULL);
	else /* the deadlines of the others' ops end their wait */
		log_error("cluster",
			  "no memory: other nodes do not hear that a rank has left job=%s",
			  cj->label);
	free(l.last);
	free(last);
}

static void cluster_left_apply(struct cluster_job *cj, const Shardd__V1__JobLeft *l)
{
	struct job *job = cluster_job_of(cj);
	uint64_t *keys = calloc(2 * l->n_last + 1, sizeof(*keys)), *numbers = keys + l->n_last;
	const struct job_left left = {
		.rank = l->rank, .pid = l->pid, .n = l->n_last, .keys = keys, .numbers = numbers
	};

	if (!keys) {
		log_error("cluster",
			  "no memory: ops may wait for a rank that has left job=%s rank=%u",
			  cj->label, l->rank);
		return;
	}
	for (size_t i = 0; i < l->n_last; i++) {
		keys[i] = l->last[i]->group;
		numbers[i] = l->last[i]->number;
	}
	if (job)
		job_left_elsewhere(job, &left);
	free(keys);
}

/* Does node @node of the epoch have @rank? */
static bool cluster_left_is_of(const struct cluster_job *cj, unsigned node, uint32_t rank)
{
	const struct job *job = cluster_job_of(cj);
	const struct span *s = job ? job->across.span : NULL;

	return !s || s->over || (rank < s->world && span_node_of(s, rank) == node);
}

void cluster_on_rank_left(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobLeft *l)
{
	bool valid = l->n_last <= JOB_MAX_GROUPS;
	unsigned node = 0;

	while (cj->epoch.peers && node < cj->epoch.n_nodes && cj->epoch.peers[node] != from)
		node++;
	if (cj->epoch.peers ? node == cj->epoch.n_nodes : from != cluster_to_leader(cj))
		return; /* it has no part in the epoch */
	if (cj->epoch.peers)
		valid = valid && cluster_left_is_of(cj, node, l->rank);
	if (!valid) {
		peer_end(from, "it has sent that a rank has left which it does not have");
		return;
	}
	if (cj->epoch.peers)
		cluster_left_tell(cj, (Shardd__V1__JobLeft *)l, from);
	cluster_left_apply(cj, l);
}

/* ------------------------------------------------------- they give up joining one */

void cluster_withdraw(struct cluster_job *cj)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobWish w = SHARDD__V1__JOB_WISH__INIT;

	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_WISH;
	m.wish = &w;
	if (cj->state == CLUSTER_FOLLOWS)
		cluster_send(cj, cluster_to_leader(cj), &m);
}

void cluster_gave_up(struct job *job, uint32_t rank)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;
	uint32_t at = 0;

	if (!cj || cluster_job_of(cj) != job)
		return;
	while (at < cj->n_wishes && cj->wishes[at] != rank)
		at++;
	if (at == cj->n_wishes)
		return;
	cj->n_wishes--;
	memmove(&cj->wishes[at], &cj->wishes[at + 1], (cj->n_wishes - at) * sizeof(*cj->wishes));
	cluster_tell_wishes(cj);
	job_settle(job); /* another process may want to be that rank, too: it asks again */
}

bool cluster_is_awaited(const struct job *job)
{
	const struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;

	return cj && cj->n_wishes;
}
