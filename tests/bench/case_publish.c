/*
 * publish: what a generation costs beside the memory's speed, what publications cost a training step, and a
 * delta. publish_swap: a reader that takes the next generation, and what the kernel needs for that.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

enum { PUBLISH_FULL, PUBLISH_NONE, PUBLISH_EVERY_1, PUBLISH_EVERY_4, PUBLISH_N };

#define PUBLISH_STEPS 4 /* of a sample of steps */

static void publish_declare(struct trainer *t, const char *name, const char *rest)
{
	struct shardd_error err;
	char json[160];

	snprintf(json, sizeof(json), "{\"name\": \"%s\", \"type\": \"bf16\"%s}", name, rest);
	trainer_must(t, shardd_publication_declare(t->client, t->crew->job, json, NULL, &err), &err,
		     "declare");
}

static void publish_drop(struct trainer *t, const char *name)
{
	struct shardd_error err;

	trainer_must(t, shardd_publication_drop(t->client, t->crew->job, name, &err), &err, "drop");
}

static void publish_now(struct trainer *t, const char *name)
{
	struct shardd_error err;

	trainer_must(t,
		     shardd_publication_publish(t->client, t->crew->job, name, 60000, NULL, &err),
		     &err, "publish");
}

static void publish_one_step(struct trainer *t)
{
	trainer_gather(t);
	trainer_release(t);
	trainer_gradient(t);
	trainer_reduce(t);
	trainer_step(t, ++t->step);
}

/* A generation on request: nothing else happens meanwhile. */
static void publish_time_full(struct trainer *t, int i)
{
	struct sample *s;

	trainer_step(t, ++t->step);
	trainer_meet(t);
	if (t->rank == 0) {
		s = trainer_sample(t, PUBLISH_FULL, i);
		sample_begin(s);
		publish_now(t, "full");
		sample_end(s);
	}
	trainer_meet(t);
}

/* PUBLISH_STEPS steps while the publication @rest is there; NULL: none. */
static void publish_time_steps(struct trainer *t, unsigned series, const char *rest, int i)
{
	struct sample *s;

	if (t->rank == 0 && rest)
		publish_declare(t, "steps", rest);
	trainer_meet(t);
	for (unsigned k = 0; k < 3 * PUBLISH_STEPS; k++) /* all buffers get their memory */
		publish_one_step(t);
	trainer_meet(t);
	s = trainer_sample(t, series, t->rank == 0 ? i : -1);
	sample_begin(s);
	for (unsigned k = 0; k < PUBLISH_STEPS; k++)
		publish_one_step(t);
	sample_end(s);
	trainer_meet(t);
	if (t->rank == 0 && rest)
		publish_drop(t, "steps");
	trainer_meet(t);
}

static void publish_main(struct trainer *t)
{
	trainer_enter(t);
	publish_one_step(t);
	if (t->rank == 0)
		publish_declare(t, "full", "");
	trainer_meet(t);
	trainer_limit(t, PUBLISH_FULL, LIMIT_COPY, t->crew->elements * 6);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++)
		publish_time_full(t, i);
	trainer_limit(t, PUBLISH_FULL, LIMIT_COPY, t->crew->elements * 6);
	if (t->rank == 0)
		publish_drop(t, "full");
	for (int i = -1; i < (int)t->crew->repeat; i++) {
		publish_time_steps(t, PUBLISH_NONE, NULL, i);
		publish_time_steps(t, PUBLISH_EVERY_1, ", \"every_steps\": 1", i);
		publish_time_steps(t, PUBLISH_EVERY_4, ", \"every_steps\": 4", i);
	}
	trainer_leave(t);
}

static void publish_report(const struct bench *b, const struct crew *crew, double of_device)
{
	static const char *const names[PUBLISH_N] = { "publish", "publish_4_steps_without",
						      "publish_4_steps_every_1",
						      "publish_4_steps_every_4" };

	for (unsigned k = 0; k < PUBLISH_N; k++) {
		struct figures f = FIGURES_NULL;

		f.name = names[k];
		f.ranks = crew->ranks;
		f.bytes = b->o.bytes;
		f.dtype = "bf16";
		figures_calls(&f, crew, k, 0, 1);
		f.ran_us = -1;
		if (k == PUBLISH_FULL)
			figures_traffic(&f, (double)crew->elements * (4 + 2),
					crew_limit(crew, k, of_device));
		figures_report(b, &f);
	}
}

int case_publish(struct bench *b, const struct bench_case *c)
{
	uint64_t elements = b->o.bytes / 2;
	struct crew *crew =
		crew_new(b, bench_ranks(b, c), 0, PUBLISH_N, bench_repeat(b, c), elements);
	double of_device = bench_on_device(b) ? limit_measure(LIMIT_COPY, elements * 6) : -1;
	int r = -1;

	if (crew) {
		crew->dtype = SHARDD_BF16;
		crew->optimizer = SHARDD_ADAMW;
		r = crew_run(crew, publish_main);
	}
	if (r == 0)
		publish_report(b, crew, of_device);
	crew_free(crew);
	return r;
}

