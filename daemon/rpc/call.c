/*
 * One call from its dispatch to its last batch.
 *
 * Core wants RECV_CLOSE_ON_SERVER once per call: its completion tells that the caller is gone. If a
 * handler answers at once, it is part of the same batch as the answer; else it is started when the
 * handler returns.
 */
#include <grpc/byte_buffer.h>
#include <grpc/slice.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "rpc/rpc_server_impl.h"
#include "rpc/status_map.h"

#define MAX_OPS 4

struct batch {
	grpc_op ops[MAX_OPS];
	size_t n;
};

static void call_outgoing_free(struct outgoing *o)
{
	list_unlink(&o->link);
	grpc_byte_buffer_destroy(o->buffer);
	free(o);
}

/* Drop waiting messages; the one being sent belongs to core until it is done. */
static void call_drop_outgoing(struct rpc_call *call)
{
	struct outgoing *o, *tmp;
	bool keep = call->out.sending;

	list_for_each (o, tmp, &call->out.messages, link) {
		if (keep) {
			keep = false;
			continue;
		}
		call_outgoing_free(o);
		call->out.n--;
	}
}

static void call_free(struct rpc_call *call)
{
	struct rpc_server *s = call->server;

	CHECK(list_empty(&call->link) && !call->out.sending);
	call_drop_outgoing(call);
	codec_message_deinit(&call->request);
	grpc_slice_unref(call->packed);
	if (call->core.payload)
		grpc_byte_buffer_destroy(call->core.payload);
	if (call->status.has_trailer) {
		grpc_slice_unref(call->status.trailer.key);
		grpc_slice_unref(call->status.trailer.value);
	}
	grpc_slice_unref(call->status.text);
	grpc_metadata_array_destroy(&call->core.metadata);
	grpc_call_details_destroy(&call->core.details);
	if (call->core.call)
		grpc_call_unref(call->core.call);
	call->magic = 0;
	free(call);
	if (atomic_fetch_sub(&s->n_live, 1) == 1)
		server_idle(s);
}

static void call_on_freed(struct work *work)
{
	struct rpc_call *call = CONTAINER_OF(work, struct rpc_call, freed);

	user_charge_deinit(&call->charge);
	call_free(call);
}

void call_unref(struct rpc_call *call)
{
	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	if (atomic_fetch_sub(&call->refs, 1) != 1)
		return;
	if (call->charge.user) /* accounts are the loop's */
		loopq_post(call->server->loopq, &call->freed, call_on_freed);
	else
		call_free(call);
}

/* Memory of the requests of @p's calls is charged to its user. */
static void call_peer_hold(struct peer *p, uint64_t bytes)
{
	struct user *u = conn_account(p->conn);

	p->held += bytes;
	if (u)
		user_add(u, USER_MEMORY, bytes);
}

void peer_let_go(struct peer *p, uint64_t bytes)
{
	struct user *u = conn_account(p->conn);

	CHECK(p->held >= bytes);
	p->held -= bytes;
	if (u)
		user_sub(u, USER_MEMORY, bytes);
}

static grpc_op *call_batch_add(struct batch *b, grpc_op_type type)
{
	CHECK(b->n < MAX_OPS);
	b->ops[b->n] = (grpc_op){ .op = type };
	return &b->ops[b->n++];
}

/*
 * The batch holds a reference until @tag's function has dropped it.
 *
 * Core writes an answer, and completes its batch, before it returns. One such event is kept back
 * for us (its tag may belong to another call), and is handled here. Otherwise core would wake the
 * queue's thread for it, at the moment when the caller wakes: a fifth of a round trip on two cores.
 */
static void call_batch_start(struct rpc_call *call, const struct batch *b, struct tag *tag)
{
	grpc_completion_queue *cq = call->server->cq;
	grpc_call_error e;
	void *event;
	int ok;

	atomic_fetch_add(&call->refs, 1);
	grpc_completion_queue_thread_local_cache_init(cq);
	e = grpc_call_start_batch(call->core.call, b->ops, b->n, tag, NULL);
	CHECK(e == GRPC_CALL_OK);
	if (grpc_completion_queue_thread_local_cache_flush(cq, &event, &ok))
		((struct tag *)event)->fn(event, ok != 0);
}

static void call_add_headers(struct rpc_call *call, struct batch *b)
{
	if (call->out.headers_sent)
		return;
	call->out.headers_sent = true;
	call_batch_add(b, GRPC_OP_SEND_INITIAL_METADATA);
}

