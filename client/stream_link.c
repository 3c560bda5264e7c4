/* What a join said about the order between streams and the daemon's queues. */
#include "methods.h"
#include "stream.h"

#ifdef SHARDD_CUDA

#include <stdlib.h>
#include <string.h>

#include "client.h"
#include "call.h"
#include "client_error.h"
#include "core/cleanup.h"
#include "stream_impl.h"

static_assert(sizeof(CUipcEventHandle) == MAP_IPC_BYTES, "handles");

#define IS_EVENTS(link)   ((link)->order == SHARDD__V1__STREAM_LINK__ORDER__ORDER_EVENTS)
#define IS_TIMELINE(link) ((link)->order == SHARDD__V1__STREAM_LINK__ORDER__ORDER_TIMELINE)

/* ------------------------------------------------------------------- reading */

static int stream_link_bad_link(const char *what, struct shardd_error *err)
{
	return error_set(err, SHARDD_INTERNAL, NULL,
			 "the daemon's answer to the join has an invalid stream link: %s", what);
}

static int stream_link_place_copy(const Shardd__V1__Placement *from, struct link_place *to,
				  struct shardd_error *err)
{
	if (!from || (from->ipc_handle.len && from->ipc_handle.len != MAP_IPC_BYTES))
		return stream_link_bad_link("a placement is missing or malformed", err);
	to->place = (struct map_place){ .slab = from->slab,
					.offset = from->offset,
					.bytes = from->bytes,
					.writable = from->writable,
					.slab_bytes = from->slab_bytes };
	if (from->ipc_handle.len) {
		memcpy(to->handle, from->ipc_handle.data, MAP_IPC_BYTES);
		to->place.ipc = to->handle;
	}
	return 0;
}

static int stream_link_timeline_copy(const Shardd__V1__StreamLink *from, struct stream_link *to,
				     struct shardd_error *err)
{
	int r = stream_link_place_copy(from->signals, &to->signals_place, err);

	if (r == 0)
		r = stream_link_place_copy(from->ready, &to->ready_place, err);
	if (r < 0)
		return r;
	if (to->stride < sizeof(uint64_t) || to->stride % sizeof(uint64_t) != 0)
		return stream_link_bad_link("its words overlap", err);
	to->queues = (uint32_t)(to->ready_place.place.bytes / to->stride);
	if (to->signals_place.place.bytes / to->stride < to->slots)
		return stream_link_bad_link("it has fewer words than slots", err);
	return 0;
}

static int stream_link_events_copy(const Shardd__V1__StreamLink *from, struct stream_link *to,
				   struct shardd_error *err)
{
	size_t n = from->n_ready_events;
	int r = 0;

	/* Not mapped; but another page tells that the daemon knows nothing of our events. */
	if (from->signals)
		r = stream_link_place_copy(from->signals, &to->signals_place, err);
	if (r < 0)
		return r;

	if (!from->event_ring || !n || n % from->event_ring != 0)
		return stream_link_bad_link("its events do not form whole rings", err);
	to->handles = calloc(n, MAP_IPC_BYTES);
	to->ready_events = calloc(n, sizeof(*to->ready_events));
	if (!to->handles || !to->ready_events)
		return error_memory(err);
	to->ring_size = from->event_ring;
	to->queues = (uint32_t)(n / from->event_ring);
	for (size_t i = 0; i < n; i++) {
		if (from->ready_events[i].len != MAP_IPC_BYTES)
			return stream_link_bad_link("an event handle is malformed", err);
		memcpy(to->handles + i * MAP_IPC_BYTES, from->ready_events[i].data, MAP_IPC_BYTES);
	}
	return 0;
}

int stream_link_new(const Shardd__V1__StreamLink *from, struct stream_link **ret,
		    struct shardd_error *err)
{
	struct stream_link *to = calloc(1, sizeof(*to));
	int r = 0;

	if (!to)
		return error_memory(err);
	to->order = from->order;
	to->slots = from->slots;
	to->stride = from->slot_stride;
	if (IS_TIMELINE(to))
		r = stream_link_timeline_copy(from, to, err);
	else if (IS_EVENTS(to))
		r = stream_link_events_copy(from, to, err);
	if (r < 0)
		stream_link_free(NULL, to);
	else
		*ret = to;
	return r;
}

struct stream_link *stream_link_free(const struct cuda *c, struct stream_link *link)
{
	struct stream_link *older = link->older;

	for (uint32_t i = 0; link->ready_events && i < link->queues * link->ring_size; i++)
		if (link->ready_events[i])
			c->lib->cuEventDestroy(link->ready_events[i]);
	free(link->ready_events);
	free(link->handles);
	free(link);
	return older;
}

bool stream_link_orders(const struct stream_link *link)
{
	return link && (IS_TIMELINE(link) || IS_EVENTS(link));
}

int stream_link_refused(struct shardd_error *err)
{
	return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
			 "the daemon orders no ops with streams on this device: use no stream");
}

