/* What trainers do: with libshardd and nothing else. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

#define JOB_TTL_S 60 /* of what a failed run leaves in a daemon that is not ours */

void trainer_must(struct trainer *t, int rc, const struct shardd_error *err, const char *what)
{
	if (rc >= 0)
		return;
	fprintf(stderr, "shardd-bench: rank %u: %s: %s: %s\n", t->rank, what, shardd_code_name(rc),
		err->text);
	_exit(1);
}

void trainer_connect(struct trainer *t)
{
	struct shardd_options o = { .size = sizeof(o),
				    .socket = t->crew->socket,
				    .device = t->device };
	struct shardd_error err;

	trainer_must(t, shardd_connect(&o, &t->client, &err), &err, "connect");
}

void trainer_join(struct trainer *t, enum shardd_lifetime lifetime)
{
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->crew->job,
				  .world_size = t->crew->ranks,
				  .rank = t->rank,
				  .lifetime = lifetime,
				  .resume = t->crew->resume,
				  .ttl_s = JOB_TTL_S };
	struct shardd_info info = { .size = sizeof(info) };
	struct shardd_error err;

	trainer_must(t, shardd_join(t->client, &job, NULL, &err), &err, "join");
	trainer_must(t, shardd_get_info(t->client, &info, &err), &err, "info");
	t->on_device = strcmp(info.device.backend, "host") != 0;
}

void trainer_register(struct trainer *t)
{
	struct crew *crew = t->crew;
	struct shardd_tensor w = { .name = "w",
				   .shape = &crew->elements,
				   .dims = 1,
				   .init = SHARDD_INIT_CONSTANT,
				   .a = 1 };
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = "unit",
					 .tensors = &w,
					 .n_tensors = 1,
					 .group = SHARDD_WORLD,
					 .compute_dtype = crew->dtype,
					 .gradient_dtype = crew->dtype };
	struct shardd_unit_info info;
	struct shardd_error err;

	spec.optimizer = (struct shardd_optimizer){ .kind = crew->optimizer, .lr = 1e-6 };
	if (crew->op && crew->op->adapt)
		crew->op->adapt(t, &spec, &w);
	trainer_must(t, shardd_register(t->client, &spec, 1, &info, &err), &err, "register");
	t->unit = info.unit;
	if (!info.initialised)
		trainer_must(t, shardd_init_seed(t->client, t->unit, 1, &err), &err, "initialise");
}

void trainer_enter(struct trainer *t)
{
	trainer_connect(t);
	trainer_join(t, SHARDD_EPHEMERAL);
	trainer_register(t);
}

void trainer_leave(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_leave(t->client, &err), &err, "leave");
	shardd_close(t->client);
}

void trainer_meet(struct trainer *t)
{
	pthread_barrier_wait(&t->crew->meeting);
}

void trainer_limit(struct trainer *t, unsigned series, enum limit_kind kind, uint64_t footprint)
{
	double *best = &t->crew->limits[series];

	trainer_meet(t);
	if (t->rank == 0 && !t->crew->on_device)
		*best = limit_better(*best, limit_measure(kind, footprint));
	trainer_meet(t);
}

/* ------------------------------------------------- a training step's parts */

const void *trainer_gather(struct trainer *t)
{
	struct shardd_error err;
	const void *data;

	trainer_must(t, shardd_gather(t->client, t->unit, &data, &err), &err, "gather");
	return data;
}

void trainer_release(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_release(t->client, t->unit, &err), &err, "release");
}

static void fill_ones(void *data, uint64_t elements, enum shardd_dtype dtype)
{
	const uint16_t one = dtype == SHARDD_BF16 ? 0x3f80 : 0x3c00;
	float *wide = data;
	uint16_t *narrow = data;

	if (dtype == SHARDD_FP32)
		for (uint64_t i = 0; i < elements; i++)
			wide[i] = 1;
	else
		for (uint64_t i = 0; i < elements; i++)
			narrow[i] = one;
}

/* The CPU cannot write there: a copy of what it has written once. */
static void write_ones(struct trainer *t, void *data, uint64_t elements, enum shardd_dtype dtype)
{
	size_t bytes = elements * shardd_dtype_size(dtype);
	struct shardd_error err;

	if (!t->ones) {
		t->ones = malloc(bytes);
		if (!t->ones) {
			fputs("shardd-bench: no memory for a gradient\n", stderr);
			_exit(1);
		}
		fill_ones(t->ones, elements, dtype);
	}
	trainer_must(t, shardd_write(t->client, data, t->ones, bytes, &err), &err, "write");
}

void trainer_fill(struct trainer *t, void *data, uint64_t elements, enum shardd_dtype dtype)
{
	if (t->on_device)
		write_ones(t, data, elements, dtype);
	else
		fill_ones(data, elements, dtype);
}

void trainer_gradient(struct trainer *t)
{
	struct shardd_error err;
	void *data;

	trainer_must(t, shardd_gradient(t->client, t->unit, &data, &err), &err, "gradient");
	trainer_fill(t, data, t->crew->elements, t->crew->dtype);
}

void trainer_reduce(struct trainer *t)
{
	struct shardd_error err;

	trainer_must(t, shardd_reduce(t->client, t->unit, &err), &err, "reduce");
}

void trainer_step(struct trainer *t, uint64_t number)
{
	struct shardd_error err;

	trainer_must(t, shardd_step(t->client, SHARDD_WORLD, NULL, &err), &err, "step");
	trainer_must(t, shardd_commit(t->client, number, NULL, 0, &err), &err, "commit");
}

/* ------------------------------------------------------------------ samples */

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

struct sample *trainer_sample(const struct trainer *t, unsigned series, int i)
{
	static struct sample warm_up;
	const struct crew *crew = t->crew;
	size_t members = crew->ranks + crew->helpers;

	if (i < 0)
		return &warm_up;
	return &crew->sample[(series * members + t->rank) * crew->repeat + (unsigned)i];
}

void sample_begin(struct sample *s)
{
	s->begin_ns = now_ns();
}

void sample_end(struct sample *s)
{
	s->end_ns = now_ns();
}

void trainer_timed_wait(struct trainer *t, struct sample *s, shardd_ticket ticket,
			struct shardd_result *ret, const char *what)
{
	struct shardd_result result = { 0 };
	struct shardd_error err;

	trainer_must(t, shardd_wait(t->client, ticket, -1, &result, &err), &err, what);
	sample_end(s);
	s->waited_us = result.waited_us;
	s->ran_us = result.ran_us;
	if (ret)
		*ret = result;
}
