/*
 * The cuda backend: its table, its threads, its start and its end.
 */
#include "backend/backend_impl.h"
#include "backend/cuda_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"

static void cuda_backend_cuda_free(struct cuda *c)
{
	pthread_mutex_destroy(&c->lock);
	free(c);
}

/* ----------------------------------------------------------------------- news */

static void cuda_backend_tell_lost(struct cuda *c)
{
	pthread_mutex_lock(&c->lock);
	memcpy(c->backend.info.lost, c->lost_text, sizeof(c->lost_text));
	pthread_mutex_unlock(&c->lock);
	c->news_lost = true;
	backend_tell(&c->backend, BACKEND_NEWS_LOST);
}

static void cuda_backend_on_tick(struct work *work)
{
	struct cuda *c = CONTAINER_OF(work, struct cuda, tick);

	pthread_mutex_lock(&c->lock);
	c->tick_posted = false;
	pthread_mutex_unlock(&c->lock);
	c->ticking = true;
	if (!c->closed && atomic_load(&c->lost) && !c->news_lost)
		cuda_backend_tell_lost(c);
	if (!c->closed && cuda_setup_collect(c))
		backend_tell(&c->backend, BACKEND_NEWS_MEMORY);
	if (!c->closed)
		cuda_signals_collect(c);
	c->ticking = false;
	if (c->closed && !c->tick_posted)
		cuda_backend_cuda_free(c);
}

void cuda_tick(struct cuda *c)
{
	if (c->tick_posted)
		return;
	c->tick_posted = true;
	loopq_post(c->backend.loopq, &c->tick, cuda_backend_on_tick);
}

/* ---------------------------------------------------------------------- table */

static int cuda_backend_export(struct backend *b, struct backend_mem *mem, bool writable,
			       int *ret_fd)
{
	int fd;

	(void)b;
	(void)writable; /* the mapping process chooses the access */
	if (mem->share != BACKEND_SHARE_FD)
		return -EOPNOTSUPP;
	fd = fcntl(CONTAINER_OF(mem, struct cuda_mem, mem)->fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	*ret_fd = fd;
	return 0;
}

static int cuda_backend_store(struct backend *b, struct backend_mem *mem, int *ret_fd)
{
	return cuda_backend_export(b, mem, true, ret_fd);
}

static int cuda_backend_export_ipc(struct backend *b, struct backend_mem *mem, uint8_t *ret_handle)
{
	(void)b;
	memcpy(ret_handle, &CONTAINER_OF(mem, struct cuda_mem, mem)->ipc, BACKEND_IPC_BYTES);
	return 0;
}

static struct backend_mem *cuda_backend_ready(struct backend *b)
{
	return &cuda_of(b)->ready.page->mem;
}

static struct backend_mem *cuda_backend_ready_ipc(struct backend *b)
{
	struct cuda *c = cuda_of(b);

	if (!c->ready.page_ipc)
		return NULL;
	atomic_store(&c->ready.ipc_used, true);
	return &c->ready.page_ipc->mem;
}

static int cuda_backend_ready_event(struct backend *b, enum backend_queue queue, unsigned i,
				    uint8_t *ret_handle)
{
	memcpy(ret_handle, &cuda_of(b)->queues[queue].ready_handles[i], BACKEND_IPC_BYTES);
	return 0;
}

static void cuda_backend_cuda_close(struct backend *b);

/* Memory for legacy CUDA IPC is mapped on its own device alone. */
static bool cuda_backend_reaches(const struct backend *b, const struct backend *other,
				 enum backend_share share)
{
	const struct cuda *c = cuda_of((struct backend *)(uintptr_t)b);
	const struct cuda *of = cuda_of((struct backend *)(uintptr_t)other);

	for (unsigned i = 0; i < of->reach.n_peers; i++)
		if (of->reach.peers[i] == c->device)
			return share == BACKEND_SHARE_FD;
	return false;
}

static const struct backend_ops cuda_ops = {
	.alloc = cuda_setup_alloc,
	.tick = cuda_setup_tick,
	.free = cuda_setup_free,
	.export = cuda_backend_export,
	.import = cuda_setup_import,
	.store = cuda_backend_store,
	.submit = cuda_exec_submit,
	.close = cuda_backend_cuda_close,
	.reaches = cuda_backend_reaches,
	.export_ipc = cuda_backend_export_ipc,
	.ready = cuda_backend_ready,
	.release = cuda_order_release,
	.redo_open = cuda_undo_open,
	.redo_last = cuda_undo_last,
	.redo_run = cuda_undo_run,
	.ready_ipc = cuda_backend_ready_ipc,
	.ready_event = cuda_backend_ready_event,
	.signals_new = cuda_signals_new,
	.signals_events = cuda_signals_events,
	.signals_poison = cuda_signals_poison,
	.signals_free = cuda_signals_free,
};

/* -------------------------------------------------------------- for the engine */

void *backend_cuda_stream(struct backend *b, enum backend_queue queue)
{
	CHECK(b->ops == &cuda_ops && queue < _BACKEND_Q_N);
	return cuda_of(b)->queues[queue].stream;
}

void *backend_cuda_context(struct backend *b)
{
	CHECK(b->ops == &cuda_ops);
	return cuda_of(b)->context;
}

void backend_cuda_hold(struct backend *b, enum backend_queue queue)
{
	struct cuda *c = cuda_of(b);
	struct cuda_queue *q = &c->queues[queue];

	CHECK(b->ops == &cuda_ops && queue < _BACKEND_Q_N);
	pthread_mutex_lock(&c->lock);
	q->holds++;
	while (q->issuing || c->setting_up)
		pthread_cond_wait(&c->calm, &c->lock);
	pthread_mutex_unlock(&c->lock);
}

/* As long as a wait for a trainer is open no memory is made anyway, and what that trainer waits for may
 * stand behind this. */
bool backend_cuda_wait_begin(struct backend *b)
{
	struct cuda *c = cuda_of(b);
	bool may;

	CHECK(b->ops == &cuda_ops);
	pthread_mutex_lock(&c->lock);
	may = !c->setting_up && (!c->gate || c->foreign > c->between);
	c->foreign += may;
	c->between += may;
	pthread_mutex_unlock(&c->lock);
	return may;
}

void backend_cuda_wait_end(struct backend *b)
{
	struct cuda *c = cuda_of(b);

	CHECK(b->ops == &cuda_ops);
	pthread_mutex_lock(&c->lock);
	CHECK(c->between > 0 && c->foreign >= c->between);
	c->foreign--;
	c->between--;
	pthread_cond_signal(&c->setup);
	pthread_mutex_unlock(&c->lock);
}

void backend_cuda_let(struct backend *b, enum backend_queue queue)
{
	struct cuda *c = cuda_of(b);

	CHECK(b->ops == &cuda_ops && queue < _BACKEND_Q_N);
	pthread_mutex_lock(&c->lock);
	CHECK(c->queues[queue].holds > 0);
	c->queues[queue].holds--;
	pthread_cond_signal(&c->work);
	pthread_cond_signal(&c->setup);
	pthread_mutex_unlock(&c->lock);
}

/* -------------------------------------------------------------------- threads */

static int cuda_backend_start_thread(pthread_t *t, bool *runs, void *(*fn)(void *), void *arg,
				     const char *name, int ordinal)
{
	sigset_t all, old;
	char text[16];
	int r;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(t, NULL, fn, arg);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r)
		return -r;
	*runs = true;
	snprintf(text, sizeof(text), "shardd-%s%u", name, (unsigned)ordinal % 1000);
	pthread_setname_np(*t, text);
	return 0;
}

