/* All interleavings of small orders: in every state that can be reached the rules of docs/nodes.md hold, and
 * where nothing moves any more everything is over. SHARDD_TEST_LONG=1 has larger ones. */
#include <criterion/criterion.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "longform.h"
#include "orderfix.h"

TestSuite(order_explore, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 3600);

#define DEPTH  2000
#define EVENTS 32

/* A set of hashes of states; 0 is none. */
struct seen {
	uint64_t *slots;
	size_t n, cap;
};

struct search {
	struct seen seen;
	struct orderfix_event trail[DEPTH];
	const struct orderfix_plan *plan;
	size_t ends, breaks;
	bool recorded;
};

static bool seen_put(struct seen *s, uint64_t h)
{
	size_t i = h & (s->cap - 1);

	for (; s->slots[i]; i = (i + 1) & (s->cap - 1))
		if (s->slots[i] == h)
			return false;
	s->slots[i] = h;
	s->n++;
	return true;
}

static void seen_grow(struct seen *s)
{
	struct seen grown = { .cap = s->cap ? s->cap * 2 : 1024 };

	grown.slots = calloc(grown.cap, sizeof(*grown.slots));
	CHECK(grown.slots);
	for (size_t i = 0; i < s->cap; i++)
		if (s->slots[i])
			seen_put(&grown, s->slots[i]);
	free(s->slots);
	*s = grown;
}

/* Return: true if it is new. */
static bool seen_add(struct seen *s, uint64_t h)
{
	if (s->n * 2 >= s->cap)
		seen_grow(s);
	return seen_put(s, h);
}

/* How it came to that. */
static void tell(const struct search *s, uint32_t depth, const char *wrong)
{
	struct orderfix *w = orderfix_new(s->plan);
	char text[128];

	fprintf(stderr, "%s: %s\n", s->plan->c->name, wrong);
	for (uint32_t i = 0; i < s->plan->c->n_nodes; i++)
		fprintf(stderr, "  node %u: %s\n", i, s->plan->c->programs[i][0]);
	for (uint32_t i = 0; i < depth; i++) {
		orderfix_describe(w, s->trail[i], text, sizeof(text));
		fprintf(stderr, "  %s\n", text);
		orderfix_apply(w, s->trail[i]);
	}
	orderfix_free(w);
	cr_assert_fail("%s: %s", s->plan->c->name, wrong);
}

static void check_here(struct search *s, struct orderfix *w, uint32_t depth, uint32_t n_events)
{
	if (orderfix_wrong(w))
		tell(s, depth, orderfix_wrong(w));
	s->recorded |= orderfix_is_recorded(w);
	s->ends += !n_events;
	s->breaks += !n_events && orderfix_reason(w)[0];
}

/* NOLINTNEXTLINE(misc-no-recursion): as deep as the longest way */
static void explore_from(struct search *s, struct orderfix *w, uint32_t depth)
{
	struct orderfix_event events[EVENTS];
	uint32_t n = orderfix_events(w, events, EVENTS);

	check_here(s, w, depth, n);
	CHECK(depth < DEPTH);
	for (uint32_t i = 0; i < n; i++) {
		struct orderfix *next = i + 1 < n ? orderfix_clone(w) : w;

		s->trail[depth] = events[i];
		orderfix_apply(next, events[i]);
		if (seen_add(&s->seen, orderfix_hash(next)) || orderfix_wrong(next))
			explore_from(s, next, depth + 1);
		if (next != w)
			orderfix_free(next);
	}
}

static void explore(const struct orderfix_case *c)
{
	static struct orderfix_plan plan;
	static struct search s;
	struct orderfix *w;

	orderfix_plan(&plan, c);
	s = (struct search){ .plan = &plan };
	w = orderfix_new(&plan);
	explore_from(&s, w, 0);
	orderfix_free(w);
	printf("%-40s %8zu states, %5zu ends, %5zu of them broken%s\n", c->name, s.seen.n, s.ends,
	       s.breaks, s.recorded ? ", recorded" : "");
	fflush(stdout);
	cr_assert(s.ends && (s.recorded || !c->must_record));
	free(s.seen.slots);
}

