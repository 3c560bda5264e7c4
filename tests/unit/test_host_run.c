/* The host backend: launches that their callers wait for, beside tasks. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend_impl.h"
#include "core/check.h"
#include "fdcheck.h"
#include "looprun.h"

TestSuite(host_run, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 60);

#define TASKS 200u

/* A task that counts its callbacks. */
struct counted {
	struct backend_task task;
	unsigned done;
};

static void on_done(struct backend_task *task, int status)
{
	cr_expect_eq(status, 0);
	CONTAINER_OF(task, struct counted, task)->done++;
}

static bool all_done(void *arg)
{
	const struct counted *c = arg;

	for (unsigned i = 0; i < TASKS; i++)
		if (!c[i].done)
			return false;
	return true;
}

#define RUNNERS 3u
#define RUNS    20u
#define RUN_N   (5u * KERNEL_NORM_BLOCK + 7)

/* A thread that waits for its launches. */
struct runner {
	pthread_t thread;
	struct backend *b;
	float *x;
};

/* A kernel that takes long enough for a helper to be late. Return: whether all of it is there. */
static bool fill_and_look(const struct runner *r, uint64_t seed)
{
	struct launch launch = { .kind = LAUNCH_FILL, .n = RUN_N };
	float *want = malloc(RUN_N * sizeof(float));
	bool same;

	launch.fill = (struct k_fill){ .dst = want, .seed = seed, .kind = FILL_NORMAL, .b = 1 };
	kernels_host()->fill(&launch.fill, 0, RUN_N);
	launch.fill.dst = r->x;
	backend_run(r->b, &launch, (struct backend_owner){ .job = 1 });
	same = memcmp(r->x, want, RUN_N * sizeof(float)) == 0;
	free(want);
	return same;
}

static void *run_and_look(void *arg)
{
	const struct runner *r = arg;
	struct launch launch = { .kind = LAUNCH_SCALE, .n = RUN_N };

	launch.scale = (struct k_scale){ r->x, 2, NULL };
	for (unsigned i = 0; i < RUNS; i++) {
		backend_run(r->b, &launch, (struct backend_owner){ .job = 1 });
		for (unsigned k = 0; k < RUN_N; k++)
			if (r->x[k] != (float)(2u << i))
				return arg;
	}
	for (unsigned i = 0; i < RUNS; i++)
		if (!fill_and_look(r, i))
			return arg;
	launch.n = 0;
	backend_run(r->b, &launch, (struct backend_owner){ .job = 1 });
	return NULL;
}

/* Each element is worked on once, and none is left when the call returns, whatever else the threads do;
 * with two threads nobody helps. */
static void run_beside_tasks(unsigned threads)
{
	static struct counted c[TASKS];
	static struct launch launches[TASKS];
	static float x[TASKS];
	struct runner runners[RUNNERS];
	struct looprun run;
	struct backend *b;
	void *wrong;

	looprun_init(&run);
	cr_assert_eq(backend_host_new(&run.queue, threads, 0, false, &b), 0);
	for (unsigned i = 0; i < RUNNERS; i++) {
		runners[i] = (struct runner){ .b = b, .x = malloc(RUN_N * sizeof(float)) };
		for (unsigned k = 0; k < RUN_N; k++)
			runners[i].x[k] = 1;
		cr_assert_eq(pthread_create(&runners[i].thread, NULL, run_and_look, &runners[i]),
			     0);
	}
	for (unsigned i = 0; i < TASKS; i++) {
		launches[i] = (struct launch){ .kind = LAUNCH_SCALE, .n = 1 };
		launches[i].scale = (struct k_scale){ &x[i], 2, NULL };
		c[i] = (struct counted){ .task = { .launches = &launches[i],
						   .n_launches = 1,
						   .owner = { .job = 2 },
						   .done = on_done } };
		backend_submit(b, &c[i].task);
	}
	looprun_until(&run, all_done, c, 30);
	for (unsigned i = 0; i < RUNNERS; i++) {
		cr_assert_eq(pthread_join(runners[i].thread, &wrong), 0);
		cr_expect_null(wrong);
		free(runners[i].x);
	}
	backend_close(b);
	looprun_deinit(&run);
}

Test(host_run, a_launch_is_over_when_the_call_returns)
{
	run_beside_tasks(6);
	run_beside_tasks(2);
}
