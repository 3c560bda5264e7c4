#ifndef SHARDD_TESTS_LONGFORM_H
#define SHARDD_TESTS_LONGFORM_H

/* How much a test does: tests/run --nightly sets SHARDD_TEST_LONG=1. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SANITIZE_ADDRESS__
#define LONGFORM_ADDRESSES true
#else
#define LONGFORM_ADDRESSES false
#endif

static inline bool longform_asked(void)
{
	const char *text = getenv("SHARDD_TEST_LONG");

	return text && *text && strcmp(text, "0") != 0;
}

/* Is this the address sanitizer's short run? What takes some times as long there, and is done in
 * full by the plain build, leaves out a part. */
static inline bool longform_cut(void)
{
	return LONGFORM_ADDRESSES && !longform_asked();
}

#endif
