/* Matching of collectives: each entry ends in exactly one way, and all of a slot in
 * the same one. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "fdcheck.h"
#include "job/match.h"

TestSuite(match, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

enum outcome { PENDING, COMPLETE, FAILED };

/* An op as op/ has it: passed exactly when it is over. */
struct call {
	struct match_entry entry;
	struct match *match;
	enum outcome outcome;
	struct fault fault;
	unsigned told;
};

static void test_match_end(struct call *c, enum outcome outcome, const struct fault *fault)
{
	c->told++;
	c->outcome = outcome;
	if (fault)
		c->fault = *fault;
	match_passed(c->match, &c->entry);
}

static void on_complete(struct match_entry *const *entries, uint32_t n, void *userdata)
{
	unsigned *completed = userdata;

	(*completed)++;
	for (uint32_t i = 0; i < n; i++) {
		cr_assert_eq(entries[i]->index, i);
		test_match_end(CONTAINER_OF(entries[i], struct call, entry), COMPLETE, NULL);
	}
}

static void on_failed(struct match_entry *entry, const struct fault *fault, void *userdata)
{
	(void)userdata;
	cr_assert_neq(fault->code, FAULT_NONE);
	test_match_end(CONTAINER_OF(entry, struct call, entry), FAILED, fault);
}

static void number(struct match *m, struct call *c, uint32_t index, uint64_t what)
{
	*c = (struct call){ .match = m };
	c->entry.index = index;
	c->entry.rank = index + 10;
	c->entry.pid = (int)index + 100;
	c->entry.print.words[0] = what;
	snprintf(c->entry.print.text, sizeof(c->entry.print.text), "Op %llu",
		 (unsigned long long)what);
	match_number(m, &c->entry);
}

static void announce(struct match *m, struct call *c, uint32_t index, uint64_t what)
{
	number(m, c, index, what);
	cr_assert_eq(match_announce(m, &c->entry), 0);
}

static struct fault fault_of(enum fault_code code, const char *text)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, code, NULL, "%s", text);
	return f;
}

static void assert_failed(const struct call *c, enum fault_code code, const char *text)
{
	cr_assert_eq(c->outcome, FAILED);
	cr_assert_eq(c->told, 1);
	cr_assert_eq(c->fault.code, code);
	cr_assert(strstr(c->fault.text, text), "\"%s\" is not in \"%s\"", text, c->fault.text);
}

struct fixture {
	struct match m;
	unsigned completed;
};

static void setup(struct fixture *f, uint32_t size)
{
	f->completed = 0;
	cr_assert_eq(match_init(&f->m, size, on_complete, on_failed, &f->completed), 0);
}

Test(match, completes_when_the_last_member_announces)
{
	struct fixture f;
	struct call c[3];

	setup(&f, 3);
	announce(&f.m, &c[2], 2, 7);
	announce(&f.m, &c[0], 0, 7);
	cr_assert_eq(f.completed, 0);
	cr_assert_eq(c[0].outcome, PENDING);
	announce(&f.m, &c[1], 1, 7);
	cr_assert_eq(f.completed, 1);
	for (int i = 0; i < 3; i++) {
		cr_assert_eq(c[i].outcome, COMPLETE);
		cr_assert_eq(c[i].entry.number, 1);
	}
	cr_assert_eq(f.m.n_slots, 0, "a slot that all have passed is dropped");
	match_deinit(&f.m);
}

Test(match, a_group_of_one_completes_at_once)
{
	struct fixture f;
	struct call c[5];

	setup(&f, 1);
	for (unsigned i = 0; i < ARRAY_SIZE(c); i++) {
		announce(&f.m, &c[i], 0, i);
		cr_assert_eq(c[i].outcome, COMPLETE);
		cr_assert_eq(c[i].entry.number, i + 1);
	}
	cr_assert_eq(f.completed, 5);
	match_deinit(&f.m);
}

Test(match, a_difference_fails_all_with_both_texts)
{
	struct fixture f;
	struct call c[3], next[3];

	setup(&f, 3);
	announce(&f.m, &c[0], 0, 7);
	announce(&f.m, &c[1], 1, 8);
	for (int i = 0; i < 2; i++) {
		assert_failed(&c[i], FAULT_STATE, "rank 10 (pid 100) asks for Op 7");
		assert_failed(&c[i], FAULT_STATE, "rank 11 (pid 101) for Op 8");
		assert_failed(&c[i], FAULT_STATE, "number 1");
	}
	/* who comes later gets the same, whatever it asks for */
	announce(&f.m, &c[2], 2, 7);
	assert_failed(&c[2], FAULT_STATE, "rank 11 (pid 101) for Op 8");
	cr_assert_eq(f.completed, 0);
	/* and nobody has drifted: the next number works */
	for (uint32_t i = 0; i < 3; i++)
		announce(&f.m, &next[i], i, 9);
	cr_assert_eq(f.completed, 1);
	cr_assert_eq(next[0].entry.number, 2);
	match_deinit(&f.m);
}

