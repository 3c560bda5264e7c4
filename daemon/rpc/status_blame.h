/*
 * The ranks that hold up others of their job, as its nodes describe them. A rank holds up those that wait
 * in a collective that it has not announced, unless it waits for others itself.
 */
#ifndef SHARDD_RPC_STATUS_BLAME_H
#define SHARDD_RPC_STATUS_BLAME_H

#include "peer.pb-c.h"
#include "rpc/arena.h"
#include "status.pb-c.h"

struct status_blame {
	uint32_t world;
	const Shardd__V1__JobRankTold **ranks; /* by rank; NULL: its node has said nothing */
	const char **nodes;                    /* by rank: where it is; "": all are here */
	const char **why;                      /* by rank: why nothing is known of it */
	const Shardd__V1__JobTold **told;      /* of all nodes that have said something */
	size_t n_told;
};

/* Into @j->blame, from the arena @a. Loop thread only. */
void status_blame(struct arena *a, const struct status_blame *b, Shardd__V1__JobStatus *j);

#endif
