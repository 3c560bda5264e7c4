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

struct fixture {
	struct looprun run;
	struct backend *b;
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

static void make_comm(struct fixture *f, unsigned size, unsigned member)
{
	f->ready = false;
	cr_assert_eq(engine_comm_new(f->e, size, member, on_ready, f), 0);
	cr_assert_not(f->ready, "ready was called inside");
	looprun_flag(&f->run, &f->ready, 5);
	cr_assert_eq(comm_size(f->c), size);
}

static void setup_local(struct fixture *f)
{
	looprun_init(&f->run);
	cr_assert_eq(backend_fake_new(&f->run.queue, 0, &f->b), 0);
	cr_assert_eq(engine_local_new(&f->run.queue, f->b, &f->e), 0);
	make_comm(f, 1, 0);
}

static void setup_fake(struct fixture *f, unsigned size, unsigned member)
{
	looprun_init(&f->run);
	f->b = NULL;
	cr_assert_eq(engine_fake_new(&f->run.queue, &f->e), 0);
	make_comm(f, size, member);
}

static void teardown(struct fixture *f)
{
	f->c = comm_free(f->c);
	f->e = engine_close(f->e);
	f->b = backend_close(f->b);
	looprun_deinit(&f->run);
}

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

	setup_local(&f);
	cr_assert_str_eq(engine_name(f.e), "local");
	cr_assert_eq(engine_comm_new(f.e, 2, 0, on_ready, &f), -EINVAL);
	cr_assert_null(comm_free(NULL));
	cr_assert_null(engine_close(NULL));
	teardown(&f);
}

Test(engine, local_copies_where_send_and_recv_differ)
{
	struct fixture f;
	uint16_t send[3] = { 1, 2, 3 }, recv[4] = { 9, 9, 9, 9 };
	float fs[2] = { 4, 5 }, fr[2] = { 0, 0 };
	struct named a = NAMED('a'), b = NAMED('b');

	setup_local(&f);
	comm_all_gather(f.c, &a.op, send, recv, 3, DTYPE_BF16);
	comm_reduce_scatter(f.c, &b.op, fs, fr, 2, DTYPE_FP32);
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
	comm_all_gather(f.c, &n[0].op, x, x, 2, DTYPE_FP32);
	comm_reduce_scatter(f.c, &n[1].op, x, x, 2, DTYPE_FP32);
	comm_all_reduce(f.c, &n[2].op, x, 2, DTYPE_FP32, REDUCE_AVG);
	comm_broadcast(f.c, &n[3].op, x, sizeof(x), 0);
	comm_all_gather(f.c, &n[4].op, NULL, NULL, 0, DTYPE_FP32);
	cr_assert_eq(n_order, 0, "completed inside the call");
	expect(&f, &n[4], 0);
	cr_assert_arr_eq(order, "abcde", 5);
	for (unsigned i = 0; i < 4; i++)
		cr_assert_eq(n[i].status, 0);
	cr_assert_eq(x[0], 4.0f);
	cr_assert_eq(x[1], 5.0f);
	cr_assert_eq(backend_fake_calls(f.b), 0, "nothing was to be copied");
	teardown(&f);
}

/* The second reads what the first writes: they must not run at the same time. */
Test(engine, local_operations_run_in_the_order_of_their_start)
{
	struct fixture f;
	float a = 1, b = 2, c = 3;
	struct named n[3] = { NAMED('a'), NAMED('b'), NAMED('c') };

	setup_local(&f);
	backend_fake_hold(f.b, true);
	comm_all_gather(f.c, &n[0].op, &a, &b, 1, DTYPE_FP32);
	comm_all_gather(f.c, &n[1].op, &b, &c, 1, DTYPE_FP32);
	comm_all_reduce(f.c, &n[2].op, &c, 1, DTYPE_FP32, REDUCE_SUM);
	uv_run(&f.run.loop, UV_RUN_NOWAIT);
	cr_assert_eq(backend_in_flight(f.b), 1);
	backend_fake_hold(f.b, false);
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
	backend_fake_fail(f.b, 1, -EIO);
	comm_all_gather(f.c, &n.op, &a, &b, 1, DTYPE_FP32);
	expect(&f, &n, -EIO);
	comm_all_gather(f.c, &m.op, &a, &b, 1, DTYPE_FP32);
	expect(&f, &m, 0);
	teardown(&f);
}

