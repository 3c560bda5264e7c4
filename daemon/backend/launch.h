/* One launch: how to run it with a set of kernels, for backends on the host, and the bytes that it
 * moves. */
#ifndef SHARDD_BACKEND_LAUNCH_H
#define SHARDD_BACKEND_LAUNCH_H

#include "backend/backend.h"

/* Work on elements [begin, end) of @launch (LAUNCH_COPY: bytes; LAUNCH_ASSEMBLE: blocks), end <= launch->n. Any thread. */
void launch_run(const struct kernels *k, const struct launch *launch, uint64_t begin, uint64_t end);

/* Bytes that all of @launch has to read and to write. The read of a line before it is written is not
 * counted. For LAUNCH_ADD_ROWS all rows count. Any thread. */
uint64_t launch_bytes(const struct launch *launch);

#endif
