/* A daemon that cannot get all it needs says so and leaves nothing. */
#include <criterion/criterion.h>
#include <grpc/grpc.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "app/server.h"
#include "failmalloc.h"
#include "fdcheck.h"

static void on_stopped(void *userdata)
{
	*(bool *)userdata = true;
}

/* Return: server_new's; what was made is stopped again. */
static int start_once(const struct config *config, bool *ret_hit, struct fault *f)
{
	struct inherited in = INHERITED_NULL;
	struct server *s = NULL;
	bool stopped = false;
	uv_loop_t loop;
	int r;

	cr_assert_eq(uv_loop_init(&loop), 0);
	r = server_new(&loop, config, &in, &s, f);
	*ret_hit = failmalloc_hit();
	failmalloc_in(0);
	if (r == 0) {
		server_stop(s, false, 0, on_stopped, &stopped);
		while (!stopped)
			uv_run(&loop, UV_RUN_ONCE);
	}
	uv_run(&loop, UV_RUN_DEFAULT);
	cr_assert_eq(uv_loop_close(&loop), 0);
	return r;
}

static char dir[] = "/tmp/shardd-test-start-XXXXXX";
static struct config config;

/* gRPC core opens descriptors of its own the first time, which stay while it is in use. */
static void test_start_begin(void)
{
	struct fault f = FAULT_NULL;
	bool hit;

	cr_assert(mkdtemp(dir));
	config_default(&config);
	snprintf(config.socket, sizeof(config.socket), "%s/s", dir);
	config.threads = 1;
	grpc_init();
	cr_assert_eq(start_once(&config, &hit, &f), 0, "%s", f.text);
	fdcheck_begin();
}

static void test_start_end(void)
{
	fdcheck_end();
	grpc_shutdown();
	cr_assert_eq(rmdir(dir), 0);
}

TestSuite(start, .init = test_start_begin, .fini = test_start_end, .timeout = 120);

/* What had not been set up yet was ended all the same: the daemon crashed where it should
 * have said what it lacks. The first forty are those before the gRPC thread begins. */
Test(start, any_allocation_may_fail)
{
	unsigned failed = 0;

	for (unsigned n = 1; n <= 40; n++) {
		struct fault f = FAULT_NULL;
		bool hit;
		int r;

		failmalloc_in(n);
		r = start_once(&config, &hit, &f);
		cr_assert(!r || (hit && f.code == FAULT_EXHAUSTED && f.text[0]), "%u: %s", n,
			  f.text);
		failed += r != 0;
	}
	cr_assert_gt(failed, 5);
}
