#include "op/uneven_nodes.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/fnv.h"
#include "core/text.h"
#include "job/span.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/surrogate.h"

static struct op *uneven_nodes_first_join(const struct group *g)
{
	if (list_empty(&g->joins.waiters))
		return NULL;
	return CONTAINER_OF(list_entry(g->joins.waiters.next, struct waiter, link), struct op,
			    waiter);
}

/* An epoch that is over takes part in nothing more. */
static bool uneven_nodes_is_alive(const struct group *g)
{
	return group_spans(g) && !g->job->across.span->over;
}

/* What units and groups are called by number: nodes may have made them in different orders. */
static uint64_t uneven_nodes_units(const struct job *job)
{
	uint64_t hash = FNV_BEGIN;

	for (uint32_t i = 0; i < job->n_units; i++)
		hash = fnv_add(hash, job->units[i]->rec->dropped ? 0 : job->units[i]->key);
	for (uint32_t i = 0; i < job->n_groups; i++)
		hash = fnv_add(hash, group_key(job->groups[i]));
	return hash;
}

/* -------------------------------------------------------------- what ranks here ask for */

/* The op of a rank with inputs; NULL: none of them has. */
static const struct op *uneven_nodes_active(struct group *g, uint64_t number)
{
	const struct match_slot *s = match_slot(&g->match, number);

	for (uint32_t i = 0; s && s->entries && i < g->match.size; i++) {
		const struct op *op =
			s->entries[i] ? CONTAINER_OF(s->entries[i], struct op, entry) : NULL;

		if (op && !op->surrogate)
			return op;
	}
	return NULL;
}

static struct asked *uneven_nodes_describe(const struct group *g, const struct op *op)
{
	bool packs = op->type->surrogates && !op->type->ask && op->request;
	size_t bytes = packs ? protobuf_c_message_get_packed_size(op->request) : 0;
	struct asked *a = asked_new(g->match.user, bytes);

	if (!a)
		return NULL;
	a->number = op->entry.number;
	a->rank = op->entry.rank;
	a->pid = op->entry.pid;
	a->print = op->entry.print;
	a->units = uneven_nodes_units(g->job);
	text_copy(a->type, sizeof(a->type), op->type->name);
	if (packs)
		(void)protobuf_c_message_pack(op->request, a->request);
	if (op->type->ask)
		op->type->ask(op, a->words);
	return a;
}

static void uneven_nodes_no_memory(struct group *g)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL,
		  "there is no memory for what other ranks of job '%s' ask for", g->job->rec->name);
	job_epoch_end(g->job, &f);
}

/* NULL: there was no memory. */
static void uneven_nodes_ask(struct group *g, struct asked *a)
{
	if (!a) {
		uneven_nodes_no_memory(g);
		return;
	}
	if (g->across.n_joined)
		g->job->jobs->ops.asks(g, a);
	asked_insert(&g->across.asks, a);
}

void uneven_announces(struct group *g, uint64_t number)
{
	const struct op *op = uneven_nodes_active(g, number);

	if (op && uneven_nodes_is_alive(g))
		uneven_nodes_ask(g, uneven_nodes_describe(g, op));
}

/* A node without inputs must come to it, too. */
void uneven_refuses(struct group *g, uint64_t number)
{
	struct asked *a;

	if (g->across.told || !uneven_nodes_is_alive(g))
		return;
	a = asked_new(g->match.user, 0);
	if (a) {
		a->number = number;
		a->rank = g->rec->ranks[group_member_here(g, 0)];
		text_copy(a->type, sizeof(a->type), ASKED_REFUSED);
	}
	uneven_nodes_ask(g, a);
}

void uneven_starts(struct group *g, uint64_t number, bool all_know)
{
	if (all_know)
		asked_drop(&g->across.asks, number);
}

/* ----------------------------------------------------------- what ranks elsewhere ask for */

/* Are surrogates here under way? */
static bool uneven_nodes_stands_in(const struct group *g)
{
	for (uint32_t i = 0; i < group_size(g); i++) {
		struct member *m = g->job->ranks[g->rec->ranks[i]];
		struct op *op, *tmp;

		if (!m)
			continue;
		list_for_each (op, tmp, &m->ops, link)
			if (op->surrogate && op->group == g)
				return true;
	}
	return false;
}

