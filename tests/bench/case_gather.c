/* gather and gather_cast. */
#include "bench.h"

static void timed_gather(struct trainer *t, unsigned series, int i)
{
	struct sample *s = trainer_sample(t, series, i);
	struct shardd_error err;
	shardd_ticket ticket;

	sample_begin(s);
	trainer_must(t,
		     shardd_submit_gather(t->client, SHARDD_OPTIONS(gather, .unit = t->unit),
					  &ticket, &err),
		     &err, "gather");
	trainer_timed_wait(t, s, ticket, NULL, "gather");
}

static void gather_main(struct trainer *t)
{
	trainer_enter(t);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		trainer_meet(t);
		timed_gather(t, 0, i);
		trainer_release(t);
	}
	trainer_meet(t);
	trainer_leave(t);
}

int case_gather(struct bench *b, const struct bench_case *c)
{
	unsigned ranks = bench_ranks(b, c);
	struct crew *crew = crew_new(b, ranks, 0, 1, bench_repeat(b, c), b->o.bytes / 4);
	struct figures f = FIGURES_NULL;
	int r = crew ? crew_run(crew, gather_main) : -1;

	if (r == 0) {
		f.name = "gather";
		f.ranks = ranks;
		f.bytes = b->o.bytes;
		f.dtype = "fp32";
		figures_calls(&f, crew, 0, 0, ranks);
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}

enum { CAST_FIRST, CAST_LATER, CAST_NOP, CAST_N };

static void timed_nop(struct trainer *t, unsigned series, int i)
{
	struct sample *s = trainer_sample(t, series, i);
	struct shardd_error err;

	sample_begin(s);
	trainer_must(t, shardd_nop(t->client, &err), &err, "nop");
	sample_end(s);
}

/* New parameters make the old copy useless; the first rank's gather makes the next
 * one, the other ranks' find it. @nop: and what a round trip takes then is timed, before. */
static void cast_turn(struct trainer *t, int i, bool nop)
{
	struct shardd_error err;

	trainer_must(t, shardd_init_seed(t->client, t->unit, 1, &err), &err, "initialise");
	trainer_meet(t);
	if (t->rank == 0)
		timed_gather(t, CAST_FIRST, i);
	trainer_meet(t);
	if (nop && (t->rank > 0 || t->crew->ranks == 1))
		timed_nop(t, CAST_NOP, i);
	if (t->rank > 0 || t->crew->ranks == 1)
		timed_gather(t, CAST_LATER, nop ? -1 : i);
	trainer_meet(t);
	if (t->crew->ranks == 1)
		trainer_release(t);
	trainer_release(t);
}

static void cast_main(struct trainer *t)
{
	trainer_enter(t);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++) {
		cast_turn(t, i, true);
		cast_turn(t, i, false);
	}
	trainer_meet(t);
	trainer_leave(t);
}

int case_gather_cast(struct bench *b, const struct bench_case *c)
{
	unsigned ranks = bench_ranks(b, c);
	enum shardd_dtype dtype = bench_dtype(b, SHARDD_BF16);
	uint64_t elements, traffic;
	struct figures f = FIGURES_NULL;
	struct crew *crew;
	double limit;
	int r;

	dtype = dtype == SHARDD_FP32 ? SHARDD_BF16 : dtype;
	elements = bench_elements(b, dtype);
	crew = crew_new(b, ranks, 0, CAST_N, bench_repeat(b, c), elements);
	if (crew)
		crew->dtype = dtype;
	traffic = elements * (4 + 2);
	limit = limit_measure(LIMIT_COPY, traffic);
	r = crew ? crew_run(crew, cast_main) : -1;
	limit = limit_better(limit, limit_measure(LIMIT_COPY, traffic));
	if (r == 0) {
		f.name = "gather_cast_first";
		f.ranks = ranks;
		f.bytes = b->o.bytes;
		f.dtype = bench_dtype_name(dtype);
		figures_calls(&f, crew, CAST_FIRST, 0, 1);
		figures_traffic(&f, (double)traffic, limit);
		figures_report(b, &f);
		f.name = "gather_cast_later";
		f.traffic = f.gb_per_s = f.limit = f.ratio = -1;
		figures_calls(&f, crew, CAST_LATER, ranks > 1, ranks > 1 ? ranks - 1 : 1);
		figures_report(b, &f);
		f.name = "gather_cast_nop";
		f.ran_us = -1;
		figures_calls(&f, crew, CAST_NOP, ranks > 1, ranks > 1 ? ranks - 1 : 1);
		figures_report(b, &f);
	}
	crew_free(crew);
	return r;
}
