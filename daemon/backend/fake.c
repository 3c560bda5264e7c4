/*
 * A backend without threads: memory is real (memfds), kernels are the reference
 * ones and run on the loop when the task completes. Calls fail on demand, and
 * completions can be held back, so that a test decides what happens when. With
 * queues (fake_queue.h) it orders tasks as a GPU does: issued first, executed later.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "backend/backend_impl.h"
#include "backend/fake_queue.h"
#include "backend/launch.h"
#include "backend/memfd.h"
#include "core/check.h"
#include "core/clock.h"

#define FAKE_CAPACITY (UINT64_C(64) << 30)

struct fake_task {
	struct list link;          /* fake.ready or fake.held */
	struct backend_task *task; /* NULL: free */
	int status;
};

/* Tasks at one time; more than any test uses. Static, so that a test in which allocations fail
 * still sees its tasks complete. */
#define FAKE_TASKS 4096

struct fake {
	struct backend backend; /* first */
	struct list ready;      /* complete in the loop's next turns, in this order */
	struct list held;       /* wait for release, in submission order */
	struct work work;       /* posted while @ready is not empty */
	bool posted;
	pthread_mutex_t lock;     /* for threads in backend_run: */
	pthread_cond_t go;        /* @hold or @releases has changed */
	bool hold;                /* written under the lock */
	unsigned releases;        /* under the lock */
	bool executes;            /* held: one issued task is let through */
	bool later;               /* memory is allocated in a later turn, as on a GPU */
	struct list making, made; /* of struct fake_made */
	uint64_t used;            /* bytes of all allocations */
	unsigned calls;
	unsigned fail_in; /* the how-manieth call from now on fails; 0: none */
	int fail_err;
	struct fake_queues queues;
	struct fake_task tasks[FAKE_TASKS];
};

static const struct backend_ops fake_ops;

static struct fake *backend_fake_to_fake(struct backend *b)
{
	CHECK(b->ops == &fake_ops);
	return CONTAINER_OF(b, struct fake, backend);
}

static struct memfd *backend_fake_to_memfd(struct backend_mem *mem)
{
	return CONTAINER_OF(mem, struct memfd, mem);
}

/* Memory that was requested, and is allocated when no other work is left. */
struct fake_made {
	struct list link;
	uint64_t bytes;
};

/* Return: true: @bytes were requested before, and are allocated now. */
static bool backend_fake_was_made(struct fake *f, uint64_t bytes)
{
	struct fake_made *m, *tmp;

	list_for_each (m, tmp, &f->made, link)
		if (m->bytes == bytes) {
			list_unlink(&m->link);
			free(m);
			return true;
		}
	return false;
}

static void backend_fake_post(struct fake *f);

static void backend_fake_make_later(struct fake *f, uint64_t bytes)
{
	struct fake_made *m, *tmp;

	list_for_each (m, tmp, &f->making, link)
		if (m->bytes == bytes)
			return;
	m = malloc(sizeof(*m));
	CHECK(m); /* tests only: no way to continue */
	m->bytes = bytes;
	list_init(&m->link);
	list_append(&f->making, &m->link);
	backend_fake_post(f);
}

static void backend_fake_make_all(struct fake *f)
{
	struct fake_made *m, *tmp;

	f->executes = false;
	list_for_each (m, tmp, &f->making, link) {
		list_unlink(&m->link);
		list_append(&f->made, &m->link);
	}
	backend_tell(&f->backend, BACKEND_NEWS_MEMORY);
}

static void backend_fake_forget_made(struct list *list)
{
	struct fake_made *m, *tmp;

	list_for_each (m, tmp, list, link) {
		list_unlink(&m->link);
		free(m);
	}
}

/* Count a call. Return: 0, or what it must fail with. */
static int backend_fake_count_call(struct fake *f)
{
	f->calls++;
	return f->fail_in > 0 && --f->fail_in == 0 ? f->fail_err : 0;
}

static int backend_fake_alloc(struct backend *b, uint64_t bytes, enum backend_share share,
			      struct backend_mem **ret)
{
	struct fake *f = backend_fake_to_fake(b);
	struct memfd *m;
	int r = backend_fake_count_call(f);

	(void)share;
	if (r)
		return r;
	if (f->used > b->info.capacity_bytes || bytes > b->info.capacity_bytes - f->used)
		return BACKEND_E_FULL;
	if (f->later && !backend_fake_was_made(f, bytes)) {
		backend_fake_make_later(f, bytes);
		return BACKEND_E_LATER;
	}
	r = memfd_new(bytes, &m);
	if (r)
		return r;
	f->used += bytes;
	fake_queues_own(m);
	*ret = &m->mem;
	return 0;
}

