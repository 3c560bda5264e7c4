/* grpc.health.v1.Health over a real socket. */
#include <criterion/criterion.h>
#include <string.h>

#include "health.pb-c.h"
#include "rpc/svc_health.h"
#include "rpc_client.h"
#include "rpchost.h"
#include "shardd.pb-c.h"
#include "status.pb-c.h"

#define UNKNOWN     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN
#define SERVING     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
#define NOT_SERVING GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING

#define REPLY (&grpc__health__v1__health_check_response__descriptor)

static struct rpchost host;
static struct health health;
static struct rpc_client *client;
static unsigned n_descriptors;

/* Only their names are used. */
static const struct rpc_service known[] = {
	{ .desc = &shardd__v1__session_service__descriptor },
	{ .desc = &shardd__v1__training_service__descriptor },
	{ .desc = &shardd__v1__job_service__descriptor },
	{ .desc = &shardd__v1__status_service__descriptor },
};

static void test_health_begin(void)
{
	struct shardd_error err;

	n_descriptors = rpchost_begin();
	health_init(&health, known, ARRAY_SIZE(known));
	rpchost_start(&host, NULL, health_service(&health), 1);
	cr_assert_eq(rpc_client_connect(host.path, 1000, &client, &err), 0);
}

static void finish(void)
{
	rpc_client_close(client);
	rpchost_stop(&host);
	health_deinit(&health);
	rpchost_descriptors(n_descriptors);
}

TestSuite(health, .init = test_health_begin, .timeout = 30);

static void set(void *arg)
{
	health_set(&health, *(bool *)arg);
}

static void set_serving(bool serving)
{
	rpchost_run(&host, set, &serving);
}

static struct rpc_pending *start(const char *method, const char *name, bool streaming)
{
	Grpc__Health__V1__HealthCheckRequest req = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
	struct rpc_pending *p = NULL;

	req.service = (char *)name;
	cr_assert_eq(rpc_client_start(client, method, &req.base, REPLY, streaming, 10000, &p, NULL),
		     0);
	return p;
}

static int status_of(ProtobufCMessage *msg)
{
	int status = (int)((Grpc__Health__V1__HealthCheckResponse *)msg)->status;

	protobuf_c_message_free_unpacked(msg, NULL);
	return status;
}

/* Return: the serving status, or a negative code. */
static int test_health_check(const char *name, struct shardd_error *err)
{
	struct rpc_pending *p = start("/grpc.health.v1.Health/Check", name, false);
	ProtobufCMessage *msg = NULL;
	int r;

	cr_assert(rpc_pending_wait(p, -1));
	r = rpc_pending_result(p, &msg, err);
	rpc_pending_free(p);
	return r ? r : status_of(msg);
}

static struct rpc_pending *watch(const char *name)
{
	return start("/grpc.health.v1.Health/Watch", name, true);
}

/* Return: the next status of a watch, or a negative code. */
static int next(struct rpc_pending *p, int timeout_ms)
{
	ProtobufCMessage *msg = NULL;
	int r = rpc_pending_next(p, timeout_ms, &msg, NULL);

	return r == 1 ? status_of(msg) : r;
}

Test(health, check_says_whether_it_serves)
{
	static const char *const names[] = { "", "shardd.v1.SessionService",
					     "shardd.v1.TrainingService",
					     "shardd.v1.StatusService" };

	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		cr_assert_eq(test_health_check(names[i], NULL), NOT_SERVING, "%s", names[i]);
	set_serving(true);
	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		cr_assert_eq(test_health_check(names[i], NULL), SERVING, "%s", names[i]);
	finish();
}

Test(health, check_of_an_unknown_name_is_not_found)
{
	struct shardd_error err;

	set_serving(true);
	cr_assert_eq(test_health_check("shardd.v1.Nope", &err), -SHARDD_NOT_FOUND);
	cr_assert(strstr(err.text, "shardd.v1.Nope"), "%s", err.text);
	finish();
}

/* Each name and the daemon's own, with @status. */
static void lists(int status)
{
	Grpc__Health__V1__HealthListRequest req = GRPC__HEALTH__V1__HEALTH_LIST_REQUEST__INIT;
	ProtobufCMessage *msg = NULL;
	Grpc__Health__V1__HealthListResponse *list;

	cr_assert_eq(rpc_client_call(client, "/grpc.health.v1.Health/List", &req.base,
				     &grpc__health__v1__health_list_response__descriptor, 10000,
				     &msg, NULL),
		     0);
	list = (Grpc__Health__V1__HealthListResponse *)msg;
	cr_assert_eq(list->n_statuses, 1 + ARRAY_SIZE(known));
	for (size_t i = 0; i < list->n_statuses; i++) {
		cr_assert_str_eq(list->statuses[i]->key, i ? known[i - 1].desc->name : "");
		cr_assert_eq((int)list->statuses[i]->value->status, status);
	}
	protobuf_c_message_free_unpacked(msg, NULL);
}

Test(health, list_has_each_service)
{
	lists(NOT_SERVING);
	set_serving(true);
	lists(SERVING);
	finish();
}

Test(health, watch_tells_each_change_once)
{
	struct rpc_pending *p = watch("shardd.v1.JobService");

	cr_assert_eq(next(p, 5000), NOT_SERVING);
	set_serving(true);
	set_serving(true);
	set_serving(false);
	cr_assert_eq(next(p, 5000), SERVING);
	cr_assert_eq(next(p, 5000), NOT_SERVING);
	cr_assert_eq(next(p, 20), -SHARDD_DEADLINE_EXCEEDED);
	rpc_pending_free(p);
	finish();
}

Test(health, watch_of_an_unknown_name_stays_open)
{
	struct rpc_pending *p = watch("who");

	cr_assert_eq(next(p, 5000), UNKNOWN);
	set_serving(true);
	cr_assert_eq(next(p, 20), -SHARDD_DEADLINE_EXCEEDED);
	cr_assert_not(rpc_pending_wait(p, 0));
	rpc_pending_free(p);
	finish();
}

static void count_calls(void *arg)
{
	*(size_t *)arg = rpc_server_calls(host.server);
}

static void wait_for_calls(size_t wanted)
{
	struct timespec pause = { .tv_nsec = 1000000 };
	size_t n = wanted + 1;

	for (int i = 0; i < 10000 && n != wanted; i++) {
		rpchost_run(&host, count_calls, &n);
		nanosleep(&pause, NULL);
	}
	cr_assert_eq(n, wanted);
}

Test(health, watchers_that_left_are_forgotten)
{
	struct rpc_pending *p[50];

	for (int i = 0; i < 50; i++)
		p[i] = watch(i % 2 ? "" : "who");
	wait_for_calls(50);
	for (int i = 0; i < 50; i++)
		rpc_pending_free(p[i]);
	wait_for_calls(0);
	set_serving(true);
	cr_assert_eq(test_health_check("", NULL), SERVING);
	finish();
}

static void flap(void *arg)
{
	for (int i = 0; i < 2000; i++)
		health_set(&health, i % 2 == 0);
	*(bool *)arg = list_empty(&health.watchers);
}

Test(health, watcher_that_does_not_read_is_let_go)
{
	struct rpc_pending *p = watch("");
	bool gone = false;
	int r;

	cr_assert_eq(next(p, 5000), NOT_SERVING);
	rpchost_run(&host, flap, &gone);
	cr_assert(gone);
	while ((r = next(p, 5000)) >= 0)
		;
	cr_assert_eq(r, -SHARDD_RESOURCE_EXHAUSTED);
	rpc_pending_free(p);
	finish();
}
