/* Ops: their order, what waits for what, cancel, deadlines, and how they end. */
#include <criterion/criterion.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "op/op_run.h"
#include "op/op_time.h"

TestSuite(op, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *a, *b; /* each gather needs a cast */

static struct unit *cast_unit(const char *name)
{
	state_unit *spec = nodefix_spec(name, 1000);

	spec->compute_dtype = DTYPE_BF16;
	return nodefix_unit(&n, job, spec, m, 2);
}

static void test_op_begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	a = cast_unit("a");
	b = cast_unit("b");
	nodefix_ended = 0;
}

static void test_op_end(void)
{
	nodefix_end(&n);
	fdcheck_end();
}

#define OP_TEST(name) Test(op, name, .init = test_op_begin, .fini = test_op_end)

static void expect_fault(const struct fault *f, enum fault_code code, const char *words)
{
	cr_expect_eq(f->code, code, "%s: %s: %s", words, fault_code_name(f->code), f->text);
	cr_expect(strstr(f->text, words), "%s: %s", words, f->text);
}

static const char *state_of(const struct nodefix_op *op)
{
	return op->over ? "over" : op_state_name(op->op->state);
}

static const char *waits_for(const struct nodefix_op *op)
{
	static char buf[400];

	op_waits_for(op->op, buf, sizeof(buf));
	return buf;
}

/* --------------------------------------------------------------------- order */

OP_TEST(ops_take_their_turn_by_seq_however_they_come)
{
	static const unsigned comes[] = { 4, 2, 5, 1, 3 };
	static struct nodefix_op ops[6] = { 0 };

	for (unsigned i = 0; i < ARRAY_SIZE(comes); i++) {
		struct nodefix_op *op = &ops[comes[i]];

		op->seq = comes[i];
		cr_assert_eq(nodefix_on_unit(&n, m[0], "Release", a, op), 0);
		if (i < 3) {
			cr_expect_str_eq(state_of(op), "HELD");
			cr_expect_str_eq(waits_for(op), "this session's op with seq 1");
		}
	}
	for (unsigned seq = 1; seq <= 5; seq++) {
		nodefix_ok(&ops[seq], "Release");
		cr_expect_eq(ops[seq].order, seq - 1);
	}
	cr_expect_eq(m[0]->next_seq, 6);
	cr_expect_eq(m[0]->pending, 0);
}

OP_TEST(a_seq_comes_once)
{
	static struct nodefix_op op = { .seq = 3 }, twice = { .seq = 3 }, past = { .seq = 1 };
	static struct nodefix_op first = { .seq = 1 };

	nodefix_on_unit(&n, m[0], "Release", a, &op);
	cr_expect_neq(nodefix_on_unit(&n, m[0], "Release", a, &twice), 0);
	expect_fault(&twice.fault, FAULT_INVALID, "header.seq 3 came twice");
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Release", a, &first), &first);
	cr_expect_neq(nodefix_on_unit(&n, m[0], "Release", a, &past), 0);
	expect_fault(&past.fault, FAULT_INVALID, "the next one of this session is 2");
	cr_expect_str_eq(past.fault.field, "header.seq");
	cr_expect_eq(m[0]->pending, 1);
}

OP_TEST(an_op_with_wrong_fields_takes_its_turn_too)
{
	Shardd__V1__ReleaseRequest r = SHARDD__V1__RELEASE_REQUEST__INIT;
	static struct nodefix_op bad = { .seq = 2 }, first = { .seq = 1 }, last = { .seq = 3 };

	r.unit = 77;
	nodefix_on_unit(&n, m[0], "Release", a, &last);
	cr_expect_eq(nodefix_submit(&n, m[0], "Release", &r.base, &bad), 0);
	cr_expect_str_eq(state_of(&bad), "HELD");
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Release", a, &first), &first);
	cr_assert(bad.over);
	expect_fault(&bad.fault, FAULT_NOT_FOUND, "no unit 77");
	nodefix_ok(&last, "Release");
}

