/* Where members of communicators meet: threads ask, the loop tells the leader and gets the answers. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cluster/rendezvous.h"

static struct {
	uv_loop_t loop;
	struct loopq q;
	struct rendezvous *r;
	char told[256]; /* "set KEY=VALUE;get KEY;" */
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

static const struct rendezvous_ops ops = { .set = on_set, .get = on_get };

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
