/* Decisions: of all that several leaders try, whatever answers are lost, one chain takes effect. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coord/coord_impl.h"
#include "coord/decide.h"
#include "core/check.h"
#include "core/clock.h"
#include "etcdfix.h"
#include "fdcheck.h"
#include "looprun.h"
#include "stopped.h"

static struct looprun run;
static struct coord_fake *fake;
static struct etcdfix etcd;
static struct coord *c, *other;

static struct outcome {
	struct decide d;
	bool done;
	enum decide_outcome outcome;
	int64_t revision;
} first, second;

static void on_decided(struct decide *d, enum decide_outcome outcome, int64_t revision,
		       const char *why)
{
	struct outcome *o = CONTAINER_OF(d, struct outcome, d);

	cr_assert_not(o->done);
	cr_expect(outcome == DECIDE_DONE || *why);
	o->done = true;
	o->outcome = outcome;
	o->revision = revision;
}

static void begin_fake(void)
{
	fdcheck_begin();
	looprun_init(&run);
	cr_assert_eq(coord_fake_new(&fake), 0);
	cr_assert_eq(coord_fake_open(fake, &run.queue, &c), 0);
	cr_assert_eq(coord_fake_open(fake, &run.queue, &other), 0);
}

static void begin_etcd(void)
{
	const char *endpoints[] = { etcd.client };
	struct coord_options o = { .endpoints = endpoints, .n_endpoints = 1, .prefix = "/test/" };
	struct fault f = FAULT_NULL;

	etcdfix_begin(&etcd);
	looprun_init(&run);
	cr_assert_eq(coord_etcd_new(&run.queue, &o, &c, &f), 0, "%s", f.text);
	cr_assert_eq(coord_etcd_new(&run.queue, &o, &other, &f), 0, "%s", f.text);
}

static void end(void)
{
	decide_cancel(&first.d);
	decide_cancel(&second.d);
	coord_close(c);
	coord_close(other);
	looprun_deinit(&run);
	if (fake)
		coord_fake_free(fake);
	if (fake)
		fdcheck_end();
	else
		etcdfix_end(&etcd);
}

TestSuite(decide_fake, .init = begin_fake, .fini = end, .timeout = 60);
TestSuite(decide_etcd, .init = begin_etcd, .fini = end, .timeout = 60);

#define TEST_BOTH(name)                \
	static void both_##name(void); \
	Test(decide_fake, name)        \
	{                              \
		both_##name();         \
	}                              \
	Test(decide_etcd, name)        \
	{                              \
		both_##name();         \
	}                              \
	static void both_##name(void)

static struct {
	struct coord_call call;
	char value[64];
	int64_t created, modified;
} got;

static void on_got(struct coord_call *call, const struct coord_reply *r)
{
	(void)call;
	cr_assert_eq(r->status, COORD_OK, "%s", r->why);
	got.created = r->n ? r->kvs[0].created : 0;
	got.modified = r->n ? r->kvs[0].modified : 0;
	snprintf(got.value, sizeof(got.value), "%.*s", r->n ? (int)r->kvs[0].bytes : 0,
		 r->n ? (const char *)r->kvs[0].value : "");
}

static void do_txn(const struct coord_txn *t)
{
	got.call.done = on_got;
	cr_assert_eq(coord_txn(other, &got.call, t, 5000), 0);
	while (got.call.impl)
		uv_run(&run.loop, UV_RUN_NOWAIT);
}

static const char *value_of(const char *key)
{
	struct coord_txn t = { .read = key };

	do_txn(&t);
	return got.value;
}

/* Somebody leads. Return: the token. */
static int64_t elect(const char *name)
{
	struct coord_change gone = { .key = "leader", .remove = true };
	struct coord_change put = { .key = "leader", .value = name, .bytes = strlen(name) };
	struct coord_txn t = { .changes = &gone, .n_changes = 1 };

	do_txn(&t);
	t = (struct coord_txn){ .changes = &put, .n_changes = 1, .read = "leader" };
	do_txn(&t);
	return got.created;
}

static void begin_one(struct outcome *o, int64_t token, int64_t last, const char *value)
{
	struct decide_what what = { .key = "step",
				    .value = value,
				    .bytes = strlen(value),
				    .leader = "leader",
				    .token = token,
				    .last = last };

	*o = (struct outcome){ .done = false };
	cr_assert_eq(decide_begin(&o->d, c, &what, on_decided), 0);
	cr_assert_not(o->done);
}

static void until_done(struct outcome *o)
{
	uint64_t until = clock_now_us() + 20000000u;

	while (!o->done) {
		cr_assert(clock_now_us() < until);
		decide_tick(&o->d, clock_now_us());
		uv_run(&run.loop, UV_RUN_NOWAIT);
	}
}

static void decide_one(struct outcome *o, int64_t token, int64_t last, const char *value)
{
	begin_one(o, token, last, value);
	until_done(o);
}

