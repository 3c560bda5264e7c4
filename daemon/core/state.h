/*
 * States with a table of the moves between them. docs/states.md has the same tables
 * (tests/lint/states compares them). Loop thread only.
 */
#ifndef SHARDD_CORE_STATE_H
#define SHARDD_CORE_STATE_H

#include <stdint.h>

/* By state: its name, and a set of those that may follow it (STATE_TO of each). */
struct state_row {
	const char *name;
	uint32_t next;
};

#define STATE_TO(state) (UINT32_C(1) << (state))

/* Move *@state to @to. CHECKs that @rows has this move. */
void state_move(const struct state_row *rows, uint8_t *state, uint8_t to);

#endif
