/* Ranks that do not come: who waits hears who is missing, first as a report, at the
 * deadline as an error; and a rank that is stopped keeps what it holds. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"
#include "failfix.h"
#include "stopped.h"

static void test_deadline_begin(void)
{
	static const char *const args[] = { "--set", "stall_after_ms=200", NULL };

	failfix_begin(args);
}

TestSuite(deadline, .init = test_deadline_begin, .fini = failfix_end, .timeout = 120);

enum { WORLD = 3, N = 5000, SHORT_MS = 1200, LONG_MS = 50000 };

struct play {
	stage go, at[WORLD];
	struct told told[WORLD];
	_Atomic uint64_t took_us[WORLD];
	pid_t pids[WORLD];
};

/* ------------------------------------------------------- one never comes */

static int waits(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	uint64_t begin_us;

	/* only one of the two has the short deadline, it counts for both */
	shardd_set_timeout(c, t->rank == 0 ? SHORT_MS : LONG_MS);
	if (t->rank == 2)
		TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
	begin_us = clock_now_us();
	told_note(&p->told[t->rank], shardd_barrier(c, SHARDD_WORLD, &train_err));
	atomic_store(&p->took_us[t->rank], clock_now_us() - begin_us);
	shardd_set_timeout(c, LONG_MS);
	/* the epoch goes on, at the next number */
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(deadline, who_is_missing_is_told_to_all_that_wait)
{
	struct play *p = trainer_shared(sizeof(*p));
	char text[256], words[64];

	for (uint32_t r = 0; r < 2; r++)
		p->pids[r] = trainer_start(&trainfix, "late", r, WORLD, waits, p);
	AWAIT(fail_has_op(&trainfix, "late", 0, "Barrier", "WAIT"), 20);
	fail_op_text(&trainfix, "late", 0, "Barrier", "waits_for", text, sizeof(text));
	cr_assert(strstr(text, "rank 2 (not joined)"), "waits for: %s", text);
	snprintf(words, sizeof(words), "stalled job=%u/late", (unsigned)geteuid());
	AWAIT(fail_logged(&trainfix, words), 20);
	for (uint32_t r = 0; r < 2; r++) {
		told_check(&p->told[r], SHARDD_DEADLINE_EXCEEDED, "rank 2 (not joined)");
		told_check(&p->told[r], SHARDD_DEADLINE_EXCEEDED, "Barrier");
	}
	AWAIT(atomic_load(&p->took_us[0]) > 0, 10);
	cr_assert_geq(atomic_load(&p->took_us[0]), SHORT_MS * 1000u);
	cr_assert_leq(atomic_load(&p->took_us[0]), SHORT_MS * 1000u + 1000000u);
	/* who comes after that is told the same, and then all go on */
	p->pids[2] = trainer_start(&trainfix, "late", 2, WORLD, waits, p);
	stage_set(&p->go, 1);
	told_check(&p->told[2], SHARDD_DEADLINE_EXCEEDED, "waits for");
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 30), 0);
}

/* Rank 0's barrier and what it has submitted behind it, all with one deadline. */
static int waits_with_more(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_ticket barrier, commit;

	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	if (t->rank == 0)
		shardd_set_timeout(c, 300);
	else
		TRAINER_AWAIT(atomic_load(&p->at[0]) == 1, 60);
	TRAIN_OK(shardd_submit_barrier(c, SHARDD_OPTIONS(barrier), &barrier, &train_err));
	TRAIN_OK(shardd_submit_commit(c, SHARDD_OPTIONS(commit, .step = 3), &commit, &train_err));
	TRAIN_FAILS(shardd_wait(c, barrier, -1, NULL, &train_err), SHARDD_DEADLINE_EXCEEDED);
	told_now("Barrier");
	TRAIN_FAILS(shardd_wait(c, commit, -1, NULL, &train_err), SHARDD_DEADLINE_EXCEEDED);
	told_now("Commit");
	stage_set(&p->at[t->rank], 1);
	shardd_set_timeout(c, LONG_MS);
	TRAIN_OK(shardd_commit(c, 3, NULL, 0, &train_err));
	train_leave(c);
	return 0;
}

Test(deadline, ops_behind_a_late_one_have_their_own_end)
{
	struct play *p = trainer_shared(sizeof(*p));

	trainfix_run(WORLD, waits_with_more, p);
}

/* ----------------------------------------------------------------- stopped */

/* What rank 2 has in its hands while it is stopped. */
struct held {
	const float *full;
	void *gradient;
};

