/* The command line of shardd-bench. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define DEFAULT_BYTES (UINT64_C(64) << 20)
#define MAX_BYTES     (UINT64_C(1) << 40)
#define MAX_REPEAT    1000000
#define MAX_UNITS     100000

static void usage(FILE *to)
{
	fputs("usage: shardd-bench [--json] [--socket PATH] [--ranks K] [--bytes N]\n"
	      "                    [--dtype fp32|bf16|fp16] [--repeat R] [--units U]\n"
	      "                    [--backend host|cuda] CASE...\n"
	      "\n"
	      "Measures a daemon of its own, or the one at PATH, with K trainer processes.\n"
	      "  --json      one JSON object a line instead of a table\n"
	      "  --backend B the daemon's, and what limits are taken of; default: host\n"
	      "  --ranks K   trainers; default: by case\n"
	      "  --bytes N   size of the unit in its dtype, with KiB, MiB or GiB; default 64MiB\n"
	      "  --dtype D   of the gradients, of what is handed out (gather_cast, memory);\n"
	      "              default: fp32, gather_cast: bf16\n"
	      "  --repeat R  measured turns, after three that are not; default: by case\n"
	      "  --units U   of cases with many units; default: by case\n"
	      "Cases, and in brackets the ops of the protocol that they measure:\n",
	      to);
	for (size_t k = 0; bench_tables[k]; k++)
		for (const struct bench_case *c = bench_tables[k]; c->name; c++)
			fprintf(to, "  %-18s%s%s%s%s\n", c->name, c->help, c->ops ? " [" : "",
				c->ops ? c->ops : "", c->ops ? "]" : "");
}

static int wrong(const char *what, const char *value, const char *allowed)
{
	fprintf(stderr, "shardd-bench: %s '%s': %s\n", what, value, allowed);
	return -1;
}

/* A number from 1 to @max, which may end with a suffix if @suffixes. */
static bool number(const char *text, uint64_t max, bool suffixes, uint64_t *ret)
{
	static const struct {
		const char *name;
		unsigned shift;
	} units[] = { { "", 0 }, { "KiB", 10 }, { "MiB", 20 }, { "GiB", 30 } };
	unsigned long long n;
	char *end;

	if (*text < '0' || *text > '9')
		return false;
	errno = 0;
	n = strtoull(text, &end, 10);
	if (errno || n == 0)
		return false;
	for (size_t i = 0; i < (suffixes ? 4 : 1); i++)
		if (strcmp(end, units[i].name) == 0 && n <= max >> units[i].shift) {
			*ret = (uint64_t)n << units[i].shift;
			return true;
		}
	return false;
}

static int take_unsigned(const char *what, const char *value, unsigned max, unsigned *ret)
{
	char allowed[64];
	uint64_t n;

	snprintf(allowed, sizeof(allowed), "it must be a number from 1 to %u", max);
	if (!number(value, max, false, &n))
		return wrong(what, value, allowed);
	*ret = (unsigned)n;
	return 0;
}

static int take_bytes(const char *value, uint64_t *ret)
{
	if (number(value, MAX_BYTES, true, ret) && *ret >= 4)
		return 0;
	return wrong("--bytes", value, "it must be 4 to 1024GiB");
}

static int take_dtype(const char *value, enum shardd_dtype *ret)
{
	for (enum shardd_dtype d = SHARDD_FP32; d <= SHARDD_FP16; d++)
		if (strcmp(value, bench_dtype_name(d)) == 0) {
			*ret = d;
			return 0;
		}
	return wrong("--dtype", value, "it must be fp32, bf16 or fp16");
}

static int take_backend(const char *value, const char **ret)
{
	if (strcmp(value, "host") != 0 && strcmp(value, "cuda") != 0)
		return wrong("--backend", value, "it must be host or cuda");
	*ret = value;
	return 0;
}

static int take_case(struct options *o, const char *name)
{
	const struct bench_case *c = bench_case_named(name);

	if (!c)
		return wrong("case", name, "there is none of that name; --help lists them");
	if (o->n_cases == BENCH_MAX_CASES)
		return wrong("case", name, "these are too many cases");
	o->cases[o->n_cases++] = c;
	return 0;
}

static int take_option(struct options *o, int option)
{
	switch (option) {
	case 'j':
		o->json = true;
		return 0;
	case 's':
		o->socket = optarg;
		return 0;
	case 'k':
		return take_unsigned("--ranks", optarg, BENCH_MAX_RANKS, &o->ranks);
	case 'b':
		return take_bytes(optarg, &o->bytes);
	case 'd':
		return take_dtype(optarg, &o->dtype);
	case 'r':
		return take_unsigned("--repeat", optarg, MAX_REPEAT, &o->repeat);
	case 'u':
		return take_unsigned("--units", optarg, MAX_UNITS, &o->units);
	case 'B':
		return take_backend(optarg, &o->backend);
	case 'h':
		usage(stdout);
		return 1;
	default:
		fputs("shardd-bench: --help shows what it takes\n", stderr);
		return -1;
	}
}

int options_parse(struct options *o, int argc, char **argv)
{
	static const struct option options[] = {
		{ "json", no_argument, NULL, 'j' },
		{ "socket", required_argument, NULL, 's' },
		{ "ranks", required_argument, NULL, 'k' },
		{ "bytes", required_argument, NULL, 'b' },
		{ "dtype", required_argument, NULL, 'd' },
		{ "repeat", required_argument, NULL, 'r' },
		{ "units", required_argument, NULL, 'u' },
		{ "backend", required_argument, NULL, 'B' },
		{ "help", no_argument, NULL, 'h' },
		{ 0 },
	};
	int option, r;

	*o = (struct options){ .bytes = DEFAULT_BYTES, .backend = "host" };
	while ((option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		r = take_option(o, option);
		if (r)
			return r;
	}
	for (int i = optind; i < argc; i++)
		if (take_case(o, argv[i]) < 0)
			return -1;
	if (o->n_cases == 0) {
		fputs("shardd-bench: no case is given; --help lists them\n", stderr);
		return -1;
	}
	if (o->socket && strlen(o->socket) >= sizeof(((struct bench *)0)->socket))
		return wrong("--socket", o->socket, "the path of a socket has at most 107 bytes");
	return 0;
}

unsigned bench_ranks(const struct bench *b, const struct bench_case *c)
{
	return b->o.ranks ? b->o.ranks : c->ranks;
}

unsigned bench_repeat(const struct bench *b, const struct bench_case *c)
{
	return b->o.repeat ? b->o.repeat : c->repeat;
}

unsigned bench_units(const struct bench *b, unsigned by_default)
{
	return b->o.units ? b->o.units : by_default;
}

enum shardd_dtype bench_dtype(const struct bench *b, enum shardd_dtype by_default)
{
	return b->o.dtype ? b->o.dtype : by_default;
}

bool bench_on_device(const struct bench *b)
{
	return strcmp(b->o.backend, "host") != 0;
}

uint64_t bench_elements(const struct bench *b, enum shardd_dtype dtype)
{
	return b->o.bytes / (dtype == SHARDD_FP32 ? 4 : 2);
}

const char *bench_dtype_name(enum shardd_dtype dtype)
{
	return dtype == SHARDD_FP32 ? "fp32" : dtype == SHARDD_BF16 ? "bf16" : "fp16";
}
