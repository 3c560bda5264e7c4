/* The stream of a link: batches of gRPC core, on the loop; the thread that waits for their ends. */
#include <errno.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "peer/peer_impl.h"

/* Memory of a message that waits, besides its bytes. */
#define PEER_OUT_COST 128u
/* Memory that a message may take when it is unpacked: a few bytes can need many. */
#define PEER_UNPACK_BASE   65536u
#define PEER_UNPACK_FACTOR 16u
/* For a connection that is being made. */
#define PEER_LINGER_MS 500

/* ------------------------------------------------------------------------------ the thread */

static void *peer_stream_alloc(void *left, size_t bytes)
{
	uint64_t *budget = left;

	if (bytes > *budget)
		return NULL;
	*budget -= bytes;
	return malloc(bytes);
}

static void peer_stream_dealloc(void *left, void *at)
{
	(void)left;
	free(at);
}

static Shardd__V1__PeerMessage *peer_stream_unpack(grpc_byte_buffer *buffer)
{
	uint64_t left = PEER_UNPACK_BASE;
	ProtobufCAllocator allocator = { peer_stream_alloc, peer_stream_dealloc, &left };
	Shardd__V1__PeerMessage *m;
	grpc_byte_buffer_reader reader;
	grpc_slice all;

	if (buffer->data.raw.compression != GRPC_COMPRESS_NONE ||
	    !grpc_byte_buffer_reader_init(&reader, buffer))
		return NULL;
	all = grpc_byte_buffer_reader_readall(&reader);
	grpc_byte_buffer_reader_destroy(&reader);
	left += PEER_UNPACK_FACTOR * GRPC_SLICE_LENGTH(all);
	m = shardd__v1__peer_message__unpack(&allocator, GRPC_SLICE_LENGTH(all),
					     GRPC_SLICE_START_PTR(all));
	grpc_slice_unref(all);
	return m;
}

static void peer_stream_read(struct peer *p)
{
	p->read = PEER_READ_END;
	if (!p->incoming)
		return;
	p->message = peer_stream_unpack(p->incoming);
	p->read = p->message ? PEER_READ_MESSAGE : PEER_READ_BAD;
	grpc_byte_buffer_destroy(p->incoming);
	p->incoming = NULL;
}

