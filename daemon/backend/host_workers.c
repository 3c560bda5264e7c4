#include "backend/host_workers.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/host_fair.h"
#include "backend/launch.h"
#include "backend/redo.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/list.h"

/* Elements of a chunk: large enough to make the cost of taking one negligible. Small tasks are cut
 * finer, so that all threads get a part. Both are whole norm blocks. */
#define CHUNK       (4u * KERNEL_NORM_BLOCK)
#define SMALL_CHUNK KERNEL_NORM_BLOCK
/* Of a launch that its caller waits for. */
#define RUN_CHUNK (KERNEL_NORM_BLOCK / 4u)
/* LAUNCH_COPY counts bytes. */
#define COPY_FACTOR 4u
/* LAUNCH_ASSEMBLE counts blocks. */
#define ASSEMBLE_CHUNK 4u
/* A chunk that moves more bytes is cut as small as a norm block allows, because others wait for
 * it. */
#define CHUNK_BYTES (4u << 20)

/* The cursor holds which launch (high bits) and which chunk of it (low bits). */
#define CURSOR_CHUNK_BITS 40
#define CURSOR_CHUNK_MASK ((UINT64_C(1) << CURSOR_CHUNK_BITS) - 1)
#define CURSOR(launch)    ((uint64_t)(launch) << CURSOR_CHUNK_BITS)
#define MAX_LAUNCHES      (1u << (64 - CURSOR_CHUNK_BITS))

/* One task in progress; stored in the task's room, so that submitting allocates nothing and cannot
 * fail. */
struct job {
	struct work work;          /* back to the loop; not of workers_run */
	struct fair_task turn;     /* while chunks may be left; under the lock */
	struct workers *workers;   /* back pointer */
	struct backend_task *task; /* borrowed */
	uint64_t chunk;            /* elements */
	bool awaited;              /* workers_run waits for it */
	_Atomic uint64_t cursor;   /* the next chunk nobody has taken */
	unsigned users;            /* threads inside; under the lock */
	uint64_t began_us;         /* the first thread entered; under the lock */
	uint64_t ended_us;         /* the last one has left */
};

_Static_assert(sizeof(struct job) <= sizeof(((struct backend_task *)0)->room), "a task has room");

/* One thread. */
struct worker {
	pthread_t thread;
	struct workers *workers; /* back pointer */
	unsigned index;
};

struct workers {
	struct workers_options o;
	pthread_mutex_t lock;
	pthread_cond_t wake;
	pthread_cond_t left; /* a job that is awaited: its last thread has left */
	struct fair fair;    /* of struct job, by turn; under the lock */
	_Atomic bool shared; /* several jobs wait: after each chunk look whose turn it is */
	bool stop;           /* under the lock */
	unsigned unfinished; /* tasks; loop thread only */
	unsigned started;    /* threads */
	struct worker *threads;
};

static struct job *host_workers_job_of(struct backend_task *task)
{
	return (struct job *)(void *)task->room;
}

static uint64_t host_workers_chunk_of(const struct job *job, const struct launch *launch)
{
	if (launch->kind == LAUNCH_COPY)
		return job->chunk * COPY_FACTOR;
	if (launch->kind == LAUNCH_ASSEMBLE)
		return job->chunk == CHUNK ? ASSEMBLE_CHUNK : 1;
	if (job->awaited)
		return job->chunk;
	return launch->n && launch_bytes(launch) / launch->n > CHUNK_BYTES / CHUNK ? SMALL_CHUNK
										   : job->chunk;
}

/* Take the next chunk. Relaxed: the lock under which the job was found has published the contents
 * of the chunk; the counter only ensures that each chunk is taken once.
 * Return: false if there is none left. */