static bool is_long(void)
{
	const char *text = getenv("SHARDD_TEST_LONG");

	return text && *text && strcmp(text, "0") != 0;
}

static uint64_t random_next(uint64_t *x)
{
	*x ^= *x << 13;
	*x ^= *x >> 7;
	*x ^= *x << 17;
	return *x >> 11;
}

/* One way through an order that is too large for all of them. */
static struct search *walk(const struct orderfix_case *c, uint64_t seed)
{
	static struct orderfix_plan plan;
	static struct search s;
	struct orderfix_event events[EVENTS];
	struct orderfix *w;
	uint32_t depth = 0, n;

	orderfix_plan(&plan, c);
	s = (struct search){ .plan = &plan };
	w = orderfix_new(&plan);
	while ((n = orderfix_events(w, events, EVENTS))) {
		check_here(&s, w, depth, n);
		CHECK(depth < DEPTH);
		s.trail[depth] = events[random_next(&seed) % n];
		orderfix_apply(w, s.trail[depth++]);
	}
	check_here(&s, w, depth, 0);
	orderfix_free(w);
	return &s;
}

/* With the address sanitizer every third: the rules do not depend on it, and the code of the messages
 * is the same in all. */
static void explore_all(const struct orderfix_case *cases, size_t n)
{
	for (size_t i = 0; i < n; i += longform_cut() ? 3 : 1)
		explore(&cases[i]);
}

Test(order_explore, without_schedules)
{
	static const struct orderfix_case cases[] = {
		{ .name = "two nodes, two groups",
		  .n_nodes = 2,
		  .programs = { { "abab" }, { "abab" } } },
		{ .name = "two nodes, two orders",
		  .n_nodes = 2,
		  .programs = { { "ab", "cd" }, { "cd", "ab" } } },
		{ .name = "two nodes, one is blocked",
		  .n_nodes = 2,
		  .programs = { { "a.b.a" }, { "ba.a" } } },
		{ .name = "two nodes, few ahead",
		  .n_nodes = 2,
		  .programs = { { "abaca" }, { "abaca" } },
		  .max_ahead = 2 },
		{ .name = "three nodes",
		  .n_nodes = 3,
		  .programs = { { "ab" }, { "ba" }, { "ab" } } },
		{ .name = "three nodes, parts of them",
		  .n_nodes = 3,
		  .programs = { { "uwa" }, { "uva" }, { "wva" } } },
		{ .name = "two nodes, a mismatch",
		  .n_nodes = 2,
		  .programs = { { "aba" }, { "ab?a" } } },
		{ .name = "three nodes, a mismatch",
		  .n_nodes = 3,
		  .programs = { { "ab" }, { "a?b" }, { "a?b" } } },
		{ .name = "two nodes, a refusal",
		  .n_nodes = 2,
		  .programs = { { "ab!a" }, { "aba" } } },
		{ .name = "two nodes, two refusals",
		  .n_nodes = 2,
		  .programs = { { "a!b" }, { "a!b-" } } },
		{ .name = "two nodes, a late refusal",
		  .n_nodes = 2,
		  .programs = { { "ab-a" }, { "aba" } } },
		{ .name = "three nodes, a late refusal",
		  .n_nodes = 3,
		  .programs = { { "ab" }, { "a-b" }, { "ba" } } },
		{ .name = "two nodes, a gather of one",
		  .n_nodes = 2,
		  .programs = { { "aGb" }, { "ab" } } },
		{ .name = "two nodes, a gather of both",
		  .n_nodes = 2,
		  .programs = { { "aG.bG" }, { "Gab" } } },
		{ .name = "three nodes, gathers",
		  .n_nodes = 3,
		  .programs = { { "aX" }, { "Ga" }, { "aG." } } },
		{ .name = "two nodes, a refused gather",
		  .n_nodes = 2,
		  .programs = { { "aG-" }, { "aG" } } },
		{ .name = "two nodes, a gather refused early",
		  .n_nodes = 2,
		  .programs = { { "G!a" }, { "Ga" } } },
		{ .name = "two nodes, a decision",
		  .n_nodes = 2,
		  .programs = { { "aCb", "c" }, { "aCb", "c" } },
		  .may_fail = true },
		{ .name = "two nodes, a decision refused late",
		  .n_nodes = 2,
		  .programs = { { "aC-b" }, { "aCb" } },
		  .may_break = true },
		{ .name = "three nodes, a decision",
		  .n_nodes = 3,
		  .programs = { { "Ca" }, { "Ca" }, { "aC" } },
		  .may_fail = true },
		{ .name = "two nodes, a step", .n_nodes = 2, .programs = { { "aPM" }, { "aPM" } } },
		{ .name = "two nodes, lost links",
		  .n_nodes = 2,
		  .programs = { { "aGC" }, { "aGC" } },
		  .cut = true },
		{ .name = "three nodes, lost links",
		  .n_nodes = 3,
		  .programs = { { "aG" }, { "a" }, { "a" } },
		  .cut = true },
	};

	explore_all(cases, ARRAY_SIZE(cases));
}

