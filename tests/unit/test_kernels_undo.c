/*
 * Kernels whose launch a successor can complete, compiled for the host (tests/gpu/emulated): cut off
 * at every store, with what the threads had stored since their last fence taking effect in part and
 * in any order, and completed, perhaps after further deaths. The result has the bits of kernels/ref.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "adam.h"
#include "core/check.h"
#include "cuda_kernels.h"
#include "fdcheck.h"
#include "kernels.h"
#include "longform.h"
#include "ref/ref.h"

TestSuite(kernels_undo, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 240);

#ifdef SHARDD_EMULATED

#include "emulated.h"

/* Two blocks, whose threads have several calls each; the last vectors are not whole. */
enum { BLOCKS = 2, THREADS = 256, N = BLOCKS * THREADS * 4 * 2 + 301, ARRAYS = 5, SHIFTS = 4 };

struct arrays {
	float at[ARRAYS][N + SHIFTS + 4] __attribute__((aligned(64))); /* p, m, v, vmax, g */
};

static struct arrays before, now, want;
static unsigned char area[BLOCKS * THREADS * CUDA_UNDO_BYTES] __attribute__((aligned(64)));

#define ADDRESS(p) ((uint64_t)(uintptr_t)(p))

static void fill(void)
{
	uint64_t x = 88172645463325252u;

	for (unsigned k = 0; k < ARRAYS; k++)
		for (unsigned i = 0; i < N + SHIFTS; i++) {
			x = x * 6364136223846793005u + 1442695040888963407u;
			before.at[k][i] =
				(float)((double)(x >> 40) * 0x1p-24 - (k == 1 || k == 4 ? 0.5 : 0));
		}
}

/* A kernel and its definition, on arrays that begin @shift elements behind a vector. */
struct way {
	const char *name;
	enum cuda_fn fn;
	unsigned shift;
	void (*define)(const struct way *w, struct arrays *a);
	void (*fill)(const struct way *w, const struct cuda_undo *u, union cuda_args *ret);
};

static void define_adam(const struct way *w, struct arrays *a)
{
	struct adam_step s = { .decoupled = true,
			       .decay = 0.99f,
			       .w1 = 0.1f,
			       .b2 = 0.95f,
			       .w2 = 0.05f,
			       .step_size = 0.01f,
			       .sq = 0.3f,
			       .eps = 1e-8f,
			       .tail_from = UINT64_MAX };

	s.p = a->at[0] + w->shift, s.m = a->at[1] + w->shift, s.v = a->at[2] + w->shift;
	s.vmax = a->at[3] + w->shift, s.g = a->at[4] + w->shift;
	ref_adam_step(&s, 0, N);
}

static void fill_adam(const struct way *w, const struct cuda_undo *u, union cuda_args *ret)
{
	ret->adam_undo = (struct cuda_adam_undo){ { .n = N,
						    .tail_from = UINT64_MAX,
						    .decay = 0.99f,
						    .w1 = 0.1f,
						    .b2 = 0.95f,
						    .w2 = 0.05f,
						    .step_size = 0.01f,
						    .sq = 0.3f,
						    .eps = 1e-8f,
						    .decoupled = 1 },
						  *u };
	ret->adam_undo.a.p = ADDRESS(now.at[0] + w->shift);
	ret->adam_undo.a.m = ADDRESS(now.at[1] + w->shift);
	ret->adam_undo.a.v = ADDRESS(now.at[2] + w->shift);
	ret->adam_undo.a.vmax = ADDRESS(now.at[3] + w->shift);
	ret->adam_undo.a.g = ADDRESS(now.at[4] + w->shift);
}

static void define_adam_f64(const struct way *w, struct arrays *a)
{
	const struct k_adam_f64 d = { .wd = 0.01,
				      .w1 = 0.1,
				      .b2 = 0.95,
				      .w2 = 0.05,
				      .step_size = 0.01,
				      .sq = 0.3,
				      .eps = 1e-8 };
	struct adam_step s = { .f64 = true, .d = &d };

	s.p = a->at[0] + w->shift, s.m = a->at[1] + w->shift, s.v = a->at[2] + w->shift;
	s.g = a->at[4] + w->shift;
	ref_adam_step(&s, 0, N);
}

