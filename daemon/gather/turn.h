/*
 * Gathered copies of units whose parts are on several nodes. All nodes make one together, in the order
 * of the job's line (job/line.h): whoever wants one asks the leader, and each node begins it when the
 * leader has started it, whether somebody here wants it or not. Loop thread only.
 */
#ifndef SHARDD_GATHER_TURN_H
#define SHARDD_GATHER_TURN_H

#include "op/op.h"

/* Are the parts of @u, which has to be gathered, on several nodes? */
bool turn_is_needed(const struct job *job, const struct unit *u);
/* Somebody here wants a copy, and waits for u->cast_done. */
void turn_want(struct job *job, struct unit *u);
/* The leader has started the copy that is the next turn of @u. Return: 0 or -ENOMEM. */
int turn_start(struct job *job, struct unit *u);

#endif
