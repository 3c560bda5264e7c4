/* Ranks that ask for different things at one number: all of them are told who asked
 * for what, soon, and the job goes on. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"

TestSuite(mismatch, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { WORLD = 3, ODD = 1 }; /* the rank that differs */

struct stuff {
	shardd_client *c;
	shardd_unit a, b;
	shardd_group g;
	uint64_t buffer;
};

/* What all do, and what rank ODD does instead. */
struct difference {
	const char *name;
	const char *usual, *odd; /* as the text says it */
	int (*usual_call)(const struct stuff *s);
	int (*odd_call)(const struct stuff *s);
};

static int barrier(const struct stuff *s)
{
	return shardd_barrier(s->c, SHARDD_WORLD, &train_err);
}

static int step(const struct stuff *s)
{
	return shardd_step(s->c, SHARDD_WORLD, NULL, &train_err);
}

static int step_lr(const struct stuff *s)
{
	return shardd_step(s->c, SHARDD_WORLD, &(double){ 0.25 }, &train_err);
}

static int step_other_lr(const struct stuff *s)
{
	return shardd_step(s->c, SHARDD_WORLD, &(double){ 0.5 }, &train_err);
}

static int step_setting(const struct stuff *s, double lr, double eps)
{
	const struct shardd_step_settings setting = { .lr = lr, .eps = eps };
	const struct shardd_step_options o = { .size = sizeof(o),
					       .settings = &setting,
					       .n_settings = 1 };

	return shardd_step_with(s->c, &o, NULL, &train_err);
}

static int step_set(const struct stuff *s)
{
	return step_setting(s, 0.25, 0);
}

static int step_set_lr(const struct stuff *s)
{
	return step_setting(s, 0.5, 0);
}

static int step_set_eps(const struct stuff *s)
{
	return step_setting(s, 0.25, 0.125);
}

static int plan_set(const struct stuff *s, double lr)
{
	const struct shardd_step_settings setting = { .lr = lr };
	const struct shardd_plan_backward_options plan = { .size = sizeof(plan),
							   .settings = &setting,
							   .n_settings = 1 };

	return shardd_plan_backward(s->c, &plan, &train_err);
}

static int plan_a(const struct stuff *s)
{
	return plan_set(s, 0.25);
}

static int plan_b(const struct stuff *s)
{
	return plan_set(s, 0.5);
}

static int reduce_a(const struct stuff *s)
{
	return shardd_reduce(s->c, s->a, &train_err);
}

static int reduce_b(const struct stuff *s)
{
	return shardd_reduce(s->c, s->b, &train_err);
}

static int all_reduce(const struct stuff *s, uint64_t offset, uint64_t count,
		      enum shardd_dtype dtype, enum shardd_reduce_op op)
{
	return shardd_all_reduce(s->c, SHARDD_WORLD, s->buffer, offset, count, dtype, op,
				 &train_err);
}

static int sum_8(const struct stuff *s)
{
	return all_reduce(s, 0, 8, SHARDD_FP32, SHARDD_SUM);
}

static int sum_7(const struct stuff *s)
{
	return all_reduce(s, 0, 7, SHARDD_FP32, SHARDD_SUM);
}

static int sum_8_bf16(const struct stuff *s)
{
	return all_reduce(s, 0, 8, SHARDD_BF16, SHARDD_SUM);
}

static int max_8(const struct stuff *s)
{
	return all_reduce(s, 0, 8, SHARDD_FP32, SHARDD_MAX);
}

static int broadcast_0(const struct stuff *s)
{
	return shardd_broadcast(s->c, SHARDD_WORLD, s->buffer, 0, 64, 0, &train_err);
}

static int broadcast_2(const struct stuff *s)
{
	return shardd_broadcast(s->c, SHARDD_WORLD, s->buffer, 0, 64, 2, &train_err);
}

static int broadcast_less(const struct stuff *s)
{
	return shardd_broadcast(s->c, SHARDD_WORLD, s->buffer, 0, 32, 0, &train_err);
}

static int commit_5(const struct stuff *s)
{
	return shardd_commit(s->c, 5, NULL, 0, &train_err);
}

static int commit_6(const struct stuff *s)
{
	return shardd_commit(s->c, 6, NULL, 0, &train_err);
}

static int clip_1(const struct stuff *s)
{
	return shardd_clip_grad_norm(s->c, SHARDD_WORLD, 1, 2, NULL, &train_err);
}

static int clip_2(const struct stuff *s)
{
	return shardd_clip_grad_norm(s->c, SHARDD_WORLD, 2, 2, NULL, &train_err);
}

static int seed_1(const struct stuff *s)
{
	return shardd_init_seed(s->c, s->a, 1, &train_err);
}

static int seed_2(const struct stuff *s)
{
	return shardd_init_seed(s->c, s->a, 2, &train_err);
}

