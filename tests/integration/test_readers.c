/*
 * Readers: what a process that is no rank sees of live parameters is always one committed step,
 * and it cannot keep the trainers waiting for longer than it may.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"
#include "rawcall.h"
#include "request.h"

static void test_readers_begin(void)
{
	static const char *const args[] = { "--set", "reader_hold_ms=20s", NULL };

	failfix_begin(args);
}

TestSuite(readers, .init = test_readers_begin, .fini = failfix_end, .timeout = 120);

enum { WORLD = 2, READERS = 2, UNITS = 4, STEPS = 150, LOOKS = 10 };

/* Shared between a test, its trainers and its readers. */
struct play {
	stage go; /* the test's word */
	stage at[WORLD];
	stage reader;
	enum shardd_optimizer_when when;
	bool buckets;                   /* of a ddp: units are replicated */
	atomic_uint steps;              /* committed by rank 0 */
	atomic_uint snapshots;          /* that were good */
	atomic_uint different[READERS]; /* steps among them, of each */
	struct told told;
};

static const uint64_t rows[UNITS] = { 3001, 64, 1, 70001 };

/* Parameters of 0, of which every step with gradients of -1 makes the number of the step. */
static void make_units(shardd_client *c, const struct play *p, shardd_unit *ret)
{
	for (unsigned i = 0; i < UNITS; i++) {
		const uint64_t shape[] = { rows[i], 3 };
		struct shardd_tensor tensors[] = {
			{ .name = "weight", .shape = shape, .dims = 2 },
			{ .name = "bias", .shape = shape, .dims = 1 },
			{ .name = "tied", .shape = shape, .dims = 2, .alias_of = "weight" },
		};
		struct shardd_unit_spec spec = {
			.size = sizeof(spec),
			.tensors = tensors,
			.n_tensors = 3,
			.layout = i % 2 ? SHARDD_LAYOUT_DIM0 : SHARDD_LAYOUT_FLAT,
			.compute_dtype = i == 2 ? SHARDD_BF16 : SHARDD_FP32,
			.gradient_dtype = SHARDD_FP32
		};
		struct shardd_unit_info info;
		char name[16];

		snprintf(name, sizeof(name), "layer.%u", i);
		spec.name = name;
		if (p->buckets) {
			spec.layout = SHARDD_LAYOUT_FLAT;
			spec.strategy = SHARDD_REPLICATE;
			spec.reduce_profile = SHARDD_PROFILE_DDP;
		}
		spec.optimizer.when = p->when;
		if (p->when != SHARDD_OPTIM_BY_TRAINER) {
			spec.optimizer.kind = SHARDD_SGD;
			spec.optimizer.lr = 1;
		}
		TRAIN_OK(shardd_register(c, &spec, 1, &info, &train_err));
		TRAIN_OK(shardd_init_seed(c, info.unit, 1, &train_err));
		ret[i] = info.unit;
	}
}

static void hand_in(shardd_client *c, shardd_unit u, uint64_t n)
{
	struct shardd_result r;
	shardd_ticket t;
	float *g;

	TRAIN_OK(shardd_submit_gradient(c, SHARDD_OPTIONS(gradient, .unit = u), &t, &train_err));
	TRAIN_OK(shardd_wait(c, t, -1, &r, &train_err));
	TRAINER_CHECK(r.bytes >= n * sizeof(float));
	g = r.data;
	for (uint64_t i = 0; i < r.bytes / sizeof(float); i++)
		g[i] = -1;
	TRAIN_OK(shardd_reduce(c, u, &train_err));
}

static void step_shards(shardd_client *c)
{
	struct shardd_shard s;

	for (unsigned i = 0; i < UNITS; i++) {
		float *params;

		TRAIN_OK(shardd_next_shard(c, SHARDD_WORLD, &s, &train_err));
		params = s.params;
		for (uint64_t k = 0; k < s.elements; k++)
			params[k] += 1;
		TRAIN_OK(shardd_shard_done(c, s.unit, &train_err));
	}
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
}

enum { DDP_TENSORS = 2 * UNITS }; /* without other names */

