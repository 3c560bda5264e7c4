/* Stalls: when a job begins to stall, when it ends, and who is told to hold it up. */
#include <criterion/criterion.h>
#include <string.h>

#include "backend/backend_impl.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "op/op_run.h"
#include "op/op_time.h"
#include "op/stall.h"
#include "rpc/status_fill.h"
#include "rpc/status_stall.h"

static struct nodefix n;
static struct job *job;
static struct member *m[2];

static void test_stall_begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	clock_fake(1000000);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	n.node.limits.stall_after_ms = 1000;
}

static void test_stall_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

#define STALL_TEST(name) Test(stall, name, .init = test_stall_begin, .fini = test_stall_end)

static void tick_at(uint64_t us)
{
	clock_fake(us);
	ops_tick(&n.jobs, us, 1000000);
}

STALL_TEST(begins_and_ends_once)
{
	static struct nodefix_op op = { 0 }, late = { 0 }, peer = { 0 }, second = { 0 };
	uint64_t since;

	nodefix_barrier(&n, m[0], 0, &op);
	nodefix_barrier(&n, m[0], 0, &late); /* waits for the first, not for a peer */
	tick_at(1999999);
	cr_expect_eq(n.events.n, 0);
	cr_expect_null(stall_op(job, &since));
	ops_tick(&n.jobs, 2000000, 0);
	cr_expect_eq(n.events.n, 0, "reports are off");
	tick_at(2000000);
	cr_assert_eq(n.events.n, 1);
	cr_expect_eq(n.events.kind, JOB_EVENT_STALL);
	cr_expect_eq(n.events.job, job);
	cr_expect(strstr(n.events.text, "Barrier of rank 0 (number"), "%s", n.events.text);
	cr_expect(strstr(n.events.text, "waits for rank 1 (pid"), "%s", n.events.text);
	cr_expect_eq(stall_op(job, &since), op.op);
	cr_expect_eq(since, 1000000);
	tick_at(3000000);
	cr_expect_eq(n.events.n, 1);
	nodefix_barrier(&n, m[1], 0, &peer);
	nodefix_ok(&op, "Barrier");
	tick_at(3000001);
	cr_assert_eq(n.events.n, 2, "the second one has just begun to wait");
	cr_expect_eq(n.events.kind, JOB_EVENT_STALL_ENDED);
	cr_expect_null(stall_op(job, &since));
	tick_at(3999999);
	cr_expect_eq(n.events.n, 2);
	tick_at(4000000);
	cr_expect_eq(n.events.n, 3, "now that one");
	nodefix_barrier(&n, m[1], 0, &second);
	nodefix_ok(&late, "Barrier");
	tick_at(4000001);
	cr_expect_eq(n.events.n, 4);
}

/* Another job goes on. */
STALL_TEST(is_of_one_job)
{
	static struct nodefix_op op = { 0 }, other[2] = { 0 };
	struct job *busy = nodefix_job(&n, "busy", 2, 0);
	struct member *b[2] = { nodefix_join(&n, busy, 0), nodefix_join(&n, busy, 1) };
	uint64_t since;

	nodefix_barrier(&n, m[0], 0, &op);
	for (uint64_t us = 1000000; us < 3000000; us += 500000) {
		nodefix_barrier(&n, b[0], 0, &other[0]);
		nodefix_barrier(&n, b[1], 0, &other[1]);
		nodefix_ok(&other[0], "Barrier");
		nodefix_ok(&other[1], "Barrier");
		tick_at(us);
	}
	cr_expect_eq(n.events.n, 1);
	cr_expect_eq(n.events.job, job);
	cr_expect_null(stall_op(busy, &since));
}

/* What a device does takes as long as it takes. */
STALL_TEST(is_no_work_on_devices)
{
	static struct nodefix_op op = { 0 };
	state_unit *spec = nodefix_spec("u", 1000);
	struct unit *u;

	spec->compute_dtype = DTYPE_BF16;
	u = nodefix_unit(&n, job, spec, m, 2);
	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", u, &op);
	tick_at(9000000);
	cr_expect_eq(n.events.n, 0);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_ok(&op, "Gather");
}