Test(match, every_word_of_the_fingerprint_counts)
{
	for (unsigned w = 0; w < 8; w++) {
		struct fixture f;
		struct call a, b;

		setup(&f, 2);
		announce(&f.m, &a, 0, 7);
		number(&f.m, &b, 1, 7);
		b.entry.print.words[w] ^= UINT64_C(1) << 63;
		cr_assert_eq(match_announce(&f.m, &b.entry), 0);
		cr_assert_eq(a.outcome, FAILED, "word %u", w);
		cr_assert_eq(b.outcome, FAILED, "word %u", w);
		match_deinit(&f.m);
	}
}

Test(match, refused_after_announcing_fails_all_once)
{
	struct fixture f;
	struct call c[3];
	struct fault why = fault_of(FAULT_DEADLINE, "too late");

	setup(&f, 3);
	announce(&f.m, &c[0], 0, 7);
	announce(&f.m, &c[1], 1, 7);
	match_refuse(&f.m, &c[1].entry, &why);
	assert_failed(&c[0], FAULT_DEADLINE, "too late");
	assert_failed(&c[1], FAULT_DEADLINE, "too late");
	announce(&f.m, &c[2], 2, 7);
	assert_failed(&c[2], FAULT_DEADLINE, "too late");
	cr_assert_eq(f.m.n_slots, 0);
	match_deinit(&f.m);
}

Test(match, refused_before_announcing_fails_those_that_come)
{
	struct fixture f;
	struct call c[3];
	struct fault why = fault_of(FAULT_STATE, "no gradient buffer");

	setup(&f, 3);
	announce(&f.m, &c[0], 0, 7);
	number(&f.m, &c[1], 1, 7);
	match_refuse(&f.m, &c[1].entry, &why);
	assert_failed(&c[0], FAULT_STATE, "no gradient buffer");
	cr_assert_eq(c[1].told, 0, "who never announced is not told");
	match_passed(&f.m, &c[1].entry);
	announce(&f.m, &c[2], 2, 7);
	assert_failed(&c[2], FAULT_STATE, "no gradient buffer");
	cr_assert_eq(f.m.n_slots, 0);
	match_deinit(&f.m);
}

Test(match, refused_first_of_all_fails_everybody)
{
	struct fixture f;
	struct call c[2];
	struct fault why = fault_of(FAULT_STATE, "not this one");

	setup(&f, 2);
	number(&f.m, &c[0], 0, 7);
	match_refuse(&f.m, &c[0].entry, &why);
	match_passed(&f.m, &c[0].entry);
	announce(&f.m, &c[1], 1, 7);
	assert_failed(&c[1], FAULT_STATE, "not this one");
	match_deinit(&f.m);
}

Test(match, announced_out_of_order)
{
	struct fixture f;
	struct call a[4], b[4];

	setup(&f, 2);
	for (int i = 0; i < 4; i++)
		number(&f.m, &a[i], 0, (uint64_t)i);
	for (int i = 3; i >= 0; i--)
		cr_assert_eq(match_announce(&f.m, &a[i].entry), 0);
	for (int i = 0; i < 4; i++)
		number(&f.m, &b[i], 1, (uint64_t)i);
	for (unsigned i = 0; i < 4; i++) {
		unsigned k = (i + 2) % 4;

		cr_assert_eq(match_announce(&f.m, &b[k].entry), 0);
		cr_assert_eq(f.completed, i + 1);
		cr_assert_eq(a[k].outcome, COMPLETE);
		cr_assert_eq(b[k].outcome, COMPLETE);
	}
	cr_assert_eq(f.m.n_slots, 0);
	match_deinit(&f.m);
}

