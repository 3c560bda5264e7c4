/*
 * The trainer's own optimizer: shards come one unit after the other, each once, in the order
 * of the reduces; what is given back is the parameters of the next step.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"

TestSuite(own_optimizer, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { WORLD = 2, UNITS = 3, STEPS = 4 };

/* The last has fewer rows than there are ranks: one rank owns nothing of it. */
static const uint64_t rows[UNITS] = { 50, 33, 1 };

static shardd_unit make_unit(shardd_client *c, unsigned i, enum shardd_layout layout, bool own)
{
	const uint64_t shape[] = { rows[i], 3 };
	struct shardd_tensor tensors[] = {
		{ .name = "weight",
		  .shape = shape,
		  .dims = 2,
		  .init = SHARDD_INIT_CONSTANT,
		  .a = 0.5 + i },
		{ .name = "frozen", .shape = shape, .dims = 1, .frozen = true }
	};
	struct shardd_unit_spec spec = {
		.size = sizeof(spec), .tensors = tensors, .n_tensors = 2, .layout = layout
	};
	struct shardd_unit_info info = { 0 };
	char name[64];

	snprintf(name, sizeof(name), "%s %d %u", own ? "own" : "daemon's", layout, i);
	spec.name = name;
	if (own)
		spec.optimizer.when = SHARDD_OPTIM_BY_TRAINER;
	else
		spec.optimizer = (struct shardd_optimizer){ .kind = SHARDD_SGD, .lr = 0.1 };
	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
	return info.unit;
}

static size_t padded(unsigned i, enum shardd_layout layout)
{
	uint64_t r = layout == SHARDD_LAYOUT_DIM0 ? (rows[i] + 1) / 2 * 2 : rows[i];

	return r * 3;
}

static void hand_in(shardd_client *c, const struct trainer *t, shardd_unit u, unsigned i,
		    enum shardd_layout layout, unsigned step)
{
	float *x = train_numbers(padded(i, layout), t->rank * 100 + step * 10 + i);

	train_reduce(c, u, DTYPE_FP32, x, padded(i, layout));
	free(x);
}

/* SGD as the daemon does it. */
static void step_shard(shardd_client *c, const struct shardd_shard *s)
{
	size_t bytes = s->elements * sizeof(float);
	float *p = train_copy(c, s->params, bytes), *g = train_copy(c, s->gradient, bytes);
	const struct k_sgd sgd = { .p = p, .g = g, .lr = 0.1F, .tail_from = UINT64_MAX };

	kernels_ref()->sgd(&sgd, 0, s->elements);
	train_write(c, s->params, p, bytes);
	free(p);
	free(g);
}

static void compare(shardd_client *c, shardd_unit a, shardd_unit b, unsigned i,
		    enum shardd_layout layout)
{
	size_t bytes = padded(i, layout) * sizeof(float);
	float *x = train_alloc(bytes), *y = train_alloc(bytes);

	train_params(c, a, x, bytes);
	train_params(c, b, y, bytes);
	TRAIN_SAME(x, y, bytes);
	free(x);
	free(y);
}

/* One step; the units come back in the order in which they were reduced: last first. */
static void one_step(shardd_client *c, const struct trainer *t, const shardd_unit *own,
		     const shardd_unit *plain, enum shardd_layout layout, unsigned step)
{
	struct shardd_shard s[UNITS];

	for (unsigned i = UNITS; i-- > 0;)
		hand_in(c, t, own[i], i, layout, step);
	for (unsigned k = 0; k < UNITS; k++) {
		unsigned i = UNITS - 1 - k;

		TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &s[k], &train_err));
		TRAINER_CHECK(s[k].unit == own[i]);
		TRAINER_CHECK(s[k].elements <= padded(i, layout));
		step_shard(c, &s[k]);
	}
	for (unsigned k = 0; k < UNITS; k++)
		TRAIN_OK(shardd_shard_done(c, s[(k + step) % UNITS].unit, &train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	for (unsigned i = 0; i < UNITS; i++)
		hand_in(c, t, plain[i], i, layout, step);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	for (unsigned i = 0; i < UNITS; i++)
		compare(c, own[i], plain[i], i, layout);
}

static int same_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	uint64_t committed = 0;

	for (int layout = SHARDD_LAYOUT_FLAT; layout <= SHARDD_LAYOUT_DIM0; layout++) {
		shardd_unit own[UNITS], plain[UNITS];

		for (unsigned i = 0; i < UNITS; i++)
			own[i] = make_unit(c, i, (enum shardd_layout)layout, true);
		for (unsigned i = 0; i < UNITS; i++)
			plain[i] = make_unit(c, i, (enum shardd_layout)layout, false);
		for (unsigned step = 0; step < STEPS; step++) {
			one_step(c, t, own, plain, (enum shardd_layout)layout, step);
			TRAIN_OK(shardd_commit(c, ++committed, NULL, 0, &train_err));
		}
	}
	train_leave(c);
	return 0;
}

