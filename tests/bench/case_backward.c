/* reduce_adamw: AdamW in backward, by the reduce itself, against a reduce and a step after
 * it, in the same turns. Both units are there all the time; every other turn the other one comes
 * first. Then by the reduce again, in a job that copies the unit before each step, to which it would be
 * rolled back. */
#include "bench.h"

enum { FUSED, APART, WAYS, COPIED = WAYS };

static void register_both(struct trainer *t, struct shardd_unit_info *ret)
{
	static const char *const names[WAYS] = { "fused", "apart" };
	struct shardd_tensor w = { .name = "w", .shape = &t->crew->elements, .dims = 1 };
	struct shardd_unit_spec specs[WAYS];
	struct shardd_error err;

	for (unsigned k = 0; k < WAYS; k++)
		specs[k] = (struct shardd_unit_spec){ .size = sizeof(specs[k]),
						      .name = names[k],
						      .tensors = &w,
						      .n_tensors = 1,
						      .group = SHARDD_WORLD,
						      .compute_dtype = t->crew->dtype,
						      .gradient_dtype = t->crew->dtype,
						      .optimizer = { .kind = SHARDD_ADAMW,
								     .lr = 1e-6 } };
	specs[FUSED].optimizer.when = SHARDD_OPTIM_IN_BACKWARD;
	trainer_must(t, shardd_register(t->client, specs, WAYS, ret, &err), &err, "register");
	for (unsigned k = 0; k < WAYS; k++)
		trainer_must(t, shardd_init_seed(t->client, ret[k].unit, 1, &err), &err,
			     "initialise");
}

/* Until the parameters are those of the next step, whatever makes them so. */
static void measured(struct trainer *t, struct sample *s)
{
	shardd_ticket reduce, step, commit;
	struct shardd_result result[2];
	struct shardd_error err;

	trainer_gradient(t);
	trainer_meet(t);
	sample_begin(s);
	trainer_must(t,
		     shardd_submit_reduce(t->client, SHARDD_OPTIONS(reduce, .unit = t->unit),
					  &reduce, &err),
		     &err, "reduce");
	trainer_must(t, shardd_submit_step(t->client, SHARDD_OPTIONS(step), &step, &err), &err,
		     "step");
	trainer_must(t,
		     shardd_submit_commit(t->client, SHARDD_OPTIONS(commit, .step = ++t->step),
					  &commit, &err),
		     &err, "commit");
	trainer_timed_wait(t, s, reduce, &result[0], "reduce");
	trainer_timed_wait(t, s, step, &result[1], "step");
	trainer_timed_wait(t, s, commit, NULL, "commit");
	s->ran_us += result[0].ran_us + result[1].ran_us;
}

static void both_main(struct trainer *t)
{
	struct shardd_unit_info info[WAYS];

	trainer_connect(t);
	trainer_join(t, SHARDD_EPHEMERAL);
	register_both(t, info);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++)
		for (unsigned turn = 0; turn < WAYS; turn++) {
			unsigned k = (turn + (unsigned)(i - TRAINER_WARM_UP)) % WAYS;

			t->unit = info[k].unit;
			measured(t, trainer_sample(t, k, i));
		}
	trainer_leave(t);
}

static void copied_main(struct trainer *t)
{
	struct shardd_unit_info info[WAYS];

	trainer_connect(t);
	trainer_join(t, SHARDD_EPHEMERAL);
	register_both(t, info);
	t->unit = info[FUSED].unit;
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++)
		measured(t, trainer_sample(t, 0, i));
	trainer_leave(t);
}

static void report_one(struct bench *b, struct crew *crew, unsigned k, unsigned way, double limit)
{
	static const char *const names[] = { "reduce_adamw", "reduce_adamw_apart",
					     "reduce_adamw_copied" };
	static const unsigned of_step[] = { 24, 32, 48 };
	uint64_t inputs = crew->ranks * shardd_dtype_size(crew->dtype);
	struct figures f = FIGURES_NULL;

	f.name = names[way];
	f.ranks = crew->ranks;
	f.bytes = b->o.bytes;
	f.dtype = bench_dtype_name(crew->dtype);
	figures_collective(&f, crew, k);
	figures_traffic(&f, (double)((inputs + of_step[way]) * crew->elements), limit);
	figures_report(b, &f);
}

static int case_copied(struct bench *b, const struct bench_case *c, double limit)
{
	enum shardd_dtype dtype = bench_dtype(b, SHARDD_FP32);
	struct crew *crew =
		crew_new(b, bench_ranks(b, c), 0, 1, bench_repeat(b, c), bench_elements(b, dtype));
	int r;

	if (!crew)
		return -1;
	crew->dtype = dtype;
	r = crew_run(crew, copied_main);
	if (r == 0)
		report_one(b, crew, 0, COPIED, limit);
	crew_free(crew);
	return r;
}

/* Bytes of an element that have to be read and written. Fused: all gradients once; p, m, v
 * read and written. Apart: the gradient shard is written and read again as well. Copied: p, m, v are read
 * and their copies written before. */
int case_reduce_adamw(struct bench *b, const struct bench_case *c)
{
	enum shardd_dtype dtype = bench_dtype(b, SHARDD_FP32);
	uint64_t elements = bench_elements(b, dtype);
	unsigned ranks = bench_ranks(b, c);
	uint64_t inputs = ranks * shardd_dtype_size(dtype);
	uint64_t footprint = WAYS * elements * (inputs + 4 * sizeof(float));
	struct crew *crew = crew_new(b, ranks, 0, WAYS, bench_repeat(b, c), elements);
	double limit;
	int r;

	if (!crew)
		return -1;
	crew->dtype = dtype;
	crew->resume = SHARDD_RESUME_NO_COPY;
	limit = limit_measure(LIMIT_TRIAD, footprint);
	r = crew_run(crew, both_main);
	limit = limit_better(limit, limit_measure(LIMIT_TRIAD, footprint));
	for (unsigned k = 0; k < WAYS && r == 0; k++)
		report_one(b, crew, k, k, limit);
	crew_free(crew);
	return r == 0 ? case_copied(b, c, limit) : r;
}