static shardd_ddp make_ddp(shardd_client *c, const shardd_unit *units)
{
	const struct shardd_ddp_create_options spec = {
		.size = sizeof(spec), .units = units, .n_units = UNITS, .bucket_bytes = 30000
	};
	uint32_t n;
	shardd_ddp d = 0;

	TRAIN_OK(shardd_ddp_create(c, &spec, &d, &n, &train_err));
	TRAINER_CHECK(n == DDP_TENSORS);
	return d;
}

static void bucket_step(shardd_client *c, shardd_ddp d)
{
	struct shardd_ddp_view views[DDP_TENSORS];

	TRAIN_OK(shardd_ddp_forward(c, d, views, DDP_TENSORS, &train_err));
	TRAIN_OK(shardd_ddp_backward(c, d, NULL, 0, NULL, 0, &train_err));
	for (uint32_t i = DDP_TENSORS; i-- > 0;) {
		float *g = views[i].data;

		for (uint64_t k = 0; k < views[i].elements; k++)
			g[k] = -1;
		TRAIN_OK(shardd_ddp_ready(c, d, &i, 1, &train_err));
	}
	TRAIN_OK(shardd_ddp_finish(c, d, NULL, 0, &train_err));
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
}

/* All but the commit. */
static void one_step(shardd_client *c, const struct play *p, const shardd_unit *units)
{
	for (unsigned i = UNITS; i-- > 0;)
		hand_in(c, units[i], rows[i] * 4);
	if (p->when == SHARDD_OPTIM_BY_TRAINER)
		step_shards(c);
	TRAIN_OK(shardd_step(c, SHARDD_WORLD, NULL, &train_err));
}

static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit units[UNITS];
	shardd_ddp d = 0;
	const void *full;

	make_units(c, p, units);
	if (p->buckets)
		d = make_ddp(c, units);
	TRAIN_OK(shardd_commit(c, 0, NULL, 0, &train_err));
	stage_set(&p->at[t->rank], 1);
	for (uint64_t step = 1; step <= STEPS; step++) {
		if (p->buckets)
			bucket_step(c, d);
		else
			one_step(c, p, units);
		if (step % 3 == 0) { /* applied, and not committed yet */
			TRAIN_OK(shardd_gather(c, units[0], &full, &train_err));
			TRAIN_OK(shardd_release(c, units[0], &train_err));
		}
		TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
		atomic_store(&p->steps, (unsigned)step);
		/* a reader that the machine gives no time sees some of them all the same */
		for (unsigned i = 0; i < READERS && step % (STEPS / LOOKS) == 0; i++)
			TRAINER_AWAIT(atomic_load(&p->different[i]) >= step / (STEPS / LOOKS), 60);
	}
	stage_set(&p->at[t->rank], 2);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	train_leave(c);
	return 0;
}

static shardd_reader *open_reader(const struct trainer *t, shardd_client **ret_c)
{
	shardd_reader *r;

	*ret_c = train_connect(t);
	TRAIN_OK(shardd_reader_open(*ret_c, t->job, &r, &train_err));
	return r;
}

/* Every element of every tensor is @value. */
static bool all_are(const struct shardd_snapshot *s, float value)
{
	for (size_t u = 0; u < s->n_units; u++)
		for (size_t k = 0; k < s->units[u].n_tensors; k++) {
			const struct shardd_read_tensor *t = &s->units[u].tensors[k];
			const volatile float *x = t->data;

			for (uint64_t i = 0; i < t->elements; i++)
				if (x[i] != value) {
					fprintf(stderr, "%s.%s[%llu] is %g in step %g\n",
						s->units[u].name, t->name, (unsigned long long)i,
						(double)x[i], (double)value);
					return false;
				}
		}
	return true;
}

static bool both_done(const struct play *p)
{
	return atomic_load(&p->at[0]) == 2 && atomic_load(&p->at[1]) == 2;
}

