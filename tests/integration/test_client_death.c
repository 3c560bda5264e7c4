/*
 * Trainers that die: kill -9 at random points of a training loop, again and again
 * against one daemon; and by construction while they take part in each kind of op.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "core/check.h"
#include "failfix.h"

TestSuite(client_death, .init = trainfix_begin, .fini = trainfix_end, .timeout = 300);

/* ------------------------------------------------------- the training loop */

enum { WORLD = 3, BIG = 1000, SMALL = 77, N_PARAMS = BIG + SMALL };

struct loop_rank {
	_Atomic uint64_t step; /* done by the present process */
	struct told aborted;   /* the last ABORTED */
};

/* Shared with all trainers. */
struct loop {
	_Atomic uint64_t stop_after; /* 0: not yet */
	struct loop_rank ranks[WORLD];
	float params[N_PARAMS]; /* at the end */
};

struct blob {
	uint64_t step;
	uint32_t rank;
	uint32_t check;
};

static struct blob blob_of(uint64_t step, uint32_t rank)
{
	return (struct blob){ step, rank, (uint32_t)step * 2654435761u + rank };
}

struct loop_units {
	shardd_unit big, small;
	uint64_t buffer;
	float *values;
};

/* Return: 0 or the negative code of the first call that failed. */
static int register_units(shardd_client *c, struct loop_units *u)
{
	uint64_t big = BIG, small = SMALL;
	const struct shardd_tensor tensors[] = {
		{ .name = "w",
		  .shape = &big,
		  .dims = 1,
		  .init = SHARDD_INIT_UNIFORM,
		  .a = -1,
		  .b = 1 },
		{ .name = "b", .shape = &small, .dims = 1, .init = SHARDD_INIT_NORMAL, .b = 1 },
	};
	const struct shardd_unit_spec specs[] = {
		{ .size = sizeof(specs[0]),
		  .name = "big",
		  .tensors = &tensors[0],
		  .n_tensors = 1,
		  .compute_dtype = SHARDD_BF16,
		  .gradient_dtype = SHARDD_FP32,
		  .optimizer = { .kind = SHARDD_ADAMW, .lr = 0.01, .weight_decay = 0.1 } },
		{ .size = sizeof(specs[0]),
		  .name = "small",
		  .tensors = &tensors[1],
		  .n_tensors = 1,
		  .optimizer = { .kind = SHARDD_SGD, .lr = 0.1, .momentum = 0.9 } },
	};
	struct shardd_unit_info info[2];
	int r = shardd_register(c, specs, 2, info, &train_err);

	u->big = info[0].unit;
	u->small = info[1].unit;
	return r;
}

static int look_at(shardd_client *c, shardd_unit u, size_t bytes)
{
	uint32_t *data, sum = 0;
	const void *full;
	int r = shardd_gather(c, u, &full, &train_err);

	if (r < 0)
		return r;
	data = train_copy(c, full, bytes);
	for (size_t i = 0; i < bytes / 4; i++)
		sum += data[i];
	free(data);
	TRAINER_CHECK(sum != 1); /* what counts is that all of it can be read */
	return shardd_release(c, u, &train_err);
}

static int reduce_one(shardd_client *c, shardd_unit u, uint32_t rank, uint64_t step, size_t n)
{
	float values[BIG];
	void *data;
	int r = shardd_gradient(c, u, &data, &train_err);

	if (r < 0)
		return r;
	train_fill(values, n, (step * WORLD + rank) * 2 + (n == BIG));
	train_write(c, data, values, n * sizeof(float));
	return shardd_reduce(c, u, &train_err);
}

/* A sum over all ranks, as a loss would be. */
static int sum_up(shardd_client *c, struct loop_units *u, uint32_t rank, uint64_t step)
{
	int r;

	train_poke(c, u->values, (float)(step % 1000 + rank));
	r = shardd_all_reduce(c, SHARDD_WORLD, u->buffer, 0, 1, SHARDD_FP32, SHARDD_SUM,
			      &train_err);
	if (r == 0)
		TRAINER_CHECK(train_peek(c, u->values) == (float)(3 * (step % 1000) + 3));
	return r;
}

static int one_step(shardd_client *c, struct loop_units *u, uint32_t rank, uint64_t step)
{
	struct blob blob = blob_of(step, rank);
	int r = look_at(c, u->big, BIG * 2);

	r = r ? r : look_at(c, u->small, SMALL * 4);
	r = r ? r : reduce_one(c, u->small, rank, step, SMALL);
	r = r ? r : reduce_one(c, u->big, rank, step, BIG);
	r = r ? r : sum_up(c, u, rank, step);
	r = r ? r : shardd_clip_grad_norm(c, SHARDD_WORLD, 5, 2, NULL, &train_err);
	r = r ? r : shardd_step(c, SHARDD_WORLD, NULL, &train_err);
	r = r ? r : shardd_commit(c, step, &blob, sizeof(blob), &train_err);
	return r;
}

