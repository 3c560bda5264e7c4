#include "otlp/otlp_rpc.h"

#include <errno.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/compression.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "otlp.pb-c.h"
#include "rpc/codec.h"
#include "rpc_status.pb-c.h"

#define RECONNECT_FIRST_MS 500
#define RECONNECT_MOST_MS  30000
#define CONNECT_MS         5000
/* Of a name: less than a call may take, so that its error says what is wrong. */
#define LOOKUP_MS 8000
/* The file of the CA: how often it is looked at. */
#define TLS_RELOAD_S 60u
/* An answer has counts and a sentence. */
#define ANSWER_BYTES 65536
#define RETRY_INFO   "type.googleapis.com/google.rpc.RetryInfo"
/* Before a name: core would take a host that is called unix or dns for a scheme. */
#define OTLP_RPC_NAMES "dns:///"

struct otlp_rpc {
	struct loopq *loopq;
	grpc_completion_queue *cq;
	grpc_channel *channel;
	grpc_channel_credentials *creds;
	char target[HOSTPORT_TEXT_BYTES + sizeof(OTLP_RPC_NAMES)];
	pthread_t thread;
	struct otlp_headers headers;
	bool tls;
	unsigned n_calls;
};

struct otlp_call {
	struct work work;
	struct otlp_rpc *r;
	grpc_call *call;
	grpc_byte_buffer *request, *reply;
	grpc_metadata headers[OTLP_HEADERS_MAX]; /* owned: what it was sent with */
	size_t n_headers;
	grpc_metadata_array initial, trailing;
	grpc_status_code status;
	grpc_slice details;
	otlp_call_cb done;
	void *userdata;
};

static const char *const otlp_rpc_names[] = {
	"OK",
	"CANCELLED",
	"UNKNOWN",
	"INVALID_ARGUMENT",
	"DEADLINE_EXCEEDED",
	"NOT_FOUND",
	"ALREADY_EXISTS",
	"PERMISSION_DENIED",
	"RESOURCE_EXHAUSTED",
	"FAILED_PRECONDITION",
	"ABORTED",
	"OUT_OF_RANGE",
	"UNIMPLEMENTED",
	"INTERNAL",
	"UNAVAILABLE",
	"DATA_LOSS",
	"UNAUTHENTICATED",
};

const char *otlp_rpc_status_name(int status)
{
	return status >= 0 && (size_t)status < ARRAY_SIZE(otlp_rpc_names) ? otlp_rpc_names[status]
									  : "UNKNOWN";
}

/* ------------------------------------------------------------------------------ the channel */

static grpc_arg otlp_rpc_arg(const char *key, int value)
{
	return (grpc_arg){ GRPC_ARG_INTEGER, (char *)(uintptr_t)key, { .integer = value } };
}

static grpc_channel *otlp_rpc_new_channel(const struct otlp_rpc *r)
{
	grpc_arg args[] = {
		otlp_rpc_arg(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1), /* a connection of its own */
		otlp_rpc_arg(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
		otlp_rpc_arg(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1),
		otlp_rpc_arg(GRPC_ARG_ENABLE_RETRIES, 0), /* that is done here */
		otlp_rpc_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, ANSWER_BYTES),
		/* An answer that is small on the wire would be decompressed before its length is
		 * looked at. */
		otlp_rpc_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0),
		otlp_rpc_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
			     1 << GRPC_COMPRESS_NONE),
		otlp_rpc_arg(GRPC_ARG_DNS_ARES_QUERY_TIMEOUT_MS, LOOKUP_MS),
		otlp_rpc_arg(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, RECONNECT_FIRST_MS),
		otlp_rpc_arg(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CONNECT_MS),
		otlp_rpc_arg(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, RECONNECT_MOST_MS),
	};
	grpc_channel_args list = { ARRAY_SIZE(args), args };

	return grpc_channel_create(r->target, r->creds, &list);
}

/* A connection whose other end has vanished looks like a slow collector for as long as the kernel repeats segments,
 * a quarter of an hour; the next call makes another one. Calls that are under way keep theirs. */
static void otlp_rpc_reconnect(struct otlp_rpc *r)
{
	grpc_channel_destroy(r->channel);
	r->channel = otlp_rpc_new_channel(r);
}

/* ------------------------------------------------------------------------- what was answered */

/* OTLP says of which statuses a client tries again. */
static bool otlp_rpc_may_again(grpc_status_code status, bool says_when)
{
	switch (status) {
	case GRPC_STATUS_CANCELLED:
	case GRPC_STATUS_DEADLINE_EXCEEDED:
	case GRPC_STATUS_ABORTED:
	case GRPC_STATUS_OUT_OF_RANGE:
	case GRPC_STATUS_UNAVAILABLE:
	case GRPC_STATUS_DATA_LOSS:
		return true;
	case GRPC_STATUS_RESOURCE_EXHAUSTED:
		return says_when;
	default:
		return false;
	}
}

