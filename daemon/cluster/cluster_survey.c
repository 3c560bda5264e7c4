/*
 * Surveys: what the ranks of all nodes of a job do. A node asks its leader, which passes the question to
 * the others, and their answers back. It keeps nothing of them: a question and its answers name the node
 * that asks.
 */
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/text.h"

/* Nodes that have not answered then are shown as such. */
#define SURVEY_US 1000000u

struct survey_node {
	char name[SPAN_NAME_BYTES];
	Shardd__V1__JobTold *told; /* owned; NULL: it has not answered */
	bool no_link;
};

struct cluster_survey {
	uint64_t id, begun_us, over_us; /* over_us: 0: it goes on */
	struct list asks;               /* of struct cluster_ask */
	struct survey_node *nodes;      /* owned: the others that are expected to answer */
	size_t n;
};

struct peer *cluster_survey_peer(struct cluster_job *cj, const char *name)
{
	struct cluster_node *n, *tmp;

	for (unsigned i = 0; cj->epoch.peers && i < cj->epoch.n_nodes; i++)
		if (cj->epoch.peers[i] && strcmp(peer_name(cj->epoch.peers[i]), name) == 0)
			return cj->epoch.peers[i];
	list_for_each (n, tmp, &cj->nodes, link)
		if (n->peer && strcmp(n->name, name) == 0)
			return n->peer;
	return NULL;
}

/* ------------------------------------------------------------------ at the node that asks */

static struct survey_node *cluster_survey_node(struct cluster_survey *s, const char *name)
{
	for (size_t i = 0; i < s->n; i++)
		if (strcmp(s->nodes[i].name, name) == 0)
			return &s->nodes[i];
	return NULL;
}

/* Node @name is expected to answer. Return: NULL without memory, or there are too many. */
static struct survey_node *cluster_survey_expect(struct cluster_survey *s, const char *name)
{
	struct survey_node *n = cluster_survey_node(s, name), *grown;

	if (n || s->n == SPAN_MAX_NODES)
		return n;
	grown = realloc(s->nodes, (s->n + 1) * sizeof(*grown));
	if (!grown)
		return NULL;
	s->nodes = grown;
	n = &s->nodes[s->n++];
	*n = (struct survey_node){ 0 };
	text_copy(n->name, sizeof(n->name), name);
	return n;
}

static void cluster_survey_end(struct cluster_survey *s)
{
	struct list asks = LIST_INIT(asks);

	if (!s->over_us)
		s->over_us = clock_now_us();
	list_take_all(&asks, &s->asks);
	while (!list_empty(&asks)) {
		struct cluster_ask *a = list_first(&asks, struct cluster_ask, link);

		list_unlink(&a->link);
		a->done(a);
	}
}

static bool cluster_survey_is_whole(const struct cluster_survey *s)
{
	for (size_t i = 0; i < s->n; i++)
		if (!s->nodes[i].told && !s->nodes[i].no_link)
			return false;
	return true;
}

void cluster_survey_tick(struct cluster_job *cj, uint64_t now_us)
{
	struct cluster_survey *s = cj->survey;

	if (s && !s->over_us && now_us - s->begun_us >= SURVEY_US)
		cluster_survey_end(s);
}

static void cluster_survey_clear(struct cluster_survey *s)
{
	for (size_t i = 0; i < s->n; i++)
		if (s->nodes[i].told)
			shardd__v1__job_told__free_unpacked(s->nodes[i].told, NULL);
	free(s->nodes);
	s->nodes = NULL;
	s->n = 0;
}

void cluster_survey_free(struct cluster_job *cj)
{
	struct cluster_survey *s = cj->survey;

	if (!s)
		return;
	cj->survey = NULL;
	cluster_survey_end(s);
	cluster_survey_clear(s);
	free(s);
}

static void cluster_survey_send(struct cluster_job *cj, struct peer *to, uint64_t id,
				const char *origin)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	Shardd__V1__JobAsk ask = SHARDD__V1__JOB_ASK__INIT;

	ask.id = id;
	ask.origin = (char *)origin;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_ASK;
	m.ask = &ask;
	cluster_send(cj, to, &m);
}

