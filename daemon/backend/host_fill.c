#include "backend/host_fill.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backend/host_memory.h"
#include "core/cleanup.h"

#define SLICE_BYTES (UINT64_C(4) << 20)
/* If less than this part of the machine's memory, or of the control group's limit, is left, the
 * filler stops. */
#define LEAVE_PART 8
/* Between two slices, while more threads want a processor than there are. */
#define HOST_FILL_PAUSE_NS 20000000

struct fill {
	struct list link; /* filler.queue; in none while a slice of it is made */
	struct memfd *of; /* borrowed; under the lock; NULL: dropped */
	int fd;           /* borrowed from it */
	uint64_t bytes, at;
};

static bool host_fill_is_memory_left(void)
{
	struct host_memory m;

	return host_memory_read(&HOST_MEMORY_OWN, &m) == 0 &&
	       m.available > m.machine / LEAVE_PART && m.left > m.limit / LEAVE_PART;
}

/* Instead of a low priority, which stays when the process is killed: it ends with its last thread, and
 * one that gets no processor keeps its sockets open for seconds. */
static bool host_fill_is_busy(void)
{
	_cleanup_(fclosep) FILE *load = fopen("/proc/loadavg", "re");
	long runnable = 0;

	if (!load || fscanf(load, "%*f %*f %*f %ld/", &runnable) != 1)
		return false;
	return runnable > sysconf(_SC_NPROCESSORS_ONLN);
}

/* Lock held. */
static void host_fill_pause(struct filler *f)
{
	struct timespec at;

	clock_gettime(CLOCK_REALTIME, &at);
	at.tv_nsec += HOST_FILL_PAUSE_NS;
	at.tv_sec += at.tv_nsec / 1000000000;
	at.tv_nsec %= 1000000000;
	if (!f->stop)
		pthread_cond_timedwait(&f->wake, &f->lock, &at);
}

/* Return: is there more to do? */
static bool host_fill_slice(struct fill *fill)
{
	uint64_t n = fill->bytes - fill->at < SLICE_BYTES ? fill->bytes - fill->at : SLICE_BYTES;

	if (!host_fill_is_memory_left())
		return false;
	if (fallocate(fill->fd, 0, (off_t)fill->at, (off_t)n) < 0)
		return false;
	fill->at += n;
	return fill->at < fill->bytes;
}

/* Wait for one and take it out. Return: NULL at the end. */
static struct fill *host_fill_next_or_null(struct filler *f)
{
	struct fill *fill = NULL;
	bool busy = host_fill_is_busy();

	pthread_mutex_lock(&f->lock);
	if (busy)
		host_fill_pause(f);
	while (list_empty(&f->queue) && !f->stop)
		pthread_cond_wait(&f->wake, &f->lock);
	if (!f->stop) {
		fill = list_first(&f->queue, struct fill, link);
		list_unlink(&fill->link);
		f->current = fill;
	}
	pthread_mutex_unlock(&f->lock);
	return fill;
}

/* After a slice: continue with it later, or finish it. */
static void host_fill_put_back(struct filler *f, struct fill *fill, bool more)
{
	pthread_mutex_lock(&f->lock);
	f->current = NULL;
	pthread_cond_broadcast(&f->idle);
	if (fill->of && more) {
		list_append(f->queue.next, &fill->link); /* before the first */
		fill = NULL;
	} else if (fill->of) {
		fill->of->fill = NULL;
	}
	pthread_mutex_unlock(&f->lock);
	free(fill);
}

static void *host_fill_filler_main(void *arg)
{
	struct fill *fill;

	while ((fill = host_fill_next_or_null(arg)))
		host_fill_put_back(arg, fill, host_fill_slice(fill));
	return NULL;
}

int filler_init(struct filler *f)
{
	sigset_t all, old;
	int r;

	pthread_mutex_init(&f->lock, NULL);
	pthread_cond_init(&f->wake, NULL);
	pthread_cond_init(&f->idle, NULL);
	list_init(&f->queue);
	f->stop = false;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&f->thread, NULL, host_fill_filler_main, f);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r) {
		pthread_cond_destroy(&f->idle);
		pthread_cond_destroy(&f->wake);
		pthread_mutex_destroy(&f->lock);
		return -r;
	}
	pthread_setname_np(f->thread, "shardd-fill");
	f->started = true;
	return 0;
}

void filler_add(struct filler *f, struct memfd *m)
{
	struct fill *fill = f->started ? calloc(1, sizeof(*fill)) : NULL;

	if (!fill)
		return;
	*fill = (struct fill){ .of = m, .fd = m->fd, .bytes = m->mem.bytes };
	list_init(&fill->link);
	m->fill = fill;
	pthread_mutex_lock(&f->lock);
	list_append(&f->queue, &fill->link);
	pthread_mutex_unlock(&f->lock);
	pthread_cond_signal(&f->wake);
}

void filler_drop(struct filler *f, struct memfd *m)
{
	struct fill *fill;

	if (!f->started)
		return;
	pthread_mutex_lock(&f->lock);
	fill = STEAL_PTR(m->fill);
	if (fill)
		fill->of = NULL;
	if (fill && fill != f->current) {
		list_unlink(&fill->link);
		free(fill);
		fill = NULL;
	}
	while (fill && f->current == fill) /* the thread that works on it frees it */
		pthread_cond_wait(&f->idle, &f->lock);
	pthread_mutex_unlock(&f->lock);
}

void filler_deinit(struct filler *f)
{
	if (!f->started)
		return;
	pthread_mutex_lock(&f->lock);
	f->stop = true;
	pthread_mutex_unlock(&f->lock);
	pthread_cond_signal(&f->wake);
	pthread_join(f->thread, NULL);
	while (!list_empty(&f->queue)) {
		struct fill *fill = list_first(&f->queue, struct fill, link);

		list_unlink(&fill->link);
		free(fill);
	}
	pthread_cond_destroy(&f->idle);
	pthread_cond_destroy(&f->wake);
	pthread_mutex_destroy(&f->lock);
	f->started = false;
}
