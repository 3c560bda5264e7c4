/* Engines: the local one, and the fake one, by the same contract. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>

#include "backend/backend_impl.h"
#include "core/check.h"
#include "engine/engine_impl.h"
#include "fdcheck.h"
#include "looprun.h"

TestSuite(engine, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20);

#define MAX_MEMBERS 8

struct fixture {
	struct looprun run;
	struct backend *b[MAX_MEMBERS];
	unsigned n; /* of @b */
	struct engine *e;
	struct comm *c;
	bool ready;
};

static void on_ready(void *userdata, struct comm *comm, int status)
{
	struct fixture *f = userdata;

	cr_assert_eq(status, 0);
	f->c = comm;
	f->ready = true;
}

static void make_comm(struct fixture *f)
{
	struct comm_options options = { .name = "all",
					.devices = f->b,
					.n_devices = f->n,
					.queue = BACKEND_Q_GATHER,
					.ready = on_ready,
					.userdata = f };

	f->ready = false;
	cr_assert_eq(engine_comm_new(f->e, &options), 0);
	cr_assert_not(f->ready, "ready was called inside");
	looprun_flag(&f->run, &f->ready, 5);
	cr_assert_eq(f->c->size, f->n);
	cr_assert_eq(f->c->n_local, f->n);
	cr_assert_eq(f->c->member, 0);
}

static void setup_devices(struct fixture *f, unsigned n)
{
	looprun_init(&f->run);
	f->n = n;
	for (unsigned i = 0; i < n; i++)
		cr_assert_eq(backend_fake_new(&f->run.queue, 0, &f->b[i]), 0);
}

static void setup_local(struct fixture *f)
{
	setup_devices(f, 1);
	cr_assert_eq(engine_local_new(&f->run.queue, &f->e), 0);
	make_comm(f);
}

static void setup_fake(struct fixture *f, unsigned size)
{
	setup_devices(f, size);
	cr_assert_eq(engine_fake_new(&f->run.queue, &f->e), 0);
	make_comm(f);
}

static void teardown(struct fixture *f)
{
	f->c = comm_free(f->c);
	f->e = engine_close(f->e);
	for (unsigned i = 0; i < f->n; i++)
		f->b[i] = backend_close(f->b[i]);
	looprun_deinit(&f->run);
}

/* A fold that multiplies what was there by ten and adds a digit to it. */
static void fold_digit(void *userdata, void *values, uint64_t first, uint64_t n, bool begin)
{
	const float *digit = userdata;
	float *x = values;

	for (uint64_t i = 0; i < n; i++)
		x[i] = (begin ? 0 : x[i] * 10) + *digit + (float)(first + i) / 8;
}

/* One address per local member. */
#define SEND(...)   ((const void *const[]){ __VA_ARGS__ })
#define RECV(...)   ((void *const[]){ __VA_ARGS__ })
#define SUM(n, all) (&(const struct comm_sum){ .count = (n), .dtype = DTYPE_FP32, .whole = (all) })
#define CHAIN(n, all)              \
	(&(const struct comm_sum){ \
		.count = (n), .dtype = DTYPE_FP32, .whole = (all), .chained = true })

static char order[16];
static unsigned n_order;

struct named {
	struct comm_op op;
	char name;
	bool done;
	int status;
};

static void on_done(struct comm_op *op, int status)
{
	struct named *n = CONTAINER_OF(op, struct named, op);

	cr_assert_not(n->done, "completed twice");
	n->done = true;
	n->status = status;
	order[n_order++] = n->name;
}

#define NAMED(c) ((struct named){ .op = { .done = on_done }, .name = (c) })

static void expect(struct fixture *f, struct named *n, int status)
{
	looprun_flag(&f->run, &n->done, 5);
	cr_assert_eq(n->status, status, "status %d", n->status);
}

Test(engine, local_has_one_member_only)
{
	struct fixture f;
	struct comm_options options = { .n_devices = 2, .ready = on_ready, .userdata = &f };
	struct comm_info info;
	const bool gone[1] = { true };

	setup_local(&f);
	options.devices = (struct backend *const[]){ f.b[0], f.b[0] };
	cr_assert_str_eq(f.e->ops->name, "local");
	cr_assert_str_eq(f.e->detail, "");
	cr_assert_eq(engine_comm_new(f.e, &options), -EINVAL);
	options.n_devices = 1;
	cr_assert_eq(comm_shrink(f.c, gone, &options), -EOPNOTSUPP);
	comm_info(f.c, &info);
	cr_assert_str_eq(info.name, "all");
	cr_assert_str_eq(info.engine, "local");
	cr_assert_str_eq(info.gather, "copy");
	cr_assert_eq(info.size, 1);
	cr_assert_eq(info.memory_bytes, 0);
	cr_assert_null(comm_free(NULL));
	cr_assert_null(engine_close(NULL));
	teardown(&f);
}