OP_TEST(ops_of_another_epoch_are_refused)
{
	static struct nodefix_op op = { .epoch = 2 };

	cr_expect_neq(nodefix_barrier(&n, m[0], 0, &op), 0);
	expect_fault(&op.fault, FAULT_ABORTED, "header.epoch is 2, but this rank has joined epoch");
	cr_expect_eq(m[0]->pending, 0);
}

OP_TEST(a_session_has_so_many_ops_unanswered)
{
	static struct nodefix_op ops[4] = { 0 };

	n.node.limits.max_inflight_ops = 3;
	for (unsigned i = 0; i < 3; i++)
		cr_expect_eq(nodefix_barrier(&n, m[0], 0, &ops[i]), 0);
	cr_expect_neq(nodefix_barrier(&n, m[0], 0, &ops[3]), 0);
	expect_fault(&ops[3].fault, FAULT_EXHAUSTED, "max_inflight_ops");
	cr_expect_eq(nodefix_barrier(&n, m[1], 0, &ops[3]), 0, "the other session may");
}

/* -------------------------------------------------------------- dependencies */

OP_TEST(ops_that_share_nothing_run_side_by_side)
{
	static struct nodefix_op ga = { 0 }, gb = { 0 }, ra = { 0 }, grad = { 0 }, mem = { 0 };

	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", a, &ga);
	nodefix_on_unit(&n, m[0], "Gather", b, &gb);
	nodefix_on_unit(&n, m[0], "Release", a, &ra);
	nodefix_on_unit(&n, m[0], "GradientBuffer", a, &grad);
	nodefix_alloc(&n, m[0], 100, &mem);
	cr_expect_str_eq(state_of(&ga), "RUN");
	cr_expect_str_eq(waits_for(&ga), "a cast");
	cr_expect_str_eq(state_of(&gb), "RUN");
	cr_expect_str_eq(state_of(&ra), "DEPS", "the gather of the same unit comes first");
	cr_expect_str_eq(waits_for(&ra), "1 earlier ops of this session");
	nodefix_ok(&grad, "GradientBuffer"); /* another part of the unit */
	nodefix_ok(&mem, "AllocBuffer");
	cr_expect_eq(job->copies.casts, 2);
	backend_fake_release(n.node.devices[0].backend, true); /* b's cast ends first */
	nodefix_wait(&ra);
	cr_expect_lt(gb.order, ga.order);
	cr_expect_lt(ga.order, ra.order);
	cr_expect_eq(ra.result.references, 0);
}

OP_TEST(a_barrier_is_after_all_before_it_and_before_all_after_it)
{
	static struct nodefix_op ga = { 0 }, bar = { 0 }, gb = { 0 }, peer = { 0 };

	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_barrier(&n, m[1], 0, &peer);
	cr_expect_str_eq(state_of(&peer), "WAIT");
	nodefix_on_unit(&n, m[0], "Gather", a, &ga);
	nodefix_barrier(&n, m[0], 0, &bar);
	nodefix_on_unit(&n, m[0], "Gather", b, &gb);
	cr_expect_str_eq(state_of(&bar), "DEPS");
	cr_expect_str_eq(state_of(&gb), "DEPS");
	backend_fake_release(n.node.devices[0].backend, false);
	nodefix_wait(&bar);
	cr_expect(peer.over);
	cr_expect_str_eq(state_of(&gb), "RUN");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_ok(&gb, "Gather");
	cr_expect_lt(ga.order, bar.order);
}

