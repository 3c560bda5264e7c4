/*
 * Divide factors and shards against the functions of FSDP1, FSDP2 and fairscale:
 * tests/golden/factors.json and layout.json, which make_layout.py writes and describes.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "core/cleanup.h"
#include "fdcheck.h"
#include "golden.h"
#include "unit/layout.h"
#include "unit/reduce_plan.h"
#include "unit/runs.h"

#define MAX_DIMS 4

/* 1 to 4096 ranks. */
Test(golden_layout, divide_factors, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	_cleanup_(golden_json_freep) json_t *file = golden_json("factors.json");
	const json_t *rows = json_object_get(file, "world");

	cr_assert_eq(json_array_size(rows), 4096);
	for (size_t i = 0; i < 4096; i++) {
		const json_t *row = json_array_get(rows, i);
		double pre, post;

		cr_assert_eq(golden_json_count(row, 0), i + 1);
		layout_divide_factors((uint32_t)i + 1, &pre, &post);
		cr_assert_eq(pre, golden_json_number(row, 1), "%zu ranks: pre %g", i + 1, pre);
		cr_assert_eq(post, golden_json_number(row, 2), "%zu ranks: post %g", i + 1, post);
	}
}

/* What a factor divides by: 1 where it does nothing. */
static double divides_by(const struct k_factor *f)
{
	cr_assert(f->how == K_FACTOR_NONE || f->how == K_FACTOR_DIV);
	return f->how ? (double)f->value : 1;
}

/* FSDP2 in fp16 cuts a factor of the user in two. */
Test(golden_layout, factors_of_the_user, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	_cleanup_(golden_json_freep) json_t *file = golden_json("factors.json");
	const json_t *rows = json_object_get(file, "set"), *row;
	size_t i;

	cr_assert_geq(json_array_size(rows), 50);
	json_array_foreach(rows, i, row)
	{
		struct reduce_setting s = { .profile = PROFILE_FSDP2,
					    .gradient_dtype = DTYPE_FP16,
					    .reduce_dtype = DTYPE_FP16,
					    .pre_divide = 1,
					    .post_divide = 1 };
		struct reduce_plan plan;

		s.ranks = s.shard_ranks = (uint32_t)golden_json_count(row, 0);
		s.divide_factor = golden_json_number(row, 1);
		reduce_plan_make(&s, &plan);
		cr_assert_eq(divides_by(&plan.pre), golden_json_number(row, 2), "row %zu", i);
		cr_assert_eq(divides_by(&plan.post), golden_json_number(row, 3), "row %zu", i);
	}
}

Test(golden_layout, flat, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	_cleanup_(golden_json_freep) json_t *file = golden_json("layout.json");
	const json_t *rows = json_object_get(file, "flat"), *row;
	size_t i;

	cr_assert_geq(json_array_size(rows), 400);
	json_array_foreach(rows, i, row)
	{
		uint64_t n = golden_json_count(row, 0), shard = golden_json_count(row, 2);
		uint32_t ranks = (uint32_t)golden_json_count(row, 1);
		const json_t *own = json_array_get(row, 3);
		struct layout l;

		cr_assert(layout_flat(n, ranks, 1, &l));
		cr_assert_eq(l.shard_elements, shard, "%zu elements, %u ranks", (size_t)n, ranks);
		cr_assert_eq(json_array_size(own), ranks);
		for (uint32_t r = 0; r < ranks; r++) {
			cr_assert_eq(layout_owned(&l, r), golden_json_count(own, r),
				     "%zu elements, %u ranks: rank %u", (size_t)n, ranks, r);
			cr_assert(!layout_owned(&l, r) || layout_begin(&l, r) == r * shard);
		}
	}
}

Test(golden_layout, flat_with_a_multiple, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	_cleanup_(golden_json_freep) json_t *file = golden_json("layout.json");
	const json_t *rows = json_object_get(file, "xla"), *row;
	size_t i;

	cr_assert_geq(json_array_size(rows), 100);
	json_array_foreach(rows, i, row)
	{
		struct layout l;

		cr_assert(layout_flat(golden_json_count(row, 0),
				      (uint32_t)golden_json_count(row, 1),
				      (uint32_t)golden_json_count(row, 2), &l));
		cr_assert_eq(l.shard_elements, golden_json_count(row, 3), "row %zu", i);
	}
}

/* A unit of one tensor by its rows, on one device. */
static struct unit *unit_by_rows(const uint64_t *shape, uint32_t dims, uint32_t ranks,
				 struct device *device, state_unit **ret_rec)
{
	state_unit *rec = state_unit_new("u");
	struct unit *u = NULL;
	const struct unit_place place = { &device, 1, 1, 0 };
	struct layout l;

	cr_assert_not_null(rec);
	cr_assert_eq(state_unit_add_tensor(rec, state_tensor_new("t", shape, dims)), 0);
	rec->layout = LAYOUT_DIM0;
	rec->shard_multiple = 1;
	rec->shard_ranks = ranks;
	rec->compute_dtype = rec->gradient_dtype = rec->storage_dtype = DTYPE_FP32;
	cr_assert(unit_layout(rec, ranks, &l));
	cr_assert_eq(unit_new(1, rec, &l, &place, &u), 0);
	*ret_rec = rec;
	return u;
}

/* What each rank has of it: rows of torch's chunk, whose shard has @rows. */
static void check_rows(const struct unit *u, uint32_t ranks, const json_t *own, uint64_t rows,
		       uint64_t row)
{
	cr_assert_eq(json_array_size(own), ranks);
	cr_assert_eq(u->layout.shard_elements, rows * row);
	for (uint32_t r = 0; r < ranks; r++) {
		uint64_t want = golden_json_count(own, r) * row;
		struct unit_run run;
		bool has = unit_rank_run(u, r, 0, &run);

		cr_assert_eq(has, want != 0, "rank %u of %u", r, ranks);
		cr_assert(!has || (run.n == want && run.first == r * rows * row), "rank %u of %u",
			  r, ranks);
	}
}

Test(golden_layout, rows_of_a_tensor, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	_cleanup_(golden_json_freep) json_t *file = golden_json("layout.json");
	const json_t *rows = json_object_get(file, "dim0"), *line;
	struct device device;
	size_t i;

	memset(&device, 0, sizeof(device));
	cr_assert_geq(json_array_size(rows), 250);
	json_array_foreach(rows, i, line)
	{
		const json_t *shape = json_array_get(line, 0);
		uint32_t dims = (uint32_t)json_array_size(shape);
		uint32_t ranks = (uint32_t)golden_json_count(line, 1);
		uint64_t d[MAX_DIMS], row = 1;
		state_unit *rec;
		struct unit *u;

		cr_assert(dims && dims <= MAX_DIMS);
		for (uint32_t k = 0; k < dims; k++) {
			d[k] = golden_json_count(shape, k);
			row *= k ? d[k] : 1;
		}
		u = unit_by_rows(d, dims, ranks, &device, &rec);
		check_rows(u, ranks, json_array_get(line, 3), golden_json_count(line, 2), row);
		unit_free(u);
		state_unit_free(rec);
	}
}
