/* Debug mode: who uses memory after it was given back is told what it was. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

enum { N = 100, TEXT = 4096 }; /* units so small that several share a page */

/* What a trainer says to the test. */
struct told {
	bool no_ring;
	int fd; /* its standard error */
	void *at;
	uint64_t buffer;
	bool survived;
	unsigned calls;
	float params[3][N];
};

static struct told *told_new(void)
{
	struct told *told = trainer_shared(sizeof(*told));

	told->fd = memfd_create("stderr", MFD_CLOEXEC);
	cr_assert_geq(told->fd, 0);
	return told;
}

static void told_free(struct told *told)
{
	close(told->fd);
	munmap(told, sizeof(*told));
}

static void host_only(void)
{
	if (!train_on_host())
		cr_skip_test("memory of a GPU cannot be protected");
}

/* What trainers that died have left. */
static void job_delete(const char *job)
{
	const char *const args[] = { "job", "delete", "--force", job, NULL };

	json_decref(daemonfix_ctl(&trainfix, args));
}

static const char *told_text(const struct told *told)
{
	static char text[TEXT];
	ssize_t n = pread(told->fd, text, sizeof(text) - 1, 0);

	cr_assert_geq(n, 0);
	text[n] = '\0';
	return text;
}

/* A trainer in debug mode. */
static void debug_on(const struct told *told)
{
	const struct rlimit none = { 0, 0 };

	setrlimit(RLIMIT_CORE, &none);
	signal(SIGSEGV, SIG_DFL); /* not the report of a sanitizer */
	TRAINER_CHECK(setenv("SHARDD_DEBUG", "1", 1) == 0);
	if (told->no_ring)
		TRAINER_CHECK(setenv("SHARDD_RING", "off", 1) == 0);
	TRAINER_CHECK(dup2(told->fd, STDERR_FILENO) == STDERR_FILENO);
}

static shardd_client *debug_join(const struct trainer *t)
{
	debug_on(t->arg);
	return train_join(t);
}

static void touch_read(struct told *told, const void *at)
{
	volatile char byte;

	told->at = (void *)at;
	byte = *(const volatile char *)at;
	(void)byte;
	told->survived = true;
}

static void touch_write(struct told *told, void *at)
{
	told->at = at;
	*(volatile char *)at = 1;
	told->survived = true;
}

/* ------------------------------------------------------- every way to lose memory */

static const struct shardd_optimizer sgd = { .kind = SHARDD_SGD, .lr = 1 };

static int by_release(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	const void *data;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_release(c, u, &train_err));
	touch_read(t->arg, data); /* one reference is left */
	TRAINER_CHECK(((struct told *)t->arg)->survived);
	((struct told *)t->arg)->survived = false;
	TRAIN_OK(shardd_release(c, u, &train_err));
	touch_read(t->arg, (const char *)data + N * sizeof(float) - 1);
	return 0;
}

/* Sent is given back. */
static int by_submitted_release(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	shardd_ticket ticket;
	const void *data;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_release_submit(c, u, &ticket, &train_err));
	touch_read(t->arg, data);
	return 0;
}

/* The gather's answer is fetched after the release was sent. */
static int by_early_release(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	shardd_ticket gather, release;
	struct shardd_result r;

	TRAIN_OK(shardd_gather_submit(c, u, &gather, &train_err));
	TRAIN_OK(shardd_release_submit(c, u, &release, &train_err));
	TRAIN_OK(shardd_wait(c, gather, -1, &r, &train_err));
	touch_read(t->arg, r.data);
	return 0;
}

static int by_reduce(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd };
	shardd_unit u = train_zero_unit(c, "layer3", N, &like);
	void *data;

	TRAIN_OK(shardd_gradient(c, u, &data, &train_err));
	memset(data, 0, N * sizeof(float));
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	touch_write(t->arg, data);
	return 0;
}

static int by_accumulate(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	void *data;

	TRAIN_OK(shardd_gradient(c, u, &data, &train_err));
	memset(data, 0, N * sizeof(float));
	TRAIN_OK(shardd_accumulate(c, u, &train_err));
	touch_read(t->arg, data);
	return 0;
}

static int by_return(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	void *data;

	TRAIN_OK(shardd_summon(c, u, &data, &train_err));
	memset(data, 0, N * sizeof(float));
	TRAIN_OK(shardd_return(c, u, true, &train_err));
	touch_write(t->arg, data);
	return 0;
}

