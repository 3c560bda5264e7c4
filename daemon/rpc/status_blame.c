#include "rpc/status_blame.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "rpc/status_fill.h"

/* Collectives that are looked at, and sentences. */
#define BLAME_OPS   64u
#define BLAME_LINES 16u

/* A collective that ranks wait in. */
struct blame_op {
	const Shardd__V1__JobRankTold *first; /* who waits longest */
	const Shardd__V1__JobGroupTold *group;
	uint32_t waiting; /* ranks */
	uint32_t lacking; /* ranks that have not announced it */
};

/* A rank that others wait for. */
struct blame_rank {
	uint32_t rank, holds;
	const struct blame_op *op; /* that is waited in longest; NULL: nobody waits for it */
};

struct blame {
	const struct status_blame *in;
	struct blame_op ops[BLAME_OPS];
	size_t n_ops;
	struct blame_rank *ranks; /* by rank, then as they are told */
};

/* ------------------------------------------------------------------- who waits where */

static const Shardd__V1__JobGroupTold *status_blame_group(const struct status_blame *in,
							  uint64_t key)
{
	for (size_t i = 0; i < in->n_told; i++)
		for (size_t k = 0; k < in->told[i]->n_groups; k++)
			if (in->told[i]->groups[k]->group == key)
				return in->told[i]->groups[k];
	return NULL;
}

static struct blame_op *status_blame_op_of(struct blame *b, const Shardd__V1__JobRankTold *r)
{
	for (size_t i = 0; i < b->n_ops; i++)
		if (b->ops[i].first->group == r->group && b->ops[i].first->number == r->number)
			return &b->ops[i];
	return NULL;
}

static void status_blame_add_rank(struct blame *b, const Shardd__V1__JobRankTold *r)
{
	struct blame_op *op = status_blame_op_of(b, r);

	if (!op && b->n_ops < BLAME_OPS) {
		op = &b->ops[b->n_ops];
		*op = (struct blame_op){ .first = r, .group = status_blame_group(b->in, r->group) };
		b->n_ops += op->group != NULL;
	}
	if (!op || !op->group)
		return;
	op->waiting++;
	if (r->wait_us > op->first->wait_us)
		op->first = r;
}

/* Has @rank not announced what @op waits for? */
static bool status_blame_lacks(const struct blame *b, const struct blame_op *op, uint32_t rank)
{
	const Shardd__V1__JobRankTold *r = b->in->ranks[rank];

	if (!r || strcmp(r->state, "JOINED") != 0)
		return true;
	for (size_t i = 0; i < r->n_last; i++)
		if (r->last[i]->group == op->first->group)
			return r->last[i]->number < op->first->number;
	return !r->cut;
}

static void status_blame_look_at(struct blame *b, struct blame_op *op)
{
	for (size_t i = 0; i < op->group->n_ranks; i++) {
		uint32_t rank = op->group->ranks[i];
		struct blame_rank *to = rank < b->in->world ? &b->ranks[rank] : NULL;

		if (!to || !status_blame_lacks(b, op, rank))
			continue;
		op->lacking++;
		to->holds += op->waiting;
		if (!to->op || op->first->wait_us > to->op->first->wait_us)
			to->op = op;
	}
}

/* It waits for others itself, and they are not there. */
static bool status_blame_is_held(struct blame *b, uint32_t rank)
{
	const Shardd__V1__JobRankTold *r = b->in->ranks[rank];
	const struct blame_op *op = r && r->for_ranks ? status_blame_op_of(b, r) : NULL;

	return op && op->lacking;
}

static int status_blame_compare(const void *x, const void *y)
{
	const struct blame_rank *a = x, *b = y;
	uint64_t a_us = a->op->first->wait_us, b_us = b->op->first->wait_us;

	if (a_us != b_us)
		return a_us > b_us ? -1 : 1;
	if (a->holds != b->holds)
		return a->holds > b->holds ? -1 : 1;
	return a->rank < b->rank ? -1 : 1;
}

/* Those that hold up others come to the front. @circle: also if others hold them up. */
static size_t status_blame_choose(struct blame *b, bool circle)
{
	size_t n = 0;

	for (uint32_t r = 0; r < b->in->world; r++) {
		struct blame_rank found = b->ranks[r];

		if (found.op && (circle || !status_blame_is_held(b, r))) {
			b->ranks[r] = b->ranks[n];
			b->ranks[n++] = found;
		}
	}
	if (n)
		qsort(b->ranks, n, sizeof(*b->ranks), status_blame_compare);
	return n;
}

/* ------------------------------------------------------------------------- sentences */

static void status_blame_seconds(uint64_t us, char ret[32])
{
	snprintf(ret, 32, "%llu.%llu s", (unsigned long long)(us / 1000000),
		 (unsigned long long)(us / 100000 % 10));
}

/* "Reduce of out, number 7 in group world" */
static void status_blame_describe(const struct blame_op *op, char *buf, size_t bytes)
{
	const Shardd__V1__JobRankTold *r = op->first;
	bool unit = *r->on && strcmp(r->on, op->group->name) != 0;

	snprintf(buf, bytes, "%.40s%s%.64s, number %llu in group %.64s", r->op, unit ? " of " : "",
		 unit ? r->on : "", (unsigned long long)r->number, op->group->name);
}

static const char *status_blame_state(const Shardd__V1__JobRankTold *r)
{
	return strcmp(r->state, "EMPTY") == 0  ? "it has not joined"
	       : strcmp(r->state, "LEFT") == 0 ? "it has left"
	       : strcmp(r->state, "DEAD") == 0 ? "its process is gone"
					       : "it has to join again";
}

