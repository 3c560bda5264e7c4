/* Buckets under way: passes that were left before they were over, and units that are converted
 * meanwhile. */
#include <criterion/criterion.h>
#include <string.h>

#include "failfix.h"

TestSuite(ddp_early, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { TENSORS = 2, N = 300 };

static const uint32_t all[TENSORS] = { 0, 1 };

struct model {
	shardd_client *c;
	shardd_unit unit;
	shardd_ddp ddp;
	struct shardd_ddp_view views[TENSORS];
};

/* Every gradient of rank r is 2 + 2 r: their average over two is 3. */
static void write_gradients(struct model *m, uint32_t rank)
{
	float x[N];

	for (unsigned i = 0; i < N; i++)
		x[i] = 2 + 2 * (float)rank;
	for (unsigned k = 0; k < TENSORS; k++)
		train_write(m->c, m->views[k].data, x, sizeof(x));
}

static void check_average(struct model *m)
{
	float want[N];

	for (unsigned i = 0; i < N; i++)
		want[i] = 3;
	for (unsigned k = 0; k < TENSORS; k++)
		TRAIN_HAS(m->c, m->views[k].data, want, sizeof(want));
}

/* In its first pass, with gradients that nobody has said are ready. */
static struct model test_ddp_early_begin(const struct trainer *t)
{
	const uint64_t n = N;
	const struct shardd_tensor tensors[TENSORS] = {
		{ .name = "a", .shape = &n, .dims = 1 },
		{ .name = "b", .shape = &n, .dims = 1 },
	};
	const struct shardd_unit_spec spec = { .size = sizeof(spec),
					       .name = "unit",
					       .tensors = tensors,
					       .n_tensors = TENSORS,
					       .strategy = SHARDD_REPLICATE,
					       .reduce_profile = SHARDD_PROFILE_DDP,
					       .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };
	struct model m = { .c = train_join(t) };
	struct shardd_ddp_create_options ddp = { .size = sizeof(ddp),
						 .units = &m.unit,
						 .n_units = 1 };
	struct shardd_unit_info info;

	TRAIN_OK(shardd_register(m.c, &spec, 1, &info, &train_err));
	m.unit = info.unit;
	TRAIN_OK(shardd_init_seed(m.c, m.unit, 1, &train_err));
	TRAIN_OK(shardd_ddp_create(m.c, &ddp, &m.ddp, NULL, &train_err));
	TRAIN_OK(shardd_ddp_forward(m.c, m.ddp, m.views, TENSORS, &train_err));
	write_gradients(&m, t->rank);
	TRAIN_OK(shardd_ddp_backward(m.c, m.ddp, NULL, 0, NULL, 0, &train_err));
	return m;
}

/* Rank 0 does not wait for its DdpFinish: its buckets wait for rank 1 all the same, with what
 * rank 0 has said of this pass. It cannot begin another one before they are over. */
static void leave_early(struct model *m)
{
	TRAIN_OK(shardd_ddp_ready(m->c, m->ddp, all, TENSORS, &train_err));
	shardd_set_timeout(m->c, 50);
	TRAIN_FAILS(shardd_ddp_finish(m->c, m->ddp, NULL, 0, &train_err), SHARDD_DEADLINE_EXCEEDED);
	shardd_set_timeout(m->c, 0);
	TRAIN_FAILS(shardd_ddp_backward(m->c, m->ddp, NULL, 0, NULL, 0, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "still in progress"));
	TRAIN_FAILS(shardd_ddp_forward(m->c, m->ddp, m->views, TENSORS, &train_err),
		    SHARDD_FAILED_PRECONDITION);
}

static int early_trainer(const struct trainer *t)
{
	stage *s = t->arg;
	struct model m = test_ddp_early_begin(t);

	if (t->rank == 0) {
		leave_early(&m);
		stage_set(s, 1);
		TRAINER_AWAIT(atomic_load(s) == 2, 30);
	} else {
		TRAINER_AWAIT(atomic_load(s) == 1, 30);
		TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, all, TENSORS, &train_err));
		TRAIN_OK(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err));
		stage_set(s, 2);
	}
	check_average(&m);
	if (t->rank == 0) /* and now it can */
		TRAIN_OK(shardd_ddp_forward(m.c, m.ddp, m.views, TENSORS, &train_err));
	TRAIN_OK(shardd_barrier(m.c, SHARDD_WORLD, &train_err));
	train_leave(m.c);
	return 0;
}

Test(ddp_early, the_next_pass_begins_when_the_last_is_over)
{
	trainfix_run(2, early_trainer, trainer_shared(sizeof(stage)));
}

/* What a bucket reads must not be converted under it. */
static int converting_trainer(const struct trainer *t)
{
	struct shardd_convert_options to_rows = { .size = sizeof(to_rows),
						  .layout = SHARDD_LAYOUT_DIM0 };
	struct model m = test_ddp_early_begin(t);

	for (unsigned k = 0; k < 2; k++) {
		to_rows.units = &m.unit;
		to_rows.n_units = 1;
		TRAIN_FAILS(shardd_convert(m.c, &to_rows, &train_err), SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "in buckets of a pass"));
		if (k == 0)
			TRAIN_OK(shardd_ddp_ready(m.c, m.ddp, all, TENSORS, &train_err));
	}
	TRAIN_OK(shardd_ddp_finish(m.c, m.ddp, NULL, 0, &train_err));
	TRAIN_OK(shardd_step(m.c, SHARDD_WORLD, NULL, &train_err));
	to_rows.units = &m.unit;
	to_rows.n_units = 1;
	TRAIN_OK(shardd_convert(m.c, &to_rows, &train_err));
	train_leave(m.c);
	return 0;
}

Test(ddp_early, units_are_not_converted_in_a_pass)
{
	trainfix_run(2, converting_trainer, NULL);
}
