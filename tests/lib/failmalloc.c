/* The linker's --wrap sends every call of malloc to __wrap_malloc, and __real_malloc
 * to the one that was meant. */
#include "failmalloc.h"

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
char *__real_strdup(const char *s);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);
char *__wrap_strdup(const char *s);

static atomic_uint left;
static atomic_bool hit;

void failmalloc_in(unsigned n)
{
	atomic_store(&hit, false);
	atomic_store(&left, n);
}

bool failmalloc_hit(void)
{
	return atomic_load(&hit);
}

static bool fails_now(void)
{
	if (!atomic_load(&left) || atomic_fetch_sub(&left, 1) != 1)
		return false;
	atomic_store(&hit, true);
	errno = ENOMEM;
	return true;
}

void *__wrap_malloc(size_t bytes)
{
	return fails_now() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes)
{
	return fails_now() ? NULL : __real_calloc(n, bytes);
}

void *__wrap_realloc(void *p, size_t bytes)
{
	return fails_now() ? NULL : __real_realloc(p, bytes);
}

char *__wrap_strdup(const char *s)
{
	return fails_now() ? NULL : __real_strdup(s);
}
