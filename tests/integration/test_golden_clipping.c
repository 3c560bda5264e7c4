/*
 * Gradient clipping through a daemon against torch, FSDP2, FSDP1, fairscale and XLA: every case of
 * tests/golden/clip.safetensors, on as many ranks as it has, FLAT and DIM0. SGD with lr 1 on
 * parameters that are -0 leaves the gradient, turned round.
 *
 * The total is as test_golden_clip has it: maxima are equal, sums close. Where it is equal, the
 * clipped gradients are the systems' bit for bit; else the factor is off by as much as the total,
 * and so are they. A power that fp32 cannot hold makes the systems' total infinite, but not ours:
 * their gradients are then 0, and are not compared.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "golden_clip.h"
#include "trainfix.h"

TestSuite(golden_clipping, .init = trainfix_begin, .fini = trainfix_end, .timeout = 240);

enum { TENSORS = 5, N = 250, MAX_CASES = 320 };

/* Of make_clip.py. */
static const uint64_t shapes[TENSORS][3] = { { 5, 3 }, { 7 }, { 1 }, { 2, 2, 3 }, { 43, 5 } };
static const uint32_t dims[TENSORS] = { 2, 1, 1, 3, 2 };

struct kase {
	const char *name;
	bool value; /* by value, not by norm */
	struct shardd_clip_options clip;
	double total;
	const float *in, *want;
};

/* A number of ranks, and what has been recorded for it. */
struct scene {
	enum shardd_layout layout;
	unsigned n;
	struct kase cases[MAX_CASES];
};

/* ---------------------------------------------------------------- the file */

static struct kase read_case(const struct safetensors *f, const char *name, const char *about)
{
	struct safetensors_tensor in = golden_clip_input(f, about),
				  want = golden_part(f, name, "g");
	struct safetensors_tensor total = golden_part(f, name, "total");
	struct kase k = {
		.name = name,
		.value = golden_is(about, "system", "value"),
		.clip = { .size = sizeof(k.clip),
			  .max_norm = golden_number(about, "max"),
			  .norm_type = golden_number(about, "p"),
			  .profile = golden_is(about, "system", "fairscale") ? SHARDD_CLIP_FAIRSCALE
				     : golden_is(about, "system", "xla")     ? SHARDD_CLIP_XLA
									     : SHARDD_CLIP_TORCH },
		.total = (double)golden_at(total.data, DTYPE_FP32, 0),
		.in = in.data,
		.want = want.data
	};

	cr_assert(in.elements == N && want.elements == N && want.dtype == DTYPE_FP32);
	return k;
}

static void read_scene(const struct safetensors *f, unsigned world, struct scene *s)
{
	const char *name, *about;
	void *iter = NULL;

	while (safetensors_next(f, &iter, &name, &about)) {
		if (golden_number(about, "ranks") != world)
			continue;
		cr_assert_lt(s->n, MAX_CASES);
		s->cases[s->n++] = read_case(f, name, about);
	}
}

/* ------------------------------------------------------------------ a rank */

struct model {
	shardd_client *c;
	const struct trainer *t;
	const struct scene *s;
	struct shardd_unit_info info;
	struct shardd_tensor_place places[TENSORS];
	uint64_t buffer; /* rank 0's: all parameters are -0 */
};

/* A sum that is divided by 1. */
static void register_model(struct model *m)
{
	static const char *const names[TENSORS] = { "a", "b", "c", "d", "e" };
	struct shardd_tensor tensors[TENSORS];
	const struct shardd_unit_spec spec = { .size = sizeof(spec),
					       .name = "model",
					       .tensors = tensors,
					       .n_tensors = TENSORS,
					       .layout = m->s->layout,
					       .reduce_profile = SHARDD_PROFILE_FSDP2,
					       .divide_factor = 1,
					       .force_sum = true,
					       .optimizer = { .kind = SHARDD_SGD, .lr = 1 } };

	for (unsigned i = 0; i < TENSORS; i++)
		tensors[i] = (struct shardd_tensor){ .name = names[i],
						     .shape = shapes[i],
						     .dims = dims[i] };
	TRAIN_OK(shardd_register(m->c, &spec, 1, &m->info, &train_err));
	TRAINER_CHECK(m->info.packed_elements == N);
	TRAIN_OK(shardd_tensor_places(m->c, m->info.unit, m->places, TENSORS, &train_err));
}

static void make_negative_zeros(struct model *m)
{
	float x[N];
	void *data;

	if (m->t->rank)
		return;
	for (unsigned i = 0; i < N; i++)
		x[i] = -0.0F;
	TRAIN_OK(shardd_alloc(m->c, sizeof(x), &m->buffer, &data, &train_err));
	train_write(m->c, data, x, sizeof(x));
}

