#include "trainfix.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"

struct daemonfix trainfix;
/* mold 1.10 gives a program that does not start, now and then, if these sections are aligned less than read-only
 * data: memory that the loader protects then begins in a page that is not mapped. */
_Thread_local struct shardd_error train_err __attribute__((aligned(64)));

static unsigned fds_at_begin;
static uint64_t bytes_at_begin;

void trainfix_begin(void)
{
	fdcheck_begin();
	daemonfix_start(&trainfix, NULL);
	daemonfix_check_alive(&trainfix);
	fds_at_begin = daemonfix_fds(&trainfix);
	bytes_at_begin = daemonfix_bytes(&trainfix);
}

void trainfix_end(void)
{
	daemonfix_settles(&trainfix, fds_at_begin, bytes_at_begin);
	daemonfix_stop(&trainfix);
	fdcheck_end();
}

void trainfix_run(uint32_t world, trainer_fn fn, void *arg)
{
	trainers_run(&trainfix, "test", world, fn, arg, 60);
}

/* ------------------------------------------------------------------- checks */

void train_ok(int rc, const char *call, const char *file, int line)
{
	if (rc < 0)
		fprintf(stderr, "%s: %s\n", shardd_code_name(rc), train_err.text);
	trainer_check(rc >= 0, call, file, line);
}

void train_fails(int rc, enum shardd_code code, const char *call, const char *file, int line)
{
	if (rc != -(int)code)
		fprintf(stderr, "%s instead of %s: %s\n", shardd_code_name(rc),
			shardd_code_name((int)code), rc ? train_err.text : "");
	trainer_check(rc == -(int)code, call, file, line);
}

void train_same(const void *got, const void *want, size_t bytes, const char *what, const char *file,
		int line)
{
	size_t at = 0;
	uint32_t a = 0, b = 0;

	if (memcmp(got, want, bytes) == 0)
		return;
	while (((const uint8_t *)got)[at] == ((const uint8_t *)want)[at])
		at++;
	at &= ~(size_t)3;
	memcpy(&a, (const uint8_t *)got + at, bytes - at < 4 ? bytes - at : 4);
	memcpy(&b, (const uint8_t *)want + at, bytes - at < 4 ? bytes - at : 4);
	fprintf(stderr, "at byte %zu of %zu: 0x%08x instead of 0x%08x\n", at, bytes, a, b);
	trainer_check(false, what, file, line);
}

void *train_alloc(size_t bytes)
{
	void *p = calloc(1, bytes ? bytes : 1);

	TRAINER_CHECK(p);
	return p;
}

void train_fill(float *x, size_t n, uint64_t seed)
{
	const struct k_fill a = { .dst = x, .seed = seed, .kind = FILL_UNIFORM, .a = -1, .b = 1 };

	kernels_ref()->fill(&a, 0, n);
}

float *train_numbers(size_t n, uint64_t seed)
{
	float *x = train_alloc(n * sizeof(*x));

	train_fill(x, n, seed);
	return x;
}

/* --------------------------------------------------- memory that ops hand out */

bool train_on_host(void)
{
	return strcmp(daemonfix_backend(), "host") == 0;
}

struct k_factor train_divide_by(float by, enum dtype t)
{
	if (by == 1 || train_on_host())
		return k_divide_by(by, t);
	return (struct k_factor){ K_FACTOR_MUL, t, (float)(1 / (double)by) };
}

void train_not_here(const char *what)
{
	fprintf(stderr, "not on this backend: %s\n", what);
}

void train_write(shardd_client *c, void *dst, const void *src, size_t bytes)
{
	TRAIN_OK(shardd_write(c, dst, src, bytes, &train_err));
}

void train_read(shardd_client *c, void *dst, const void *src, size_t bytes)
{
	TRAIN_OK(shardd_read(c, dst, src, bytes, &train_err));
}

void *train_copy(shardd_client *c, const void *src, size_t bytes)
{
	void *copy = train_alloc(bytes);

	train_read(c, copy, src, bytes);
	return copy;
}