/* Looks twice: what comes in between would show. */
static void look(struct play *p, uint32_t reader, shardd_reader *r, uint64_t *last)
{
	struct shardd_snapshot s;

	TRAIN_OK(shardd_reader_hold(r, 0, 60000, &s, &train_err));
	TRAINER_CHECK(s.n_units == UNITS && s.step <= STEPS);
	TRAINER_CHECK(*last == UINT64_MAX || s.step >= *last);
	TRAINER_CHECK(all_are(&s, (float)s.step));
	poll(NULL, 0, (int)(s.step % 3));
	TRAINER_CHECK(all_are(&s, (float)s.step));
	TRAIN_OK(shardd_reader_release(r, &train_err));
	atomic_fetch_add(&p->snapshots, 1);
	if (s.step != *last)
		atomic_fetch_add(&p->different[reader], 1);
	*last = s.step;
}

static int reads(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c;
	shardd_reader *r = open_reader(t, &c);
	uint64_t last = UINT64_MAX;

	while (!both_done(p))
		look(p, t->rank, r, &last);
	look(p, t->rank, r, &last);
	TRAINER_CHECK(last == STEPS);
	shardd_reader_close(r);
	shardd_close(c);
	return 0;
}

static void hammer(enum shardd_optimizer_when when, bool buckets)
{
	struct play *p = trainer_shared(sizeof(*p));
	pid_t ranks[WORLD], readers[READERS];

	if (!train_on_host())
		cr_skip_test("readers are for host memory");
	p->when = when;
	p->buckets = buckets;
	for (uint32_t r = 0; r < WORLD; r++)
		ranks[r] = trainer_start(&trainfix, "live", r, WORLD, trains, p);
	AWAIT(atomic_load(&p->at[0]) && atomic_load(&p->at[1]), 30);
	for (size_t i = 0; i < ARRAY_SIZE(readers); i++)
		readers[i] = trainer_start(&trainfix, "live", (uint32_t)i, WORLD, reads, p);
	for (size_t i = 0; i < ARRAY_SIZE(readers); i++)
		cr_assert_eq(trainer_wait(readers[i], 90), 0);
	stage_set(&p->go, 1);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(ranks[r], 30), 0);
	fprintf(stderr, "# %u snapshots, %u and %u of another step than the one before\n",
		atomic_load(&p->snapshots), atomic_load(&p->different[0]),
		atomic_load(&p->different[1]));
}

Test(readers, never_see_two_steps_mixed_at_step)
{
	hammer(SHARDD_OPTIM_AT_STEP, false);
}

Test(readers, never_see_two_steps_mixed_in_backward)
{
	hammer(SHARDD_OPTIM_IN_BACKWARD, false);
}

Test(readers, never_see_two_steps_mixed_in_buckets)
{
	hammer(SHARDD_OPTIM_AT_STEP, true);
}

Test(readers, never_see_two_steps_mixed_in_buckets_in_backward)
{
	hammer(SHARDD_OPTIM_IN_BACKWARD, true);
}

Test(readers, never_see_two_steps_mixed_by_trainer)
{
	hammer(SHARDD_OPTIM_BY_TRAINER, false);
}

/* --------------------------------------------------- what waits, and for how long */

/* One step after each word of the test. */
static int steps_when_told(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit units[UNITS];
	unsigned done = 0;

	make_units(c, p, units);
	TRAIN_OK(shardd_commit(c, 0, NULL, 0, &train_err));
	stage_set(&p->at[t->rank], 1);
	for (;;) {
		TRAINER_AWAIT(atomic_load(&p->go) > done, 60);
		done = atomic_load(&p->go);
		if (done == 99)
			break;
		one_step(c, p, units);
		TRAIN_OK(shardd_commit(c, done, NULL, 0, &train_err));
		atomic_store(&p->steps, done);
	}
	train_leave(c);
	return 0;
}

struct scene {
	struct play *p;
	pid_t ranks[WORLD];
};

static struct scene scene_begin(enum shardd_optimizer_when when, trainer_fn fn)
{
	struct scene s = { .p = trainer_shared(sizeof(*s.p)) };

	if (!train_on_host())
		cr_skip_test("readers are for host memory");
	s.p->when = when;
	for (uint32_t r = 0; r < WORLD; r++)
		s.ranks[r] = trainer_start(&trainfix, "live", r, WORLD, fn, s.p);
	AWAIT(atomic_load(&s.p->at[0]) && atomic_load(&s.p->at[1]), 30);
	return s;
}

