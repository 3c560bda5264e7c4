/* Gather, release, gradient buffer: what they hand out and how it is counted. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

enum { N = 5003 };

/* All parameters of @u from rank 0's @values (collective). */
static void init_from(shardd_client *c, const struct trainer *t, shardd_unit u, const float *values)
{
	uint64_t buffer = 0;
	void *data;

	if (t->rank == 0) {
		TRAIN_OK(shardd_alloc(c, N * sizeof(float), &buffer, &data, &train_err));
		train_write(c, data, values, N * sizeof(float));
	}
	TRAIN_OK(shardd_init_broadcast(c, u, 0, buffer, &train_err));
	if (buffer)
		TRAIN_OK(shardd_free(c, buffer, &train_err));
}

static struct shardd_result gather(shardd_client *c, shardd_unit u)
{
	struct shardd_result r;
	shardd_ticket ticket;

	TRAIN_OK(shardd_submit_gather(c, SHARDD_OPTIONS(gather, .unit = u), &ticket, &train_err));
	TRAIN_OK(shardd_wait(c, ticket, -1, &r, &train_err));
	return r;
}

static uint32_t release(shardd_client *c, shardd_unit u)
{
	struct shardd_result r;
	shardd_ticket ticket;

	TRAIN_OK(shardd_submit_release(c, SHARDD_OPTIONS(release, .unit = u), &ticket, &train_err));
	TRAIN_OK(shardd_wait(c, ticket, -1, &r, &train_err));
	return r.references;
}

/* Every pattern of interest: usual numbers, subnormals, ties, overflow, signs. */
static float *awkward_numbers(void)
{
	static const float special[] = { 0.0f,        -0.0f,      1e-45f,     -1e-45f,
					 1e-40f,      6e-8f,      65504.0f,   65520.0f,
					 1e30f,       -3.3e38f,   1.0f,       1.00390625f,
					 1.01171875f, 0x1.002p0f, 0x1.006p0f, 5.9604645e-08f };
	float *x = train_numbers(N, 42);

	memcpy(x, special, sizeof(special));
	return x;
}

static int values_trainer(const struct trainer *t)
{
	static const enum shardd_dtype dtypes[] = { SHARDD_FP32, SHARDD_BF16, SHARDD_FP16 };
	static const char *const names[] = { "fp32", "bf16", "fp16" };
	shardd_client *c = train_join(t);
	float *values = awkward_numbers();

	for (size_t i = 0; i < ARRAY_SIZE(dtypes); i++) {
		struct shardd_unit_spec like = { .compute_dtype = dtypes[i] };
		shardd_unit u = train_register(c, names[i], N, &like).unit;
		size_t bytes = N * shardd_dtype_size(dtypes[i]);
		struct k_cast cast = { .dst = train_alloc(bytes),
				       .src = values,
				       .dst_dtype = (enum dtype)dtypes[i],
				       .src_dtype = DTYPE_FP32 };
		struct shardd_result r;

		init_from(c, t, u, values);
		r = gather(c, u);
		kernels_ref()->cast(&cast, 0, N);
		TRAINER_CHECK(r.bytes == bytes && r.references == 1);
		TRAIN_HAS(c, r.data, cast.dst, bytes);
		TRAINER_CHECK(release(c, u) == 0);
		free(cast.dst);
	}
	free(values);
	train_leave(c);
	return 0;
}

Test(gather, hands_out_the_parameters_in_the_compute_dtype, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(1, values_trainer, NULL);
	trainfix_run(3, values_trainer, NULL);
}

