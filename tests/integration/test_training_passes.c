/*
 * Guarded units in a real daemon: training in passes ends with the same bits as gathers and
 * releases by hand, whatever the policy; the states are seen and checked; ranks that die in a
 * pass leave nothing behind; what is gathered ahead is there when it is asked for.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

enum { N = 3001, UNITS = 3, STEPS = 4 };

TestSuite(training_passes, .timeout = 120, .init = trainfix_begin, .fini = trainfix_end);

static const struct shardd_unit_spec like = {
	.compute_dtype = SHARDD_BF16,
	.gradient_dtype = SHARDD_FP32,
	.optimizer = { .kind = SHARDD_ADAMW, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8 },
};

static void make_units(shardd_client *c, const char *prefix, const struct shardd_unit_spec *spec,
		       shardd_unit *ret)
{
	for (unsigned i = 0; i < UNITS; i++) {
		char name[32];

		snprintf(name, sizeof(name), "%s%u", prefix, i);
		ret[i] = train_register(c, name, N, spec).unit;
		TRAIN_OK(shardd_init_seed(c, ret[i], i + 1, &train_err));
	}
}

/* The gradient of a unit in a step depends on its parameters, so that a stale copy shows. */
static void hand_gradient(shardd_client *c, shardd_unit u, const void *params, uint64_t seed)
{
	float g[N];
	uint16_t p[N];

	train_fill(g, N, seed);
	train_read(c, p, params, sizeof(p));
	for (size_t i = 0; i < N; i++)
		g[i] += (float)p[i] * 0x1p-17f;
	train_fill_gradient(c, u, DTYPE_FP32, g, N);
}

static void step_by_hand(shardd_client *c, const struct trainer *t, const shardd_unit *u,
			 unsigned step)
{
	const void *data;

	for (unsigned i = UNITS; i-- > 0;) {
		TRAIN_OK(shardd_gather(c, u[i], &data, &train_err));
		hand_gradient(c, u[i], data, step * 100 + t->rank * 10 + i);
		TRAIN_OK(shardd_release(c, u[i], &train_err));
		TRAIN_OK(shardd_reduce(c, u[i], &train_err));
	}
}

static void forward(shardd_client *c, const shardd_unit *u)
{
	const void *data;

	for (unsigned i = 0; i < UNITS; i++) {
		TRAIN_OK(shardd_begin_pass(c, u[i], SHARDD_FORWARD, &data, &train_err));
		TRAINER_CHECK(data);
		TRAIN_OK(shardd_end_pass(c, u[i], SHARDD_FORWARD, false, &train_err));
	}
}

/* The first micro-batch without a reduce: its gradients are written over here, which is a
 * trainer's affair. */
static void step_in_passes(shardd_client *c, const struct trainer *t, const shardd_unit *u,
			   unsigned step)
{
	const void *data;

	for (unsigned micro = 0; micro < 2; micro++) {
		forward(c, u);
		for (unsigned i = UNITS; i-- > 0;) {
			TRAIN_OK(shardd_begin_pass(c, u[i], SHARDD_BACKWARD, &data, &train_err));
			hand_gradient(c, u[i], data, step * 100 + t->rank * 10 + i);
			if (micro)
				TRAIN_OK(shardd_reduce(c, u[i], &train_err));
			TRAIN_OK(shardd_end_pass(c, u[i], SHARDD_BACKWARD, micro, &train_err));
		}
	}
}

static int same_trainer(const struct trainer *t)
{
	static const enum shardd_reshard policies[] = { SHARDD_RESHARD_AFTER_FORWARD,
							SHARDD_RESHARD_AFTER_BACKWARD,
							SHARDD_RESHARD_NEVER,
							SHARDD_RESHARD_AFTER_FORWARD_ONLY };
	shardd_client *c = train_join(t);
	shardd_unit hand[UNITS], u[UNITS];

	make_units(c, "hand", &like, hand);
	for (size_t p = 0; p < ARRAY_SIZE(policies); p++) {
		struct shardd_unit_spec spec = like;
		char name[16];

		snprintf(name, sizeof(name), "policy%zu.", p);
		spec.guarded = true;
		spec.reshard = policies[p];
		make_units(c, name, &spec, u);
		if (p)
			for (unsigned i = 0; i < UNITS; i++)
				TRAIN_OK(shardd_init_seed(c, hand[i], i + 1, &train_err));
		for (unsigned s = 0; s < STEPS; s++) {
			step_by_hand(c, t, hand, s);
			step_in_passes(c, t, u, s);
			TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
			TRAIN_OK(shardd_commit(c, p * STEPS + s + 1, NULL, 0, &train_err));
		}
		for (unsigned i = 0; i < UNITS; i++) {
			uint16_t a[N], b[N];

			train_params(c, hand[i], a, sizeof(a));
			train_params(c, u[i], b, sizeof(b));
			TRAINER_CHECK(memcmp(a, b, sizeof(a)) == 0);
		}
	}
	train_leave(c);
	return 0;
}

