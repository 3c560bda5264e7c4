#include "unit/optim.h"

#include <math.h>

#include "core/check.h"
#include "core/fnv.h"
#include "unit/runs.h"

float *optim_at(const struct region *r, uint64_t i)
{
	return r->slab ? (float *)region_addr(r) + i : NULL;
}

/* A stretch of a part whose elements have the same step. */
struct stretch {
	uint64_t at; /* element of the part's arrays */
	uint64_t n;
	struct setting set;
	uint64_t steps;     /* that its tensors have had */
	uint64_t tail_from; /* FUSED: element of the stretch; UINT64_MAX: none */
};

/* The launches of one part as they are made. */
struct steps {
	const struct unit *u;
	const struct unit_part *p;
	const struct step_rates *rates;
	struct launch *launches; /* NULL: they are only counted */
	size_t n;
	struct stretch now; /* not yet a launch */
};

/* Elements of one vector in PyTorch's loop (AVX2): it handles the rest after the last whole vector
 * one by one. */
#define FUSED_VECTOR 8u

static enum k_profile optim_profile_of(const state_optimizer *o)
{
	return (enum k_profile)(o->profile ? o->profile - OPTIM_EAGER_SINGLE : 0);
}

/* PyTorch treats a learning rate that is a tensor like any tensor: the values computed from it are
 * rounded at each operation, and so are the numbers combined with it. */
static void optim_round_lr(const struct setting *s, double corrected, struct k_adam_f64 *x)
{
	float lr = (float)s->lr;

	x->decay = 1.0f - lr * (float)s->weight_decay;
	x->step_size = lr / (float)corrected;
}

static struct k_adam_f64 optim_f64_of(const struct setting *s, uint64_t steps)
{
	double t = (double)(steps + 1), corrected = 1.0 - pow(s->beta1, t);
	struct k_adam_f64 x = { .decay = 1.0 - s->lr * s->weight_decay,
				.wd = s->weight_decay,
				.b1 = s->beta1,
				.w1 = 1.0 - s->beta1,
				.b2 = s->beta2,
				.w2 = 1.0 - s->beta2,
				.step_size = s->lr / corrected,
				.sq = sqrt(1.0 - pow(s->beta2, t)),
				.eps = s->eps };

	if (s->lr_fp32)
		optim_round_lr(s, corrected, &x);
	return x;
}

/* The common fields of k_adamw and k_adam; @x: f64_of. */
#define ADAM_OF(o, part, s, x)                                                                \
	.p = optim_at(&(part)->params, (s)->at), .g = optim_at(&(part)->grads, (s)->at),      \
	.m = optim_at(&(part)->state1, (s)->at), .v = optim_at(&(part)->state2, (s)->at),     \
	.vmax = optim_at(&(part)->state3, (s)->at), .w1 = (float)(x).w1, .b2 = (float)(x).b2, \
	.w2 = (float)(x).w2, .step_size = (float)(x).step_size, .sq = (float)(x).sq,          \
	.eps = (float)(x).eps, .profile = optim_profile_of(o), .maximize = (s)->set.maximize, \
	.tail_from = (s)->tail_from, .f64 = (x)

static void optim_adamw_launch(const state_optimizer *o, const struct unit_part *p,
			       const struct stretch *s, struct launch *launch)
{
	struct k_adam_f64 x = optim_f64_of(&s->set, s->steps);

	launch->kind = LAUNCH_ADAMW;
	launch->adamw =
		(struct k_adamw){ ADAM_OF(o, p, s, x), .decay = (float)x.decay, .b1 = (float)x.b1 };
}

static void optim_adam_launch(const state_optimizer *o, const struct unit_part *p,
			      const struct stretch *s, struct launch *launch)
{
	struct k_adam_f64 x = optim_f64_of(&s->set, s->steps);

	launch->kind = LAUNCH_ADAM;
	launch->adam = (struct k_adam){ ADAM_OF(o, p, s, x), .wd = (float)x.wd };
}

static void optim_sgd_launch(const state_optimizer *o, const struct unit_part *p,
			     const struct stretch *s, struct launch *launch)
{
	const struct setting *set = &s->set;

	launch->kind = LAUNCH_SGD;
	launch->sgd = (struct k_sgd){ .p = optim_at(&p->params, s->at),
				      .g = optim_at(&p->grads, s->at),
				      .buf = optim_at(&p->state1, s->at),
				      .lr = (float)set->lr,
				      .wd = (float)set->weight_decay,
				      .mu = p->state1.slab ? (float)set->momentum : 0,
				      .nesterov = set->nesterov,
				      .first = s->steps == 0,
				      .maximize = set->maximize,
				      .dampening = set->dampening,
				      .profile = optim_profile_of(o),
				      .tail_from = s->tail_from };
}

static void optim_end_stretch(struct steps *x)
{
	const state_optimizer *o = x->u->rec->optimizer;
	struct launch *launch = x->launches ? &x->launches[x->n] : NULL;

	if (!x->now.n)
		return;
	x->n++;
	if (!launch)
		return;
	*launch = (struct launch){ .n = x->now.n };
	if (o->kind == OPTIM_ADAMW)
		optim_adamw_launch(o, x->p, &x->now, launch);
	else if (o->kind == OPTIM_ADAM)
		optim_adam_launch(o, x->p, &x->now, launch);
	else
		optim_sgd_launch(o, x->p, &x->now, launch);
}