/* Parameters, and the first commit, unless there is one to go on from. */
static int begin_or_resume(shardd_client *c, struct loop_units *u, uint32_t rank,
			   const struct shardd_membership *me)
{
	struct blob blob = blob_of(me->step, rank);
	void *data;
	int r = register_units(c, u);

	TRAINER_CHECK(!me->torn);
	r = r ? r : shardd_alloc(c, 64, &u->buffer, &data, &train_err);
	if (r)
		return r;
	u->values = data;
	if (me->has_commit) {
		TRAINER_CHECK(me->blob_bytes == sizeof(blob));
		TRAINER_CHECK(memcmp(me->blob, &blob, sizeof(blob)) == 0);
		return 0;
	}
	r = shardd_init_seed(c, u->big, 11, &train_err);
	r = r ? r : shardd_init_seed(c, u->small, 12, &train_err);
	blob = blob_of(1, rank);
	r = r ? r : shardd_commit(c, 1, &blob, sizeof(blob), &train_err);
	return r;
}

/* From one join to the end of its epoch, or to the end of the loop. */
static int one_epoch(shardd_client *c, const struct trainer *t, struct loop *loop)
{
	struct shardd_membership me = train_join_as(c, t, SHARDD_EPHEMERAL);
	struct loop_rank *mine = &loop->ranks[t->rank];
	struct loop_units u;
	uint64_t step;
	int r = begin_or_resume(c, &u, t->rank, &me);

	for (step = me.has_commit ? me.step : 1; r == 0; step++) {
		uint64_t stop = atomic_load(&loop->stop_after);

		atomic_store(&mine->step, step);
		TRAINER_CHECK(!stop || step <= stop);
		if (step == stop)
			break;
		r = one_step(c, &u, t->rank, step + 1);
	}
	if (r == 0 && t->rank == 0) {
		train_params(c, u.big, loop->params, BIG * 2);
		train_params(c, u.small, loop->params + BIG, SMALL * sizeof(float));
	}
	/* nobody leaves before rank 0 has read what it needs */
	return r ? r : shardd_barrier(c, SHARDD_WORLD, &train_err);
}

static int train_loop(const struct trainer *t)
{
	struct loop *loop = t->arg;
	shardd_client *c = train_connect(t);
	int r;

	while ((r = one_epoch(c, t, loop)) < 0) {
		TRAIN_FAILS(r, SHARDD_ABORTED);
		told_note(&loop->ranks[t->rank].aborted, r);
	}
	train_leave(c);
	return 0;
}

/* --------------------------------------------------------------- the killer */

struct killer {
	struct loop *loop;
	pid_t pids[WORLD];
	unsigned points, waited;
	double *ms; /* from the death to the last peer's ABORTED */
	unsigned n_ms;
	unsigned random;
};

static unsigned draw(struct killer *k, unsigned n)
{
	k->random = k->random * 1664525u + 1013904223u;
	return (k->random >> 8) % n;
}

static void start_rank(struct killer *k, uint32_t rank)
{
	atomic_store(&k->loop->ranks[rank].step, 0);
	k->pids[rank] = trainer_start(&trainfix, "loop", rank, WORLD, train_loop, k->loop);
}

static bool all_alive(const struct killer *k)
{
	for (int r = 0; r < WORLD; r++)
		if (waitpid(k->pids[r], NULL, WNOHANG) != 0)
			return false;
	return true;
}

/* The rank's present process, and with it all others, do steps. */
static bool goes_on(struct killer *k, uint32_t rank, uint64_t beyond)
{
	cr_assert(all_alive(k), "a trainer has ended by itself");
	return atomic_load(&k->loop->ranks[rank].step) > beyond;
}

static uint64_t steps_done(const struct killer *k)
{
	uint64_t most = 0;

	for (int r = 0; r < WORLD; r++) {
		uint64_t s = atomic_load(&k->loop->ranks[r].step);

		most = s > most ? s : most;
	}
	return most;
}