static ProtobufCMessage *otlp_rpc_unpack(const ProtobufCMessageDescriptor *type, grpc_slice s)
{
	return protobuf_c_message_unpack(type, NULL, GRPC_SLICE_LENGTH(s), GRPC_SLICE_START_PTR(s));
}

static uint64_t otlp_rpc_read_retry(const ProtobufCBinaryData *packed)
{
	Shardd__Otlp__V1__RetryInfo *m =
		shardd__otlp__v1__retry_info__unpack(NULL, packed->len, packed->data);
	uint64_t ms = 0;

	if (m && m->retry_delay && m->retry_delay->seconds >= 0 && m->retry_delay->nanos >= 0 &&
	    m->retry_delay->seconds < INT32_MAX)
		ms = (uint64_t)m->retry_delay->seconds * 1000u +
		     (uint64_t)m->retry_delay->nanos / 1000000u;
	if (m)
		protobuf_c_message_free_unpacked(&m->base, NULL);
	return ms;
}

/* What a collector that has too much to do says: when to come again. Return: false: it does not. */
static bool otlp_rpc_find_retry(const struct otlp_call *c, uint64_t *ret_ms)
{
	bool found = false;

	for (size_t i = 0; i < c->trailing.count; i++) {
		Shardd__Wire__V1__RpcStatus *m;

		if (grpc_slice_str_cmp(c->trailing.metadata[i].key, "grpc-status-details-bin") != 0)
			continue;
		m = (void *)otlp_rpc_unpack(&shardd__wire__v1__rpc_status__descriptor,
					    c->trailing.metadata[i].value);
		for (size_t k = 0; m && k < m->n_details; k++)
			if (strcmp(m->details[k]->type_url, RETRY_INFO) == 0) {
				*ret_ms = otlp_rpc_read_retry(&m->details[k]->value);
				found = true;
			}
		if (m)
			protobuf_c_message_free_unpacked(&m->base, NULL);
	}
	return found;
}

/* Return: NULL: there is none, or it cannot be read. Nobody has offered to take a compressed one. */
static Shardd__Otlp__V1__ExportResponse *otlp_rpc_read_reply(const struct otlp_call *c)
{
	grpc_byte_buffer_reader reader;
	ProtobufCMessage *m;
	grpc_slice all;

	if (!c->reply || c->reply->data.raw.compression != GRPC_COMPRESS_NONE ||
	    !grpc_byte_buffer_reader_init(&reader, c->reply))
		return NULL;
	all = grpc_byte_buffer_reader_readall(&reader);
	grpc_byte_buffer_reader_destroy(&reader);
	m = otlp_rpc_unpack(&shardd__otlp__v1__export_response__descriptor, all);
	grpc_slice_unref(all);
	return (void *)m;
}

/* What the administrator has to look at, in front of what gRPC says. "": nothing to add. */
static const char *otlp_rpc_hint(const struct otlp_rpc *r, int status, const char *why)
{
	if (strstr(why, "certificate verify failed"))
		return "the collector's certificate is not accepted: it is not signed by otlp_ca "
		       "or "
		       "a CA of the machine, has expired, or does not name the host of otlp: ";
	if (strstr(why, "wrong host") || strstr(why, "Hostname Verification"))
		return "the collector's certificate does not name the host of otlp: ";
	if (!r->tls && strstr(why, "Socket closed"))
		return "the collector ends the connection; if it wants TLS write https:// in "
		       "otlp: ";
	if (r->tls && strcasestr(why, "wrong version number"))
		return "the collector speaks no TLS; write http:// in otlp: ";
	if (status == GRPC_STATUS_DEADLINE_EXCEEDED)
		return "the collector has not answered in time: ";
	if (status == GRPC_STATUS_UNIMPLEMENTED)
		return "the collector takes no such data, or that port is none of OTLP over gRPC: ";
	if (status == GRPC_STATUS_UNAUTHENTICATED || status == GRPC_STATUS_PERMISSION_DENIED)
		return "the collector wants other headers than those of otlp_headers_file: ";
	return "";
}

/* A collector may repeat what it was sent; status and log are not for secrets. */
static void otlp_rpc_hide_headers(const struct otlp_call *c, char *text)
{
	for (size_t i = 0; i < c->n_headers; i++) {
		char *value = grpc_slice_to_c_string(c->headers[i].value);

		otlp_headers_hide(value, text);
		explicit_bzero(value, strlen(value));
		gpr_free(value);
	}
}

