/*
 * Memory of a GPU in the hands of several processes: handed over as a descriptor or as a
 * CUDA IPC handle, and what becomes of it when one of the processes is killed.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "gpufix.h"

TestSuite(gpu_processes, .timeout = 120);

enum { N = 100003, RANKS = 4 };

static const struct shardd_optimizer sgd = { .kind = SHARDD_SGD, .lr = 0.5 };

/* ------------------------------------------------------------------- two ways */

struct ways {
	enum shardd_handover how[RANKS];
	float params[RANKS][N];
};

static shardd_client *connect_by(const struct trainer *t, enum shardd_handover how)
{
	struct shardd_options o = { .size = sizeof(o),
				    .socket = t->socket,
				    .name = "test",
				    .handover = how,
				    .device = "cuda:0" };
	shardd_client *c = NULL;

	TRAIN_OK(shardd_connect(&o, &c, &train_err));
	return c;
}

/* Two steps: every rank's gradient is in the parameters that every rank reads. */
static int step_by(const struct trainer *t)
{
	struct ways *w = t->arg;
	const struct shardd_unit_spec like = { .optimizer = sgd };
	shardd_client *c = connect_by(t, w->how[t->rank]);
	shardd_unit u;

	train_join_as(c, t, SHARDD_EPHEMERAL);
	u = train_zero_unit(c, "u", N, &like);
	for (uint64_t step = 1; step <= 2; step++) {
		float *g = train_numbers(N, step * RANKS + t->rank);

		train_reduce(c, u, DTYPE_FP32, g, N);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
		free(g);
	}
	train_params(c, u, w->params[t->rank], N * sizeof(float));
	train_leave(c);
	return 0;
}

static struct ways *run_by(const char *job, enum shardd_handover how, uint32_t world)
{
	struct ways *w = trainer_shared(sizeof(*w));

	for (uint32_t r = 0; r < RANKS; r++)
		w->how[r] = how;
	trainers_run(&trainfix, job, world, step_by, w, 60);
	for (uint32_t r = 1; r < world; r++)
		cr_assert_eq(memcmp(w->params[0], w->params[r], sizeof(w->params[0])), 0);
	cr_assert_neq(w->params[0][N / 2], 0);
	return w;
}

/* What trainers see does not depend on how they got it. */
Test(gpu_processes, descriptors_and_handles_give_the_same)
{
	struct ways *by_fd, *by_handle;

	gpu_begin(1, NULL);
	for (uint32_t world = 1; world <= RANKS; world *= 2) {
		by_fd = run_by("fd", SHARDD_HANDOVER_FD, world);
		by_handle = run_by("ipc", SHARDD_HANDOVER_IPC, world);
		cr_assert_eq(memcmp(by_fd->params[0], by_handle->params[0],
				    sizeof(by_fd->params[0])),
			     0, "%u trainers", world);
	}
	gpu_end();
}

/* ------------------------------------------------- a trainer with work in flight */

struct flight {
	stage queued; /* its reduce is in the device's queue, behind its own stream */
	stage told;   /* the other rank has been told */
	int rc;
	char text[512];
};

/* Its stream will not raise the signal that the daemon's queue waits for. */
static int dies_in_flight(const struct trainer *t)
{
	struct flight *f = t->arg;
	struct gpu g;
	CUstream stream;
	shardd_client *c;
	shardd_ticket ticket;
	shardd_unit u;
	void *data;

	gpu_open(&g, 0);
	stream = gpu_stream(&g);
	gpu_spin(&g, stream, 1);
	gpu_drain(&g, stream);
	c = gpu_join(t, 0);
	u = train_zero_unit(c, "u", N, NULL);
	TRAIN_OK(shardd_gradient(c, u, &data, &train_err));
	TRAIN_OK(shardd_set_stream(c, stream, &train_err));
	gpu_spin(&g, stream, 20 * 1000 * 1000);
	TRAIN_OK(shardd_submit_reduce(c, SHARDD_OPTIONS(reduce, .unit = u), &ticket, &train_err));
	TRAIN_OK(shardd_wait(c, ticket, -1, NULL, &train_err));
	stage_set(&f->queued, 1);
	raise(SIGKILL);
	return 1;
}

