/*
 * Every op of the table, stopped at every boundary between its stages, and there each rank in
 * turn is killed, disconnected, joins again, is replaced, leaves; the job is deleted with force
 * or drained, ops are cancelled or their deadlines pass, communicators break. On 1, 2 and 4
 * ranks, 1 and 2 devices, with and without queues of their own.
 *
 * After each: every op ended once and with a reason, the ranks join again and train a step, and
 * when the job is deleted every byte is back.
 *
 * There were two crashes: SummonFull handed out a copy that a lost rank had given back, and
 * Reduce read gradients that were given back between its stages.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "longform.h"
#include "op/op_util.h"
#include "scenes.h"

TestSuite(boundaries, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 600);

/* Steps of one op, at most: a scene in which they do not end waits for ever. */
#define MAX_BOUNDARIES 200u

/* With the address sanitizer, which takes five times as long, each disturbance stops at every STRIDE-th
 * boundary, and the next one a boundary later. The plain build and the long form stop at all. */
#define STRIDE 47u

static unsigned cases; /* that were disturbed */

static void submit_all(struct scene *s, const struct scenario *o, unsigned ranks)
{
	for (unsigned r = 0; r < ranks; r++)
		o->submit(s, r);
	nodefix_turns(s->n);
}

/* Stop at boundary @at: 0: before the last rank asks, 1: nothing has ended yet. Return: false:
 * there is no such boundary. */
static bool stop_at(struct scene *s, const struct scenario *o, unsigned at)
{
	unsigned ranks = s->stage->ranks;

	scene_hold(s);
	submit_all(s, o, ranks - 1);
	if (at)
		o->submit(s, ranks - 1);
	nodefix_turns(s->n);
	for (unsigned i = 1; i < at; i++)
		if (!scene_step(s))
			return false;
	return true;
}

/* In the epoch that the scene began in. */
static bool is_there(const struct scene *s, unsigned rank)
{
	const struct member *m = s->m[rank];

	return m && m->state == MEMBER_JOINED && m->epoch == s->epoch;
}

/* Return: is there such a boundary? */
static bool run_case(struct nodefix *n, const struct stage *stage, const struct scenario *o,
		     enum disturbance d, unsigned rank, unsigned at)
{
	static struct scene s; /* ops are written to until they are over */
	bool there;

	scene_begin(&s, n, stage);
	if (o->prepare)
		o->prepare(&s);
	s.promised = stage->promises;
	there = stop_at(&s, o, at);
	if (there)
		cases += scene_disturb(&s, d, rank);
	if (there && at == 0 && is_there(&s, stage->ranks - 1))
		o->submit(&s, stage->ranks - 1);
	scene_end(&s, there && d == DISTURB_DELETE);
	return there;
}

static const char *only; /* SHARDD_TEST_SCENARIO: those whose type or name it is part of */

static void every_boundary(struct nodefix *n, const struct stage *stage, const struct scenario *o)
{
	unsigned stride = longform_cut() ? STRIDE : 1;

	for (enum disturbance d = 0; d < _DISTURB_N; d++) {
		bool of_rank = d != DISTURB_DELETE && d != DISTURB_DRAIN && d != DISTURB_BREAK;

		if (d == DISTURB_BREAK && stage->devices == 1)
			continue;
		for (unsigned rank = 0; rank < (of_rank ? stage->ranks : 1); rank++) {
			unsigned at = (d + rank) % stride;

			do {
				cr_assert_lt(at, MAX_BOUNDARIES);
				if (getenv("SHARDD_TEST_VERBOSE"))
					fprintf(stderr, "%s (%s): %s rank %u at %u\n", o->type,
						o->name, disturbance_name(d), rank, at);
				at += stride;
			} while (run_case(n, stage, o, d, rank, at - stride));
		}
	}
}

static void every_op(const struct stage *stage)
{
	static struct nodefix n;

	only = getenv("SHARDD_TEST_SCENARIO");
	cases = 0;
	scene_node_begin(&n, stage);
	for (size_t i = 0; i < n_scenarios; i++) {
		const struct scenario *o = &scenarios[i];

		if (o->ranks <= stage->ranks &&
		    (!only || strstr(o->type, only) || strstr(o->name, only)))
			every_boundary(&n, stage, o);
	}
	scene_node_end(&n);
	fprintf(stderr, "%u disturbances on %u ranks, %u devices%s%s\n", cases, stage->ranks,
		stage->devices, stage->queues ? ", queues" : "", stage->streams ? ", streams" : "");
	cr_assert(only || cases > (longform_cut() ? 100u : 500u));
}

#define BOUNDARIES(name, ...)                               \
	Test(boundaries, name)                              \
	{                                                   \
		const struct stage stage = { __VA_ARGS__ }; \
                                                            \
		every_op(&stage);                           \
	}

BOUNDARIES(one_rank, .ranks = 1, .devices = 1)
BOUNDARIES(two_ranks, .ranks = 2, .devices = 1)
BOUNDARIES(four_ranks, .ranks = 4, .devices = 1)
BOUNDARIES(two_ranks_two_devices, .ranks = 2, .devices = 2)
BOUNDARIES(four_ranks_two_devices, .ranks = 4, .devices = 2, .batches = true)
BOUNDARIES(one_rank_on_a_queue, .ranks = 1, .devices = 1, .queues = true, .streams = true)
BOUNDARIES(two_ranks_on_a_queue, .ranks = 2, .devices = 1, .queues = true)
BOUNDARIES(two_ranks_on_two_queues, .ranks = 2, .devices = 2, .queues = true, .streams = true)
BOUNDARIES(two_ranks_and_memory_made_later, .ranks = 2, .devices = 2, .later = true)
BOUNDARIES(two_ranks_with_promises, .ranks = 2, .devices = 2, .queues = true, .streams = true,
	   .promises = true)

/* A new op needs a scenario here that stops in the middle of it. */
Test(boundaries, every_op_of_the_table_has_a_scenario)
{
	for (size_t i = 0; op_table[i]; i++) {
		bool found = false;

		for (size_t k = 0; k < n_scenarios; k++)
			found = found || strcmp(scenarios[k].type, op_table[i]->name) == 0;
		cr_expect(found,
			  "%s is in the table of ops and has no scenario: add to scenarios[] in "
			  "tests/fault/scenarios.c what prepares a job for it and how a rank asks "
			  "for "
			  "it",
			  op_table[i]->name);
	}
	for (size_t k = 0; k < n_scenarios; k++)
		cr_expect(op_type_by_name(scenarios[k].type), "there is no op %s",
			  scenarios[k].type);
}