/* ------------------------------------------------------------------------------ deltas */

enum { DELTA_FULL, DELTA_WITH, DELTA_COPY, DELTA_APPLY, DELTA_N };

/* Of 100 elements two change. */
static void delta_gradient(struct trainer *t)
{
	struct shardd_error err;
	float *g;
	void *data;

	trainer_must(t, shardd_gradient(t->client, t->unit, &data, &err), &err, "gradient");
	g = data;
	if (!g) /* a unit without elements */
		return;
	memset(g, 0, t->crew->elements * sizeof(*g));
	for (uint64_t i = 0; i < t->crew->elements; i += 50)
		g[i + (i / 50 + t->step) % 50 * (i + 50 <= t->crew->elements)] = -1e6f;
}

static void delta_time(struct trainer *t, unsigned series, const char *name, int i)
{
	struct sample *s = trainer_sample(t, series, i);

	sample_begin(s);
	publish_now(t, name);
	sample_end(s);
}

/* A copy of the base becomes the generation: all of it is copied, or the delta applied. */
static void delta_time_apply(struct trainer *t, shardd_live *l, char *copy, int i)
{
	struct sample *s = trainer_sample(t, DELTA_APPLY, i);
	struct shardd_generation g;
	struct shardd_error err;
	struct shardd_delta d;
	void *copies[1] = { copy };

	trainer_must(t, shardd_live_acquire(l, 0, &g, &err), &err, "acquire");
	trainer_must(t, shardd_live_delta(l, g.number - 1, &d, &err), &err, "delta");
	sample_begin(s);
	trainer_must(t, shardd_delta_apply(d.data, d.bytes, g.tensors, 1, copies, 0, &err), &err,
		     "apply");
	sample_end(s);
	if (memcmp(copy, g.tensors[0].data, g.tensors[0].bytes) != 0) {
		fputs("shardd-bench: a delta has made something else than the generation\n",
		      stderr);
		_Exit(1);
	}
	t->crew->numbers[0] = d.bytes;
	t->crew->numbers[1] = g.tensors[0].bytes;
	s = trainer_sample(t, DELTA_COPY, i);
	sample_begin(s);
	memcpy(copy, g.tensors[0].data, g.tensors[0].bytes);
	sample_end(s);
}

static void delta_main(struct trainer *t)
{
	char *copy = malloc(t->crew->elements * 2);
	struct shardd_generation g;
	struct shardd_error err;
	shardd_live *l;

	if (!copy) {
		fputs("shardd-bench: no memory\n", stderr);
		_Exit(1);
	}
	trainer_enter(t);
	publish_declare(t, "full", "");
	publish_declare(t, "delta", ", \"delta_percent\": 10");
	trainer_step(t, ++t->step);
	publish_now(t, "delta");
	trainer_must(t, shardd_live_open(t->client, t->crew->job, "delta", 0, &l, &err), &err,
		     "open");
	trainer_must(t, shardd_live_acquire(l, 0, &g, &err), &err, "acquire");
	memcpy(copy, g.tensors[0].data, g.tensors[0].bytes);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		delta_gradient(t);
		trainer_reduce(t);
		trainer_step(t, ++t->step);
		delta_time(t, i % 2 ? DELTA_FULL : DELTA_WITH, i % 2 ? "full" : "delta", i);
		delta_time(t, i % 2 ? DELTA_WITH : DELTA_FULL, i % 2 ? "delta" : "full", i);
		delta_time_apply(t, l, copy, i);
	}
	shardd_live_close(l);
	trainer_leave(t);
	free(copy);
}

static void delta_report(const struct bench *b, const struct crew *crew)
{
	static const char *const names[DELTA_N] = { "publish_without_delta", "publish_with_delta",
						    "publish_copied", "publish_applied" };
	struct figures f = FIGURES_NULL;

	for (unsigned k = 0; k < DELTA_N; k++) {
		f.name = names[k];
		f.ranks = 1;
		f.bytes = b->o.bytes;
		f.dtype = "bf16";
		figures_calls(&f, crew, k, 0, 1);
		f.ran_us = -1;
		figures_report(b, &f);
	}
	/* the bytes of a delta, beside those of a generation */
	f = FIGURES_NULL;
	f.name = "publish_delta_bytes";
	f.ranks = 1;
	f.bytes = b->o.bytes;
	f.dtype = "bf16";
	f.n = 1;
	f.has_memory = true;
	f.held = crew->numbers[0];
	f.formula = crew->numbers[1];
	f.overhead_percent = ((double)f.held - (double)f.formula) * 100 / (double)f.formula;
	figures_report(b, &f);
}

int case_publish_delta(struct bench *b, const struct bench_case *c)
{
	struct crew *crew = crew_new(b, 1, 0, DELTA_N, bench_repeat(b, c), b->o.bytes / 2);
	int r = -1;

	if (crew) {
		crew->dtype = SHARDD_FP32;
		crew->optimizer = SHARDD_SGD;
		r = crew_run(crew, delta_main);
	}
	if (r == 0)
		delta_report(b, crew);
	crew_free(crew);
	return r;
}

