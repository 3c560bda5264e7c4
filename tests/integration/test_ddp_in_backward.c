/*
 * Optimizers in backward on units that are reduced in buckets: the same bits as the ordinary
 * step, whatever buckets their tensors are in, with clipping, a scaled loss, unused tensors,
 * sparse ones and a static graph too; the trainers' own; and what is refused.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

TestSuite(ddp_in_backward, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum {
	WORLD = 3,
	UNITS = 4,
	TENSORS = 7,
	STEPS = 5,
	ROWS = 30,
	WIDTH = 4,
	TABLE = 3,
	BIGGEST = 700
};

/* The table is the only one of two dimensions. The last unit is never used where tensors may
 * be unused. */
static const uint64_t shapes[TENSORS][2] = { { 300 }, { 5 },   { 64 }, { ROWS, WIDTH },
					     { 1 },   { 700 }, { 9 } };
static const unsigned first_of[UNITS + 1] = { 0, 2, 5, 6, 7 };

struct way {
	const char *name;
	enum shardd_reduce_profile profile;
	enum shardd_optimizer_kind kind;
	double clip;      /* 0: none */
	double inv_scale; /* 0: none */
	unsigned inf_at;  /* step with an infinity; 0: none */
	bool find_unused, static_graph, sparse;
	bool held;    /* a unit is gathered until the pass is over */
	bool at_step; /* both are: the plan alone differs */
	bool own;     /* one of both is the trainers' own; without momentum and decay */
};

struct model {
	shardd_client *c;
	const struct way *w;
	shardd_unit units[UNITS];
	uint64_t elements[UNITS];
	shardd_ddp ddp;
};

static uint64_t numel(unsigned i)
{
	return shapes[i][0] * (shapes[i][1] ? shapes[i][1] : 1);
}

static struct shardd_optimizer optimizer_of(const struct way *w, enum shardd_optimizer_when when)
{
	bool sgd = w->kind == SHARDD_SGD;

	if (when == SHARDD_OPTIM_BY_TRAINER)
		return (struct shardd_optimizer){ .when = when };
	if (w->own)
		return (struct shardd_optimizer){ .kind = SHARDD_SGD, .lr = 0.01, .when = when };
	return (struct shardd_optimizer){ .kind = w->kind,
					  .lr = 0.01,
					  .weight_decay = 0.1,
					  .momentum = sgd ? 0.9 : 0,
					  .beta1 = sgd ? 0 : 0.9,
					  .beta2 = sgd ? 0 : 0.99,
					  .eps = sgd ? 0 : 1e-8,
					  .when = when };
}

static void register_units(struct model *m, enum shardd_optimizer_when when)
{
	struct shardd_tensor tensors[TENSORS] = { 0 };
	struct shardd_unit_spec specs[UNITS] = { 0 };
	struct shardd_unit_info info[UNITS];
	char names[TENSORS][16], units[UNITS][64];

	for (unsigned i = 0; i < TENSORS; i++) {
		snprintf(names[i], sizeof(names[i]), "t%u", i);
		tensors[i] = (struct shardd_tensor){ .name = names[i],
						     .shape = shapes[i],
						     .dims = i == TABLE ? 2 : 1,
						     .init = SHARDD_INIT_CONSTANT,
						     .a = 0.3 };
	}
	for (unsigned u = 0; u < UNITS; u++) {
		snprintf(units[u], sizeof(units[u]), "%s %d.%u", m->w->name, (int)when, u);
		specs[u] = (struct shardd_unit_spec){
			.size = sizeof(specs[u]),
			.name = units[u],
			.tensors = &tensors[first_of[u]],
			.n_tensors = first_of[u + 1] - first_of[u],
			.strategy = SHARDD_REPLICATE,
			.reduce_profile = m->w->profile,
			.optimizer = optimizer_of(m->w, when),
		};
	}
	TRAIN_OK(shardd_register(m->c, specs, UNITS, info, &train_err));
	for (unsigned u = 0; u < UNITS; u++) {
		m->units[u] = info[u].unit;
		m->elements[u] = info[u].elements;
		TRAIN_OK(shardd_init_seed(m->c, m->units[u], 7, &train_err));
	}
}