static int backend_fake_import(struct backend *b, int fd, uint64_t bytes, struct backend_mem **ret)
{
	struct fake *f = backend_fake_to_fake(b);
	struct memfd *m;
	int r = backend_fake_count_call(f);

	if (r)
		return r;
	if (bytes % b->info.granularity != 0)
		return -EINVAL;
	r = memfd_import(fd, bytes, &m);
	if (r)
		return r;
	f->used += bytes;
	fake_queues_own(m);
	*ret = &m->mem;
	return 0;
}

static int backend_fake_export(struct backend *b, struct backend_mem *mem, bool writable,
			       int *ret_fd)
{
	int r = backend_fake_count_call(backend_fake_to_fake(b));

	return r ? r : memfd_export(backend_fake_to_memfd(mem), writable, ret_fd);
}

static int backend_fake_store(struct backend *b, struct backend_mem *mem, int *ret_fd)
{
	int r = backend_fake_count_call(backend_fake_to_fake(b));

	return r ? r : memfd_store(backend_fake_to_memfd(mem), ret_fd);
}

static void backend_fake_free(struct backend *b, struct backend_mem *mem)
{
	struct fake *f = backend_fake_to_fake(b);

	CHECK(f->used >= mem->bytes);
	f->used -= mem->bytes;
	fake_queues_free(&f->queues, backend_fake_to_memfd(mem));
}

static bool backend_fake_is_held(struct backend *b, struct backend_mem *mem)
{
	(void)b;
	return memfd_is_held(backend_fake_to_memfd(mem));
}

static void backend_fake_empty(struct backend *b, struct backend_mem *mem)
{
	(void)b;
	(void)memfd_empty(backend_fake_to_memfd(mem));
}

static int backend_fake_seal(struct backend *b, struct backend_mem *mem)
{
	(void)b;
	return memfd_seal(backend_fake_to_memfd(mem));
}

/* With queues: done when it is issued, unless it is sync. */
static void backend_fake_issue(struct fake *f, struct backend_task *task, int status)
{
	bool sync = task->sync;

	fake_queues_issue(&f->queues, &f->backend, task, status);
	backend_fake_post(f);
	if (!sync)
		backend_complete(&f->backend, task, status);
}

static void backend_fake_execute_next(struct fake *f)
{
	struct fake_exec *e = fake_queues_next(&f->queues);

	f->executes = false;
	backend_fake_post(f);
	if (e)
		fake_queues_execute(&f->queues, &f->backend, e);
}

/* One task per turn. Nothing of the backend is touched after its callback, so the callback may
 * submit or close. */
static void backend_fake_on_turn(struct work *work)
{
	struct fake *f = CONTAINER_OF(work, struct fake, work);
	struct fake_task *ft;
	struct backend_task *task;
	int status;

	f->posted = false;
	if (list_empty(&f->ready)) {
		if (fake_queues_can(&f->queues))
			backend_fake_execute_next(f);
		else
			backend_fake_make_all(f);
		return;
	}
	ft = list_first(&f->ready, struct fake_task, link);
	task = ft->task;
	status = ft->status;
	list_unlink(&ft->link);
	ft->task = NULL;
	backend_fake_post(f);
	if (f->queues.on) {
		backend_fake_issue(f, task, status);
		return;
	}
	task->began_us = clock_now_us();
	for (unsigned i = 0; status == 0 && i < task->n_launches; i++)
		launch_run(kernels_ref(), &task->launches[i], 0, task->launches[i].n);
	task->ended_us = clock_now_us();
	backend_complete(&f->backend, task, status);
}

/* Issued tasks are executed when no task is left to issue; then memory is allocated. Both unless
 * they are held. */
static bool backend_fake_has_work(const struct fake *f)
{
	if (!list_empty(&f->ready))
		return true;
	return (f->executes || !f->hold) &&
	       (fake_queues_can(&f->queues) || !list_empty(&f->making));
}

static void backend_fake_post(struct fake *f)
{
	if (f->posted || !backend_fake_has_work(f))
		return;
	f->posted = true;
	loopq_post(f->backend.loopq, &f->work, backend_fake_on_turn);
}

static struct fake_task *backend_fake_free_task(struct fake *f)
{
	for (unsigned i = 0; i < FAKE_TASKS; i++)
		if (!f->tasks[i].task)
			return &f->tasks[i];
	return NULL;
}

static void backend_fake_submit(struct backend *b, struct backend_task *task)
{
	struct fake *f = backend_fake_to_fake(b);
	struct fake_task *ft = backend_fake_free_task(f);

	CHECK(ft);
	ft->task = task;
	ft->status = backend_fake_count_call(f);
	CHECK(ft->status <= 0);
	list_init(&ft->link);
	list_append(f->hold ? &f->held : &f->ready, &ft->link);
	backend_fake_post(f);
}