static void call_add_close(struct rpc_call *call, struct batch *b)
{
	grpc_op *op = call_batch_add(b, GRPC_OP_RECV_CLOSE_ON_SERVER);

	op->data.recv_close_on_server.cancelled = &call->core.cancelled;
	call->close_posted = true;
}

static void call_add_status(struct rpc_call *call, struct batch *b)
{
	grpc_op *op = call_batch_add(b, GRPC_OP_SEND_STATUS_FROM_SERVER);

	op->data.send_status_from_server.status = (grpc_status_code)call->status.code;
	op->data.send_status_from_server.status_details = &call->status.text;
	if (call->status.has_trailer) {
		op->data.send_status_from_server.trailing_metadata = &call->status.trailer;
		op->data.send_status_from_server.trailing_metadata_count = 1;
	}
	call->out.status_sent = true;
	atomic_fetch_add(&call->server->n_answers, 1);
}

static void call_start_final(struct rpc_call *call)
{
	struct batch b = { .n = 0 };

	call_add_headers(call, &b);
	call_add_status(call, &b);
	if (!call->close_posted)
		call_add_close(call, &b);
	call_batch_start(call, &b, &call->final_tag);
}

static void call_start_message(struct rpc_call *call)
{
	struct outgoing *o = list_first(&call->out.messages, struct outgoing, link);
	struct batch b = { .n = 0 };

	call->out.sending = true;
	if (o->lent) {
		call_lend_start(call);
		return;
	}
	call_add_headers(call, &b);
	call_batch_add(&b, GRPC_OP_SEND_MESSAGE)->data.send_message.send_message = o->buffer;
	call_batch_start(call, &b, &call->sent_tag);
}

static void call_start_next(struct rpc_call *call)
{
	struct batch b = { .n = 0 };

	CHECK(!call->core.payload);
	call_batch_add(&b, GRPC_OP_RECV_MESSAGE)->data.recv_message.recv_message =
		&call->core.payload;
	call->next.running = true;
	call_batch_start(call, &b, &call->next.tag);
}

void call_pump(struct rpc_call *call)
{
	if (call->out.sending || call->out.status_sent || call->cancelled)
		return;
	if (!list_empty(&call->out.messages))
		call_start_message(call);
	else if (call->ended)
		call_start_final(call);
	else if (call->next.fn && !call->next.running)
		call_start_next(call);
}

/* --- completions: first on the thread (or in batch_start), then on the loop --- */

static void call_on_sent(struct work *work)
{
	struct rpc_call *call = CONTAINER_OF(work, struct rpc_call, sent);

	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(call->out.sending && call->out.n > 0);
	call->out.sending = false;
	call_outgoing_free(list_first(&call->out.messages, struct outgoing, link));
	call->out.n--;
	if (!call->out.sent_ok) { /* on_cancelled follows, or has been */
		call_drop_outgoing(call);
		call->cancelled = true;
	}
	call_pump(call);
	call_lend_told(call);
	call_unref(call);
}

static void call_on_sent_tag(struct tag *tag, bool ok)
{
	struct rpc_call *call = CONTAINER_OF(tag, struct rpc_call, sent_tag);

	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	call->out.sent_ok = ok;
	loopq_post(call->server->loopq, &call->sent, call_on_sent);
}

static void call_on_cancelled(struct work *work)
{
	struct rpc_call *call = CONTAINER_OF(work, struct rpc_call, closed);
	rpc_cancelled_cb fn = call->cancelled_fn;

	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	call->cancelled = true;
	call->close_seen = true;
	call->cancelled_fn = NULL;
	call_drop_outgoing(call);
	if (fn)
		fn(call, call->cancelled_data);
	call_unref(call);
}

static void call_on_close_tag(struct tag *tag, bool ok)
{
	struct rpc_call *call = CONTAINER_OF(tag, struct rpc_call, close_tag);

	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	if (!ok || call->core.cancelled)
		loopq_post(call->server->loopq, &call->closed, call_on_cancelled);
	else /* the peer has received the status: the loop knows that already */
		call_unref(call);
}

static void call_on_final_tag(struct tag *tag, bool ok)
{
	struct rpc_call *call = CONTAINER_OF(tag, struct rpc_call, final_tag);

	(void)ok; /* whether it arrived does not matter any more */
	atomic_fetch_sub(&call->server->n_answers, 1);
	call_unref(call);
}

