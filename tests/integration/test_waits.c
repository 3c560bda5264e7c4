/* Tickets that are let go, cancelled, interrupted, or that take long. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainfix.h"

enum { N = 100 };

TestSuite(waits, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end);

static void await(atomic_uint *flag, unsigned value)
{
	while (atomic_load(flag) < value)
		sched_yield();
}

/* ------------------------------------------------------------------- detached */

static shardd_ticket submit_release(shardd_client *c, shardd_unit u)
{
	shardd_ticket ticket;

	/* as fast as the daemon answers */
	while (shardd_submit_release(c, SHARDD_OPTIONS(release, .unit = u), &ticket, &train_err)) {
		TRAINER_CHECK(train_err.code == SHARDD_RESOURCE_EXHAUSTED);
		sched_yield();
	}
	return ticket;
}

static int detach_trainer(const struct trainer *t)
{
	enum { MANY = 5000 };
	shardd_client *c = train_join(t);
	shardd_unit u = train_zero_unit(c, "unit", N, NULL);
	shardd_ticket ticket;
	const void *data;

	for (unsigned i = 0; i < MANY; i++) /* more than a session may have unanswered */
		TRAIN_OK(shardd_detach(c, submit_release(c, u), &train_err));
	ticket = submit_release(c, u);
	TRAIN_OK(shardd_detach(c, ticket, &train_err));
	TRAIN_FAILS(shardd_wait(c, ticket, -1, NULL, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(train_err.native == EBADF);
	TRAIN_FAILS(shardd_detach(c, ticket, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_release(c, u, &train_err));
	train_leave(c);
	return 0;
}

Test(waits, detached_tickets_need_no_wait)
{
	trainfix_run(1, detach_trainer, NULL);
}

static int failure_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	shardd_ticket ticket;
	int rc;

	/* by the next submissions: at the latest when the daemon has answered */
	TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = 77), &ticket, &train_err));
	TRAIN_OK(shardd_detach(c, ticket, &train_err));
	while ((rc = shardd_barrier(c, SHARDD_WORLD, &train_err)) == 0)
		;
	TRAINER_CHECK(rc == -SHARDD_NOT_FOUND && strstr(train_err.text, "detached"));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	/* by the leave, which waits for it */
	TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = 78), &ticket, &train_err));
	TRAIN_OK(shardd_detach(c, ticket, &train_err));
	TRAIN_FAILS(shardd_leave(c, &train_err), SHARDD_NOT_FOUND);
	train_leave(c);
	return 0;
}

Test(waits, a_detached_failure_is_told)
{
	trainfix_run(1, failure_trainer, NULL);
}

/* --------------------------------------------------------------------- cancel */

static void *wait_cancelled(void *arg)
{
	struct {
		shardd_client *c;
		shardd_ticket ticket;
		int rc;
	} *w = arg;

	w->rc = shardd_wait(w->c, w->ticket, -1, NULL, NULL);
	return NULL;
}

static int cancel_trainer(const struct trainer *t)
{
	atomic_uint *turn = t->arg;
	shardd_client *c = train_join(t);
	struct {
		shardd_client *c;
		shardd_ticket ticket;
		int rc;
	} w = { .c = c };
	pthread_t thread;

	if (t->rank == 0) {
		TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &w.ticket, &train_err));
		TRAINER_CHECK(pthread_create(&thread, NULL, wait_cancelled, &w) == 0);
		TRAIN_OK(shardd_cancel(c, w.ticket, &train_err));
		pthread_join(thread, NULL);
		TRAINER_CHECK(w.rc == -SHARDD_CANCELLED);
		TRAIN_FAILS(shardd_cancel(c, w.ticket, &train_err), SHARDD_INVALID_ARGUMENT);
		atomic_store(turn, 1);
	} else { /* the op at this number has ended for all */
		await(turn, 1);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err),
			    SHARDD_FAILED_PRECONDITION);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(waits, a_cancelled_op_ends)
{
	trainfix_run(2, cancel_trainer, trainer_shared(sizeof(atomic_uint)));
}

