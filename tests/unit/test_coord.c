/* Stores of coordination by one contract: the fake one, and a real etcd. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "coord/coord_impl.h"
#include "coord/follow.h"
#include "core/check.h"
#include "core/clock.h"
#include "etcdfix.h"
#include "fdcheck.h"
#include "looprun.h"
#include "stopped.h"

static struct looprun run;
static struct coord *a, *b; /* two daemons of one store */
static struct coord_fake *fake;
static struct etcdfix etcd;

static void open_etcd(struct coord **ret)
{
	const char *endpoints[] = { etcd.client };
	struct coord_options o = { .endpoints = endpoints, .n_endpoints = 1, .prefix = "/test/" };
	struct fault f = FAULT_NULL;

	cr_assert_eq(coord_etcd_new(&run.queue, &o, ret, &f), 0, "%s", f.text);
}

static void begin_fake(void)
{
	fdcheck_begin();
	looprun_init(&run);
	cr_assert_eq(coord_fake_new(&fake), 0);
	cr_assert_eq(coord_fake_open(fake, &run.queue, &a), 0);
	cr_assert_eq(coord_fake_open(fake, &run.queue, &b), 0);
}

static void begin_etcd(void)
{
	etcdfix_begin(&etcd);
	looprun_init(&run);
	open_etcd(&a);
	open_etcd(&b);
}

static void end(void)
{
	a = coord_close(a);
	b = coord_close(b);
	looprun_deinit(&run);
	if (fake)
		coord_fake_free(fake);
	if (fake)
		fdcheck_end();
	else
		etcdfix_end(&etcd);
}

TestSuite(coord_fake, .init = begin_fake, .fini = end, .timeout = 60);
TestSuite(coord_etcd, .init = begin_etcd, .fini = end, .timeout = 60);

/* A call, and a copy of its answer. */
struct asked {
	struct coord_call call;
	bool done, succeeded;
	enum coord_status status;
	int64_t revision, lease, ttl_s;
	size_t n;
	char why[200];
	struct {
		char key[64], value[64];
		int64_t created, modified, lease;
	} kvs[8];
};

static void on_done(struct coord_call *call, const struct coord_reply *r)
{
	struct asked *q = CONTAINER_OF(call, struct asked, call);

	cr_assert_not(q->done, "called twice");
	q->done = true;
	q->status = r->status;
	q->succeeded = r->succeeded;
	q->revision = r->revision;
	q->lease = r->lease;
	q->ttl_s = r->ttl_s;
	q->n = r->n;
	snprintf(q->why, sizeof(q->why), "%s", r->why ? r->why : "");
	for (size_t i = 0; i < r->n; i++) {
		snprintf(q->kvs[i].key, sizeof(q->kvs[i].key), "%s", r->kvs[i].key);
		snprintf(q->kvs[i].value, sizeof(q->kvs[i].value), "%.*s", (int)r->kvs[i].bytes,
			 (const char *)r->kvs[i].value);
		q->kvs[i].created = r->kvs[i].created;
		q->kvs[i].modified = r->kvs[i].modified;
		q->kvs[i].lease = r->kvs[i].lease;
	}
}

static struct asked ask(struct coord *c, const struct coord_txn *t)
{
	struct asked q = { .call.done = on_done };

	cr_assert_eq(coord_txn(c, &q.call, t, 5000), 0);
	cr_assert_not(q.done, "called from inside");
	looprun_flag(&run, &q.done, 10);
	cr_assert_null(q.call.impl);
	return q;
}

/* Make @key be @value, if its creation is of revision @created (-1: whatever it is). */
static struct asked put(struct coord *c, const char *key, const char *value, int64_t created,
			int64_t lease)
{
	struct coord_cond cond = { .key = key, .revision = created };
	struct coord_change change = {
		.key = key, .value = value, .bytes = strlen(value), .lease = lease
	};
	struct coord_txn t = { .conds = &cond,
			       .n_conds = created >= 0,
			       .changes = &change,
			       .n_changes = 1,
			       .read = key };

	return ask(c, &t);
}

static struct asked get(struct coord *c, const char *key, bool prefix)
{
	struct coord_txn t = { .read = key, .prefix = prefix };

	return ask(c, &t);
}

static struct asked drop(struct coord *c, const char *key)
{
	struct coord_change change = { .key = key, .remove = true };
	struct coord_txn t = { .changes = &change, .n_changes = 1 };

