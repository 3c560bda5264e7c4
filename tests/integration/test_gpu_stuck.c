/*
 * Streams that do not come: of trainers that were killed, and of trainers that live but
 * have put something on their stream that never ends. The daemon's own queues go on, the
 * others are told in time, and what was committed is untouched.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/check.h"
#include "gpufix.h"

TestSuite(gpu_stuck, .timeout = 240);

enum { WORLD = 2, N = 20011, DEADLINE_MS = 2500, VICTIM_MS = 1000 };

struct play {
	struct gpu_layout l;
	uint32_t timeout_ms;
	stage go, at[WORLD];
	struct told told[WORLD];
	pid_t pids[WORLD];
	char from[64]; /* a file: launches fail from when it is there */
};

static struct play *play_new(struct gpu_layout l, uint32_t timeout_ms)
{
	struct play *p = trainer_shared(sizeof(*p));

	p->l = l;
	p->timeout_ms = timeout_ms;
	return p;
}

static struct shardd_membership join(shardd_client *c, const struct trainer *t)
{
	const struct play *p = t->arg;
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = t->world,
				  .rank = t->rank,
				  .op_timeout_ms = p->timeout_ms };
	struct shardd_membership me;

	TRAIN_OK(shardd_join(c, &job, &me, &train_err));
	return me;
}

static const struct shardd_unit_spec as_sgd = { .compute_dtype = SHARDD_BF16,
						.gradient_dtype = SHARDD_FP32,
						.optimizer = { .kind = SHARDD_SGD, .lr = 1 } };

static shardd_unit make_unit(shardd_client *c)
{
	return train_register(c, "u", N, &as_sgd).unit;
}

/* Every gradient is 1 on both ranks: each step takes 1 off every parameter. */
static void write_ones(shardd_client *c, shardd_unit u)
{
	float *x = train_alloc(N * sizeof(*x));
	void *data;

	for (size_t i = 0; i < N; i++)
		x[i] = 1;
	TRAIN_OK(shardd_gradient(c, u, &data, &train_err));
	train_write(c, data, x, N * sizeof(*x));
	free(x);
}

static void check_params(shardd_client *c, shardd_unit u, float value)
{
	uint16_t *got = train_alloc(N * sizeof(*got)), *want = train_alloc(N * sizeof(*want));
	float *x = train_alloc(N * sizeof(*x));
	const struct k_cast cast = {
		.dst = want, .src = x, .dst_dtype = DTYPE_BF16, .src_dtype = DTYPE_FP32
	};

	for (size_t i = 0; i < N; i++)
		x[i] = value;
	kernels_ref()->cast(&cast, 0, N);
	train_params(c, u, got, N * sizeof(*got));
	TRAIN_SAME(got, want, N * sizeof(*got));
	free(got);
	free(want);
	free(x);
}

/* One step that is committed, so that parameters are -1. */
static void first_step(shardd_client *c, shardd_unit u)
{
	TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
	write_ones(c, u);
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	check_params(c, u, -1);
}

/* After the failure: all is as it was committed, and can go on. */
static void second_life(shardd_client *c, const struct trainer *t)
{
	struct shardd_membership me = join(c, t);
	shardd_unit u = make_unit(c);

	TRAINER_CHECK(me.has_commit && me.step == 1 && !me.torn);
	check_params(c, u, -1);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	write_ones(c, u);
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, 2, NULL, 0, &train_err));
	check_params(c, u, -2);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
}

/* Waits in a reduce for the other one, whose stream is stuck. */
static int peer(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = gpu_connect(t, gpu_of(&p->l, t->rank));
	shardd_unit u;

	join(c, t);
	u = make_unit(c);
	first_step(c, u);
	write_ones(c, u);
	stage_set(&p->at[t->rank], 1);
	told_note(&p->told[t->rank], shardd_reduce(c, u, &train_err));
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	second_life(c, t);
	return 0;
}

