/* Buckets under way, and what else is asked of their units meanwhile: another ddp, a Reduce, a
 * Step. Each has its turn, so that none takes away what another still needs. And what is left
 * behind by a pass without a rank's inputs, by a policy, and by an epoch before. */
#include <criterion/criterion.h>
#include <string.h>

#include "trainfix.h"

TestSuite(ddp_beside, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

/* Large enough to be under way for a while. */
enum { TENSORS = 2, N = 300000, SMALL = 100, ROUNDS = 10 };

static const uint32_t all[TENSORS] = { 0, 1 };

static shardd_unit make_unit(shardd_client *c, uint64_t n, enum shardd_optimizer_when when)
{
	const struct shardd_tensor tensors[TENSORS] = {
		{ .name = "a", .shape = &n, .dims = 1 },
		{ .name = "b", .shape = &n, .dims = 1 },
	};
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = "unit",
					 .tensors = tensors,
					 .n_tensors = TENSORS,
					 .strategy = SHARDD_REPLICATE,
					 .reduce_profile = SHARDD_PROFILE_DDP,
					 .optimizer = { .when = when } };
	struct shardd_unit_info info;

	if (when != SHARDD_OPTIM_BY_TRAINER)
		spec.optimizer = (struct shardd_optimizer){ SHARDD_SGD, .lr = 1, .when = when };
	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 7, &train_err));
	return info.unit;
}

static shardd_ddp make_ddp(shardd_client *c, shardd_unit u, uint64_t bucket_bytes)
{
	struct shardd_ddp_create_options spec = { .size = sizeof(spec),
						  .units = &u,
						  .n_units = 1,
						  .bucket_limits = &bucket_bytes,
						  .n_bucket_limits = 1 };
	shardd_ddp d;

	TRAIN_OK(shardd_ddp_create(c, &spec, &d, NULL, &train_err));
	return d;
}

/* In a pass, with gradients of @value. */
static void test_ddp_beside_begin(shardd_client *c, shardd_ddp d, uint64_t n, float value)
{
	struct shardd_ddp_view views[TENSORS];
	float *x = train_alloc(n * sizeof(float));

	for (uint64_t i = 0; i < n; i++)
		x[i] = value;
	TRAIN_OK(shardd_ddp_forward(c, d, views, TENSORS, &train_err));
	for (unsigned k = 0; k < TENSORS; k++)
		train_write(c, views[k].data, x, n * sizeof(float));
	TRAIN_OK(shardd_ddp_backward(c, d, NULL, 0, NULL, 0, &train_err));
	free(x);
}

static void is_late(int rc)
{
	TRAINER_CHECK(rc == -SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "reduced for the last time"));
}

static void check_params(shardd_client *c, shardd_unit u, uint64_t n, float want)
{
	size_t bytes = TENSORS * n * sizeof(float);
	float *p = train_alloc(bytes);

	train_params(c, u, p, bytes);
	for (uint64_t i = 0; i < TENSORS * n; i++)
		TRAINER_CHECK(p[i] == want);
	free(p);
}

/* The first of two ddps gives out the shares; the other one comes too late. */
static int twice_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	shardd_unit u = make_unit(c, N, SHARDD_OPTIM_BY_TRAINER);
	shardd_ddp d[2] = { make_ddp(c, u, 1 << 30), make_ddp(c, u, 1 << 30) };
	struct shardd_shard s;

	for (unsigned round = 0; round < ROUNDS; round++) {
		for (unsigned i = 0; i < 2; i++)
			test_ddp_beside_begin(c, d[i], N, 1);
		for (unsigned i = 0; i < 2; i++)
			TRAIN_OK(shardd_ddp_ready(c, d[i], all, TENSORS, &train_err));
		TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err));
		TRAIN_OK(shardd_ddp_finish(c, d[0], NULL, 0, &train_err));
		is_late(shardd_ddp_finish(c, d[1], NULL, 0, &train_err));
		TRAIN_OK(shardd_shard_done(c, u, &train_err));
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(ddp_beside, shares_are_given_out_once)
{
	trainfix_run(2, twice_trainer, NULL);
}

/* The optimizer in backward gives the gradient back, which nobody else has by then. */
static int reduce_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	shardd_unit u = make_unit(c, N, SHARDD_OPTIM_IN_BACKWARD);
	shardd_ddp d = make_ddp(c, u, 1 << 30);
	shardd_ticket reduce;

	for (unsigned round = 0; round < ROUNDS; round++) {
		TRAIN_OK(shardd_gradient(c, u, NULL, &train_err));
		test_ddp_beside_begin(c, d, N, 1);
		TRAIN_OK(shardd_ddp_ready(c, d, all, TENSORS, &train_err));
		TRAIN_OK(shardd_submit_reduce(c, SHARDD_OPTIONS(reduce, .unit = u), &reduce,
					      &train_err));
		TRAIN_OK(shardd_ddp_finish(c, d, NULL, 0, &train_err));
		is_late(shardd_wait(c, reduce, -1, NULL, &train_err));
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	}
	check_params(c, u, N, -(float)ROUNDS);
	train_leave(c);
	return 0;
}

Test(ddp_beside, a_reduce_comes_after_the_bucket)
{
	trainfix_run(2, reduce_trainer, NULL);
}

