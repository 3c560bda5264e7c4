#include "fdcheck.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

static unsigned at_begin;

/* Count, and list on stderr when @list. The directory's own descriptor is left out. */
static unsigned walk(bool list)
{
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *e;
	unsigned n = 0;

	if (!dir)
		return 0;
	while ((e = readdir(dir))) {
		char path[300], target[PATH_MAX];
		ssize_t len;

		if (e->d_name[0] == '.' || atoi(e->d_name) == dirfd(dir))
			continue;
		n++;
		snprintf(path, sizeof(path), "/proc/self/fd/%s", e->d_name);
		len = list ? readlink(path, target, sizeof(target) - 1) : -1;
		if (len >= 0)
			fprintf(stderr, "  %s -> %.*s\n", e->d_name, (int)len, target);
	}
	closedir(dir);
	return n;
}

unsigned fdcheck_count(void)
{
	return walk(false);
}

/* libuv opens a pipe for signals with the first loop and keeps it for good. */
static void open_what_stays(void)
{
	uv_loop_t loop;

	cr_assert_eq(uv_loop_init(&loop), 0);
	cr_assert_eq(uv_loop_close(&loop), 0);
}

/* gRPC core waits for so long for what a connection that it gives up has begun. */
enum { WAIT_S = 30 };

void fdcheck_begin(void)
{
	open_what_stays();
	at_begin = fdcheck_count();
}

/* A failed assertion in .fini is printed but does not fail the test; an abort does. */
void fdcheck_end(void)
{
	const struct timespec pause = { 0, 10000000 };
	unsigned now = fdcheck_count();

	/* gRPC core closes sockets in threads of its own, a moment after it says that they are */
	for (unsigned i = 0; now != at_begin && i < WAIT_S * 100; i++) {
		nanosleep(&pause, NULL);
		now = fdcheck_count();
	}
	if (now == at_begin)
		return;
	walk(true);
	fprintf(stderr, "descriptors: %u at the begin, %u at the end\n", at_begin, now);
	abort();
}
