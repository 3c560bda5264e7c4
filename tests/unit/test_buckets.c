/* Buckets of gradients, held against what torch.distributed makes of the same tensors. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "core/buckets.h"
#include "core/check.h"

enum { F = 1, B = 2, S = 4 }; /* keys; S: sparse */

struct case_of {
	uint32_t n;
	uint64_t bytes[8];
	int kind[8];
	unsigned n_limits;
	uint64_t limits[4];
	bool mapped;
	uint32_t map[8];
	/* torch.distributed._compute_bucket_assignment_by_size */
	uint32_t n_buckets;
	uint32_t sizes[8];
	uint32_t tensors[8];
};

#define ALL_F                          \
	{                              \
		F, F, F, F, F, F, F, F \
	}

static const struct case_of cases[] = {
	{ 5,
	  { 4, 8, 12, 16, 20 },
	  ALL_F,
	  2,
	  { 8, 12 },
	  false,
	  { 0 },
	  4,
	  { 2, 1, 1, 1 },
	  { 0, 1, 2, 3, 4 } },
	{ 5,
	  { 4, 8, 12, 16, 20 },
	  ALL_F,
	  2,
	  { 8, 12 },
	  true,
	  { 4, 3, 2, 1, 0 },
	  4,
	  { 2, 1, 1, 1 },
	  { 4, 3, 2, 1, 0 } },
	{ 5, { 40, 4, 4, 40, 4 }, ALL_F, 1, { 1024 }, false, { 0 }, 1, { 5 }, { 0, 1, 2, 3, 4 } },
	{ 5, { 40, 4, 4, 40, 4 }, ALL_F, 0, { 0 }, false, { 0 }, 1, { 5 }, { 0, 1, 2, 3, 4 } },
	{ 6,
	  { 8, 8, 4, 8, 4, 8 },
	  { F, F | S, B, F, B, F },
	  3,
	  { 8, 16, 4 },
	  false,
	  { 0 },
	  4,
	  { 1, 1, 2, 2 },
	  { 0, 1, 2, 4, 3, 5 } },
	{ 6,
	  { 8, 8, 4, 8, 4, 8 },
	  { F, F, B, F, B | S, F },
	  3,
	  { 8, 16, 4 },
	  true,
	  { 5, 4, 3, 2, 1, 0 },
	  5,
	  { 1, 2, 1, 1, 1 },
	  { 5, 4, 2, 1, 0, 3 } },
	{ 6,
	  { 4, 8, 4, 8, 4, 8 },
	  { B, F, B, F, B, F },
	  1,
	  { 16 },
	  false,
	  { 0 },
	  3,
	  { 3, 2, 1 },
	  { 0, 2, 4, 1, 3, 5 } },
	{ 3, { 8, 12, 16 }, ALL_F, 1, { 8 }, true, { 2, 0, 1 }, 3, { 1, 1, 1 }, { 2, 0, 1 } },
	{ 0, { 0 }, ALL_F, 1, { 8 }, false, { 0 }, 0, { 0 }, { 0 } },
};

static void run(const struct case_of *c, unsigned number)
{
	struct bucket_tensor t[8] = { 0 };
	uint32_t tensors[8], sizes[8];
	int64_t n;

	for (uint32_t i = 0; i < c->n; i++)
		t[i] = (struct bucket_tensor){ c->bytes[i], (uint32_t)c->kind[i] & ~(uint32_t)S,
					       c->kind[i] & S };
	n = buckets_assign(t, c->n, c->limits, c->n_limits, c->mapped ? c->map : NULL, tensors,
			   sizes);
	cr_assert_eq(n, c->n_buckets, "case %u: %lld buckets", number, (long long)n);
	for (uint32_t b = 0; b < c->n_buckets; b++)
		cr_expect_eq(sizes[b], c->sizes[b], "case %u, bucket %u", number, b);
	for (uint32_t i = 0; i < c->n; i++)
		cr_expect_eq(tensors[i], c->tensors[i], "case %u, place %u", number, i);
}

Test(buckets, are_those_of_pytorch, .timeout = 10)
{
	for (unsigned i = 0; i < ARRAY_SIZE(cases); i++)
		run(&cases[i], i);
}