#define SCHEDULE .max_recorded = 16, .must_record = true
#define DEVIATE  .max_recorded = 16, .may_break = true

Test(order_explore, with_a_schedule)
{
	static const struct orderfix_case cases[] = {
		{ .name = "collectives",
		  .n_nodes = 2,
		  .programs = { { "5(abM)" }, { "5(abM)" } },
		  SCHEDULE },
		{ .name = "collectives and time",
		  .n_nodes = 2,
		  .programs = { { "4(aM)" }, { "4(aM)" } },
		  SCHEDULE,
		  .ticks = true },
		{ .name = "blocked ranks",
		  .n_nodes = 2,
		  .programs = { { "5(ab.M.)" }, { "5(a.bM.)" } },
		  SCHEDULE },
		{ .name = "few ahead",
		  .n_nodes = 2,
		  .programs = { { "6(abM)" }, { "6(abM)" } },
		  SCHEDULE,
		  .max_ahead = 2 },
		{ .name = "a gather of both",
		  .n_nodes = 2,
		  .programs = { { "4(GaM.)" }, { "4(GaM.)" } },
		  SCHEDULE },
		{ .name = "a gather of one",
		  .n_nodes = 2,
		  .programs = { { "4(aGM.)" }, { "4(aM.)" } },
		  SCHEDULE },
		{ .name = "gathers of each",
		  .n_nodes = 2,
		  .programs = { { "4(G.aM.)" }, { "4(H.aM.)" } },
		  SCHEDULE },
		{ .name = "steps",
		  .n_nodes = 2,
		  .programs = { { "4(aPM.)" }, { "4(aPM.)" } },
		  SCHEDULE },
		{ .name = "decisions",
		  .n_nodes = 2,
		  .programs = { { "5(aD.)" }, { "5(aD.)" } },
		  SCHEDULE },
		{ .name = "decisions that fail",
		  .n_nodes = 2,
		  .programs = { { "5(aD.)" }, { "5(aD.)" } },
		  SCHEDULE,
		  .may_fail = true },
		{ .name = "what differs from step to step",
		  .n_nodes = 2,
		  .programs = { { "5(aSb.M.)" }, { "5(aSb.M.)" } },
		  SCHEDULE },
		{ .name = "steps as marks",
		  .n_nodes = 2,
		  .programs = { { "4(abQ.)" }, { "4(abQ.)" } },
		  SCHEDULE,
		  .ticks = true },
		{ .name = "three nodes",
		  .n_nodes = 3,
		  .programs = { { "4(aQ.)" }, { "4(aQ.)" }, { "4(aQ.)" } },
		  SCHEDULE },
		{ .name = "parts of three nodes",
		  .n_nodes = 3,
		  .programs = { { "4(uM.)" }, { "4(vuM.)" }, { "4(vM.)" } },
		  SCHEDULE },
		{ .name = "lost links",
		  .n_nodes = 2,
		  .programs = { { "4(aM.)" }, { "4(aM.)" } },
		  SCHEDULE,
		  .cut = true },
	};

	explore_all(cases, ARRAY_SIZE(cases));
}

