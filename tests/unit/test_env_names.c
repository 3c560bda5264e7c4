/* env_names: SHARDD_ variables that nothing reads. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "config/config_keys.h"
#include "core/check.h"
#include "core/env_names.h"
#include "fdcheck.h"

#define ENV_TEST(name) \
	Test(env_names, name, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10)

struct seen {
	unsigned n;
	char name[64], nearest[64];
};

static void note(const char *name, const char *nearest, void *userdata)
{
	struct seen *s = userdata;

	s->n++;
	snprintf(s->name, sizeof(s->name), "%s", name);
	snprintf(s->nearest, sizeof(s->nearest), "%s", nearest ? nearest : "");
}

static struct seen look(void)
{
	struct seen s = { 0 };

	env_names_unknown(note, &s);
	return s;
}

ENV_TEST(a_misspelt_name_is_told_with_the_right_one)
{
	static const char *const names[][2] = {
		{ "SHARDD_SOCKT", "SHARDD_SOCKET" },
		{ "SHARDD_MEMORY_BYTE", "SHARDD_MEMORY_BYTES" },
		{ "SHARDD_JBO", "SHARDD_JOB" },
		{ "SHARDD_INSTANC", "SHARDD_INSTANCE" },
		{ "SHARDD_COMPLETELY_ELSE", "" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		struct seen s;

		setenv(names[i][0], "x", 1);
		s = look();
		cr_expect_eq(s.n, 1, "%s", names[i][0]);
		cr_expect_str_eq(s.name, names[i][0]);
		cr_expect_str_eq(s.nearest, names[i][1]);
		unsetenv(names[i][0]);
	}
}

ENV_TEST(what_something_reads_is_known)
{
	static const char *const names[] = {
		"SHARDD_SOCKET",  "SHARDD_JOB",       "SHARDD_RING",    "SHARDD_DEVICE",
		"SHARDD_GUARD",   "SHARDD_KERNELS",   "SHARDD_LIBRARY", "SHARDD_LIBCUDA",
		"SHARDD_LIBNCCL", "SHARDD_TEST_LONG", "SHARDD_PORT",    "SHARDD_SERVICE_HOST",
		"SHARDD_DEBUG",   "SHARDX",           "NOT_SHARDD_X"
	};

	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		setenv(names[i], "x", 1);
	for (size_t i = 0; env_names_config[i]; i++)
		setenv(env_names_config[i], "x", 1);
	cr_expect_eq(look().n, 0, "%s", look().name);
}

/* The list lies in core/, where libshardd may use it, away from the keys. */
ENV_TEST(the_names_of_the_configuration_are_its_keys)
{
	for (size_t i = 0; i < config_n_keys; i++) {
		char name[96] = "SHARDD_";

		for (const char *c = config_keys[i].name; *c; c++)
			strncat(name, (char[]){ (char)(*c == '_' ? '_' : *c - 32), 0 }, 1);
		cr_assert_not_null(env_names_config[i], "%s is missing", name);
		cr_expect_str_eq(env_names_config[i], name);
	}
	cr_expect_null(env_names_config[config_n_keys]);
}

ENV_TEST(long_names_are_cut)
{
	char name[300] = "SHARDD_";

	memset(name + 7, 'A', sizeof(name) - 8);
	setenv(name, "x", 1);
	cr_expect_eq(look().n, 1);
}
