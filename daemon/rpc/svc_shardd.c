/* The method tables, Attach and Watch. */
#include "rpc/svc_shardd.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "op/op_util.h"
#include "ring_abi.h"
#include "rpc/codec.h"
#include "rpc/svc_shardd_impl.h"
#include "rpc/unit_spec.h"

struct session *svc_session(struct rpc_call *call)
{
	struct conn *c = rpc_call_conn(call);
	struct session *s = c ? conn_user(c) : NULL;
	struct fault f = FAULT_NULL;

	if (s) {
		session_catch_up(s);
		return s;
	}
	fault_set(&f, FAULT_STATE, NULL, "there is no session on this connection: call Attach");
	rpc_call_fail(call, &f);
	return NULL;
}

struct member *svc_member(struct rpc_call *call)
{
	struct session *s = svc_session(call);
	struct fault f = FAULT_NULL;
	struct member *m;

	if (!s)
		return NULL;
	m = session_member(s, &f);
	if (!m)
		rpc_call_fail(call, &f);
	return m;
}

static int svc_shardd_check_attach(const Shardd__V1__AttachRequest *r, struct fault *f)
{
	if (*r->client_name && unit_spec_name(r->client_name, SESSION_NAME_MAX, "client_name", f))
		return f->code;
	if (r->protocol < 1)
		return fault_set(f, FAULT_INVALID, "protocol",
				 "protocol is %u; it must be 1 or more", r->protocol);
	return 0;
}

static void svc_shardd_attach(struct rpc_call *call, const ProtobufCMessage *request,
			      void *userdata)
{
	const Shardd__V1__AttachRequest *r = (const Shardd__V1__AttachRequest *)request;
	struct svc_shardd *svc = userdata;
	Shardd__V1__AttachResponse reply = SHARDD__V1__ATTACH_RESPONSE__INIT;
	struct conn *c = rpc_call_conn(call);
	struct session *s = NULL;
	struct fault f = FAULT_NULL;

	if (!c)
		fault_set(&f, FAULT_CANCELLED, NULL, "the connection is closed");
	if (f.code || svc_shardd_check_attach(r, &f) ||
	    session_new(svc->sessions, c, r->client_name, &s, &f)) {
		svc_refuse(call, "attach", "", &f);
		return;
	}
	reply.session = s->id;
	reply.token = (ProtobufCBinaryData){ .len = sizeof(s->token), .data = s->token };
	reply.protocol = 1;
	reply.version = (char *)SHARDD_VERSION;
	reply.max_message_bytes = svc->max_message_bytes;
	reply.ring = svc->sessions->rings ? RING_VERSION : 0;
	reply.instance = (ProtobufCBinaryData){ NODE_INSTANCE_BYTES, svc->jobs->node->instance };
	reply.started_unix_s = svc->jobs->node->started_unix_s;
	reply.max_inflight_ops = svc->jobs->node->limits.max_inflight_ops;
	reply.outlives = svc->jobs->journal && !svc->jobs->keeper_lost;
	rpc_call_reply(call, &reply.base);
}

/* ----------------------------------------------------------------- Watch */

struct watch {
	struct session_watch sw;
	struct rpc_call *call;
};

static void svc_shardd_watch_free(struct watch *w)
{
	list_unlink(&w->sw.link);
	rpc_call_on_cancelled(w->call, NULL, NULL);
	free(w);
}

static void svc_shardd_send_event(struct watch *w, Shardd__V1__WatchResponse__Kind kind,
				  uint64_t epoch, const char *text)
{
	Shardd__V1__WatchResponse e = SHARDD__V1__WATCH_RESPONSE__INIT;
	struct rpc_call *call = w->call;
	struct fault f = FAULT_NULL;
	char clean[sizeof(f.text)]; /* names in it may have been cut inside a character */

	snprintf(clean, sizeof(clean), "%s", text);
	codec_clean_text(clean);
	e.kind = kind;
	e.epoch = epoch;
	e.text = clean;
	if (rpc_call_send(call, &e.base) == 0)
		return;
	svc_shardd_watch_free(w);
	fault_set(&f, FAULT_EXHAUSTED, NULL, "this watcher does not read its events");
	rpc_call_fail(call, &f);
}

static void svc_shardd_on_event(struct session_watch *sw, enum job_event_kind kind, uint64_t epoch,
				const char *text)
{
	static const Shardd__V1__WatchResponse__Kind kinds[] = {
		[JOB_EVENT_EPOCH_ENDED] = SHARDD__V1__WATCH_RESPONSE__KIND__KIND_EPOCH_ENDED,
		[JOB_EVENT_STALL] = SHARDD__V1__WATCH_RESPONSE__KIND__KIND_STALL,
		[JOB_EVENT_STALL_ENDED] = SHARDD__V1__WATCH_RESPONSE__KIND__KIND_STALL_ENDED,
		[JOB_EVENT_DRAIN] = SHARDD__V1__WATCH_RESPONSE__KIND__KIND_DRAIN,
	};

	svc_shardd_send_event(CONTAINER_OF(sw, struct watch, sw), kinds[kind], epoch, text);
}