Test(order_explore, a_schedule_that_a_node_leaves)
{
	static const struct orderfix_case cases[] = {
		/* all do the same, and something new */
		{ .name = "new at the beginning",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)cabM" }, { "3(abM.)cabM" } },
		  SCHEDULE },
		{ .name = "new in the middle",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)acbM" }, { "3(abM.)acbM" } },
		  SCHEDULE },
		{ .name = "new at the end",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)abcM" }, { "3(abM.)abcM" } },
		  SCHEDULE },
		{ .name = "something missing",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)aMaM" }, { "3(abM.)aMaM" } },
		  SCHEDULE },
		{ .name = "another order",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)ba.M" }, { "3(abM.)ba.M" } },
		  DEVIATE },
		{ .name = "blocked in another order",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)b.aM" }, { "3(abM.)b.aM" } },
		  SCHEDULE },
		{ .name = "new and blocked",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)ac.bM" }, { "3(abM.)ac.bM" } },
		  DEVIATE },
		/* one does, and the others may have gone on */
		{ .name = "one has another order",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)ba.M" }, { "3(abM.)abM" } },
		  DEVIATE },
		{ .name = "a mismatch",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)ab?M" }, { "3(abM.)abM" } },
		  DEVIATE,
		  .ticks = true },
		{ .name = "a mismatch of what is joint",
		  .n_nodes = 2,
		  .programs = { { "3(aSM.)aS?bM" }, { "3(aSM.)aSbM" } },
		  SCHEDULE },
		{ .name = "a mismatch at the mark",
		  .n_nodes = 2,
		  .programs = { { "3(aM.)aM?a" }, { "3(aM.)aMa" } },
		  SCHEDULE },
		{ .name = "a refusal at the beginning",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)a!bM" }, { "3(abM.)abM" } },
		  DEVIATE },
		{ .name = "a refusal at the end",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)ab!M" }, { "3(abM.)abM" } },
		  DEVIATE },
		{ .name = "a refusal of the mark",
		  .n_nodes = 2,
		  .programs = { { "3(aM.)aM!a" }, { "3(aM.)aMa" } },
		  SCHEDULE },
		{ .name = "a late refusal",
		  .n_nodes = 2,
		  .programs = { { "3(abM.)ab-M" }, { "3(abM.)abM" } },
		  DEVIATE },
		{ .name = "a late refusal of the mark",
		  .n_nodes = 2,
		  .programs = { { "3(aM.)aM-a" }, { "3(aM.)aMa" } },
		  SCHEDULE },
		/* gathers */
		{ .name = "a new gather",
		  .n_nodes = 2,
		  .programs = { { "3(aM.)HaM" }, { "3(aM.)aM" } },
		  SCHEDULE },
		{ .name = "a gather that one still wants",
		  .n_nodes = 2,
		  .programs = { { "3(G.aM.)G" }, { "3(G.aM.)" } },
		  SCHEDULE },
		{ .name = "a gather in another order",
		  .n_nodes = 2,
		  .programs = { { "3(aGM.)G.aM" }, { "3(aGM.)aGM" } },
		  DEVIATE },
		{ .name = "a gather that nobody wants",
		  .n_nodes = 2,
		  .programs = { { "3(GaM.)aMa" }, { "3(GaM.)aMa" } },
		  SCHEDULE },
		{ .name = "gathers at other places",
		  .n_nodes = 2,
		  .programs = { { "3(a.GM.)" }, { "3(G.aM.)" } },
		  SCHEDULE },
		{ .name = "a refused gather",
		  .n_nodes = 2,
		  .programs = { { "3(aGM.)aG!M" }, { "3(aGM.)aGM" } },
		  DEVIATE },
		/* decisions */
		{ .name = "new beside a decision",
		  .n_nodes = 2,
		  .programs = { { "3(aD.)aD", "//c" }, { "3(aD.)aD", "//c" } },
		  SCHEDULE,
		  .may_fail = true },
		/* three nodes */
		{ .name = "three nodes, new",
		  .n_nodes = 3,
		  .programs = { { "3(aQ.)caQ" }, { "3(aQ.)caQ" }, { "3(aQ.)caQ" } },
		  SCHEDULE },
		{ .name = "three nodes, a refusal",
		  .n_nodes = 3,
		  .programs = { { "3(aQ.)aQ" }, { "3(aQ.)a!Q" }, { "3(aQ.)aQ" } },
		  DEVIATE },
		{ .name = "parts, and a new one",
		  .n_nodes = 3,
		  .programs = { { "3(uM.)uM" }, { "3(vuM.)vcuM" }, { "3(vM.)vM" } },
		  DEVIATE },
		/* and again */
		{ .name = "again and again",
		  .n_nodes = 2,
		  .programs = { { "3(aM.)ca2(M.a)M" }, { "3(aM.)ca2(M.a)M" } },
		  SCHEDULE },
	};

	explore_all(cases, ARRAY_SIZE(cases));
}

