/*
 * SetFactors: a unit whose factors are changed has the bits of one that was registered with
 * them; what is refused, and that the end of the epoch forgets them.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

TestSuite(factors, .init = trainfix_begin, .fini = trainfix_end, .timeout = 60);

enum { N = 131 };

struct way {
	enum shardd_reduce_profile profile;
	enum shardd_strategy strategy;
	enum shardd_dtype gradient, reduce;
	double pre, post, factor;
	bool force;
};

static const struct way ways[] = {
	{ SHARDD_PROFILE_FAIRSCALE, SHARDD_SHARD, SHARDD_FP32, SHARDD_FP32, 1, 5, 0, false },
	{ SHARDD_PROFILE_FAIRSCALE, SHARDD_SHARD, SHARDD_BF16, SHARDD_BF16, 3, 0, 0, false },
	{ SHARDD_PROFILE_XLA, SHARDD_SHARD, SHARDD_BF16, SHARDD_FP32, 3, 1, 0, false },
	{ SHARDD_PROFILE_FSDP1_HOOK, SHARDD_REPLICATE, SHARDD_FP32, SHARDD_FP16, 7, 1.5, 0, false },
	{ SHARDD_PROFILE_FSDP2, SHARDD_SHARD, SHARDD_FP32, SHARDD_FP32, 0, 0, 5, false },
	{ SHARDD_PROFILE_FSDP2, SHARDD_SHARD, SHARDD_BF16, SHARDD_FP32, 0, 0, 6, true },
	{ SHARDD_PROFILE_FSDP2, SHARDD_REPLICATE, SHARDD_FP32, SHARDD_FP16, 0, 0, 6, false },
};

static shardd_unit make(shardd_client *c, const char *name, const struct way *w, bool with)
{
	struct shardd_unit_spec spec = { .gradient_dtype = w->gradient,
					 .reduce_dtype = w->reduce,
					 .reduce_profile = w->profile,
					 .strategy = w->strategy,
					 .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };

	if (with) {
		spec.pre_divide = w->pre;
		spec.post_divide = w->post;
		spec.divide_factor = w->factor;
		spec.force_sum = w->force;
	}
	return train_zero_unit(c, name, N, &spec);
}

static struct shardd_set_factors_options factors_of(const struct way *w)
{
	return (struct shardd_set_factors_options){ .size = sizeof(
							    struct shardd_set_factors_options),
						    .pre_divide = w->pre,
						    .post_divide = w->post,
						    .divide_factor = w->factor,
						    .force_sum = w->force };
}

static struct shardd_set_factors_options open = { .size = sizeof(open) };

static void reduce(shardd_client *c, const struct trainer *t, shardd_unit u, const struct way *w,
		   unsigned pass)
{
	float *x = train_numbers(N, t->rank * 13 + pass);

	train_reduce(c, u, (enum dtype)w->gradient, x, N);
	free(x);
}

/* Of @u and @like after a step; @differ: they must not be alike. */
static void compare(shardd_client *c, shardd_unit u, shardd_unit like, bool differ)
{
	float a[N], b[N];

	train_params(c, u, a, sizeof(a));
	train_params(c, like, b, sizeof(b));
	TRAINER_CHECK(a[0] != 0 && (memcmp(a, b, sizeof(a)) != 0) == differ);
}

/* changed: registered without factors, and fixed: with them; plain: never has any. A pass
 * that accumulates before the change is divided by what is said then. */
static void one_way(shardd_client *c, const struct trainer *t, const struct way *w, unsigned k)
{
	const struct shardd_set_factors_options set = factors_of(w);
	struct shardd_set_factors_options now;
	shardd_unit changed, fixed, plain;
	char name[32];

	snprintf(name, sizeof(name), "changed %u", k);
	changed = make(c, name, w, false);
	snprintf(name, sizeof(name), "fixed %u", k);
	fixed = make(c, name, w, true);
	snprintf(name, sizeof(name), "plain %u", k);
	plain = make(c, name, w, false);
	for (unsigned pass = 0; pass < 2; pass++) {
		const shardd_unit all[] = { changed, fixed, plain };

		for (unsigned i = 0; i < 3; i++) {
			float *x = train_numbers(N, t->rank + 99);

			train_fill_gradient(c, all[i], (enum dtype)w->gradient, x, N);
			TRAIN_OK(shardd_accumulate(c, all[i], &train_err));
			free(x);
		}
		now = pass ? open : set;
		now.unit = changed;
		TRAIN_OK(shardd_set_factors(c, &now, &train_err));
		now.unit = fixed;
		TRAIN_OK(shardd_set_factors(c, &now, &train_err));
		for (unsigned i = 0; i < 3; i++)
			reduce(c, t, all[i], w, pass);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		compare(c, changed, fixed, false);
		compare(c, changed, plain, true);
	}
}

static int changed_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);

	for (unsigned k = 0; k < ARRAY_SIZE(ways); k++)
		one_way(c, t, &ways[k], k);
	train_leave(c);
	return 0;
}