/* Its reduce is queued behind a stream on which nothing happens any more. */
static void get_stuck(shardd_client *c, const struct trainer *t, struct gpu *g)
{
	struct play *p = t->arg;
	CUstream stream = gpu_stream(g);
	shardd_ticket ticket;
	shardd_unit u;

	join(c, t);
	u = make_unit(c);
	first_step(c, u);
	/* everything is mapped when this is done; from then on nothing may be */
	write_ones(c, u);
	TRAIN_OK(shardd_set_stream(c, stream, &train_err));
	gpu_block(g, stream);
	TRAIN_OK(shardd_submit_reduce(c, SHARDD_OPTIONS(reduce, .unit = u), &ticket, &train_err));
	stage_set(&p->at[t->rank], 1);
}

static int stuck_and_killed(const struct trainer *t)
{
	struct play *p = t->arg;
	struct gpu g;

	gpu_open(&g, gpu_of(&p->l, t->rank));
	get_stuck(gpu_connect(t, gpu_of(&p->l, t->rank)), t, &g);
	pause();
	return 1;
}

static int successor(const struct trainer *t)
{
	struct play *p = t->arg;

	second_life(gpu_connect(t, gpu_of(&p->l, t->rank)), t);
	return 0;
}

/* Of another job on the same device. */
static int bystander(const struct trainer *t)
{
	shardd_client *c = gpu_connect(t, 0);
	shardd_unit u;

	train_join_as(c, t, SHARDD_EPHEMERAL);
	u = make_unit(c);
	first_step(c, u);
	train_leave(c);
	return 0;
}

static void killed(struct gpu_layout l)
{
	struct play *p = play_new(l, 60000);
	uint64_t died_us;
	char who[64];

	p->pids[0] = trainer_start(&trainfix, "stuck", 0, WORLD, peer, p);
	p->pids[1] = trainer_start(&trainfix, "stuck", 1, WORLD, stuck_and_killed, p);
	AWAIT(atomic_load(&p->at[0]) == 1 && atomic_load(&p->at[1]) == 1, 40);
	snprintf(who, sizeof(who), "rank 1 (pid %d)", (int)p->pids[1]);
	died_us = clock_now_us();
	fail_kill(p->pids[1]);
	told_check(&p->told[0], SHARDD_ABORTED, who);
	fprintf(stderr, "# told %llu us after the death: %s\n",
		(unsigned long long)(p->told[0].at_us - died_us), p->told[0].text);
	cr_assert_leq(p->told[0].at_us - died_us, 3000000u);
	/* the device's queue is free again, for others too */
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "by", 0, 1, bystander, p), 30), 0);
	p->pids[1] = trainer_start(&trainfix, "stuck", 1, WORLD, successor, p);
	stage_set(&p->go, 1);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 60), 0, "rank %u", r);
}

Test(gpu_stuck, killed_with_its_stream_stuck)
{
	gpu_begin(1, NULL);
	killed((struct gpu_layout){ 1, WORLD, false });
	gpu_end();
}

Test(gpu_stuck, killed_with_its_stream_stuck_on_two_devices)
{
	gpu_begin(2, NULL);
	killed((struct gpu_layout){ 2, WORLD, false });
	gpu_end();
}

/* It lives, and hears at its next call that its session has ended. */
static int live_on(shardd_client *c, const struct trainer *t)
{
	struct play *p = t->arg;
	uint64_t begin_us = clock_now_us();
	int r = 0;

	shardd_set_stream(c, SHARDD_NO_STREAM, NULL);
	while (r == 0 && clock_now_us() - begin_us < 30000000u)
		r = shardd_barrier(c, SHARDD_WORLD, &train_err);
	told_note(&p->told[t->rank], r);
	/* without closing: nothing can be unmapped under what is on the stream */
	fflush(NULL);
	_exit(r < 0 ? 0 : 1);
}

static int stuck_and_alive(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = gpu_connect(t, gpu_of(&p->l, t->rank));
	struct gpu g;

	gpu_open(&g, gpu_of(&p->l, t->rank));
	get_stuck(c, t, &g);
	return live_on(c, t);
}

