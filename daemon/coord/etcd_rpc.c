/*
 * Calls of etcd with gRPC core. The loop starts them; a thread waits for the events of the completion
 * queue and posts each to the loop, where all state is.
 */
#include <errno.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

#include "coord/etcd_impl.h"
#include "core/check.h"

/* For a token, if the call that needs it has no time of its own. */
#define ETCD_LOGIN_MS 5000

/* ------------------------------------------------------------------------------ the thread */

static void etcd_rpc_on_batch(struct work *w);

void *etcd_rpc_main(void *etcd)
{
	struct etcd *e = etcd;

	for (;;) {
		grpc_event ev = grpc_completion_queue_next(
			e->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
		struct etcd_batch *b = ev.tag;

		if (ev.type == GRPC_QUEUE_SHUTDOWN)
			return NULL;
		b->ok = ev.success != 0;
		if (atomic_load(&e->closing))
			list_append(&e->dead, &b->link);
		else
			loopq_post(e->loopq, &b->work, etcd_rpc_on_batch);
	}
}

/* --------------------------------------------------------------------------- life of a call */

struct etcd *etcd_unref(struct etcd *e)
{
	CHECK(e->refs);
	if (--e->refs)
		return NULL;
	CHECK(list_empty(&e->rpcs) && list_empty(&e->waiting));
	for (size_t i = 0; i < e->n_endpoints; i++)
		free(e->endpoints[i].target);
	free(e->endpoints);
	free(e->prefix);
	free(e->user);
	free(e->password);
	free(e->token);
	if (e->core)
		grpc_shutdown();
	free(e);
	return NULL;
}

/* What one try has taken; the request stays. */
static void etcd_rpc_end_try(struct etcd_rpc *r)
{
	if (!r->call)
		return;
	grpc_call_unref(r->call);
	r->call = NULL;
	grpc_byte_buffer_destroy(r->sent);
	if (r->reply)
		grpc_byte_buffer_destroy(r->reply);
	r->reply = NULL;
	grpc_metadata_array_destroy(&r->initial);
	grpc_metadata_array_destroy(&r->trailing);
	grpc_slice_unref(r->details);
	grpc_slice_unref(r->token_text);
}

static void etcd_rpc_free(struct etcd_rpc *r)
{
	struct etcd *e = r->e;

	CHECK(!r->n_open);
	list_unlink(&r->link);
	etcd_rpc_end_try(r);
	grpc_byte_buffer_destroy(r->request);
	free(r);
	etcd_unref(e);
}

static void etcd_rpc_batch_init(struct etcd_rpc *r, struct etcd_batch *b)
{
	list_init(&b->link);
	b->rpc = r;
}

static grpc_byte_buffer *etcd_rpc_pack(const ProtobufCMessage *m)
{
	grpc_slice s = grpc_slice_malloc(protobuf_c_message_get_packed_size(m));
	grpc_byte_buffer *b;

	protobuf_c_message_pack(m, GRPC_SLICE_START_PTR(s));
	b = grpc_raw_byte_buffer_create(&s, 1);
	grpc_slice_unref(s);
	return b;
}

struct etcd_rpc *etcd_rpc_new(struct etcd *e, const char *method, const ProtobufCMessage *request)
{
	struct etcd_rpc *r = calloc(1, sizeof(*r));

	if (!r)
		return NULL;
	list_init(&r->link);
	r->e = e;
	e->refs++;
	r->method = method;
	r->request = etcd_rpc_pack(request);
	etcd_rpc_batch_init(r, &r->whole);
	etcd_rpc_batch_init(r, &r->message);
	etcd_rpc_batch_init(r, &r->ending);
	return r;
}

ProtobufCMessage *etcd_rpc_reply(struct etcd_rpc *r, const ProtobufCMessageDescriptor *type)
{
	grpc_byte_buffer_reader reader;
	ProtobufCMessage *m;
	grpc_slice all;

	if (!r->reply || !grpc_byte_buffer_reader_init(&reader, r->reply))
		return NULL;
	all = grpc_byte_buffer_reader_readall(&reader);
	grpc_byte_buffer_reader_destroy(&reader);
	m = protobuf_c_message_unpack(type, NULL, GRPC_SLICE_LENGTH(all),
				      GRPC_SLICE_START_PTR(all));
	grpc_slice_unref(all);
	return m;
}

/* --------------------------------------------------------------------------------- a token */

static void etcd_rpc_begin(struct etcd_rpc *r);

static void etcd_rpc_end(struct etcd_rpc *r, grpc_status_code status, const char *why)
{
	r->done(r, status, why);
	if (!r->n_open)
		etcd_rpc_free(r);
}

/* Those that wait for a token go on, or fail as the login has. */
static void etcd_rpc_on_login(struct etcd_rpc *login, grpc_status_code status, const char *why)
{
	struct etcd *e = login->e;
	struct list now = LIST_INIT(now);
	Shardd__Etcd__V1__AuthenticateResponse *reply =
		(void *)etcd_rpc_reply(login, &shardd__etcd__v1__authenticate_response__descriptor);

	e->login = NULL;
	if (status == GRPC_STATUS_OK && reply)
		e->token = strdup(reply->token);
	if (reply)
		protobuf_c_message_free_unpacked(&reply->base, NULL);
	list_take_all(&now, &e->waiting);
	while (!list_empty(&now)) {
		struct etcd_rpc *r = CONTAINER_OF(now.next, struct etcd_rpc, link);

		list_unlink(&r->link);
		if (e->token && !atomic_load(&e->closing))
			etcd_rpc_begin(r);
		else
			etcd_rpc_end(r, status ? status : GRPC_STATUS_UNKNOWN,
				     status ? why : "etcd has given no token");
	}
}

static bool etcd_rpc_ask_token(struct etcd *e, uint32_t timeout_ms)
{
	Shardd__Etcd__V1__AuthenticateRequest q = SHARDD__ETCD__V1__AUTHENTICATE_REQUEST__INIT;

	q.name = e->user;
	q.password = e->password;
	e->login = etcd_rpc_new(e, "/etcdserverpb.Auth/Authenticate", &q.base);
	if (!e->login)
		return false;
	e->login->done = etcd_rpc_on_login;
	e->login->timeout_ms = timeout_ms ? timeout_ms : ETCD_LOGIN_MS;
	etcd_rpc_begin(e->login);
	return true;
}

/* @r is in no list: it waits for a token. Return: false: without memory, nothing has changed. */
static bool etcd_rpc_log_in(struct etcd_rpc *r)
{
	if (!r->e->login && !etcd_rpc_ask_token(r->e, r->timeout_ms))
		return false;
	list_append(&r->e->waiting, &r->link);
	return true;
}

/* ---------------------------------------------------------------------------------- a try */

static void etcd_rpc_submit(struct etcd_rpc *r, const grpc_op *ops, size_t n, struct etcd_batch *b)
{
	r->n_open++;
	CHECK(grpc_call_start_batch(r->call, ops, n, b, NULL) == GRPC_CALL_OK);
}

static grpc_op etcd_rpc_op_status(struct etcd_rpc *r)
{
	return (grpc_op){ .op = GRPC_OP_RECV_STATUS_ON_CLIENT,
			  .data.recv_status_on_client = { .trailing_metadata = &r->trailing,
							  .status = &r->status,
							  .status_details = &r->details } };
}

static grpc_op etcd_rpc_op_message(struct etcd_rpc *r)
{
	return (grpc_op){ .op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &r->reply };
}

static void etcd_rpc_make_call(struct etcd_rpc *r)
{
	struct etcd *e = r->e;
	gpr_timespec until = gpr_inf_future(GPR_CLOCK_MONOTONIC);

	if (r->timeout_ms)
		until = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
				     gpr_time_from_millis(r->timeout_ms, GPR_TIMESPAN));
	if (!r->is_fixed)
		r->endpoint = e->current;
	r->call = grpc_channel_create_call(e->endpoints[r->endpoint].channels[r->kind], NULL,
					   GRPC_PROPAGATE_DEFAULTS, e->cq,
					   grpc_slice_from_static_string(r->method), NULL, until,
					   NULL);
	grpc_metadata_array_init(&r->initial);
	grpc_metadata_array_init(&r->trailing);
	r->details = grpc_empty_slice();
	r->token_text = e->token && r != e->login ? grpc_slice_from_copied_string(e->token)
						  : grpc_empty_slice();
	r->sent = grpc_byte_buffer_copy(r->request);
	/* a member of etcd without the others refuses it, and ends its watches */
	r->metadata[0] = (grpc_metadata){ .key = grpc_slice_from_static_string("hasleader"),
					  .value = grpc_slice_from_static_string("true") };
	r->metadata[1] = (grpc_metadata){ .key = grpc_slice_from_static_string("token"),
					  .value = r->token_text };
}

