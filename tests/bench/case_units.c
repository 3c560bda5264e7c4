/* attach_units: a restarted trainer that finds a job with many units, gathers one of them
 * (attach_first: all until then), and all.
 * reduce_units: the reductions of many units, submitted before any is waited for. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"

#define UNITS   1000u /* by default */
#define AT_ONCE 500u  /* ops under way: below a session's limit */

enum {
	UNITS_CONNECT,
	UNITS_JOIN,
	UNITS_REGISTER,
	UNITS_FIRST,
	UNITS_TO_FIRST,
	UNITS_GATHER,
	UNITS_AGAIN,
	UNITS_TOTAL,
	UNITS_N
};

static void *room(size_t n, size_t bytes)
{
	void *p = calloc(n, bytes);

	if (!p) {
		fputs("shardd-bench: no memory for the units\n", stderr);
		_exit(1);
	}
	return p;
}

void model_make(struct model *m, struct crew *crew)
{
	unsigned n = crew->units;

	m->info = room(n, sizeof(*m->info));
	m->spec = room(n, sizeof(*m->spec));
	m->name = room(n, sizeof(*m->name));
	m->ticket = room(n, sizeof(*m->ticket));
	m->w = (struct shardd_tensor){ .name = "w",
				       .shape = &crew->elements,
				       .dims = 1,
				       .init = SHARDD_INIT_CONSTANT,
				       .a = 1 };
	for (unsigned i = 0; i < n; i++) {
		snprintf(m->name[i], sizeof(m->name[i]), "layer.%u", i);
		m->spec[i] = (struct shardd_unit_spec){ .size = sizeof(m->spec[i]),
							.name = m->name[i],
							.tensors = &m->w,
							.n_tensors = 1,
							.group = SHARDD_WORLD };
	}
}

/* @submit on every unit, AT_ONCE at a time. */
static void each(struct trainer *t, struct model *m, const char *what,
		 int (*submit)(struct trainer *t, shardd_unit u, shardd_ticket *ticket,
			       struct shardd_error *err))
{
	struct shardd_error err;

	for (unsigned at = 0; at < t->crew->units; at += AT_ONCE) {
		unsigned end = at + AT_ONCE < t->crew->units ? at + AT_ONCE : t->crew->units;

		for (unsigned i = at; i < end; i++)
			trainer_must(t, submit(t, m->info[i].unit, &m->ticket[i], &err), &err,
				     what);
		for (unsigned i = at; i < end; i++)
			trainer_must(t, shardd_wait(t->client, m->ticket[i], -1, NULL, &err), &err,
				     what);
	}
}

static int init_one(struct trainer *t, shardd_unit u, shardd_ticket *ticket,
		    struct shardd_error *err)
{
	return shardd_submit_init(
		t->client, SHARDD_OPTIONS(init, .unit = u, .seed = 1, .from = SHARDD_FROM_SEED),
		ticket, err);
}

static int gather_one(struct trainer *t, shardd_unit u, shardd_ticket *ticket,
		      struct shardd_error *err)
{
	return shardd_submit_gather(t->client, SHARDD_OPTIONS(gather, .unit = u), ticket, err);
}

/* A new process in each turn, with a CUDA context on a GPU. Turn 0 makes the job. */
static void units_main(struct trainer *t)
{
	struct sample *s[UNITS_N];
	struct shardd_error err;
	struct model m;

	for (unsigned k = 0; k < UNITS_N; k++)
		s[k] = trainer_sample(t, k, (int)t->crew->turn - 1);
	model_make(&m, t->crew);
	if (t->crew->on_device)
		device_stream(0);
	sample_begin(s[UNITS_CONNECT]);
	trainer_connect(t);
	sample_end(s[UNITS_CONNECT]);
	sample_begin(s[UNITS_JOIN]);
	trainer_join(t, SHARDD_KEEP);
	sample_end(s[UNITS_JOIN]);
	sample_begin(s[UNITS_REGISTER]);
	trainer_must(t, shardd_register(t->client, m.spec, t->crew->units, m.info, &err), &err,
		     "register");
	sample_end(s[UNITS_REGISTER]);
	if (!m.info[0].initialised)
		each(t, &m, "initialise", init_one);
	sample_begin(s[UNITS_FIRST]);
	t->unit = m.info[t->crew->units / 2].unit;
	trainer_gather(t);
	sample_end(s[UNITS_FIRST]);
	sample_begin(s[UNITS_GATHER]);
	each(t, &m, "gather", gather_one);
	sample_end(s[UNITS_GATHER]);
	/* nothing is mapped any more: the difference is what mapping took */
	sample_begin(s[UNITS_AGAIN]);
	each(t, &m, "gather", gather_one);
	sample_end(s[UNITS_AGAIN]);
	s[UNITS_TO_FIRST]->begin_ns = s[UNITS_CONNECT]->begin_ns;
	s[UNITS_TO_FIRST]->end_ns = s[UNITS_FIRST]->end_ns;
	s[UNITS_TOTAL]->begin_ns = s[UNITS_CONNECT]->begin_ns;
	s[UNITS_TOTAL]->end_ns = s[UNITS_GATHER]->end_ns;
	trainer_leave(t);
}

int case_attach_units(struct bench *b, const struct bench_case *c)
{
	static const char *const names[] = { "units_connect", "units_join",   "units_register",
					     "units_first",   "attach_first", "units_gather",
					     "units_again",   "attach_units" };
	uint64_t elements = b->o.bytes / 4 / bench_units(b, UNITS);
	struct crew *crew = crew_new(b, 1, 0, UNITS_N, bench_repeat(b, c), elements ? elements : 1);

	if (crew)
		crew->units = bench_units(b, UNITS);
	return figures_turns(b, crew, units_main, names, UNITS_N);
}

static int gradient_one(struct trainer *t, shardd_unit u, shardd_ticket *ticket,
			struct shardd_error *err)
{
	return shardd_submit_gradient(t->client, SHARDD_OPTIONS(gradient, .unit = u), ticket, err);
}

static int reduce_one(struct trainer *t, shardd_unit u, shardd_ticket *ticket,
		      struct shardd_error *err)
{
	return shardd_submit_reduce(t->client, SHARDD_OPTIONS(reduce, .unit = u), ticket, err);
}

static void reduce_units_main(struct trainer *t)
{
	struct shardd_error err;
	struct model m;

	model_make(&m, t->crew);
	if (t->crew->on_device)
		device_stream(0);
	trainer_connect(t);
	trainer_join(t, SHARDD_EPHEMERAL);
	trainer_must(t, shardd_register(t->client, m.spec, t->crew->units, m.info, &err), &err,
		     "register");
	each(t, &m, "initialise", init_one);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);

		each(t, &m, "gradient buffer", gradient_one);
		trainer_meet(t);
		sample_begin(s);
		each(t, &m, "reduce", reduce_one);
		sample_end(s);
	}
	trainer_leave(t);
}

int case_reduce_units(struct bench *b, const struct bench_case *c)
{
	uint64_t elements = b->o.bytes / 4 / bench_units(b, UNITS);
	struct crew *crew =
		crew_new(b, bench_ranks(b, c), 0, 1, bench_repeat(b, c), elements ? elements : 1);
	struct figures f = FIGURES_NULL;
	int r;

	if (!crew)
		return -1;
	crew->units = bench_units(b, UNITS);
	r = crew_run(crew, reduce_units_main);
	if (r == 0) {
		f.name = c->name;
		f.ranks = crew->ranks;
		f.bytes = b->o.bytes;
		f.dtype = "fp32";
		figures_collective(&f, crew, 0);
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}