static void alive(struct gpu_layout l)
{
	struct play *p = play_new(l, DEADLINE_MS);

	p->pids[0] = trainer_start(&trainfix, "alive", 0, WORLD, peer, p);
	p->pids[1] = trainer_start(&trainfix, "alive", 1, WORLD, stuck_and_alive, p);
	cr_assert_eq(trainer_wait(p->pids[1], 60), 0);
	AWAIT(atomic_load(&p->told[0].n) > 0, 20);
	for (uint32_t r = 0; r < WORLD; r++)
		fprintf(stderr, "# rank %u: %d: %s\n", r, -p->told[r].rc, p->told[r].text);
	cr_assert(p->told[0].rc == -SHARDD_ABORTED || p->told[0].rc == -SHARDD_DEADLINE_EXCEEDED);
	cr_assert(strstr(p->told[0].text, "rank 1"), "%s", p->told[0].text);
	cr_assert(strstr(p->told[1].text, "stream") || fail_logged(&trainfix, "stream"));
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "by", 0, 1, bystander, p), 30), 0);
	p->pids[1] = trainer_start(&trainfix, "alive", 1, WORLD, successor, p);
	stage_set(&p->go, 1);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 60), 0, "rank %u", r);
}

Test(gpu_stuck, a_stream_that_never_comes_ends_its_session)
{
	gpu_begin(1, NULL);
	alive((struct gpu_layout){ 1, WORLD, false });
	gpu_end();
}

Test(gpu_stuck, a_stream_that_never_comes_ends_its_session_on_two_devices)
{
	gpu_begin(2, NULL);
	alive((struct gpu_layout){ 2, WORLD, false });
	gpu_end();
}

/* ------------------------------------------- an Initialise, in several stages */

/* The unit counts as never initialised, and all can begin again. */
static int init_again(shardd_client *c, const struct trainer *t)
{
	struct shardd_membership me = join(c, t);

	TRAINER_CHECK(!me.has_commit && !me.torn);
	TRAINER_CHECK(!train_register(c, "u", N, &as_sgd).initialised);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	first_step(c, make_unit(c));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

static int init_successor(const struct trainer *t)
{
	struct play *p = t->arg;

	return init_again(gpu_connect(t, gpu_of(&p->l, t->rank)), t);
}

/* Waits for the parameters from rank 1, whose stream never comes to them. */
static int init_peer(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = gpu_connect(t, gpu_of(&p->l, t->rank));

	join(c, t);
	told_note(&p->told[t->rank], shardd_init_broadcast(c, make_unit(c), 1, 0, &train_err));
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	return init_again(c, t);
}

static int init_stuck(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = gpu_connect(t, gpu_of(&p->l, t->rank));
	shardd_ticket ticket;
	uint64_t buffer;
	shardd_unit u;
	CUstream stream;
	struct gpu g;
	void *data;

	gpu_open(&g, gpu_of(&p->l, t->rank));
	stream = gpu_stream(&g);
	join(c, t);
	u = make_unit(c);
	TRAIN_OK(shardd_alloc(c, N * sizeof(float), &buffer, &data, &train_err));
	TRAIN_OK(shardd_set_stream(c, stream, &train_err));
	gpu_block(&g, stream);
	TRAIN_OK(shardd_submit_init(c,
				    SHARDD_OPTIONS(init, .unit = u, .root = 1, .buffer = buffer,
						   .from = SHARDD_FROM_ROOT),
				    &ticket, &train_err));
	stage_set(&p->at[t->rank], 1);
	return live_on(c, t);
}

/* Rank 1 is blamed, not the communicator, and the queues go on. */
static void init_alive(struct gpu_layout l)
{
	struct play *p = play_new(l, DEADLINE_MS);

	p->pids[0] = trainer_start(&trainfix, "init", 0, WORLD, init_peer, p);
	p->pids[1] = trainer_start(&trainfix, "init", 1, WORLD, init_stuck, p);
	cr_assert_eq(trainer_wait(p->pids[1], 60), 0);
	told_check(&p->told[0], SHARDD_ABORTED, "rank 1");
	cr_assert(fail_logged(&trainfix, "has streams that did not reach"));
	cr_assert(!fail_logged(&trainfix, "did not end in time"));
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "by", 0, 1, bystander, p), 30), 0);
	p->pids[1] = trainer_start(&trainfix, "init", 1, WORLD, init_successor, p);
	stage_set(&p->go, 1);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 60), 0, "rank %u", r);
}

Test(gpu_stuck, an_initialise_whose_stream_never_comes)
{
	gpu_begin(1, NULL);
	init_alive((struct gpu_layout){ 1, WORLD, false });
	gpu_end();
}