/* An epoch that ends, ends what waited in it. */
STALL_TEST(ends_with_the_epoch)
{
	static struct nodefix_op op = { 0 };

	nodefix_barrier(&n, m[0], 0, &op);
	tick_at(2000000);
	cr_expect_eq(n.events.n, 1);
	op_cancel(op.op, FAULT_CANCELLED, "given up");
	tick_at(2000001);
	cr_assert(op.over);
	cr_expect_eq(n.events.n, 2);
	cr_expect_eq(n.events.kind, JOB_EVENT_STALL_ENDED);
}

static char said[1024];

static void on_told(struct job *of, const char *text)
{
	cr_expect_eq(of, job);
	snprintf(said, sizeof(said), "%s", text);
}

STALL_TEST(names_the_rank_and_what_its_process_does)
{
	static struct nodefix_op op = { 0 };
	char who[64];

	nodefix_barrier(&n, m[0], 0, &op);
	tick_at(3500000);
	status_stall_ask(job, on_told);
	snprintf(who, sizeof(who), "rank 1 (pid %d, running) has not begun Barrier", getpid());
	cr_expect(strstr(said, who), "%s", said);
	cr_expect(strstr(said, "in which 1 rank waits for 2.5 s"), "%s", said);
}

/* What shardctl status is told, at @us. */
static Shardd__V1__JobStatus *look(struct arena *a, uint64_t us)
{
	static Shardd__V1__JobStatus j;

	clock_fake(us);
	j = (Shardd__V1__JobStatus)SHARDD__V1__JOB_STATUS__INIT;
	status_fill_job(a, job, &j);
	status_fill_told(a, job, &j);
	status_fill_stall(a, job, &j);
	cr_assert(!a->failed);
	return &j;
}

/* An op that has waited for an earlier one of its own rank used to count from its arrival on. */
STALL_TEST(does_not_count_the_wait_for_earlier_ops)
{
	static struct nodefix_op op = { 0 }, late = { 0 }, peer = { 0 };
	struct arena a = ARENA_NULL;
	Shardd__V1__JobStatus *j;

	nodefix_barrier(&n, m[0], 0, &op);
	nodefix_barrier(&n, m[0], 0, &late);
	clock_fake(1900000);
	nodefix_barrier(&n, m[1], 0, &peer);
	nodefix_ok(&op, "Barrier");
	tick_at(2100000);
	j = look(&a, 2100000);
	cr_expect_null(j->stall);
	cr_assert_eq(j->n_blame, 1);
	cr_expect_eq(j->blame[0]->wait_us, 200000);
	tick_at(3000000);
	j = look(&a, 3000000);
	cr_assert(j->stall);
	cr_expect_eq(j->stall->wait_us, 1100000);
	cr_expect_eq(j->stall->culprit->rank, 1);
	arena_free(&a);
}

/* Something else holds it up than the rank that another one waits for since a moment. */
STALL_TEST(of_readers_is_not_blamed_on_a_rank)
{
	static struct nodefix_op op = { 0 }, held = { 0 };
	struct arena a = ARENA_NULL;
	Shardd__V1__JobStatus *j;

	job = nodefix_job(&n, "three", 3, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	nodefix_barrier(&n, m[0], 0, &held);
	held.op->state = OP_BLOCKED; /* as one that waits for readers */
	condition_wait(&job->readers.writers, &held.op->waiter);
	clock_fake(1990000);
	nodefix_barrier(&n, m[1], 0, &op);
	tick_at(2000000);
	j = look(&a, 2000000);
	cr_assert(j->stall);
	cr_assert_eq(j->n_blame, 1);
	cr_expect_eq(j->blame[0]->rank, 2);
	cr_expect_null(j->stall->culprit);
	cr_expect(strstr(j->stall->text, "Barrier of rank 0"), "%s", j->stall->text);
	waiter_leave(&held.op->waiter);
	held.op->state = OP_WAIT;
	arena_free(&a);
}

STALL_TEST(is_not_told_when_it_is_over)
{
	status_stall_ask(job, on_told);
	cr_expect_str_eq(said, "");
}
