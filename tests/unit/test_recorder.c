/* The flight recorder: rings of the last ops, and of what devices did for them. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core/clock.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "op/op_time.h"

TestSuite(recorder, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

Test(recorder, keeps_the_last_ones_in_their_order)
{
	cr_assert_eq(recorder_init(3), 0);
	cr_expect_null(recorder_at(0));
	for (uint64_t id = 1; id <= 7; id++) {
		struct record *r = recorder_add();

		cr_assert_eq(r->id, id);
		r->seq = id * 10;
		for (size_t i = 0; i < (id < 3 ? id : 3); i++)
			cr_assert_eq(recorder_at(i)->id, (id < 3 ? 1 : id - 2) + i);
		cr_assert_null(recorder_at(id < 3 ? id : 3));
	}
	cr_expect_null(recorder_find(4), "overwritten");
	cr_expect_eq(recorder_find(5)->seq, 50);
	cr_expect_eq(recorder_find(7)->seq, 70);
	cr_expect_null(recorder_find(0));
	cr_expect_null(recorder_find(8));
	recorder_deinit();
	recorder_deinit();
}

Test(recorder, devices_have_a_ring_of_their_own)
{
	cr_assert_eq(recorder_init(3), 0);
	cr_expect_null(recorder_device_at(0));
	(void)recorder_add();
	for (uint64_t id = 1; id <= 7; id++)
		cr_assert_eq(recorder_add_device()->id, id);
	for (size_t i = 0; i < 3; i++)
		cr_expect_eq(recorder_device_at(i)->id, 5 + i);
	cr_expect_null(recorder_device_at(3));
	cr_expect_null(recorder_find_device(4), "overwritten");
	cr_expect_null(recorder_find_device(0));
	cr_expect_null(recorder_find_device(8));
	cr_expect_eq(recorder.next_id, 2);
	recorder_deinit();
}

Test(recorder, of_size_0_keeps_nothing)
{
	cr_assert_eq(recorder_init(0), 0);
	cr_expect_null(recorder_add());
	cr_expect_null(recorder_find(1));
	cr_expect_null(recorder_at(0));
	cr_expect_null(recorder_add_device());
	cr_expect_null(recorder_find_device(1));
	cr_expect_null(recorder_device_at(0));
	recorder_deinit();
}

static const struct record *newest(void)
{
	return recorder_find(recorder.next_id - 1);
}

Test(recorder, an_op_is_written_when_it_comes_and_when_it_ends)
{
	struct nodefix n;
	struct nodefix_op a = { 0 }, b = { .timeout_ms = 50 };
	struct member *m[2];
	struct job *job;

	nodefix_begin(&n, NULL);
	clock_fake(5000000);
	job = nodefix_job(&n, "training", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	nodefix_barrier(&n, m[1], 0, &b);
	cr_expect_eq(newest()->op, b.op);
	cr_expect_str_eq(newest()->name, "Barrier");
	cr_expect_str_eq(newest()->job, "training");
	cr_expect_str_eq(newest()->group, "world");
	cr_expect_str_eq(newest()->unit, "");
	cr_expect_eq(newest()->rank, 1);
	cr_expect_eq(newest()->pid, getpid());
	cr_expect_eq(newest()->epoch, 1);
	cr_expect_eq(newest()->announced_us, 5000000);
	cr_expect_eq(newest()->finished_us, 0);
	cr_expect_eq(newest()->op->active_us, 5000000, "nothing was before it");
	clock_fake(5060000);
	ops_tick(&n.jobs, clock_now_us(), 0);
	cr_assert(b.over);
	cr_expect_null(newest()->op);
	cr_expect_eq(newest()->started_us, 0);
	cr_expect_eq(newest()->finished_us, 5060000);
	cr_expect_eq(newest()->number, 1);
	cr_expect_eq(strncmp(newest()->error, "DEADLINE_EXCEEDED: ", 19), 0, "%s", newest()->error);
	nodefix_barrier(&n, m[0], 0, &a); /* that slot has failed */
	cr_expect_eq(strncmp(newest()->error, "DEADLINE_EXCEEDED: ", 19), 0);
	NODEFIX_OK(nodefix_alloc(&n, m[0], 100, &a), &a);
	cr_expect_str_eq(newest()->name, "AllocBuffer");
	cr_expect_eq(newest()->started_us, 5060000);
	cr_expect_str_eq(newest()->error, "");
	nodefix_end(&n);
}