	return ask(c, &t);
}

static struct asked grant(struct coord *c, int64_t ttl_s)
{
	struct asked q = { .call.done = on_done };

	cr_assert_eq(coord_grant(c, &q.call, ttl_s, 5000), 0);
	looprun_flag(&run, &q.done, 10);
	cr_assert_eq(q.status, COORD_OK, "%s", q.why);
	cr_assert(q.lease);
	return q;
}

static struct asked keep(struct coord *c, int64_t lease)
{
	struct asked q = { .call.done = on_done };

	cr_assert_eq(coord_keep(c, &q.call, lease, 5000), 0);
	looprun_flag(&run, &q.done, 10);
	return q;
}

static struct asked revoke_lease(struct coord *c, int64_t lease)
{
	struct asked q = { .call.done = on_done };

	cr_assert_eq(coord_revoke(c, &q.call, lease, 5000), 0);
	looprun_flag(&run, &q.done, 10);
	return q;
}

/* Both stores. */
#define TEST_BOTH(name)                \
	static void both_##name(void); \
	Test(coord_fake, name)         \
	{                              \
		both_##name();         \
	}                              \
	Test(coord_etcd, name)         \
	{                              \
		both_##name();         \
	}                              \
	static void both_##name(void)

TEST_BOTH(keys_have_revisions)
{
	struct asked q = get(a, "none", false);
	int64_t created;

	cr_assert_eq(q.status, COORD_OK, "%s", q.why);
	cr_expect_eq(q.n, 0);
	q = put(a, "x", "one", 0, 0);
	cr_assert(q.succeeded && q.n == 1);
	created = q.kvs[0].created;
	cr_expect_eq(created, q.revision);
	cr_expect_eq(q.kvs[0].modified, created);
	q = put(b, "x", "two", created, 0);
	cr_assert(q.succeeded);
	cr_expect_eq(q.kvs[0].created, created);
	cr_expect_gt(q.kvs[0].modified, created);
	cr_expect_str_eq(q.kvs[0].value, "two");
}

TEST_BOTH(a_key_that_was_removed_is_another_one)
{
	int64_t created = put(a, "x", "one", 0, 0).kvs[0].created;
	struct asked q;

	cr_assert(drop(a, "x").succeeded);
	cr_expect_eq(get(b, "x", false).n, 0);
	q = put(b, "x", "two", created, 0);
	cr_expect_not(q.succeeded);
	cr_expect_eq(q.n, 0);
	q = put(b, "x", "two", 0, 0);
	cr_assert(q.succeeded);
	cr_expect_gt(q.kvs[0].created, created);
}

TEST_BOTH(one_of_two_creates_a_key)
{
	struct coord_cond cond = { .key = "leader" };
	struct coord_change changes[] = { { .key = "leader", .value = "a", .bytes = 1 },
					  { .key = "leader", .value = "b", .bytes = 1 } };
	struct asked q[2] = { { .call.done = on_done }, { .call.done = on_done } };

	for (unsigned i = 0; i < 2; i++) {
		struct coord_txn t = { .conds = &cond,
				       .n_conds = 1,
				       .changes = &changes[i],
				       .n_changes = 1,
				       .read = "leader" };

		cr_assert_eq(coord_txn(i ? b : a, &q[i].call, &t, 5000), 0);
	}
	for (unsigned i = 0; i < 2; i++)
		looprun_flag(&run, &q[i].done, 10);
	cr_assert_neq(q[0].succeeded, q[1].succeeded);
	for (unsigned i = 0; i < 2; i++)
		cr_expect_str_eq(q[i].kvs[0].value, q[0].succeeded ? "a" : "b");
}

/* What a leader decides takes effect while it is the leader, and once. */
TEST_BOTH(decisions_are_fenced)
{
	int64_t token = put(a, "leader", "a", 0, 0).kvs[0].created;
	struct coord_cond conds[] = { { .key = "leader", .revision = token },
				      { .key = "epoch", .modified = true } };
	struct coord_change changes[] = { { .key = "epoch", .value = "1", .bytes = 1 },
					  { .key = "members", .value = "a b", .bytes = 3 } };
	struct coord_txn t = {
		.conds = conds, .n_conds = 2, .changes = changes, .n_changes = 2, .read = "epoch"
	};
	struct asked q = ask(a, &t);

	cr_assert(q.succeeded);
	cr_expect_str_eq(get(b, "members", false).kvs[0].value, "a b");
	cr_expect_not(ask(a, &t).succeeded, "the epoch is not what it was");
	conds[1].revision = q.kvs[0].modified;
	drop(b, "leader");
	put(b, "leader", "b", 0, 0);
	changes[0].value = "2";
	cr_expect_not(ask(a, &t).succeeded, "another one leads");
	cr_expect_str_eq(get(b, "epoch", false).kvs[0].value, "1");
}

