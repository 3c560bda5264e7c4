/*
 * What the programs of the peers share: their options, and their lines.
 *
 * A turn is measured as shardd-bench measures its own collectives: every rank notes when
 * it calls and when its call returns (CLOCK_MONOTONIC, the same for all processes), and
 * p50_us and p99_us are from the first rank's call to the last rank's return. What one
 * rank waits, of all ranks and turns, is call_p50_us. For C and C++.
 */
#ifndef SHARDD_TESTS_BENCH_PEER_H
#define SHARDD_TESTS_BENCH_PEER_H

#include <getopt.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PEER_WARM_UP 3u /* turns that are not measured */

struct peer_options {
	unsigned ranks;
	unsigned repeat;
	uint64_t bytes; /* a multiple of 4 bytes for each rank */
};

struct peer_sample {
	uint64_t begin_ns, end_ns;
};

static inline uint64_t peer_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline void peer_die(const char *program, const char *what)
{
	fprintf(stderr, "%s: %s\n", program, what);
	exit(1);
}

/* --ranks K --bytes N --repeat R; the rest of the arguments are cases, from optind on. */
static inline struct peer_options peer_parse(int argc, char **argv)
{
	static const struct option known[] = { { "ranks", required_argument, NULL, 'k' },
					       { "bytes", required_argument, NULL, 'b' },
					       { "repeat", required_argument, NULL, 'r' },
					       { NULL, 0, NULL, 0 } };
	struct peer_options o = { 4, 20, UINT64_C(64) << 20 };
	int option;

	while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
		unsigned long long n = optarg ? strtoull(optarg, NULL, 10) : 0;

		if (n == 0)
			peer_die(argv[0],
				 "--ranks K --bytes N --repeat R CASE...: numbers above 0");
		if (option == 'k')
			o.ranks = (unsigned)n;
		else if (option == 'b')
			o.bytes = n;
		else
			o.repeat = (unsigned)n;
	}
	o.bytes -= o.bytes % (sizeof(float) * o.ranks);
	if (o.bytes == 0)
		peer_die(argv[0], "--bytes: at least 4 for each rank");
	return o;
}

static inline int peer_compare(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static inline double peer_median(const double *sorted, size_t n)
{
	return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

/* The smallest value that at least 99 of 100 are not above. */
static inline double peer_p99(const double *sorted, size_t n)
{
	return sorted[(n * 99 + 99) / 100 - 1];
}

/* One line. @samples: [ranks][repeat]. */
static inline void peer_report(const char *name, const struct peer_options *o,
			       const struct peer_sample *samples)
{
	size_t calls = (size_t)o->ranks * o->repeat;
	double *all = (double *)calloc(o->repeat, sizeof(*all));
	double *each = (double *)calloc(calls, sizeof(*each));

	if (!all || !each)
		peer_die(name, "no memory for the figures");
	for (unsigned i = 0; i < o->repeat; i++) {
		uint64_t begin = UINT64_MAX, end = 0;

		for (unsigned r = 0; r < o->ranks; r++) {
			const struct peer_sample *s = &samples[(size_t)r * o->repeat + i];

			begin = s->begin_ns < begin ? s->begin_ns : begin;
			end = s->end_ns > end ? s->end_ns : end;
			each[(size_t)i * o->ranks + r] = (double)(s->end_ns - s->begin_ns) / 1e3;
		}
		all[i] = (double)(end - begin) / 1e3;
	}
	qsort(all, o->repeat, sizeof(*all), peer_compare);
	qsort(each, calls, sizeof(*each), peer_compare);
	printf("{\"case\": \"%s\", \"ranks\": %u, \"bytes\": %llu, \"dtype\": \"fp32\", \"n\": %u, "
	       "\"p50_us\": %.1f, \"p99_us\": %.1f, \"call_p50_us\": %.1f}\n",
	       name, o->ranks, (unsigned long long)o->bytes, o->repeat, peer_median(all, o->repeat),
	       peer_p99(all, o->repeat), peer_median(each, calls));
	fflush(stdout);
	free(all);
	free(each);
}

/* What a rank puts in before every turn, and what must come out of a sum. */
static inline void peer_fill(float *data, size_t n, float value)
{
	for (size_t i = 0; i < n; i++)
		data[i] = value;
}

static inline void peer_check(const char *name, const float *data, size_t n, float value)
{
	for (size_t i = 0; i < n; i++)
		if (data[i] != value)
			peer_die(name, "the result is wrong");
}

#endif
