/*
 * The order in which a rank uses units, learned in one step and followed in the next: which
 * unit comes next. What is not as before is recorded again from there on, and nothing is
 * foretold until the step is over. Pure, but for the account that pays for the record; any
 * thread, one at a time.
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
/* So many are part of the session's own records; more than these are paid for. */
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
	bool used;           /* something since the last step */
	uint64_t deviations; /* steps that did not go on as before */
};

void prefetch_init(struct prefetch *p, struct quota *payer);
/* Forget all and pay it back. Safe twice. */
void prefetch_deinit(struct prefetch *p);
/* A step was broken off and begins again. */
void prefetch_restart(struct prefetch *p);

/* @unit (below 2^30) is used for @kind (0 to 3). */
prefetch_use prefetch_use_of(uint32_t unit, unsigned kind);
uint32_t prefetch_unit(prefetch_use use);

/* @use is what happens now. Return: it was expected. */
bool prefetch_used(struct prefetch *p, prefetch_use use);
/* What will come next. Return: 0: not known. */
prefetch_use prefetch_next(const struct prefetch *p);
/* The step is over. Nothing, if nothing was used since the last time. */
void prefetch_step(struct prefetch *p);

/* RECORDING, FOLLOWING, OFF. Return: static string. */
const char *prefetch_mode_name(enum prefetch_mode mode);

#endif