/* -------------------------------------------------------------------------------- swap */

enum { SWAP_PLACES, SWAP_FIXED, SWAP_N, SWAP_BARE = SWAP_N, SWAP_SERIES = SWAP_BARE + SWAP_BARE_N };

#define SWAP_PER_UNIT 1000u

static void swap_register(struct trainer *t)
{
	static char names[SWAP_PER_UNIT][16];
	static struct shardd_tensor tensors[SWAP_PER_UNIT];
	uint64_t elements = t->crew->elements / t->crew->units;
	struct shardd_error err;

	for (unsigned i = 0; i < SWAP_PER_UNIT; i++) {
		snprintf(names[i], sizeof(names[i]), "t%u", i);
		tensors[i] =
			(struct shardd_tensor){ .name = names[i], .shape = &elements, .dims = 1 };
	}
	for (unsigned at = 0, k = 0; at < t->crew->units; at += SWAP_PER_UNIT, k++) {
		unsigned left = t->crew->units - at;
		char name[16];
		struct shardd_unit_spec spec = {
			.size = sizeof(spec),
			.name = name,
			.tensors = tensors,
			.n_tensors = left < SWAP_PER_UNIT ? left : SWAP_PER_UNIT,
			.compute_dtype = SHARDD_BF16,
			.gradient_dtype = SHARDD_BF16,
			.optimizer = { .kind = SHARDD_SGD, .lr = 1 },
		};
		struct shardd_unit_info info;

		snprintf(name, sizeof(name), "u%u", k);
		trainer_must(t, shardd_register(t->client, &spec, 1, &info, &err), &err,
			     "register");
		trainer_must(t, shardd_init_seed(t->client, info.unit, 1, &err), &err,
			     "initialise");
	}
}

/* A reader computes with the generation that it has, until it takes the next one. */
static void swap_read(const struct shardd_generation *g)
{
	for (size_t k = 0; k < g->n_tensors; k++)
		for (uint64_t at = 0; at < g->tensors[k].bytes; at += 64)
			(void)((const volatile uint8_t *)g->tensors[k].data)[at];
}

static void swap_time(struct trainer *t, shardd_live *l, struct shardd_generation *g,
		      unsigned series, int i)
{
	struct sample *s = trainer_sample(t, series, i);
	struct shardd_error err;

	swap_read(g);
	sample_begin(s);
	trainer_must(t, shardd_live_acquire(l, 0, g, &err), &err, "acquire");
	sample_end(s);
	if (g->step != t->step || g->n_tensors != t->crew->units) {
		fputs("shardd-bench: a reader has got another generation\n", stderr);
		_Exit(1);
	}
}

/* Before each swap, so that all find the caches alike. */
static void swap_publish(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_commit(t->client, ++t->step, NULL, 0, &err), &err, "commit");
	publish_now(t, "swap");
}

static void swap_main(struct trainer *t)
{
	struct bare *bare;
	struct shardd_generation g[SWAP_N] = { 0 };
	struct shardd_error err;
	shardd_live *l[SWAP_N];

	trainer_connect(t);
	trainer_join(t, SHARDD_EPHEMERAL);
	swap_register(t);
	trainer_must(t, shardd_commit(t->client, ++t->step, NULL, 0, &err), &err, "commit");
	publish_declare(t, "swap", ", \"buffers\": 4");
	for (unsigned k = 0; k < SWAP_N; k++)
		trainer_must(t,
			     shardd_live_open(t->client, t->crew->job, "swap",
					      k == SWAP_FIXED ? SHARDD_LIVE_FIXED : 0, &l[k], &err),
			     &err, "open");
	bare = swap_bare_new(t->crew->elements * 2);
	for (int i = 4 * TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		for (unsigned k = 0; k < SWAP_N; k++) {
			swap_publish(t);
			swap_time(t, l[k], &g[k], k, i);
		}
		swap_publish(t);
		swap_bare(t, bare, SWAP_BARE, i);
	}
	for (unsigned k = 0; k < SWAP_N; k++)
		shardd_live_close(l[k]);
	trainer_leave(t);
}

int case_publish_swap(struct bench *b, const struct bench_case *c)
{
	static const char *const names[SWAP_SERIES] = {
		"publish_swap", "publish_swap_fixed",  "swap_bare_out",
		"swap_bare_in", "swap_bare_out_again", "swap_bare_in_again"
	};
	unsigned units = bench_units(b, 10000);
	struct crew *crew = crew_new(b, 1, 0, SWAP_SERIES, bench_repeat(b, c), b->o.bytes / 2);
	int r = -1;

	if (crew) {
		crew->units = units;
		r = crew_run(crew, swap_main);
	}
	for (unsigned k = 0; k < SWAP_SERIES && r == 0; k++) {
		struct figures f = FIGURES_NULL;

		f.name = names[k];
		f.ranks = 1;
		f.bytes = b->o.bytes;
		f.units = k < SWAP_BARE ? units : 0;
		f.dtype = "bf16";
		figures_calls(&f, crew, k, 0, 1);
		f.ran_us = -1;
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}