/* Ask a node that this one leads, if there is a link to it. */
static void cluster_survey_ask_led(struct cluster_job *cj, struct cluster_survey *s,
				   struct survey_node *n)
{
	struct peer *p = cluster_survey_peer(cj, n->name);

	n->no_link = !p;
	if (p)
		cluster_survey_send(cj, p, s->id, cj->c->node);
}

static void cluster_survey_ask_all(struct cluster_job *cj, struct cluster_survey *s)
{
	struct peer *leader = cluster_leads(cj) ? NULL : cluster_to_leader(cj);
	const struct job *job = cluster_job_of(cj);
	const struct span *span = job ? job->across.span : NULL;
	struct cluster_node *n, *tmp;

	for (unsigned i = 0; span && i < span->n_nodes; i++)
		if (i != span->self)
			cluster_survey_expect(s, span->nodes[i].name);
	list_for_each (n, tmp, &cj->nodes, link)
		if (n->peer)
			cluster_survey_expect(s, n->name);
	if (leader)
		cluster_survey_expect(s, peer_name(leader));
	for (size_t i = 0; !leader && i < s->n; i++)
		cluster_survey_ask_led(cj, s, &s->nodes[i]);
	if (leader)
		cluster_survey_send(cj, leader, s->id, cj->c->node);
}

static struct cluster_survey *cluster_survey_of(struct cluster_job *cj)
{
	static uint64_t last;
	struct cluster_survey *s = cj->survey;

	if (s && !s->over_us)
		return s; /* one at a time */
	if (!s) {
		s = calloc(1, sizeof(*s));
		if (!s)
			return NULL;
		list_init(&s->asks);
		cj->survey = s;
	}
	cluster_survey_clear(s);
	s->id = ++last;
	s->begun_us = clock_now_us();
	s->over_us = 0;
	cluster_survey_ask_all(cj, s);
	if (cluster_survey_is_whole(s))
		s->over_us = s->begun_us;
	return s;
}

bool cluster_ask(struct cluster_ask *a, struct job *job)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;
	struct cluster_survey *s = cj && cluster_job_of(cj) == job ? cluster_survey_of(cj) : NULL;

	list_init(&a->link);
	if (!s || s->over_us)
		return true;
	list_append(&s->asks, &a->link);
	return false;
}

void cluster_ask_cancel(struct cluster_ask *a)
{
	list_unlink(&a->link);
}

const Shardd__V1__JobTold *cluster_told(const struct job *job, const char *node,
					const char **ret_why)
{
	struct cluster_job *cj = the_cluster ? cluster_find(the_cluster, job->label) : NULL;
	struct survey_node *n = cj && cj->survey ? cluster_survey_node(cj->survey, node) : NULL;
	struct survey_node *leader = n ? cluster_survey_node(cj->survey, cj->leader) : NULL;

	*ret_why = "";
	if (n && n->told)
		return n->told;
	if (!n || n->no_link)
		*ret_why = "there is no link to it, and none through the job's leader";
	else if (leader && leader != n && !leader->told && strcmp(cj->leader, cj->c->node) != 0)
		*ret_why = "the job's leader, through which it is asked, has not answered within "
			   "1 s";
	else
		*ret_why = "it has not answered within 1 s";
	return NULL;
}

/* The leader has said whom it has asked: the others have no link to it. */
static void cluster_survey_asked(struct cluster_survey *s, const Shardd__V1__JobTold *told)
{
	for (size_t i = 0; i < s->n; i++)
		s->nodes[i].no_link = strcmp(s->nodes[i].name, told->node) != 0;
	for (size_t i = 0; i < told->n_asked; i++) {
		struct survey_node *n = cluster_survey_expect(s, told->asked[i]);

		if (n)
			n->no_link = false;
	}
}

/* An answer to this node. */
static void cluster_survey_take(struct cluster_job *cj, const Shardd__V1__JobTold *told)
{
	const struct peer *leader = cluster_to_leader(cj);
	struct cluster_survey *s = cj->survey;
	struct survey_node *n;
	size_t bytes;
	uint8_t *packed;

	if (!s || s->over_us || s->id != told->id)
		return; /* it is late */
	if (leader && strcmp(told->node, peer_name(leader)) == 0 && !cluster_leads(cj))
		cluster_survey_asked(s, told);
	n = cluster_survey_expect(s, told->node);
	if (!n || n->told)
		return;
	bytes = shardd__v1__job_told__get_packed_size(told);
	packed = malloc(bytes + 1);
	if (packed)
		n->told = shardd__v1__job_told__unpack(
			NULL, shardd__v1__job_told__pack(told, packed), packed);
	free(packed);
	if (!n->told)
		log_error("cluster", "no memory for what a node says of a job job=%s node=%s",
			  cj->label, n->name);
	if (cluster_survey_is_whole(s))
		cluster_survey_end(s);
}

