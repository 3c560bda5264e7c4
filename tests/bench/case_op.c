/* The engine of the cases that measure one op by itself; the ops are in ops_*.c. */
#include "bench.h"

static void measured(struct trainer *t, struct sample *s)
{
	const struct op_case *op = t->crew->op;
	struct shardd_result result = { 0 };
	struct shardd_error err;
	shardd_ticket ticket;

	sample_begin(s);
	if (op->call) {
		trainer_must(t, op->call(t, &err), &err, "the op that is measured");
		sample_end(s);
		return;
	}
	trainer_must(t, op->submit(t, &ticket, &err), &err, "the op that is measured");
	trainer_timed_wait(t, s, ticket, &result, "the op that is measured");
	if (result.buffer)
		t->buffer = result.buffer;
	if (result.data)
		t->data = result.data;
}

static void op_main(struct trainer *t)
{
	const struct op_case *op = t->crew->op;

	trainer_enter(t);
	if (op->prepare)
		op->prepare(t);
	for (int i = TRAINER_WARM_UP; i < (int)t->crew->repeat; i++, t->turn++) {
		if (op->before)
			op->before(t);
		trainer_meet(t);
		measured(t, trainer_sample(t, 0, i));
		if (op->after)
			op->after(t);
	}
	trainer_meet(t);
	trainer_leave(t);
}

static void report(const struct bench *b, const struct bench_case *c, const struct crew *crew,
		   double traffic, double limit)
{
	struct figures f = FIGURES_NULL;

	f.name = c->name;
	f.ranks = crew->ranks;
	f.bytes = b->o.bytes;
	f.dtype = bench_dtype_name(crew->dtype);
	if (c->op->collective)
		figures_collective(&f, crew, 0);
	else
		figures_calls(&f, crew, 0, 0, crew->ranks);
	if (c->op->call)
		f.ran_us = -1; /* what has no ticket has no reply either */
	if (traffic > 0)
		figures_traffic(&f, traffic, limit);
	figures_report(b, &f);
}

/* The limit is taken with as much memory as a turn touches: what the op reads and writes, and the
 * gradient buffers that the ranks have filled before it. */
int case_op(struct bench *b, const struct bench_case *c)
{
	const struct op_case *op = c->op;
	enum shardd_dtype dtype = bench_dtype(b, SHARDD_FP32);
	uint64_t size = shardd_dtype_size(dtype), elements = bench_elements(b, dtype);
	unsigned ranks = bench_ranks(b, c);
	uint64_t wide = op->wide ? sizeof(float) : size;
	double traffic = (op->once + op->each * (double)(ranks * wide)) * (double)elements;
	uint64_t footprint = (uint64_t)traffic + (uint64_t)ranks * b->o.bytes;
	struct crew *crew = crew_new(b, ranks, 0, 1, bench_repeat(b, c), elements ? elements : 1);
	double limit = -1;
	int r;

	if (!crew)
		return -1;
	crew->dtype = dtype;
	crew->op = op;
	crew->optimizer = op->optimizer;
	if (traffic > 0)
		limit = limit_measure(op->limit, footprint);
	r = crew_run(crew, op_main);
	if (traffic > 0)
		limit = limit_better(limit, limit_measure(op->limit, footprint));
	if (r == 0)
		report(b, c, crew, traffic, limit);
	crew_free(crew);
	return r;
}
