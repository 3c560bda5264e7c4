/* Every call to the backend fails once in turn: nothing leaks, charges return. */
#include <criterion/criterion.h>
#include <errno.h>
#include <unistd.h>

#include "backend/backend_impl.h"
#include "engine/engine_impl.h"
#include "core/check.h"
#include "fdcheck.h"
#include "looprun.h"
#include "mem/pool.h"

TestSuite(fault_mem, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

struct fixture {
	struct looprun run;
	struct backend *b;
	struct device d;
	struct quota job;
};

static void setup(struct fixture *f)
{
	looprun_init(&f->run);
	cr_assert_eq(backend_fake_new(&f->run.queue, 0, &f->b), 0);
	slab_device_init(&f->d, f->b, 0);
	quota_init(&f->job, &f->d.quota, 0);
}

/* The destructors CHECK that every allocation and every byte is back. */
static void teardown(struct fixture *f)
{
	cr_assert_eq(f->job.used, 0);
	slab_device_deinit(&f->d);
	f->b = backend_close(f->b);
	looprun_deinit(&f->run);
}

struct waited {
	struct backend_task task;
	bool done;
	int status;
};

static void on_done(struct backend_task *task, int status)
{
	struct waited *w = CONTAINER_OF(task, struct waited, task);

	w->status = status;
	w->done = true;
}

static int fill(struct fixture *f, const struct region *r)
{
	struct launch launch = { .kind = LAUNCH_FILL, .n = r->bytes / sizeof(float) };
	struct waited w = { .task = { .launches = &launch, .n_launches = 1, .done = on_done } };

	launch.fill = (struct k_fill){ .dst = region_addr(r), .kind = FILL_CONSTANT, .a = 1.5 };
	backend_submit(f->b, &w.task);
	looprun_flag(&f->run, &w.done, 5);
	return w.status;
}

/* Export a slab, take it in under another id, drop it. */
static int hand_over(struct fixture *f, struct slab *s)
{
	struct slab *again;
	bool writable;
	int fd, r;

	r = slab_export(s, &fd, &writable);
	if (r)
		return r;
	r = slab_import(&f->d, &f->job, s->class, s->bytes, "job", s->id + 1000, fd, &again);
	close(fd);
	if (r)
		return r;
	slab_unref(again);
	return 0;
}

/* What a unit's life is for the memory: two regions, one of them large, a kernel
 * on each, and a hand-over. Return: what the first call to fail gave. */
static int life(struct fixture *f)
{
	struct region small = REGION_NULL, large = REGION_NULL;
	struct pool p;
	int r;

	pool_init(&p, &f->d, &f->job, MEM_GRAD, BACKEND_SHARE_FD, "job", 0);
	r = pool_take(&p, 4096, &small);
	if (r == 0)
		r = pool_take(&p, 3u << 20, &large);
	if (r == 0)
		r = fill(f, &small);
	if (r == 0)
		r = fill(f, &large);
	if (r == 0)
		r = hand_over(f, small.slab);
	if (r == 0)
		cr_assert_eq(((float *)region_addr(&large))[1000], 1.5f);
	pool_give(&p, &small);
	pool_give(&p, &large);
	cr_assert_eq(p.used, 0);
	pool_deinit(&p);
	return r;
}

static unsigned fail_until_success(int err, int expected)
{
	unsigned n = 0;
	int r;

	do {
		struct fixture f;

		setup(&f);
		backend_fake_fail(f.b, ++n, err);
		r = life(&f);
		cr_assert(r == 0 || r == expected, "call %u: %d", n, r);
		cr_assert(r != 0 || backend_fake_calls(f.b) < n, "call %u was not heeded", n);
		teardown(&f);
	} while (r != 0);
	return n - 1;
}

Test(fault_mem, every_backend_call_fails_once)
{
	cr_assert_eq(fail_until_success(-EIO, -EIO), 6);
}

/* A full device: the pool asks once more for less, so the small region goes through. */
Test(fault_mem, a_full_device_is_an_answer)
{
	struct fixture f;
	struct region r;
	struct pool p;

	setup(&f);
	pool_init(&p, &f.d, &f.job, MEM_GRAD, BACKEND_SHARE_FD, "job", 0);
	backend_fake_fail(f.b, 1, BACKEND_E_FULL);
	cr_assert_eq(pool_take(&p, 4096, &r), 0);
	cr_assert_eq(r.slab->bytes, backend_info(f.b)->granularity);
	pool_give(&p, &r);
	backend_fake_fail(f.b, 1, BACKEND_E_FULL);
	cr_assert_eq(pool_take(&p, 3u << 20, &r), SLAB_E_FULL);
	cr_assert_eq(p.used, 0);
	pool_deinit(&p);
	teardown(&f);
}

struct waited_op {
	struct comm_op op;
	bool done;
	int status;
};

static void on_op_done(struct comm_op *op, int status)
{
	struct waited_op *w = CONTAINER_OF(op, struct waited_op, op);

	w->status = status;
	w->done = true;
}

struct waited_comm {
	struct comm *comm;
	bool done;
};

static void on_ready(void *userdata, struct comm *comm, int status)
{
	struct waited_comm *w = userdata;

	cr_assert_eq(status, 0);
	w->comm = comm;
	w->done = true;
}

Test(fault_mem, a_failed_copy_ends_its_collective_and_no_other)
{
	struct fixture f;
	struct engine *e;
	struct waited_comm c = { 0 };
	float a[3] = { 1, 2, 3 }, b[3] = { 0 };
	const struct comm_options options = {
		.devices = &f.b, .n_devices = 1, .ready = on_ready, .userdata = &c
	};

	setup(&f);
	cr_assert_eq(engine_local_new(&f.run.queue, &e), 0);
	cr_assert_eq(engine_comm_new(e, &options), 0);
	looprun_flag(&f.run, &c.done, 5);
	for (unsigned failing = 1; failing <= 4; failing++) {
		struct waited_op w[3] = { 0 };

		backend_fake_fail(f.b, failing, -EIO);
		for (unsigned i = 0; i < 3; i++) {
			const void *send = a + i;
			void *recv = b + i;

			w[i].op.done = on_op_done;
			comm_all_gather(c.comm, &w[i].op, &send, &recv, 1, DTYPE_FP32);
		}
		looprun_flag(&f.run, &w[2].done, 5);
		for (unsigned i = 0; i < 3; i++)
			cr_assert_eq(w[i].status, i + 1 == failing ? -EIO : 0);
	}
	cr_assert_eq(b[2], 3.0f);
	comm_free(c.comm);
	engine_close(e);
	teardown(&f);
}
