/*
 * A job over several nodes: two to four cores of the daemon in one process, each with its own loop and
 * its order, and Gloo between them. Links between the orders are a queue here, and commits are decided at
 * once. Every script runs twice: on the nodes, and on one node with as many devices. What it has noted
 * must be equal, bit for bit.
 */
#ifndef SHARDD_TESTS_SPANFIX_H
#define SHARDD_TESTS_SPANFIX_H

#include <criterion/criterion.h>

#include "job/span.h"
#include "nodefix.h"
#include "order/order.h"

#define SPANFIX_NODES 4
#define SPANFIX_RANKS 8

#define SPANFIX_SENT 256

/* What is on its way: a message of an order, of ranks without inputs, or of a rank that writes. */
enum spanfix_kind { SPANFIX_ORDER, SPANFIX_JOINED, SPANFIX_ASKS, SPANFIX_WRITES };

struct spanfix_sent {
	uint32_t from, to;
	enum spanfix_kind kind;
	struct order_msg msg;
	uint64_t group, number, last_number; /* the key of the group, or of the unit */
	uint32_t last;
	struct asked *asked; /* owned */
};

/* Ranks on several nodes, or on one node with several devices. */
struct spanfix {
	bool spans;
	struct nodefix nodes[SPANFIX_NODES];
	struct job *jobs[SPANFIX_NODES];
	struct member *members[SPANFIX_RANKS];
	unsigned node_of[SPANFIX_RANKS]; /* else: its device */
	unsigned n_nodes, ranks[SPANFIX_NODES];
	uint32_t size;
	uint32_t unit; /* the number of the last unit */
	struct nodefix_op ops[SPANFIX_RANKS];
	struct order *orders[SPANFIX_NODES]; /* NULL: no epoch runs */
	struct spanfix_sent sent[SPANFIX_SENT];
	unsigned first_sent, n_sent;
	unsigned astray; /* the number of the node whose fingerprints are wrong, and 1; 0: none */
	unsigned started[SPANFIX_NODES]; /* by a recorded schedule */
	unsigned deaf;        /* nodes (bits) that do not hear that commits and steps take effect */
	bool undecided;       /* the store says nothing of commits */
	unsigned held;        /* the number of the node that no message reaches, and 1; 0: none */
	struct fault broken;  /* why an order has ended by itself */
	unsigned char *notes; /* owned */
	size_t n_notes, room;
};

extern struct spanfix spanfix;
/* Sums in rank order, beside one node with one device. */
extern bool spanfix_by_ranks;
/* gloo_options.reason_ms. */
extern unsigned spanfix_reason_ms;
/* Devices order tasks as GPUs do, and are not written in place. */
extern bool spanfix_queues;

/* @ranks: of each node; ended by a 0 or SPANFIX_NODES. All have joined when it returns. */
void spanfix_begin(struct spanfix *w, bool spans, const unsigned *ranks);
/* Of that: node @i with its job, which knows no other nodes yet; and its order, in an epoch. */
void spanfix_make_node(struct spanfix *w, unsigned i);
void spanfix_begin_order(struct spanfix *w, unsigned i);
/* When nothing runs any more. */
void spanfix_end(struct spanfix *w);
/* Run @script on one node and on several, and compare. */
void spanfix_run(void (*script)(struct spanfix *w), const unsigned *ranks);

/* Where a rank is; how many nodes there are; its node, and the unit that was added last, there. */
unsigned spanfix_home(const struct spanfix *w, uint32_t rank);
unsigned spanfix_homes(const struct spanfix *w);
struct nodefix *spanfix_node_of(struct spanfix *w, uint32_t rank);
struct unit *spanfix_unit_of(struct spanfix *w, uint32_t rank);

/* What both runs must have alike. */
void spanfix_note(struct spanfix *w, const void *data, size_t bytes);
/* Turn all loops until @done, for twenty seconds; all of them, or only the orders, once. */
void spanfix_turn_until(struct spanfix *w, bool (*done)(struct spanfix *w));
void spanfix_turn(struct spanfix *w);
void spanfix_turn_orders(struct spanfix *w);
bool spanfix_is_idle(struct spanfix *w);
bool spanfix_ops_are_over(struct spanfix *w);
/* All groups have their communicators. */
bool spanfix_is_placed(struct spanfix *w);
/* Fails the test unless all ops end well. */
void spanfix_all_ok(struct spanfix *w, const char *what);
/* All nodes follow a recorded step. */
bool spanfix_is_recorded(struct spanfix *w);
/* The span of the next epoch, of node @self; the caller's. */
struct span *spanfix_new_span(const struct spanfix *w, unsigned self, const char *prefix);

/* @call with n, m, u and op of each rank r. */
#define EACH(w, call)                                                  \
	do {                                                           \
		for (uint32_t r = 0; r < (w)->size; r++) {             \
			struct nodefix *n = spanfix_node_of(w, r);     \
			struct unit *u = spanfix_unit_of(w, r);        \
			struct nodefix_op *op = &(w)->ops[r];          \
			struct member *m = (w)->members[r];            \
                                                                       \
			(void)u;                                       \
			*op = (struct nodefix_op){ 0 };                \
			cr_assert_eq((call), 0, "%s", op->fault.text); \
		}                                                      \
	} while (0)
#define ALL(w, call)                      \
	do {                              \
		EACH(w, call);            \
		spanfix_all_ok(w, #call); \
	} while (0)

/* @change says how its record differs from nodefix_spec's. */
void spanfix_add_named_unit(struct spanfix *w, const char *name, uint64_t elements,
			    void (*change)(state_unit *spec));
void spanfix_add_unit(struct spanfix *w, uint64_t elements, void (*change)(state_unit *spec));
/* Something of its own for each rank and element, with sums that are rounded. */
void spanfix_fill(const struct region *r, uint32_t rank, unsigned salt);
/* What the last op of @rank has handed out. */
const struct region *spanfix_result(struct spanfix *w, uint32_t rank);
void spanfix_note_results(struct spanfix *w);
void spanfix_gather_and_note(struct spanfix *w);

/* The epoch of all nodes ends. */
void spanfix_epoch_ends(struct spanfix *w, const char *why);
/* When nothing runs any more all join again, and meet under @prefix. */
void spanfix_next_epoch(struct spanfix *w, const char *prefix);

/* Changes of records. */
void spanfix_replicated(state_unit *spec);
void spanfix_in_bf16(state_unit *spec);

/* Others for each rank and @salt, where the trainers put theirs. */
void spanfix_fill_gradients(struct spanfix *w, unsigned salt);
/* On all nodes. */
void spanfix_epoch_ends(struct spanfix *w, const char *why);
/* Epoch 100, whose communicators meet at @prefix: all ranks have joined it when it returns. */
void spanfix_next_epoch(struct spanfix *w, const char *prefix);

#endif
