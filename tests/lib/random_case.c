#include "random_case.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"

uint32_t random_below(uint64_t *state, uint32_t below)
{
	uint64_t x = *state += 0x9e3779b97f4a7c15u;

	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return (uint32_t)((x ^ (x >> 31)) >> 11) % below;
}

/* One in @n. */
static bool once_in(uint64_t *s, uint32_t n)
{
	return random_below(s, n) == 0;
}

#define PICK(s, list) ((list)[random_below((s), ARRAY_SIZE(list))])

/* ------------------------------------------------------------------ tensors */

static void draw_shape(uint64_t *s, struct case_tensor *t)
{
	static const uint64_t sizes[] = { 1, 2, 3, 4, 5, 7, 8, 13 };

	t->dims = random_below(s, 4);
	t->n = 1;
	for (uint32_t i = 0; i < t->dims; i++) {
		t->shape[i] = PICK(s, sizes);
		t->n *= t->shape[i];
	}
}

static void draw_settings(uint64_t *s, struct case_tensor *t)
{
	static const double decays[] = { 0, 0.1, 0.02 }, factors[] = { 0, 0.5, 3 };

	t->has_weight_decay = once_in(s, 4);
	t->weight_decay = t->has_weight_decay ? PICK(s, decays) : 0;
	t->has_lr_factor = once_in(s, 5);
	t->lr_factor = t->has_lr_factor ? PICK(s, factors) : 0;
}

/* Another name of a tensor that is registered before it. */
static bool draw_alias(uint64_t *s, struct random_case *rc, unsigned unit, unsigned tensor)
{
	struct case_tensor *t = &rc->units[unit].tensors[tensor];
	const struct case_tensor *of;

	t->of_unit = (int)random_below(s, unit + 1);
	t->of = (int)random_below(s, rc->units[t->of_unit].n_tensors);
	of = &rc->units[t->of_unit].tensors[t->of];
	if ((t->of_unit == (int)unit && t->of >= (int)tensor) || !of->n)
		return false;
	memcpy(t->shape, of->shape, sizeof(t->shape));
	t->dims = of->dims;
	t->frozen = of->frozen;
	t->n = 0;
	return true;
}

static void draw_tensor(uint64_t *s, struct random_case *rc, unsigned unit, unsigned tensor)
{
	struct case_tensor *t = &rc->units[unit].tensors[tensor];

	snprintf(t->name, sizeof(t->name), "t%u", tensor);
	if (tensor > 0 && once_in(s, 8) && draw_alias(s, rc, unit, tensor))
		return;
	t->of_unit = t->of = -1;
	draw_shape(s, t);
	t->frozen = once_in(s, 5);
	draw_settings(s, t);
	rc->units[unit].trained |= !t->frozen;
}

/* -------------------------------------------------------------------- units */

static void draw_optimizer(uint64_t *s, struct shardd_optimizer *o)
{
	static const double rates[] = { 0.1, 0.01, 0.5 }, decays[] = { 0, 0, 0.01, 0.3 };
	static const double momenta[] = { 0, 0.9, 0.5 };
	static const enum shardd_optimizer_profile profiles[] = { 0, SHARDD_OPTIM_EAGER_SINGLE,
								  SHARDD_OPTIM_FOREACH,
								  SHARDD_OPTIM_REFERENCE_F64 };

	o->kind = (enum shardd_optimizer_kind)(1 + random_below(s, 3));
	o->lr = PICK(s, rates);
	o->weight_decay = PICK(s, decays);
	if (o->kind == SHARDD_SGD) {
		o->momentum = PICK(s, momenta);
		o->nesterov = o->momentum != 0 && once_in(s, 3);
		o->dampening = o->momentum != 0 && !o->nesterov && once_in(s, 3) ? 0.3 : 0;
	} else if (once_in(s, 2)) {
		o->beta1 = once_in(s, 2) ? 0.3 : 0.8;
		o->beta2 = 0.95;
		o->eps = 1e-6;
	} else {
		o->beta1 = 0.9;
		o->beta2 = 0.999;
		o->eps = 1e-8;
	}
	o->maximize = once_in(s, 5);
	if (o->kind != SHARDD_SGD) {
		o->amsgrad = once_in(s, 3);
		o->profile = PICK(s, profiles);
	} else if (once_in(s, 3)) {
		o->profile = SHARDD_OPTIM_FOREACH;
	}
	o->when = once_in(s, 3) ? SHARDD_OPTIM_IN_BACKWARD : SHARDD_OPTIM_AT_STEP;
}

