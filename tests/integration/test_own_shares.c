/*
 * The trainer's own optimizer where a shard is not simply a rank's own: replicas, and ranks that
 * are not on the device of their shard. Every trained element is one rank's, the same in every
 * step, and what is given back is in all copies.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "gpufix.h"

TestSuite(own_shares, .init = trainfix_begin, .fini = trainfix_end, .timeout = 300);

enum { MAX_WORLD = 5, STEPS = 3, TENSORS = 5, MAX_ELEMENTS = 1024 };

/* Where the ranks are: side by side, all on the first device but the last one, in turn. */
enum place { PLACE_BLOCKS, PLACE_LOPSIDED, PLACE_IN_TURN, _PLACE_N };

struct scene {
	struct shardd_unit_spec like; /* strategy, shard_ranks, layout */
	enum place place;
	unsigned devices;
	atomic_uint lent[MAX_ELEMENTS]; /* how often, by element of the gathered unit */
};

/* ---------------------------------------------------------------------- devices */

static unsigned device_of(const struct scene *s, uint32_t rank, uint32_t world)
{
	if (s->place == PLACE_LOPSIDED)
		return rank + 1 < world ? 0 : s->devices - 1;
	return s->place == PLACE_IN_TURN ? rank % s->devices : rank * s->devices / world;
}

static shardd_client *join(const struct trainer *t)
{
	return train_on_host() ? train_join(t) : gpu_join(t, device_of(t->arg, t->rank, t->world));
}

/* ------------------------------------------------------------------------ units */

static const uint64_t shapes[TENSORS][2] = { { 33, 3 }, { 7, 1 }, { 40, 2 }, { 1, 5 }, { 50, 4 } };
static const bool frozen[TENSORS] = { false, false, true, false, false };

struct both {
	struct shardd_unit_info own, plain;
	struct shardd_tensor_place places[TENSORS];
};

/* Both with the same numbers. */
static void fill_unit(shardd_client *c, const struct shardd_unit_info *u, uint32_t rank)
{
	float *x = train_numbers(u->packed_elements, 5);
	uint64_t bytes = u->packed_elements * sizeof(float);
	const void *data = x;

	TRAIN_OK(shardd_init_broadcast_all(c, &u->unit, &bytes, 1, 0, rank ? NULL : &data,
					   &train_err));
	free(x);
}

static struct shardd_unit_info make_unit(shardd_client *c, const struct trainer *t,
					 const char *name, const struct shardd_optimizer *o)
{
	struct shardd_tensor tensors[TENSORS];
	const struct scene *s = t->arg;
	struct shardd_unit_spec spec = s->like;
	struct shardd_unit_info info;
	char names[TENSORS][8];

	for (unsigned i = 0; i < TENSORS; i++) {
		snprintf(names[i], sizeof(names[i]), "t%u", i);
		tensors[i] = (struct shardd_tensor){
			.name = names[i], .shape = shapes[i], .dims = 2, .frozen = frozen[i]
		};
	}
	spec.size = sizeof(spec);
	spec.name = name;
	spec.tensors = tensors;
	spec.n_tensors = TENSORS;
	spec.optimizer = *o;
	TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
	fill_unit(c, &info, t->rank);
	return info;
}

static struct both make_both(shardd_client *c, const struct trainer *t)
{
	const struct shardd_optimizer own = { .when = SHARDD_OPTIM_BY_TRAINER };
	const struct shardd_optimizer sgd = { .kind = SHARDD_SGD, .lr = 0.1, .momentum = 0.9 };
	struct both b = { 0 };

	b.own = make_unit(c, t, "own", &own);
	b.plain = make_unit(c, t, "plain", &sgd);
	TRAIN_OK(shardd_tensor_places(c, b.own.unit, b.places, TENSORS, &train_err));
	TRAINER_CHECK(b.own.elements <= MAX_ELEMENTS);
	return b;
}

static void hand_in(shardd_client *c, const struct shardd_unit_info *u, uint32_t rank,
		    unsigned step)
{
	float *x = train_numbers(u->gradient_elements, rank * 100 + step);

	train_reduce(c, u->unit, DTYPE_FP32, x, u->gradient_elements);
	free(x);
}

/* -------------------------------------------------------------------- one's share */

/* What is in the shard is what its pieces say; note who had what. @full: as it was gathered. */
static void check_pieces(shardd_client *c, struct scene *s, const struct both *b,
			 const struct shardd_shard *shard, const float *full)
{
	float *p = train_copy(c, shard->params, shard->elements * sizeof(float));
	struct shardd_shard_piece pieces[TENSORS];
	size_t n = 0;
	uint64_t end = 0;

	TRAIN_FAILS(shardd_shard_pieces(c, 99, NULL, 0, &n, &train_err), SHARDD_NOT_FOUND);
	TRAIN_OK(shardd_shard_pieces(c, shard->unit, NULL, 0, &n, &train_err));
	TRAINER_CHECK(n <= TENSORS);
	TRAIN_OK(shardd_shard_pieces(c, shard->unit, pieces, n, &n, &train_err));
	TRAINER_CHECK(n <= TENSORS && (n > 0) == (shard->elements > 0));
	for (size_t i = 0; i < n; i++) {
		const struct shardd_shard_piece *x = &pieces[i];
		const struct shardd_tensor_place *at = &b->places[x->tensor];

		TRAINER_CHECK(x->at >= end && x->elements > 0 && !frozen[x->tensor]);
		TRAINER_CHECK(x->first + x->elements <= at->elements);
		end = x->at + x->elements;
		TRAIN_SAME(p + x->at, full + at->offset + x->first, x->elements * sizeof(float));
		for (uint64_t k = 0; k < x->elements; k++)
			atomic_fetch_add(&s->lent[at->offset + x->first + k], 1);
	}
	TRAINER_CHECK(end == shard->elements);
	free(p);
}

