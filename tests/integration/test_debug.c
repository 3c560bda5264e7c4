/* Debug mode: who uses memory after it was given back is told what it was. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "debugfix.h"

enum { N = DEBUGFIX_N };

/* ------------------------------------------------------- every way to lose memory */

static const struct shardd_optimizer sgd = { .kind = SHARDD_SGD, .lr = 1 };

static int by_release(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	const void *data;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_release(c, u, &train_err));
	debugfix_read(t->arg, data); /* one reference is left */
	TRAINER_CHECK(((struct told *)t->arg)->survived);
	((struct told *)t->arg)->survived = false;
	TRAIN_OK(shardd_release(c, u, &train_err));
	debugfix_read(t->arg, (const char *)data + N * sizeof(float) - 1);
	return 0;
}

/* Sent is given back. */
static int by_submitted_release(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	shardd_ticket ticket;
	const void *data;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_submit_release(c, SHARDD_OPTIONS(release, .unit = u), &ticket, &train_err));
	debugfix_read(t->arg, data);
	return 0;
}

/* The gather's answer is fetched after the release was sent. */
static int by_early_release(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	shardd_ticket gather, release;
	struct shardd_result r;

	TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u), &gather, &train_err));
	TRAIN_OK(
		shardd_submit_release(c, SHARDD_OPTIONS(release, .unit = u), &release, &train_err));
	TRAIN_OK(shardd_wait(c, gather, -1, &r, &train_err));
	debugfix_read(t->arg, r.data);
	return 0;
}

static int by_reduce(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd };
	shardd_unit u = train_zero_unit(c, "layer3", N, &like);
	void *data;

	TRAIN_OK(shardd_gradient(c, u, &data, &train_err));
	debugfix_clear(data, N * sizeof(float));
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	debugfix_write(t->arg, data);
	return 0;
}

static int by_accumulate(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	void *data;

	TRAIN_OK(shardd_gradient(c, u, &data, &train_err));
	debugfix_clear(data, N * sizeof(float));
	TRAIN_OK(shardd_accumulate(c, u, &train_err));
	debugfix_read(t->arg, data);
	return 0;
}

static int by_return(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	void *data;

	TRAIN_OK(shardd_summon(c, u, &data, &train_err));
	debugfix_clear(data, N * sizeof(float));
	TRAIN_OK(shardd_return(c, u, true, &train_err));
	debugfix_write(t->arg, data);
	return 0;
}

static int by_free(const struct trainer *t)
{
	struct told *told = t->arg;
	shardd_client *c = debugfix_join(t);
	uint64_t other;
	void *data, *again;

	TRAIN_OK(shardd_alloc(c, 10000, &told->buffer, &data, &train_err));
	debugfix_clear(data, 10000);
	TRAIN_OK(shardd_free(c, told->buffer, &train_err));
	/* the same memory of the daemon, but not the same address */
	TRAIN_OK(shardd_alloc(c, 10000, &other, &again, &train_err));
	debugfix_clear(again, 10000);
	TRAINER_CHECK(again != data);
	debugfix_read(told, (char *)data + 9999);
	return 0;
}

static int by_end_pass(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd, .guarded = true };
	shardd_unit u = train_zero_unit(c, "layer3", N, &like);
	const void *data;

	TRAIN_OK(shardd_begin_pass(c, u, SHARDD_FORWARD, &data, &train_err));
	debugfix_read(t->arg, data);
	((struct told *)t->arg)->survived = false;
	TRAIN_OK(shardd_set_reshard(c, &u, 1, SHARDD_RESHARD_AFTER_FORWARD, &train_err));
	TRAIN_OK(shardd_end_pass(c, u, SHARDD_FORWARD, false, &train_err));
	debugfix_read(t->arg, data);
	return 0;
}

/* What a policy keeps is there until the step. */
static int by_step(const struct trainer *t)
{
	struct told *told = t->arg;
	shardd_client *c = debugfix_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd, .guarded = true };
	shardd_unit u = train_zero_unit(c, "layer3", N, &like);
	const void *data, *backward;
	void *gradient;

	TRAIN_OK(shardd_set_reshard(c, &u, 1, SHARDD_RESHARD_NEVER, &train_err));
	TRAIN_OK(shardd_begin_pass(c, u, SHARDD_FORWARD, &data, &train_err));
	TRAIN_OK(shardd_end_pass(c, u, SHARDD_FORWARD, false, &train_err));
	debugfix_read(told, data);
	TRAIN_OK(shardd_begin_pass(c, u, SHARDD_BACKWARD, &backward, &train_err));
	TRAINER_CHECK(backward == data);
	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	debugfix_clear(gradient, N * sizeof(float));
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	TRAIN_OK(shardd_end_pass(c, u, SHARDD_BACKWARD, true, &train_err));
	debugfix_read(told, data);
	told->survived = false;
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	debugfix_read(told, data);
	return 0;
}

