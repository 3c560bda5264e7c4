/* The store in etcd: its connections, leases, and what is common to its calls. */
#include "coord/etcd_impl.h"

#include <errno.h>
#include <grpc/grpc_security.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/hostport.h"
#include "core/pem.h"

#define RECONNECT_FIRST_MS 100
#define RECONNECT_MOST_MS  1000
/* For one try: an etcd that begins accepts connections before it answers. */
#define CONNECT_MS 3000
/* Files of certificates: how often they are looked at. */
#define TLS_RELOAD_S 5u
/* etcd refuses clients that ping more often than each 5 s. */
#define PING_MS         10000
#define PING_TIMEOUT_MS 3000

static struct etcd *etcd_of(struct coord *c)
{
	return CONTAINER_OF(c, struct etcd, coord);
}

/* -------------------------------------------------------------------------------- leases */

/* What a call without an answer of its own is for its owner: @lease, @ttl_s: of the answer. */
static void etcd_answer(struct etcd_rpc *r, grpc_status_code status, const char *why,
			const Shardd__Etcd__V1__ResponseHeader *header, int64_t lease,
			int64_t ttl_s)
{
	struct coord_reply reply = { .status = etcd_txn_status(status),
				     .why = why,
				     .revision = header ? header->revision : 0,
				     .lease = lease,
				     .ttl_s = ttl_s };
	struct coord_call *owner = r->owner;

	r->owner = NULL;
	if (reply.status == COORD_OK && lease && !ttl_s) {
		reply.status = COORD_NO_LEASE;
		reply.why = "the lease is gone";
	}
	if (owner)
		coord_call_end(&r->e->coord, owner, &reply);
}

static void etcd_on_granted(struct etcd_rpc *r, grpc_status_code status, const char *why)
{
	Shardd__Etcd__V1__LeaseGrantResponse *m =
		(void *)etcd_rpc_reply(r, &shardd__etcd__v1__lease_grant_response__descriptor);

	if (status == GRPC_STATUS_OK && m && !*m->error)
		etcd_answer(r, status, NULL, m->header, m->id, m->ttl);
	else if (status == GRPC_STATUS_OK)
		etcd_answer(r, GRPC_STATUS_UNKNOWN, m ? m->error : "etcd's answer cannot be read",
			    NULL, 0, 0);
	else
		etcd_answer(r, status, why, NULL, 0, 0);
	if (m)
		protobuf_c_message_free_unpacked(&m->base, NULL);
}

static void etcd_on_kept(struct etcd_rpc *r, grpc_status_code status, const char *why)
{
	Shardd__Etcd__V1__LeaseKeepAliveResponse *m =
		(void *)etcd_rpc_reply(r, &shardd__etcd__v1__lease_keep_alive_response__descriptor);

	if (m && m->id) /* whatever comes behind it */
		etcd_answer(r, GRPC_STATUS_OK, NULL, m->header, m->id, m->ttl);
	else if (status == GRPC_STATUS_OK)
		etcd_answer(r, GRPC_STATUS_UNKNOWN, "etcd has not answered", NULL, 0, 0);
	else
		etcd_answer(r, status, why, NULL, 0, 0);
	if (m)
		protobuf_c_message_free_unpacked(&m->base, NULL);
}

static void etcd_on_revoked(struct etcd_rpc *r, grpc_status_code status, const char *why)
{
	struct coord_call *owner = r->owner;
	struct coord_reply gone = { .status = COORD_NO_LEASE, .why = "the lease is gone" };

	if (status != GRPC_STATUS_NOT_FOUND) {
		etcd_answer(r, status, why, NULL, 0, 0);
		return;
	}
	r->owner = NULL;
	if (owner)
		coord_call_end(&r->e->coord, owner, &gone);
}

static int etcd_begin(struct coord *c, struct coord_call *call, const char *method,
		      const ProtobufCMessage *request,
		      void (*done)(struct etcd_rpc *r, grpc_status_code status, const char *why),
		      uint32_t timeout_ms)
{
	struct etcd_rpc *r = etcd_rpc_new(etcd_of(c), method, request);

	if (!r)
		return -ENOMEM;
	r->done = done;
	r->owner = call;
	if (etcd_rpc_start(r, timeout_ms))
		return -ENOMEM;
	call->impl = r;
	return 0;
}

