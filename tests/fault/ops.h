/*
 * Ops with failures: what the two halves of test_ops share. test_ops.c has the world, the
 * ops of every step and what goes wrong; ops_more.c has ddps, passes, uneven inputs and
 * the trainer's own optimizer.
 */
#ifndef SHARDD_TESTS_FAULT_OPS_H
#define SHARDD_TESTS_FAULT_OPS_H

#include "nodefix.h"

#define RANKS 2

struct world {
	struct nodefix n;
	struct job *job;
	struct member *m[RANKS];
	struct unit *plain, *cast, *rich;
	struct unit *twice; /* replicas, which add in another dtype than the gradients' */
	struct unit *more;  /* what the act is about, if it is none of these */
	struct nodefix_op barrier;
	struct nodefix_op buffer[RANKS];
	struct nodefix_op op[RANKS];
	state_unit *specs[2]; /* to be registered */
	struct fault fault;   /* of what is no op */
};

/* Submit one rank's op; what an act is made of. */
typedef int (*submit_fn)(struct world *w, unsigned rank);

/* One op on both ranks, as nodefix has them. Return: the code of world.fault. */
int ops_on_both(struct world *w, submit_fn submit);
/* The same, which must not fail. */
void ops_must(struct world *w, submit_fn submit, const char *what);
#define MUST(w, submit) ops_must((w), (submit), #submit)

#define UNIT_OP(name, type, which)                                                 \
	static int name(struct world *w, unsigned r)                               \
	{                                                                          \
		return nodefix_on_unit(&w->n, w->m[r], type, w->which, &w->op[r]); \
	}

/* Both ranks and this one op, or one call. */
struct act {
	const char *name;
	void (*prepare)(struct world *w); /* NULL: nothing */
	submit_fn submit;
	int (*call)(struct world *w);
	void (*mend)(struct world *w); /* afterwards, when nothing fails: end what it has begun */
};

extern const struct act ops_more[];
extern const size_t ops_n_more;
/* JoinUneven with error_if_uneven. */
int ops_join_even(struct world *w, unsigned r);
/* A use of world.more, whatever was under way; nothing if there is none. */
void ops_check_more(struct world *w);

#endif
