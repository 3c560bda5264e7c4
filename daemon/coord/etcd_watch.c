/* Watches: a stream each. One that was cancelled by etcd, or whose connection broke, ends. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "coord/etcd_impl.h"
#include "core/check.h"

static void etcd_watch_over(struct etcd_rpc *r, bool compacted, const char *why)
{
	struct coord_watch *w = r->watch;

	if (!w)
		return;
	r->watch = NULL;
	coord_watch_over(&r->e->coord, w);
	w->ops->ended(w, compacted, why);
}

static void etcd_watch_on_done(struct etcd_rpc *r, grpc_status_code status, const char *why)
{
	etcd_watch_over(r, false, status == GRPC_STATUS_OK ? "etcd has ended it" : why);
}

static void etcd_watch_tell(struct etcd_rpc *r, const Shardd__Etcd__V1__WatchResponse *m)
{
	struct coord_event *events = calloc(m->n_events + 1, sizeof(*events));
	int e = events ? 0 : -ENOMEM;

	for (size_t i = 0; e == 0 && i < m->n_events; i++) {
		e = m->events[i]->kv ? etcd_txn_kv(r->e, m->events[i]->kv, &events[i].kv) : -EPROTO;
		events[i].removed = m->events[i]->type == 1;
	}
	if (e)
		etcd_watch_over(r, true, "no memory for what has changed");
	else
		/* the header's revision may be ahead of what is told */
		r->watch->ops->events(r->watch, events, m->n_events,
				      events[m->n_events - 1].kv.modified);
	for (size_t i = 0; events && i < m->n_events; i++)
		free((char *)events[i].kv.key);
	free(events);
}

static void etcd_watch_take(struct etcd_rpc *r, const Shardd__Etcd__V1__WatchResponse *m)
{
	if (m->canceled)
		etcd_watch_over(r, m->compact_revision > 0,
				m->compact_revision ? "the changes were compacted"
						    : m->cancel_reason);
	else if (m->n_events)
		etcd_watch_tell(r, m);
}

static void etcd_watch_on_message(struct etcd_rpc *r, bool ok)
{
	Shardd__Etcd__V1__WatchResponse *m =
		(void *)etcd_rpc_reply(r, &shardd__etcd__v1__watch_response__descriptor);

	if (m && r->watch)
		etcd_watch_take(r, m);
	else if (ok && r->reply && r->watch)
		etcd_watch_over(r, true, "etcd's answer cannot be read");
	if (m)
		protobuf_c_message_free_unpacked(&m->base, NULL);
	if (ok && r->reply && r->watch)
		etcd_rpc_next(r);
	else if (r->n_open)
		etcd_rpc_cancel(r); /* its status comes */
}

int etcd_watch_begin(struct coord *c, struct coord_watch *w, const char *prefix, int64_t from)
{
	struct etcd *e = CONTAINER_OF(c, struct etcd, coord);
	Shardd__Etcd__V1__WatchRequest q = SHARDD__ETCD__V1__WATCH_REQUEST__INIT;
	Shardd__Etcd__V1__WatchCreateRequest create = SHARDD__ETCD__V1__WATCH_CREATE_REQUEST__INIT;
	char *key = etcd_txn_key(e, prefix);
	uint8_t *end = key ? etcd_txn_range_end(key) : NULL;
	struct etcd_rpc *r = NULL;

	q.request_union_case = SHARDD__ETCD__V1__WATCH_REQUEST__REQUEST_UNION_CREATE_REQUEST;
	q.create_request = &create;
	create.start_revision = from;
	if (end) {
		create.key = (ProtobufCBinaryData){ strlen(key), (uint8_t *)key };
		create.range_end = (ProtobufCBinaryData){ strlen(key), end };
		r = etcd_rpc_new(e, "/etcdserverpb.Watch/Watch", &q.base);
	}
	free(key);
	free(end);
	if (!r)
		return -ENOMEM;
	r->kind = ETCD_WATCHES;
	r->watch = w;
	r->message.fn = etcd_watch_on_message;
	r->done = etcd_watch_on_done;
	if (etcd_rpc_start(r, 0))
		return -ENOMEM;
	w->impl = r;
	return 0;
}

void etcd_watch_end(struct coord_watch *w)
{
	struct etcd_rpc *r = w->impl;

	r->watch = NULL;
	coord_watch_over(&r->e->coord, w);
	etcd_rpc_cancel(r);
}
