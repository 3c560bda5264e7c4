/* The table of moves, cell by cell, and when a gathered unit is let go of. */
#include <criterion/criterion.h>
#include <string.h>

#include "core/check.h"
#include "job/passes.h"

TestSuite(passes, .timeout = 60);

enum { NO = -1 };

/* Rows: states; columns: moves, from BEGIN_FORWARD on. Written out, so that a change of the
 * daemon's table has to be made twice. */
static const int want[_PASS_STATE_N][_MOVE_N - 1] = {
	/* begin f, end f, begin b, end b, end without, reduce, accumulate, summon, return, idle,
	 * rows */
	[PASS_IDLE] = { PASS_FORWARD, NO, PASS_BACKWARD_PRE, NO, NO, NO, NO, PASS_SUMMON, NO,
			PASS_IDLE, NO },
	[PASS_FORWARD] = { NO, PASS_IDLE, NO, NO, NO, NO, NO, NO, NO, NO, NO },
	[PASS_BACKWARD_PRE] = { PASS_FORWARD_IN_PRE, NO, NO, NO, PASS_IDLE, PASS_BACKWARD_POST,
				PASS_BACKWARD_POST, NO, NO, NO, PASS_BACKWARD_POST },
	[PASS_BACKWARD_POST] = { PASS_FORWARD_IN_POST, NO, NO, PASS_IDLE, PASS_IDLE,
				 PASS_BACKWARD_POST, PASS_BACKWARD_POST, NO, NO, NO,
				 PASS_BACKWARD_POST },
	[PASS_SUMMON] = { NO, NO, NO, NO, NO, NO, NO, NO, PASS_IDLE, NO, NO },
	[PASS_FORWARD_IN_PRE] = { NO, PASS_BACKWARD_PRE, NO, NO, NO, NO, NO, NO, NO, NO, NO },
	[PASS_FORWARD_IN_POST] = { NO, PASS_BACKWARD_POST, NO, NO, NO, NO, NO, NO, NO, NO, NO },
};

Test(passes, every_cell_of_the_table)
{
	for (int s = 0; s < _PASS_STATE_N; s++)
		for (int m = MOVE_NONE + 1; m < _MOVE_N; m++) {
			enum pass_state to = _PASS_STATE_N;
			bool ok = passes_move((enum pass_state)s, (enum pass_move)m, &to);
			int expected = want[s][m - 1];

			cr_expect_eq(ok, expected != NO, "move %d in %s", m,
				     pass_state_name((enum pass_state)s));
			cr_expect_eq((int)to, ok ? expected : (int)_PASS_STATE_N,
				     "move %d in %s leads to %s", m,
				     pass_state_name((enum pass_state)s), pass_state_name(to));
		}
}

Test(passes, what_moves_nothing_is_allowed_everywhere)
{
	for (int s = 0; s < _PASS_STATE_N; s++) {
		enum pass_state to = _PASS_STATE_N;

		cr_expect(passes_move((enum pass_state)s, MOVE_NONE, &to));
		cr_expect_eq((int)to, s);
	}
}

Test(passes, says_what_is_allowed)
{
	char text[128], small[8];

	passes_allowed(MOVE_REDUCE, text, sizeof(text));
	cr_expect_str_eq(text, "BACKWARD_PRE or BACKWARD_POST");
	passes_allowed(MOVE_BEGIN_FORWARD, text, sizeof(text));
	cr_expect_str_eq(text, "IDLE or BACKWARD_PRE or BACKWARD_POST");
	passes_allowed(MOVE_NEEDS_IDLE, text, sizeof(text));
	cr_expect_str_eq(text, "IDLE");
	passes_allowed(MOVE_REDUCE, small, sizeof(small));
	cr_expect_str_eq(small, "BACKWAR");
}

/* The rules of fairscale, with FSDP2's own: after backward also without a reduce. */
Test(passes, when_a_unit_is_let_go_of)
{
	static const struct {
		enum unit_reshard reshard;
		enum reduce_profile profile;
		enum optim_when when;
		bool forward, no_sync, sync;
	} rows[] = {
		{ RESHARD_AFTER_FORWARD, PROFILE_FAIRSCALE, OPTIM_AT_STEP, true, true, true },
		{ RESHARD_AFTER_BACKWARD, PROFILE_FAIRSCALE, OPTIM_AT_STEP, false, false, true },
		{ RESHARD_NEVER, PROFILE_FAIRSCALE, OPTIM_AT_STEP, false, false, false },
		{ RESHARD_AFTER_FORWARD, PROFILE_FSDP2, OPTIM_AT_STEP, true, true, true },
		{ RESHARD_AFTER_BACKWARD, PROFILE_FSDP2, OPTIM_AT_STEP, false, true, true },
		{ RESHARD_NEVER, PROFILE_FSDP2, OPTIM_AT_STEP, false, false, false },
		{ RESHARD_AFTER_BACKWARD, PROFILE_XLA, OPTIM_AT_STEP, false, false, true },
		{ RESHARD_NEVER, PROFILE_FAIRSCALE, OPTIM_IN_BACKWARD, false, false, true },
		{ RESHARD_AFTER_FORWARD_ONLY, PROFILE_FSDP2, OPTIM_AT_STEP, true, false, false },
		{ RESHARD_AFTER_FORWARD_ONLY, PROFILE_FAIRSCALE, OPTIM_AT_STEP, true, false,
		  false },
		{ RESHARD_AFTER_FORWARD_ONLY, PROFILE_FSDP2, OPTIM_IN_BACKWARD, true, false, true },
		{ RESHARD_AFTER_FORWARD_ONLY, PROFILE_FSDP2, OPTIM_BY_TRAINER, true, false, true },
	};

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		state_optimizer o = { .when = rows[i].when };
		state_unit u = { .reduce_profile = rows[i].profile, .optimizer = &o };
		enum unit_reshard r = rows[i].reshard;

		for (int sync = 0; sync < 2; sync++)
			cr_expect_eq(passes_let_go(&u, r, PASS_KIND_FORWARD, sync), rows[i].forward,
				     "row %zu: forward", i);
		cr_expect_eq(passes_let_go(&u, r, PASS_KIND_BACKWARD, false), rows[i].no_sync,
			     "row %zu: no_sync", i);
		cr_expect_eq(passes_let_go(&u, r, PASS_KIND_BACKWARD, true), rows[i].sync,
			     "row %zu: sync", i);
	}
}