static void scene_end(struct scene *s)
{
	stage_set(&s->p->go, 99);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(s->ranks[r], 30), 0);
}

static int holds_and_says(const struct trainer *t, uint32_t hold_ms, int release)
{
	struct play *p = t->arg;
	struct shardd_snapshot s;
	shardd_client *c;
	shardd_reader *r = open_reader(t, &c);

	TRAIN_OK(shardd_reader_hold(r, hold_ms, 60000, &s, &train_err));
	TRAINER_CHECK(all_are(&s, (float)s.step));
	stage_set(&p->reader, 1);
	TRAINER_AWAIT(atomic_load(&p->reader) == 2, 60);
	TRAINER_CHECK(release == 0 ? all_are(&s, (float)s.step) : 1);
	if (release == 0)
		TRAIN_OK(shardd_reader_release(r, &train_err));
	else
		told_note(&p->told, shardd_reader_release(r, &train_err));
	stage_set(&p->reader, 3);
	TRAINER_AWAIT(atomic_load(&p->reader) == 4, 60);
	shardd_reader_close(r);
	shardd_close(c);
	return 0;
}

static int holds_long(const struct trainer *t)
{
	return holds_and_says(t, 0, 0);
}

static int holds_too_long(const struct trainer *t)
{
	return holds_and_says(t, 200, 1);
}

static int holds_until_it_is_gone(const struct trainer *t)
{
	return holds_and_says(t, 0, 1);
}

static pid_t reader_start(struct scene *s, trainer_fn fn)
{
	pid_t pid = trainer_start(&trainfix, "live", 0, WORLD, fn, s->p);

	AWAIT(atomic_load(&s->p->reader) == 1, 30);
	return pid;
}

static void reader_end(struct scene *s, pid_t pid)
{
	stage_set(&s->p->reader, 4);
	cr_assert_eq(trainer_wait(pid, 30), 0);
}

static bool waits_for_reader(const char *op)
{
	char text[512] = "";

	return fail_op_text(&trainfix, "live", 0, op, "waits_for", text, sizeof(text)) &&
	       strstr(text, "a reader (pid ");
}

static void check_waits(enum shardd_optimizer_when when, const char *op)
{
	struct scene s = scene_begin(when, steps_when_told);
	pid_t pid = reader_start(&s, holds_long);
	char text[256];

	stage_set(&s.p->go, 1);
	AWAIT(waits_for_reader(op), 20);
	fail_job_text(&trainfix, "live", "waits_for_reader", text, sizeof(text));
	cr_assert(strstr(text, "which holds step 0"), "%s", text);
	cr_assert_eq(atomic_load(&s.p->steps), 0);
	stage_set(&s.p->reader, 2);
	AWAIT(atomic_load(&s.p->reader) == 3, 20);
	AWAIT(atomic_load(&s.p->steps) == 1, 10);
	reader_end(&s, pid);
	scene_end(&s);
}

Test(readers, keep_a_commit_waiting_and_status_says_so)
{
	check_waits(SHARDD_OPTIM_AT_STEP, "Commit");
}

Test(readers, keep_a_reduce_that_steps_waiting)
{
	check_waits(SHARDD_OPTIM_IN_BACKWARD, "Reduce");
}

Test(readers, keep_a_shard_that_comes_back_waiting)
{
	check_waits(SHARDD_OPTIM_BY_TRAINER, "ShardDone");
}

static void check_overtaken(enum shardd_optimizer_when when)
{
	struct scene s = scene_begin(when, steps_when_told);
	pid_t pid = reader_start(&s, holds_too_long);

	stage_set(&s.p->go, 1);
	AWAIT(atomic_load(&s.p->steps) == 1, 10); /* nobody has released anything */
	stage_set(&s.p->reader, 2);
	told_check(&s.p->told, SHARDD_ABORTED, "step 0 was overtaken");
	told_check(&s.p->told, SHARDD_ABORTED, "its 200 ms have passed");
	cr_assert_eq(fail_job_number(&trainfix, "live", "overtaken_reads"), 1);
	reader_end(&s, pid);
	scene_end(&s);
}