TEST_BOTH(a_prefix_is_read_in_order)
{
	struct asked q;

	put(a, "m/b", "2", 0, 0);
	put(a, "m/a", "1", 0, 0);
	put(a, "n", "3", 0, 0);
	q = get(b, "m/", true);
	cr_assert_eq(q.n, 2);
	cr_expect_str_eq(q.kvs[0].key, "m/a");
	cr_expect_str_eq(q.kvs[1].key, "m/b");
	cr_expect_str_eq(q.kvs[1].value, "2");
}

TEST_BOTH(keys_go_with_their_lease)
{
	int64_t lease = grant(a, 30).lease;
	struct asked q = put(a, "m/a", "1", 0, lease);

	cr_assert(q.succeeded, "%s", q.why);
	cr_expect_eq(q.kvs[0].lease, lease);
	q = keep(a, lease);
	cr_assert_eq(q.status, COORD_OK, "%s", q.why);
	cr_expect_eq(q.ttl_s, 30);
	cr_expect_eq(revoke_lease(b, lease).status, COORD_OK);
	cr_expect_eq(get(b, "m/a", false).n, 0);
	cr_expect_eq(revoke_lease(b, lease).status, COORD_NO_LEASE);
	cr_expect_eq(keep(a, lease).status, COORD_NO_LEASE);
	q = put(a, "m/a", "1", 0, lease);
	cr_expect_eq(q.status, COORD_NO_LEASE, "%s", q.why);
}

TEST_BOTH(what_is_too_large_is_refused)
{
	struct coord_change c = { .key = "x", .bytes = COORD_MAX_BYTES };
	struct coord_txn t = { .changes = &c, .n_changes = 1 };
	struct asked q = { .call.done = on_done };
	struct coord_change many[COORD_MAX_OPS];

	cr_expect_eq(coord_txn(a, &q.call, &t, 5000), -EINVAL);
	for (unsigned i = 0; i < COORD_MAX_OPS; i++)
		many[i] = (struct coord_change){ .key = "x" };
	t = (struct coord_txn){ .changes = many, .n_changes = COORD_MAX_OPS };
	cr_expect_eq(coord_txn(a, &q.call, &t, 5000), -EINVAL);
}

/* ------------------------------------------------------------------------------ watches */

static struct watched {
	struct coord_watch w;
	unsigned n, ended, removed;
	bool two, over, compacted;
	char last[64];
	int64_t revision;
} watched;

static void on_events(struct coord_watch *w, const struct coord_event *e, size_t n,
		      int64_t revision)
{
	struct watched *x = CONTAINER_OF(w, struct watched, w);

	for (size_t i = 0; i < n; i++) {
		x->removed += e[i].removed;
		snprintf(x->last, sizeof(x->last), "%s=%.*s", e[i].kv.key, (int)e[i].kv.bytes,
			 (const char *)e[i].kv.value);
		cr_expect_leq(e[i].kv.modified, revision);
	}
	x->n += (unsigned)n;
	x->two = x->n >= 2;
	x->revision = revision;
}

static void on_ended(struct coord_watch *w, bool compacted, const char *why)
{
	struct watched *x = CONTAINER_OF(w, struct watched, w);

	cr_expect(*why);
	x->ended++;
	x->over = true;
	x->compacted = compacted;
}

static const struct coord_watch_ops watch_ops = { on_events, on_ended };

TEST_BOTH(a_watch_tells_changes_from_a_revision_on)
{
	int64_t from = put(a, "m/a", "1", 0, 0).revision;

	put(a, "n", "no", 0, 0);
	watched.w.ops = &watch_ops;
	cr_assert_eq(coord_watch_begin(b, &watched.w, "m/", from), 0);
	drop(a, "m/a");
	looprun_flag(&run, &watched.two, 10);
	cr_expect_eq(watched.n, 2);
	cr_expect_eq(watched.removed, 1);
	cr_expect_str_eq(watched.last, "m/a=");
	watched.two = false;
	put(a, "m/b", "2", 0, 0);
	looprun_flag(&run, &watched.two, 10);
	cr_expect_str_eq(watched.last, "m/b=2");
	coord_watch_end(&watched.w);
	put(a, "m/b", "3", -1, 0);
	cr_expect_eq(watched.n, 3);
	cr_expect_eq(watched.ended, 0);
}

