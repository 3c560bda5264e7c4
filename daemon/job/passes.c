#include "job/passes.h"

#include <stdio.h>

#include "core/check.h"

/* The state after each move. A move that is not listed is not allowed. */
static const struct {
	enum pass_state from;
	enum pass_move move;
	enum pass_state to;
} moves[] = {
	{ PASS_IDLE, MOVE_BEGIN_FORWARD, PASS_FORWARD },
	{ PASS_FORWARD, MOVE_END_FORWARD, PASS_IDLE },
	{ PASS_IDLE, MOVE_BEGIN_BACKWARD, PASS_BACKWARD_PRE },
	{ PASS_BACKWARD_PRE, MOVE_REDUCE, PASS_BACKWARD_POST },
	{ PASS_BACKWARD_POST, MOVE_REDUCE, PASS_BACKWARD_POST },
	{ PASS_BACKWARD_PRE, MOVE_ACCUMULATE, PASS_BACKWARD_POST },
	{ PASS_BACKWARD_POST, MOVE_ACCUMULATE, PASS_BACKWARD_POST },
	{ PASS_BACKWARD_POST, MOVE_END_BACKWARD, PASS_IDLE },
	{ PASS_BACKWARD_PRE, MOVE_END_WITHOUT, PASS_IDLE },
	{ PASS_BACKWARD_POST, MOVE_END_WITHOUT, PASS_IDLE },
	{ PASS_BACKWARD_PRE, MOVE_BEGIN_FORWARD, PASS_FORWARD_IN_PRE },
	{ PASS_FORWARD_IN_PRE, MOVE_END_FORWARD, PASS_BACKWARD_PRE },
	{ PASS_BACKWARD_POST, MOVE_BEGIN_FORWARD, PASS_FORWARD_IN_POST },
	{ PASS_FORWARD_IN_POST, MOVE_END_FORWARD, PASS_BACKWARD_POST },
	{ PASS_IDLE, MOVE_SUMMON, PASS_SUMMON },
	{ PASS_SUMMON, MOVE_RETURN, PASS_IDLE },
	{ PASS_IDLE, MOVE_NEEDS_IDLE, PASS_IDLE },
	{ PASS_BACKWARD_PRE, MOVE_REDUCE_ROWS, PASS_BACKWARD_POST },
	{ PASS_BACKWARD_POST, MOVE_REDUCE_ROWS, PASS_BACKWARD_POST },
};

bool passes_move(enum pass_state s, enum pass_move move, enum pass_state *ret)
{
	CHECK(s < _PASS_STATE_N && move < _MOVE_N);
	if (move == MOVE_NONE) {
		*ret = s;
		return true;
	}
	for (size_t i = 0; i < ARRAY_SIZE(moves); i++) {
		if (moves[i].from != s || moves[i].move != move)
			continue;
		*ret = moves[i].to;
		return true;
	}
	return false;
}

void passes_allowed(enum pass_move move, char *buf, size_t bytes)
{
	enum pass_state to;
	size_t at = 0;

	CHECK(bytes > 0);
	buf[0] = '\0';
	for (int s = 0; s < _PASS_STATE_N && at < bytes; s++)
		if (passes_move((enum pass_state)s, move, &to))
			at += (size_t)snprintf(buf + at, bytes - at, "%s%s", at ? " or " : "",
					       pass_state_name((enum pass_state)s));
}

const char *pass_state_name(enum pass_state s)
{
	static const char *const names[_PASS_STATE_N] = {
		"IDLE",   "FORWARD",        "BACKWARD_PRE",    "BACKWARD_POST",
		"SUMMON", "FORWARD_IN_PRE", "FORWARD_IN_POST",
	};

	return s < _PASS_STATE_N ? names[s] : "?";
}

/* An optimizer in backward, or the trainers' own, changes the parameters before the step: no reader
 * may hold them then. */
static bool passes_changes_before_step(const state_unit *rec)
{
	return rec->optimizer && (rec->optimizer->when == OPTIM_IN_BACKWARD ||
				  rec->optimizer->when == OPTIM_BY_TRAINER);
}

static bool passes_after_forward(enum unit_reshard reshard)
{
	return reshard == RESHARD_AFTER_FORWARD || reshard == RESHARD_AFTER_FORWARD_ONLY;
}

/* FSDP2 frees after every backward; fairscale and those that follow it keep what cannot
 * change, unless it was not kept after forward either. */
bool passes_let_go(const state_unit *rec, enum unit_reshard reshard, enum pass_kind pass, bool sync)
{
	if (pass == PASS_KIND_FORWARD)
		return passes_after_forward(reshard);
	if (reshard == RESHARD_AFTER_FORWARD || (sync && passes_changes_before_step(rec)))
		return true;
	if (reshard == RESHARD_NEVER || reshard == RESHARD_AFTER_FORWARD_ONLY)
		return false;
	return sync || rec->reduce_profile == PROFILE_FSDP2;
}
