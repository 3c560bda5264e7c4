/* Many ops in flight: tickets, their order, waiting from several threads. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "core/check.h"
#include "trainfix.h"

enum { N = 1000, THREADS = 8 };

/* Wait for another trainer; trainers_run ends it if that one never comes. */
static void await(atomic_uint *flag, unsigned value)
{
	while (atomic_load(flag) < value)
		sched_yield();
}

static struct shardd_result wait_for(shardd_client *c, shardd_ticket ticket)
{
	struct shardd_result r;

	TRAIN_OK(shardd_wait(c, ticket, -1, &r, &train_err));
	return r;
}

/* ------------------------------------------------------------------- the order */

/* gather, gather, release, release, initialise, without waiting for any of them. Out of
 * order the counts would differ, and initialising would be refused while gathered. */
static int order_trainer(const struct trainer *t)
{
	enum { ROUNDS = 100, PER_ROUND = 5 };
	static const uint32_t references[] = { 1, 2, 1, 0 };
	shardd_client *c = train_join(t);
	shardd_unit u = train_zero_unit(c, "unit", N, t->arg);
	shardd_ticket tickets[ROUNDS * PER_ROUND];
	uint64_t number = 0;

	for (unsigned i = 0; i < ROUNDS; i++) {
		shardd_ticket *at = tickets + (size_t)i * PER_ROUND;

		TRAIN_OK(
			shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u), at, &train_err));
		TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u), at + 1,
					      &train_err));
		TRAIN_OK(shardd_submit_release(c, SHARDD_OPTIONS(release, .unit = u), at + 2,
					       &train_err));
		TRAIN_OK(shardd_submit_release(c, SHARDD_OPTIONS(release, .unit = u), at + 3,
					       &train_err));
		TRAIN_OK(shardd_submit_init(
			c, SHARDD_OPTIONS(init, .unit = u, .seed = i, .from = SHARDD_FROM_SEED),
			at + 4, &train_err));
	}
	/* the answers may be fetched in any order */
	for (unsigned k = ROUNDS * PER_ROUND; k-- > 0;) {
		struct shardd_result r = wait_for(c, tickets[k]);

		if (k % PER_ROUND < 4)
			TRAINER_CHECK(r.references == references[k % PER_ROUND]);
		else
			TRAINER_CHECK(number == 0 || r.number == number - 1);
		number = k % PER_ROUND == 4 ? r.number : number;
	}
	train_leave(c);
	return 0;
}

Test(tickets, of_one_unit_keep_their_order, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct shardd_unit_spec cast = { .compute_dtype = SHARDD_FP16 };

	trainfix_run(1, order_trainer, NULL);
	trainfix_run(3, order_trainer, NULL);
	trainfix_run(2, order_trainer, &cast);
}

/* Three ops on one buffer, over and over: (x + x) on both ranks, then rank 0's to all,
 * then the larger one. The last value tells whether one was left out or moved. */
static int buffer_trainer(const struct trainer *t)
{
	enum { ROUNDS = 100 };
	shardd_client *c = train_join(t);
	shardd_ticket tickets[3 * ROUNDS];
	uint64_t buffer;
	float x[2];
	void *data;

	TRAIN_OK(shardd_alloc(c, 2 * sizeof(float), &buffer, &data, &train_err));
	train_write(c, data, (float[]){ (float)t->rank + 1, (float)t->rank }, 2 * sizeof(float));
	for (unsigned i = 0; i < ROUNDS; i++) {
		shardd_ticket *at = tickets + (size_t)3 * i;

		TRAIN_OK(shardd_submit_all_reduce(c,
						  SHARDD_OPTIONS(all_reduce, .buffer = buffer,
								 .count = 1, .dtype = SHARDD_FP32,
								 .op = SHARDD_SUM),
						  at, &train_err));
		TRAIN_OK(shardd_submit_broadcast(c,
						 SHARDD_OPTIONS(broadcast, .buffer = buffer,
								.offset = 4, .bytes = 4,
								.root = i % 2),
						 at + 1, &train_err));
		TRAIN_OK(shardd_submit_all_reduce(c,
						  SHARDD_OPTIONS(all_reduce, .buffer = buffer,
								 .count = 2, .dtype = SHARDD_FP32,
								 .op = SHARDD_AVG),
						  at + 2, &train_err));
	}
	for (unsigned k = 0; k < ARRAY_SIZE(tickets); k++)
		wait_for(c, tickets[k]);
	train_read(c, x, data, sizeof(x));
	/* 3, then doubled by each of the 99 sums that follow */
	TRAINER_CHECK(x[0] == 3 * 0x1p99f);
	TRAINER_CHECK(x[1] == 0); /* rank 0's, from the first broadcast on */
	train_leave(c);
	return 0;
}

Test(tickets, of_one_buffer_keep_their_order, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, buffer_trainer, NULL);
}