static int by_shard_done(const struct trainer *t)
{
	struct shardd_unit_spec like = { .optimizer = { .when = SHARDD_OPTIM_BY_TRAINER } };
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, &like);
	struct shardd_shard shard;
	void *gradient;

	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	debugfix_clear(gradient, N * sizeof(float));
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &shard, &train_err));
	*(float *)shard.params = 1;
	TRAIN_OK(shardd_shard_done(c, u, &train_err));
	debugfix_write(t->arg, shard.params);
	return 0;
}

/* The second forward moves the gradients to other buckets. */
static int by_ddp_forward(const struct trainer *t)
{
	const uint64_t n = N;
	const uint32_t order[] = { 0, 1 }; /* buckets are first made for the reverse */
	const struct shardd_tensor tensors[] = { { .name = "a", .shape = &n, .dims = 1 },
						 { .name = "b", .shape = &n, .dims = 1 } };
	const struct shardd_unit_spec spec = { .size = sizeof(spec),
					       .name = "layer3",
					       .tensors = tensors,
					       .n_tensors = 2,
					       .strategy = SHARDD_REPLICATE,
					       .reduce_profile = SHARDD_PROFILE_DDP,
					       .optimizer = sgd };
	shardd_client *c = debugfix_join(t);
	struct shardd_unit_info info;
	struct shardd_ddp_create_options ddp = { .size = sizeof(ddp),
						 .units = &info.unit,
						 .n_units = 1 };
	struct shardd_ddp_view before[2], after[2];
	shardd_ddp d;

	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
	TRAIN_OK(shardd_ddp_create(c, &ddp, &d, NULL, &train_err));
	TRAIN_OK(shardd_ddp_forward(c, d, before, 2, &train_err));
	for (unsigned i = 0; i < 2; i++)
		debugfix_clear(before[i].data, N * sizeof(float));
	TRAIN_OK(shardd_ddp_backward(c, d, NULL, 0, NULL, 0, &train_err));
	TRAIN_OK(shardd_ddp_ready(c, d, order, 2, &train_err));
	TRAIN_OK(shardd_ddp_finish(c, d, NULL, 0, &train_err));
	TRAIN_OK(shardd_ddp_forward(c, d, after, 2, &train_err));
	for (unsigned i = 0; i < 2; i++)
		debugfix_clear(after[i].data, N * sizeof(float));
	((struct told *)t->arg)->buffer = d;
	debugfix_write(t->arg, before[1].data);
	return 0;
}

static int by_leave(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	const void *data;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_leave(c, &train_err));
	debugfix_read(t->arg, data);
	return 0;
}

static int by_close(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	const void *data;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	shardd_close(c);
	debugfix_read(t->arg, data);
	return 0;
}

static int by_write(const struct trainer *t)
{
	shardd_client *c = debugfix_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	const void *data;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	debugfix_write(t->arg, (void *)data);
	return 0;
}

static const struct way {
	const char *name;
	trainer_fn fn;
	const char *access;
	const char *rest; /* %llu: the buffer's number */
} ways[] = {
	{ "release", by_release, "read of",
	  "in the parameters of unit 'layer3', which Release gave back (rank 0): gather it before "
	  "you read it" },
	{ "submitted", by_submitted_release, "read of",
	  "in the parameters of unit 'layer3', which Release gave back (rank 0): gather it before "
	  "you read it" },
	{ "early", by_early_release, "read of",
	  "in the parameters of unit 'layer3', which Release gave back (rank 0): gather it before "
	  "you read it" },
	{ "reduce", by_reduce, "write to",
	  "in the gradient buffer of unit 'layer3', which Reduce gave back (rank 0): ask for the "
	  "gradient buffer before you use it" },
	{ "accumulate", by_accumulate, "read of",
	  "in the gradient buffer of unit 'layer3', which Accumulate gave back (rank 0): ask for "
	  "the gradient buffer before you use it" },
	{ "return", by_return, "write to",
	  "in the summoned memory of unit 'layer3', which ReturnFull gave back (rank 0): summon it "
	  "before you use it" },
	{ "free", by_free, "read of",
	  "in buffer %llu, which FreeBuffer gave back (rank 0): allocate a buffer before you use "
	  "it" },
	{ "endpass", by_end_pass, "read of",
	  "in the parameters of unit 'layer3', which EndPass gave back (rank 0): gather it before "
	  "you read it" },
	{ "step", by_step, "read of",
	  "in the parameters of unit 'layer3', which Step gave back (rank 0): gather it before you "
	  "read it" },
	{ "sharddone", by_shard_done, "write to",
	  "in the shard of unit 'layer3', which ShardDone gave back (rank 0): ask for the next "
	  "shard before you use it" },
	{ "ddp", by_ddp_forward, "write to",
	  "in the gradient buckets of ddp %llu, which DdpForward gave back (rank 0): use the views "
	  "of the last DdpForward" },
	{ "leave", by_leave, "read of",
	  "in the parameters of unit 'layer3', which shardd_leave gave back (rank 0): gather it "
	  "before you read it" },
	{ "close", by_close, "read of",
	  "in the parameters of unit 'layer3', which shardd_close gave back (rank 0): keep the "
	  "client open while you use its memory" },
	{ "write", by_write, "write to",
	  "in the parameters of unit 'layer3', which are read-only (rank 0): change parameters "
	  "between SummonFull and ReturnFull" },
};