/* Minutes. */
Test(order_explore, larger_orders)
{
	static const struct orderfix_case cases[] = {
		{ .name = "three nodes, two groups",
		  .n_nodes = 3,
		  .programs = { { "aba" }, { "aba" }, { "aba" } } },
		{ .name = "three nodes, two tracks",
		  .n_nodes = 3,
		  .programs = { { "aa", "b" }, { "aa", "b" }, { "aa", "b" } } },
		{ .name = "three nodes, a late refusal and more",
		  .n_nodes = 3,
		  .programs = { { "abG" }, { "a-bG" }, { "baC" } } },
		{ .name = "new in the middle, unblocked",
		  .n_nodes = 2,
		  .programs = { { "3(abM)acbM" }, { "3(abM)acbM" } },
		  .ticks = true,
		  DEVIATE },
		{ .name = "a refusal, unblocked",
		  .n_nodes = 2,
		  .programs = { { "3(aGM)a!GMa" }, { "3(aM)aMa" } },
		  .ticks = true,
		  DEVIATE },
		{ .name = "gathers, unblocked",
		  .n_nodes = 2,
		  .programs = { { "3(aGM)GaM" }, { "3(GaM)aGM" } },
		  .ticks = true,
		  DEVIATE },
		{ .name = "decisions, unblocked",
		  .n_nodes = 2,
		  .programs = { { "3(aD)caD" }, { "3(aD)aDc" } },
		  .ticks = true,
		  .may_fail = true,
		  DEVIATE },
		{ .name = "three nodes, gathers",
		  .n_nodes = 3,
		  .programs = { { "3(aXQ.)aQ" }, { "3(aQ.)XaQ" }, { "3(aQ.)aQ" } },
		  .ticks = true,
		  DEVIATE },
		{ .name = "three nodes, a mismatch",
		  .n_nodes = 3,
		  .programs = { { "3(aM.)aM" }, { "3(aM.)a?M" }, { "3(aM.)aM" } },
		  .ticks = true,
		  DEVIATE },
		{ .name = "three nodes, lost links",
		  .n_nodes = 3,
		  .programs = { { "3(aQ.)cQ" }, { "3(aQ.)cQ" }, { "3(aQ.)cQ" } },
		  .cut = true,
		  DEVIATE },
	};

	if (is_long())
		explore_all(cases, ARRAY_SIZE(cases));
}

Test(order_explore, long_programs_at_random)
{
	static const struct orderfix_case cases[] = {
		{ .name = "four nodes",
		  .n_nodes = 4,
		  .programs = { { "9(aGbD.)", "9(c/)" },
				{ "9(abGD)", "9(c.H/)" },
				{ "9(a.bD.)", "9(Hc./)" },
				{ "9(GabD.)", "9(c/)" } },
		  .ticks = true,
		  DEVIATE },
		{ .name = "three nodes, parts",
		  .n_nodes = 3,
		  .programs = { { "9(uXM)", "9(wg/)" },
				{ "9(uv.M)", "9(Yg/)" },
				{ "9(wvM)", "9(Zg./)" } },
		  DEVIATE },
		{ .name = "three nodes, deviations",
		  .n_nodes = 3,
		  .programs = { { "5(abM)5(bacM)" }, { "5(abM)5(bacM)" }, { "5(abM)5(bacM)" } },
		  DEVIATE },
	};
	uint32_t seeds = is_long() ? 100000 : longform_cut() ? 150 : 500;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		uint32_t recorded = 0;

		for (uint32_t seed = 1; seed <= seeds; seed++)
			recorded += walk(&cases[i], seed * UINT64_C(0x9e3779b97f4a7c15))->recorded;
		printf("%-40s %8u walks, %u recorded\n", cases[i].name, seeds, recorded);
		cr_assert(recorded);
	}
}

