/* Calls: a unary one is one batch; a stream has one for each message. */
#include <errno.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client_error.h"
#include "rpc_client_impl.h"

/* ------------------------------------------------- events, lock held */

static bool rpc_pending_was_answered(const struct rpc_pending *p)
{
	return p->status != GRPC_STATUS_UNAVAILABLE || p->trailing.count > 0;
}

static void rpc_pending_on_status(struct rpc_pending *p)
{
	p->done = true;
	if (rpc_pending_was_answered(p))
		p->c->answered = true;
}

static void rpc_pending_on_headers(struct rpc_pending *p)
{
	(void)p; /* a stream's request is out; what counts comes with other events */
}

static void rpc_pending_on_message(struct rpc_pending *p)
{
	p->message_ready = true;
}

static bool rpc_pending_has_ended(const struct rpc_pending *p)
{
	return p->done && p->n_open == 0;
}

static bool rpc_pending_has_news(const struct rpc_pending *p)
{
	return p->message_ready || rpc_pending_has_ended(p);
}

/* ---------------------------------------------------------------- start */

static grpc_byte_buffer *rpc_pending_pack(const ProtobufCMessage *message)
{
	size_t bytes = protobuf_c_message_get_packed_size(message);
	grpc_slice slice = grpc_slice_malloc(bytes);
	grpc_byte_buffer *buffer;

	protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
	buffer = grpc_raw_byte_buffer_create(&slice, 1);
	grpc_slice_unref(slice);
	return buffer;
}

static size_t rpc_pending_add_request(grpc_op *ops, struct rpc_pending *p,
				      grpc_byte_buffer *request)
{
	ops[0] = (grpc_op){ .op = GRPC_OP_SEND_INITIAL_METADATA };
	ops[1] = (grpc_op){ .op = GRPC_OP_SEND_MESSAGE };
	ops[1].data.send_message.send_message = request;
	ops[2] = (grpc_op){ .op = GRPC_OP_SEND_CLOSE_FROM_CLIENT };
	ops[3] = (grpc_op){ .op = GRPC_OP_RECV_INITIAL_METADATA };
	ops[3].data.recv_initial_metadata.recv_initial_metadata = &p->initial;
	return 4;
}

static grpc_op rpc_pending_message_op(struct rpc_pending *p)
{
	grpc_op op = { .op = GRPC_OP_RECV_MESSAGE };

	op.data.recv_message.recv_message = &p->incoming;
	return op;
}

static grpc_op rpc_pending_status_op(struct rpc_pending *p)
{
	grpc_op op = { .op = GRPC_OP_RECV_STATUS_ON_CLIENT };

	op.data.recv_status_on_client.trailing_metadata = &p->trailing;
	op.data.recv_status_on_client.status = &p->status;
	op.data.recv_status_on_client.status_details = &p->status_text;
	return op;
}

static grpc_call_error rpc_pending_start_batch(struct rpc_pending *p, const grpc_op *ops, size_t n,
					       struct event *event)
{
	grpc_call_error e;

	p->n_open++;
	p->c->n_open++;
	e = grpc_call_start_batch(p->call, ops, n, event, NULL);
	if (e != GRPC_CALL_OK) {
		p->n_open--;
		p->c->n_open--;
	}
	return e;
}

/* All that a call begins with. Lock held. */
static grpc_call_error rpc_pending_start_batches(struct rpc_pending *p, grpc_byte_buffer *request)
{
	grpc_op ops[6], op;
	size_t n = rpc_pending_add_request(ops, p, request);
	grpc_call_error e;

	if (!p->streaming) {
		ops[n++] = rpc_pending_message_op(p);
		ops[n++] = rpc_pending_status_op(p);
		return rpc_pending_start_batch(p, ops, n, &p->main_event);
	}
	e = rpc_pending_start_batch(p, ops, n, &p->main_event);
	if (e)
		return e;
	op = rpc_pending_message_op(p);
	e = rpc_pending_start_batch(p, &op, 1, &p->message_event);
	if (e)
		return e;
	op = rpc_pending_status_op(p);
	return rpc_pending_start_batch(p, &op, 1, &p->status_event);
}

static struct rpc_pending *rpc_pending_new(struct rpc_client *c, const char *method,
					   const ProtobufCMessageDescriptor *reply, bool streaming,
					   uint32_t timeout_ms)
{
	struct rpc_pending *p = calloc(1, sizeof(*p));

	if (!p)
		return NULL;
	p->c = c;
	p->reply = reply;
	p->streaming = streaming;
	p->timeout_ms = timeout_ms;
	snprintf(p->method, sizeof(p->method), "%s", method);
	p->main_event =
		(struct event){ streaming ? rpc_pending_on_headers : rpc_pending_on_status, p };
	p->message_event = (struct event){ rpc_pending_on_message, p };
	p->status_event = (struct event){ rpc_pending_on_status, p };
	grpc_metadata_array_init(&p->initial);
	grpc_metadata_array_init(&p->trailing);
	p->status_text = grpc_empty_slice();
	return p;
}