static int cuda_backend_start_threads(struct cuda *c)
{
	int n = c->backend.info.ordinal;
	int r = cuda_backend_start_thread(&c->threads.exec, &c->threads.exec_runs, cuda_exec_main,
					  c, "exec", n);

	if (r == 0)
		r = cuda_backend_start_thread(&c->threads.setup, &c->threads.setup_runs,
					      cuda_setup_main, c, "setup", n);
	for (unsigned i = 0; r == 0 && i < _BACKEND_Q_N; i++) {
		struct cuda_queue *q = &c->queues[i];

		r = cuda_backend_start_thread(&q->reaper, &q->reaper_runs, cuda_reap_main, q,
					      i == BACKEND_Q_MAIN ? "reap" : "reapg", n);
	}
	return r;
}

static void cuda_backend_stop(struct cuda *c, bool *which)
{
	pthread_mutex_lock(&c->lock);
	*which = true;
	pthread_cond_broadcast(&c->work);
	pthread_cond_broadcast(&c->setup);
	for (unsigned i = 0; i < _BACKEND_Q_N; i++)
		pthread_cond_broadcast(&c->queues[i].reap);
	pthread_mutex_unlock(&c->lock);
}

static void cuda_backend_join(pthread_t t, bool *runs)
{
	if (*runs)
		pthread_join(t, NULL);
	*runs = false;
}

/* In the order in which they give each other work. */
static void cuda_backend_stop_threads(struct cuda *c)
{
	cuda_backend_stop(c, &c->threads.stop_exec);
	cuda_backend_join(c->threads.exec, &c->threads.exec_runs);
	cuda_backend_stop(c, &c->threads.stop_reap);
	for (unsigned i = 0; i < _BACKEND_Q_N; i++)
		cuda_backend_join(c->queues[i].reaper, &c->queues[i].reaper_runs);
	cuda_backend_stop(c, &c->threads.stop_setup);
	cuda_backend_join(c->threads.setup, &c->threads.setup_runs);
}

/* -------------------------------------------------------------- start and end */

static void cuda_backend_free_conditions(struct cuda *c)
{
	for (unsigned i = 0; i < _BACKEND_Q_N; i++)
		pthread_cond_destroy(&c->queues[i].reap);
	pthread_cond_destroy(&c->work);
	pthread_cond_destroy(&c->setup);
	pthread_cond_destroy(&c->calm);
}

