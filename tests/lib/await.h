/* Waiting for a condition that nothing announces. */
#ifndef SHARDD_TESTS_AWAIT_H
#define SHARDD_TESTS_AWAIT_H

#include <criterion/criterion.h>
#include <stdint.h>

#include "core/clock.h"
#include "daemonwatch.h"

/* Wait in the test process until @cond holds. The test fails after @seconds, or as soon as a daemon
 * has ended. */
#define AWAIT(cond, seconds)                                                            \
	do {                                                                            \
		uint64_t await_until_ = clock_now_us() + (uint64_t)(seconds)*1000000u;  \
		while (!(cond)) {                                                       \
			cr_assert(clock_now_us() < await_until_, "not within %u s: %s", \
				  (unsigned)(seconds), #cond);                          \
			daemonwatch_turn(1);                                            \
		}                                                                       \
	} while (0)

#endif