/* A call that is cancelled before the daemon has seen it would leave a gap in the order. */
static int cancel_over_grpc(const struct trainer *t)
{
	atomic_uint *turn = t->arg;
	shardd_ticket ticket;
	shardd_client *c;

	setenv("SHARDD_RING", "off", 1);
	c = train_join(t);
	if (t->rank == 0) {
		TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &ticket, &train_err));
		TRAIN_FAILS(shardd_cancel(c, ticket, &train_err), SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "was sent over gRPC"));
		atomic_store(turn, 1);
		TRAIN_OK(shardd_wait(c, ticket, -1, NULL, &train_err));
	} else {
		await(turn, 1);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(waits, an_op_over_grpc_cannot_be_cancelled)
{
	trainfix_run(2, cancel_over_grpc, trainer_shared(sizeof(atomic_uint)));
}

/* ------------------------------------------------------------------ interrupt */

static shardd_client *signalled;

static void on_alarm(int number)
{
	(void)number;
	shardd_interrupt(signalled); /* NOLINT(bugprone-signal-handler): it is safe there */
}

static int interrupt_trainer(const struct trainer *t)
{
	atomic_uint *turn = t->arg;
	shardd_client *c = train_join(t);
	shardd_ticket ticket;
	size_t ended = 7;

	if (t->rank == 0) {
		signalled = c;
		signal(SIGALRM, on_alarm);
		TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &ticket, &train_err));
		alarm(1);
		TRAIN_FAILS(shardd_wait(c, ticket, -1, NULL, &train_err), SHARDD_CANCELLED);
		TRAINER_CHECK(train_err.native == EINTR);
		shardd_interrupt(c); /* before the wait */
		TRAIN_FAILS(shardd_wait_all(c, &ticket, 1, &ended, &train_err), SHARDD_CANCELLED);
		TRAINER_CHECK(train_err.native == EINTR && ended == 0);
		atomic_store(turn, 1);
		TRAIN_OK(shardd_wait_all(c, &ticket, 1, &ended, &train_err)); /* it went on */
		TRAINER_CHECK(ended == 1);
	} else {
		await(turn, 1);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	}
	train_leave(c);
	return 0;
}

/* The blocking form has nobody who could wait again: it cancels its op. */
static int interrupt_blocking_trainer(const struct trainer *t)
{
	atomic_uint *turn = t->arg;
	shardd_client *c = train_join(t);

	if (t->rank == 0) {
		signalled = c;
		signal(SIGALRM, on_alarm);
		alarm(1);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_CANCELLED);
		TRAINER_CHECK(train_err.native == EINTR);
		atomic_store(turn, 1);
	} else {
		await(turn, 1);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err),
			    SHARDD_FAILED_PRECONDITION);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(waits, an_interrupted_blocking_form_cancels_its_op)
{
	trainfix_run(2, interrupt_blocking_trainer, trainer_shared(sizeof(atomic_uint)));
}

