/* What the daemon says of itself and of jobs, for a program that asks. */
#include "status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "client.h"
#include "client_error.h"
#include "core/cleanup.h"
#include "json/json.h"
#include "json/status_json.h"
#include "rpc_client.h"
#include "status.pb-c.h"

/* The daemon asks other nodes, for a second at most. */
#define STATUS_BLAME_MS 2000u

static int status_as_text(const Shardd__V1__GetStatusResponse *s, char **ret,
			  struct shardd_error *err)
{
	_cleanup_(json_freep) json_t *j = status_json_status(s);
	char *text = j ? json_dumps(j, JSON_COMPACT) : NULL;
	if (!text)
		return error_memory(err);
	*ret = text;
	return 0;
}

int shardd_status(shardd_client *c, const char *job, char **ret, struct shardd_error *err)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	struct shardd_error scratch;
	int r;

	err = err ? err : &scratch;
	r = client_check(c, err);
	if (r == 0 && !ret)
		r = error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL");
	if (r < 0)
		return r;
	if (job)
		request.job = (char *)job;
	request.with_units = true;
	r = call_again(c, "/shardd.v1.StatusService/GetStatus", &request.base,
		       &shardd__v1__get_status_response__descriptor, &reply, err);
	return r < 0 ? r : status_as_text((const Shardd__V1__GetStatusResponse *)reply, ret, err);
}

/* ---------------------------------------------------------------------- blame */

/* The job that @c has joined: a copy of its name. Return: 0 or a negative shardd_code. */
static int status_job(struct shardd_client *c, char **ret, struct shardd_error *err)
{
	bool joined;

	pthread_mutex_lock(&c->reconnect.lock);
	joined = c->job;
	*ret = joined ? strdup(c->job) : NULL;
	pthread_mutex_unlock(&c->reconnect.lock);
	if (!joined)
		return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
				 "this client has joined no job");
	return *ret ? 0 : error_memory(err);
}

int status_blame(struct shardd_client *c, uint64_t left_ms, char *ret, size_t bytes,
		 struct shardd_error *err)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	_cleanup_(freep) char *job = NULL;
	const Shardd__V1__GetStatusResponse *s;
	struct link *l;
	int r;

	ret[0] = '\0';
	r = status_job(c, &job, err);
	if (r < 0)
		return r;
	request.job = job;
	request.with_nodes = true;
	l = client_use_link(c);
	r = rpc_client_call(l->rpc, "/shardd.v1.StatusService/GetStatus", &request.base,
			    &shardd__v1__get_status_response__descriptor,
			    left_ms < STATUS_BLAME_MS ? (uint32_t)left_ms : STATUS_BLAME_MS, &reply,
			    err);
	client_unuse_link(c, l);
	if (r < 0)
		return r;
	s = (const Shardd__V1__GetStatusResponse *)reply;
	if (s->n_jobs == 1 && s->jobs[0]->n_blame)
		snprintf(ret, bytes, "%s", s->jobs[0]->blame[0]->text);
	return 0;
}

int shardd_blame(shardd_client *c, char *ret, size_t bytes, struct shardd_error *err)
{
	struct shardd_error scratch;
	int r;

	err = err ? err : &scratch;
	r = client_check(c, err);
	if (r == 0 && (!ret || !bytes))
		r = error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL or has no bytes");
	return r < 0 ? r : status_blame(c, STATUS_BLAME_MS, ret, bytes, err);
}