void call_tags_init(struct rpc_call *call)
{
	call->close_tag.fn = call_on_close_tag;
	call->sent_tag.fn = call_on_sent_tag;
	call->next.tag.fn = call_on_next_tag;
	list_init(&call->lent.link);
	call->final_tag.fn = call_on_final_tag;
}

/* --- dispatch --- */

static void call_refusal_fault(const struct rpc_call *call, struct fault *f)
{
	const char *method = rpc_call_method(call);

	if (call->refusal == REFUSAL_METHOD && call->server->refusal.code) {
		*f = call->server->refusal;
		return;
	}
	switch (call->refusal) {
	case REFUSAL_METHOD:
		fault_set(f, FAULT_UNIMPLEMENTED, NULL, "there is no method %s", method);
		break;
	case REFUSAL_COMPRESSED:
		fault_set(f, FAULT_UNIMPLEMENTED, NULL,
			  "%s: compressed messages are not accepted on a local socket", method);
		break;
	case REFUSAL_EMPTY:
		fault_set(f, FAULT_INVALID, NULL, "%s: the request has no message", method);
		break;
	case REFUSAL_BUDGET:
		fault_set(f, FAULT_EXHAUSTED, NULL,
			  "%s: the request would take too much memory when unpacked", method);
		break;
	default:
		fault_set(f, FAULT_INVALID, NULL, "%s: the request is not a valid %s message",
			  method, call->slot->input->name);
		break;
	}
}

static void call_refuse(struct rpc_call *call)
{
	struct fault f = FAULT_NULL;

	call_refusal_fault(call, &f);
	rpc_call_fail(call, &f);
}

static bool call_is_too_much(const struct rpc_call *call)
{
	uint64_t others = call->peer->held - call->held;

	return call->held > RPC_SMALL_BYTES &&
	       others >= RPC_MAX_HELD * call->server->max_message_bytes;
}

/* Small ones are accepted: others may wait for one of them. */
static bool call_is_over_account(const struct rpc_call *call)
{
	const struct user *u = conn_account(call->peer->conn);

	return call->held > RPC_SMALL_BYTES && u && u->used[USER_MEMORY] > u->most[USER_MEMORY];
}

/* May the message that has come be handled? Return: 0 or a fault code. */
static int call_admit(const struct rpc_call *call, struct fault *f)
{
	struct rpc_server *s = call->server;

	if (s->closing)
		fault_set(f, FAULT_UNAVAILABLE, NULL, "the daemon is shutting down");
	else if (!call->peer)
		fault_set(f, FAULT_UNAVAILABLE, NULL, "the connection has been closed");
	else if (call->peer->n_calls > s->max_calls_per_conn)
		fault_set(f, FAULT_EXHAUSTED, NULL,
			  "%u calls of this connection are unanswered: no more are accepted",
			  s->max_calls_per_conn);
	else if (call_is_too_much(call))
		fault_set(f, FAULT_EXHAUSTED, NULL,
			  "the unanswered calls of this connection hold %llu bytes: no large call "
			  "is accepted",
			  (unsigned long long)call->peer->held);
	else if (call_is_over_account(call))
		user_refuse(conn_account(call->peer->conn), USER_MEMORY, call->held, f);
	else if (call->refusal)
		call_refusal_fault(call, f);
	return f->code;
}

static void call_dispatch(struct rpc_call *call)
{
	struct fault f = FAULT_NULL;

	if (call_admit(call, &f))
		rpc_call_fail(call, &f);
	else
		call->slot->method->fn(call, call->request.msg, call->slot->service->userdata);
}

void call_arrived(struct work *work)
{
	struct rpc_call *call = CONTAINER_OF(work, struct rpc_call, arrived);
	struct rpc_server *s = call->server;

	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	s->n_calls++;
	call->slot->calls++;
	call->peer = peer_table_find(&s->table, call->fd);
	if (call->peer) {
		call->peer->n_calls++;
		call_peer_hold(call->peer, call->held);
		list_append(&call->peer->calls, &call->link);
	}
	atomic_fetch_add(&call->refs, 1); /* the handler may end it */
	call_dispatch(call);
	if (!call->close_posted) {
		struct batch b = { .n = 0 };

		call_add_close(call, &b);
		call_batch_start(call, &b, &call->close_tag);
	}
	call_unref(call);
}

