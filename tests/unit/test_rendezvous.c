/* Where members of communicators meet: threads ask, the loop tells the leader and gets the answers. */
#include <criterion/criterion.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cluster/rendezvous.h"

static struct {
	uv_loop_t loop;
	struct loopq q;
	struct rendezvous *r;
	char told[256]; /* "set KEY=VALUE;get KEY;give KEY 0 of 2=VALUE;" */
} fix;

static void on_set(void *userdata, const char *key, const void *value, size_t bytes)
{
	size_t n = strlen(fix.told);

	(void)userdata;
	snprintf(fix.told + n, sizeof(fix.told) - n, "set %s=%.*s;", key, (int)bytes,
		 (const char *)value);
}

static void on_get(void *userdata, const char *key)
{
	size_t n = strlen(fix.told);

	(void)userdata;
	snprintf(fix.told + n, sizeof(fix.told) - n, "get %s;", key);
}

static void on_give(void *userdata, const struct rendezvous_gift *g)
{
	size_t n = strlen(fix.told);

	(void)userdata;
	snprintf(fix.told + n, sizeof(fix.told) - n, "give %s %u of %u=%.*s;", g->key, g->member,
		 g->size, (int)g->bytes, (const char *)g->value);
}

static const struct rendezvous_ops ops = { .set = on_set, .get = on_get, .give = on_give };

static void setup(void)
{
	cr_assert_eq(uv_loop_init(&fix.loop), 0);
	cr_assert_eq(loopq_init(&fix.q, &fix.loop), 0);
	cr_assert_eq(rendezvous_new(&fix.q, &ops, NULL, &fix.r), 0);
}

static void teardown(void)
{
	loopq_drain(&fix.q);
	fix.r = rendezvous_free(fix.r);
	loopq_close(&fix.q);
	uv_run(&fix.loop, UV_RUN_DEFAULT);
	cr_assert_eq(uv_loop_close(&fix.loop), 0);
}

TestSuite(rendezvous, .init = setup, .fini = teardown);

static const char *find(const char *key)
{
	static char text[64];
	size_t n;
	const void *value = rendezvous_find(fix.r, key, &n);

	if (!value)
		return "-";
	snprintf(text, sizeof(text), "%.*s", (int)n, (const char *)value);
	return text;
}

Test(rendezvous, what_a_thread_sets_is_told_once)
{
	const struct comm_store s = rendezvous_store(fix.r);
	char value[8];

	cr_assert_eq(s.set(s.userdata, "0/j/1/a", "x", 1), 0);
	loopq_drain(&fix.q);
	loopq_drain(&fix.q);
	cr_assert_str_eq(fix.told, "set 0/j/1/a=x;");
	cr_assert_eq(s.get(s.userdata, "0/j/1/a", 0, value, sizeof(value)), 1);
	cr_assert_eq(*value, 'x');
}

Test(rendezvous, a_key_that_is_not_there_is_asked_for_once)
{
	const struct comm_store s = rendezvous_store(fix.r);
	char value[8];

	cr_assert_eq(s.get(s.userdata, "0/j/1/b", 1, value, sizeof(value)), -ETIMEDOUT);
	cr_assert_eq(s.get(s.userdata, "0/j/1/b", 1, value, sizeof(value)), -ETIMEDOUT);
	loopq_drain(&fix.q);
	cr_assert_str_eq(fix.told, "get 0/j/1/b;");
	cr_assert_eq(rendezvous_put(fix.r, "0/j/1/b", "12", 2), 0);
	cr_assert_eq(s.get(s.userdata, "0/j/1/b", 1, value, sizeof(value)), 2);
	cr_assert_eq(s.get(s.userdata, "0/j/1/b", 1, value, 1), -EMSGSIZE);
}

/* Of a node that sends a key again, or that of another one. */
Test(rendezvous, the_first_value_of_a_key_stays)
{
	const struct comm_store s = rendezvous_store(fix.r);

	cr_assert_eq(rendezvous_put(fix.r, "0/j/1/c", "first", 5), 0);
	cr_assert_eq(rendezvous_put(fix.r, "0/j/1/c", "2nd", 3), 0);
	cr_assert_eq(s.set(s.userdata, "0/j/1/c", "3rd", 3), 0);
	cr_assert_str_eq(find("0/j/1/c"), "first");
}