OP_TEST(ops_on_one_buffer_follow_each_other)
{
	static struct nodefix_op x = { 0 }, y = { 0 }, peer = { 0 };
	static struct nodefix_op sum = { 0 }, sum1 = { 0 }, fx = { 0 }, fy = { 0 }, again = { 0 };

	NODEFIX_OK(nodefix_alloc(&n, m[0], 400, &x), &x);
	NODEFIX_OK(nodefix_alloc(&n, m[0], 400, &y), &y);
	NODEFIX_OK(nodefix_alloc(&n, m[1], 400, &peer), &peer);
	nodefix_write(&x.result.place, 1);
	nodefix_write(&peer.result.place, 2);
	nodefix_all_reduce(&n, m[0], x.result.buffer, 100, &sum);
	nodefix_free(&n, m[0], x.result.buffer, &fx);
	nodefix_free(&n, m[0], x.result.buffer, &again);
	cr_expect_str_eq(state_of(&fx), "DEPS");
	NODEFIX_OK(nodefix_free(&n, m[0], y.result.buffer, &fy), &fy);
	nodefix_all_reduce(&n, m[1], peer.result.buffer, 100, &sum1);
	nodefix_ok(&sum, "AllReduce");
	nodefix_ok(&sum1, "AllReduce");
	nodefix_ok(&fx, "FreeBuffer");
	cr_expect_eq(((float *)region_addr(&peer.result.place))[99], 3);
	cr_assert(again.over);
	expect_fault(&again.fault, FAULT_NOT_FOUND, "no buffer 1");
}

/* An op that ends at once makes the next one ready: a thousand of them must not call
 * each other. Stack addresses of the callbacks tell. */
struct depth {
	uintptr_t low, high;
	unsigned over;
};

static void note_depth(struct op *op, void *userdata)
{
	uintptr_t here = (uintptr_t)__builtin_frame_address(0);
	struct depth *d = userdata;

	cr_assert(!op->fault.code, "%s", op->fault.text);
	d->low = here < d->low ? here : d->low;
	d->high = here > d->high ? here : d->high;
	d->over++;
}

static void submit_barriers(struct member *of, unsigned count, uint64_t first, struct depth *d)
{
	Shardd__V1__BarrierRequest r = SHARDD__V1__BARRIER_REQUEST__INIT;
	Shardd__V1__OpHeader h = SHARDD__V1__OP_HEADER__INIT;
	struct fault f = FAULT_NULL;
	struct op *op;

	r.header = &h;
	for (unsigned i = 0; i < count; i++) {
		h.seq = first + i;
		cr_assert_eq(op_submit(of, &op_barrier, &r.base, 0, note_depth, d, &op, &f), 0);
	}
}

OP_TEST(a_thousand_pipelined_ops_do_not_nest)
{
	struct depth d = { .low = UINTPTR_MAX };

	submit_barriers(m[0], 1000, 1, &d);
	submit_barriers(m[1], 999, 2, &d); /* all held: the first one comes last */
	cr_expect_eq(d.over, 0);
	submit_barriers(m[1], 1, 1, &d);
	cr_expect_eq(d.over, 2000);
	cr_expect_lt(d.high - d.low, 4096, "%zu bytes of stack", (size_t)(d.high - d.low));
}

/* -------------------------------------------------------------------- cancel */

/* Used to end without a number of its own: from then on the ranks' numbers differed
 * by one, and every later collective failed as a mismatch. */
OP_TEST(cancelled_before_its_turn_it_keeps_its_place)
{
	static struct nodefix_op first = { .seq = 1 }, held = { .seq = 2 }, last = { .seq = 3 };
	static struct nodefix_op peer[3] = { 0 };

	nodefix_barrier(&n, m[0], 0, &held);
	nodefix_barrier(&n, m[0], 0, &last);
	op_cancel(held.op, FAULT_CANCELLED, "enough of it");
	cr_assert(held.over, "who asked is answered at once");
	expect_fault(&held.fault, FAULT_CANCELLED, "enough of it");
	for (unsigned i = 0; i < 3; i++)
		nodefix_barrier(&n, m[1], 0, &peer[i]);
	nodefix_barrier(&n, m[0], 0, &first);
	nodefix_ok(&first, "Barrier");
	nodefix_ok(&peer[0], "Barrier");
	cr_assert(peer[1].over);
	expect_fault(&peer[1].fault, FAULT_STATE, "rank 0 (pid");
	nodefix_ok(&last, "Barrier");
	nodefix_ok(&peer[2], "Barrier");
}