static enum dtype draw_dtype(uint64_t *s)
{
	static const enum dtype dtypes[] = { DTYPE_FP32, DTYPE_FP32, DTYPE_BF16, DTYPE_FP16 };

	return PICK(s, dtypes);
}

static bool is_ddp(const struct model_unit *m)
{
	return m->profile >= SHARDD_PROFILE_DDP;
}

static void draw_factors(uint64_t *s, struct model_unit *m)
{
	if (m->profile == SHARDD_PROFILE_FSDP2) {
		m->factor = once_in(s, 4) ? 3 : 0;
		m->force = once_in(s, 4);
	} else if (!is_ddp(m) && once_in(s, 4)) {
		m->pre = 1 + random_below(s, 3);
		m->post = 1.5;
	}
}

static void draw_reduce(uint64_t *s, uint32_t world, struct model_unit *m)
{
	m->profile = 1 + random_below(s, SHARDD_PROFILE_DDP_BUCKET_VIEW);
	m->gradient = draw_dtype(s);
	if (m->profile != SHARDD_PROFILE_DDP && m->profile != SHARDD_PROFILE_DDP_BUCKET_VIEW)
		m->reduce = once_in(s, 2) ? draw_dtype(s) : DTYPE_NONE;
	if (is_ddp(m))
		m->strategy = SHARDD_REPLICATE;
	else if (once_in(s, 3))
		m->strategy = once_in(s, 2) ? SHARDD_REPLICATE : SHARDD_HYBRID;
	while (m->strategy == SHARDD_HYBRID && (!m->shard_ranks || world % m->shard_ranks))
		m->shard_ranks = 1 + random_below(s, world);
	draw_factors(s, m);
}

static void draw_unit(uint64_t *s, struct random_case *rc, unsigned number)
{
	static const uint32_t multiples[] = { 0, 0, 4, 128 };
	struct case_unit *u = &rc->units[number];

	snprintf(u->name, sizeof(u->name), "unit%u", number);
	u->n_tensors = 1 + random_below(s, CASE_MAX_TENSORS);
	for (unsigned i = 0; i < u->n_tensors; i++)
		draw_tensor(s, rc, number, i);
	u->layout = once_in(s, 2) ? SHARDD_LAYOUT_DIM0 : SHARDD_LAYOUT_FLAT;
	u->multiple = u->layout == SHARDD_LAYOUT_FLAT ? PICK(s, multiples) : 0;
	u->compute = once_in(s, 3) ? draw_dtype(s) : DTYPE_FP32;
	draw_reduce(s, rc->world, &u->reduce);
	u->guarded = once_in(s, 3);
	u->reshard = u->guarded ? (enum shardd_reshard)random_below(s, 5) : 0;
	u->own_optimizer = once_in(s, 6);
	if (u->own_optimizer)
		u->optimizer.when = SHARDD_OPTIM_BY_TRAINER;
	else
		draw_optimizer(s, &u->optimizer);
}

/* ------------------------------------------------------------------- passes */