/* A whole step of 20 units in flight at once, and the commit behind it. */
static int step_trainer(const struct trainer *t)
{
	enum { UNITS = 20, STEPS = 5 };
	struct shardd_unit_spec like = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	shardd_client *c = train_join(t);
	shardd_unit u[UNITS];
	shardd_ticket gradients[UNITS], others[2 * UNITS + 2];
	float g[N];
	unsigned n = 0;

	for (unsigned i = 0; i < UNITS; i++)
		u[i] = train_zero_unit(c, (char[]){ (char)('a' + i), 0 }, N, &like);
	for (unsigned step = 1; step <= STEPS; step++) {
		for (unsigned i = 0; i < UNITS; i++)
			TRAIN_OK(shardd_submit_gradient(c, SHARDD_OPTIONS(gradient, .unit = u[i]),
							&gradients[i], &train_err));
		for (unsigned i = 0; i < UNITS; i++) {
			void *data = wait_for(c, gradients[i]).data;

			for (unsigned k = 0; k < N; k++)
				g[k] = (float)(i + 1);
			train_write(c, data, g, sizeof(g));
			TRAIN_OK(shardd_submit_reduce(c, SHARDD_OPTIONS(reduce, .unit = u[i]),
						      &others[n++], &train_err));
		}
		TRAIN_OK(shardd_submit_step(c, SHARDD_OPTIONS(step), &others[n++], &train_err));
		TRAIN_OK(shardd_submit_commit(
			c, SHARDD_OPTIONS(commit, .step = step, .blob = "x", .bytes = 1),
			&others[n++], &train_err));
		for (unsigned i = 0; i < UNITS; i++)
			TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u[i]),
						      &others[n++], &train_err));
		for (unsigned i = 0; i < n; i++) {
			struct shardd_result r = wait_for(c, others[i]);

			if (r.data) /* a gather */
				TRAINER_CHECK(train_peek(c, (const float *)r.data + N - 1) ==
					      -(float)(step * (i - UNITS - 2 + 1)));
		}
		for (unsigned i = 0; i < UNITS; i++)
			TRAIN_OK(shardd_release(c, u[i], &train_err));
		n = 0;
	}
	train_leave(c);
	return 0;
}

Test(tickets, of_a_whole_step_in_flight, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, step_trainer, NULL);
}

/* ------------------------------------------------------------------- waiting */

static int poll_trainer(const struct trainer *t)
{
	atomic_uint *turn = t->arg;
	shardd_client *c = train_join(t);
	struct shardd_result r;
	shardd_ticket ticket;
	int rc;

	if (t->rank == 0) {
		TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &ticket, &train_err));
		for (unsigned i = 0; i < 3; i++) {
			TRAINER_CHECK(shardd_poll(c, ticket, &r, &train_err) == 0);
			TRAIN_FAILS(shardd_wait(c, ticket, 0, &r, &train_err),
				    SHARDD_DEADLINE_EXCEEDED);
			TRAINER_CHECK(train_err.native == EAGAIN);
			TRAIN_FAILS(shardd_wait(c, ticket, 10, &r, &train_err),
				    SHARDD_DEADLINE_EXCEEDED);
			TRAINER_CHECK(train_err.native == EAGAIN);
		}
		atomic_store(turn, 1);
		while ((rc = shardd_poll(c, ticket, &r, &train_err)) == 0)
			sched_yield();
		TRAINER_CHECK(rc == 1 && r.number == 1);
	} else {
		await(turn, 1);
		TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &ticket, &train_err));
		r = wait_for(c, ticket);
		TRAINER_CHECK(r.number == 1);
	}
	/* the ticket is ended */
	TRAIN_FAILS(shardd_poll(c, ticket, &r, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(train_err.native == EBADF);
	TRAIN_FAILS(shardd_wait(c, ticket, 0, &r, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(train_err.native == EBADF);
	TRAIN_FAILS(shardd_wait(c, 0, -1, &r, &train_err), SHARDD_INVALID_ARGUMENT);
	train_leave(c);
	return 0;
}

Test(tickets, poll_and_wait_tell_that_it_is_not_yet, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, poll_trainer, trainer_shared(sizeof(atomic_uint)));
}

static int deadline_trainer(const struct trainer *t)
{
	atomic_uint *turn = t->arg;
	shardd_client *c = train_join(t);

	if (t->rank == 0) {
		shardd_set_timeout(c, 50);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_DEADLINE_EXCEEDED);
		shardd_set_timeout(c, 0);
		atomic_store(turn, 1);
	} else { /* late: the op at this number has ended for all */
		await(turn, 1);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_DEADLINE_EXCEEDED);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(tickets, a_deadline_ends_the_op_for_all, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, deadline_trainer, trainer_shared(sizeof(atomic_uint)));
}

/* More unanswered ops than allowed: refused, and nothing is lost by that. */
static int limit_trainer(const struct trainer *t)
{
	enum { LIMIT = 1024 }; /* max_inflight_ops */
	atomic_uint *turn = t->arg;
	shardd_client *c = train_join(t);
	shardd_ticket tickets[LIMIT], more;

	if (t->rank == 1)
		await(turn, 1);
	for (unsigned i = 0; i < LIMIT; i++)
		TRAIN_OK(
			shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &tickets[i], &train_err));
	if (t->rank == 0) {
		for (unsigned i = 0; i < 3; i++)
			TRAIN_FAILS(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &more,
							  &train_err),
				    SHARDD_RESOURCE_EXHAUSTED);
		atomic_store(turn, 1);
	}
	for (unsigned i = 0; i < LIMIT; i++)
		TRAINER_CHECK(wait_for(c, tickets[i]).number == i + 1);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(tickets, beyond_the_limit_are_refused, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, limit_trainer, trainer_shared(sizeof(atomic_uint)));
}