Test(rendezvous, a_key_that_is_too_long_is_refused)
{
	char key[RENDEZVOUS_KEY_BYTES + 1] = "";

	memset(key, 'k', RENDEZVOUS_KEY_BYTES);
	cr_assert_eq(rendezvous_put(fix.r, key, "x", 1), -ENOMEM);
	cr_assert_str_eq(find(key), "-");
	key[RENDEZVOUS_KEY_BYTES - 1] = 0;
	cr_assert_eq(rendezvous_put(fix.r, key, "x", 1), 0);
}

/* "1 2 " */
static const char *waiters(const char *key)
{
	static char text[64];
	unsigned node;
	size_t n = 0;

	*text = 0;
	while (rendezvous_next_waiter(fix.r, key, &node))
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%u ", node);
	return text;
}

Test(rendezvous, nodes_that_wait_for_a_key_are_told_once)
{
	cr_assert_not(rendezvous_is_known(fix.r, "0/j/1/e"));
	cr_assert_str_eq(waiters("0/j/1/e"), "");
	cr_assert_eq(rendezvous_await(fix.r, "0/j/1/e", 7), 0);
	cr_assert_eq(rendezvous_await(fix.r, "0/j/1/e", 2), 0);
	cr_assert_eq(rendezvous_await(fix.r, "0/j/1/f", 3), 0);
	cr_assert(rendezvous_is_known(fix.r, "0/j/1/e"));
	cr_assert_str_eq(find("0/j/1/e"), "-");
	cr_assert_eq(rendezvous_put(fix.r, "0/j/1/e", "x", 1), 0);
	cr_assert_str_eq(waiters("0/j/1/e"), "7 2 ");
	cr_assert_str_eq(waiters("0/j/1/e"), "");
	rendezvous_drop(fix.r, "0/j/1/");
	cr_assert_str_eq(waiters("0/j/1/f"), "");
	cr_assert_eq(rendezvous_await(fix.r, "0/j/1/f", 3), -ECANCELED);
	cr_assert_not(rendezvous_is_known(fix.r, "0/j/1/f"));
}

static void *wait_for_d(void *arg)
{
	const struct comm_store s = rendezvous_store(fix.r);
	char value[8];

	*(long *)arg = s.get(s.userdata, "0/j/1/d", 60000, value, sizeof(value));
	return NULL;
}

Test(rendezvous, the_end_of_an_epoch_ends_waits_and_drops_its_keys, .timeout = 20)
{
	const struct comm_store s = rendezvous_store(fix.r);
	pthread_t thread;
	long got = 0;

	cr_assert_eq(rendezvous_put(fix.r, "0/j/1/a", "x", 1), 0);
	cr_assert_eq(rendezvous_put(fix.r, "0/j/2/a", "y", 1), 0);
	cr_assert_eq(pthread_create(&thread, NULL, wait_for_d, &got), 0);
	while (!*fix.told) /* it waits */
		uv_run(&fix.loop, UV_RUN_ONCE);
	rendezvous_drop(fix.r, "0/j/1/");
	pthread_join(thread, NULL);
	cr_assert_eq(got, -ECANCELED);
	cr_assert_str_eq(find("0/j/1/a"), "-");
	cr_assert_str_eq(find("0/j/2/a"), "y");
	cr_assert_eq(s.set(s.userdata, "0/j/1/late", "x", 1), -ECANCELED);
}

/* ------------------------------------------------------------------------ exchanges */

/* Values of two bytes. */
static int exchange(const char *key, unsigned member, unsigned size, const char *value, bool late,
		    unsigned ms, struct comm_exchange *ret, char *all)
{
	const struct comm_store s = rendezvous_store(fix.r);

	*ret = (struct comm_exchange){ .key = key,
				       .size = size,
				       .member = member,
				       .bytes = 2,
				       .value = value,
				       .all = all,
				       .late = late };
	return s.exchange(s.userdata, ret, ms);
}

static int give(const char *key, unsigned member, unsigned size, const char *value, unsigned node)
{
	const struct rendezvous_gift g = { key, size, member, value, strlen(value) };

	return rendezvous_give(fix.r, &g, node);
}

