/*
 * Random ops of all ranks, and random disturbances among them: thousands, each at a random
 * boundary of whatever is under way. In the order of a seed, which is told; SHARDD_TEST_SEED
 * sets it, SHARDD_TEST_LONG=1 asks for ten times as many.
 *
 * Nobody checks what an op says: it is refused, aborted or ends well. The daemon stays, every
 * op ends once, the ranks train again afterwards, and every byte is back.
 */
#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "asks.h"
#include "core/check.h"
#include "fdcheck.h"

TestSuite(disturbances, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 600);

static uint64_t state;
static uint64_t ops, failed; /* of all scenes so far */

/* xorshift64*. Return: less than @n. */
static unsigned random_below(unsigned n)
{
	state ^= state >> 12;
	state ^= state << 25;
	state ^= state >> 27;
	return (unsigned)((state * UINT64_C(2685821657736338717)) >> 33) % n;
}

static uint64_t seed_of(void)
{
	const char *text = getenv("SHARDD_TEST_SEED");

	return text && strtoull(text, NULL, 0) ? strtoull(text, NULL, 0) : 20261122;
}

/* With SHARDD_TEST_VERBOSE: what came last before it went wrong. */
static void trace(const char *fmt, ...)
{
	va_list ap;

	if (!getenv("SHARDD_TEST_VERBOSE"))
		return;
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
}

/* Mostly all of them ask for the same. */
static void ask(struct scene *s)
{
	unsigned which = random_below((unsigned)n_all_asks);
	ask_fn fn = all_asks[which];

	trace("ask %u", which);
	for (unsigned r = 0; r < s->stage->ranks; r++) {
		if (random_below(10) == 0)
			fn = all_asks[random_below((unsigned)n_all_asks)];
		if (s->m[r] && s->m[r]->state == MEMBER_JOINED &&
		    scene_has_room(s, r, MOST_OF_AN_ASK) && random_below(16))
			fn(s, r);
	}
}

static void join_some(struct scene *s)
{
	for (unsigned r = 0; r < s->stage->ranks; r++)
		if (!s->job->life.draining && random_below(4))
			(void)scene_join(s, r);
}

static void go_on(struct scene *s)
{
	for (unsigned n = random_below(12); n > 0; n--)
		(void)scene_step(s);
	if (random_below(8) == 0) {
		scene_raise(s);
		scene_let_go(s);
		scene_hold(s);
	}
}

/* Return: disturbances. The last one may be the end of the job. */
static unsigned play(struct nodefix *n, const struct stage *stage)
{
	static struct scene s; /* ops are written to until they are over */
	const struct scenario *o = &scenarios[random_below((unsigned)n_scenarios)];
	unsigned done = 0, want = 1 + random_below(8), rank;
	bool gone = false;

	trace("prepared: %s (%s)", o->type, o->name);
	scene_begin(&s, n, stage);
	if (o->prepare && o->ranks <= stage->ranks)
		o->prepare(&s);
	s.promised = stage->promises;
	scene_hold(&s);
	while (done < want && !gone) {
		enum disturbance d = random_below(_DISTURB_N);

		for (unsigned k = random_below(5); k > 0; k--)
			ask(&s);
		go_on(&s);
		if ((d == DISTURB_DELETE || d == DISTURB_DRAIN) && done + 1 < want)
			d = DISTURB_KILL;
		rank = random_below(stage->ranks);
		trace("%s rank %u", disturbance_name(d), rank);
		done += scene_disturb(&s, d, rank);
		gone = d == DISTURB_DELETE && s.job->life.deleted;
		if (!gone)
			join_some(&s);
	}
	s.epoch = s.job->rec->epoch;
	ops += s.job->ops.total;
	failed += s.job->ops.failed;
	scene_end(&s, gone);
	return done;
}

static void disturb(const struct stage *stage, unsigned at_least)
{
	static struct nodefix n;
	const char *text = getenv("SHARDD_TEST_LONG");
	uint64_t seed = seed_of();
	unsigned done = 0, scenes = 0;

	at_least *= text && strtoul(text, NULL, 10) ? 10 : 1;
	scene_node_begin(&n, stage);
	while (done < at_least) {
		state = seed + scenes * UINT64_C(0x9e3779b97f4a7c15);
		trace("scene %u of SHARDD_TEST_SEED=%llu", scenes, (unsigned long long)seed);
		done += play(&n, stage);
		scenes++;
	}
	scene_node_end(&n);
	cr_assert_lt(failed, ops - ops / 4, "hardly an op ends well: nothing is tested");
	fprintf(stderr,
		"%u disturbances, %llu ops of which %llu failed in %u scenes on %u ranks, %u "
		"devices%s, SHARDD_TEST_SEED=%llu\n",
		done, (unsigned long long)ops, (unsigned long long)failed, scenes, stage->ranks,
		stage->devices, stage->queues ? ", queues" : "", (unsigned long long)seed);
}

/* The seed is told before anything can go wrong: a crash tells nothing any more. */
#define DISTURBANCES(name, n, ...)                                                                 \
	Test(disturbances, name)                                                                   \
	{                                                                                          \
		const struct stage stage = { __VA_ARGS__ };                                        \
                                                                                                   \
		fprintf(stderr, #name ": SHARDD_TEST_SEED=%llu\n", (unsigned long long)seed_of()); \
		disturb(&stage, n);                                                                \
	}

DISTURBANCES(one_rank, 600, .ranks = 1, .devices = 1)
DISTURBANCES(two_ranks, 1200, .ranks = 2, .devices = 1)
DISTURBANCES(four_ranks_two_devices, 1200, .ranks = 4, .devices = 2, .batches = true)
DISTURBANCES(four_ranks_two_queues, 1000, .ranks = 4, .devices = 2, .queues = true, .streams = true)
DISTURBANCES(two_ranks_and_memory_made_later, 600, .ranks = 2, .devices = 2, .queues = true,
	     .later = true)
DISTURBANCES(two_ranks_with_promises, 1000, .ranks = 2, .devices = 2, .queues = true,
	     .streams = true, .promises = true)
