/* Models that come and go in one job: units are dropped by all ranks, and their memory is free for the
 * next ones. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "trainfix.h"

#define UNITS    3
#define ELEMENTS 5000u

struct model {
	struct shardd_unit_info info[UNITS];
	shardd_unit units[UNITS];
};

static void model_register(shardd_client *c, struct model *m, enum shardd_dtype compute)
{
	static const uint64_t shape[] = { ELEMENTS };
	struct shardd_tensor w = { .name = "w", .shape = shape, .dims = 1 };
	struct shardd_buffer b = {
		.name = "b", .dtype = SHARDD_BUFFER_FP32, .shape = shape, .dims = 1
	};
	struct shardd_unit_spec specs[UNITS];
	char names[UNITS][16];

	for (unsigned u = 0; u < UNITS; u++) {
		snprintf(names[u], sizeof(names[u]), "unit.%u", u);
		specs[u] =
			(struct shardd_unit_spec){ .size = sizeof(specs[u]),
						   .name = names[u],
						   .tensors = &w,
						   .n_tensors = 1,
						   .compute_dtype = compute,
						   .optimizer = SHARDD_ADAMW_DEFAULTS(.lr = 1e-3),
						   .buffers = &b,
						   .n_buffers = 1 };
	}
	TRAIN_OK(shardd_register(c, specs, UNITS, m->info, &train_err));
	for (unsigned u = 0; u < UNITS; u++) {
		m->units[u] = m->info[u].unit;
		TRAINER_CHECK(!m->info[u].initialised);
		TRAIN_OK(shardd_init_seed(c, m->units[u], u + 1, &train_err));
	}
}

static void model_train(shardd_client *c, const struct model *m, uint64_t step)
{
	for (unsigned u = 0; u < UNITS; u++) {
		const void *params = NULL;
		void *gradient = NULL;

		TRAIN_OK(shardd_gather(c, m->units[u], &params, &train_err));
		TRAIN_OK(shardd_release(c, m->units[u], &train_err));
		TRAIN_OK(shardd_gradient(c, m->units[u], &gradient, &train_err));
		train_set(c, gradient, 0, 16);
		TRAIN_OK(shardd_reduce(c, m->units[u], &train_err));
	}
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
}

static int drop(shardd_client *c, const shardd_unit *units, size_t n)
{
	shardd_ticket t = 0;
	int r = shardd_submit_free(c, SHARDD_OPTIONS(free, .units = units, .n_units = n), &t,
				   &train_err);

	return r < 0 ? r : shardd_wait(c, t, -1, NULL, &train_err);
}

/* Charged to anybody, but for what a process still has mapped: that goes with the process. */
static uint64_t live_bytes(void)
{
	static const char *const status[] = { "memory", NULL };
	json_t *j = daemonfix_ctl(&trainfix, status), *device;
	uint64_t bytes = 0;
	size_t i;

	json_array_foreach(json_object_get(j, "devices"), i, device)
	{
		bytes += (uint64_t)json_integer_value(json_object_get(device, "used_bytes"));
		bytes -= (uint64_t)json_integer_value(json_object_get(device, "quarantined_bytes"));
	}
	TRAINER_CHECK(i > 0);
	json_decref(j);
	return bytes;
}

/* Ten models of the same names, one after the other; the job never has two. */
static int models_trainer(const struct trainer *t)
{
	uint64_t *used = t->arg;
	shardd_client *c = train_join(t);
	struct model m;

	for (unsigned k = 0; k < 10; k++) {
		model_register(c, &m, k % 2 ? SHARDD_BF16 : SHARDD_FP32);
		for (unsigned u = 0; u < UNITS; u++)
			TRAINER_CHECK(m.units[u] == k * UNITS + u + 1);
		model_train(c, &m, 2 * k + 1);
		model_train(c, &m, 2 * k + 2);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		if (t->rank == 0)
			used[2 * k] = live_bytes();
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		TRAIN_OK(drop(c, m.units, UNITS));
		if (t->rank == 0)
			used[2 * k + 1] = live_bytes();
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	}
	TRAIN_FAILS(shardd_gather(c, m.units[0], &(const void *){ NULL }, &train_err),
		    SHARDD_NOT_FOUND);
	train_leave(c);
	return 0;
}

static void models_come_and_go(uint32_t world)
{
	uint64_t *used = trainer_shared(20 * sizeof(*used));

	trainfix_run(world, models_trainer, used);
	for (unsigned k = 0; k < 10; k++) {
		cr_expect_gt(used[2 * k], used[2 * k + 1]);
		if (k > 1)
			cr_expect_leq(used[2 * k + 1], used[3], "after model %u: %llu bytes", k,
				      (unsigned long long)used[2 * k + 1]);
	}
}

Test(drop_units, models_come_and_go_with_one_rank, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	models_come_and_go(1);
}

Test(drop_units, models_come_and_go_with_three, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	models_come_and_go(3);
}

/* Bytes of what was freed and is still mapped. */
static uint64_t quarantined_bytes(void)
{
	static const char *const status[] = { "memory", NULL };
	json_t *j = daemonfix_ctl(&trainfix, status), *device;
	uint64_t bytes = 0;
	size_t i;

	json_array_foreach(json_object_get(j, "devices"), i, device) bytes +=
		(uint64_t)json_integer_value(json_object_get(device, "quarantined_bytes"));
	json_decref(j);
	return bytes;
}

/* The parameters were mapped by all ranks, and all of them live on. */
static int unmaps_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	unsigned tries = 0;
	struct model m;

	model_register(c, &m, SHARDD_FP32);
	model_train(c, &m, 1);
	TRAIN_OK(drop(c, m.units, UNITS));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	while (t->rank == 0 && train_on_host() && quarantined_bytes() && tries++ < 100)
		usleep(100000);
	TRAINER_CHECK(tries < 100);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(drop_units, parameters_are_unmapped, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(1, unmaps_trainer, NULL);
	trainfix_run(3, unmaps_trainer, NULL);
}

/* What is refused is refused for all, and the model trains on. */
static int refused_trainer(const struct trainer *t)
{
	shardd_client *c = train_join(t);
	const void *params = NULL;
	shardd_ticket ticket;
	struct model m;

	model_register(c, &m, SHARDD_FP32);
	if (t->rank == 1)
		TRAIN_OK(shardd_gather(c, m.units[1], &params, &train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAIN_FAILS(drop(c, m.units, UNITS), SHARDD_FAILED_PRECONDITION);
	if (t->rank == 1)
		TRAIN_OK(shardd_release(c, m.units[1], &train_err));
	TRAIN_FAILS(drop(c, m.units, t->rank ? 1 : 2), SHARDD_FAILED_PRECONDITION);
	TRAIN_FAILS(shardd_submit_free(
			    c, SHARDD_OPTIONS(free, .buffer = 1, .units = m.units, .n_units = 1),
			    &ticket, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_submit_free(c, SHARDD_OPTIONS(free, .n_units = 1), &ticket, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	model_train(c, &m, 1);
	TRAIN_OK(drop(c, m.units, 1));
	TRAIN_OK(drop(c, m.units + 1, 2));
	train_leave(c);
	return 0;
}

Test(drop_units, what_is_refused_changes_nothing, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	trainfix_run(2, refused_trainer, NULL);
}