static bool host_workers_take_chunk(struct job *job, const struct launch **launch, uint64_t *begin,
				    uint64_t *end)
{
	uint64_t at = atomic_load_explicit(&job->cursor, memory_order_relaxed);

	while (at < CURSOR(job->task->n_launches)) {
		const struct launch *k = &job->task->launches[at >> CURSOR_CHUNK_BITS];
		uint64_t size = host_workers_chunk_of(job, k);
		uint64_t from = (at & CURSOR_CHUNK_MASK) * size;
		bool last = k->n <= from || k->n - from <= size;
		uint64_t next = last ? CURSOR((at >> CURSOR_CHUNK_BITS) + 1) : at + 1;

		if (!atomic_compare_exchange_weak_explicit(
			    &job->cursor, &at, next, memory_order_relaxed, memory_order_relaxed))
			continue;
		if (k->n > from) {
			*launch = k;
			*begin = from;
			*end = last ? k->n : from + size;
			return true;
		}
		at = next; /* a launch of no elements */
	}
	return false;
}

/* The position of a thread in the tasks: the chunk that it has taken, if any. */
struct piece {
	const struct launch *launch;
	uint64_t begin, end;
};

static bool host_workers_take_piece(struct job *job, struct piece *p)
{
	return host_workers_take_chunk(job, &p->launch, &p->begin, &p->end);
}

static uint64_t host_workers_piece_bytes(const struct piece *p)
{
	return launch_bytes(p->launch) / p->launch->n * (p->end - p->begin);
}

static void host_workers_run_piece(const struct worker *me, const struct backend_task *task,
				   const struct piece *p)
{
	const struct kernels *k = me->workers->o.kernels;
	unsigned i = task->first_redo + (unsigned)(p->launch - task->launches);

	if (task->redo)
		redo_run(task->redo, i, me->index, k, p->launch, p->begin, p->end);
	else
		launch_run(k, p->launch, p->begin, p->end);
}

/* Run @p, and the chunks after it as long as no other job wants the threads. Return: bytes of the
 * chunks after it; *ret_over: no chunk is left. */
static uint64_t host_workers_run_chunks(const struct worker *me, struct job *job, struct piece *p,
					bool *ret_over)
{
	struct workers *w = me->workers;
	uint64_t more = 0;

	for (;;) {
		host_workers_run_piece(me, job->task, p);
		*ret_over = false;
		if (atomic_load_explicit(&w->shared, memory_order_relaxed))
			return more;
		*ret_over = !host_workers_take_piece(job, p);
		if (*ret_over)
			return more;
		more += host_workers_piece_bytes(p);
	}
}

static void host_workers_on_job_done(struct work *work)
{
	struct job *job = CONTAINER_OF(work, struct job, work);
	struct workers *w = job->workers;
	struct backend_task *task = job->task;

	task->began_us = job->began_us;
	task->ended_us = job->ended_us;
	CHECK(w->unfinished > 0);
	w->unfinished--;
	w->o.done(w->o.userdata, task);
}

/* Several jobs, or one: threads inside a task look at this after each chunk. */
static void host_workers_note_shared(struct workers *w)
{
	atomic_store_explicit(&w->shared, fair_shared(&w->fair), memory_order_relaxed);
}

/* Leave @job; under the lock. With @over no chunk of it is left, and no thread enters it any more:
 * all taken chunks are done when the last thread inside leaves. Return: true for that last thread,
 * which then owns the job alone. */
static bool host_workers_leave_job(struct workers *w, struct job *job, bool over)
{
	if (over) {
		fair_remove(&w->fair, &job->turn);
		host_workers_note_shared(w);
	}
	CHECK(job->users > 0);
	job->users--;
	return job->users == 0 && list_empty(&job->turn.link);
}

static void host_workers_tell_done(struct workers *w, struct job *job)
{
	job->ended_us = clock_now_us();
	loopq_post(w->o.loopq, &job->work, host_workers_on_job_done);
}

/* Whose turn it is; under the lock. */
static void host_workers_enter_job(struct job *job)
{
	job->users++;
	if (!job->began_us)
		job->began_us = clock_now_us();
}

