#include "backend/host_unmap.h"

#include <errno.h>
#include <signal.h>

#include "core/check.h"
#include "core/clock.h"

/* Wait for work, no longer than a second while memory is left over. */
static void host_unmap_unmapper_sleep(struct unmapper *u)
{
	struct timespec until;

	if (list_empty(&u->left)) {
		pthread_cond_wait(&u->wake, &u->lock);
		return;
	}
	until = clock_in(1000);
	pthread_cond_timedwait(&u->wake, &u->lock, &until);
}

/* Take the next entry of the queue. @ret_free: whether to free it. Return: NULL if the queue is
 * empty (look at the entries that wait) or the thread stops. */
static struct memfd *host_unmap_unmapper_next(struct unmapper *u, bool *ret_free)
{
	struct memfd *m = NULL;

	pthread_mutex_lock(&u->lock);
	if (list_empty(&u->queue) && !u->stop)
		host_unmap_unmapper_sleep(u);
	if (!list_empty(&u->queue)) {
		m = list_first(&u->queue, struct memfd, link);
		list_unlink(&m->link);
		*ret_free = m->free;
	}
	pthread_mutex_unlock(&u->lock);
	return m;
}

static void host_unmap_unmapper_let_go(struct unmapper *u, struct memfd *m)
{
	list_unlink(&m->link);
	u->n_left--;
	memfd_free(m);
}

/* Free pages that came back; close memory that no process holds any more. */
static void host_unmap_unmapper_look_at_left(struct unmapper *u)
{
	struct memfd *m, *tmp;

	list_for_each (m, tmp, &u->left, link)
		if (memfd_is_held(m))
			(void)memfd_empty(m);
		else
			host_unmap_unmapper_let_go(u, m);
}

static void host_unmap_unmapper_leave_over(struct unmapper *u, struct memfd *m)
{
	if (u->n_left == UNMAPPER_MAX_LEFT)
		host_unmap_unmapper_let_go(u, list_first(&u->left, struct memfd, link));
	(void)memfd_empty(m);
	list_append(&u->left, &m->link);
	u->n_left++;
}

static void host_unmap_unmapper_do(struct unmapper *u, struct memfd *m, bool free)
{
	uint64_t bytes = m->mem.bytes;

	filler_drop(u->filler, m);
	if (!free) {
		(void)memfd_empty(m);
		return;
	}
	if (!m->mem.stored && memfd_is_held(m))
		host_unmap_unmapper_leave_over(u, m);
	else
		memfd_free(m);
	pthread_mutex_lock(&u->lock);
	CHECK(u->pending >= bytes);
	u->pending -= bytes;
	pthread_mutex_unlock(&u->lock);
}

static bool host_unmap_unmapper_stopped(struct unmapper *u)
{
	bool stopped;

	pthread_mutex_lock(&u->lock);
	stopped = u->stop && list_empty(&u->queue);
	pthread_mutex_unlock(&u->lock);
	return stopped;
}

static void *host_unmap_unmapper_main(void *arg)
{
	struct unmapper *u = arg;
	struct memfd *m;
	bool free;

	while (!host_unmap_unmapper_stopped(u)) {
		m = host_unmap_unmapper_next(u, &free);
		if (m)
			host_unmap_unmapper_do(u, m, free);
		else
			host_unmap_unmapper_look_at_left(u);
	}
	while (!list_empty(&u->left))
		host_unmap_unmapper_let_go(u, list_first(&u->left, struct memfd, link));
	return NULL;
}

static void host_unmap_unmapper_init_wake(struct unmapper *u)
{
	pthread_condattr_t attr;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&u->wake, &attr);
	pthread_condattr_destroy(&attr);
}

int unmapper_init(struct unmapper *u, struct filler *filler)
{
	sigset_t all, old;
	int r;

	pthread_mutex_init(&u->lock, NULL);
	host_unmap_unmapper_init_wake(u);
	list_init(&u->queue);
	list_init(&u->left);
	u->n_left = 0;
	u->pending = 0;
	u->stop = false;
	u->filler = filler;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&u->thread, NULL, host_unmap_unmapper_main, u);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r) {
		pthread_cond_destroy(&u->wake);
		pthread_mutex_destroy(&u->lock);
		return -r;
	}
	pthread_setname_np(u->thread, "shardd-unmap");
	return 0;
}

/* It may be queued already, for emptying; freeing includes that. */
static void host_unmap_unmapper_queue(struct unmapper *u, struct memfd *m)
{
	if (list_empty(&m->link))
		list_append(&u->queue, &m->link);
}

void unmapper_free(struct unmapper *u, struct memfd *m)
{
	pthread_mutex_lock(&u->lock);
	CHECK(!m->free);
	m->free = true;
	u->pending += m->mem.bytes;
	host_unmap_unmapper_queue(u, m);
	pthread_mutex_unlock(&u->lock);
	pthread_cond_signal(&u->wake);
}

void unmapper_empty(struct unmapper *u, struct memfd *m)
{
	pthread_mutex_lock(&u->lock);
	CHECK(!m->free);
	host_unmap_unmapper_queue(u, m);
	pthread_mutex_unlock(&u->lock);
	pthread_cond_signal(&u->wake);
}

uint64_t unmapper_pending(struct unmapper *u)
{
	uint64_t bytes;

	pthread_mutex_lock(&u->lock);
	bytes = u->pending;
	pthread_mutex_unlock(&u->lock);
	return bytes;
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
