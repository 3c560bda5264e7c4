/* Publications of a job, and leases of their generations. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/log.h"
#include "json/json_message.h"
#include "publication.pb-c.h"
#include "publish/publication.h"
#include "rpc/arena.h"
#include "rpc/status_turns.h"
#include "rpc/svc_publication.h"
#include "rpc/svc_shardd_impl.h"

/* Tensors of one answer. */
#define SVC_PUBLISH_PAGE 4096u
/* Of a declaration: what it is parsed into takes hundreds of times as much. */
#define SVC_PUBLISH_JSON (512u << 10)

/* The job @name, if the caller may open it. Return: 0 or a fault code. */
static int svc_shardd_publish_job(struct rpc_call *call, void *userdata, const struct session *s,
				  const char *name, struct job **ret, struct fault *f)
{
	return svc_find_job(call, userdata, name, ret, f) ||
			       job_check_open(*ret, proc_uid(s->proc), f)
		       ? (int)f->code
		       : 0;
}

/* ------------------------------------------------------------------- declare, drop */

/* The declaration of the request. @made: the one from JSON, to be freed. */
static int svc_shardd_publish_declared(const Shardd__V1__DeclarePublicationRequest *r,
				       ProtobufCMessage **made, const view_declaration **ret,
				       struct fault *f)
{
	if (!r->publication == !*r->json)
		return fault_set(f, FAULT_INVALID, r->publication ? "json" : "publication",
				 "either publication or json is needed");
	if (strlen(r->json) > SVC_PUBLISH_JSON)
		return fault_set(f, FAULT_INVALID, "json",
				 "the declaration has %zu bytes of JSON; at most %u are possible",
				 strlen(r->json), SVC_PUBLISH_JSON);
	*ret = r->publication;
	if (*r->json &&
	    json_message(r->json, "json", &shardd__v1__publication__descriptor, made, f) == 0)
		*ret = (const view_declaration *)*made;
	return f->code;
}

static void svc_shardd_publish_declare(struct rpc_call *call, const ProtobufCMessage *request,
				       void *userdata)
{
	const Shardd__V1__DeclarePublicationRequest *r =
		(const Shardd__V1__DeclarePublicationRequest *)request;
	Shardd__V1__DeclarePublicationResponse reply =
		SHARDD__V1__DECLARE_PUBLICATION_RESPONSE__INIT;
	struct session *s = svc_session(call);
	const view_declaration *d = NULL;
	ProtobufCMessage *made = NULL;
	struct publication *p = NULL;
	struct fault f = FAULT_NULL;
	struct job *job;

	if (!s)
		return;
	if (svc_shardd_publish_job(call, userdata, s, r->job, &job, &f) ||
	    svc_shardd_publish_declared(r, &made, &d, &f) || publication_declare(job, d, &p, &f)) {
		svc_refuse(call, "publish", r->job, &f);
	} else {
		log_info("job", "publication declared job=%s publication=%s tensors=%u bytes=%llu",
			 job->label, d->name, p->assembly->view->n,
			 (unsigned long long)p->assembly->bytes);
		reply.tensors = p->assembly->view->n;
		reply.bytes = p->assembly->bytes;
		rpc_call_reply(call, &reply.base);
	}
	protobuf_c_message_free_unpacked(made, NULL);
}

/* One user's declarations do not take all of the loop's time. */
void svc_declare_publication(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	struct svc_shardd *svc = userdata;

	status_turns_serve(svc->turns, call, request, svc_shardd_publish_declare, userdata);
}

void svc_drop_publication(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__DropPublicationRequest *r =
		(const Shardd__V1__DropPublicationRequest *)request;
	Shardd__V1__DropPublicationResponse reply = SHARDD__V1__DROP_PUBLICATION_RESPONSE__INIT;
	struct publication *p =
		svc_publication_find(call, userdata, r->job, r->name, SVC_PUBLICATION_OWN);

	if (!p)
		return;
	publication_drop(p);
	rpc_call_reply(call, &reply.base);
}

/* ------------------------------------------------------------------------- waiting */

/* A call that waits for a generation. */
struct svc_shardd_publish_wait {
	struct publication_wait w;
	struct rpc_call *call;
	struct publication *p;
	void (*answer)(struct svc_shardd_publish_wait *wait);
};