Test(gpu_stuck, an_initialise_whose_stream_never_comes_on_two_devices)
{
	gpu_begin(2, NULL);
	init_alive((struct gpu_layout){ 2, WORLD, false });
	gpu_end();
}

/* What was read from the streams of a dead process is not believed. */
static void init_killed(struct gpu_layout l)
{
	struct play *p = play_new(l, 60000);

	p->pids[0] = trainer_start(&trainfix, "init", 0, WORLD, init_peer, p);
	p->pids[1] = trainer_start(&trainfix, "init", 1, WORLD, init_stuck, p);
	AWAIT(atomic_load(&p->at[1]) == 1 && fail_has_op(&trainfix, "init", 0, "Initialise", "RUN"),
	      40);
	fail_kill(p->pids[1]);
	told_check(&p->told[0], SHARDD_ABORTED, "rank 1");
	p->pids[1] = trainer_start(&trainfix, "init", 1, WORLD, init_successor, p);
	stage_set(&p->go, 1);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 60), 0, "rank %u", r);
}

Test(gpu_stuck, an_initialise_from_a_killed_trainers_stream)
{
	gpu_begin(1, NULL);
	init_killed((struct gpu_layout){ 1, WORLD, false });
	gpu_end();
}

Test(gpu_stuck, an_initialise_from_a_killed_trainers_stream_on_two_devices)
{
	gpu_begin(2, NULL);
	init_killed((struct gpu_layout){ 2, WORLD, false });
	gpu_end();
}

/* ------------------------------------------------------------ behind another job */

/* Its streams stand behind the hog's: the second op waits for the stream, the stream for the
 * first op, and that for the device's queue. Late, through no fault of its own. */
static int victim(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = gpu_connect(t, 0);
	CUstream stream;
	uint64_t buffer;
	struct gpu g;
	void *data;

	gpu_open(&g, 0);
	stream = gpu_stream(&g);
	join(c, t);
	TRAIN_OK(shardd_alloc(c, N * sizeof(float), &buffer, &data, &train_err));
	stage_set(&p->at[0], 1);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	TRAIN_OK(shardd_set_stream(c, stream, &train_err));
	for (unsigned i = 0; i < 2; i++)
		TRAIN_OK(shardd_all_reduce(c, SHARDD_WORLD, buffer, 0, N, SHARDD_FP32, SHARDD_SUM,
					   &train_err));
	stage_set(&p->at[0], 2);
	TRAINER_AWAIT(atomic_load(&p->go) == 2, 60);
	gpu_drain(&g, stream);
	shardd_set_stream(c, SHARDD_NO_STREAM, NULL);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

/* The victim's deadline is the first to pass. */
Test(gpu_stuck, who_stands_behind_another_jobs_stream_is_not_blamed)
{
	struct play *hog, *p;
	pid_t pids[2];

	gpu_begin(1, NULL);
	hog = play_new((struct gpu_layout){ 1, 1, false }, 3 * VICTIM_MS);
	p = play_new((struct gpu_layout){ 1, 1, false }, VICTIM_MS);
	pids[1] = trainer_start(&trainfix, "victim", 0, 1, victim, p);
	AWAIT(atomic_load(&p->at[0]) == 1, 40);
	pids[0] = trainer_start(&trainfix, "hog", 0, 1, stuck_and_alive, hog);
	AWAIT(atomic_load(&hog->at[0]) == 1, 40);
	stage_set(&p->go, 1);
	AWAIT(atomic_load(&p->at[0]) == 2, 40);
	cr_assert_eq(atomic_load(&hog->told[0].n), 0, "the hog was lost before the victim came");
	cr_assert_eq(trainer_wait(pids[0], 60), 0);
	stage_set(&p->go, 2);
	cr_assert_eq(trainer_wait(pids[1], 60), 0);
	cr_assert(fail_logged(&trainfix, "of job 'hog' has streams that did not reach"));
	cr_assert(!fail_logged(&trainfix, "of job 'victim' has streams that did not reach"));
	gpu_end();
}

/* ------------------------------------------------- an op that fails in the middle */

/* Launches on its device fail from now on, and so does the reduce: at once, while the other
 * device waits for a stream that does not come. */
static int fails_early(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = gpu_connect(t, gpu_of(&p->l, t->rank));
	uint64_t begin_us;
	shardd_unit u;

	join(c, t);
	u = make_unit(c);
	first_step(c, u);
	write_ones(c, u);
	TRAINER_AWAIT(atomic_load(&p->at[1]) == 1, 60);
	TRAINER_CHECK(creat(p->from, 0600) >= 0);
	begin_us = clock_now_us();
	told_note(&p->told[0], shardd_reduce(c, u, &train_err));
	p->told[0].at_us -= begin_us;
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	train_leave(c);
	return 0;
}

/* Of another job on the second device. */
static int bystander_there(const struct trainer *t)
{
	shardd_client *c = gpu_connect(t, 1);

	train_join_as(c, t, SHARDD_EPHEMERAL);
	first_step(c, make_unit(c));
	train_leave(c);
	return 0;
}

Test(gpu_stuck, an_op_that_failed_does_not_leave_a_queue_to_its_stream)
{
	struct play *p = play_new((struct gpu_layout){ 2, WORLD, false }, DEADLINE_MS);

	snprintf(p->from, sizeof(p->from), "/tmp/shardd-fail-from.%d", (int)getpid());
	gpu_set("SHARDD_SIM_FAIL", "cuLaunchKernel:1:2");
	gpu_set("SHARDD_SIM_FAIL_FROM", p->from);
	gpu_set("SHARDD_SIM_FAIL_DEVICE", "0");
	gpu_begin(2, NULL);
	p->pids[0] = trainer_start(&trainfix, "early", 0, WORLD, fails_early, p);
	p->pids[1] = trainer_start(&trainfix, "early", 1, WORLD, stuck_and_alive, p);
	AWAIT(atomic_load(&p->told[0].n) == 1, 40);
	unlink(p->from);
	fprintf(stderr, "# told after %llu us: %s\n", (unsigned long long)p->told[0].at_us,
		p->told[0].text);
	cr_assert_lt(p->told[0].rc, 0);
	/* another job gets the device's queue, when the deadline has passed */
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "by", 0, 1, bystander_there, p), 30), 0);
	cr_assert(fail_logged(&trainfix, "of job 'early' has streams that did not reach"));
	stage_set(&p->go, 1);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 60), 0, "rank %u", r);
	gpu_end();
}

