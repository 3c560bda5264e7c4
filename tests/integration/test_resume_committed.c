/*
 * Jobs that resume at their last commit (resume COMMITTED): whoever dies, and however far the
 * parameters have gone since, the next ones begin with what was committed and end with the parameters
 * of those whom nobody killed, bit for bit. Also with optimizers in backward, in the middle of a pass.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"
#include "fdcheck.h"
#include "trainunits.h"

static void begin(void)
{
	fdcheck_begin();
	daemonfix_start_held(&trainfix, NULL);
}

static void end(void)
{
	if (trainfix.pid)
		daemonfix_stop(&trainfix);
	fdcheck_end();
}

TestSuite(resume_committed, .init = begin, .fini = end, .timeout = 180);

enum { WORLD = 2, STEPS = 12, COMMIT_EVERY = 4 };

typedef float params[TRAINUNITS][TRAINUNITS_ELEMENTS];

struct play {
	enum shardd_optimizer_when when;
	bool calm;       /* nobody dies */
	stage at[WORLD]; /* step after which each rank waits for its death or another's */
	stage go;
	bool was_at[STEPS + 1];      /* somebody has died there */
	params committed[STEPS + 1]; /* by step; rank 0's */
	params last;
};

static struct shardd_membership join(shardd_client *c, const struct trainer *t)
{
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = t->world,
				  .rank = t->rank,
				  .lifetime = SHARDD_KEEP,
				  .op_timeout_ms = 50000,
				  .resume = SHARDD_RESUME_COMMITTED };
	struct shardd_membership me;

	TRAIN_OK(shardd_join(c, &job, &me, &train_err));
	return me;
}

/* Return: the step to continue after. */
static uint64_t enter(shardd_client *c, const struct trainer *t, shardd_unit *units)
{
	struct play *p = t->arg;
	struct shardd_membership m = join(c, t);
	params now = { 0 };

	TRAINER_CHECK(!m.torn && m.has_step == m.has_commit);
	trainunits_register_when(c, units, p->when);
	if (!m.has_commit) {
		trainunits_init(c, units);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		return 0;
	}
	TRAINER_CHECK(trainunits_is_at(&m, t->rank, m.step) && m.committed_step == m.step);
	trainunits_read(c, units, now);
	TRAIN_SAME(now, p->committed[m.step], sizeof(now));
	return m.step;
}

static void step_once(shardd_client *c, const struct trainer *t, const shardd_unit *units,
		      uint64_t step)
{
	struct play *p = t->arg;
	uint64_t blob[2] = { step, t->rank };

	trainunits_reduce(c, units, t->rank, step);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	if (step % COMMIT_EVERY == 0)
		TRAIN_OK(shardd_commit(c, step, blob, sizeof(blob), &train_err));
	trainunits_read(c, units, t->rank ? p->last : p->committed[step]); /* it is applied */
}

/* A part of the next step. */
static void begin_step(shardd_client *c, const struct trainer *t, const shardd_unit *units,
		       uint64_t step)
{
	float *g = train_numbers(TRAINUNITS_ELEMENTS, step);

	train_reduce(c, units[0], DTYPE_FP32, g, TRAINUNITS_ELEMENTS);
	free(g);
	(void)t;
}

static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	shardd_unit units[TRAINUNITS];
	uint64_t step = enter(c, t, units);

	while (step < STEPS) {
		step_once(c, t, units, ++step);
		if (p->calm || p->was_at[step])
			continue;
		if (step % 2)
			begin_step(c, t, units, step + 1);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err)); /* all are here */
		stage_set(&p->at[t->rank], (unsigned)step);
		TRAINER_AWAIT(atomic_load(&p->go) >= step, 60);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
		step = enter(c, t, units);
		TRAINER_CHECK(step % COMMIT_EVERY == 0);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

static void kill_somebody(struct play *p, pid_t *pids, unsigned step)
{
	p->was_at[step] = true;
	if (step % 3 == 0 && train_on_host()) { /* trainers of GPUs do not connect again */
		daemonfix_replace_daemon(&trainfix, SIGKILL);
		stage_set(&p->go, step);
		return;
	}
	kill(pids[1], SIGKILL);
	(void)trainer_wait(pids[1], 60);
	stage_set(&p->go, step);
	pids[1] = trainer_start(&trainfix, "dies", 1, WORLD, trains, p);
}

static void go_on_bit_for_bit(enum shardd_optimizer_when when)
{
	struct play *p = trainer_shared(sizeof(*p)), *calm = trainer_shared(sizeof(*calm));
	pid_t pids[WORLD];

	p->when = calm->when = when;
	calm->calm = true;
	for (uint32_t r = 0; r < WORLD; r++)
		pids[r] = trainer_start(&trainfix, "dies", r, WORLD, trains, p);
	for (unsigned step = 1; step <= STEPS; step++) {
		AWAIT(atomic_load(&p->at[0]) == step && atomic_load(&p->at[1]) == step, 60);
		kill_somebody(p, pids, step);
	}
	for (unsigned r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
	trainers_run(&trainfix, "calm", WORLD, trains, calm, 60);
	for (unsigned step = 1; step <= STEPS; step++)
		cr_expect_arr_eq(p->committed[step], calm->committed[step],
				 sizeof(p->committed[step]), "step %u differs", step);
	cr_expect_neq(p->committed[STEPS][0][0], 0, "something was trained");
	cr_expect(fail_logged(&trainfix, "rolled back job="));
}

Test(resume_committed, goes_on_bit_for_bit)
{
	go_on_bit_for_bit(SHARDD_OPTIM_AT_STEP);
}

Test(resume_committed, goes_on_bit_for_bit_in_the_middle_of_a_backward_pass)
{
	go_on_bit_for_bit(SHARDD_OPTIM_IN_BACKWARD);
}

/* ------------------------------------------------------------------- how it is chosen */

static int refuses(const struct trainer *t)
{
	shardd_client *c = train_connect(t);
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = t->world,
				  .rank = t->rank,
				  .allow_torn = true,
				  .resume = SHARDD_RESUME_COMMITTED };

	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	told_now("job.allow_torn is set and job.resume is COMMITTED");
	job.allow_torn = false;
	job.resume = (enum shardd_resume)4;
	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	told_now("job.resume is 4; it must be APPLIED, COMMITTED or NO_COPY");
	job.resume = SHARDD_RESUME_NO_COPY;
	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("not at its last applied step without a copy (NO_COPY)");
	job.resume = SHARDD_RESUME_APPLIED;
	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("resumes at its last commit, not at its last applied step");
	job.resume = 0; /* as it is */
	TRAIN_OK(shardd_join(c, &job, NULL, &train_err));
	train_leave(c);
	return 0;
}

Test(resume_committed, is_decided_when_the_job_is_created)
{
	static const char *const create[] = { "job", "create",   "made",      "--world-size",
					      "1",   "--resume", "committed", NULL };
	static const char *const wrong[] = { "job", "create",   "other", "--world-size",
					     "1",   "--resume", "torn",  NULL };
	char out[4096];

	cr_assert_eq(daemonfix_ctl_text(&trainfix, create, out, sizeof(out)), 0, "%s", out);
	cr_expect_eq(daemonfix_ctl_text(&trainfix, wrong, out, sizeof(out)), 2);
	cr_expect(strstr(out, "--resume \"torn\" is not applied, committed or no-copy"), "%s", out);
	trainers_run(&trainfix, "made", 1, refuses, NULL, 60);
	fail_job_text(&trainfix, "made", "resume", out, sizeof(out));
	cr_expect_str_eq(out, "COMMITTED");
}