static void svc_shardd_publish_on_wait(struct publication_wait *w, const struct fault *f)
{
	struct svc_shardd_publish_wait *wait = CONTAINER_OF(w, struct svc_shardd_publish_wait, w);

	rpc_call_on_cancelled(wait->call, NULL, NULL);
	if (f)
		rpc_call_fail(wait->call, f);
	else
		wait->answer(wait);
	free(wait);
}

static void svc_shardd_publish_on_cancelled(struct rpc_call *call, void *userdata)
{
	struct svc_shardd_publish_wait *wait = userdata;
	struct fault f = FAULT_NULL;

	publication_leave(&wait->w);
	free(wait);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

/* @how: answer, p, w.newer_than and w.asks. */
static void svc_shardd_publish_await(struct rpc_call *call,
				     const struct svc_shardd_publish_wait *how, uint32_t timeout_ms)
{
	struct svc_shardd_publish_wait *wait = malloc(sizeof(*wait));
	uint64_t ms = timeout_ms ? timeout_ms : how->p->job->rec->op_timeout_ms;
	struct fault f = FAULT_NULL;

	if (!wait) {
		fault_errno(&f, -ENOMEM, "waiting for a generation");
		rpc_call_fail(call, &f);
		return;
	}
	*wait = *how;
	wait->call = call;
	wait->w.done = svc_shardd_publish_on_wait;
	wait->w.deadline_us = ms ? clock_now_us() + ms * 1000u : UINT64_MAX;
	rpc_call_on_cancelled(call, svc_shardd_publish_on_cancelled, wait);
	publication_await(wait->p, &wait->w);
}

/* ------------------------------------------------------------------------- publish */

static void svc_shardd_publish_reply_made(struct rpc_call *call, const struct published *g)
{
	Shardd__V1__PublishGenerationResponse reply = SHARDD__V1__PUBLISH_GENERATION_RESPONSE__INIT;

	reply.number = g->number;
	reply.step = g->step;
	rpc_call_reply(call, &reply.base);
}

static void svc_shardd_publish_answer_made(struct svc_shardd_publish_wait *wait)
{
	svc_shardd_publish_reply_made(wait->call, publication_newest(wait->p));
}

void svc_publish_generation(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__PublishGenerationRequest *r =
		(const Shardd__V1__PublishGenerationRequest *)request;
	struct svc_shardd_publish_wait how = { .answer = svc_shardd_publish_answer_made };
	const struct published *newest;

	how.p = svc_publication_find(call, userdata, r->job, r->name, SVC_PUBLICATION_PUBLISH);
	if (!how.p)
		return;
	newest = publication_newest(how.p);
	if (publication_is_current(how.p)) {
		svc_shardd_publish_reply_made(call, newest);
		return;
	}
	how.w.newer_than = newest ? newest->number : 0;
	how.w.asks = true;
	svc_shardd_publish_await(call, &how, r->timeout_ms);
	publication_want(how.p);
}

/* ------------------------------------------------------------------ acquire, release */

/* @s: that gets a lease; NULL: the reader has a hold. @g: NULL: there is none. */
static void svc_shardd_publish_reply_lease(struct rpc_call *call, struct session *s,
					   struct published *g)
{
	Shardd__V1__AcquireGenerationResponse reply = SHARDD__V1__ACQUIRE_GENERATION_RESPONSE__INIT;
	struct publication_lease *l;
	struct fault f = FAULT_NULL;

	l = g && s ? session_lease(s, g, &f) : NULL;
	if (f.code) {
		rpc_call_fail(call, &f);
		return;
	}
	if (g) {
		reply.lease = l ? l->id : 0;
		reply.number = g->number;
		reply.step = g->step;
		reply.checksum = g->checksum;
		reply.layout = g->assembly->layout;
		reply.slab = g->slab->id;
		reply.bytes = g->assembly->bytes;
		reply.tensors = g->assembly->view->n;
	}
	rpc_call_reply(call, &reply.base);
}

static void svc_shardd_publish_answer_lease(struct svc_shardd_publish_wait *wait)
{
	struct session *s = svc_session(wait->call);

	if (s)
		svc_shardd_publish_reply_lease(wait->call, s, publication_newest(wait->p));
}

static void svc_shardd_publish_answer_hold(struct svc_shardd_publish_wait *wait)
{
	svc_shardd_publish_reply_lease(wait->call, NULL, publication_newest(wait->p));
}

/* The reader of the call's session, whose publication is there. NULL: the call has ended. */
static struct board_reader *svc_shardd_publish_reader(struct rpc_call *call, uint64_t id)
{
	struct session *s = svc_session(call);
	struct board_reader *r;
	struct fault f = FAULT_NULL;

	if (!s)
		return NULL;
	r = session_find_reader(s, id, &f);
	if (r && !r->p)
		fault_set(&f, FAULT_NOT_FOUND, "reader",
			  "its publication was dropped, or the job deleted");
	if (!f.code)
		return r;
	rpc_call_fail(call, &f);
	return NULL;
}

/* What the request is about. NULL: the call has ended. */
static struct publication *svc_shardd_publish_acquired(
	struct rpc_call *call, void *userdata, const Shardd__V1__AcquireGenerationRequest *r)
{
	struct board_reader *reader;

	if (!r->reader)
		return svc_publication_find(call, userdata, r->job, r->name, SVC_PUBLICATION_READ);
	reader = svc_shardd_publish_reader(call, r->reader);
	return reader ? reader->p : NULL;
}

void svc_acquire_generation(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__AcquireGenerationRequest *r =
		(const Shardd__V1__AcquireGenerationRequest *)request;
	struct svc_shardd_publish_wait how = { .answer =
						       r->reader
							       ? svc_shardd_publish_answer_hold
							       : svc_shardd_publish_answer_lease };
	struct published *newest;

	how.p = svc_shardd_publish_acquired(call, userdata, r);
	if (!how.p)
		return;
	newest = publication_newest(how.p);
	if (newest && newest->number <= r->newer_than)
		newest = NULL;
	if (newest || !r->wait) {
		svc_shardd_publish_reply_lease(call, r->reader ? NULL : svc_session(call), newest);
		return;
	}
	how.w.newer_than = r->newer_than;
	svc_shardd_publish_await(call, &how, r->timeout_ms);
}

/* The lease of the call's session; NULL: the call has ended. */
static struct publication_lease *svc_shardd_publish_lease_of(struct rpc_call *call, uint64_t id)
{
	struct session *s = svc_session(call);
	struct publication_lease *l = NULL;
	struct fault f = FAULT_NULL;

	if (!s)
		return NULL;
	l = session_lease_find(s, id, &f);
	if (!l)
		rpc_call_fail(call, &f);
	return l;
}

void svc_release_generation(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__ReleaseGenerationRequest *r =
		(const Shardd__V1__ReleaseGenerationRequest *)request;
	Shardd__V1__ReleaseGenerationResponse reply = SHARDD__V1__RELEASE_GENERATION_RESPONSE__INIT;
	struct publication_lease *l = svc_shardd_publish_lease_of(call, r->lease);

	(void)userdata;
	if (!l)
		return;
	publication_release(l);
	rpc_call_reply(call, &reply.base);
}

/* ------------------------------------------------------------------------- readers */

void svc_open_reader(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__OpenReaderRequest *r = (const Shardd__V1__OpenReaderRequest *)request;
	Shardd__V1__OpenReaderResponse reply = SHARDD__V1__OPEN_READER_RESPONSE__INIT;
	struct publication *p =
		svc_publication_find(call, userdata, r->job, r->name, SVC_PUBLICATION_READ);
	struct board_reader *reader;
	struct fault f = FAULT_NULL;

	if (!p)
		return;
	reader = session_open_reader(svc_session(call), p, &f);
	if (!reader) {
		svc_refuse(call, "publish", r->job, &f);
		return;
	}
	reply.reader = reader->id;
	reply.board = p->board.slab->id;
	reply.hold = reader->slab->id;
	rpc_call_reply(call, &reply.base);
}

void svc_close_reader(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__CloseReaderRequest *r = (const Shardd__V1__CloseReaderRequest *)request;
	Shardd__V1__CloseReaderResponse reply = SHARDD__V1__CLOSE_READER_RESPONSE__INIT;
	struct session *s = svc_session(call);
	struct board_reader *reader;
	struct fault f = FAULT_NULL;

	(void)userdata;
	if (!s)
		return;
	reader = session_find_reader(s, r->reader, &f);
	if (!reader) {
		rpc_call_fail(call, &f);
		return;
	}
	publication_close_reader(reader);
	rpc_call_reply(call, &reply.base);
}

/* ------------------------------------------------------------------------ describe */

/* The generation that the request is about; NULL: the call has ended. */
static struct published *svc_shardd_publish_described(
	struct rpc_call *call, const Shardd__V1__DescribeGenerationRequest *r)
{
	struct board_reader *reader;
	struct publication_lease *l;
	struct published *g = NULL;
	struct fault f = FAULT_NULL;

	if (r->reader) {
		reader = svc_shardd_publish_reader(call, r->reader);
		if (!reader)
			return NULL;
		g = publication_numbered(reader->p, r->number);
		if (!g)
			fault_set(&f, FAULT_NOT_FOUND, "number",
				  "generation %llu is not there any more: take the newest one",
				  (unsigned long long)r->number);
	} else {
		l = svc_shardd_publish_lease_of(call, r->lease);
		if (!l)
			return NULL;
		g = l->g;
		if (!g)
			fault_set(&f, FAULT_NOT_FOUND, "lease", "the publication was dropped");
	}
	if (f.code)
		rpc_call_fail(call, &f);
	return g;
}

static Shardd__V1__PublishedType svc_shardd_publish_type(enum dtype t)
{
	return t == DTYPE_FP32   ? SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_FP32
	       : t == DTYPE_BF16 ? SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_BF16
	       : t == DTYPE_E4M3 ? SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_E4M3
				 : SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_FP16;
}

void svc_shardd_publish_fill_tensor(const struct view_tensor *t, Shardd__V1__PublishedTensor *m)
{
	shardd__v1__published_tensor__init(m);
	m->name = t->name;
	m->type = svc_shardd_publish_type(t->dtype);
	m->shape = (uint64_t *)(uintptr_t)t->shape;
	m->n_shape = t->dims;
	m->offset = t->offset;
	m->bytes = t->bytes;
}

static void svc_shardd_publish_fill_page(struct arena *a, const struct view *v, uint32_t first,
					 Shardd__V1__DescribeGenerationResponse *reply)
{
	uint32_t n = v->n - first < SVC_PUBLISH_PAGE ? v->n - first : SVC_PUBLISH_PAGE;
	Shardd__V1__PublishedTensor *tensors = arena_take(a, n * sizeof(*tensors));

	reply->tensors = arena_take(a, n * sizeof(*reply->tensors));
	if (!tensors || !reply->tensors)
		return;
	for (; reply->n_tensors < n; reply->n_tensors++) {
		reply->tensors[reply->n_tensors] = &tensors[reply->n_tensors];
		svc_shardd_publish_fill_tensor(&v->tensors[first + reply->n_tensors],
					       &tensors[reply->n_tensors]);
	}
	reply->next = first + n < v->n ? first + n : 0;
}

/* Where its memory is. @handle: room for the slab's. Return: 0 or a fault code. */
static int svc_shardd_publish_fill_place(const struct published *g,
					 uint8_t handle[BACKEND_IPC_BYTES],
					 Shardd__V1__DescribeGenerationResponse *reply,
					 struct fault *f)
{
	const struct backend_info *info = backend_info(g->slab->device->backend);
	int r;

	reply->device = (char *)(uintptr_t)info->id;
	reply->uuid = (char *)(uintptr_t)info->uuid;
	if (job_share(g->p->job) != BACKEND_SHARE_IPC)
		return 0;
	r = slab_export_ipc(g->slab, handle);
	if (r < 0)
		return fault_errno(f, r, "handing out a generation");
	reply->ipc_handle = (ProtobufCBinaryData){ BACKEND_IPC_BYTES, handle };
	reply->slab_bytes = g->slab->bytes;
	return 0;
}

void svc_describe_generation(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__DescribeGenerationRequest *r =
		(const Shardd__V1__DescribeGenerationRequest *)request;
	Shardd__V1__DescribeGenerationResponse reply =
		SHARDD__V1__DESCRIBE_GENERATION_RESPONSE__INIT;
	const struct published *g = svc_shardd_publish_described(call, r);
	uint8_t handle[BACKEND_IPC_BYTES];
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;

	(void)userdata;
	if (!g)
		return;
	if (r->first >= g->assembly->view->n)
		fault_set(&f, FAULT_INVALID, "first", "first %u is out of range (0..%u)", r->first,
			  g->assembly->view->n - 1);
	else if (svc_shardd_publish_fill_place(g, handle, &reply, &f) == 0)
		svc_shardd_publish_fill_page(&a, g->assembly->view, r->first, &reply);
	if (a.failed)
		fault_errno(&f, -ENOMEM, "listing a generation's tensors");
	if (f.code)
		rpc_call_fail(call, &f);
	else
		rpc_call_reply(call, &reply.base);
	arena_free(&a);
}
