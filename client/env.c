#include "env.h"

#include <ctype.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client_error.h"
#include "core/env_names.h"

const char *env_socket(const char *given)
{
	const char *value = given ? given : getenv("SHARDD_SOCKET");

	return value && *value ? value : ENV_DEFAULT_SOCKET;
}

bool env_no_ring(void)
{
	const char *value = getenv("SHARDD_RING");

	return value && strcmp(value, "off") == 0;
}

int env_job(const char *given, const char **ret, struct shardd_error *err)
{
	const char *value = given ? given : getenv("SHARDD_JOB");

	if (!value)
		return error_set(
			err, SHARDD_INVALID_ARGUMENT, "job.name",
			"no job name is given and SHARDD_JOB is not set: give one of them");
	*ret = value;
	return 0;
}

int env_number(const char *name, uint32_t max, uint32_t *ret, struct shardd_error *err)
{
	const char *value = getenv(name);
	unsigned long long number;
	char *end;

	if (!value)
		return error_set(err, SHARDD_INVALID_ARGUMENT, name,
				 "no value is given and %s is not set: give one of them", name);
	errno = 0;
	number = strtoull(value, &end, 10);
	/* strtoull would take a sign and leading blanks. */
	if (!isdigit((unsigned char)value[0]) || *end || errno || number > max)
		return error_set(err, SHARDD_INVALID_ARGUMENT, name,
				 "%s=\"%.40s\" is not a whole number from 0 to %u", name, value,
				 max);
	*ret = (uint32_t)number;
	return 0;
}

int env_signed(const char *name, int32_t most, int32_t *ret, struct shardd_error *err)
{
	const char *value = getenv(name), *digits = value;
	long long number = 0;
	char *end = NULL;

	if (value && *digits == '-')
		digits++;
	errno = 0;
	if (value)
		number = strtoll(value, &end, 10);
	if (!value || !isdigit((unsigned char)*digits) || *end || errno || number > most ||
	    number < -most)
		return error_set(err, SHARDD_INVALID_ARGUMENT, name,
				 "%s=\"%.40s\" is not a whole number from -%d to %d", name,
				 value ? value : "", most, most);
	*ret = (int32_t)number;
	return 0;
}

static void env_say(const char *name, const char *nearest, void *userdata)
{
	fprintf(stderr, "%s: the variable %s is set, but nothing reads it%s%s%s\n",
		(const char *)userdata, name, nearest ? "; did you mean " : "",
		nearest ? nearest : "", nearest ? "?" : "");
}

void env_warn(const char *who)
{
	static atomic_flag said = ATOMIC_FLAG_INIT;

	if (!atomic_flag_test_and_set(&said))
		env_names_unknown(env_say, (void *)who);
}