/* ------------------------------------------------------------------------ the fake one */

Test(coord_fake, leases_grow_old)
{
	int64_t lease = grant(a, 10).lease;

	put(a, "m/a", "1", 0, lease);
	coord_fake_pass(fake, 9000);
	cr_expect_eq(keep(a, lease).status, COORD_OK);
	coord_fake_pass(fake, 9000);
	cr_expect_eq(get(b, "m/a", false).n, 1);
	coord_fake_pass(fake, 1000);
	cr_expect_eq(get(b, "m/a", false).n, 0);
}

Test(coord_fake, answers_are_lost)
{
	struct asked q[2] = { { .call.done = on_done }, { .call.done = on_done } };

	for (unsigned i = 0; i < 2; i++) {
		struct coord_change c = { .key = i ? "after" : "before", .value = "x", .bytes = 1 };
		struct coord_txn t = { .changes = &c, .n_changes = 1 };

		coord_fake_fate(a, i ? COORD_FAKE_LOST_AFTER : COORD_FAKE_LOST_BEFORE);
		cr_assert_eq(coord_txn(a, &q[i].call, &t, 5000), 0);
	}
	cr_expect_eq(get(b, "before", false).n, 0);
	cr_expect_eq(get(b, "after", false).n, 1);
	coord_fake_lose(a);
	looprun_flag(&run, &q[1].done, 10);
	cr_expect(q[0].done && q[0].status == COORD_DOUBT && q[1].status == COORD_DOUBT);
	coord_fake_fate(a, COORD_FAKE_ANSWERED);
}

Test(coord_fake, a_watch_of_compacted_changes_ends)
{
	put(a, "m/a", "1", 0, 0);
	coord_fake_compact(fake);
	watched.w.ops = &watch_ops;
	cr_assert_eq(coord_watch_begin(b, &watched.w, "m/", 1), 0);
	looprun_flag(&run, &watched.over, 10);
	cr_expect(watched.compacted);
	cr_expect_null(watched.w.impl);
}

Test(coord_fake, what_is_cancelled_is_not_told)
{
	struct coord_txn t = { .read = "x" };
	struct asked q = { .call.done = on_done };

	cr_assert_eq(coord_txn(a, &q.call, &t, 5000), 0);
	coord_cancel(&q.call);
	coord_cancel(&q.call);
	get(a, "x", false);
	cr_expect_not(q.done);
}

/* ----------------------------------------------------------------------- a followed key */

struct followed {
	struct follow f;
	unsigned told;
	char value[16]; /* "-": there is none */
	const char *until;
};

static void on_changed(struct follow *f, const struct coord_kv *kv)
{
	struct followed *w = CONTAINER_OF(f, struct followed, f);

	w->told++;
	snprintf(w->value, sizeof(w->value), "%.*s", kv ? (int)kv->bytes : 1,
		 kv ? (const char *)kv->value : "-");
}

static bool is_told(void *arg)
{
	struct followed *w = arg;

	follow_tick(&w->f, clock_now_us());
	return strcmp(w->value, w->until) == 0;
}

static void expect_told(struct followed *w, const char *value)
{
	w->until = value;
	looprun_until(&run, is_told, w, 20);
}

TEST_BOTH(a_key_that_is_followed_tells_its_changes)
{
	struct followed w = { .told = 0 };

	follow_begin(&w.f, b, "m/a", on_changed);
	expect_told(&w, "-");
	put(a, "m/a", "1", 0, 0);
	expect_told(&w, "1");
	put(a, "m/a", "2", -1, 0);
	expect_told(&w, "2");
	put(a, "m/ab", "other", 0, 0);
	drop(a, "m/a");
	expect_told(&w, "-");
	cr_expect_eq(w.told, 4);
	follow_end(&w.f);
	follow_end(&w.f);
	put(a, "m/a", "3", 0, 0);
	get(b, "m/a", false);
	cr_expect_eq(w.told, 4);
}

