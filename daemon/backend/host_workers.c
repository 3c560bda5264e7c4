#include "backend/host_workers.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/kop.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/list.h"

/* Tasks that threads can be at; more wait in the loop thread's own queue. With a
 * fixed number nothing is allocated per task, so submitting cannot fail. */
#define MAX_JOBS 256

/* Elements of a chunk: large enough that taking one costs nothing beside it. Small
 * tasks are cut finer, so that all threads get a part. Both are whole norm blocks. */
#define CHUNK       (4u * KERNEL_NORM_BLOCK)
#define SMALL_CHUNK KERNEL_NORM_BLOCK
/* KOP_COPY counts bytes. */
#define COPY_FACTOR 4u

/* The cursor holds which kop (high bits) and which chunk of it (low bits). */
#define CURSOR_CHUNK_BITS 40
#define CURSOR_CHUNK_MASK ((UINT64_C(1) << CURSOR_CHUNK_BITS) - 1)
#define CURSOR(kop)       ((uint64_t)(kop) << CURSOR_CHUNK_BITS)
#define MAX_KOPS          (1u << (64 - CURSOR_CHUNK_BITS))

/* One task the threads are at. */
struct job {
	struct work work;          /* back to the loop */
	struct list link;          /* workers.queue while chunks may be left; else free_jobs */
	struct workers *workers;   /* back pointer */
	struct backend_task *task; /* borrowed */
	uint64_t chunk;            /* elements */
	_Atomic uint64_t cursor;   /* the next chunk nobody has taken */
	unsigned users;            /* threads inside; under the lock */
	uint64_t began_us;         /* the first thread entered; under the lock */
	uint64_t ended_us;         /* the last one has left */
};

struct workers {
	struct workers_options o;
	pthread_mutex_t lock;
	pthread_cond_t wake;
	struct list queue; /* of struct job, oldest first; under the lock */
	bool stop;         /* under the lock */

	/* loop thread only */
	struct list free_jobs;
	struct backend_task *waiting, *waiting_last; /* without a job, linked by impl */
	unsigned unfinished;                         /* tasks */

	unsigned started; /* threads */
	pthread_t *threads;
	struct job jobs[MAX_JOBS];
};

static uint64_t chunk_of(const struct job *job, const struct kop *kop)
{
	return kop->kind == KOP_COPY ? job->chunk * COPY_FACTOR : job->chunk;
}

/* Take the next chunk. Relaxed: what the chunk consists of was published by the
 * lock under which the job was found; the counter only hands out each one once.
 * Return: false if there is none left. */
static bool take_chunk(struct job *job, const struct kop **kop, uint64_t *begin, uint64_t *end)
{
	uint64_t at = atomic_load_explicit(&job->cursor, memory_order_relaxed);

	while (at < CURSOR(job->task->n_kops)) {
		const struct kop *k = &job->task->kops[at >> CURSOR_CHUNK_BITS];
		uint64_t size = chunk_of(job, k);
		uint64_t from = (at & CURSOR_CHUNK_MASK) * size;
		bool last = k->n <= from || k->n - from <= size;
		uint64_t next = last ? CURSOR((at >> CURSOR_CHUNK_BITS) + 1) : at + 1;

		if (!atomic_compare_exchange_weak_explicit(
			    &job->cursor, &at, next, memory_order_relaxed, memory_order_relaxed))
			continue;
		if (k->n > from) {
			*kop = k;
			*begin = from;
			*end = last ? k->n : from + size;
			return true;
		}
		at = next; /* a kop of no elements */
	}
	return false;
}

static void run_chunks(const struct workers *w, struct job *job)
{
	const struct kop *kop;
	uint64_t begin, end;

	while (take_chunk(job, &kop, &begin, &end))
		kop_run(w->o.kernels, kop, begin, end);
}

static void start_waiting(struct workers *w);

static void on_job_done(struct work *work)
{
	struct job *job = CONTAINER_OF(work, struct job, work);
	struct workers *w = job->workers;
	struct backend_task *task = STEAL_PTR(job->task);

	task->began_us = job->began_us;
	task->ended_us = job->ended_us;
	list_append(&w->free_jobs, &job->link);
	start_waiting(w);
	CHECK(w->unfinished > 0);
	w->unfinished--;
	w->o.done(w->o.userdata, task);
}

/* No chunk of @job is left. All that were taken are done when the last thread
 * inside leaves: it tells the loop, and the job is not ours any more. */
static void leave_job(struct workers *w, struct job *job)
{
	bool last;

	pthread_mutex_lock(&w->lock);
	list_unlink(&job->link);
	last = --job->users == 0;
	pthread_mutex_unlock(&w->lock);
	if (!last)
		return;
	job->ended_us = clock_now_us();
	loopq_post(w->o.loopq, &job->work, on_job_done);
}

/* Wait for a job with chunks left and enter it. Return: NULL at the end. */
static struct job *enter_job(struct workers *w)
{
	struct job *job = NULL;

