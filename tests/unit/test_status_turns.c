/* status_turns: one user's slow calls wait for each other, and nobody else does. */
#include <criterion/criterion.h>
#include <uv.h>

#include "core/check.h"
#include "core/clock.h"
#include "rpc/status_turns.h"

enum { ALICE = 10001, BOB = 10002, SLOW_US = 2000 };

static struct users us;
static uv_loop_t loop;
static struct status_turns turns;
static unsigned order; /* of those that ran */

struct turn_case {
	struct status_turn turn;
	uint64_t takes_us;
	unsigned ran; /* as the how manieth; 0: not yet */
};

static void begin(void)
{
	struct user_limits limits = { .n_overrides = 0 };

	users_init(&us);
	cr_assert_eq(users_configure(&us, &limits), 0);
	CHECK(uv_loop_init(&loop) == 0);
	status_turns_init(&turns, &loop, &us);
	order = 0;
}

static void end(void)
{
	status_turns_close(&turns);
	status_turns_close(&turns);
	uv_run(&loop, UV_RUN_DEFAULT);
	CHECK(uv_loop_close(&loop) == 0);
	users_deinit(&us);
}

TestSuite(status_turns, .init = begin, .fini = end, .timeout = 60);

static void run(struct status_turn *turn)
{
	struct turn_case *c = CONTAINER_OF(turn, struct turn_case, turn);
	uint64_t until = clock_now_us() + c->takes_us;

	c->ran = ++order;
	while (clock_now_us() < until)
		;
}

static void ask(struct user *u, struct turn_case *c)
{
	list_init(&c->turn.link);
	status_turns_run(&turns, u, &c->turn, run);
}

Test(status_turns, of_one_user_come_one_after_the_other)
{
	struct user *alice = users_get(&us, ALICE, NULL, 0), *bob = users_get(&us, BOB, NULL, 0);
	struct turn_case slow = { .takes_us = SLOW_US }, next = { .ran = 0 }, last = { .ran = 0 },
			 others = { .ran = 0 }, own = { .ran = 0 };

	ask(alice, &slow);
	cr_assert_eq(slow.ran, 1, "nobody has taken time before");
	ask(alice, &next);
	ask(alice, &last);
	cr_assert_eq(next.ran + last.ran, 0, "the time of the slow one is not over");
	ask(bob, &others);
	cr_assert_eq(others.ran, 2, "another user does not wait");
	ask(NULL, &own);
	cr_assert_eq(own.ran, 3, "nor does the daemon itself");
	while (!last.ran)
		uv_run(&loop, UV_RUN_ONCE);
	cr_assert_eq(next.ran, 4);
	cr_assert_eq(last.ran, 5);
	user_unref(alice);
	user_unref(bob);
}

Test(status_turns, that_are_given_up_do_not_come)
{
	struct user *alice = users_get(&us, ALICE, NULL, 0);
	struct turn_case slow = { .takes_us = SLOW_US }, gone = { .ran = 0 }, last = { .ran = 0 };

	ask(alice, &slow);
	ask(alice, &gone);
	ask(alice, &last);
	status_turn_cancel(&gone.turn);
	while (!last.ran)
		uv_run(&loop, UV_RUN_ONCE);
	cr_assert_eq(gone.ran, 0);
	cr_assert_eq(last.ran, 2);
	user_unref(alice);
}

Test(status_turns, that_are_fast_do_not_wait)
{
	struct user *alice = users_get(&us, ALICE, NULL, 0);
	struct turn_case one = { .ran = 0 }, two = { .ran = 0 };

	ask(alice, &one);
	alice->turn_at_us[USER_TURN_CALLS] = 0; /* should the machine have stood still in it */
	ask(alice, &two);
	cr_assert_eq(two.ran, 2);
	user_unref(alice);
}
