/*
 * What every entry goes through: failing on request, being initialised, having a context.
 * And the small things all files use: messages, the environment, chance, clock, futexes.
 */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "sim_impl.h"

#define FAILS 32

struct fail {
	char function[64];
	unsigned long nth, calls;
	int code; /* -1: none named */
};

pthread_mutex_t sim_lock = PTHREAD_MUTEX_INITIALIZER;

static pthread_mutex_t fail_lock = PTHREAD_MUTEX_INITIALIZER;
static struct fail fails[FAILS];
static unsigned n_fails;
static bool fails_read;
static char *fail_from; /* a file: calls are counted from when it is there; NULL: all are */
static long long fail_device = -1; /* only calls on it are counted; below 0: all are */
#define ANY_DEVICE INT_MIN

static void line(const char *fmt, va_list args)
{
	char text[512];

	vsnprintf(text, sizeof(text), fmt, args);
	dprintf(STDERR_FILENO, "sim: %s\n", text);
}

void sim_note(const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	line(fmt, args);
	va_end(args);
}

void sim_breach(const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	line(fmt, args);
	va_end(args);
	abort();
}

long long sim_env(const char *name, long long otherwise)
{
	const char *s = getenv(name);
	char *end;
	long long v;

	if (!s || !*s)
		return otherwise;
	v = strtoll(s, &end, 0);
	if (*end)
		sim_breach("%s is not a number: \"%s\"", name, s);
	return v;
}

unsigned sim_random(unsigned below)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static uint64_t state;
	uint64_t x;

	pthread_mutex_lock(&lock);
	if (!state)
		state = (uint64_t)sim_env("SHARDD_SIM_SEED", (long long)sim_clock_us()) *
				0x9e3779b97f4a7c15ull |
			1;
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	x = state;
	pthread_mutex_unlock(&lock);
	return (unsigned)((x >> 32) % below);
}

uint64_t sim_clock_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

void sim_futex_wait(_Atomic uint32_t *word, uint32_t value, uint32_t mask)
{
	syscall(SYS_futex, word, FUTEX_WAIT_BITSET, value, NULL, NULL, mask);
}

void sim_futex_nap(_Atomic uint32_t *word, uint32_t value)
{
	struct timespec t = { .tv_nsec = 10000000 };

	syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
}

void sim_futex_wake(_Atomic uint32_t *word, uint32_t mask)
{
	syscall(SYS_futex, word, FUTEX_WAKE_BITSET, INT32_MAX, NULL, NULL, mask);
}

/* "cuMemCreate:3" or "cuMemCreate:3:2" */
static void fail_parse(struct fail *f, char *text)
{
	char *nth = strchr(text, ':');
	char *code = nth ? strchr(nth + 1, ':') : NULL;

	if (!nth || nth - text >= (long)sizeof(f->function))
		sim_breach("SHARDD_SIM_FAIL: \"%s\" is not function:n or function:n:code", text);
	memcpy(f->function, text, (size_t)(nth - text));
	f->nth = strtoul(nth + 1, NULL, 10);
	f->code = code ? atoi(code + 1) : -1;
	if (!f->nth)
		sim_breach("SHARDD_SIM_FAIL: calls are counted from 1: \"%s\"", text);
}

static void fails_parse(void)
{
	const char *env = getenv("SHARDD_SIM_FAIL");
	char *copy = env ? strdup(env) : NULL;
	char *save = NULL;

	for (char *s = copy ? strtok_r(copy, ",", &save) : NULL; s;
	     s = strtok_r(NULL, ",", &save)) {
		if (n_fails == FAILS)
			sim_breach("SHARDD_SIM_FAIL names more than %d calls", FAILS);
		fail_parse(&fails[n_fails++], s);
	}
	free(copy);
	env = getenv("SHARDD_SIM_FAIL_FROM");
	fail_from = env ? strdup(env) : NULL;
	fail_device = sim_env("SHARDD_SIM_FAIL_DEVICE", -1);
	fails_read = true;
}

/* cuda.h's macros make cuMemAlloc_v2 of cuMemAlloc: both are meant. */
static bool same_function(const char *named, const char *called)
{
	size_t n = strlen(named);

	return strncmp(named, called, n) == 0 && (!called[n] || strncmp(called + n, "_v", 2) == 0);
}

/* Also where a call on @device is one that is counted. The environment was read once: the
 * program's other threads may change it. */
static bool counts(int device)
{
	if (fail_device >= 0 && device != ANY_DEVICE && device != fail_device)
		return false;
	return !fail_from || access(fail_from, F_OK) == 0;
}

static bool fail_on(const char *function, int device, int *ret_code)
{
	bool fail = false;

	pthread_mutex_lock(&fail_lock);
	if (!fails_read)
		fails_parse();
	for (unsigned i = 0; i < n_fails && counts(device); i++) {
		struct fail *f = &fails[i];

		if (!same_function(f->function, function) || ++f->calls != f->nth)
			continue;
		fail = true;
		if (f->code >= 0)
			*ret_code = f->code;
	}
	pthread_mutex_unlock(&fail_lock);
	return fail;
}

bool sim_fail(const char *function, int *ret_code)
{
	return fail_on(function, ANY_DEVICE, ret_code);
}

/* What a call most likely fails with, where nobody said. */
static int default_code(const char *function)
{
	bool takes = strstr(function, "Alloc") || strstr(function, "Create") ||
		     strstr(function, "Reserve") || strstr(function, "Map");

	return takes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
}

CUresult sim_enter(const char *function, enum need need, struct ctx **ret)
{
	struct ctx *c = sim_current();
	int code = default_code(function);

	if (ret)
		*ret = c;
	if (fail_on(function, c ? c->device : -1, &code))
		return (CUresult)code;
	if (need == NEED_NOTHING)
		return CUDA_SUCCESS;
	if (sim_started_in != getpid()) /* also in the child of a fork */
		return CUDA_ERROR_NOT_INITIALIZED;
	if (need == NEED_START)
		return CUDA_SUCCESS;
	if (!c)
		return need == NEED_CTX ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
	if (!c->retains)
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	return need == NEED_END ? CUDA_SUCCESS : (CUresult)c->error;
}

CUresult sim_leave(const struct ctx *c)
{
	return c ? (CUresult)c->error : CUDA_SUCCESS;
}
