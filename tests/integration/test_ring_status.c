/* What is said of the rings of sessions: what went over them, and whose memory they are. */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <time.h>

#include "core/check.h"
#include "ring_abi.h"
#include "trainfix.h"

enum { NOPS = 300 };

struct steps {
	atomic_uint there; /* trainers with a ring that has been used */
	atomic_bool over;
};

static void nap(void)
{
	struct timespec ts = { .tv_nsec = 2 * 1000000 };

	nanosleep(&ts, NULL);
}

static int nop_trainer(const struct trainer *t)
{
	struct steps *s = t->arg;
	shardd_client *c = train_connect(t);

	for (unsigned i = 0; i < NOPS * (t->rank + 1); i++)
		TRAIN_OK(shardd_nop(c, &train_err));
	atomic_fetch_add(&s->there, 1);
	while (!atomic_load(&s->over))
		nap();
	shardd_close(c);
	return 0;
}

static json_int_t number(json_t *o, const char *key)
{
	json_t *n = json_object_get(o, key);

	cr_assert(json_is_integer(n), "%s", key);
	return json_integer_value(n);
}

static json_int_t ring_bytes(void)
{
	static const char *const args[] = { "memory", NULL };
	json_t *memory = daemonfix_ctl(&trainfix, args);
	json_int_t bytes = number(memory, "ring_bytes");

	json_decref(memory);
	return bytes;
}

/* Return: the bytes of all rings. */
static json_int_t check_rings(void)
{
	static const char *const args[] = { "sessions", NULL };
	json_t *all = daemonfix_ctl(&trainfix, args), *session;
	json_int_t bytes = 0, submitted = 0;
	size_t i;

	json_array_foreach(json_object_get(all, "sessions"), i, session)
	{
		json_t *ring = json_object_get(session, "ring");
		json_int_t n = number(ring, "submissions");

		cr_expect(n == NOPS || n == 2 * NOPS, "%lld", (long long)n);
		cr_expect_eq(number(ring, "completions"), n);
		cr_expect_leq(number(ring, "wakes"), n);
		cr_expect_geq(number(ring, "woken"), 1, "the daemon slept at the beginning");
		cr_expect_leq(number(ring, "woken"), n);
		cr_expect_eq(number(ring, "full"), 0);
		cr_expect_gt(number(ring, "bytes"), RING_MIN_ENTRIES * 2 * RING_LONG_BYTES);
		bytes += number(ring, "bytes");
		submitted += n;
	}
	json_decref(all);
	cr_expect_eq(submitted, 3 * NOPS);
	return bytes;
}

Test(ring_status, counts_and_memory_of_each_ring, .timeout = 60, .init = trainfix_begin,
     .fini = trainfix_end)
{
	struct steps *s = trainer_shared(sizeof(*s));
	const char *text[] = { "sessions", NULL };
	char out[4096];
	pid_t pids[2];

	cr_expect_eq(ring_bytes(), 0);
	for (uint32_t i = 0; i < 2; i++)
		pids[i] = trainer_start(&trainfix, "test", i, 2, nop_trainer, s);
	while (atomic_load(&s->there) < 2)
		nap();
	cr_expect_eq(check_rings(), ring_bytes());
	cr_assert_eq(daemonfix_ctl_text(&trainfix, text, out, sizeof(out)), 0);
	cr_expect(strstr(out, "RING OF") && strstr(out, "300") && strstr(out, "600"), "%s", out);
	atomic_store(&s->over, true);
	for (unsigned i = 0; i < 2; i++)
		cr_assert_eq(trainer_wait(pids[i], 30), 0);
	while (ring_bytes()) /* or the time is up */
		nap();
}