static int by_free(const struct trainer *t)
{
	struct told *told = t->arg;
	shardd_client *c = debug_join(t);
	uint64_t other;
	void *data, *again;

	TRAIN_OK(shardd_alloc(c, 10000, &told->buffer, &data, &train_err));
	memset(data, 0, 10000);
	TRAIN_OK(shardd_free(c, told->buffer, &train_err));
	/* the same memory of the daemon, but not the same address */
	TRAIN_OK(shardd_alloc(c, 10000, &other, &again, &train_err));
	memset(again, 0, 10000);
	TRAINER_CHECK(again != data);
	touch_read(told, (char *)data + 9999);
	return 0;
}

static int by_end_pass(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd, .guarded = true };
	shardd_unit u = train_zero_unit(c, "layer3", N, &like);
	const void *data;

	TRAIN_OK(shardd_begin_pass(c, u, SHARDD_FORWARD, &data, &train_err));
	touch_read(t->arg, data);
	((struct told *)t->arg)->survived = false;
	TRAIN_OK(shardd_set_reshard(c, &u, 1, SHARDD_RESHARD_AFTER_FORWARD, &train_err));
	TRAIN_OK(shardd_end_pass(c, u, SHARDD_FORWARD, false, &train_err));
	touch_read(t->arg, data);
	return 0;
}

/* What a policy keeps is there until the step. */
static int by_step(const struct trainer *t)
{
	struct told *told = t->arg;
	shardd_client *c = debug_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd, .guarded = true };
	shardd_unit u = train_zero_unit(c, "layer3", N, &like);
	const void *data, *backward;
	void *gradient;

	TRAIN_OK(shardd_set_reshard(c, &u, 1, SHARDD_RESHARD_NEVER, &train_err));
	TRAIN_OK(shardd_begin_pass(c, u, SHARDD_FORWARD, &data, &train_err));
	TRAIN_OK(shardd_end_pass(c, u, SHARDD_FORWARD, false, &train_err));
	touch_read(told, data);
	TRAIN_OK(shardd_begin_pass(c, u, SHARDD_BACKWARD, &backward, &train_err));
	TRAINER_CHECK(backward == data);
	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	memset(gradient, 0, N * sizeof(float));
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	TRAIN_OK(shardd_end_pass(c, u, SHARDD_BACKWARD, true, &train_err));
	touch_read(told, data);
	told->survived = false;
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	touch_read(told, data);
	return 0;
}

static int by_shard_done(const struct trainer *t)
{
	struct shardd_unit_spec like = { .optimizer = { .when = SHARDD_OPTIM_BY_TRAINER } };
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, &like);
	struct shardd_shard shard;
	void *gradient;

	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	memset(gradient, 0, N * sizeof(float));
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &shard, &train_err));
	shard.params[0] = 1;
	TRAIN_OK(shardd_shard_done(c, u, &train_err));
	touch_write(t->arg, shard.params);
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
	shardd_client *c = debug_join(t);
	struct shardd_unit_info info;
	struct shardd_ddp_spec ddp = { .size = sizeof(ddp), .units = &info.unit, .n_units = 1 };
	struct shardd_ddp_view before[2], after[2];
	shardd_ddp d;

	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
	TRAIN_OK(shardd_ddp_create(c, &ddp, &d, NULL, &train_err));
	TRAIN_OK(shardd_ddp_forward(c, d, before, 2, &train_err));
	for (unsigned i = 0; i < 2; i++)
		memset(before[i].data, 0, N * sizeof(float));
	TRAIN_OK(shardd_ddp_backward(c, d, NULL, 0, NULL, 0, &train_err));
	TRAIN_OK(shardd_ddp_ready(c, d, order, 2, &train_err));
	TRAIN_OK(shardd_ddp_finish(c, d, NULL, 0, &train_err));
	TRAIN_OK(shardd_ddp_forward(c, d, after, 2, &train_err));
	for (unsigned i = 0; i < 2; i++)
		memset(after[i].data, 0, N * sizeof(float));
	((struct told *)t->arg)->buffer = d;
	touch_write(t->arg, before[1].data);
	return 0;
}

static int by_leave(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	const void *data;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_leave(c, &train_err));
	touch_read(t->arg, data);
	return 0;
}

static int by_close(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	const void *data;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	shardd_close(c);
	touch_read(t->arg, data);
	return 0;
}

