#include "backend/host_unmap.h"

#include <signal.h>

static struct memfd *next_or_null(struct unmapper *u)
{
	struct memfd *m = NULL;

	pthread_mutex_lock(&u->lock);
	while (list_empty(&u->queue) && !u->stop)
		pthread_cond_wait(&u->wake, &u->lock);
	if (!list_empty(&u->queue)) {
		m = list_first(&u->queue, struct memfd, link);
		list_unlink(&m->link);
	}
	pthread_mutex_unlock(&u->lock);
	return m;
}

static void *unmapper_main(void *arg)
{
	struct memfd *m;

	while ((m = next_or_null(arg))) {
		filler_drop(((struct unmapper *)arg)->filler, m);
		memfd_free(m);
	}
	return NULL;
}

int unmapper_init(struct unmapper *u, struct filler *filler)
{
	sigset_t all, old;
	int r;

	pthread_mutex_init(&u->lock, NULL);
	pthread_cond_init(&u->wake, NULL);
	list_init(&u->queue);
	u->stop = false;
	u->filler = filler;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&u->thread, NULL, unmapper_main, u);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r) {
		pthread_cond_destroy(&u->wake);
		pthread_mutex_destroy(&u->lock);
		return -r;
	}
	pthread_setname_np(u->thread, "shardd-unmap");
	return 0;
}

void unmapper_free(struct unmapper *u, struct memfd *m)
{
	pthread_mutex_lock(&u->lock);
	list_append(&u->queue, &m->link);
	pthread_mutex_unlock(&u->lock);
	pthread_cond_signal(&u->wake);
}

void unmapper_deinit(struct unmapper *u)
{
	pthread_mutex_lock(&u->lock);
	u->stop = true;
	pthread_mutex_unlock(&u->lock);
	pthread_cond_signal(&u->wake);
	pthread_join(u->thread, NULL);
	pthread_cond_destroy(&u->wake);
	pthread_mutex_destroy(&u->lock);
}