Test(match, a_member_may_be_a_thousand_ahead)
{
	enum { N = 1000 };
	struct call *a = calloc(N, sizeof(*a)), *b = calloc(N, sizeof(*b));
	struct fixture f;

	setup(&f, 2);
	for (unsigned i = 0; i < N; i++)
		announce(&f.m, &a[i], 0, i);
	cr_assert_eq(f.m.n_slots, N);
	for (unsigned i = 0; i < N; i++) {
		announce(&f.m, &b[i], 1, i);
		cr_assert_eq(a[i].outcome, COMPLETE);
		cr_assert_eq(b[i].entry.number, i + 1);
		cr_assert_eq(f.m.n_slots, N - 1 - i);
	}
	cr_assert_eq(f.completed, N);
	match_deinit(&f.m);
	free(a);
	free(b);
}

Test(match, reset_fails_what_waits_and_begins_anew)
{
	struct fixture f;
	struct call a[3], b, na, nb;
	struct fault why = fault_of(FAULT_ABORTED, "rank 10 died");

	setup(&f, 2);
	for (int i = 0; i < 3; i++)
		announce(&f.m, &a[i], 0, (uint64_t)i);
	number(&f.m, &b, 1, 0); /* numbered, its turn has not come */
	match_reset(&f.m, &why);
	for (int i = 0; i < 3; i++)
		assert_failed(&a[i], FAULT_ABORTED, "rank 10 died");
	cr_assert_eq(b.told, 0);
	match_passed(&f.m, &b.entry); /* of an earlier generation: nothing to do */
	cr_assert_eq(f.m.n_slots, 0);
	announce(&f.m, &na, 0, 5);
	announce(&f.m, &nb, 1, 5);
	cr_assert_eq(na.outcome, COMPLETE);
	cr_assert_eq(na.entry.number, 1);
	match_deinit(&f.m);
}

/* Ops of a slot that is complete run on beyond a reset and pass later. */
struct late {
	struct match_entry *entries[2];
};

static void keep_running(struct match_entry *const *entries, uint32_t n, void *userdata)
{
	memcpy(((struct late *)userdata)->entries, entries, n * sizeof(*entries));
}

Test(match, reset_leaves_running_ops_alone)
{
	struct match m;
	struct late late = { 0 };
	struct call a, b, more, again;
	struct fault why = fault_of(FAULT_ABORTED, "the epoch has ended");

	cr_assert_eq(match_init(&m, 2, keep_running, on_failed, &late), 0);
	announce(&m, &a, 0, 1);
	announce(&m, &b, 1, 1);
	announce(&m, &more, 1, 2);
	cr_assert_eq(late.entries[1], &b.entry);
	match_reset(&m, &why);
	cr_assert_eq(a.told + b.told, 0);
	assert_failed(&more, FAULT_ABORTED, "epoch");
	announce(&m, &again, 0, 3);
	match_passed(&m, &a.entry);
	match_passed(&m, &b.entry);
	cr_assert_eq(again.outcome, PENDING, "the old ops do not pass for the new one");
	match_reset(&m, &why);
	cr_assert_eq(again.outcome, FAILED);
	match_deinit(&m);
}

Test(match, a_member_that_left_fails_what_it_has_not_announced)
{
	struct fixture f;
	struct call a[3], b, c, late;
	struct fault why = fault_of(FAULT_ABORTED, "rank 11 has left");

	setup(&f, 3);
	announce(&f.m, &b, 1, 0);
	announce(&f.m, &a[0], 0, 0);
	announce(&f.m, &a[1], 0, 1);
	announce(&f.m, &a[2], 0, 2);
	match_member_left(&f.m, 1, &why);
	assert_failed(&a[1], FAULT_ABORTED, "rank 11 has left");
	assert_failed(&a[2], FAULT_ABORTED, "rank 11 has left");
	cr_assert_eq(a[0].outcome, PENDING, "it has announced this one");
	announce(&f.m, &c, 2, 0);
	cr_assert_eq(a[0].outcome, COMPLETE);
	announce(&f.m, &late, 2, 1);
	assert_failed(&late, FAULT_ABORTED, "rank 11 has left");
	announce(&f.m, &late, 2, 9);
	assert_failed(&late, FAULT_ABORTED, "rank 11 has left");
	announce(&f.m, &late, 2, 9);
	assert_failed(&late, FAULT_ABORTED, "rank 11 has left");
	match_deinit(&f.m);
}