static void on_freed(void *userdata)
{
	*(bool *)userdata = true;
}

/* Registering is advice: an engine that has no use for it takes it all the same. */
Test(engine, registering_is_always_allowed)
{
	struct fixture f;
	float x[2];
	bool freed = false;

	setup_fake(&f, 2);
	comm_register(f.c, RECV(&x[0], &x[1]), 4);
	comm_unregister(f.c, RECV(&x[0], &x[1]), on_freed, &freed);
	looprun_flag(&f.run, &freed, 5);
	teardown(&f);
}

static unsigned n_failed;

static void on_failed(void *userdata, struct comm *comm, const char *why)
{
	(void)userdata;
	cr_assert_eq(comm->size, 1);
	cr_assert_str_eq(why, "the wire is cut");
	n_failed++;
}

Test(engine, a_broken_communicator_says_so_once)
{
	struct fixture f;
	float x = 1;
	struct named n = NAMED('a');

	setup_fake(&f, 1);
	f.c->failed = on_failed;
	comm_broke(f.c, "the wire is cut");
	comm_broke(f.c, "again");
	cr_assert_eq(n_failed, 1);
	comm_all_reduce(f.c, &n.op, RECV(&x), 1, DTYPE_FP32, REDUCE_SUM);
	expect(&f, &n, ENGINE_E_ABORTED);
	teardown(&f);
}

Test(engine, local_copies_where_send_and_recv_differ)
{
	struct fixture f;
	uint16_t send[3] = { 1, 2, 3 }, recv[4] = { 9, 9, 9, 9 };
	float fs[2] = { 4, 5 }, fr[2] = { 0, 0 };
	struct named a = NAMED('a'), b = NAMED('b');

	setup_local(&f);
	comm_all_gather(f.c, &a.op, SEND(send), RECV(recv), 3, DTYPE_BF16);
	comm_reduce_scatter(f.c, &b.op, SEND(fs), RECV(fr), 2, DTYPE_FP32);
	cr_assert(!a.done && !b.done, "completed inside the call");
	expect(&f, &a, 0);
	expect(&f, &b, 0);
	cr_assert_arr_eq(recv, ((uint16_t[4]){ 1, 2, 3, 9 }), sizeof(recv));
	cr_assert_arr_eq(fr, fs, sizeof(fs));
	teardown(&f);
}

Test(engine, local_in_place_leaves_the_data_as_it_is)
{
	struct fixture f;
	float x[2] = { 4, 5 };
	struct named n[5] = { NAMED('a'), NAMED('b'), NAMED('c'), NAMED('d'), NAMED('e') };

	setup_local(&f);
	comm_all_gather(f.c, &n[0].op, SEND(x), RECV(x), 2, DTYPE_FP32);
	comm_reduce_scatter(f.c, &n[1].op, SEND(x), RECV(x), 2, DTYPE_FP32);
	comm_all_reduce(f.c, &n[2].op, RECV(x), 2, DTYPE_FP32, REDUCE_AVG);
	comm_broadcast(f.c, &n[3].op, RECV(x), sizeof(x), 0);
	comm_all_gather(f.c, &n[4].op, SEND(NULL), RECV(NULL), 0, DTYPE_FP32);
	cr_assert_eq(n_order, 0, "completed inside the call");
	expect(&f, &n[4], 0);
	cr_assert_arr_eq(order, "abcde", 5);
	for (unsigned i = 0; i < 4; i++)
		cr_assert_eq(n[i].status, 0);
	cr_assert_eq(x[0], 4.0f);
	cr_assert_eq(x[1], 5.0f);
	cr_assert_eq(backend_fake_calls(f.b[0]), 0, "nothing was to be copied");
	teardown(&f);
}

/* The second reads what the first writes: they must not run at the same time. */
Test(engine, local_operations_run_in_the_order_of_their_start)
{
	struct fixture f;
	float a = 1, b = 2, c = 3;
	struct named n[3] = { NAMED('a'), NAMED('b'), NAMED('c') };

	setup_local(&f);
	backend_fake_hold(f.b[0], true);
	comm_all_gather(f.c, &n[0].op, SEND(&a), RECV(&b), 1, DTYPE_FP32);
	comm_all_gather(f.c, &n[1].op, SEND(&b), RECV(&c), 1, DTYPE_FP32);
	comm_all_reduce(f.c, &n[2].op, RECV(&c), 1, DTYPE_FP32, REDUCE_SUM);
	uv_run(&f.run.loop, UV_RUN_NOWAIT);
	cr_assert_eq(backend_in_flight(f.b[0]), 1);
	backend_fake_hold(f.b[0], false);
	expect(&f, &n[2], 0);
	cr_assert_arr_eq(order, "abc", 3);
	cr_assert_eq(c, 1.0f);
	teardown(&f);
}

