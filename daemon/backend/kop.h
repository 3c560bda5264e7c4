/* One kop: how to run it with a set of kernels, for backends on the host, and the bytes that it
 * moves. */
#ifndef SHARDD_BACKEND_KOP_H
#define SHARDD_BACKEND_KOP_H

#include "backend/backend.h"

/* Work on elements [begin, end) of @kop (KOP_COPY: bytes), end <= kop->n. Any thread. */
void kop_run(const struct kernels *k, const struct kop *kop, uint64_t begin, uint64_t end);

/* Bytes that all of @kop has to read and to write. The read of a line before it is written is not
 * counted. For KOP_ADD_ROWS all rows count. Any thread. */
uint64_t kop_bytes(const struct kop *kop);

#endif