static int etcd_grant(struct coord *c, struct coord_call *call, int64_t ttl_s, uint32_t timeout_ms)
{
	Shardd__Etcd__V1__LeaseGrantRequest q = SHARDD__ETCD__V1__LEASE_GRANT_REQUEST__INIT;

	q.ttl = ttl_s;
	return etcd_begin(c, call, "/etcdserverpb.Lease/LeaseGrant", &q.base, etcd_on_granted,
			  timeout_ms);
}

static int etcd_keep(struct coord *c, struct coord_call *call, int64_t lease, uint32_t timeout_ms)
{
	Shardd__Etcd__V1__LeaseKeepAliveRequest q =
		SHARDD__ETCD__V1__LEASE_KEEP_ALIVE_REQUEST__INIT;

	q.id = lease;
	return etcd_begin(c, call, "/etcdserverpb.Lease/LeaseKeepAlive", &q.base, etcd_on_kept,
			  timeout_ms);
}

static int etcd_revoke(struct coord *c, struct coord_call *call, int64_t lease, uint32_t timeout_ms)
{
	Shardd__Etcd__V1__LeaseRevokeRequest q = SHARDD__ETCD__V1__LEASE_REVOKE_REQUEST__INIT;

	q.id = lease;
	return etcd_begin(c, call, "/etcdserverpb.Lease/LeaseRevoke", &q.base, etcd_on_revoked,
			  timeout_ms);
}

static void etcd_cancel(struct coord_call *call)
{
	struct etcd_rpc *r = call->impl;

	r->owner = NULL;
	coord_cancelled(&r->e->coord, call);
	etcd_rpc_cancel(r);
}

/* --------------------------------------------------------------------------- begin and end */

static void etcd_close(struct coord *c)
{
	struct etcd *e = etcd_of(c);
	struct list *l;

	atomic_store(&e->closing, true);
	for (l = e->rpcs.next; l != &e->rpcs; l = l->next)
		if (CONTAINER_OF(l, struct etcd_rpc, link)->call)
			grpc_call_cancel(CONTAINER_OF(l, struct etcd_rpc, link)->call, NULL);
	grpc_completion_queue_shutdown(e->cq);
	pthread_join(e->thread, NULL); /* all calls are cancelled: it ends at once */
	etcd_rpc_free_dead(e);
	for (size_t i = 0; i < e->n_endpoints; i++)
		for (unsigned k = 0; k < _ETCD_CHANNEL_N; k++)
			grpc_channel_destroy(e->endpoints[i].channels[k]);
	grpc_completion_queue_destroy(e->cq);
	etcd_unref(e);
}

static const struct coord_impl etcd_impl = {
	.txn = etcd_txn_start,
	.grant = etcd_grant,
	.keep = etcd_keep,
	.revoke = etcd_revoke,
	.cancel = etcd_cancel,
	.watch_begin = etcd_watch_begin,
	.watch_end = etcd_watch_end,
	.close = etcd_close,
};

static grpc_arg etcd_arg(const char *key, int value)
{
	return (grpc_arg){ GRPC_ARG_INTEGER, (char *)key, { .integer = value } };
}

static grpc_channel *etcd_channel_new(const char *target, grpc_channel_credentials *creds)
{
	grpc_arg args[] = {
		etcd_arg(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1), /* a connection of its own */
		etcd_arg(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
		etcd_arg(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1),
		etcd_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, INT_MAX),
		etcd_arg(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, RECONNECT_FIRST_MS),
		etcd_arg(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CONNECT_MS),
		etcd_arg(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, RECONNECT_MOST_MS),
		etcd_arg(GRPC_ARG_KEEPALIVE_TIME_MS, PING_MS),
		etcd_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, PING_TIMEOUT_MS),
		etcd_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0), /* a watch is idle for long */
	};
	grpc_channel_args list = { ARRAY_SIZE(args), args };

	return grpc_channel_create(target, creds, &list);
}

static grpc_channel_credentials *etcd_credentials(const struct coord_options *o)
{
	grpc_tls_credentials_options *tls;
	grpc_tls_certificate_provider *files;

	if (!o->ca)
		return grpc_insecure_credentials_create();
	tls = grpc_tls_credentials_options_create();
	files = grpc_tls_certificate_provider_file_watcher_create(o->key, o->cert, o->ca,
								  TLS_RELOAD_S);
	grpc_tls_credentials_options_set_certificate_provider(tls, files); /* has a reference */
	grpc_tls_certificate_provider_release(files);
	grpc_tls_credentials_options_watch_root_certs(tls);
	if (o->cert)
		grpc_tls_credentials_options_watch_identity_key_cert_pairs(tls);
	return grpc_tls_credentials_create(tls);
}

