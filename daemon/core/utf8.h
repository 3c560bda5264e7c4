/* Text that may appear in messages to clients. No state, no locale, any thread. */
#ifndef SHARDD_CORE_UTF8_H
#define SHARDD_CORE_UTF8_H

#include <stddef.h>

/* Bytes of the character at @text (zero-terminated), or 0 if it is not valid UTF-8 or
 * a control character. */
size_t utf8_length(const char *text);

#endif
