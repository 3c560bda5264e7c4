/* What kernels move, as a trace of them says it. */
#include <criterion/criterion.h>

#include "backend/launch.h"
#include "core/check.h"
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
