/*
 * Tests whether threads can be started. gRPC core hangs and libuv aborts if they cannot start a
 * thread, so the daemon tests this before it depends on them.
 */
#ifndef SHARDD_CORE_THREADS_H
#define SHARDD_CORE_THREADS_H

#include "core/fault.h"

/* Start @n threads at the same time, with some address space to spare, and end them again. Blocks
 * for a short time. Return: 0, or FAULT_EXHAUSTED with the limits that may be raised. */
int threads_probe(unsigned n, struct fault *f);

#endif
