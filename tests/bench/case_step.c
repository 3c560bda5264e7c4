/* reduce, adamw, sgd and norm: the collectives that calculate. adamw_kept: AdamW by a daemon with a
 * holder, whose step its successor can complete, beside one without. */
#include <stdio.h>

#include "bench.h"

/* One turn is a training step's second half; the case says which part is measured. */
static void reduce_main(struct trainer *t)
{
	trainer_enter(t);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);
		struct shardd_error err;
		shardd_ticket ticket;

		trainer_gradient(t);
		trainer_meet(t);
		sample_begin(s);
		trainer_must(t,
			     shardd_submit_reduce(t->client,
						  SHARDD_OPTIONS(reduce, .unit = t->unit), &ticket,
						  &err),
			     &err, "reduce");
		trainer_timed_wait(t, s, ticket, NULL, "reduce");
		/* Gradients are empty again: the next reduce writes, it does not add. */
		trainer_step(t, (uint64_t)(i - TRAINER_WARM_UP + 1));
	}
	trainer_leave(t);
}

/* A step is applied by its commit: both are measured together. */
static void step_main(struct trainer *t)
{
	trainer_enter(t);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);
		shardd_ticket step, commit;
		struct shardd_result result;
		struct shardd_error err;

		trainer_gradient(t);
		trainer_reduce(t);
		trainer_meet(t);
		sample_begin(s);
		trainer_must(t, shardd_submit_step(t->client, SHARDD_OPTIONS(step), &step, &err),
			     &err, "step");
		trainer_must(
			t,
			shardd_submit_commit(
				t->client,
				SHARDD_OPTIONS(commit, .step = (uint64_t)(i - TRAINER_WARM_UP + 1)),
				&commit, &err),
			&err, "commit");
		trainer_timed_wait(t, s, step, &result, "step");
		trainer_timed_wait(t, s, commit, NULL, "commit");
		s->ran_us += result.ran_us;
	}
	trainer_leave(t);
}

static void norm_main(struct trainer *t)
{
	trainer_enter(t);
	trainer_gradient(t);
	trainer_reduce(t);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		struct sample *s = trainer_sample(t, 0, i);
		struct shardd_error err;
		shardd_ticket ticket;

		trainer_meet(t);
		sample_begin(s);
		trainer_must(
			t,
			shardd_submit_clip(t->client,
					   SHARDD_OPTIONS(clip, .max_norm = 1e30, .norm_type = 2),
					   &ticket, &err),
			&err, "clip_grad_norm");
		trainer_timed_wait(t, s, ticket, NULL, "clip_grad_norm");
	}
	trainer_leave(t);
}

/* What a case needs besides its trainers. */
struct collective {
	trainer_fn main;
	enum shardd_dtype dtype;
	enum shardd_optimizer_kind optimizer;
	enum limit_kind limit;
	double traffic; /* bytes per element that are read and written */
	/* Bytes per element that a whole turn touches: they decide what is in the caches
	 * when the measured op begins, so the limit is taken with as much. */
	uint64_t footprint;
};

