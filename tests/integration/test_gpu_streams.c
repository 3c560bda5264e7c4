/*
 * Trainers that order their ops with CUDA streams. What they put on a stream is executed
 * long after they have put it there, and they wait for nothing: whatever does not wait
 * where it must reads or overwrites too early, and the numbers show it.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "gpufix.h"

TestSuite(gpu_streams, .timeout = 180);

enum { WORLD = 2, N = 30011, UNITS = 3, STEPS = 6, LATE_US = 3000, PINNED = 16 << 20 };

static const struct {
	const char *name;
	enum dtype dtype; /* of what is gathered */
	struct shardd_optimizer o;
} kinds[UNITS] = {
	{ "direct", DTYPE_FP32, { SHARDD_SGD, .lr = 0.5 } },
	{ "narrow", DTYPE_BF16, { SHARDD_SGD, .lr = 0.25, .momentum = 0.5 } },
	{ "half", DTYPE_FP16, { SHARDD_SGD, .lr = 0.125 } },
};

/* One trainer. */
struct run {
	struct gpu g;
	shardd_client *c;
	uint32_t rank;
	CUstream stream;
	shardd_unit u[UNITS];
	float *p[UNITS], *momentum[UNITS]; /* what the daemon must have */
	char *pinned;                      /* taken once: allocating may wait for streams */
	size_t pinned_used;
	unsigned steps;
};

/* All parameters begin with 0. */
static void test_gpu_streams_begin(struct run *r, const struct trainer *t, unsigned device)
{
	memset(r, 0, sizeof(*r));
	r->rank = t->rank;
	gpu_open(&r->g, device);
	r->stream = gpu_stream(&r->g);
	r->pinned = gpu_pinned(&r->g, PINNED);
	r->c = gpu_join(t, device);
	for (unsigned i = 0; i < UNITS; i++) {
		const struct shardd_unit_spec like = { .compute_dtype =
							       (enum shardd_dtype)kinds[i].dtype,
						       .gradient_dtype = SHARDD_FP32,
						       .optimizer = kinds[i].o };

		r->u[i] = train_zero_unit(r->c, kinds[i].name, N, &like);
		r->p[i] = train_alloc(N * sizeof(float));
		r->momentum[i] = train_alloc(N * sizeof(float));
	}
	TRAIN_OK(shardd_set_stream(r->c, r->stream, &train_err));
}

static void test_gpu_streams_end(struct run *r)
{
	gpu_drain(&r->g, r->stream);
	shardd_set_stream(r->c, SHARDD_NO_STREAM, NULL);
	TRAIN_OK(shardd_barrier(r->c, SHARDD_WORLD, &train_err));
	train_leave(r->c);
	for (unsigned i = 0; i < UNITS; i++) {
		free(r->p[i]);
		free(r->momentum[i]);
	}
}

static uint64_t seed_of(uint32_t rank, unsigned unit, unsigned step)
{
	return rank * 1000003ull + unit * 101ull + step * 7919ull;
}

/* Mean over the ranks, as the daemon adds them up. */
static void model_gradient(float *g, unsigned unit, unsigned step, bool accumulate)
{
	float *x[WORLD];
	const void *in[WORLD];
	const struct k_reduce k = { .out = g,
				    .in = in,
				    .k = WORLD,
				    .in_dtype = DTYPE_FP32,
				    .out_dtype = DTYPE_FP32,
				    .sum_dtype = DTYPE_FP32,
				    .pre = k_divide_by(2, DTYPE_FP32),
				    .accumulate = accumulate };

	for (uint32_t rank = 0; rank < WORLD; rank++)
		in[rank] = x[rank] = train_numbers(N, seed_of(rank, unit, step));
	kernels_ref()->reduce(&k, 0, N);
	for (uint32_t rank = 0; rank < WORLD; rank++)
		free(x[rank]);
}

static void model_step(struct run *r, unsigned unit, const float *g)
{
	const struct shardd_optimizer *o = &kinds[unit].o;
	const struct k_sgd k = { .p = r->p[unit],
				 .g = g,
				 .buf = o->momentum != 0 ? r->momentum[unit] : NULL,
				 .lr = (float)o->lr,
				 .mu = (float)o->momentum,
				 .first = r->steps == 0 };

	kernels_ref()->sgd(&k, 0, N);
}