static int by_write(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	const void *data;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	touch_write(t->arg, (void *)data);
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
		job_delete(way->name);
	told_free(told);
}

Test(debug, use_after_it_was_given_back_ends_with_a_sentence, .timeout = 120,
     .init = trainfix_begin, .fini = trainfix_end)
{
	host_only();
	for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
		check_way(&ways[i], false);
}

Test(debug, so_does_it_over_grpc, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end)
{
	host_only();
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
	shardd_client *c = debug_join(t);
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
	touch_read(t->arg, data);
	((struct told *)t->arg)->survived = false;
	train_join_as(c, t, SHARDD_EPHEMERAL);
	*(volatile char *)buffers = 1;
	touch_read(t->arg, data);
	return 0;
}

Test(debug, a_new_epoch_takes_what_the_last_one_lent, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct told *told;
	pid_t pids[2];

	host_only();
	told = told_new();
	for (uint32_t r = 0; r < 2; r++)
		pids[r] = trainer_start(&trainfix, "test", r, 2, rejoin_trainer, told);
	cr_assert_eq(trainer_wait(pids[1], 60), 0);
	cr_assert_eq(trainer_wait(pids[0], 60), 128 + SIGSEGV, "%s", told_text(told));
	cr_assert(strstr(told_text(told),
			 "the parameters of unit 'layer3', which shardd_join gave back"),
		  "%s", told_text(told));
	job_delete("test");
	told_free(told);
}

/* ------------------------------------------------------------- what stays usable */

static int neighbours_trainer(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd };
	float ones[N], *gradients[2];
	const float *params[2], *again;
	shardd_unit u[2] = { train_zero_unit(c, "a", N, &like), train_zero_unit(c, "b", N, &like) };

	for (unsigned i = 0; i < 2; i++)
		TRAIN_OK(shardd_gather(c, u[i], (const void **)&params[i], &train_err));
	TRAIN_OK(shardd_release(c, u[0], &train_err));
	for (unsigned i = 0; i < N; i++)
		TRAINER_CHECK(params[1][i] == 0);
	TRAIN_OK(shardd_gather(c, u[0], (const void **)&again, &train_err));
	TRAINER_CHECK(again == params[0] && again[N - 1] == 0);
	for (unsigned i = 0; i < 2; i++)
		TRAIN_OK(shardd_release(c, u[i], &train_err));
	for (unsigned i = 0; i < 2; i++)
		TRAIN_OK(shardd_gradient(c, u[i], (void **)&gradients[i], &train_err));
	for (unsigned i = 0; i < N; i++)
		ones[i] = gradients[0][i] = 1;
	TRAIN_OK(shardd_reduce(c, u[0], &train_err));
	memcpy(gradients[1], ones, sizeof(ones));
	TRAIN_OK(shardd_reduce(c, u[1], &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	for (unsigned i = 0; i < 2; i++) {
		TRAIN_OK(shardd_gather(c, u[i], (const void **)&params[i], &train_err));
		TRAINER_CHECK(params[i][0] == -1 && params[i][N - 1] == -1);
		TRAIN_OK(shardd_release(c, u[i], &train_err));
	}
	train_leave(c);
	return 0;
}

/* All that the trainers of @told have said is nothing. */
static void run_quietly(uint32_t world, trainer_fn fn)
{
	struct told *told = told_new();

	trainfix_run(world, fn, told);
	cr_assert_str_empty(told_text(told));
	told_free(told);
}

Test(debug, neighbours_on_the_same_page_stay_usable, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	host_only();
	run_quietly(2, neighbours_trainer);
}

/* Rank 1 comes after rank 0's deadline, and is told the same. */
static int refused_trainer(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd };
	shardd_unit u = train_zero_unit(c, "unit", N, &like);
	struct told *told = t->arg;
	float *gradient;

	TRAIN_OK(shardd_gradient(c, u, (void **)&gradient, &train_err));
	for (unsigned i = 0; i < N; i++)
		gradient[i] = 1;
	if (t->rank == 0) {
		shardd_set_timeout(c, 100);
		TRAIN_FAILS(shardd_reduce(c, u, &train_err), SHARDD_DEADLINE_EXCEEDED);
		shardd_set_timeout(c, 0);
		__atomic_store_n(&told->survived, true, __ATOMIC_RELEASE);
	} else {
		while (!__atomic_load_n(&told->survived, __ATOMIC_ACQUIRE))
			sched_yield();
		TRAIN_FAILS(shardd_reduce(c, u, &train_err), SHARDD_DEADLINE_EXCEEDED);
	}
	TRAINER_CHECK(gradient[N - 1] == 1);
	gradient[0] = 1;
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	train_leave(c);
	return 0;
}

