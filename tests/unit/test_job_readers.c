/* Readers of a job: when a hold is granted, what waits for it, for how long, and what becomes of
 * both when something happens in between. Op by op. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "fdcheck.h"
#include "nodefix.h"

#define ELEMENTS 1000

static struct nodefix n;
static struct job *job;
static struct member *m[2];
static struct unit *u, *v; /* at the step; in backward */
static struct nodefix_op op[2];

/* A reader, and what came of its last hold. */
struct looker {
	struct reader *r;
	unsigned told;
	struct fault fault;
};
static struct looker a, b;

static void on_granted(struct reader *r, const struct fault *f)
{
	struct looker *l = r->userdata;

	l->told++;
	l->fault = f ? *f : FAULT_NULL;
}

static int hold(struct looker *l)
{
	struct fault f = FAULT_NULL;

	l->told = 0;
	return reader_hold(l->r, clock_now_us() + 5000000u, on_granted, l, &f);
}

static bool holds(const struct looker *l)
{
	return l->told == 1 && !l->fault.code && l->r->state == READER_HOLDS;
}

static int release(struct looker *l, struct fault *f)
{
	*f = FAULT_NULL;
	return reader_release(l->r, f);
}

static void released(struct looker *l)
{
	struct fault f;

	cr_assert_eq(release(l, &f), 0, "%s", f.text);
}

static void commit(uint64_t step)
{
	for (unsigned i = 0; i < 2; i++)
		nodefix_commit(&n, m[i], step, 0, &op[i]);
}

static void both_ok(const char *what)
{
	nodefix_ok(&op[0], what);
	nodefix_ok(&op[1], what);
}

static state_unit *spec_of(const char *name, enum optim_when when)
{
	state_unit *spec = nodefix_spec(name, ELEMENTS);

	spec->optimizer->when = when;
	return spec;
}

static void test_job_readers_begin(void)
{
	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 2, 0);
	m[0] = nodefix_join(&n, job, 0);
	m[1] = nodefix_join(&n, job, 1);
	u = nodefix_unit(&n, job, spec_of("u", OPTIM_AT_STEP), m, 2);
	v = nodefix_unit(&n, job, spec_of("v", OPTIM_IN_BACKWARD), m, 2);
	a = b = (struct looker){ 0 };
	cr_assert_eq(reader_new(job, n.proc, 7, &a.r), 0);
	cr_assert_eq(reader_new(job, n.proc, 8, &b.r), 0);
	commit(0);
	both_ok("Commit");
}

