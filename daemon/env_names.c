#include "env_names.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "config_keys.h"
#include "core/check.h"

#define ENV_PREFIX   "SHARDD_"
#define ENV_NAME_MAX 64u
#define ENV_NEAR     3u /* maximum number of wrong, missing or extra letters */

/* Variables that are read in addition to the configuration's keys. */
static const char *const env_others[] = {
	"SHARDD_JOB", "SHARDD_RING", "SHARDD_DEBUG", "SHARDD_DEVICE", "SHARDD_INSTANCE",
	"SHARDD_LIBCUDA", "SHARDD_LIBNCCL", "SHARDD_KERNELS", "SHARDD_GUARD", "SHARDD_NODES",
	"SHARDD_LIBRARY",
	/* the build and the tests */
	"SHARDD_BIN_DIR", "SHARDD_BUILD_DIR", "SHARDD_LIB_DIR", "SHARDD_SOURCE_DIR",
	"SHARDD_GOLDEN", "SHARDD_CUDA_HOME", "SHARDD_BOOT_INSIDE", "SHARDD_KILL_POINTS",
	"SHARDD_LINT_VENV", "SHARDD_LINT_NCCL", "SHARDD_TORCH_VENV", "SHARDD_UNIT"
};

/* Whole families: those of the tests, and those that Kubernetes sets for a service called
 * shardd. */
static const char *const env_families[] = { "SHARDD_TEST_", "SHARDD_SIM_", "SHARDD_SERVICE_",
					    "SHARDD_PORT" };

/* The @i-th known name into @buf. Return: false past the end. */
static bool env_names_env_known(size_t i, char buf[ENV_NAME_MAX])
{
	if (i < ARRAY_SIZE(env_others)) {
		snprintf(buf, ENV_NAME_MAX, "%s", env_others[i]);
		return true;
	}
	i -= ARRAY_SIZE(env_others);
	if (i >= config_n_keys)
		return false;
	snprintf(buf, ENV_NAME_MAX, ENV_PREFIX "%s", config_keys[i].name);
	for (char *c = buf; *c; c++)
		*c = (char)toupper((unsigned char)*c);
	return true;
}

/* Edit distance: letters to change, add or remove. */
static unsigned env_names_env_distance(const char *a, const char *b)
{
	unsigned row[ENV_NAME_MAX + 1];
	size_t n = strlen(b);

	for (size_t j = 0; j <= n; j++)
		row[j] = (unsigned)j;
	for (size_t i = 1; a[i - 1]; i++) {
		unsigned above = row[0];

		row[0] = (unsigned)i;
		for (size_t j = 1; j <= n; j++) {
			unsigned best = above + (a[i - 1] != b[j - 1]);

			above = row[j];
			best = row[j] + 1 < best ? row[j] + 1 : best;
			row[j] = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
		}
	}
	return row[n];
}

static bool env_names_env_in_family(const char *name)
{
	for (size_t i = 0; i < ARRAY_SIZE(env_families); i++)
		if (strncmp(name, env_families[i], strlen(env_families[i])) == 0)
			return true;
	return false;
}

static void env_names_env_look(const char *name, env_names_cb fn, void *userdata)
{
	char known[ENV_NAME_MAX], nearest[ENV_NAME_MAX] = "";
	unsigned least = ENV_NEAR + 1;

	for (size_t i = 0; env_names_env_known(i, known); i++) {
		unsigned d = strcmp(name, known) == 0 ? 0 : env_names_env_distance(name, known);

		if (!d)
			return;
		/* SHARDD_JOB is three changes at most from every name of three letters */
		if (d >= least || (d > 1 && name[strlen(ENV_PREFIX)] != known[strlen(ENV_PREFIX)]))
			continue;
		least = d;
		memcpy(nearest, known, sizeof(nearest));
	}
	fn(name, *nearest ? nearest : NULL, userdata);
}

void env_names_unknown(env_names_cb fn, void *userdata)
{
	for (char **e = environ; e && *e; e++) {
		char name[ENV_NAME_MAX];
		size_t n = strcspn(*e, "=");

		if (strncmp(*e, ENV_PREFIX, strlen(ENV_PREFIX)) != 0)
			continue;
		n = n < sizeof(name) ? n : sizeof(name) - 1;
		memcpy(name, *e, n);
		name[n] = '\0';
		if (!env_names_env_in_family(name))
			env_names_env_look(name, fn, userdata);
	}
}
