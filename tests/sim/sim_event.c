/*
 * Events.
 *
 * An event is the place in a stream at which it was recorded last; waiting, asking and
 * synchronising mean the record that was the last one when the call was made. An
 * interprocess event counts its records in a page that all its processes share: recorded
 * when cuEventRecord is called, completed when the stream came there. A process that dies
 * before that leaves its record incomplete for ever.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim_impl.h"

#define PAGE  4096u
#define MAGIC "SIMcuEVT"

struct event_page {
	char magic[8];
	_Atomic uint64_t recorded, completed;
	_Atomic uint32_t bell;
	_Atomic uint32_t ended; /* its maker destroyed it */
};

/* This process's view of one; items that use it may outlive the event. */
struct page {
	unsigned refs;
	struct event_page *at;
	int fd; /* what is handed out; -1 in a process that opened it */
};

/* One record of a timed or plain event; outlives the next one. */
struct record {
	unsigned refs;
	struct stream *stream;
	uint64_t seq;
	uint64_t us; /* when it was executed */
};

struct event {
	uint32_t live;
	struct ctx *ctx;
	unsigned flags;
	struct record *last; /* NULL: never recorded */
	struct page *page;   /* interprocess */
	uint64_t offered;    /* number under which it was exported; 0: not */
	bool opened;         /* made by another process */
};

static struct objects events = { .what = "event", .size = sizeof(struct event) };

static void record_unref(struct record *rec)
{
	if (rec && !--rec->refs)
		free(rec);
}

/* -- interprocess pages --------------------------------------------------------------- */

static struct page *page_map(int fd)
{
	struct page *p = calloc(1, sizeof(*p));

	if (!p)
		return NULL;
	p->at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p->at == MAP_FAILED) {
		free(p);
		return NULL;
	}
	p->refs = 1;
	p->fd = -1;
	return p;
}

static void page_unref(struct page *p)
{
	if (--p->refs)
		return;
	munmap(p->at, PAGE);
	free(p);
}

static struct page *page_new(void)
{
	int fd = memfd_create("sim-event", MFD_CLOEXEC);
	struct page *p = fd >= 0 && ftruncate(fd, PAGE) == 0 ? page_map(fd) : NULL;

	if (p) {
		memcpy(p->at->magic, MAGIC, 8);
		p->fd = fd;
	} else if (fd >= 0) {
		close(fd);
	}
	return p;
}

static void page_end(struct event *e)
{
	if (!e->page)
		return;
	if (!e->opened)
		e->page->at->ended = 1;
	ipc_withdraw(e->offered);
	if (e->page->fd >= 0)
		close(e->page->fd);
	page_unref(e->page);
	e->page = NULL;
}

static bool page_reached(const struct event_page *p, uint64_t target)
{
	return atomic_load(&p->completed) >= target;
}

struct page_item {
	struct page *page;
	uint64_t target;
};

static void page_item_free(struct item *item)
{
	page_unref(((struct page_item *)(void *)item->payload)->page);
}

static struct item *page_item(item_fn run, const char *what, const struct event *e, uint64_t target)
{
	struct item *item = item_new(run, what, sizeof(struct page_item));

	e->page->refs++;
	*(struct page_item *)(void *)item->payload = (struct page_item){ e->page, target };
	item->free = page_item_free;
	return item;
}

static void page_complete(struct stream *s, struct item *item)
{
	struct page_item *i = (void *)item->payload;
	struct event_page *p = i->page->at;
	uint64_t now = atomic_load(&p->completed);

	(void)s;
	while (now < i->target && !atomic_compare_exchange_weak(&p->completed, &now, i->target))
		;
	atomic_fetch_add(&p->bell, 1);
	sim_futex_wake(&p->bell, UINT32_MAX);
}

static void page_wait(struct stream *s, struct item *item)
{
	struct page_item *i = (void *)item->payload;
	struct event_page *p = i->page->at;
	uint32_t seen;

	stream_set_bell(s, &p->bell);
	while (seen = atomic_load(&p->bell), !page_reached(p, i->target) && !stream_stopped(s))
		sim_futex_wait(&p->bell, seen, UINT32_MAX);
	stream_set_bell(s, NULL);
}

/* -- create and destroy ------------------------------------------------------------------ */

