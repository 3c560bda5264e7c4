/*
 * Trainers in debug mode (SHARDD_DEBUG=1), and what they write to standard error. On top of
 * trainfix.
 */
#ifndef SHARDD_TESTS_DEBUGFIX_H
#define SHARDD_TESTS_DEBUGFIX_H

#include "trainfix.h"

/* Elements of a unit so small that several share a page. */
enum { DEBUGFIX_N = 100 };

/* What a trainer says to the test; its @arg. Shared memory. */
struct told {
	bool no_ring; /* set by the test: over gRPC */
	int fd;       /* the trainer's standard error */
	void *at;     /* what it used last */
	uint64_t buffer;
	bool survived; /* the use */
	unsigned calls;
	float params[3][DEBUGFIX_N];
};

struct told *told_new(void);
void told_free(struct told *told);
/* All that was written to standard error. Valid until the next call. */
const char *told_text(const struct told *told);
/* Nothing of the library? A sanitizer may have said something. */
bool told_nothing(const struct told *told);

/* In a trainer: debug mode from here on, without a report of a sanitizer. */
void debugfix_on(const struct told *told);
/* The same, and train_join. */
shardd_client *debugfix_join(const struct trainer *t);

/* Use the byte at @at. */
void debugfix_read(struct told *told, const void *at);
void debugfix_clear(void *at, size_t bytes);
void debugfix_write(struct told *told, void *at);

/* In a test: skip it if memory is that of a GPU. */
void debugfix_host_only(void);
/* What trainers that died have left. */
void debugfix_delete(const char *job);
/* @world trainers run @fn with a struct told, and the library says nothing. */
void debugfix_run_quietly(uint32_t world, trainer_fn fn);

#endif
