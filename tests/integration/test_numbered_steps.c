/*
 * Training without a commit: each Step says its number and has the ranks' blobs. A trainer or the
 * daemon dies after each step, applied or only prepared; the others and the next ones continue with
 * the step that Join names, and end with the parameters of those whom nobody killed.
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

TestSuite(numbered_steps, .init = begin, .fini = end, .timeout = 120);

enum { WORLD = 2, STEPS = 9 };

struct play {
	bool calm;       /* nobody dies */
	stage at[WORLD]; /* step after which each rank waits for its death or another's */
	stage go;
	bool was_at[STEPS + 1]; /* somebody has died there */
	float params[TRAINUNITS][TRAINUNITS_ELEMENTS];
};

static void step_once(shardd_client *c, const shardd_unit *units, uint32_t rank, uint64_t step)
{
	uint64_t blob[2] = { step, rank };
	const struct shardd_step_options o = {
		.size = sizeof(o), .number = &step, .blob = blob, .blob_bytes = sizeof(blob)
	};

	trainunits_reduce(c, units, rank, step);
	TRAIN_OK(shardd_step_with(c, &o, NULL, &train_err));
}

/* Steps with odd numbers are applied before somebody dies, the others are lost with their epoch. */
static bool is_applied(uint64_t step)
{
	return step % 2;
}

/* Return: the step to continue after. */
static uint64_t enter(shardd_client *c, const struct trainer *t, shardd_unit *units)
{
	struct shardd_membership m = train_join_as(c, t, SHARDD_KEEP);

	TRAINER_CHECK(!m.torn && !m.has_commit && m.committed_step == 0);
	trainunits_register(c, units);
	if (!m.has_step) {
		trainunits_init(c, units);
		return 0;
	}
	TRAINER_CHECK(m.resumed && m.blob_step == m.step && m.blob_bytes == 16);
	TRAINER_CHECK(((const uint64_t *)m.blob)[0] == m.step);
	TRAINER_CHECK(((const uint64_t *)m.blob)[1] == t->rank);
	return m.step;
}

static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	float unused[TRAINUNITS][TRAINUNITS_ELEMENTS];
	shardd_client *c = train_connect(t);
	shardd_unit units[TRAINUNITS];
	uint64_t step = enter(c, t, units);

	while (step < STEPS) {
		step_once(c, units, t->rank, ++step);
		if (is_applied(step))
			trainunits_read(c, units, unused);
		if (p->calm || p->was_at[step])
			continue;
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err)); /* all are here */
		stage_set(&p->at[t->rank], (unsigned)step);
		TRAINER_AWAIT(atomic_load(&p->go) >= step, 60);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
		TRAINER_CHECK(enter(c, t, units) == step - !is_applied(step));
		step -= !is_applied(step);
	}
	if (t->rank == 0)
		trainunits_read(c, units, p->params);
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

/* A job that has no commit, as it is printed. */
static void expect_status(void)
{
	static const char *const args[] = { "--no-color", "jobs", NULL };
	char out[4096], *row;

	cr_expect_eq(fail_job_number(&trainfix, "calm", "applied_step"), STEPS);
	cr_expect_eq(fail_job_number(&trainfix, "calm", "step"), 0);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, args, out, sizeof(out)), 0, "%s", out);
	row = strstr(out, "calm ");
	cr_assert(row, "%s", out);
	cr_expect(strstr(row, "  9  "), "%s", out);
}

Test(numbered_steps, training_goes_on_bit_for_bit)
{
	struct play *p = trainer_shared(sizeof(*p)), *calm = trainer_shared(sizeof(*calm));
	pid_t pids[WORLD];

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
	for (unsigned i = 0; i < TRAINUNITS; i++)
		cr_expect_arr_eq(p->params[i], calm->params[i], sizeof(p->params[i]),
				 "unit %u differs", i);
	cr_expect_neq(p->params[0][0], 0, "something was trained");
	expect_status();
}