/* All units take step @step in the model. */
static void model_all(struct run *r, unsigned step)
{
	float *g = train_alloc(N * sizeof(*g));

	for (unsigned i = 0; i < UNITS; i++) {
		model_gradient(g, i, step, false);
		model_step(r, i, g);
	}
	r->steps++;
	free(g);
}

/* What a gather of @unit must hand out now. The caller's to free. */
static void *model_gathered(const struct run *r, unsigned unit)
{
	struct k_cast cast = { .dst = train_alloc(N * dtype_size(kinds[unit].dtype)),
			       .src = r->p[unit],
			       .dst_dtype = kinds[unit].dtype,
			       .src_dtype = DTYPE_FP32 };

	kernels_ref()->cast(&cast, 0, N);
	return cast.dst;
}

static void *take_pinned(struct run *r, size_t bytes)
{
	void *p = r->pinned + r->pinned_used;

	r->pinned_used += (bytes + 255) / 256 * 256;
	TRAINER_CHECK(r->pinned_used <= PINNED);
	return p;
}

/* The gradient arrives in its buffer late: behind a kernel that takes its time. */
static void late_gradient(struct run *r, unsigned unit, unsigned step, CUstream stream)
{
	float *x = take_pinned(r, N * sizeof(*x));
	void *data;

	train_fill(x, N, seed_of(r->rank, unit, step));
	TRAIN_OK(shardd_gradient(r->c, r->u[unit], &data, &train_err));
	gpu_spin(&r->g, stream, LATE_US);
	gpu_put(&r->g, stream, data, x, N * sizeof(*x));
}

/* Gather, and have it read late. Return: where it will be. */
static void *late_gather(struct run *r, unsigned unit, CUstream stream)
{
	size_t bytes = N * dtype_size(kinds[unit].dtype);
	void *to = take_pinned(r, bytes);
	const void *data;

	TRAIN_OK(shardd_gather(r->c, r->u[unit], &data, &train_err));
	gpu_spin(&r->g, stream, LATE_US);
	gpu_get(&r->g, stream, to, data, bytes);
	TRAIN_OK(shardd_release(r->c, r->u[unit], &train_err));
	return to;
}

/* What was read, and what it should have been. */
struct reading {
	void *got, *want;
	size_t bytes;
};

static struct reading read_late(struct run *r, unsigned unit, CUstream stream)
{
	return (struct reading){ late_gather(r, unit, stream), model_gathered(r, unit),
				 N * dtype_size(kinds[unit].dtype) };
}

static void check_reading(const struct reading *x)
{
	TRAIN_SAME(x->got, x->want, x->bytes);
	free(x->want);
}

/* The end of a trainer that has read on @stream. Return: its exit code. */
static int end_checked(struct run *r, CUstream stream, struct reading seen[STEPS][UNITS])
{
	gpu_drain(&r->g, stream);
	for (unsigned step = 0; step < STEPS; step++)
		for (unsigned i = 0; i < UNITS; i++)
			check_reading(&seen[step][i]);
	test_gpu_streams_end(r);
	return 0;
}

/* ------------------------------------------------------------------- training */

/* Several steps are on the stream before the first of them is executed. */
static int late_trainer(const struct trainer *t)
{
	const struct gpu_layout *l = t->arg;
	struct reading seen[STEPS][UNITS];
	struct run r;

	test_gpu_streams_begin(&r, t, gpu_of(l, t->rank));
	for (unsigned step = 0; step < STEPS; step++) {
		for (unsigned i = 0; i < UNITS; i++) {
			late_gradient(&r, i, step, r.stream);
			TRAIN_OK(shardd_reduce(r.c, r.u[i], &train_err));
		}
		TRAIN_OK(shardd_step(r.c, SHARDD_WORLD, NULL, &train_err));
		if (step % 2)
			TRAIN_OK(shardd_commit(r.c, step, NULL, 0, &train_err));
		model_all(&r, step);
		for (unsigned i = 0; i < UNITS; i++)
			seen[step][i] = read_late(&r, i, r.stream);
	}
	return end_checked(&r, r.stream, seen);
}