static int call_admit_next(struct rpc_call *call, struct fault *f)
{
	if (++call->next.n >= RPC_MAX_RECEIVED)
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "%s: a call has at most %u messages; make another call",
				 rpc_call_method(call), RPC_MAX_RECEIVED);
	return call_admit(call, f);
}

/* No message: the end of the stream, unless the call was cancelled. */
void call_next_arrived(struct work *work)
{
	struct rpc_call *call = CONTAINER_OF(work, struct rpc_call, next.work);
	rpc_next_cb fn = call->next.fn;
	struct fault why = FAULT_NULL;
	bool over = call->refusal == REFUSAL_EMPTY;

	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(call->next.running);
	call->next.running = false;
	call->next.fn = NULL;
	if (call->peer)
		call_peer_hold(call->peer, call->held);
	if (!call->ended && !call->cancelled) {
		bool taken = !over && call_admit_next(call, &why) == 0;

		fn(call, taken ? call->request.msg : NULL, &why, call->next.userdata);
	}
	call_unref(call);
}

/* --- for services --- */

struct conn *rpc_call_conn(struct rpc_call *call)
{
	return call->peer ? call->peer->conn : NULL;
}

int rpc_call_charge(struct rpc_call *call, enum user_kind kind, struct fault *f)
{
	struct conn *c = rpc_call_conn(call);

	if (!c || user_charge(&call->charge, conn_account(c), kind, 1, f) == 0)
		return 0;
	return f->code;
}

const char *rpc_call_method(const struct rpc_call *call)
{
	return call->slot->method ? call->slot->path : call->unknown_method;
}

const uint8_t *rpc_call_packed(const struct rpc_call *call, size_t *ret_bytes)
{
	CHECK(call->slot->method->packed);
	*ret_bytes = GRPC_SLICE_LENGTH(call->packed);
	return GRPC_SLICE_START_PTR(call->packed);
}

void rpc_call_refuse(struct rpc_call *call)
{
	CHECK(call->refusal);
	call_refuse(call);
}

uint64_t rpc_call_deadline_us(const struct rpc_call *call)
{
	return call->deadline_us;
}

void rpc_call_on_cancelled(struct rpc_call *call, rpc_cancelled_cb fn, void *userdata)
{
	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(!call->ended);
	call->cancelled_fn = fn;
	call->cancelled_data = userdata;
	if (!fn || !call->close_seen)
		return;
	/* It has happened already: call the new callback, from the loop. */
	call->close_seen = false;
	atomic_fetch_add(&call->refs, 1);
	loopq_post(call->server->loopq, &call->closed, call_on_cancelled);
}

/* The handler's last action; the call may be freed when this returns. */
static void call_finish(struct rpc_call *call)
{
	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(!call->ended && call->server->n_calls > 0);
	call->ended = true;
	call->cancelled_fn = NULL;
	call->server->n_calls--;
	if (call->peer) {
		list_unlink(&call->link);
		call->peer->n_calls--;
		if (!call->next.running)
			peer_let_go(call->peer, call->held);
		call->peer = NULL;
	}
	call_pump(call);
	call_unref(call);
}

static grpc_byte_buffer *call_pack(const ProtobufCMessage *message)
{
	size_t bytes = protobuf_c_message_get_packed_size(message);
	grpc_slice slice = grpc_slice_malloc(bytes);
	grpc_byte_buffer *buffer;

	CHECK(protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice)) == bytes);
	buffer = grpc_raw_byte_buffer_create(&slice, 1);
	grpc_slice_unref(slice);
	return buffer;
}

/* @buffer: the call's from here on. */
static void call_reply_with(struct rpc_call *call, grpc_byte_buffer *buffer)
{
	struct batch b = { .n = 0 };

	call_add_headers(call, &b);
	call_batch_add(&b, GRPC_OP_SEND_MESSAGE)->data.send_message.send_message = buffer;
	call_add_status(call, &b);
	if (!call->close_posted)
		call_add_close(call, &b);
	CHECK(!call->core.payload);
	call->core.payload = buffer; /* freed with the call */
	call_batch_start(call, &b, &call->final_tag);
}

static void call_check_unary(const struct rpc_call *call)
{
	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(!call->slot->method->streaming && !call->ended && !call->out.headers_sent);
}

void rpc_call_reply(struct rpc_call *call, const ProtobufCMessage *reply)
{
	call_check_unary(call);
	if (!call->cancelled)
		call_reply_with(call, call_pack(reply));
	call_finish(call);
}

