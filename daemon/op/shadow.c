/*
 * Ranks that have no more inputs, while their peers have. Each collective of their group gets
 * an op in their place, a shadow: it takes its number with the first op of a peer at that
 * number, is announced as that one's equal, and contributes zeros. So peers go on, and when
 * all have joined everybody has the same numbers.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "op/op_ddp.h"
#include "op/table.h"

static struct op *next_join(const struct group *g, struct list **at)
{
	if (*at == &g->joins)
		return NULL;
	return CONTAINER_OF(list_entry(*at, struct parked, link), struct op, parked);
}

/* What differs from the peer's: nothing of its memory is a shadow's. */
static void adapt(struct op *shadow)
{
	if (shadow->type == &op_sparse) {
		shadow->args.sparse.rows = NULL;
		shadow->args.sparse.n = 0;
	}
	if (shadow->type == &op_reduce) {
		shadow->args.reduce.unused = true;
		shadow->args.reduce.tensors = NULL;
		shadow->args.reduce.n_tensors = 0;
	}
	if (shadow->type == &op_step)
		settings_ref(shadow->args.step.rates.settings);
	if (shadow->type == &op_ddp_bucket)
		shadow->args.ddp.rank = &shadow->args.ddp.d->ranks[shadow->entry.index];
}

static int refuse(struct op *op, const struct op *join)
{
	return fault_set(
		&op->fault, FAULT_STATE, NULL,
		"%s: rank %u (pid %d) has no more inputs (JoinUneven) and cannot take part "
		"in it with zeros: it is allowed when all ranks of group '%.64s' have joined",
		op->type->name, join->m->rank, member_pid(join->m), op->group->rec->name);
}

/* A rank's Reduce counts as zeros where gradients are whole on every rank, as with DDP; a share
 * of the optimizer's own would be wanting. */
static bool is_allowed(const struct op *op)
{
	const state_unit *rec = op->unit ? op->unit->rec : NULL;

	if (op->type != &op_reduce)
		return op->type->shadowed;
	return rec->reduce_profile >= PROFILE_DDP && rec->optimizer->when != OPTIM_BY_TRAINER;
}

/* Arguments that lie in @op's own memory, for a shadow to have its own. @ret: NULL: there are none.
 * Return: 0 or -ENOMEM. */
static int copy_owned(const struct op *op, void **ret)
{
	size_t bytes = op->type == &op_clip ? op->args.clip.n_units * sizeof(uint32_t) : 0;

	*ret = bytes ? malloc(bytes) : NULL;
	if (*ret)
		memcpy(*ret, op->owned, bytes);
	return bytes && !*ret ? -ENOMEM : 0;
}

/* Return: the shadow, or NULL: none was made, and @op fails. */
static struct op *make(struct op *join, struct op *op)
{
	struct op *shadow = NULL;
	void *owned = NULL;

	if (is_allowed(op) && copy_owned(op, &owned) == 0)
		shadow = op_shadow(join, op);
	if (shadow) {
		join->args.join.shadowed++;
		shadow->owned = owned;
		adapt(shadow);
		return shadow;
	}
	free(owned);
	if (is_allowed(op))
		fault_errno(&op->fault, -ENOMEM, "taking part for a rank that has joined");
	else
		refuse(op, join);
	match_skip(&op->group->match, join->entry.index);
	return NULL;
}

void shadow_number(struct op *op)
{
	struct group *g = op->group;
	struct op *join;

	for (struct list *at = g->joins.next; (join = next_join(g, &at)); at = at->next)
		if (g->match.next[join->entry.index] < op->entry.number)
			(void)make(join, op);
}

void shadow_skip(struct group *g, uint64_t number)
{
	struct op *join;

	for (struct list *at = g->joins.next; (join = next_join(g, &at)); at = at->next)
		if (g->match.next[join->entry.index] < number)
			match_skip(&g->match, join->entry.index);
}

/* In texts it is the one whose ask it repeats. */
static void stand_in(struct op *shadow, const struct match_entry *for_whom)
{
	shadow->entry.print = for_whom->print;
	shadow->entry.rank = for_whom->rank;
	shadow->entry.pid = for_whom->pid;
}

/* One that is being ended is not to be ended again by what follows from that. */
static struct op *shadow_at(const struct member *m, const struct group *g, uint64_t number)
{
	struct op *op, *tmp;

	list_for_each (op, tmp, &((struct member *)m)->ops, link)
		if (op->shadow && !op->announced && op->state != OP_RUN && op->group == g &&
		    op->entry.number == number)
			return op;
	return NULL;
}

void shadow_announce(struct op *op)
{
	struct group *g = op->group;

	for (uint32_t i = 0; g->shadows && !op->shadow && i < group_size(g); i++) {
		struct member *m = g->job->ranks[g->rec->ranks[i]];
		struct op *shadow = m ? shadow_at(m, g, op->entry.number) : NULL;

		if (!shadow)
			continue;
		stand_in(shadow, &op->entry);
		op_announce(shadow);
	}
}

void shadow_refuse(struct group *g, uint64_t number, const struct op *op, const struct fault *fault)
{
	for (uint32_t i = 0; g->shadows && i < group_size(g); i++) {
		struct member *m = g->job->ranks[g->rec->ranks[i]];
		struct op *shadow = m ? shadow_at(m, g, number) : NULL;

		if (!shadow || shadow == op)
			continue;
		shadow->fault = *fault;
		op_end(shadow);
	}
}

/* An op of a peer with that number that is not over. */
static struct op *peer_at(const struct group *g, uint64_t number)
{
	for (uint32_t i = 0; i < group_size(g); i++) {
		struct member *m = g->job->ranks[g->rec->ranks[i]];
		struct op *op, *tmp;

		if (!m)
			continue;
		list_for_each (op, tmp, &m->ops, link)
			if (op->numbered && !op->shadow && op->group == g &&
			    op->entry.number == number)
				return op;
	}
	return NULL;
}

/* What peers have asked for already. */
static void catch_up(struct op *join)
{
	struct group *g = join->group;
	uint32_t index = join->entry.index;

	while (g->match.next[index] < match_last(&g->match)) {
		uint64_t number = g->match.next[index] + 1;
		struct match_slot *slot = match_slot(&g->match, number);
		struct op *peer = slot && slot->failed ? NULL : peer_at(g, number);
		struct op *shadow = NULL;

		if (!peer) {
			match_skip(&g->match, index);
			continue;
		}
		shadow = make(join, peer);
		if (!shadow) {
			op_cancel(peer, peer->fault.code, "");
			continue;
		}
		slot = match_slot(&g->match, number);
		if (slot && slot->announced) {
			stand_in(shadow, slot->first);
			op_announce(shadow);
		}
	}
}

void shadow_begin(struct op *join)
{
	catch_up(join);
}
