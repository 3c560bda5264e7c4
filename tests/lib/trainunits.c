#include "trainunits.h"

#include <stdlib.h>

#include "trainfix.h"

enum { MAX_WORLD = 64 };

void trainunits_register(shardd_client *c, shardd_unit units[TRAINUNITS])
{
	trainunits_register_when(c, units, SHARDD_OPTIM_AT_STEP);
}

void trainunits_register_when(shardd_client *c, shardd_unit units[TRAINUNITS],
			      enum shardd_optimizer_when when)
{
	static const char *const names[TRAINUNITS] = { "adamw", "sgd", "bf16" };
	const struct shardd_unit_spec likes[TRAINUNITS] = {
		{ .size = sizeof(likes[0]),
		  .optimizer = { .kind = SHARDD_ADAMW,
				 .lr = 0.01,
				 .weight_decay = 0.1,
				 .when = when } },
		{ .size = sizeof(likes[0]),
		  .optimizer = { .kind = SHARDD_SGD, .lr = 0.1, .momentum = 0.9, .when = when } },
		{ .size = sizeof(likes[0]),
		  .compute_dtype = SHARDD_BF16,
		  .gradient_dtype = SHARDD_FP32,
		  .optimizer = { .kind = SHARDD_ADAMW, .lr = 0.01, .when = when } },
	};

	for (unsigned i = 0; i < TRAINUNITS; i++)
		units[i] = train_register(c, names[i], TRAINUNITS_ELEMENTS, &likes[i]).unit;
}

void trainunits_init(shardd_client *c, const shardd_unit units[TRAINUNITS])
{
	for (unsigned i = 0; i < TRAINUNITS; i++)
		TRAIN_OK(shardd_init_seed(c, units[i], 7 + i, &train_err));
}

void trainunits_reduce(shardd_client *c, const shardd_unit units[TRAINUNITS], uint32_t rank,
		       uint64_t step)
{
	for (unsigned i = 0; i < TRAINUNITS; i++) {
		uint64_t seed = (step * MAX_WORLD + rank) * TRAINUNITS + i;
		float *g = train_numbers(TRAINUNITS_ELEMENTS, seed);

		train_reduce(c, units[i], DTYPE_FP32, g, TRAINUNITS_ELEMENTS);
		free(g);
	}
}

void trainunits_step(shardd_client *c, const shardd_unit units[TRAINUNITS], uint32_t rank,
		     uint64_t step)
{
	uint64_t blob[2] = { step, rank };

	trainunits_reduce(c, units, rank, step);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, step, blob, sizeof(blob), &train_err));
}

bool trainunits_is_at(const struct shardd_membership *m, uint32_t rank, uint64_t step)
{
	const uint64_t *blob = m->blob;

	return m->has_commit && m->step == step && !m->torn && !m->created && m->blob_bytes == 16 &&
	       blob[0] == step && blob[1] == rank;
}

void trainunits_read(shardd_client *c, const shardd_unit units[TRAINUNITS],
		     float ret[TRAINUNITS][TRAINUNITS_ELEMENTS])
{
	for (unsigned i = 0; i < TRAINUNITS; i++)
		train_params(c, units[i], ret[i], TRAINUNITS_ELEMENTS * (i == 2 ? 2 : 4));
}
