/* Tickets that are let go, cancelled, interrupted, or that take long. */
#include <criterion/criterion.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

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

/* As many ops as a session may have leave no entry of the ring: a cancel needs none. */
static int cancel_at_the_limit(const struct trainer *t)
{
	enum { LIMIT = 1024 }; /* max_inflight_ops */
	atomic_uint *turn = t->arg;
	shardd_client *c = train_join(t);
	shardd_ticket tickets[LIMIT];

	if (t->rank == 1)
		await(turn, 1);
	for (unsigned i = 0; i < LIMIT; i++)
		TRAIN_OK(
			shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &tickets[i], &train_err));
	for (unsigned i = LIMIT; t->rank == 0 && i-- > 0;) {
		if (i % 3) /* twice is as good as once */
			TRAIN_OK(shardd_cancel(c, tickets[i], &train_err));
		TRAIN_OK(shardd_cancel(c, tickets[i], &train_err));
	}
	for (unsigned i = 0; i < LIMIT; i++)
		TRAIN_FAILS(shardd_wait(c, tickets[i], -1, NULL, &train_err),
			    t->rank ? SHARDD_FAILED_PRECONDITION : SHARDD_CANCELLED);
	atomic_store(turn, 1);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(waits, an_op_can_be_cancelled_at_the_limit)
{
	trainfix_run(2, cancel_at_the_limit, trainer_shared(sizeof(atomic_uint)));
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

/* The leave waits for what was detached. */
static int interrupt_leave_trainer(const struct trainer *t)
{
	atomic_uint *turn = t->arg;
	shardd_client *c = train_join(t);
	shardd_ticket ticket;

	if (t->rank == 0) {
		signalled = c;
		signal(SIGALRM, on_alarm);
		TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &ticket, &train_err));
		TRAIN_OK(shardd_detach(c, ticket, &train_err));
		alarm(1);
		TRAIN_FAILS(shardd_leave(c, &train_err), SHARDD_CANCELLED);
		TRAINER_CHECK(train_err.native == EINTR);
		atomic_store(turn, 1);
	} else {
		await(turn, 1);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(waits, an_interrupted_leave_can_be_called_again)
{
	trainfix_run(2, interrupt_leave_trainer, trainer_shared(sizeof(atomic_uint)));
}

Test(waits, an_interrupted_wait_can_go_on)
{
	trainfix_run(2, interrupt_trainer, trainer_shared(sizeof(atomic_uint)));
}

/* ---------------------------------------------------------------------- stall */

struct stall {
	shardd_ticket ticket;
	unsigned told;
	char text[400];
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
		/* the daemon is asked for no longer than the wait may take, and may be late */
		while (s.told < 2 || !strstr(s.text, "ms: rank 1"))
			TRAIN_FAILS(shardd_wait(c, ticket, 500, NULL, &train_err),
				    SHARDD_DEADLINE_EXCEEDED);
		TRAINER_CHECK(s.ticket == ticket && strstr(s.text, "op 1, Barrier, has not ended"));
		TRAINER_CHECK(strstr(s.text, "has not begun Barrier"));
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

/* -------------------------------------------------------------- one of several */

struct any_turn {
	atomic_uint asked, done;
};

static shardd_ticket submit_sum(shardd_client *c, shardd_group group, uint64_t buffer)
{
	shardd_ticket ticket;

	TRAIN_OK(shardd_submit_all_reduce(c,
					  SHARDD_OPTIONS(all_reduce, .group = group,
							 .buffer = buffer, .count = 1,
							 .dtype = SHARDD_FP32, .op = SHARDD_SUM),
					  &ticket, &train_err));
	return ticket;
}

static shardd_ticket submit_convert(shardd_client *c, shardd_unit u)
{
	shardd_ticket ticket;

	TRAIN_OK(shardd_submit_convert(
		c, SHARDD_OPTIONS(convert, .units = &u, .n_units = 1, .layout = SHARDD_LAYOUT_DIM0),
		&ticket, &train_err));
	return ticket;
}

/* Rank 0 submits an op of all ranks and one of a group; rank 1 calls the second one first. */
static void any_of_two(const struct trainer *t, shardd_client *c, bool convert)
{
	struct any_turn *turn = t->arg;
	struct shardd_unit_spec like = { 0 };
	shardd_ticket tickets[4] = { 0 };
	uint64_t buffers[2];
	size_t at = 9;
	shardd_unit u;
	void *data;

	TRAIN_OK(shardd_group_create(c, "both", (uint32_t[]){ 0, 1 }, 2, &like.group, &train_err));
	u = train_zero_unit(c, "unit", N, &like);
	for (unsigned i = 0; i < 2; i++)
		TRAIN_OK(shardd_alloc(c, sizeof(float), &buffers[i], &data, &train_err));
	if (t->rank == 1) {
		await(&turn->asked, 1);
		tickets[3] = convert ? submit_convert(c, u) : submit_sum(c, like.group, buffers[1]);
		TRAIN_OK(shardd_wait(c, tickets[3], -1, NULL, &train_err));
		await(&turn->done, 1);
		tickets[1] = submit_sum(c, SHARDD_WORLD, buffers[0]);
		TRAIN_OK(shardd_wait(c, tickets[1], -1, NULL, &train_err));
		return;
	}
	tickets[1] = submit_sum(c, SHARDD_WORLD, buffers[0]);
	tickets[3] = convert ? submit_convert(c, u) : submit_sum(c, like.group, buffers[1]);
	for (int ms = 0; ms <= 20; ms += 20) {
		TRAIN_FAILS(shardd_wait_any(c, tickets, 4, ms, &at, &train_err),
			    SHARDD_DEADLINE_EXCEEDED);
		TRAINER_CHECK(train_err.native == EAGAIN && at == 9);
	}
	shardd_interrupt(c);
	TRAIN_FAILS(shardd_wait_any(c, tickets, 4, -1, &at, &train_err), SHARDD_CANCELLED);
	TRAINER_CHECK(train_err.native == EINTR && at == 9);
	atomic_store(&turn->asked, 1);
	for (unsigned i = 0; i < 2; i++) { /* it stays until it is waited for */
		TRAIN_OK(shardd_wait_any(c, tickets, 4, -1, &at, &train_err));
		TRAINER_CHECK(at == 3);
	}
	TRAIN_OK(shardd_wait(c, tickets[3], 0, NULL, &train_err));
	TRAIN_FAILS(shardd_wait_any(c, tickets, 4, -1, &at, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(train_err.native == EBADF);
	tickets[3] = 0;
	atomic_store(&turn->done, 1);
	TRAIN_OK(shardd_wait_any(c, tickets, 4, 10000, &at, &train_err));
	TRAINER_CHECK(at == 1);
	tickets[2] = tickets[1];
	TRAIN_FAILS(shardd_wait_any(c, tickets, 4, -1, &at, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_wait(c, tickets[1], 0, NULL, &train_err));
	tickets[1] = tickets[2] = 0;
	TRAIN_FAILS(shardd_wait_any(c, tickets, 4, -1, &at, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_wait_any(c, tickets, 0, -1, &at, &train_err), SHARDD_INVALID_ARGUMENT);
}

static int any_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);

	any_of_two(t, c, false);
	train_leave(c);
	return 0;
}

static int any_over_grpc_trainer(const struct trainer *t)
{
	shardd_client *c;

	setenv("SHARDD_RING", "off", 1);
	c = train_join(t);
	any_of_two(t, c, false);
	train_leave(c);
	return 0;
}

/* The conversion's reply has lists: it goes over gRPC, while the barrier is in the ring. */
static int any_over_both_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);

	any_of_two(t, c, true);
	train_leave(c);
	return 0;
}

Test(waits, one_of_several_in_the_ring)
{
	trainfix_run(2, any_trainer, trainer_shared(sizeof(struct any_turn)));
}

Test(waits, one_of_several_over_grpc)
{
	trainfix_run(2, any_over_grpc_trainer, trainer_shared(sizeof(struct any_turn)));
}

Test(waits, one_of_several_in_the_ring_and_over_grpc)
{
	trainfix_run(2, any_over_both_trainer, trainer_shared(sizeof(struct any_turn)));
}

/* A failed op has ended, too, and so has one that is late. */
static int any_failed_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	shardd_ticket tickets[2];
	size_t at;

	shardd_set_timeout(c, 1);
	TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = 77), &tickets[0],
				      &train_err));
	TRAIN_OK(shardd_wait_any(c, tickets, 1, -1, &at, &train_err));
	TRAINER_CHECK(at == 0);
	TRAIN_FAILS(shardd_wait(c, tickets[0], 0, NULL, &train_err), SHARDD_NOT_FOUND);
	shardd_set_timeout(c, 0);
	train_leave(c);
	return 0;
}