Test(training_passes, end_with_the_bits_of_gathers_by_hand)
{
	trainfix_run(1, same_trainer, NULL);
	trainfix_run(2, same_trainer, NULL);
	trainfix_run(4, same_trainer, NULL);
}

/* ---------------------------------------------------------------------- states */

static int refused_trainer(const struct trainer *t)
{
	struct shardd_unit_spec spec = like;
	shardd_client *c = train_join(t);
	struct shardd_result r;
	shardd_ticket ticket;
	shardd_unit u[UNITS];
	const void *data;

	spec.guarded = true;
	make_units(c, "u", &spec, u);
	TRAIN_FAILS(shardd_end_pass(c, u[0], SHARDD_FORWARD, false, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "EndPass(FORWARD): unit 'u0' is in state IDLE"));
	TRAIN_OK(shardd_begin_pass(c, u[0], SHARDD_BACKWARD, &data, &train_err));
	TRAIN_FAILS(shardd_step(c, SHARDD_WORLD, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "unit 'u0' is in state BACKWARD_PRE") ||
		      strstr(train_err.text, "was refused its Step"));
	TRAIN_FAILS(shardd_end_pass(c, u[0], SHARDD_BACKWARD, true, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAIN_OK(shardd_end_pass(c, u[0], SHARDD_BACKWARD, false, &train_err));
	TRAIN_FAILS(shardd_begin_pass(c, u[0], (enum shardd_pass)7, &data, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_set_reshard(c, NULL, 1, SHARDD_RESHARD_NEVER, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_set_prefetch(c, u[0], SHARDD_FORWARD, NULL, 1, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	TRAIN_OK(shardd_set_reshard(c, u, UNITS, SHARDD_RESHARD_NEVER, &train_err));
	TRAIN_OK(shardd_begin_pass(c, u[0], SHARDD_FORWARD, &data, &train_err));
	TRAIN_OK(shardd_submit_end_pass(
		c, SHARDD_OPTIONS(end_pass, .unit = u[0], .pass = SHARDD_FORWARD), &ticket,
		&train_err));
	TRAIN_OK(shardd_wait(c, ticket, -1, &r, &train_err));
	TRAINER_CHECK(r.kept);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
	train_leave(c);
	return 0;
}

Test(training_passes, what_does_not_fit_is_refused_with_the_state)
{
	trainfix_run(2, refused_trainer, NULL);
}

/* A pass with sync whose gradients nobody reduces: refused, whatever the strategy. */
static int unreduced_trainer(const struct trainer *t)
{
	static const enum shardd_strategy strategies[] = { SHARDD_SHARD, SHARDD_REPLICATE,
							   SHARDD_HYBRID };
	shardd_client *c = train_join(t);

	for (size_t i = 0; i < ARRAY_SIZE(strategies); i++) {
		struct shardd_unit_spec spec = like;
		shardd_unit u[UNITS];
		const void *data;
		char name[16];
		void *gradient;

		snprintf(name, sizeof(name), "unreduced%zu.", i);
		spec.guarded = true;
		spec.strategy = strategies[i];
		spec.shard_ranks = strategies[i] == SHARDD_HYBRID ? 1 : 0;
		make_units(c, name, &spec, u);
		TRAIN_OK(shardd_begin_pass(c, u[0], SHARDD_BACKWARD, &data, &train_err));
		TRAIN_FAILS(shardd_end_pass(c, u[0], SHARDD_BACKWARD, true, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "is in state BACKWARD_PRE"));
		TRAINER_CHECK(strstr(train_err.text, "it must be BACKWARD_POST"));
		TRAIN_OK(shardd_gradient(c, u[0], &gradient, &train_err));
		TRAIN_OK(shardd_accumulate(c, u[0], &train_err));
		TRAIN_FAILS(shardd_end_pass(c, u[0], SHARDD_BACKWARD, true, &train_err),
			    SHARDD_FAILED_PRECONDITION);
		TRAINER_CHECK(strstr(train_err.text, "were accumulated on rank"));
		TRAIN_OK(shardd_reduce(c, u[0], &train_err));
		TRAIN_OK(shardd_end_pass(c, u[0], SHARDD_BACKWARD, true, &train_err));
		TRAIN_OK(shardd_begin_pass(c, u[0], SHARDD_BACKWARD, &data, &train_err));
		TRAIN_OK(shardd_end_pass(c, u[0], SHARDD_BACKWARD, false, &train_err));
	}
	train_leave(c);
	return 0;
}

Test(training_passes, end_with_sync_only_when_reduced)
{
	trainfix_run(2, unreduced_trainer, NULL);
}

/* Two units of one ddp, in passes: what its buckets have got is reduced. */
struct in_buckets {
	shardd_client *c;
	shardd_unit u[UNITS];
	shardd_ddp ddp;
	struct shardd_ddp_view views[UNITS];
};

static void begin_backward(struct in_buckets *b)
{
	const void *data;

	TRAIN_OK(shardd_ddp_forward(b->c, b->ddp, b->views, UNITS, &train_err));
	for (unsigned i = 0; i < UNITS; i++)
		TRAIN_OK(shardd_begin_pass(b->c, b->u[i], SHARDD_BACKWARD, &data, &train_err));
}

static void end_backward(struct in_buckets *b, unsigned i)
{
	TRAIN_OK(shardd_end_pass(b->c, b->u[i], SHARDD_BACKWARD, true, &train_err));
}

static void not_yet(struct in_buckets *b, unsigned i)
{
	TRAIN_FAILS(shardd_end_pass(b->c, b->u[i], SHARDD_BACKWARD, true, &train_err),
		    SHARDD_FAILED_PRECONDITION);
	TRAINER_CHECK(strstr(train_err.text, "is in state BACKWARD_PRE"));
}

static void ready(struct in_buckets *b, uint32_t tensor)
{
	TRAIN_OK(shardd_ddp_ready(b->c, b->ddp, &tensor, 1, &train_err));
}

static void ddp_pass(struct in_buckets *b)
{
	begin_backward(b);
	not_yet(b, 0);
	TRAIN_OK(shardd_ddp_backward(b->c, b->ddp, NULL, 0, NULL, 0, &train_err));
	for (uint32_t i = UNITS; i-- > 0;) {
		not_yet(b, i);
		ready(b, i);
		if (i % 2) /* at once, or when the pass is over */
			end_backward(b, i);
	}
	TRAIN_OK(shardd_ddp_finish(b->c, b->ddp, NULL, 0, &train_err));
	for (unsigned i = 0; i < UNITS; i += 2)
		end_backward(b, i);
}

static int buckets_trainer(const struct trainer *t)
{
	struct shardd_unit_spec spec = like;
	struct in_buckets b = { .c = train_join(t) };
	struct shardd_ddp_create_options ddp = { .size = sizeof(ddp),
						 .units = b.u,
						 .n_units = UNITS };
	uint32_t n;

	spec.guarded = true;
	spec.strategy = SHARDD_REPLICATE;
	spec.reduce_profile = SHARDD_PROFILE_DDP;
	spec.reduce_dtype = 0;
	make_units(b.c, "bucket", &spec, b.u);
	TRAIN_OK(shardd_ddp_create(b.c, &ddp, &b.ddp, &n, &train_err));
	TRAINER_CHECK(n == UNITS);
	for (unsigned step = 1; step < 4; step++) {
		ddp_pass(&b);
		TRAIN_OK(shardd_step(b.c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_commit(b.c, step, NULL, 0, &train_err));
	}
	begin_backward(&b); /* the pass before is not this one's */
	not_yet(&b, 0);
	for (unsigned i = 0; i < UNITS; i++)
		TRAIN_OK(shardd_end_pass(b.c, b.u[i], SHARDD_BACKWARD, false, &train_err));
	train_leave(b.c);
	return 0;
}

Test(training_passes, end_with_sync_when_the_buckets_have_all)
{
	trainfix_run(2, buckets_trainer, NULL);
}

/* ---------------------------------------------------- seen, and ended, from outside */

static int told[2], go_on[2][2]; /* a trainer has come to its place; rank r may go on */

static void open_pipes(void)
{
	cr_assert_eq(pipe(told), 0);
	for (unsigned r = 0; r < 2; r++)
		cr_assert_eq(pipe(go_on[r]), 0);
}

static void close_pipes(void)
{
	for (unsigned i = 0; i < 2; i++) {
		close(told[i]);
		close(go_on[0][i]);
		close(go_on[1][i]);
	}
}

static void wait_here(const struct trainer *t)
{
	char byte = 'x';

	TRAINER_CHECK(write(told[1], &byte, 1) == 1);
	TRAINER_CHECK(read(go_on[t->rank][0], &byte, 1) == 1);
}

static void wait_for_trainers(unsigned n)
{
	char byte;

	while (n--)
		cr_assert_eq(read(told[0], &byte, 1), 1);
}

static void let_go_on(uint32_t rank)
{
	cr_assert_eq(write(go_on[rank][1], "x", 1), 1);
}

static int seen_trainer(const struct trainer *t)
{
	struct shardd_unit_spec spec = like;
	shardd_client *c = train_join(t);
	shardd_unit u[UNITS];
	const void *data;

	spec.guarded = true;
	spec.reshard = SHARDD_RESHARD_AFTER_BACKWARD;
	make_units(c, "u", &spec, u);
	TRAIN_OK(shardd_begin_pass(c, u[0], t->rank ? SHARDD_BACKWARD : SHARDD_FORWARD, &data,
				   &train_err));
	TRAIN_OK(shardd_begin_pass(c, u[1], SHARDD_FORWARD, &data, &train_err));
	TRAIN_OK(shardd_end_pass(c, u[1], SHARDD_FORWARD, false, &train_err));
	wait_here(t);
	TRAIN_OK(shardd_end_pass(c, u[0], t->rank ? SHARDD_BACKWARD : SHARDD_FORWARD, false,
				 &train_err));
	train_leave(c);
	return 0;
}

static void expect_pass(json_t *unit, size_t i, int rank, const char *state)
{
	json_t *p = json_array_get(json_object_get(unit, "passes"), i);

	cr_assert(p, "%zu", i);
	cr_expect_eq(json_integer_value(json_object_get(p, "rank")), rank);
	cr_expect_str_eq(json_string_value(json_object_get(p, "state")), state);
	cr_expect(json_is_true(json_object_get(p, "holds")));
}

Test(training_passes, are_seen_in_shardctl_units)
{
	pid_t pids[2];
	char text[4096];
	json_t *all, *units;

	open_pipes();
	for (uint32_t r = 0; r < 2; r++)
		pids[r] = trainer_start(&trainfix, "seen", r, 2, seen_trainer, NULL);
	wait_for_trainers(2);
	all = daemonfix_ctl(&trainfix, (const char *const[]){ "units", "seen", NULL });
	units = json_object_get(all, "units");
	expect_pass(json_array_get(units, 0), 0, 0, "FORWARD");
	expect_pass(json_array_get(units, 0), 1, 1, "BACKWARD_PRE");
	expect_pass(json_array_get(units, 1), 1, 1, "IDLE"); /* kept by its policy */
	cr_expect_eq(json_array_size(json_object_get(json_array_get(units, 2), "passes")), 0);
	cr_expect_str_eq(json_string_value(json_object_get(json_array_get(units, 0), "reshard")),
			 "AFTER_BACKWARD");
	cr_expect(json_is_true(json_object_get(json_array_get(units, 0), "guarded")));
	json_decref(all);
	cr_expect_eq(daemonfix_ctl_text(&trainfix, (const char *const[]){ "units", "seen", NULL },
					text, sizeof(text)),
		     0);
	cr_expect(strstr(text, "0:FORWARD 1:BACKWARD_PRE"), "%s", text);
	let_go_on(0);
	let_go_on(1);
	for (uint32_t r = 0; r < 2; r++)
		cr_expect_eq(trainer_wait(pids[r], 30), 0);
	close_pipes();
}

/* Rank 1 comes to a state and waits there to be killed; rank 0 joins again and trains on
 * with its successor. @arg: which state. */
static int dying_trainer(const struct trainer *t)
{
	struct shardd_unit_spec spec = like;
	unsigned state = *(const unsigned *)t->arg;
	shardd_client *c = train_connect(t);
	const void *data;
	shardd_unit u[UNITS];

	train_join_as(c, t, SHARDD_KEEP);
	spec.guarded = true;
	make_units(c, "u", &spec, u);
	TRAIN_OK(shardd_begin_pass(c, u[0], state ? SHARDD_BACKWARD : SHARDD_FORWARD, &data,
				   &train_err));
	if (state == 2) {
		hand_gradient(c, u[0], data, 1);
		TRAIN_OK(shardd_reduce(c, u[0], &train_err));
	}
	if (state == 3)
		TRAIN_OK(shardd_begin_pass(c, u[0], SHARDD_FORWARD, &data, &train_err));
	wait_here(t);
	TRAIN_FAILS(shardd_end_pass(c, u[0], SHARDD_FORWARD, false, &train_err), SHARDD_ABORTED);
	train_join_as(c, t, SHARDD_KEEP);
	wait_here(t);               /* for its peer */
	step_in_passes(c, t, u, 0); /* from IDLE */
	train_leave(c);
	return 0;
}

static int successor_trainer(const struct trainer *t)
{
	struct shardd_unit_spec spec = like;
	shardd_client *c = train_connect(t);
	struct shardd_unit_info info;
	shardd_unit u[UNITS];

	train_join_as(c, t, SHARDD_KEEP);
	spec.guarded = true;
	for (unsigned i = 0; i < UNITS; i++) {
		char name[32];

		snprintf(name, sizeof(name), "u%u", i);
		info = train_register(c, name, N, &spec);
		TRAINER_CHECK(info.initialised);
		u[i] = info.unit;
	}
	wait_here(t);
	step_in_passes(c, t, u, 0);
	train_leave(c);
	return 0;
}

Test(training_passes, a_rank_that_dies_in_a_pass_leaves_nothing_behind)
{
	unsigned *state = trainer_shared(sizeof(*state));

	for (*state = 0; *state < 4; ++*state) {
		pid_t pids[2];
		char job[16];

		snprintf(job, sizeof(job), "dying%u", *state);
		open_pipes();
		for (uint32_t r = 0; r < 2; r++)
			pids[r] = trainer_start(&trainfix, job, r, 2, dying_trainer, state);
		wait_for_trainers(2);
		kill(pids[1], SIGKILL);
		cr_expect_eq(trainer_wait(pids[1], 30), 128 + SIGKILL);
		pids[1] = trainer_start(&trainfix, job, 1, 2, successor_trainer, NULL);
		wait_for_trainers(1); /* the successor has joined: the epoch is the last one */
		let_go_on(0);
		wait_for_trainers(1); /* rank 0 has joined it */
		let_go_on(0);
		let_go_on(1);
		for (uint32_t r = 0; r < 2; r++)
			cr_expect_eq(trainer_wait(pids[r], 30), 0, "state %u, rank %u", *state, r);
		close_pipes();
		json_decref(daemonfix_ctl(&trainfix,
					  (const char *const[]){ "job", "delete", job, NULL }));
	}
}

/* ---------------------------------------------------------------- gathered ahead */

static int ahead_trainer(const struct trainer *t)
{
	struct shardd_unit_spec spec = like;
	shardd_client *c = train_join(t);
	shardd_unit u[UNITS];

	spec.guarded = true;
	make_units(c, "u", &spec, u);
	for (unsigned s = 0; s < STEPS; s++) {
		step_in_passes(c, t, u, s);
		TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
		TRAIN_OK(shardd_commit(c, s + 1, NULL, 0, &train_err));
	}
	wait_here(t);
	train_leave(c);
	return 0;
}

static uint64_t of_rank(json_t *all, unsigned rank, const char *key)
{
	return (uint64_t)json_integer_value(
		json_object_get(json_array_get(json_object_get(all, "ranks"), rank), key));
}

/* How many are hits depends on how fast the ranks are; that the order is learned does not. */
Test(training_passes, the_order_is_learned_and_followed)
{
	json_t *all;
	pid_t pids[2];

	open_pipes();
	for (uint32_t r = 0; r < 2; r++)
		pids[r] = trainer_start(&trainfix, "ahead", r, 2, ahead_trainer, NULL);
	wait_for_trainers(2);
	all = daemonfix_ctl(&trainfix, (const char *const[]){ "units", "ahead", NULL });
	for (unsigned r = 0; r < 2; r++) {
		json_t *rank = json_array_get(json_object_get(all, "ranks"), r);

		cr_expect_str_eq(json_string_value(json_object_get(rank, "prefetch")), "FOLLOWING");
		cr_expect_eq(of_rank(all, r, "prefetch_deviations"), 0);
		cr_expect_gt(of_rank(all, r, "prefetch_hits"), 0);
		/* a miss is at most the first of a step, and what was skipped */
		cr_expect_leq(of_rank(all, r, "prefetch_misses"),
			      STEPS - 1 + of_rank(all, r, "prefetch_skipped"));
	}
	cr_expect_gt(of_rank(all, 0, "prefetch_started") + of_rank(all, 1, "prefetch_started"), 0);
	json_decref(all);
	let_go_on(0);
	let_go_on(1);
	for (uint32_t r = 0; r < 2; r++)
		cr_expect_eq(trainer_wait(pids[r], 30), 0);
	close_pipes();
}
