/* Slabs: the charge is taken with the memory and goes with it. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/backend_impl.h"
#include "fdcheck.h"
#include "looprun.h"
#include "mem/slab.h"
#include "ownfd.h"

TestSuite(slab, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20);

struct fixture {
	struct looprun run;
	struct backend *b;
	struct device d;
	struct quota job;
	uint64_t page;
};

static void setup(struct fixture *f, uint64_t capacity_pages, uint64_t job_pages)
{
	looprun_init(&f->run);
	f->page = (uint64_t)sysconf(_SC_PAGESIZE);
	cr_assert_eq(backend_fake_new(&f->run.queue, capacity_pages * f->page, &f->b), 0);
	slab_device_init(&f->d, f->b, 0);
	quota_init(&f->job, &f->d.quota, job_pages * f->page);
}

static void teardown(struct fixture *f)
{
	cr_assert_eq(f->job.used, 0);
	slab_device_deinit(&f->d);
	f->b = backend_close(f->b);
	looprun_deinit(&f->run);
}

static struct slab *take(struct fixture *f, enum mem_class class, uint64_t bytes)
{
	struct slab *s = NULL;

	cr_assert_eq(slab_new(&f->d, &f->job, class, BACKEND_SHARE_FD, bytes, "job", 3, &s), 0);
	return s;
}

Test(slab, the_device_limit_is_the_smaller_of_both)
{
	struct fixture f;
	struct device d;

	setup(&f, 8, 0);
	cr_assert_eq(f.d.quota.limit, 8 * f.page);
	slab_device_init(&d, f.b, 3 * f.page);
	cr_assert_eq(d.quota.limit, 3 * f.page);
	slab_device_deinit(&d);
	slab_device_init(&d, f.b, 30 * f.page);
	cr_assert_eq(d.quota.limit, 8 * f.page);
	slab_device_deinit(&d);
	teardown(&f);
}

Test(slab, bytes_are_rounded_up_and_charged_until_the_last_reference_goes)
{
	struct fixture f;
	struct slab *s;

	setup(&f, 8, 0);
	s = take(&f, MEM_SHARD, f.page + 1);
	cr_assert_eq(s->bytes, 2 * f.page);
	cr_assert_eq(backend_bytes(s->mem), 2 * f.page);
	cr_assert_eq(f.job.by_class[MEM_SHARD], 2 * f.page);
	cr_assert_eq(f.d.quota.used, 2 * f.page);
	cr_assert_str_eq(s->job, "job");
	cr_assert_eq(s->owner_rank, 3);
	slab_ref(s);
	slab_unref(s);
	cr_assert_eq(f.job.used, 2 * f.page);
	cr_assert_null(slab_unref(s));
	cr_assert_null(slab_unref(NULL));
	cr_assert_eq(f.d.quota.used, 0);
	teardown(&f);
}

Test(slab, what_is_refused_names_who_has_not_enough)
{
	struct fixture f;
	struct slab *s, *none = NULL;

	setup(&f, 4, 3);
	cr_assert_eq(slab_new(&f.d, &f.job, MEM_FULL, BACKEND_SHARE_FD, 4 * f.page, "j", -1, &none),
		     SLAB_E_QUOTA);
	cr_assert_eq(slab_new(&f.d, &f.job, MEM_FULL, BACKEND_SHARE_FD, 5 * f.page, "j", -1, &none),
		     SLAB_E_FULL);
	cr_assert_eq(slab_new(&f.d, &f.job, MEM_FULL, BACKEND_SHARE_FD, UINT64_MAX, "j", -1, &none),
		     SLAB_E_FULL);
	cr_assert_eq(slab_new(&f.d, &f.d.quota, MEM_FULL, BACKEND_SHARE_FD, 5 * f.page, "j", -1,
			      &none),
		     SLAB_E_FULL);
	s = take(&f, MEM_FULL, 2 * f.page);
	cr_assert_eq(slab_new(&f.d, &f.job, MEM_FULL, BACKEND_SHARE_FD, 2 * f.page, "j", -1, &none),
		     SLAB_E_QUOTA);
	cr_assert_null(none);
	cr_assert_eq(f.job.used, 2 * f.page);
	slab_unref(s);
	teardown(&f);
}

Test(slab, the_charge_is_returned_when_the_backend_refuses)
{
	struct fixture f;
	struct slab *none = NULL;

	setup(&f, 4, 0);
	backend_fake_fail(f.b, 1, -EIO);
	cr_assert_eq(slab_new(&f.d, &f.job, MEM_FULL, BACKEND_SHARE_FD, 1, "j", -1, &none), -EIO);
	backend_fake_fail(f.b, 1, BACKEND_E_FULL);
	cr_assert_eq(slab_new(&f.d, &f.job, MEM_FULL, BACKEND_SHARE_FD, 1, "j", -1, &none),
		     SLAB_E_FULL);
	cr_assert_null(none);
	cr_assert_eq(f.job.used, 0);
	cr_assert(list_empty(&f.d.own.slabs));
	teardown(&f);
}

Test(slab, ids_are_found_and_never_used_twice)
{
	struct fixture f;
	struct slab *a, *b, *c;
	uint32_t id;

	setup(&f, 8, 0);
	a = take(&f, MEM_GRAD, 1);
	b = take(&f, MEM_GRAD, 1);
	cr_assert_neq(a->id, b->id);
	cr_assert_eq(slab_find(&f.d, a->id), a);
	cr_assert_eq(slab_find(&f.d, b->id), b);
	id = b->id;
	slab_unref(b);
	cr_assert_null(slab_find(&f.d, id));
	c = take(&f, MEM_GRAD, 1);
	cr_assert_neq(c->id, id);
	slab_unref(a);
	slab_unref(c);
	teardown(&f);
}

Test(slab, only_gradient_memory_is_handed_out_writable)
{
	struct fixture f;

	setup(&f, 8, 0);
	for (int class = 0; class < _MEM_N; class ++) {
		struct slab *s = take(&f, class, 1);
		bool writable = class != MEM_GRAD;
		void *addr;
		int fd;

		cr_assert_eq(slab_export(s, &fd, &writable), 0);
		cr_assert_eq(writable, class == MEM_GRAD);
		cr_assert_eq(s->exported, 1);
		addr = mmap(NULL, f.page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		cr_assert_eq(addr != MAP_FAILED, writable);
		if (addr != MAP_FAILED)
			munmap(addr, f.page);
		close(fd);
		backend_fake_fail(f.b, 1, -EMFILE);
		cr_assert_eq(slab_export(s, &fd, &writable), -EMFILE);
		cr_assert_eq(s->exported, 1);
		slab_unref(s);
	}
	teardown(&f);
}

Test(slab, memory_of_another_daemon_is_imported_under_its_id)
{
	struct fixture f;
	struct slab *s, *again, *next, *none = NULL;
	struct region r;
	uint32_t id;
	int fd;

	setup(&f, 8, 4);
	s = take(&f, MEM_GRAD, 2 * f.page);
	r = (struct region){ s, 8, 16 };
	*(char *)region_addr(&r) = 42;
	id = s->id + 100;
	fd = own_fd(s->mem);
	cr_assert_eq(slab_import(&f.d, &f.job, MEM_GRAD, 2 * f.page, "j", s->id, fd, &none),
		     -EINVAL);
	cr_assert_eq(slab_import(&f.d, &f.job, MEM_GRAD, f.page, "j", id, fd, &none), -EINVAL);
	cr_assert_eq(slab_import(&f.d, &f.job, MEM_GRAD, 0, "j", id, fd, &none), -EINVAL);
	cr_assert_eq(slab_import(&f.d, &f.job, MEM_GRAD, 2 * f.page, "j", 0, fd, &none), -EINVAL);
	cr_assert_eq(slab_import(&f.d, &f.job, MEM_GRAD, 3 * f.page, "j", id, fd, &none),
		     SLAB_E_QUOTA);
	cr_assert_null(none);
	slab_unref(s);
	cr_assert_eq(f.job.used, 0);
	cr_assert_eq(slab_import(&f.d, &f.job, MEM_GRAD, 2 * f.page, "j", id, fd, &again), 0);
	close(fd);
	cr_assert_eq(f.job.by_class[MEM_GRAD], 2 * f.page);
	cr_assert_eq(slab_find(&f.d, id), again);
	r.slab = again;
	cr_assert_eq(*(char *)region_addr(&r), 42);
	next = take(&f, MEM_GRAD, 1);
	cr_assert_gt(next->id, id);
	slab_unref(next);
	slab_unref(again);
	teardown(&f);
}

static void hand_out(struct slab *s, int *ret_fd)
{
	bool writable;

	cr_assert_eq(slab_export(s, ret_fd, &writable), 0);
}

static void need_holders(void)
{
	if (!memfd_knows_holders())
		cr_skip("this kernel does not tell who holds a memfd");
}

static uint64_t bytes_there(int fd)
{
	struct stat st;

	cr_assert_eq(fstat(fd, &st), 0);
	return (uint64_t)st.st_blocks * 512;
}

/* The account said 0 when the last reference was gone, whoever still held the memory. */
Test(slab, a_slab_is_charged_until_nobody_can_hold_it)
{
	struct fixture f;
	struct slab *s;
	uint32_t id;
	int fd;

	need_holders();
	setup(&f, 8, 0);
	s = take(&f, MEM_GRAD, 2 * f.page);
	id = s->id;
	memset(backend_addr(s->mem), 1, 2 * f.page);
	hand_out(s, &fd);
	slab_unref(s);
	cr_assert_eq(f.job.used, 2 * f.page);
	cr_assert_eq(f.d.quarantined, 2 * f.page);
	cr_assert_eq(slab_find(&f.d, id), s, "status shows it");
	cr_assert_eq(s->quarantined, 2 * f.page);
	cr_assert_eq(bytes_there(fd), 0, "its pages are given back nevertheless");
	slabs_sweep(&f.d);
	cr_assert_eq(f.job.used, 2 * f.page);
	cr_assert_eq(pwrite(fd, "x", 1, 0), 1);
	slabs_sweep(&f.d);
	cr_assert_eq(bytes_there(fd), 0, "and those that came back");
	close(fd);
	slabs_sweep(&f.d);
	cr_assert_eq(f.job.used, 0);
	cr_assert_eq(f.d.quarantined, 0);
	cr_assert_null(slab_find(&f.d, id));
	teardown(&f);
}