/* Rank 0 has the gradient; the others have -0, to which anything can be added. */
static void reduce(const struct model *m, const struct kase *k)
{
	float *whole = train_alloc(m->info.gradient_elements * sizeof(*whole));
	size_t n = 0;

	for (unsigned i = 0; i < TENSORS; i++)
		for (size_t e = 0; e < m->places[i].elements; e++, n++)
			whole[m->places[i].offset + e] = m->t->rank ? -0.0F : k->in[n];
	TRAINER_CHECK(n == N);
	TRAIN_OK(shardd_init_broadcast(m->c, m->info.unit, 0, m->buffer, &train_err));
	train_reduce(m->c, m->info.unit, DTYPE_FP32, whole, m->info.gradient_elements);
	free(whole);
}

/* --------------------------------------------------------------- comparing */

/* @off: how far the totals are apart, as a part of them. The factor is rounded twice (a
 * reciprocal, a product) on either side, and so is what it multiplies. */
static bool is_as(float got, float want, double off)
{
	if (off == 0 || !isfinite(want))
		return f32_bits(got) == f32_bits(want) || (isnan(got) && isnan(want));
	return fabs((double)got - (double)want) <=
	       (off + 6 * 0x1p-24) * fabs((double)want) + 2 * 0x1p-149;
}

static void check_gradient(const struct model *m, const struct kase *k, double off)
{
	size_t bytes = m->info.elements * sizeof(float), n = 0;
	float *p = train_alloc(bytes);

	train_params(m->c, m->info.unit, p, bytes);
	for (unsigned i = 0; i < TENSORS; i++)
		for (size_t e = 0; e < m->places[i].elements; e++, n++) {
			float got = -p[m->places[i].offset + e];

			if (is_as(got, k->want[n], off))
				continue;
			fprintf(stderr, "%s, layout %d: element %zu is %a, not %a\n", k->name,
				(int)m->s->layout, n, (double)got, (double)k->want[n]);
			TRAINER_CHECK(!"the system's");
		}
	free(p);
}

/* Return: how far the totals are apart, with the 1e-6 that is added to both; NaN: what was made of
 * them cannot be compared. */
static double clip(const struct model *m, const struct kase *k)
{
	struct shardd_clip_options by = k->clip;
	double total = -1;

	if (k->value) {
		TRAIN_OK(shardd_clip(m->c,
				     SHARDD_OPTIONS(clip, .group = SHARDD_WORLD, .by_value = true,
						    .value = by.max_norm, .units = NULL,
						    .n_units = 0),
				     NULL, &train_err));
		return 0;
	}
	TRAIN_OK(shardd_clip(m->c, &by, &total, &train_err));
	if (!golden_clip_is_near(total, k->total, N, by.norm_type)) {
		fprintf(stderr, "%s: the norm is %a, not %a\n", k->name, total, k->total);
		TRAINER_CHECK(!"the system's");
	}
	if ((isnan(total) && isnan(k->total)) || (float)total == (float)k->total)
		return 0;
	return isfinite(k->total) ? fabs(total - k->total) / (k->total + 1e-6) : (double)NAN;
}

static int replay_trainer(const struct trainer *t)
{
	struct model m = { .c = train_join(t), .t = t, .s = t->arg };

	register_model(&m);
	make_negative_zeros(&m);
	for (unsigned i = 0; i < m.s->n; i++) {
		double off;

		reduce(&m, &m.s->cases[i]);
		off = clip(&m, &m.s->cases[i]);
		TRAIN_OK(shardd_step(m.c, SHARDD_WORLD, NULL, &train_err));
		if (!isnan(off))
			check_gradient(&m, &m.s->cases[i], off);
	}
	TRAIN_OK(shardd_barrier(m.c, SHARDD_WORLD, &train_err));
	train_leave(m.c);
	return 0;
}

/* ------------------------------------------------------------------- tests */

/* At least @least cases, so that none is lost unseen. */
static void replay(unsigned world, unsigned least)
{
	_cleanup_(safetensors_freep) struct safetensors *f = golden_open("clip.safetensors");
	_cleanup_(freep) struct scene *s = calloc(1, sizeof(*s));

	cr_assert_not_null(s);
	read_scene(f, world, s);
	cr_assert_geq(s->n, least, "%u cases of %u ranks", s->n, world);
	s->layout = SHARDD_LAYOUT_FLAT;
	trainers_run(&trainfix, "flat", world, replay_trainer, s, 100);
	s->layout = SHARDD_LAYOUT_DIM0;
	trainers_run(&trainfix, "rows", world, replay_trainer, s, 100);
}

#define GOLDEN_CLIPPING(ranks, world, least) \
	Test(golden_clipping, ranks)         \
	{                                    \
		replay(world, least);        \
	}

GOLDEN_CLIPPING(one_rank, 1, 260)
GOLDEN_CLIPPING(two_ranks, 2, 190)
GOLDEN_CLIPPING(three_ranks, 3, 190)
GOLDEN_CLIPPING(four_ranks, 4, 190)
GOLDEN_CLIPPING(six_ranks, 6, 190)
GOLDEN_CLIPPING(eight_ranks, 8, 190)
