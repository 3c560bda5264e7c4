/*
 * Time on a device. Processes take turns, as they do without MPS: each device is a lock
 * that all processes share, a byte of this library's own file (so nothing is left behind).
 * Kernels of one process run beside each other. With SHARDD_SIM_MPS=1 nobody waits.
 */
#include "sim_run.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include "sim_impl.h"

#define TURN_NS 500000 /* how long one process keeps a device that others want */

struct turn {
	unsigned users; /* streams of this process */
	int fd;
};

static struct turn turns[SIM_DEVICES];
static pthread_mutex_t turn_locks[SIM_DEVICES] = {
	PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
	PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
	PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
};

static int lock_file(void)
{
	Dl_info info;

	return dladdr((void *)(uintptr_t)spin_run, &info) ? open(info.dli_fname, O_RDWR | O_CLOEXEC)
							  : -1;
}

static void turn_begin(int device)
{
	struct flock l = { .l_type = F_WRLCK, .l_start = device, .l_len = 1 };
	struct turn *t = &turns[device];

	pthread_mutex_lock(&turn_locks[device]);
	if (!t->users++) {
		t->fd = lock_file();
		if (t->fd < 0 || fcntl(t->fd, F_OFD_SETLKW, &l) < 0)
			sim_breach("cannot lock the simulator's file: SHARDD_SIM_MPS=1 needs none");
	}
	pthread_mutex_unlock(&turn_locks[device]);
}

static void turn_end(int device)
{
	struct turn *t = &turns[device];

	pthread_mutex_lock(&turn_locks[device]);
	if (!--t->users)
		close(t->fd); /* and with it the lock */
	pthread_mutex_unlock(&turn_locks[device]);
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static void sleep_ns(uint64_t ns)
{
	struct timespec t = { .tv_sec = (time_t)(ns / 1000000000),
			      .tv_nsec = (long)(ns % 1000000000) };

	while (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &t) != 0)
		;
}

uint64_t spin_run(uint64_t ns)
{
	struct stream *s = stream_self();
	int device = sim_physical(s->ctx->device);
	bool alone = !sim_env("SHARDD_SIM_MPS", 0);
	uint64_t first = 0;

	while (ns && !stream_stopped(s)) {
		uint64_t part = ns < TURN_NS ? ns : TURN_NS;
		uint64_t begin;

		if (alone)
			turn_begin(device);
		begin = now_ns();
		first = first ? first : begin;
		sleep_ns(part);
		part = now_ns() - begin;
		ns -= part < ns ? part : ns;
		if (alone)
			turn_end(device);
	}
	return first ? now_ns() - first : 0;
}
