/*
 * The daemon dies while streams of trainers wait for it, and is replaced: the streams continue, the
 * trainers connect again in the same process, and training goes on bit for bit. A daemon that lacks
 * a device changes nothing.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "gpufix.h"
#include "trainunits.h"

TestSuite(gpu_reconnect, .timeout = 120);

/* As gpu_begin, under shardd-holder. */
static void begin_held(unsigned devices, const char *const *args)
{
	char text[16];

	if (train_on_host())
		cr_skip_test("no GPU: SHARDD_TEST_BACKEND is not cuda");
	snprintf(text, sizeof(text), "%u", devices);
	if (gpu_simulated())
		setenv("SHARDD_SIM_DEVICES", text, 1);
	fdcheck_begin();
	daemonfix_start_held(&trainfix, args);
	if (gpu_count() >= devices)
		return;
	daemonfix_stop(&trainfix);
	fdcheck_end();
	cr_skip_test("needs %u GPUs", devices);
}

static void end_held(void)
{
	daemonfix_stop(&trainfix);
	fdcheck_end();
}

#ifdef SHARDD_CUDA

enum { WORLD = 2, STEPS = 5 };

struct play {
	unsigned devices;
	bool calm; /* nobody dies */
	stage at[WORLD], go;
	float params[TRAINUNITS][TRAINUNITS_ELEMENTS];
};

/* One trainer. */
struct run {
	struct gpu g;
	shardd_client *c;
	CUstream stream, beside;
	CUdeviceptr word; /* for hold */
	uint64_t held;
	float *pinned;
};

static void open_run(struct run *r, const struct trainer *t, unsigned device)
{
	memset(r, 0, sizeof(*r));
	gpu_open(&r->g, device);
	r->stream = gpu_stream(&r->g);
	r->beside = gpu_stream(&r->g);
	r->pinned = gpu_pinned(&r->g, TRAINUNITS_ELEMENTS * sizeof(float));
	GPU_OK(&r->g, r->g.cu->cuMemAlloc(&r->word, 4096));
	GPU_OK(&r->g, r->g.cu->cuMemsetD8Async(r->word, 0, 4096, r->stream));
	GPU_OK(&r->g, r->g.cu->cuStreamSynchronize(r->stream));
	r->c = gpu_connect(t, device);
}

/* What comes on the stream from here on waits for let_go. */
static void hold(struct run *r)
{
	GPU_OK(&r->g, r->g.cu->cuStreamWaitValue64(r->stream, r->word, ++r->held,
						   CU_STREAM_WAIT_VALUE_GEQ));
}

static void let_go(struct run *r)
{
	GPU_OK(&r->g, r->g.cu->cuStreamWriteValue64(r->beside, r->word, r->held,
						    CU_STREAM_WRITE_VALUE_DEFAULT));
}

/* Rank 0's stream waits for a reduction, which waits for rank 1's stream, which is held. */
static void begin_what_breaks(struct run *r, const shardd_unit *units, const struct trainer *t)
{
	float *x = train_numbers(TRAINUNITS_ELEMENTS, t->rank + 1);
	void *data;

	TRAIN_OK(shardd_gradient(r->c, units[0], &data, &train_err));
	train_write(r->c, data, x, TRAINUNITS_ELEMENTS * sizeof(*x));
	free(x);
	if (t->rank == 1)
		hold(r);
	TRAIN_OK(shardd_reduce(r->c, units[0], &train_err));
	gpu_get(&r->g, r->stream, r->pinned, data, TRAINUNITS_ELEMENTS * sizeof(float));
}