/* The trainer is ended by SIGSEGV, and its last words are the sentence. */
static void check_way(const struct way *way, bool no_ring)
{
	struct told *told = told_new();
	char rest[256], want[512];
	int code;

	told->no_ring = no_ring;
	code = trainer_wait(trainer_start(&trainfix, way->name, 0, 1, way->fn, told), 60);
	cr_assert_eq(code, 128 + SIGSEGV, "%s: %d: %s", way->name, code, told_text(told));
	cr_assert(!told->survived, "%s", way->name);
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
	snprintf(rest, sizeof(rest), way->rest, (unsigned long long)told->buffer);
#ifndef __x86_64__
	way = &(struct way){ way->name, way->fn, "access to", way->rest };
#endif
	snprintf(want, sizeof(want), "shardd: %s %p %s\n", way->access, told->at, rest);
	cr_assert_str_eq(told_text(told), want, "%s: %s", way->name, told_text(told));
	if (way->fn != by_leave)
		debugfix_delete(way->name);
	told_free(told);
}

Test(debug, use_after_it_was_given_back_ends_with_a_sentence, .timeout = 120,
     .init = trainfix_begin, .fini = trainfix_end)
{
	debugfix_host_only();
	for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
		check_way(&ways[i], false);
}

Test(debug, so_does_it_over_grpc, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end)
{
	debugfix_host_only();
	for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
		check_way(&ways[i], true);
}

/* Rank 1 ends; rank 0 joins again. A unit's buffers stay with the job. */
static int rejoin_trainer(const struct trainer *t)
{
	const uint64_t n = N;
	const struct shardd_tensor tensor = { .name = "w", .shape = &n, .dims = 1 };
	const struct shardd_buffer buffer = { .name = "mean", .shape = &n, .dims = 1 };
	const struct shardd_unit_spec spec = { .size = sizeof(spec),
					       .name = "layer3",
					       .tensors = &tensor,
					       .n_tensors = 1,
					       .buffers = &buffer,
					       .n_buffers = 1 };
	shardd_client *c = debugfix_join(t);
	struct shardd_unit_info info;
	const void *data;
	void *buffers;
	shardd_unit u;

	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	u = info.unit;
	TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
	TRAIN_OK(shardd_unit_buffers(c, u, &buffers, &train_err));

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (t->rank == 1)
		_exit(0);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	debugfix_read(t->arg, data);
	((struct told *)t->arg)->survived = false;
	train_join_as(c, t, SHARDD_EPHEMERAL);
	*(volatile char *)buffers = 1;
	debugfix_read(t->arg, data);
	return 0;
}

Test(debug, a_new_epoch_takes_what_the_last_one_lent, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct told *told;
	pid_t pids[2];

	debugfix_host_only();
	told = told_new();
	for (uint32_t r = 0; r < 2; r++)
		pids[r] = trainer_start(&trainfix, "test", r, 2, rejoin_trainer, told);
	cr_assert_eq(trainer_wait(pids[1], 60), 0);
	cr_assert_eq(trainer_wait(pids[0], 60), 128 + SIGSEGV, "%s", told_text(told));
	cr_assert(strstr(told_text(told),
			 "the parameters of unit 'layer3', which shardd_join gave back"),
		  "%s", told_text(told));
	debugfix_delete("test");
	told_free(told);
}