Test(readers, are_overtaken_when_their_time_is_up)
{
	check_overtaken(SHARDD_OPTIM_AT_STEP);
}

Test(readers, are_overtaken_in_backward)
{
	check_overtaken(SHARDD_OPTIM_IN_BACKWARD);
}

Test(readers, are_overtaken_by_the_trainers_own_optimizer)
{
	check_overtaken(SHARDD_OPTIM_BY_TRAINER);
}

/* Its 200 ms are over long ago, but nobody wanted to write. */
Test(readers, are_not_overtaken_by_time_alone)
{
	struct scene s = scene_begin(SHARDD_OPTIM_AT_STEP, steps_when_told);
	pid_t pid = reader_start(&s, holds_too_long);
	uint64_t until = clock_now_us() + 600000;

	while (clock_now_us() < until)
		poll(NULL, 0, 10);
	stage_set(&s.p->reader, 2);
	AWAIT(atomic_load(&s.p->reader) == 3, 20);
	cr_assert_eq(s.p->told.rc, 0, "%s", s.p->told.text);
	reader_end(&s, pid);
	scene_end(&s);
}

Test(readers, that_die_let_the_trainers_go_on)
{
	struct scene s = scene_begin(SHARDD_OPTIM_AT_STEP, steps_when_told);
	pid_t pid = reader_start(&s, holds_long);

	stage_set(&s.p->go, 1);
	AWAIT(waits_for_reader("Commit"), 20);
	fail_kill(pid);
	AWAIT(atomic_load(&s.p->steps) == 1, 5); /* it might have held for 20 s */
	scene_end(&s);
}

/* ------------------------------------------------------------ only what is committed */

/* Applies steps without committing them, until it is told to. */
static int commits_late(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit units[UNITS];
	const void *full;

	make_units(c, p, units);
	TRAIN_OK(shardd_gather(c, units[0], &full, &train_err));
	TRAIN_OK(shardd_release(c, units[0], &train_err));
	stage_set(&p->at[t->rank], 1);
	TRAINER_AWAIT(atomic_load(&p->go) >= 1, 60);
	TRAIN_OK(shardd_commit(c, 0, NULL, 0, &train_err));
	one_step(c, p, units);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	stage_set(&p->at[t->rank], 2);
	TRAINER_AWAIT(atomic_load(&p->go) >= 2, 60);
	TRAIN_OK(shardd_gather(c, units[0], &full, &train_err));
	TRAIN_OK(shardd_release(c, units[0], &train_err));
	stage_set(&p->at[t->rank], 3);
	TRAINER_AWAIT(atomic_load(&p->go) >= 3, 60);
	TRAIN_OK(shardd_commit(c, 1, NULL, 0, &train_err));
	TRAINER_AWAIT(atomic_load(&p->go) == 99, 60);
	train_leave(c);
	return 0;
}

static void await_both(struct play *p, unsigned at)
{
	TRAINER_AWAIT(atomic_load(&p->at[0]) == at && atomic_load(&p->at[1]) == at, 30);
}

static int waits_for_commits(const struct trainer *t)
{
	struct play *p = t->arg;
	struct shardd_snapshot s;
	shardd_client *c;
	shardd_reader *r = open_reader(t, &c);

	TRAIN_FAILS(shardd_reader_hold(r, 0, 100, &s, &train_err), SHARDD_DEADLINE_EXCEEDED);
	told_now("the first commit of job 'live'");
	stage_set(&p->go, 1);
	await_both(p, 2);
	/* prepared, and not applied: a hold now would only keep the commit waiting */
	TRAIN_FAILS(shardd_reader_hold(r, 0, 100, &s, &train_err), SHARDD_DEADLINE_EXCEEDED);
	told_now("the commit that follows step 0");
	stage_set(&p->go, 2);
	await_both(p, 3);
	TRAIN_FAILS(shardd_reader_hold(r, 0, 100, &s, &train_err), SHARDD_DEADLINE_EXCEEDED);
	told_now("the commit that follows step 0");
	stage_set(&p->go, 3);
	TRAIN_OK(shardd_reader_hold(r, 0, 0, &s, &train_err));
	TRAINER_CHECK(s.step == 1 && s.hold_ms == 20000 && all_are(&s, 1));
	TRAIN_OK(shardd_reader_release(r, &train_err));
	shardd_reader_close(r);
	shardd_close(c);
	return 0;
}

