/* shardctl slow: a rank that comes late, and a job in which none does. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "failfix.h"

TestSuite(slow, .init = trainfix_begin, .fini = trainfix_end, .timeout = 120);

enum { STEPS = 12, LATE_US = 40000 };

struct play {
	stage ready;
	stage asked;
	stage on_time; /* ranks that have come to a step, over all steps */
	uint32_t late; /* the rank */
	pid_t pids[3];
};

/* One rank comes LATE_US after the others to the barrier of each step. */
static int trains(const struct trainer *t)
{
	struct play *p = t->arg;
	shardd_client *c = train_join(t);

	p->pids[t->rank] = getpid();
	for (uint64_t step = 1; step <= STEPS; step++) {
		if (t->rank == p->late) { /* later than the others, however busy the machine is */
			TRAINER_AWAIT(atomic_load(&p->on_time) == 2 * step, 20);
			usleep(LATE_US);
		} else {
			atomic_fetch_add(&p->on_time, 1);
		}
		TRAIN_OK(shardd_barrier(c, SHARDD_WORLD, &train_err));
		TRAIN_OK(shardd_commit(c, step, NULL, 0, &train_err));
	}
	atomic_fetch_add(&p->ready, 1);
	TRAINER_AWAIT(atomic_load(&p->asked) == 1, 20);
	train_leave(c);
	return 0;
}

static json_int_t number(const json_t *j, const char *key)
{
	json_t *n = json_object_get(j, key);

	cr_assert(json_is_integer(n), "no number '%s'", key);
	return json_integer_value(n);
}

Test(slow, names_the_rank_that_comes_late)
{
	static const char *const all[] = { "slow", "j", NULL };
	static const char *const few[] = { "slow", "j", "-n", "4", NULL };
	struct play *p = trainer_shared(sizeof(*p));
	pid_t pids[3];
	char out[4096], words[64];
	json_t *j, *first;

	p->late = 1;
	for (uint32_t r = 0; r < 3; r++)
		pids[r] = trainer_start(&trainfix, "j", r, 3, trains, p);
	AWAIT(atomic_load(&p->ready) == 3, 60);
	j = daemonfix_ctl(&trainfix, all);
	cr_expect_eq(number(j, "late_rank"), 1);
	cr_expect_eq(number(j, "collectives"), 2 * STEPS - 1); /* not the first */
	cr_expect_eq(number(j, "steps"), STEPS);
	first = json_array_get(json_object_get(j, "ranks"), 0);
	cr_expect_eq(number(first, "rank"), 1);
	cr_expect_eq(number(first, "pid"), p->pids[1]);
	cr_expect_geq(number(first, "last"), STEPS / 2);
	cr_expect_geq(number(first, "worst_us"), LATE_US / 2);
	cr_expect_geq(number(first, "waited_us"), STEPS * LATE_US / 2);
	json_decref(j);
	j = daemonfix_ctl(&trainfix, few);
	cr_expect_eq(number(j, "collectives"), 2 * 4);
	cr_expect_eq(number(j, "steps"), 4);
	json_decref(j);
	cr_assert_eq(daemonfix_ctl_text(&trainfix, all, out, sizeof(out)), 0, "%s", out);
	snprintf(words, sizeof(words), "rank 1 (pid %d) is last in ", (int)p->pids[1]);
	cr_expect(strncmp(out, words, strlen(words)) == 0, "%s", out);
	atomic_store(&p->asked, 1);
	for (uint32_t r = 0; r < 3; r++)
		cr_expect_eq(trainer_wait(pids[r], 30), 0);
}
