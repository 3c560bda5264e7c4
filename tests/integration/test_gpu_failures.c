/*
 * Failures between devices: trainers that die, collectives that hang or break, devices
 * that are lost. The ranks concerned get an error in one sentence, all others go on,
 * and the committed state equals that of a job without the failure.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "gpufix.h"

TestSuite(gpu_failures, .timeout = 180);

enum { MAX_WORLD = 8, N = 5003, STEPS = 12, TIMEOUT_MS = 4000 };

/* Shared by a job's trainers and the test. */
struct play {
	struct gpu_layout l;
	unsigned steps;      /* so many, then it is over */
	unsigned die_at;     /* rank 0 of a job of its own is killed in this step; 0: none */
	bool hangs;          /* a deadline may pass */
	stage at[MAX_WORLD]; /* the step each is in */
	struct told told[MAX_WORLD];
	float params[2][N]; /* at the end */
	pid_t pids[MAX_WORLD];
};

static struct play *play_new(struct gpu_layout l, unsigned steps)
{
	struct play *p = trainer_shared(sizeof(*p));

	p->l = l;
	p->steps = steps;
	return p;
}

static void start(struct play *p, const char *job, trainer_fn fn)
{
	for (uint32_t r = 0; r < p->l.world; r++)
		p->pids[r] = trainer_start(&trainfix, job, r, p->l.world, fn, p);
}

static void test_gpu_failures_end(struct play *p)
{
	for (uint32_t r = 0; r < p->l.world; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 100), 0, "rank %u", r);
}

struct units {
	shardd_unit u[2];
};

static int join(shardd_client *c, const struct trainer *t, struct shardd_membership *me)
{
	const struct play *p = t->arg;
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = t->world,
				  .rank = t->rank,
				  .allow_torn = true,
				  .op_timeout_ms = p->hangs ? TIMEOUT_MS : 50000 };

	return shardd_join(c, &job, me, &train_err);
}

/* Units, and their parameters unless there is a commit to go on from. */
static int set_up(shardd_client *c, struct units *u, const struct shardd_membership *me)
{
	static const struct shardd_optimizer kinds[2] = {
		{ SHARDD_ADAMW, .lr = 0.01, .weight_decay = 0.1 },
		{ SHARDD_SGD, .lr = 0.1, .momentum = 0.9 },
	};
	uint64_t n = N;
	const struct shardd_tensor w = {
		.name = "w", .shape = &n, .dims = 1, .init = SHARDD_INIT_NORMAL, .b = 1
	};
	int r = 0;

	for (unsigned i = 0; r == 0 && i < 2; i++) {
		const struct shardd_unit_spec spec = { .size = sizeof(spec),
						       .name = i ? "sgd" : "adamw",
						       .tensors = &w,
						       .n_tensors = 1,
						       .compute_dtype =
							       i ? SHARDD_FP32 : SHARDD_BF16,
						       .gradient_dtype = SHARDD_FP32,
						       .optimizer = kinds[i] };
		struct shardd_unit_info info;

		r = shardd_register(c, &spec, 1, &info, &train_err);
		u->u[i] = info.unit;
	}
	for (unsigned i = 0; r == 0 && !me->has_commit && i < 2; i++)
		r = shardd_init_seed(c, u->u[i], 3 + i, &train_err);
	if (r == 0 && !me->has_commit)
		r = shardd_commit(c, 1, NULL, 0, &train_err);
	return r;
}

static int look_at(shardd_client *c, shardd_unit u, size_t bytes)
{
	const void *data;
	int r = shardd_gather(c, u, &data, &train_err);
	void *copy;

	if (r < 0)
		return r;
	copy = train_alloc(bytes);
	r = shardd_read(c, copy, data, bytes, &train_err);
	free(copy);
	return r < 0 ? r : shardd_release(c, u, &train_err);
}

static int reduce(shardd_client *c, shardd_unit u, uint64_t seed)
{
	float *x = train_numbers(N, seed);
	void *data;
	int r = shardd_gradient(c, u, &data, &train_err);

	r = r < 0 ? r : shardd_write(c, data, x, N * sizeof(*x), &train_err);
	free(x);
	return r < 0 ? r : shardd_reduce(c, u, &train_err);
}