static int collective_run(struct bench *b, const struct bench_case *c,
			  const struct collective *what)
{
	unsigned ranks = bench_ranks(b, c);
	uint64_t elements = bench_elements(b, what->dtype);
	struct crew *crew = crew_new(b, ranks, 0, 1, bench_repeat(b, c), elements);
	struct figures f = FIGURES_NULL;
	double limit;
	int r;

	if (!crew)
		return -1;
	crew->dtype = what->dtype;
	crew->optimizer = what->optimizer;
	limit = limit_measure(what->limit, what->footprint * elements);
	r = crew_run(crew, what->main);
	limit = limit_better(limit, limit_measure(what->limit, what->footprint * elements));
	if (r == 0) {
		f.name = c->name;
		f.ranks = ranks;
		f.bytes = b->o.bytes;
		f.dtype = bench_dtype_name(what->dtype);
		figures_collective(&f, crew, 0);
		figures_traffic(&f, what->traffic * (double)elements, limit);
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}

int case_reduce(struct bench *b, const struct bench_case *c)
{
	enum shardd_dtype dtype = bench_dtype(b, SHARDD_FP32);
	uint64_t buffers = bench_ranks(b, c) * shardd_dtype_size(dtype);
	const struct collective what = { .main = reduce_main,
					 .dtype = dtype,
					 .optimizer = SHARDD_SGD,
					 .limit = LIMIT_TRIAD,
					 .traffic = (double)buffers + sizeof(float),
					 .footprint = buffers + 2 * sizeof(float) };

	return collective_run(b, c, &what);
}

int case_adamw(struct bench *b, const struct bench_case *c)
{
	/* Reads p, g, m, v and writes p, m, v; the turn has the gradient buffers, too. */
	const struct collective what = { .main = step_main,
					 .dtype = SHARDD_FP32,
					 .optimizer = SHARDD_ADAMW,
					 .limit = LIMIT_TRIAD,
					 .traffic = 7 * sizeof(float),
					 .footprint = (4 + bench_ranks(b, c)) * sizeof(float) };

	return collective_run(b, c, &what);
}

int case_sgd(struct bench *b, const struct bench_case *c)
{
	/* Reads p and g, writes p. */
	const struct collective what = { .main = step_main,
					 .dtype = SHARDD_FP32,
					 .optimizer = SHARDD_SGD,
					 .limit = LIMIT_TRIAD,
					 .traffic = 3 * sizeof(float),
					 .footprint = (2 + bench_ranks(b, c)) * sizeof(float) };

	return collective_run(b, c, &what);
}

/* ------------------------------------------------------------ what a keeper costs */

#define KEPT_ROUNDS 6

static struct crew *kept_crew(struct bench *b, unsigned ranks, unsigned repeat)
{
	struct crew *crew = crew_new(b, ranks, 0, 1, repeat, bench_elements(b, SHARDD_FP32));

	if (crew)
		crew->optimizer = SHARDD_ADAMW;
	return crew;
}

/* A job of its own; its times to the end of those that @all has of @done turns. */
static int kept_round(struct bench *b, unsigned repeat, struct crew *all, unsigned done)
{
	struct crew *crew = kept_crew(b, all->ranks, repeat);
	int r = crew ? crew_run(crew, step_main) : -1;

	for (unsigned i = 0; r == 0 && i < all->ranks; i++)
		for (unsigned k = 0; k < repeat; k++)
			all->sample[i * all->repeat + done + k] = crew->sample[i * repeat + k];
	if (crew)
		crew_free(crew);
	return r;
}

static void kept_report(struct bench *b, const char *name, const struct crew *all)
{
	struct figures f = FIGURES_NULL;

	f.name = name;
	f.ranks = all->ranks;
	f.bytes = b->o.bytes;
	f.dtype = bench_dtype_name(SHARDD_FP32);
	figures_collective(&f, all, 0);
	figures_report(b, &f);
}

/* In turn, so that both have the same machine. */
static int kept_run(struct bench *by, unsigned repeat, struct crew *const *all)
{
	for (unsigned round = 0; round < KEPT_ROUNDS; round++)
		for (unsigned k = 0; k < 2; k++)
			if (kept_round(&by[(round + k) % 2], repeat, all[(round + k) % 2],
				       round * repeat) < 0)
				return -1;
	return 0;
}

int case_adamw_kept(struct bench *b, const struct bench_case *c)
{
	static const char *const names[] = { "adamw_plain", "adamw_kept" };
	unsigned ranks = bench_ranks(b, c), repeat = bench_repeat(b, c);
	struct bench by[2] = { *b, *b };
	struct crew *all[2] = { kept_crew(b, ranks, KEPT_ROUNDS * repeat),
				kept_crew(b, ranks, KEPT_ROUNDS * repeat) };
	int r = -1;

	by[1].held = true;
	if (b->o.socket)
		fputs("shardd-bench: this case starts two daemons: leave --socket out\n", stderr);
	else if (all[0] && all[1] && daemon_start(&by[0]) == 0) {
		r = daemon_start(&by[1]);
		r = r == 0 ? kept_run(by, repeat, all) : -1;
		r = daemon_stop(&by[1]) == 0 ? r : -1;
		r = daemon_stop(&by[0]) == 0 ? r : -1;
	}
	for (unsigned k = 0; k < 2; k++) {
		if (r == 0)
			kept_report(b, names[k], all[k]);
		if (all[k])
			crew_free(all[k]);
	}
	return r;
}

int case_norm(struct bench *b, const struct bench_case *c)
{
	const struct collective what = { .main = norm_main,
					 .dtype = SHARDD_FP32,
					 .optimizer = SHARDD_SGD,
					 .limit = LIMIT_READ,
					 .traffic = sizeof(float),
					 .footprint = sizeof(float) };

	return collective_run(b, c, &what);
}