/* What the rank does instead. */
static void status_blame_instead(const struct blame *b, uint32_t rank, char *buf, size_t bytes)
{
	const Shardd__V1__JobRankTold *r = b->in->ranks[rank];
	char time[32];

	if (!r) {
		snprintf(buf, bytes, "what it does is not known: %.160s", b->in->why[rank]);
	} else if (strcmp(r->state, "JOINED") != 0) {
		snprintf(buf, bytes, "%s", status_blame_state(r));
	} else if (*r->op) {
		status_blame_seconds(r->op_us, time);
		snprintf(buf, bytes, "it is in %.40s%s%.64s for %s%s%.200s", r->op,
			 *r->on ? " of " : "", r->on, time,
			 *r->waits_for ? ", which waits for " : "", r->waits_for);
	} else if (r->idle_us) {
		status_blame_seconds(r->idle_us, time);
		snprintf(buf, bytes, "it has no op; the last one, %.100s, ended %s ago", r->last_op,
			 time);
	} else {
		snprintf(buf, bytes, "it has no op");
	}
}

/* " (pid 44, stopped)" */
static void status_blame_process(const Shardd__V1__JobRankTold *told, char ret[64])
{
	static const struct {
		char letter;
		const char *words;
	} states[] = { { 'R', "running" },
		       { 'S', "sleeping" },
		       { 'D', "in a sleep that cannot be interrupted" },
		       { 'T', "stopped" },
		       { 't', "stopped by a debugger" } };
	const char *words = "";

	ret[0] = '\0';
	if (!told || told->pid <= 0)
		return;
	for (size_t i = 0; i < ARRAY_SIZE(states); i++)
		if (*told->process_state == states[i].letter)
			words = states[i].words;
	snprintf(ret, 64, " (pid %d%s%s)", told->pid, *words ? ", " : "", words);
}

static void status_blame_tell_rank(struct arena *a, const struct blame *b,
				   const struct blame_rank *r, Shardd__V1__BlameStatus *to)
{
	const Shardd__V1__JobRankTold *told = b->in->ranks[r->rank];
	const char *node = b->in->nodes[r->rank];
	char what[256], instead[512], time[32], pid[64], text[1024];

	status_blame_describe(r->op, what, sizeof(what));
	status_blame_instead(b, r->rank, instead, sizeof(instead));
	status_blame_seconds(r->op->first->wait_us, time);
	status_blame_process(told, pid);
	snprintf(text, sizeof(text),
		 "rank %u%s%s%.64s has not begun %s, in which %u rank%s wait%s for %s: %s", r->rank,
		 pid, *node ? " on node " : "", node, what, r->op->waiting,
		 r->op->waiting == 1 ? "" : "s", r->op->waiting == 1 ? "s" : "", time, instead);
	to->rank = r->rank;
	to->node = status_text(a, node);
	to->pid = told ? told->pid : 0;
	to->process_state = status_text(a, told ? told->process_state : "");
	to->last_op = status_text(a, told ? told->last_op : "");
	to->holds = r->holds;
	to->wait_us = r->op->first->wait_us;
	to->text = status_text(a, text);
}

/* All ranks are there. */
static void status_blame_tell_op(struct arena *a, const struct blame_op *op,
				 Shardd__V1__BlameStatus *to)
{
	char what[256], time[32], text[1024];

	status_blame_describe(op, what, sizeof(what));
	status_blame_seconds(op->first->wait_us, time);
	snprintf(text, sizeof(text), "all ranks have begun %s, for %s%s%.300s", what, time,
		 *op->first->waits_for ? ": it waits for " : "", op->first->waits_for);
	to->rank = -1;
	to->wait_us = op->first->wait_us;
	to->text = status_text(a, text);
}

static void status_blame_tell(struct arena *a, const struct blame *b, size_t n,
			      Shardd__V1__JobStatus *j)
{
	size_t whole = 0, lines;

	for (size_t i = 0; i < b->n_ops; i++)
		whole += !b->ops[i].lacking;
	lines = n + whole < BLAME_LINES ? n + whole : BLAME_LINES;
	j->blame = lines ? STATUS_MESSAGES(a, lines, BlameStatus, blame_status) : NULL;
	for (size_t i = 0; j->blame && i < n && j->n_blame < lines; i++)
		status_blame_tell_rank(a, b, &b->ranks[i], j->blame[j->n_blame++]);
	for (size_t i = 0; j->blame && i < b->n_ops && j->n_blame < lines; i++)
		if (!b->ops[i].lacking)
			status_blame_tell_op(a, &b->ops[i], j->blame[j->n_blame++]);
}

void status_blame(struct arena *a, const struct status_blame *in, Shardd__V1__JobStatus *j)
{
	struct blame b = { .in = in };
	size_t n;

	b.ranks = arena_take(a, in->world * sizeof(*b.ranks));
	if (!b.ranks)
		return;
	for (uint32_t r = 0; r < in->world; r++) {
		b.ranks[r].rank = r;
		if (in->ranks[r] && in->ranks[r]->for_ranks)
			status_blame_add_rank(&b, in->ranks[r]);
	}
	for (size_t i = 0; i < b.n_ops; i++)
		status_blame_look_at(&b, &b.ops[i]);
	n = status_blame_choose(&b, false);
	if (!n)
		n = status_blame_choose(&b, true);
	status_blame_tell(a, &b, n, j);
}