Test(factors, a_changed_unit_has_the_bits_of_one_registered_so)
{
	trainfix_run(4, changed_trainer, NULL);
	trainfix_run(3, changed_trainer, NULL);
}

/* What is open again is what it is for a unit that was registered open: nothing is left of
 * what was set. */
static int open_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);

	for (unsigned k = 0; k < ARRAY_SIZE(ways); k++) {
		struct shardd_set_factors_options set = factors_of(&ways[k]);
		char name[32];
		shardd_unit with, without;

		snprintf(name, sizeof(name), "with %u", k);
		with = make(c, name, &ways[k], true);
		snprintf(name, sizeof(name), "without %u", k);
		without = make(c, name, &ways[k], false);
		set.unit = without;
		TRAIN_OK(shardd_set_factors(c, &set, &train_err));
		open.unit = without;
		TRAIN_OK(shardd_set_factors(c, &open, &train_err));
		open.unit = with;
		TRAIN_OK(shardd_set_factors(c, &open, &train_err));
		reduce(c, t, with, &ways[k], 1);
		reduce(c, t, without, &ways[k], 1);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		compare(c, with, without, false);
	}
	train_leave(c);
	return 0;
}

Test(factors, what_is_open_is_not_what_was_registered)
{
	trainfix_run(3, open_trainer, NULL);
}

/* ------------------------------------------------------------------- refusals */

static int refused_trainer(const struct trainer *t)
{
	const struct way *w = &ways[4];
	struct shardd_set_factors_options f = factors_of(w), mine = f;
	const struct way hybrid = {
		SHARDD_PROFILE_FSDP2, SHARDD_REPLICATE, SHARDD_FP32, SHARDD_FP32, 0, 0, 0, false
	};
	const struct way ddp = {
		SHARDD_PROFILE_DDP, SHARDD_REPLICATE, SHARDD_FP32, SHARDD_FP32, 0, 0, 0, false
	};
	shardd_client *c = train_join(t);
	shardd_unit u = make(c, "u", w, false), deferred = make(c, "deferred", &hybrid, false);
	shardd_unit bucket = make(c, "bucket", &ddp, false);
	float zeros[N] = { 0 };

	mine.divide_factor = 2 + t->rank;
	mine.unit = u;
	TRAIN_FAILS(shardd_set_factors(c, &mine, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "divide_factor 2") &&
		      strstr(train_err.text, "divide_factor 3"));
	f.unit = bucket;
	TRAIN_FAILS(shardd_set_factors(c, &f, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAINER_CHECK(strstr(train_err.text, "reduce_profile DDP: only FSDP2 has it"));
	f.size--;
	f.unit = u;
	TRAIN_FAILS(shardd_set_factors(c, &f, &train_err), SHARDD_INVALID_ARGUMENT);
	f.size++;
	train_fill_gradient(c, u, DTYPE_FP32, zeros, N);
	f.unit = u;
	TRAIN_FAILS(shardd_set_factors(c, &f, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "has its gradient buffer"));
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	f.unit = u;
	TRAIN_OK(shardd_set_factors(c, &f, &train_err));
	train_fill_gradient(c, deferred, DTYPE_FP32, zeros, N);
	TRAIN_OK(shardd_reduce_with(c, SHARDD_OPTIONS(reduce, .unit = deferred, .deferred = true),
				    NULL, &train_err));
	f.unit = deferred;
	TRAIN_FAILS(shardd_set_factors(c, &f, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "its all-reduce is deferred"));
	train_fill_gradient(c, deferred, DTYPE_FP32, zeros, N);
	TRAIN_OK(shardd_reduce(c, deferred, &train_err));
	f.unit = deferred;
	TRAIN_OK(shardd_set_factors(c, &f, &train_err));
	train_leave(c);
	return 0;
}

Test(factors, they_are_changed_by_all_and_between_passes)
{
	trainfix_run(2, refused_trainer, NULL);
}

static int guarded_trainer(const struct trainer *t)
{
	const struct shardd_unit_spec spec = { .reduce_profile = SHARDD_PROFILE_FSDP2,
					       .guarded = true,
					       .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	struct shardd_set_factors_options f = { .size = sizeof(f), .divide_factor = 3 };
	shardd_client *c = train_join(t);
	shardd_unit u = train_zero_unit(c, "u", N, &spec);

	TRAIN_OK(shardd_begin_pass(c, u, SHARDD_FORWARD, NULL, &train_err));
	f.unit = u;
	TRAIN_FAILS(shardd_set_factors(c, &f, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "in state FORWARD") &&
		      strstr(train_err.text, "it must be IDLE"));
	TRAIN_OK(shardd_end_pass(c, u, SHARDD_FORWARD, true, &train_err));
	f.unit = u;
	TRAIN_OK(shardd_set_factors(c, &f, &train_err));
	train_leave(c);
	return 0;
}

Test(factors, a_guarded_unit_must_be_idle)
{
	trainfix_run(2, guarded_trainer, NULL);
}
