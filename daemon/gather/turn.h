/*
 * Gathered copies of units whose parts are on several nodes. All nodes make one together, in the order
 * of the job's line (job/line.h): whoever wants one asks for it, and each node begins it when it is started in
 * the order, whether somebody here wants it or not. Loop thread only.
 */
#ifndef SHARDD_GATHER_TURN_H
#define SHARDD_GATHER_TURN_H

#include "op/op.h"

/* Are the parts of @u, which has to be gathered, on several nodes? */
bool turn_is_needed(const struct job *job, const struct unit *u);
/* Somebody here wants a copy, and waits for u->cast_done. */
void turn_want(struct job *job, struct unit *u);
/* A rank here waits for the copy that is in line, or being made, if there is one: it was started without
 * that. */
void turn_asked(struct job *job, struct unit *u);
/* The copy that is the next turn of @u is started, at @position of the order; @place: comm_op.place of its
 * operations between nodes. Return: 0 or -ENOMEM. */
int turn_start(struct job *job, struct unit *u, uint64_t position, uint64_t place);

#endif