/* The daemon is another one now. */
static void survive(struct run *r, const struct trainer *t, uint64_t step)
{
	struct shardd_membership m;

	TRAIN_FAILS(shardd_barrier(r->c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	if (t->rank == 1)
		let_go(r);
	gpu_drain(&r->g, r->stream); /* the successor has released it */
	m = train_join_as(r->c, t, SHARDD_EPHEMERAL);
	TRAINER_CHECK(trainunits_is_at(&m, t->rank, step));
}

static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_unit units[TRAINUNITS];
	struct run r;

	open_run(&r, t, t->rank % p->devices);
	train_join_as(r.c, t, SHARDD_EPHEMERAL);
	trainunits_register(r.c, units);
	TRAIN_OK(shardd_set_stream(r.c, r.stream, &train_err));
	trainunits_init(r.c, units);
	for (uint64_t step = 1; step <= STEPS; step++) {
		trainunits_step(r.c, units, t->rank, step);
		if (p->calm || step == STEPS)
			continue;
		begin_what_breaks(&r, units, t);
		stage_set(&p->at[t->rank], (unsigned)step);
		TRAINER_AWAIT(atomic_load(&p->go) >= step, 60);
		survive(&r, t, step);
		trainunits_register(r.c, units);
	}
	if (t->rank == 0)
		trainunits_read(r.c, units, p->params);
	TRAIN_OK(shardd_barrier(r.c, SHARDD_WORLD, &train_err));
	gpu_drain(&r.g, r.stream);
	train_leave(r.c);
	return 0;
}

static bool all_at(struct play *p, unsigned step)
{
	return atomic_load(&p->at[0]) >= step && atomic_load(&p->at[1]) >= step;
}

static void play(unsigned devices)
{
	static const int signals[] = { SIGKILL, SIGTERM, SIGUSR2, SIGKILL };
	struct play *p = trainer_shared(sizeof(*p)), *calm = trainer_shared(sizeof(*calm));
	pid_t pids[WORLD];

	begin_held(devices, NULL);
	p->devices = devices;
	*calm = (struct play){ .devices = devices, .calm = true };
	for (uint32_t r = 0; r < WORLD; r++)
		pids[r] = trainer_start(&trainfix, "dies", r, WORLD, trains, p);
	for (unsigned step = 1; step < STEPS; step++) {
		AWAIT(all_at(p, step), 60);
		daemonfix_replace_daemon(&trainfix, signals[step - 1]);
		stage_set(&p->go, step);
	}
	for (unsigned r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
	trainers_run(&trainfix, "calm", WORLD, trains, calm, 60);
	for (unsigned i = 0; i < TRAINUNITS; i++)
		cr_expect_arr_eq(p->params[i], calm->params[i], sizeof(p->params[i]),
				 "unit %u differs", i);
	cr_expect_neq(p->params[0][0], 0, "something was trained");
	AWAIT(daemonfix_bytes(&trainfix) == 0, 10);
	end_held();
}

Test(gpu_reconnect, streams_that_wait_for_a_dead_daemon_continue)
{
	play(1);
}

Test(gpu_reconnect, streams_that_wait_for_a_dead_daemon_continue_on_two_devices)
{
	play(2);
}

/* ------------------------------------------------- answers that came before the death */

struct late {
	stage at, go;
};

/* An op whose answer said that it was queued is one of the epoch that has ended. */
static int waits_late(const struct trainer *t)
{
	struct late *l = t->arg;
	shardd_unit units[TRAINUNITS];
	shardd_ticket tickets[2];
	struct run r;
	void *data;

	open_run(&r, t, 0);
	train_join_as(r.c, t, SHARDD_EPHEMERAL);
	TRAIN_OK(shardd_set_stream(r.c, r.stream, &train_err));
	trainunits_register(r.c, units);
	trainunits_init(r.c, units);
	for (unsigned i = 0; i < 2; i++) {
		TRAIN_OK(shardd_gradient(r.c, units[i], &data, &train_err));
		TRAIN_OK(shardd_submit_reduce(r.c, SHARDD_OPTIONS(reduce, .unit = units[i]),
					      &tickets[i], &train_err));
	}
	TRAIN_OK(shardd_barrier(r.c, SHARDD_WORLD, &train_err)); /* they have been answered */
	stage_set(&l->at, 1);
	TRAINER_AWAIT(atomic_load(&l->go) == 1, 60);
	TRAIN_FAILS(shardd_barrier(r.c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	TRAIN_FAILS(shardd_wait(r.c, tickets[0], -1, NULL, &train_err), SHARDD_ABORTED);
	train_join_as(r.c, t, SHARDD_EPHEMERAL);
	TRAIN_FAILS(shardd_wait(r.c, tickets[1], -1, NULL, &train_err), SHARDD_ABORTED);
	told_now("was restarted");
	TRAIN_OK(shardd_barrier(r.c, SHARDD_WORLD, &train_err));
	gpu_drain(&r.g, r.stream);
	train_leave(r.c);
	return 0;
}

Test(gpu_reconnect, answers_of_the_dead_daemon_order_no_stream)
{
	struct late *l = trainer_shared(sizeof(*l));
	pid_t pid;

	begin_held(1, NULL);
	pid = trainer_start(&trainfix, "late", 0, 1, waits_late, l);
	AWAIT(atomic_load(&l->at) == 1, 60);
	daemonfix_replace_daemon(&trainfix, SIGKILL);
	stage_set(&l->go, 1);
	cr_assert_eq(trainer_wait(pid, 60), 0);
	end_held();
}

/* --------------------------------------------------------------------- device loss */

static int keeps(const struct trainer *t)
{
	shardd_client *c = gpu_connect(t, 1);
	shardd_unit units[TRAINUNITS];

	train_join_as(c, t, SHARDD_KEEP);
	trainunits_register(c, units);
	trainunits_init(c, units);
	trainunits_step(c, units, 0, 1);
	train_leave(c);
	return 0;
}

static bool serves(void)
{
	static const char *const args[] = { "status", NULL };
	char out[512];

	return daemonfix_ctl_text(&trainfix, args, out, sizeof(out)) == 0;
}

static void write_devices(const char *path, const char *uuids)
{
	_cleanup_(fclosep) FILE *f = fopen(path, "we");

	cr_assert(f && fprintf(f, "devices: \"%s\"\n", uuids) > 0);
}

/* Its memory is on a device that the next daemon does not have: that one changes nothing and says so.
 * When the device is back, so is the job. */
Test(gpu_reconnect, a_daemon_without_the_device_changes_nothing)
{
	char path[128] = "/tmp/shardd-devices-XXXXXX", one[48], two[48], both[100];
	const char *const args[] = { "--config", path, NULL };
	int fd;

	if (train_on_host())
		cr_skip_test("no GPU: SHARDD_TEST_BACKEND is not cuda");
	fd = mkstemp(path);
	cr_assert(fd >= 0);
	close(fd);
	begin_held(2, args);
	gpu_uuid(0, one);
	gpu_uuid(1, two);
	trainers_run(&trainfix, "kept", 1, keeps, NULL, 60);
	write_devices(path, one);
	kill(daemonfix_daemon(&trainfix), SIGKILL);
	AWAIT(fail_logged(&trainfix, "which this daemon does not have"), 30);
	cr_expect(fail_logged(&trainfix, two));
	snprintf(both, sizeof(both), "%s,%s", one, two);
	write_devices(path, both);
	AWAIT(serves(), 60);
	cr_expect_eq(fail_job_number(&trainfix, "kept", "step"), 1);
	end_held();
	unlink(path);
}

#endif
