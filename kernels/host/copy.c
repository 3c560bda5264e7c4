#include "host/host.h"

#include <string.h>

void HOST(copy)(const struct k_copy *a, size_t begin, size_t end)
{
	if (begin < end)
		memcpy((char *)a->dst + begin, (const char *)a->src + begin, end - begin);
}
