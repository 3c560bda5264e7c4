/*
 * tests/golden/clip.safetensors, which make_clip.py writes and describes: what the tests that
 * read it have in common.
 */
#ifndef SHARDD_TESTS_GOLDEN_CLIP_H
#define SHARDD_TESTS_GOLDEN_CLIP_H

#include "golden.h"

#define GOLDEN_CLIP_MAX_N 512

/* The gradients that @about's case begins with. */
struct safetensors_tensor golden_clip_input(const struct safetensors *f, const char *about);

/* Is @got the norm of order @p of @n numbers of which a system said that it is @want? Maxima are
 * equal. */
bool golden_clip_is_near(double got, double want, size_t n, double p);

#endif
