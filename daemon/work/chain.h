/*
 * Sums over the ranks of all nodes, in host memory: each node adds its ranks when the engine asks for it, a
 * chunk at a time, while others are on their way (comm_sum). With order: devices each node's sum begins with
 * its own first rank. With order: ranks it is a chain, in rank order over all nodes: running values go from
 * node to node, and each adds its ranks to them, one after the other, so that the bits are those of one
 * device with all ranks. Loop thread only, but for sources, which a thread of the engine asks while the
 * collective waits.
 */
#ifndef SHARDD_WORK_CHAIN_H
#define SHARDD_WORK_CHAIN_H

#include "work/coll.h"

struct chain;

/* What rank @k (0, 1...) of part @d has of the *@n elements from @first on, in the order of the sum: where
 * that is, of chain->in_dtype, and *@n less if what follows is elsewhere. NULL: there is nothing to be added
 * to these. *@pre is chain->pre, unless it says another factor. It says the same of all ranks of a part, but
 * for the address. */
typedef const void *(*chain_source)(const struct chain *ch, unsigned d, uint32_t k, uint64_t first,
				    uint64_t *n, struct k_factor *pre);

/* Filled by the owner, who keeps it and what its source reads until the operation is over. */
struct chain {
	struct coll *c;
	chain_source source;
	void *userdata; /* the source's */
	enum dtype in_dtype, sum_dtype;
	struct k_factor pre;        /* of each rank's */
	struct k_factor post;       /* of the part's sum; not with order: ranks */
	struct backend_owner owner; /* chain_talk's, as the next */
	struct chain_part {
		const struct chain *chain;
		unsigned d;
	} parts[NODE_MAX_DEVICES];
};

/* Does this node want sums in rank order, between the nodes of @g? All nodes must want the same: part of
 * fingerprints. */
bool chain_is_wanted(const struct group *g);
/* Are sums of @c made when the engine asks for them? Else by kernels before. After coll_ready. */
bool chain_is_used(const struct coll *c);
/* Is it possible, where it is wanted? RES_FAILED: with c->fault, on all nodes. */
enum res chain_check(struct coll *c);
/* The sum of @count elements on each device, to recv[d]: of its segment; @whole: of all. Where the inputs are
 * written: coll_kernels_sync. Return: RES_WAIT. */
void chain_talk(struct chain *ch, void *const *recv, uint64_t count, bool whole);

#endif
