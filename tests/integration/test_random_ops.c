/*
 * Random sequences of ops: ranks that mostly do the same and now and then something else,
 * die, leave, come back, and have little memory. Whatever comes of it, the daemon lives,
 * every op ends, and after the job is deleted every byte and descriptor is back.
 *
 * What the ranks ask for follows from a seed that is printed; SHARDD_TEST_SEED repeats it, but
 * not their timing. SHARDD_TEST_FIRST, SHARDD_TEST_ROUNDS: which job is the first, and how many
 * there are; SHARDD_TEST_LONG=1: many.
 */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"

static void test_random_ops_begin(void)
{
	failfix_begin(NULL);
}

TestSuite(random_ops, .init = test_random_ops_begin, .fini = failfix_end, .timeout = 3600);

enum { WORLD = 3, MAX_UNITS = 8, MAX_TENSORS = 5, LIVES = 3, TICKETS = 12 };

/* ------------------------------------------------------------------- numbers */

struct rng {
	uint64_t s;
};

static uint64_t next(struct rng *r)
{
	uint64_t z = r->s += 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static uint32_t below(struct rng *r, uint32_t n)
{
	return (uint32_t)(next(r) >> 33) % n;
}

static bool chance(struct rng *r, uint32_t percent)
{
	return below(r, 100) < percent;
}

static struct rng rng_of(uint64_t a, uint64_t b, uint64_t c)
{
	struct rng r = { a * 1000003u + b * 7919u + c };

	next(&r);
	return r;
}

/* --------------------------------------------------------------------- a model */

struct model {
	char names[MAX_UNITS][16];
	char tensors[MAX_UNITS][MAX_TENSORS][16];
	uint64_t shapes[MAX_UNITS][MAX_TENSORS][2];
	struct shardd_tensor tensor[MAX_UNITS][MAX_TENSORS];
	struct shardd_buffer buffer[MAX_UNITS];
	uint64_t buffer_shape[1];
	struct shardd_unit_spec spec[MAX_UNITS];
	unsigned n;
};

static void random_shape(struct rng *r, struct model *m, unsigned u, unsigned t)
{
	struct shardd_tensor *x = &m->tensor[u][t];

	x->dims = below(r, 3);
	x->shape = m->shapes[u][t];
	m->shapes[u][t][0] = 1 + below(r, chance(r, 10) ? 40000 : 9);
	m->shapes[u][t][1] = 1 + below(r, 7);
}

static void random_alias(struct rng *r, struct model *m, unsigned u, unsigned t)
{
	unsigned of_unit = below(r, u + 1), of = below(r, MAX_TENSORS);
	struct shardd_tensor *x = &m->tensor[u][t];
	const struct shardd_tensor *y = &m->tensor[of_unit][of];

	if ((of_unit == u && of >= t) || of >= m->spec[of_unit].n_tensors || !y->name)
		return;
	x->dims = y->dims;
	memcpy(m->shapes[u][t], m->shapes[of_unit][of], sizeof(m->shapes[u][t]));
	x->frozen = y->frozen;
	x->alias_of = y->name;
	x->alias_unit = of_unit == u ? NULL : m->names[of_unit];
}

static void random_tensor(struct rng *r, struct model *m, unsigned u, unsigned t)
{
	struct shardd_tensor *x = &m->tensor[u][t];

	random_shape(r, m, u, t);
	snprintf(m->tensors[u][t], sizeof(m->tensors[u][t]), "t%u", t);
	x->name = m->tensors[u][t];
	x->init = SHARDD_INIT_UNIFORM;
	x->a = -1;
	x->b = 1;
	x->frozen = chance(r, 20);
	x->has_lr_factor = chance(r, 10);
	x->lr_factor = 0.5;
	if (chance(r, 15))
		random_alias(r, m, u, t);
}

static void random_optimizer(struct rng *r, struct shardd_optimizer *o)
{
	o->when = (enum shardd_optimizer_when)(1 + below(r, 3));
	if (o->when == SHARDD_OPTIM_BY_TRAINER)
		return;
	o->kind = (enum shardd_optimizer_kind)(1 + below(r, 3));
	o->lr = 0.01;
	o->profile = (enum shardd_optimizer_profile)below(r, 5);
	if (o->kind == SHARDD_SGD)
		o->momentum = chance(r, 50) ? 0.9 : 0;
	else
		o->amsgrad = chance(r, 30);
}

static void random_unit(struct rng *r, struct model *m, unsigned u, shardd_group other)
{
	struct shardd_unit_spec *s = &m->spec[u];
	bool all_frozen = chance(r, 8);

	snprintf(m->names[u], sizeof(m->names[u]), "u%u", u);
	s->size = sizeof(*s);
	s->name = m->names[u];
	s->tensors = m->tensor[u];
	for (unsigned t = 0, n = 1 + below(r, MAX_TENSORS); t < n; t++) {
		random_tensor(r, m, u, t);
		m->tensor[u][t].frozen = m->tensor[u][t].frozen || all_frozen;
		s->n_tensors = t + 1;
	}
	s->group = chance(r, 12) ? other : SHARDD_WORLD;
	s->compute_dtype = (enum shardd_dtype)below(r, 4);
	s->gradient_dtype = chance(r, 30) ? SHARDD_FP32 : 0;
	s->reduce_dtype = chance(r, 50) ? SHARDD_FP32 : 0;
	s->layout = (enum shardd_layout)below(r, 3);
	s->shard_multiple = s->layout == SHARDD_LAYOUT_DIM0 ? 0 : below(r, 3) * 32;
	s->strategy = (enum shardd_strategy)below(r, 4);
	s->shard_ranks = s->strategy == SHARDD_HYBRID ? 1 + below(r, 3) : 0;
	s->reduce_profile = (enum shardd_reduce_profile)below(r, s->strategy == 2 ? 8 : 5);
	random_optimizer(r, &s->optimizer);
	if (chance(r, 40)) {
		m->buffer_shape[0] = 5;
		m->buffer[u] = (struct shardd_buffer){ "b", m->buffer_shape, 1, 0 };
		s->buffers = &m->buffer[u];
		s->n_buffers = 1;
	}
	s->reshard = (enum shardd_reshard)below(r, 5);
	s->guarded = chance(r, 40);
}

/* --------------------------------------------------------------------- a rank */

struct play {
	uint64_t seed;
	unsigned round;
	unsigned ops;               /* of one rank in one life */
	uint64_t quota;             /* 0: none */
	atomic_uint ids[MAX_UNITS]; /* of the units that are there */
	atomic_uint codes[32];      /* how often ops ended so */
};

struct self {
	const struct trainer *t;
	struct play *p;
	shardd_client *c;
	struct shardd_membership me;
	struct model model;
	struct shardd_unit_info units[MAX_UNITS];
	unsigned n;
	shardd_group other;
	struct rng shared, own;
	shardd_ticket tickets[TICKETS];
	unsigned n_tickets;
	uint64_t buffer;
	bool aborted;
	const char *last;
};

static void took(struct self *s, int rc)
{
	if (rc < 0)
		atomic_fetch_add(&s->p->codes[-rc & 31], 1);
	else
		atomic_fetch_add(&s->p->codes[0], 1);
	if (rc == -SHARDD_UNAVAILABLE || rc == -SHARDD_INTERNAL || rc == -SHARDD_UNKNOWN) {
		fprintf(stderr, "rank %u: %s: %s: %s\n", s->t->rank, s->last, shardd_code_name(rc),
			train_err.text);
		TRAINER_CHECK(rc != -SHARDD_UNAVAILABLE && rc != -SHARDD_INTERNAL);
	}
	s->aborted = s->aborted || rc == -SHARDD_ABORTED;
}

/* Is what was handed out there, to its end? */
static void touch(struct self *s, void *data, uint64_t bytes, bool write)
{
	uint8_t *all = data ? calloc(1, bytes ? bytes : 1) : NULL;

	if (data && bytes && write && chance(&s->own, 50))
		(void)shardd_write(s->c, data, all, bytes, &train_err);
	else if (data && bytes)
		(void)shardd_read(s->c, all, data, bytes, &train_err);
	free(all);
}

static void drop_tickets(struct self *s)
{
	for (; s->n_tickets; s->n_tickets--) {
		struct shardd_result r = { 0 };
		int rc = shardd_wait(s->c, s->tickets[s->n_tickets - 1], -1, &r, &train_err);

		s->last = "a ticket";
		took(s, rc);
	}
}

/* @t: a pointer, since @rc is a call that fills it. */
static void ticket(struct self *s, int rc, const shardd_ticket *t)
{
	if (rc < 0) {
		took(s, rc);
		return;
	}
	s->tickets[s->n_tickets++] = *t;
	if (s->n_tickets == TICKETS || chance(&s->own, 30))
		drop_tickets(s);
}

static shardd_unit any_unit(struct self *s, struct rng *r)
{
	return s->n ? s->units[below(r, s->n)].unit : 1;
}

static unsigned some_units(struct self *s, struct rng *r, shardd_unit *ret)
{
	unsigned n = 0, percent = chance(r, 50) ? 30 : 100;

	for (unsigned i = 0; i < s->n; i++)
		if (chance(r, percent))
			ret[n++] = s->units[i].unit;
	return n;
}

static void op_gradient(struct self *s, shardd_unit u)
{
	struct shardd_result r = { 0 };
	shardd_ticket t = 0;
	int rc = shardd_submit_gradient(s->c, SHARDD_OPTIONS(gradient, .unit = u), &t, &train_err);

	rc = rc < 0 ? rc : shardd_wait(s->c, t, -1, &r, &train_err);
	s->last = "gradient";
	took(s, rc);
	if (rc == 0)
		touch(s, r.data, r.bytes, true);
}

static void op_reduce(struct self *s, struct rng *r)
{
	shardd_unit u = any_unit(s, r);
	uint32_t how = below(r, 6);
	shardd_ticket t = 0;
	int rc;

	s->last = "reduce";
	if (chance(r, 85))
		op_gradient(s, u);
	if (how == 0)
		rc = shardd_submit_reduce(s->c, SHARDD_OPTIONS(reduce, .unit = u, .deferred = true),
					  &t, &train_err);
	else if (how == 1)
		rc = shardd_submit_reduce(s->c, SHARDD_OPTIONS(reduce, .unit = u, .more = true), &t,
					  &train_err);
	else if (how == 2)
		rc = shardd_submit_accumulate(s->c, SHARDD_OPTIONS(accumulate, .unit = u), &t,
					      &train_err);
	else
		rc = shardd_submit_reduce(s->c, SHARDD_OPTIONS(reduce, .unit = u), &t, &train_err);
	ticket(s, rc, &t);
}

static void op_reduce_all(struct self *s, struct rng *r)
{
	bool more = chance(r, 20);

	drop_tickets(s);
	for (unsigned i = 0; i < s->n; i++) {
		shardd_ticket t = 0;

		op_gradient(s, s->units[i].unit);
		ticket(s,
		       more ? shardd_submit_reduce(s->c,
						   SHARDD_OPTIONS(reduce, .unit = s->units[i].unit,
								  .more = true),
						   &t, &train_err)
			    : shardd_submit_reduce(s->c,
						   SHARDD_OPTIONS(reduce, .unit = s->units[i].unit),
						   &t, &train_err),
		       &t);
	}
}

static void op_gather(struct self *s, struct rng *r)
{
	shardd_unit u = any_unit(s, r);
	struct shardd_result res = { 0 };
	shardd_ticket t = 0;
	int rc;

	s->last = "gather";
	if (chance(r, 40)) {
		rc = shardd_submit_release(s->c, SHARDD_OPTIONS(release, .unit = u), &t,
					   &train_err);
		ticket(s, rc, &t);
		return;
	}
	rc = shardd_submit_gather(s->c, SHARDD_OPTIONS(gather, .unit = u), &t, &train_err);
	rc = rc < 0 ? rc : shardd_wait(s->c, t, -1, &res, &train_err);
	took(s, rc);
	if (rc == 0)
		touch(s, res.data, res.bytes, false);
	if (rc == 0 && chance(r, 70))
		took(s, shardd_release(s->c, u, &train_err));
}

static void op_pass(struct self *s, struct rng *r)
{
	shardd_unit u = any_unit(s, r);
	enum shardd_pass pass = chance(r, 50) ? SHARDD_FORWARD : SHARDD_BACKWARD;
	shardd_ticket t = 0;
	int rc;

	s->last = "pass";
	if (chance(r, 50))
		rc = shardd_submit_begin_pass(
			s->c, SHARDD_OPTIONS(begin_pass, .unit = u, .pass = pass), &t, &train_err);
	else
		rc = shardd_submit_end_pass(s->c,
					    SHARDD_OPTIONS(end_pass, .unit = u, .pass = pass,
							   .sync = chance(r, 50)),
					    &t, &train_err);
	ticket(s, rc, &t);
}

static void op_train(struct self *s, struct rng *r)
{
	const void *data;

	(void)r;
	s->last = "passes";
	for (unsigned i = 0; i < s->n; i++) {
		took(s,
		     shardd_begin_pass(s->c, s->units[i].unit, SHARDD_FORWARD, &data, &train_err));
		took(s, shardd_end_pass(s->c, s->units[i].unit, SHARDD_FORWARD, true, &train_err));
	}
	for (unsigned i = s->n; i--;) {
		took(s,
		     shardd_begin_pass(s->c, s->units[i].unit, SHARDD_BACKWARD, &data, &train_err));
		op_gradient(s, s->units[i].unit);
		took(s, shardd_reduce(s->c, s->units[i].unit, &train_err));
		took(s, shardd_end_pass(s->c, s->units[i].unit, SHARDD_BACKWARD, true, &train_err));
	}
}

static void op_policy(struct self *s, struct rng *r)
{
	shardd_unit units[MAX_UNITS];
	unsigned n = some_units(s, r, units);
	struct shardd_set_factors_options factors = { .size = sizeof(factors),
						      .pre_divide = (double)below(r, 3) };
	shardd_ticket t = 0;
	int rc;

	s->last = "policy";
	factors.unit = any_unit(s, r);
	if (chance(r, 20))
		rc = shardd_submit_set_factors(s->c, &factors, &t, &train_err);
	else if (chance(r, 50))
		rc = shardd_submit_set_reshard(
			s->c,
			SHARDD_OPTIONS(set_reshard, .units = units, .n_units = n,
				       .reshard = (enum shardd_reshard)below(r, 5)),
			&t, &train_err);
	else
		rc = shardd_submit_set_prefetch(
			s->c,
			SHARDD_OPTIONS(set_prefetch, .unit = any_unit(s, r),
				       .pass = (enum shardd_pass)(1 + below(r, 2)), .units = units,
				       .n_units = n),
			&t, &train_err);
	ticket(s, rc, &t);
}

static void op_summon(struct self *s, struct rng *r)
{
	shardd_unit u = any_unit(s, r);
	struct shardd_result res = { 0 };
	uint64_t steps = below(r, 10);
	shardd_ticket t = 0;
	int rc;

	s->last = "summon";
	if (chance(r, 35)) {
		ticket(s,
		       shardd_submit_return(
			       s->c,
			       SHARDD_OPTIONS(return, .unit = u, .write = chance(r, 50),
						    .optimizer_steps =
							    chance(r, 20) ? &steps : NULL),
			       &t, &train_err),
		       &t);
		return;
	}
	rc = shardd_submit_summon(
		s->c, SHARDD_OPTIONS(summon, .unit = u, .state = chance(r, 30) ? below(r, 5) : 0),
		&t, &train_err);
	rc = rc < 0 ? rc : shardd_wait(s->c, t, -1, &res, &train_err);
	took(s, rc);
	if (rc == 0)
		touch(s, res.data, res.bytes, true);
	if (rc == 0 && chance(r, 70))
		took(s, shardd_return(s->c, u, chance(r, 50), &train_err));
}

static void op_convert(struct self *s, struct rng *r)
{
	shardd_unit units[MAX_UNITS];
	unsigned n = some_units(s, r, units);
	struct shardd_convert_options to = { .size = sizeof(to) };
	uint32_t tensor = below(r, 4);
	shardd_ticket t = 0;

	s->last = "convert";
	to.layout = (enum shardd_layout)below(r, 3);
	to.shard_multiple = to.layout == SHARDD_LAYOUT_DIM0 ? 0 : below(r, 4) * 100;
	to.strategy = (enum shardd_strategy)below(r, 4);
	to.shard_ranks = to.strategy == SHARDD_HYBRID ? 1 + 2 * below(r, 2) : 0;
	to.units = units;
	to.n_units = n;
	if (chance(r, 20)) { /* most are not frozen, or do not exist */
		to.unfreeze = &tensor;
		to.n_unfreeze = 1;
		to.optimizer_like = chance(r, 20) ? any_unit(s, r) : 0;
	}
	ticket(s, shardd_submit_convert(s->c, &to, &t, &train_err), &t);
}

static void op_buffers(struct self *s, struct rng *r)
{
	shardd_unit u = any_unit(s, r);
	struct shardd_result res = { 0 };
	shardd_ticket t = 0;
	int rc;

	s->last = "buffers";
	if (chance(r, 50)) {
		ticket(s,
		       shardd_submit_broadcast_buffers(s->c,
						       SHARDD_OPTIONS(broadcast_buffers,
								      .unit = chance(r, 50) ? u : 0,
								      .root = below(r, WORLD)),
						       &t, &train_err),
		       &t);
		return;
	}
	rc = shardd_submit_unit_buffers(s->c, SHARDD_OPTIONS(unit_buffers, .unit = u), &t,
					&train_err);
	rc = rc < 0 ? rc : shardd_wait(s->c, t, -1, &res, &train_err);
	took(s, rc);
	if (rc == 0)
		touch(s, res.data, res.bytes, true);
}

static void op_shards(struct self *s, struct rng *r)
{
	struct shardd_shard x = { 0 };
	shardd_ticket t = 0;
	int rc;

	s->last = "shards";
	if (chance(r, 30)) {
		ticket(s,
		       shardd_submit_shard_done(s->c,
						SHARDD_OPTIONS(shard_done, .unit = any_unit(s, r)),
						&t, &train_err),
		       &t);
		return;
	}
	shardd_set_timeout(s->c, 20);
	rc = shardd_next_shard(s->c, SHARDD_WORLD, &x, &train_err);
	shardd_set_timeout(s->c, 300);
	took(s, rc);
	if (rc)
		return;
	touch(s, x.params, x.elements * sizeof(float), true);
	if (chance(r, 85))
		took(s, shardd_shard_done(s->c, x.unit, &train_err));
}

/* Of a step or a plan: mostly none, and now and then some that the daemon refuses. @tensors: room
 * for as many as @units. Return: how many. */
static size_t some_settings(struct rng *r, const shardd_unit *units, unsigned n, uint32_t *tensors,
			    struct shardd_step_settings ret[2])
{
	if (!chance(r, 30))
		return 0;
	for (unsigned i = 0; i < 2; i++)
		ret[i] = (struct shardd_step_settings){ .lr = 0.1 * i,
							.beta1 = 0.5,
							.beta2 = 0.5,
							.eps = 1e-8,
							.maximize = chance(r, 20),
							.momentum = chance(r, 10) ? 0.5 : 0 };
	for (unsigned i = 0; i < n; i++)
		tensors[i] = chance(r, 95) ? 0 : below(r, MAX_TENSORS + 1);
	ret[1].units = units;
	ret[1].tensors = tensors;
	ret[1].n = n;
	return 1 + (n > 0);
}

static void op_clip(struct self *s, struct rng *r)
{
	shardd_unit units[MAX_UNITS];
	uint32_t tensors[MAX_UNITS];
	struct shardd_step_settings settings[2];
	unsigned n = some_units(s, r, units);
	shardd_group g = chance(r, 80) ? SHARDD_WORLD : s->other;
	struct shardd_clip_options clip = { .size = sizeof(clip),
					    .max_norm = 1,
					    .norm_type = below(r, 3) };
	struct shardd_plan_backward_options plan = { .size = sizeof(plan),
						     .inv_scale = chance(r, 50) ? 0.5 : 0 };
	double lr = 0.1;
	shardd_ticket t = 0;

	s->last = "clip";
	clip.profile = (enum shardd_clip_profile)below(r, 4);
	clip.error_if_nonfinite = chance(r, 20);
	switch (below(r, 4)) {
	case 0:
		clip.units = chance(r, 50) ? units : NULL;
		clip.n_units = clip.units ? n : 0;
		clip.group = g;
		ticket(s, shardd_submit_clip(s->c, &clip, &t, &train_err), &t);
		break;
	case 1:
		ticket(s,
		       shardd_submit_clip(s->c,
					  SHARDD_OPTIONS(clip, .group = g, .value = 0.5,
							 .units = units, .n_units = n,
							 .by_value = true),
					  &t, &train_err),
		       &t);
		break;
	case 2:
		ticket(s,
		       shardd_submit_unscale(s->c,
					     SHARDD_OPTIONS(unscale, .group = g, .inv_scale = 0.5),
					     &t, &train_err),
		       &t);
		break;
	default:
		plan.clip = chance(r, 60) ? &clip : NULL;
		plan.lr = chance(r, 30) ? &lr : NULL;
		plan.settings = settings;
		plan.n_settings = some_settings(r, units, n, tensors, settings);
		plan.group = g;
		ticket(s, shardd_submit_plan_backward(s->c, &plan, &t, &train_err), &t);
		break;
	}
}

static void op_step(struct self *s, struct rng *r)
{
	shardd_unit units[MAX_UNITS];
	uint32_t tensors[MAX_UNITS];
	struct shardd_step_settings settings[2];
	struct shardd_step_options o = { .size = sizeof(o), .settings = settings };
	double lr = 0.1;
	shardd_ticket t = 0;

	s->last = "step";
	o.n_settings = some_settings(r, units, some_units(s, r, units), tensors, settings);
	o.lr = chance(r, 20) ? &lr : NULL;
	o.skip_if_found = chance(r, 30);
	o.discard = chance(r, 10);
	o.group = chance(r, 80) ? SHARDD_WORLD : s->other;
	ticket(s, shardd_submit_step(s->c, &o, &t, &train_err), &t);
}

static void op_commit(struct self *s, struct rng *r)
{
	shardd_ticket t = 0;

	s->last = "commit";
	ticket(s,
	       shardd_submit_commit(s->c,
				    SHARDD_OPTIONS(commit, .step = s->me.step + 1 + below(r, 5),
						   .blob = "blob", .bytes = 4),
				    &t, &train_err),
	       &t);
}

static void op_init(struct self *s, struct rng *r)
{
	shardd_ticket t = 0;

	s->last = "init";
	ticket(s,
	       shardd_submit_init(s->c,
				  SHARDD_OPTIONS(init, .unit = any_unit(s, r), .seed = below(r, 9),
						 .from = SHARDD_FROM_SEED),
				  &t, &train_err),
	       &t);
}

static void init_all(struct self *s)
{
	s->last = "init";
	drop_tickets(s);
	for (unsigned i = 0; i < s->n; i++)
		took(s, shardd_init_seed(s->c, s->units[i].unit, i, &train_err));
}

static void op_alloc(struct self *s, struct rng *r)
{
	shardd_ticket t = 0;
	void *data;

	s->last = "alloc";
	if (!s->buffer) {
		took(s, shardd_alloc(s->c, 4096 + 4 * below(r, 1 << 16), &s->buffer, &data,
				     &train_err));
		return;
	}
	switch (below(r, 4)) {
	case 0:
		ticket(s,
		       shardd_submit_all_reduce(s->c,
						SHARDD_OPTIONS(all_reduce, .buffer = s->buffer,
							       .count = 1024, .dtype = SHARDD_FP32,
							       .op = SHARDD_SUM),
						&t, &train_err),
		       &t);
		break;
	case 1:
		ticket(s,
		       shardd_submit_broadcast(s->c,
					       SHARDD_OPTIONS(broadcast, .buffer = s->buffer,
							      .bytes = 4096,
							      .root = below(r, WORLD)),
					       &t, &train_err),
		       &t);
		break;
	case 2:
		ticket(s,
		       shardd_submit_init(s->c,
					  SHARDD_OPTIONS(init, .unit = any_unit(s, r),
							 .buffer = s->buffer,
							 .from = SHARDD_FROM_OWN),
					  &t, &train_err),
		       &t);
		break;
	default:
		took(s, shardd_free(s->c, s->buffer, &train_err));
		s->buffer = 0;
		break;
	}
}

static void op_barrier(struct self *s, struct rng *r)
{
	(void)r;
	s->last = "barrier";
	drop_tickets(s);
	took(s, shardd_barrier(s->c, SHARDD_WORLD, &train_err));
}

/* With collectives before and behind it that nobody waits for. */
static void op_join(struct self *s, struct rng *r)
{
	shardd_group g = chance(r, 70) ? SHARDD_WORLD : s->other;
	shardd_ticket t = 0;

	s->last = "join";
	if (chance(&s->own, 30))
		ticket(s,
		       shardd_submit_barrier(s->c, SHARDD_OPTIONS(barrier, .group = g), &t,
					     &train_err),
		       &t);
	if (chance(r, 50))
		ticket(s,
		       shardd_submit_join_uneven(
			       s->c, SHARDD_OPTIONS(join_uneven, .group = g, .require_even = true),
			       &t, &train_err),
		       &t);
	else
		ticket(s,
		       shardd_submit_join_uneven(s->c,
						 SHARDD_OPTIONS(join_uneven, .group = g,
								.divide_by_active = chance(r, 50)),
						 &t, &train_err),
		       &t);
	if (chance(r, 30))
		ticket(s,
		       shardd_submit_barrier(s->c, SHARDD_OPTIONS(barrier, .group = g), &t,
					     &train_err),
		       &t);
}

static void die(struct self *s, struct rng *r)
{
	(void)r;
	if (chance(&s->own, 3))
		kill(getpid(), SIGKILL);
}

typedef void (*random_op)(struct self *s, struct rng *r);
static const random_op all_ops[] = {
	op_reduce, op_reduce, op_reduce, op_reduce_all, op_reduce_all, op_gather,  op_gather,
	op_pass,   op_train,  op_policy, op_summon,     op_convert,    op_convert, op_buffers,
	op_shards, op_shards, op_shards, op_clip,       op_clip,       op_step,    op_step,
	op_commit, op_init,   op_alloc,  op_barrier,    op_barrier,    op_join,    die,
};

static void join(struct self *s)
{
	const struct shardd_job job = { .size = sizeof(job),
					.name = s->t->job,
					.world_size = WORLD,
					.rank = s->t->rank,
					.lifetime = SHARDD_KEEP,
					.quota_bytes = s->p->quota,
					.op_timeout_ms = 300,
					.allow_torn = true };
	const uint32_t ranks[] = { 2, 0 };
	struct rng model = rng_of(s->p->seed, s->p->round, 1);

	drop_tickets(s);
	s->buffer = 0;
	TRAIN_OK(shardd_join(s->c, &job, &s->me, &train_err));
	s->aborted = false;
	s->shared = rng_of(s->p->seed, s->p->round, 10 + s->me.epoch);
	s->own = rng_of(s->p->seed + 1 + s->t->rank, s->p->round, s->me.epoch);
	s->other = 0;
	(void)shardd_group_create(s->c, "other", ranks, 2, &s->other, &train_err);
	memset(&s->model, 0, sizeof(s->model));
	s->n = 0;
	for (unsigned u = 0, n = 1 + below(&model, MAX_UNITS); u < n; u++) {
		random_unit(&model, &s->model, u, s->other);
		if (shardd_register(s->c, &s->model.spec[u], 1, &s->units[s->n], &train_err) == 0)
			atomic_store(&s->p->ids[u], s->units[s->n].unit);
		/* one that was converted is not found under what it was */
		s->units[s->n].unit = atomic_load(&s->p->ids[u]);
		s->n += s->units[s->n].unit != 0;
	}
	init_all(s);
}

static int rank_main(const struct trainer *t)
{
	struct self *s = train_alloc(sizeof(*s));

	s->t = t;
	s->p = t->arg;
	s->c = train_connect(t);
	shardd_set_timeout(s->c, 300);
	join(s);
	for (unsigned i = 0; i < s->p->ops; i++) {
		uint32_t which = below(&s->shared, ARRAY_SIZE(all_ops));
		struct rng args = { next(&s->shared) }, mine = { next(&s->own) };
		bool odd = chance(&s->own, 4);

		if (odd)
			all_ops[below(&s->own, ARRAY_SIZE(all_ops))](s, &mine);
		else
			all_ops[which](s, &args);
		if (s->aborted)
			join(s);
	}
	drop_tickets(s);
	if (chance(&s->own, 50))
		(void)shardd_leave(s->c, &train_err);
	shardd_close(s->c);
	free(s);
	return 0;
}

/* ------------------------------------------------------------------- the test */

/* The end of what the daemon has to say. */
static void show_log(void)
{
	char line[1024], command[256];
	FILE *f;

	snprintf(command, sizeof(command), "tail -n 60 %s", trainfix.log);
	f = popen(command, "r");
	while (f && fgets(line, sizeof(line), f))
		fprintf(stderr, "| %s", line);
	if (f)
		pclose(f);
}

static void one_round(struct play *p)
{
	char job[32];
	const char *remove[] = { "job", "delete", "--force", job, NULL };
	char out[512];
	pid_t pids[WORLD];
	unsigned lives[WORLD] = { 0 };

	snprintf(job, sizeof(job), "random-%u", p->round);
	for (uint32_t r = 0; r < WORLD; r++)
		pids[r] = trainer_start(&trainfix, job, r, WORLD, rank_main, p);
	for (bool any = true; any;) {
		any = false;
		for (uint32_t r = 0; r < WORLD; r++) {
			int code;

			if (!pids[r])
				continue;
			any = true;
			code = trainer_wait(pids[r], 120);
			if (code && code != 128 + SIGKILL)
				show_log();
			cr_assert(code == 0 || code == 128 + SIGKILL,
				  "rank %u of round %u ended with %d", r, p->round, code);
			pids[r] = code && ++lives[r] < LIVES
					  ? trainer_start(&trainfix, job, r, WORLD, rank_main, p)
					  : 0;
		}
	}
	daemonfix_check_alive(&trainfix);
	daemonfix_ctl_text(&trainfix, remove, out, sizeof(out));
}

static uint64_t number(const char *name, uint64_t otherwise)
{
	const char *value = getenv(name);

	return value ? strtoull(value, NULL, 10) : otherwise;
}

/* All is given back; on a GPU communicators stay for those that come later. */
static void settle(unsigned fds)
{
	if (train_on_host())
		daemonfix_settles(&trainfix, fds, 0);
	failfix_again();
}

static void tell(const struct play *p)
{
	for (unsigned i = 0; i < ARRAY_SIZE(p->codes); i++)
		if (p->codes[i])
			fprintf(stderr, "# %u ops ended with %s\n", p->codes[i],
				shardd_code_name((int)i));
}

Test(random_ops, the_daemon_survives_them)
{
	struct play *p = trainer_shared(sizeof(*p));
	uint64_t rounds = number("SHARDD_TEST_ROUNDS", number("SHARDD_TEST_LONG", 0) ? 60 : 3);
	unsigned fds = daemonfix_fds(&trainfix);

	p->seed = number("SHARDD_TEST_SEED", 20240607);
	p->ops = 60;
	fprintf(stderr, "# seed %" PRIu64 ", %" PRIu64 " rounds\n", p->seed, rounds);
	for (p->round = (unsigned)number("SHARDD_TEST_FIRST", 0); rounds--; p->round++) {
		p->quota = p->round % 3 == 2 ? (64u << 10) << p->round % 7 : 0;
		memset(p->ids, 0, sizeof(p->ids));
		one_round(p);
		settle(fds);
	}
	tell(p);
	cr_expect(p->codes[0], "something went well");
}
