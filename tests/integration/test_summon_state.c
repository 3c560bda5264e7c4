/*
 * The optimizer's state summoned and written back, end to end: it is what the optimizer made of
 * the gradients, in every layout; of what comes back each rank's own shard counts, with the
 * number of steps, and training goes on from there.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "trainfix.h"

TestSuite(summon_state, .init = trainfix_begin, .fini = trainfix_end, .timeout = 240);

#define TENSORS 4
#define STATES  3

static const uint64_t s_matrix[] = { 7, 3 }, s_frozen[] = { 6, 2 }, s_bias[] = { 5 };

static const struct shardd_tensor tensors[TENSORS] = {
	{ .name = "matrix", .shape = s_matrix, .dims = 2, .init = SHARDD_INIT_NORMAL, .b = 1 },
	{ .name = "frozen",
	  .shape = s_frozen,
	  .dims = 2,
	  .init = SHARDD_INIT_UNIFORM,
	  .a = 1,
	  .b = 2,
	  .frozen = true },
	{ .name = "bias", .shape = s_bias, .dims = 1, .init = SHARDD_INIT_UNIFORM, .a = 1, .b = 2 },
	{ .name = "scalar", .dims = 0, .init = SHARDD_INIT_UNIFORM, .a = 5, .b = 6 },
};
static const uint64_t numel[TENSORS] = { 21, 12, 5, 1 };

struct form {
	enum shardd_layout layout;
	uint32_t multiple;
	enum shardd_strategy strategy;
	uint32_t shard_ranks;
};

static const struct form forms[] = {
	{ SHARDD_LAYOUT_FLAT, 1, SHARDD_SHARD, 0 },  { SHARDD_LAYOUT_FLAT, 8, SHARDD_SHARD, 0 },
	{ SHARDD_LAYOUT_DIM0, 1, SHARDD_SHARD, 0 },  { SHARDD_LAYOUT_FLAT, 1, SHARDD_REPLICATE, 0 },
	{ SHARDD_LAYOUT_DIM0, 1, SHARDD_HYBRID, 2 }, { SHARDD_LAYOUT_FLAT, 1, SHARDD_HYBRID, 2 },
};

struct model {
	struct shardd_unit_info info;
	struct shardd_tensor_place places[TENSORS];
};

/* Factors that are powers of two: every state is exact in fp32. */
static void model_register(shardd_client *c, unsigned number, struct model *m)
{
	const struct form *f = &forms[number];
	char name[16];
	struct shardd_unit_spec spec = { .size = sizeof(spec),
					 .name = name,
					 .tensors = tensors,
					 .n_tensors = TENSORS,
					 .compute_dtype = SHARDD_FP32,
					 .shard_multiple = f->multiple,
					 .pre_divide = 1,
					 .post_divide = 1,
					 .layout = f->layout,
					 .strategy = f->strategy,
					 .shard_ranks = f->shard_ranks };

	snprintf(name, sizeof(name), "unit %u", number);
	spec.optimizer = (struct shardd_optimizer){ .kind = SHARDD_ADAMW,
						    .lr = 0.25,
						    .beta1 = 0.5,
						    .beta2 = 0.75,
						    .eps = 1e-8,
						    .amsgrad = true };
	TRAIN_OK(shardd_register(c, &spec, 1, &m->info, &train_err));
	TRAIN_OK(shardd_tensor_places(c, m->info.unit, m->places, TENSORS, &train_err));
	TRAIN_OK(shardd_init_seed(c, m->info.unit, 1, &train_err));
}

static float gradient_of(unsigned i, uint64_t k, uint32_t rank)
{
	return (float)((i + 1) * 8 + k) * (float)(rank + 1) / 16;
}

static void train_once(shardd_client *c, const struct model *m, uint32_t rank)
{
	uint64_t bytes = m->info.gradient_elements * sizeof(float);
	float *x = train_alloc(bytes);
	void *data = NULL;

	memset(x, 0xff, bytes);
	for (unsigned i = 0; i < TENSORS; i++)
		for (uint64_t k = 0; !tensors[i].frozen && k < numel[i]; k++)
			x[m->places[i].offset + k] = gradient_of(i, k, rank);
	TRAIN_OK(shardd_gradient(c, m->info.unit, &data, &train_err));
	train_write(c, data, x, bytes);
	TRAIN_OK(shardd_reduce(c, m->info.unit, &train_err));
	TRAIN_OK(shardd_step(c, 0, NULL, &train_err));
	free(x);
}

/* What the first step of AdamW makes of the sum of all ranks' gradients. */
static float first_state(unsigned state, unsigned i, uint64_t k, uint32_t world)
{
	float sum = 0;

	for (uint32_t r = 0; !tensors[i].frozen && r < world; r++)
		sum += gradient_of(i, k, r);
	return state == 1 ? sum / 2 : sum * sum / 4;
}