/* It fails on all nodes. */
static void uneven_nodes_refuse(struct group *g, const struct asked *a, const struct fault *why)
{
	struct match_entry e = { .number = a->number, .generation = g->match.generation };
	struct fault f = FAULT_NULL;

	fault_set(&f, why->code, NULL, "%s", why->text);
	match_refuse(&g->match, &e, &f);
	surrogate_skip(g, a->number);
}

/* Surrogates of all ranks here, from @op of a peer. */
static void uneven_nodes_make(struct group *g, struct op *op)
{
	surrogate_number(op);
	if (op->fault.code)
		uneven_nodes_no_memory(g);
	else
		surrogate_announce(op);
}

static void uneven_nodes_take_part(struct group *g, const struct asked *a)
{
	const struct op_type *type = op_type_by_name(a->type);
	struct op *join = uneven_nodes_first_join(g), *op = NULL;
	struct fault f = FAULT_NULL;

	CHECK(join);
	if (strcmp(a->type, ASKED_REFUSED) == 0)
		fault_set(&f, FAULT_STATE, NULL, "rank %u was refused it", a->rank);
	else if (a->units != uneven_nodes_units(g->job))
		fault_set(
			&f, FAULT_STATE, NULL,
			"%.32s: the nodes of rank %u and of rank %u, which has no more inputs "
			"(JoinUneven), have made units or groups of job '%s' in different orders: "
			"make them in one order",
			a->type, a->rank, join->m->rank, g->job->rec->name);
	else if (!type || !type->collective)
		fault_set(&f, FAULT_STATE, NULL, "%.32s: this node has no such collective",
			  a->type);
	else
		op = op_new_peer(join, type, a, &f);
	if (op && surrogate_check(op, join, &f) == 0)
		uneven_nodes_make(g, op);
	else
		uneven_nodes_refuse(g, a, &f);
	if (op)
		op_free_peer(op);
}

/* The next number. Return: false: nothing is known of it yet. */
static bool uneven_nodes_take_next(struct group *g)
{
	uint64_t number = match_last(&g->match) + 1;
	struct asked *a;

	asked_drop(&g->across.heard, number - 1);
	a = list_empty(&g->across.heard) ? NULL : list_first(&g->across.heard, struct asked, link);
	if (!a || a->number != number)
		return false;
	list_unlink(&a->link);
	uneven_nodes_take_part(g, a);
	asked_free(a);
	return true;
}

static bool uneven_nodes_all_joined(const struct group *g)
{
	const struct span *s = g->job->across.span;

	for (uint32_t i = 0; i < group_size(g); i++) {
		unsigned node = span_node_of(s, g->rec->ranks[i]);

		if (node == s->self ? !g->across.told
				    : !g->across.joined || !g->across.joined[node].now)
			return false;
	}
	return g->across.told && match_last(&g->match) >= g->across.most;
}

static void uneven_nodes_note_last(struct group *g, uint64_t last_number, uint32_t last)
{
	struct asked_across *x = &g->across;

	if (x->n_joined + x->told &&
	    (last_number < x->last_number || (last_number == x->last_number && last < x->last)))
		return;
	x->last_number = last_number;
	x->last = last;
}

/* That of another node, in numbers of uneven_joined_elsewhere. */
static void uneven_nodes_note_joined(struct group *g, unsigned node, uint64_t number,
				     uint64_t last_number, uint32_t last)
{
	struct asked_across *x = &g->across;

	CHECK(!x->joined[node].now);
	uneven_nodes_note_last(g, last_number, last);
	x->joined[node].now = true;
	x->n_joined++;
	x->most = number > x->most ? number : x->most;
}

/* All have joined. What is known of others belongs to the next time. */
static void uneven_nodes_begin_next(struct group *g)
{
	struct asked_joined *joined = STEAL_PTR(g->across.joined);

	asked_across_reset(&g->across);
	g->across.joined = joined;
	for (unsigned i = 0; joined && i < g->job->across.span->n_nodes; i++) {
		joined[i].now = false;
		if (joined[i].again)
			uneven_nodes_note_joined(g, i, joined[i].number, joined[i].last_number,
						 joined[i].last);
		joined[i].again = false;
	}
}