OP_TEST(cancelled_while_earlier_ops_run)
{
	static struct nodefix_op ga = { 0 }, step = { 0 }, rel = { 0 }, peer = { 0 };

	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", a, &ga);
	nodefix_step(&n, m[0], &step);
	nodefix_on_unit(&n, m[0], "Release", a, &rel);
	nodefix_step(&n, m[1], &peer);
	cr_expect_str_eq(state_of(&step), "DEPS");
	op_cancel(step.op, FAULT_CANCELLED, "enough");
	cr_assert(step.over);
	expect_fault(&step.fault, FAULT_CANCELLED, "enough");
	cr_assert(peer.over, "its peers do not wait for ever");
	expect_fault(&peer.fault, FAULT_STATE, "was refused its Step at number");
	cr_expect_str_eq(state_of(&rel), "DEPS", "it still waits for the gather");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_ok(&rel, "Release");
}

OP_TEST(cancelled_while_it_waits_for_peers)
{
	static struct nodefix_op op = { 0 }, peer = { 0 }, next = { 0 };

	nodefix_barrier(&n, m[0], 0, &op);
	cr_expect_str_eq(state_of(&op), "WAIT");
	cr_expect(strstr(waits_for(&op), "rank 1 (pid"), "%s", waits_for(&op));
	op_cancel(op.op, FAULT_CANCELLED, "enough");
	cr_assert(op.over);
	expect_fault(&op.fault, FAULT_CANCELLED, "enough");
	nodefix_barrier(&n, m[1], 0, &peer); /* comes later and gets the same answer */
	cr_assert(peer.over);
	expect_fault(&peer.fault, FAULT_STATE, "rank 0 (pid");
	nodefix_barrier(&n, m[0], 0, &next);
	NODEFIX_OK(nodefix_barrier(&n, m[1], 0, &peer), &peer);
	nodefix_ok(&next, "Barrier");
}

OP_TEST(cancelled_while_it_is_blocked)
{
	static struct nodefix_op first = { 0 }, blocked = { 0 }, queued = { 0 }, after = { 0 };

	n.node.limits.max_inflight_gathers = 1;
	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", a, &first);
	nodefix_on_unit(&n, m[1], "Gather", a, &blocked); /* for the same cast */
	nodefix_on_unit(&n, m[0], "Gather", b, &queued);  /* for its own */
	cr_expect_str_eq(state_of(&blocked), "BLOCKED");
	cr_expect_str_eq(state_of(&queued), "BLOCKED");
	cr_expect_str_eq(waits_for(&blocked), "a cast");
	op_cancel(blocked.op, FAULT_CANCELLED, "enough");
	op_cancel(queued.op, FAULT_CANCELLED, "enough");
	expect_fault(&blocked.fault, FAULT_CANCELLED, "enough");
	expect_fault(&queued.fault, FAULT_CANCELLED, "enough");
	for (unsigned i = 0; i < 2; i++)
		cr_expect(condition_is_idle(&m[i]->casts));
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_ok(&first, "Gather");
	cr_expect_eq(a->gathered_ranks, 1);
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", b, &after), &after);
}

static void expect_both(const struct nodefix_op *ops, const char *waits)
{
	for (unsigned i = 0; i < 2; i++) {
		cr_expect_str_eq(state_of(&ops[i]), "RUN");
		cr_expect_str_eq(waits_for(&ops[i]), waits);
	}
}

static void later_and_held(bool on)
{
	for (unsigned d = 0; d < n.node.n_devices; d++) {
		backend_fake_later(n.node.devices[d].backend, on);
		backend_fake_hold(n.node.devices[d].backend, on);
	}
}

