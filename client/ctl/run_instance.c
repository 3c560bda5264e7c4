#include "ctl/run_instance.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/cleanup.h"
#include "ctl/ctl.h"

#define CALL_MS 2000u

/* @job: "": all. Return: 0 or a negative code of the API. */
static int run_instance_status(const char *socket, const char *job, ProtobufCMessage **ret)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct rpc_client *rpc = NULL;
	struct shardd_error err;
	int r = rpc_client_connect(socket, 0, &rpc, &err);

	request.job = (char *)job;
	if (r == 0)
		r = rpc_client_call(rpc, "/shardd.v1.StatusService/GetStatus", &request.base,
				    &shardd__v1__get_status_response__descriptor, CALL_MS, ret,
				    &err);
	rpc_client_close(rpc);
	return r;
}

bool run_instance_has_job(const char *socket, const char *job, bool if_unknown)
{
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	int r = run_instance_status(socket, job, &reply);

	if (r == 0)
		return ((const Shardd__V1__GetStatusResponse *)reply)->n_jobs > 0;
	return r == -SHARDD_NOT_FOUND ? false : if_unknown;
}

bool run_instance_ask(const char *socket, char ret[RUN_INSTANCE_MAX], uint64_t *ret_started)
{
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	const Shardd__V1__GetStatusResponse *s;
	int r = run_instance_status(socket, "", &reply);

	s = (const Shardd__V1__GetStatusResponse *)reply;
	if (r < 0 || strlen(s->instance) + 1 != RUN_INSTANCE_MAX)
		return false;
	snprintf(ret, RUN_INSTANCE_MAX, "%s", s->instance);
	*ret_started = s->started_unix_s;
	return true;
}

bool run_instance_lost(const char *socket, const char *known, const char *job)
{
	char now[RUN_INSTANCE_MAX], when[32] = "?";
	uint64_t started;
	time_t at;
	struct tm tm;

	if (!*known || !run_instance_ask(socket, now, &started) || strcmp(now, known) == 0)
		return false;
	at = (time_t)started;
	if (gmtime_r(&at, &tm))
		strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S UTC", &tm);
	fprintf(stderr,
		"shardctl: DATA_LOSS: the daemon was restarted at %s: the state of job '%s' is "
		"gone; "
		"restore a checkpoint, or start the whole run again from step 0. If other nodes "
		"have copies of it (replicas: 1), start the ranks here with SHARDD_INSTANCE=any\n",
		when, job);
	return true;
}