static struct model make(shardd_client *c, const struct way *w, enum shardd_optimizer_when when)
{
	struct model m = { .c = c, .w = w };
	struct shardd_ddp_tensor sparse;
	struct shardd_ddp_create_options spec = { .size = sizeof(spec),
						  .n_units = UNITS,
						  .bucket_bytes = 1024,
						  .first_bucket_bytes = 256,
						  .find_unused = w->find_unused,
						  .static_graph = w->static_graph };

	register_units(&m, when);
	spec.units = m.units;
	sparse = (struct shardd_ddp_tensor){ m.units[1], TABLE - first_of[1] };
	spec.sparse = &sparse;
	spec.n_sparse = w->sparse;
	TRAIN_OK(shardd_ddp_create(c, &spec, &m.ddp, NULL, &train_err));
	return m;
}

/* -------------------------------------------------------------------- a pass */

static bool is_unused(const struct way *w, uint32_t rank, unsigned i, unsigned step)
{
	if (!w->find_unused)
		return w->static_graph && i == 6;
	return i == 6 || (i == 1 && step % 2) || (i == 5 && (rank == 0 || step == 2)) ||
	       (i == TABLE && rank == 1);
}

static void ready_rows(struct model *m, const struct trainer *t, unsigned step, uint64_t buffer,
		       void *at)
{
	int64_t rows[5];
	float *x = train_numbers(5 * WIDTH, t->rank * 31 + step);

	for (unsigned i = 0; i < 5; i++)
		rows[i] = (int64_t)((i * 7 + t->rank + step) % ROWS);
	train_write(m->c, at, x, 5 * WIDTH * sizeof(float));
	TRAIN_OK(shardd_ddp_ready_rows(m->c, m->ddp, TABLE, rows, 5, buffer, 0, &train_err));
	free(x);
}

static void ready(struct model *m, const struct trainer *t, uint32_t i, unsigned step, void *view)
{
	float *x = train_numbers(numel(i), (t->rank * 31 + step) * 57 + i);

	if (m->w->inf_at == step && i == 2 && t->rank == 1)
		x[0] = INFINITY;
	train_write(m->c, view, x, numel(i) * sizeof(float));
	TRAIN_OK(shardd_ddp_ready(m->c, m->ddp, &i, 1, &train_err));
	free(x);
}

static void pass(struct model *m, const struct trainer *t, unsigned step)
{
	struct shardd_ddp_view views[TENSORS];
	uint32_t unused[TENSORS];
	size_t n_unused = 0;
	uint64_t buffer;
	void *at;

	for (uint32_t i = 0; m->w->find_unused && i < TENSORS; i++)
		if (is_unused(m->w, t->rank, i, step))
			unused[n_unused++] = i;
	TRAIN_OK(shardd_alloc(m->c, 5 * WIDTH * sizeof(float), &buffer, &at, &train_err));
	TRAIN_OK(shardd_ddp_forward(m->c, m->ddp, views, TENSORS, &train_err));
	if (m->w->held)
		TRAIN_OK(shardd_gather(m->c, m->units[1], NULL, &train_err));
	TRAIN_OK(shardd_ddp_backward(m->c, m->ddp, unused, n_unused, NULL, 0, &train_err));
	for (uint32_t i = TENSORS; i--;) {
		if (is_unused(m->w, t->rank, i, step))
			continue;
		if (i == TABLE && m->w->sparse)
			ready_rows(m, t, step, buffer, at);
		else
			ready(m, t, i, step, views[i].data);
	}
	TRAIN_OK(shardd_ddp_finish(m->c, m->ddp, NULL, 0, &train_err));
	if (m->w->held)
		TRAIN_OK(shardd_release(m->c, m->units[1], &train_err));
	TRAIN_OK(shardd_free(m->c, buffer, &train_err));
}