/* The peers were told who died, and how fast. */
static void check_told(struct killer *k, uint32_t victim, pid_t pid, const unsigned *before,
		       uint64_t died_us)
{
	uint64_t last = died_us;
	char who[64];

	snprintf(who, sizeof(who), "rank %u (pid %d)", victim, (int)pid);
	for (uint32_t r = 0; r < WORLD; r++) {
		struct told *told = &k->loop->ranks[r].aborted;

		if (r == victim)
			continue;
		AWAIT(atomic_load(&told->n) > before[r], 2);
		cr_assert(strstr(told->text, who), "\"%s\" is not in \"%s\"", who, told->text);
		cr_assert(strstr(told->text, "its last op: "), "%s", told->text);
		last = told->at_us > last ? told->at_us : last;
	}
	k->ms[k->n_ms++] = (double)(last - died_us) / 1000;
}

/* The point is anywhere in a few steps; not a wait for something. */
static void random_time(struct killer *k, unsigned most_us)
{
	struct timespec t = { .tv_nsec = (long)draw(k, most_us) * 1000 };

	nanosleep(&t, NULL);
}

static void kill_one(struct killer *k)
{
	uint32_t victim = draw(k, WORLD);
	bool in_loop = draw(k, 4) > 0; /* else while it connects, joins, registers */
	uint64_t done = steps_done(k);
	unsigned before[WORLD];
	pid_t pid = k->pids[victim];
	uint64_t died_us;

	if (in_loop)
		for (uint32_t r = 0; r < WORLD; r++)
			AWAIT(goes_on(k, r, done), 30);
	random_time(k, in_loop ? 5000 : 30000);
	for (uint32_t r = 0; r < WORLD; r++)
		before[r] = atomic_load(&k->loop->ranks[r].aborted.n);
	died_us = clock_now_us();
	fail_kill(pid);
	if (in_loop)
		check_told(k, victim, pid, before, died_us);
	start_rank(k, victim);
}

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static void report(struct killer *k)
{
	qsort(k->ms, k->n_ms, sizeof(*k->ms), by_size);
	fprintf(stderr,
		"client_death: %u points, %llu steps; from the death to the last peer's ABORTED "
		"(%u measured): median %.2f ms, p99 %.2f ms, most %.2f ms\n",
		k->points, (unsigned long long)atomic_load(&k->loop->stop_after), k->n_ms,
		k->ms[k->n_ms / 2], k->ms[k->n_ms * 99 / 100], k->ms[k->n_ms - 1]);
	cr_assert_leq(k->ms[k->n_ms - 1], 2000.0);
}

static unsigned points_wanted(void)
{
	const char *s = getenv("SHARDD_KILL_POINTS");
	int n = s ? atoi(s) : 0;

	return n > 0 ? (unsigned)n : 200;
}

static void finish(struct killer *k)
{
	for (uint32_t r = 0; r < WORLD; r++)
		AWAIT(goes_on(k, r, 1), 30);
	/* far enough that no rank is beyond it yet */
	atomic_store(&k->loop->stop_after, steps_done(k) + 20);
	for (int r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(k->pids[r], 60), 0);
}

Test(client_death, killed_at_random_points_of_training)
{
	struct loop *loop = trainer_shared(sizeof(*loop));
	struct loop *calm = trainer_shared(sizeof(*calm));
	struct killer k = { .loop = loop, .points = points_wanted(), .random = 20240501 };

	k.ms = calloc(k.points + 1, sizeof(*k.ms));
	for (uint32_t r = 0; r < WORLD; r++)
		start_rank(&k, r);
	for (unsigned i = 0; i < k.points; i++)
		kill_one(&k);
	finish(&k);
	/* the same steps without a death give the same bits */
	atomic_store(&calm->stop_after, atomic_load(&loop->stop_after));
	trainers_run(&trainfix, "calm", WORLD, train_loop, calm, 120);
	cr_assert_eq(atomic_load(&calm->ranks[0].aborted.n), 0);
	cr_assert_eq(memcmp(loop->params, calm->params, sizeof(loop->params)), 0,
		     "the parameters differ from an undisturbed run's");
	report(&k);
	free(k.ms);
}

/* -------------------------------------------- in each op, by construction */

/* Two of three wait in an op; one of the two dies; the third comes after that. */
struct phase {
	const char *op;   /* as the daemon calls it */
	const char *last; /* what the text says of the dead one's last op */
	int (*call)(shardd_client *c, shardd_unit u, uint64_t buffer);
	stage third_may_come;
	stage second_is_there; /* it has its buffers */
	pid_t pids[WORLD];
	struct told told[WORLD];
};

static int call_init(shardd_client *c, shardd_unit u, uint64_t buffer)
{
	(void)buffer;
	return shardd_init_seed(c, u, 9, &train_err);
}

static int call_reduce(shardd_client *c, shardd_unit u, uint64_t buffer)
{
	(void)buffer;
	return shardd_reduce(c, u, &train_err);
}