/* ----------------------------------------------------------------------- a real etcd */

static void compact(int64_t revision)
{
	char command[256];

	if (access("/usr/bin/etcdctl", X_OK) < 0)
		cr_skip_test("there is no etcdctl: deploy/install-deps --test");
	snprintf(command, sizeof(command),
		 "ETCDCTL_API=3 etcdctl --endpoints %s compact %lld >/dev/null", etcd.client,
		 (long long)revision);
	cr_assert_eq(system(command), 0); /* NOLINT: of this test's own text */
}

Test(coord_etcd, a_watch_of_compacted_changes_ends)
{
	put(a, "m/a", "1", 0, 0);
	compact(put(a, "m/a", "2", -1, 0).revision);
	watched.w.ops = &watch_ops;
	cr_assert_eq(coord_watch_begin(b, &watched.w, "m/", 1), 0);
	looprun_flag(&run, &watched.over, 10);
	cr_expect(watched.compacted);
}

/* What has changed without a connection, and was compacted, is read. */
Test(coord_etcd, a_key_that_is_followed_is_read_again)
{
	struct followed w = { .told = 0 };

	put(a, "m/a", "1", 0, 0);
	follow_begin(&w.f, b, "m/a", on_changed);
	expect_told(&w, "1");
	etcdfix_kill(&etcd);
	while (w.f.watch.impl)
		uv_run(&run.loop, UV_RUN_ONCE);
	etcdfix_again(&etcd);
	while (put(a, "m/a", "2", -1, 0).status != COORD_OK)
		;
	compact(put(a, "m/a", "3", -1, 0).revision);
	expect_told(&w, "3");
	put(a, "m/a", "4", -1, 0);
	expect_told(&w, "4");
	follow_end(&w.f);
}

/* A killed etcd costs the watch and what is asked meanwhile; both go on with the next one. */
Test(coord_etcd, that_is_killed_comes_back)
{
	struct coord_txn t = { .read = "x" };
	struct asked q = { .call.done = on_done };
	int64_t revision = put(a, "m/a", "1", 0, 0).revision;

	watched.w.ops = &watch_ops;
	cr_assert_eq(coord_watch_begin(b, &watched.w, "m/", revision), 0);
	put(a, "m/b", "1", 0, 0);
	looprun_flag(&run, &watched.two, 10);
	etcdfix_kill(&etcd);
	looprun_flag(&run, &watched.over, 10);
	cr_expect_not(watched.compacted);
	cr_assert_eq(coord_txn(a, &q.call, &t, 1000), 0);
	looprun_flag(&run, &q.done, 10);
	cr_expect_eq(q.status, COORD_DOUBT);
	cr_expect(*q.why);
	etcdfix_again(&etcd);
	do {
		q = (struct asked){ .call.done = on_done };
		cr_assert_eq(coord_txn(a, &q.call, &t, 5000), 0);
		looprun_flag(&run, &q.done, 10);
	} while (q.status == COORD_DOUBT);
	cr_expect_eq(get(a, "m/", true).n, 2, "nothing is lost");
	watched = (struct watched){ .w.ops = &watch_ops };
	cr_assert_eq(coord_watch_begin(b, &watched.w, "m/", revision + 1), 0);
	put(a, "m/c", "1", 0, 0);
	looprun_flag(&run, &watched.two, 10);
	cr_expect_str_eq(watched.last, "m/c=1");
	coord_watch_end(&watched.w);
}

Test(coord_etcd, that_hangs_leaves_the_outcome_in_doubt)
{
	struct coord_change c = { .key = "x", .value = "1", .bytes = 1 };
	struct coord_txn t = { .changes = &c, .n_changes = 1 };
	struct asked q = { .call.done = on_done };

	get(a, "x", false);
	stopped_stop(etcd.pid);
	cr_assert_eq(coord_txn(a, &q.call, &t, 300), 0);
	looprun_flag(&run, &q.done, 10);
	cr_expect_eq(q.status, COORD_DOUBT);
	kill(etcd.pid, SIGCONT);
	cr_expect_leq(get(a, "x", false).n, 1u);
}

