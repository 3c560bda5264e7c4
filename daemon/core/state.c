#include "core/state.h"

#include "core/check.h"

void state_move(const struct state_row *rows, uint8_t *state, uint8_t to)
{
	CHECK(rows[*state].next & STATE_TO(to));
	*state = to;
}