/* Only where there are several replicas, and FSDP1 shards or its gradients are narrow. */
static bool may_defer(const struct model_unit *m, uint32_t world)
{
	uint32_t shard = m->strategy == SHARDD_HYBRID ? m->shard_ranks : 1;

	if (m->profile == SHARDD_PROFILE_FSDP1_HOOK && shard == 1 && m->gradient == DTYPE_FP32)
		return false;
	return !is_ddp(m) && m->strategy != 0 && shard < world;
}

/* A step ends with a reduce; before it what the unit can do. */
static void draw_passes(uint64_t *s, const struct model_unit *m, uint32_t world, unsigned n,
			char *ret)
{
	for (unsigned i = 0; i + 1 < n; i++) {
		char kind = "snnmd"[random_below(s, 5)];

		if (kind == 'd' && !may_defer(m, world))
			kind = 's';
		ret[i] = kind;
	}
	ret[n - 1] = n > 1 && ret[n - 2] == 'n' && once_in(s, 3) ? 'r' : 's';
	ret[n] = 0;
}

static bool any_when(const struct random_case *rc, enum shardd_optimizer_when when)
{
	for (unsigned u = 0; u < rc->n_units; u++)
		if (rc->units[u].trained && rc->units[u].optimizer.when == when)
			return true;
	return false;
}

/* An optimizer in backward has to know before, and the trainers' own is not told of it. */
static void draw_gradients(uint64_t *s, struct random_case *rc, struct case_step *x)
{
	static const double types[] = { 2, INFINITY, 1, 3 };
	bool back = any_when(rc, SHARDD_OPTIM_IN_BACKWARD);

	x->norm_type = PICK(s, types);
	x->profile = (enum shardd_clip_profile)(1 + random_below(s, 3));
	if (any_when(rc, SHARDD_OPTIM_BY_TRAINER)) {
		x->planned = back && x->has_lr;
		return;
	}
	x->max_norm = once_in(s, 3) ? 0.5 : 0;
	x->inv_scale = once_in(s, 4) ? 0.375 : 0;
	x->planned =
		(x->max_norm != 0 || x->inv_scale != 0 || x->has_lr) && (back || once_in(s, 4));
	x->clamp = !back && !x->planned && once_in(s, 5) ? 0.01 : 0;
	x->discard =
		(!back || (x->planned && (x->max_norm != 0 || x->inv_scale != 0))) && once_in(s, 8);
}

static void draw_step(uint64_t *s, struct random_case *rc, unsigned step)
{
	struct case_step *x = &rc->steps[step];

	rc->n_passes[step] = 1 + random_below(s, CASE_MAX_PASSES);
	for (unsigned u = 0; u < rc->n_units; u++)
		draw_passes(s, &rc->units[u].reduce, rc->world, rc->n_passes[step],
			    rc->units[u].passes[step]);
	x->has_lr = once_in(s, 4);
	x->lr = x->has_lr ? 0.02 : 0;
	draw_gradients(s, rc, x);
}

/* ---------------------------------------- what is drawn beside, by another row of numbers */

/* Some of the ranks of a job, in any order. */
static void draw_group(uint64_t *s, struct random_case *rc)
{
	uint32_t n, most = rc->world > CASE_USUAL_RANKS ? CASE_MAX_RANKS : CASE_USUAL_RANKS;

	rc->grouped = once_in(s, 3);
	rc->job_world = rc->world;
	if (rc->grouped)
		rc->job_world += random_below(s, most - rc->world + 1);
	for (n = 0; n < rc->job_world; n++) {
		uint32_t k = rc->grouped ? random_below(s, n + 1) : n;

		if (k < n)
			rc->ranks[n] = rc->ranks[k];
		rc->ranks[k] = n;
	}
}

static void draw_new_factors(uint64_t *s, const struct model_unit *m, struct case_factors *f)
{
	struct model_unit like = { .profile = m->profile };

	f->given = m->profile && !is_ddp(m) && once_in(s, 4);
	if (!f->given)
		return;
	draw_factors(s, &like);
	*f = (struct case_factors){ true, like.pre, like.post, like.factor, like.force };
}

