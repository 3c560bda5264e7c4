/* The kernel that keeps a device busy (sim_spin.c). */
#ifndef SHARDD_TESTS_SIM_RUN_H
#define SHARDD_TESTS_SIM_RUN_H

#include <stdint.h>

/* Keep the device of the stream that calls busy for so long, when it is its process's turn.
 * Stream thread. Return: nanoseconds from the first turn to the end. */
uint64_t spin_run(uint64_t nanoseconds);

/* A kernel of kernels/cuda (sim_undo.c). @args: with addresses of this process. Stream thread. */
void undo_run(unsigned fn, const void *args, unsigned blocks);
/* Of so many blocks. */
unsigned undo_threads(unsigned blocks);

#endif