static void test_job_readers_end(void)
{
	reader_free(a.r);
	reader_free(b.r);
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(job_readers, .init = test_job_readers_begin, .fini = test_job_readers_end, .timeout = 60);

static void submit_reduce(struct unit *x)
{
	for (unsigned i = 0; i < 2; i++) {
		NODEFIX_OK(nodefix_on_unit(&n, m[i], "GradientBuffer", x, &op[i]), &op[i]);
		nodefix_write(&op[i].result.place, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		nodefix_reduce(&n, m[i], x, false, &op[i]);
}

static void prepare_step(void)
{
	submit_reduce(u);
	both_ok("Reduce");
	for (unsigned i = 0; i < 2; i++)
		nodefix_step(&n, m[i], &op[i]);
	both_ok("Step");
}

/* Nothing of it is over. */
static void both_wait(void)
{
	nodefix_turns(&n);
	cr_assert(!op[0].over && !op[1].over);
}

Test(job_readers, hold_what_is_committed_and_keep_the_next_commit_waiting)
{
	float before = nodefix_params(u)[3];

	cr_assert_eq(hold(&a), 0);
	cr_assert(holds(&a) && a.r->step == 0);
	prepare_step();
	commit(1);
	both_wait();
	cr_assert_eq(nodefix_params(u)[3], before);
	released(&a);
	both_ok("Commit");
	cr_assert_neq(nodefix_params(u)[3], before);
}

/* By who goes on without a commit. */
Test(job_readers, wait_for_the_commit_of_a_step_that_was_applied)
{
	struct nodefix_op gather = { 0 };

	prepare_step();
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Gather", u, &gather), &gather);
	NODEFIX_OK(nodefix_on_unit(&n, m[0], "Release", u, &gather), &gather);
	cr_assert_eq(hold(&a), 0);
	cr_assert(!a.told);
	commit(1);
	both_ok("Commit");
	cr_assert(holds(&a) && a.r->step == 1);
}

/* Two that take turns without a gap would keep a writer waiting for ever. */
Test(job_readers, are_granted_nothing_while_somebody_waits_to_write)
{
	cr_assert_eq(hold(&a), 0);
	prepare_step();
	commit(1);
	cr_assert_eq(hold(&b), 0);
	both_wait();
	cr_assert(holds(&a) && !b.told && b.r->state == READER_WAITING);
	released(&a);
	both_ok("Commit");
	cr_assert(holds(&b) && b.r->step == 1);
	released(&b);
}

/* Also when no step is prepared. */
Test(job_readers, are_granted_nothing_while_a_unit_is_to_be_initialised)
{
	cr_assert_eq(hold(&a), 0);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 9, &op[i]);
	cr_assert_eq(hold(&b), 0);
	both_wait();
	cr_assert(!b.told);
	released(&a);
	both_ok("Initialise");
	cr_assert(!b.told); /* what was committed is no more */
	commit(1);
	both_ok("Commit");
	cr_assert(holds(&b));
}

/* What was summoned may be given back at any time, but not written. */
Test(job_readers, keep_what_is_written_back_waiting)
{
	Shardd__V1__ReturnFullRequest r = SHARDD__V1__RETURN_FULL_REQUEST__INIT;
	float before = nodefix_params(u)[3];

	r.unit = u->id;
	for (unsigned write = 0; write < 2; write++) {
		for (unsigned i = 0; i < 2; i++)
			nodefix_on_unit(&n, m[i], "SummonFull", u, &op[i]);
		both_ok("SummonFull");
		for (unsigned i = 0; i < 2; i++)
			nodefix_write(&op[i].result.place, before + 1);
		cr_assert_eq(hold(&a), 0);
		cr_assert(holds(&a));
		r.write = write;
		for (unsigned i = 0; i < 2; i++)
			nodefix_submit(&n, m[i], "ReturnFull", &r.base, &op[i]);
		if (write)
			both_wait();
		else
			both_ok("ReturnFull");
		cr_assert_eq(nodefix_params(u)[3], before);
		released(&a);
		both_ok("ReturnFull");
	}
	cr_assert_eq(nodefix_params(u)[3], before + 1);
	cr_assert_eq(hold(&a), 0);
	cr_assert(!a.told); /* no commit knows of it */
}

/* It would be found elsewhere. */
Test(job_readers, keep_a_conversion_waiting)
{
	Shardd__V1__ConvertUnitsRequest r[2];
	uint64_t before = readers_generation(job);
	uint32_t slab = u->parts[0].params.slab->id;

	cr_assert_eq(hold(&a), 0);
	for (unsigned i = 0; i < 2; i++) {
		r[i] = (Shardd__V1__ConvertUnitsRequest)SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
		r[i].units = &u->id;
		r[i].n_units = 1;
		r[i].layout = SHARDD__V1__LAYOUT__LAYOUT_DIM0;
		nodefix_submit(&n, m[i], "ConvertUnits", &r[i].base, &op[i]);
	}
	both_wait();
	cr_assert_eq(u->parts[0].params.slab->id, slab);
	released(&a);
	both_ok("ConvertUnits");
	cr_assert_neq(u->parts[0].params.slab->id, slab);
	cr_assert_gt(readers_generation(job), before);
	cr_assert_eq(hold(&a), 0);
	cr_assert(holds(&a)); /* the same parameters, and committed */
}

Test(job_readers, are_granted_at_the_commit_before_what_was_submitted_behind_it)
{
	struct nodefix_op next[2] = { 0 };

	prepare_step();
	cr_assert_eq(hold(&a), 0);
	cr_assert(!a.told);
	commit(1);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 9, &next[i]);
	both_ok("Commit");
	nodefix_turns(&n);
	cr_assert(holds(&a) && a.r->step == 1 && !next[0].over && !next[1].over);
	released(&a);
	nodefix_ok(&next[0], "Initialise");
	nodefix_ok(&next[1], "Initialise");
}

Test(job_readers, wait_as_long_as_they_said)
{
	uint64_t now = 1000000;

	clock_fake(now);
	prepare_step();
	cr_assert_eq(hold(&a), 0);
	readers_tick(job, now + 4999999);
	cr_assert(!a.told);
	readers_tick(job, now + 5000000);
	cr_assert(a.told == 1 && a.fault.code == FAULT_DEADLINE);
	cr_assert(strstr(a.fault.text, "the commit that follows step 0"), "%s", a.fault.text);
	cr_assert_eq(a.r->state, READER_IDLE);
	clock_real();
}

/* --------------------------------------------------------------- in backward */

Test(job_readers, keep_a_reduce_that_steps_waiting_before_it_takes_memory)
{
	cr_assert_eq(hold(&a), 0);
	submit_reduce(v);
	both_wait();
	cr_assert(!v->parts[0].grads.slab && !v->has_gradient);
	released(&a);
	both_ok("Reduce");
	cr_assert(v->step == UNIT_STEP_STEPPED);
}

Test(job_readers, wait_for_a_reduce_that_steps)
{
	struct backend *d = n.node.devices[0].backend;

	backend_fake_hold(d, true);
	submit_reduce(v);
	nodefix_turns(&n);
	cr_assert_eq(hold(&a), 0);
	cr_assert(!a.told);
	backend_fake_hold(d, false);
	both_ok("Reduce");
	nodefix_turns(&n);
	cr_assert(!a.told); /* past the commit now */
	commit(1);
	both_ok("Commit");
	cr_assert(holds(&a));
}

/* Gathered by somebody when it began, so that it is stepped by what follows. */
Test(job_readers, wait_for_a_reduce_that_leads_to_a_step)
{
	struct backend *d = n.node.devices[0].backend;
	struct nodefix_op gather = { 0 };

	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Gather", v, &gather), &gather);
	backend_fake_hold(d, true);
	submit_reduce(v);
	both_wait();
	cr_assert(v->step != UNIT_STEP_DUE && v->step != UNIT_STEP_STEPPING &&
		  !job->rec->uncommitted_steps);
	cr_assert_eq(hold(&a), 0);
	cr_assert(!a.told);
	backend_fake_hold(d, false);
	both_ok("Reduce");
	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Release", v, &gather), &gather);
	commit(1);
	both_ok("Commit");
	cr_assert(holds(&a) && a.r->step == 1);
}

/* Somebody has it gathered, so it is stepped later: nothing runs meanwhile. */
Test(job_readers, wait_for_a_unit_that_is_due)
{
	struct nodefix_op gather = { 0 };

	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Gather", v, &gather), &gather);
	submit_reduce(v);
	both_ok("Reduce");
	cr_assert(v->step == UNIT_STEP_DUE && !job->rec->uncommitted_steps);
	cr_assert_eq(hold(&a), 0);
	nodefix_turns(&n);
	cr_assert(!a.told);
	NODEFIX_OK(nodefix_on_unit(&n, m[1], "Release", v, &gather), &gather);
	nodefix_turns(&n);
	cr_assert(v->step == UNIT_STEP_STEPPED && !a.told);
	commit(1);
	both_ok("Commit");
	cr_assert(holds(&a));
}

/* --------------------------------------------------------------------- ends */

Test(job_readers, keep_a_commit_waiting_whose_rank_dies)
{
	float before = nodefix_params(u)[3];
	struct member *again = NULL;
	struct fault f = FAULT_NULL;

	cr_assert_eq(hold(&a), 0);
	prepare_step();
	commit(1);
	both_wait();
	nodefix_drop(&n, m[1], "died");
	nodefix_turns(&n);
	cr_assert(!op[0].over);
	/* as long as the reader holds, but for the tick: it would not be told else */
	jobs_tick(&n.jobs, clock_now_us());
	nodefix_wait(&op[0]);
	nodefix_wait(&op[1]);
	cr_assert_eq(op[0].fault.code, FAULT_ABORTED, "%s", op[0].fault.text);
	cr_assert(holds(&a) && !job->life.torn && job->rec->step == 0);
	cr_assert_eq(nodefix_params(u)[3], before);
	cr_assert_eq(nodefix_try_join(&n, job, 0, NULL, m[0], &again, &f), 0, "%s", f.text);
	released(&a);
	cr_assert_eq(nodefix_params(u)[3], before);
}

Test(job_readers, lose_a_job_that_is_deleted_while_it_waits_for_them)
{
	struct fault f = FAULT_NULL;

	cr_assert_eq(hold(&a), 0);
	prepare_step();
	commit(1);
	cr_assert_eq(hold(&b), 0);
	both_wait();
	cr_assert_eq(job_delete(job, true, NULL, &f), 0);
	cr_assert(b.told == 1 && b.fault.code == FAULT_NOT_FOUND);
	jobs_tick(&n.jobs, clock_now_us());
	nodefix_wait(&op[0]);
	nodefix_wait(&op[1]);
	cr_assert_eq(op[0].fault.code, FAULT_ABORTED);
	cr_assert_eq(a.r->state, READER_IDLE);
	cr_assert_eq(hold(&a), FAULT_NOT_FOUND);
}

Test(job_readers, that_end_while_they_hold_let_go)
{
	cr_assert_eq(hold(&a), 0);
	prepare_step();
	commit(1);
	cr_assert_eq(hold(&b), 0);
	both_wait();
	b.r = reader_free(b.r); /* waits */
	cr_assert(b.told == 1 && b.fault.code == FAULT_CANCELLED);
	a.r = reader_free(a.r); /* holds */
	both_ok("Commit");
}

Test(job_readers, of_a_draining_job_hold_nothing)
{
	struct fault f = FAULT_NULL;

	cr_assert_eq(hold(&a), 0);
	prepare_step();
	cr_assert_eq(hold(&b), 0);
	job_drain(job);
	cr_assert(b.told == 1 && b.fault.code == FAULT_UNAVAILABLE);
	cr_assert_eq(a.r->state, READER_IDLE);
	cr_assert_eq(reader_hold(a.r, UINT64_MAX, on_granted, &a, &f), FAULT_UNAVAILABLE);
}

Test(job_readers, are_told_of_what_has_changed)
{
	uint64_t before = readers_generation(job);

	prepare_step();
	commit(1);
	both_ok("Commit");
	cr_assert_eq(readers_generation(job), before);
	for (unsigned i = 0; i < 2; i++)
		nodefix_seed(&n, m[i], u, 9, &op[i]);
	both_ok("Initialise");
	cr_assert_eq(readers_generation(job), before, "other values, in the same place");
	nodefix_register(job, nodefix_spec("w", ELEMENTS));
	cr_assert_gt(readers_generation(job), before);
}