static bool fits_buckets(const struct case_unit *u)
{
	return u->trained && is_ddp(&u->reduce) && !u->own_optimizer;
}

/* Sums of rows are fp32 with these profiles; what is rounded before and after is test_sparse's. */
static bool may_be_sparse(const struct case_unit *u, const struct case_tensor *t)
{
	return t->n && !t->frozen && t->dims > 0 && u->reduce.gradient == DTYPE_FP32 &&
	       (u->reduce.reduce == DTYPE_NONE || u->reduce.reduce == DTYPE_FP32);
}

static void draw_buckets(uint64_t *s, struct random_case *rc)
{
	static const uint64_t bytes[] = { 0, 16, 64, 300 };

	rc->bucket_bytes = PICK(s, bytes);
	rc->static_graph = once_in(s, 4);
	for (unsigned u = 0; u < rc->n_units; u++) {
		struct case_unit *x = &rc->units[u];

		x->in_buckets = fits_buckets(x) && !once_in(s, 4);
		for (unsigned i = 0; x->in_buckets && i < rc->n_steps; i++)
			strcpy(x->passes[i], "s");
		for (unsigned t = 0; x->in_buckets && t < x->n_tensors; t++)
			x->tensors[t].sparse = may_be_sparse(x, &x->tensors[t]) && once_in(s, 2);
	}
}

static void draw_beside(uint64_t s, struct random_case *rc)
{
	draw_group(&s, rc);
	rc->prefetch = once_in(&s, 2);
	for (unsigned u = 0; u < rc->n_units; u++)
		for (unsigned i = 0; rc->units[u].trained && i < rc->n_steps; i++)
			draw_new_factors(&s, &rc->units[u].reduce, &rc->units[u].factors[i]);
	draw_buckets(&s, rc);
}

struct model_unit random_case_reduce(const struct case_unit *u, unsigned step)
{
	struct model_unit m = u->reduce;

	for (unsigned i = 0; i <= step; i++) {
		if (!u->factors[i].given)
			continue;
		m.pre = u->factors[i].pre;
		m.post = u->factors[i].post;
		m.factor = u->factors[i].factor;
		m.force = u->factors[i].force;
	}
	m.passes = u->passes[step];
	return m;
}

bool random_case_has_row(const struct random_case *rc, unsigned u, unsigned t, unsigned step,
			 uint64_t row)
{
	const struct case_tensor *tensor = &rc->units[u].tensors[t];
	uint64_t tensors = (u * CASE_MAX_TENSORS + t) * CASE_MAX_STEPS + step;
	uint64_t of_tensor = rc->seed * 977 + tensors, of_row = of_tensor * 64 + row;

	/* one there is always: without any the tensor would be left alone */
	return !tensor->sparse || row == random_below(&of_tensor, (uint32_t)tensor->shape[0]) ||
	       random_below(&of_row, 3) > 0;
}

/* More than the usual number by another row of numbers, too. */
static uint32_t draw_world(uint64_t *s, uint64_t beside)
{
	uint32_t usual = 1 + random_below(s, CASE_USUAL_RANKS);

	if (!once_in(&beside, 16))
		return usual;
	return CASE_USUAL_RANKS + 1 + random_below(&beside, CASE_MAX_RANKS - CASE_USUAL_RANKS);
}

void random_case_draw(uint64_t seed, struct random_case *ret)
{
	uint64_t s = seed;

	*ret = (struct random_case){ .seed = seed };
	ret->world = draw_world(&s, seed ^ 0x68e31da4b492d08bu);
	ret->n_units = 1 + random_below(&s, CASE_MAX_UNITS);
	ret->special = once_in(&s, 8);
	for (unsigned u = 0; u < ret->n_units; u++)
		draw_unit(&s, ret, u);
	ret->n_steps = 1 + random_below(&s, CASE_MAX_STEPS);
	for (unsigned i = 0; i < ret->n_steps; i++)
		draw_step(&s, ret, i);
	draw_beside(seed ^ 0xb5297a4d3f84d5b5u, ret);
}

