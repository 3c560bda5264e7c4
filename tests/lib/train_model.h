/*
 * What a training of random_case.h must come to, tensor by tensor: whole tensors, without
 * shards, units' layouts or devices; gradients by reduce_model.h, the rest by kernels/ref's
 * elementwise definitions.
 */
#ifndef SHARDD_TESTS_TRAIN_MODEL_H
#define SHARDD_TESTS_TRAIN_MODEL_H

#include "random_case.h"

struct train_tensor {
	float *p, *g, *s1, *s2, *s3; /* of as many elements as the tensor; one allocation */
};

struct train_model {
	const struct random_case *rc; /* borrowed */
	struct model_world world;
	struct train_tensor tensors[CASE_MAX_UNITS][CASE_MAX_TENSORS];
	unsigned step;  /* under way */
	unsigned steps; /* that have been applied */
	bool found_inf; /* in the gradients of the step, where it is asked for */
};

/* Parameters by lot. */
void train_model_init(struct train_model *m, const struct random_case *rc,
		      const struct model_world *world);
void train_model_deinit(struct train_model *m);

/* Element @i of what rank @rank puts into the gradient buffer for tensor @t of unit @u in
 * pass @pass of step @step. */
float train_model_number(const struct train_model *m, unsigned u, unsigned t, uint32_t rank,
			 unsigned step, unsigned pass, uint64_t i);

/* All passes of the step: the gradients, unscaled. Return: their norm, as the step has it. */
double train_model_backward(struct train_model *m);
/* Clip them by @total, the norm; then the optimizers, if the step is one. */
void train_model_step(struct train_model *m, double total);
/* Is the step no step? */
bool train_model_skips(const struct train_model *m);

#endif
