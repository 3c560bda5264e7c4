/* What kernels move, as a trace of them says it. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "backend/launch.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/memfile.h"
#include "fdcheck.h"

TestSuite(launch, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10);

/* The amounts are those that docs/performance.md counts by hand. */
Test(launch, bytes_are_what_is_read_and_written)
{
	static float x;
	const struct {
		struct launch launch;
		uint64_t bytes;
	} rows[] = {
		{ { .kind = LAUNCH_CAST, .cast = { NULL, NULL, DTYPE_BF16, DTYPE_FP32, false } },
		  6 },
		{ { .kind = LAUNCH_REDUCE,
		    .reduce = { .k = 4, .in_dtype = DTYPE_BF16, .out_dtype = DTYPE_FP32 } },
		  4 * 2 + 4 },
		{ { .kind = LAUNCH_REDUCE,
		    .reduce = { .k = 1,
				.in_dtype = DTYPE_FP32,
				.out_dtype = DTYPE_FP32,
				.accumulate = true } },
		  4 + 8 },
		{ { .kind = LAUNCH_ALL_REDUCE, .all_reduce = { .k = 3, .dtype = DTYPE_FP16 } }, 8 },
		{ { .kind = LAUNCH_ADAMW }, 28 },
		{ { .kind = LAUNCH_ADAMW, .adamw = { .vmax = &x } }, 36 },
		{ { .kind = LAUNCH_ADAM }, 28 },
		{ { .kind = LAUNCH_SGD }, 12 },
		{ { .kind = LAUNCH_SGD, .sgd = { .buf = &x } }, 20 },
		{ { .kind = LAUNCH_SGD, .sgd = { .buf = &x, .first = true } }, 16 },
		{ { .kind = LAUNCH_NORM }, 4 },
		{ { .kind = LAUNCH_SCALE }, 8 },
		{ { .kind = LAUNCH_CLAMP }, 8 },
		{ { .kind = LAUNCH_UNSCALE }, 8 },
		{ { .kind = LAUNCH_FOUND_INF, .found_inf = { .dtype = DTYPE_BF16 } }, 2 },
		{ { .kind = LAUNCH_FILL }, 4 },
		{ { .kind = LAUNCH_PACK,
		    .pack = { .dst_dtype = DTYPE_BF16, .src_dtype = DTYPE_FP32 } },
		  6 },
		{ { .kind = LAUNCH_COPY }, 2 },
		{ { .kind = LAUNCH_ADD_ROWS, .add_rows = { .n_rows = 5, .dtype = DTYPE_BF16 } },
		  5 * (2 + 8) },
		{ { .kind = LAUNCH_REDUCE_STEP,
		    .reduce_step = { .reduce = { .k = 4,
						 .in_dtype = DTYPE_FP32,
						 .out_dtype = DTYPE_FP32 },
				     .step = { .kind = K_STEP_ADAMW } } },
		  4 * 4 + 24 },
		{ { .kind = LAUNCH_REDUCE_STEP,
		    .reduce_step = { .reduce = { .k = 2,
						 .in_dtype = DTYPE_BF16,
						 .out_dtype = DTYPE_FP32,
						 .accumulate = true },
				     .step = { .kind = K_STEP_ADAM, .adam = { .vmax = &x } } } },
		  2 * 2 + 4 + 32 },
		{ { .kind = LAUNCH_REDUCE_STEP,
		    .reduce_step = { .reduce = { .k = 1,
						 .in_dtype = DTYPE_FP32,
						 .out_dtype = DTYPE_FP32 },
				     .step = { .kind = K_STEP_SGD } } },
		  4 + 8 },
		{ { .kind = LAUNCH_ASSEMBLE, .assemble = { .moves = 300 } }, 300 },
	};
	unsigned kinds = 0;

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		struct launch launch = rows[i].launch;

		launch.n = 1000;
		cr_expect_eq(launch_bytes(&launch), 1000 * rows[i].bytes, "row %zu", i);
		kinds |= 1u << launch.kind;
	}
	cr_expect_eq(kinds, (1u << _LAUNCH_N) - 1, "every kind");
}

enum { PAGE = 4096, AROUND = 16, PAGES = 4096, FLOATS = PAGES * PAGE / sizeof(float) };

static long faults(void)
{
	struct rusage u;

	cr_assert_eq(getrusage(RUSAGE_THREAD, &u), 0);
	return u.ru_minflt;
}

/* Memory whose pages exist, as a daemon finds what the previous one has left. */
static float *map_left(int fd)
{
	void *at = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	cr_assert_neq(at, MAP_FAILED);
	return at;
}

/* Does this kernel map the neighbours of a page that is read, and of one that is written not? */
static bool maps_around(int fd)
{
	float *at = map_left(fd);
	long before = faults();

	for (unsigned i = 0; i < AROUND; i++)
		(void)*(volatile char *)((char *)at + i * PAGE);
	before = faults() - before;
	munmap(at, PAGES * PAGE);
	return sysconf(_SC_PAGESIZE) == PAGE && before == 1;
}

/* Each page had a fault of its own: the step after the death of a daemon took three times as long as
 * a calm one, most of it in the kernel. */
Test(launch, memory_that_is_there_is_mapped_in_few_faults)
{
	_cleanup_(freep) float *g = calloc(FLOATS, sizeof(*g));
	_cleanup_(fd_closep) int fd = -1;
	struct launch sgd = { .kind = LAUNCH_SGD, .n = FLOATS };
	struct launch cast = { .kind = LAUNCH_CAST, .n = FLOATS };
	struct launch copy = { .kind = LAUNCH_COPY, .n = PAGES * PAGE };
	struct launch *all[] = { &sgd, &cast, &copy };

	cr_assert(g && memfile_new("left", &fd) == 0 && ftruncate(fd, PAGES * PAGE) == 0);
	for (unsigned i = 0; i < PAGES; i++)
		cr_assert_eq(pwrite(fd, "", 1, i * PAGE), 1);
	if (!maps_around(fd))
		cr_skip_test("this kernel maps page by page");
	for (unsigned i = 0; i < FLOATS; i++)
		g[i] = 1;
	for (unsigned i = 0; i < ARRAY_SIZE(all); i++) {
		float *at = map_left(fd);
		long before;

		sgd.sgd = (struct k_sgd){ .p = at, .g = g, .lr = 1, .profile = K_EAGER_SINGLE };
		cast.cast = (struct k_cast){ at, g, DTYPE_FP32, DTYPE_FP32, false };
		copy.copy = (struct k_copy){ at, g };
		before = faults();
		/* not from the beginning of a window on */
		launch_run(kernels_host(), all[i], 1000, all[i]->n);
		cr_expect_leq(faults() - before, PAGES / AROUND + AROUND, "launch %u", i);
		munmap(at, PAGES * PAGE);
	}
}