static struct shardd_clip_options clip_of(const struct way *w)
{
	return (struct shardd_clip_options){ .size = sizeof(struct shardd_clip_options),
					     .max_norm = w->clip,
					     .profile = SHARDD_CLIP_TORCH };
}

static void planned(struct model *m, const struct trainer *t, unsigned step,
		    struct shardd_result *ret)
{
	struct shardd_clip_options clip = clip_of(m->w);
	struct shardd_step_options o = { .size = sizeof(o) };
	double lr = 0.01 * (1 + step % 2);
	struct shardd_plan_backward_options p = { .size = sizeof(p),
						  .clip = m->w->clip != 0 ? &clip : NULL,
						  .inv_scale = m->w->inv_scale,
						  .lr = &lr };

	TRAIN_OK(shardd_plan_backward(m->c, &p, &train_err));
	pass(m, t, step);
	TRAIN_OK(shardd_step_with(m->c, &o, ret, &train_err));
}

static void ordinary(struct model *m, const struct trainer *t, unsigned step, double *norm,
		     struct shardd_result *ret)
{
	struct shardd_clip_options clip = clip_of(m->w);
	double lr = 0.01 * (1 + step % 2);
	struct shardd_step_options o = { .size = sizeof(o), .lr = &lr, .skip_if_found = true };

	pass(m, t, step);
	if (m->w->inv_scale != 0)
		TRAIN_OK(shardd_unscale(m->c, SHARDD_WORLD, m->w->inv_scale, NULL, &train_err));
	if (m->w->clip != 0)
		TRAIN_OK(shardd_clip(m->c, &clip, norm, &train_err));
	TRAIN_OK(shardd_step_with(m->c, &o, ret, &train_err));
}

static void compare(struct model *a, struct model *b)
{
	float x[2][BIGGEST];

	for (unsigned u = 0; u < UNITS; u++) {
		TRAINER_CHECK(a->elements[u] <= BIGGEST);
		train_params(a->c, a->units[u], x[0], a->elements[u] * sizeof(float));
		train_params(b->c, b->units[u], x[1], b->elements[u] * sizeof(float));
		TRAIN_SAME(x[0], x[1], a->elements[u] * sizeof(float));
	}
}

static void one_way(shardd_client *c, const struct trainer *t, const struct way *w)
{
	struct model back =
		make(c, w, w->at_step ? SHARDD_OPTIM_AT_STEP : SHARDD_OPTIM_IN_BACKWARD);
	struct way other = *w;
	struct model at_step;
	struct shardd_result got, want;
	char name[32];

	snprintf(name, sizeof(name), "%s'", w->name);
	other.name = name;
	at_step = make(c, &other, SHARDD_OPTIM_AT_STEP);
	for (unsigned step = 1; step <= STEPS; step++) {
		double norm = 0;

		planned(&back, t, step, &got);
		ordinary(&at_step, t, step, &norm, &want);
		TRAINER_CHECK(got.skipped == want.skipped && got.found_inf == want.found_inf);
		TRAINER_CHECK(got.skipped == (w->inf_at == step));
		TRAINER_CHECK(got.has_total_norm == (w->clip != 0));
		if (w->clip != 0 && !got.skipped)
			TRAINER_CHECK(got.total_norm == norm || !train_on_host());
		compare(&back, &at_step);
	}
}