void *peer_stream_main(void *peers)
{
	struct peers *ps = peers;

	for (;;) {
		grpc_event ev = grpc_completion_queue_next(
			ps->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
		struct peer_tag *t = ev.tag;

		if (ev.type == GRPC_QUEUE_SHUTDOWN)
			return NULL;
		t->ok = ev.success != 0;
		if (t->peer && t == &t->peer->received)
			peer_stream_read(t->peer);
		loopq_post(ps->loopq, &t->work, t->fn);
	}
}

/* --------------------------------------------------------------------------------- batches */

static void peer_stream_on_tag(struct work *w)
{
	struct peer_tag *t = CONTAINER_OF(w, struct peer_tag, work);
	struct peer *p = t->peer;

	MAGIC_CHECK(p, PEER_MAGIC);
	t->then(p);
	peer_unref(p);
}

void peer_stream_hold(struct peer *p)
{
	p->refs++;
}

static void peer_stream_submit(struct peer *p, const grpc_op *ops, size_t n, struct peer_tag *t)
{
	peer_stream_hold(p);
	CHECK(grpc_call_start_batch(p->call, ops, n, t, NULL) == GRPC_CALL_OK);
}

static void peer_stream_next(struct peer *p)
{
	grpc_op op = { .op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &p->incoming };

	peer_stream_submit(p, &op, 1, &p->received);
}

static void peer_stream_take(struct peer *p, const Shardd__V1__PeerMessage *m)
{
	if (p->read == PEER_READ_MESSAGE)
		peer_on_message(p, m);
	else if (p->read == PEER_READ_BAD)
		peer_fail(p, "the node at %s has sent what is no message", p->at);
	else if (!p->dialled) /* of one that was dialled the status says more */
		peer_fail(p, "the connection to node '%s' is closed", *p->name ? p->name : p->at);
}

static void peer_stream_on_received(struct peer *p)
{
	bool more = p->read == PEER_READ_MESSAGE;
	Shardd__V1__PeerMessage *m = p->message;

	p->message = NULL;
	if (p->state != PEER_ENDED)
		peer_stream_take(p, m);
	if (m)
		shardd__v1__peer_message__free_unpacked(m, NULL);
	/* after its end, too: a status comes behind all messages */
	if (more && !p->ps->closing)
		peer_stream_next(p);
}

static void peer_stream_on_begun(struct peer *p)
{
	(void)p; /* if it fails, the stream ends */
}

/* What OpenSSL's words for a failed handshake mean, of those that tell no user what to do. */
static const char *peer_stream_hint(const char *details)
{
	if (strstr(details, "certificate verify failed"))
		return "; its certificate must be signed by peer_ca of this node, and must not have"
		       " expired";
	if (strstr(details, "wrong version number"))
		return "; it has no certificate, and this node has one: set peer_ca, peer_cert and "
		       "peer_key there";
	return "";
}

/* Text of the status, of one that was dialled. */
static void peer_stream_on_status(struct peer *p)
{
	char *details = grpc_slice_to_c_string(p->details);

	if (p->status == PEER_STATUS)
		peer_fail(p, "node '%s' at %s has ended the link: %.300s", p->name, p->at, details);
	else if (p->state == PEER_UP)
		peer_fail(p, "the connection to node '%s' is closed: %.300s", p->name,
			  p->status ? details : "it has ended the stream");
	else
		peer_fail(p, "node '%s' cannot be reached at %s: %.300s%s", p->name, p->at,
			  p->status ? details : "it has ended the stream",
			  peer_stream_hint(details));
	gpr_free(details);
}

static void peer_stream_on_ended(struct peer *p)
{
	p->over = true;
	if (p->state == PEER_ENDED)
		return;
	if (p->dialled)
		peer_stream_on_status(p);
	else
		peer_fail(p, "the connection to node '%s' is closed", *p->name ? p->name : p->at);
}

void peer_stream_begin(struct peer *p)
{
	grpc_op first[2] = {
		{ .op = GRPC_OP_SEND_INITIAL_METADATA },
		{ .op = GRPC_OP_RECV_INITIAL_METADATA,
		  .data.recv_initial_metadata.recv_initial_metadata = &p->initial },
	};
	grpc_op last = { .op = GRPC_OP_RECV_CLOSE_ON_SERVER,
			 .data.recv_close_on_server.cancelled = &p->cancelled };

	if (p->dialled)
		last = (grpc_op){ .op = GRPC_OP_RECV_STATUS_ON_CLIENT,
				  .data.recv_status_on_client = { .trailing_metadata = &p->trailing,
								  .status = &p->status,
								  .status_details = &p->details } };
	peer_stream_submit(p, first, p->dialled ? 2 : 1, &p->begun);
	peer_stream_submit(p, &last, 1, &p->ended);
	peer_stream_next(p);
}

/* ---------------------------------------------------------------------------------- to send */

static grpc_byte_buffer *peer_stream_pack(const Shardd__V1__PeerMessage *m)
{
	grpc_slice s = grpc_slice_malloc(shardd__v1__peer_message__get_packed_size(m));
	grpc_byte_buffer *b;

	shardd__v1__peer_message__pack(m, GRPC_SLICE_START_PTR(s));
	b = grpc_raw_byte_buffer_create(&s, 1);
	grpc_slice_unref(s);
	return b;
}

static void peer_stream_out_free(struct peer *p, struct peer_out *out)
{
	CHECK(p->out.bytes >= out->bytes);
	p->out.bytes -= out->bytes;
	list_unlink(&out->link);
	grpc_byte_buffer_destroy(out->buffer);
	free(out);
}

static void peer_stream_drop(struct peer *p)
{
	while (!list_empty(&p->out.waiting))
		peer_stream_out_free(p, list_first(&p->out.waiting, struct peer_out, link));
}

/* The next one, if none is under way. */
static void peer_stream_go_on(struct peer *p)
{
	grpc_op op = { .op = GRPC_OP_SEND_MESSAGE };

	if (p->out.sending || list_empty(&p->out.waiting))
		return;
	p->out.sending = list_first(&p->out.waiting, struct peer_out, link);
	list_unlink(&p->out.sending->link);
	op.data.send_message.send_message = p->out.sending->buffer;
	peer_stream_submit(p, &op, 1, &p->sent);
}

/* Return: NULL: no memory. */
static struct peer_out *peer_stream_out_new(const Shardd__V1__PeerMessage *m, size_t bytes)
{
	struct peer_out *out = calloc(1, sizeof(*out));

	if (!out)
		return NULL;
	list_init(&out->link);
	out->bytes = bytes + PEER_OUT_COST;
	out->buffer = peer_stream_pack(m);
	return out;
}

void peer_stream_send(struct peer *p, const Shardd__V1__PeerMessage *m)
{
	size_t bytes = shardd__v1__peer_message__get_packed_size(m);
	struct peer_out *out = NULL;

	if (bytes > PEER_MESSAGE_BYTES)
		peer_fail_later(
			p, "a message for node '%s' has %zu bytes; it must not have more than %zu",
			p->name, bytes, (size_t)PEER_MESSAGE_BYTES);
	else if (p->out.bytes + bytes + PEER_OUT_COST > p->ps->max_queued)
		peer_fail_later(
			p, "node '%s' does not take its messages: %zu bytes wait, the limit is %zu",
			p->name, (size_t)p->out.bytes, (size_t)p->ps->max_queued);
	else if (!(out = peer_stream_out_new(m, bytes)))
		peer_fail_later(p, "there is no memory for a message for node '%s'", p->name);
	if (!out)
		return;
	p->out.bytes += out->bytes;
	list_append(&p->out.waiting, &out->link);
	peer_stream_go_on(p);
}

/* ---------------------------------------------------------------------------------- to end */

/* The last message of one that was dialled, and the end of its stream. */
static void peer_stream_say_bye(struct peer *p)
{
	Shardd__V1__PeerMessage m = SHARDD__V1__PEER_MESSAGE__INIT;
	Shardd__V1__PeerBye bye = SHARDD__V1__PEER_BYE__INIT;
	grpc_op ops[2] = { { .op = GRPC_OP_SEND_MESSAGE },
			   { .op = GRPC_OP_SEND_CLOSE_FROM_CLIENT } };

	p->out.bye = false;
	bye.reason = p->why;
	m.body_case = SHARDD__V1__PEER_MESSAGE__BODY_BYE;
	m.bye = &bye;
	p->out.sending = peer_stream_out_new(&m, shardd__v1__peer_message__get_packed_size(&m));
	if (!p->out.sending) { /* no memory */
		grpc_call_cancel(p->call, NULL);
		return;
	}
	p->out.bytes += p->out.sending->bytes;
	ops[0].data.send_message.send_message = p->out.sending->buffer;
	peer_stream_submit(p, ops, 2, &p->sent);
}

static void peer_stream_on_sent(struct peer *p)
{
	bool over = !p->sent.ok || p->over || p->ps->closing;

	peer_stream_out_free(p, STEAL_PTR(p->out.sending));
	if (over)
		return; /* the stream ends */
	if (p->out.bye)
		peer_stream_say_bye(p);
	else
		peer_stream_go_on(p);
}

/* The end that listens says why in the status, which does not wait behind messages. For the other one
 * there is no such thing in gRPC. It says bye, and waits for the status. */
void peer_stream_end(struct peer *p, bool silent)
{
	CHECK(p->state == PEER_ENDED);
	peer_stream_drop(p);
	if (p->over)
		return;
	if (!p->dialled || silent) {
		p->out.bye = false;
		grpc_call_cancel_with_status(p->call, PEER_STATUS, p->why, NULL);
		return;
	}
	p->out.bye = true;
	if (!p->out.sending)
		peer_stream_say_bye(p);
}

/* --------------------------------------------------------------------------- begin and end */

static void peer_stream_tag_init(struct peer *p, struct peer_tag *t, void (*then)(struct peer *p))
{
	*t = (struct peer_tag){ .fn = peer_stream_on_tag, .peer = p, .then = then };
}

void peer_stream_init(struct peer *p)
{
	grpc_metadata_array_init(&p->initial);
	grpc_metadata_array_init(&p->trailing);
	grpc_call_details_init(&p->request);
	p->details = grpc_empty_slice();
	peer_stream_tag_init(p, &p->requested, NULL);
	peer_stream_tag_init(p, &p->begun, peer_stream_on_begun);
	peer_stream_tag_init(p, &p->received, peer_stream_on_received);
	peer_stream_tag_init(p, &p->sent, peer_stream_on_sent);
	peer_stream_tag_init(p, &p->ended, peer_stream_on_ended);
}

/* gRPC core 1.51 loses a connection, with its descriptor, if its channel is destroyed just when the other
 * end has answered. So one that is being made is waited for. */
bool peer_stream_linger(struct peer *p)
{
	gpr_timespec wait = gpr_time_from_millis(PEER_LINGER_MS, GPR_TIMESPAN);

	if (!p->channel || p->lingers ||
	    grpc_channel_check_connectivity_state(p->channel, 0) != GRPC_CHANNEL_CONNECTING)
		return false;
	p->lingers = true;
	peer_stream_hold(p);
	grpc_channel_watch_connectivity_state(p->channel, GRPC_CHANNEL_CONNECTING,
					      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), wait),
					      p->ps->cq, &p->begun);
	return true;
}

void peer_stream_deinit(struct peer *p)
{
	CHECK(!p->out.sending && !p->message);
	peer_stream_drop(p);
	CHECK(!p->out.bytes);
	if (p->call)
		grpc_call_unref(p->call);
	if (p->channel)
		grpc_channel_destroy(p->channel);
	grpc_metadata_array_destroy(&p->initial);
	grpc_metadata_array_destroy(&p->trailing);
	grpc_call_details_destroy(&p->request);
	grpc_slice_unref(p->details);
}