static int one_step(shardd_client *c, const struct units *u, uint32_t rank, uint64_t step)
{
	int r = look_at(c, u->u[0], N * 2);

	r = r ? r : look_at(c, u->u[1], N * 4);
	for (unsigned i = 0; r == 0 && i < 2; i++)
		r = reduce(c, u->u[i], (step * MAX_WORLD + rank) * 2 + i);
	r = r ? r : shardd_clip_grad_norm(c, SHARDD_WORLD, 5, 2, NULL, &train_err);
	r = r ? r : shardd_step(c, SHARDD_WORLD, NULL, &train_err);
	r = r ? r : shardd_commit(c, step, NULL, 0, &train_err);
	return r;
}

/* From one join to the failure that ends its epoch, or to the end. */
static int one_epoch(shardd_client *c, const struct trainer *t)
{
	struct play *p = t->arg;
	struct shardd_membership me;
	struct units u;
	uint64_t step;
	int r = join(c, t, &me);

	if (r < 0)
		return r;
	TRAINER_CHECK(!me.torn);
	r = set_up(c, &u, &me);
	for (step = me.has_commit ? me.step : 1; r == 0 && step < p->steps; step++) {
		stage_set(&p->at[t->rank], (unsigned)step);
		if (p->die_at == step + 1 && t->rank == t->world - 1) {
			/* in the middle: the others are in its collectives */
			TRAINER_CHECK(reduce(c, u.u[0], (step + 1) * MAX_WORLD + t->rank) == 0);
			p->die_at = 0;
			raise(SIGKILL);
		}
		r = one_step(c, &u, t->rank, step + 1);
	}
	if (r == 0 && t->rank == 0) {
		train_params(c, u.u[0], p->params[0], N * 2);
		train_params(c, u.u[1], p->params[1], N * 4);
	}
	return r ? r : shardd_barrier(c, SHARDD_WORLD, &train_err);
}

/* Whatever ends an epoch, the next one goes on from the last commit. */
static int trainer(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = gpu_connect(t, gpu_of(&p->l, t->rank));
	unsigned epochs = 0;
	int r;

	while ((r = one_epoch(c, t)) < 0) {
		if (r != -SHARDD_ABORTED && !(p->hangs && r == -SHARDD_DEADLINE_EXCEEDED))
			TRAIN_OK(r);
		told_note(&p->told[t->rank], r);
		TRAINER_CHECK(++epochs < 20);
	}
	train_leave(c);
	return 0;
}

/* The same steps without a failure. */
static void check_calm(const struct play *p)
{
	struct play *calm = play_new(p->l, p->steps);

	start(calm, "calm", trainer);
	test_gpu_failures_end(calm);
	for (uint32_t r = 0; r < p->l.world; r++)
		cr_assert_eq(atomic_load(&calm->told[r].n), 0, "%s", calm->told[r].text);
	cr_assert_eq(memcmp(calm->params[0], p->params[0], N * 2), 0, "adamw");
	cr_assert_eq(memcmp(calm->params[1], p->params[1], N * 4), 0, "sgd");
}

/* ----------------------------------------------------------------------- death */

static void death(struct gpu_layout l)
{
	struct play *p = play_new(l, STEPS);
	char who[64];
	pid_t pid;

	p->die_at = STEPS / 2;
	start(p, "death", trainer);
	pid = p->pids[l.world - 1];
	cr_assert_eq(trainer_wait(pid, 60), 128 + SIGKILL);
	p->pids[l.world - 1] = trainer_start(&trainfix, "death", l.world - 1, l.world, trainer, p);
	test_gpu_failures_end(p);
	snprintf(who, sizeof(who), "rank %u (pid %d)", l.world - 1, (int)pid);
	cr_assert(strstr(p->told[0].text, who), "\"%s\" is not in \"%s\"", who, p->told[0].text);
	check_calm(p);
}