static void run_with(struct gpu_layout l, trainer_fn fn, const char *const *args)
{
	struct gpu_layout *shared = trainer_shared(sizeof(l));

	gpu_begin(l.devices, args);
	*shared = l;
	trainers_run(&trainfix, "late", l.world, fn, shared, 100);
	gpu_end();
}

static void run(struct gpu_layout l, trainer_fn fn)
{
	run_with(l, fn, NULL);
}

/* Without stream memory operations: interprocess events instead of words in memory. */
static void run_with_events(struct gpu_layout l, trainer_fn fn)
{
	static const char *const args[] = { "--set", "gpu_order=events", NULL };

	if (gpu_simulated())
		gpu_set("SHARDD_SIM_NO_MEMOPS", "1");
	run_with(l, fn, args);
}

Test(gpu_streams, everything_is_executed_late)
{
	run((struct gpu_layout){ 1, WORLD, false }, late_trainer);
}

Test(gpu_streams, everything_is_executed_late_on_two_devices)
{
	run((struct gpu_layout){ 2, WORLD, false }, late_trainer);
}

Test(gpu_streams, everything_is_executed_late_by_events)
{
	run_with_events((struct gpu_layout){ 1, WORLD, false }, late_trainer);
}

Test(gpu_streams, everything_is_executed_late_by_events_on_two_devices)
{
	run_with_events((struct gpu_layout){ 2, WORLD, false }, late_trainer);
}

/* Gradients on one stream, parameters on another one. */
static int two_streams_trainer(const struct trainer *t)
{
	const struct gpu_layout *l = t->arg;
	struct reading seen[STEPS][UNITS];
	CUstream reads;
	struct run r;

	test_gpu_streams_begin(&r, t, gpu_of(l, t->rank));
	reads = gpu_stream(&r.g);
	for (unsigned step = 0; step < STEPS; step++) {
		TRAIN_OK(shardd_set_stream(r.c, r.stream, &train_err));
		for (unsigned i = 0; i < UNITS; i++) {
			late_gradient(&r, i, step, r.stream);
			TRAIN_OK(shardd_reduce(r.c, r.u[i], &train_err));
		}
		TRAIN_OK(shardd_step(r.c, SHARDD_WORLD, NULL, &train_err));
		model_all(&r, step);
		TRAIN_OK(shardd_set_stream(r.c, reads, &train_err));
		for (unsigned i = 0; i < UNITS; i++)
			seen[step][i] = read_late(&r, i, reads);
	}
	return end_checked(&r, reads, seen);
}

Test(gpu_streams, two_streams)
{
	run((struct gpu_layout){ 1, WORLD, false }, two_streams_trainer);
}

Test(gpu_streams, two_streams_on_two_devices)
{
	run((struct gpu_layout){ 2, WORLD, false }, two_streams_trainer);
}

Test(gpu_streams, two_streams_by_events)
{
	run_with_events((struct gpu_layout){ 1, WORLD, false }, two_streams_trainer);
}

/* Rank 0 reads for long what it has released already; rank 1 is quick. The step that the
 * commit applies must not change what is being read. */