Test(buckets, reversing_turns_the_list_and_no_bucket, .timeout = 10)
{
	uint32_t tensors[] = { 0, 1, 2, 3, 4, 5 }, sizes[] = { 1, 3, 2 };
	const uint32_t want[] = { 4, 5, 1, 2, 3, 0 }, want_sizes[] = { 2, 3, 1 };

	cr_assert_eq(buckets_reverse(tensors, sizes, 3), 0);
	cr_expect_arr_eq(tensors, want, sizeof(want));
	cr_expect_arr_eq(sizes, want_sizes, sizeof(want_sizes));
	cr_assert_eq(buckets_reverse(tensors, sizes, 0), 0);
	cr_expect_arr_eq(tensors, want, sizeof(want));
}

/* ------------------------------------------------------- tests/golden/buckets.json */

#define FILE_NAME SHARDD_SOURCE_DIR "/tests/golden/buckets.json"

static uint64_t number(const json_t *array, size_t i)
{
	return (uint64_t)json_integer_value(json_array_get(array, i));
}

static struct bucket_tensor golden_tensor(const json_t *c, size_t i)
{
	const json_t *map = json_object_get(c, "map"), *sparse = json_object_get(c, "sparse");
	const char *dtype = json_string_value(json_array_get(json_object_get(c, "dtype"), i));
	size_t index = json_array_size(map) ? number(map, i) : i;
	bool wide = strcmp(dtype, "fp32") == 0;

	return (struct bucket_tensor){
		number(json_object_get(c, "numel"), i) * (wide ? 4 : 2),
		wide ? 1 : 2 + (strcmp(dtype, "bf16") == 0),
		json_array_size(sparse) && json_is_true(json_array_get(sparse, index)),
	};
}

static bool is_bucket(const json_t *want, const uint32_t *tensors, uint32_t n)
{
	if (json_array_size(want) != n)
		return false;
	for (uint32_t i = 0; i < n; i++)
		if (number(want, i) != tensors[i])
			return false;
	return true;
}

/* Those that are left over come in the order of a hash table there: one per dtype. */
static bool is_left_over(const json_t *want, const uint32_t *tensors, uint32_t n)
{
	size_t all = json_array_size(want);

	for (size_t b = all > 3 ? all - 3 : 0; b < all; b++)
		if (is_bucket(json_array_get(want, b), tensors, n))
			return true;
	return false;
}

static void golden(const json_t *c, size_t number_of)
{
	const json_t *map = json_object_get(c, "map"), *want = json_object_get(c, "buckets");
	const json_t *limits = json_object_get(c, "limits");
	uint32_t n = (uint32_t)json_array_size(json_object_get(c, "numel")), at = 0;
	bool mapped = json_array_size(map);
	struct bucket_tensor *t = calloc(n, sizeof(*t));
	uint32_t *out = calloc(3 * (size_t)n, sizeof(*out)), *sizes = out + n, *m = sizes + n;
	uint64_t l[8];
	int64_t got;

	for (size_t i = 0; i < json_array_size(limits); i++)
		l[i] = number(limits, i);
	for (uint32_t i = 0; i < n; i++) {
		t[i] = golden_tensor(c, i);
		m[i] = mapped ? (uint32_t)number(map, i) : i;
	}
	got = buckets_assign(t, n, l, (unsigned)json_array_size(limits), mapped ? m : NULL, out,
			     sizes);
	cr_assert_eq(got, (int64_t)json_array_size(want), "case %zu", number_of);
	for (uint32_t b = 0; b < got; at += sizes[b++])
		cr_assert(is_bucket(json_array_get(want, b), out + at, sizes[b]) ||
				  (mapped && is_left_over(want, out + at, sizes[b])),
			  "case %zu, bucket %u", number_of, b);
	free(t);
	free(out);
}

Test(buckets, are_those_of_200_random_models, .timeout = 10)
{
	json_t *all = json_load_file(FILE_NAME, 0, NULL),
	       *cases_of = json_object_get(all, "assign");
	json_t *c;
	size_t i;

	cr_assert_eq(json_array_size(cases_of), 200, "%s", FILE_NAME);
	json_array_foreach(cases_of, i, c) golden(c, i);
	json_decref(all);
}
