/*
 * A launch of the kernels that were compiled for the host (kernels.cc). One at a time in a process.
 */
#ifndef SHARDD_TESTS_EMULATED_H
#define SHARDD_TESTS_EMULATED_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

void emulated_launch(unsigned fn, unsigned blocks, const void *args);

/* The same for kernels that can be completed, cut off by the death of the process before store number
 * @stores (from 0 on) is made. The threads of a block take turns at their fences. What a thread has
 * stored since its last fence takes effect then in part and in any order, by @seed. Return: has it
 * come to its end before? */
bool emulated_launch_part(unsigned fn, unsigned blocks, const void *args, uint64_t stores,
			  uint64_t seed);
/* Stores of the last launch. */
uint64_t emulated_stores(void);

#ifdef __cplusplus
}
#endif

#endif