static size_t etcd_rpc_ops_begin(struct etcd_rpc *r, grpc_op *ops)
{
	size_t n = GRPC_SLICE_IS_EMPTY(r->token_text) ? 1 : 2;

	ops[0] = (grpc_op){ .op = GRPC_OP_SEND_INITIAL_METADATA,
			    .data.send_initial_metadata = { .count = n, .metadata = r->metadata } };
	ops[1] = (grpc_op){ .op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = r->sent };
	ops[2] = (grpc_op){ .op = GRPC_OP_RECV_INITIAL_METADATA,
			    .data.recv_initial_metadata.recv_initial_metadata = &r->initial };
	return 3;
}

static void etcd_rpc_on_begun(struct etcd_rpc *r, bool ok)
{
	(void)r;
	(void)ok; /* the status says it */
}

void etcd_rpc_next(struct etcd_rpc *r)
{
	grpc_op op = etcd_rpc_op_message(r);

	if (r->reply)
		grpc_byte_buffer_destroy(r->reply);
	r->reply = NULL;
	etcd_rpc_submit(r, &op, 1, &r->message);
}

/* The token is too old, or etcd has forgotten it. */
static void etcd_rpc_drop_token(struct etcd *e)
{
	free(e->token);
	e->token = NULL;
}

/* It has ended, or users have changed since it was given. */
static bool etcd_rpc_token_is_bad(grpc_status_code status, const char *why)
{
	return status == GRPC_STATUS_UNAUTHENTICATED || strstr(why, "revision in header is old") ||
	       strstr(why, "revision of auth store is old");
}