Test(match, slots_are_their_owners_and_a_refused_rank_gets_no_number)
{
	struct user_limits limits = { .most = { [USER_MEMORY] = 8192 } };
	struct fault f = FAULT_NULL, why = fault_of(FAULT_ABORTED, "refused");
	struct call mine[64], peer;
	struct users users;
	struct user *u;
	struct match m;
	unsigned completed = 0, n = 0;

	users_init(&users);
	cr_assert_eq(users_configure(&users, &limits), 0);
	u = users_get(&users, 30001, NULL, 0);
	cr_assert_eq(match_init(&m, 2, on_complete, on_failed, &completed), 0);
	m.user = u;
	while (n < 64 && match_reserve(&m, 0, &f) == 0)
		announce(&m, &mine[n++], 0, 1);
	cr_assert(n > 1 && n < 64 && f.code == FAULT_EXHAUSTED);
	cr_assert_leq(u->used[USER_MEMORY], 8192);
	match_stop(&m, 0, &why);
	cr_assert(m.stopped[0] && !m.stopped[1]);
	for (unsigned i = 0; i <= n; i++) {
		announce(&m, &peer, 1, 1);
		cr_assert_eq(peer.outcome, i < n ? COMPLETE : FAILED);
	}
	cr_assert_eq(completed, n);
	match_reset(&m, &why);
	cr_assert(!m.stopped[0] && u->used[USER_MEMORY] == 0);
	match_deinit(&m);
	user_unref(u);
	users_deinit(&users);
}

Test(match, deinit_is_safe_twice_and_on_a_zeroed_struct)
{
	struct match m = { 0 };

	match_deinit(&m);
	cr_assert_eq(match_init(&m, 4, on_complete, on_failed, NULL), 0);
	match_deinit(&m);
	match_deinit(&m);
}

/* ------------------------------------------------------------- random walks */

enum { MEMBERS = 4, DEPTH = 64 };

struct walk {
	struct match m;
	unsigned completed;
	struct call calls[MEMBERS][DEPTH]; /* by number, per generation */
	bool announced[MEMBERS][DEPTH];
	unsigned numbered[MEMBERS];
	bool left;
	uint32_t left_index;
	unsigned ended;
};

static unsigned pick(unsigned *state, unsigned n)
{
	*state = *state * 1664525u + 1013904223u;
	return (*state >> 10) % n;
}

/* What op/ does with an op that cannot take part. */
static void walk_refuse(struct walk *w, uint32_t i, unsigned k)
{
	struct fault why = fault_of(FAULT_STATE, "refused");
	struct call *c = &w->calls[i][k];

	if (c->outcome != PENDING)
		return;
	match_refuse(&w->m, &c->entry, &why);
	if (!w->announced[i][k])
		test_match_end(c, FAILED, &why);
	w->announced[i][k] = true;
}

static void walk_announce(struct walk *w, uint32_t i, unsigned k)
{
	if (w->announced[i][k])
		return;
	w->announced[i][k] = true;
	cr_assert_eq(match_announce(&w->m, &w->calls[i][k].entry), 0);
}

/* The invariants that hold after every move. */
static void walk_check(const struct walk *w)
{
	for (unsigned k = 0; k < DEPTH; k++) {
		unsigned done = 0, failed = 0, waiting = 0, announced = 0;

		for (unsigned i = 0; i < MEMBERS; i++) {
			const struct call *c = &w->calls[i][k];

			if (k >= w->numbered[i])
				continue;
			cr_assert_leq(c->told, 1);
			done += c->outcome == COMPLETE;
			failed += c->outcome == FAILED;
			waiting += c->outcome == PENDING && w->announced[i][k];
			announced += w->announced[i][k];
		}
		cr_assert(!done || done == MEMBERS, "number %u: %u of %u complete", k + 1, done,
			  MEMBERS);
		cr_assert(!failed || !waiting, "number %u: %u failed but %u wait", k + 1, failed,
			  waiting);
		cr_assert(announced < MEMBERS || !waiting, "number %u: all came, %u wait", k + 1,
			  waiting);
	}
}

static void walk_new_generation(struct walk *w)
{
	struct fault why = fault_of(FAULT_ABORTED, "a new epoch");

	match_reset(&w->m, &why);
	for (unsigned i = 0; i < MEMBERS; i++) {
		for (unsigned k = 0; k < w->numbered[i]; k++) {
			struct call *c = &w->calls[i][k];

			if (w->announced[i][k])
				cr_assert_eq(c->told, 1, "an announced entry was lost");
			else
				match_passed(&w->m, &c->entry); /* op/ ends it by itself */
			w->ended += w->announced[i][k];
		}
		w->numbered[i] = 0;
		memset(w->announced[i], 0, sizeof(w->announced[i]));
	}
	w->left = false;
	cr_assert_eq(w->m.n_slots, 0);
}