static void fill_adam_f64(const struct way *w, const struct cuda_undo *u, union cuda_args *ret)
{
	ret->adam_f64_undo = (struct cuda_adam_f64_undo){ { .n = N,
							    .wd = 0.01,
							    .w1 = 0.1,
							    .b2 = 0.95,
							    .w2 = 0.05,
							    .step_size = 0.01,
							    .sq = 0.3,
							    .eps = 1e-8 },
							  *u };
	ret->adam_f64_undo.a.p = ADDRESS(now.at[0] + w->shift);
	ret->adam_f64_undo.a.m = ADDRESS(now.at[1] + w->shift);
	ret->adam_f64_undo.a.v = ADDRESS(now.at[2] + w->shift);
	ret->adam_f64_undo.a.g = ADDRESS(now.at[4] + w->shift);
}

static void define_sgd(const struct way *w, struct arrays *a)
{
	const struct k_sgd k = { .p = a->at[0] + w->shift,
				 .buf = a->at[1] + w->shift,
				 .g = a->at[4] + w->shift,
				 .lr = 0.1f,
				 .mu = 0.9f };

	kernels_ref()->sgd(&k, 0, N);
}

static void fill_sgd(const struct way *w, const struct cuda_undo *u, union cuda_args *ret)
{
	ret->sgd_undo = (struct cuda_sgd_undo){ { .p = ADDRESS(now.at[0] + w->shift),
						  .buf = ADDRESS(now.at[1] + w->shift),
						  .g = ADDRESS(now.at[4] + w->shift),
						  .n = N,
						  .tail_from = UINT64_MAX,
						  .lr = 0.1f,
						  .mu = 0.9f,
						  .w = 1 },
						*u };
}

/* At first the buffer is not read: what it has then is nobody's. */
static void define_sgd_first(const struct way *w, struct arrays *a)
{
	const struct k_sgd k = { .p = a->at[0] + w->shift,
				 .buf = a->at[1] + w->shift,
				 .g = a->at[4] + w->shift,
				 .lr = 0.1f,
				 .mu = 0.9f,
				 .first = true };

	kernels_ref()->sgd(&k, 0, N);
}

static void fill_sgd_first(const struct way *w, const struct cuda_undo *u, union cuda_args *ret)
{
	fill_sgd(w, u, ret);
	ret->sgd_undo.a.first = 1;
}

static void define_scale(const struct way *w, struct arrays *a)
{
	kernels_ref()->scale(&(struct k_scale){ a->at[4] + w->shift, 0.37f, NULL }, 0, N);
}

static void fill_scale(const struct way *w, const struct cuda_undo *u, union cuda_args *ret)
{
	ret->scale_undo = (struct cuda_scale_undo){
		{ .x = ADDRESS(now.at[4] + w->shift), .n = N, .factor = 0.37f }, *u
	};
}

static const struct way ways[] = {
	{ "adamw", CUDA_FN_ADAM_UNDO, 0, define_adam, fill_adam },
	{ "adamw, from the second element on", CUDA_FN_ADAM_UNDO, 1, define_adam, fill_adam },
	{ "adam in fp64", CUDA_FN_ADAM_F64_UNDO, 0, define_adam_f64, fill_adam_f64 },
	{ "sgd", CUDA_FN_SGD_UNDO, 3, define_sgd, fill_sgd },
	{ "sgd, at first", CUDA_FN_SGD_UNDO, 0, define_sgd_first, fill_sgd_first },
	{ "scale", CUDA_FN_SCALE_UNDO, 2, define_scale, fill_scale },
};