Test(engine, local_passes_on_that_the_device_failed)
{
	struct fixture f;
	float a = 1, b = 2;
	struct named n = NAMED('a'), m = NAMED('b');

	setup_local(&f);
	backend_fake_fail(f.b[0], 1, -EIO);
	comm_all_gather(f.c, &n.op, SEND(&a), RECV(&b), 1, DTYPE_FP32);
	expect(&f, &n, -EIO);
	comm_all_gather(f.c, &m.op, SEND(&a), RECV(&b), 1, DTYPE_FP32);
	expect(&f, &m, 0);
	teardown(&f);
}

Test(engine, local_abort_ends_what_is_pending_and_what_follows)
{
	struct fixture f;
	float a = 1, b = 2, c = 3;
	struct named n[4] = { NAMED('a'), NAMED('b'), NAMED('c'), NAMED('d') };

	setup_local(&f);
	backend_fake_hold(f.b[0], true);
	comm_all_gather(f.c, &n[0].op, SEND(&a), RECV(&b), 1, DTYPE_FP32);
	comm_all_gather(f.c, &n[1].op, SEND(&a), RECV(&c), 1, DTYPE_FP32);
	comm_all_reduce(f.c, &n[2].op, RECV(&a), 1, DTYPE_FP32, REDUCE_SUM);
	uv_run(&f.run.loop, UV_RUN_NOWAIT);
	comm_abort(f.c);
	comm_abort(f.c);
	uv_run(&f.run.loop, UV_RUN_NOWAIT);
	cr_assert_not(n[0].done, "its copy is still under way");
	backend_fake_hold(f.b[0], false);
	comm_broadcast(f.c, &n[3].op, RECV(&a), 4, 0);
	expect(&f, &n[3], ENGINE_E_ABORTED);
	for (unsigned i = 0; i < 3; i++)
		cr_assert_eq(n[i].status, ENGINE_E_ABORTED);
	cr_assert_arr_eq(order, "abcd", 4);
	cr_assert_eq(c, 3.0f, "copied after the abort");
	teardown(&f);
}

/* A chain in which each callback starts the next, and the last one frees. */
struct chain {
	struct comm_op op;
	struct fixture *f;
	unsigned left;
	bool done;
	float x;
};

static void on_link(struct comm_op *op, int status)
{
	struct chain *c = CONTAINER_OF(op, struct chain, op);

	cr_assert_eq(status, 0);
	if (c->left-- > 0) {
		comm_all_reduce(c->f->c, op, RECV(&c->x), 1, DTYPE_FP32, REDUCE_SUM);
		return;
	}
	c->f->c = comm_free(c->f->c);
	c->f->e = engine_close(c->f->e);
	c->done = true;
}

static void run_chain(struct fixture *f)
{
	struct chain c = { .op = { .done = on_link }, .f = f, .left = 3, .x = 1 };

	comm_all_reduce(f->c, &c.op, RECV(&c.x), 1, DTYPE_FP32, REDUCE_SUM);
	looprun_flag(&f->run, &c.done, 5);
	teardown(f);
}

Test(engine, callbacks_may_start_the_next_and_free)
{
	struct fixture f;

	setup_local(&f);
	run_chain(&f);
	setup_fake(&f, 1);
	run_chain(&f);
}

Test(engine, fake_gathers_in_member_order)
{
	struct fixture f;
	float send[3][2] = { { 1, 2 }, { 3, 4 }, { 5, 6 } }, recv[3][6] = { 0 };
	uint16_t in_place[3][3] = { { 7, 0, 0 }, { 0, 8, 0 }, { 0, 0, 9 } };
	struct named n[2] = { NAMED('a'), NAMED('b') };

	setup_fake(&f, 3);
	cr_assert_str_eq(f.e->ops->name, "fake");
	comm_all_gather(f.c, &n[0].op, SEND(send[0], send[1], send[2]),
			RECV(recv[0], recv[1], recv[2]), 2, DTYPE_FP32);
	comm_all_gather(f.c, &n[1].op, SEND(&in_place[0][0], &in_place[1][1], &in_place[2][2]),
			RECV(in_place[0], in_place[1], in_place[2]), 1, DTYPE_BF16);
	expect(&f, &n[1], 0);
	cr_assert_arr_eq(order, "ab", 2);
	for (unsigned i = 0; i < 3; i++) {
		cr_assert_arr_eq(recv[i], ((float[]){ 1, 2, 3, 4, 5, 6 }), sizeof(recv[i]));
		cr_assert_arr_eq(in_place[i], ((uint16_t[]){ 7, 8, 9 }), sizeof(in_place[i]));
	}
	cr_assert_eq(engine_fake_calls(f.e), 2);
	teardown(&f);
}