/* It waits for results, so not only for the queue. */
static int is_told(const struct trainer *t)
{
	struct flight *f = t->arg;
	shardd_client *c = gpu_join(t, 0);
	shardd_unit u = train_zero_unit(c, "u", N, NULL);
	float *g = train_numbers(N, 7);
	void *data;

	TRAIN_OK(shardd_gradient(c, u, &data, &train_err));
	train_write(c, data, g, N * sizeof(float));
	f->rc = shardd_reduce(c, u, &train_err);
	snprintf(f->text, sizeof(f->text), "%s", train_err.text);
	stage_set(&f->told, 1);
	/* who leaves last takes the job along */
	train_join_as(c, t, SHARDD_EPHEMERAL);
	train_leave(c);
	free(g);
	return 0;
}

Test(gpu_processes, a_trainer_is_killed_with_work_in_flight)
{
	struct flight *f;
	struct ways *after;
	pid_t dies, told;

	gpu_begin(1, NULL);
	f = trainer_shared(sizeof(*f));
	dies = trainer_start(&trainfix, "flight", 0, 2, dies_in_flight, f);
	told = trainer_start(&trainfix, "flight", 1, 2, is_told, f);
	cr_assert_eq(trainer_wait(dies, 60), 128 + SIGKILL);
	cr_assert_eq(trainer_wait(told, 60), 0);
	cr_assert_eq(f->rc, -SHARDD_ABORTED, "%d: %s", f->rc, f->text);
	cr_assert(strlen(f->text) > 20);
	daemonfix_check_alive(&trainfix);
	/* and the device is as good as before */
	after = run_by("after", SHARDD_HANDOVER_FD, 2);
	cr_assert_eq(after->params[0][0], after->params[1][0]);
	gpu_end();
}

/* ------------------------------------------------------- the daemon is killed */

struct orphan {
	stage ready, killed;
};

/* Reads what it has gathered by CUDA itself: nobody is left to ask. */
static int reads_on(const struct trainer *t)
{
	const struct shardd_unit_spec like = { .optimizer = sgd };
	float *before = train_numbers(N, 11), *after;
	struct orphan *o = t->arg;
	shardd_client *c;
	const void *full;
	CUstream stream;
	struct gpu g;
	shardd_unit u;

	gpu_open(&g, 0);
	stream = gpu_stream(&g);
	after = gpu_pinned(&g, N * sizeof(float));
	c = gpu_join(t, 0);
	u = train_zero_unit(c, "u", N, &like);
	train_reduce(c, u, DTYPE_FP32, before, N);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	TRAIN_OK(shardd_gather(c, u, &full, &train_err));
	train_read(c, before, full, N * sizeof(float));
	TRAINER_CHECK(before[0] != 0);
	stage_set(&o->ready, 1);
	TRAINER_AWAIT(atomic_load(&o->killed), 60);
	gpu_get(&g, stream, after, full, N * sizeof(float));
	gpu_drain(&g, stream);
	TRAIN_SAME(after, before, N * sizeof(float));
	TRAINER_CHECK(shardd_release(c, u, &train_err) < 0); /* nobody is there */
	shardd_close(c);
	free(before);
	return 0;
}

Test(gpu_processes, memory_stays_when_the_daemon_is_killed)
{
	struct orphan *o;
	pid_t pid;

	gpu_begin(1, NULL);
	o = trainer_shared(sizeof(*o));
	pid = trainer_start(&trainfix, "orphan", 0, 1, reads_on, o);
	AWAIT(atomic_load(&o->ready), 60);
	cr_assert_eq(kill(trainfix.pid, SIGKILL), 0);
	cr_assert_eq(failfix_await_daemon(20), 128 + SIGKILL);
	stage_set(&o->killed, 1);
	cr_assert_eq(trainer_wait(pid, 60), 0);
	gpu_end();
}