/* One turn: at least one chunk of a task. Under the lock, which is released meanwhile. */
static void host_workers_take_turn(const struct worker *me)
{
	struct workers *w = me->workers;
	struct fair_task *turn = fair_next(&w->fair);
	struct job *job = CONTAINER_OF(turn, struct job, turn);
	struct piece p;
	bool over, last;

	host_workers_enter_job(job);
	over = !host_workers_take_piece(job, &p);
	if (!over) {
		uint64_t more;

		fair_served(turn, host_workers_piece_bytes(&p));
		pthread_mutex_unlock(&w->lock);
		more = host_workers_run_chunks(me, job, &p, &over);
		pthread_mutex_lock(&w->lock);
		if (!list_empty(&turn->link)) /* else its place may belong to another task by now */
			fair_served(turn, more);
	}
	last = host_workers_leave_job(w, job, over);
	if (!last)
		return;
	if (job->awaited) { /* it is not there any more when the lock is released */
		pthread_cond_broadcast(&w->left);
		return;
	}
	pthread_mutex_unlock(&w->lock);
	host_workers_tell_done(w, job);
	pthread_mutex_lock(&w->lock);
}

static void *host_workers_worker_main(void *arg)
{
	const struct worker *me = arg;
	struct workers *w = me->workers;

	pthread_mutex_lock(&w->lock);
	for (;;) {
		while (!fair_next(&w->fair) && !w->stop)
			pthread_cond_wait(&w->wake, &w->lock);
		if (!fair_next(&w->fair))
			break;
		host_workers_take_turn(me);
	}
	pthread_mutex_unlock(&w->lock);
	return NULL;
}

/* How many chunks there are, at most a few more than threads. */
static uint64_t host_workers_count_chunks(const struct workers *w, const struct job *job)
{
	uint64_t n = 0;

	for (unsigned i = 0; i < job->task->n_launches && n <= w->o.threads; i++) {
		const struct launch *launch = &job->task->launches[i];
		uint64_t size = host_workers_chunk_of(job, launch);

		n += launch->n / size + (launch->n % size != 0);
	}
	return n;
}

static void host_workers_publish_job(struct workers *w, struct job *job, uint64_t chunks)
{
	pthread_mutex_lock(&w->lock);
	fair_add(&w->fair, &job->turn, job->task->owner);
	host_workers_note_shared(w);
	pthread_mutex_unlock(&w->lock);
	if (chunks >= w->o.threads) {
		pthread_cond_broadcast(&w->wake);
		return;
	}
	while (chunks-- > 0)
		pthread_cond_signal(&w->wake);
}

void workers_submit(struct workers *w, struct backend_task *task)
{
	struct job *job = host_workers_job_of(task);
	uint64_t chunks;

	CHECK(task->n_launches < MAX_LAUNCHES);
	w->unfinished++;
	*job = (struct job){ .workers = w, .task = task, .chunk = CHUNK };
	list_init(&job->turn.link);
	chunks = host_workers_count_chunks(w, job);
	if (chunks < w->o.threads) {
		job->chunk = SMALL_CHUNK;
		chunks = host_workers_count_chunks(w, job);
	}
	if (chunks == 0)
		loopq_post(w->o.loopq, &job->work, host_workers_on_job_done);
	else
		host_workers_publish_job(w, job, chunks);
}

/* How many threads help with @chunks of them. */
static uint64_t host_workers_helpers(const struct workers *w, uint64_t chunks)
{
	const uint64_t spare = w->o.threads > 2 ? w->o.threads - 2 : 0;

	return chunks - 1 < spare ? chunks - 1 : spare;
}