static grpc_call *rpc_pending_core_call(struct rpc_pending *p)
{
	grpc_slice method = grpc_slice_from_copied_string(p->method);
	struct deadline d = { .never = p->timeout_ms == 0 };
	grpc_call *call;

	if (!d.never)
		d = deadline_in((int)(p->timeout_ms > INT32_MAX ? INT32_MAX : p->timeout_ms));
	call = grpc_channel_create_call(p->c->channel, NULL, GRPC_PROPAGATE_DEFAULTS, p->c->cq,
					method, NULL, deadline_gpr(d), NULL);
	grpc_slice_unref(method);
	return call;
}

/* @p: of pending_new, or NULL. @bytes is consumed. */
static int rpc_pending_start_pending(struct rpc_pending *p, grpc_byte_buffer *bytes,
				     struct rpc_pending **ret, struct shardd_error *err)
{
	struct rpc_client *c = p ? p->c : NULL;
	grpc_call_error e;
	int r;

	if (!p) {
		grpc_byte_buffer_destroy(bytes);
		return error_memory(err);
	}
	p->call = rpc_pending_core_call(p);
	pthread_mutex_lock(&c->lock);
	client_link(c, p);
	e = rpc_pending_start_batches(p, bytes);
	client_started(c);
	pthread_mutex_unlock(&c->lock);
	grpc_byte_buffer_destroy(bytes);
	if (e != GRPC_CALL_OK) {
		r = error_set(err, SHARDD_INTERNAL, NULL, "%s could not be started: %s", p->method,
			      grpc_call_error_to_string(e));
		rpc_pending_free(p);
		return r;
	}
	*ret = p;
	return 0;
}

int rpc_client_start(struct rpc_client *c, const char *method, const ProtobufCMessage *request,
		     const ProtobufCMessageDescriptor *reply, bool streaming, uint32_t timeout_ms,
		     struct rpc_pending **ret, struct shardd_error *err)
{
	return rpc_pending_start_pending(rpc_pending_new(c, method, reply, streaming, timeout_ms),
					 rpc_pending_pack(request), ret, err);
}

/* ------------------------------------------------------------- outcome */

bool rpc_pending_wait(struct rpc_pending *p, int timeout_ms)
{
	struct rpc_client *c = p->c;
	bool ended;

	if (!c)
		return true;
	pthread_mutex_lock(&c->lock);
	client_drive(c, p, rpc_pending_has_ended, deadline_in(timeout_ms));
	ended = rpc_pending_has_ended(p);
	pthread_mutex_unlock(&c->lock);
	return ended;
}

bool rpc_pending_is_lost(const struct rpc_pending *p)
{
	bool lost;

	if (!p->c)
		return true;
	pthread_mutex_lock(&p->c->lock);
	lost = rpc_pending_has_ended(p) && !rpc_pending_was_answered(p);
	pthread_mutex_unlock(&p->c->lock);
	return lost;
}

bool rpc_pending_wait_any(struct rpc_pending *const *p, size_t n, int timeout_ms)
{
	struct rpc_client *c = p[0]->c;
	bool ended = false;

	pthread_mutex_lock(&c->lock);
	client_drive_any(c, p, n, rpc_pending_has_ended, deadline_in(timeout_ms));
	for (size_t i = 0; i < n && !ended; i++)
		ended = rpc_pending_has_ended(p[i]);
	pthread_mutex_unlock(&c->lock);
	return ended;
}

/* Take the message that has come, in one piece: the caller's. */
static bool rpc_pending_take_bytes(struct rpc_pending *p, grpc_slice *ret)
{
	grpc_byte_buffer_reader reader;
	bool is = grpc_byte_buffer_reader_init(&reader, p->incoming);

	if (is) {
		*ret = grpc_byte_buffer_reader_readall(&reader);
		grpc_byte_buffer_reader_destroy(&reader);
	}
	grpc_byte_buffer_destroy(p->incoming);
	p->incoming = NULL;
	return is;
}

/* Return: NULL: it is not one of that type. */
static ProtobufCMessage *rpc_pending_take_message(struct rpc_pending *p)
{
	ProtobufCMessage *msg;
	grpc_slice bytes;

	if (!rpc_pending_take_bytes(p, &bytes))
		return NULL;
	msg = protobuf_c_message_unpack(p->reply, NULL, GRPC_SLICE_LENGTH(bytes),
					GRPC_SLICE_START_PTR(bytes));
	grpc_slice_unref(bytes);
	return msg;
}

static int rpc_pending_bad_message(const struct rpc_pending *p, struct shardd_error *err)
{
	return error_set(err, SHARDD_INTERNAL, NULL, "%s: the daemon's answer is not a valid %s",
			 p->method, p->reply->name);
}

int rpc_pending_result(struct rpc_pending *p, ProtobufCMessage **ret, struct shardd_error *err)
{
	ProtobufCMessage *msg;
	int r = pending_error(p, err);

	if (r)
		return r;
	msg = p->incoming ? rpc_pending_take_message(p) : NULL;
	if (!msg)
		return rpc_pending_bad_message(p, err);
	*ret = msg;
	return 0;
}

