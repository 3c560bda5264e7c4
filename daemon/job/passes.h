/*
 * The pass of training that a rank is in with a unit, and the moves allowed there: one table. Pure,
 * any thread.
 *
 *   IDLE --BeginPass--> FORWARD --EndPass--> IDLE
 *   IDLE --BeginPass--> BACKWARD_PRE --Reduce, ReduceSparse--> BACKWARD_POST --EndPass--> IDLE
 *   IDLE <--summon, return--> SUMMON
 *
 * Activation checkpointing computes forward again inside backward, from either state there
 * and back to it.
 */
#ifndef SHARDD_JOB_PASSES_H
#define SHARDD_JOB_PASSES_H

#include <stdbool.h>
#include <stddef.h>

#include "unit/unit.h"

enum pass_state {
	PASS_IDLE = 0,
	PASS_FORWARD,
	PASS_BACKWARD_PRE,  /* gradients are being computed */
	PASS_BACKWARD_POST, /* they have been handed over */
	PASS_SUMMON,
	PASS_FORWARD_IN_PRE, /* forward again, inside backward */
	PASS_FORWARD_IN_POST,
	_PASS_STATE_N,
};

/* As in shardd.proto. */
enum pass_kind { PASS_KIND_FORWARD = 1, PASS_KIND_BACKWARD = 2, _PASS_KIND_N };

/* What an op does to the state, or requires of it. */
enum pass_move {
	/* No move: allowed at any time. This is so for the ops of a ddp and of the trainers' own
	 * optimizer, which have their own states (job/ddp_pass.c, op/external.c). */
	MOVE_NONE = 0,
	MOVE_BEGIN_FORWARD,
	MOVE_END_FORWARD,
	MOVE_BEGIN_BACKWARD,
	MOVE_END_BACKWARD, /* of which the gradients were handed over */
	MOVE_END_WITHOUT,  /* of one without gradients, or whose gradients wait */
	MOVE_REDUCE,       /* gradients are reduced */
	MOVE_ACCUMULATE,   /* gradients are added up, without communication */
	MOVE_SUMMON,       /* full parameters, to look at or to change */
	MOVE_RETURN,       /* what was summoned goes back */
	MOVE_NEEDS_IDLE,   /* of its unit, or of all units of the rank */
	MOVE_REDUCE_ROWS,  /* gradients of some tensors are reduced: others may follow */
	_MOVE_N,
};

/* The state after @move in @s. Return: false: it is not allowed there. */
bool passes_move(enum pass_state s, enum pass_move move, enum pass_state *ret);

/* The states in which @move is allowed, in words: "BACKWARD_PRE or BACKWARD_POST". */
void passes_allowed(enum pass_move move, char *buf, size_t bytes);

/* Return: static string. */
const char *pass_state_name(enum pass_state s);

/* Does a rank release the gathered unit at the end of a pass?
 * @reshard: its policy. @sync: the gradients of this pass are reduced, which ends the use of
 * the present parameters; else they are added up and the parameters cannot change. */
bool passes_let_go(const state_unit *rec, enum unit_reshard reshard, enum pass_kind pass,
		   bool sync);

#endif
