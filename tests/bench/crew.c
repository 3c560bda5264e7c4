/* The processes of a case, and the memory they share with the program. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

static size_t crew_bytes(unsigned members, unsigned series, unsigned repeat)
{
	return sizeof(struct crew) + (size_t)members * series * repeat * sizeof(struct sample);
}

struct crew *crew_new(struct bench *b, unsigned ranks, unsigned helpers, unsigned series,
		      unsigned repeat, uint64_t elements)
{
	size_t bytes = crew_bytes(ranks + helpers, series, repeat);
	struct crew *crew =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pthread_barrierattr_t shared;

	if (crew == MAP_FAILED) {
		fputs("shardd-bench: no memory for the measured times\n", stderr);
		return NULL;
	}
	pthread_barrierattr_init(&shared);
	pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&crew->meeting, &shared, ranks ? ranks : 1);
	pthread_barrierattr_destroy(&shared);
	crew->ranks = ranks;
	crew->helpers = helpers;
	crew->series = series;
	crew->repeat = repeat;
	crew->elements = elements;
	crew->dtype = SHARDD_FP32;
	crew->socket = b->socket;
	crew->on_device = bench_on_device(b);
	snprintf(crew->job, sizeof(crew->job), "bench-%d-%u", (int)getpid(), ++b->jobs);
	crew->sample = (struct sample *)(crew + 1);
	/* No page may be touched for the first time while something is measured. */
	memset(crew->sample, 0, bytes - sizeof(*crew));
	return crew;
}

void crew_free(struct crew *crew)
{
	if (crew)
		munmap(crew, crew_bytes(crew->ranks + crew->helpers, crew->series, crew->repeat));
}

static void member_main(struct crew *crew, unsigned rank, trainer_fn fn, pid_t parent, pid_t group)
{
	struct trainer t = { .crew = crew, .rank = rank };

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	/* A group of their own: the program can wait for them and for nobody else, and
	 * what is typed at a terminal reaches the program alone. */
	setpgid(0, group);
	signal(SIGINT, SIG_DFL);
	signal(SIGTERM, SIG_DFL);
	signal(SIGHUP, SIG_DFL);
	fn(&t);
	_exit(0);
}

/* Wait for all of the group; when one fails, or a signal comes, the others end. */
static int reap(pid_t group)
{
	int r = 0, status;
	pid_t pid;

	while ((pid = waitpid(-group, &status, 0)) > 0 || errno == EINTR) {
		if (pid > 0 && status == 0)
			continue;
		if (pid > 0 && r == 0 && WIFSIGNALED(status))
			fprintf(stderr, "shardd-bench: a trainer was killed by signal %d\n",
				WTERMSIG(status));
		kill(-group, SIGKILL);
		r = -1;
	}
	return r;
}

int crew_run(struct crew *crew, trainer_fn fn)
{
	pid_t parent = getpid(), group = 0;

	fflush(stdout);
	for (unsigned i = 0; i < crew->ranks + crew->helpers; i++) {
		pid_t pid = fork();

		if (pid == 0)
			member_main(crew, i, fn, parent, group);
		if (pid < 0) {
			fprintf(stderr, "shardd-bench: cannot start a process: %s\n",
				strerrordesc_np(errno));
			if (group)
				kill(-group, SIGKILL);
			break;
		}
		group = group ? group : pid;
		setpgid(pid, group); /* here as well: who comes first does it */
	}
	return group ? reap(group) : -1;
}

double crew_limit(const struct crew *crew, unsigned series, double of_device)
{
	if (crew->on_device)
		return of_device;
	return crew->limits[series] > 0 ? crew->limits[series] : -1;
}
