/*
 * What the memory of this machine gives without a daemon: the same number of threads,
 * memory of the same kind (a shared memfd, whose pages are all there), arrays of the
 * same size in all. Bytes are counted as they are named in the code; what a processor
 * reads before it writes a line is not, neither here nor in the cases.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

#define MAX_THREADS 256
#define TURNS       8
#define TURN_BYTES  (UINT64_C(256) << 20) /* at least, so that starting costs nothing */
#define BLOCK       (64u << 10)           /* elements; what the daemon's workers take at once */

/* A register of AVX2; elsewhere several narrower ones. */
typedef float wide __attribute__((vector_size(32)));

struct sweep {
	enum limit_kind kind;
	wide *a, *b, *c;
	size_t n; /* wides of each array */
	unsigned threads;
	unsigned passes; /* of a turn */
	pthread_barrier_t barrier;
	atomic_uint_fast64_t begin, end; /* of the first thread to begin, and of the last to end */
	_Atomic float sink;              /* so that reading is not left out */
};

struct worker {
	struct sweep *s;
	unsigned index;
	pthread_t thread;
};

#define INLINE static inline __attribute__((always_inline))

INLINE void triad_body(wide *a, const wide *b, const wide *c, size_t n)
{
	for (size_t i = 0; i < n; i++)
		a[i] = b[i] + c[i] * 0.5f;
}

/* Eight sums, so that no addition waits for the one before it. */
INLINE float read_body(const wide *a, size_t n)
{
	wide s0 = { 0 }, s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
	float sum = 0;
	size_t i;

	for (i = 0; i + 8 <= n; i += 8) {
		s0 += a[i];
		s1 += a[i + 1];
		s2 += a[i + 2];
		s3 += a[i + 3];
		s4 += a[i + 4];
		s5 += a[i + 5];
		s6 += a[i + 6];
		s7 += a[i + 7];
	}
	for (; i < n; i++)
		s0 += a[i];
	s0 += s1 + s2 + s3 + s4 + s5 + s6 + s7;
	for (i = 0; i < sizeof(wide) / sizeof(float); i++)
		sum += s0[i];
	return sum;
}

static void triad_any(wide *a, const wide *b, const wide *c, size_t n)
{
	triad_body(a, b, c, n);
}

static float read_any(const wide *a, size_t n)
{
	return read_body(a, n);
}

#ifdef __x86_64__

__attribute__((target("avx2"))) static void triad_avx2(wide *a, const wide *b, const wide *c,
						       size_t n)
{
	triad_body(a, b, c, n);
}

__attribute__((target("avx2"))) static float read_avx2(const wide *a, size_t n)
{
	return read_body(a, n);
}

static bool has_avx2(void)
{
	return __builtin_cpu_supports("avx2");
}

#else
#define triad_avx2 triad_any
#define read_avx2  read_any
static bool has_avx2(void)
{
	return false;
}
#endif

static void pass(struct sweep *s, size_t from, size_t n)
{
	float sum = 0;

	switch (s->kind) {
	case LIMIT_COPY:
		memcpy(s->a + from, s->b + from, n * sizeof(wide));
		break;
	case LIMIT_TRIAD:
		(has_avx2() ? triad_avx2 : triad_any)(s->a + from, s->b + from, s->c + from, n);
		break;
	case LIMIT_READ:
		sum = (has_avx2() ? read_avx2 : read_any)(s->a + from, n);
		break;
	}
	atomic_store_explicit(&s->sink, sum, memory_order_relaxed);
}

