#include "golden_optim.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"

/* torch steps two vectors of eight elements at once, on the machine that made these. */
#define TWO_VECTORS 16

/* "a:b:c", one for each step. */
static void read_rates(struct golden_optim *o)
{
	char text[128], *at = text, *end;

	golden_text(o->about, "lr", text, sizeof(text));
	for (unsigned i = 0; i < GOLDEN_OPTIM_STEPS; i++, at = end + 1) {
		o->lr[i] = strtod(at, &end);
		cr_assert(end != at && *end == (i + 1 < GOLDEN_OPTIM_STEPS ? ':' : 0), "%s",
			  o->name);
	}
}

static void read_settings(struct golden_optim *o)
{
	o->scaler = (unsigned)golden_number(o->about, "scaler");
	o->maximize = golden_number(o->about, "maximize") != 0;
	o->weight_decay = golden_number(o->about, "weight_decay");
	if (golden_optim_is(o, "sgd")) {
		o->momentum = golden_number(o->about, "momentum");
		o->dampening = golden_number(o->about, "dampening");
		o->nesterov = golden_number(o->about, "nesterov") != 0;
		return;
	}
	o->amsgrad = golden_number(o->about, "amsgrad") != 0;
	o->beta1 = golden_number(o->about, "beta1");
	o->beta2 = golden_number(o->about, "beta2");
	o->eps = golden_number(o->about, "eps");
}

/* "p": where @about's case starts; "g": the gradients it gets. */
static struct safetensors_tensor input(const struct safetensors *f, const char *about,
				       const char *part)
{
	char name[32];

	return golden_part(f, golden_text(about, "input", name, sizeof(name)), part);
}

void golden_optim_read(struct golden_optim *o, const struct safetensors *f, const char *name,
		       const char *about)
{
	struct safetensors_tensor p = input(f, about, "p");

	*o = (struct golden_optim){ .f = f, .name = name, .about = about, .start = p.data };
	cr_assert(p.dtype == DTYPE_FP32 && p.elements == GOLDEN_OPTIM_N);
	o->profile = golden_is(about, "form", "fused") ? K_FUSED
		     : golden_is(about, "form", "f64") ? K_REFERENCE_F64
						       : K_EAGER_SINGLE;
	read_settings(o);
	read_rates(o);
}

bool golden_optim_is(const struct golden_optim *o, const char *optimizer)
{
	return golden_is(o->about, "optimizer", optimizer);
}

bool golden_optim_divides(const struct golden_optim *o)
{
	return o->profile == K_FUSED && o->scaler == 1;
}

const float *golden_optim_row(const struct golden_optim *o, const char *part, unsigned i)
{
	struct safetensors_tensor t;

	if (!golden_has(o->f, o->name, part))
		return NULL;
	t = golden_part(o->f, o->name, part);
	cr_assert(t.dtype == DTYPE_FP32 && t.dims == 2 && t.shape[0] == GOLDEN_OPTIM_STEPS);
	cr_assert(t.shape[1] == GOLDEN_OPTIM_N && i < GOLDEN_OPTIM_STEPS);
	return (const float *)t.data + (size_t)i * GOLDEN_OPTIM_N;
}

const float *golden_optim_gradients(const struct golden_optim *o, unsigned i)
{
	struct safetensors_tensor g = input(o->f, o->about, "g");

	if (o->scaler)
		return golden_optim_row(o, "g", i);
	cr_assert(g.dtype == DTYPE_FP32 && g.dims == 2 && g.shape[0] == GOLDEN_OPTIM_STEPS);
	cr_assert(g.shape[1] == GOLDEN_OPTIM_N && i < GOLDEN_OPTIM_STEPS);
	return (const float *)g.data + (size_t)i * GOLDEN_OPTIM_N;
}

float golden_optim_number(const struct golden_optim *o, const char *part, unsigned i)
{
	struct safetensors_tensor t = golden_part(o->f, o->name, part);

	cr_assert(t.dims == 1 && i < t.shape[0]);
	return golden_at(t.data, t.dtype, i);
}

/* In double torch interpolates m, we add two products: what is rounded to fp32 may be the
 * next number, and again after each step. */
static bool is_near(float got, float want, unsigned i)
{
	if (!isfinite(want))
		return isnan(want) ? isnan(got) : got == want;
	return fabs((double)got - (double)want) <=
	       (i + 1) * (0x1p-23 * fabs((double)want) + 0x1p-149);
}

/* torch interpolates the elements behind whole pairs of vectors one by one, there by
 * subtracting where elsewhere it adds the opposite: with beta1 0 the product is a zero, so
 * that of a gradient of -0 the sign of m differs, and of a p that is -0. Nothing else can. */
static bool sign_may_differ(const struct golden_optim *o, size_t e)
{
	return !golden_optim_is(o, "sgd") && o->beta1 == 0 && o->profile == K_EAGER_SINGLE &&
	       e >= GOLDEN_OPTIM_N - GOLDEN_OPTIM_N % TWO_VECTORS;
}

static bool is_same(const struct golden_optim *o, float got, float want, unsigned i, size_t e)
{
	if (o->profile == K_REFERENCE_F64)
		return is_near(got, want, i);
	if (got == 0 && want == 0 && sign_may_differ(o, e))
		return true;
	return f32_bits(got) == f32_bits(want) || (isnan(got) && isnan(want));
}

bool golden_optim_same(const struct golden_optim *o, const char *part, const float *got, unsigned i,
		       char *text, size_t bytes)
{
	const float *want = golden_optim_row(o, part, i);

	for (size_t e = 0; want && e < GOLDEN_OPTIM_N; e++) {
		if (is_same(o, got[e], want[e], i, e))
			continue;
		snprintf(text, bytes, "%s: %s[%zu] after step %u is %a, not %a", o->name, part, e,
			 i + 1, (double)got[e], (double)want[e]);
		return false;
	}
	return true;
}
