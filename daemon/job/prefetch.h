/*
 * The order in which a rank uses units, learned in one step and followed in the next: which
 * unit comes next. At the first difference it records again from there on, and predicts nothing
 * until the step is over. Pure, except for the account that pays for the record; any thread, one at
 * a time.
 *
 *   RECORDING --step over--> FOLLOWING --another use than expected--> RECORDING
 *       '--too long, no memory--> OFF --step over--> RECORDING
 */
#ifndef SHARDD_JOB_PREFETCH_H
#define SHARDD_JOB_PREFETCH_H

#include <stdbool.h>
#include <stdint.h>

#include "core/quota.h"

/* Uses of a step that are remembered at most. */
#define PREFETCH_MAX 16384u
/* This many are part of the session's own records; more than these are charged. */
#define PREFETCH_FREE 64u

enum prefetch_mode { PREFETCH_RECORDING, PREFETCH_FOLLOWING, PREFETCH_OFF, _PREFETCH_N };

/* A use: a unit, and what for; 0 is none. */
typedef uint32_t prefetch_use;

struct prefetch {
	enum prefetch_mode mode;
	struct quota *payer; /* borrowed */
	prefetch_use *uses;  /* owned; of the step as far as it is known */
	uint32_t n;
	uint32_t room;
	uint32_t at;         /* FOLLOWING: how many of them have come */
	bool used;           /* a use since the last step */
	uint64_t deviations; /* steps that differed from the record */
};

void prefetch_init(struct prefetch *p, struct quota *payer);
/* Forget all and pay it back. Safe to call twice. */
void prefetch_deinit(struct prefetch *p);
/* A step was aborted and begins again. */
void prefetch_restart(struct prefetch *p);

/* The use of @unit (below 2^30) for @kind (0 to 3). */
prefetch_use prefetch_use_of(uint32_t unit, unsigned kind);
uint32_t prefetch_unit(prefetch_use use);

/* Record @use, which happens now. Return: true if it was expected. */
bool prefetch_used(struct prefetch *p, prefetch_use use);
/* The use that is expected next. Return: 0: not known. */
prefetch_use prefetch_next(const struct prefetch *p);
/* The step is over. Does nothing if there was no use since the last call. */
void prefetch_step(struct prefetch *p);

/* RECORDING, FOLLOWING, OFF. Return: static string. */
const char *prefetch_mode_name(enum prefetch_mode mode);

#endif
