/*
 * Jobs that resume at their last applied step, whose units make it one after the other: with an
 * optimizer in backward, or with the trainers' own. A death in the middle of a step rolls back the units
 * that have made it. The next trainers begin with the last whole step, and end with the parameters of
 * those whom nobody killed, bit for bit.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
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

TestSuite(resume_applied, .init = begin, .fini = end, .timeout = 180);

enum { WORLD = 2, STEPS = 9, N = TRAINUNITS_ELEMENTS };

typedef float params[TRAINUNITS][N];

struct play {
	enum shardd_optimizer_when when;
	bool calm;       /* nobody dies */
	stage at[WORLD]; /* step in the middle of which each rank waits for its death or another's */
	stage go;
	bool was_at[STEPS + 1]; /* somebody has died there */
	params whole[STEPS];    /* after each step before; of rank 0 */
	params last;
};

static void register_all(shardd_client *c, shardd_unit *units, enum shardd_optimizer_when when)
{
	static const char *const names[TRAINUNITS] = { "a", "b", "c" };
	static const struct shardd_unit_spec own = {
		.size = sizeof(own), .optimizer = { .when = SHARDD_OPTIM_BY_TRAINER }
	};

	if (when != SHARDD_OPTIM_BY_TRAINER) {
		trainunits_register_when(c, units, when);
		return;
	}
	for (unsigned i = 0; i < TRAINUNITS; i++)
		units[i] = train_register(c, names[i], N, &own).unit;
}

/* SGD of the next unit that is handed out. */
static void step_own(shardd_client *c)
{
	struct shardd_shard s;
	size_t bytes;
	float *p, *g;

	TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err));
	bytes = s.elements * sizeof(float);
	p = train_copy(c, s.params, bytes);
	g = train_copy(c, s.gradient, bytes);
	for (uint64_t i = 0; i < s.elements; i++)
		p[i] -= 0.5F * g[i];
	train_write(c, s.params, p, bytes);
	TRAIN_OK(shardd_shard_done(c, s.unit, &train_err));
	free(p);
	free(g);
}

/* The first @n units make the step. */
static void step_units(shardd_client *c, const struct trainer *t, const shardd_unit *units,
		       uint64_t step, unsigned n)
{
	const struct play *p = t->arg;

	for (unsigned i = 0; i < n; i++) {
		float *g = train_numbers(N, (step * 64 + t->rank) * TRAINUNITS + i);

		train_reduce(c, units[i], DTYPE_FP32, g, N);
		free(g);
		if (p->when == SHARDD_OPTIM_BY_TRAINER)
			step_own(c);
	}
}

static void end_step(shardd_client *c, uint32_t rank, uint64_t step)
{
	uint64_t blob[2] = { step, rank };
	const struct shardd_step_options o = {
		.size = sizeof(o), .number = &step, .blob = blob, .blob_bytes = sizeof(blob)
	};

	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err)); /* shares of all are back */
	TRAIN_OK(shardd_step_with(c, &o, NULL, &train_err));
}

/* Return: the step to continue after. */
static uint64_t enter(shardd_client *c, const struct trainer *t, shardd_unit *units)
{
	struct play *p = t->arg;
	struct shardd_membership m = train_join_as(c, t, SHARDD_KEEP);
	params now = { 0 };

	TRAINER_CHECK(!m.torn && !m.has_commit);
	register_all(c, units, p->when);
	if (!m.has_step && !p->calm && atomic_load(&p->go) == 0) {
		trainunits_init(c, units);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		trainunits_read(c, units, t->rank ? now : p->whole[0]);
		return 0;
	}
	if (!m.has_step && p->calm)
		trainunits_init(c, units);
	if (m.has_step) {
		const uint64_t *blob = m.blob;

		TRAINER_CHECK(m.blob_step == m.step && m.blob_bytes == 16);
		TRAINER_CHECK(blob[0] == m.step && blob[1] == t->rank);
	}
	trainunits_read(c, units, now);
	if (!p->calm)
		TRAIN_SAME(now, p->whole[m.step], sizeof(now));
	return m.step;
}

static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	shardd_unit units[TRAINUNITS];
	uint64_t step = enter(c, t, units);
	params unused;

	while (step < STEPS) {
		bool dies = !p->calm && !p->was_at[step + 1];

		step++;
		step_units(c, t, units, step, dies ? 1 + step % TRAINUNITS : TRAINUNITS);
		if (!dies || step % TRAINUNITS == 2) /* all: it is not applied yet */
			end_step(c, t->rank, step);
		if (!dies) {
			if (step < STEPS)
				trainunits_read(c, units, t->rank ? unused : p->whole[step]);
			continue;
		}
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err)); /* all are here */
		stage_set(&p->at[t->rank], (unsigned)step);
		TRAINER_AWAIT(atomic_load(&p->go) >= step, 60);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
		TRAINER_CHECK(enter(c, t, units) == step - 1);
		step--;
	}
	trainunits_read(c, units, t->rank ? unused : p->last);
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
	for (unsigned step = 1; step < STEPS; step++)
		cr_expect_arr_eq(p->whole[step], calm->whole[step], sizeof(p->whole[step]),
				 "step %u differs", step);
	cr_expect_arr_eq(p->last, calm->last, sizeof(p->last));
	cr_expect_neq(p->last[0][0], p->whole[0][0][0], "something was trained");
	cr_expect(fail_logged(&trainfix, "rolled back job="));
}

Test(resume_applied, a_step_in_backward_goes_back)
{
	go_on_bit_for_bit(SHARDD_OPTIM_IN_BACKWARD);
}

Test(resume_applied, a_step_of_the_trainers_own_optimizer_goes_back)
{
	go_on_bit_for_bit(SHARDD_OPTIM_BY_TRAINER);
}
