/* Where HTTP is listened for, as people write it: HOST:PORT or unix:PATH. Any thread. */
#ifndef SHARDD_CORE_HTTP_ADDRESS_H
#define SHARDD_CORE_HTTP_ADDRESS_H

#include <stdbool.h>

#include "core/fault.h"

/* Return: 0, or FAULT_INVALID about the key http. Port 0 stands for one that is free. */
int http_address_check(const char *text, struct fault *f);
/* Return: the path, in @text; NULL: it is HOST:PORT. */
const char *http_address_path(const char *text);
/* Can other machines connect to it? */
bool http_address_is_public(const char *text);

#endif
