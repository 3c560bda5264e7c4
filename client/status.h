/* What the daemon says of jobs (client.h: shardd_status, shardd_blame). */
#ifndef SHARDD_CLIENT_STATUS_H
#define SHARDD_CLIENT_STATUS_H

#include <stddef.h>

struct shardd_client;
struct shardd_error;

/* As shardd_blame. A lost connection stays lost; 2 s at most. Any thread that holds no lock of @c. */
int status_blame(struct shardd_client *c, char *ret, size_t bytes, struct shardd_error *err);

#endif
