#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>

#include "core/htab.h"
#include "fdcheck.h"

#define TEST(name) Test(htab, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 30)

TEST(finds_what_was_added)
{
	struct htab t = HTAB_NULL;
	int a, b;

	cr_assert_null(htab_find(&t, "a"));
	cr_assert_null(htab_remove(&t, "a"));
	cr_assert_eq(htab_add(&t, "a", &a), 0);
	cr_assert_eq(htab_add(&t, "b", &b), 0);
	cr_assert_eq(htab_find(&t, "a"), &a);
	cr_assert_eq(htab_find(&t, "b"), &b);
	cr_assert_null(htab_find(&t, ""));
	cr_assert_eq(t.count, 2);
	htab_deinit(&t);
}

TEST(refuses_a_second_of_the_same_name)
{
	struct htab t = HTAB_NULL;
	int a, b;

	cr_assert_eq(htab_add(&t, "a", &a), 0);
	cr_assert_eq(htab_add(&t, "a", &b), -EEXIST);
	cr_assert_eq(htab_find(&t, "a"), &a);
	cr_assert_eq(t.count, 1);
	htab_deinit(&t);
}

TEST(copies_the_key)
{
	struct htab t = HTAB_NULL;
	char key[] = "name";
	int a;

	cr_assert_eq(htab_add(&t, key, &a), 0);
	key[0] = 'x';
	cr_assert_eq(htab_find(&t, "name"), &a);
	cr_assert_null(htab_find(&t, key));
	htab_deinit(&t);
}

TEST(deinit_twice_is_harmless)
{
	struct htab t = HTAB_NULL;
	int a;

	cr_assert_eq(htab_add(&t, "a", &a), 0);
	htab_deinit(&t);
	htab_deinit(&t);
	cr_assert_null(htab_find(&t, "a"));
}

static unsigned next_random(unsigned *state)
{
	*state = *state * 1664525u + 1013904223u;
	return *state >> 8;
}

#define MODEL_MAX 3000

/* Random additions and removals against a plain array: full tables have long runs of
 * collisions, across the end of the array too. */
static void compare_with_model(unsigned keys, unsigned rounds, unsigned seed)
{
	static bool present[MODEL_MAX];
	static int values[MODEL_MAX];
	struct htab t = HTAB_NULL;
	size_t count = 0;
	char key[32];

	memset(present, 0, sizeof(present));
	for (unsigned r = 0; r < rounds; r++) {
		unsigned k = next_random(&seed) % keys;

		snprintf(key, sizeof(key), "unit.%u", k);
		if (next_random(&seed) % 2) {
			cr_assert_eq(htab_add(&t, key, &values[k]), present[k] ? -EEXIST : 0);
			count += !present[k];
			present[k] = true;
		} else {
			cr_assert_eq(htab_remove(&t, key), present[k] ? &values[k] : NULL);
			count -= present[k];
			present[k] = false;
		}
		cr_assert_eq(t.count, count);
		for (unsigned i = 0; i<keys; i += keys> 100 ? 97 : 1) {
			snprintf(key, sizeof(key), "unit.%u", i);
			cr_assert_eq(htab_find(&t, key), present[i] ? &values[i] : NULL);
		}
	}
	htab_deinit(&t);
}

TEST(behaves_like_an_array_when_small_and_crowded)
{
	for (unsigned seed = 1; seed <= 40; seed++)
		compare_with_model(12, 400, seed);
}

TEST(behaves_like_an_array_when_large)
{
	compare_with_model(MODEL_MAX, 20000, 7);
}
