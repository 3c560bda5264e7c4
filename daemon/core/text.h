/* Copies text into an array, on paths of every op, where snprintf is too slow. Any thread. */
#ifndef SHARDD_CORE_TEXT_H
#define SHARDD_CORE_TEXT_H

#include <string.h>

/* Copy as much of @from as fits into @bytes with the terminating 0; @bytes is at least 1. */
static inline void text_copy(char *to, size_t bytes, const char *from)
{
	size_t n = strnlen(from, bytes - 1);

	memcpy(to, from, n);
	to[n] = '\0';
}

#endif