static void check_commits(enum shardd_optimizer_when when)
{
	struct scene s = scene_begin(when, commits_late);

	cr_assert_eq(
		trainer_wait(trainer_start(&trainfix, "live", 0, WORLD, waits_for_commits, s.p),
			     60),
		0);
	scene_end(&s);
}

Test(readers, wait_for_the_commit)
{
	check_commits(SHARDD_OPTIM_AT_STEP);
}

Test(readers, wait_for_the_commit_of_a_step_in_backward)
{
	check_commits(SHARDD_OPTIM_IN_BACKWARD);
}

/* A rank dies while its commit waits for a reader: the step never was. */
static int dies_committing(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_connect(t);
	struct shardd_membership me = train_join_as(c, t, SHARDD_KEEP);
	shardd_unit units[UNITS];
	int rc;

	make_units(c, p, units);
	TRAINER_CHECK(!me.has_commit);
	TRAIN_OK(shardd_commit(c, 0, NULL, 0, &train_err));
	stage_set(&p->at[t->rank], 1);
	TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	one_step(c, p, units);
	rc = shardd_commit(c, 1, NULL, 0, &train_err);
	told_note(&p->told, rc);
	me = train_join_as(c, t, SHARDD_KEEP);
	TRAINER_CHECK(me.has_commit && me.step == 0 && !me.torn);
	stage_set(&p->at[t->rank], 2);
	TRAINER_AWAIT(atomic_load(&p->go) == 99, 60);
	train_leave(c);
	return 0;
}

Test(readers, keep_a_commit_waiting_whose_rank_dies)
{
	struct scene s = scene_begin(SHARDD_OPTIM_AT_STEP, dies_committing);
	static const char *const delete[] = { "job", "delete", "live", NULL };
	pid_t pid = reader_start(&s, holds_long);

	stage_set(&s.p->go, 1);
	AWAIT(waits_for_reader("Commit"), 20);
	fail_kill(s.ranks[1]);
	/* at once, and not when the reader lets go */
	told_check(&s.p->told, SHARDD_ABORTED, "rank 1");
	AWAIT(atomic_load(&s.p->at[0]) == 2, 20);
	stage_set(&s.p->reader, 2); /* it looks again: nothing was written */
	AWAIT(atomic_load(&s.p->reader) == 3, 20);
	reader_end(&s, pid);
	stage_set(&s.p->go, 99);
	cr_assert_eq(trainer_wait(s.ranks[0], 30), 0);
	json_decref(daemonfix_ctl(&trainfix, delete));
}

/* ---------------------------------------------------------------- ends of jobs */

Test(readers, of_a_job_that_is_deleted_are_told_and_keep_its_bytes)
{
	static const char *const delete[] = { "job", "delete", "--force", "live", NULL };
	struct scene s = scene_begin(SHARDD_OPTIM_AT_STEP, steps_when_told);
	pid_t pid = reader_start(&s, holds_until_it_is_gone);
	uint64_t kept;

	for (uint32_t r = 0; r < WORLD; r++)
		fail_kill(s.ranks[r]);
	AWAIT(fail_rank_is(&trainfix, "live", 0, "DEAD"), 20);
	AWAIT(fail_rank_is(&trainfix, "live", 1, "DEAD"), 20);
	json_decref(daemonfix_ctl(&trainfix, delete));
	kept = fail_quarantined(&trainfix);
	cr_assert_geq(kept, rows[3] * 4 * sizeof(float));
	stage_set(&s.p->reader, 2);
	told_check(&s.p->told, SHARDD_ABORTED, "job 'live' was deleted");
	cr_assert_eq(fail_quarantined(&trainfix), kept);
	reader_end(&s, pid);
	AWAIT(fail_quarantined(&trainfix) == 0 && daemonfix_bytes(&trainfix) == 0, 20);
}