static void walk_move(struct walk *w, unsigned *seed)
{
	uint32_t i = pick(seed, MEMBERS);
	unsigned what = pick(seed, 100);
	unsigned k = w->numbered[i] ? pick(seed, w->numbered[i]) : 0;

	if (what < 40 && w->numbered[i] < DEPTH && !(w->left && w->left_index == i)) {
		/* one op in 16 differs from the others at its number */
		number(&w->m, &w->calls[i][w->numbered[i]], i,
		       w->numbered[i] + (pick(seed, 16) ? 0u : 1000u + i));
		w->numbered[i]++;
	} else if (what < 96 && w->numbered[i]) {
		while (k + 1 < w->numbered[i] && w->announced[i][k])
			k++;
		walk_announce(w, i, k);
	} else if (what < 98 && w->numbered[i]) {
		walk_refuse(w, i, k);
	} else if (what == 98 && !w->left && !pick(seed, 4)) {
		struct fault why = fault_of(FAULT_ABORTED, "left");

		/* who leaves has no op under way */
		for (k = 0; k < w->numbered[i]; k++)
			walk_refuse(w, i, k);
		match_member_left(&w->m, i, &why);
		w->left = true;
		w->left_index = i;
	} else if (what == 99 && !pick(seed, 4)) {
		walk_new_generation(w);
	}
}

Test(match, random_walks_lose_no_entry)
{
	struct walk *w = calloc(1, sizeof(*w));
	unsigned completed = 0, ended = 0;

	for (unsigned seed = 1; seed <= 300; seed++) {
		unsigned state = seed;

		memset(w, 0, sizeof(*w));
		cr_assert_eq(match_init(&w->m, MEMBERS, on_complete, on_failed, &w->completed), 0);
		for (int move = 0; move < 600; move++) {
			walk_move(w, &state);
			walk_check(w);
		}
		walk_new_generation(w);
		completed += w->completed;
		ended += w->ended;
		match_deinit(&w->m);
	}
	cr_assert_gt(completed, 1000, "the walks complete something: %u", completed);
	cr_assert_gt(ended, MEMBERS * completed, "and fail something: %u", ended);
	free(w);
}

/* --------------------------------------------------------- members on other nodes */

static struct {
	unsigned announced, refused;
	uint64_t number;
	char why[256];
} told;

static void on_here(void *userdata, uint64_t at, const struct match_entry *first)
{
	(void)userdata;
	told.announced++;
	told.number = at;
	cr_expect_gt(strlen(first->print.text), 0);
}

static void on_refused(void *userdata, uint64_t at, const struct fault *fault)
{
	(void)userdata;
	told.refused++;
	told.number = at;
	snprintf(told.why, sizeof(told.why), "%s", fault->text);
}

static const struct match_others others = { .announce = on_here, .refuse = on_refused };

static void begin_with_others(struct match *m, unsigned *completed)
{
	memset(&told, 0, sizeof(told));
	*completed = 0;
	cr_assert_eq(match_init(m, 2, on_complete, on_failed, completed), 0);
	m->others = &others;
}

Test(match, with_others_a_slot_completes_when_it_is_started)
{
	struct match m;
	struct call a, b;
	unsigned completed;

	begin_with_others(&m, &completed);
	announce(&m, &a, 0, 1);
	cr_expect_not(match_start(&m, 1, 7), "member 1 has not announced");
	cr_expect_eq(told.announced, 0);
	announce(&m, &b, 1, 1);
	cr_expect_eq(told.announced, 1);
	cr_expect_eq(told.number, 1);
	cr_expect_eq(completed, 0);
	cr_expect_eq(a.outcome, PENDING);
	cr_expect(match_start(&m, 1, 7));
	cr_expect_eq(completed, 1);
	cr_expect_eq(a.outcome, COMPLETE);
	cr_expect_eq(b.outcome, COMPLETE);
	cr_expect_not(match_start(&m, 1, 7), "once");
	match_deinit(&m);
}

Test(match, others_are_told_once_what_has_failed_here)
{
	struct match m;
	struct call a, b;
	unsigned completed;

	begin_with_others(&m, &completed);
	announce(&m, &a, 0, 1);
	announce(&m, &b, 1, 2);
	cr_expect_eq(told.refused, 1);
	cr_expect(strstr(told.why, "ops differ at number 1"), "%s", told.why);
	assert_failed(&a, FAULT_STATE, "ops differ at number 1");
	assert_failed(&b, FAULT_STATE, "ops differ at number 1");
	/* after it was announced, too: a deadline */
	announce(&m, &a, 0, 3);
	announce(&m, &b, 1, 3);
	cr_expect_eq(told.announced, 1);
	match_refuse(&m, &a.entry, &(struct fault){ .code = FAULT_DEADLINE, .text = "late" });
	cr_expect_eq(told.refused, 2);
	assert_failed(&b, FAULT_DEADLINE, "late");
	cr_expect_not(match_start(&m, 2, 7));
	match_deinit(&m);
}