/* ----------------------------------------------------------------- printing */

static void print_unit(const struct case_unit *u)
{
	const struct model_unit *m = &u->reduce;
	const struct shardd_optimizer *o = &u->optimizer;

	fprintf(stderr,
		"  %s: layout %d/%u, strategy %u/%u, compute %s, gradient %s, reduce %s, profile "
		"%u, factors %g %g %g %d, optimizer %d: lr %g, decay %g, momentum %g%s, betas %g "
		"%g, eps %g, dampening %g, profile %d, when %d%s%s%s %d\n",
		u->name, (int)u->layout, u->multiple, m->strategy, m->shard_ranks,
		dtype_name(u->compute), dtype_name(m->gradient),
		m->reduce ? dtype_name(m->reduce) : "open", m->profile, m->pre, m->post, m->factor,
		m->force, (int)o->kind, o->lr, o->weight_decay, o->momentum,
		o->nesterov ? " (nesterov)" : "", o->beta1, o->beta2, o->eps, o->dampening,
		(int)o->profile, (int)o->when, o->amsgrad ? ", amsgrad" : "",
		o->maximize ? ", maximize" : "", u->guarded ? ", guarded" : ", reshard",
		(int)u->reshard);
	if (u->in_buckets)
		fprintf(stderr, "    in buckets\n");
	for (unsigned i = 0; i < u->n_tensors; i++) {
		const struct case_tensor *t = &u->tensors[i];

		fprintf(stderr, "    %s %ux[%d %d %d]%s", t->name, t->dims, (int)t->shape[0],
			(int)t->shape[1], (int)t->shape[2], t->frozen ? " frozen" : "");
		if (!t->n)
			fprintf(stderr, " is tensor %d of unit %d", t->of, t->of_unit);
		if (t->sparse)
			fprintf(stderr, " sparse");
		if (t->has_weight_decay)
			fprintf(stderr, " decay %g", t->weight_decay);
		if (t->has_lr_factor)
			fprintf(stderr, " lr times %g", t->lr_factor);
		fprintf(stderr, "\n");
	}
}

void random_case_print(const struct random_case *rc)
{
	fprintf(stderr, "case of seed %llu: %u ranks%s\n", (unsigned long long)rc->seed, rc->world,
		rc->special ? ", special numbers" : "");
	fprintf(stderr, "  %s of %u:", rc->grouped ? "a group" : "all", rc->job_world);
	for (uint32_t r = 0; r < rc->world; r++)
		fprintf(stderr, " %u", rc->ranks[r]);
	fprintf(stderr, "; prefetch %s; buckets of %llu bytes%s\n",
		rc->prefetch ? "by lists" : "learned", (unsigned long long)rc->bucket_bytes,
		rc->static_graph ? ", static graph" : "");
	for (unsigned u = 0; u < rc->n_units; u++)
		print_unit(&rc->units[u]);
	for (unsigned i = 0; i < rc->n_steps; i++) {
		fprintf(stderr, "  step %u: passes", i);
		for (unsigned u = 0; u < rc->n_units; u++)
			fprintf(stderr, " %s%s", rc->units[u].passes[i],
				rc->units[u].factors[i].given ? " with new factors" : "");
		fprintf(stderr,
			", lr %g, scaled by %g, clipped to %g in norm %g, profile %d, clamped to "
			"%g%s%s\n",
			rc->steps[i].lr, rc->steps[i].inv_scale, rc->steps[i].max_norm,
			rc->steps[i].norm_type, (int)rc->steps[i].profile, rc->steps[i].clamp,
			rc->steps[i].planned ? ", planned" : "",
			rc->steps[i].discard ? ", discarded" : "");
	}
}