/* Every thread has its own contiguous part, in blocks like those of the daemon. */
static void sweep_part(struct sweep *s, unsigned index)
{
	size_t from = s->n * index / s->threads, end = s->n * (index + 1) / s->threads;
	size_t block = BLOCK * sizeof(float) / sizeof(wide);

	for (size_t at = from; at < end; at += block)
		pass(s, at, end - at < block ? end - at : block);
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Threads do not begin together. The time of each alone would leave out that one waits while the other has all of the
 * memory's bandwidth. */
static void turn(struct sweep *s, unsigned index)
{
	uint64_t now, known;

	pthread_barrier_wait(&s->barrier);
	now = now_ns();
	known = atomic_load(&s->begin);
	while (now < known && !atomic_compare_exchange_weak(&s->begin, &known, now))
		;
	for (unsigned i = 0; i < s->passes; i++)
		sweep_part(s, index);
	now = now_ns();
	known = atomic_load(&s->end);
	while (now > known && !atomic_compare_exchange_weak(&s->end, &known, now))
		;
	pthread_barrier_wait(&s->barrier);
}

static void *worker_main(void *arg)
{
	struct worker *w = arg;

	for (unsigned i = 0; i < TURNS; i++)
		turn(w->s, w->index);
	return NULL;
}

/* Threads that have started wait at the barrier for good: the program ends. */
static void limit_failed(void)
{
	fputs("shardd-bench: cannot start the threads that measure the limit\n", stderr);
	exit(1);
}

/* The program's thread is worker 0. Return: the best turn's nanoseconds. */
static uint64_t sweep_run(struct sweep *s)
{
	struct worker workers[MAX_THREADS];
	uint64_t best = UINT64_MAX;
	unsigned started;

	for (started = 1; started < s->threads; started++) {
		workers[started] = (struct worker){ .s = s, .index = started };
		if (pthread_create(&workers[started].thread, NULL, worker_main, &workers[started]))
			limit_failed();
	}
	for (unsigned i = 0; i < TURNS; i++) {
		uint64_t ns;

		atomic_store(&s->begin, UINT64_MAX);
		atomic_store(&s->end, 0);
		turn(s, 0);
		ns = atomic_load(&s->end) - atomic_load(&s->begin);
		best = ns < best ? ns : best;
	}
	while (--started > 0)
		pthread_join(workers[started].thread, NULL);
	return best;
}

static void *map_like_daemon(size_t bytes)
{
	int fd = memfd_create("shardd-bench", MFD_CLOEXEC);
	void *addr = MAP_FAILED;

	if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0)
		addr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd >= 0)
		close(fd);
	if (addr == MAP_FAILED)
		return NULL;
	madvise(addr, bytes, MADV_HUGEPAGE);
	memset(addr, 0, bytes);
	return addr;
}

static bool on_device;

void limit_of_device(void)
{
	on_device = true;
}

double limit_measure(enum limit_kind kind, uint64_t footprint)
{
	unsigned arrays = kind == LIMIT_COPY ? 2 : kind == LIMIT_TRIAD ? 3 : 1;
	unsigned cores = (unsigned)get_nprocs();
	struct sweep s = { .kind = kind, .threads = cores < MAX_THREADS ? cores : MAX_THREADS };
	uint64_t bytes, best;
	char *addr;

	if (on_device)
		return device_copy_limit(footprint);
	s.n = footprint / arrays / sizeof(wide);
	s.n = s.n < s.threads ? s.threads : s.n;
	bytes = s.n * sizeof(wide) * arrays;
	s.passes = (unsigned)((TURN_BYTES + bytes - 1) / bytes);
	addr = map_like_daemon(bytes);
	if (!addr)
		return -1;
	s.a = (wide *)addr;
	s.b = s.a + (arrays > 1 ? s.n : 0);
	s.c = s.b + (arrays > 2 ? s.n : 0);
	pthread_barrier_init(&s.barrier, NULL, s.threads);
	best = sweep_run(&s);
	pthread_barrier_destroy(&s.barrier);
	munmap(addr, bytes);
	return (double)bytes * s.passes / (double)best;
}

int case_limits(struct bench *b, const struct bench_case *c)
{
	static const char *const names[] = { "limit_copy", "limit_triad", "limit_read" };

	(void)c;
	for (enum limit_kind kind = LIMIT_COPY; kind <= (on_device ? LIMIT_COPY : LIMIT_READ);
	     kind++) {
		struct figures f = FIGURES_NULL;

		f.name = names[kind];
		f.bytes = b->o.bytes;
		f.n = TURNS;
		f.limit = limit_measure(kind, b->o.bytes);
		if (f.limit < 0)
			return -1;
		figures_report(b, &f);
	}
	return 0;
}
