#include "unit/optim.h"

#include <math.h>

#include "core/check.h"
#include "unit/runs.h"

float *optim_at(const struct region *r, uint64_t i)
{
	return r->slab ? (float *)region_addr(r) + i : NULL;
}

static void adamw_kop(const struct unit *u, const struct unit_part *p, double lr, struct kop *kop)
{
	const state_optimizer *o = u->rec->optimizer;
	double t = (double)(o->steps + 1);
	double bc1 = 1.0 - pow(o->beta1, t);
	double bc2 = 1.0 - pow(o->beta2, t);

	kop->kind = KOP_ADAMW;
	kop->adamw = (struct k_adamw){
		.p = optim_at(&p->params, 0),
		.g = optim_at(&p->grads, 0),
		.m = optim_at(&p->state1, 0),
		.v = optim_at(&p->state2, 0),
		.decay = (float)(1.0 - lr * o->weight_decay),
		.w1 = (float)(1.0 - o->beta1),
		.b1 = (float)o->beta1,
		.b2 = (float)o->beta2,
		.w2 = (float)(1.0 - o->beta2),
		.step_size = (float)(lr / bc1),
		.sq = (float)sqrt(bc2),
		.eps = (float)o->eps,
	};
}

static void sgd_kop(const struct unit *u, const struct unit_part *p, double lr, struct kop *kop)
{
	const state_optimizer *o = u->rec->optimizer;

	kop->kind = KOP_SGD;
	kop->sgd = (struct k_sgd){
		.p = optim_at(&p->params, 0),
		.g = optim_at(&p->grads, 0),
		.buf = optim_at(&p->state1, 0),
		.lr = (float)lr,
		.wd = (float)o->weight_decay,
		.mu = (float)o->momentum,
		.nesterov = o->nesterov,
		.first = o->steps == 0,
	};
}

bool optim_step_kop(const struct unit *u, const struct unit_part *p, double lr, struct kop *kop)
{
	CHECK(u->rec->optimizer->kind < _OPTIM_N);
	kop->n = p->n;
	if (u->rec->optimizer->kind == OPTIM_ADAMW)
		adamw_kop(u, p, lr, kop);
	else if (u->rec->optimizer->kind == OPTIM_SGD)
		sgd_kop(u, p, lr, kop);
	else
		return false;
	return true;
}

/* A stream per unit and tensor: FNV-1a over both names, so that values follow a
 * tensor when other units come or go. */
static uint64_t stream_of(const char *unit, const char *tensor)
{
	uint64_t h = 14695981039346656037u;

	for (const char *p = unit; *p; p++)
		h = (h ^ (unsigned char)*p) * 1099511628211u;
	h = (h ^ 0xff) * 1099511628211u;
	for (const char *p = tensor; *p; p++)
		h = (h ^ (unsigned char)*p) * 1099511628211u;
	return h;
}

static void fill_kop(const struct unit *u, const struct unit_part *p, const struct unit_run *run,
		     uint64_t seed, struct kop *kop)
{
	const state_tensor *t = u->rec->tensors[run->tensor];

	*kop = (struct kop){ .kind = KOP_FILL, .n = run->n };
	kop->fill = (struct k_fill){
		.dst = optim_at(&p->params, run->at),
		.seed = seed,
		.stream = stream_of(u->rec->name, t->name),
		.first = run->first,
		.kind = t->init_kind ? (enum fill_kind)t->init_kind : FILL_CONSTANT,
		.a = t->init_a,
		.b = t->init_b,
	};
}

unsigned optim_seed_kops(const struct unit *u, const struct unit_part *p, uint64_t seed,
			 struct kop *kops)
{
	struct unit_run run;
	unsigned n_kops = 0;

	for (uint32_t i = 0; i < u->rec->n_tensors; i++)
		if (unit_part_run(u, p, i, &run))
			fill_kop(u, p, &run, seed, &kops[n_kops++]);
	return n_kops;
}

unsigned optim_zero_kops(const struct unit_part *p, struct kop *kops)
{
	const struct region *arrays[2] = { &p->state1, &p->state2 };
	unsigned n = 0;

	for (unsigned i = 0; i < 2; i++) {
		if (!arrays[i]->slab || !p->n)
			continue;
		kops[n] = (struct kop){ .kind = KOP_FILL, .n = p->n };
		kops[n++].fill =
			(struct k_fill){ .dst = optim_at(arrays[i], 0), .kind = FILL_CONSTANT };
	}
	return n;
}