/* A collective that runs waits with its own waiter: each of its ops is told for what. */
Test(op, what_runs_names_what_it_waits_for, .fini = test_op_end)
{
	static struct nodefix_op ops[2], buffers[2];
	const uint64_t count = 4 << 20;

	fdcheck_begin();
	nodefix_begin(&n, &(struct nodefix_options){ .devices = 2, .fake_engine = true });
	job = nodefix_job(&n, "job", 2, 0);
	for (unsigned i = 0; i < 2; i++)
		m[i] = nodefix_join(&n, job, i);
	for (unsigned i = 0; i < 2; i++)
		NODEFIX_OK(nodefix_alloc(&n, m[i], count * sizeof(float), &buffers[i]),
			   &buffers[i]);
	nodefix_all_reduce(&n, m[0], buffers[0].result.buffer, count, &ops[0]);
	cr_expect_str_eq(state_of(&ops[0]), "WAIT");
	later_and_held(true);
	nodefix_all_reduce(&n, m[1], buffers[1].result.buffer, count, &ops[1]);
	expect_both(ops, "memory or communicators"); /* for its sums */
	for (unsigned d = 0; d < 2; d++)
		cr_assert(backend_fake_step(n.node.devices[d].backend)); /* it is made */
	nodefix_turns(&n);
	expect_both(ops, "work on its devices");
	later_and_held(false);
	nodefix_ok(&ops[0], "AllReduce");
	nodefix_ok(&ops[1], "AllReduce");
}

OP_TEST(what_runs_is_not_cancelled)
{
	static struct nodefix_op op = { 0 };

	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", a, &op);
	op_cancel(op.op, FAULT_CANCELLED, "enough");
	cr_expect_str_eq(state_of(&op), "RUN");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_ok(&op, "Gather");
}

/* ----------------------------------------------------- deadlines and stalls */

static void tick_at(uint64_t us, uint64_t stall_after_us)
{
	clock_fake(us);
	ops_tick(&n.jobs, us, stall_after_us);
}

OP_TEST(the_deadline_is_the_ops_or_the_jobs_or_the_callers)
{
	static struct nodefix_op own = { .timeout_ms = 10 }, none = { 0 };
	static struct nodefix_op jobs = { 0 };

	clock_fake(1000000);
	nodefix_barrier(&n, m[0], 0, &own);
	cr_expect_eq(own.op->deadline_us, 1010000);
	nodefix_barrier(&n, m[0], 0, &none);
	cr_expect_eq(none.op->deadline_us, UINT64_MAX);
	job->rec->op_timeout_ms = 20;
	nodefix_wrote(&n);
	nodefix_barrier(&n, m[0], 0, &jobs);
	cr_expect_eq(jobs.op->deadline_us, 1020000);
	tick_at(1009999, 0);
	cr_expect_not(own.over);
	tick_at(1010000, 0);
	cr_assert(own.over);
	expect_fault(&own.fault, FAULT_DEADLINE, "Barrier of rank 0 (number");
	cr_expect_not(jobs.over);
	tick_at(1020000, 0);
	cr_expect(jobs.over);
	cr_expect_not(none.over);
}

OP_TEST(a_deadline_says_what_was_missing_and_tells_the_peers)
{
	static struct nodefix_op op = { .timeout_ms = 10 }, peer = { 0 };

	clock_fake(1000000);
	nodefix_on_unit(&n, m[1], "Release", b, &peer);
	nodefix_barrier(&n, m[0], 0, &op);
	tick_at(1010000, 0);
	expect_fault(&op.fault, FAULT_DEADLINE, "waits for rank 1 (pid");
	expect_fault(&op.fault, FAULT_DEADLINE, "last op Release of unit b)");
	nodefix_barrier(&n, m[1], 0, &peer);
	cr_assert(peer.over);
	expect_fault(&peer.fault, FAULT_DEADLINE, "rank 0 (pid");
}