/* More ops under way than the recorder has records: the oldest are forgotten, and
 * their end is written nowhere. */
Test(recorder, a_pending_op_whose_record_was_overwritten_ends_in_peace)
{
	const struct nodefix_options o = { .recorder = 2 };
	struct nodefix_op ops[6] = { 0 }, peer[6] = { 0 };
	struct member *m[2];
	struct nodefix n;
	struct job *job;

	nodefix_begin(&n, &o);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	for (unsigned i = 0; i < 6; i++)
		nodefix_barrier(&n, m[0], 0, &ops[i]);
	cr_expect_eq(recorder_at(0)->id, 5);
	cr_expect_eq(recorder_at(0)->op, ops[4].op);
	for (unsigned i = 0; i < 6; i++)
		nodefix_barrier(&n, m[1], 0, &peer[i]);
	for (unsigned i = 0; i < 6; i++) {
		nodefix_ok(&ops[i], "Barrier");
		nodefix_ok(&peer[i], "Barrier");
	}
	for (size_t i = 0; recorder_at(i); i++)
		cr_expect_null(recorder_at(i)->op);
	nodefix_end(&n);
}

/* ------------------------------------------------------------------- devices */

static const struct device_record *newest_device(void)
{
	return recorder_find_device(recorder.next_device_id - 1);
}

enum { ELEMENTS = 1000 };

/* Two ranks of one job with one unit that is cast, and their gradients. */
struct bed {
	struct nodefix n;
	struct job *job;
	struct member *m[2];
	struct unit *u;
	struct backend *b;
	struct nodefix_op op[4];
};

static void bed_begin(struct bed *d, size_t records)
{
	const struct nodefix_options o = { .recorder = records };
	state_unit *spec;

	nodefix_begin(&d->n, &o);
	clock_fake(1000000);
	d->job = nodefix_job(&d->n, "training", 2, 0);
	d->m[0] = nodefix_join(&d->n, d->job, 0);
	d->m[1] = nodefix_join(&d->n, d->job, 1);
	spec = nodefix_spec("layer", ELEMENTS);
	spec->compute_dtype = DTYPE_BF16;
	d->u = nodefix_unit(&d->n, d->job, spec, d->m, 2);
	d->b = d->n.node.devices[0].backend;
	for (unsigned i = 0; i < 2; i++)
		NODEFIX_OK(nodefix_on_unit(&d->n, d->m[i], "GradientBuffer", d->u, &d->op[i]),
			   &d->op[i]);
}

Test(recorder, a_collective_on_a_device_is_one_record)
{
	struct bed d = { 0 };
	const struct device_record *r;

	bed_begin(&d, 64);
	backend_fake_hold(d.b, true);
	nodefix_reduce(&d.n, d.m[0], d.u, false, &d.op[0]);
	clock_fake(2000000);
	nodefix_reduce(&d.n, d.m[1], d.u, false, &d.op[1]);
	r = newest_device();
	cr_expect_eq(r->pending, 1);
	cr_expect_eq(r->ended_us, 0);
	clock_fake(2500000);
	backend_fake_hold(d.b, false);
	nodefix_wait(&d.op[0]);
	nodefix_wait(&d.op[1]);
	cr_expect_eq(r, newest_device());
	cr_expect_str_eq(r->name, "Reduce");
	cr_expect_str_eq(r->job, "training");
	cr_expect_str_eq(r->unit, "layer");
	cr_expect_str_eq(r->device, backend_info(d.b)->id);
	cr_expect_str_eq(r->queue, "main");
	cr_expect_eq(r->number, d.op[0].number);
	cr_expect_eq(r->epoch, 1);
	cr_expect_eq(r->submitted_us, 2000000, "not when the first rank came");
	cr_expect_eq(r->began_us, 2500000);
	cr_expect_eq(r->ended_us, 2500000);
	cr_expect_eq(r->kernels, 1);
	cr_expect_eq(r->bytes, ELEMENTS * (2 * sizeof(float) + sizeof(float)));
	cr_expect_eq(r->pending, 0);
	cr_expect_eq(r->status, 0);
	nodefix_end(&d.n);
}