Test(match, what_others_have_failed_fails_here_now_and_later)
{
	struct match m;
	struct call a, b;
	struct fault f = fault_of(FAULT_STATE, "node b has refused it");
	unsigned completed;

	begin_with_others(&m, &completed);
	announce(&m, &a, 0, 1);
	match_fail(&m, 1, &f);
	assert_failed(&a, FAULT_STATE, "node b has refused it");
	announce(&m, &b, 1, 1);
	assert_failed(&b, FAULT_STATE, "node b has refused it");
	match_fail(&m, 2, &f); /* before anybody here has come to it */
	announce(&m, &a, 0, 1);
	assert_failed(&a, FAULT_STATE, "node b has refused it");
	cr_expect_eq(told.refused, 0, "they know");
	cr_expect_eq(told.announced, 0);
	match_fail(&m, 1, &f); /* it is over */
	match_deinit(&m);
}

/* Each node hears of the rank itself: nothing has to go through the leader. */
Test(match, a_member_elsewhere_that_left_fails_what_it_has_not_announced)
{
	struct match m;
	struct call a[3], b[3];
	struct fault why = fault_of(FAULT_ABORTED, "rank 7 has left");
	unsigned completed;

	begin_with_others(&m, &completed);
	announce(&m, &a[0], 0, 1);
	announce(&m, &b[0], 1, 1);
	announce(&m, &a[1], 0, 2);
	cr_expect_not(match_left_elsewhere(&m, 1, &why));
	assert_failed(&a[1], FAULT_ABORTED, "rank 7 has left");
	announce(&m, &b[1], 1, 2);
	assert_failed(&b[1], FAULT_ABORTED, "rank 7 has left");
	cr_expect_eq(a[0].outcome, PENDING, "it has announced this one");
	cr_expect(match_start(&m, 1, 7));
	cr_expect_eq(a[0].outcome, COMPLETE);
	match_member_left(&m, 0, &why);
	announce(&m, &b[2], 1, 3);
	assert_failed(&b[2], FAULT_ABORTED, "rank 7 has left");
	cr_expect_eq(told.refused, 0);
	cr_expect_eq(told.announced, 1);
	match_deinit(&m);
}

Test(match, what_runs_without_a_member_elsewhere_that_left_is_known)
{
	struct match m;
	struct late late = { 0 };
	struct call a, b;
	struct fault why = fault_of(FAULT_ABORTED, "rank 7 has left");

	memset(&told, 0, sizeof(told));
	cr_assert_eq(match_init(&m, 2, keep_running, on_failed, &late), 0);
	m.others = &others;
	announce(&m, &a, 0, 1);
	announce(&m, &b, 1, 1);
	cr_expect(match_start(&m, 1, 7));
	cr_expect_not(match_left_elsewhere(&m, 1, &why));
	cr_expect(match_left_elsewhere(&m, 0, &why));
	match_passed(&m, &a.entry);
	match_passed(&m, &b.entry);
	cr_expect_not(match_left_elsewhere(&m, 0, &why), "it is over");
	match_deinit(&m);
}

Test(match, others_are_told_of_what_a_member_cannot_number)
{
	struct match m;
	struct call a;
	struct fault why = fault_of(FAULT_EXHAUSTED, "no room");
	unsigned completed;

	begin_with_others(&m, &completed);
	announce(&m, &a, 0, 1);
	match_stop(&m, 1, &why);
	assert_failed(&a, FAULT_EXHAUSTED, "no room");
	cr_expect_eq(told.refused, 1);
	match_deinit(&m);
}

Test(match, a_new_epoch_tells_others_nothing)
{
	struct match m;
	struct call a, b;
	struct fault f = fault_of(FAULT_ABORTED, "the epoch has ended");
	unsigned completed;

	begin_with_others(&m, &completed);
	announce(&m, &a, 0, 1);
	announce(&m, &b, 1, 1);
	match_reset(&m, &f);
	assert_failed(&a, FAULT_ABORTED, "the epoch has ended");
	cr_expect_eq(told.refused, 0);
	match_deinit(&m);
}