static void svc_shardd_on_session_ended(struct session_watch *sw)
{
	struct watch *w = CONTAINER_OF(sw, struct watch, sw);
	struct rpc_call *call = w->call;

	svc_shardd_watch_free(w);
	rpc_call_end(call);
}

static void svc_shardd_on_watch_cancelled(struct rpc_call *call, void *userdata)
{
	svc_shardd_watch_free(userdata);
	rpc_call_end(call);
}

static void svc_shardd_watch(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	struct session *s = svc_session(call);
	struct watch *w;
	struct fault f = FAULT_NULL;

	(void)request;
	(void)userdata;
	if (!s)
		return;
	w = calloc(1, sizeof(*w));
	if (w)
		list_init(&w->sw.link);
	else
		fault_errno(&f, -ENOMEM, "setting a watch");
	if (f.code || session_watch_add(s, &w->sw, &f)) {
		free(w);
		rpc_call_fail(call, &f);
		return;
	}
	w->call = call;
	w->sw.fn = svc_shardd_on_event;
	w->sw.ended = svc_shardd_on_session_ended;
	rpc_call_on_cancelled(call, svc_shardd_on_watch_cancelled, w);
	svc_shardd_send_event(w, SHARDD__V1__WATCH_RESPONSE__KIND__KIND_HELLO,
			      s->member ? s->member->epoch : 0, "");
}

/* The methods that are not ops. */
static const struct rpc_method svc_shardd_calls[] = {
	{ "Attach", svc_shardd_attach, false, false },
	{ "Watch", svc_shardd_watch, true, false },
	{ "ShareEvents", svc_share_events, false, false },
	{ "CreateJob", svc_create_job, false, false },
	{ "DeleteJob", svc_delete_job, false, false },
	{ "DrainJob", svc_drain_job, false, false },
	{ "Checkpoint", svc_checkpoint, false, false },
	{ "LoadCheckpoint", svc_load_checkpoint, false, false },
	{ "SetCheckpoints", svc_set_checkpoints, false, false },
	{ "ResizeJob", svc_resize_job, false, false },
	{ "ReadBase", svc_read_base, false, false },
	{ "Join", svc_join, false, false },
	{ "Leave", svc_leave, false, false },
	{ "CreateGroup", svc_create_group, false, false },
	{ "RegisterUnits", svc_register, false, true },
	{ "DeclarePublication", svc_declare_publication, false, false },
	{ "DropPublication", svc_drop_publication, false, false },
	{ "PublishGeneration", svc_publish_generation, false, false },
	{ "AcquireGeneration", svc_acquire_generation, false, false },
	{ "DescribeGeneration", svc_describe_generation, false, false },
	{ "ReleaseGeneration", svc_release_generation, false, false },
	{ "OpenReader", svc_open_reader, false, false },
	{ "CloseReader", svc_close_reader, false, false },
	{ "StreamGeneration", svc_stream_generation, true, false },
	{ "ListPublications", svc_list_publications, false, false },
};

static struct rpc_method svc_shardd_method(const char *name)
{
	for (size_t i = 0; i < ARRAY_SIZE(svc_shardd_calls); i++)
		if (strcmp(svc_shardd_calls[i].name, name) == 0)
			return svc_shardd_calls[i];
	CHECK(op_type_by_name(name));
	return (struct rpc_method){ .name = name, .fn = svc_op };
}

/* The methods of each service, as the .proto lists them. */
static void svc_shardd_fill(struct svc_shardd *svc)
{
	static const ProtobufCServiceDescriptor *const services[SVC_SHARDD_SERVICES] = {
		&shardd__v1__session_service__descriptor,
		&shardd__v1__job_service__descriptor,
		&shardd__v1__unit_service__descriptor,
		&shardd__v1__training_service__descriptor,
		&shardd__v1__ddp_service__descriptor,
		&shardd__v1__publication_service__descriptor,
	};
	struct rpc_method *next = svc->methods;

	for (unsigned i = 0; i < SVC_SHARDD_SERVICES; i++) {
		svc->services[i] = (struct rpc_service){ services[i], next, svc };
		CHECK(next + services[i]->n_methods < svc->methods + ARRAY_SIZE(svc->methods));
		for (unsigned k = 0; k < services[i]->n_methods; k++)
			*next++ = svc_shardd_method(services[i]->methods[k].name);
		next++; /* its NULL */
	}
}

void svc_shardd_init(struct svc_shardd *svc, struct sessions *sessions, struct jobs *jobs,
		     struct slices *slices, struct status_turns *turns, uint64_t max_message_bytes)
{
	*svc = (struct svc_shardd){
		.sessions = sessions,
		.jobs = jobs,
		.slices = slices,
		.turns = turns,
		.max_message_bytes = max_message_bytes,
	};
	svc_shardd_fill(svc);
}
