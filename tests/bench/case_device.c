/* launch, reduce_bare and nccl_direct: ops in the queue of a device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"

#define SMALL_ELEMENTS 1024
#define DEPTH          32u /* ops of one trainer under way */
#define RAIL           64  /* bytes of "cuda:N" */

/* With a stream of its own where the memory is a GPU's: then answers come when an op is
 * in the device's queue. @device: number of the GPU. Return: the stream, or NULL. */
static void *enter_on_stream(struct trainer *t, bool wanted, unsigned device)
{
	static char id[RAIL];
	void *stream = NULL;
	struct shardd_error err;

	if (wanted) {
		stream = device_stream(device);
		snprintf(id, sizeof(id), "cuda:%u", device);
		t->device = id;
	}
	trainer_connect(t);
	trainer_join(t, SHARDD_EPHEMERAL);
	if (wanted)
		trainer_must(t, shardd_set_stream(t->client, stream, &err), &err, "set_stream");
	return stream;
}

static void wait_for(struct trainer *t, shardd_ticket ticket, const char *what)
{
	struct shardd_error err;

	trainer_must(t, shardd_wait(t->client, ticket, -1, NULL, &err), &err, what);
}

/* ----------------------------------------------------------------- launch */

enum { LAUNCH_ALONE, LAUNCH_MANY, LAUNCH_N };

/* Ops on one unit come one after the other, so there are as many as ops under way. */
static void register_units(struct trainer *t, shardd_unit *ret)
{
	struct shardd_tensor w = { .name = "w",
				   .shape = &t->crew->elements,
				   .dims = 1,
				   .init = SHARDD_INIT_CONSTANT,
				   .a = 1 };
	struct shardd_unit_info info[DEPTH];
	struct shardd_unit_spec spec[DEPTH];
	struct shardd_error err;
	char name[DEPTH][16];

	for (unsigned i = 0; i < DEPTH; i++) {
		snprintf(name[i], sizeof(name[i]), "unit.%u", i);
		spec[i] = (struct shardd_unit_spec){ .size = sizeof(spec[i]),
						     .name = name[i],
						     .tensors = &w,
						     .n_tensors = 1,
						     .group = SHARDD_WORLD };
	}
	trainer_must(t, shardd_register(t->client, spec, DEPTH, info, &err), &err, "register");
	for (unsigned i = 0; i < DEPTH; i++)
		ret[i] = info[i].unit;
}

static shardd_ticket initialise(struct trainer *t, shardd_unit unit)
{
	struct shardd_error err;
	shardd_ticket ticket;

	trainer_must(t,
		     shardd_submit_init(t->client,
					SHARDD_OPTIONS(init, .unit = unit, .seed = 1,
						       .from = SHARDD_FROM_SEED),
					&ticket, &err),
		     &err, "initialise");
	return ticket;
}

/* DEPTH at once; their time is shared out among them. */
static void launch_many(struct trainer *t, const shardd_unit *units, struct sample *s)
{
	shardd_ticket tickets[DEPTH];

	sample_begin(s);
	for (unsigned k = 0; k < DEPTH; k++)
		tickets[k] = initialise(t, units[k]);
	for (unsigned k = 0; k < DEPTH; k++)
		wait_for(t, tickets[k], "initialise");
	sample_end(s);
	s->end_ns = s->begin_ns + (s->end_ns - s->begin_ns) / DEPTH;
}

/* A small unit is filled: one call, one kernel. */
static void launch_main(struct trainer *t)
{
	shardd_unit units[DEPTH];

	enter_on_stream(t, t->crew->on_device, 0);
	register_units(t, units);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, LAUNCH_ALONE, i);

		sample_begin(s);
		trainer_timed_wait(t, s, initialise(t, units[0]), NULL, "initialise");
	}
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++)
		launch_many(t, units, trainer_sample(t, LAUNCH_MANY, i));
	trainer_leave(t);
}