static int slow_reader_trainer(const struct trainer *t)
{
	const struct gpu_layout *l = t->arg;
	struct reading seen[STEPS][UNITS];
	struct run r;

	test_gpu_streams_begin(&r, t, gpu_of(l, t->rank));
	for (unsigned step = 0; step < STEPS; step++) {
		for (unsigned i = 0; i < UNITS; i++) {
			if (t->rank == 0)
				gpu_spin(&r.g, r.stream, 10 * LATE_US);
			seen[step][i] = read_late(&r, i, r.stream);
		}
		/* handed in by the CPU: not behind what the stream does */
		shardd_set_stream(r.c, SHARDD_NO_STREAM, NULL);
		for (unsigned i = 0; i < UNITS; i++) {
			float *x = train_numbers(N, seed_of(r.rank, i, step));

			train_reduce(r.c, r.u[i], DTYPE_FP32, x, N);
			free(x);
		}
		TRAIN_OK(shardd_step(r.c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_commit(r.c, step + 1, NULL, 0, &train_err));
		model_all(&r, step);
		TRAIN_OK(shardd_set_stream(r.c, r.stream, &train_err));
	}
	return end_checked(&r, r.stream, seen);
}

Test(gpu_streams, who_still_reads_sees_the_old_values)
{
	run((struct gpu_layout){ 1, WORLD, false }, slow_reader_trainer);
}

Test(gpu_streams, who_still_reads_sees_the_old_values_on_two_devices)
{
	run((struct gpu_layout){ 2, WORLD, false }, slow_reader_trainer);
}

Test(gpu_streams, who_still_reads_sees_the_old_values_by_events)
{
	run_with_events((struct gpu_layout){ 1, WORLD, false }, slow_reader_trainer);
}

/* Many batches under way at once; buffers are used again and again before the first of
 * them was executed. */
static int micro_trainer(const struct trainer *t)
{
	enum { MICRO = 48 };
	const struct gpu_layout *l = t->arg;
	float *g = train_alloc(N * sizeof(*g));
	shardd_ticket tickets[MICRO];
	struct reading seen;
	struct run r;

	test_gpu_streams_begin(&r, t, gpu_of(l, t->rank));
	for (unsigned m = 0; m < MICRO; m++) {
		late_gradient(&r, 0, m, r.stream);
		TRAIN_OK(shardd_submit_reduce(r.c, SHARDD_OPTIONS(reduce, .unit = r.u[0]),
					      &tickets[m], &train_err));
		model_gradient(g, 0, m, m > 0);
	}
	for (unsigned m = 0; m < MICRO; m++)
		TRAIN_OK(shardd_wait(r.c, tickets[m], -1, NULL, &train_err));
	TRAIN_OK(shardd_step(r.c, SHARDD_WORLD, NULL, &train_err));
	model_step(&r, 0, g);
	seen = read_late(&r, 0, r.stream);
	gpu_drain(&r.g, r.stream);
	check_reading(&seen);
	free(g);
	test_gpu_streams_end(&r);
	return 0;
}

Test(gpu_streams, many_micro_batches_under_way)
{
	run((struct gpu_layout){ 1, WORLD, false }, micro_trainer);
}

Test(gpu_streams, many_micro_batches_under_way_on_two_devices)
{
	run((struct gpu_layout){ 2, WORLD, false }, micro_trainer);
}

Test(gpu_streams, many_micro_batches_under_way_by_events)
{
	run_with_events((struct gpu_layout){ 1, WORLD, false }, micro_trainer);
}

/* A clip needs its norm on the CPU: exact, and in time, whatever the stream does. */
static int clip_trainer(const struct trainer *t)
{
	const struct gpu_layout *l = t->arg;
	float *g = train_alloc(N * sizeof(*g));
	double total, sum = 0;
	struct run r;

	test_gpu_streams_begin(&r, t, gpu_of(l, t->rank));
	late_gradient(&r, 0, 5, r.stream);
	TRAIN_OK(shardd_reduce(r.c, r.u[0], &train_err));
	model_gradient(g, 0, 5, false);
	for (size_t i = 0; i < N; i++)
		sum += (double)g[i] * g[i];
	TRAIN_OK(shardd_clip_grad_norm(r.c, SHARDD_WORLD, 1e9, 2, &total, &train_err));
	TRAINER_CHECK(total > 0 && total * total > sum * (1 - 1e-12) &&
		      total * total < sum * (1 + 1e-12));
	free(g);
	test_gpu_streams_end(&r);
	return 0;
}

Test(gpu_streams, a_norm_waits_for_the_stream)
{
	run((struct gpu_layout){ 1, WORLD, false }, clip_trainer);
}

/* What is refused. */
static int refusals_trainer(const struct trainer *t)
{
	shardd_client *c = gpu_connect(t, 0);
	struct gpu g;
	CUstream stream;

	gpu_open(&g, 0);
	stream = gpu_stream(&g);
	TRAIN_FAILS(shardd_set_stream(c, stream, &train_err), SHARDD_FAILED_PRECONDITION);
	train_join_as(c, t, SHARDD_EPHEMERAL);
	TRAIN_OK(shardd_set_stream(c, stream, &train_err));
	TRAIN_OK(shardd_set_stream(c, NULL, &train_err)); /* CUDA's default stream */
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	shardd_set_stream(c, SHARDD_NO_STREAM, NULL);
	train_leave(c);
	return 0;
}

Test(gpu_streams, only_those_who_have_joined_have_streams)
{
	run((struct gpu_layout){ 1, 1, false }, refusals_trainer);
}
