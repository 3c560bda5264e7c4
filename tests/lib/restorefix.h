/*
 * Nodes whose job is restored from parts in memory (job/restore.h), in one process: the parts are written into a
 * folder, and read back. The job has units of several kinds.
 */
#ifndef SHARDD_TESTS_RESTOREFIX_H
#define SHARDD_TESTS_RESTOREFIX_H

#include "job/restore.h"
#include "job/saving.h"
#include "spanfix.h"

#define WORLD(...) ((const unsigned[SPANFIX_NODES]){ __VA_ARGS__ })

extern char restorefix_root[64]; /* a folder */

extern struct restorefix {
	uint64_t epoch;
	/* The job has hybrid units, units of a group, and parameters (before it is loaded). */
	bool hybrid, pair, unseeded;
	unsigned answers, awaited;
	struct saving_answer said;
	uint32_t crcs[SPANFIX_NODES];
} restorefix;

/* Of restores. */
extern struct restorefix_ended {
	unsigned over;
	struct fault f[SPANFIX_NODES];
} restorefix_ended;

void restorefix_begin_suite(void);
void restorefix_end_suite(void);
void restorefix_begin(const unsigned *ranks);
void restorefix_end(void);

/* The node of a rank; a unit on a node, or NULL; the unit that ALL is about. */
unsigned restorefix_home(uint32_t rank);
struct unit *restorefix_unit_of(unsigned node, const char *name);
bool restorefix_use(const char *name);

void restorefix_add_units(void);
/* A step, with its commit; steps @from to @to. */
void restorefix_step(unsigned number);
void restorefix_train(unsigned from, unsigned to);

void restorefix_epoch_ends(void);
/* The processes of a node are gone; the same, and its job is a new one. */
void restorefix_drop_members(unsigned node);
void restorefix_lose(unsigned node);
/* Between epochs: ranks are elsewhere from here on. The job of a node that is new is empty. @stay: processes of
 * nodes that stay do, too. */
void restorefix_move_to(const unsigned *ranks, bool stay);
/* All ranks have joined when it returns. */
void restorefix_next_epoch(void);

/* What the nodes have of a commit. */
struct restorefix_parts {
	unsigned n;
	uint64_t step;
	struct restore_part all[SPANFIX_NODES]; /* owned, as is the next */
	uint8_t *specs;
	size_t specs_bytes;
};

/* @path: NULL: the checkpoint is not completed; else it is in there then. */
struct restorefix_parts restorefix_take(const char *path);
void restorefix_free(struct restorefix_parts *p);
/* Are parameters, optimizer state and steps equal, however they are cut? @ranks: of which both have a blob and two
 * buffers. */
void restorefix_same(const struct restorefix_parts *a, const struct restorefix_parts *b,
		     unsigned ranks);

/* Wait until @n nodes have answered (restorefix.answers). */
void restorefix_await(unsigned n);
/* Begin a restore of @node, with the parts that it says it needs. Return: as restore_begin. */
int restorefix_try(unsigned node, const struct restorefix_parts *p, uint64_t step_number,
		   struct fault *f);
/* Are restorefix.awaited of them over? */
bool restorefix_is_over(struct spanfix *w);
/* All nodes, which must succeed. */
void restorefix_all(const struct restorefix_parts *p);

#endif
