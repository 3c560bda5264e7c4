/* Threads that post one piece of work at a time and wait for it: nothing else wakes the
 * loop, so a wake-up that is lost stays lost.
 *
 * Was: uv_async_send read that a wake-up was pending before the push was to be seen by the
 * loop, which took that wake-up and slept on: a completion waited for the next one. */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "core/check.h"
#include "core/loopq.h"

enum { POSTERS = 2, EACH = 200000, PATIENCE_S = 20 };

struct poster {
	struct work work;
	sem_t done;
	pthread_t thread;
};

static struct loopq queue;
static struct poster posters[POSTERS];
static struct work end;

static void on_work(struct work *work)
{
	sem_post(&CONTAINER_OF(work, struct poster, work)->done);
}

static void on_end(struct work *work)
{
	(void)work;
	loopq_close(&queue);
}

static void await(sem_t *done)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += PATIENCE_S;
	while (sem_timedwait(done, &until) < 0)
		CHECK(errno == EINTR); /* else the wake-up was lost */
}

static void *post(void *arg)
{
	struct poster *p = arg;

	for (unsigned i = 0; i < EACH; i++) {
		loopq_post(&queue, &p->work, on_work);
		await(&p->done);
	}
	return NULL;
}

static void *run_all(void *arg)
{
	(void)arg;
	for (unsigned i = 0; i < POSTERS; i++) {
		CHECK(sem_init(&posters[i].done, 0, 0) == 0);
		CHECK(pthread_create(&posters[i].thread, NULL, post, &posters[i]) == 0);
	}
	for (unsigned i = 0; i < POSTERS; i++)
		pthread_join(posters[i].thread, NULL);
	loopq_post(&queue, &end, on_end);
	return NULL;
}

int main(void)
{
	pthread_t thread;
	uv_loop_t loop;

	CHECK(uv_loop_init(&loop) == 0);
	CHECK(loopq_init(&queue, &loop) == 0);
	CHECK(pthread_create(&thread, NULL, run_all, NULL) == 0);
	uv_run(&loop, UV_RUN_DEFAULT);
	pthread_join(thread, NULL);
	CHECK(uv_loop_close(&loop) == 0);
	printf("loopq ok posters=%d each=%d\n", POSTERS, EACH);
	return 0;
}