/* Summon @state, or with 0 the parameters. Return: a copy, owned. */
static float *summon(shardd_client *c, const struct model *m, uint32_t state, void **ret_data,
		     uint64_t want_steps)
{
	uint64_t steps = UINT64_MAX;

	TRAIN_OK(shardd_summon_state(c, m->info.unit, state, ret_data, &steps, &train_err));
	CHECK(steps == want_steps);
	return train_copy(c, *ret_data, m->info.elements * sizeof(float));
}

static void expect_first(shardd_client *c, const struct model *m, uint32_t world)
{
	for (uint32_t state = 1; state <= STATES; state++) {
		void *data = NULL;
		float *x = summon(c, m, state, &data, 1);

		for (unsigned i = 0; i < TENSORS; i++)
			for (uint64_t k = 0; k < numel[i]; k++)
				CHECK(x[m->places[i].offset + k] ==
				      first_state(state, i, k, world));
		free(x);
		TRAIN_OK(shardd_return(c, m->info.unit, false, &train_err));
	}
}

/* Everybody writes its own number everywhere. */
static void write_own(shardd_client *c, const struct model *m, uint32_t state, uint32_t rank,
		      uint64_t steps)
{
	void *data = NULL;
	float *x = summon(c, m, state, &data, state == 1 ? 1 : 40 + state - 1);

	for (uint64_t e = 0; e < m->info.elements; e++)
		x[e] = (float)(rank + 1 + 10 * state);
	train_write(c, data, x, m->info.elements * sizeof(float));
	free(x);
	TRAIN_OK(shardd_return_state(c, m->info.unit, true, &steps, &train_err));
}

/* Of each tensor this rank's rows are its own number now; of replicas the first one's ranks
 * count. */
static void expect_own(shardd_client *c, const struct model *m, uint32_t state, uint32_t rank,
		       const struct form *f)
{
	bool counts = f->strategy == SHARDD_SHARD || rank < f->shard_ranks || !rank;
	void *data = NULL;
	float *x = summon(c, m, state, &data, 40 + STATES);

	for (unsigned i = 0; i < TENSORS; i++) {
		uint64_t mine = 0;

		for (uint64_t k = 0; k < numel[i]; k++) {
			float v = x[m->places[i].offset + k];

			mine += v == (float)(rank + 1 + 10 * state);
			CHECK(tensors[i].frozen == (v == 0));
		}
		CHECK(mine == (counts && !tensors[i].frozen ? m->places[i].shard_elements : 0));
	}
	free(x);
	TRAIN_OK(shardd_return(c, m->info.unit, false, &train_err));
}

static int trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);

	for (unsigned n = 0; n < ARRAY_SIZE(forms); n++) {
		struct model m;
		float *before, *after;
		void *data = NULL;

		if (forms[n].shard_ranks && t->world % forms[n].shard_ranks)
			continue;
		model_register(c, n, &m);
		train_once(c, &m, t->rank);
		before = summon(c, &m, 0, &data, 1);
		TRAIN_OK(shardd_return(c, m.info.unit, false, &train_err));
		expect_first(c, &m, t->world);
		for (uint32_t state = 1; state <= STATES; state++)
			write_own(c, &m, state, t->rank, 40 + state);
		for (uint32_t state = 1; state <= STATES; state++)
			expect_own(c, &m, state, t->rank, &forms[n]);
		after = summon(c, &m, 0, &data, 40 + STATES);
		TRAIN_OK(shardd_return(c, m.info.unit, false, &train_err));
		for (unsigned i = 0; i < TENSORS; i++)
			TRAIN_SAME(after + m.places[i].offset, before + m.places[i].offset,
				   numel[i] * sizeof(float));
		free(before);
		free(after);
	}
	train_leave(c);
	return 0;
}

Test(summon_state, every_layout_alone)
{
	trainfix_run(1, trainer, NULL);
}
Test(summon_state, every_layout_on_two)
{
	trainfix_run(2, trainer, NULL);
}
Test(summon_state, every_layout_on_three)
{
	trainfix_run(3, trainer, NULL);
}
Test(summon_state, every_layout_on_four)
{
	trainfix_run(4, trainer, NULL);
}

/* What is read out, put back into a unit that was initialised again, trains on as if nothing had
 * been. */
static int moved_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	uint64_t bytes, steps = 2;
	float *kept[1 + STATES], *want, *got;
	struct model m;
	void *data = NULL;

	model_register(c, 2, &m);
	bytes = m.info.elements * sizeof(float);
	for (unsigned i = 0; i < 2; i++)
		train_once(c, &m, t->rank);
	for (uint32_t state = 0; state <= STATES; state++) {
		kept[state] = summon(c, &m, state, &data, 2);
		TRAIN_OK(shardd_return(c, m.info.unit, false, &train_err));
	}
	train_once(c, &m, t->rank);
	want = summon(c, &m, 0, &data, 3);
	TRAIN_OK(shardd_return(c, m.info.unit, false, &train_err));
	TRAIN_OK(shardd_init_seed(c, m.info.unit, 9, &train_err));
	for (uint32_t state = 0; state <= STATES; state++) {
		free(summon(c, &m, state, &data, state ? 2 : 0));
		train_write(c, data, kept[state], bytes);
		TRAIN_OK(shardd_return_state(c, m.info.unit, true, &steps, &train_err));
		free(kept[state]);
	}
	train_once(c, &m, t->rank);
	got = summon(c, &m, 0, &data, 3);
	TRAIN_OK(shardd_return(c, m.info.unit, false, &train_err));
	for (unsigned i = 0; i < TENSORS; i++)
		TRAIN_SAME(got + m.places[i].offset, want + m.places[i].offset,
			   numel[i] * sizeof(float));
	free(want);
	free(got);
	train_leave(c);
	return 0;
}