int case_launch(struct bench *b, const struct bench_case *c)
{
	static const char *const names[] = { "launch", "launch_pipelined" };
	struct crew *crew = crew_new(b, 1, 0, LAUNCH_N, bench_repeat(b, c), SMALL_ELEMENTS);
	int r = crew ? crew_run(crew, launch_main) : -1;

	for (unsigned k = 0; k < LAUNCH_N && r == 0; k++) {
		struct figures f = FIGURES_NULL;

		f.name = names[k];
		f.ranks = 1;
		figures_calls(&f, crew, k, 0, 1);
		f.ran_us = -1;
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}

/* ------------------------------------------------------------- reduce_bare */

/* In flight at once: gradient buffers are as large as they are. */
#define REDUCES 4u

/* As many reduces as the case repeats, never waiting for the device; the sample is all of
 * them. There is no step between them, so each one adds to what the shard holds. What is in
 * the buffers was written once: they come from a pool. */
static void stream_reduces(struct trainer *t, void *stream, struct sample *s, unsigned n)
{
	shardd_ticket tickets[REDUCES];
	struct shardd_error err;
	shardd_ticket gradient;

	trainer_meet(t);
	sample_begin(s);
	for (unsigned i = 0; i < n; i++) {
		if (i >= REDUCES)
			wait_for(t, tickets[i % REDUCES], "reduce");
		trainer_must(t,
			     shardd_submit_gradient(t->client,
						    SHARDD_OPTIONS(gradient, .unit = t->unit),
						    &gradient, &err),
			     &err, "gradient");
		trainer_must(t,
			     shardd_submit_reduce(t->client,
						  SHARDD_OPTIONS(reduce, .unit = t->unit),
						  &tickets[i % REDUCES], &err),
			     &err, "reduce");
		wait_for(t, gradient, "gradient");
	}
	for (unsigned i = n > REDUCES ? n - REDUCES : 0; i < n; i++)
		wait_for(t, tickets[i % REDUCES], "reduce");
	device_drain(stream);
	sample_end(s);
}

static void bare_main(struct trainer *t)
{
	void *stream = enter_on_stream(t, true, 0);
	unsigned n = (unsigned)t->crew->numbers[0];

	trainer_register(t);
	for (unsigned i = 0; i < REDUCES; i++) {
		trainer_gradient(t);
		trainer_reduce(t);
	}
	for (int i = -1; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);

		stream_reduces(t, stream, s, n);
		s->end_ns = s->begin_ns + (s->end_ns - s->begin_ns) / n;
	}
	trainer_meet(t);
	trainer_leave(t);
}

static int needs_device(const struct bench *b, const struct bench_case *c)
{
	if (bench_on_device(b))
		return 0;
	fprintf(stderr, "shardd-bench: %s needs --backend cuda\n", c->name);
	return -1;
}

#define BARE_TURNS 5u

