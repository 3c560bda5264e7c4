/*
 * Ranks that have no more inputs, while their peers have. Each collective of their group gets
 * an op in their place, a surrogate: it takes its number with the first op of a peer at that
 * number, is announced as that one's equal, and contributes zeros. So peers go on, and when
 * all have joined everybody has the same numbers.
 */
#include "op/surrogate.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "op/op.h"
#include "op/op_run.h"

static struct op *surrogate_next_join(const struct group *g, struct list **at)
{
	if (*at == &g->joins.waiters)
		return NULL;
	return CONTAINER_OF(list_entry(*at, struct waiter, link), struct op, waiter);
}

static int surrogate_impossible(const struct op *op, const struct op *join, struct fault *f)
{
	return fault_set(
		f, FAULT_STATE, NULL,
		"%s: rank %u (pid %d) has no more inputs (JoinUneven) and cannot take part "
		"in it with zeros: call it when all ranks of group '%.64s' have joined",
		op->type->name, join->m->rank, member_pid(join->m), op->group->rec->name);
}

static bool surrogate_is_allowed(const struct op *op)
{
	return op->type->surrogates &&
	       (!op->type->surrogate_allowed || op->type->surrogate_allowed(op));
}

int surrogate_check(const struct op *op, const struct op *join, struct fault *f)
{
	return surrogate_is_allowed(op) ? 0 : surrogate_impossible(op, join, f);
}

/* Arguments that lie in @op's own memory, for a surrogate to have its own. @ret: NULL: there are none.
 * Return: 0 or -ENOMEM. */
static int surrogate_copy_owned(const struct op *op, void **ret)
{
	size_t bytes = op->type->surrogate_owned ? op->type->surrogate_owned(op) : 0;

	*ret = bytes ? malloc(bytes) : NULL;
	if (*ret)
		memcpy(*ret, op->owned, bytes);
	return bytes && !*ret ? -ENOMEM : 0;
}

/* Return: the surrogate, or NULL: none was made, and @op fails. */
static struct op *surrogate_make(struct op *join, struct op *op)
{
	struct op *surrogate = NULL;
	void *owned = NULL;

	if (surrogate_is_allowed(op) && surrogate_copy_owned(op, &owned) == 0)
		surrogate = op_new_surrogate(join, op);
	if (surrogate) {
		CHECK(surrogate->entry.number == op->entry.number);
		join_args(join)->surrogates++;
		if (join_args(join)->by_active)
			surrogate->surrogate = OP_SURROGATE_BY_ACTIVE;
		surrogate->owned = owned;
		if (op->type->surrogate_init)
			op->type->surrogate_init(surrogate);
		return surrogate;
	}
	free(owned);
	if (surrogate_is_allowed(op))
		fault_errno(&op->fault, -ENOMEM, "taking part for a rank that has joined");
	else
		surrogate_impossible(op, join, &op->fault);
	match_skip(&op->group->match, join->entry.index);
	return NULL;
}

void surrogate_number(struct op *op)
{
	struct group *g = op->group;
	struct op *join;

	for (struct list *at = g->joins.waiters.next; (join = surrogate_next_join(g, &at));
	     at = at->next)
		if (g->match.next[join->entry.index] < op->entry.number)
			(void)surrogate_make(join, op);
}

void surrogate_skip(struct group *g, uint64_t number)
{
	struct op *join;

	for (struct list *at = g->joins.waiters.next; (join = surrogate_next_join(g, &at));
	     at = at->next)
		if (g->match.next[join->entry.index] < number)
			match_skip(&g->match, join->entry.index);
}

/* In texts it is the one whose ask it repeats. */
static void surrogate_stand_in(struct op *surrogate, const struct match_entry *for_whom)
{
	CHECK(surrogate->surrogate && !surrogate->announced);
	surrogate->entry.print = for_whom->print;
	surrogate->entry.rank = for_whom->rank;
	surrogate->entry.pid = for_whom->pid;
}

/* One that is being ended is not to be ended again by what follows from that. */
static struct op *surrogate_at(const struct member *m, const struct group *g, uint64_t number)
{
	struct op *op, *tmp;

	list_for_each (op, tmp, &((struct member *)m)->ops, link)
		if (op->surrogate && !op->announced && op->state != OP_RUN && op->group == g &&
		    op->entry.number == number)
			return op;
	return NULL;
}

void surrogate_announce(struct op *op)
{
	struct group *g = op->group;

	for (uint32_t i = 0; g->surrogates && !op->surrogate && i < group_size(g); i++) {
		struct member *m = g->job->ranks[g->rec->ranks[i]];
		struct op *surrogate = m ? surrogate_at(m, g, op->entry.number) : NULL;

		if (!surrogate)
			continue;
		surrogate_stand_in(surrogate, &op->entry);
		op_announce(surrogate);
	}
}

void surrogate_refuse(struct group *g, uint64_t number, const struct op *op,
		      const struct fault *fault)
{
	for (uint32_t i = 0; g->surrogates && i < group_size(g); i++) {
		struct member *m = g->job->ranks[g->rec->ranks[i]];
		struct op *surrogate = m ? surrogate_at(m, g, number) : NULL;

		if (!surrogate || surrogate == op)
			continue;
		surrogate->fault = *fault;
		op_end(surrogate);
	}
}

/* An op of a peer with that number that is not over. */
static struct op *surrogate_peer_at(const struct group *g, uint64_t number)
{
	for (uint32_t i = 0; i < group_size(g); i++) {
		struct member *m = g->job->ranks[g->rec->ranks[i]];
		struct op *op, *tmp;

		if (!m)
			continue;
		list_for_each (op, tmp, &m->ops, link)
			if (op->numbered && !op->surrogate && op->group == g &&
			    op->entry.number == number)
				return op;
	}
	return NULL;
}

/* What peers have asked for already. */
static void surrogate_catch_up(struct op *join)
{
	struct group *g = join->group;
	uint32_t index = join->entry.index;

	while (g->match.next[index] < match_last(&g->match)) {
		uint64_t number = g->match.next[index] + 1;
		struct match_slot *slot = match_slot(&g->match, number);
		struct op *peer = slot && slot->failed ? NULL : surrogate_peer_at(g, number);
		struct op *surrogate = NULL;

		if (!peer) {
			match_skip(&g->match, index);
			continue;
		}
		surrogate = surrogate_make(join, peer);
		if (!surrogate) {
			op_cancel(peer, peer->fault.code, "");
			continue;
		}
		slot = match_slot(&g->match, number);
		if (slot && slot->announced) {
			surrogate_stand_in(surrogate, slot->first);
			op_announce(surrogate);
		}
	}
}

void surrogate_begin(struct op *join)
{
	surrogate_catch_up(join);
}
