/*
 * One user keeps the host's threads busy with large initialises, sixteen at a time, again and
 * again. The steps of another user's small job wait for pieces of them, not for all of them.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"

enum {
	ALICE = 30001,
	BOB = 30002,
	CAROL = 30003 /* weight 300 */,
	UNITS = 16,
	LARGE = 4 << 20,
	SMALL = 4096,
	STEPS = 200
};

struct play {
	stage busy, stop;
	atomic_ullong rounds;
	uid_t uid;
	atomic_ullong p50_us, p99_us;
};

static void test_worker_share_begin(void)
{
	static const char *const args[] = { "--set", "socket_mode=0666",
					    "--set", "threads=2",
					    "--set", "user_limits=30003:worker_weight=300",
					    NULL };

	failfix_begin(args);
	chmod(trainfix.dir, 0755);
}

TestSuite(worker_share, .init = test_worker_share_begin, .fini = failfix_end, .timeout = 180);

/* And nobody who only waits outlives a test that has failed. */
static void worker_share_become(uid_t uid)
{
	TRAINER_CHECK(setgid(uid) == 0 && setuid(uid) == 0);
	TRAINER_CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
}

static int hog(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_ticket ticket[UNITS];
	shardd_unit u[UNITS];
	shardd_client *c;
	char name[16];

	worker_share_become(p->uid);
	c = train_connect(t);
	train_join_as(c, t, SHARDD_EPHEMERAL);
	for (unsigned i = 0; i < UNITS; i++) {
		snprintf(name, sizeof(name), "large%u", i);
		u[i] = train_zero_unit(c, name, LARGE, NULL);
		TRAIN_OK(shardd_submit_init(
			c, SHARDD_OPTIONS(init, .unit = u[i], .seed = 1, .from = SHARDD_FROM_SEED),
			&ticket[i], &train_err));
	}
	stage_set(&p->busy, 1);
	while (!atomic_load(&p->stop))
		for (unsigned i = 0; i < UNITS; i++) {
			TRAIN_OK(shardd_wait(c, ticket[i], -1, NULL, &train_err));
			TRAIN_OK(shardd_submit_init(c,
						    SHARDD_OPTIONS(init, .unit = u[i], .seed = 1,
								   .from = SHARDD_FROM_SEED),
						    &ticket[i], &train_err));
			atomic_fetch_add(&p->rounds, 1);
		}
	for (unsigned i = 0; i < UNITS; i++)
		TRAIN_OK(shardd_wait(c, ticket[i], -1, NULL, &train_err));
	train_leave(c);
	return 0;
}

static int compare_u64(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static int steps(const struct trainer *t)
{
	static uint64_t took[STEPS];
	struct play *p = t->arg;
	float *gradient;
	shardd_client *c;
	shardd_unit u;

	worker_share_become(BOB);
	c = train_connect(t);
	train_join_as(c, t, SHARDD_EPHEMERAL);
	u = train_zero_unit(c, "u", SMALL, NULL);
	gradient = train_numbers(SMALL, 1);
	for (unsigned i = 0; i < STEPS; i++) {
		uint64_t began = clock_now_us();

		train_reduce(c, u, DTYPE_FP32, gradient, SMALL);
		took[i] = clock_now_us() - began;
	}
	qsort(took, STEPS, sizeof(took[0]), compare_u64);
	atomic_store(&p->p50_us, took[STEPS / 2]);
	atomic_store(&p->p99_us, took[STEPS * 99 / 100]);
	free(gradient);
	train_leave(c);
	return 0;
}

static uint64_t measure(struct play *p, const char *what)
{
	cr_assert_eq(trainer_wait(trainer_start(&trainfix, "bobs", 0, 1, steps, p), 120), 0);
	fprintf(stderr, "# %s: step p50 %llu us, p99 %llu us\n", what,
		(unsigned long long)atomic_load(&p->p50_us),
		(unsigned long long)atomic_load(&p->p99_us));
	return atomic_load(&p->p50_us);
}

/* Tasks began in the order in which they came: each step waited for sixteen initialises, hundreds
 * of milliseconds. Twenty times the step that nobody disturbs, or 20 ms on a machine where that
 * is microseconds, is what is left of it at most. */
Test(worker_share, a_step_does_not_wait_for_what_another_user_has_queued)
{
	struct play *p = trainer_shared(sizeof(*p));
	uint64_t alone, beside, most;
	pid_t pid;

	if (geteuid() != 0)
		cr_skip_test("becoming two other users needs the superuser");
	if (!train_on_host()) {
		train_not_here("the threads of the host");
		return;
	}
	alone = measure(p, "alone");
	p->uid = ALICE;
	pid = trainer_start(&trainfix, "hog", 0, 1, hog, p);
	AWAIT(atomic_load(&p->busy) == 1, 60);
	beside = measure(p, "beside initialises of 16 MiB, sixteen at a time");
	cr_assert_gt(atomic_load(&p->rounds), 0);
	stage_set(&p->stop, 1);
	cr_assert_eq(trainer_wait(pid, 60), 0);
	most = 20 * alone > 20000 ? 20 * alone : 20000;
	cr_expect_lt(beside, most, "%llu us beside, %llu us alone", (unsigned long long)beside,
		     (unsigned long long)alone);
}

/* Both keep the threads busy; one has three times the weight. */
Test(worker_share, users_share_the_threads_by_weight)
{
	struct play *p[2] = { trainer_shared(sizeof(*p[0])), trainer_shared(sizeof(*p[1])) };
	static const uid_t uids[2] = { ALICE, CAROL };
	unsigned long long from[2], done[2];
	pid_t pid[2];

	if (geteuid() != 0)
		cr_skip_test("becoming two other users needs the superuser");
	if (!train_on_host()) {
		train_not_here("the threads of the host");
		return;
	}
	for (unsigned i = 0; i < 2; i++) {
		p[i]->uid = uids[i];
		pid[i] = trainer_start(&trainfix, i ? "carols" : "alices", 0, 1, hog, p[i]);
		AWAIT(atomic_load(&p[i]->busy) == 1, 60);
	}
	for (unsigned i = 0; i < 2; i++)
		from[i] = atomic_load(&p[i]->rounds);
	AWAIT(atomic_load(&p[0]->rounds) >= from[0] + 4 * UNITS, 120);
	for (unsigned i = 0; i < 2; i++) {
		done[i] = atomic_load(&p[i]->rounds) - from[i];
		stage_set(&p[i]->stop, 1);
	}
	for (unsigned i = 0; i < 2; i++)
		cr_expect_eq(trainer_wait(pid[i], 60), 0);
	fprintf(stderr, "# initialises done with weight 100 and 300: %llu and %llu\n", done[0],
		done[1]);
	cr_expect_gt(done[1], 2 * done[0]);
	cr_expect_lt(done[1], 4 * done[0]);
}