/* Over gRPC it cannot be cancelled: it goes on, detached, and the ranks do not drift apart. */
static int interrupt_over_grpc_trainer(const struct trainer *t)
{
	atomic_uint *turn = t->arg;
	shardd_client *c;

	setenv("SHARDD_RING", "off", 1);
	c = train_join(t);
	if (t->rank == 0) {
		signalled = c;
		signal(SIGALRM, on_alarm);
		alarm(1);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_CANCELLED);
		TRAINER_CHECK(train_err.native == EINTR);
		atomic_store(turn, 1);
	} else {
		await(turn, 1);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(waits, an_interrupted_blocking_form_over_grpc_detaches_its_op)
{
	trainfix_run(2, interrupt_over_grpc_trainer, trainer_shared(sizeof(atomic_uint)));
}

Test(waits, an_interrupted_wait_can_go_on)
{
	trainfix_run(2, interrupt_trainer, trainer_shared(sizeof(atomic_uint)));
}

/* ---------------------------------------------------------------------- stall */

struct stall {
	shardd_ticket ticket;
	unsigned told;
	char text[200];
};

static void on_stall(void *data, uint64_t ticket, const char *text)
{
	struct stall *s = data;

	s->ticket = ticket;
	s->told++;
	snprintf(s->text, sizeof(s->text), "%s", text);
}

static int stall_trainer(const struct trainer *t)
{
	atomic_uint *turn = t->arg;
	struct stall s = { 0 };
	struct shardd_options o = {
		.size = sizeof(o), .socket = t->socket, .on_stall = on_stall, .stall_data = &s
	};
	shardd_client *c = NULL;
	shardd_ticket ticket;

	TRAIN_FAILS(shardd_connect(&o, &c, &train_err), SHARDD_INVALID_ARGUMENT);
	o.stall_ms = 20;
	TRAIN_OK(shardd_connect(&o, &c, &train_err));
	train_join_as(c, t, SHARDD_EPHEMERAL);
	if (t->rank == 0) {
		TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &ticket, &train_err));
		while (s.told < 2)
			TRAIN_FAILS(shardd_wait(c, ticket, 60, NULL, &train_err),
				    SHARDD_DEADLINE_EXCEEDED);
		TRAINER_CHECK(s.ticket == ticket && strstr(s.text, "op 1, Barrier, has not ended"));
		atomic_store(turn, 1);
		TRAIN_OK(shardd_wait(c, ticket, -1, NULL, &train_err));
	} else {
		await(turn, 1);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(waits, a_stalled_wait_is_told)
{
	trainfix_run(2, stall_trainer, trainer_shared(sizeof(atomic_uint)));
}

/* ------------------------------------------------------------------ optimizers */

static int optimizer_trainer(const struct trainer *t)
{
	const uint64_t shape = N;
	const struct shardd_tensor w = { .name = "w", .shape = &shape, .dims = 1 };
	struct shardd_unit_spec spec = {
		.size = sizeof(spec), .name = "unit", .tensors = &w, .n_tensors = 1
	};
	shardd_client *c = train_join(t);
	struct shardd_unit_info info;

	spec.optimizer = SHARDD_ADAMW_DEFAULTS(.eps = 1e-6);
	TRAINER_CHECK(spec.optimizer.beta1 == 0.9 && spec.optimizer.beta2 == 0.999 &&
		      spec.optimizer.eps == 1e-6 && spec.optimizer.weight_decay == 1e-2);
	spec.optimizer.momentum = 0.9;
	TRAIN_FAILS(shardd_register(c, &spec, 1, &info, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strcmp(train_err.field, "units[0].optimizer.momentum") == 0);
	spec.optimizer = SHARDD_SGD_DEFAULTS(.eps = 1e-8);
	TRAIN_FAILS(shardd_register(c, &spec, 1, &info, &train_err), SHARDD_INVALID_ARGUMENT);
	spec.optimizer = SHARDD_SGD_DEFAULTS(.momentum = 0.9);
	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	train_leave(c);
	return 0;
}

Test(waits, optimizer_defaults_and_unused_settings)
{
	trainfix_run(1, optimizer_trainer, NULL);
}

/* --------------------------------------------------------------------- rejoin */

struct lives {
	unsigned entered, trained;
};

static int enter(void *data)
{
	struct lives *l = data;

	return ++l->entered == 1 ? -SHARDD_ABORTED : 0;
}

static int train(void *data)
{
	struct lives *l = data;

	return ++l->trained == 1 ? -SHARDD_ABORTED : -SHARDD_DATA_LOSS;
}

Test(waits, rejoin_ends_with_another_code_than_aborted)
{
	struct lives l = { 0 };

	cr_assert_eq(shardd_rejoin(enter, train, &l), -SHARDD_DATA_LOSS);
	cr_assert(l.entered == 3 && l.trained == 2);
}
