/* The rule for names of nodes and of clusters. No state, no locale, any thread. */
#ifndef SHARDD_CORE_NAME_H
#define SHARDD_CORE_NAME_H

#include <stdbool.h>

/* With the terminating 0. */
#define NAME_BYTES 64
#define NAME_RULE  "1 to 63 letters, digits, '.', '_' and '-'"

/* Letters and digits are those of ASCII. */
bool name_is_good(const char *text);

#endif
