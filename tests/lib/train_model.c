#include "train_model.h"

#include <math.h>
#include <stdlib.h>

#include "core/check.h"

static const struct case_unit *unit_of(const struct train_model *m, unsigned u)
{
	return &m->rc->units[u];
}

static bool is_trained(const struct case_tensor *t)
{
	return t->n && !t->frozen;
}

void train_model_init(struct train_model *m, const struct random_case *rc,
		      const struct model_world *world)
{
	*m = (struct train_model){ .rc = rc, .world = *world };
	for (unsigned u = 0; u < rc->n_units; u++)
		for (unsigned i = 0; i < rc->units[u].n_tensors; i++) {
			uint64_t n = rc->units[u].tensors[i].n;
			float *p = calloc(5 * n + 1, sizeof(*p));
			const struct k_fill fill = { .dst = p,
						     .seed = rc->seed,
						     .stream = u * CASE_MAX_TENSORS + i,
						     .kind = FILL_UNIFORM,
						     .a = -1,
						     .b = 1 };

			CHECK(p);
			m->tensors[u][i] =
				(struct train_tensor){ p, p + n, p + 2 * n, p + 3 * n, p + 4 * n };
			kernels_ref()->fill(&fill, 0, n);
		}
}

void train_model_deinit(struct train_model *m)
{
	for (unsigned u = 0; u < m->rc->n_units; u++)
		for (unsigned i = 0; i < m->rc->units[u].n_tensors; i++)
			free(m->tensors[u][i].p);
}

/* ---------------------------------------------------------------- gradients */

/* No two elements of a case have the same; of tensor 0 of unit 0 those that reduce_model has
 * special numbers for, if the case wants them. */
static size_t index_of(const struct train_model *m, unsigned u, unsigned t, unsigned step,
		       uint64_t i)
{
	size_t tensor = (m->rc->seed % 1000 * CASE_MAX_STEPS + step) * CASE_MAX_UNITS + u;

	if (m->rc->special && u + t + step == 0)
		return i;
	return 16 + (tensor * CASE_MAX_TENSORS + t) * 4096 + i;
}

float train_model_number(const struct train_model *m, unsigned u, unsigned t, uint32_t rank,
			 unsigned step, unsigned pass, uint64_t i)
{
	return model_number(&unit_of(m, u)->reduce, rank, pass, index_of(m, u, t, step, i));
}

typedef void (*each_fn)(struct train_model *m, unsigned u, unsigned t, void *arg);

static void each_trained(struct train_model *m, each_fn fn, void *arg)
{
	for (unsigned u = 0; u < m->rc->n_units; u++)
		for (unsigned t = 0; t < unit_of(m, u)->n_tensors; t++)
			if (is_trained(&unit_of(m, u)->tensors[t]))
				fn(m, u, t, arg);
}

static const struct case_step *step_of(const struct train_model *m)
{
	return &m->rc->steps[m->step];
}

static void backward(struct train_model *m, unsigned u, unsigned t, void *arg)
{
	struct model_unit reduce = random_case_reduce(unit_of(m, u), m->step);
	const struct case_tensor *tensor = &unit_of(m, u)->tensors[t];
	uint64_t row = tensor->dims ? tensor->n / tensor->shape[0] : 1;
	struct train_tensor *x = &m->tensors[u][t];
	float found = 0;
	struct k_unscale unscale = { x->g, (float)step_of(m)->inv_scale, &found };

	(void)arg;
	/* PyTorch's Reducer divides sparse gradients, and multiplies dense ones */
	if (tensor->sparse && reduce.profile == SHARDD_PROFILE_DDP)
		reduce.profile = SHARDD_PROFILE_DDP_BUCKET_VIEW;
	for (uint64_t i = 0; i < tensor->n; i++)
		x->g[i] =
			random_case_has_row(m->rc, u, t, m->step, i / row)
				? model_gradient(&reduce, &m->world, index_of(m, u, t, m->step, i))
				: 0;
	if (step_of(m)->inv_scale != 0)
		kernels_ref()->unscale(&unscale, 0, unit_of(m, u)->tensors[t].n);
	m->found_inf |= found != 0;
}

/* Of one tensor, added to *@arg. */
static void add_norm(struct train_model *m, unsigned u, unsigned t, void *arg)
{
	double p = step_of(m)->norm_type, *sum = arg;

	for (uint64_t i = 0; i < unit_of(m, u)->tensors[t].n; i++) {
		double x = fabs((double)m->tensors[u][t].g[i]);

		if (!isinf(p))
			*sum += pow(x, p);
		else if (x > *sum || isnan(x))
			*sum = x;
	}
}

double train_model_backward(struct train_model *m)
{
	double p = step_of(m)->norm_type, sum = 0;

	m->found_inf = false;
	each_trained(m, backward, NULL);
	each_trained(m, add_norm, &sum);
	return isinf(p) ? sum : pow(sum, 1 / p);
}

/* -------------------------------------------------------------------- steps */