Test(waits, one_of_several_may_have_failed)
{
	trainfix_run(1, any_failed_trainer, NULL);
}

/* ----------------------------------------------------------- the descriptor */

static bool is_readable(int fd, int timeout_ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, timeout_ms) == 1;
}

static void drain(int fd)
{
	uint64_t n;

	TRAINER_CHECK(read(fd, &n, sizeof(n)) == sizeof(n));
	TRAINER_CHECK(!is_readable(fd, 0));
}

/* Rank 1 answers when it is told to; nobody waits on rank 0 while the descriptor becomes readable. */
static void completion(const struct trainer *t, shardd_client *c, bool convert)
{
	struct any_turn *turn = t->arg;
	shardd_unit u = train_zero_unit(c, "unit", N, NULL);
	shardd_ticket ticket;
	int fd = -1, again = -1;
	size_t at;

	if (t->rank == 1) {
		await(&turn->asked, 1);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		if (convert) {
			ticket = submit_convert(c, u);
			TRAIN_OK(shardd_wait(c, ticket, -1, NULL, &train_err));
		}
		await(&turn->done, 1);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_DEADLINE_EXCEEDED);
		return;
	}
	TRAIN_OK(shardd_completion_fd(c, &fd, &train_err));
	TRAIN_OK(shardd_completion_fd(c, &again, &train_err));
	TRAINER_CHECK(fd >= 0 && again == fd && is_readable(fd, 0));
	drain(fd);
	TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &ticket, &train_err));
	TRAINER_CHECK(!is_readable(fd, 50));
	atomic_store(&turn->asked, 1);
	TRAINER_CHECK(is_readable(fd, 10000));
	TRAINER_CHECK(is_readable(fd, 0)); /* until it is drained */
	drain(fd);
	TRAIN_OK(shardd_wait_any(c, &ticket, 1, 0, &at, &train_err));
	TRAIN_OK(shardd_wait(c, ticket, 0, NULL, &train_err));
	TRAINER_CHECK(!is_readable(fd, 10));
	if (convert) { /* over gRPC, beside the ring */
		ticket = submit_convert(c, u);
		TRAINER_CHECK(is_readable(fd, 10000));
		drain(fd);
		while (shardd_wait(c, ticket, 0, NULL, &train_err))
			TRAINER_CHECK(train_err.native == EAGAIN && is_readable(fd, 10000));
	}
	shardd_set_timeout(c, 50); /* the daemon says it */
	TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &ticket, &train_err));
	TRAINER_CHECK(is_readable(fd, 10000));
	TRAIN_FAILS(shardd_wait(c, ticket, 0, NULL, &train_err), SHARDD_DEADLINE_EXCEEDED);
	shardd_set_timeout(c, 0);
	atomic_store(&turn->done, 1);
}

