/*
 * JoinUneven in a group that spans nodes. A node some of whose ranks have inputs does what one node does
 * (op/surrogate.h). One whose ranks have all joined says so to the others, which tell it of the
 * collectives that their ranks ask for; it makes surrogates for its ranks from that and announces
 * these like any other op, one collective after the other. All ranks have joined when all nodes have said so.
 *
 * A recorded schedule lets nodes begin collectives that another one has not come to, up to the next joint
 * entry. So each node keeps what its ranks have asked for until all nodes have come to it. Loop thread only.
 */
#ifndef SHARDD_OP_UNEVEN_NODES_H
#define SHARDD_OP_UNEVEN_NODES_H

#include "op/op.h"

/* All ranks of @g here have joined: their JoinUneven are in g->joins. Return: those of all nodes have; the
 * caller ends them, each with @ret_last. */
bool uneven_all_here(struct group *g, uint32_t *ret_last);
/* A JoinUneven of them ends with a fault. */
void uneven_gave_up(const struct op *join);
/* Take part in what was heard of, as far as that is possible now. */
void uneven_go_on(struct group *g);

/* All ranks here have announced at @number, and the other nodes are about to be told. */
void uneven_announces(struct group *g, uint64_t number);
/* The collective at @number is about to start. @all_know: all nodes have announced it. */
void uneven_starts(struct group *g, uint64_t number, bool all_know);
/* It does not start: ranks here were refused it. */
void uneven_refuses(struct group *g, uint64_t number);

/* What another node has said: job_ops.joined. Return: 0, or -EINVAL: no node can say that now. */
int uneven_joined_elsewhere(struct group *g, uint64_t number, uint64_t last_number, uint32_t last);
/* job_ops.asks. @a: taken over. Return: 0, or -EINVAL: there are more than @most. */
int uneven_asked_elsewhere(struct group *g, struct asked *a, uint32_t most);

#endif