OP_TEST(ops_behind_a_missing_one_have_deadlines_too)
{
	static struct nodefix_op op = { .seq = 2, .timeout_ms = 10 }, first = { .seq = 1 };
	static struct nodefix_op next = { .seq = 3 };

	clock_fake(1000000);
	nodefix_barrier(&n, m[0], 0, &op);
	tick_at(1010000, 0);
	cr_assert(op.over);
	expect_fault(&op.fault, FAULT_DEADLINE, "waits for this session's op with seq 1");
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Release", a, &first), &first);
	/* the late one fills its place: what comes after it goes on */
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Release", a, &next), &next);
}

OP_TEST(what_runs_has_no_deadline)
{
	static struct nodefix_op op = { .timeout_ms = 10 };

	clock_fake(1000000);
	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", a, &op);
	tick_at(9000000, 0);
	cr_expect_str_eq(state_of(&op), "RUN");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_ok(&op, "Gather");
}

/* --------------------------------------------------------------------- peers */

OP_TEST(ranks_that_ask_for_different_things_are_both_told)
{
	static struct nodefix_op op[2] = { 0 };

	nodefix_barrier(&n, m[0], 0, &op[0]);
	nodefix_step(&n, m[1], &op[1]);
	for (unsigned i = 0; i < 2; i++) {
		cr_assert(op[i].over);
		expect_fault(&op[i].fault, FAULT_STATE, "asks for Barrier, rank 1 (pid");
		expect_fault(&op[i].fault, FAULT_STATE, "for Step");
	}
	nodefix_barrier(&n, m[0], 0, &op[0]);
	NODEFIX_OK(nodefix_barrier(&n, m[1], 0, &op[1]), &op[1]);
	nodefix_ok(&op[0], "Barrier");
}

OP_TEST(who_is_refused_does_not_leave_his_peers_waiting)
{
	static struct nodefix_op grad = { 0 }, good = { 0 }, bad = { 0 };

	NODEFIX_OK(nodefix_on_unit(&n, m[0], "GradientBuffer", a, &grad), &grad);
	nodefix_on_unit(&n, m[0], "Reduce", a, &good);
	cr_expect_str_eq(state_of(&good), "WAIT");
	nodefix_on_unit(&n, m[1], "Reduce", a, &bad);
	cr_assert(bad.over && good.over);
	expect_fault(&bad.fault, FAULT_STATE, "has not asked for its gradient buffer");
	expect_fault(&good.fault, FAULT_STATE, "rank 1 (pid");
	expect_fault(&good.fault, FAULT_STATE, "has not asked for its gradient buffer");
}

OP_TEST(the_end_of_an_epoch_ends_everything_that_waits)
{
	static struct nodefix_op run = { 0 }, deps = { 0 }, blocked = { 0 }, wait = { 0 };
	static struct nodefix_op held = { .seq = 9 };

	backend_fake_hold(n.node.devices[0].backend, true);
	nodefix_on_unit(&n, m[0], "Gather", a, &run);
	nodefix_on_unit(&n, m[0], "Release", a, &deps);
	nodefix_all_reduce(&n, m[0], 1, 1, &held);
	nodefix_on_unit(&n, m[1], "Gather", a, &blocked);
	nodefix_step(&n, m[1], &wait);
	cr_expect_str_eq(state_of(&wait), "DEPS");
	nodefix_drop(&n, m[1], "died");
	expect_fault(&deps.fault, FAULT_ABORTED, "rank 1");
	expect_fault(&held.fault, FAULT_ABORTED, "rank 1");
	expect_fault(&blocked.fault, FAULT_ABORTED, "rank 1");
	expect_fault(&wait.fault, FAULT_ABORTED, "rank 1");
	cr_expect_str_eq(state_of(&run), "RUN");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_wait(&run);
	expect_fault(&run.fault, FAULT_ABORTED, "epoch 1 has ended");
	cr_expect_eq(a->gathered_ranks, 0);
	cr_expect_eq(m[0]->pending, 0);
}