static int completion_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);

	completion(t, c, true);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

static int completion_over_grpc_trainer(const struct trainer *t)
{
	shardd_client *c;

	setenv("SHARDD_RING", "off", 1);
	c = train_join(t);
	completion(t, c, false);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(waits, a_descriptor_tells_that_an_op_has_ended)
{
	trainfix_run(2, completion_trainer, trainer_shared(sizeof(struct any_turn)));
}

Test(waits, a_descriptor_tells_that_an_op_over_grpc_has_ended)
{
	trainfix_run(2, completion_over_grpc_trainer, trainer_shared(sizeof(struct any_turn)));
}

/* A loop of libuv in which each op that has ended submits the next one. */
struct loop {
	shardd_client *c;
	shardd_unit u;
	shardd_ticket tickets[4];
	unsigned ended;
	int fd;
};

static void loop_submit(struct loop *l, size_t at)
{
	TRAIN_OK(shardd_submit_gather(l->c, SHARDD_OPTIONS(gather, .unit = l->u), &l->tickets[at],
				      &train_err));
}

static void loop_on_readable(uv_poll_t *handle, int status, int events)
{
	enum { OPS = 1000 };
	struct loop *l = handle->data;
	uint64_t count;
	size_t at;

	(void)events;
	TRAINER_CHECK(status == 0);
	(void)!read(l->fd, &count, sizeof(count));
	while (shardd_wait_any(l->c, l->tickets, 4, 0, &at, &train_err) == 0) {
		/* the first one maps its memory */
		TRAIN_OK(shardd_wait(l->c, l->tickets[at], -1, NULL, &train_err));
		l->tickets[at] = 0;
		if (l->ended++ + 4 < OPS)
			loop_submit(l, at);
	}
	if (l->ended == OPS)
		uv_poll_stop(handle);
}

static int loop_trainer(const struct trainer *t)
{
	struct loop l = { .c = train_join(t) };
	uv_poll_t handle = { .data = &l };
	uv_loop_t loop;

	l.u = train_zero_unit(l.c, "unit", N, NULL);
	TRAIN_OK(shardd_completion_fd(l.c, &l.fd, &train_err));
	uv_loop_init(&loop);
	uv_poll_init(&loop, &handle, l.fd);
	uv_poll_start(&handle, UV_READABLE, loop_on_readable);
	for (size_t i = 0; i < 4; i++)
		loop_submit(&l, i);
	uv_run(&loop, UV_RUN_DEFAULT);
	uv_close((uv_handle_t *)&handle, NULL);
	uv_run(&loop, UV_RUN_DEFAULT);
	TRAINER_CHECK(uv_loop_close(&loop) == 0 && l.ended == 1000);
	for (unsigned i = 0; i < 1000; i++)
		TRAIN_OK(shardd_release(l.c, l.u, &train_err));
	train_leave(l.c);
	return 0;
}

Test(waits, a_loop_waits_for_ops_by_their_descriptor)
{
	trainfix_run(1, loop_trainer, NULL);
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
	/* without the macro what is left out is 0 */
	spec.optimizer = (struct shardd_optimizer){ .kind = SHARDD_ADAMW, .lr = 1, .eps = 1e-6 };
	TRAIN_FAILS(shardd_register(c, &spec, 1, &info, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strcmp(train_err.field, "units[0].optimizer.beta1") == 0 &&
		      strstr(train_err.text, "SHARDD_ADAMW_DEFAULTS"));
	spec.optimizer = (struct shardd_optimizer){ .kind = SHARDD_ADAM, .lr = 1, .beta1 = 0.5 };
	TRAIN_FAILS(shardd_register(c, &spec, 1, &info, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strcmp(train_err.field, "units[0].optimizer.beta2") == 0 &&
		      strstr(train_err.text, "SHARDD_ADAM_DEFAULTS"));
	spec.optimizer = SHARDD_SGD_DEFAULTS(.complete = true);
	TRAIN_FAILS(shardd_register(c, &spec, 1, &info, &train_err), SHARDD_INVALID_ARGUMENT);
	/* 0 on purpose */
	spec.name = "zero";
	spec.optimizer = SHARDD_ADAM_DEFAULTS(.beta1 = 0, .beta2 = 0, .eps = 1e-6);
	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	/* it is not the default: FAILED_PRECONDITION would say that the unit has other settings */
	spec.optimizer.beta1 = 0.9;
	TRAIN_FAILS(shardd_register(c, &spec, 1, &info, &train_err), SHARDD_FAILED_PRECONDITION);
	spec.name = "unit";
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
