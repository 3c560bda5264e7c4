/* Files of a part from another node, which has no place for a fetch at first. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "bulkfix.h"
#include "cluster/cluster_impl.h"
#include "core/clock.h"
#include "nodefix.h"
#include "peer/bulk_impl.h"

#define BYTES 5000u

/* Node b has the files of the part. */
struct owner {
	int fds[_REPLICA_FILES];
	unsigned refuses, asked, opens, closes; /* it refuses so many; it was asked for so many */
	const char *only;                       /* it refuses this file alone; NULL: both */
	uint64_t bytes;                         /* of tensors */
};

static int owner_open(void *userdata, const char *node, const char *key, struct bulk_source *ret,
		      struct fault *f)
{
	struct owner *o = userdata;

	(void)node;
	if ((!o->only || strstr(key, o->only)) && o->asked++ < o->refuses)
		return fault_set(f, FAULT_EXHAUSTED, NULL, "no place");
	ret->fd = o->fds[strstr(key, "/tail") ? REPLICA_TAIL : REPLICA_TENSORS];
	ret->size = strstr(key, "/tail") ? BYTES : o->bytes;
	o->opens++;
	return 0;
}

static bool owner_keeps(void *userdata, const struct bulk_source *source)
{
	(void)userdata;
	(void)source;
	return true;
}

static void owner_close(void *userdata, struct bulk_source *source)
{
	struct owner *o = userdata;

	(void)source;
	o->closes++;
}

static struct nodefix n; /* of the job */
static struct cluster c;
static struct owner owner;
static struct peerfix_node *a, *b;
static struct replica *replica;
static struct cluster_copy *copy;

static struct {
	unsigned done;
	uint64_t bytes;
	struct fault f;
} got;

static void on_copied(void *userdata, uint64_t bytes, const struct fault *f)
{
	(void)userdata;
	got.done++;
	got.bytes = bytes;
	got.f = f ? *f : FAULT_NULL;
	copy = NULL;
}

static void begin(void)
{
	static const struct bulk_ops ops = { .open = owner_open,
					     .keeps = owner_keeps,
					     .close = owner_close };
	const struct replica_id id = { 3, 77, 0, 2 };
	struct fault f = FAULT_NULL;

	peerfix_begin();
	nodefix_begin(&n, NULL);
	a = peerfix_node("a", NULL);
	b = peerfix_node("b", NULL);
	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		owner.fds[i] = bulkfix_file(BYTES, true);
	owner.bytes = BYTES;
	bulk_serve(b->ps, &ops, &owner);
	c.peers = a->ps;
	c.loopq = &peerfix.run.queue;
	list_init(&c.copies);
	cr_assert_eq(replica_new(nodefix_job(&n, "job", 1, 0), &id, BYTES, &replica, &f), 0);
}

static bool closed_all(void *arg)
{
	(void)arg;
	return owner.opens == owner.closes;
}

static void end(void)
{
	cr_expect(list_empty(&c.copies));
	looprun_until(&peerfix.run, closed_all, NULL, 30);
	replica_drop(replica);
	nodefix_end(&n);
	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		close(owner.fds[i]);
	peerfix_end();
}

TestSuite(cluster_copy, .init = begin, .fini = end, .timeout = 60);

static void ask(void)
{
	const struct cluster_copy_want want = { .replica = replica,
						.label = "0/job",
						.node = "b",
						.at = b->at,
						.bytes = { owner.bytes, BYTES } };
	struct fault f = FAULT_NULL;

	cr_assert_eq(cluster_copy_begin(&c, &want, on_copied, NULL, &copy, &f), 0, "%s", f.text);
}

/* Time goes by as fast as fetches are refused. */
static bool is_over(void *arg)
{
	(void)arg;
	cluster_copies_tick(&c, clock_now_us() + CLUSTER_PAUSE_US);
	return got.done;
}

static bool all_refused(void *arg)
{
	(void)arg;
	return owner.asked == owner.refuses;
}

/* The round, or all that the nodes had done to restore a job, failed. */
Test(cluster_copy, it_waits_for_a_place)
{
	owner.refuses = 5;
	ask();
	looprun_until(&peerfix.run, is_over, NULL, 30);
	cr_expect_eq(got.f.code, 0, "%s", got.f.text);
	cr_expect_eq(got.bytes, 2 * BYTES);
	cr_expect_geq(owner.asked, 7);
	for (unsigned i = 0; i < _REPLICA_FILES; i++)
		cr_expect(bulkfix_same(owner.fds[i], replica->fds[i], BYTES));
}

