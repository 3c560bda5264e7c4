/* Several nodes of an order, with links that deliver in any interleaving, and the rules of
 * docs/nodes.md, which are checked whenever something starts or fails.
 *
 * What a node's ranks ask for is a text: one for each node and track. Tracks of one node go on
 * independently of each other.
 *
 *   a..h     a collective of all nodes, in group 1..8
 *   u v w    a collective of nodes 0,1  1,2  0,2
 *   M D      a mark; a mark that the leader decides      C  a decision that is no mark
 *   S        joint, and no more than that. M, D, C, Q and S have another fingerprint each time
 *   P Q      an APPLY; one that is a mark
 *   G..K     a gather of unit 1..5 on all nodes; X Y Z: on nodes 0,1  1,2  0,2
 *   /        the next step begins, for the numbers of gathers (a mark does that, too)
 *
 * Behind a letter: ! refuses it, - announces and then refuses it, ? announces something else,
 * . goes on when it is over. A number repeats what is in parentheses: 3(abM).
 */
#ifndef SHARDD_TESTS_ORDERFIX_H
#define SHARDD_TESTS_ORDERFIX_H

#include <stdbool.h>
#include <stdint.h>

#include "order/order.h"

#define ORDERFIX_NODES  4
#define ORDERFIX_TRACKS 2
#define ORDERFIX_ITEMS  128
#define ORDERFIX_KEYS   250

struct orderfix_case {
	const char *name;
	uint32_t n_nodes;
	const char *programs[ORDERFIX_NODES][ORDERFIX_TRACKS];
	uint32_t max_ahead;    /* 0: enough */
	uint32_t max_recorded; /* 0: no schedules */
	bool ticks;       /* time may pass whenever something waits; else only when nothing moves */
	bool may_fail;    /* decisions may be refused */
	bool may_break;   /* the epoch may end */
	bool must_break;  /* it does in the end */
	bool cut;         /* a link may be lost at any time */
	bool must_record; /* somewhere a schedule is followed */
};

struct orderfix_item {
	uint8_t key;
	bool announce, refuse, wait;
	uint64_t print;
};

struct orderfix_key {
	struct order_key key;
	uint32_t flags;
	struct order_nodes nodes;
	uint32_t mask;
	bool all;
};

/* A case, parsed. */
struct orderfix_plan {
	const struct orderfix_case *c;
	struct orderfix_item items[ORDERFIX_NODES][ORDERFIX_TRACKS][ORDERFIX_ITEMS];
	uint32_t n_items[ORDERFIX_NODES][ORDERFIX_TRACKS];
	struct orderfix_key keys[ORDERFIX_KEYS];
	uint32_t n_keys;
};

enum orderfix_event_kind {
	ORDERFIX_STEP,    /* the next item of track @b of node @a */
	ORDERFIX_DELIVER, /* the first message of the link from @a to @b */
	ORDERFIX_DECIDE,  /* key @a is decided: @b: it is done */
	ORDERFIX_TICK,    /* enough time passes on node @a */
	ORDERFIX_CUT,     /* links are lost */
	ORDERFIX_END,     /* node @a knows that the epoch has ended */
};

struct orderfix_event {
	uint8_t kind, a, b;
};

struct orderfix;

void orderfix_plan(struct orderfix_plan *p, const struct orderfix_case *c);
struct orderfix *orderfix_new(const struct orderfix_plan *p);
struct orderfix *orderfix_clone(const struct orderfix *w);
struct orderfix *orderfix_free(struct orderfix *w);
/* What may happen next. Return: how many. Without any it has been checked that all is as it must be. */
uint32_t orderfix_events(struct orderfix *w, struct orderfix_event *out, uint32_t most);
void orderfix_apply(struct orderfix *w, struct orderfix_event e);
/* Of all that decides what can happen from here on. */
uint64_t orderfix_hash(const struct orderfix *w);
/* The first rule that was broken, or NULL. */
const char *orderfix_wrong(const struct orderfix *w);
bool orderfix_is_recorded(const struct orderfix *w);
/* What has made the epoch end; empty: nothing. */
const char *orderfix_reason(const struct orderfix *w);
void orderfix_describe(const struct orderfix *w, struct orderfix_event e, char *text, size_t size);

#endif
