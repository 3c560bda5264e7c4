/* The fake backend keeps the contract, and fails and waits as it is told. */
#include <criterion/criterion.h>
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/backend_impl.h"
#include "core/check.h"
#include "fdcheck.h"
#include "looprun.h"

TestSuite(backend_fake, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20);

#define PAGE 4096u

struct fixture {
	struct looprun run;
	struct backend *b;
};

static void setup(struct fixture *f, uint64_t capacity)
{
	looprun_init(&f->run);
	cr_assert_eq(backend_fake_new(&f->run.queue, capacity, &f->b), 0);
	cr_assert_eq(backend_info(f->b)->granularity % PAGE, 0);
}

static void teardown(struct fixture *f)
{
	f->b = backend_close(f->b);
	looprun_deinit(&f->run);
}

static char order[16];
static unsigned n_order;

struct named {
	struct backend_task task;
	char name;
	int status;
	bool done;
};

static void on_done(struct backend_task *task, int status)
{
	struct named *t = CONTAINER_OF(task, struct named, task);

	t->status = status;
	t->done = true;
	order[n_order++] = t->name;
}

static struct named make(char name, struct launch *launch)
{
	return (struct named){
		.task = { .launches = launch, .n_launches = launch ? 1 : 0, .done = on_done },
		.name = name
	};
}

Test(backend_fake, kernels_run_when_the_task_completes)
{
	struct fixture f;
	float x[3] = { 1, 2, 3 };
	struct launch launch = { .kind = LAUNCH_SCALE, .n = 3, .scale = { x, 2, NULL } };
	struct named t = make('a', &launch);

	setup(&f, 0);
	backend_submit(f.b, &t.task);
	cr_assert_eq(x[2], 3.0f);
	cr_assert_not(t.done);
	looprun_flag(&f.run, &t.done, 5);
	cr_assert_eq(t.status, 0);
	cr_assert_eq(x[2], 6.0f);
	teardown(&f);
}

Test(backend_fake, memory_can_be_exported_and_imported)
{
	struct fixture f;
	struct backend_mem *mem, *again;
	uint64_t page;
	int fd, ro;

	setup(&f, 0);
	page = backend_info(f.b)->granularity;
	cr_assert_eq(backend_alloc(f.b, page, BACKEND_SHARE_FD, &mem), 0);
	((char *)backend_addr(mem))[1] = 4;
	cr_assert_eq(backend_export(f.b, mem, true, &fd), 0);
	cr_assert_eq(backend_export(f.b, mem, false, &ro), 0);
	cr_assert_eq(mmap(NULL, page, PROT_WRITE, MAP_SHARED, ro, 0), MAP_FAILED);
	cr_assert_eq(backend_import(f.b, fd, page, &again), 0);
	cr_assert_eq(((char *)backend_addr(again))[1], 4);
	close(fd);
	close(ro);
	backend_free(f.b, mem);
	backend_free(f.b, again);
	teardown(&f);
}

Test(backend_fake, the_capacity_is_a_limit)
{
	struct fixture f;
	struct backend_mem *mem, *more;
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

	setup(&f, 2 * page);
	cr_assert_eq(backend_alloc(f.b, 3 * page, BACKEND_SHARE_FD, &mem), BACKEND_E_FULL);
	cr_assert_eq(backend_alloc(f.b, 2 * page, BACKEND_SHARE_FD, &mem), 0);
	cr_assert_eq(backend_alloc(f.b, page, BACKEND_SHARE_FD, &more), BACKEND_E_FULL);
	backend_free(f.b, mem);
	cr_assert_eq(backend_alloc(f.b, page, BACKEND_SHARE_FD, &more), 0);
	backend_free(f.b, more);
	teardown(&f);
}

Test(backend_fake, the_nth_call_fails_and_only_that)
{
	struct fixture f;
	struct backend_mem *mem, *again;
	struct named t = make('a', NULL), u = make('b', NULL);
	uint64_t page;
	int fd;

	setup(&f, 0);
	page = backend_info(f.b)->granularity;
	backend_fake_fail(f.b, 2, -EIO);
	cr_assert_eq(backend_alloc(f.b, page, BACKEND_SHARE_FD, &mem), 0);
	cr_assert_eq(backend_export(f.b, mem, true, &fd), -EIO);
	cr_assert_eq(backend_export(f.b, mem, true, &fd), 0);
	backend_fake_fail(f.b, 1, -ENOMEM);
	cr_assert_eq(backend_import(f.b, fd, page, &again), -ENOMEM);
	backend_fake_fail(f.b, 1, BACKEND_E_FULL);
	cr_assert_eq(backend_alloc(f.b, page, BACKEND_SHARE_FD, &again), BACKEND_E_FULL);
	backend_fake_fail(f.b, 1, -EFAULT);
	backend_submit(f.b, &t.task);
	backend_submit(f.b, &u.task);
	looprun_flag(&f.run, &u.done, 5);
	cr_assert_eq(t.status, -EFAULT);
	cr_assert_eq(u.status, 0);
	backend_fake_fail(f.b, 1, -EIO);
	backend_fake_fail(f.b, 0, 0);
	cr_assert_eq(backend_alloc(f.b, page, BACKEND_SHARE_FD, &again), 0);
	cr_assert_eq(backend_fake_calls(f.b), 8);
	close(fd);
	backend_free(f.b, mem);
	backend_free(f.b, again);
	teardown(&f);
}

Test(backend_fake, a_failed_task_does_nothing)
{
	struct fixture f;
	float x = 1;
	struct launch launch = { .kind = LAUNCH_SCALE, .n = 1, .scale = { &x, 2, NULL } };
	struct named t = make('a', &launch);

	setup(&f, 0);
	backend_fake_fail(f.b, 1, -EIO);
	backend_submit(f.b, &t.task);
	looprun_flag(&f.run, &t.done, 5);
	cr_assert_eq(t.status, -EIO);
	cr_assert_eq(x, 1.0f);
	teardown(&f);
}

static void hold_three(struct fixture *f, struct named t[3])
{
	struct named after = make('z', NULL);

	for (unsigned i = 0; i < 3; i++)
		t[i] = make((char)('a' + i), NULL);
	backend_submit(f->b, &after.task);
	backend_fake_hold(f->b, true);
	for (unsigned i = 0; i < 3; i++)
		backend_submit(f->b, &t[i].task);
	looprun_flag(&f->run, &after.done, 5); /* submitted before: goes on */
	cr_assert_eq(n_order, 1);
	cr_assert_eq(backend_in_flight(f->b), 3);
}

Test(backend_fake, held_tasks_complete_when_released_in_order)
{
	struct fixture f;
	struct named t[3];

	setup(&f, 0);
	hold_three(&f, t);
	backend_fake_release(f.b, false);
	cr_assert_eq(n_order, 1, "a callback ran inside release");
	looprun_flag(&f.run, &t[2].done, 5);
	cr_assert_arr_eq(order, "zabc", 4);
	teardown(&f);
}

Test(backend_fake, held_tasks_complete_reversed_when_told)
{
	struct fixture f;
	struct named t[3], late = make('l', NULL);

	setup(&f, 0);
	hold_three(&f, t);
	backend_fake_release(f.b, true);
	backend_submit(f.b, &late.task); /* still on hold */
	looprun_flag(&f.run, &t[0].done, 5);
	cr_assert_arr_eq(order, "zcba", 4);
	cr_assert_not(late.done);
	backend_fake_hold(f.b, false); /* lets go of what is held */
	looprun_flag(&f.run, &late.done, 5);
	teardown(&f);
}
