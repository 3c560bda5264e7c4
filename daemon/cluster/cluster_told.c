/* What the ranks of this node do, in the words of the links. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/cluster_impl.h"
#include "core/check.h"
#include "core/clock.h"
#include "op/op.h"
#include "op/op_time.h"
#include "op/op_util.h"

/* Groups of a rank whose numbers are told, and groups whose members are. */
#define TOLD_GROUPS 64u

/* Strings and arrays are freed with the message, by free. */
static bool cluster_told_text(char **field, const char *text)
{
	char *copy = *text ? strdup(text) : *field;

	if (copy)
		*field = copy;
	return copy;
}

/* ----------------------------------------------------------------------- groups */

/* The last collective that member @index, of those here, has announced. */
static uint64_t cluster_told_last(const struct group *g, uint32_t index)
{
	const struct match *m = &g->match;

	for (size_t i = 0; i < m->n_slots && m->slots[i].number <= m->next[index]; i++) {
		const struct match_slot *s = &m->slots[i];

		if (!s->complete && !s->failed && !s->entries[index])
			return s->number - 1;
	}
	return m->next[index];
}

static bool cluster_told_lasts(const struct job *job, Shardd__V1__JobRankTold *r)
{
	r->last = calloc(TOLD_GROUPS, sizeof(struct Shardd__V1__JobLast *));
	for (uint32_t i = 0; r->last && i < job->n_groups; i++) {
		const struct group *g = job->groups[i];
		Shardd__V1__JobLast *l;
		uint32_t index;

		if (!group_index_here(g, r->rank, &index))
			continue;
		if (r->n_last == TOLD_GROUPS) {
			r->cut = true;
			return true;
		}
		l = malloc(sizeof(*l));
		if (!l)
			return false;
		shardd__v1__job_last__init(l);
		l->group = group_key(g);
		l->number = cluster_told_last(g, index);
		r->last[r->n_last++] = l;
	}
	return r->last;
}

static bool cluster_told_has_group(const Shardd__V1__JobTold *t, uint64_t key)
{
	for (size_t i = 0; i < t->n_groups; i++)
		if (t->groups[i]->group == key)
			return true;
	return false;
}

/* The members of the groups in which ranks wait for others. */
static bool cluster_told_group(Shardd__V1__JobTold *t, const struct group *g)
{
	Shardd__V1__JobGroupTold *to;

	if (t->n_groups == TOLD_GROUPS || cluster_told_has_group(t, group_key(g)))
		return true;
	to = malloc(sizeof(*to));
	if (!to)
		return false;
	shardd__v1__job_group_told__init(to);
	t->groups[t->n_groups++] = to;
	to->group = group_key(g);
	to->ranks = calloc(group_size(g), sizeof(*to->ranks));
	if (!to->ranks || !cluster_told_text(&to->name, g->rec->name))
		return false;
	to->n_ranks = group_size(g);
	memcpy(to->ranks, g->rec->ranks, to->n_ranks * sizeof(*to->ranks));
	return true;
}

/* ------------------------------------------------------------------------ ranks */

/* The oldest that waits for other ranks, else the oldest. */
static const struct op *cluster_told_op_of(const struct member *m)
{
	const struct op *op, *tmp, *first = NULL;

	list_for_each (op, tmp, &((struct member *)m)->ops, link) {
		if (op->answered)
			continue;
		if (op_waits_for_ranks(op))
			return op;
		first = first ? first : op;
	}
	if (!first && !list_empty(&m->held))
		first = list_first(&((struct member *)m)->held, struct op, link);
	return first;
}

static bool cluster_told_op(Shardd__V1__JobTold *t, const struct op *op, Shardd__V1__JobRankTold *r)
{
	uint64_t now = clock_now_us();
	char waits[512];

	op_waits_for(op, waits, sizeof(waits));
	r->op_us = now > op->announced_us ? now - op->announced_us : 0;
	r->wait_us = op_waited_us(op, now);
	r->for_ranks = op_waits_for_ranks(op);
	if (op->group) {
		r->group = group_key(op->group);
		r->number = op->numbered ? op->entry.number : 0;
	}
	if (r->for_ranks && !cluster_told_group(t, op->group))
		return false;
	return cluster_told_text(&r->op, op->type->name) &&
	       cluster_told_text(&r->on, op->unit    ? op->unit->rec->name
					 : op->group ? op->group->rec->name
						     : "") &&
	       cluster_told_text(&r->waits_for, waits);
}

static bool cluster_told_member(Shardd__V1__JobTold *t, const struct member *m,
				Shardd__V1__JobRankTold *r)
{
	const struct op *op = m->state == MEMBER_JOINED ? cluster_told_op_of(m) : NULL;
	uint64_t now = clock_now_us();
	char last[128], state[2] = "";

	state[0] = proc_state(m->proc);
	snprintf(last, sizeof(last), "%s%s%s", m->last.op, m->last.unit[0] ? " " : "",
		 m->last.unit);
	r->pid = member_pid(m);
	r->pending = m->pending;
	r->waited_us = m->waits.us;
	r->late_us = m->waits.late_us;
	if (!op && m->last.ended_us && m->last.ended_us <= now)
		r->idle_us = now - m->last.ended_us;
	return cluster_told_text(&r->last_op, last) &&
	       cluster_told_text(&r->process_state, state) && (!op || cluster_told_op(t, op, r));
}

/* @t has room for it. */
static bool cluster_told_rank(Shardd__V1__JobTold *t, const struct job *job, uint32_t rank)
{
	const struct member *m = job->ranks[rank];
	const struct device *d = job->placed[rank];
	const struct group *world = job->groups[0];
	Shardd__V1__JobRankTold *r = malloc(sizeof(*r));
	uint32_t index;

	if (!r)
		return false;
	shardd__v1__job_rank_told__init(r);
	t->ranks[t->n_ranks++] = r;
	r->rank = rank;
	r->next_number = group_is_here(world, rank, &index) ? world->match.next[index] + 1 : 0;
	return cluster_told_text(&r->state, m ? member_state_name(m->state) : "EMPTY") &&
	       cluster_told_text(&r->device, d ? backend_info(d->backend)->id : "") &&
	       cluster_told_lasts(job, r) && (!m || cluster_told_member(t, m, r));
}

static bool cluster_told_fill(Shardd__V1__JobTold *t, const struct job *job, const char *node)
{
	uint32_t world = job->rec->world_size;
	char waits[400];
	bool there;

	cluster_job_waits(job, waits, sizeof(waits));
	t->ranks = calloc(world, sizeof(struct Shardd__V1__JobRankTold *));
	t->groups = calloc(TOLD_GROUPS, sizeof(struct Shardd__V1__JobGroupTold *));
	there = t->ranks && t->groups && cluster_told_text(&t->node, node) &&
		cluster_told_text(&t->waits, waits);
	for (uint32_t r = 0; there && r < world; r++)
		if (span_is_here(job->across.span, r))
			there = cluster_told_rank(t, job, r);
	return there;
}

Shardd__V1__JobTold *cluster_told_new(const struct job *job, const char *node)
{
	Shardd__V1__JobTold *t = malloc(sizeof(*t));

	if (!t)
		return NULL;
	shardd__v1__job_told__init(t);
	if (cluster_told_fill(t, job, node))
		return t;
	shardd__v1__job_told__free_unpacked(t, NULL);
	return NULL;
}

Shardd__V1__JobTold *cluster_told_here(const struct job *job)
{
	return cluster_told_new(job, the_cluster ? the_cluster->node : "");
}