/* --------------------------------------------------- killed while a commit waits */

/* fp32 throughout: a gather shows the shards themselves, and a step waits for its readers. */
static const struct shardd_unit_spec direct = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };

static void reduce_ones(shardd_client *c, shardd_unit u)
{
	write_ones(c, u);
	TRAIN_OK(shardd_reduce(c, u, &train_err));
}

/* One step is committed, one was applied by a gather, and gradients for a third are there. */
static shardd_unit step_without_commit(shardd_client *c, const struct trainer *t)
{
	shardd_unit u;
	float *x = train_alloc(N * sizeof(*x));

	join(c, t);
	u = train_register(c, "u", N, &direct).unit;
	TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	reduce_ones(c, u);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_params(c, u, x, N * sizeof(*x));
	TRAINER_CHECK(x[0] == -1 && x[N - 1] == -1);
	reduce_ones(c, u);
	free(x);
	return u;
}

static int check_torn(shardd_client *c, const struct trainer *t)
{
	struct shardd_membership me = join(c, t);

	TRAINER_CHECK(me.has_commit && me.step == 1 && me.torn);
	TRAINER_CHECK(!train_register(c, "u", N, &direct).initialised);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

static int torn_peer(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = gpu_connect(t, 0);

	step_without_commit(c, t);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	told_note(&p->told[t->rank], shardd_commit(c, 2, NULL, 0, &train_err));
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	return check_torn(c, t);
}

/* Says that it has read the parameters when its stream gets there, which is never. */
static int reader_in_the_way(const struct trainer *t)
{
	shardd_client *c = gpu_connect(t, 0);
	CUstream stream;
	const void *full;
	shardd_unit u;
	struct gpu g;

	gpu_open(&g, 0);
	stream = gpu_stream(&g);
	u = step_without_commit(c, t);
	TRAIN_OK(shardd_gather(c, u, &full, &train_err));
	TRAIN_OK(shardd_set_stream(c, stream, &train_err));
	gpu_block(&g, stream);
	TRAIN_OK(shardd_release(c, u, &train_err));
	shardd_set_stream(c, SHARDD_NO_STREAM, NULL);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	shardd_commit(c, 2, NULL, 0, &train_err);
	return 1;
}

static int torn_successor(const struct trainer *t)
{
	return check_torn(gpu_connect(t, 0), t);
}

/* The commit would have covered the step that was applied before: it did not come to that. */
Test(gpu_stuck, killed_while_a_commit_waits_for_its_stream)
{
	struct play *p;

	gpu_begin(1, NULL);
	p = play_new((struct gpu_layout){ 1, WORLD, false }, 60000);
	p->pids[0] = trainer_start(&trainfix, "torn", 0, WORLD, torn_peer, p);
	p->pids[1] = trainer_start(&trainfix, "torn", 1, WORLD, reader_in_the_way, p);
	AWAIT(fail_has_op(&trainfix, "torn", 0, "Commit", "RUN"), 40);
	cr_assert_eq(atomic_load(&p->told[0].n), 0);
	fail_kill(p->pids[1]);
	told_check(&p->told[0], SHARDD_ABORTED, "rank 1");
	p->pids[1] = trainer_start(&trainfix, "torn", 1, WORLD, torn_successor, p);
	stage_set(&p->go, 1);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 60), 0, "rank %u", r);
	gpu_end();
}

