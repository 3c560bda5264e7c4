#include "expect.h"

#include <ctype.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client_error.h"

struct expected {
	struct expected *next;
	uint8_t instance[EXPECT_BYTES];
	size_t socket_bytes; /* with its 0 */
	char text[];         /* the socket, then the job */
};

static pthread_mutex_t expect_lock = PTHREAD_MUTEX_INITIALIZER;
static struct expected *expect_all;

/* The link to it, or to the end. Called with the lock held. */
static struct expected **expect_link(const char *socket, const char *job)
{
	struct expected **e = &expect_all;

	while (*e && (strcmp((*e)->text, socket) != 0 ||
		      strcmp((*e)->text + (*e)->socket_bytes, job) != 0))
		e = &(*e)->next;
	return e;
}

/* 32 hexadecimal digits. */
static bool expect_parse(const char *text, uint8_t ret[EXPECT_BYTES])
{
	static const char digits[] = "0123456789abcdef";

	if (strlen(text) != 2 * EXPECT_BYTES)
		return false;
	for (unsigned i = 0; i < 2 * EXPECT_BYTES; i++) {
		const char *d = strchr(digits, tolower((unsigned char)text[i]));

		if (!d)
			return false;
		ret[i / 2] = (uint8_t)(ret[i / 2] << 4 | (d - digits));
	}
	return true;
}

int expect_find(const char *socket, const char *job, uint8_t ret[EXPECT_BYTES], bool *ret_any,
		struct shardd_error *err)
{
	const char *given = getenv("SHARDD_INSTANCE");
	const struct expected *e;

	*ret_any = given && *given && strcmp(given, "any") != 0;
	if (*ret_any && !expect_parse(given, ret))
		return error_set(err, SHARDD_INVALID_ARGUMENT, "SHARDD_INSTANCE",
				 "SHARDD_INSTANCE=\"%.40s\" is neither 32 hexadecimal digits nor "
				 "\"any\"",
				 given);
	if (given && *given)
		return 0;
	pthread_mutex_lock(&expect_lock);
	e = *expect_link(socket, job);
	*ret_any = e;
	if (e)
		memcpy(ret, e->instance, EXPECT_BYTES);
	pthread_mutex_unlock(&expect_lock);
	return 0;
}

void expect_note(const char *socket, const char *job, const uint8_t instance[EXPECT_BYTES])
{
	size_t socket_bytes = strlen(socket) + 1, job_bytes = strlen(job) + 1;
	struct expected **e;

	pthread_mutex_lock(&expect_lock);
	e = expect_link(socket, job);
	if (!*e) {
		*e = calloc(1, sizeof(**e) + socket_bytes + job_bytes);
		if (*e) {
			(*e)->socket_bytes = socket_bytes;
			memcpy((*e)->text, socket, socket_bytes);
			memcpy((*e)->text + socket_bytes, job, job_bytes);
		}
	}
	if (*e)
		memcpy((*e)->instance, instance, EXPECT_BYTES);
	pthread_mutex_unlock(&expect_lock);
}

void expect_forget(const char *socket, const char *job)
{
	struct expected **e, *gone;

	pthread_mutex_lock(&expect_lock);
	e = expect_link(socket, job);
	gone = *e;
	if (gone)
		*e = gone->next;
	pthread_mutex_unlock(&expect_lock);
	free(gone);
}
