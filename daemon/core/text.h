/* Text into an array; where every op does it, which snprintf is too slow for. Any thread. */
#ifndef SHARDD_CORE_TEXT_H
#define SHARDD_CORE_TEXT_H

#include <string.h>

/* As much of @from as @bytes hold with the 0 at its end; they are at least 1. */
static inline void text_copy(char *to, size_t bytes, const char *from)
{
	size_t n = strnlen(from, bytes - 1);

	memcpy(to, from, n);
	to[n] = '\0';
}

#endif
