/*
 * A daemon that must come out of a test as it went in: alive, answering, with the
 * descriptors and bytes it had.
 */
#ifndef SHARDD_TESTS_WITNESS_H
#define SHARDD_TESTS_WITNESS_H

#include "daemonfix.h"

struct witness {
	struct daemonfix d;
	unsigned fds;
	uint64_t bytes;
};

/* Start it with @args (may be NULL) and remember what it has. */
void witness_begin(struct witness *w, const char *const *args);

/* Poll `shardctl health` for at most @seconds: while a limit is hit it may be refused. */
void witness_serves(struct witness *w, unsigned seconds);

/* It answers, has what it had, and stops. */
void witness_end(struct witness *w);

/* Begin, one trainer that must end with 0 within @seconds, @job deleted, end. */
void witness_trainer(const char *const *args, const char *job, trainer_fn fn, unsigned seconds);

#endif
