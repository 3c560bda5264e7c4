#include "engine/nccl_impl.h"

#ifdef SHARDD_CUDA

#include <signal.h>

int nccl_thread_create(pthread_t *ret, const char *name, void *(*fn)(void *), void *arg)
{
	sigset_t all, old;
	int r;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(ret, NULL, fn, arg);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r == 0)
		pthread_setname_np(*ret, name);
	return -r;
}

static struct nccl_job *nccl_thread_next_job(struct nccl_thread *t)
{
	struct nccl_job *job = NULL;

	pthread_mutex_lock(&t->lock);
	while (list_empty(&t->jobs) && !t->stop)
		pthread_cond_wait(&t->wake, &t->lock);
	if (!list_empty(&t->jobs)) {
		job = list_first(&t->jobs, struct nccl_job, link);
		list_unlink(&job->link);
	}
	pthread_mutex_unlock(&t->lock);
	return job;
}

static void *nccl_thread_main(void *arg)
{
	struct nccl_job *job;

	while ((job = nccl_thread_next_job(arg)))
		job->fn(job->clique);
	return NULL;
}

int nccl_thread_start(struct nccl_thread *t, const char *name)
{
	int r;

	pthread_mutex_init(&t->lock, NULL);
	pthread_cond_init(&t->wake, NULL);
	list_init(&t->jobs);
	t->stop = false;
	r = nccl_thread_create(&t->id, name, nccl_thread_main, t);
	t->runs = r == 0;
	if (r) {
		pthread_cond_destroy(&t->wake);
		pthread_mutex_destroy(&t->lock);
	}
	return r;
}

void nccl_thread_post(struct nccl_thread *t, struct nccl_clique *q,
		      void (*fn)(struct nccl_clique *))
{
	q->job.clique = q;
	q->job.fn = fn;
	pthread_mutex_lock(&t->lock);
	list_append(&t->jobs, &q->job.link);
	pthread_mutex_unlock(&t->lock);
	pthread_cond_signal(&t->wake);
}

void nccl_thread_stop(struct nccl_thread *t)
{
	if (!t->runs)
		return;
	pthread_mutex_lock(&t->lock);
	t->stop = true;
	pthread_mutex_unlock(&t->lock);
	pthread_cond_signal(&t->wake);
	pthread_join(t->id, NULL);
	pthread_cond_destroy(&t->wake);
	pthread_mutex_destroy(&t->lock);
	t->runs = false;
}

#endif