TEST_BOTH(a_leader_decides_one_after_the_other)
{
	int64_t token = elect("a");

	decide_one(&first, token, 0, "step 1 by a");
	cr_assert_eq(first.outcome, DECIDE_DONE);
	cr_expect_str_eq(value_of("step"), "step 1 by a");
	cr_expect_eq(got.modified, first.revision);
	decide_one(&second, token, first.revision, "step 2 by a");
	cr_assert_eq(second.outcome, DECIDE_DONE);
	decide_one(&first, token, first.revision, "step 3 by a");
	cr_expect_eq(first.outcome, DECIDE_OVERTAKEN);
	cr_expect_str_eq(value_of("step"), "step 2 by a");
}

TEST_BOTH(who_does_not_lead_any_more_decides_nothing)
{
	int64_t token = elect("a");

	elect("b");
	decide_one(&first, token, 0, "step 1 by a");
	cr_expect_eq(first.outcome, DECIDE_FENCED);
	cr_expect_str_eq(value_of("step"), "");
}

/* The text of two decisions may be the same only if one has made both tries. */
TEST_BOTH(the_same_value_by_another_is_no_decision_of_ours)
{
	int64_t token = elect("a");

	decide_one(&first, token, 0, "step 1");
	decide_one(&second, token, 0, "step 1");
	cr_expect_eq(second.outcome, DECIDE_OVERTAKEN);
}

static void lost(enum coord_fake_fate fate, bool another_leads)
{
	int64_t token = elect("a");

	coord_fake_fate(c, fate);
	begin_one(&first, token, 0, "step 1 by a");
	coord_fake_lose(c);
	uv_run(&run.loop, UV_RUN_NOWAIT);
	cr_expect_eq(first.d.state, DECIDE_DOUBT);
	if (another_leads)
		elect("b");
	coord_fake_fate(c, COORD_FAKE_ANSWERED);
	until_done(&first);
}

Test(decide_fake, takes_effect_once_if_an_answer_was_lost)
{
	lost(COORD_FAKE_LOST_AFTER, false);
	cr_expect_eq(first.outcome, DECIDE_DONE);
	value_of("step");
	cr_expect_eq(first.revision, got.modified);
	cr_expect_eq(got.created, got.modified, "changed once");
}

Test(decide_fake, is_made_again_if_the_request_was_lost)
{
	lost(COORD_FAKE_LOST_BEFORE, false);
	cr_expect_eq(first.outcome, DECIDE_DONE);
	cr_expect_str_eq(value_of("step"), "step 1 by a");
}

Test(decide_fake, that_took_effect_stays_though_another_leads)
{
	lost(COORD_FAKE_LOST_AFTER, true);
	cr_expect_eq(first.outcome, DECIDE_DONE);
	cr_expect_str_eq(value_of("step"), "step 1 by a");
}

Test(decide_fake, that_did_not_take_effect_never_does_after_the_leader_has_changed)
{
	lost(COORD_FAKE_LOST_BEFORE, true);
	cr_expect_eq(first.outcome, DECIDE_FENCED);
	cr_expect_str_eq(value_of("step"), "");
}

/* It took effect, and the next leader has gone on from there. */
Test(decide_fake, that_was_in_force_for_a_while_is_not_said_to_be_overtaken)
{
	int64_t token = elect("a");

	coord_fake_fate(c, COORD_FAKE_LOST_AFTER);
	begin_one(&first, token, 0, "step 1 by a");
	coord_fake_lose(c);
	uv_run(&run.loop, UV_RUN_NOWAIT);
	coord_fake_fate(c, COORD_FAKE_ANSWERED);
	token = elect("b");
	value_of("step");
	decide_one(&second, token, got.modified, "step 2 by b");
	cr_assert_eq(second.outcome, DECIDE_DONE);
	until_done(&first);
	cr_expect_eq(first.outcome, DECIDE_SUPERSEDED);
	cr_expect_str_eq(value_of("step"), "step 2 by b");
}

Test(decide_etcd, is_certain_after_etcd_has_hung_and_was_killed)
{
	int64_t token = elect("a");

	stopped_stop(etcd.pid);
	begin_one(&first, token, 0, "step 1 by a");
	for (uint64_t until = clock_now_us() + 3000000u; clock_now_us() < until;) {
		decide_tick(&first.d, clock_now_us());
		uv_run(&run.loop, UV_RUN_NOWAIT);
	}
	cr_expect_not(first.done);
	cr_expect(*first.d.why);
	kill(etcd.pid, SIGCONT);
	etcdfix_kill(&etcd);
	etcdfix_again(&etcd);
	until_done(&first);
	cr_expect_eq(first.outcome, DECIDE_DONE);
	value_of("step");
	cr_expect_eq(got.created, got.modified, "changed once");
}