/* @number: of the launch. Return: has it come to its end? */
static bool launch(const struct way *w, uint64_t number, uint64_t stores, uint64_t seed)
{
	const struct cuda_undo u = { .words = ADDRESS(area),
				     .old = ADDRESS(area) +
					    (uint64_t)BLOCKS * THREADS * CUDA_UNDO_WORD,
				     .launch = number,
				     .room = BLOCKS * THREADS };
	union cuda_args args;

	w->fill(w, &u, &args);
	return emulated_launch_part(w->fn, BLOCKS, &args, stores, seed);
}

/* Killed before store @at, and then at later ones as often as it takes. */
static void die_and_complete(const struct way *w, uint64_t number, uint64_t at)
{
	uint64_t stores = at, seed = at * 7919 + number;
	unsigned deaths = 0;

	now = before;
	while (!launch(w, number, stores, seed)) {
		deaths++;
		stores = deaths < 4 ? (seed >> 3) % (at + 40) : UINT64_MAX;
		seed = seed * 6364136223846793005u + 1442695040888963407u;
	}
	cr_assert_eq(memcmp(&now, &want, sizeof(now)), 0, "%s, killed at store %llu, %u deaths",
		     w->name, (unsigned long long)at, deaths);
}

Test(kernels_undo, a_launch_that_was_cut_off_is_completed_bit_for_bit)
{
	const unsigned points = longform_cut() ? 50 : 400;

	fill();
	for (unsigned i = 0; i < ARRAY_SIZE(ways); i++) {
		const struct way *w = &ways[i];
		uint64_t all, number = 1;

		memset(area, 0, sizeof(area));
		want = before;
		w->define(w, &want);
		now = before;
		cr_assert(launch(w, number, UINT64_MAX, 1));
		cr_assert_eq(memcmp(&now, &want, sizeof(now)), 0, "%s", w->name);
		all = emulated_stores();
		cr_assert_gt(all, points);
		for (uint64_t at = 0; at < all; at += all / points)
			die_and_complete(w, ++number, at);
	}
}

/* The highest launch in the words, as a successor finds it. */
static uint64_t last_launch(void)
{
	uint64_t last = 0, word;

	for (unsigned i = 0; i < BLOCKS * THREADS; i++) {
		memcpy(&word, area + (size_t)i * CUDA_UNDO_WORD, sizeof(word));
		if (word >> CUDA_UNDO_LAUNCH_SHIFT > last)
			last = word >> CUDA_UNDO_LAUNCH_SHIFT;
	}
	return last;
}

/* Killed at the begin of the second launch: the words may still name the first one, so that it is what
 * is completed, while threads have saved contents for the second one already. */
Test(kernels_undo, a_launch_stays_complete_while_the_next_one_begins)
{
	const struct way *first = &ways[0], *second = &ways[ARRAY_SIZE(ways) - 1];
	unsigned of_first = 0;

	fill();
	memset(area, 0, sizeof(area));
	want = before;
	first->define(first, &want);
	second->define(second, &want);
	for (uint64_t at = 0; at < 3000; at += at < 300 ? 1 : 37) {
		uint64_t number = 2 * at + 1;

		now = before;
		cr_assert(launch(first, number, UINT64_MAX, at));
		cr_assert_not(launch(second, number + 1, at, at));
		if (last_launch() == number) {
			cr_assert(launch(first, number, UINT64_MAX, at));
			of_first++;
		}
		cr_assert(launch(second, number + 1, UINT64_MAX, at));
		cr_assert_eq(memcmp(&now, &want, sizeof(now)), 0, "killed at store %llu",
			     (unsigned long long)at);
	}
	cr_expect_gt(of_first, 100);
}

/* The number of a launch that is complete: its last calls are made again, from what was kept. */
Test(kernels_undo, completing_twice_changes_nothing)
{
	fill();
	for (unsigned i = 0; i < ARRAY_SIZE(ways); i++) {
		memset(area, 0, sizeof(area));
		want = before;
		ways[i].define(&ways[i], &want);
		now = before;
		for (unsigned k = 0; k < 3; k++)
			cr_assert(launch(&ways[i], 5, UINT64_MAX, k));
		cr_assert_eq(memcmp(&now, &want, sizeof(now)), 0, "%s", ways[i].name);
	}
}

#endif
