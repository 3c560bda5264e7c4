/* shardctl health: for probes and scripts. */
#include <stdio.h>

#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "json/status_json.h"
#include "health.pb-c.h"

/* Jobs that stall: a line for each. They say nothing about the daemon, so the exit code is not theirs. */
static void health_print_stalls(struct ctl *ctl, const Shardd__V1__GetStatusResponse *s)
{
	for (size_t i = 0; i < s->n_jobs; i++) {
		const Shardd__V1__JobStatus *j = s->jobs[i];
		char job[CTL_JOB_MAX];

		if (!j->stall)
			continue;
		ctl_job_text(j->uid, j->name, job);
		ctl_print_sentence(ctl, 0, "STALLED job %s: %s", job, j->stall->text);
	}
}

static json_t *health_json(const ProtobufCMessage *health, const Shardd__V1__GetStatusResponse *s)
{
	/* null: not known, which is not the same as none */
	json_t *out = json_from_message(health), *stalls = s ? status_json_stalls(s) : json_null();

	if (out)
		json_object_set_new(out, "stalls", stalls);
	else
		json_decref(stalls);
	return out;
}

static void health_print_state(const Grpc__Health__V1__HealthCheckResponse *h)
{
	const ProtobufCEnumValue *name = protobuf_c_enum_descriptor_get_value(
		&grpc__health__v1__health_check_response__serving_status__descriptor,
		(int)h->status);

	puts(name ? name->name : "UNKNOWN");
	fflush(stdout);
}

/* Of this node alone, and not for longer than a probe waits. */
static void health_get_stalls(struct ctl *ctl, Shardd__V1__GetStatusResponse **ret)
{
	Shardd__V1__GetStatusRequest all = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	ProtobufCMessage *reply = NULL;

	if (ctl_call_soon(ctl, "/shardd.v1.StatusService/GetStatus", &all.base,
			  &shardd__v1__get_status_response__descriptor, &reply) == CTL_OK)
		*ret = (Shardd__V1__GetStatusResponse *)reply;
	else
		fputs("shardctl: which jobs stall is not known\n", stderr);
}

int ctl_health(struct ctl *ctl, int argc, char **argv)
{
	_cleanup_(ctl_status_freep) Shardd__V1__GetStatusResponse *s = NULL;
	Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	const Grpc__Health__V1__HealthCheckResponse *h;
	int r = ctl_no_arguments(argc, argv);

	if (r == CTL_OK)
		r = ctl_call(ctl, "/grpc.health.v1.Health/Check", &request.base,
			     &grpc__health__v1__health_check_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	h = (const Grpc__Health__V1__HealthCheckResponse *)reply;
	if (!ctl->json)
		health_print_state(h);
	health_get_stalls(ctl, &s);
	if (ctl->json)
		r = ctl_print_json(health_json(reply, s));
	else if (s)
		health_print_stalls(ctl, s);
	if (h->status != GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING)
		return CTL_FAILED;
	return r;
}
