/*
 * The daemon's instrumented points: before and after each function that publishes state, which the
 * linker's --wrap sends through here. shardd-chaos is the daemon with them; shardd has nothing of it.
 *
 * SHARDD_TEST_CHAOS names a file that the runner has made. The runner arms one point with a number of
 * passes, in this daemon or in one after it; the pass that uses them up ends the process, or stops it.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "backend/launch.h"
#include "backend/redo.h"
#include "coord/decide.h"
#include "engine/engine_impl.h"
#include "gather/turn.h"
#include "job/match.h"
#include "order/order.h"
#include "points.h"
#include "ring/rings_impl.h"
#include "rpc/method.h"
#include "step/apply.h"
#include "store/journal.h"
#include "store/keeper.h"

static struct points *points;

static void __attribute__((constructor)) points_open(void)
{
	const char *path = getenv("SHARDD_TEST_CHAOS");
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	void *at = MAP_FAILED;

	if (fd >= 0)
		at = mmap(NULL, sizeof(*points), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd >= 0)
		close(fd);
	if (at != MAP_FAILED)
		points = at;
}

/* Return: the signal for the process at this pass; 0: none. */
static int points_signal(unsigned point)
{
	struct timespec now;
	uint32_t armed;

	if (!points)
		return 0;
	atomic_fetch_add_explicit(&points->at[point].passes, 1, memory_order_relaxed);
	armed = atomic_load(&points->armed);
	if ((armed & ~POINTS_STOPS) != point + 1 || atomic_fetch_sub(&points->left, 1) != 1)
		return 0;
	atomic_store(&points->armed, 0);
	atomic_fetch_add(&points->at[point].deaths, 1);
	clock_gettime(CLOCK_MONOTONIC, &now);
	atomic_store(&points->died_ns, (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
	return armed & POINTS_STOPS ? SIGSTOP : SIGKILL;
}

static void points_pass(unsigned point)
{
	int number = points_signal(point);

	if (number)
		kill(getpid(), number);
}

/* The first store to the page of the middle element ends the process: what a block's other arrays got
 * before it is there. */
static void points_pass_inside(const struct launch *l, uint64_t begin, uint64_t end)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at;

	if (l->kind != LAUNCH_ADAMW || begin >= end ||
	    points_signal(POINT_INSIDE_LAUNCH) != SIGKILL)
		return;
	at = (uintptr_t)&l->adamw.p[begin + (end - begin) / 2] / page * page;
	signal(SIGSEGV, SIG_DFL);
	mprotect((void *)at, page, PROT_READ);
}

/* A function of POINTS that returns a value, and one that does not. */
#define WRAP(type, name, declared, given)         \
	type __real_##name declared;              \
	type __wrap_##name declared;              \
	type __wrap_##name declared               \
	{                                         \
		type result;                      \
		points_pass(POINT_BEFORE_##name); \
		result = __real_##name given;     \
		points_pass(POINT_AFTER_##name);  \
		return result;                    \
	}
#define WRAP_VOID(name, declared, given)          \
	void __real_##name declared;              \
	void __wrap_##name declared;              \
	void __wrap_##name declared               \
	{                                         \
		points_pass(POINT_BEFORE_##name); \
		__real_##name given;              \
		points_pass(POINT_AFTER_##name);  \
	}

WRAP(void *, journal_begin, (struct journal * r, size_t bytes), (r, bytes))
WRAP_VOID(journal_end, (struct journal * r, size_t bytes), (r, bytes))
WRAP(void *, journal_base_begin, (struct journal * r, size_t bytes), (r, bytes))
WRAP_VOID(journal_base_end, (struct journal * r, size_t bytes), (r, bytes))
WRAP(uint64_t, redo_task_publish, (struct redo_task * t), (t))
WRAP(struct redo_task *, redo_task_free, (struct redo_task * t), (t))
WRAP_VOID(redo_run,
	  (struct redo_task * t, unsigned i, unsigned slot, const struct kernels *k,
	   const struct launch *launch, uint64_t begin, uint64_t end),
	  (t, i, slot, k, launch, begin, end))
WRAP(int, redo_complete,
     (struct redo * r, uint64_t number, const struct kernels *k, unsigned threads,
      redo_addr_cb addr, void *arg, struct fault *f),
     (r, number, k, threads, addr, arg, f))
WRAP_VOID(redo_clear, (struct redo * r), (r))
WRAP(int, keeper_add, (struct keeper * k, const char *name, int fd), (k, name, fd))
WRAP_VOID(keeper_drop, (struct keeper * k, const char *name), (k, name))
WRAP_VOID(ring_post,
	  (struct ring * r, uint64_t tag, uint16_t code, const void *data, uint32_t bytes),
	  (r, tag, code, data, bytes))
WRAP_VOID(rpc_call_reply, (struct rpc_call * call, const ProtobufCMessage *reply), (call, reply))

void __real_launch_run(const struct kernels *k, const struct launch *l, uint64_t begin,
		       uint64_t end);
void __wrap_launch_run(const struct kernels *k, const struct launch *l, uint64_t begin,
		       uint64_t end);
void __wrap_launch_run(const struct kernels *k, const struct launch *l, uint64_t begin,
		       uint64_t end)
{
	points_pass(POINT_BEFORE_launch_run);
	points_pass_inside(l, begin, end);
	__real_launch_run(k, l, begin, end);
	points_pass(POINT_AFTER_launch_run);
}

/* ---------------------------------------------------------- between nodes */

int __real_order_announce(struct order *o, const struct order_entry *e);
int __wrap_order_announce(struct order *o, const struct order_entry *e);
int __wrap_order_announce(struct order *o, const struct order_entry *e)
{
	bool commits = e->flags & ORDER_DECISION;
	int r;

	points_pass(POINT_BEFORE_order_announce);
	if (commits)
		points_pass(POINT_BEFORE_COMMIT);
	r = __real_order_announce(o, e);
	if (commits)
		points_pass(POINT_AFTER_COMMIT);
	points_pass(POINT_AFTER_order_announce);
	return r;
}

WRAP(bool, match_start, (struct match * m, uint64_t number, uint64_t place), (m, number, place))
WRAP(int, turn_start, (struct job * job, struct unit *u, uint64_t position, uint64_t place),
     (job, u, position, place))
WRAP_VOID(comm_all_gather,
	  (struct comm * c, struct comm_op *op, const void *const *send, void *const *recv,
	   uint64_t count, enum dtype dtype),
	  (c, op, send, recv, count, dtype))
WRAP_VOID(comm_sum,
	  (struct comm * c, struct comm_op *op, const struct comm_sum *sum,
	   const struct comm_fold *fold, void *const *recv),
	  (c, op, sum, fold, recv))
WRAP_VOID(comm_all_reduce,
	  (struct comm * c, struct comm_op *op, void *const *data, uint64_t count, enum dtype dtype,
	   enum reduce_op reduce),
	  (c, op, data, count, dtype, reduce))
WRAP_VOID(comm_complete, (struct comm * c, struct comm_op *op, int status), (c, op, status))
WRAP(int, decide_begin,
     (struct decide * d, struct coord *c, const struct decide_what *what, decide_cb done),
     (d, c, what, done))
WRAP_VOID(order_decided,
	  (struct order * o, const struct order_key *key, bool done, const struct fault *fault),
	  (o, key, done, fault))
WRAP_VOID(apply_allow, (struct job * job, uint64_t group, uint64_t number), (job, group, number))