/* At the leader: values of other nodes and of its own, in any order. */
Test(rendezvous, an_exchange_is_over_when_all_have_given)
{
	struct comm_exchange x;
	struct rendezvous_all all;
	char got[8] = "";

	cr_assert_not(rendezvous_see(fix.r, "0/j/1/g", &all));
	cr_assert_eq(give("0/j/1/g", 2, 3, "cc", 5), 0);
	cr_assert(rendezvous_is_known(fix.r, "0/j/1/g"));
	cr_assert_eq(exchange("0/j/1/g", 1, 3, "bb", false, 1, &x, got), -ETIMEDOUT);
	cr_assert_eq(x.missing, -1);
	loopq_drain(&fix.q);
	cr_assert_str_eq(fix.told, "give 0/j/1/g 1 of 3=bb;");
	cr_assert(rendezvous_see(fix.r, "0/j/1/g", &all));
	cr_assert(all.size == 3 && all.n == 2 && all.bytes == 2 && all.missing == 0);
	cr_assert_not(rendezvous_finish(fix.r, "0/j/1/g"));
	cr_assert_eq(give("0/j/1/g", 0, 3, "aa", 7), 0);
	cr_assert(rendezvous_finish(fix.r, "0/j/1/g"));
	cr_assert_not(rendezvous_finish(fix.r, "0/j/1/g"));
	cr_assert(rendezvous_see(fix.r, "0/j/1/g", &all));
	cr_assert(all.n == 3 && all.missing == 3 && memcmp(all.values, "aabbcc", 6) == 0);
	cr_assert_eq(rendezvous_from(fix.r, "0/j/1/g", 0), 7);
	cr_assert_eq(rendezvous_from(fix.r, "0/j/1/g", 1), UINT_MAX);
	cr_assert_eq(rendezvous_from(fix.r, "0/j/1/g", 2), 5);
	cr_assert_eq(exchange("0/j/1/g", 1, 3, "bb", false, 0, &x, got), 0);
	cr_assert_str_eq(got, "aabbcc");
	loopq_drain(&fix.q);
	cr_assert_str_eq(fix.told, "give 0/j/1/g 1 of 3=bb;"); /* it was told once */
}

static struct {
	int result;
	char got[8];
} follower;

static void *exchange_h(void *arg)
{
	struct comm_exchange x;

	(void)arg;
	follower.result = exchange("0/j/1/h", 0, 3, "aa", false, 60000, &x, follower.got);
	return NULL;
}

/* Begin a thread that is member 0 of three, and wait until the leader is told. */
static pthread_t begin_h(void)
{
	pthread_t thread;

	memset(&follower, 0, sizeof(follower));
	cr_assert_eq(pthread_create(&thread, NULL, exchange_h, NULL), 0);
	while (!*fix.told)
		uv_run(&fix.loop, UV_RUN_ONCE);
	cr_assert_str_eq(fix.told, "give 0/j/1/h 0 of 3=aa;");
	return thread;
}

/* Elsewhere: all come from the leader, perhaps in parts. */
Test(rendezvous, an_exchange_ends_with_what_the_leader_sends, .timeout = 20)
{
	pthread_t thread = begin_h();

	cr_assert_eq(rendezvous_take(fix.r, "0/j/1/h", 3, 0, "aabb", 4), 0);
	cr_assert_eq(rendezvous_take(fix.r, "0/j/1/h", 3, 2, "cc", 2), 0);
	pthread_join(thread, NULL);
	cr_assert_eq(follower.result, 0);
	cr_assert_str_eq(follower.got, "aabbcc");
	/* of an exchange that nobody here takes part in */
	cr_assert_eq(rendezvous_take(fix.r, "0/j/1/i", 3, 0, "aabb", 4), 0);
	cr_assert_not(rendezvous_is_known(fix.r, "0/j/1/i"));
}

Test(rendezvous, the_end_of_an_epoch_ends_an_exchange, .timeout = 20)
{
	pthread_t thread = begin_h();
	struct comm_exchange x;
	char got[8];

	cr_assert_eq(give("0/j/2/h", 1, 3, "bb", 1), 0);
	rendezvous_drop(fix.r, "0/j/1/");
	pthread_join(thread, NULL);
	cr_assert_eq(follower.result, -ECANCELED);
	cr_assert_not(rendezvous_is_known(fix.r, "0/j/1/h"));
	cr_assert(rendezvous_is_known(fix.r, "0/j/2/h"));
	cr_assert_eq(exchange("0/j/1/late", 0, 3, "aa", false, 0, &x, got), -ECANCELED);
	cr_assert_eq(give("0/j/1/late", 1, 3, "bb", 1), -ECANCELED);
	cr_assert_not(rendezvous_is_known(fix.r, "0/j/1/late"));
}