/* ------------------------------------------------------------------ at the node that is asked */

/* The names of the nodes other than @but that this one leads. Return: an array of the caller's, whose
 * strings are borrowed; NULL without memory. */
static char **cluster_survey_led(struct cluster_job *cj, const struct peer *but, size_t *ret_n)
{
	struct cluster_node *n, *tmp;
	size_t room = cj->epoch.n_nodes + 1;
	char **names;

	list_for_each (n, tmp, &cj->nodes, link)
		room++;
	*ret_n = 0;
	names = calloc(room, sizeof(char *));
	for (unsigned i = 0; names && cj->epoch.peers && i < cj->epoch.n_nodes; i++)
		if (cj->epoch.peers[i] && cj->epoch.peers[i] != but)
			names[(*ret_n)++] = (char *)peer_name(cj->epoch.peers[i]);
	list_for_each (n, tmp, &cj->nodes, link)
		if (names && !cj->epoch.peers && n->peer && n->peer != but)
			names[(*ret_n)++] = n->name;
	return names;
}

/* @asked: borrowed. */
static void cluster_survey_answer(struct cluster_job *cj, struct peer *to,
				  const Shardd__V1__JobAsk *ask, char **asked, size_t n_asked)
{
	const struct job *job = cluster_job_of(cj);
	Shardd__V1__JobTold none = SHARDD__V1__JOB_TOLD__INIT;
	Shardd__V1__JobTold *made = job ? cluster_told_new(job, cj->c->node) : NULL, told;
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;

	told = made ? *made : none; /* what it borrows is not freed with it */
	told.id = ask->id;
	told.origin = ask->origin;
	told.node = cj->c->node;
	told.asked = asked;
	told.n_asked = n_asked;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_TOLD;
	m.told = &told;
	if (made || !job)
		cluster_send(cj, to, &m);
	if (made)
		shardd__v1__job_told__free_unpacked(made, NULL);
}

void cluster_answer_nothing(struct cluster *c, struct peer *from, const Shardd__V1__JobMessage *m)
{
	struct cluster_job cj = { .c = c };

	text_copy(cj.label, sizeof(cj.label), m->job);
	cluster_survey_answer(&cj, from, m->ask, NULL, 0);
}

void cluster_on_ask(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobAsk *ask)
{
	char **names;
	size_t n;

	if (from == cluster_to_leader(cj) && !cluster_leads(cj)) {
		cluster_survey_answer(cj, from, ask, NULL, 0);
		return;
	}
	if (strcmp(ask->origin, peer_name(from)) != 0) {
		peer_end(from, "it asks in the name of another node");
		return;
	}
	names = cluster_survey_led(cj, from, &n);
	for (size_t i = 0; names && i < n; i++)
		cluster_survey_send(cj, cluster_survey_peer(cj, names[i]), ask->id, ask->origin);
	cluster_survey_answer(cj, from, ask, names, names ? n : 0);
	free(names);
}

void cluster_on_told(struct cluster_job *cj, struct peer *from, const Shardd__V1__JobTold *told)
{
	Shardd__V1__JobMessage m = SHARDD__V1__JOB_MESSAGE__INIT;
	struct peer *to;

	if (from != cluster_to_leader(cj) && strcmp(told->node, peer_name(from)) != 0) {
		peer_end(from, "it answers in the name of another node");
		return;
	}
	if (strcmp(told->origin, cj->c->node) == 0) {
		cluster_survey_take(cj, told);
		return;
	}
	to = cluster_leads(cj) ? cluster_survey_peer(cj, told->origin) : NULL;
	m.body_case = SHARDD__V1__JOB_MESSAGE__BODY_TOLD;
	m.told = (Shardd__V1__JobTold *)told;
	cluster_send(cj, to, &m);
}