Test(slab, nothing_is_kept_when_the_daemon_ends)
{
	struct fixture f;
	struct slab *s, *later;
	int fd[2];

	setup(&f, 8, 0);
	s = take(&f, MEM_FULL, f.page);
	later = take(&f, MEM_FULL, f.page);
	hand_out(s, &fd[0]);
	hand_out(later, &fd[1]);
	slab_unref(s);
	slabs_let_go(&f.d);
	cr_assert_eq(f.job.used, f.page);
	slab_unref(later);
	cr_assert_eq(f.job.used, 0);
	close(fd[0]);
	close(fd[1]);
	teardown(&f);
}

Test(slab, parameters_are_sealed_where_that_is_asked_for)
{
	enum { SEALS, CLASS, WRITABLE, SEALED };
	static const int cases[][4] = {
		{ true, MEM_SHARD, false, true }, { false, MEM_SHARD, false, false },
		{ true, MEM_SHARD, true, false }, /* buffers of a unit are their ranks' to write */
		{ true, MEM_FULL, false, false }, /* copies are given back while ranks map them */
		{ true, MEM_GRAD, true, false },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct fixture f;
		struct slab *s;
		int fd, again;

		setup(&f, 8, 0);
		f.d.seals = cases[i][SEALS];
		s = take(&f, (enum mem_class)cases[i][CLASS], f.page);
		s->writable = cases[i][WRITABLE];
		hand_out(s, &fd);
		hand_out(s, &again);
		cr_assert_eq(!!(fcntl(fd, F_GET_SEALS) & F_SEAL_FUTURE_WRITE), cases[i][SEALED],
			     "case %zu", i);
		cr_assert(fcntl(fd, F_GET_SEALS) & F_SEAL_SEAL);
		close(fd);
		close(again);
		slab_unref(s);
		teardown(&f);
	}
}
