/* The thread that does what NCCL does on threads of its own. */
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "nccl_impl.h"

struct job {
	struct job *next;
	void (*fn)(void *arg);
	void *arg;
};

static struct job *jobs, **last = &jobs;
static pthread_cond_t posted = PTHREAD_COND_INITIALIZER;
static bool runs;

static void *work(void *arg)
{
	struct job *job;

	(void)arg;
	pthread_mutex_lock(&nccl_lock);
	for (;;) {
		while (!jobs)
			pthread_cond_wait(&posted, &nccl_lock);
		pthread_mutex_unlock(&nccl_lock);
		/* a moment later, so that the state in between is seen */
		nanosleep(&(struct timespec){ .tv_nsec = 1000 * (long)sim_random(200) }, NULL);
		pthread_mutex_lock(&nccl_lock);
		job = jobs;
		jobs = job->next;
		last = jobs ? last : &jobs;
		job->fn(job->arg);
		free(job);
		pthread_cond_broadcast(&nccl_changed);
	}
	return NULL;
}

static void start(void)
{
	sigset_t all, old;
	pthread_t thread;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	runs = pthread_create(&thread, NULL, work, NULL) == 0;
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (!runs)
		sim_breach("libnccl: no thread");
	pthread_detach(thread);
}

void worker_post(void (*fn)(void *arg), void *arg)
{
	struct job *job = malloc(sizeof(*job));

	if (!job)
		sim_breach("libnccl: no memory");
	if (!runs)
		start();
	*job = (struct job){ NULL, fn, arg };
	*last = job;
	last = &job->next;
	pthread_cond_signal(&posted);
}
