/*
 * How a GPU's memory comes to trainers: as descriptors over the local channel or as CUDA
 * IPC handles in the replies; what a process may do with it, and that it stays where it is.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "gpufix.h"

TestSuite(gpu_handover, .timeout = 180);

enum { WORLD = 2, N = 70001 };

struct way {
	enum shardd_handover handover;
	unsigned devices;
};

static shardd_client *connect_by(const struct trainer *t, enum shardd_handover handover,
				 unsigned device)
{
	char id[32];
	struct shardd_options o = { .size = sizeof(o),
				    .socket = t->socket,
				    .name = "test",
				    .handover = handover,
				    .device = id };
	shardd_client *c = NULL;

	snprintf(id, sizeof(id), "cuda:%u", device);
	TRAIN_OK(shardd_connect(&o, &c, &train_err));
	return c;
}

static const struct way *way_of(const struct trainer *t)
{
	return t->arg;
}

static shardd_client *join_by(const struct trainer *t)
{
	const struct way *w = way_of(t);
	shardd_client *c = connect_by(t, w->handover, t->rank * w->devices / t->world);

	train_join_as(c, t, SHARDD_EPHEMERAL);
	return c;
}

static void run(enum shardd_handover handover, unsigned devices, trainer_fn fn)
{
	struct way *w = trainer_shared(sizeof(*w));

	*w = (struct way){ handover, devices };
	gpu_begin(devices, NULL);
	trainers_run(&trainfix, "hand", WORLD, fn, w, 100);
	gpu_end();
}

/* --------------------------------------------------------- a job, in either way */

