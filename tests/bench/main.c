/* shardd-bench: run the cases one after the other. */
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
	interrupted = number;
}

bool bench_interrupted(void)
{
	return interrupted != 0;
}

void bench_program(const char *name, char *path, size_t size)
{
	ssize_t n = readlink("/proc/self/exe", path, size - 1);
	char *slash;

	path[n > 0 ? n : 0] = 0;
	slash = strrchr(path, '/');
	if (slash && (size_t)(slash - path) + strlen(name) + 2 <= size) {
		strcpy(slash + 1, name);
		if (access(path, X_OK) == 0)
			return;
	}
	snprintf(path, size, "%s", name);
}

/* Calls that wait are to end with EINTR. */
static void catch_signals(void)
{
	struct sigaction action = { .sa_handler = on_signal };

	sigaction(SIGINT, &action, NULL);
	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGHUP, &action, NULL);
	signal(SIGPIPE, SIG_IGN); /* a closed standard output is seen at the end */
}

static int run_cases(struct bench *b)
{
	int r = 0;

	for (unsigned i = 0; i < b->o.n_cases && r == 0 && !interrupted; i++) {
		r = b->o.cases[i]->run(b, b->o.cases[i]);
		if (r < 0 && !interrupted)
			fprintf(stderr, "shardd-bench: %s could not be measured\n",
				b->o.cases[i]->name);
	}
	return r;
}

int main(int argc, char **argv)
{
	struct bench b = { 0 };
	int r = options_parse(&b.o, argc, argv);

	if (r)
		return r > 0 ? 0 : 2;
	catch_signals();
	if (bench_on_device(&b))
		limit_of_device();
	r = daemon_start(&b);
	if (r == 0)
		r = run_cases(&b);
	if (daemon_stop(&b) < 0)
		r = -1;
	if (fflush(stdout) != 0 || ferror(stdout)) {
		fputs("shardd-bench: the figures could not be written\n", stderr);
		r = -1;
	}
	if (interrupted)
		return 128 + interrupted;
	return r ? 1 : 0;
}