/* Refused without a good token, nothing was done. Return: it is tried again with another one. */
static bool etcd_rpc_try_again(struct etcd_rpc *r, const char *why)
{
	struct etcd *e = r->e;

	if (!e->user || r == e->login || atomic_load(&e->closing) ||
	    !etcd_rpc_token_is_bad(r->status, why))
		return false;
	etcd_rpc_drop_token(e);
	if (r->tried || r->kind != ETCD_CALLS || !r->owner)
		return false;
	list_unlink(&r->link);
	if (!etcd_rpc_log_in(r))
		return false;
	r->tried = true;
	etcd_rpc_end_try(r);
	return true;
}

/* What the administrator has to look at, in front of what gRPC or etcd says. "": nothing to add. */
static const char *etcd_rpc_hint(const struct etcd *e, const char *why)
{
	if (strstr(why, "certificate verify failed"))
		return "etcd's certificate is not accepted: it is not signed by coord_ca, has "
		       "expired, or does not name the host of coord: ";
	if (strstr(why, "wrong host") || strstr(why, "Hostname Verification"))
		return "etcd's certificate does not name the host of coord: ";
	if (strstr(why, "authentication failed"))
		return "etcd does not accept coord_user with the password of coord_password_file: ";
	if (strstr(why, "user name is empty"))
		return "etcd wants a user: set coord_user and coord_password_file: ";
	if (strstr(why, "permission denied"))
		return "etcd does not allow coord_user, or the node's certificate, to use the "
		       "cluster's keys: ";
	if (e->plain && strstr(why, "Socket closed"))
		return "etcd ends the connection; if it wants TLS set coord_ca: ";
	/* of its own certificate a client hears within the handshake with TLS 1.2, and after it with 1.3 */
	if (!e->plain &&
	    (strstr(why, "alert bad certificate") || strstr(why, "Endpoint read failed")))
		return e->has_cert ? "etcd ends the connection; if it does not accept coord_cert, "
				     "that has expired or is not signed by etcd's trusted CA: "
				   : "etcd ends the connection; if its clients need a certificate "
				     "set coord_cert and coord_key: ";
	return "";
}

/* All answers have it as their first field. */
static void etcd_rpc_hear_cluster(struct etcd_rpc *r)
{
	Shardd__Etcd__V1__PutResponse *m =
		(void *)etcd_rpc_reply(r, &shardd__etcd__v1__put_response__descriptor);

	if (m && m->header && m->header->cluster_id)
		etcd_cluster_heard(r->e, r->endpoint, m->header->cluster_id);
	if (m)
		protobuf_c_message_free_unpacked(&m->base, NULL);
}

/* Nothing was sent: the endpoints are of two clusters. */
static void etcd_rpc_on_split(struct etcd_rpc *r, bool ok)
{
	(void)ok;
	r->done(r, GRPC_STATUS_UNAVAILABLE, *r->e->split ? r->e->split : "try again");
}