static void otlp_rpc_free_call(struct otlp_call *c)
{
	for (size_t i = 0; i < c->n_headers; i++) {
		grpc_slice_unref(c->headers[i].key);
		grpc_slice_unref(c->headers[i].value);
	}
	grpc_call_unref(c->call);
	grpc_byte_buffer_destroy(c->request);
	if (c->reply)
		grpc_byte_buffer_destroy(c->reply);
	grpc_metadata_array_destroy(&c->initial);
	grpc_metadata_array_destroy(&c->trailing);
	grpc_slice_unref(c->details);
	CHECK(c->r->n_calls > 0);
	c->r->n_calls--;
	free(c);
}

static void otlp_rpc_on_ended(struct work *w)
{
	struct otlp_call *c = CONTAINER_OF(w, struct otlp_call, work);
	Shardd__Otlp__V1__ExportResponse *reply =
		c->status == GRPC_STATUS_OK ? otlp_rpc_read_reply(c) : NULL;
	struct otlp_answer a = { .status = (int)c->status, .warning = "" };
	char *details = grpc_slice_to_c_string(c->details), why[512];
	bool says = c->status != GRPC_STATUS_OK && otlp_rpc_find_retry(c, &a.wait_ms);

	otlp_rpc_hide_headers(c, details); /* as a whole: a part of a secret is one, too */
	if (c->status == GRPC_STATUS_OK && !reply) {
		a.status = GRPC_STATUS_UNKNOWN;
		snprintf(why, sizeof(why), "the collector's answer cannot be read");
	} else {
		snprintf(why, sizeof(why), "%s%s", otlp_rpc_hint(c->r, a.status, details), details);
	}
	codec_clean_text(why);
	a.why = why;
	a.again = otlp_rpc_may_again(a.status, says);
	if (reply && reply->partial_success) {
		a.rejected = reply->partial_success->rejected;
		a.warning = reply->partial_success->error_message;
		otlp_rpc_hide_headers(c, reply->partial_success->error_message);
		codec_clean_text(reply->partial_success->error_message);
	}
	if (c->status == GRPC_STATUS_DEADLINE_EXCEEDED)
		otlp_rpc_reconnect(c->r);
	c->done(&a, c->userdata);
	if (reply)
		protobuf_c_message_free_unpacked(&reply->base, NULL);
	gpr_free(details);
	otlp_rpc_free_call(c);
}

/* --------------------------------------------------------------------------------- a call */

static void otlp_rpc_make_call(struct otlp_call *c, const char *method, uint32_t timeout_ms)
{
	gpr_timespec until = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
					  gpr_time_from_millis(timeout_ms, GPR_TIMESPAN));

	c->call =
		grpc_channel_create_call(c->r->channel, NULL, GRPC_PROPAGATE_DEFAULTS, c->r->cq,
					 grpc_slice_from_static_string(method), NULL, until, NULL);
	grpc_metadata_array_init(&c->initial);
	grpc_metadata_array_init(&c->trailing);
	c->details = grpc_empty_slice();
}

/* Slices of the headers' own text would outlive a reload of it. */
static void otlp_rpc_add_headers(struct otlp_call *c)
{
	const struct otlp_headers *h = &c->r->headers;

	for (size_t i = 0; i < h->n; i++)
		c->headers[i] =
			(grpc_metadata){ .key = grpc_slice_from_copied_string(h->list[i].name),
					 .value = grpc_slice_from_copied_string(h->list[i].value) };
	c->n_headers = h->n;
}

struct otlp_call *otlp_rpc_call(struct otlp_rpc *r, const char *method, const void *data,
				size_t bytes, uint32_t timeout_ms, otlp_call_cb done,
				void *userdata)
{
	struct otlp_call *c = calloc(1, sizeof(*c));
	grpc_slice s;

	if (!c)
		return NULL;
	c->r = r;
	c->done = done;
	c->userdata = userdata;
	s = grpc_slice_from_copied_buffer(data, bytes);
	c->request = grpc_raw_byte_buffer_create(&s, 1);
	grpc_slice_unref(s);
	otlp_rpc_make_call(c, method, timeout_ms);
	otlp_rpc_add_headers(c);
	r->n_calls++;
	const grpc_op ops[] = {
		{ .op = GRPC_OP_SEND_INITIAL_METADATA,
		  .data.send_initial_metadata = { .count = c->n_headers, .metadata = c->headers } },
		{ .op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = c->request },
		{ .op = GRPC_OP_SEND_CLOSE_FROM_CLIENT },
		{ .op = GRPC_OP_RECV_INITIAL_METADATA,
		  .data.recv_initial_metadata.recv_initial_metadata = &c->initial },
		{ .op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &c->reply },
		{ .op = GRPC_OP_RECV_STATUS_ON_CLIENT,
		  .data.recv_status_on_client = { .trailing_metadata = &c->trailing,
						  .status = &c->status,
						  .status_details = &c->details } },
	};
	CHECK(grpc_call_start_batch(c->call, ops, ARRAY_SIZE(ops), c, NULL) == GRPC_CALL_OK);
	return c;
}

