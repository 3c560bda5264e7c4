/* Run a libuv loop inside a test until something is so, without sleeping. */
#ifndef SHARDD_TESTS_LOOPRUN_H
#define SHARDD_TESTS_LOOPRUN_H

#include <stdbool.h>
#include <uv.h>

#include "core/loopq.h"

/* A loop with its queue, for modules that need both. */
struct looprun {
	uv_loop_t loop;
	struct loopq queue;
};

void looprun_init(struct looprun *l);
/* Close the queue, run what is left, close the loop; fails the test if a handle
 * is still open. */
void looprun_deinit(struct looprun *l);

/* This process was forked by a test: if a wait fails the process prints that, and ends with status 1.
 * Criterion would wait for an answer of the test's parent, which does not know the process. */
void looprun_in_child(void);

/* Turn the loop until @done(@arg) is true; fails the test after @seconds. */
void looprun_until(struct looprun *l, bool (*done)(void *arg), void *arg, unsigned seconds);

/* Turn the loop until *@flag is true; fails the test after @seconds. */
void looprun_flag(struct looprun *l, const bool *flag, unsigned seconds);

#endif
