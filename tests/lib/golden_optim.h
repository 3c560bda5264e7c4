/*
 * The cases of tests/golden/optim.safetensors, which make_optim.py writes and describes: what
 * an optimizer was given, and what then was in parameters and state, step by step.
 */
#ifndef SHARDD_TESTS_GOLDEN_OPTIM_H
#define SHARDD_TESTS_GOLDEN_OPTIM_H

#include "golden.h"

enum { GOLDEN_OPTIM_N = 61, GOLDEN_OPTIM_STEPS = 5 };

struct golden_optim {
	const struct safetensors *f; /* borrowed, as the texts are */
	const char *name, *about;
	enum k_profile profile;
	unsigned scaler; /* 0: none; 1: the fused form divides by itself; 2 */
	bool amsgrad, maximize, nesterov;
	double weight_decay, beta1, beta2, eps, momentum, dampening;
	double lr[GOLDEN_OPTIM_STEPS]; /* by step */
	const float *start;            /* parameters before the first */
};

/* The case @name of @f; the test fails where the file does not fit. */
void golden_optim_read(struct golden_optim *o, const struct safetensors *f, const char *name,
		       const char *about);
/* "adamw", "adam", "sgd". */
bool golden_optim_is(const struct golden_optim *o, const char *optimizer);
/* Is it one whose unscaling Unscale does not do: a division? */
bool golden_optim_divides(const struct golden_optim *o);

/* The gradients of step @i, scaled where there is a scaler. */
const float *golden_optim_gradients(const struct golden_optim *o, unsigned i);
/* What "p", "m", "v", "vmax", "buf" or "unscaled" was after step @i; NULL: there is none. */
const float *golden_optim_row(const struct golden_optim *o, const char *part, unsigned i);
/* "scale", "found" or "t" of step @i. */
float golden_optim_number(const struct golden_optim *o, const char *part, unsigned i);

/* Is @got what @part was after step @i? Bit for bit, but what golden_optim.c says of f64 and of
 * signs of zeros; true where there is none. @text: says where it differs. */
bool golden_optim_same(const struct golden_optim *o, const char *part, const float *got, unsigned i,
		       char *text, size_t bytes);

#endif