int case_reduce_bare(struct bench *b, const struct bench_case *c)
{
	enum shardd_dtype dtype = bench_dtype(b, SHARDD_BF16);
	uint64_t elements = bench_elements(b, dtype);
	unsigned ranks = bench_ranks(b, c), n = bench_repeat(b, c);
	double traffic = (double)elements * (double)(ranks * shardd_dtype_size(dtype) + 2 * 4);
	struct figures f = FIGURES_NULL;
	struct crew *crew;
	double us;
	int r;

	if (needs_device(b, c) < 0)
		return -1;
	crew = crew_new(b, ranks, 0, 1, BARE_TURNS, elements);
	us = crew ? device_reduce_us(ranks, elements, dtype, n) : -1;
	if (us < 0) {
		crew_free(crew);
		return -1;
	}
	crew->dtype = dtype;
	crew->optimizer = SHARDD_SGD;
	crew->numbers[0] = n;
	f = (struct figures){ .name = "reduce_kernel",
			      .ranks = ranks,
			      .bytes = b->o.bytes,
			      .dtype = bench_dtype_name(dtype),
			      .n = n,
			      .p50_us = us,
			      .p99_us = us,
			      .ran_us = -1 };
	figures_traffic(&f, traffic, limit_measure(LIMIT_COPY, (uint64_t)traffic));
	figures_report(b, &f);
	r = crew_run(crew, bare_main);
	if (r == 0) {
		double bare = f.gb_per_s;

		f.name = "reduce_pipelined";
		figures_collective(&f, crew, 0);
		f.ran_us = -1;
		figures_traffic(&f, traffic, bare);
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}

/* ------------------------------------------------------------- nccl_direct */

/* All-reduces of one buffer, one trainer on each GPU. */
static void all_reduce_main(struct trainer *t)
{
	void *stream = enter_on_stream(t, true, t->rank);
	unsigned n = (unsigned)t->crew->numbers[0];
	uint64_t bytes = t->crew->elements * 2, buffer;
	struct shardd_error err;
	void *data;

	trainer_must(t, shardd_alloc(t->client, bytes, &buffer, &data, &err), &err, "alloc");
	t->ones = calloc(1, bytes);
	if (!t->ones)
		_exit(1);
	memset(t->ones, 0x3d, bytes); /* numbers like any other, and not large */
	trainer_must(t, shardd_write(t->client, data, t->ones, bytes, &err), &err, "write");
	for (int i = -1; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);
		shardd_ticket tickets[DEPTH];

		trainer_meet(t);
		sample_begin(s);
		for (unsigned k = 0; k < n + DEPTH; k++) {
			if (k >= DEPTH && k - DEPTH < n)
				wait_for(t, tickets[k % DEPTH], "all_reduce");
			if (k < n)
				trainer_must(t,
					     shardd_submit_all_reduce(
						     t->client,
						     SHARDD_OPTIONS(all_reduce, .buffer = buffer,
								    .count = t->crew->elements,
								    .dtype = SHARDD_BF16,
								    .op = SHARDD_AVG),
						     &tickets[k % DEPTH], &err),
					     &err, "all_reduce");
		}
		device_drain(stream);
		sample_end(s);
		s->end_ns = s->begin_ns + (s->end_ns - s->begin_ns) / n;
	}
	trainer_meet(t);
	trainer_leave(t);
}

static void nccl_line(const struct bench *b, const char *name, const struct nccl_times *t,
		      unsigned repeat, double us, double traffic)
{
	struct figures f = FIGURES_NULL;

	f.name = name;
	f.ranks = t->devices;
	f.bytes = b->o.bytes;
	f.dtype = "bf16";
	f.n = repeat;
	f.p50_us = us;
	f.p99_us = us;
	figures_traffic(&f, traffic, -1);
	figures_report(b, &f);
}

int case_nccl_direct(struct bench *b, const struct bench_case *c)
{
	unsigned repeat = bench_repeat(b, c);
	struct figures f = FIGURES_NULL;
	struct nccl_times times;
	struct crew *crew;
	double bytes = (double)b->o.bytes;
	int r;

	if (needs_device(b, c) < 0 || nccl_measure(b->o.bytes, repeat, &times) < 0)
		return -1;
	/* what each device reads and writes at least */
	nccl_line(b, "nccl_all_gather", &times, repeat, times.all_gather_us,
		  bytes + bytes / times.devices);
	nccl_line(b, "nccl_reduce_scatter", &times, repeat, times.reduce_scatter_us,
		  bytes + bytes / times.devices);
	/* with one member nothing has to be moved, and NCCL does not */
	if (times.devices > 1)
		nccl_line(b, "nccl_all_reduce", &times, repeat, times.all_reduce_us, 2 * bytes);
	crew = crew_new(b, times.devices, 0, 1, BARE_TURNS, b->o.bytes / 2);
	if (!crew)
		return -1;
	crew->numbers[0] = repeat;
	r = crew_run(crew, all_reduce_main);
	if (r == 0) {
		f.name = "all_reduce";
		f.ranks = times.devices;
		f.bytes = b->o.bytes;
		f.dtype = "bf16";
		figures_collective(&f, crew, 0);
		f.ran_us = -1;
		figures_traffic(&f, 2 * bytes,
				times.devices > 1 ? 2 * bytes / times.all_reduce_us / 1e3 : -1);
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}
