/*
 * Runs the tests of criterion/criterion.h here, one after the other, each in a child, and says in TAP what came
 * of them.
 *
 * usage: threads_NAME [SUITE/TEST]...
 */
#include <criterion/criterion.h>

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TIMEOUT_S \
	60 /* unless its suite says otherwise; all is slower with the sanitizer: see SLOWER */
#define SLOWER  4
#define SKIPPED 77

extern const struct threads_test *const __start_threads_tests[];
extern const struct threads_test *const __stop_threads_tests[];

/* Of a library that is not instrumented (gRPC, Gloo, OpenSSL, libuv) the sanitizer sees locks and system calls, and
 * no atomics; so what such a library copies itself is not looked at. */
__attribute__((visibility("default"))) const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
	return "race:libgrpc.so\nrace:libgpr.so\nrace:libabsl_\nrace:libgloo.so\n"
	       "mutex:libgrpc.so\nmutex:libabsl_\ndeadlock:libgrpc.so\ndeadlock:libabsl_\n";
}

/* history_size: else the frame that is in such a library may be forgotten. */
__attribute__((visibility("default"))) const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
	return "history_size=7:ignore_noninstrumented_modules=1";
}

/* ------------------------------------------------------------------- in a test */

static bool failed;

void threads_check(bool good, bool fatal, const char *file, int line, const char *what,
		   const char *format, ...)
{
	va_list args;

	if (good)
		return;
	fprintf(stderr, "%s:%d: not: %s: ", file, line, what);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	failed = true;
	if (fatal)
		_exit(1);
}

void threads_note(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
}

void threads_skip(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	_exit(SKIPPED);
}

static const struct threads_options *threads_suite(const struct threads_test *t)
{
	static const struct threads_options none;

	for (const struct threads_test *const *s = __start_threads_tests; s < __stop_threads_tests;
	     s++)
		if (!(*s)->name && strcmp((*s)->suite, t->suite) == 0)
			return &(*s)->o;
	return &none;
}

/* In the child. exit: what the sanitizer has found makes it another code. */
static void threads_do(const struct threads_test *t)
{
	const struct threads_options *suite = threads_suite(t);
	void (*init)(void) = t->o.init ? t->o.init : suite->init;
	void (*fini)(void) = t->o.fini ? t->o.fini : suite->fini;
	double s = t->o.timeout > 0     ? t->o.timeout
		   : suite->timeout > 0 ? suite->timeout
					: TIMEOUT_S;

	alarm((unsigned)(s * SLOWER));
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (init)
		init();
	t->run();
	if (fini)
		fini();
	exit(failed);
}

/* ------------------------------------------------------------------- the runner */

static bool threads_run(const struct threads_test *t)
{
	time_t began = time(NULL);
	pid_t pid = fork();
	int status = 0;
	bool good;

	if (pid == 0)
		threads_do(t);
	if (pid < 0 || waitpid(pid, &status, 0) < 0) {
		perror("threads");
		exit(2);
	}
	good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
	if (WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED) {
		printf("ok - %s/%s # SKIP\n", t->suite, t->name);
		return true;
	}
	printf("%sok - %s/%s\n# %ld s\n", good ? "" : "not ", t->suite, t->name,
	       (long)(time(NULL) - began));
	if (!good)
		printf("# it has ended %s %d\n", WIFSIGNALED(status) ? "by signal" : "with code",
		       WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
	fflush(stdout);
	return good;
}

static bool threads_has_name(const struct threads_test *t, const char *wanted)
{
	char name[256];

	snprintf(name, sizeof(name), "%s/%s", t->suite, t->name);
	return t->name && strcmp(wanted, name) == 0;
}

static bool threads_is_asked_for(const struct threads_test *t, char **names)
{
	for (char **n = names; *n; n++)
		if (threads_has_name(t, *n))
			return true;
	return t->name && !*names;
}

/* A name that no test has must not look passed. */
static bool threads_exists(const char *name)
{
	for (const struct threads_test *const *t = __start_threads_tests; t < __stop_threads_tests;
	     t++)
		if (threads_has_name(*t, name))
			return true;
	printf("not ok - %s\n# there is no such test\n", name);
	return false;
}

int main(int argc, char **argv)
{
	unsigned n = 0;
	bool all = true;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (int i = 1; i < argc; i++)
		if (!threads_exists(argv[i])) {
			all = false;
			n++;
		}
	for (const struct threads_test *const *t = __start_threads_tests; t < __stop_threads_tests;
	     t++) {
		if (!threads_is_asked_for(*t, argv + 1))
			continue;
		all = threads_run(*t) && all;
		n++;
	}
	printf("1..%u\n", n);
	return !all;
}