void train_set(shardd_client *c, void *dst, uint8_t value, size_t bytes)
{
	void *values = train_alloc(bytes);

	memset(values, value, bytes);
	train_write(c, dst, values, bytes);
	free(values);
}

float train_peek(shardd_client *c, const void *at)
{
	float value;

	train_read(c, &value, at, sizeof(value));
	return value;
}

void train_poke(shardd_client *c, void *at, float value)
{
	train_write(c, at, &value, sizeof(value));
}

void train_has(shardd_client *c, const void *at, const void *want, size_t bytes, const char *what,
	       const char *file, int line)
{
	void *got = train_copy(c, at, bytes);

	train_same(got, want, bytes, what, file, line);
	free(got);
}

/* ----------------------------------------------------------- what trainers do */

shardd_client *train_connect(const struct trainer *t)
{
	struct shardd_options o = { .size = sizeof(o), .socket = t->socket, .name = "test" };
	shardd_client *c = NULL;

	TRAIN_OK(shardd_connect(&o, &c, &train_err));
	return c;
}

struct shardd_membership train_join_resuming(shardd_client *c, const struct trainer *t,
					     enum shardd_lifetime lifetime,
					     enum shardd_resume resume)
{
	struct shardd_job job = { .size = sizeof(job),
				  .name = t->job,
				  .world_size = t->world,
				  .rank = t->rank,
				  .lifetime = lifetime,
				  .op_timeout_ms = 50000,
				  .resume = resume };
	struct shardd_membership me;

	TRAIN_OK(shardd_join(c, &job, &me, &train_err));
	TRAINER_CHECK(me.rank == t->rank && me.world_size == t->world && me.epoch > 0);
	return me;
}

struct shardd_membership train_join_as(shardd_client *c, const struct trainer *t,
				       enum shardd_lifetime lifetime)
{
	return train_join_resuming(c, t, lifetime, 0);
}

shardd_client *train_join(const struct trainer *t)
{
	shardd_client *c = train_connect(t);

	train_join_as(c, t, SHARDD_EPHEMERAL);
	return c;
}

void train_leave(shardd_client *c)
{
	TRAIN_OK(shardd_leave(c, &train_err));
	shardd_close(c);
}

struct shardd_unit_info train_register(shardd_client *c, const char *name, uint64_t n,
				       const struct shardd_unit_spec *like)
{
	struct shardd_tensor tensor = { .name = "weight", .shape = &n, .dims = 1 };
	struct shardd_unit_spec spec = like ? *like : (struct shardd_unit_spec){ 0 };
	struct shardd_unit_info info;

	spec.size = sizeof(spec);
	spec.name = name;
	spec.tensors = &tensor;
	spec.n_tensors = 1;
	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	TRAINER_CHECK(info.unit > 0 && info.elements == n);
	return info;
}

shardd_unit train_zero_unit(shardd_client *c, const char *name, uint64_t n,
			    const struct shardd_unit_spec *like)
{
	struct shardd_unit_info info = train_register(c, name, n, like);

	TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
	return info.unit;
}

void train_params(shardd_client *c, shardd_unit u, void *ret, size_t bytes)
{
	const void *data;

	TRAIN_OK(shardd_gather(c, u, &data, &train_err));
	train_read(c, ret, data, bytes);
	TRAIN_OK(shardd_release(c, u, &train_err));
}

void train_fill_gradient(shardd_client *c, shardd_unit u, enum dtype dtype, const float *values,
			 size_t n)
{
	size_t bytes = n * dtype_size(dtype);
	struct k_cast cast = { .dst = train_alloc(bytes),
			       .src = values,
			       .dst_dtype = dtype,
			       .src_dtype = DTYPE_FP32 };
	void *data;

	TRAIN_OK(shardd_gradient(c, u, &data, &train_err));
	kernels_ref()->cast(&cast, 0, n);
	train_write(c, data, cast.dst, bytes);
	free(cast.dst);
}

void train_reduce(shardd_client *c, shardd_unit u, enum dtype dtype, const float *values, size_t n)
{
	train_fill_gradient(c, u, dtype, values, n);
	TRAIN_OK(shardd_reduce(c, u, &train_err));
}
