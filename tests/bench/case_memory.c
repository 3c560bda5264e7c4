/* memory: what the daemon holds for one AdamW unit against what it has to hold. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "status.pb-c.h"

enum { HELD_SHARD, HELD_FULL, HELD_GRAD, HELD_ALL, HELD_N };

static const char *const names[HELD_N] = { "memory_shard", "memory_full", "memory_grad", "memory" };

/* Class names of status.proto in the order above. */
static const char *const classes[] = { "shard", "full", "grad" };

static void take_job(struct crew *crew, const Shardd__V1__JobStatus *job)
{
	for (size_t i = 0; i < job->n_classes; i++)
		for (unsigned k = 0; k < HELD_ALL; k++)
			if (strcmp(job->classes[i]->name, classes[k]) == 0)
				crew->numbers[k] = job->classes[i]->bytes;
	crew->numbers[HELD_ALL] = job->used_bytes;
}

static void ask_held(struct trainer *t)
{
	Shardd__V1__GetStatusRequest q = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	struct raw_client *client = raw_client_new(t->crew->socket);
	Shardd__V1__GetStatusResponse *reply;
	uint8_t request[128], *data;
	size_t bytes;

	q.job = t->crew->job;
	bytes = shardd__v1__get_status_request__pack(&q, request);
	raw_call(client, "/shardd.v1.StatusService/GetStatus", request, bytes, &data, &bytes);
	reply = shardd__v1__get_status_response__unpack(NULL, bytes, data);
	if (!reply || reply->n_jobs != 1) {
		fputs("shardd-bench: StatusService.GetStatus does not show the job\n", stderr);
		_exit(1);
	}
	take_job(t->crew, reply->jobs[0]);
	shardd__v1__get_status_response__free_unpacked(reply, NULL);
	free(data);
	raw_client_free(client);
}

/* In the middle of a step: all ranks hold the unit and their gradients. */
static void memory_main(struct trainer *t)
{
	trainer_enter(t);
	trainer_gather(t);
	trainer_gradient(t);
	trainer_meet(t);
	if (t->rank == 0)
		ask_held(t);
	trainer_meet(t);
	trainer_release(t);
	trainer_reduce(t);
	trainer_step(t, 1);
	trainer_leave(t);
}

/* Padded shards: 4 bytes of parameter, 4 of gradient, 8 of optimizer per element. */
static void formula(const struct crew *crew, uint64_t *ret)
{
	uint64_t shard = (crew->elements + crew->ranks - 1) / crew->ranks;
	uint64_t full = crew->elements * shardd_dtype_size(crew->dtype);

	ret[HELD_SHARD] = shard * crew->ranks * (4 + 4 + 8);
	ret[HELD_FULL] = crew->dtype == SHARDD_FP32 ? 0 : full; /* else the shards themselves */
	ret[HELD_GRAD] = full * crew->ranks;
	ret[HELD_ALL] = ret[HELD_SHARD] + ret[HELD_FULL] + ret[HELD_GRAD];
}

static void report(const struct bench *b, const struct crew *crew)
{
	uint64_t want[HELD_N];

	formula(crew, want);
	for (unsigned k = 0; k < HELD_N; k++) {
		struct figures f = FIGURES_NULL;

		f.name = names[k];
		f.ranks = crew->ranks;
		f.bytes = b->o.bytes;
		f.dtype = bench_dtype_name(crew->dtype);
		f.n = 1;
		f.has_memory = true;
		f.held = crew->numbers[k];
		f.formula = want[k];
		if (want[k])
			f.overhead_percent =
				((double)f.held - (double)f.formula) * 100 / (double)f.formula;
		figures_report(b, &f);
	}
}

int case_memory(struct bench *b, const struct bench_case *c)
{
	enum shardd_dtype dtype = bench_dtype(b, SHARDD_FP32);
	struct crew *crew = crew_new(b, bench_ranks(b, c), 0, 1, 1, bench_elements(b, dtype));
	int r;

	if (!crew)
		return -1;
	crew->dtype = dtype;
	crew->optimizer = SHARDD_ADAMW;
	r = crew_run(crew, memory_main);
	if (r == 0)
		report(b, crew);
	crew_free(crew);
	return r;
}