static CUevent event_new(struct ctx *c, unsigned flags, struct event **ret)
{
	struct event *e = objects_new(&events);

	e->ctx = c;
	e->flags = flags;
	*ret = e;
	return (CUevent)e;
}

CUresult cuEventCreate(CUevent *ret, unsigned int flags)
{
	const unsigned known =
		CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
	struct ctx *c;
	struct event *e;
	CUevent h;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);

	if (r)
		return r;
	if (flags & ~known || (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	h = event_new(c, flags, &e);
	if (flags & CU_EVENT_INTERPROCESS && !(e->page = page_new())) {
		e->live = 0;
		r = CUDA_ERROR_OPERATING_SYSTEM;
	}
	pthread_mutex_unlock(&sim_lock);
	if (r == CUDA_SUCCESS)
		*ret = h;
	return r;
}

static struct event *event_get(CUevent h, const char *function)
{
	struct event *e = objects_get(&events, h, function);

	if (e && e->opened && e->page->at->ended && strncmp(function, "cuEventDestroy", 14) != 0)
		sim_breach("%s: the process that made the event has destroyed it", function);
	return e;
}

CUresult cuEventDestroy(CUevent event)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_END, &c);
	struct event *e;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	e = event_get(event, __func__);
	if (e) {
		page_end(e);
		record_unref(e->last);
		e->last = NULL;
		e->live = 0;
	}
	pthread_mutex_unlock(&sim_lock);
	ipc_settle();
	return e ? sim_leave(c) : CUDA_ERROR_INVALID_HANDLE;
}

/* -- record and wait ------------------------------------------------------------------------ */

static void record_run(struct stream *s, struct item *item)
{
	struct record *rec = *(struct record **)(void *)item->payload;

	(void)s;
	pthread_mutex_lock(&sim_lock);
	rec->us = sim_clock_us();
	pthread_mutex_unlock(&sim_lock);
}

static void record_free(struct item *item)
{
	record_unref(*(struct record **)(void *)item->payload);
}

static void record(struct event *e, struct stream *s)
{
	struct record *rec;
	struct item *item;

	if (e->page) {
		uint64_t target = atomic_fetch_add(&e->page->at->recorded, 1) + 1;

		stream_put(s, page_item(page_complete, "cuEventRecord", e, target));
		return;
	}
	rec = calloc(1, sizeof(*rec));
	if (!rec)
		sim_breach("out of memory");
	item = item_new(record_run, "cuEventRecord", sizeof(rec));
	*(struct record **)(void *)item->payload = rec;
	item->free = record_free;
	record_unref(e->last);
	e->last = rec;
	rec->refs = 2;
	rec->stream = s;
	rec->seq = stream_put(s, item);
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);
	struct event *e;
	struct stream *s;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	e = event_get(event, __func__);
	s = stream_get(stream, c, __func__);
	if (!e || !s || e->ctx != s->ctx)
		r = CUDA_ERROR_INVALID_HANDLE;
	else
		record(e, s);
	pthread_mutex_unlock(&sim_lock);
	return r;
}

static void nothing_run(struct stream *s, struct item *item)
{
	(void)s;
	(void)item;
}

static void wait_for(struct stream *s, const struct event *e)
{
	struct item *item;

	if (e->page) {
		uint64_t target = atomic_load(&e->page->at->recorded);

		if (!page_reached(e->page->at, target))
			stream_put(s, page_item(page_wait, "cuStreamWaitEvent", e, target));
		return;
	}
	if (!e->last || e->last->stream == s)
		return;
	item = item_new(nothing_run, "cuStreamWaitEvent", 0);
	item_after(item, e->last->stream, e->last->seq);
	stream_put(s, item);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
	struct ctx *c;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);
	struct event *e;
	struct stream *s;

	if (r)
		return r;
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sim_lock);
	e = event_get(event, __func__);
	s = stream_get(stream, c, __func__);
	if (!e || !s)
		r = CUDA_ERROR_INVALID_HANDLE;
	else
		wait_for(s, e);
	pthread_mutex_unlock(&sim_lock);
	return r;
}

static bool complete(const struct event *e)
{
	if (e->page)
		return page_reached(e->page->at, e->page->at->recorded);
	return !e->last || e->last->stream->executed >= e->last->seq;
}