Test(engine, fake_reduces_each_segment_for_its_member)
{
	struct fixture f;
	float send[2][4] = { { 1, 2, 3, 4 }, { 10, 20, 30, 40 } }, recv[2][2] = { 0 };
	float in_place[2][2] = { { 1, 2 }, { 10, 20 } };
	struct named n[2] = { NAMED('a'), NAMED('b') };

	setup_fake(&f, 2);
	comm_reduce_scatter(f.c, &n[0].op, SEND(send[0], send[1]), RECV(recv[0], recv[1]), 2,
			    DTYPE_FP32);
	comm_reduce_scatter(f.c, &n[1].op, SEND(in_place[0], in_place[1]),
			    RECV(&in_place[0][0], &in_place[1][1]), 1, DTYPE_FP32);
	expect(&f, &n[1], 0);
	cr_assert_arr_eq(recv[0], ((float[]){ 11, 22 }), sizeof(recv[0]));
	cr_assert_arr_eq(recv[1], ((float[]){ 33, 44 }), sizeof(recv[1]));
	cr_assert_eq(in_place[0][0], 11.0f);
	cr_assert_eq(in_place[1][1], 22.0f);
	teardown(&f);
}

/* Member order matters in fp32: 1e8 swallows the ones that come after it. */
Test(engine, fake_folds_in_member_order)
{
	struct fixture f;
	float x[4] = { 1, 1e8f, 1, 1 }, y[4] = { 1, 1, 1, 1e8f };
	struct named n[2] = { NAMED('a'), NAMED('b') };

	setup_fake(&f, 4);
	comm_all_reduce(f.c, &n[0].op, RECV(&x[0], &x[1], &x[2], &x[3]), 1, DTYPE_FP32, REDUCE_SUM);
	comm_all_reduce(f.c, &n[1].op, RECV(&y[0], &y[1], &y[2], &y[3]), 1, DTYPE_FP32, REDUCE_SUM);
	expect(&f, &n[1], 0);
	for (unsigned i = 0; i < 4; i++) {
		cr_assert_eq(x[i], ((1.0f + 1e8f) + 1.0f) + 1.0f);
		cr_assert_eq(y[i], ((1.0f + 1.0f) + 1.0f) + 1e8f);
	}
	teardown(&f);
}

Test(engine, fake_knows_all_operators_and_roots)
{
	static const float want[_REDUCE_N] = {
		[REDUCE_SUM] = 9, [REDUCE_AVG] = 3, [REDUCE_MAX] = 6, [REDUCE_MIN] = 1
	};
	struct fixture f;
	char text[3][4] = { "abc", "def", "ghi" };
	struct named b = NAMED('b');

	setup_fake(&f, 3);
	for (unsigned op = REDUCE_SUM; op < _REDUCE_N; op++) {
		float x[3] = { 1, 6, 2 };
		struct named n = NAMED('a');

		comm_all_reduce(f.c, &n.op, RECV(&x[0], &x[1], &x[2]), 1, DTYPE_FP32, op);
		expect(&f, &n, 0);
		for (unsigned i = 0; i < 3; i++)
			cr_assert_eq(x[i], want[op], "%u: %g", op, (double)x[i]);
	}
	comm_broadcast(f.c, &b.op, RECV(text[0], text[1], text[2]), 4, 1);
	expect(&f, &b, 0);
	cr_assert_str_eq(text[0], "def");
	cr_assert_str_eq(text[2], "def");
	teardown(&f);
}