Test(cluster_copy, it_does_not_wait_for_ever)
{
	owner.refuses = 2;
	ask();
	looprun_until(&peerfix.run, all_refused, NULL, 30);
	peerfix_turn(200);
	cr_expect_eq(got.done, 0);
	owner.refuses = UINT32_MAX;
	clock_fake(clock_now_us() + CLUSTER_COPY_IDLE_US);
	looprun_until(&peerfix.run, is_over, NULL, 30);
	clock_real();
	cr_expect_eq(got.f.code, FAULT_UNAVAILABLE, "%s", got.f.text);
	cr_expect(strstr(got.f.text, "no place"), "%s", got.f.text);
}

static bool asked_again(void *arg)
{
	(void)arg;
	cluster_copies_tick(&c, clock_now_us() + CLUSTER_PAUSE_US);
	return got.done || owner.asked;
}

static bool has_one_fetch(void *arg)
{
	(void)arg;
	return got.done || a->ps->bulk->n_fetches == 1;
}

static bool has_moved(void *arg)
{
	const uint64_t *bytes = arg;

	return got.done || cluster_copy_bytes(copy) > *bytes;
}

/* It was given up while its tensors came, a minute after there was no place for its tail. */
Test(cluster_copy, it_waits_for_as_long_as_bytes_come)
{
	int null = open("/dev/null", O_WRONLY | O_CLOEXEC);

	cr_assert_eq(dup3(null, replica->fds[REPLICA_TENSORS], O_CLOEXEC),
		     replica->fds[REPLICA_TENSORS]);
	close(null);
	owner.bytes = BULKFIX_ENDLESS;
	cr_assert_eq(ftruncate(owner.fds[REPLICA_TENSORS], BULKFIX_ENDLESS), 0);
	owner.refuses = UINT32_MAX;
	owner.only = "/tail";
	ask();
	for (unsigned i = 0; i < 3; i++) {
		uint64_t bytes;

		looprun_until(&peerfix.run, asked_again, NULL, 30);
		looprun_until(&peerfix.run, has_one_fetch, NULL, 30);
		cr_assert_eq(got.done, 0, "%s", got.f.text);
		peerfix.held = true; /* the fetch is not to see that it was silent for so long */
		bytes = cluster_copy_bytes(copy);
		owner.asked = 0;
		clock_fake(clock_now_us() + CLUSTER_COPY_IDLE_US);
		looprun_until(&peerfix.run, has_moved, &bytes, 30);
	}
	clock_real();
	cluster_copy_cancel(copy);
	looprun_until(&peerfix.run, is_over, NULL, 30);
	cr_expect_eq(got.f.code, FAULT_CANCELLED, "%s", got.f.text);
}

/* It was taken for a lack of places: the fetch was repeated for a minute, and then so was the restore. */
Test(cluster_copy, a_shortage_of_memory_ends_it)
{
	int full = open("/dev/full", O_WRONLY | O_CLOEXEC);

	cr_assert_eq(dup3(full, replica->fds[REPLICA_TENSORS], O_CLOEXEC),
		     replica->fds[REPLICA_TENSORS]);
	close(full);
	ask();
	looprun_until(&peerfix.run, is_over, NULL, 30);
	cr_expect_eq(got.f.code, FAULT_EXHAUSTED, "%s", got.f.text);
	cr_expect_eq(got.f.native, ENOSPC);
	cr_expect(strstr(got.f.text, "writing what came: No space left"), "%s", got.f.text);
	cr_expect_leq(owner.asked, 2, "it was asked for %u times", owner.asked);
}

/* What waits has no fetch that could end. */
Test(cluster_copy, it_is_cancelled_while_it_waits)
{
	owner.refuses = 2;
	ask();
	looprun_until(&peerfix.run, all_refused, NULL, 30);
	peerfix_turn(200);
	cr_expect_eq(got.done, 0);
	cluster_copy_cancel(copy);
	cluster_copy_cancel(copy);
	cr_expect_eq(got.done, 0, "called from inside");
	peerfix_turn(1);
	cr_expect_eq(got.done, 1);
	cr_expect_eq(got.f.code, FAULT_CANCELLED, "%s", got.f.text);
}
