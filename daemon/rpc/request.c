/* Turns core's event into a call for the loop: on the queue's thread, sometimes in batch_start
 * (call.c). */
#include <errno.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "rpc/rpc_server_impl.h"

/* All of the request in one piece. */
static enum refusal request_take_payload(struct rpc_call *call)
{
	grpc_byte_buffer_reader reader;

	if (!call->core.payload)
		return REFUSAL_EMPTY;
	if (call->core.payload->data.raw.compression != GRPC_COMPRESS_NONE)
		return REFUSAL_COMPRESSED;
	if (!grpc_byte_buffer_reader_init(&reader, call->core.payload))
		return REFUSAL_MALFORMED;
	call->packed = grpc_byte_buffer_reader_readall(&reader);
	call->held = GRPC_SLICE_LENGTH(call->packed);
	grpc_byte_buffer_reader_destroy(&reader);
	grpc_byte_buffer_destroy(call->core.payload);
	call->core.payload = NULL;
	return REFUSAL_NONE;
}

/* Into the call's own memory. */
static enum refusal request_unpack(struct rpc_call *call)
{
	size_t bytes = GRPC_SLICE_LENGTH(call->packed);
	int r = codec_unpack(&call->request, call->slot->input, GRPC_SLICE_START_PTR(call->packed),
			     bytes, codec_budget(bytes));

	if (r == CODEC_E_BUDGET)
		return REFUSAL_BUDGET;
	return r ? REFUSAL_MALFORMED : REFUSAL_NONE;
}

static enum refusal request_take_request(struct rpc_call *call)
{
	enum refusal r = request_take_payload(call);

	if (r || call->slot->method->packed)
		return r;
	r = request_unpack(call);
	grpc_slice_unref(call->packed);
	call->packed = grpc_empty_slice();
	call->held = call->request.used;
	return r;
}

const ProtobufCMessage *rpc_call_unpack(struct rpc_call *call)
{
	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(call->slot->method->packed && !call->request.msg);
	call->refusal = request_unpack(call);
	return call->request.msg;
}

void rpc_call_drop(struct rpc_call *call)
{
	codec_message_deinit(&call->request);
}

/* Core names a connection that it was given by "fd:" and the number. */
static int request_peer_fd(grpc_call *core)
{
	char *name = grpc_call_get_peer(core);
	int fd;

	if (!name || sscanf(name, "fd:%d", &fd) != 1)
		fd = -1;
	gpr_free(name);
	return fd;
}

/* Computed from the remaining time, so that it is right with a stepped clock, too. */
static uint64_t request_deadline_us(gpr_timespec deadline)
{
	gpr_timespec left;
	double us;

	if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0)
		return 0;
	left = gpr_time_sub(deadline, gpr_now(deadline.clock_type));
	us = gpr_timespec_to_micros(left);
	if (us > 1e15) /* 30 years */
		return 0;
	return clock_now_us() + (us > 0 ? (uint64_t)us : 0) + 1;
}

static void request_copy_method(struct rpc_call *call)
{
	size_t n = GRPC_SLICE_LENGTH(call->core.details.method);

	if (n >= sizeof(call->unknown_method))
		n = sizeof(call->unknown_method) - 1;
	memcpy(call->unknown_method, GRPC_SLICE_START_PTR(call->core.details.method), n);
	call->unknown_method[n] = '\0';
	codec_clean_text(call->unknown_method);
	call->core.deadline = call->core.details.deadline;
	call->refusal = REFUSAL_METHOD;
}

static void request_on_request(struct tag *tag, bool ok)
{
	struct rpc_call *call = CONTAINER_OF(tag, struct rpc_call, request_tag);
	struct slot *slot = call->slot;

	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(slot->n_armed > 0);
	slot->n_armed--;
	if (!ok) { /* core shuts down */
		call_unref(call);
		return;
	}
	if (slot->method)
		call->refusal = request_take_request(call);
	else
		request_copy_method(call);
	if (call->refusal == REFUSAL_EMPTY || call->refusal == REFUSAL_METHOD) {
		call_refuse_early(call);
	} else {
		call->fd = request_peer_fd(call->core.call);
		call->deadline_us = request_deadline_us(call->core.deadline);
		loopq_post(slot->server->loopq, &call->arrived, call_arrived);
	}
	call_arm(slot); /* no memory: the next turn of the thread tries again */
}

/* Core gives no message at the end of the stream, and if the call is cancelled. */
void call_on_next_tag(struct tag *tag, bool ok)
{
	struct rpc_call *call = CONTAINER_OF(tag, struct rpc_call, next.tag);

	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	call->refusal = ok ? request_take_request(call) : REFUSAL_EMPTY;
	loopq_post(call->server->loopq, &call->next.work, call_next_arrived);
}

static struct rpc_call *request_call_new(struct slot *slot)
{
	struct rpc_call *call = calloc(1, sizeof(*call));

	if (!call)
		return NULL;
	call->magic = RPC_CALL_MAGIC;
	atomic_init(&call->refs, 1);
	call->server = slot->server;
	call->slot = slot;
	call->fd = -1;
	grpc_metadata_array_init(&call->core.metadata);
	grpc_call_details_init(&call->core.details);
	call->status.text = grpc_empty_slice();
	call->packed = grpc_empty_slice();
	list_init(&call->link);
	list_init(&call->out.messages);
	call->request_tag.fn = request_on_request;
	call_tags_init(call);
	atomic_fetch_add(&slot->server->n_live, 1);
	return call;
}

static void request(struct rpc_call *call)
{
	struct slot *slot = call->slot;
	struct rpc_server *s = call->server;
	grpc_call_error e;

	if (slot->method)
		e = grpc_server_request_registered_call(s->core, slot->registered, &call->core.call,
							&call->core.deadline, &call->core.metadata,
							&call->core.payload, s->cq, s->cq,
							&call->request_tag);
	else
		e = grpc_server_request_call(s->core, &call->core.call, &call->core.details,
					     &call->core.metadata, s->cq, s->cq,
					     &call->request_tag);
	CHECK(e == GRPC_CALL_OK);
}

/* Core checks whether it is shutting down before it queues a request, and not again. A request that
 * is queued while the shutdown empties the queue is never answered, and the stop never ends. So the
 * two exclude each other. */
int call_arm(struct slot *slot)
{
	struct rpc_server *s = slot->server;
	struct rpc_call *call = request_call_new(slot);
	bool stopping;

	if (!call)
		return -ENOMEM;
	slot->n_armed++;
	pthread_mutex_lock(&s->arm_lock);
	stopping = s->stopping;
	if (!stopping)
		request(call);
	pthread_mutex_unlock(&s->arm_lock);
	if (!stopping)
		return 0;
	slot->n_armed--;
	call_unref(call);
	return -ESHUTDOWN;
}
