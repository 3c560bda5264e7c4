#include "core/check.h"

#include <stdio.h>
#include <stdlib.h>

void check_failed(const char *cond, const char *file, int line, const char *func)
{
	fprintf(stderr, "shardd: broken invariant: %s (%s:%d, %s)\n", cond, file, line, func);
	abort();
}