/* ------------------------------------------------------------------- threads */

struct thread {
	pthread_t id;
	shardd_client *client;
	shardd_ticket ticket;
	shardd_unit unit;
	unsigned index;
	int rc;
	struct shardd_error err;
};

static void start_threads(struct thread *threads, void *(*fn)(void *arg))
{
	for (unsigned i = 0; i < THREADS; i++) {
		threads[i].index = i;
		TRAINER_CHECK(pthread_create(&threads[i].id, NULL, fn, &threads[i]) == 0);
	}
}

static void join_threads(struct thread *threads)
{
	for (unsigned i = 0; i < THREADS; i++)
		TRAINER_CHECK(pthread_join(threads[i].id, NULL) == 0);
}

static void *wait_thread(void *arg)
{
	struct thread *th = arg;

	th->rc = shardd_wait(th->client, th->ticket, -1, NULL, &th->err);
	return NULL;
}

/* Each thread its own ticket; then all of them one: exactly one gets the answer. */
static int wait_trainer(const struct trainer *t)
{
	atomic_uint *turn = t->arg;
	struct thread threads[THREADS] = { 0 };
	shardd_client *c = train_join(t);
	shardd_ticket one;
	unsigned ok = 0;

	if (t->rank == 1) {
		await(turn, 1);
		for (unsigned i = 0; i <= THREADS; i++)
			TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		train_leave(c);
		return 0;
	}
	for (unsigned i = 0; i < THREADS; i++) {
		threads[i].client = c;
		TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &threads[i].ticket,
					       &train_err));
	}
	start_threads(threads, wait_thread);
	atomic_store(turn, 1);
	join_threads(threads);
	for (unsigned i = 0; i < THREADS; i++)
		TRAINER_CHECK(threads[i].rc == 0);

	TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &one, &train_err));
	for (unsigned i = 0; i < THREADS; i++)
		threads[i].ticket = one;
	start_threads(threads, wait_thread);
	join_threads(threads);
	for (unsigned i = 0; i < THREADS; i++) {
		ok += threads[i].rc == 0;
		TRAINER_CHECK(threads[i].rc == 0 || threads[i].rc == -SHARDD_FAILED_PRECONDITION ||
			      (threads[i].rc == -SHARDD_INVALID_ARGUMENT &&
			       threads[i].err.native == EBADF));
	}
	TRAINER_CHECK(ok == 1);
	train_leave(c);
	return 0;
}

Test(tickets, are_waited_for_by_several_threads, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, wait_trainer, trainer_shared(sizeof(atomic_uint)));
}

/* Ops on a unit of its own. */
static void *work_thread(void *arg)
{
	struct thread *th = arg;
	const void *data;
	void *gradient;

	for (unsigned i = 0; i < 100 && th->rc >= 0; i++) {
		th->rc = shardd_gather(th->client, th->unit, &data, &th->err);
		if (th->rc >= 0 &&
		    train_peek(th->client, (const float *)data + N - 1) != (float)th->index)
			th->rc = -SHARDD_UNKNOWN;
		if (th->rc >= 0)
			th->rc = shardd_gradient(th->client, th->unit, &gradient, &th->err);
		if (th->rc >= 0)
			th->rc = shardd_release(th->client, th->unit, &th->err);
	}
	return NULL;
}

static int threads_trainer(const struct trainer *t)
{
	struct thread threads[THREADS] = { 0 };
	shardd_client *c = train_join(t);

	for (unsigned i = 0; i < THREADS; i++) {
		float values[N];
		uint64_t buffer;
		void *data;

		threads[i].client = c;
		threads[i].unit = train_register(c, (char[]){ (char)('a' + i), 0 }, N, NULL).unit;
		for (unsigned k = 0; k < N; k++)
			values[k] = (float)i;
		TRAIN_OK(shardd_alloc(c, sizeof(values), &buffer, &data, &train_err));
		train_write(c, data, values, sizeof(values));
		TRAIN_OK(shardd_init_own(c, threads[i].unit, buffer, &train_err));
		TRAIN_OK(shardd_free(c, buffer, &train_err));
	}
	start_threads(threads, work_thread);
	join_threads(threads);
	for (unsigned i = 0; i < THREADS; i++)
		TRAINER_CHECK(threads[i].rc == 0);
	train_leave(c);
	return 0;
}

Test(tickets, of_several_threads_on_one_client, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, threads_trainer, NULL);
}
