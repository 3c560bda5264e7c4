#include "rpc/svc_health.h"

#include <stdlib.h>
#include <string.h>

#include "health.pb-c.h"

#define UNKNOWN     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN
#define SERVING     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
#define NOT_SERVING GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING

#define HEALTH_SERVICES 32u

/* One Watch; ends with its call. */
struct watcher {
	struct list link;
	struct rpc_call *call;
};

static bool svc_health_is_known(const struct health *h, const char *service)
{
	for (size_t i = 0; i < h->n; i++)
		if (strcmp(service, h->services[i].desc->name) == 0)
			return true;
	return !*service;
}

static Grpc__Health__V1__HealthCheckResponse svc_health_response(const struct health *h)
{
	Grpc__Health__V1__HealthCheckResponse msg = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

	msg.status = h->serving ? SERVING : NOT_SERVING;
	return msg;
}

static void svc_health_check(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Grpc__Health__V1__HealthCheckRequest *req = (const void *)request;
	Grpc__Health__V1__HealthCheckResponse msg = svc_health_response(userdata);
	struct fault f = FAULT_NULL;

	if (svc_health_is_known(userdata, req->service)) {
		rpc_call_reply(call, &msg.base);
		return;
	}
	fault_set(&f, FAULT_NOT_FOUND, "service", "there is no service %.64s here", req->service);
	rpc_call_fail(call, &f);
}

static void svc_health_list(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	Grpc__Health__V1__HealthListResponse__StatusesEntry entries[1 + HEALTH_SERVICES],
		*all[1 + HEALTH_SERVICES];
	Grpc__Health__V1__HealthListResponse msg = GRPC__HEALTH__V1__HEALTH_LIST_RESPONSE__INIT;
	Grpc__Health__V1__HealthCheckResponse status = svc_health_response(userdata);
	const struct health *h = userdata;

	(void)request;
	for (size_t i = 0; i <= h->n; i++) {
		grpc__health__v1__health_list_response__statuses_entry__init(&entries[i]);
		entries[i].key = i ? (char *)h->services[i - 1].desc->name : "";
		entries[i].value = &status;
		all[i] = &entries[i];
	}
	msg.n_statuses = 1 + h->n;
	msg.statuses = all;
	rpc_call_reply(call, &msg.base);
}

static void svc_health_watcher_free(struct watcher *w)
{
	list_unlink(&w->link);
	free(w);
}

static void svc_health_on_cancelled(struct rpc_call *call, void *userdata)
{
	svc_health_watcher_free(userdata);
	rpc_call_end(call);
}

/* A watch whose client does not read is ended. */
static void svc_health_tell(struct health *h, struct watcher *w)
{
	Grpc__Health__V1__HealthCheckResponse msg = svc_health_response(h);
	struct rpc_call *call = w->call;
	struct fault f = FAULT_NULL;

	if (rpc_call_send(call, &msg.base) == 0)
		return;
	svc_health_watcher_free(w);
	fault_set(&f, FAULT_EXHAUSTED, NULL, "the watcher does not read its messages");
	rpc_call_fail(call, &f);
}

/* The protocol requires the call to stay open for a name that is not known (yet). */
static void svc_health_watch(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Grpc__Health__V1__HealthCheckRequest *req = (const void *)request;
	Grpc__Health__V1__HealthCheckResponse msg = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
	struct watcher *w = calloc(1, sizeof(*w));
	struct health *h = userdata;
	struct fault f = FAULT_NULL;

	if (!w) {
		fault_set(&f, FAULT_EXHAUSTED, NULL, "no memory for another watch");
		rpc_call_fail(call, &f);
		return;
	}
	w->call = call;
	list_init(&w->link);
	rpc_call_on_cancelled(call, svc_health_on_cancelled, w);
	if (svc_health_is_known(h, req->service)) {
		list_append(&h->watchers, &w->link);
		svc_health_tell(h, w);
		return;
	}
	msg.status = UNKNOWN;
	rpc_call_send(call, &msg.base);
}

static const struct rpc_method methods[] = {
	{ "Check", svc_health_check, false, false },
	{ "List", svc_health_list, false, false },
	{ "Watch", svc_health_watch, true, false },
	{ NULL, NULL, false, false },
};

void health_init(struct health *h, const struct rpc_service *services, size_t n)
{
	CHECK(n <= HEALTH_SERVICES);
	h->serving = false;
	h->services = services;
	h->n = n;
	list_init(&h->watchers);
	h->service = (struct rpc_service){ &grpc__health__v1__health__descriptor, methods, h };
}

void health_deinit(struct health *h)
{
	CHECK(list_empty(&h->watchers));
}

void health_set(struct health *h, bool serving)
{
	struct watcher *w, *tmp;

	if (h->serving == serving)
		return;
	h->serving = serving;
	list_for_each (w, tmp, &h->watchers, link)
		svc_health_tell(h, w);
}

const struct rpc_service *health_service(const struct health *h)
{
	return &h->service;
}