/* SGD with momentum as the daemon does it, on what lies where it lay the step before. */
static void step_shard(shardd_client *c, const struct shardd_shard *s, float *momentum, bool first)
{
	size_t bytes = s->elements * sizeof(float);
	float *p = train_copy(c, s->params, bytes), *g = train_copy(c, s->gradient, bytes);
	const struct k_sgd sgd = { .p = p,
				   .g = g,
				   .buf = momentum,
				   .lr = 0.1F,
				   .mu = 0.9F,
				   .first = first,
				   .tail_from = UINT64_MAX };

	kernels_ref()->sgd(&sgd, 0, s->elements);
	train_write(c, s->params, p, bytes);
	free(p);
	free(g);
}

static void compare(shardd_client *c, const struct both *b)
{
	size_t bytes = b->own.elements * sizeof(float);
	float *x = train_alloc(bytes), *y = train_alloc(bytes);

	train_params(c, b->own.unit, x, bytes);
	train_params(c, b->plain.unit, y, bytes);
	TRAIN_SAME(x, y, bytes);
	free(x);
	free(y);
}

static void one_step(shardd_client *c, const struct trainer *t, const struct both *b,
		     float *momentum, unsigned step)
{
	float full[MAX_ELEMENTS];
	struct shardd_shard shard;

	train_params(c, b->own.unit, full, b->own.elements * sizeof(float));
	hand_in(c, &b->own, t->rank, step);
	TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &shard, &train_err));
	check_pieces(c, t->arg, b, &shard, full);
	step_shard(c, &shard, momentum, step == 0);
	TRAIN_OK(shardd_shard_done(c, shard.unit, &train_err));
	hand_in(c, &b->plain, t->rank, step);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	compare(c, b);
	TRAIN_OK(shardd_commit(c, step + 1, NULL, 0, &train_err));
}

static int trainer(const struct trainer *t)
{
	shardd_client *c = join(t);
	struct both b = make_both(c, t);
	float momentum[MAX_ELEMENTS] = { 0 };

	for (unsigned step = 0; step < STEPS; step++)
		one_step(c, t, &b, momentum, step);
	train_leave(c);
	return 0;
}

/* Every trained element in every step, and nothing else: what is frozen, and padding. */
static void check_lent(const struct scene *s)
{
	unsigned all = 0, trained = 0;

	for (unsigned i = 0; i < TENSORS; i++)
		trained += frozen[i] ? 0 : (unsigned)(shapes[i][0] * shapes[i][1]);
	for (unsigned i = 0; i < MAX_ELEMENTS; i++) {
		unsigned n = atomic_load(&s->lent[i]);

		cr_assert(n == 0 || n == STEPS, "element %u was lent %u times", i, n);
		all += n > 0;
	}
	cr_assert_eq(all, trained);
}

static void run_all(const struct shardd_unit_spec *like, uint32_t world)
{
	unsigned devices = gpu_count();

	for (int i = 0; i < 2 * _PLACE_N; i++) {
		struct scene *s = trainer_shared(sizeof(*s));
		char job[64];

		if (devices == 1 && i / 2)
			continue;
		s->like = *like;
		s->like.layout = i % 2 ? SHARDD_LAYOUT_DIM0 : SHARDD_LAYOUT_FLAT;
		s->place = (enum place)(i / 2);
		s->devices = devices;
		snprintf(job, sizeof(job), "s%d-%u-w%u-%d", like->strategy, like->shard_ranks,
			 world, i);
		trainers_run(&trainfix, job, world, trainer, s, 120);
		check_lent(s);
	}
}

Test(own_shares, replicas_share_the_elements_between_them)
{
	const struct shardd_unit_spec like = { .strategy = SHARDD_REPLICATE };

	for (uint32_t world = 1; world <= MAX_WORLD; world += 2)
		run_all(&like, world);
}

Test(own_shares, of_each_shard_of_a_hybrid_its_replicas_have_a_part)
{
	struct shardd_unit_spec like = { .strategy = SHARDD_HYBRID };

	for (like.shard_ranks = 1; like.shard_ranks <= 4; like.shard_ranks *= 2)
		run_all(&like, 4);
}