void rpc_call_reply_packed(struct rpc_call *call, const uint8_t *reply, size_t bytes)
{
	grpc_slice slice;

	call_check_unary(call);
	if (!call->cancelled) {
		slice = grpc_slice_from_copied_buffer((const char *)reply, bytes);
		call_reply_with(call, grpc_raw_byte_buffer_create(&slice, 1));
		grpc_slice_unref(slice);
	}
	call_finish(call);
}

static void call_set_trailer(struct rpc_call *call, const struct fault *f)
{
	uint8_t *bytes;
	size_t n;

	if (status_map_details(f, &bytes, &n) != 0)
		return; /* no memory: code and text still tell the error */
	call->status.trailer.key = grpc_slice_from_static_string("grpc-status-details-bin");
	call->status.trailer.value = grpc_slice_from_copied_buffer((const char *)bytes, n);
	call->status.has_trailer = true;
	free(bytes);
}

static void call_set_failure(struct rpc_call *call, const struct fault *fault)
{
	char text[sizeof(fault->text)];

	memcpy(text, fault->text, sizeof(text));
	codec_clean_text(text);
	call->status.code = status_map_code(fault->code);
	call->status.text = grpc_slice_from_copied_string(text);
	call_set_trailer(call, fault);
}

void rpc_call_fail(struct rpc_call *call, const struct fault *fault)
{
	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(fault->code != FAULT_NONE && !call->ended);
	call->slot->failed++;
	if (!call->cancelled)
		call_set_failure(call, fault);
	call_finish(call);
}

/* Not with batch_start: the event that it keeps back for this thread may be the next call that is
 * refused in this way, and so on. */
void call_refuse_early(struct rpc_call *call)
{
	struct fault f = FAULT_NULL;
	struct batch b = { .n = 0 };

	CHECK(call->refusal == REFUSAL_EMPTY || call->refusal == REFUSAL_METHOD);
	call_refusal_fault(call, &f);
	call_set_failure(call, &f);
	call->ended = true;
	call_add_headers(call, &b);
	call_add_status(call, &b);
	call_add_close(call, &b);
	/* the batch takes the reference that the loop would have had */
	CHECK(grpc_call_start_batch(call->core.call, b.ops, b.n, &call->final_tag, NULL) ==
	      GRPC_CALL_OK);
}

struct outgoing *call_outgoing_new(struct rpc_call *call)
{
	struct outgoing *o;

	if (call->out.n >= RPC_MAX_SEND)
		return NULL;
	o = malloc(sizeof(*o));
	if (!o)
		return NULL;
	o->lent = false;
	list_init(&o->link);
	list_append(&call->out.messages, &o->link);
	call->out.n++;
	return o;
}

static void call_check_stream(const struct rpc_call *call)
{
	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(call->slot->method->streaming && !call->ended);
}

int rpc_call_send(struct rpc_call *call, const ProtobufCMessage *message)
{
	struct outgoing *o;

	call_check_stream(call);
	if (call->cancelled)
		return 0;
	o = call_outgoing_new(call);
	if (!o)
		return -ENOBUFS;
	o->buffer = call_pack(message);
	call_pump(call);
	return 0;
}

int rpc_call_send_with(struct rpc_call *call, const struct rpc_piece *head,
		       const struct rpc_piece *rest)
{
	grpc_slice slices[2];
	struct outgoing *o;

	call_check_stream(call);
	if (call->cancelled)
		return 0;
	o = call_outgoing_new(call);
	if (!o)
		return -ENOBUFS;
	slices[0] = grpc_slice_from_copied_buffer((const char *)head->bytes, head->n);
	slices[1] = grpc_slice_from_static_buffer(rest->bytes, rest->n);
	o->buffer = grpc_raw_byte_buffer_create(slices, ARRAY_SIZE(slices));
	grpc_slice_unref(slices[0]); /* the buffer has its own reference */
	call_pump(call);
	return 0;
}

void rpc_call_next(struct rpc_call *call, rpc_next_cb fn, void *userdata)
{
	call_check_stream(call);
	CHECK(fn && !call->next.fn);
	codec_message_deinit(&call->request);
	if (call->peer)
		peer_let_go(call->peer, call->held);
	call->held = 0;
	call->next.fn = fn;
	call->next.userdata = userdata;
	call_pump(call);
}

void rpc_call_end(struct rpc_call *call)
{
	MAGIC_CHECK(call, RPC_CALL_MAGIC);
	CHECK(call->slot->method->streaming);
	call_finish(call);
}
