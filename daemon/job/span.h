/*
 * A span: the nodes that a job's ranks are on, in one epoch (docs/nodes.md). A job without one has all
 * ranks on this node.
 *
 * A node has the members, the memory and the records of its own ranks; of the others it knows where
 * they are. The ranks of a node are consecutive. Loop thread only.
 */
#ifndef SHARDD_JOB_SPAN_H
#define SHARDD_JOB_SPAN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fault.h"
#include "engine/engine.h"

#define SPAN_MAX_NODES  1024u
#define SPAN_NAME_BYTES 64

struct span_node {
	char name[SPAN_NAME_BYTES];
	uint32_t first, n;       /* ranks */
	const uint16_t *devices; /* by rank of it: the number of its device on that node */
};

/* Arrays are the span's own. */
struct span {
	struct span_node *nodes; /* in the order of their ranks */
	unsigned n_nodes;
	unsigned self;           /* this node */
	bool over;               /* its epoch has ended: no communicator is made any more */
	struct fault ended;      /* why, if that is known */
	uint32_t world;          /* ranks of all nodes */
	char prefix[160];        /* of the keys of its communicators; of no other epoch */
	struct comm_store store; /* where members of communicators meet */
};

/* Copies @nodes. Return: 0 or a fault code: INTERNAL if the ranks of @nodes are not 0, 1, 2... in order. */
int span_new(const struct span_node *nodes, unsigned n_nodes, unsigned self, const char *prefix,
	     const struct comm_store *store, struct span **ret, struct fault *f);
/* As text, for the record; the caller's. Return: NULL without memory. */
char *span_format(const struct span *s);
/* The span of that text, whose epoch is over. Return: 0 or a fault code: INVALID. */
int span_parse(const char *text, struct span **ret, struct fault *f);
/* NULL is allowed. Return: NULL. */
struct span *span_free(struct span *s);

/* Add a node to such a word (span_layout). */
uint64_t span_layout_add(uint64_t h, const char *name, uint32_t n, const uint16_t *devices);
/* A word for where the ranks are: the same on all nodes; equal places, equal words. */
uint64_t span_layout(const struct span *s);
/* Are the same ranks on the same nodes and devices in both? */
bool span_same(const struct span *a, const struct span *b);

/* Is this the only node, for now, of a job over nodes? @elastic: it may go on without some. NULL is allowed. */
bool span_is_alone(const struct span *s, bool elastic);

/* The node of a rank of the job. */
unsigned span_node_of(const struct span *s, uint32_t rank);
/* Of a rank: a number that it shares with those on its device. */
uint32_t span_device_of(const struct span *s, uint32_t rank);
/* Ranks on this node, of @world without a span. */
static inline uint32_t span_ranks_here(const struct span *s, uint32_t world)
{
	return s ? s->nodes[s->self].n : world;
}
/* Is @rank on this node? Also without a span (NULL). */
bool span_is_here(const struct span *s, uint32_t rank);

#endif
