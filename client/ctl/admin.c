/* shardctl cordon, uncordon, handover, shutdown: for administrators. */
#include "admin.pb-c.h"

#include <getopt.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "ctl/ctl.h"
#include "ctl/format.h"

#define ADMIN_CALL_MS  10000u
#define ADMIN_AGAIN_MS 10
#define ADMIN_SLOW_MS  100
#define ADMIN_WAIT_S   60u

/* ------------------------------------------------------------- cordon, uncordon */

static int admin_cordon(struct ctl *ctl, int argc, char **argv, bool on)
{
	Shardd__V1__CordonRequest request = SHARDD__V1__CORDON_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	int r = ctl_no_arguments(argc, argv);

	request.cordoned = on;
	if (r == CTL_OK)
		r = ctl_call(ctl, "/shardd.v1.AdminService/Cordon", &request.base,
			     &shardd__v1__cordon_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	if (ctl->json)
		return ctl_print_json(json_from_message(reply));
	printf("the daemon %s%s: %s\n",
	       ((const Shardd__V1__CordonResponse *)reply)->changed ? "is " : "was already ",
	       on ? "cordoned" : "uncordoned",
	       on ? "it admits no new jobs, those that exist train on" : "it admits new jobs");
	return CTL_OK;
}

int ctl_cordon(struct ctl *ctl, int argc, char **argv)
{
	return admin_cordon(ctl, argc, argv, true);
}

int ctl_uncordon(struct ctl *ctl, int argc, char **argv)
{
	return admin_cordon(ctl, argc, argv, false);
}

/* -------------------------------------------------------------------- handover */

/* Ask whoever serves the socket now. Return: NULL: nobody answers. */
static Shardd__V1__GetStatusResponse *admin_ask(struct ctl *ctl)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct shardd_error err = { 0 };
	struct rpc_client *rpc = NULL;
	ProtobufCMessage *reply = NULL;

	if (rpc_client_connect(ctl->socket, 0, &rpc, &err) == 0)
		(void)rpc_client_call(rpc, "/shardd.v1.StatusService/GetStatus", &request.base,
				      &shardd__v1__get_status_response__descriptor, ADMIN_CALL_MS,
				      &reply, &err);
	rpc_client_close(rpc);
	return (Shardd__V1__GetStatusResponse *)reply;
}

/* Return: what a daemon that is not @old answers, or NULL: none does in time. */
static Shardd__V1__GetStatusResponse *admin_await_next(struct ctl *ctl, int32_t old,
						       uint64_t until_us)
{
	while (clock_now_us() < until_us) {
		Shardd__V1__GetStatusResponse *s = admin_ask(ctl);

		if (s && s->pid != old)
			return s;
		ctl_status_freep(&s);
		poll(NULL, 0, ADMIN_AGAIN_MS);
	}
	return NULL;
}

static int admin_parse_timeout(int argc, char **argv, uint32_t *ret_s)
{
	static const struct option options[] = { { "timeout", required_argument, NULL, 't' },
						 { 0 } };
	uint64_t number;
	int o;

	*ret_s = ADMIN_WAIT_S;
	while ((o = ctl_getopt(argc, argv, "", options, NULL)) != -1) {
		if (o != 't')
			return CTL_USAGE;
		if (!format_parse_number(optarg, UINT32_MAX, &number))
			return ctl_usage("--timeout \"%s\" is not a whole number of seconds",
					 optarg);
		*ret_s = (uint32_t)number;
	}
	if (optind < argc)
		return ctl_usage("%s takes no argument \"%s\"", argv[0], argv[optind]);
	return CTL_OK;
}

/* The answer may go with the connection: then the next daemon's answer is what counts. */
static int admin_request_hand_over(struct ctl *ctl)
{
	Shardd__V1__HandOverRequest request = SHARDD__V1__HAND_OVER_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	struct shardd_error err = { 0 };

	if (rpc_client_call(ctl->rpc, "/shardd.v1.AdminService/HandOver", &request.base,
			    &shardd__v1__hand_over_response__descriptor, ADMIN_CALL_MS, &reply,
			    &err) < 0 &&
	    err.code != SHARDD_UNAVAILABLE)
		return ctl_error(&err);
	return CTL_OK;
}

