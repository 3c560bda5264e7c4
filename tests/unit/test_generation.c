/* Generations: what is read is what was there when one was opened, whether it is copied before a change,
 * ahead of it, or not at all; and copies go when other memory is needed. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "fdcheck.h"
#include "job/generation.h"
#include "nodefix.h"

#define BYTES (9u << 20) /* three blocks */
#define HALF  (BYTES / 2)

static struct nodefix n;
static struct job *job;
static struct generation *g;
static unsigned char *at, *copy;
static unsigned changes;

static void on_changed(struct job *j)
{
	(void)j;
	changes++;
}

static unsigned char byte_of(size_t i)
{
	return (unsigned char)(i * 2654435761u >> 13);
}

static void begin(void)
{
	uint64_t from;

	fdcheck_begin();
	nodefix_begin(&n, NULL);
	job = nodefix_job(&n, "job", 1, 0);
	at = malloc(BYTES);
	copy = malloc(BYTES);
	for (size_t i = 0; i < BYTES; i++)
		at[i] = byte_of(i);
	g = generation_new(job, n.node.loopq, on_changed);
	cr_assert(g);
	cr_assert_eq(generation_add(g, at, HALF, &from), 0);
	cr_assert_eq(generation_add(g, at + HALF, BYTES - HALF, &from), 0);
	cr_assert_eq(from, HALF);
	cr_assert_eq(generation_open(g), 0);
	changes = 0;
}

static void end(void)
{
	if (g)
		generation_end(g);
	nodefix_turns(&n);
	cr_expect_eq(job->quota.by_class[MEM_CONTROL], 0);
	free(at);
	free(copy);
	nodefix_end(&n);
	fdcheck_end();
}

TestSuite(generation, .init = begin, .fini = end, .timeout = 60);

static int read_from(size_t from)
{
	return generation_read(g, from, copy + from, BYTES - from);
}

static void expect_as_opened(void)
{
	for (size_t i = 0; i < BYTES; i++)
		cr_assert_eq(copy[i], byte_of(i), "byte %zu", i);
}

/* Change all of it, as a step does. */
static void change(void)
{
	while (generation_let(job) == RES_WAIT) /* a thread may be in a block */
		nodefix_turns(&n);
	memset(at, 0xee, BYTES);
}

/* An op of the job has ended: then its trainers compute. */
static void copies_ahead(void)
{
	job->ops.total++;
	generation_tick(job);
	nodefix_turns(&n);
}

static uint64_t control(void)
{
	return job->quota.by_class[MEM_CONTROL];
}

Test(generation, without_changes_it_is_read_in_place)
{
	cr_assert_eq(read_from(0), 0);
	expect_as_opened();
	cr_expect_eq(generation_copied(g), 0);
}

Test(generation, what_is_not_read_is_copied_before_a_change)
{
	cr_assert_eq(generation_read(g, 0, copy, 5u << 20), 0);
	change();
	cr_expect_eq(changes, 1);
	cr_expect_eq(generation_copied(g), BYTES - (4u << 20), "the first block was read");
	cr_assert_eq(read_from(5u << 20), 0);
	expect_as_opened();
}

Test(generation, a_job_that_stands_still_is_not_copied)
{
	generation_tick(job);
	nodefix_turns(&n);
	cr_expect_eq(control(), 0);
	copies_ahead();
	cr_expect_eq(generation_copied(g), BYTES);
	change();
	cr_expect_eq(generation_copied(g), BYTES, "all of it was there");
	cr_assert_eq(read_from(0), 0);
	expect_as_opened();
	generation_tick(job);
	cr_expect_eq(control(), 0, "what was read is given back");
}

Test(generation, copies_made_ahead_go_when_other_memory_is_needed)
{
	copies_ahead();
	cr_assert_geq(control(), BYTES);
	cr_expect_eq(generation_evict(job, true), 0, "it need not be lost");
	cr_expect_geq(generation_evict(job, false), BYTES);
	cr_expect_eq(control(), 0);
	copies_ahead();
	cr_expect_eq(control(), 0, "they are not made again");
	change();
	cr_assert_eq(read_from(0), 0);
	expect_as_opened();
	cr_expect_not(generation_is_lost(g));
}

Test(generation, it_is_lost_for_memory_that_training_needs)
{
	change();
	cr_expect_eq(generation_evict(job, false), 0, "they cannot be made again");
	cr_assert_eq(generation_read(g, 0, copy, 100), 0);
	cr_expect_geq(generation_evict(job, true), BYTES);
	cr_expect(generation_is_lost(g));
	cr_expect_eq(control(), 0);
	cr_expect_eq(read_from(100), -ENOMEM);
}

Test(generation, an_op_gets_the_memory_of_copies)
{
	struct region r = REGION_NULL;

	copies_ahead();
	job->quota.limit = job->quota.used + 1000;
	cr_assert_eq(job_take(job, &job->mem.full[0], 8u << 20, &r), 0);
	pool_give(&job->mem.full[0], &r);
	cr_expect_eq(control(), 0);
	cr_assert_eq(read_from(0), 0);
	expect_as_opened();
}

Test(generation, without_memory_for_copies_it_is_lost)
{
	job->quota.limit = 1;
	copies_ahead();
	cr_expect_eq(control(), 0);
	cr_expect_not(generation_is_lost(g));
	change();
	cr_expect(generation_is_lost(g));
	cr_expect_eq(read_from(0), -ENOMEM);
}

static atomic_size_t read_bytes;

static void *reads(void *arg)
{
	int *ret = arg;

	for (size_t k = 0; *ret == 0 && k < BYTES; k += 1024) {
		*ret = generation_read(g, k, copy + k, 1024);
		atomic_store(&read_bytes, k);
	}
	return NULL;
}

/* At whatever byte the thread is that reads. */
Test(generation, copies_go_while_they_are_read)
{
	for (unsigned i = 0; i < 8; i++) {
		pthread_t thread;
		uint64_t from;
		int r = 0;

		copies_ahead();
		atomic_store(&read_bytes, 0);
		cr_assert_eq(pthread_create(&thread, NULL, reads, &r), 0);
		while (atomic_load(&read_bytes) < BYTES / 9 * i)
			;
		(void)generation_evict(job, false);
		change();
		cr_assert_eq(pthread_join(thread, NULL), 0);
		cr_assert_eq(r, 0);
		expect_as_opened();
		generation_end(g);
		nodefix_turns(&n);
		for (size_t k = 0; k < BYTES; k++)
			at[k] = byte_of(k);
		g = generation_new(job, n.node.loopq, on_changed);
		cr_assert_eq(generation_add(g, at, BYTES, &from), 0);
		cr_assert_eq(generation_open(g), 0);
	}
}

/* A writer that comes while a block is copied ahead waits for that one, and for the others. */
Test(generation, a_writer_waits_for_the_block_that_is_copied_ahead)
{
	backend_fake_hold(n.node.devices[0].backend, true);
	job->ops.total++;
	generation_tick(job);
	cr_expect_eq(generation_let(job), RES_WAIT);
	cr_expect(generation_is_copying(job));
	cr_expect_eq(generation_evict(job, false), 0, "it is being made");
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	change();
	cr_assert_eq(read_from(0), 0);
	expect_as_opened();
}

Test(generation, its_end_waits_for_the_block_that_is_copied_ahead)
{
	backend_fake_hold(n.node.devices[0].backend, true);
	job->ops.total++;
	generation_tick(job);
	cr_expect_null(generation_end(g));
	g = NULL;
	cr_expect(job->generation);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	cr_expect_null(job->generation);
}