static int call_all_reduce(shardd_client *c, shardd_unit u, uint64_t buffer)
{
	(void)u;
	return shardd_all_reduce(c, SHARDD_WORLD, buffer, 0, 4, SHARDD_FP32, SHARDD_SUM,
				 &train_err);
}

static int call_broadcast(shardd_client *c, shardd_unit u, uint64_t buffer)
{
	(void)u;
	return shardd_broadcast(c, SHARDD_WORLD, buffer, 0, 16, 1, &train_err);
}

static int call_barrier(shardd_client *c, shardd_unit u, uint64_t buffer)
{
	(void)u;
	(void)buffer;
	return shardd_barrier(c, SHARDD_WORLD, &train_err);
}

static int call_clip(shardd_client *c, shardd_unit u, uint64_t buffer)
{
	(void)u;
	(void)buffer;
	return shardd_clip_grad_norm(c, SHARDD_WORLD, 1, 2, NULL, &train_err);
}

static int call_step(shardd_client *c, shardd_unit u, uint64_t buffer)
{
	(void)u;
	(void)buffer;
	return shardd_step(c, SHARDD_WORLD, NULL, &train_err);
}

static int call_commit(shardd_client *c, shardd_unit u, uint64_t buffer)
{
	(void)u;
	(void)buffer;
	return shardd_commit(c, 7, "blob", 4, &train_err);
}

static int phase_trainer(const struct trainer *t)
{
	struct phase *p = t->arg;
	shardd_client *c = train_join(t);
	uint64_t buffer;
	shardd_unit u = train_zero_unit(c, "layer", 100, NULL);
	void *data;

	TRAIN_OK(shardd_alloc(c, 64, &buffer, &data, &train_err));
	TRAIN_OK(shardd_gradient(c, u, &data, &train_err));
	if (t->rank == 1) {
		stage_set(&p->second_is_there, 1);
		TRAINER_AWAIT(atomic_load(&p->third_may_come), 60);
	}
	told_note(&p->told[t->rank], p->call(c, u, buffer));
	/* in the new epoch this session has nothing; the next call is as the first */
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	train_join_as(c, t, SHARDD_EPHEMERAL);
	train_leave(c);
	return 0;
}

static void check_phase(struct phase *p)
{
	pid_t victim;
	char died[64], last[64];

	for (uint32_t r = 0; r < WORLD; r++)
		p->pids[r] = trainer_start(&trainfix, p->op, r, WORLD, phase_trainer, p);
	AWAIT(fail_has_op(&trainfix, p->op, 0, p->op, "WAIT"), 30);
	AWAIT(fail_has_op(&trainfix, p->op, 2, p->op, "WAIT"), 30);
	AWAIT(atomic_load(&p->second_is_there), 30);
	victim = p->pids[2];
	fail_kill(victim);
	snprintf(died, sizeof(died), "rank 2 (pid %d)", (int)victim);
	snprintf(last, sizeof(last), "its last op: %s)", p->last);
	told_check(&p->told[0], SHARDD_ABORTED, died);
	told_check(&p->told[0], SHARDD_ABORTED, last);
	stage_set(&p->third_may_come, 1);
	told_check(&p->told[1], SHARDD_ABORTED, died);
	told_check(&p->told[1], SHARDD_ABORTED, last);
	cr_assert_eq(trainer_wait(p->pids[0], 30), 0);
	cr_assert_eq(trainer_wait(p->pids[1], 30), 0);
	/* the last one has left cleanly, so the job is gone */
	AWAIT(!fail_has_job(&trainfix, p->op), 20);
}

Test(client_death, peers_in_every_op_are_told_who_died_where)
{
	static const struct {
		const char *op, *last;
		int (*call)(shardd_client *c, shardd_unit u, uint64_t buffer);
	} phases[] = {
		{ "Initialise", "Initialise of unit layer", call_init },
		{ "Reduce", "Reduce of unit layer", call_reduce },
		{ "AllReduce", "AllReduce", call_all_reduce },
		{ "Broadcast", "Broadcast", call_broadcast },
		{ "Barrier", "Barrier", call_barrier },
		{ "ClipGradNorm", "ClipGradNorm", call_clip },
		{ "Step", "Step", call_step },
		{ "Commit", "Commit", call_commit },
	};

	for (size_t i = 0; i < ARRAY_SIZE(phases); i++) {
		struct phase *p = trainer_shared(sizeof(*p));

		p->op = phases[i].op;
		p->last = phases[i].last;
		p->call = phases[i].call;
		check_phase(p);
	}
}