/* --------------------------------------------------------- killed at random */

enum { RING = 4 };

struct loop {
	struct gpu_layout l;
	_Atomic uint64_t stop_after; /* 0: not yet */
	_Atomic uint64_t step[WORLD];
	struct told aborted[WORLD];
	float params[N];
};

struct looper {
	struct gpu g;
	CUstream stream;
	shardd_client *c;
	shardd_unit u;
	float *gradients[RING];
	void *seen;
};

static int loop_step(struct looper *x, uint32_t rank, uint64_t step)
{
	float *from = x->gradients[step % RING];
	const void *full;
	void *data;
	int r = shardd_gather(x->c, x->u, &full, &train_err);

	if (r < 0)
		return r;
	gpu_spin(&x->g, x->stream, 200);
	gpu_get(&x->g, x->stream, x->seen, full, N * 2);
	r = shardd_release(x->c, x->u, &train_err);
	r = r ? r : shardd_gradient(x->c, x->u, &data, &train_err);
	if (r < 0)
		return r;
	if (step % RING == 0) /* what comes next is used by what is under way */
		gpu_drain(&x->g, x->stream);
	train_fill(from, N, step * WORLD + rank);
	gpu_spin(&x->g, x->stream, 200);
	gpu_put(&x->g, x->stream, data, from, N * sizeof(*from));
	r = shardd_reduce(x->c, x->u, &train_err);
	r = r ? r : shardd_step(x->c, SHARDD_WORLD, NULL, &train_err);
	return r ? r : shardd_commit(x->c, step, NULL, 0, &train_err);
}

static int loop_epoch(struct looper *x, const struct trainer *t)
{
	static const struct shardd_unit_spec like = {
		.compute_dtype = SHARDD_BF16,
		.gradient_dtype = SHARDD_FP32,
		.optimizer = { .kind = SHARDD_SGD, .lr = 0.1, .momentum = 0.9 }
	};
	struct loop *loop = t->arg;
	struct shardd_membership me = train_join_as(x->c, t, SHARDD_EPHEMERAL);
	uint64_t n = N, step, stop;
	const struct shardd_tensor w = {
		.name = "w", .shape = &n, .dims = 1, .init = SHARDD_INIT_NORMAL, .b = 1
	};
	struct shardd_unit_spec spec = like;
	struct shardd_unit_info info = { 0 };
	int r;

	spec.size = sizeof(spec);
	spec.name = "w";
	spec.tensors = &w;
	spec.n_tensors = 1;
	TRAINER_CHECK(!me.torn);
	TRAIN_OK(shardd_set_stream(x->c, x->stream, &train_err));
	r = shardd_register(x->c, &spec, 1, &info, &train_err);
	x->u = info.unit;
	if (r == 0 && !me.has_commit)
		r = shardd_init_seed(x->c, x->u, 4, &train_err);
	if (r == 0 && !me.has_commit)
		r = shardd_commit(x->c, 1, NULL, 0, &train_err);
	for (step = me.has_commit ? me.step : 1; r == 0; step++) {
		stop = atomic_load(&loop->stop_after);
		atomic_store(&loop->step[t->rank], step);
		if (step == stop)
			break;
		r = loop_step(x, t->rank, step + 1);
	}
	gpu_drain(&x->g, x->stream);
	shardd_set_stream(x->c, SHARDD_NO_STREAM, NULL);
	if (r == 0 && t->rank == 0)
		train_params(x->c, x->u, loop->params, N * 2);
	return r ? r : shardd_barrier(x->c, SHARDD_WORLD, &train_err);
}

