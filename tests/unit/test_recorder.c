/* The flight recorder: pending ops, the last ones, and what devices did for them. */
#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core/clock.h"
#include "fdcheck.h"
#include "nodefix.h"
#include "op/op_time.h"

TestSuite(recorder, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

/* How many records of @job are there, and the number of the oldest. */
static unsigned count(const char *job, uint64_t *oldest)
{
	unsigned n = 0;

	*oldest = 0;
	for (size_t i = 0; i < recorder_size(); i++) {
		const struct record *r = recorder_op_at(i);

		if (!r || strcmp(r->head.job, job) != 0)
			continue;
		if (!*oldest || r->head.id < *oldest)
			*oldest = r->head.id;
		n++;
	}
	return n;
}

static void add(const char *job, uid_t uid, unsigned n)
{
	while (n-- > 0)
		cr_assert(recorder_add(recorder_next_op(), job, uid));
}

Test(recorder, keeps_the_last_ones)
{
	uint64_t oldest;

	cr_assert_eq(recorder_init(3), 0);
	cr_expect_eq(count("a", &oldest), 0);
	for (uint64_t id = 1; id <= 7; id++) {
		add("a", 0, 1);
		cr_expect_eq(count("a", &oldest), id < 3 ? id : 3);
		cr_expect_eq(oldest, id < 3 ? 1 : id - 2);
	}
	recorder_deinit();
	recorder_deinit();
}

/* A busy job used to push out what had happened in all others. */
Test(recorder, each_job_has_its_share)
{
	uint64_t oldest;

	cr_assert_eq(recorder_init(12), 0);
	add("quiet", 0, 3);
	add("busy", 0, 100);
	cr_expect_eq(count("quiet", &oldest), 3);
	cr_expect_eq(oldest, 1);
	cr_expect_eq(count("busy", &oldest), 9);
	add("third", 0, 100);
	cr_expect_eq(count("quiet", &oldest), 3);
	cr_expect_eq(oldest, 1);
	cr_expect_leq(count("busy", &oldest), 5);
	cr_expect_geq(count("busy", &oldest), 4);
	cr_expect_eq(oldest, 103 - count("busy", &oldest) + 1, "the last ones");
	add("quiet", 0, 100);
	cr_expect_eq(count("quiet", &oldest), 4);
	cr_expect_eq(count("busy", &oldest), 4);
	cr_expect_eq(count("third", &oldest), 4);
	recorder_deinit();
}

/* A user's jobs are not those of another one, even with the same name. */
Test(recorder, owners_have_their_shares)
{
	unsigned mine = 0;

	cr_assert_eq(recorder_init(4), 0);
	add("job", 1000, 2);
	add("job", 1001, 100);
	for (size_t i = 0; i < recorder_size(); i++)
		mine += recorder_op_at(i)->head.uid == 1000;
	cr_expect_eq(mine, 2);
	recorder_deinit();
}

/* More jobs than records: each has the last one, or none. */
Test(recorder, more_jobs_than_records)
{
	char name[16];
	uint64_t oldest;

	cr_assert_eq(recorder_init(5), 0);
	for (unsigned i = 0; i < 1000; i++) {
		snprintf(name, sizeof(name), "job%u", i * 7919 % 31);
		add(name, 0, 1 + i % 3);
		cr_expect_geq(count(name, &oldest), 1);
	}
	cr_expect_leq(recorder.ops.n_trails, 5);
	recorder_deinit();
}

/* Jobs that have ended long ago kept their records, and those that ran had none. */
Test(recorder, jobs_that_record_nothing_give_way)
{
	char name[16];
	uint64_t oldest;

	cr_assert_eq(recorder_init(16), 0);
	for (unsigned i = 0; i < 16; i++) {
		snprintf(name, sizeof(name), "old%u", i);
		add(name, 0, 1);
	}
	for (unsigned i = 0; i < 100; i++) {
		add("b", 0, 1);
		add("c", 0, 1);
	}
	cr_expect_geq(count("b", &oldest), 4);
	cr_expect_geq(count("c", &oldest), 4);
	cr_expect_leq(recorder.ops.n_trails, 4);
	recorder_deinit();
}

/* Those of publications have fewer places, and the same shares. */
Test(recorder, publications_have_records_of_their_own)
{
	unsigned quiet = 0, busy = 0;

	cr_assert_eq(recorder_init(64), 0);
	for (unsigned i = 0; i < 3; i++)
		cr_assert(recorder_add_published("quiet", 0));
	for (unsigned i = 0; i < 100; i++) {
		struct published_record *r = recorder_add_published("busy", 0);

		cr_assert(r);
		cr_expect_eq(r->number, 0, "nothing is left of another one");
		r->number = i + 1;
	}
	add("ops", 0, 100);
	for (size_t i = 0; i < recorder_size(); i++) {
		const struct published_record *r = recorder_published_at(i);

		quiet += r && strcmp(r->head.job, "quiet") == 0;
		busy += r && strcmp(r->head.job, "busy") == 0;
		cr_expect(!r || r->number == 0 || r->number > 100 - 13);
	}
	cr_expect_eq(quiet, 3);
	cr_expect_eq(busy, 13);
	recorder_deinit();
	cr_assert_eq(recorder_init(0), 0);
	cr_expect_null(recorder_add_published("job", 0));
	recorder_deinit();
}

static unsigned count_devices(void)
{
	unsigned n = 0;

	for (size_t i = 0; i < recorder_size(); i++)
		n += recorder_device_at(i) != NULL;
	return n;
}

Test(recorder, devices_have_records_of_their_own)
{
	struct device_record *r;

	cr_assert_eq(recorder_init(3), 0);
	add("job", 0, 1);
	cr_expect_eq(count_devices(), 0);
	for (uint64_t id = 1; id <= 7; id++) {
		r = recorder_add_device("job", 0);
		cr_assert_eq(r->head.id, id);
		recorder_end_device(r);
	}
	cr_expect_eq(count_devices(), 3);
	recorder_deinit();
}

Test(recorder, work_that_has_not_ended_is_not_overwritten)
{
	struct device_record *first, *second, *third;

	cr_assert_eq(recorder_init(3), 0);
	first = recorder_add_device("job", 0);
	second = recorder_add_device("job", 0);
	third = recorder_add_device("other", 0);
	cr_expect_null(recorder_add_device("job", 0));
	recorder_end_device(second);
	for (unsigned i = 0; i < 5; i++) {
		cr_expect_eq(recorder_add_device("other", 0), second);
		recorder_end_device(second);
	}
	cr_expect_eq(first->head.id, 1);
	cr_expect_eq(third->head.id, 3);
	recorder_resume_device(second);
	cr_expect_null(recorder_add_device("job", 0));
	recorder_end_device(first);
	cr_expect_eq(recorder_add_device("job", 0), first);
	recorder_deinit();
}

Test(recorder, of_size_0_keeps_nothing)
{
	cr_assert_eq(recorder_init(0), 0);
	cr_expect_null(recorder_add(recorder_next_op(), "job", 0));
	cr_expect_null(recorder_add_device("job", 0));
	cr_expect_eq(recorder_size(), 0);
	recorder_deinit();
}

/* The op that came last and is pending; NULL: none is. */
static const struct op *pending(void)
{
	return list_empty(&recorder.pending)
		       ? NULL
		       : list_entry(recorder.pending.prev, struct op, recorded.link);
}

/* Of the op that came last, if it has ended. */
static const struct record *newest(void)
{
	for (size_t i = 0; i < recorder_size(); i++)
		if (recorder_op_at(i) && recorder_op_at(i)->head.id == recorder.ops.next_id - 1)
			return recorder_op_at(i);
	return NULL;
}

Test(recorder, an_op_is_pending_and_then_written)
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
	cr_expect_eq(pending(), b.op);
	cr_expect_null(newest());
	cr_expect_eq(b.op->recorded.id, recorder.ops.next_id - 1);
	cr_expect_eq(b.op->active_us, 5000000, "nothing was before it");
	clock_fake(5060000);
	ops_tick(&n.jobs, clock_now_us(), 0);
	cr_assert(b.over);
	cr_expect_null(pending());
	cr_expect_str_eq(newest()->name, "Barrier");
	cr_expect_str_eq(newest()->head.job, "training");
	cr_expect_str_eq(newest()->group, "world");
	cr_expect_str_eq(newest()->unit, "");
	cr_expect_eq(newest()->rank, 1);
	cr_expect_eq(newest()->pid, getpid());
	cr_expect_eq(newest()->epoch, 1);
	cr_expect_eq(newest()->announced_us, 5000000);
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

/* More ops are under way than the recorder has records: all of them are there. They used to be
 * forgotten. */
Test(recorder, pending_ops_are_never_forgotten)
{
	const struct nodefix_options o = { .recorder = 2 };
	struct nodefix_op ops[6] = { 0 }, peer[6] = { 0 };
	struct op *op, *tmp;
	struct member *m[2];
	struct nodefix n;
	struct job *job;
	unsigned found = 0;

	nodefix_begin(&n, &o);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	for (unsigned i = 0; i < 6; i++)
		nodefix_barrier(&n, m[0], 0, &ops[i]);
	list_for_each (op, tmp, &recorder.pending, recorded.link)
		cr_expect_eq(op, ops[found++].op, "in the order in which they came");
	cr_expect_eq(found, 6);
	for (unsigned i = 0; i < 6; i++)
		nodefix_barrier(&n, m[1], 0, &peer[i]);
	for (unsigned i = 0; i < 6; i++) {
		nodefix_ok(&ops[i], "Barrier");
		nodefix_ok(&peer[i], "Barrier");
	}
	cr_expect_null(pending());
	nodefix_end(&n);
}

/* ------------------------------------------------------------------- devices */

static const struct device_record *newest_device(void)
{
	for (size_t i = 0; i < recorder_size(); i++)
		if (recorder_device_at(i) &&
		    recorder_device_at(i)->head.id == recorder.devices.next_id - 1)
			return recorder_device_at(i);
	return NULL;
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
	cr_expect_str_eq(r->head.job, "training");
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

/* More tasks than records: what finds no record is written nowhere. */
Test(recorder, a_task_without_a_record_ends_in_peace)
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
	for (size_t i = 0; i < recorder_size(); i++)
		cr_expect_eq(recorder_device_at(i)->pending, 0);
	nodefix_end(&d.n);
}

/* The second op of a rank on the same unit waits for the first: from when on it does no more
 * is what tells one wait from the other. */
Test(recorder, an_op_becomes_active_when_those_before_it_are_over)
{
	struct bed d = { 0 };
	const struct record *r = NULL;
	uint64_t id;

	bed_begin(&d, 64);
	nodefix_reduce(&d.n, d.m[0], d.u, false, &d.op[0]);
	nodefix_on_unit(&d.n, d.m[0], "GradientBuffer", d.u, &d.op[2]);
	id = d.op[2].op->recorded.id;
	cr_expect_eq(d.op[2].op->active_us, 0);
	clock_fake(3000000);
	nodefix_reduce(&d.n, d.m[1], d.u, false, &d.op[1]);
	nodefix_ok(&d.op[2], "GradientBuffer");
	for (size_t i = 0; i < recorder_size() && !r; i++)
		if (recorder_op_at(i) && recorder_op_at(i)->head.id == id)
			r = recorder_op_at(i);
	cr_assert(r);
	cr_expect_eq(r->announced_us, 1000000);
	cr_expect_eq(r->active_us, 3000000);
	nodefix_end(&d.n);
}
