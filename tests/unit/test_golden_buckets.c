/*
 * Buckets against PyTorch's own assignment and against what DistributedDataParallel did with
 * it: tests/golden/buckets.json, which make_layout.py writes and describes.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "core/buckets.h"
#include "core/cleanup.h"
#include "fdcheck.h"
#include "golden.h"

#define MAX_TENSORS 64

struct assigned {
	uint32_t n;
	struct bucket_tensor tensors[MAX_TENSORS];
	uint64_t limits[MAX_TENSORS];
	unsigned n_limits;
	uint32_t map[MAX_TENSORS];
	bool has_map;
	bool one_key;
	uint32_t order[MAX_TENSORS], sizes[MAX_TENSORS];
	uint32_t n_buckets;
};

static uint32_t dtype_number(const json_t *name)
{
	for (enum dtype t = DTYPE_FP32; t < _DTYPE_N; t++)
		if (strcmp(dtype_name(t), json_string_value(name)) == 0)
			return (uint32_t)t;
	cr_assert_fail("no such dtype");
	return 0;
}

static void read_tensors(const json_t *row, struct assigned *a)
{
	const json_t *numel = json_object_get(row, "numel"), *dtype = json_object_get(row, "dtype");
	const json_t *sparse = json_object_get(row, "sparse"), *map = json_object_get(row, "map");

	a->n = (uint32_t)json_array_size(numel);
	cr_assert(a->n && a->n <= MAX_TENSORS);
	a->one_key = true;
	a->has_map = json_array_size(map) != 0;
	for (uint32_t i = 0; i < a->n; i++) {
		uint32_t t = dtype_number(json_array_get(dtype, i));

		a->tensors[i] = (struct bucket_tensor){
			.bytes = golden_json_count(numel, i) * dtype_size((enum dtype)t),
			.key = t,
		};
		a->one_key = a->one_key && t == a->tensors[0].key;
		if (a->has_map)
			a->map[i] = (uint32_t)golden_json_count(map, i);
		/* torch looks the flag up by the tensor's index */
		if (json_array_size(sparse))
			a->tensors[i].sparse =
				json_is_true(json_array_get(sparse, a->has_map ? a->map[i] : i));
	}
}

static void read_limits(const json_t *limits, struct assigned *a)
{
	a->n_limits = (unsigned)json_array_size(limits);
	cr_assert_leq(a->n_limits, MAX_TENSORS);
	for (unsigned i = 0; i < a->n_limits; i++)
		a->limits[i] = golden_json_count(limits, i);
}

static void assign(struct assigned *a)
{
	int64_t n = buckets_assign(a->tensors, a->n, a->limits, a->n_limits,
				   a->has_map ? a->map : NULL, a->order, a->sizes);

	cr_assert(n > 0 && n <= a->n);
	a->n_buckets = (uint32_t)n;
}

/* Where bucket @bucket of torch's is in @a: at which index, or UINT32_MAX. */
static uint32_t find(const struct assigned *a, const json_t *bucket)
{
	uint32_t at = 0;

	for (uint32_t b = 0; b < a->n_buckets; at += a->sizes[b++]) {
		bool same = a->sizes[b] == json_array_size(bucket);

		for (uint32_t i = 0; same && i < a->sizes[b]; i++)
			same = a->order[at + i] == golden_json_count(bucket, i);
		if (same)
			return b;
	}
	return UINT32_MAX;
}

/* The same buckets in the same order; with a map and several dtypes torch has those that
 * stay open to the end in the order of a hash table, so that only the buckets are compared. */
static void check_row(const json_t *row, size_t i)
{
	const json_t *buckets = json_object_get(row, "buckets"), *bucket;
	struct assigned a = { 0 };
	size_t b;

	read_tensors(row, &a);
	read_limits(json_object_get(row, "limits"), &a);
	assign(&a);
	cr_assert_eq(a.n_buckets, json_array_size(buckets), "row %zu", i);
	json_array_foreach(buckets, b, bucket)
	{
		uint32_t at = find(&a, bucket);

		cr_assert_neq(at, UINT32_MAX, "row %zu: bucket %zu is not there", i, b);
		if (!a.has_map || a.one_key)
			cr_assert_eq(at, b, "row %zu: bucket %zu is number %u", i, b, at);
	}
}

Test(golden_buckets, assignment, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	_cleanup_(golden_json_freep) json_t *file = golden_json("buckets.json");
	const json_t *rows = json_object_get(file, "assign"), *row;
	size_t i;

	cr_assert_geq(json_array_size(rows), 200);
	json_array_foreach(rows, i, row) check_row(row, i);
}

static void expect_bytes(const json_t *row, const char *key, const struct assigned *a)
{
	const json_t *bytes = json_object_get(row, key);
	uint32_t at = 0;

	cr_assert_eq(json_array_size(bytes), a->n_buckets, "%s", key);
	for (uint32_t b = 0; b < a->n_buckets; b++) {
		uint64_t sum = 0;

		for (uint32_t i = 0; i < a->sizes[b]; i++)
			sum += golden_json_count(json_object_get(row, "numel"), a->order[at++]) * 4;
		cr_assert_eq(sum, golden_json_count(bytes, b), "%s of bucket %u", key, b);
	}
}

/* DistributedDataParallel's limits: a list of the user's; else a first bucket smaller than the
 * others only where the user sets none. */
static void ddp_limits(const json_t *row, struct assigned *a)
{
	uint64_t cap_mb = (uint64_t)json_integer_value(json_object_get(row, "bucket_cap_mb"));
	const json_t *list = json_object_get(row, "bucket_cap_mb_list");

	if (json_array_size(list)) {
		read_limits(list, a);
		for (unsigned i = 0; i < a->n_limits; i++)
			a->limits[i] <<= 20;
		return;
	}
	a->n_limits = cap_mb ? 1 : 2;
	a->limits[0] = cap_mb ? cap_mb << 20 : BUCKETS_FIRST_BYTES;
	a->limits[1] = BUCKETS_CAP_BYTES;
}

static void read_parameters(const json_t *row, const json_t *order, struct assigned *a)
{
	const json_t *numel = json_object_get(row, "numel");

	a->n = (uint32_t)json_array_size(numel);
	cr_assert(a->n && a->n <= MAX_TENSORS);
	a->has_map = order != NULL;
	for (uint32_t i = 0; i < a->n; i++) {
		a->map[i] = order ? (uint32_t)golden_json_count(order, i) : i;
		a->tensors[i] =
			(struct bucket_tensor){ .bytes = golden_json_count(numel, a->map[i]) * 4,
						.key = 1 };
	}
}

Test(golden_buckets, of_ddp, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20)
{
	_cleanup_(golden_json_freep) json_t *file = golden_json("buckets.json");
	const json_t *rows = json_object_get(file, "ddp"), *row;
	size_t i;

	cr_assert_geq(json_array_size(rows), 20);
	json_array_foreach(rows, i, row)
	{
		bool unused = json_is_true(json_object_get(row, "find_unused"));
		bool list = json_array_size(json_object_get(row, "bucket_cap_mb_list")) != 0;
		struct assigned a = { 0 };

		read_parameters(row, NULL, &a);
		if (unused || list)
			ddp_limits(row, &a);
		assign(&a);
		cr_assert_eq(buckets_reverse(a.order, a.sizes, a.n_buckets), 0);
		expect_bytes(row, "first", &a);
		if (unused) /* not rebuilt */
			continue;
		read_parameters(row, json_object_get(row, "ready"), &a);
		ddp_limits(row, &a);
		assign(&a);
		expect_bytes(row, "rebuilt", &a);
	}
}