static int loop_trainer(const struct trainer *t)
{
	struct loop *loop = t->arg;
	struct looper x = { 0 };
	int r;

	gpu_open(&x.g, gpu_of(&loop->l, t->rank));
	x.stream = gpu_stream(&x.g);
	for (unsigned i = 0; i < RING; i++)
		x.gradients[i] = gpu_pinned(&x.g, N * sizeof(float));
	x.seen = gpu_pinned(&x.g, N * 2);
	x.c = gpu_connect(t, gpu_of(&loop->l, t->rank));
	while ((r = loop_epoch(&x, t)) < 0) {
		TRAIN_FAILS(r, SHARDD_ABORTED);
		told_note(&loop->aborted[t->rank], r);
	}
	train_leave(x.c);
	return 0;
}

static unsigned draw(unsigned *random, unsigned n)
{
	*random = *random * 1664525u + 1013904223u;
	return (*random >> 8) % n;
}

static void kill_at_random(struct loop *loop, pid_t *pids, unsigned *random)
{
	uint32_t victim = draw(random, WORLD);
	uint64_t step[WORLD];
	struct timespec when = { .tv_nsec = draw(random, 8000) * 1000 };

	for (uint32_t r = 0; r < WORLD; r++)
		step[r] = atomic_load(&loop->step[r]);
	for (uint32_t r = 0; r < WORLD; r++)
		AWAIT(atomic_load(&loop->step[r]) > step[r], 40);
	nanosleep(&when, NULL); /* the point is anywhere in a few steps */
	fail_kill(pids[victim]);
	atomic_store(&loop->step[victim], 0);
	pids[victim] = trainer_start(&trainfix, "loop", victim, WORLD, loop_trainer, loop);
}

static void random_kills(struct gpu_layout l, unsigned points)
{
	struct loop *loop = trainer_shared(sizeof(*loop)), *calm = trainer_shared(sizeof(*calm));
	const char *form = getenv("SHARDD_TEST_LONG");
	unsigned random = 20261121;
	uint64_t most = 0;
	pid_t pids[WORLD];

	loop->l = calm->l = l;
	points *= form && *form == '1' ? 10 : 1;
	for (uint32_t r = 0; r < WORLD; r++)
		pids[r] = trainer_start(&trainfix, "loop", r, WORLD, loop_trainer, loop);
	for (unsigned i = 0; i < points; i++)
		kill_at_random(loop, pids, &random);
	for (uint32_t r = 0; r < WORLD; r++) {
		AWAIT(atomic_load(&loop->step[r]) > 1, 40);
		most = atomic_load(&loop->step[r]) > most ? atomic_load(&loop->step[r]) : most;
	}
	atomic_store(&loop->stop_after, most + 20);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(pids[r], 60), 0);
	atomic_store(&calm->stop_after, most + 20);
	trainers_run(&trainfix, "calm", WORLD, loop_trainer, calm, 120);
	cr_assert_eq(memcmp(loop->params, calm->params, N * 2), 0,
		     "the parameters differ from an undisturbed run's");
}

Test(gpu_stuck, killed_at_random_points_of_training)
{
	gpu_begin(1, NULL);
	random_kills((struct gpu_layout){ 1, WORLD, false }, 20);
	gpu_end();
}

Test(gpu_stuck, killed_at_random_points_of_training_on_two_devices)
{
	gpu_begin(2, NULL);
	random_kills((struct gpu_layout){ 2, WORLD, false }, 20);
	gpu_end();
}
