/*
 * Let the n-th allocation of this program fail: malloc, calloc, realloc and strdup as
 * called from our own objects. For programs linked with FAILMALLOC_LINK (CMakeLists.txt).
 */
#ifndef SHARDD_TESTS_FAILMALLOC_H
#define SHARDD_TESTS_FAILMALLOC_H

#include <stdbool.h>

/* The @n-th allocation from now on returns NULL, once (1: the next); 0: none. */
void failmalloc_in(unsigned n);
/* Has it failed since failmalloc_in? */
bool failmalloc_hit(void);

#endif
