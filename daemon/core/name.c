#include "core/name.h"

#include <stddef.h>
#include <string.h>

#define NAME_CHARS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"

bool name_is_good(const char *text)
{
	size_t n = strspn(text, NAME_CHARS);

	return n > 0 && n < NAME_BYTES && !text[n];
}