CUresult cuEventQuery(CUevent event)
{
	CUresult r = sim_enter(__func__, NEED_CTX, NULL);
	struct event *e;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	e = event_get(event, __func__);
	if (!e)
		r = CUDA_ERROR_INVALID_HANDLE;
	else if (e->ctx->error)
		r = (CUresult)e->ctx->error;
	else if (!complete(e))
		r = CUDA_ERROR_NOT_READY;
	pthread_mutex_unlock(&sim_lock);
	return r;
}

/* The lock is held on entry and exit, not while it sleeps: a short one, since nobody who
 * breaks the context knows of it. */
static void page_synchronize(const struct event *e)
{
	struct page *page = e->page;
	uint64_t target = atomic_load(&page->at->recorded);
	uint32_t seen;

	page->refs++;
	pthread_mutex_unlock(&sim_lock);
	while (seen = atomic_load(&page->at->bell),
	       !page_reached(page->at, target) && !e->ctx->error)
		sim_futex_nap(&page->at->bell, seen);
	pthread_mutex_lock(&sim_lock);
	page_unref(page);
}

CUresult cuEventSynchronize(CUevent event)
{
	CUresult r = sim_enter(__func__, NEED_CTX, NULL);
	struct event *e;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	e = event_get(event, __func__);
	if (e && e->page)
		page_synchronize(e);
	else if (e && e->last)
		stream_wait(e->last->stream, e->last->seq);
	r = e ? (CUresult)e->ctx->error : CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_unlock(&sim_lock);
	return r;
}

static CUresult elapsed(float *ret, const struct event *a, const struct event *b)
{
	if (!a || !b || !a->last || !b->last || (a->flags | b->flags) & CU_EVENT_DISABLE_TIMING)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!complete(a) || !complete(b))
		return CUDA_ERROR_NOT_READY;
	*ret = (float)((double)(int64_t)(b->last->us - a->last->us) / 1000);
	return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *ret, CUevent begin, CUevent end)
{
	CUresult r = sim_enter(__func__, NEED_CTX, NULL);

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	r = elapsed(ret, event_get(begin, __func__), event_get(end, __func__));
	pthread_mutex_unlock(&sim_lock);
	return r;
}

/* -- between processes ------------------------------------------------------------------------ */

CUresult cuIpcGetEventHandle(CUipcEventHandle *ret, CUevent event)
{
	CUresult r = sim_enter(__func__, NEED_CTX, NULL);
	struct event *e;

	if (r)
		return r;
	pthread_mutex_lock(&sim_lock);
	e = event_get(event, __func__);
	if (!e || !e->page || e->opened)
		r = CUDA_ERROR_INVALID_HANDLE;
	else if (!e->offered && !(e->offered = ipc_offer(e->page->fd, IPC_EVENT)))
		r = CUDA_ERROR_OPERATING_SYSTEM;
	if (r == CUDA_SUCCESS)
		ipc_handle_make(ret, IPC_EVENT, e->offered, PAGE);
	pthread_mutex_unlock(&sim_lock);
	return r;
}

static bool is_event(int fd)
{
	struct stat st;
	char magic[8];

	return fstat(fd, &st) == 0 && st.st_size == PAGE && pread(fd, magic, 8, 0) == 8 &&
	       memcmp(magic, MAGIC, 8) == 0;
}

CUresult cuIpcOpenEventHandle(CUevent *ret, CUipcEventHandle handle)
{
	struct ipc_handle h;
	struct event *e;
	struct ctx *c;
	int fd;
	CUresult r = sim_enter(__func__, NEED_CTX, &c);

	_Static_assert(sizeof(h) == CU_IPC_HANDLE_SIZE, "a handle is 64 bytes");
	memcpy(&h, &handle, sizeof(h));
	if (r == CUDA_SUCCESS)
		r = ipc_handle_check(&h, IPC_EVENT);
	if (r == CUDA_SUCCESS)
		r = ipc_fetch(&h, &fd);
	if (r)
		return r;
	if (!is_event(fd)) {
		close(fd);
		return CUDA_ERROR_INVALID_VALUE;
	}
	pthread_mutex_lock(&sim_lock);
	*ret = event_new(c, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING, &e);
	e->opened = true;
	e->page = page_map(fd);
	if (!e->page) {
		e->live = 0;
		r = CUDA_ERROR_OPERATING_SYSTEM;
	}
	pthread_mutex_unlock(&sim_lock);
	close(fd);
	return r;
}