Test(gpu_failures, death_on_one_device)
{
	gpu_begin(1, NULL);
	death((struct gpu_layout){ 1, 3, false });
	gpu_end();
}

Test(gpu_failures, death_of_a_whole_devices_ranks)
{
	gpu_begin(2, NULL);
	death((struct gpu_layout){ 2, 2, false });
	gpu_end();
}

Test(gpu_failures, death_of_one_of_a_devices_ranks)
{
	gpu_begin(3, NULL);
	death((struct gpu_layout){ 3, 6, true });
	gpu_end();
}

/* ---------------------------------------------- collectives that hang or break */

/* The @nth collective of the daemon does not end, or breaks, and then none does. */
static void broken(const char *how, const char *nth, struct gpu_layout l, bool hangs)
{
	struct play *p;

	gpu_set(how, nth);
	gpu_begin(l.devices, NULL);
	p = play_new(l, STEPS);
	p->hangs = hangs;
	start(p, "broken", trainer);
	test_gpu_failures_end(p);
	for (uint32_t r = 0; r < l.world; r++) {
		cr_assert_gt(atomic_load(&p->told[r].n), 0, "rank %u was not told", r);
		fprintf(stderr, "# rank %u: %d: %s\n", r, -p->told[r].rc, p->told[r].text);
		cr_assert(strstr(p->told[r].text, " ") && strlen(p->told[r].text) > 20);
	}
	check_calm(p);
	gpu_end();
}

Test(gpu_failures, a_collective_that_hangs)
{
	broken("SHARDD_SIM_NCCL_HANG", "40", (struct gpu_layout){ 2, 4, false }, true);
}

Test(gpu_failures, a_collective_that_hangs_on_three_devices)
{
	broken("SHARDD_SIM_NCCL_HANG", "30", (struct gpu_layout){ 3, 3, false }, true);
}

/* ------------------------------------------------ the daemon ends meanwhile */

static int waits_for_a_hung_one(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = gpu_connect(t, gpu_of(&p->l, t->rank));
	shardd_ticket ticket;
	uint64_t buffer;
	void *data;
	int r = 0;

	train_join_as(c, t, SHARDD_EPHEMERAL);
	TRAIN_OK(shardd_alloc(c, N * sizeof(float), &buffer, &data, &train_err));
	while (r == 0) {
		TRAIN_OK(shardd_submit_all_reduce(c,
						  SHARDD_OPTIONS(all_reduce, .buffer = buffer,
								 .count = N, .dtype = SHARDD_FP32,
								 .op = SHARDD_SUM),
						  &ticket, &train_err));
		r = shardd_wait(c, ticket, 2000, NULL, &train_err);
	}
	TRAIN_FAILS(r, SHARDD_DEADLINE_EXCEEDED);
	stage_set(&p->at[t->rank], 1);
	told_note(&p->told[t->rank], shardd_wait(c, ticket, -1, NULL, &train_err));
	shardd_close(c);
	return 0;
}

/* Not by the op's deadline, which is far away. */
Test(gpu_failures, a_collective_that_hangs_does_not_hold_up_the_end)
{
	static const char *const args[] = { "--set", "drain_timeout_ms=0", "--set",
					    "op_timeout_ms=10min", NULL };
	struct play *p;

	gpu_set("SHARDD_SIM_NCCL_HANG", "40"); /* the first ones are the daemon's own */
	gpu_begin(2, args);
	p = play_new((struct gpu_layout){ 2, 2, false }, STEPS);
	start(p, "hung", waits_for_a_hung_one);
	AWAIT(atomic_load(&p->at[0]) == 1 && atomic_load(&p->at[1]) == 1, 60);
	cr_assert_eq(kill(trainfix.pid, SIGTERM), 0);
	cr_assert_eq(failfix_await_daemon(20), 0);
	for (uint32_t r = 0; r < 2; r++) {
		told_check(&p->told[r], SHARDD_UNAVAILABLE, "");
		cr_assert_eq(trainer_wait(p->pids[r], 30), 0);
	}
	gpu_end();
}