/* A thread of an engine waits as the loop's tasks do. */
static void backend_fake_run(struct backend *b, struct launch *launch, struct backend_owner owner)
{
	struct fake *f = backend_fake_to_fake(b);
	unsigned releases;

	(void)owner;
	pthread_mutex_lock(&f->lock);
	releases = f->releases;
	while (f->hold && f->releases == releases)
		pthread_cond_wait(&f->go, &f->lock);
	pthread_mutex_unlock(&f->lock);
	launch_run(kernels_ref(), launch, 0, launch->n);
}

static struct backend_mem *backend_fake_ready(struct backend *b)
{
	return &backend_fake_to_fake(b)->queues.ready->mem;
}

static void backend_fake_close(struct backend *b)
{
	struct fake *f = backend_fake_to_fake(b);

	CHECK(f->used == 0 && !f->posted);
	fake_queues_deinit(&f->queues);
	pthread_cond_destroy(&f->go);
	pthread_mutex_destroy(&f->lock);
	backend_fake_forget_made(&f->making);
	backend_fake_forget_made(&f->made);
	free(f);
}

static const struct backend_ops fake_ops = {
	.alloc = backend_fake_alloc,
	.free = backend_fake_free,
	.export = backend_fake_export,
	.import = backend_fake_import,
	.store = backend_fake_store,
	.is_held = backend_fake_is_held,
	.empty = backend_fake_empty,
	.seal = backend_fake_seal,
	.submit = backend_fake_submit,
	.run = backend_fake_run,
	.close = backend_fake_close,
	.ready = backend_fake_ready,
	.signals_new = fake_signals_new,
	.signals_poison = fake_signals_poison,
	.signals_free = fake_signals_free,
};

void backend_fake_fail(struct backend *b, unsigned n, int err)
{
	struct fake *f = backend_fake_to_fake(b);

	CHECK(n == 0 || err != 0);
	f->fail_in = n;
	f->fail_err = err;
}

unsigned backend_fake_calls(const struct backend *b)
{
	return CONTAINER_OF(b, const struct fake, backend)->calls;
}

void backend_fake_hold(struct backend *b, bool hold)
{
	struct fake *f = backend_fake_to_fake(b);

	pthread_mutex_lock(&f->lock);
	f->hold = hold;
	pthread_mutex_unlock(&f->lock);
	if (!hold)
		backend_fake_release(b, false);
}

void backend_fake_release(struct backend *b, bool reversed)
{
	struct fake *f = backend_fake_to_fake(b);

	while (!list_empty(&f->held)) {
		struct list *link = reversed ? f->held.prev : f->held.next;

		list_unlink(link);
		list_append(&f->ready, link);
	}
	pthread_mutex_lock(&f->lock);
	f->releases++;
	pthread_cond_broadcast(&f->go);
	pthread_mutex_unlock(&f->lock);
	backend_fake_post(f);
}

bool backend_fake_step(struct backend *b)
{
	struct fake *f = backend_fake_to_fake(b);
	struct list *link = f->held.next;

	CHECK(f->hold);
	if (list_empty(&f->held) && !fake_queues_can(&f->queues) && list_empty(&f->making))
		return false;
	if (list_empty(&f->held)) {
		f->executes = true;
	} else {
		list_unlink(link);
		list_append(&f->ready, link);
	}
	backend_fake_post(f);
	return true;
}

void backend_fake_later(struct backend *b, bool later)
{
	backend_fake_to_fake(b)->later = later;
}

void backend_fake_look(struct backend *b)
{
	backend_fake_post(backend_fake_to_fake(b));
}

int backend_fake_queues(struct backend *b)
{
	struct fake *f = backend_fake_to_fake(b);
	int r = memfd_new(b->info.granularity, &f->queues.ready);

	if (r)
		return r;
	for (unsigned i = 0; i < _BACKEND_Q_N; i++)
		list_init(&f->queues.tasks[i]);
	list_init(&f->queues.frees);
	f->queues.on = true;
	b->info.order = BACKEND_ORDER_TIMELINE;
	return 0;
}

int backend_fake_new(struct loopq *loopq, uint64_t capacity, struct backend **ret)
{
	struct fake *f = calloc(1, sizeof(*f));
	struct backend_info *info;

	if (!f)
		return -ENOMEM;
	backend_init(&f->backend, &fake_ops, loopq);
	list_init(&f->ready);
	list_init(&f->held);
	list_init(&f->making);
	list_init(&f->made);
	pthread_mutex_init(&f->lock, NULL);
	pthread_cond_init(&f->go, NULL);
	info = &f->backend.info;
	info->name = "fake";
	info->capacity_bytes = capacity ? capacity : FAKE_CAPACITY;
	info->granularity = (uint64_t)sysconf(_SC_PAGESIZE);
	info->threads = 0;
	snprintf(info->id, sizeof(info->id), "fake:0");
	snprintf(info->kernels, sizeof(info->kernels), "%s", kernels_ref()->name);
	snprintf(info->detail, sizeof(info->detail), "no threads, for tests");
	*ret = &f->backend;
	return 0;
}
