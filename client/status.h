/* What the daemon says of jobs (client.h: shardd_status, shardd_blame). */
#ifndef SHARDD_CLIENT_STATUS_H
#define SHARDD_CLIENT_STATUS_H

#include <stddef.h>
#include <stdint.h>

struct shardd_client;
struct shardd_error;

/* In less time than this it is not worth while. */
#define STATUS_BLAME_LEAST_MS 20u

/* As shardd_blame. A lost connection stays lost; 2 s at most, or @left_ms. Any thread that holds no lock of @c. */
int status_blame(struct shardd_client *c, uint64_t left_ms, char *ret, size_t bytes,
		 struct shardd_error *err);

#endif
