/*
 * A training drawn by lot: a model in units, how each is cut, computed, reduced and
 * stepped, and what its passes do. The same seed gives the same case everywhere.
 */
#ifndef SHARDD_TESTS_RANDOM_CASE_H
#define SHARDD_TESTS_RANDOM_CASE_H

#include <shardd/shardd.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "reduce_model.h"

enum {
	CASE_USUAL_RANKS = 4, /* so that a case is cheap */
	CASE_MAX_RANKS = 8,   /* of one case in sixteen */
	CASE_MAX_UNITS = 3,
	CASE_MAX_TENSORS = 5,
	CASE_MAX_STEPS = 3,
	CASE_MAX_PASSES = 4,
};

#define CASE_OWN_RATE 0.125f

struct case_tensor {
	char name[16];
	uint64_t shape[3];
	uint32_t dims;
	uint64_t n; /* elements; 0: an alias */
	bool frozen;
	bool has_weight_decay, has_lr_factor;
	double weight_decay, lr_factor;
	int of_unit, of; /* alias: what it stands for; else -1 */
	bool sparse;     /* in buckets: its gradient is rows and values */
};

/* What SetFactors says before a step, of all that reductions divide by. */
struct case_factors {
	bool given;
	double pre, post, factor;
	bool force;
};

struct case_unit {
	char name[16];
	struct case_tensor tensors[CASE_MAX_TENSORS];
	unsigned n_tensors;
	enum shardd_layout layout;
	uint32_t multiple;
	enum dtype compute;
	struct model_unit reduce; /* passes are those of a step, below */
	struct shardd_optimizer optimizer;
	bool trained;
	bool guarded; /* used in passes */
	enum shardd_reshard reshard;
	bool own_optimizer;                               /* the trainers': SGD with OWN_RATE */
	char passes[CASE_MAX_STEPS][CASE_MAX_PASSES + 1]; /* letters as in reduce_model.h */
	struct case_factors factors[CASE_MAX_STEPS];
	bool in_buckets; /* of the case's ddp: in the first pass of a step, and not in the others */
};

/* What becomes of a step's gradients, in this order. */
struct case_step {
	bool has_lr;
	double lr;
	bool planned;     /* said before the passes, by PlanBackward */
	double inv_scale; /* 0: none; with an infinity or NaN the step is skipped */
	double max_norm;  /* 0: no clipping */
	double norm_type;
	enum shardd_clip_profile profile;
	double clamp; /* 0: no clipping by value */
	bool discard; /* no step at all */
};

struct random_case {
	uint64_t seed;
	uint32_t world;
	struct case_unit units[CASE_MAX_UNITS];
	unsigned n_units, n_steps, n_passes[CASE_MAX_STEPS];
	struct case_step steps[CASE_MAX_STEPS];
	bool special; /* gradients with infinities, NaN and numbers that vanish */
	/* The ranks are these of the job's, in this order; where that is another row than 0, 1... or
	 * the job has more, they are a group. */
	uint32_t job_world, ranks[CASE_MAX_RANKS];
	bool grouped;
	bool prefetch;     /* by lists; else what is learned is followed */
	bool static_graph; /* of the ddp */
	uint64_t bucket_bytes;
};

/* The unit's reductions in a step: as it is registered, or as factors were set since. */
struct model_unit random_case_reduce(const struct case_unit *u, unsigned step);
/* Has the gradient of a sparse tensor this row, on all ranks? At least one it has. */
bool random_case_has_row(const struct random_case *rc, unsigned u, unsigned t, unsigned step,
			 uint64_t row);

void random_case_draw(uint64_t seed, struct random_case *ret);

/* On stderr, for who has to look into it. */
void random_case_print(const struct random_case *rc);

/* The next number of a generator, below @below. */
uint32_t random_below(uint64_t *state, uint32_t below);

#endif