static int etcd_check_endpoint(const char *at, struct fault *f)
{
	struct hostport h;

	if (!hostport_parse(at, &h))
		return fault_set(f, FAULT_INVALID, "coord",
				 "'%.200s' is no endpoint of etcd: write HOST:PORT, such as "
				 "10.0.0.1:2379 or [fd00::1]:2379",
				 at);
	return 0;
}

static int etcd_check(const struct coord_options *o, struct fault *f)
{
	if (!o->n_endpoints)
		return fault_set(f, FAULT_INVALID, "coord",
				 "there is no endpoint of etcd: write etcd://HOST:PORT");
	for (size_t i = 0; i < o->n_endpoints; i++)
		if (etcd_check_endpoint(o->endpoints[i], f))
			return (int)f->code;
	if (o->cert && !o->ca) /* else it would be ignored, and nothing encrypted */
		return fault_set(f, FAULT_INVALID, "coord",
				 "a certificate for etcd needs TLS: set the CA, too");
	if (!o->cert != !o->key)
		return fault_set(
			f, FAULT_INVALID, "coord",
			"a certificate for etcd and its key go together: set both or none");
	if (o->ca && (pem_check_file(o->ca, "coord_ca", f) ||
		      (o->cert && (pem_check_file(o->cert, "coord_cert", f) ||
				   pem_check_file(o->key, "coord_key", f)))))
		return (int)f->code;
	if (!o->user != !o->password)
		return fault_set(f, FAULT_INVALID, "coord",
				 "a user of etcd and the password go together: set both or none");
	return 0;
}

static void etcd_connect(struct etcd *e, const struct coord_options *o)
{
	grpc_channel_credentials *creds = etcd_credentials(o);

	e->plain = !o->ca;
	e->has_cert = o->cert;
	for (size_t i = 0; i < e->n_endpoints; i++)
		for (unsigned k = 0; k < _ETCD_CHANNEL_N; k++)
			e->endpoints[i].channels[k] =
				etcd_channel_new(e->endpoints[i].target, creds);
	grpc_channel_credentials_release(creds);
}

static int etcd_copy(struct etcd *e, const struct coord_options *o)
{
	e->endpoints = calloc(o->n_endpoints, sizeof(*e->endpoints));
	e->prefix = strdup(o->prefix);
	e->user = o->user ? strdup(o->user) : NULL;
	e->password = o->user ? strdup(o->password) : NULL;
	if (!e->endpoints || !e->prefix || (o->user && (!e->user || !e->password)))
		return -ENOMEM;
	for (; e->n_endpoints < o->n_endpoints; e->n_endpoints++) {
		e->endpoints[e->n_endpoints].target = strdup(o->endpoints[e->n_endpoints]);
		if (!e->endpoints[e->n_endpoints].target)
			return -ENOMEM;
	}
	return 0;
}

static int etcd_start_thread(struct etcd *e)
{
	sigset_t all, old;
	int r;

	sigfillset(&all); /* signals are the loop's */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&e->thread, NULL, etcd_rpc_main, e);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r == 0)
		pthread_setname_np(e->thread, "shardd-coord");
	return -r;
}

int coord_etcd_new(struct loopq *loopq, const struct coord_options *o, struct coord **ret,
		   struct fault *f)
{
	struct etcd *e;
	int r;

	CHECK(*o->prefix);
	if (etcd_check(o, f))
		return (int)f->code;
	e = calloc(1, sizeof(*e));
	if (!e)
		return fault_errno(f, -ENOMEM, "connecting to etcd");
	e->coord.impl = &etcd_impl;
	e->loopq = loopq;
	e->refs = 1;
	list_init(&e->dead);
	list_init(&e->waiting);
	list_init(&e->rpcs);
	r = etcd_copy(e, o);
	if (r == 0) {
		grpc_init();
		e->core = true;
		e->cq = grpc_completion_queue_create_for_next(NULL);
		r = etcd_start_thread(e);
		if (r == 0) {
			etcd_connect(e, o);
			*ret = &e->coord;
			return 0;
		}
		grpc_completion_queue_shutdown(e->cq);
		grpc_completion_queue_destroy(e->cq);
	}
	etcd_unref(e);
	return fault_errno(f, r, "connecting to etcd");
}