/* The session has ended, but its process has all mapped. */
static int lives_on(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c;
	shardd_reader *r;

	for (unsigned i = 0; i < 3; i++) { /* one process, remembered once */
		r = open_reader(t, &c);
		shardd_reader_close(r);
		if (i < 2)
			shardd_close(c);
	}
	stage_set(&p->reader, 1);
	TRAINER_AWAIT(atomic_load(&p->reader) == 4, 60);
	shardd_close(c);
	return 0;
}

Test(readers, are_waited_for_by_quarantine_until_their_process_is_gone)
{
	struct scene s = scene_begin(SHARDD_OPTIM_AT_STEP, steps_when_told);
	pid_t pid = reader_start(&s, lives_on);

	scene_end(&s); /* an ephemeral job: freed */
	AWAIT(!fail_has_job(&trainfix, "nobody") && fail_quarantined(&trainfix) > 0, 20);
	reader_end(&s, pid);
	AWAIT(fail_quarantined(&trainfix) == 0 && daemonfix_bytes(&trainfix) == 0, 20);
}

Test(readers, are_told_when_the_job_drains)
{
	static const char *const drain[] = { "job", "drain", "live", NULL };
	struct scene s = scene_begin(SHARDD_OPTIM_AT_STEP, steps_when_told);
	pid_t pid = reader_start(&s, holds_until_it_is_gone);

	stage_set(&s.p->go, 1);
	AWAIT(waits_for_reader("Commit"), 20);
	json_decref(daemonfix_ctl(&trainfix, drain));
	AWAIT(atomic_load(&s.p->steps) == 1, 5);
	stage_set(&s.p->reader, 2);
	told_check(&s.p->told, SHARDD_ABORTED, "job 'live' is draining");
	reader_end(&s, pid);
	scene_end(&s);
}

/* ------------------------------------------------------------------- bad readers */

static int wrong_calls(const struct trainer *t)
{
	struct shardd_job job = { .size = sizeof(job), .name = t->job, .world_size = WORLD };
	struct shardd_snapshot s;
	shardd_client *c;
	shardd_reader *r = open_reader(t, &c), *other;

	TRAIN_FAILS(shardd_reader_release(r, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("holds no step");
	TRAIN_FAILS(shardd_reader_hold(r, 20001, 0, &s, &train_err), SHARDD_INVALID_ARGUMENT);
	told_now("the limit is 20000 (reader_hold_ms)");
	TRAIN_OK(shardd_reader_hold(r, 0, 0, &s, &train_err));
	TRAIN_FAILS(shardd_reader_hold(r, 0, 0, &s, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("release it first");
	TRAIN_OK(shardd_reader_release(r, &train_err));
	TRAIN_FAILS(shardd_join(c, &job, NULL, &train_err), SHARDD_FAILED_PRECONDITION);
	told_now("open a new connection to join");
	TRAIN_FAILS(shardd_reader_open(c, "nobody", &other, &train_err), SHARDD_NOT_FOUND);
	TRAIN_FAILS(shardd_reader_open(c, "a/b", &other, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_reader_open(c, NULL, &other, &train_err), SHARDD_INVALID_ARGUMENT);
	TRAIN_FAILS(shardd_reader_hold(NULL, 0, 0, &s, &train_err), SHARDD_INVALID_ARGUMENT);
	/* what it maps it cannot write to */
	TRAIN_FAILS(shardd_write(c, (void *)s.units[0].tensors[0].data, "x", 1, &train_err),
		    SHARDD_INVALID_ARGUMENT);
	shardd_reader_close(r);
	shardd_close(c);
	return 0;
}

Test(readers, wrong_calls_are_refused_in_words)
{
	struct scene s = scene_begin(SHARDD_OPTIM_AT_STEP, steps_when_told);

	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "live", 0, WORLD, wrong_calls, s.p), 30),
		     0);
	scene_end(&s);
}

/* Of who is on no GPU. */
static int is_refused(const struct trainer *t)
{
	shardd_client *trainer = train_join(t), *c = train_connect(t);
	shardd_reader *r;

	train_zero_unit(trainer, "u", 100, NULL);
	TRAIN_FAILS(shardd_reader_open(c, t->job, &r, &train_err), SHARDD_UNIMPLEMENTED);
	told_now("can read only host memory");
	train_leave(trainer);
	shardd_close(c);
	return 0;
}

Test(readers, of_the_memory_of_a_gpu_are_refused)
{
	if (train_on_host())
		cr_skip_test("this is host memory");
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "live", 0, 1, is_refused, NULL), 60), 0);
}