static void scale(struct train_model *m, unsigned u, unsigned t, void *arg)
{
	struct k_scale s = { m->tensors[u][t].g, *(const float *)arg, NULL };

	kernels_ref()->scale(&s, 0, unit_of(m, u)->tensors[t].n);
}

/* fairscale: only a factor below 1; XLA: from 0 to 1, always; PyTorch: up to 1, always. */
static void clip(struct train_model *m, double total)
{
	float most = (float)step_of(m)->max_norm, sum = (float)total + 1e-6f, factor;

	if (step_of(m)->profile == SHARDD_CLIP_FAIRSCALE) {
		factor = most / sum;
		if (!(factor < 1))
			return;
	} else {
		factor = 1.0f / sum * most;
		factor = factor > 1 ? 1 : factor;
	}
	each_trained(m, scale, &factor);
}

static void clamp(struct train_model *m, unsigned u, unsigned t, void *arg)
{
	float value = (float)step_of(m)->clamp;
	struct k_clamp c = { m->tensors[u][t].g, -value, value };

	(void)arg;
	kernels_ref()->clamp(&c, 0, unit_of(m, u)->tensors[t].n);
}

static void sgd(const struct shardd_optimizer *o, struct train_tensor *x, double lr, double wd,
		bool first, uint64_t n)
{
	const struct k_sgd a = { .p = x->p,
				 .g = x->g,
				 .buf = o->momentum != 0 ? x->s1 : NULL,
				 .lr = (float)lr,
				 .wd = (float)wd,
				 .mu = (float)o->momentum,
				 .nesterov = o->nesterov,
				 .first = first,
				 .maximize = o->maximize,
				 .dampening = o->dampening,
				 .tail_from = UINT64_MAX };

	kernels_ref()->sgd(&a, 0, n);
}

static void adam(const struct shardd_optimizer *o, struct train_tensor *x, double lr, double wd,
		 double t, uint64_t n)
{
	const struct k_adam_f64 f = { .decay = 1 - lr * wd,
				      .wd = wd,
				      .b1 = o->beta1,
				      .w1 = 1 - o->beta1,
				      .b2 = o->beta2,
				      .w2 = 1 - o->beta2,
				      .step_size = lr / (1 - pow(o->beta1, t)),
				      .sq = sqrt(1 - pow(o->beta2, t)),
				      .eps = o->eps };
	const struct k_adam a = { .p = x->p,
				  .g = x->g,
				  .m = x->s1,
				  .v = x->s2,
				  .wd = (float)f.wd,
				  .w1 = (float)f.w1,
				  .b2 = (float)f.b2,
				  .w2 = (float)f.w2,
				  .step_size = (float)f.step_size,
				  .sq = (float)f.sq,
				  .eps = (float)f.eps,
				  .vmax = o->amsgrad ? x->s3 : NULL,
				  .profile = (enum k_profile)(o->profile ? o->profile - 1 : 0),
				  .maximize = o->maximize,
				  .tail_from = UINT64_MAX,
				  .f64 = f };
	const struct k_adamw w = { .p = a.p,
				   .g = a.g,
				   .m = a.m,
				   .v = a.v,
				   .decay = (float)f.decay,
				   .w1 = a.w1,
				   .b1 = (float)f.b1,
				   .b2 = a.b2,
				   .w2 = a.w2,
				   .step_size = a.step_size,
				   .sq = a.sq,
				   .eps = a.eps,
				   .vmax = a.vmax,
				   .profile = a.profile,
				   .maximize = a.maximize,
				   .tail_from = UINT64_MAX,
				   .f64 = f };

	if (o->kind == SHARDD_ADAM)
		kernels_ref()->adam(&a, 0, n);
	else
		kernels_ref()->adamw(&w, 0, n);
}

static void own(struct train_tensor *x, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++)
		x->p[i] -= CASE_OWN_RATE * x->g[i];
}

static void step_tensor(struct train_model *m, unsigned u, unsigned t, void *arg)
{
	const struct case_tensor *tensor = &unit_of(m, u)->tensors[t];
	const struct shardd_optimizer *o = &unit_of(m, u)->optimizer;
	double lr = step_of(m)->has_lr ? step_of(m)->lr : o->lr;
	double wd = tensor->has_weight_decay ? tensor->weight_decay : o->weight_decay;

	(void)arg;
	lr = tensor->has_lr_factor ? lr * tensor->lr_factor : lr;
	if (unit_of(m, u)->own_optimizer)
		own(&m->tensors[u][t], tensor->n);
	else if (o->kind == SHARDD_SGD)
		sgd(o, &m->tensors[u][t], lr, wd, m->steps == 0, tensor->n);
	else
		adam(o, &m->tensors[u][t], lr, wd, m->steps + 1.0, tensor->n);
}

bool train_model_skips(const struct train_model *m)
{
	return step_of(m)->discard || m->found_inf;
}

void train_model_step(struct train_model *m, double total)
{
	if (step_of(m)->max_norm != 0)
		clip(m, total);
	if (step_of(m)->clamp != 0)
		each_trained(m, clamp, NULL);
	if (!train_model_skips(m)) {
		each_trained(m, step_tensor, NULL);
		m->steps++;
	}
	m->step++;
}