static void write_numbers(shardd_client *c, void *gradient)
{
	float *x = train_numbers(N, 77);

	train_write(c, gradient, x, N * sizeof(*x));
	free(x);
}

static struct held take(shardd_client *c, shardd_unit u)
{
	const void *full;
	void *gradient;

	TRAIN_OK(shardd_gather(c, u, &full, &train_err));
	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	write_numbers(c, gradient);
	return (struct held){ full, gradient };
}

/* It is all as it was, and may be written. */
static void check_held(shardd_client *c, const struct held *h, const float *full)
{
	float *wrote = train_numbers(N, 77);

	TRAIN_HAS(c, h->full, full, N * sizeof(float));
	TRAIN_HAS(c, h->gradient, wrote, N * sizeof(float));
	train_set(c, h->gradient, 0, N * sizeof(float));
	free(wrote);
}

static shardd_unit unit_of(shardd_client *c)
{
	static const struct shardd_unit_spec spec = { .optimizer = { .kind = SHARDD_SGD,
								     .lr = 1 } };
	shardd_unit u = train_zero_unit(c, "u", N, &spec);

	TRAIN_OK(shardd_init_seed(c, u, 3, &train_err));
	return u;
}

static int stopped_one(shardd_client *c, const struct trainer *t, shardd_unit u)
{
	struct play *p = t->arg;
	struct held h = take(c, u);
	float *full = train_copy(c, h.full, N * sizeof(*full));

	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	stage_set(&p->at[2], 1);
	raise(SIGSTOP);
	check_held(c, &h, full);
	/* the number at which the others waited is over for it too */
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_DEADLINE_EXCEEDED);
	told_now("waits for rank 2");
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	write_numbers(c, h.gradient);
	stage_set(&p->at[2], 2);
	raise(SIGSTOP);
	/* rank 1 has died meanwhile */
	check_held(c, &h, full);
	TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	told_now("rank 1 (pid ");
	free(full);
	return 0;
}

static int stop_trainer(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit u = unit_of(c);

	if (t->rank == 2) {
		stopped_one(c, t, u);
	} else {
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		TRAINER_AWAIT(atomic_load(&p->go) == 1, 60);
		shardd_set_timeout(c, 400);
		told_note(&p->told[t->rank], shardd_barrier(c, SHARDD_WORLD, &train_err));
		shardd_set_timeout(c, LONG_MS);
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		stage_set(&p->at[t->rank], 2);
		TRAIN_FAILS(shardd_barrier(c, SHARDD_WORLD, &train_err), SHARDD_ABORTED);
	}
	train_join_as(c, t, SHARDD_EPHEMERAL);
	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

static int successor(const struct trainer *t)
{
	shardd_client *c = train_join(t);

	TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
	train_leave(c);
	return 0;
}

Test(deadline, a_stopped_trainer_keeps_what_it_holds)
{
	struct play *p = trainer_shared(sizeof(*p));
	uint64_t bytes;

	for (uint32_t r = 0; r < WORLD; r++)
		p->pids[r] = trainer_start(&trainfix, "stop", r, WORLD, stop_trainer, p);
	AWAIT(atomic_load(&p->at[2]) == 1 && stopped_is(p->pids[2]), 20);
	bytes = daemonfix_bytes(&trainfix);
	stage_set(&p->go, 1);
	for (uint32_t r = 0; r < 2; r++) {
		char who[64];

		snprintf(who, sizeof(who), "rank 2 (pid %d, last op Barrier)", (int)p->pids[2]);
		told_check(&p->told[r], SHARDD_DEADLINE_EXCEEDED, who);
	}
	cr_assert_eq(daemonfix_bytes(&trainfix), bytes);
	cr_assert(fail_rank_is(&trainfix, "stop", 2, "JOINED"));
	cr_assert_eq(kill(p->pids[2], SIGCONT), 0);
	AWAIT(atomic_load(&p->at[2]) == 2 && stopped_is(p->pids[2]), 20);
	AWAIT(atomic_load(&p->at[1]) == 2, 20);
	fail_kill(p->pids[1]);
	AWAIT(fail_rank_is(&trainfix, "stop", 2, "STALE"), 20);
	cr_assert_eq(kill(p->pids[2], SIGCONT), 0);
	p->pids[1] = trainer_start(&trainfix, "stop", 1, WORLD, successor, p);
	for (uint32_t r = 0; r < WORLD; r++)
		cr_assert_eq(trainer_wait(p->pids[r], 30), 0);
}
