/*
 * JoinUneven with error_if_uneven: a rank without inputs takes no part in what its peers ask
 * for. Instead the first collective that it would have to take part in is the end for all
 * ranks of the group: those that have joined are told by their JoinUneven, the others
 * by their collectives, each of which fails until their rank has called JoinUneven too, and
 * been told there once more. Numbers are equal again then, and the group goes on.
 */
#include "op/uneven.h"

#include <string.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/surrogate.h"
#include "op/uneven_nodes.h"

static struct op *uneven_first_join(const struct group *g)
{
	if (list_empty(&g->joins.waiters))
		return NULL;
	return CONTAINER_OF(list_entry(g->joins.waiters.next, struct waiter, link), struct op,
			    waiter);
}

static bool uneven_has_joined(const struct group *g, const struct member *m)
{
	for (const struct list *at = g->joins.waiters.next; at != &g->joins.waiters; at = at->next)
		if (CONTAINER_OF(list_entry(at, struct waiter, link), struct op, waiter)->m == m)
			return true;
	return false;
}

/* Its end is under way. */
static bool uneven_is_failing(struct group *g, const struct op *op)
{
	const struct match_slot *slot = match_slot(&g->match, op->entry.number);

	return op->announced && slot && slot->failed;
}

/* A collective of the group that waits, other than @but. */
static struct op *uneven_waiting(struct group *g, const struct op *but)
{
	for (uint32_t i = 0; i < group_size(g); i++) {
		struct member *m = g->job->ranks[g->rec->ranks[i]];
		struct op *op, *tmp;

		if (!m)
			continue;
		list_for_each (op, tmp, &m->ops, link)
			if (op != but && op->numbered && op->group == g && op->state != OP_RUN &&
			    !uneven_is_failing(g, op))
				return op;
	}
	return NULL;
}

static void uneven_align(struct group *g)
{
	uint64_t last = match_last(&g->match);

	for (uint32_t i = 0; i < g->match.size; i++)
		while (g->match.next[i] < last)
			match_skip(&g->match, i);
}

/* @goes_on: the collective of a peer, of which nothing is known afterwards, nor of @join.
 * @but: not to be ended here. */
static void uneven_tell(struct op *join, const struct op *goes_on, const struct op *but)
{
	struct group *g = join->group;
	struct fault f = FAULT_NULL;
	struct op *op;

	fault_set(&f, FAULT_STATE, NULL,
		  "rank %u (pid %d) has no more inputs, but rank %u (pid %d) asks for %s: with "
		  "error_if_uneven, each rank of group '%.64s' must now call JoinUneven",
		  join->m->rank, member_pid(join->m), goes_on->m->rank, member_pid(goes_on->m),
		  goes_on->type->name, g->rec->name);
	g->uneven = f;
	memset(g->untold, true, group_size(g) * sizeof(*g->untold));
	g->n_untold = group_size(g);
	while ((op = uneven_first_join(g))) {
		CHECK(g->untold[op->entry.index] && g->n_untold > 0);
		g->untold[op->entry.index] = false;
		g->n_untold--;
		op_cancel(op, f.code, f.text);
	}
	while ((op = uneven_waiting(g, but)))
		op_cancel(op, f.code, f.text);
	uneven_align(g);
}

/* Have those who have joined asked for error_if_uneven? Then there are no surrogates. */
static bool uneven_strict(const struct group *g)
{
	const struct op *join = uneven_first_join(g);

	return join && join_args(join)->strict;
}

/* If those who have joined have no inputs for it nobody goes on. What they submit for later does not
 * count. */
static int uneven_announce(struct op *op)
{
	struct group *g = op->group;
	struct op *join = uneven_first_join(g);

	if (!uneven_strict(g) || g->match.next[join->entry.index] >= op->entry.number ||
	    uneven_has_joined(g, op->m))
		return 0;
	uneven_tell(join, op, op);
	return fault_set(&op->fault, FAULT_STATE, NULL, "%s", g->uneven.text);
}

/* What peers have asked for already. */
static void uneven_begin_strict(struct op *join)
{
	const struct group *g = join->group;
	uint64_t mine = g->match.next[join->entry.index];

	for (uint32_t i = 0; i < group_size(g); i++) {
		struct member *m = g->job->ranks[g->rec->ranks[i]];
		struct op *op, *tmp;

		if (!m || uneven_has_joined(g, m))
			continue;
		list_for_each (op, tmp, &m->ops, link)
			if (op->numbered && op->group == g && op->state != OP_RUN &&
			    op->entry.number > mine) {
				uneven_tell(join, op, NULL);
				return;
			}
	}
}

/* Has its rank still to be told? */
static int uneven_check(struct op *op)
{
	const struct group *g = op->group;

	if (!g->n_untold || !g->untold[op->entry.index])
		return 0;
	return fault_set(&op->fault, FAULT_STATE, NULL, "%s", g->uneven.text);
}

int uneven_told(struct op *join)
{
	struct group *g = join->group;

	if (!uneven_check(join))
		return 0;
	CHECK(g->n_untold > 0);
	g->untold[join->entry.index] = false;
	g->n_untold--;
	return join->fault.code;
}

static void uneven_number(struct op *op)
{
	if (!uneven_strict(op->group))
		surrogate_number(op);
}

static int uneven_announce_all(struct op *op)
{
	if (uneven_announce(op))
		return (int)op->fault.code;
	surrogate_announce(op);
	return 0;
}

void uneven_begin(struct op *join)
{
	static const struct op_joined_ops joined = {
		.check = uneven_check,
		.number = uneven_number,
		.announce = uneven_announce_all,
		.skip = surrogate_skip,
		.refuse = surrogate_refuse,
		.over = uneven_go_on,
	};

	join->group->joined = &joined;
	if (join_args(join)->strict)
		uneven_begin_strict(join);
	else
		surrogate_begin(join);
}