	pthread_mutex_lock(&w->lock);
	while (list_empty(&w->queue) && !w->stop)
		pthread_cond_wait(&w->wake, &w->lock);
	if (!list_empty(&w->queue)) {
		job = list_first(&w->queue, struct job, link);
		job->users++;
		if (!job->began_us)
			job->began_us = clock_now_us();
	}
	pthread_mutex_unlock(&w->lock);
	return job;
}

static void *worker_main(void *arg)
{
	struct workers *w = arg;
	struct job *job;

	while ((job = enter_job(w))) {
		run_chunks(w, job);
		leave_job(w, job);
	}
	return NULL;
}

/* How many chunks there are, at most a few more than threads. */
static uint64_t count_chunks(const struct workers *w, const struct job *job)
{
	uint64_t n = 0;

	for (unsigned i = 0; i < job->task->n_kops && n <= w->o.threads; i++) {
		const struct kop *kop = &job->task->kops[i];
		uint64_t size = chunk_of(job, kop);

		n += kop->n / size + (kop->n % size != 0);
	}
	return n;
}

static void publish_job(struct workers *w, struct job *job, uint64_t chunks)
{
	pthread_mutex_lock(&w->lock);
	list_append(&w->queue, &job->link);
	pthread_mutex_unlock(&w->lock);
	if (chunks >= w->o.threads) {
		pthread_cond_broadcast(&w->wake);
		return;
	}
	while (chunks-- > 0)
		pthread_cond_signal(&w->wake);
}

static void start_task(struct workers *w, struct backend_task *task)
{
	struct job *job = list_first(&w->free_jobs, struct job, link);
	uint64_t chunks;

	list_unlink(&job->link);
	task->impl = NULL;
	job->task = task;
	job->users = 0;
	job->began_us = 0;
	job->ended_us = 0;
	job->chunk = CHUNK;
	atomic_store_explicit(&job->cursor, 0, memory_order_relaxed);
	chunks = count_chunks(w, job);
	if (chunks < w->o.threads) {
		job->chunk = SMALL_CHUNK;
		chunks = count_chunks(w, job);
	}
	if (chunks == 0)
		loopq_post(w->o.loopq, &job->work, on_job_done);
	else
		publish_job(w, job, chunks);
}

static void start_waiting(struct workers *w)
{
	while (w->waiting && !list_empty(&w->free_jobs)) {
		struct backend_task *task = w->waiting;

		w->waiting = task->impl;
		start_task(w, task);
	}
}

void workers_submit(struct workers *w, struct backend_task *task)
{
	CHECK(task->n_kops < MAX_KOPS);
	w->unfinished++;
	task->impl = NULL;
	if (w->waiting)
		w->waiting_last->impl = task;
	else
		w->waiting = task;
	w->waiting_last = task;
	start_waiting(w);
}

/* A machine of several NUMA nodes: the threads are spread over them, each staying
 * near the memory it was first to touch. Refusal (a smaller cpuset) is harmless. */
static void bind_thread(const struct workers *w, unsigned index)
{
	if (w->o.n_nodes < 2 || !w->o.node_cpus)
		return;
	pthread_setaffinity_np(w->threads[index], sizeof(cpu_set_t),
			       &w->o.node_cpus[index % w->o.n_nodes]);
}

static int start_threads(struct workers *w)
{
	sigset_t all, old;
	char name[16];
	int r = 0;

	/* Signals are the loop thread's. The new threads inherit the mask. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	while (r == 0 && w->started < w->o.threads) {
		r = -pthread_create(&w->threads[w->started], NULL, worker_main, w);
		if (r)
			break;
		snprintf(name, sizeof(name), "shardd-w%u", w->started);
		pthread_setname_np(w->threads[w->started], name);
		bind_thread(w, w->started++);
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return r;
}

int workers_new(const struct workers_options *o, struct workers **ret)
{
	struct workers *w = calloc(1, sizeof(*w));
	int r;

	CHECK(o->threads > 0);
	if (!w)
		return -ENOMEM;
	w->o = *o;
	w->threads = calloc(o->threads, sizeof(*w->threads));
	pthread_mutex_init(&w->lock, NULL);
	pthread_cond_init(&w->wake, NULL);
	list_init(&w->queue);
	list_init(&w->free_jobs);
	for (unsigned i = 0; i < MAX_JOBS; i++) {
		w->jobs[i].workers = w;
		list_init(&w->jobs[i].link);
		list_append(&w->free_jobs, &w->jobs[i].link);
	}
	r = w->threads ? start_threads(w) : -ENOMEM;
	if (r) {
		workers_free(w);
		return r;
	}
	w->o.node_cpus = NULL; /* was the caller's, and has served */
	*ret = w;
	return 0;
}

struct workers *workers_free(struct workers *w)
{
	if (!w)
		return NULL;
	CHECK(w->unfinished == 0 && !w->waiting);
	pthread_mutex_lock(&w->lock);
	w->stop = true;
	pthread_mutex_unlock(&w->lock);
	pthread_cond_broadcast(&w->wake);
	for (unsigned i = 0; i < w->started; i++)
		pthread_join(w->threads[i], NULL);
	pthread_cond_destroy(&w->wake);
	pthread_mutex_destroy(&w->lock);
	free(w->threads);
	free(w);
	return NULL;
}