/* May @node have what @letter is? */
static bool takes_part(char letter, uint32_t node)
{
	static const char letters[] = "uvwXYZ";
	static const uint32_t masks[] = { 3, 6, 5, 3, 6, 5 };
	const char *at = strchr(letters, letter);

	return !at || masks[at - letters] >> node & 1;
}

/* @step for @node. With @change one place is otherwise. A rank waits for nothing but gathers and marks: what
 * it does not ask for then is never what another node waits for in an order without schedules. */
static void random_step(const char *step, uint32_t node, bool change, uint64_t *x, char *out)
{
	static const char changes[] = "abcdGHI!?-";
	size_t at = change ? random_next(x) % strlen(step) : SIZE_MAX;

	out += strlen(out);
	for (size_t i = 0; step[i]; i++) {
		char other = changes[random_next(x) % (sizeof(changes) - 1)];

		if (i == at && isalpha((unsigned char)other))
			*out++ = other;
		if (!takes_part(step[i], node) || (i == at && random_next(x) % 2 && step[i + 1]))
			continue;
		*out++ = step[i];
		if (i == at && ispunct((unsigned char)other) && islower((unsigned char)step[i]))
			*out++ = other;
		if (strchr("GHIXYZMDQ", step[i]) && random_next(x) % 3)
			*out++ = '.';
	}
	*out = '\0';
}

struct random_programs {
	char text[ORDERFIX_NODES][256];
};

static void random_case(uint64_t *x, struct orderfix_case *c, struct random_programs *p)
{
	static const char entries[] = "aabbcGHIXYZuvwPC", marks[] = "MMDQ";
	char step[8] = "";
	uint32_t n = 1 + random_next(x) % 4, steps = 4 + random_next(x) % 5;
	bool all = random_next(x) % 2, change = false;

	*c = (struct orderfix_case){ .name = "random",
				     .n_nodes = 3,
				     .max_recorded = 16,
				     .may_break = true,
				     .may_fail = random_next(x) % 4 == 0,
				     .ticks = random_next(x) % 2 };
	for (uint32_t i = 0; i < n; i++)
		step[i] = entries[random_next(x) % (sizeof(entries) - 1)];
	step[n] = marks[random_next(x) % 4];
	memset(p, 0, sizeof(*p));
	for (uint32_t s = 0; s < steps; s++) {
		uint64_t same = random_next(x);

		change = s >= 3 && random_next(x) % 2;
		for (uint32_t i = 0; i < c->n_nodes; i++) {
			uint64_t y = all ? same : random_next(x);

			random_step(step, i, change && (all || random_next(x) % 2), &y, p->text[i]);
		}
	}
	for (uint32_t i = 0; i < c->n_nodes; i++)
		c->programs[i][0] = p->text[i];
}

Test(order_explore, random_programs)
{
	uint32_t seeds = is_long()        ? 1000000
			 : longform_cut() ? 1000
					  : 5000,
		 recorded = 0, broken = 0;

	for (uint32_t seed = 1; seed <= seeds; seed++) {
		uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15);
		struct random_programs programs;
		struct orderfix_case c;
		struct search *s;

		random_case(&x, &c, &programs);
		s = walk(&c, x);
		recorded += s->recorded;
		broken += s->breaks > 0;
	}
	printf("%-40s %8u walks, %u recorded, %u broken\n", "random programs", seeds, recorded,
	       broken);
	cr_assert(recorded);
}
