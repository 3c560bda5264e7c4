/* A rank is stopped: status, health, the log and the job's ranks are told who holds up the others, and when
 * that is over. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"
#include "methods.h"
#include "rawcall.h"

static void test_stall_begin(void)
{
	static const char *const args[] = { "--set", "stall_after_ms=200", NULL };

	failfix_begin(args);
}

TestSuite(stalls, .init = test_stall_begin, .fini = failfix_end, .timeout = 120);

struct play {
	stage watches; /* the ranks that have seen a stall, then those that have seen its end */
	stage joined, over;
	pid_t pids[2];
	char blamed[1024];
};

static void await_event(struct rpc_pending *watch, Shardd__V1__WatchResponse__Kind kind,
			const char *words)
{
	Shardd__V1__WatchResponse *e;
	ProtobufCMessage *event = NULL;
	struct shardd_error err;

	TRAINER_CHECK(rpc_pending_next(watch, 20000, &event, &err) == 1);
	e = (Shardd__V1__WatchResponse *)event;
	trainer_check(e->kind == kind && strstr(e->text, words), e->text, __FILE__, __LINE__);
	protobuf_c_message_free_unpacked(event, NULL);
}

/* It waits, and watches. */
static int waits(const struct trainer *t)
{
	Shardd__V1__WatchRequest request = SHARDD__V1__WATCH_REQUEST__INIT;
	Shardd__V1__BarrierRequest b = SHARDD__V1__BARRIER_REQUEST__INIT;
	struct rpc_client *c = raw_trainer(t->socket, "j", 0, 2, false);
	struct rpc_pending *watch = NULL, *barrier;
	struct play *p = t->arg;
	struct shardd_error err;
	char who[64];

	TRAINER_CHECK(rpc_client_start(c, METHOD_Watch, &request.base,
				       &shardd__v1__watch_response__descriptor, true, 0, &watch,
				       &err) == 0);
	await_event(watch, SHARDD__V1__WATCH_RESPONSE__KIND__KIND_HELLO, "");
	stage_set(&p->joined, 1);
	barrier = raw_start(c, "Barrier", &b.base);
	snprintf(who, sizeof(who), "rank 1 (pid %d, stopped) has not begun Barrier",
		 (int)p->pids[1]);
	await_event(watch, SHARDD__V1__WATCH_RESPONSE__KIND__KIND_STALL, who);
	stage_set(&p->watches, 1);
	await_event(watch, SHARDD__V1__WATCH_RESPONSE__KIND__KIND_STALL_ENDED,
		    "the job has stalled for ");
	TRAINER_CHECK(raw_finish(barrier, NULL, &err) == 0);
	stage_set(&p->watches, 2);
	TRAINER_AWAIT(atomic_load(&p->over) == 1, 20);
	rpc_pending_free(watch);
	rpc_client_close(c);
	return 0;
}

static int stops(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);

	train_join_as(c, t, SHARDD_EPHEMERAL);
	TRAINER_AWAIT(atomic_load(&p->joined) == 1, 20);
	raise(SIGSTOP);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAIN_OK(shardd_blame(c, p->blamed, sizeof(p->blamed), &train_err));
	TRAINER_AWAIT(atomic_load(&p->watches) == 2, 20);
	train_leave(c);
	stage_set(&p->over, 1);
	return 0;
}

/* The member @key of what health says of the stall; NULL: there is none. */
static const char *told(json_t *health, const char *key)
{
	json_t *stall =
		json_object_get(json_array_get(json_object_get(health, "stalls"), 0), "stall");

	return json_string_value(json_object_get(json_object_get(stall, "culprit"), key));
}

Test(stalls, is_told_by_whatever_is_asked)
{
	static const char *const health[] = { "health", NULL }, *const status[] = { "status",
										    NULL };
	struct play *p = trainer_shared(sizeof(*p));
	json_t *j;

	p->pids[1] = trainer_start(&trainfix, "j", 1, 2, stops, p);
	p->pids[0] = trainer_start(&trainfix, "j", 0, 2, waits, p);
	AWAIT(atomic_load(&p->watches) == 1, 20);
	j = daemonfix_ctl(&trainfix, health);
	cr_expect_str_eq(json_string_value(json_object_get(j, "status")), "SERVING");
	cr_assert(told(j, "process_state"));
	cr_expect_str_eq(told(j, "process_state"), "T");
	cr_expect_str_eq(told(j, "last_op"), "join");
	json_decref(j);
	j = daemonfix_ctl(&trainfix, status);
	cr_expect(json_object_get(json_array_get(json_object_get(j, "jobs"), 0), "stall"));
	json_decref(j);
	cr_expect_eq(fail_times_logged(&trainfix, "stalled job="), 1);
	cr_expect_eq(fail_times_logged(&trainfix, "stall over job="), 0);
	cr_assert_eq(kill(p->pids[1], SIGCONT), 0);
	AWAIT(atomic_load(&p->watches) == 2, 20);
	for (unsigned i = 0; i < 2; i++)
		cr_assert_eq(trainer_wait(p->pids[i], 30), 0);
	cr_expect_str_eq(p->blamed, "", "nobody waits any more");
	cr_expect_eq(fail_times_logged(&trainfix, "stalled job="), 1);
	AWAIT(fail_times_logged(&trainfix, "stall over job=") == 1, 20);
	j = daemonfix_ctl(&trainfix, health);
	cr_expect_eq(json_array_size(json_object_get(j, "stalls")), 0);
	json_decref(j);
}

/* Without a job there is nobody to blame; a buffer without room is refused. */
static int asks(const struct trainer *t)
{
	char text[8] = "x";
	shardd_client *c = train_connect(t);

	TRAIN_FAILS(shardd_blame(c, text, sizeof(text), &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strcmp(text, "") == 0);
	TRAIN_FAILS(shardd_blame(c, text, 0, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_blame(c, NULL, 8, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_blame(NULL, text, 8, &train_err), SHARDD_INVALID_ARGUMENT);
	shardd_close(c);
	return 0;
}

Test(stalls, blame_checks_its_arguments)
{
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "j", 0, 1, asks, NULL), 20), 0);
}