Test(engine, local_abort_ends_what_is_pending_and_what_follows)
{
	struct fixture f;
	float a = 1, b = 2, c = 3;
	struct named n[4] = { NAMED('a'), NAMED('b'), NAMED('c'), NAMED('d') };

	setup_local(&f);
	backend_fake_hold(f.b, true);
	comm_all_gather(f.c, &n[0].op, &a, &b, 1, DTYPE_FP32);
	comm_all_gather(f.c, &n[1].op, &a, &c, 1, DTYPE_FP32);
	comm_all_reduce(f.c, &n[2].op, &a, 1, DTYPE_FP32, REDUCE_SUM);
	uv_run(&f.run.loop, UV_RUN_NOWAIT);
	comm_abort(f.c);
	comm_abort(f.c);
	uv_run(&f.run.loop, UV_RUN_NOWAIT);
	cr_assert_not(n[0].done, "its copy is still under way");
	backend_fake_hold(f.b, false);
	comm_broadcast(f.c, &n[3].op, &a, 4, 0);
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
		comm_all_reduce(c->f->c, op, &c->x, 1, DTYPE_FP32, REDUCE_SUM);
		return;
	}
	c->f->c = comm_free(c->f->c);
	c->f->e = engine_close(c->f->e);
	c->done = true;
}

static void run_chain(struct fixture *f)
{
	struct chain c = { .op = { .done = on_link }, .f = f, .left = 3, .x = 1 };

	comm_all_reduce(f->c, &c.op, &c.x, 1, DTYPE_FP32, REDUCE_SUM);
	looprun_flag(&f->run, &c.done, 5);
	teardown(f);
}

Test(engine, callbacks_may_start_the_next_and_free)
{
	struct fixture f;

	setup_local(&f);
	run_chain(&f);
	setup_fake(&f, 1, 0);
	run_chain(&f);
}

Test(engine, fake_members_all_send_the_same)
{
	struct fixture f;
	float send[2] = { 1, 2 }, all[6], part[1] = { 0 }, seg[3] = { 1, 2, 5 };
	struct named n[4] = { NAMED('a'), NAMED('b'), NAMED('c'), NAMED('d') };

	setup_fake(&f, 3, 2);
	cr_assert_str_eq(engine_name(f.e), "fake");
	comm_all_gather(f.c, &n[0].op, send, all, 2, DTYPE_FP32);
	comm_reduce_scatter(f.c, &n[1].op, seg, part, 1, DTYPE_FP32);
	comm_all_reduce(f.c, &n[2].op, send, 2, DTYPE_FP32, REDUCE_SUM);
	comm_broadcast(f.c, &n[3].op, send, sizeof(send), 1);
	expect(&f, &n[3], 0);
	cr_assert_arr_eq(order, "abcd", 4);
	cr_assert_arr_eq(all, ((float[]){ 1, 2, 1, 2, 1, 2 }), sizeof(all));
	cr_assert_eq(part[0], 15.0f);
	cr_assert_eq(send[1], 6.0f);
	cr_assert_eq(engine_fake_calls(f.e), 4);
	teardown(&f);
}

Test(engine, fake_fails_the_nth_operation_and_holds)
{
	struct fixture f;
	float x = 1;
	struct named n[3] = { NAMED('a'), NAMED('b'), NAMED('c') };

	setup_fake(&f, 2, 0);
	engine_fake_fail(f.e, 2, -EPIPE);
	engine_fake_hold(f.e, true);
	for (unsigned i = 0; i < 3; i++)
		comm_all_reduce(f.c, &n[i].op, &x, 1, DTYPE_FP32, REDUCE_SUM);
	uv_run(&f.run.loop, UV_RUN_NOWAIT);
	cr_assert_eq(n_order, 0);
	engine_fake_hold(f.e, false);
	expect(&f, &n[2], 0);
	cr_assert_eq(n[0].status, 0);
	cr_assert_eq(n[1].status, -EPIPE);
	cr_assert_eq(x, 4.0f);
	teardown(&f);
}

Test(engine, fake_abort_ends_what_is_held)
{
	struct fixture f;
	float x = 1;
	struct named n[2] = { NAMED('a'), NAMED('b') };

	setup_fake(&f, 2, 1);
	engine_fake_hold(f.e, true);
	comm_all_reduce(f.c, &n[0].op, &x, 1, DTYPE_FP32, REDUCE_SUM);
	comm_abort(f.c);
	comm_all_reduce(f.c, &n[1].op, &x, 1, DTYPE_FP32, REDUCE_SUM);
	expect(&f, &n[1], ENGINE_E_ABORTED);
	cr_assert_eq(n[0].status, ENGINE_E_ABORTED);
	cr_assert_eq(x, 1.0f);
	teardown(&f);
}