/* All numbers are equal on all nodes. */
static void uneven_nodes_end(struct group *g)
{
	uint32_t last = g->across.last;

	uneven_nodes_begin_next(g);
	for (struct list *at = g->joins.waiters.next; at != &g->joins.waiters; at = at->next) {
		struct op *op =
			CONTAINER_OF(list_entry(at, struct waiter, link), struct op, waiter);

		join_args(op)->is_over = true;
		join_args(op)->last = last;
	}
	condition_signal(&g->joins);
}

void uneven_go_on(struct group *g)
{
	bool more = true;

	if (g->across.busy)
		return;
	g->across.busy = true;
	/* when all have joined, what comes is for their next inputs */
	while (more && g->across.told && uneven_nodes_is_alive(g) && !uneven_nodes_stands_in(g))
		more = !uneven_nodes_all_joined(g) && uneven_nodes_take_next(g);
	g->across.busy = false;
	if (g->across.told && uneven_nodes_is_alive(g) && !uneven_nodes_stands_in(g) &&
	    uneven_nodes_all_joined(g))
		uneven_nodes_end(g);
}

/* ------------------------------------------------------------------ who has joined */

bool uneven_all_here(struct group *g, uint32_t *ret_last)
{
	struct asked_across *x = &g->across;
	uint64_t last_number = 0;
	uint32_t last = 0;

	CHECK(!x->told);
	for (struct list *at = g->joins.waiters.next; at != &g->joins.waiters; at = at->next) {
		const struct op *op =
			CONTAINER_OF(list_entry(at, struct waiter, link), struct op, waiter);
		uint64_t number = join_args(op)->number;

		if (at != g->joins.waiters.next &&
		    (number < last_number || (number == last_number && op->m->rank < last)))
			continue;
		last_number = number;
		last = op->m->rank;
	}
	uneven_nodes_note_last(g, last_number, last);
	x->told = true;
	x->most = match_last(&g->match) > x->most ? match_last(&g->match) : x->most;
	g->job->jobs->ops.joined(g, match_last(&g->match), last_number, last);
	if (!uneven_nodes_is_alive(g) || !uneven_nodes_all_joined(g))
		return false;
	*ret_last = x->last;
	uneven_nodes_begin_next(g);
	return true;
}

void uneven_gave_up(const struct op *join)
{
	struct group *g = join->group;
	struct fault f = FAULT_NULL;
	char node[JOB_ON_NODE_BYTES];

	if (!g->across.told || !uneven_nodes_is_alive(g) || join->m->epoch != g->job->rec->epoch)
		return;
	fault_set(&f, FAULT_ABORTED, NULL,
		  "rank %u (pid %d)%s has given up JoinUneven after its node had told the other "
		  "nodes of it: %.300s",
		  join->m->rank, member_pid(join->m), job_on_node(g->job, node), join->fault.text);
	job_epoch_end(g->job, &f);
}

int uneven_joined_elsewhere(struct group *g, uint64_t number, uint64_t last_number, uint32_t last)
{
	struct asked_across *x = &g->across;
	const struct span *s = g->job->across.span;
	struct asked *a, *tmp;
	uint32_t index;
	unsigned node;

	if (!uneven_nodes_is_alive(g))
		return 0;
	if (!group_index(g, last, &index) || span_is_here(s, last))
		return -EINVAL;
	node = span_node_of(s, last);
	if (!x->joined)
		x->joined = calloc(s->n_nodes, sizeof(*x->joined));
	if (!x->joined) {
		uneven_nodes_no_memory(g);
		return 0;
	}
	if (x->joined[node].now && (!x->told || x->joined[node].again))
		return -EINVAL;
	if (x->joined[node].now) { /* that node knows that all have joined, and has joined again */
		x->joined[node] = (struct asked_joined){ true, true, number, last_number, last };
		return 0;
	}
	uneven_nodes_note_joined(g, node, number, last_number, last);
	list_for_each (a, tmp, &x->asks, link)
		if (a->number > number)
			g->job->jobs->ops.asks(g, a);
	uneven_go_on(g);
	return 0;
}

int uneven_asked_elsewhere(struct group *g, struct asked *a, uint32_t most)
{
	struct asked_across *x = &g->across;
	uint64_t here = match_last(&g->match);

	if (!uneven_nodes_is_alive(g) || !x->told || a->number <= here) {
		asked_free(a); /* it is sent again when all ranks here have joined */
		return 0;
	}
	if (a->number - here > most) {
		asked_free(a);
		return -EINVAL;
	}
	asked_insert(&x->heard, a);
	uneven_go_on(g);
	return 0;
}