Test(debug, an_op_that_fails_gives_nothing_back, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	host_only();
	run_quietly(2, refused_trainer);
}

/* shardd_read and shardd_write return an error instead. */
static int copies_trainer(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	struct shardd_unit_spec like = { .optimizer = sgd };
	shardd_unit u = train_zero_unit(c, "layer3", N, &like);
	float some[N] = { 0 };
	const void *data;
	void *gradient;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_read(c, some, data, sizeof(some), &train_err));
	TRAIN_FAILS(shardd_read(c, some, data, sizeof(some) + 1, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_write(c, (void *)data, some, 4, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(
		strstr(train_err.text, "the parameters of unit 'layer3', which are read-only"));
	TRAIN_OK(shardd_release(c, u, &train_err));
	TRAIN_FAILS(shardd_read(c, some, data, 4, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strstr(train_err.text, "'layer3', which Release gave back"));
	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	TRAIN_OK(shardd_write(c, gradient, some, sizeof(some), &train_err));
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	TRAIN_FAILS(shardd_write(c, gradient, some, 4, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strstr(train_err.text, "'layer3', which Reduce gave back"));
	train_leave(c);
	return 0;
}

Test(debug, copies_are_refused_in_what_was_given_back, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	host_only();
	run_quietly(1, copies_trainer);
}

/* ------------------------------------------------------------------- the process */

static sigjmp_buf after_fault;
static struct told *handler_told;

static void own_handler(int number, siginfo_t *info, void *context)
{
	(void)context;
	handler_told->calls++;
	handler_told->survived = number == SIGSEGV && info->si_addr == handler_told->at;
	siglongjmp(after_fault, 1);
}

/* The application's own handler goes on as it would have, more than once. */
static int handler_trainer(const struct trainer *t)
{
	struct sigaction own = { .sa_sigaction = own_handler, .sa_flags = SA_SIGINFO };
	shardd_client *c;
	shardd_unit u;
	const void *data;

	debug_on(t->arg);
	handler_told = t->arg;
	TRAINER_CHECK(sigaction(SIGSEGV, &own, NULL) == 0);
	c = train_join(t);
	u = train_zero_unit(c, "layer3", N, NULL);
	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_release(c, u, &train_err));
	for (volatile unsigned i = 0; i < 2; i++) {
		if (sigsetjmp(after_fault, 1) == 0)
			touch_read(handler_told, data);
		TRAINER_CHECK(handler_told->survived && handler_told->calls == i + 1);
		handler_told->survived = false;
	}
	/* a fault of another kind is none of ours */
	if (sigsetjmp(after_fault, 1) == 0)
		touch_write(handler_told,
			    mmap(NULL, 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
	TRAINER_CHECK(handler_told->survived && handler_told->calls == 3);
	train_leave(c);
	return 0;
}

Test(debug, a_handler_of_the_application_is_called, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct told *told;
	const char *first;

	host_only();
	told = told_new();
	trainfix_run(1, handler_trainer, told);
	first = strstr(told_text(told), "gave back");
	cr_assert(first && strstr(first + 1, "gave back"), "%s", told_text(told));
	cr_assert(!strstr(strstr(first + 1, "gave back") + 1, "gave back"), "%s", told_text(told));
	told_free(told);
}

static int unrelated_trainer(const struct trainer *t)
{
	shardd_client *c = debug_join(t);

	(void)c;
	touch_write(t->arg, mmap(NULL, 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
	return 0;
}

static int sent_trainer(const struct trainer *t)
{
	shardd_client *c = debug_join(t);

	(void)c;
	kill(getpid(), SIGSEGV);
	((struct told *)t->arg)->survived = true;
	return 0;
}

Test(debug, faults_of_others_end_as_before, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	static const trainer_fn fns[] = { unrelated_trainer, sent_trainer };

	host_only();
	for (size_t i = 0; i < ARRAY_SIZE(fns); i++) {
		struct told *told = told_new();
		pid_t pid = trainer_start(&trainfix, "test", 0, 1, fns[i], told);

		cr_assert_eq(trainer_wait(pid, 60), 128 + SIGSEGV);
		cr_assert(!told->survived);
		cr_assert_str_empty(told_text(told));
		job_delete("test");
		told_free(told);
	}
}

/* A child of a fork has the same memory, and the same sentence. */
static int fork_trainer(const struct trainer *t)
{
	struct told *told = t->arg;
	shardd_client *c = debug_join(t);
	shardd_unit a = train_zero_unit(c, "layer3", N, NULL);
	shardd_unit b = train_zero_unit(c, "layer4", N, NULL);
	const void *lost, *kept;
	int status;
	pid_t pid;

	TRAIN_OK(shardd_gather(c, a, &lost, &train_err));
	TRAIN_OK(shardd_gather(c, b, &kept, &train_err));
	TRAIN_OK(shardd_release(c, a, &train_err));
	pid = fork();
	TRAINER_CHECK(pid >= 0);
	if (pid == 0) {
		touch_read(told, kept);
		shardd_close(c); /* the parent's: nothing happens */
		touch_read(told, kept);
		told->survived = false;
		touch_read(told, lost);
		_exit(0);
	}
	TRAINER_CHECK(waitpid(pid, &status, 0) == pid);
	TRAINER_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV && !told->survived);
	TRAIN_OK(shardd_gather(c, a, &lost, &train_err));
	touch_read(told, lost);
	TRAIN_OK(shardd_release(c, a, &train_err));
	TRAIN_OK(shardd_release(c, b, &train_err));
	train_leave(c);
	return 0;
}

Test(debug, a_child_of_a_fork_is_told_too, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct told *told;

	host_only();
	told = told_new();
	trainfix_run(1, fork_trainer, told);
	cr_assert(strstr(told_text(told), "'layer3', which Release gave back (rank 0)"), "%s",
		  told_text(told));
	told_free(told);
}

struct worker {
	shardd_client *c;
	shardd_unit u;
};

static void *work(void *arg)
{
	const struct worker *w = arg;

	for (unsigned i = 0; i < 200; i++) {
		const float *params;
		float *gradient;

		TRAIN_OK(shardd_gather(w->c, w->u, (const void **)&params, &train_err));
		TRAINER_CHECK(params[0] == 0 && params[N - 1] == 0);
		TRAIN_OK(shardd_release(w->c, w->u, &train_err));
		TRAIN_OK(shardd_gradient(w->c, w->u, (void **)&gradient, &train_err));
		gradient[0] = gradient[N - 1] = 0;
		TRAIN_OK(shardd_accumulate(w->c, w->u, &train_err));
	}
	return NULL;
}

static int threads_trainer(const struct trainer *t)
{
	enum { THREADS = 4 };
	static const char *const names[THREADS] = { "a", "b", "c", "d" };
	struct worker workers[THREADS];
	pthread_t threads[THREADS];
	shardd_client *c = debug_join(t);

	for (unsigned i = 0; i < THREADS; i++)
		workers[i] = (struct worker){ c, train_zero_unit(c, names[i], N, NULL) };
	for (unsigned i = 0; i < THREADS; i++)
		TRAINER_CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
	for (unsigned i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	train_leave(c);
	return 0;
}

Test(debug, threads_do_not_take_each_others_memory, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	host_only();
	run_quietly(1, threads_trainer);
}

/* More buffers than keep their addresses. */
static int many_trainer(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "unit", N, NULL);
	const float *params;

	for (unsigned i = 0; i < 20000; i++) {
		uint64_t buffer;
		void *data;

		TRAIN_OK(shardd_alloc(c, 100, &buffer, &data, &train_err));
		*(char *)data = 1;
		TRAIN_OK(shardd_free(c, buffer, &train_err));
	}
	TRAIN_OK(shardd_gather(c, u, (const void **)&params, &train_err));
	TRAINER_CHECK(params[0] == 0);
	TRAIN_OK(shardd_release(c, u, &train_err));
	train_leave(c);
	return 0;
}

Test(debug, addresses_are_given_up_in_the_end, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	host_only();
	run_quietly(1, many_trainer);
}

/* ------------------------------------------------------------------------ tickets */

static int tickets_trainer(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "layer3", N, NULL);
	shardd_ticket ticket;

	TRAIN_OK(shardd_gather_submit(c, u, &ticket, &train_err));
	TRAIN_OK(shardd_barrier_submit(c, SHARDD_WORLD, &ticket, &train_err));
	for (unsigned i = 0; i < 10; i++)
		TRAIN_OK(shardd_release_submit(c, u, &ticket, &train_err));
	shardd_close(c);
	return 0;
}

Test(debug, tickets_that_nobody_waited_for_are_reported, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct told *told = told_new();
	const char *text;

	trainfix_run(1, tickets_trainer, told);
	text = told_text(told);
	cr_assert(strstr(text, "shardd: nobody waited for the ticket of Gather of unit 'layer3' "
			       "(rank 0): wait for every ticket before you close\n"),
		  "%s", text);
	cr_assert(strstr(text, "the ticket of Barrier (rank 0)"), "%s", text);
	cr_assert(strstr(text, "shardd: nor for 2 more tickets (rank 0)\n"), "%s", text);
	job_delete("test");
	told_free(told);
}

/* --------------------------------------------------------------------- the switch */

static int value_trainer(const struct trainer *t)
{
	struct shardd_options o = { .size = sizeof(o), .socket = t->socket };
	shardd_client *c;

	TRAINER_CHECK(setenv("SHARDD_DEBUG", "yes", 1) == 0);
	TRAIN_FAILS(shardd_connect(&o, &c, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strstr(train_err.text, "SHARDD_DEBUG=\"yes\" is neither 0 nor 1"));
	TRAINER_CHECK(setenv("SHARDD_DEBUG", "0", 1) == 0);
	TRAIN_OK(shardd_connect(&o, &c, &train_err));
	shardd_close(c);
	return 0;
}

Test(debug, other_values_are_refused, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(1, value_trainer, NULL);
}

static int gpu_trainer(const struct trainer *t)
{
	shardd_client *c = debug_join(t);
	shardd_unit u = train_zero_unit(c, "unit", N, NULL);
	float some[N];

	train_params(c, u, some, sizeof(some));
	train_leave(c);
	return 0;
}

Test(debug, says_that_it_cannot_protect_a_gpu, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct told *told = told_new();

	trainfix_run(1, gpu_trainer, told);
	cr_assert_eq(strstr(told_text(told), "shardd: SHARDD_DEBUG=1 cannot protect memory of a "
					     "GPU") == NULL,
		     train_on_host(), "%s", told_text(told));
	told_free(told);
}

/* ------------------------------------------------------------- the same bits as ever */

static int training_trainer(const struct trainer *t)
{
	static const char *const names[] = { "a", "b", "c" };
	struct shardd_unit_spec like = { .optimizer = { .kind = SHARDD_ADAMW, .lr = 0.01 },
					 .compute_dtype = SHARDD_BF16 };
	struct told *told = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit u[3];

	for (unsigned i = 0; i < 3; i++) {
		u[i] = train_register(c, names[i], N, &like).unit;
		TRAIN_OK(shardd_init_seed(c, u[i], 7, &train_err));
		like.compute_dtype = i ? SHARDD_FP16 : SHARDD_FP32;
	}
	for (unsigned step = 0; step < 5; step++) {
		float numbers[N];

		for (unsigned i = 0; i < 3; i++) {
			train_fill(numbers, N, step * 100 + i * 10 + t->rank);
			train_reduce(c, u[i],
				     i == 0   ? DTYPE_BF16
				     : i == 1 ? DTYPE_FP32
					      : DTYPE_FP16,
				     numbers, N);
		}
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
	}
	for (unsigned i = 0; i < 3; i++) {
		void *data;

		TRAIN_OK(shardd_summon(c, u[i], &data, &train_err));
		if (t->rank == 0)
			train_read(c, told->params[i], data, sizeof(told->params[i]));
		TRAIN_OK(shardd_return(c, u[i], false, &train_err));
	}
	train_leave(c);
	return 0;
}

static int training_in_debug_mode(const struct trainer *t)
{
	debug_on(t->arg);
	return training_trainer(t);
}

Test(debug, training_has_the_same_bits, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	struct told *plain = told_new(), *debug = told_new();

	trainfix_run(2, training_trainer, plain);
	trainfix_run(2, training_in_debug_mode, debug);
	cr_assert_arr_eq(plain->params, debug->params, sizeof(plain->params));
	cr_assert_neq(plain->params[0][0], 0);
	if (train_on_host())
		cr_assert_str_empty(told_text(debug));
	told_free(plain);
	told_free(debug);
}