/* The settings with which the unit was registered, at the learning rate of the step. */
static struct setting optim_registered(const state_optimizer *o, const struct step_rates *rates)
{
	return (struct setting){ .lr = rates->has_lr ? rates->lr : o->lr,
				 .weight_decay = o->weight_decay,
				 .momentum = o->momentum,
				 .dampening = o->dampening,
				 .beta1 = o->beta1,
				 .beta2 = o->beta2,
				 .eps = o->eps,
				 .nesterov = o->nesterov,
				 .maximize = o->maximize };
}

static struct setting optim_setting_of(const struct steps *x, uint32_t tensor)
{
	const struct settings *given = x->rates->settings;
	const struct setting *own = given ? settings_find(given, x->u->id, tensor) : NULL;
	const state_tensor *t = x->u->rec->tensors[tensor];
	struct setting s;

	if (own)
		return *own;
	s = optim_registered(x->u->rec->optimizer, x->rates);
	if (t->has_lr_factor)
		s.lr *= t->lr_factor;
	if (t->has_weight_decay)
		s.weight_decay = t->weight_decay;
	return s;
}

static struct stretch optim_stretch_of(const struct steps *x, uint32_t tensor)
{
	return (struct stretch){ .set = optim_setting_of(x, tensor),
				 .steps = unit_steps(x->u, tensor),
				 .tail_from = UINT64_MAX };
}

static bool optim_is_alike(const struct stretch *a, const struct stretch *b)
{
	return setting_same(&a->set, &b->set) && a->steps == b->steps;
}

/* The gap between two runs (padding of rows) belongs to the run before it: it stays 0. */
static void optim_add_merged(struct steps *x, const struct unit_run *run)
{
	struct stretch next = optim_stretch_of(x, run->tensor);

	if (x->now.n && optim_is_alike(&next, &x->now)) {
		x->now.n = run->at + run->n - x->now.at;
		return;
	}
	x->now.n = x->now.n ? run->at - x->now.at : 0;
	optim_end_stretch(x);
	next.at = run->at;
	next.n = run->n;
	x->now = next;
}

/* A tensor that no rank has used has no gradient, and is not stepped. */
static bool optim_is_stepped(const struct unit *u, uint32_t tensor)
{
	return !u->tensors[tensor].frozen && !(u->some_lack && u->lacks[tensor]);
}

static void optim_merged(struct steps *x)
{
	struct unit_run run;

	for (uint32_t i = 0; i < x->u->rec->n_tensors; i++) {
		if (x->u->tensors[i].frozen || !unit_part_run(x->u, x->p, i, &run))
			continue;
		if (optim_is_stepped(x->u, i)) {
			optim_add_merged(x, &run);
		} else {
			optim_end_stretch(x);
			x->now = (struct stretch){ 0 };
		}
	}
	optim_end_stretch(x);
}

/* Elements [@at, @end) of @tensor, which belong to a piece that PyTorch would step as one tensor:
 * it begins at @from and has @n elements. */
static void optim_add_fused(struct steps *x, uint32_t tensor, uint64_t at, uint64_t end,
			    uint64_t from, uint64_t n)
{
	uint64_t tail = from + n / FUSED_VECTOR * FUSED_VECTOR;

	x->now = optim_stretch_of(x, tensor);
	x->now.at = at;
	x->now.n = end - at;
	if (tail < end)
		x->now.tail_from = tail > at ? tail - at : 0;
	optim_end_stretch(x);
}

/* FLAT: the step covers a rank's shard, including padding. */
static void optim_fused_flat(struct steps *x, const struct unit_run *run)
{
	uint64_t shard = x->u->layout.shard_elements;

	for (uint64_t at = run->at; at < run->at + run->n;) {
		uint64_t from = at / shard * shard, end = from + shard;

		end = end < run->at + run->n ? end : run->at + run->n;
		optim_add_fused(x, run->tensor, at, end, from, shard);
		at = end;
	}
}

/* DIM0: a rank's rows of one tensor. */
static void optim_fused_rows(struct steps *x, const struct unit_run *run)
{
	uint64_t piece = x->u->tensors[run->tensor].piece;

	for (uint64_t at = 0; at < run->n; at += piece) {
		uint64_t n = run->n - at < piece ? run->n - at : piece;

		optim_add_fused(x, run->tensor, run->at + at, run->at + at + n, run->at + at, n);
	}
}

/* DDP: every tensor is a parameter of its own. */
static void optim_fused_whole(struct steps *x, const struct unit_run *run)
{
	uint64_t vectors = x->u->tensors[run->tensor].elements / FUSED_VECTOR * FUSED_VECTOR;
	uint64_t tail = vectors > run->first ? vectors - run->first : 0;

	x->now = optim_stretch_of(x, run->tensor);
	x->now.at = run->at;
	x->now.n = run->n;
	if (tail < run->n)
		x->now.tail_from = tail;
	optim_end_stretch(x);
}