Test(own_optimizer, shards_come_in_order_and_go_back)
{
	trainfix_run(WORLD, same_trainer, NULL);
}

/* ------------------------------------------------- clipped, and reduced twice */

static void hand_in_twice(shardd_client *c, const struct trainer *t, shardd_unit u, unsigned i)
{
	for (unsigned pass = 0; pass < 2; pass++) {
		float *x = train_numbers(padded(i, SHARDD_LAYOUT_DIM0), t->rank * 10 + pass);

		train_fill_gradient(c, u, DTYPE_FP32, x, padded(i, SHARDD_LAYOUT_DIM0));
		TRAIN_OK(shardd_reduce_with(c, SHARDD_OPTIONS(reduce, .unit = u, .more = true),
					    NULL, &train_err));
		free(x);
	}
}

/* What comes last has nothing: the rest is handed out as it is. */
static void end_pass(shardd_client *c, shardd_unit u)
{
	void *gradient;
	bool by_all;

	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	TRAIN_OK(shardd_reduce_unused(c, u, &by_all, &train_err));
	TRAINER_CHECK(by_all);
}

static int clipping_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	shardd_unit own = make_unit(c, 0, SHARDD_LAYOUT_DIM0, true);
	shardd_unit plain = make_unit(c, 0, SHARDD_LAYOUT_DIM0, false);
	double norm, norm_of_plain;
	struct shardd_shard s;
	void *gradient;

	hand_in_twice(c, t, own, 0);
	TRAIN_OK(shardd_clip_grad_norm(c, SHARDD_WORLD, 0.25, 2, &norm, &train_err));
	end_pass(c, own);
	TRAIN_FAILS(shardd_clip_grad_norm(c, SHARDD_WORLD, 0.25, 2, NULL, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_gradient(c, own, &gradient, &train_err));
	TRAIN_FAILS(shardd_reduce_unused(c, own, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("the trainers have its shards");
	TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err));
	step_shard(c, &s);
	TRAIN_OK(shardd_shard_done(c, own, &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	hand_in_twice(c, t, plain, 0);
	TRAIN_OK(shardd_clip_grad_norm(c, SHARDD_WORLD, 0.25, 2, &norm_of_plain, &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAINER_CHECK(norm == norm_of_plain && norm > 0.25);
	compare(c, own, plain, 0, SHARDD_LAYOUT_DIM0);
	train_leave(c);
	return 0;
}

Test(own_optimizer, has_what_was_reduced_twice_and_clipped)
{
	trainfix_run(WORLD, clipping_trainer, NULL);
}

/* A pass that nothing was reduced in hands nothing out. */
static int idle_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	shardd_unit own = make_unit(c, 0, SHARDD_LAYOUT_DIM0, true);
	struct shardd_shard s;

	end_pass(c, own);
	shardd_set_timeout(c, 100);
	TRAIN_FAILS(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err), SHARDD_DEADLINE_EXCEEDED);
	shardd_set_timeout(c, 0);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	hand_in_twice(c, t, own, 0);
	TRAIN_OK(shardd_step_with(
		c,
		&(struct shardd_step_options){ .size = sizeof(struct shardd_step_options),
					       .discard = true },
		NULL, &train_err));
	end_pass(c, own);
	shardd_set_timeout(c, 100);
	TRAIN_FAILS(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err), SHARDD_DEADLINE_EXCEEDED);
	shardd_set_timeout(c, 0);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	hand_in_twice(c, t, own, 0); /* and a Step that nothing was handed out before */
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	end_pass(c, own);
	shardd_set_timeout(c, 100);
	TRAIN_FAILS(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err), SHARDD_DEADLINE_EXCEEDED);
	train_leave(c);
	return 0;
}

Test(own_optimizer, has_nothing_where_nothing_was_reduced)
{
	trainfix_run(WORLD, idle_trainer, NULL);
}

/* ----------------------------------------------------------------- wrong calls */

