#include "core/threads.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/cleanup.h"

/* What the libraries map for each thread at its start. */
#define SPARE_BYTES ((size_t)64 << 20)

struct threads_gate {
	pthread_mutex_t lock;
	pthread_cond_t opened;
	bool open;
};

/* Allocates memory, as a real thread does, and stays until all have started. */
static void *threads_wait(void *arg)
{
	struct threads_gate *g = arg;
	void *volatile p = malloc(64);

	pthread_mutex_lock(&g->lock);
	while (!g->open)
		pthread_cond_wait(&g->opened, &g->lock);
	pthread_mutex_unlock(&g->lock);
	free(p);
	return NULL;
}

/* Return: 0 or an errno; @ret_started of them have started. */
static int threads_start(struct threads_gate *g, pthread_t *threads, unsigned n,
			 unsigned *ret_started)
{
	sigset_t all, old;
	int r = 0;

	/* only the loop thread handles signals */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	for (*ret_started = 0; r == 0 && *ret_started < n; *ret_started += r == 0)
		r = pthread_create(&threads[*ret_started], NULL, threads_wait, g);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return r;
}

static void threads_end(struct threads_gate *g, pthread_t *threads, unsigned n)
{
	pthread_mutex_lock(&g->lock);
	g->open = true;
	pthread_cond_broadcast(&g->opened);
	pthread_mutex_unlock(&g->lock);
	for (unsigned i = 0; i < n; i++)
		pthread_join(threads[i], NULL);
}

static int threads_spare(void)
{
	void *p = mmap(NULL, SPARE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
		       -1, 0);

	if (p == MAP_FAILED)
		return errno;
	munmap(p, SPARE_BYTES);
	return 0;
}

int threads_probe(unsigned n, struct fault *f)
{
	struct threads_gate g = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false };
	_cleanup_(freep) pthread_t *threads = calloc(n, sizeof(*threads));
	unsigned started = 0;
	char buf[128];
	int r = threads ? threads_start(&g, threads, n, &started) : ENOMEM;

	if (r == 0)
		r = threads_spare();
	threads_end(&g, threads, started);
	if (r == 0)
		return 0;
	if (started < n)
		fault_set(f, FAULT_EXHAUSTED, "threads",
			  "cannot start thread %u of %u: %s; raise the limit of processes (ulimit "
			  "-u, TasksMax, pids.max) or of address space (ulimit -v)",
			  started + 1, n, strerror_r(r, buf, sizeof(buf)));
	else
		fault_set(f, FAULT_EXHAUSTED, "threads",
			  "cannot start: no address space for %zu MiB beside %u threads: %s; raise "
			  "its limit (ulimit -v)",
			  SPARE_BYTES >> 20, n, strerror_r(r, buf, sizeof(buf)));
	f->domain = FAULT_DOMAIN_OS;
	f->native = r;
	return f->code;
}