/* A message or the end of messages is there. Lock held. Return: as rpc_pending_next. */
static int rpc_pending_next_message(struct rpc_pending *p, ProtobufCMessage **ret,
				    struct shardd_error *err)
{
	grpc_op op = rpc_pending_message_op(p);
	ProtobufCMessage *msg = rpc_pending_take_message(p);

	p->message_ready = false;
	if (p->c && rpc_pending_start_batch(p, &op, 1, &p->message_event) != GRPC_CALL_OK)
		p->message_ready = true; /* with no message: the status is what is left */
	if (!msg)
		return rpc_pending_bad_message(p, err);
	*ret = msg;
	return 1;
}

static int rpc_pending_next_locked(struct rpc_pending *p, struct deadline d, ProtobufCMessage **ret,
				   struct shardd_error *err)
{
	int r;

	client_drive(p->c, p, rpc_pending_has_news, d);
	if (p->message_ready && p->incoming)
		return rpc_pending_next_message(p, ret, err);
	if (p->message_ready) /* no more of them: the status is on its way */
		client_drive(p->c, p, rpc_pending_has_ended, d);
	if (rpc_pending_has_ended(p))
		return pending_error(p, err);
	r = error_set(err, SHARDD_DEADLINE_EXCEEDED, NULL, "%s: no message yet", p->method);
	if (err)
		err->native = EAGAIN;
	return r;
}

int rpc_pending_next(struct rpc_pending *p, int timeout_ms, ProtobufCMessage **ret,
		     struct shardd_error *err)
{
	struct rpc_client *c = p->c;
	int r;

	if (!c)
		return p->incoming ? rpc_pending_next_message(p, ret, err) : pending_error(p, err);
	pthread_mutex_lock(&c->lock);
	r = rpc_pending_next_locked(p, deadline_in(timeout_ms), ret, err);
	pthread_mutex_unlock(&c->lock);
	return r;
}

void pending_destroy(struct rpc_pending *p)
{
	if (p->prev) {
		*p->prev = p->next;
		if (p->next)
			p->next->prev = p->prev;
	}
	if (p->call)
		grpc_call_unref(p->call);
	if (p->incoming)
		grpc_byte_buffer_destroy(p->incoming);
	grpc_metadata_array_destroy(&p->initial);
	grpc_metadata_array_destroy(&p->trailing);
	grpc_slice_unref(p->status_text);
	free(p);
}

void rpc_pending_free(struct rpc_pending *p)
{
	struct rpc_client *c;

	if (!p)
		return;
	c = p->c;
	if (!c) {
		pending_destroy(p);
		return;
	}
	pthread_mutex_lock(&c->lock);
	if (p->n_open == 0) {
		pending_destroy(p);
	} else {
		p->abandoned = true;
		grpc_call_cancel(p->call, NULL);
		client_poll(c);
	}
	pthread_mutex_unlock(&c->lock);
}

int rpc_client_call(struct rpc_client *c, const char *method, const ProtobufCMessage *request,
		    const ProtobufCMessageDescriptor *reply, uint32_t timeout_ms,
		    ProtobufCMessage **ret, struct shardd_error *err)
{
	struct rpc_pending *p;
	int r = rpc_client_start(c, method, request, reply, false, timeout_ms, &p, err);

	if (r)
		return r;
	rpc_pending_wait(p, -1);
	r = rpc_pending_result(p, ret, err);
	rpc_pending_free(p);
	return r;
}

static int rpc_pending_give_bytes(struct rpc_pending *p, rpc_reply_cb take, void *userdata,
				  struct shardd_error *err)
{
	int r = pending_error(p, err);
	grpc_slice bytes;

	if (r)
		return r;
	if (!p->incoming || !rpc_pending_take_bytes(p, &bytes))
		return rpc_pending_bad_message(p, err);
	r = take(GRPC_SLICE_START_PTR(bytes), GRPC_SLICE_LENGTH(bytes), userdata, err);
	grpc_slice_unref(bytes);
	return r == RPC_E_REPLY ? rpc_pending_bad_message(p, err) : r;
}

int rpc_client_call_packed(struct rpc_client *c, const char *method, const uint8_t *request,
			   size_t bytes, const ProtobufCMessageDescriptor *reply,
			   uint32_t timeout_ms, rpc_reply_cb take, void *userdata,
			   struct shardd_error *err)
{
	grpc_slice slice = grpc_slice_from_copied_buffer((const char *)request, bytes);
	grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
	struct rpc_pending *p;
	int r;

	grpc_slice_unref(slice);
	r = rpc_pending_start_pending(rpc_pending_new(c, method, reply, false, timeout_ms), buffer,
				      &p, err);
	if (r)
		return r;
	rpc_pending_wait(p, -1);
	r = rpc_pending_give_bytes(p, take, userdata, err);
	rpc_pending_free(p);
	return r;
}