void otlp_call_cancel(struct otlp_call *c)
{
	grpc_call_cancel(c->call, NULL);
}

/* ------------------------------------------------------------------------------------ life */

static void *otlp_rpc_main(void *rpc)
{
	struct otlp_rpc *r = rpc;

	for (;;) {
		grpc_event ev = grpc_completion_queue_next(
			r->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
		struct otlp_call *c = ev.tag;

		if (ev.type == GRPC_QUEUE_SHUTDOWN)
			return NULL;
		loopq_post(r->loopq, &c->work, otlp_rpc_on_ended);
	}
}

static grpc_channel_credentials *otlp_rpc_credentials(const struct otlp_target *t, const char *ca)
{
	grpc_tls_credentials_options *tls;
	grpc_tls_certificate_provider *files;

	if (!t->tls)
		return grpc_insecure_credentials_create();
	if (!ca) /* core's own default is those of the machine */
		return grpc_ssl_credentials_create(NULL, NULL, NULL, NULL);
	tls = grpc_tls_credentials_options_create();
	files = grpc_tls_certificate_provider_file_watcher_create(NULL, NULL, ca, TLS_RELOAD_S);
	grpc_tls_credentials_options_set_certificate_provider(tls, files); /* has a reference */
	grpc_tls_certificate_provider_release(files);
	grpc_tls_credentials_options_watch_root_certs(tls);
	return grpc_tls_credentials_create(tls);
}

static void otlp_rpc_connect(struct otlp_rpc *r, const struct otlp_target *t, const char *ca)
{
	const bool is_name = !hostport_is_numeric(t->at.host);
	char at[HOSTPORT_TEXT_BYTES];

	hostport_format(t->at.host, t->at.port, at);
	snprintf(r->target, sizeof(r->target), "%s%s", is_name ? OTLP_RPC_NAMES : "", at);
	r->creds = otlp_rpc_credentials(t, ca);
	r->channel = otlp_rpc_new_channel(r);
}

static int otlp_rpc_start_thread(struct otlp_rpc *r)
{
	sigset_t all, old;
	int error;

	sigfillset(&all); /* signals are the loop's */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	error = pthread_create(&r->thread, NULL, otlp_rpc_main, r);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (error == 0)
		pthread_setname_np(r->thread, "shardd-otlp");
	return -error;
}

int otlp_rpc_new(struct loopq *loopq, const struct otlp_target *target, const char *ca,
		 struct otlp_rpc **ret, struct fault *f)
{
	struct otlp_rpc *r = calloc(1, sizeof(*r));
	int error;

	if (!r)
		return fault_errno(f, -ENOMEM, "starting the exporter to OpenTelemetry");
	r->loopq = loopq;
	r->tls = target->tls;
	grpc_init();
	r->cq = grpc_completion_queue_create_for_next(NULL);
	error = otlp_rpc_start_thread(r);
	if (error == 0) {
		otlp_rpc_connect(r, target, ca);
		*ret = r;
		return 0;
	}
	grpc_completion_queue_shutdown(r->cq);
	grpc_completion_queue_destroy(r->cq);
	grpc_shutdown();
	free(r);
	return fault_errno(f, error, "starting the exporter to OpenTelemetry");
}

void otlp_rpc_set_headers(struct otlp_rpc *r, struct otlp_headers *h)
{
	otlp_headers_deinit(&r->headers);
	r->headers = *h;
	*h = OTLP_HEADERS_NULL;
}

struct otlp_rpc *otlp_rpc_free(struct otlp_rpc *r)
{
	if (!r)
		return NULL;
	CHECK(r->n_calls == 0);
	grpc_completion_queue_shutdown(r->cq);
	pthread_join(r->thread, NULL);
	grpc_channel_destroy(r->channel);
	grpc_channel_credentials_release(r->creds);
	grpc_completion_queue_destroy(r->cq);
	otlp_headers_deinit(&r->headers);
	grpc_shutdown();
	free(r);
	return NULL;
}