static void etcd_rpc_refuse(struct etcd_rpc *r)
{
	list_append(&r->e->rpcs, &r->link);
	r->n_open++;
	r->whole.fn = etcd_rpc_on_split;
	loopq_post(r->e->loopq, &r->whole.work, etcd_rpc_on_batch);
}

/* The last event of a try. */
static void etcd_rpc_on_status(struct etcd_rpc *r, bool ok)
{
	struct etcd *e = r->e;
	char *why = grpc_slice_to_c_string(r->details);
	char text[ETCD_WHY_BYTES];

	(void)ok;
	if ((r->status == GRPC_STATUS_UNAVAILABLE || r->status == GRPC_STATUS_DEADLINE_EXCEEDED) &&
	    !r->is_fixed && r->endpoint == e->current)
		e->current = (e->current + 1) % e->n_endpoints;
	if (r->status == GRPC_STATUS_OK && !r->message.fn)
		etcd_rpc_hear_cluster(r);
	snprintf(text, sizeof(text), "%s%s", r->status ? etcd_rpc_hint(e, why) : "", why);
	if (*e->split && !r->is_fixed && r->reply) { /* what it says is not believed */
		grpc_byte_buffer_destroy(r->reply);
		r->reply = NULL;
	}
	if (*e->split && !r->is_fixed && r->status == GRPC_STATUS_OK)
		etcd_rpc_end(r, GRPC_STATUS_UNAVAILABLE, e->split);
	else if (!etcd_rpc_try_again(r, why))
		etcd_rpc_end(r, r->status, text);
	gpr_free(why);
}

static void etcd_rpc_begin(struct etcd_rpc *r)
{
	grpc_op ops[6];
	size_t n;

	list_append(&r->e->rpcs, &r->link);
	etcd_rpc_make_call(r);
	n = etcd_rpc_ops_begin(r, ops);
	if (r->message.fn) {
		r->whole.fn = etcd_rpc_on_begun;
		etcd_rpc_submit(r, ops, n, &r->whole);
		ops[0] = etcd_rpc_op_status(r);
		r->ending.fn = etcd_rpc_on_status;
		etcd_rpc_submit(r, ops, 1, &r->ending);
		etcd_rpc_next(r);
		return;
	}
	ops[n++] = (grpc_op){ .op = GRPC_OP_SEND_CLOSE_FROM_CLIENT };
	ops[n++] = etcd_rpc_op_message(r);
	ops[n++] = etcd_rpc_op_status(r);
	r->whole.fn = etcd_rpc_on_status;
	etcd_rpc_submit(r, ops, n, &r->whole);
}

int etcd_rpc_start(struct etcd_rpc *r, uint32_t timeout_ms)
{
	bool wait = r->e->user && !r->e->token;

	r->timeout_ms = timeout_ms;
	if (!r->is_fixed)
		etcd_cluster_ask(r->e);
	if (!r->is_fixed && *r->e->split) {
		etcd_rpc_refuse(r);
		return 0;
	}
	if (!wait)
		etcd_rpc_begin(r);
	if (!wait || etcd_rpc_log_in(r))
		return 0;
	etcd_rpc_free(r);
	return -ENOMEM;
}

void etcd_rpc_cancel(struct etcd_rpc *r)
{
	if (r->call)
		grpc_call_cancel(r->call, NULL);
	else if (!r->n_open) /* it waits for a token */
		etcd_rpc_free(r);
}

static void etcd_rpc_on_batch(struct work *w)
{
	struct etcd_batch *b = CONTAINER_OF(w, struct etcd_batch, work);
	struct etcd_rpc *r = b->rpc;
	bool status = b->fn == etcd_rpc_on_status;

	r->n_open--;
	b->fn(r, b->ok);
	/* the status frees it, if it is the last one; else the last one does */
	if (!status && !r->n_open)
		etcd_rpc_free(r);
}

void etcd_rpc_free_dead(struct etcd *e)
{
	struct list waiting = LIST_INIT(waiting);

	list_take_all(&waiting, &e->waiting); /* for a login that does not end: nobody owns them */
	while (!list_empty(&waiting))
		etcd_rpc_free(CONTAINER_OF(waiting.next, struct etcd_rpc, link));
	while (!list_empty(&e->dead)) {
		struct etcd_batch *b = CONTAINER_OF(e->dead.next, struct etcd_batch, link);
		struct etcd_rpc *r = b->rpc;

		list_unlink(&b->link);
		if (--r->n_open == 0)
			etcd_rpc_free(r);
	}
}