Test(recorder, a_cast_is_of_the_other_queue_and_a_failure_is_told)
{
	struct bed d = { 0 };
	const struct device_record *r;

	bed_begin(&d, 64);
	NODEFIX_OK(nodefix_on_unit(&d.n, d.m[0], "Gather", d.u, &d.op[0]), &d.op[0]);
	r = newest_device();
	cr_expect_str_eq(r->name, "Gather");
	cr_expect_str_eq(r->queue, "gather");
	cr_expect_eq(r->bytes, ELEMENTS * (4 + 2));
	cr_expect_eq(r->status, 0);
	cr_expect_eq(newest()->bytes, ELEMENTS * 2, "of the memory it handed out");
	NODEFIX_OK(nodefix_on_unit(&d.n, d.m[1], "Gather", d.u, &d.op[1]), &d.op[1]);
	cr_expect_eq(r, newest_device(), "nothing ran for the second rank");
	nodefix_reduce(&d.n, d.m[0], d.u, false, &d.op[2]);
	backend_fake_fail(d.b, 1, -EIO);
	nodefix_reduce(&d.n, d.m[1], d.u, false, &d.op[3]);
	nodefix_wait(&d.op[3]);
	cr_expect_neq(d.op[3].fault.code, 0);
	cr_expect_eq(newest_device()->status, -EIO);
	cr_expect_eq(newest_device()->pending, 0);
	nodefix_end(&d.n);
}

/* A task ends whose record was overwritten by later ones: it is written nowhere. */
Test(recorder, a_task_whose_record_was_overwritten_ends_in_peace)
{
	struct bed d = { 0 };
	struct nodefix_op gather[4] = { 0 };

	bed_begin(&d, 2);
	backend_fake_hold(d.b, true);
	for (unsigned i = 0; i < 4; i++) {
		char name[16];
		state_unit *spec;
		struct unit *u;

		snprintf(name, sizeof(name), "unit%u", i);
		spec = nodefix_spec(name, ELEMENTS);
		spec->compute_dtype = DTYPE_BF16;
		backend_fake_hold(d.b, false);
		u = nodefix_unit(&d.n, d.job, spec, d.m, 2);
		backend_fake_hold(d.b, true);
		nodefix_on_unit(&d.n, d.m[0], "Gather", u, &gather[i]);
	}
	cr_expect_not(gather[3].over);
	backend_fake_hold(d.b, false);
	for (unsigned i = 0; i < 4; i++)
		nodefix_ok(&gather[i], "Gather");
	for (size_t i = 0; recorder_device_at(i); i++)
		cr_expect_eq(recorder_device_at(i)->pending, 0);
	nodefix_end(&d.n);
}

/* The second op of a rank on the same unit waits for the first: from when on it does no more
 * is what tells one wait from the other. */
Test(recorder, an_op_becomes_active_when_those_before_it_are_over)
{
	struct bed d = { 0 };
	const struct record *r;

	bed_begin(&d, 64);
	nodefix_reduce(&d.n, d.m[0], d.u, false, &d.op[0]);
	nodefix_on_unit(&d.n, d.m[0], "GradientBuffer", d.u, &d.op[2]);
	r = newest();
	cr_expect_eq(r->op->active_us, 0);
	clock_fake(3000000);
	nodefix_reduce(&d.n, d.m[1], d.u, false, &d.op[1]);
	nodefix_ok(&d.op[2], "GradientBuffer");
	cr_expect_eq(r->announced_us, 1000000);
	cr_expect_eq(r->active_us, 3000000);
	nodefix_end(&d.n);
}
