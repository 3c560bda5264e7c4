/* Which units a rank may hold memory for: a bit each, in words of 64. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "job/job_types.h"
#include "job/member.h"

#define UNITS 130u

TestSuite(member_held, .timeout = 30);

static uint32_t count(const struct member *m)
{
	uint32_t n = 0;

	for (uint32_t i = member_next_held(m, 0); i < m->n_units; i = member_next_held(m, i + 1))
		n++;
	return n;
}

static struct member *make(struct job *job)
{
	struct member *m = calloc(1, sizeof(*m));
	struct unit u = { .id = 1 };

	cr_assert_not_null(m);
	m->job = job;
	cr_expect_eq(member_next_held(m, 0), 0, "it has none");
	cr_assert_not_null(member_unit(m, &u));
	cr_assert_eq(m->n_units, job->n_units);
	return m;
}

static void end(struct member *m)
{
	free(m->units);
	free(m->now.holding);
	free(m);
}

Test(member_held, finds_each_and_nothing_else)
{
	static const uint32_t ids[] = { 1, 2, 63, 64, 65, 128, 129, 130 };
	struct job job = { .n_units = UNITS };
	struct member *m = make(&job);
	uint32_t at = 0;

	cr_expect_eq(count(m), 0);
	for (size_t i = 0; i < ARRAY_SIZE(ids); i++) {
		m->units[ids[i] - 1].is_summoned = true;
		member_note_held(m, &m->units[ids[i] - 1]);
		cr_expect_eq(count(m), i + 1);
	}
	for (size_t i = 0; i < ARRAY_SIZE(ids); i++, at++) {
		at = member_next_held(m, at);
		cr_expect_eq(at, ids[i] - 1);
	}
	cr_expect_eq(member_next_held(m, UNITS), UNITS);
	for (size_t i = 0; i < ARRAY_SIZE(ids); i++) {
		m->units[ids[i] - 1].is_summoned = false;
		member_note_held(m, &m->units[ids[i] - 1]);
	}
	cr_expect_eq(count(m), 0);
	end(m);
}

Test(member_held, each_way_of_holding_counts)
{
	struct job job = { .n_units = UNITS };
	struct member *m = make(&job);
	struct member_unit *mu = &m->units[99];

	for (int state = SHARD_NONE; state <= SHARD_GIVEN_BACK; state++) {
		mu->shard_state = (uint8_t)state;
		member_note_held(m, mu);
		cr_expect_eq(count(m),
			     state == SHARD_GOING || state == SHARD_OUT || state == SHARD_BACK);
	}
	mu->shard_state = SHARD_NONE;
	mu->gradient.slab = (void *)mu; /* only compared with NULL */
	member_note_held(m, mu);
	cr_expect_eq(count(m), 1);
	mu->accumulated.slab = mu->gradient.slab;
	mu->gradient.slab = NULL;
	member_note_held(m, mu);
	cr_expect_eq(member_next_held(m, 0), 99);
	end(m);
}

Test(member_held, units_that_come_later_keep_what_was_there)
{
	struct job job = { .n_units = 65 };
	struct member *m = make(&job);
	struct unit u = { .id = UNITS };

	m->units[64].is_summoned = true;
	member_note_held(m, &m->units[64]);
	job.n_units = UNITS;
	cr_assert_not_null(member_unit(m, &u));
	cr_expect_eq(m->n_units, UNITS);
	cr_expect_eq(count(m), 1);
	cr_expect_eq(member_next_held(m, 0), 64);
	end(m);
}
