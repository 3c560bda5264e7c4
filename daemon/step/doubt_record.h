/*
 * What may be in doubt, in the record of its job: from before the other nodes are told of it until it has taken
 * effect. So a successor of a daemon that dies in between has it, too (doubt_restored). Without a journal
 * all of this does nothing. Loop thread only.
 */
#ifndef SHARDD_STEP_DOUBT_RECORD_H
#define SHARDD_STEP_DOUBT_RECORD_H

#include "store/state.h"

struct job;

/* The record's, of this epoch; made if there is none. Return: NULL: no memory. */
state_doubt *doubt_record_get(struct job *job);
/* The prepared step is being applied: the record is written with that. */
void doubt_record_applied(struct job *job);
/* Nothing is in doubt. */
void doubt_record_clear(struct job *job);

#endif