/* As a worker that has nothing else to do, until no chunk is left and nobody is inside. */
static void host_workers_run_shared(struct workers *w, struct job *job, uint64_t helpers)
{
	struct piece p;

	pthread_mutex_lock(&w->lock);
	fair_add(&w->fair, &job->turn, job->task->owner);
	host_workers_note_shared(w);
	host_workers_enter_job(job);
	pthread_mutex_unlock(&w->lock);
	while (helpers-- > 0)
		pthread_cond_signal(&w->wake);
	while (host_workers_take_piece(job, &p))
		launch_run(w->o.kernels, p.launch, p.begin, p.end);
	pthread_mutex_lock(&w->lock);
	host_workers_leave_job(w, job, true);
	while (job->users > 0)
		pthread_cond_wait(&w->left, &w->lock);
	pthread_mutex_unlock(&w->lock);
}

void workers_run(struct workers *w, struct launch *launch, struct backend_owner owner)
{
	struct backend_task task = { .launches = launch, .n_launches = 1, .owner = owner };
	struct job job = { .workers = w, .task = &task, .chunk = RUN_CHUNK, .awaited = true };
	const uint64_t size = host_workers_chunk_of(&job, launch);
	const uint64_t chunks = launch->n / size + (launch->n % size != 0);
	const uint64_t helpers = chunks ? host_workers_helpers(w, chunks) : 0;

	list_init(&job.turn.link);
	if (helpers)
		host_workers_run_shared(w, &job, helpers);
	else
		launch_run(w->o.kernels, launch, 0, launch->n);
}

/* On a machine with several NUMA nodes the threads are spread over them, so that each stays near
 * the memory that it touched first. A refusal (a smaller cpuset) is harmless. */
static void host_workers_bind_thread(const struct workers *w, unsigned index)
{
	if (w->o.n_nodes < 2 || !w->o.node_cpus)
		return;
	pthread_setaffinity_np(w->threads[index].thread, sizeof(cpu_set_t),
			       &w->o.node_cpus[index % w->o.n_nodes]);
}

static int host_workers_start_threads(struct workers *w)
{
	sigset_t all, old;
	char name[16];
	int r = 0;

	/* Signals are the loop thread's. The new threads inherit the mask. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	while (r == 0 && w->started < w->o.threads) {
		struct worker *me = &w->threads[w->started];

		*me = (struct worker){ .workers = w, .index = w->started };
		r = -pthread_create(&me->thread, NULL, host_workers_worker_main, me);
		if (r)
			break;
		snprintf(name, sizeof(name), "shardd-w%u", w->started);
		pthread_setname_np(me->thread, name);
		host_workers_bind_thread(w, w->started++);
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return r;
}

int workers_new(const struct workers_options *o, struct workers **ret)
{
	struct workers *w = calloc(1, sizeof(*w));
	int r;

	CHECK(o->threads > 0 && o->threads <= REDO_SLOTS);
	if (!w)
		return -ENOMEM;
	w->o = *o;
	w->threads = calloc(o->threads, sizeof(*w->threads));
	pthread_mutex_init(&w->lock, NULL);
	pthread_cond_init(&w->wake, NULL);
	pthread_cond_init(&w->left, NULL);
	fair_init(&w->fair);
	r = w->threads ? host_workers_start_threads(w) : -ENOMEM;
	if (r) {
		workers_free(w);
		return r;
	}
	w->o.node_cpus = NULL; /* was the caller's, and is no longer needed */
	*ret = w;
	return 0;
}

struct workers *workers_free(struct workers *w)
{
	if (!w)
		return NULL;
	CHECK(w->unfinished == 0);
	pthread_mutex_lock(&w->lock);
	w->stop = true;
	pthread_mutex_unlock(&w->lock);
	pthread_cond_broadcast(&w->wake);
	for (unsigned i = 0; i < w->started; i++)
		pthread_join(w->threads[i].thread, NULL);
	pthread_cond_destroy(&w->wake);
	pthread_cond_destroy(&w->left);
	pthread_mutex_destroy(&w->lock);
	free(w->threads);
	free(w);
	return NULL;
}