Test(coord_etcd, leases_end_by_themselves)
{
	int64_t lease = grant(a, 2).lease;
	struct asked q;

	put(a, "m/a", "1", 0, lease);
	watched.w.ops = &watch_ops;
	cr_assert_eq(coord_watch_begin(b, &watched.w, "m/", 1), 0);
	looprun_flag(&run, &watched.two, 20);
	cr_expect_eq(watched.removed, 1);
	coord_watch_end(&watched.w);
	q = keep(a, lease);
	cr_expect_eq(q.status, COORD_NO_LEASE);
}

static void etcdctl(const char *what)
{
	char command[256];

	snprintf(command, sizeof(command),
		 "echo secret | ETCDCTL_API=3 timeout 10 etcdctl --endpoints=%s %s >/dev/null 2>&1",
		 etcd.client, what);
	cr_assert_eq(system(command), 0, "%s", command);
}

static struct coord *open_as(const char *password)
{
	const char *endpoints[] = { etcd.client };
	struct coord_options o = { .endpoints = endpoints,
				   .n_endpoints = 1,
				   .prefix = "/test/",
				   .user = "root",
				   .password = password };
	struct fault f = FAULT_NULL;
	struct coord *c = NULL;

	cr_assert_eq(coord_etcd_new(&run.queue, &o, &c, &f), 0, "%s", f.text);
	return c;
}

/* What is refused because a token has ended is asked again, whole. */
Test(coord_etcd, that_wants_a_password_gets_it)
{
	struct coord *root, *wrong;
	struct asked q;

	etcdctl("user add root:secret");
	etcdctl("user grant-role root root");
	etcdctl("auth enable");
	root = open_as("secret");
	cr_assert(put(root, "x", "one", 0, 0).succeeded);
	q = put(a, "x", "two", -1, 0);
	cr_expect_eq(q.status, COORD_REFUSED, "%s", q.why);
	wrong = open_as("guess");
	q = put(wrong, "x", "two", -1, 0);
	cr_expect_eq(q.status, COORD_REFUSED, "%s", q.why);
	/* this ends all tokens of the user; the password is the same */
	etcdctl("--user root:secret user passwd root --interactive=false");
	q = get(root, "x", false);
	cr_assert_eq(q.status, COORD_OK, "%s", q.why);
	cr_assert_eq(q.n, 1);
	cr_expect_str_eq(q.kvs[0].value, "one");
	root = coord_close(root);
	wrong = coord_close(wrong);
}

/* Closed with calls that were cancelled, and with answers under way. */
Test(coord_etcd, is_closed_in_the_middle)
{
	struct coord_txn t = { .read = "x" };
	struct asked q[8];
	struct coord *c;

	for (unsigned i = 0; i < 8; i++) {
		open_etcd(&c);
		for (unsigned k = 0; k < 8; k++) {
			q[k] = (struct asked){ .call.done = on_done };
			cr_assert_eq(coord_txn(c, &q[k].call, &t, 5000), 0);
		}
		watched.w.ops = &watch_ops;
		cr_assert_eq(coord_watch_begin(c, &watched.w, "m/", 1), 0);
		for (unsigned k = 0; k < i; k++)
			uv_run(&run.loop, UV_RUN_NOWAIT);
		for (unsigned k = 0; k < 8; k++)
			coord_cancel(&q[k].call);
		coord_watch_end(&watched.w);
		coord_close(c);
	}
}

Test(coord_options, that_are_wrong_are_refused)
{
	static const struct {
		const char *endpoint, *cert, *user, *text;
	} bad[] = {
		{ "host", NULL, NULL, "'host' is no endpoint of etcd: write HOST:PORT" },
		{ "host:", NULL, NULL, "is no endpoint" },
		{ ":2379", NULL, NULL, "is no endpoint" },
		{ "host:99999", NULL, NULL, "is no endpoint" },
		{ "host:2379x", NULL, NULL, "is no endpoint" },
		{ "host:2379", "PEM", NULL, "needs TLS: set the CA, too" },
		{ "host:2379", NULL, "me", "the password go together" },
	};

	looprun_init(&run);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		struct coord_options o = { .endpoints = &bad[i].endpoint,
					   .n_endpoints = 1,
					   .prefix = "/",
					   .cert = bad[i].cert,
					   .user = bad[i].user };
		struct fault f = FAULT_NULL;
		struct coord *c = NULL;

		cr_expect_eq(coord_etcd_new(&run.queue, &o, &c, &f), FAULT_INVALID);
		cr_expect(strstr(f.text, bad[i].text), "%s", f.text);
	}
	looprun_deinit(&run);
}
