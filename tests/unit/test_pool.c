/* Pools: regions never overlap, everything comes back together, sums are exact. */
#include <criterion/criterion.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/backend_impl.h"
#include "backend/memfd.h"
#include "fdcheck.h"
#include "looprun.h"
#include "mem/pool.h"
#include "mem/stagger.h"

TestSuite(pool, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

#define MIB (UINT64_C(1) << 20)

struct fixture {
	struct looprun run;
	struct backend *b;
	struct device d;
	struct quota job;
	struct pool p;
};

static void setup(struct fixture *f, uint64_t capacity, uint64_t quota)
{
	looprun_init(&f->run);
	cr_assert_eq(backend_fake_new(&f->run.queue, capacity, &f->b), 0);
	slab_device_init(&f->d, f->b, 0);
	quota_init(&f->job, &f->d.quota, quota);
	pool_init(&f->p, &f->d, &f->job, MEM_FULL, BACKEND_SHARE_FD, "job", 2);
}

static void teardown(struct fixture *f)
{
	pool_deinit(&f->p);
	pool_deinit(&f->p);
	cr_assert_eq(f->job.used, 0);
	slab_device_deinit(&f->d);
	f->b = backend_close(f->b);
	looprun_deinit(&f->run);
}

static struct region take(struct fixture *f, uint64_t bytes)
{
	struct region r = REGION_NULL;

	cr_assert_eq(pool_take(&f->p, bytes, &r), 0);
	cr_assert_eq(r.bytes, bytes);
	cr_assert_eq(r.offset % POOL_ALIGN, 0);
	return r;
}

/* The pool is rank 2's. */
Test(pool, large_regions_begin_where_those_of_other_ranks_do_not)
{
	const uint64_t large = STAGGER_FROM, block = large + STAGGER_ROOM;
	struct fixture f;
	struct region a, b, c;

	setup(&f, 0, 0);
	a = take(&f, large);
	cr_assert_eq(a.offset, STAGGER_RANK(2) * STAGGER_STEP);
	cr_assert_eq(f.p.used, block);
	cr_assert_eq(f.p.bytes, block);
	b = take(&f, large - 1);
	cr_assert_neq(a.slab, b.slab);
	cr_assert_eq(b.offset, 0, "is not large");
	pool_give(&f.p, &a);
	cr_assert_eq(f.p.used, large);
	c = take(&f, large);
	cr_assert_eq(c.offset, STAGGER_RANK(2) * STAGGER_STEP, "in the same place again");
	cr_assert_eq(f.p.used, block + large);
	pool_give(&f.p, &b);
	pool_give(&f.p, &c);
	cr_assert_eq(f.p.used, 0);
	teardown(&f);
}

Test(pool, small_regions_share_a_slab_of_the_pool)
{
	struct fixture f;
	struct region a, b;

	setup(&f, 0, 0);
	a = take(&f, 1);
	b = take(&f, 257);
	cr_assert_eq(a.slab, b.slab);
	cr_assert_eq(a.slab->class, MEM_FULL);
	cr_assert_eq(a.slab->owner_rank, 2);
	cr_assert_str_eq(a.slab->job, "job");
	cr_assert_eq(a.offset, 0);
	cr_assert_eq(b.offset, POOL_ALIGN);
	cr_assert_eq(f.p.bytes, POOL_MIN_SLAB);
	cr_assert_eq(f.p.used, 3 * POOL_ALIGN);
	cr_assert_eq(f.job.by_class[MEM_FULL], POOL_MIN_SLAB);
	pool_give(&f.p, &a);
	pool_give(&f.p, &a); /* is REGION_NULL now */
	cr_assert_null(a.slab);
	pool_give(&f.p, &b);
	cr_assert_eq(f.p.used, 0);
	teardown(&f);
}

Test(pool, the_first_range_that_fits_is_taken)
{
	struct fixture f;
	struct region r[4], again;
	uint64_t hole;

	setup(&f, 0, 0);
	for (unsigned i = 0; i < 4; i++)
		r[i] = take(&f, 4096);
	hole = r[1].offset;
	pool_give(&f.p, &r[1]);
	again = take(&f, 8192); /* does not fit the hole */
	cr_assert_gt(again.offset, r[3].offset);
	pool_give(&f.p, &again);
	again = take(&f, 1000);
	cr_assert_eq(again.offset, hole);
	pool_give(&f.p, &again);
	pool_give(&f.p, &r[2]); /* the hole grows */
	again = take(&f, 8192);
	cr_assert_eq(again.offset, hole);
	pool_give(&f.p, &again);
	pool_give(&f.p, &r[0]);
	pool_give(&f.p, &r[3]);
	teardown(&f);
}

Test(pool, when_a_whole_slab_does_not_fit_the_bytes_alone_may)
{
	struct fixture f;
	struct region a, b = REGION_NULL;

	setup(&f, 0, 64 * 1024);
	a = take(&f, 60 * 1024 + 1);
	cr_assert_eq(a.slab->bytes, 64 * 1024);
	cr_assert_eq(pool_take(&f.p, 4096, &b), SLAB_E_QUOTA);
	cr_assert_null(b.slab);
	b = take(&f, 3 * 1024); /* the rest of the slab */
	cr_assert_eq(a.slab, b.slab);
	pool_give(&f.p, &a);
	pool_give(&f.p, &b);
	teardown(&f);
}

Test(pool, a_refusal_changes_nothing)
{
	struct fixture f;
	struct region r = REGION_NULL;

	setup(&f, 4 * MIB, 2 * MIB);
	cr_assert_eq(pool_take(&f.p, 3 * MIB, &r), SLAB_E_QUOTA);
	cr_assert_eq(pool_take(&f.p, 5 * MIB, &r), SLAB_E_FULL);
	cr_assert_eq(pool_take(&f.p, UINT64_MAX, &r), SLAB_E_FULL);
	cr_assert_eq(pool_take(&f.p, UINT64_MAX - POOL_ALIGN, &r), SLAB_E_FULL);
	backend_fake_fail(f.b, 1, -EIO);
	cr_assert_eq(pool_take(&f.p, 1, &r), -EIO);
	cr_assert_null(r.slab);
	cr_assert_eq(f.p.bytes, 0);
	cr_assert_eq(f.job.used, 0);
	teardown(&f);
}

Test(pool, trim_gives_back_empty_slabs_largest_first)
{
	struct fixture f;
	struct region r[4];
	const uint64_t mib[4] = { 2, 5, 3, 4 };

	setup(&f, 0, 0);
	for (unsigned i = 0; i < 4; i++)
		r[i] = take(&f, mib[i] * MIB);
	cr_assert_eq(pool_trim(&f.p, UINT64_MAX), 0);
	for (unsigned i = 0; i < 3; i++)
		pool_give(&f.p, &r[i]);
	cr_assert_eq(f.p.bytes, 14 * MIB);
	cr_assert_eq(pool_trim(&f.p, 0), 0);
	cr_assert_eq(pool_trim(&f.p, 1), 5 * MIB);
	cr_assert_eq(pool_trim(&f.p, 3 * MIB + 1), 5 * MIB);
	cr_assert_eq(f.p.bytes, 4 * MIB);
	cr_assert_eq(pool_trim(&f.p, 1), 0);
	pool_give(&f.p, &r[3]);
	cr_assert_eq(pool_trim(&f.p, UINT64_MAX), 4 * MIB);
	cr_assert_eq(f.job.used, 0);
	teardown(&f);
}

/* Random take and give against a plain list of what is out. */
#define LIVE 200

static uint64_t rounded(uint64_t bytes)
{
	return (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
}

static void check_model(struct fixture *f, const struct region *live)
{
	uint64_t used = 0, slabs = 0;
	struct slab *s, *tmp;

	for (unsigned i = 0; i < LIVE; i++) {
		const struct region *a = &live[i];

		if (!a->slab)
			continue;
		used += rounded(a->bytes);
		cr_assert_leq(a->offset + rounded(a->bytes), a->slab->bytes);
		for (unsigned j = 0; j < i; j++) {
			const struct region *b = &live[j];

			cr_assert(b->slab != a->slab || b->offset + b->bytes <= a->offset ||
					  a->offset + a->bytes <= b->offset,
				  "%u and %u overlap", i, j);
		}
	}
	list_for_each (s, tmp, &f->d.own.slabs, link)
		slabs += s->bytes;
	cr_assert_eq(f->p.used, used);
	cr_assert_eq(f->p.bytes, slabs);
	cr_assert_eq(f->job.used, slabs);
	cr_assert_eq(f->job.by_class[MEM_FULL], slabs);
}

static uint32_t next_random(uint32_t *state)
{
	*state = *state * 1664525u + 1013904223u;
	return *state >> 8;
}

Test(pool, random_take_and_give_agree_with_a_model)
{
	static struct region live[LIVE];
	struct fixture f;
	uint32_t x = 20240607;
	unsigned refused = 0;

	setup(&f, 0, 48 * MIB);
	for (unsigned step = 0; step < 20000; step++) {
		struct region *r = &live[next_random(&x) % LIVE];
		uint64_t bytes = 1 + next_random(&x) % (step % 3 ? 20000 : 2000000);

		if (r->slab)
			pool_give(&f.p, r);
		else if (pool_take(&f.p, bytes, r) != 0)
			refused++;
		if (step % 97 == 0)
			check_model(&f, live);
		if (step % 1009 == 0)
			pool_trim(&f.p, next_random(&x) % (4 * MIB));
	}
	cr_assert_gt(refused, 0, "the limit was never met");
	check_model(&f, live);
	for (unsigned i = 0; i < LIVE; i++)
		pool_give(&f.p, &live[i]);
	check_model(&f, live);
	/* all of each slab is one range again: it can be taken in one piece */
	while (f.p.bytes > 0) {
		struct slab *s = list_first(&f.d.own.slabs, struct slab, link);
		uint64_t before = f.p.bytes;

		live[0] = take(&f, s->bytes);
		cr_assert_eq(f.p.bytes, before, "a slab of %lu was in pieces", s->bytes);
		cr_assert_eq(live[0].offset, 0);
		pool_give(&f.p, &live[0]);
		cr_assert_gt(pool_trim(&f.p, 1), 0);
	}
	teardown(&f);
}

static uint64_t bytes_there(int fd)
{
	struct stat st;

	cr_assert_eq(fstat(fd, &st), 0);
	return (uint64_t)st.st_blocks * 512;
}

/* A slab of 1 MiB with pages, in no region any more. @ret_fd: a rank's. */
static void filled_slab(struct fixture *f, int *ret_fd)
{
	struct region r = take(f, MIB);
	bool writable;

	memset(region_addr(&r), 1, MIB);
	cr_assert_eq(slab_export(r.slab, ret_fd, &writable), 0);
	pool_give(&f->p, &r);
	cr_assert_eq(bytes_there(*ret_fd), MIB);
}

/* The charge went back, and ranks that live had the pages mapped nevertheless. */
Test(pool, what_is_trimmed_is_free_in_reality_too)
{
	struct fixture f;
	int fd;

	setup(&f, 0, 4 * MIB);
	filled_slab(&f, &fd);
	cr_assert_eq(pool_trim(&f.p, UINT64_MAX), MIB);
	cr_assert_eq(f.job.used, 0, "who asked for memory can have it");
	cr_assert_eq(bytes_there(fd), 0);
	close(fd);
	teardown(&f);
}

Test(pool, the_end_of_a_pool_does_not_end_the_charge_of_what_is_held)
{
	struct fixture f;
	int fd;

	if (!memfd_knows_holders())
		cr_skip("this kernel does not tell who holds a memfd");
	setup(&f, 0, 4 * MIB);
	filled_slab(&f, &fd);
	pool_deinit(&f.p);
	cr_assert_eq(f.job.used, MIB);
	cr_assert_eq(bytes_there(fd), 0);
	close(fd);
	slabs_sweep(&f.d);
	teardown(&f);
}