Test(rendezvous, what_contradicts_an_exchange_is_refused)
{
	static char large[RENDEZVOUS_VALUE_BYTES + 2], key[RENDEZVOUS_KEY_BYTES + 1];
	struct comm_exchange x;
	struct rendezvous_all all;
	char got[8];

	cr_assert_eq(give("0/j/1/k", 1, 3, "bb", 4), 0);
	cr_assert_eq(give("0/j/1/k", 1, 3, "bb", 4), RENDEZVOUS_E_KNOWN);
	cr_assert_eq(give("0/j/1/k", 1, 3, "bc", 4), RENDEZVOUS_E_WRONG); /* another value */
	cr_assert_eq(give("0/j/1/k", 2, 4, "cc", 4), RENDEZVOUS_E_WRONG); /* another size */
	cr_assert_eq(give("0/j/1/k", 2, 3, "ccc", 4), RENDEZVOUS_E_WRONG);
	cr_assert_eq(give("0/j/1/k", 3, 3, "dd", 4), RENDEZVOUS_E_WRONG); /* no such member */
	cr_assert_eq(give("0/j/1/l", 0, 3, "", 4), RENDEZVOUS_E_WRONG);
	cr_assert_eq(give("0/j/1/l", 0, 0, "aa", 4), RENDEZVOUS_E_WRONG);
	cr_assert_eq(give("0/j/1/l", 0, RENDEZVOUS_MEMBERS + 1, "aa", 4), RENDEZVOUS_E_WRONG);
	memset(large, 'x', RENDEZVOUS_VALUE_BYTES + 1);
	cr_assert_eq(give("0/j/1/l", 0, 3, large, 4), RENDEZVOUS_E_WRONG);
	memset(key, 'k', RENDEZVOUS_KEY_BYTES);
	cr_assert_eq(give(key, 0, 3, "aa", 4), -ENOMEM);
	cr_assert_not(rendezvous_is_known(fix.r, "0/j/1/l"));
	/* a thread here that differs */
	cr_assert_eq(exchange("0/j/1/k", 1, 3, "xx", false, 0, &x, got), -EEXIST);
	cr_assert_eq(exchange("0/j/1/k", 1, 2, "bb", false, 0, &x, got), -EPROTO);
	/* what a leader sends */
	cr_assert_eq(rendezvous_take(fix.r, "0/j/1/k", 4, 0, "aa", 2), RENDEZVOUS_E_WRONG);
	cr_assert_eq(rendezvous_take(fix.r, "0/j/1/k", 3, 0, "a", 1), RENDEZVOUS_E_WRONG);
	cr_assert_eq(rendezvous_take(fix.r, "0/j/1/k", 3, 0, "aabc", 4), RENDEZVOUS_E_WRONG);
	cr_assert_eq(give("0/j/1/n", 2, 3, "cc", 4), 0);
	cr_assert_eq(rendezvous_take(fix.r, "0/j/1/n", 3, 2, "ccdd", 4), RENDEZVOUS_E_WRONG);
	cr_assert_eq(rendezvous_take(fix.r, "0/j/1/k", 3, 3, "", 0), RENDEZVOUS_E_WRONG);
	cr_assert(rendezvous_see(fix.r, "0/j/1/k", &all));
	cr_assert(all.size == 3 && memcmp(all.values + 2, "bb", 2) == 0);
}

/* The last call asks the leader again: what it has said before may be over. */
Test(rendezvous, a_late_exchange_asks_who_is_missing)
{
	struct comm_exchange x;
	char got[8];

	cr_assert_eq(exchange("0/j/1/m", 0, 3, "aa", false, 0, &x, got), -ETIMEDOUT);
	loopq_drain(&fix.q);
	cr_assert_eq(rendezvous_take(fix.r, "0/j/1/m", 3, 1, NULL, 0), 0);
	cr_assert_eq(exchange("0/j/1/m", 0, 3, "aa", true, 1, &x, got), -ETIMEDOUT);
	cr_assert_eq(x.missing, -1);
	loopq_drain(&fix.q);
	cr_assert_str_eq(fix.told, "give 0/j/1/m 0 of 3=aa;give 0/j/1/m 0 of 3=aa;");
	cr_assert_eq(rendezvous_take(fix.r, "0/j/1/m", 3, 2, NULL, 0), 0);
	cr_assert_eq(exchange("0/j/1/m", 0, 3, "aa", true, 1000, &x, got), -ETIMEDOUT);
	cr_assert_eq(x.missing, 2);
}
