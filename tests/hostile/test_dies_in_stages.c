/*
 * Trainers that go in the middle of what they have asked for.
 *
 * There were two ways to end the daemon so. A rank that reduced twice and went left the next
 * stage of a Reduce with gradients that were given back. And a peer's kill -9 during
 * SummonFull ended the survivor's as well done, without a copy. After each try the next
 * trainers join the same job; at the end they train, and every byte is back.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/check.h"
#include "trainfix.h"

TestSuite(dies_in_stages, .init = trainfix_begin, .fini = trainfix_end, .timeout = 240);

enum { N = 1 << 20, TRIES = 24, SPAN_US = 6000 };

static const struct shardd_unit_spec ddp = { .reduce_profile = SHARDD_PROFILE_DDP,
					     .strategy = SHARDD_REPLICATE };

/* Shared with the trainers. */
struct attack {
	const struct shardd_unit_spec *like; /* in every process the same address */
	bool accumulates;
	unsigned turn;
};

/* Another time in each try: what is under way then is up to the machine. */
static void wait_a_little(const struct attack *a)
{
	const struct timespec t = { .tv_nsec = (long)a->turn * SPAN_US / TRIES * 1000 };

	nanosleep(&t, NULL);
}

/* A peer may have gone already: then it is refused, which is as well. */
static void submit_reduce(shardd_client *c, shardd_unit u, bool accumulates)
{
	shardd_ticket ticket;

	(void)shardd_submit_gradient(c, SHARDD_OPTIONS(gradient, .unit = u), &ticket, &train_err);
	if (accumulates) {
		(void)shardd_submit_accumulate(c, SHARDD_OPTIONS(accumulate, .unit = u), &ticket,
					       &train_err);
		(void)shardd_submit_gradient(c, SHARDD_OPTIONS(gradient, .unit = u), &ticket,
					     &train_err);
	}
	(void)shardd_submit_reduce(c, SHARDD_OPTIONS(reduce, .unit = u), &ticket, &train_err);
}

/* Twice, and it goes without a word. */
static int reduce_and_go(const struct trainer *t)
{
	const struct attack *a = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit u = train_zero_unit(c, "u", N, a->like);

	submit_reduce(c, u, a->accumulates);
	submit_reduce(c, u, a->accumulates);
	wait_a_little(a);
	_exit(0);
}

/* Rank 1 is killed meanwhile; rank 0 has its copy, or is told. */
static int summon(const struct trainer *t)
{
	const struct attack *a = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit u = train_zero_unit(c, "u", N, a->like);
	shardd_ticket ticket;
	void *data = NULL;
	int r;

	if (t->rank == 1) {
		TRAIN_OK(shardd_submit_summon(c, SHARDD_OPTIONS(summon, .unit = u), &ticket,
					      &train_err));
		wait_a_little(a);
		kill(getpid(), SIGKILL);
	}
	r = shardd_summon(c, u, &data, &train_err);
	if (r == 0)
		train_set(c, data, 1, N * sizeof(float));
	else
		TRAINER_CHECK(r == -SHARDD_ABORTED && strstr(train_err.text, "rank 1"));
	shardd_close(c);
	return 0;
}

/* As if nothing had been. */
static int train(const struct trainer *t)
{
	const struct attack *a = t->arg;
	shardd_client *c = train_join(t);
	shardd_unit u = train_zero_unit(c, "u", N, a->like);
	void *gradient, *data;

	TRAIN_OK(shardd_gradient(c, u, &gradient, &train_err));
	train_set(c, gradient, 0, N * sizeof(float));
	TRAIN_OK(shardd_reduce(c, u, &train_err));
	TRAIN_OK(shardd_summon(c, u, &data, &train_err));
	TRAIN_OK(shardd_return(c, u, true, &train_err));
	train_leave(c);
	return 0;
}

static void attack(trainer_fn fn, uint32_t world, struct attack *a)
{
	for (a->turn = 0; a->turn < TRIES; a->turn++) {
		pid_t pids[2];

		for (uint32_t r = 0; r < world; r++)
			pids[r] = trainer_start(&trainfix, "test", r, world, fn, a);
		for (uint32_t r = 0; r < world; r++) {
			int code = trainer_wait(pids[r], 60);

			cr_assert(code == 0 || (r == 1 && code == 128 + SIGKILL),
				  "rank %u ended with %d in try %u", r, code, a->turn);
		}
	}
	trainfix_run(world, train, a);
}

Test(dies_in_stages, of_a_reduce)
{
	struct attack a = { 0 };

	attack(reduce_and_go, 1, &a);
}

Test(dies_in_stages, of_a_reduce_of_what_was_accumulated)
{
	struct attack a = { .accumulates = true };

	attack(reduce_and_go, 1, &a);
}

Test(dies_in_stages, of_a_reduce_of_ddp)
{
	struct attack a = { .like = &ddp };

	attack(reduce_and_go, 1, &a);
}

Test(dies_in_stages, of_two_ranks_reduce_of_ddp)
{
	struct attack a = { .like = &ddp, .accumulates = true };

	attack(reduce_and_go, 2, &a);
}

Test(dies_in_stages, of_a_summon)
{
	struct attack a = { 0 };

	attack(summon, 2, &a);
}