static int wrong_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	shardd_unit own = make_unit(c, 0, SHARDD_LAYOUT_FLAT, true);
	shardd_unit plain = make_unit(c, 1, SHARDD_LAYOUT_FLAT, false);
	struct shardd_shard s;
	const void *full;

	TRAIN_FAILS(shardd_shard_done(c, plain, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("is not BY_TRAINER");
	TRAIN_FAILS(shardd_shard_done(c, own, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("its last Reduce has not come");
	TRAIN_FAILS(shardd_shard_done(c, 99, &train_err), SHARDD_NOT_FOUND);
	TRAIN_FAILS(shardd_next_shard(c, 99, &s, &train_err), SHARDD_NOT_FOUND);
	shardd_set_timeout(c, 100);
	TRAIN_FAILS(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err), SHARDD_DEADLINE_EXCEEDED);
	told_now("a unit whose gradient is reduced");
	shardd_set_timeout(c, 0);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	hand_in(c, t, own, 0, SHARDD_LAYOUT_FLAT, 0);
	TRAIN_FAILS(shardd_shard_done(c, own, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("has not been handed out");
	TRAIN_FAILS(shardd_gather(c, own, &full, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("has not given its shard back");
	TRAIN_FAILS(shardd_step(c, SHARDD_WORLD, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("have not given back their shard");
	TRAIN_FAILS(shardd_clip_grad_norm(c, SHARDD_WORLD, 1, 2, NULL, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	told_now("the trainers' own");
	TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err));
	step_shard(c, &s);
	TRAIN_OK(shardd_shard_done(c, own, &train_err));
	TRAIN_FAILS(shardd_shard_done(c, own, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	shardd_set_timeout(c, 100);
	TRAIN_FAILS(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err), SHARDD_DEADLINE_EXCEEDED);
	shardd_set_timeout(c, 0);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	train_leave(c);
	return 0;
}

Test(own_optimizer, wrong_calls_are_refused_in_words)
{
	trainfix_run(WORLD, wrong_trainer, NULL);
}

/* ------------------------------------------------------------------------ death */

struct play {
	stage go;
	stage at[WORLD];
	pid_t pids[WORLD];
	bool give_back; /* rank 1 does, before it dies */
	enum shardd_resume resume;
	float before[150];
};

/* Rank 0 sees what the death of rank 1 has left. */
static int dying_trainer(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = train_join_resuming(c, t, SHARDD_EPHEMERAL, p->resume);
	shardd_unit own = make_unit(c, 0, SHARDD_LAYOUT_FLAT, true);
	struct shardd_shard s;

	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	if (t->rank == 0)
		train_params(c, own, p->before, sizeof(p->before));
	hand_in(c, t, own, 0, SHARDD_LAYOUT_FLAT, 0);
	TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err));
	if (t->rank == 1) {
		if (p->give_back) {
			step_shard(c, &s);
			TRAIN_OK(shardd_shard_done(c, own, &train_err));
		}
		stage_set(&p->at[1], 1);
		for (;;)
			pause();
	}
	stage_set(&p->at[0], 1);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	me = train_join_as(c, t, SHARDD_EPHEMERAL);
	TRAINER_CHECK(me.has_commit && me.step == 1);
	TRAINER_CHECK(me.torn == (p->give_back && p->resume == SHARDD_RESUME_NO_COPY));
	if (!me.torn) {
		float now[150];

		train_params(c, own, now, sizeof(now));
		TRAIN_SAME(now, p->before, sizeof(now));
	}
	stage_set(&p->at[0], 2);
	train_leave(c);
	return 0;
}

static void dies(bool give_back, enum shardd_resume resume)
{
	struct play *p = trainer_shared(sizeof(*p));

	p->give_back = give_back;
	p->resume = resume;
	for (uint32_t r = 0; r < WORLD; r++)
		p->pids[r] = trainer_start(&trainfix, "dies", r, WORLD, dying_trainer, p);
	for (uint32_t r = 0; r < WORLD; r++)
		AWAIT(atomic_load(&p->at[r]) == 1, 30);
	fail_kill(p->pids[1]);
	stage_set(&p->go, 1);
	cr_assert_eq(trainer_wait(p->pids[0], 60), 0);
}

Test(own_optimizer, a_death_before_a_shard_is_given_back_changes_nothing)
{
	dies(false, SHARDD_RESUME_NO_COPY);
}

Test(own_optimizer, a_death_after_one_was_given_back_changes_nothing)
{
	dies(true, SHARDD_RESUME_APPLIED);
}

Test(own_optimizer, a_death_after_one_was_given_back_tears_a_job_without_a_copy)
{
	dies(true, SHARDD_RESUME_NO_COPY);
}
