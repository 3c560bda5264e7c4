/*
 * Rounds (cluster/round.h) of the nodes of a spanfix: their messages go through a queue, packed; in place of
 * links there is @dead.
 */
#ifndef SHARDD_TESTS_ROUNDFIX_H
#define SHARDD_TESTS_ROUNDFIX_H

#include "cluster/round.h"
#include "job/replica.h"
#include "spanfix.h"

#define WORLD(...) ((const unsigned[SPANFIX_NODES]){ __VA_ARGS__ })
/* Of a round of replicas. */
#define ROUNDFIX_ID 78

struct roundfix_letter {
	unsigned from, to;
	size_t bytes;
	uint8_t *packed; /* owned */
};

struct roundfix {
	struct round *rounds[SPANFIX_NODES], *over[64];
	unsigned n_over;
	struct roundfix_letter letters[256];
	unsigned first, n;
	unsigned leader;
	bool dead[SPANFIX_NODES], held, left;
	uint64_t last_step;
	/* what the message of a phase to a node is changed to */
	uint8_t blind;         /* 1 + node that sees another folder */
	uint8_t strays;        /* 1 + node that finds another checkpoint */
	uint8_t dies_at, dies; /* JobRoundWhat; 1 + node */
	/* of replicas */
	bool copies[SPANFIX_NODES]; /* a node is to take a copy */
	bool waits;                 /* and none does it yet */
	unsigned from[SPANFIX_NODES];
	uint64_t copy_bytes[SPANFIX_NODES][_REPLICA_FILES];
	struct fault ended; /* how the leader's round was over */
	bool is_over;
	struct fault followed; /* how that of another node was over, the last one */
	/* a node is told in a phase that all is well */
	uint8_t ends_at, ends; /* JobRoundWhat; 1 + node */
	uint32_t answered;     /* the code of the last answer */
	bool later;            /* in it */
};

extern struct roundfix roundfix;
extern const struct round_ops roundfix_ops;
/* A folder for checkpoints. */
extern char roundfix_root[64];
/* What the unit is beside the usual; NULL: nothing. */
extern void (*roundfix_unit_changes)(state_unit *spec);

/* .init and .fini: the folder, and descriptors. */
void roundfix_begin_suite(void);
void roundfix_end_suite(void);
/* As spanfix_begin; node @leader leads. */
void roundfix_begin(const unsigned *ranks, bool spans, unsigned leader);
void roundfix_end(void);
/* A unit, and as many steps, each with a commit. */
void roundfix_train(unsigned steps);
void roundfix_step(unsigned number, bool commit);

/* Return: always false, for spanfix_turn_until. */
bool roundfix_turn(void);
/* For it: no node makes or loads anything any more. */
bool roundfix_is_idle(struct spanfix *w);
/* For it: the node of @ends was told. */
bool roundfix_has_told_the_end(struct spanfix *w);
/* Node @node dies. */
void roundfix_lose(unsigned node);
/* Node @at gets that of node @from. */
void roundfix_on_phase(unsigned at, unsigned from, Shardd__V1__JobRoundPhase *m);
/* Of the round ROUNDFIX_ID, on node @node. */
struct replica_id roundfix_replica_of(unsigned node, uint64_t step, unsigned part);
void roundfix_path(char ret[128], const char *name);

#endif
