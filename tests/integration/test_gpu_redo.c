/*
 * The daemon is killed in the middle of the kernels of a step (SHARDD_SIM_FUSE), and the next one, too,
 * while it completes the step: the step and its commit are made, on one device and on several, and
 * training ends with the bits of a run in which nobody dies.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "gpufix.h"
#include "trainunits.h"

TestSuite(gpu_redo, .timeout = 240);

#ifdef SHARDD_CUDA

enum { WORLD = 3, STEPS = 10 };

struct play {
	unsigned devices;
	bool calm; /* nobody dies */
	stage at[WORLD], go;
	float params[TRAINUNITS][TRAINUNITS_ELEMENTS];
};

static char fuse[64];

/* The gradients of step @step, clipped in every second one: their factor is a launch before the step. */
static int step_once(shardd_client *c, const shardd_unit *units, const struct trainer *t,
		     uint64_t step)
{
	uint64_t blob[2] = { step, t->rank };
	double norm;

	trainunits_reduce(c, units, t->rank, step);
	if (step % 2 == 0)
		TRAIN_OK(shardd_clip_grad_norm(c, SHARDD_WORLD, 0.5, 2, &norm, &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	return shardd_commit(c, step, blob, sizeof(blob), &train_err);
}

static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = gpu_connect(t, t->rank % p->devices);
	shardd_unit units[TRAINUNITS];

	train_join_as(c, t, SHARDD_EPHEMERAL);
	trainunits_register(c, units);
	trainunits_init(c, units);
	for (uint64_t step = 1; step <= STEPS; step++) {
		struct shardd_membership m;
		int r;

		stage_set(&p->at[t->rank], (unsigned)step);
		TRAINER_AWAIT(p->calm || atomic_load(&p->go) >= step, 60);
		r = step_once(c, units, t, step);
		TRAINER_CHECK(p->calm ? r == 0 : r == -SHARDD_ABORTED);
		if (p->calm)
			continue;
		m = train_join_as(c, t, SHARDD_EPHEMERAL);
		TRAINER_CHECK(trainunits_is_at(&m, t->rank, step));
		trainunits_register(c, units);
	}
	if (t->rank == 0)
		trainunits_read(c, units, p->params);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

/* Deaths of @step: after so many stores; in every third step, of the next daemon as well. */
static void light_fuse(uint64_t step)
{
	char part[80];
	_cleanup_(fclosep) FILE *f = NULL;

	snprintf(part, sizeof(part), "%s.part", fuse);
	f = fopen(part, "we");
	cr_assert(f && fprintf(f, "%llu\n", (unsigned long long)(step * 2311 % 20000)) > 0);
	if (step % 3 == 0)
		cr_assert(fprintf(f, "%llu\n", (unsigned long long)(step * 97)) > 0);
	cr_assert(fflush(f) == 0 && rename(part, fuse) == 0);
}

static bool all_at(const struct play *p, unsigned step)
{
	for (unsigned r = 0; r < WORLD; r++)
		if (atomic_load(&p->at[r]) < step)
			return false;
	return true;
}

static void begin(unsigned devices)
{
	char text[16];

	if (train_on_host())
		cr_skip_test("no GPU: SHARDD_TEST_BACKEND is not cuda");
	snprintf(fuse, sizeof(fuse), "/tmp/shardd-fuse-%d", (int)getpid());
	gpu_set("SHARDD_SIM_FUSE", fuse);
	snprintf(text, sizeof(text), "%u", devices);
	gpu_set("SHARDD_SIM_DEVICES", text);
	fdcheck_begin();
	daemonfix_start_held(&trainfix, NULL);
}

static void play(unsigned devices)
{
	struct play *p = trainer_shared(sizeof(*p)), *calm = trainer_shared(sizeof(*calm));
	pid_t pids[WORLD];

	begin(devices);
	p->devices = devices;
	*calm = (struct play){ .devices = devices, .calm = true };
	for (uint32_t r = 0; r < WORLD; r++)
		pids[r] = trainer_start(&trainfix, "dies", r, WORLD, trains, p);
	for (unsigned step = 1; step <= STEPS; step++) {
		AWAIT(all_at(p, step), 60);
		light_fuse(step);
		daemonfix_may_end(&trainfix);
		stage_set(&p->go, step);
		AWAIT(access(fuse, F_OK) < 0, 60);
	}
	for (unsigned r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
	cr_expect_eq(fail_times_logged(&trainfix, "step completed job="), STEPS);
	trainers_run(&trainfix, "calm", WORLD, trains, calm, 60);
	for (unsigned i = 0; i < TRAINUNITS; i++)
		cr_expect_arr_eq(p->params[i], calm->params[i], sizeof(p->params[i]),
				 "unit %u differs", i);
	cr_expect_neq(p->params[0][0], 0, "something was trained");
	AWAIT(daemonfix_bytes(&trainfix) == 0, 10);
	daemonfix_stop(&trainfix);
	fdcheck_end();
}

Test(gpu_redo, a_step_that_is_half_applied_is_completed)
{
	play(1);
}

Test(gpu_redo, a_step_that_is_half_applied_is_completed_on_two_devices)
{
	play(2);
}

Test(gpu_redo, a_step_that_is_half_applied_is_completed_on_three_devices)
{
	play(3);
}

#endif
