/* Running one kop with a set of kernels; for backends on the host. */
#ifndef SHARDD_BACKEND_KOP_H
#define SHARDD_BACKEND_KOP_H

#include "backend/backend.h"

/* Work on elements [begin, end) of @kop (KOP_COPY: bytes), end <= kop->n. Any thread. */
void kop_run(const struct kernels *k, const struct kop *kop, uint64_t begin, uint64_t end);

#endif
