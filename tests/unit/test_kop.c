/* What kernels move, as a trace of them says it. */
#include <criterion/criterion.h>

#include "backend/kop.h"
#include "core/check.h"
#include "fdcheck.h"

TestSuite(kop, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10);

/* The amounts are those that docs/performance.md counts by hand. */
Test(kop, bytes_are_what_is_read_and_written)
{
	static float x;
	const struct {
		struct kop kop;
		uint64_t bytes;
	} rows[] = {
		{ { .kind = KOP_CAST, .cast = { NULL, NULL, DTYPE_BF16, DTYPE_FP32, false } }, 6 },
		{ { .kind = KOP_REDUCE,
		    .reduce = { .k = 4, .in_dtype = DTYPE_BF16, .out_dtype = DTYPE_FP32 } },
		  4 * 2 + 4 },
		{ { .kind = KOP_REDUCE,
		    .reduce = { .k = 1,
				.in_dtype = DTYPE_FP32,
				.out_dtype = DTYPE_FP32,
				.accumulate = true } },
		  4 + 8 },
		{ { .kind = KOP_ALL_REDUCE, .all_reduce = { .k = 3, .dtype = DTYPE_FP16 } }, 8 },
		{ { .kind = KOP_ADAMW }, 28 },
		{ { .kind = KOP_ADAMW, .adamw = { .vmax = &x } }, 36 },
		{ { .kind = KOP_ADAM }, 28 },
		{ { .kind = KOP_SGD }, 12 },
		{ { .kind = KOP_SGD, .sgd = { .buf = &x } }, 20 },
		{ { .kind = KOP_SGD, .sgd = { .buf = &x, .first = true } }, 16 },
		{ { .kind = KOP_NORM }, 4 },
		{ { .kind = KOP_SCALE }, 8 },
		{ { .kind = KOP_CLAMP }, 8 },
		{ { .kind = KOP_UNSCALE }, 8 },
		{ { .kind = KOP_FOUND_INF, .found_inf = { .dtype = DTYPE_BF16 } }, 2 },
		{ { .kind = KOP_FILL }, 4 },
		{ { .kind = KOP_PACK,
		    .pack = { .dst_dtype = DTYPE_BF16, .src_dtype = DTYPE_FP32 } },
		  6 },
		{ { .kind = KOP_COPY }, 2 },
		{ { .kind = KOP_ADD_ROWS, .add_rows = { .n_rows = 5, .dtype = DTYPE_BF16 } },
		  5 * (2 + 8) },
		{ { .kind = KOP_REDUCE_STEP,
		    .reduce_step = { .reduce = { .k = 4,
						 .in_dtype = DTYPE_FP32,
						 .out_dtype = DTYPE_FP32 },
				     .step = { .kind = K_STEP_ADAMW } } },
		  4 * 4 + 24 },
		{ { .kind = KOP_REDUCE_STEP,
		    .reduce_step = { .reduce = { .k = 2,
						 .in_dtype = DTYPE_BF16,
						 .out_dtype = DTYPE_FP32,
						 .accumulate = true },
				     .step = { .kind = K_STEP_ADAM, .adam = { .vmax = &x } } } },
		  2 * 2 + 4 + 32 },
		{ { .kind = KOP_REDUCE_STEP,
		    .reduce_step = { .reduce = { .k = 1,
						 .in_dtype = DTYPE_FP32,
						 .out_dtype = DTYPE_FP32 },
				     .step = { .kind = K_STEP_SGD } } },
		  4 + 8 },
	};
	unsigned kinds = 0;

	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		struct kop kop = rows[i].kop;

		kop.n = 1000;
		cr_expect_eq(kop_bytes(&kop), 1000 * rows[i].bytes, "row %zu", i);
		kinds |= 1u << kop.kind;
	}
	cr_expect_eq(kinds, (1u << _KOP_N) - 1, "every kind");
}