/* What a Reduce has brought before is a gradient that the Step would use and give back. */
static int step_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	shardd_unit u = make_unit(c, N, SHARDD_OPTIM_IN_BACKWARD);
	shardd_ddp d = make_ddp(c, u, 1 << 30);
	shardd_ticket more;

	for (unsigned round = 0; round < ROUNDS; round++) {
		TRAIN_OK(shardd_gradient(c, u, NULL, &train_err));
		TRAIN_OK(shardd_submit_reduce(c, SHARDD_OPTIONS(reduce, .unit = u, .more = true),
					      &more, &train_err));
		TRAIN_OK(shardd_wait(c, more, -1, NULL, &train_err));
		test_ddp_beside_begin(c, d, N, 1);
		TRAIN_OK(shardd_ddp_ready(c, d, all, TENSORS, &train_err));
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		check_params(c, u, N, -(float)(round + 1));
		TRAIN_OK(shardd_ddp_finish(c, d, NULL, 0, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(ddp_beside, a_step_comes_after_the_bucket)
{
	trainfix_run(2, step_trainer, NULL);
}

/* Rank 0 has no input in the second pass, so that it has begun as many after the third as rank 1
 * after the second: a unit is stepped with all of its tensors none the less. */
static int uneven_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	shardd_unit u = make_unit(c, SMALL, SHARDD_OPTIM_IN_BACKWARD);
	shardd_ddp d = make_ddp(c, u, SMALL * sizeof(float));

	for (unsigned pass = 1; pass <= 4; pass++) {
		if (pass != 2 || t->rank) {
			test_ddp_beside_begin(c, d, SMALL, 2);
			TRAIN_OK(shardd_ddp_ready(c, d, all, TENSORS, &train_err));
			TRAIN_OK(shardd_ddp_finish(c, d, NULL, 0, &train_err));
			TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		}
		if (pass == 2)
			TRAIN_OK(
				shardd_join_uneven(c, SHARDD_WORLD, false, NULL, NULL, &train_err));
	}
	check_params(c, u, SMALL, -7);
	train_leave(c);
	return 0;
}

Test(ddp_beside, a_rank_that_had_no_input_steps_whole_units_again)
{
	trainfix_run(2, uneven_trainer, NULL);
}

/* ------------------------------------------------------------- own optimizers, besides */

/* What a policy keeps is let go of when the shares come, also by who has ended its pass without
 * sync and so cannot let go of it himself. */
static int kept_trainer(const struct trainer *t)
{
	const uint64_t n = SMALL;
	const struct shardd_tensor tensor = { .name = "a", .shape = &n, .dims = 1 };
	const struct shardd_unit_spec spec = { .size = sizeof(spec),
					       .name = "unit",
					       .tensors = &tensor,
					       .n_tensors = 1,
					       .strategy = SHARDD_REPLICATE,
					       .reduce_profile = SHARDD_PROFILE_DDP,
					       .optimizer = { .when = SHARDD_OPTIM_BY_TRAINER },
					       .reshard = SHARDD_RESHARD_NEVER,
					       .guarded = true };
	shardd_client *c = train_join(t);
	struct shardd_unit_info info;
	struct shardd_ddp_view view;
	struct shardd_shard s;
	shardd_ddp d;

	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	TRAIN_OK(shardd_init_seed(c, info.unit, 7, &train_err));
	d = make_ddp(c, info.unit, 1 << 20);
	for (unsigned round = 0; round < ROUNDS; round++) {
		TRAIN_OK(shardd_ddp_forward(c, d, &view, 1, &train_err));
		TRAIN_OK(shardd_ddp_backward(c, d, NULL, 0, NULL, 0, &train_err));
		TRAIN_OK(shardd_begin_pass(c, info.unit, SHARDD_BACKWARD, NULL, &train_err));
		for (unsigned i = 0; i < 2; i++) {
			if (i == round % 2) {
				TRAIN_OK(shardd_ddp_ready(c, d, all, 1, &train_err));
				TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err));
			} else {
				TRAIN_OK(shardd_end_pass(c, info.unit, SHARDD_BACKWARD, false,
							 &train_err));
			}
		}
		TRAIN_OK(shardd_ddp_finish(c, d, NULL, 0, &train_err));
		TRAIN_OK(shardd_shard_done(c, info.unit, &train_err));
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(ddp_beside, what_a_policy_keeps_does_not_hold_up_shares)
{
	trainfix_run(2, kept_trainer, NULL);
}

/* A ddp is over with its epoch: what was refused because of it is allowed then. */
static int next_epoch_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);

	(void)make_ddp(c, make_unit(c, SMALL, SHARDD_OPTIM_BY_TRAINER), 1 << 20);
	TRAIN_FAILS(shardd_join_uneven(c, SHARDD_WORLD, false, NULL, NULL, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (t->rank)
		TRAIN_OK(shardd_leave(c, &train_err));
	else
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	(void)train_join_as(c, t, SHARDD_EPHEMERAL);
	(void)make_unit(c, SMALL, SHARDD_OPTIM_BY_TRAINER);
	TRAIN_OK(shardd_join_uneven(c, SHARDD_WORLD, false, NULL, NULL, &train_err));
	train_leave(c);
	return 0;
}

Test(ddp_beside, a_ddp_of_an_epoch_before_refuses_nothing)
{
	trainfix_run(2, next_epoch_trainer, NULL);
}
