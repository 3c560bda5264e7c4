/* JoinUneven over nodes: what nodes without inputs, and those with some, say to the others
 * (op/uneven_nodes.h). Through the leader, in the order in which it comes. */
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/text.h"
#include "op/uneven_nodes.h"

void cluster_tell_others(struct cluster_job *cj, Shardd__V1__JobMessage *m,
			 const struct peer *except)
{
	m->epoch = cj->epoch.number;
	for (unsigned i = 0; cj->epoch.peers && i < cj->epoch.n_nodes; i++)
		if (cj->epoch.peers[i] != except)
			cluster_send(cj, cj->epoch.peers[i], m);
	if (!cj->epoch.peers)
		cluster_send(cj, cluster_to_leader(cj), m);
}

void cluster_no_inputs(struct group *g, uint64_t number, uint64_t last_number, uint32_t last)
{
	struct cluster_job *cj = cluster_order_running(g->job);
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobNoInputs n = SHARDD__V1__JOB_NO_INPUTS__INIT;

	n.group = group_key(g);
	n.number = number;
	n.last_number = last_number;
	n.last = last;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_NO_INPUTS;
	m.no_inputs = &n;
	if (cj)
		cluster_tell_others(cj, &m, NULL);
}

void cluster_asks(struct group *g, const struct asked *a)
{
	struct cluster_job *cj = cluster_order_running(g->job);
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobCollective c = SHARDD__V1__JOB_COLLECTIVE__INIT;

	c.group = group_key(g);
	c.number = a->number;
	c.rank = a->rank;
	c.pid = a->pid;
	c.type = (char *)a->type;
	c.request = (ProtobufCBinaryData){ a->bytes, (uint8_t *)a->request };
	c.words = (uint64_t *)a->words;
	c.n_words = ASKED_WORDS;
	c.units = a->units;
	c.print = (uint64_t *)a->print.words;
	c.n_print = sizeof(a->print.words) / sizeof(a->print.words[0]);
	c.text = (char *)a->print.text;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_COLLECTIVE;
	m.collective = &c;
	if (cj)
		cluster_tell_others(cj, &m, NULL);
}

static struct asked *cluster_uneven_unpack(const struct group *g,
					   const Shardd__V1__JobCollective *c)
{
	struct asked *a = asked_new(g->match.user, c->request.len);

	if (!a)
		return NULL;
	a->number = c->number;
	a->rank = c->rank;
	a->pid = c->pid;
	a->units = c->units;
	memcpy(a->words, c->words, sizeof(a->words));
	memcpy(a->print.words, c->print, sizeof(a->print.words));
	text_copy(a->print.text, sizeof(a->print.text), c->text);
	text_copy(a->type, sizeof(a->type), c->type);
	if (a->bytes)
		memcpy(a->request, c->request.data, a->bytes);
	return a;
}

bool cluster_node_of(const struct cluster_job *cj, const struct peer *from, unsigned *ret)
{
	if (!cj->epoch.peers)
		return from == cluster_to_leader(cj);
	for (*ret = 0; *ret < cj->epoch.n_nodes; ++*ret)
		if (cj->epoch.peers[*ret] == from)
			return true;
	return false;
}

/* The leader knows whose rank it is; the others believe it. */
bool cluster_is_rank_of(const struct cluster_job *cj, const struct group *g, unsigned node,
			uint32_t rank)
{
	uint32_t index;

	if (!group_index(g, rank, &index))
		return false;
	return !cj->epoch.peers || span_node_of(g->job->across.span, rank) == node;
}

static struct group *cluster_uneven_group(const struct cluster_job *cj, uint64_t key)
{
	struct job *job = cluster_job_of(cj);

	for (uint32_t i = 0; job && i < job->n_groups; i++)
		if (group_key(job->groups[i]) == key)
			return group_spans(job->groups[i]) && !job->across.span->over
				       ? job->groups[i]
				       : NULL;
	return NULL;
}

static int cluster_uneven_take_no_inputs(const struct cluster_job *cj, unsigned node,
					 const Shardd__V1__JobNoInputs *n)
{
	struct group *g = cluster_uneven_group(cj, n->group);

	if (!g)
		return 0;
	if (!cluster_is_rank_of(cj, g, node, n->last))
		return -1;
	return g->here ? uneven_joined_elsewhere(g, n->number, n->last_number, n->last) : 0;
}

static int cluster_uneven_take_collective(struct cluster_job *cj, unsigned node,
					  const Shardd__V1__JobCollective *c)
{
	struct group *g = cluster_uneven_group(cj, c->group);
	struct fault f = FAULT_NULL;
	struct asked *a;

	if (!g)
		return 0;
	if (c->n_words != ASKED_WORDS || c->n_print != sizeof(a->print.words) / sizeof(uint64_t) ||
	    !cluster_is_rank_of(cj, g, node, c->rank))
		return -1;
	if (!g->here)
		return 0;
	a = cluster_uneven_unpack(g, c);
	if (a)
		return uneven_asked_elsewhere(g, a, cluster_order_ahead(g->job));
	fault_set(&f, FAULT_ABORTED, NULL,
		  "there is no memory for what other ranks of job '%s' ask for", g->job->rec->name);
	job_epoch_end(g->job, &f);
	return 0;
}

void cluster_on_uneven(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobMessage *m)
{
	unsigned node = 0;
	int r;

	if (!cluster_node_of(cj, from, &node))
		return; /* it has no part in the epoch */
	if (cj->epoch.peers)
		cluster_tell_others(cj, (Shardd__V1__JobMessage *)m, from);
	if (m->body_case == SHARDD__V1__JOB_MESSAGE__BODY_NO_INPUTS)
		r = cluster_uneven_take_no_inputs(cj, node, m->no_inputs);
	else
		r = cluster_uneven_take_collective(cj, node, m->collective);
	if (r)
		peer_end(from, "it has sent of ranks without inputs what cannot be");
}