static bool stream_link_place_same(const struct link_place *a, const struct link_place *b)
{
	return a->place.slab == b->place.slab && a->place.offset == b->place.offset &&
	       a->place.bytes == b->place.bytes;
}

bool stream_link_same(const struct stream_link *a, const struct stream_link *b)
{
	if (a->order != b->order || a->slots != b->slots || a->stride != b->stride ||
	    a->queues != b->queues || a->ring_size != b->ring_size)
		return false;
	if (!stream_link_place_same(&a->signals_place, &b->signals_place) ||
	    !stream_link_place_same(&a->ready_place, &b->ready_place))
		return false;
	return !IS_EVENTS(a) || memcmp(a->handles, b->handles,
				       (size_t)a->queues * a->ring_size * MAP_IPC_BYTES) == 0;
}

/* ------------------------------------------------------------------- opening */

static int stream_link_map_words(struct streams *s, const struct link_place *p, CUdeviceptr *ret,
				 struct shardd_error *err)
{
	void *at;
	int r = map_address(&s->client->map, &p->place, -1, &at, err);

	if (r == 0)
		*ret = (CUdeviceptr)(uintptr_t)at;
	return r;
}

static int stream_link_open_events(const struct cuda *c, struct stream_link *link,
				   struct shardd_error *err)
{
	for (uint32_t i = 0; i < link->queues * link->ring_size; i++) {
		CUipcEventHandle handle;
		CUresult r;

		memcpy(&handle, link->handles + (size_t)i * MAP_IPC_BYTES, sizeof(handle));
		if (link->ready_events[i])
			continue;
		r = c->lib->cuIpcOpenEventHandle(&link->ready_events[i], handle);
		if (r != CUDA_SUCCESS)
			return cuda_error(c, r, err, "cannot open the daemon's events");
	}
	return 0;
}

int stream_link_open(struct streams *s, struct stream_link *link, struct shardd_error *err)
{
	int r = 0;

	if (link->open)
		return 0;
	if (IS_EVENTS(link)) {
		r = stream_link_open_events(s->cuda, link, err);
	} else {
		r = stream_link_map_words(s, &link->signals_place, &link->signals, err);
		if (r == 0)
			r = stream_link_map_words(s, &link->ready_place, &link->ready, err);
	}
	link->open = r == 0;
	return r;
}

/* ------------------------------------------------------------------- sharing */

static int stream_link_make_ring(const struct cuda *c, uint32_t n, struct stream *x,
				 struct shardd_error *err)
{
	x->ring = calloc(n, sizeof(*x->ring));
	x->holders = calloc(n, sizeof(*x->holders));
	if (!x->ring || !x->holders)
		return error_memory(err);
	x->ring_size = n;
	for (uint32_t i = 0; i < n; i++) {
		CUresult r = c->lib->cuEventCreate(&x->ring[i],
						   CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);

		if (r != CUDA_SUCCESS)
			return cuda_error(c, r, err, "cannot create an interprocess event");
	}
	return 0;
}

int stream_link_tell(struct streams *s, uint32_t slot, const uint8_t *handles, uint32_t n,
		     struct shardd_error *err)
{
	Shardd__V1__ShareEventsRequest request = SHARDD__V1__SHARE_EVENTS_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	ProtobufCBinaryData *list = calloc(n, sizeof(*list));
	int r;

	if (!list)
		return error_memory(err);
	for (uint32_t i = 0; i < n; i++)
		list[i] = (ProtobufCBinaryData){ MAP_IPC_BYTES,
						 (uint8_t *)handles + (size_t)i * MAP_IPC_BYTES };
	request.slot = slot;
	request.handles = list;
	request.n_handles = n;
	r = call_once(s->client, METHOD_ShareEvents, &request.base,
		      &shardd__v1__share_events_response__descriptor, &reply, NULL, err);
	free(list);
	return r;
}

static int stream_link_share_ring(struct streams *s, const struct stream *x, uint8_t *handles,
				  struct shardd_error *err)
{
	CUipcEventHandle handle;

	for (uint32_t i = 0; i < x->ring_size; i++) {
		CUresult r = s->cuda->lib->cuIpcGetEventHandle(&handle, x->ring[i]);

		if (r != CUDA_SUCCESS)
			return cuda_error(s->cuda, r, err, "cannot share an event");
		memcpy(handles + (size_t)i * MAP_IPC_BYTES, &handle, sizeof(handle));
	}
	return s->tell(s, x->slot, handles, x->ring_size, err);
}

int stream_link_share(struct streams *s, const struct stream_link *link, struct stream *x,
		      struct shardd_error *err)
{
	uint8_t *handles;
	int r = 0;

	if (!IS_EVENTS(link))
		return 0;
	if (!x->ring)
		r = stream_link_make_ring(s->cuda, link->ring_size, x, err);
	if (r < 0)
		return r;
	if (x->ring_size != link->ring_size)
		return stream_link_bad_link("its rings have a different size than before", err);
	handles = calloc(x->ring_size, MAP_IPC_BYTES);
	r = handles ? stream_link_share_ring(s, x, handles, err) : error_memory(err);
	free(handles);
	return r;
}

#endif