static void cuda_backend_cuda_close(struct backend *b)
{
	struct cuda *c = cuda_of(b);
	CUcontext old = NULL;

	cuda_backend_stop_threads(c);
	CHECK(list_empty(&c->signals));
	if (c->context) {
		c->lib->cuCtxGetCurrent(&old);
		c->lib->cuCtxSetCurrent(c->context);
		cuda_setup_deinit(c);
		cuda_undo_close(c);
		cuda_order_close(c);
		cuda_device_close(c);
		if (old != c->context)
			c->lib->cuCtxSetCurrent(old);
	}
	cuda_backend_free_conditions(c);
	c->closed = true;
	if (!c->tick_posted && !c->ticking)
		cuda_backend_cuda_free(c);
}

static struct cuda *cuda_backend_cuda_new(struct loopq *loopq, const struct cuda_lib *lib)
{
	struct cuda *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	backend_init(&c->backend, &cuda_ops, loopq);
	c->lib = lib;
	c->import_fd = -1;
	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->work, NULL);
	pthread_cond_init(&c->setup, NULL);
	pthread_cond_init(&c->calm, NULL);
	list_init(&c->unclaimed);
	list_init(&c->signals);
	list_init(&c->requests);
	list_init(&c->doing);
	list_init(&c->finished);
	list_init(&c->frees);
	list_init(&c->poison);
	cuda_exec_init(c);
	for (unsigned i = 0; i < _BACKEND_Q_N; i++)
		pthread_cond_init(&c->queues[i].reap, NULL);
	return c;
}

/* This device, and those of @all that may access its memory. */
static void cuda_backend_find_peers(struct cuda *c, const CUdevice *all, unsigned n)
{
	c->reach.peers[c->reach.n_peers++] = c->device;
	for (unsigned i = 0; i < n; i++) {
		int can = 0;

		if (all[i] != c->device &&
		    c->lib->cuDeviceCanAccessPeer(&can, all[i], c->device) == CUDA_SUCCESS && can)
			c->reach.peers[c->reach.n_peers++] = all[i];
	}
}

static int cuda_backend_open_one(struct cuda *c, const struct backend_cuda_options *o,
				 const CUdevice *all, unsigned n, unsigned i, struct fault *f)
{
	CUcontext old = NULL;
	int r;

	c->lib->cuCtxGetCurrent(&old);
	c->device = all[i];
	cuda_backend_find_peers(c, all, n);
	r = cuda_device_open(c, all[i], f);
	if (r == 0)
		r = cuda_order_open(c, o->order, f);
	if (r == 0)
		cuda_overlap(c, o->measure ? o->program : NULL);
	c->lib->cuCtxSetCurrent(old);
	if (r)
		return r;
	r = cuda_backend_start_threads(c);
	return r ? fault_errno(f, r, "threads for a GPU") : 0;
}

static int cuda_backend_open_all(struct loopq *loopq, const struct cuda_lib *lib,
				 const struct backend_cuda_options *o, const CUdevice *all,
				 unsigned n, struct backend **ret, struct fault *f)
{
	for (unsigned i = 0; i < n; i++) {
		struct cuda *c = cuda_backend_cuda_new(loopq, lib);
		int r;

		if (!c)
			r = fault_errno(f, -ENOMEM, "a GPU");
		else
			r = cuda_backend_open_one(c, o, all, n, i, f);
		if (c)
			ret[i] = &c->backend;
		if (r == 0)
			continue;
		for (unsigned k = 0; k < i + (c ? 1 : 0); k++)
			ret[k] = backend_close(ret[k]);
		return r;
	}
	return 0;
}

int backend_cuda_new(struct loopq *loopq, const struct backend_cuda_options *options,
		     struct backend **ret, unsigned max, unsigned *ret_n, struct fault *f)
{
	const struct cuda_lib *lib;
	CUdevice devices[CUDA_MAX_DEVICES];
	char why[256];
	unsigned n = 0;
	int r = cuda_lib_open(&lib, why, sizeof(why));

	if (r) {
		fault_set(f, FAULT_NOT_FOUND, NULL, "%s", why);
		f->domain = FAULT_DOMAIN_CUDA;
		return f->code;
	}
	r = cuda_find(lib, options, devices, max < CUDA_MAX_DEVICES ? max : CUDA_MAX_DEVICES, &n,
		      f);
	if (r == 0 && n == 0)
		r = fault_set(f, FAULT_NOT_FOUND, NULL, "the driver shows no GPU");
	if (r == 0)
		r = cuda_backend_open_all(loopq, lib, options, devices, n, ret, f);
	if (r == 0)
		*ret_n = n;
	return r;
}

#else

int backend_cuda_new(struct loopq *loopq, const struct backend_cuda_options *options,
		     struct backend **ret, unsigned max, unsigned *ret_n, struct fault *f)
{
	const struct cuda_lib *lib;
	char why[256];

	(void)loopq, (void)options, (void)ret, (void)max, (void)ret_n;
	cuda_lib_open(&lib, why, sizeof(why));
	return fault_set(f, FAULT_NOT_FOUND, NULL, "%s", why);
}

#endif