/* A rank is no reader, who reads nothing holds nothing, pages that are not there. */
static int raw_calls(const struct trainer *t)
{
	struct rpc_client *c = raw_connect(t->socket);
	Shardd__V1__ReadJobRequest read = SHARDD__V1__READ_JOB_REQUEST__INIT;
	Shardd__V1__HoldStepRequest hold = SHARDD__V1__HOLD_STEP_REQUEST__INIT;
	Shardd__V1__ReleaseStepRequest release = SHARDD__V1__RELEASE_STEP_REQUEST__INIT;
	Shardd__V1__ReadJobResponse *reply;
	struct rpc_pending *pending;

	read.job = (char *)t->job;
	raw_refused(c, "ReadJob", &read.base, SHARDD_FAILED_PRECONDITION, NULL, "call Attach");
	raw_attach(c);
	raw_refused(c, "HoldStep", &hold.base, SHARDD_FAILED_PRECONDITION, NULL, "call ReadJob");
	raw_refused(c, "ReleaseStep", &release.base, SHARDD_FAILED_PRECONDITION, NULL,
		    "call ReadJob");
	read.first = UNITS + 2;
	raw_refused(c, "ReadJob", &read.base, SHARDD_INVALID_ARGUMENT, "first", "at most 5");
	read.first = UNITS;
	reply = raw_must(c, "ReadJob", &read.base);
	TRAINER_CHECK(reply->n_units == 1 && !reply->next && reply->units[0]->n_tensors == 3);
	TRAINER_CHECK(reply->units[0]->tensors[2]->offset == reply->units[0]->tensors[0]->offset);
	protobuf_c_message_free_unpacked(&reply->base, NULL);
	raw_done(c, "HoldStep", &hold.base);
	/* held by this session: another one waits for nothing but the trainers */
	pending = raw_start(c, "HoldStep", &hold.base);
	raw_finish_refused(pending, SHARDD_FAILED_PRECONDITION, NULL, "release it first");
	rpc_client_close(c); /* with its hold */
	c = raw_trainer(t->socket, "other", 0, 1, false);
	read.first = 0;
	raw_refused(c, "ReadJob", &read.base, SHARDD_FAILED_PRECONDITION, NULL,
		    "open a new connection to read");
	rpc_client_close(c);
	return 0;
}

/* Three hundred sessions that hold, wait or have asked for nothing, and end as they are. */
static int comes_and_goes(const struct trainer *t)
{
	Shardd__V1__ReadJobRequest read = SHARDD__V1__READ_JOB_REQUEST__INIT;
	Shardd__V1__HoldStepRequest hold = SHARDD__V1__HOLD_STEP_REQUEST__INIT;

	read.job = (char *)t->job;
	for (unsigned i = 0; i < 300; i++) {
		struct rpc_client *c = raw_connect(t->socket);
		struct rpc_pending *pending;

		raw_attach(c);
		raw_done(c, "ReadJob", &read.base);
		pending = i % 3 ? raw_start(c, "HoldStep", &hold.base) : NULL;
		if (i % 3 == 1)
			rpc_pending_wait(pending, 30000);
		rpc_pending_free(pending); /* cancelled, if it was not answered */
		rpc_client_close(c);
	}
	return 0;
}

Test(readers, bad_ones_cost_their_own_connection_only)
{
	struct scene s = scene_begin(SHARDD_OPTIM_AT_STEP, steps_when_told);

	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "live", 0, WORLD, raw_calls, s.p), 30),
		     0);
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "live", 0, WORLD, comes_and_goes, s.p),
				  60),
		     0);
	stage_set(&s.p->go, 1);
	AWAIT(atomic_load(&s.p->steps) == 1, 10);
	scene_end(&s);
}
