/*
 * Nodes of one job, each with one rank, in one process: all of the daemon that decides what takes effect
 * (cluster/, order/, coord/decide, step/doubt, job/), with a fake store, a fake clock, and links that are
 * queues here and can be cut. Daemons may die. Ranks train: reduce, step, commit, and join again when they are told to.
 *
 * What happens next is always the same, so that each moment of a commit can be reached by its number. Each
 * message that arrives, each transaction of the store and each answer of it is an event; options.on_event is
 * called before it.
 *
 * Checked all the time, of the invariants of docs/nodes.md: (5) when a node has applied a step each other one has
 * it prepared, or has applied it; (6) when a node has taken a commit the store has decided it, and all nodes
 * that have a commit of that step have that of one epoch; (7) what the store has decided is not decided, nor
 * taken, again with another epoch: nobody has dropped it.
 */
#ifndef SHARDD_TESTS_PARTITION_CUTFIX_H
#define SHARDD_TESTS_PARTITION_CUTFIX_H

#include <stdbool.h>
#include <stdint.h>

#define CUTFIX_NODES 3 /* at most */

struct cutfix_options {
	unsigned nodes; /* 0: CUTFIX_NODES */
	/* The job goes on without nodes, from replicas, and takes them in again. Rules: see cutline.h. */
	bool elastic;
	unsigned leader; /* the node that leads the first epoch */
	/* What happens next, 0 to n - 1: one of the links delivers, in the order in which their messages were
	 * sent; with @turns the last CUTFIX_NODES are nodes that go on first, with answers of the store and their
	 * rank. NULL: the first, or a link by chance if @random is set. Called when there is a choice. */
	unsigned (*pick)(unsigned n);
	bool turns;
	uint64_t random;
	bool schedules; /* steps may be recorded */
	bool refuses;   /* ranks may be refused: then they do not ask again. Else that is wrong */
	void (*on_event)(void);
};

void cutfix_begin(const struct cutfix_options *o);
void cutfix_end(void);

/* Until all nodes have committed @step; of an elastic job ranks begin no step behind it. Return: false: not within @ms of the fake clock. */
bool cutfix_train(uint64_t step, unsigned ms);
/* Are copies made at the commits that follow? From the beginning they are, of an elastic job. */
void cutfix_copies(bool are_made);
/* All that happens within @ms. */
void cutfix_pass(unsigned ms);

/* Of the two nodes, while they are cut: all between them is lost. Each notices the end of a link after
 * 1.25 s, the ones of @late 300 ms later. @apart: a set of nodes (bits), which hear nothing of the others. */
void cutfix_cut(unsigned apart, unsigned late);
void cutfix_heal(void);
/* What becomes of the calls of the store that @node makes from now on. LOST_AFTER and DELAYED are about its next
 * transaction; the calls behind it are lost before they take effect. A delayed one arrives later; its answer is
 * lost, too. */
enum cutfix_fate { CUTFIX_ANSWERED, CUTFIX_LOST_BEFORE, CUTFIX_LOST_AFTER, CUTFIX_DELAYED };
/* When a delayed one arrives. */
enum cutfix_delay {
	CUTFIX_BEFORE_EPOCH,  /* directly before the next transaction that decides an epoch */
	CUTFIX_BEHIND_EPOCH,  /* directly behind it */
	CUTFIX_BEFORE_COMMIT, /* before the next one that decides a commit */
	CUTFIX_BEHIND_COMMIT,
	_CUTFIX_DELAY_N,
};
void cutfix_store(unsigned node, enum cutfix_fate fate, enum cutfix_delay delay);

struct cutfix_death {
	unsigned node;
	bool loses; /* what it has sent and has not arrived; what others have sent to it is lost in any case */
	bool back; /* a daemon and a rank without memory begin there just afterwards; else with cutfix_come_back */
	/* Of the transaction that it makes just then. */
	enum cutfix_fate fate; /* not CUTFIX_ANSWERED */
	enum cutfix_delay delay;
};
/* A daemon dies, with its memory and its rank, of an elastic job; also in options.on_event. The others hear of it at
 * once. */
void cutfix_die(const struct cutfix_death *death);
void cutfix_come_back(unsigned node);
/* Has one that has died made a transaction just then? */
bool cutfix_has_died_asking(void);

/* Where the commit of the step behind @step is just now. */
enum cutfix_phase {
	CUTFIX_BEFORE,    /* no node has announced it */
	CUTFIX_ANNOUNCED, /* some have, or all; nothing has been asked of the store */
	CUTFIX_DECIDING,  /* it has been asked, and has not decided */
	CUTFIX_DECIDED,   /* and no node has begun it */
	CUTFIX_STARTED,   /* some nodes have it */
	CUTFIX_OVER,      /* all have it */
	_CUTFIX_PHASE_N,
};
enum cutfix_phase cutfix_phase(uint64_t step);

/* How many events there have been. */
unsigned cutfix_events(void);
/* The last step that a node has committed, and in which epoch. */
uint64_t cutfix_step(unsigned node);
uint64_t cutfix_epoch(unsigned node);
/* The node that leads the job as @node knows it. */
unsigned cutfix_leader(unsigned node);
/* What the ranks of @node that want to join wait for. */
const char *cutfix_waits(unsigned node);
/* What was broken; "": nothing. */
const char *cutfix_wrong(void);

#endif