Test(own_shares, a_shard_on_another_device_is_lent_where_it_is)
{
	const struct shardd_unit_spec like = { .strategy = SHARDD_SHARD };

	run_all(&like, 3);
	run_all(&like, MAX_WORLD);
}

/* ------------------------------------------------------------------- the sign of 0 */

/* Ranks that have nothing to add to a replica's sum add nothing: not a +0 either. */
static int signs_trainer(const struct trainer *t)
{
	const struct shardd_optimizer own = { .when = SHARDD_OPTIM_BY_TRAINER };
	shardd_client *c = join(t);
	struct shardd_unit_info u = make_unit(c, t, "own", &own);
	size_t bytes = u.gradient_elements * sizeof(float);
	float *zeros = train_alloc(bytes), *got;
	struct shardd_shard s;

	for (uint64_t i = 0; i < u.gradient_elements; i++)
		zeros[i] = -0.0f;
	train_reduce(c, u.unit, DTYPE_FP32, zeros, u.gradient_elements);
	TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err));
	got = train_copy(c, s.gradient, s.elements * sizeof(float));
	TRAIN_SAME(got, zeros, s.elements * sizeof(float));
	TRAIN_OK(shardd_shard_done(c, s.unit, &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_leave(c);
	free(zeros);
	free(got);
	return 0;
}

Test(own_shares, a_sum_of_minus_zeros_is_one)
{
	for (int i = 0; i < 2 * _PLACE_N; i++) {
		struct scene *s = trainer_shared(sizeof(*s));
		char job[32];

		s->devices = gpu_count();
		s->place = (enum place)(i / 2);
		s->like = (struct shardd_unit_spec){ .strategy = SHARDD_HYBRID,
						     .shard_ranks = 2,
						     .reduce_profile = SHARDD_PROFILE_FSDP2,
						     .gradient_dtype = SHARDD_FP32,
						     .reduce_dtype =
							     i % 2 ? SHARDD_BF16 : SHARDD_FP32 };
		snprintf(job, sizeof(job), "signs%d", i);
		trainers_run(&trainfix, job, 4, signs_trainer, s, 60);
	}
}

/* ------------------------------------------------------------------------ death */

struct play {
	struct scene scene; /* first: trainers look for it here */
	enum shardd_resume resume;
	stage go;
	stage at[2];
	pid_t pids[2];
	float before[MAX_ELEMENTS], now[MAX_ELEMENTS];
};

static shardd_client *join_resuming(const struct trainer *t, enum shardd_resume resume)
{
	shardd_client *c = train_on_host() ? train_connect(t)
					   : gpu_connect(t, device_of(t->arg, t->rank, t->world));

	train_join_resuming(c, t, SHARDD_EPHEMERAL, resume);
	return c;
}

/* Rank 1 gives its part back and dies; there is no commit. */
static int dying(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = join_resuming(t, p->resume);
	struct shardd_optimizer own = { .when = SHARDD_OPTIM_BY_TRAINER };
	struct shardd_unit_info u = make_unit(c, t, "own", &own);
	size_t bytes = u.elements * sizeof(float);
	struct shardd_shard s;
	const void *full;

	if (t->rank == 0)
		train_params(c, u.unit, p->before, bytes);
	hand_in(c, &u, t->rank, 0);
	TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err));
	if (t->rank == 1) {
		train_poke(c, s.params, 99);
		TRAIN_OK(shardd_shard_done(c, u.unit, &train_err));
		stage_set(&p->at[1], 1);
		for (;;)
			pause();
	}
	stage_set(&p->at[0], 1);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	train_join_as(c, t, SHARDD_EPHEMERAL);
	if (p->resume == SHARDD_RESUME_APPLIED) {
		train_params(c, u.unit, p->now, bytes);
		TRAIN_SAME(p->now, p->before, bytes);
	} else if (p->scene.devices > 1) {
		TRAIN_FAILS(shardd_gather(c, u.unit, &full, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		told_now("is not initialised");
	} else {
		TRAIN_OK(shardd_gather(c, u.unit, &full, &train_err));
	}
	train_leave(c);
	return 0;
}

static void dies(enum shardd_resume resume)
{
	struct play *p = trainer_shared(sizeof(*p));

	p->resume = resume;
	p->scene.like.strategy = SHARDD_REPLICATE;
	p->scene.devices = gpu_count() > 1 ? 2 : 1;
	for (uint32_t r = 0; r < 2; r++)
		p->pids[r] = trainer_start(&trainfix, "dies", r, 2, dying, p);
	for (uint32_t r = 0; r < 2; r++)
		AWAIT(atomic_load(&p->at[r]) == 1, 30);
	fail_kill(p->pids[1]);
	stage_set(&p->go, 1);
	cr_assert_eq(trainer_wait(p->pids[0], 60), 0);
}

/* Its device's copy has it, another device's has not. */
Test(own_shares, copies_that_a_death_left_unequal_are_nobodys)
{
	dies(SHARDD_RESUME_NO_COPY);
}

Test(own_shares, copies_that_a_death_left_unequal_are_rolled_back)
{
	dies(SHARDD_RESUME_APPLIED);
}
