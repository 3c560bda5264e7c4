/*
 * Kernels whose launch a successor of the process can complete: the code of kernels/cuda itself, as it
 * is compiled for the host (tests/gpu/emulated), on translated addresses.
 *
 * SHARDD_SIM_FUSE names a file with numbers, if it is there: so many of their stores are made as the
 * first one says, then the process kills itself. What each thread has stored since its last fence takes
 * effect in part. The next process goes on with the next number; without one the file is gone.
 */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "emulated.h"
#include "launch.h"
#include "sim_impl.h"
#include "sim_run.h"

/* Of the code of the kernels, which knows one launch at a time; and of the fuse. */
static pthread_mutex_t undo_lock = PTHREAD_MUTEX_INITIALIZER;

#define MOST_DEATHS 8u

/* Return: how many numbers there are. */
static unsigned fuse_read(const char *path, unsigned long long ret[MOST_DEATHS])
{
	FILE *f = path ? fopen(path, "re") : NULL;
	unsigned n = 0;

	while (f && n < MOST_DEATHS && fscanf(f, "%llu", &ret[n]) == 1)
		n++;
	if (f)
		fclose(f);
	return n;
}

static void fuse_write(const char *path, const unsigned long long *numbers, unsigned n)
{
	FILE *f = n ? fopen(path, "we") : NULL;
	bool done = n ? f != NULL : unlink(path) == 0;

	for (unsigned i = 0; f && i < n; i++)
		done &= fprintf(f, "%llu\n", numbers[i]) > 0;
	if (f)
		done &= fclose(f) == 0;
	if (!done)
		sim_breach("cannot write to %s", path);
}

void undo_run(unsigned fn, const void *args, unsigned blocks)
{
	const char *path = getenv("SHARDD_SIM_FUSE");
	unsigned long long left[MOST_DEATHS];
	unsigned n;

	pthread_mutex_lock(&undo_lock);
	n = fuse_read(path, left);
	if (!n) {
		emulated_launch(fn, blocks, args);
	} else if (emulated_launch_part(fn, blocks, args, left[0], left[0])) {
		left[0] -= emulated_stores();
		fuse_write(path, left, n);
	} else {
		fuse_write(path, left + 1, n - 1);
		kill(getpid(), SIGKILL);
	}
	pthread_mutex_unlock(&undo_lock);
}

unsigned undo_threads(unsigned blocks)
{
	return blocks * LAUNCH_THREADS;
}
