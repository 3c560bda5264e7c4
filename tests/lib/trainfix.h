/*
 * What the tests of training have in common: a daemon for each test, and what a
 * trainer does all the time. Trainers check their results themselves: a call of
 * train_* or TRAIN_* that does not end as it must ends the trainer with 1.
 */
#ifndef SHARDD_TESTS_TRAINFIX_H
#define SHARDD_TESTS_TRAINFIX_H

#include <shardd/shardd.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemonfix.h"
#include "kernels.h"

/* .init and .fini of a test: the daemon, and that at the end it has the descriptors and
 * bytes it began with, stops cleanly, and that the test leaks no descriptor. */
extern struct daemonfix trainfix;
void trainfix_begin(void);
void trainfix_end(void);
/* @world trainers run @fn, at most 60 s. */
void trainfix_run(uint32_t world, trainer_fn fn, void *arg);

/* The error of the last call; passed to all calls of the library. */
extern _Thread_local struct shardd_error train_err;

#define TRAIN_OK(call)          train_ok((call), #call, __FILE__, __LINE__)
#define TRAIN_FAILS(call, code) train_fails((call), (code), #call, __FILE__, __LINE__)
/* Equal bytes; says at which element of 4 bytes they differ. */
#define TRAIN_SAME(got, want, bytes) train_same((got), (want), (bytes), #got, __FILE__, __LINE__)
void train_ok(int rc, const char *call, const char *file, int line);
void train_fails(int rc, enum shardd_code code, const char *call, const char *file, int line);
void train_same(const void *got, const void *want, size_t bytes, const char *what, const char *file,
		int line);

/* Connect; connect and join (an ephemeral job); leave and close. */
shardd_client *train_connect(const struct trainer *t);
shardd_client *train_join(const struct trainer *t);
void train_leave(shardd_client *c);
/* Join @t's job and say what is in it. */
struct shardd_membership train_join_as(shardd_client *c, const struct trainer *t,
				       enum shardd_lifetime lifetime);
/* The same of a job that goes on from there after a loss. */
struct shardd_membership train_join_resuming(shardd_client *c, const struct trainer *t,
					     enum shardd_lifetime lifetime,
					     enum shardd_resume resume);

/* Register a unit of one tensor of @n elements like @like (NULL: fp32, no optimizer)
 * under @name. */
struct shardd_unit_info train_register(shardd_client *c, const char *name, uint64_t n,
				       const struct shardd_unit_spec *like);
/* The same, and all parameters become 0 (collective). */
shardd_unit train_zero_unit(shardd_client *c, const char *name, uint64_t n,
			    const struct shardd_unit_spec *like);

/* Is the daemon's memory ordinary memory of this machine, and not a GPU's? */
bool train_on_host(void);
/* What PyTorch's tensor.div_(@by) is on the daemon's devices, in @t. */
struct k_factor train_divide_by(float by, enum dtype t);
/* Say that the rest of a test is about @what, which a GPU does not have. */
void train_not_here(const char *what);

/* What ops hand out (gather, gradient, alloc) may be a GPU's memory, which a process
 * cannot touch itself: these write and read it, whatever it is. */
void train_write(shardd_client *c, void *dst, const void *src, size_t bytes);
void train_read(shardd_client *c, void *dst, const void *src, size_t bytes);
/* A copy of it, the caller's to free. */
void *train_copy(shardd_client *c, const void *src, size_t bytes);
/* All @bytes become @value, as memset does it. */
void train_set(shardd_client *c, void *dst, uint8_t value, size_t bytes);
/* One number. */
float train_peek(shardd_client *c, const void *at);
void train_poke(shardd_client *c, void *at, float value);
/* As TRAIN_SAME for what an op handed out. */
#define TRAIN_HAS(c, at, want, bytes) train_has((c), (at), (want), (bytes), #at, __FILE__, __LINE__)
void train_has(shardd_client *c, const void *at, const void *want, size_t bytes, const char *what,
	       const char *file, int line);

/* Gather, copy @bytes out, release. */
void train_params(shardd_client *c, shardd_unit u, void *ret, size_t bytes);

/* The gradient buffer of @u, filled with @values (fp32), narrowed to @dtype; then the
 * reduce. */
void train_fill_gradient(shardd_client *c, shardd_unit u, enum dtype dtype, const float *values,
			 size_t n);
void train_reduce(shardd_client *c, shardd_unit u, enum dtype dtype, const float *values, size_t n);

/* @n numbers in [-1, 1) that depend on @seed only; the second form allocates. */
void train_fill(float *x, size_t n, uint64_t seed);
float *train_numbers(size_t n, uint64_t seed);

/* malloc, zeroed; never NULL. */
void *train_alloc(size_t bytes);

#endif
