/* The file that the runner and the instrumented daemon share; tests/chaos/control.py reads the same. */
#ifndef SHARDD_TESTS_CHAOS_POINTS_H
#define SHARDD_TESTS_CHAOS_POINTS_H

#include <stdatomic.h>
#include <stdint.h>

/* Order and number are those of POINTS in tests/chaos/control.py, also those of NODE_POINTS. */
#define POINTS(X)             \
	X(journal_begin)      \
	X(journal_end)        \
	X(journal_base_begin) \
	X(journal_base_end)   \
	X(redo_task_publish)  \
	X(redo_task_free)     \
	X(redo_run)           \
	X(redo_complete)      \
	X(redo_clear)         \
	X(keeper_add)         \
	X(keeper_drop)        \
	X(launch_run)         \
	X(ring_post)          \
	X(rpc_call_reply)

/* What the nodes of a job do together: tests/multinode/states.py. */
#define NODE_POINTS(X)     \
	X(order_announce)  \
	X(match_start)     \
	X(turn_start)      \
	X(comm_all_gather) \
	X(comm_sum)        \
	X(comm_all_reduce) \
	X(comm_complete)   \
	X(decide_begin)    \
	X(order_decided)   \
	X(apply_allow)

#define POINTS_OF(name) POINT_BEFORE_##name, POINT_AFTER_##name,
/* INSIDE_LAUNCH: while a launch of AdamW changes a block. ..._COMMIT: order_announce of a commit. */
enum {
	POINTS(POINTS_OF) POINT_INSIDE_LAUNCH,
	NODE_POINTS(POINTS_OF) POINT_BEFORE_COMMIT,
	POINT_AFTER_COMMIT,
	POINTS_N
};

#define POINTS_STOPS \
	(UINT32_C(1) << 31) /* the process stops at the point (SIGSTOP), and does not end */

struct points {
	_Atomic uint32_t armed;   /* point + 1, with POINTS_STOPS or without; 0: none */
	_Atomic int32_t left;     /* passes of it, the last of which ends or stops the process */
	_Atomic uint64_t died_ns; /* CLOCK_MONOTONIC */
	struct {
		_Atomic uint64_t passes, deaths;
	} at[POINTS_N];
};

#endif
