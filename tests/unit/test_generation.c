/* Generations: what is read is what was there when one was opened, whether it is copied before a change,
 * ahead of it, or not at all; and copies go when other memory is needed. */
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

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

static void begin_on(const struct nodefix_options *o)
{
	struct device *last;
	uint64_t from;

	fdcheck_begin();
	nodefix_begin(&n, o);
	last = &n.node.devices[n.node.n_devices - 1];
	job = nodefix_job(&n, "job", 1, 0);
	at = malloc(BYTES);
	copy = malloc(BYTES);
	for (size_t i = 0; i < BYTES; i++)
		at[i] = byte_of(i);
	g = generation_new(job, n.node.loopq, on_changed);
	cr_assert(g);
	cr_assert_eq(generation_add(g, &n.node.devices[0], at, HALF, &from), 0);
	cr_assert_eq(generation_add(g, last, at + HALF, BYTES - HALF, &from), 0);
	cr_assert_eq(from, HALF);
	cr_assert_eq(generation_open(g), 0);
	changes = 0;
}

static void begin(void)
{
	begin_on(NULL);
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
	cr_expect_not(generation_lost(g));
}

Test(generation, it_is_lost_for_memory_that_training_needs)
{
	change();
	cr_expect_eq(generation_evict(job, false), 0, "they cannot be made again");
	cr_assert_eq(generation_read(g, 0, copy, 100), 0);
	cr_expect_geq(generation_evict(job, true), BYTES);
	cr_expect_eq(generation_lost(g), -ENOMEM);
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
	cr_expect_not(generation_lost(g));
	change();
	cr_expect_eq(generation_lost(g), -ENOMEM);
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
		cr_assert_eq(generation_add(g, &n.node.devices[0], at, BYTES, &from), 0);
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

/* As an op does that has no memory: it asks, and again at the news of the node. */
static struct asks {
	struct waiter waiter;
	uint64_t bytes;
	struct region got;
	unsigned later;
	int r;
} asks;

static void asks_for_memory(struct waiter *w)
{
	struct asks *a = CONTAINER_OF(w, struct asks, waiter);

	a->r = job_take(job, &job->mem.full[0], a->bytes, &a->got);
	if (a->r != SLAB_E_LATER)
		return;
	a->later++;
	condition_wait(&n.node.changed, w);
}

static void asks_begin(uint64_t bytes)
{
	asks = (struct asks){ .bytes = bytes, .got = REGION_NULL };
	waiter_init(&asks.waiter, asks_for_memory);
	job->quota.limit = job->quota.used + 1000;
	asks_for_memory(&asks.waiter);
}

static void asks_end(void)
{
	cr_assert_eq(asks.r, 0);
	cr_expect_geq(asks.later, 1);
	pool_give(&job->mem.full[0], &asks.got);
}

Test(generation, an_op_waits_for_the_block_that_is_copied_ahead)
{
	backend_fake_hold(n.node.devices[0].backend, true);
	job->ops.total++;
	generation_tick(job);
	asks_begin(1u << 20);
	cr_assert_eq(asks.r, SLAB_E_LATER);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	asks_end();
	cr_expect_eq(control(), 0);
	cr_assert_eq(read_from(0), 0);
	expect_as_opened();
}

Test(generation, an_op_waits_for_the_copy_before_a_change)
{
	backend_fake_hold(n.node.devices[0].backend, true);
	cr_assert_eq(generation_let(job), RES_WAIT);
	asks_begin(8u << 20);
	cr_assert_eq(asks.r, SLAB_E_LATER);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	asks_end();
	cr_expect_eq(control(), 0);
	cr_expect_eq(generation_lost(g), -ENOMEM, "training comes first");
	cr_expect_eq(read_from(0), -ENOMEM);
}

Test(generation, an_op_waits_for_the_end_of_a_generation)
{
	backend_fake_hold(n.node.devices[0].backend, true);
	cr_assert_eq(generation_let(job), RES_WAIT);
	g = generation_end(g);
	cr_assert(job->generation);
	asks_begin(8u << 20);
	cr_assert_eq(asks.r, SLAB_E_LATER);
	backend_fake_hold(n.node.devices[0].backend, false);
	nodefix_turns(&n);
	asks_end();
}

/* The page that the reader copies to is not there yet: it stays in its block until it may go on. */
static sem_t is_in, may_go;
static char *page;

static void reader_is_in(int sig)
{
	(void)sig;
	sem_post(&is_in);
	while (sem_wait(&may_go) < 0)
		;
	(void)mprotect(page, 4096, PROT_READ | PROT_WRITE);
}

static void *reads_into_page(void *arg)
{
	*(int *)arg = generation_read(g, 0, page, 4096);
	return NULL;
}

/* The generation ends before the next tick: the op is not forgotten. */
Test(generation, an_op_waits_for_the_block_that_is_read)
{
	struct sigaction act = { .sa_handler = reader_is_in };
	pthread_t thread;
	int r = -1;

	page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	cr_assert(page != MAP_FAILED);
	sem_init(&is_in, 0, 0);
	sem_init(&may_go, 0, 0);
	cr_assert_eq(sigaction(SIGSEGV, &act, NULL), 0);
	change();
	cr_assert_eq(pthread_create(&thread, NULL, reads_into_page, &r), 0);
	while (sem_wait(&is_in) < 0)
		;
	asks_begin(8u << 20);
	cr_assert_eq(asks.r, SLAB_E_LATER);
	cr_expect_geq(control(), 4u << 20, "what is read stays");
	sem_post(&may_go);
	cr_assert_eq(pthread_join(thread, NULL), 0);
	cr_expect_eq(r, 0);
	g = generation_end(g);
	nodefix_turns(&n);
	asks_end();
	munmap(page, 4096);
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

/* ----------------------------------------------------------------- memory of two GPUs */

/* The thread cannot read it where it is: all comes through staging. */
static void begin_devices(void)
{
	begin_on(&(struct nodefix_options){ .devices = 2, .queues = true });
}

TestSuite(generation_devices, .init = begin_devices, .fini = end, .timeout = 60);

static struct reading {
	pthread_t thread;
	size_t from, to;
	int result;
	atomic_bool over;
} reading;

static void *reads_on_devices(void *arg)
{
	struct reading *r = arg;

	for (size_t k = r->from; r->result == 0 && k < r->to; k += 64 << 10) {
		size_t bytes = r->to - k < 64 << 10 ? r->to - k : 64 << 10;

		r->result = generation_read(g, k, copy + k, bytes);
	}
	atomic_store(&r->over, true);
	return NULL;
}

static void reading_begin(size_t from, size_t to)
{
	reading = (struct reading){ .from = from, .to = to };
	cr_assert_eq(pthread_create(&reading.thread, NULL, reads_on_devices, &reading), 0);
}

/* Return: what the thread got. */
static int reading_end(void)
{
	while (!atomic_load(&reading.over))
		nodefix_turns(&n);
	cr_assert_eq(pthread_join(reading.thread, NULL), 0);
	nodefix_turns(&n);
	return reading.result;
}

static int reads_all(size_t from)
{
	reading_begin(from, BYTES);
	return reading_end();
}

static uint64_t on_devices(void)
{
	return n.node.devices[0].quota.used + n.node.devices[1].quota.used;
}

Test(generation_devices, it_is_copied_for_the_reader)
{
	uint64_t used = on_devices();

	cr_assert_eq(reads_all(0), 0);
	expect_as_opened();
	cr_expect_eq(generation_copied(g), 0, "nothing has changed");
	generation_tick(job);
	cr_expect_eq(control(), 0, "what was read is given back");
	cr_expect_gt(quota_peak(&job->quota, MEM_CONTROL), 0);
	cr_expect_eq(on_devices(), used, "it is no memory of theirs");
}

/* A job that stands still: its reader gets no more than the blocks around the one that it is in. */
Test(generation_devices, a_reader_that_is_slow_has_few_blocks)
{
	struct generation *large;
	uint64_t from;

	generation_end(g);
	g = NULL;
	large = generation_new(job, n.node.loopq, on_changed);
	for (unsigned i = 0; i < 8; i++)
		cr_assert_eq(generation_add(large, &n.node.devices[i % 2], at, 8u << 20, &from), 0);
	cr_assert_eq(generation_open(large), 0);
	g = large;
	reading_begin(0, 100);
	cr_assert_eq(reading_end(), 0);
	cr_expect_eq(control(), 12u << 20, "of 64 MiB");
	cr_expect_eq(memcmp(copy, at, 100), 0);
}

Test(generation_devices, what_is_not_read_is_copied_before_a_change)
{
	uint64_t used = on_devices();

	change();
	cr_expect_geq(changes, 1);
	cr_expect_eq(generation_copied(g), BYTES);
	cr_expect_eq(on_devices(), used);
	cr_assert_eq(reads_all(0), 0);
	expect_as_opened();
}

/* The thread waits for a block while a writer comes. */
Test(generation_devices, a_change_while_the_reader_waits_for_a_block)
{
	for (unsigned i = 0; i < 2; i++)
		backend_fake_hold(n.node.devices[i].backend, true);
	reading_begin(0, BYTES);
	while (!control())
		nodefix_turns(&n);
	cr_expect_eq(generation_let(job), RES_WAIT);
	for (unsigned i = 0; i < 2; i++)
		backend_fake_hold(n.node.devices[i].backend, false);
	change();
	cr_assert_eq(reading_end(), 0);
	expect_as_opened();
}

Test(generation_devices, copies_ahead_go_for_what_the_reader_waits_for)
{
	copies_ahead();
	cr_expect_geq(control(), BYTES);
	cr_expect_eq(generation_evict(job, false), 0, "a device gains nothing by it");
	job->quota.limit = job->quota.used + (4u << 20);
	cr_expect_geq(generation_evict(job, false), BYTES, "the job's own account does");
	cr_assert_eq(reads_all(0), 0);
	expect_as_opened();
}

/* Copies ahead have taken all that the job may have: they make room for the block that is waited for. */
Test(generation_devices, copies_ahead_leave_room_for_the_reader)
{
	job->quota.limit = job->quota.used + (6u << 20);
	copies_ahead();
	cr_expect_gt(control(), 0);
	cr_expect_lt(control(), BYTES);
	cr_assert_eq(reads_all(0), 0);
	expect_as_opened();
	cr_expect_eq(generation_lost(g), 0);
}

/* The op comes first, and what the reader waits for after it. */
Test(generation_devices, an_op_waits_for_the_block_that_the_reader_waits_for)
{
	int r;

	backend_fake_hold(n.node.devices[0].backend, true);
	job->quota.limit = UINT64_MAX;
	reading_begin(0, BYTES);
	while (!generation_gives_later(job))
		nodefix_turns(&n);
	asks_begin(4u << 20);
	cr_assert_eq(asks.r, SLAB_E_LATER);
	backend_fake_hold(n.node.devices[0].backend, false);
	while (waiter_on(&asks.waiter)) {
		generation_tick(job);
		nodefix_turns(&n);
	}
	asks_end();
	cr_expect_leq(control(), 1000u);
	r = reading_end(); /* it has read the block, or has no memory for it any more */
	cr_assert_eq(r, generation_lost(g));
	if (r == 0)
		expect_as_opened();
}

Test(generation_devices, without_memory_for_a_block_it_is_lost)
{
	job->quota.limit = job->quota.used + (1u << 20);
	cr_expect_eq(reads_all(0), -ENOMEM);
	cr_expect_eq(generation_lost(g), -ENOMEM);
	cr_expect_eq(generation_let(job), RES_DONE, "the trainers go on");
}

Test(generation_devices, a_copy_that_fails_ends_it)
{
	backend_fake_fail(n.node.devices[1].backend, 1, -EIO);
	cr_expect_eq(reads_all(0), -EIO);
	cr_expect_eq(generation_lost(g), -EIO);
	change();
}

Test(generation_devices, a_copy_before_a_change_that_fails_ends_it)
{
	backend_fake_fail(n.node.devices[0].backend, 1, -EIO);
	change();
	cr_expect_eq(generation_lost(g), -EIO);
	cr_expect_eq(reads_all(0), -EIO);
	cr_expect_eq(control(), 0);
}

/* At whatever byte the thread is that reads: changes, copies ahead and evictions. */
Test(generation_devices, all_of_it_at_once)
{
	for (unsigned i = 0; i < 12; i++) {
		uint64_t from;

		reading_begin(0, BYTES);
		for (unsigned k = 0; k < i % 4; k++)
			nodefix_turns(&n);
		if (i % 2)
			copies_ahead();
		job->quota.limit = i % 3 ? 0 : job->quota.used + (64u << 20);
		(void)generation_evict(job, false);
		change();
		cr_assert_eq(reading_end(), 0);
		expect_as_opened();
		generation_end(g);
		nodefix_turns(&n);
		for (size_t k = 0; k < BYTES; k++)
			at[k] = byte_of(k);
		g = generation_new(job, n.node.loopq, on_changed);
		cr_assert_eq(generation_add(g, &n.node.devices[i % 2], at, BYTES, &from), 0);
		cr_assert_eq(generation_open(g), 0);
	}
}