static void optim_fused(struct steps *x)
{
	bool ddp = x->u->rec->reduce_profile >= PROFILE_DDP;
	struct unit_run run;

	for (uint32_t i = 0; i < x->u->rec->n_tensors; i++) {
		if (!optim_is_stepped(x->u, i) || !unit_part_run(x->u, x->p, i, &run))
			continue;
		if (ddp)
			optim_fused_whole(x, &run);
		else if (x->u->layout.dim0)
			optim_fused_rows(x, &run);
		else
			optim_fused_flat(x, &run);
	}
}

static bool optim_is_special(const state_tensor *t)
{
	return t->has_weight_decay || t->has_lr_factor || t->missed;
}

static bool optim_has_special(const state_unit *rec)
{
	for (size_t i = 0; i < rec->n_tensors; i++)
		if (optim_is_special(rec->tensors[i]))
			return true;
	return false;
}

/* Does every tensor of @u have the same step? @ret: its settings, if so. */
static bool optim_is_uniform(const struct unit *u, const struct step_rates *rates,
			     struct setting *ret)
{
	const struct settings *s = rates->settings;

	if (optim_has_special(u->rec) || u->some_lack || (s && settings_names(s, u->id)))
		return false;
	*ret = s && s->rest != UINT32_MAX ? s->all[s->rest]
					  : optim_registered(u->rec->optimizer, rates);
	return true;
}

size_t optim_step_launches(const struct unit *u, const struct unit_part *p,
			   const struct step_rates *rates, struct launch *launches)
{
	const state_optimizer *o = u->rec->optimizer;
	struct steps x = { .u = u, .p = p, .rates = rates, .launches = launches };
	struct setting all;

	CHECK(o->kind < _OPTIM_N);
	if (!p->n || o->kind == OPTIM_NONE)
		return 0;
	if (o->profile == OPTIM_FUSED) {
		optim_fused(&x);
	} else if (!optim_is_uniform(u, rates, &all)) {
		optim_merged(&x);
	} else {
		x.now = (struct stretch){
			.n = p->n, .set = all, .steps = o->steps, .tail_from = UINT64_MAX
		};
		optim_end_stretch(&x);
	}
	return x.n;
}

size_t optim_scale_launches(const struct unit *u, const struct unit_part *p, float factor,
			    struct launch *launches)
{
	struct unit_run run = { .n = p->n };
	size_t n = 0;

	for (uint32_t i = 0; i < (u->layout.dim0 ? u->rec->n_tensors : 1); i++) {
		if (u->layout.dim0 && (u->tensors[i].frozen || !unit_part_run(u, p, i, &run)))
			continue;
		if (!run.n)
			continue;
		if (launches) {
			launches[n] = (struct launch){ .kind = LAUNCH_SCALE, .n = run.n };
			launches[n].scale = (struct k_scale){ .x = optim_at(&p->grads, run.at),
							      .factor = factor };
		}
		n++;
	}
	return n;
}

/* A stream per unit and tensor: FNV-1a over both names, so that the values of a tensor do not
 * depend on other units. */
static uint64_t optim_stream_of(const char *unit, const char *tensor)
{
	uint64_t h = fnv_add_text(FNV_BEGIN, unit);

	return fnv_add_text(fnv_add(h, 0xff), tensor);
}

static void optim_fill_launch(const struct unit *u, const struct region *to,
			      const struct unit_run *run, uint64_t seed, struct launch *launch)
{
	const state_tensor *t = u->rec->tensors[run->tensor];

	*launch = (struct launch){ .kind = LAUNCH_FILL, .n = run->n };
	launch->fill = (struct k_fill){
		.dst = optim_at(to, run->at),
		.seed = seed,
		.stream = optim_stream_of(u->rec->name, t->name),
		.first = run->first,
		.kind = t->init_kind ? (enum fill_kind)t->init_kind : FILL_CONSTANT,
		.a = t->init_a,
		.b = t->init_b,
	};
}

unsigned optim_seed_launches(const struct unit *u, const struct unit_part *p,
			     const struct region *to, uint64_t seed, struct launch *launches)
{
	struct unit_run run;
	unsigned n_launches = 0;

	for (uint32_t i = 0; i < u->rec->n_tensors; i++)
		if (unit_part_run(u, p, i, &run))
			optim_fill_launch(u, to, &run, seed, &launches[n_launches++]);
	return n_launches;
}

unsigned optim_zero_launches(const struct unit_part *p, struct launch *launches)
{
	const struct region *arrays[UNIT_MAX_STATES] = { &p->state1, &p->state2, &p->state3 };
	unsigned n = 0;

	for (unsigned i = 0; i < UNIT_MAX_STATES; i++) {
		if (!arrays[i]->slab || !p->n)
			continue;
		launches[n] = (struct launch){ .kind = LAUNCH_FILL, .n = p->n };
		launches[n++].fill =
			(struct k_fill){ .dst = optim_at(arrays[i], 0), .kind = FILL_CONSTANT };
	}
	return n;
}