static int same_trainer(const struct trainer *t)
{
	static const struct way ways[] = {
		{ "plain", SHARDD_PROFILE_DDP, .kind = SHARDD_ADAMW },
		{ "view", SHARDD_PROFILE_DDP_BUCKET_VIEW, .kind = SHARDD_SGD },
		{ "hook", SHARDD_PROFILE_DDP_HOOK, .kind = SHARDD_ADAM, .held = true },
		{ "clip", SHARDD_PROFILE_DDP, .kind = SHARDD_ADAMW, .clip = 0.5 },
		{ "scale", SHARDD_PROFILE_DDP, .kind = SHARDD_ADAMW, .inv_scale = 0.25,
		  .inf_at = 3 },
		{ "unused", SHARDD_PROFILE_DDP, .kind = SHARDD_SGD, .find_unused = true },
		{ "static", SHARDD_PROFILE_DDP, .kind = SHARDD_ADAMW, .static_graph = true },
		{ "sparse", SHARDD_PROFILE_DDP_BUCKET_VIEW, .kind = SHARDD_ADAMW, .sparse = true,
		  .held = true },
		{ "all", SHARDD_PROFILE_DDP, .kind = SHARDD_ADAMW, .clip = 0.7, .inv_scale = 0.125,
		  .inf_at = 4, .find_unused = true, .sparse = true },
		{ "planned", SHARDD_PROFILE_DDP, .kind = SHARDD_ADAMW, .clip = 0.7,
		  .inv_scale = 0.125, .inf_at = 4, .find_unused = true, .sparse = true,
		  .at_step = true },
	};
	shardd_client *c = train_join(t);

	for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
		one_way(c, t, &ways[i]);
	train_leave(c);
	return 0;
}

Test(ddp_in_backward, it_has_the_bits_of_the_ordinary_step)
{
	trainfix_run(WORLD, same_trainer, NULL);
}

/* ------------------------------------------------------------------- the rules */