/* Everything that is handed out: parameters, a copy of them, gradients, buffers. */
static int all_kinds(const struct trainer *t)
{
	const struct shardd_unit_spec direct = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	const struct shardd_unit_spec narrow = { .compute_dtype = SHARDD_BF16,
						 .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	shardd_client *c = join_by(t);
	shardd_unit u[2] = { train_zero_unit(c, "direct", N, &direct),
			     train_zero_unit(c, "narrow", N, &narrow) };
	float *ones = train_alloc(N * sizeof(*ones)), *got = train_alloc(N * sizeof(*got));
	uint64_t buffer;
	void *at;

	for (size_t i = 0; i < N; i++)
		ones[i] = 1;
	for (unsigned step = 1; step <= 3; step++) {
		train_reduce(c, u[0], DTYPE_FP32, ones, N);
		train_reduce(c, u[1], DTYPE_BF16, ones, N);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
		train_params(c, u[0], got, N * sizeof(*got));
		for (size_t i = 0; i < N; i++)
			TRAINER_CHECK(got[i] == -(float)step);
		train_params(c, u[1], got, N * 2);
		for (size_t i = 0; i < N; i++)
			TRAINER_CHECK(((uint16_t *)got)[i] == ((uint16_t *)got)[0]);
		TRAINER_CHECK(((uint16_t *)got)[0] >> 8 == (step == 1 ? 0xbf : 0xc0));
	}
	TRAIN_OK(shardd_alloc(c, N * sizeof(float), &buffer, &at, &train_err));
	train_write(c, at, ones, N * sizeof(float));
	TRAIN_OK(shardd_all_reduce(c, SHARDD_WORLD, buffer, 0, N, SHARDD_FP32, SHARDD_SUM,
				   &train_err));
	train_read(c, got, at, N * sizeof(float));
	for (size_t i = 0; i < N; i++)
		TRAINER_CHECK(got[i] == WORLD);
	TRAIN_OK(shardd_free(c, buffer, &train_err));
	free(ones);
	free(got);
	train_leave(c);
	return 0;
}

Test(gpu_handover, by_descriptor)
{
	run(SHARDD_HANDOVER_FD, 1, all_kinds);
}

Test(gpu_handover, by_ipc_handle)
{
	run(SHARDD_HANDOVER_IPC, 1, all_kinds);
}

Test(gpu_handover, by_descriptor_on_two_devices)
{
	run(SHARDD_HANDOVER_FD, 2, all_kinds);
}

Test(gpu_handover, by_ipc_handle_on_two_devices)
{
	run(SHARDD_HANDOVER_IPC, 2, all_kinds);
}

/* ------------------------------------------------------------- what may be done */

/* Gathered parameters are not written to, and addresses are within what was handed out. */
static int refused_writes(const struct trainer *t)
{
	const struct shardd_unit_spec narrow = { .compute_dtype = SHARDD_FP16 };
	shardd_client *c = join_by(t);
	shardd_unit u = train_zero_unit(c, "narrow", N, &narrow);
	shardd_unit d = train_zero_unit(c, "direct", N, NULL);
	char *zero = train_alloc(N * sizeof(float));
	const void *full, *direct;
	uint64_t buffer;
	void *at;

	TRAIN_OK(shardd_gather(c, u, &full, &train_err));
	TRAIN_OK(shardd_gather(c, d, &direct, &train_err));
	TRAIN_FAILS(shardd_write(c, (void *)full, "12", 2, &train_err), SHARDD_INVALID_ARGUMENT);
	fprintf(stderr, "# %s\n", train_err.text);
	TRAIN_FAILS(shardd_write(c, (void *)direct, "1234", 4, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_HAS(c, full, zero, N * 2);
	TRAIN_HAS(c, direct, zero, N * 4);
	TRAIN_OK(shardd_alloc(c, 4096, &buffer, &at, &train_err));
	train_write(c, (char *)at + 4092, "1234", 4);
	TRAIN_FAILS(shardd_write(c, zero, "1234", 4, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_read(c, zero, (char *)at + (1ull << 40), 4, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	free(zero);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(gpu_handover, only_what_was_handed_out_for_it_is_written)
{
	run(SHARDD_HANDOVER_FD, 1, refused_writes);
}

Test(gpu_handover, only_what_was_handed_out_for_it_is_written_by_ipc_handle)
{
	run(SHARDD_HANDOVER_IPC, 1, refused_writes);
}

/* ------------------------------------------------------------- and publications */

/* A reader with a local channel, which boards come by, reads what a job with either way publishes. */
static void read_published(const struct trainer *t)
{
	shardd_client *c = connect_by(t, SHARDD_HANDOVER_FD, 0);
	float *twos = train_alloc(N * sizeof(*twos));
	struct shardd_generation g;
	shardd_live *l;

	for (size_t i = 0; i < N; i++)
		twos[i] = -2;
	TRAIN_OK(shardd_publication_declare(c, t->job, "{\"name\": \"engine\"}", NULL, &train_err));
	TRAIN_OK(shardd_publication_publish(c, t->job, "engine", 0, NULL, &train_err));
	TRAIN_OK(shardd_live_open(c, t->job, "engine", 0, &l, &train_err));
	TRAIN_OK(shardd_live_acquire(l, 0, &g, &train_err));
	TRAINER_CHECK(g.n_tensors == 1 && g.step == 2 && strncmp(g.uuid, "GPU-", 4) == 0);
	TRAIN_HAS(c, g.tensors[0].data, twos, N * sizeof(*twos));
	TRAIN_OK(shardd_live_release(l, &train_err));
	shardd_live_close(l);
	TRAIN_OK(shardd_live_open(c, t->job, "engine", SHARDD_LIVE_FIXED, &l, &train_err));
	if (way_of(t)->handover == SHARDD_HANDOVER_IPC) {
		TRAIN_FAILS(shardd_live_acquire(l, 0, &g, &train_err), SHARDD_UNIMPLEMENTED);
		TRAINER_CHECK(strstr(train_err.text, "CUDA IPC handles"));
	} else {
		TRAIN_OK(shardd_live_acquire(l, 0, &g, &train_err));
		TRAIN_HAS(c, g.tensors[0].data, twos, N * sizeof(*twos));
	}
	shardd_live_close(l);
	shardd_close(c);
	free(twos);
}

static void is_refused(const struct trainer *t)
{
	shardd_client *c = connect_by(t, SHARDD_HANDOVER_FD, 0);

	TRAIN_FAILS(shardd_publication_declare(c, t->job, "{\"name\": \"engine\"}", NULL,
					       &train_err),
		    SHARDD_UNIMPLEMENTED);
	TRAINER_CHECK(strstr(train_err.text, "memory of cuda:1, which cuda:0 cannot read"));
	shardd_close(c);
}

static int publishes(const struct trainer *t)
{
	const struct shardd_unit_spec spec = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	shardd_client *c = join_by(t);
	shardd_unit u = train_zero_unit(c, "unit", N, &spec);
	float *ones = train_alloc(N * sizeof(*ones));

	for (size_t i = 0; i < N; i++)
		ones[i] = 1;
	for (unsigned step = 1; step <= 2; step++) {
		train_reduce(c, u, DTYPE_FP32, ones, N);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
	}
	if (t->rank == 0 && way_of(t)->handover == SHARDD_HANDOVER_IPC && way_of(t)->devices > 1)
		is_refused(t);
	else if (t->rank == 0)
		read_published(t);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	free(ones);
	train_leave(c);
	return 0;
}

Test(gpu_handover, of_generations_by_descriptor_on_two_devices)
{
	run(SHARDD_HANDOVER_FD, 2, publishes);
}

Test(gpu_handover, of_generations_by_ipc_handle)
{
	run(SHARDD_HANDOVER_IPC, 1, publishes);
}

Test(gpu_handover, no_generations_by_ipc_handle_on_two_devices)
{
	run(SHARDD_HANDOVER_IPC, 2, publishes);
}

/* ------------------------------------------------------- without a local channel */

struct mixed {
	stage made, over;
};

static int makes_the_job(const struct trainer *t)
{
	struct mixed *m = t->arg;
	shardd_client *c = connect_by(t, SHARDD_HANDOVER_FD, 0);

	train_join_as(c, t, SHARDD_EPHEMERAL);
	stage_set(&m->made, 1);
	TRAINER_AWAIT(atomic_load(&m->over) == 1, 60);
	train_leave(c);
	return 0;
}

static int has_no_channel(const struct trainer *t)
{
	shardd_client *c = connect_by(t, SHARDD_HANDOVER_IPC, 0);
	struct shardd_job job = {
		.size = sizeof(job), .name = t->job, .world_size = t->world, .rank = t->rank
	};

	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	fprintf(stderr, "# %s\n", train_err.text);
	told_now("IPC");
	told_now(t->job);
	shardd_close(c);
	return 0;
}

Test(gpu_handover, a_job_of_descriptors_needs_a_local_channel)
{
	struct mixed *m = trainer_shared(sizeof(*m));
	pid_t first;

	gpu_begin(1, NULL);
	first = trainer_start(&trainfix, "mixed", 0, WORLD, makes_the_job, m);
	AWAIT(atomic_load(&m->made) == 1, 30);
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "mixed", 1, WORLD, has_no_channel, m),
				  30),
		     0);
	stage_set(&m->over, 1);
	cr_assert_eq(trainer_wait(first, 30), 0);
	gpu_end();
}

/* The other way round goes: who has a channel can open handles as well. */
static int makes_an_ipc_job(const struct trainer *t)
{
	struct mixed *m = t->arg;
	shardd_client *c =
		connect_by(t, t->rank == 0 ? SHARDD_HANDOVER_IPC : SHARDD_HANDOVER_FD, 0);
	float *got = train_alloc(N * sizeof(*got));
	shardd_unit u;

	if (t->rank == 1)
		TRAINER_AWAIT(atomic_load(&m->made) == 1, 60);
	train_join_as(c, t, SHARDD_EPHEMERAL);
	stage_set(&m->made, 1);
	u = train_zero_unit(c, "u", N, NULL);
	train_params(c, u, got, N * sizeof(*got));
	TRAINER_CHECK(got[0] == 0 && got[N - 1] == 0);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	free(got);
	train_leave(c);
	return 0;
}

Test(gpu_handover, a_job_of_ipc_handles_takes_all)
{
	struct mixed *m = trainer_shared(sizeof(*m));

	gpu_begin(1, NULL);
	trainers_run(&trainfix, "handles", WORLD, makes_an_ipc_job, m, 60);
	gpu_end();
}

/* ------------------------------------------------------------------- addresses */

static int stays_where_it_is(const struct trainer *t)
{
	enum { ROUNDS = 100 };
	const struct shardd_unit_spec narrow = { .compute_dtype = SHARDD_BF16,
						 .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	shardd_client *c = join_by(t);
	shardd_unit u[2] = { train_zero_unit(c, "direct", N, NULL),
			     train_zero_unit(c, "narrow", N, &narrow) };
	const void *first[2] = { NULL, NULL }, *now;

	for (unsigned i = 0; i < ROUNDS; i++) {
		for (unsigned k = 0; k < 2; k++) {
			TRAIN_OK(shardd_gather(c, u[k], &now, &train_err));
			first[k] = first[k] ? first[k] : now;
			TRAINER_CHECK(now == first[k]);
			TRAINER_CHECK(train_peek(c, now) == 0);
			TRAIN_OK(shardd_release(c, u[k], &train_err));
		}
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(gpu_handover, addresses_stay_over_release_and_gather)
{
	run(SHARDD_HANDOVER_FD, 1, stays_where_it_is);
}

Test(gpu_handover, addresses_stay_over_release_and_gather_on_two_devices)
{
	run(SHARDD_HANDOVER_IPC, 2, stays_where_it_is);
}

/* A process that comes later finds what the job has. */
struct relay {
	stage made;
	float values[N];
};

static int first_life(const struct trainer *t)
{
	struct relay *r = t->arg;
	uint64_t n = N;
	const struct shardd_tensor w = {
		.name = "w", .shape = &n, .dims = 1, .init = SHARDD_INIT_NORMAL, .b = 1
	};
	const struct shardd_unit_spec spec = { sizeof(spec), "u", &w, 1, .group = SHARDD_WORLD };
	shardd_client *c = connect_by(t, SHARDD_HANDOVER_FD, 0);
	struct shardd_unit_info info;

	train_join_as(c, t, SHARDD_KEEP);
	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	if (!info.initialised) {
		TRAIN_OK(shardd_init_seed(c, info.unit, 5, &train_err));
		TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
		train_params(c, info.unit, r->values, sizeof(r->values));
		stage_set(&r->made, 1);
	} else {
		float *got = train_alloc(sizeof(r->values));

		train_params(c, info.unit, got, sizeof(r->values));
		TRAIN_SAME(got, r->values, sizeof(r->values));
		free(got);
		stage_set(&r->made, 2);
	}
	train_leave(c);
	return 0;
}

Test(gpu_handover, a_later_process_finds_the_parameters)
{
	static const char *const delete[] = { "job", "delete", "relay", NULL };
	struct relay *r = trainer_shared(sizeof(*r));

	gpu_begin(1, NULL);
	for (unsigned life = 1; life <= 2; life++) {
		trainers_run(&trainfix, "relay", 1, first_life, r, 60);
		cr_assert_eq(atomic_load(&r->made), life);
	}
	json_decref(daemonfix_ctl(&trainfix, delete));
	gpu_end();
}

/* ----------------------------------------------------------------- many units */

static int many_units(const struct trainer *t)
{
	enum { UNITS = 1000 };
	static struct shardd_unit_spec specs[UNITS];
	static struct shardd_unit_info info[UNITS];
	static shardd_ticket tickets[UNITS];
	static char names[UNITS][16];
	uint64_t n = 4096;
	const struct shardd_tensor w = {
		.name = "w", .shape = &n, .dims = 1, .init = SHARDD_INIT_CONSTANT, .a = 3
	};
	shardd_client *c = join_by(t);
	uint64_t begin_us = clock_now_us(), attach_us;
	struct shardd_result r;

	for (unsigned i = 0; i < UNITS; i++) {
		snprintf(names[i], sizeof(names[i]), "layer.%u", i);
		specs[i] = (struct shardd_unit_spec){ sizeof(specs[i]), names[i], &w, 1,
						      .group = SHARDD_WORLD };
	}
	TRAIN_OK(shardd_register(c, specs, UNITS, info, &train_err));
	fprintf(stderr, "# rank %u: %d units registered in %llu ms\n", t->rank, UNITS,
		(unsigned long long)(clock_now_us() - begin_us) / 1000);
	for (unsigned at = 0; at < UNITS; at += 500) {
		for (unsigned i = at; i < at + 500; i++)
			TRAIN_OK(shardd_submit_init(c,
						    SHARDD_OPTIONS(init, .unit = info[i].unit,
								   .seed = 1,
								   .from = SHARDD_FROM_SEED),
						    &tickets[i], &train_err));
		for (unsigned i = at; i < at + 500; i++)
			TRAIN_OK(shardd_wait(c, tickets[i], -1, NULL, &train_err));
	}
	begin_us = clock_now_us();
	for (unsigned i = 0; i < UNITS; i++)
		TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = info[i].unit),
					      &tickets[i], &train_err));
	for (unsigned i = 0; i < UNITS; i++) {
		TRAIN_OK(shardd_wait(c, tickets[i], -1, &r, &train_err));
		info[i].elements = (uint64_t)(uintptr_t)r.data;
	}
	attach_us = clock_now_us() - begin_us;
	fprintf(stderr, "# rank %u: all gathered and mapped for the first time in %llu us\n",
		t->rank, (unsigned long long)attach_us);
	for (unsigned i = 0; i < UNITS; i += 37)
		TRAINER_CHECK(train_peek(c, (const void *)(uintptr_t)info[i].elements) == 3);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(gpu_handover, a_thousand_units)
{
	run(SHARDD_HANDOVER_FD, 1, many_units);
}

Test(gpu_handover, a_thousand_units_by_ipc_handle)
{
	run(SHARDD_HANDOVER_IPC, 1, many_units);
}
