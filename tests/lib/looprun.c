#include "looprun.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

/* All is slower with the thread sanitizer. */
#ifdef __SANITIZE_THREAD__
#define SLOWER 4
#else
#define SLOWER 1
#endif

static double now_s(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static void on_tick(uv_timer_t *timer)
{
	(void)timer; /* only wakes the loop, so that deadlines are seen */
}

void looprun_init(struct looprun *l)
{
	cr_assert_eq(uv_loop_init(&l->loop), 0);
	cr_assert_eq(loopq_init(&l->queue, &l->loop), 0);
}

void looprun_deinit(struct looprun *l)
{
	loopq_close(&l->queue);
	while (uv_run(&l->loop, UV_RUN_NOWAIT))
		if (!uv_loop_alive(&l->loop))
			break;
	cr_assert_eq(uv_loop_close(&l->loop), 0, "a handle is still open");
}

static bool in_child;

void looprun_in_child(void)
{
	in_child = true;
}

static void looprun_too_late(unsigned seconds)
{
	if (in_child) {
		fprintf(stderr, "the condition did not come true within %u s\n", seconds);
		_exit(1);
	}
	cr_assert(false, "the condition did not come true within %u s", seconds);
}

void looprun_until(struct looprun *l, bool (*done)(void *arg), void *arg, unsigned seconds)
{
	double end = now_s() + seconds * SLOWER;
	uv_timer_t tick;

	uv_timer_init(&l->loop, &tick);
	uv_timer_start(&tick, on_tick, 20, 20);
	while (!done(arg)) {
		uv_run(&l->loop, UV_RUN_ONCE);
		if (now_s() >= end)
			looprun_too_late(seconds);
	}
	uv_close((uv_handle_t *)&tick, NULL);
	uv_run(&l->loop, UV_RUN_NOWAIT);
}

static bool flag_set(void *arg)
{
	return *(const bool *)arg;
}

void looprun_flag(struct looprun *l, const bool *flag, unsigned seconds)
{
	looprun_until(l, flag_set, (void *)flag, seconds);
}