/* The first unit is stepped before the pass is over: its other buckets are still to come. */
static int early_trainer(const struct trainer *t)
{
	static const struct way w = { "early", SHARDD_PROFILE_DDP, .kind = SHARDD_SGD };
	shardd_client *c = train_join(t);
	struct model m = make(c, &w, SHARDD_OPTIM_IN_BACKWARD);
	struct shardd_ddp_view views[TENSORS];
	float before[9], after[9];

	for (unsigned step = 0; step < 2; step++) { /* then buckets are small */
		TRAIN_OK(shardd_ddp_forward(c, m.ddp, views, TENSORS, &train_err));
		train_params(c, m.units[3], before, sizeof(before));
		TRAIN_OK(shardd_ddp_backward(c, m.ddp, NULL, 0, NULL, 0, &train_err));
		for (uint32_t i = TENSORS; i-- > 5;)
			ready(&m, t, i, step, views[i].data);
		if (step == 1) {
			do
				train_params(c, m.units[3], after, sizeof(after));
			while (!memcmp(before, after, sizeof(after)));
		}
		for (uint32_t i = 5; i--;)
			ready(&m, t, i, step, views[i].data);
		TRAIN_OK(shardd_ddp_finish(c, m.ddp, NULL, 0, &train_err));
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(ddp_in_backward, a_unit_is_stepped_as_soon_as_its_buckets_are_reduced)
{
	trainfix_run(2, early_trainer, NULL);
}

/* A second pass before the Step has nowhere to put its gradients; the Step makes it good. */
static int twice_trainer(const struct trainer *t)
{
	static const struct way w = { "twice", SHARDD_PROFILE_DDP, .kind = SHARDD_SGD };
	shardd_client *c = train_join(t);
	struct model m = make(c, &w, SHARDD_OPTIM_IN_BACKWARD);
	struct shardd_ddp_view views[TENSORS];
	float before[9], after[9];

	pass(&m, t, 1);
	train_params(c, m.units[3], before, sizeof(before));
	TRAIN_OK(shardd_ddp_forward(c, m.ddp, views, TENSORS, &train_err));
	TRAIN_OK(shardd_ddp_backward(c, m.ddp, NULL, 0, NULL, 0, &train_err));
	for (uint32_t i = TENSORS; i--;)
		ready(&m, t, i, 2, views[i].data);
	TRAIN_FAILS(shardd_ddp_finish(c, m.ddp, NULL, 0, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "was reduced for the last time"));
	train_params(c, m.units[3], after, sizeof(after));
	TRAIN_SAME(before, after, sizeof(after));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	pass(&m, t, 2);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_params(c, m.units[3], after, sizeof(after));
	TRAINER_CHECK(memcmp(before, after, sizeof(after)) != 0);
	train_leave(c);
	return 0;
}

Test(ddp_in_backward, a_second_pass_before_the_step_is_refused)
{
	trainfix_run(2, twice_trainer, NULL);
}

/* ------------------------------------------------------------ the trainers' own */

/* SGD as the daemon does it, on this rank's share of the unit whose buckets come next. A tensor
 * that nobody has used is left alone. Return: the unit. */
static shardd_unit step_own(struct model *m, const uint8_t *untouched, float lr)
{
	struct shardd_shard_piece pieces[TENSORS];
	struct shardd_shard s;
	unsigned unit = 0;
	size_t n;

	TRAIN_OK(shardd_next_shard(m->c, SHARDD_WORLD, &s, &train_err));
	while (m->units[unit] != s.unit)
		TRAINER_CHECK(++unit < UNITS);
	TRAIN_OK(shardd_shard_pieces(m->c, s.unit, pieces, TENSORS, &n, &train_err));
	for (size_t i = 0; i < n; i++) {
		size_t bytes = pieces[i].elements * sizeof(float);
		float *p = train_copy(m->c, (float *)s.params + pieces[i].at, bytes);
		float *g = train_copy(m->c, s.gradient + pieces[i].at, bytes);
		const struct k_sgd sgd = { .p = p, .g = g, .lr = lr, .tail_from = UINT64_MAX };

		if (!untouched[first_of[unit] + pieces[i].tensor])
			kernels_ref()->sgd(&sgd, 0, pieces[i].elements);
		train_write(m->c, (float *)s.params + pieces[i].at, p, bytes);
		free(p);
		free(g);
	}
	TRAIN_OK(shardd_shard_done(m->c, s.unit, &train_err));
	return s.unit;
}

/* Which tensors nobody uses in @step: all ranks say the same. */
static unsigned find_untouched(const struct way *w, uint32_t world, unsigned step, uint8_t *ret)
{
	unsigned used_units = 0;

	for (unsigned u = 0; u < UNITS; u++) {
		bool used = false;

		for (unsigned i = first_of[u]; i < first_of[u + 1]; i++) {
			ret[i] = 1;
			for (uint32_t r = 0; r < world; r++)
				ret[i] &= is_unused(w, r, i, step);
			used = used || !ret[i];
		}
		used_units += used;
	}
	return used_units;
}

static void own_way(shardd_client *c, const struct trainer *t, const struct way *w)
{
	struct model own = make(c, w, SHARDD_OPTIM_BY_TRAINER), at_step;
	struct way other = *w;
	char name[32];

	snprintf(name, sizeof(name), "%s'", w->name);
	other.name = name;
	other.own = true;
	at_step = make(c, &other, SHARDD_OPTIM_AT_STEP);
	for (unsigned step = 1; step <= STEPS; step++) {
		double lr = 0.01 * (1 + step % 2);
		const struct shardd_step_options o = { .size = sizeof(o), .lr = &lr };
		uint8_t untouched[TENSORS];
		unsigned n = find_untouched(w, t->world, step, untouched), seen = 0;

		pass(&own, t, step);
		while (n--) {
			shardd_unit u = step_own(&own, untouched, (float)lr);

			TRAINER_CHECK(!(seen >> u & 1));
			seen |= 1U << u;
		}
		pass(&at_step, t, step);
		TRAIN_OK(shardd_step_with(c, &o, NULL, &train_err));
		compare(&own, &at_step);
	}
}

/* Each rank steps a third of every unit; momentum and decay are left out of both. */
static int by_trainer(const struct trainer *t)
{
	static const struct way ways[] = {
		{ "own", SHARDD_PROFILE_DDP, .kind = SHARDD_SGD },
		{ "own view", SHARDD_PROFILE_DDP_BUCKET_VIEW, .kind = SHARDD_SGD },
		{ "own unused", SHARDD_PROFILE_DDP, .kind = SHARDD_SGD, .find_unused = true },
		{ "own sparse", SHARDD_PROFILE_DDP, .kind = SHARDD_SGD, .sparse = true },
	};
	shardd_client *c = train_join(t);

	for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
		own_way(c, t, &ways[i]);
	train_leave(c);
	return 0;
}

Test(ddp_in_backward, the_trainers_own_optimizer_gets_shares_from_buckets)
{
	trainfix_run(WORLD, by_trainer, NULL);
}

/* A share that nobody steps would hold up all others. */
static int own_join_trainer(const struct trainer *t)
{
	static const struct way w = { "joins", SHARDD_PROFILE_DDP, .kind = SHARDD_SGD };
	shardd_client *c = train_join(t);
	struct model m = make(c, &w, SHARDD_OPTIM_BY_TRAINER);
	struct shardd_shard s;

	TRAIN_FAILS(shardd_join_uneven(c, SHARDD_WORLD, false, NULL, NULL, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "BY_TRAINER"));
	pass(&m, t, 1);
	TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err));
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	TRAIN_FAILS(shardd_step(c, SHARDD_WORLD, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "have not given back their shard"));
	train_leave(c);
	return 0;
}