static int admin_print_handover(struct ctl *ctl, const Shardd__V1__GetStatusResponse *old,
				const Shardd__V1__GetStatusResponse *next, uint64_t us)
{
	if (strcmp(old->instance, next->instance) != 0) {
		fprintf(stderr,
			"shardctl: DATA_LOSS: the next daemon (pid %d) has not taken the jobs "
			"over: "
			"it has instance %s, not %s; its log says why\n",
			next->pid, next->instance, old->instance);
		return CTL_FAILED;
	}
	if (ctl->json)
		return ctl_print_json(json_pack("{s:i, s:i, s:s, s:s, s:I, s:I}", "old_pid",
						old->pid, "pid", next->pid, "old_version",
						old->version, "version", next->version, "jobs",
						(json_int_t)next->n_jobs, "us", (json_int_t)us));
	printf("shardd %s (pid %d) has handed over to shardd %s (pid %d): %zu %s, %.1f ms from "
	       "the request to the first answer\n",
	       old->version, old->pid, next->version, next->pid, next->n_jobs,
	       next->n_jobs == 1 ? "job" : "jobs", (double)us / 1000);
	return CTL_OK;
}

int ctl_handover(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *old = NULL, *next = NULL;
	uint32_t timeout_s;
	uint64_t began;
	int r = admin_parse_timeout(argc, argv, &timeout_s);

	if (r == CTL_OK)
		r = ctl_get_status(ctl, &request, &old);
	if (r != CTL_OK)
		return r;
	began = clock_now_us();
	r = admin_request_hand_over(ctl);
	if (r != CTL_OK)
		return r;
	next = admin_await_next(ctl, old->pid, began + timeout_s * UINT64_C(1000000));
	if (next)
		return admin_print_handover(ctl, old, next, clock_now_us() - began);
	fprintf(stderr,
		"shardctl: DEADLINE_EXCEEDED: pid %d was told to hand over, and no other daemon "
		"has "
		"answered for %u s: see the log, and systemctl status shardd or that of "
		"shardd-holder\n",
		old->pid, timeout_s);
	return CTL_UNREACHABLE;
}

/* -------------------------------------------------------------------- shutdown */

/* On its old connection: with a socket unit a new one would start another daemon. */
static int admin_await_end(struct ctl *ctl, uint64_t until_us)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;

	while (clock_now_us() < until_us) {
		struct shardd_error err = { 0 };
		ProtobufCMessage *reply = NULL;

		if (rpc_client_call(ctl->rpc, "/shardd.v1.StatusService/GetStatus", &request.base,
				    &shardd__v1__get_status_response__descriptor, ADMIN_CALL_MS,
				    &reply, &err) < 0 &&
		    err.code == SHARDD_UNAVAILABLE)
			return CTL_OK;
		ctl_messagep(&reply);
		poll(NULL, 0, ADMIN_SLOW_MS);
	}
	fprintf(stderr, "shardctl: DEADLINE_EXCEEDED: the daemon still waits for its trainers "
			"(drain_timeout_ms): see shardctl status\n");
	return CTL_FAILED;
}

static int admin_parse_shutdown(int argc, char **argv, bool *ret_discard)
{
	static const struct option options[] = { { "discard", no_argument, NULL, 'd' }, { 0 } };
	int o;

	while ((o = ctl_getopt(argc, argv, "", options, NULL)) != -1) {
		if (o != 'd')
			return CTL_USAGE;
		*ret_discard = true;
	}
	if (optind < argc)
		return ctl_usage("shutdown takes no argument \"%s\"", argv[optind]);
	return CTL_OK;
}

int ctl_shutdown(struct ctl *ctl, int argc, char **argv)
{
	Shardd__V1__ShutdownRequest request = SHARDD__V1__SHUTDOWN_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	const Shardd__V1__ShutdownResponse *s;
	bool discard = false;
	int r = admin_parse_shutdown(argc, argv, &discard);

	request.discard = discard;
	if (r == CTL_OK)
		r = ctl_call(ctl, "/shardd.v1.AdminService/Shutdown", &request.base,
			     &shardd__v1__shutdown_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	s = (const Shardd__V1__ShutdownResponse *)reply;
	if (!ctl->json)
		printf("the daemon ends: %u %s told to commit and leave, %u %s with it\n", s->ranks,
		       s->ranks == 1 ? "rank is" : "ranks are", s->jobs,
		       s->jobs == 1 ? "job ends" : "jobs end");
	fflush(stdout);
	r = admin_await_end(ctl, clock_now_us() + ADMIN_WAIT_S * UINT64_C(1000000));
	if (r == CTL_OK && ctl->json)
		return ctl_print_json(json_from_message(reply));
	return r;
}