Test(summon_state, what_was_read_trains_on_where_it_is_written_two)
{
	trainfix_run(2, moved_trainer, NULL);
}
Test(summon_state, what_was_read_trains_on_where_it_is_written_three)
{
	trainfix_run(3, moved_trainer, NULL);
}

static void refuse_steps(shardd_client *c, shardd_unit u)
{
	uint64_t steps = 4, by_tensor[TENSORS + 1] = { 4, 4, 5, 4 }, got[TENSORS];
	struct shardd_return_options o = { .size = sizeof(o),
					   .write = true,
					   .optimizer_steps = &steps,
					   .tensor_steps = by_tensor,
					   .n_tensors = TENSORS };
	o.unit = u;

	TRAIN_FAILS(shardd_return_with(c, &o, &train_err), SHARDD_INVALID_ARGUMENT);
	CHECK(strstr(train_err.text, "tensor_steps[2] of unit") &&
	      strstr(train_err.text, "is 5; it must be at most optimizer_steps, 4"));
	o.n_tensors = TENSORS + 1;
	o.unit = u;
	TRAIN_FAILS(shardd_return_with(c, &o, &train_err), SHARDD_INVALID_ARGUMENT);
	CHECK(strstr(train_err.text, "has 4 tensors"));
	o.optimizer_steps = NULL;
	o.n_tensors = TENSORS;
	o.unit = u;
	TRAIN_FAILS(shardd_return_with(c, &o, &train_err), SHARDD_INVALID_ARGUMENT);
	CHECK(strstr(train_err.text, "is set without optimizer_steps"));
	TRAIN_FAILS(shardd_unit_steps(c, u, got, TENSORS - 1, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_OK(shardd_unit_steps(c, u, got, TENSORS, &train_err));
	CHECK(got[0] == 0 && got[3] == 0);
}

/* Ranks that do not say the same of a tensor. */
static int unlike_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	uint64_t steps = 4, by_tensor[TENSORS] = { 4, 4, 4, 3 + t->rank }, got[TENSORS];
	struct shardd_return_options o = { .size = sizeof(o),
					   .write = true,
					   .optimizer_steps = &steps,
					   .tensor_steps = by_tensor,
					   .n_tensors = TENSORS };
	struct model m;
	void *data = NULL;

	model_register(c, 0, &m);
	TRAIN_OK(shardd_summon_state(c, m.info.unit, 1, &data, NULL, &train_err));
	o.unit = m.info.unit;
	TRAIN_FAILS(shardd_return_with(c, &o, &train_err), SHARDD_FAILED_PRECONDITION);
	by_tensor[3] = 3;
	o.unit = m.info.unit;
	TRAIN_OK(shardd_return_with(c, &o, &train_err));
	TRAIN_OK(shardd_summon(c, m.info.unit, &data, &train_err));
	TRAIN_OK(shardd_unit_steps(c, m.info.unit, got, TENSORS, &train_err));
	CHECK(got[0] == 4 && got[2] == 4 && got[3] == 3);
	TRAIN_OK(shardd_return(c, m.info.unit, false, &train_err));
	train_leave(c);
	return 0;
}

Test(summon_state, steps_of_tensors_are_the_same_on_all_ranks)
{
	trainfix_run(2, unlike_trainer, NULL);
}

static int refused_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	uint64_t steps = (UINT64_C(1) << 53) + 1;
	struct model m;
	void *data = NULL;

	model_register(c, 0, &m);
	TRAIN_FAILS(shardd_summon_state(c, m.info.unit, STATES + 1, &data, NULL, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	CHECK(strstr(train_err.text, "0 to 3"));
	TRAIN_OK(shardd_summon_state(c, m.info.unit, 2, &data, NULL, &train_err));
	TRAIN_FAILS(shardd_summon(c, m.info.unit, &data, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAIN_FAILS(shardd_return_state(c, m.info.unit, true, &steps, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	steps = 1;
	TRAIN_FAILS(shardd_return_state(c, m.info.unit, false, &steps, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	refuse_steps(c, m.info.unit);
	TRAIN_OK(shardd_return(c, m.info.unit, false, &train_err));
	train_leave(c);
	return 0;
}

Test(summon_state, what_is_not_there_is_refused)
{
	trainfix_run(2, refused_trainer, NULL);
}