Test(gpu_failures, a_collective_that_breaks)
{
	broken("SHARDD_SIM_NCCL_ERROR", "40", (struct gpu_layout){ 2, 4, true }, false);
}

Test(gpu_failures, a_collective_that_breaks_on_three_devices)
{
	broken("SHARDD_SIM_NCCL_ERROR", "30", (struct gpu_layout){ 3, 3, false }, false);
}

/* ------------------------------------------------------------------ a lost GPU */

struct loss {
	stage lost;  /* the trainer on the device that is lost has been told */
	stage after; /* steps of the other one since then */
	struct told told;
};

static shardd_unit unit_on(shardd_client *c, const struct trainer *t)
{
	const struct shardd_unit_spec like = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	struct shardd_membership me;
	struct shardd_job job = {
		.size = sizeof(job), .name = t->job, .world_size = 1, .op_timeout_ms = 20000
	};

	TRAIN_OK(shardd_join(c, &job, &me, &train_err));
	return train_zero_unit(c, "u", N, &like);
}

static int is_lost(const struct trainer *t)
{
	struct loss *l = t->arg;
	shardd_client *c = gpu_connect(t, 0);
	shardd_unit u = unit_on(c, t);
	int r = 0;

	for (unsigned step = 1; r == 0 && step < 5000; step++) {
		r = reduce(c, u, step);
		r = r ? r : shardd_step(c, SHARDD_WORLD, NULL, &train_err);
		r = r ? r : shardd_commit(c, step, NULL, 0, &train_err);
	}
	told_note(&l->told, r);
	stage_set(&l->lost, 1);
	shardd_close(c);
	return r == 0;
}

static int goes_on(const struct trainer *t)
{
	struct loss *l = t->arg;
	shardd_client *c = gpu_connect(t, 1);
	shardd_unit u = unit_on(c, t);
	uint64_t step = 1;
	unsigned after = 0;

	while (after < 20) {
		TRAIN_OK(reduce(c, u, step));
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_commit(c, step++, NULL, 0, &train_err));
		after += atomic_load(&l->lost);
	}
	train_leave(c);
	return 0;
}

static int comes_too_late(const struct trainer *t)
{
	shardd_client *c = gpu_connect(t, 0);
	struct shardd_job job = { .size = sizeof(job), .name = t->job, .world_size = 1 };
	int r = shardd_join(c, &job, NULL, &train_err);

	TRAINER_CHECK(r == -SHARDD_UNAVAILABLE || r == -SHARDD_FAILED_PRECONDITION);
	told_now("cuda:0");
	shardd_close(c);
	return 0;
}

/* The trainer's own process has the same environment, but by far not so many launches. */
Test(gpu_failures, a_lost_device_ends_its_jobs_and_no_other)
{
	static const char *const delete[] = { "job", "delete", "--force", "lost", NULL };
	struct loss *l = trainer_shared(sizeof(*l));
	char out[1024], text[256];
	json_t *s, *d;
	pid_t other, lost;

	gpu_set("SHARDD_SIM_LOSE", "0:100");
	gpu_begin(2, NULL);
	other = trainer_start(&trainfix, "kept", 0, 1, goes_on, l);
	lost = trainer_start(&trainfix, "lost", 0, 1, is_lost, l);
	cr_assert_eq(trainer_wait(lost, 60), 0);
	fprintf(stderr, "# %d: %s\n", -l->told.rc, l->told.text);
	cr_assert(strstr(l->told.text, "cuda:0"), "%s", l->told.text);
	cr_assert_eq(trainer_wait(other, 60), 0);
	s = daemonfix_ctl(&trainfix, (const char *const[]){ "status", NULL });
	d = json_array_get(json_object_get(s, "devices"), 0);
	snprintf(text, sizeof(text), "%s", json_string_value(json_object_get(d, "lost")));
	fprintf(stderr, "# status: %s\n", text);
	cr_assert(strlen(text) > 10);
	json_decref(s);
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "late", 0, 1, comes_too_late, l), 30),
		     0);
	daemonfix_ctl_text(&trainfix, delete, out, sizeof(out));
	gpu_end();
}