Test(ddp_in_backward, a_rank_with_a_share_cannot_be_without_inputs)
{
	trainfix_run(2, own_join_trainer, NULL);
}

/* ----------------------------------------------------------------------- a death */

struct death {
	bool early; /* before any unit is stepped */
	enum shardd_resume resume;
};

/* A pass in which the last two tensors come first: two units, in one bucket. Rank 1 dies
 * behind it. */
static void last_pass(struct model *m, const struct trainer *t, bool early)
{
	struct shardd_ddp_view views[TENSORS];
	float before[9], after[9];

	TRAIN_OK(shardd_ddp_forward(m->c, m->ddp, views, TENSORS, &train_err));
	train_params(m->c, m->units[3], before, sizeof(before));
	TRAIN_OK(shardd_ddp_backward(m->c, m->ddp, NULL, 0, NULL, 0, &train_err));
	for (uint32_t i = TENSORS; i-- > 5 && !early;)
		ready(m, t, i, 2, views[i].data);
	do
		train_params(m->c, m->units[3], after, sizeof(after));
	while (!early && !memcmp(before, after, sizeof(after)));
	TRAIN_OK(shardd_barrier(m->c, SHARDD_WORLD, &train_err));
	if (t->rank == 1)
		_exit(0);
}

static int dying_trainer(const struct trainer *t)
{
	static const struct way w = { "dying", SHARDD_PROFILE_DDP, .kind = SHARDD_SGD };
	const struct death *how = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = train_join_resuming(c, t, SHARDD_EPHEMERAL, how->resume);
	struct model m = make(c, &w, SHARDD_OPTIM_IN_BACKWARD);
	float committed[9], after[9];

	pass(&m, t, 1);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	train_params(c, m.units[3], committed, sizeof(committed));
	last_pass(&m, t, how->early);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	me = train_join_as(c, t, SHARDD_EPHEMERAL);
	TRAINER_CHECK(me.has_commit && me.step == 1);
	TRAINER_CHECK(me.torn == (!how->early && how->resume == SHARDD_RESUME_NO_COPY));
	if (!me.torn) {
		train_params(c, m.units[3], after, sizeof(after));
		TRAIN_SAME(after, committed, sizeof(after));
	}
	train_leave(c);
	return 0;
}

static void die(bool early, enum shardd_resume resume)
{
	struct death *how = trainer_shared(sizeof(*how));

	how->early = early;
	how->resume = resume;
	trainfix_run(3, dying_trainer, how);
}

Test(ddp_in_backward, a_death_after_a_unit_was_stepped_leaves_the_commit)
{
	die(false, SHARDD_RESUME_APPLIED);
}

Test(ddp_in_backward, a_death_after_a_unit_was_stepped_tears_a_job_without_a_copy)
{
	die(false, SHARDD_RESUME_NO_COPY);
}

Test(ddp_in_backward, a_death_before_that_leaves_the_commit)
{
	die(true, SHARDD_RESUME_NO_COPY);
}