Test(engine, fake_fails_the_nth_operation_and_holds)
{
	struct fixture f;
	float x[2] = { 1, 1 };
	struct named n[3] = { NAMED('a'), NAMED('b'), NAMED('c') };

	setup_fake(&f, 2);
	engine_fake_fail(f.e, 2, -EPIPE);
	engine_fake_hold(f.e, true);
	for (unsigned i = 0; i < 3; i++)
		comm_all_reduce(f.c, &n[i].op, RECV(&x[0], &x[1]), 1, DTYPE_FP32, REDUCE_SUM);
	uv_run(&f.run.loop, UV_RUN_NOWAIT);
	cr_assert_eq(n_order, 0);
	engine_fake_hold(f.e, false);
	expect(&f, &n[2], 0);
	cr_assert_eq(n[0].status, 0);
	cr_assert_eq(n[1].status, -EPIPE);
	cr_assert_eq(x[1], 4.0f);
	teardown(&f);
}

Test(engine, fake_abort_ends_what_is_held)
{
	struct fixture f;
	float x[2] = { 1, 1 };
	struct named n[2] = { NAMED('a'), NAMED('b') };

	setup_fake(&f, 2);
	engine_fake_hold(f.e, true);
	comm_all_reduce(f.c, &n[0].op, RECV(&x[0], &x[1]), 1, DTYPE_FP32, REDUCE_SUM);
	comm_abort(f.c);
	comm_all_reduce(f.c, &n[1].op, RECV(&x[0], &x[1]), 1, DTYPE_FP32, REDUCE_SUM);
	expect(&f, &n[1], ENGINE_E_ABORTED);
	cr_assert_eq(n[0].status, ENGINE_E_ABORTED);
	cr_assert_eq(x[0], 1.0f);
	teardown(&f);
}

Test(engine, a_chain_passes_through_the_members_in_order)
{
	float digits[3] = { 1, 2, 3 }, x[3][6];
	struct comm_fold folds[3] = { { fold_digit, &digits[0] },
				      { fold_digit, &digits[1] },
				      { fold_digit, &digits[2] } };
	struct named part = NAMED('p'), whole = NAMED('w');
	struct fixture f;

	setup_fake(&f, 3);
	cr_assert(comm_can_sum(f.c));
	comm_sum(f.c, &part.op, CHAIN(2, false), folds, RECV(x[0], x[1], x[2]));
	expect(&f, &part, 0);
	for (unsigned i = 0; i < 6; i++)
		cr_assert_eq(x[i / 2][i % 2], 123 + 111 * (float)i / 8);
	comm_sum(f.c, &whole.op, CHAIN(6, true), folds, RECV(x[0], x[1], x[2]));
	expect(&f, &whole, 0);
	for (unsigned i = 0; i < 18; i++)
		cr_assert_eq(x[i / 6][i % 6], 123 + 111 * (float)(i % 6) / 8);
	teardown(&f);
}

/* Each begins values of its own, so that no digit moves another one up, as it does in a chain. */
Test(engine, a_sum_adds_what_members_make)
{
	float digits[3] = { 1, 2, 3 }, x[3][6];
	struct comm_fold folds[3] = { { fold_digit, &digits[0] },
				      { fold_digit, &digits[1] },
				      { fold_digit, &digits[2] } };
	struct named part = NAMED('p'), whole = NAMED('w');
	struct fixture f;

	setup_fake(&f, 3);
	comm_sum(f.c, &part.op, SUM(2, false), folds, RECV(x[0], x[1], x[2]));
	expect(&f, &part, 0);
	for (unsigned i = 0; i < 6; i++)
		cr_assert_eq(x[i / 2][i % 2], 6 + 3 * (float)i / 8);
	comm_sum(f.c, &whole.op, SUM(6, true), folds, RECV(x[0], x[1], x[2]));
	expect(&f, &whole, 0);
	for (unsigned i = 0; i < 18; i++)
		cr_assert_eq(x[i / 6][i % 6], 6 + 3 * (float)(i % 6) / 8);
	teardown(&f);
}

Test(engine, a_chain_of_one_member_is_its_fold)
{
	float digit = 7, x[2] = { 0 };
	struct comm_fold fold = { fold_digit, &digit };
	struct named aborted = NAMED('a'), whole = NAMED('w'), none = NAMED('n');
	struct fixture f;

	setup_local(&f);
	cr_assert(comm_can_sum(f.c));
	comm_sum(f.c, &whole.op, CHAIN(2, true), &fold, RECV(x));
	comm_sum(f.c, &none.op, CHAIN(0, false), &fold, RECV(x));
	expect(&f, &whole, 0);
	expect(&f, &none, 0);
	cr_assert(x[0] == 7 && x[1] == 7.125f);
	digit = 8;
	comm_sum(f.c, &aborted.op, CHAIN(2, true), &fold, RECV(x));
	comm_abort(f.c);
	expect(&f, &aborted, ENGINE_E_ABORTED);
	cr_assert_eq(x[0], 7, "the fold was called after an abort");
	teardown(&f);
}