static int counts_trainer(const struct trainer *t)
{
	static const enum shardd_dtype dtypes[] = { SHARDD_FP32, SHARDD_BF16 };
	shardd_client *c = train_join(t);

	for (size_t i = 0; i < ARRAY_SIZE(dtypes); i++) {
		struct shardd_unit_spec like = { .compute_dtype = dtypes[i] };
		shardd_unit u = train_zero_unit(c, i ? "bf16" : "fp32", N, &like);
		const void *at = gather(c, u).data;

		for (uint32_t n = 2; n <= 5; n++) {
			struct shardd_result r = gather(c, u);

			TRAINER_CHECK(r.references == n && r.data == at && !r.copied);
		}
		for (uint32_t n = 5; n-- > 0;)
			TRAINER_CHECK(release(c, u) == n);
		/* with none left a release does nothing, as often as it comes */
		for (uint32_t n = 0; n < 3; n++)
			TRAINER_CHECK(release(c, u) == 0);
		TRAINER_CHECK(gather(c, u).references == 1);
		TRAINER_CHECK(release(c, u) == 0);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(gather, is_counted_and_keeps_its_address, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, counts_trainer, NULL);
}

/* One cast is made for all ranks, and a new one only after the parameters changed. */
static int shared_trainer(const struct trainer *t)
{
	struct shardd_unit_spec like = { .compute_dtype = SHARDD_BF16,
					 .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	unsigned *casts = t->arg;
	float values[N];
	shardd_client *c = train_join(t);
	shardd_unit u = train_zero_unit(c, "unit", N, &like);

	for (unsigned step = 0; step < 3; step++) {
		for (unsigned i = 0; i < 4; i++)
			__atomic_fetch_add(&casts[step], gather(c, u).copied, __ATOMIC_RELAXED);
		for (unsigned i = 0; i < 4; i++)
			release(c, u);
		__atomic_fetch_add(&casts[step], gather(c, u).copied, __ATOMIC_RELAXED);
		release(c, u);
		train_fill(values, N, step);
		train_reduce(c, u, DTYPE_BF16, values, N);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(gather, casts_once_for_all_ranks, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	unsigned *casts = trainer_shared(3 * sizeof(*casts));

	trainfix_run(3, shared_trainer, casts);
	for (unsigned step = 0; step < 3; step++)
		cr_assert_eq(casts[step], 1, "step %u: %u casts", step, casts[step]);
}

/* What @fn does to the memory at @at must end the process that does it with SIGSEGV. */
static void must_fault(volatile char *at)
{
	int status;
	pid_t pid = fork();

	TRAINER_CHECK(pid >= 0);
	if (pid == 0) {
		signal(SIGSEGV, SIG_DFL); /* not the report of a sanitizer */
		*at = 1;
		_exit(0);
	}
	TRAINER_CHECK(waitpid(pid, &status, 0) == pid);
	TRAINER_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

/* The library refuses it; who goes around it on the host is ended by the mapping. (What
 * a GPU makes of a kernel that writes there ends that process's context.) */
static void must_not_be_written(shardd_client *c, char *at)
{
	TRAIN_FAILS(shardd_write(c, at, "x", 1, &train_err), SHARDD_INVALID_ARGUMENT);
	if (train_on_host())
		must_fault(at);
}

static int read_only_trainer(const struct trainer *t)
{
	struct shardd_unit_spec like = { .compute_dtype = SHARDD_BF16 };
	shardd_client *c = train_join(t);
	shardd_unit direct = train_zero_unit(c, "direct", N, NULL);
	shardd_unit cast = train_zero_unit(c, "cast", N, &like);
	char zero[N * sizeof(float)] = { 0 };
	char *a = gather(c, direct).data, *b = gather(c, cast).data;

	must_not_be_written(c, a);
	must_not_be_written(c, a + N * sizeof(float) - 1);
	must_not_be_written(c, b);
	TRAIN_HAS(c, a, zero, N * sizeof(float));
	TRAIN_HAS(c, b, zero, N * sizeof(uint16_t));
	train_leave(c);
	return 0;
}

Test(gather, maps_read_only, .timeout = 60, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(2, read_only_trainer, NULL);
}

static int refusals_trainer(const struct trainer *t)
{
	struct shardd_unit_spec like = { .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	shardd_client *c = train_join(t);
	shardd_unit u = train_register(c, "unit", N, &like).unit;
	const void *data;
	float values[N];

	TRAIN_FAILS(shardd_gather(c, u, &data, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_FAILS(shardd_gather(c, u + 1, &data, &train_err), SHARDD_NOT_FOUND);
	TRAIN_OK(shardd_init_seed(c, u, 1, &train_err));
	train_fill(values, N, t->rank);
	train_reduce(c, u, DTYPE_FP32, values, N);

	/* who holds a gather must release it before the step; nothing is lost by that */
	if (t->rank == 1)
		TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAIN_FAILS(shardd_step(c, SHARDD_WORLD, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "'unit'") && strstr(train_err.text, "rank 1"));
	TRAIN_FAILS(shardd_init_seed(c, u, 2, &train_err), SHARDD_FAILED_PRECONDITION);
	if (t->rank == 1)
		TRAINER_CHECK(release(c, u) == 0);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_params(c, u, values, sizeof(values));
	TRAINER_CHECK(values[0] != 0); /* the gradient was still there */
	train_leave(c);
	return 0;
}

Test(gather, is_refused_in_the_wrong_state, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, refusals_trainer, NULL);
}

static int gradient_trainer(const struct trainer *t)
{
	struct shardd_unit_spec like = { .gradient_dtype = SHARDD_FP16 };
	shardd_client *c = train_join(t);
	shardd_unit u = train_zero_unit(c, "unit", N, &like);
	struct shardd_result r;
	shardd_ticket ticket;
	void *first, *again, *other;
	uint8_t byte;

	/* asked again before the reduce: the same, with what was written */
	TRAIN_OK(shardd_submit_gradient(c, SHARDD_OPTIONS(gradient, .unit = u), &ticket,
					&train_err));
	TRAIN_OK(shardd_wait(c, ticket, -1, &r, &train_err));
	TRAINER_CHECK(r.data && r.bytes == N * sizeof(uint16_t));
	first = r.data;
	train_set(c, first, (uint8_t)(t->rank + 1), r.bytes);
	for (unsigned i = 0; i < 3; i++) {
		TRAIN_OK(shardd_gradient(c, u, &again, &train_err));
		TRAINER_CHECK(again == first);
	}
	train_read(c, &byte, first, 1);
	TRAINER_CHECK(byte == t->rank + 1);

	/* a buffer is one unit's alone; the reduce takes it back */
	TRAIN_OK(shardd_gradient(c, train_zero_unit(c, "other", N, &like), &other, &train_err));
	TRAINER_CHECK((char *)other >= (char *)first + r.bytes ||
		      (char *)other + r.bytes <= (char *)first);
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	TRAIN_FAILS(shardd_reduce(c, u, &train_err), SHARDD_FAILED_PRECONDITION);
	train_leave(c);
	return 0;
}

Test(gather, gradient_buffer_stays_until_the_reduce, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, gradient_trainer, NULL);
}

/* 2,000 units in one call: ids, sizes and parameters are each unit's own. */
static int model_trainer(const struct trainer *t)
{
	enum { UNITS = 2000 };
	static char names[UNITS][16];
	static uint64_t shapes[UNITS];
	static struct shardd_tensor tensors[UNITS];
	static struct shardd_unit_spec specs[UNITS];
	static struct shardd_unit_info info[UNITS], again[UNITS];
	static shardd_ticket tickets[UNITS];
	shardd_client *c = train_join(t);

	for (unsigned i = 0; i < UNITS; i++) {
		snprintf(names[i], sizeof(names[i]), "layer.%u", i);
		shapes[i] = i % 97 + 1;
		tensors[i] = (struct shardd_tensor){ .name = "weight",
						     .shape = &shapes[i],
						     .dims = 1,
						     .init = SHARDD_INIT_CONSTANT,
						     .a = i };
		specs[i] = (struct shardd_unit_spec){ .size = sizeof(specs[i]),
						      .name = names[i],
						      .tensors = &tensors[i],
						      .n_tensors = 1 };
	}
	TRAIN_OK(shardd_register(c, specs, UNITS, info, &train_err));
	TRAIN_OK(shardd_register(c, specs, UNITS, again, &train_err));
	for (unsigned at = 0; at < UNITS; at += 500) { /* max_inflight_ops is 1024 */
		for (unsigned i = at; i < at + 500; i++)
			TRAIN_OK(shardd_submit_init(c,
						    SHARDD_OPTIONS(init, .unit = info[i].unit,
								   .seed = 1,
								   .from = SHARDD_FROM_SEED),
						    &tickets[i], &train_err));
		for (unsigned i = at; i < at + 500; i++)
			TRAIN_OK(shardd_wait(c, tickets[i], -1, NULL, &train_err));
	}
	for (unsigned i = 0; i < UNITS; i++) {
		struct shardd_result r = gather(c, info[i].unit);
		float *params;

		TRAINER_CHECK(info[i].elements == shapes[i] && info[i].unit == again[i].unit);
		TRAINER_CHECK(r.bytes == shapes[i] * sizeof(float));
		params = train_copy(c, r.data, r.bytes);
		for (unsigned k = 0; k < shapes[i]; k++)
			TRAINER_CHECK(params[k] == (float)i);
		free(params);
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(gather, of_a_model_of_2000_units, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end)
{
	trainfix_run(2, model_trainer, NULL);
}