static const struct difference differences[] = {
	{ "op", "Barrier", "Step", barrier, step },
	{ "unit", "Reduce of unit 'a'", "Reduce of unit 'b'", reduce_a, reduce_b },
	{ "count", "AllReduce of 8 ", "AllReduce of 7 ", sum_8, sum_7 },
	{ "dtype", "fp32", "bf16", sum_8, sum_8_bf16 },
	{ "reduce op", "AllReduce of 8 fp32 (sum)", "AllReduce of 8 fp32 (max)", sum_8, max_8 },
	{ "root", "bytes from rank 0", "bytes from rank 2", broadcast_0, broadcast_2 },
	{ "bytes", "Broadcast of 64 bytes", "Broadcast of 32 bytes", broadcast_0, broadcast_less },
	{ "lr", "Step with lr 0.25", "Step with lr 0.5", step_lr, step_other_lr },
	{ "lr at all", "Step with lr 0.25", "Step", step_lr, step },
	{ "settings", "Step with 1 settings (first lr 0.25", "(first lr 0.5", step_set,
	  step_set_lr },
	{ "settings' rest", "(first lr 0.25, weight_decay 0; word ", "Step with 1", step_set,
	  step_set_eps },
	{ "settings at all", "Step with 1 settings", "Step", step_set, step },
	{ "plan", "0) with 1 settings (first lr 0.25", "0) with 1 settings (first lr 0.5", plan_a,
	  plan_b },
	{ "step", "Commit of step 5", "Commit of step 6", commit_5, commit_6 },
	{ "norm", "ClipGradNorm to 1 ", "ClipGradNorm to 2 ", clip_1, clip_2 },
	{ "seed", "Initialise of unit 'a' (seed 1)", "Initialise of unit 'a' (seed 2)", seed_1,
	  seed_2 },
};

struct play {
	_Atomic int pids[WORLD];
	atomic_uint arrived; /* of all rounds */
};

/* So that the time is that of the mismatch, not of a late process. */
static void meet(struct play *p, unsigned round)
{
	atomic_fetch_add(&p->arrived, 1);
	TRAINER_AWAIT(atomic_load(&p->arrived) >= (round + 1) * WORLD, 60);
}

static void must_say(const char *round, const char *words)
{
	if (!strstr(train_err.text, words))
		fprintf(stderr, "%s: \"%s\" is not in \"%s\"\n", round, words, train_err.text);
	TRAINER_CHECK(strstr(train_err.text, words));
}

/* It names two ranks with pid and op: the odd one and the other that came first. */
static void check_text(const struct play *p, const struct difference *d)
{
	char who[64];
	uint32_t usual = strstr(train_err.text, "rank 0 (pid") ? 0 : 2;

	must_say(d->name, "ops differ at number ");
	snprintf(who, sizeof(who), "rank %u (pid %d)", usual, atomic_load(&p->pids[usual]));
	must_say(d->name, who);
	snprintf(who, sizeof(who), "rank %d (pid %d)", ODD, atomic_load(&p->pids[ODD]));
	must_say(d->name, who);
	must_say(d->name, d->usual);
	must_say(d->name, d->odd);
}

static void differ(struct stuff *s, const struct trainer *t, unsigned round)
{
	struct play *p = t->arg;
	const struct difference *d = &differences[round];
	uint64_t begin;
	int rc;

	meet(p, round);
	begin = clock_now_us();
	rc = t->rank == ODD ? d->odd_call(s) : d->usual_call(s);
	TRAIN_FAILS(rc, SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(clock_now_us() - begin < 1000000);
	check_text(p, d);
	/* nobody has drifted, nobody must join again */
	TRAIN_OK(barrier(s));
}

static int mismatch_trainer(const struct trainer *t)
{
	struct play *p = t->arg;
	struct stuff s = { .c = train_join(t) };
	void *data;

	atomic_store(&p->pids[t->rank], (int)getpid());
	s.a = train_zero_unit(s.c, "a", 100, NULL);
	s.b = train_zero_unit(s.c, "b", 100, NULL);
	TRAIN_OK(shardd_alloc(s.c, 64, &s.buffer, &data, &train_err));
	train_set(s.c, data, 0, 64);
	TRAIN_OK(shardd_gradient(s.c, s.a, &data, &train_err));
	TRAIN_OK(shardd_gradient(s.c, s.b, &data, &train_err));
	for (unsigned i = 0; i < ARRAY_SIZE(differences); i++)
		differ(&s, t, i);
	/* what failed has changed nothing, so it can be done now */
	TRAIN_OK(reduce_a(&s));
	TRAIN_OK(sum_8(&s));
	TRAIN_OK(broadcast_0(&s));
	TRAIN_OK(clip_1(&s));
	TRAIN_OK(step_lr(&s));
	TRAIN_OK(commit_5(&s));
	train_leave(s.c);
	return 0;
}

Test(mismatch, every_rank_is_told_who_asked_for_what)
{
	struct play *p = trainer_shared(sizeof(*p));

	trainfix_run(WORLD, mismatch_trainer, p);
	cr_assert_eq(atomic_load(&p->arrived), ARRAY_SIZE(differences) * WORLD);
}
