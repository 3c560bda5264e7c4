#include "link.h"

#include <stdlib.h>
#include <string.h>

#include "client_error.h"
#include "core/cleanup.h"
#include "env.h"
#include "methods.h"
#include "shardd.pb-c.h"

#define PROTOCOL 1u
/* How often a call looks whether it is to give up. */
#define LINK_SLICE_MS 50

struct link *link_free(struct link *l)
{
	if (!l)
		return NULL;
	if (l->rpc)
		rpc_client_stop_serving(l->rpc); /* it pokes the ring */
	ring_close(l->ring);
	channel_deinit(&l->channel);
	rpc_client_close(l->rpc);
	free(l->version);
	free(l);
	return NULL;
}

static void link_freep(struct link **l)
{
	*l = link_free(*l);
}

/* As rpc_client_call, until the client is closed. */
static int link_call_attach(struct link *l, const struct link_plan *plan,
			    const ProtobufCMessage *request, uint32_t ms, ProtobufCMessage **ret,
			    struct shardd_error *err)
{
	struct rpc_pending *p;
	bool ended = false;
	int r = rpc_client_start(l->rpc, METHOD_Attach, request,
				 &shardd__v1__attach_response__descriptor, false, ms, &p, err);

	if (r < 0)
		return r;
	while (!ended && !(plan->stop && atomic_load(plan->stop)))
		ended = rpc_pending_wait(p, LINK_SLICE_MS);
	r = ended ? rpc_pending_result(p, ret, err)
		  : error_set(err, SHARDD_CANCELLED, NULL, "the client is being closed");
	rpc_pending_free(p);
	return r;
}

static int link_take(struct link *l, const Shardd__V1__AttachResponse *a, struct shardd_error *err)
{
	if (a->protocol != PROTOCOL || a->token.len != SHD1_TOKEN_BYTES)
		return error_set(err, SHARDD_UNIMPLEMENTED, NULL,
				 "daemon %s speaks protocol %u, this library %u", a->version,
				 a->protocol, PROTOCOL);
	l->session = a->session;
	l->max_ops = a->max_inflight_ops;
	l->max_message = a->max_message_bytes;
	l->started_unix_s = a->started_unix_s;
	l->outlives = a->outlives;
	if (a->instance.len == EXPECT_BYTES)
		memcpy(l->instance, a->instance.data, EXPECT_BYTES);
	l->version = strdup(a->version);
	return l->version ? 0 : error_memory(err);
}

static int link_attach(struct link *l, const struct link_plan *plan, uint32_t ms,
		       struct shardd_error *err)
{
	Shardd__V1__AttachRequest request = SHARDD__V1__ATTACH_REQUEST__INIT;
	Shardd__V1__AttachResponse *a;
	ProtobufCMessage *reply = NULL;
	int r;

	request.client_name = (char *)plan->name;
	request.protocol = PROTOCOL;
	r = link_call_attach(l, plan, &request.base, ms, &reply, err);
	if (r < 0)
		return r;
	a = (Shardd__V1__AttachResponse *)reply;
	r = link_take(l, a, err);
	if (r == 0 && plan->local)
		r = channel_open(&l->channel, plan->path, a->token.data, a->session, err);
	if (r == 0 && plan->local && a->ring == RING_VERSION && !env_no_ring())
		r = ring_open(&l->channel, plan->path, &l->ring, err);
	if (r < 0 && l->channel.forwarded) {
		r = 0; /* all calls go over gRPC, and nothing is mapped */
		l->forwarded = true;
		l->outlives = true; /* the connection may end without the daemon */
	}
	protobuf_c_message_free_unpacked(reply, NULL);
	return r;
}

int link_open(const struct link_plan *plan, uint32_t connect_ms, uint32_t attach_ms,
	      struct link **ret, struct shardd_error *err)
{
	_cleanup_(link_freep) struct link *l = calloc(1, sizeof(*l));
	int r;

	if (!l)
		return error_memory(err);
	channel_init(&l->channel);
	r = rpc_client_connect(plan->path, connect_ms, &l->rpc, err);
	if (r == 0)
		r = link_attach(l, plan, attach_ms, err);
	if (r < 0)
		return r;
	*ret = STEAL_PTR(l);
	return 0;
}
