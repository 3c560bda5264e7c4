/*
 * Cuda backends on the simulator: memory taken, filled and read through the backend, tasks
 * run to their end.
 */
#ifndef SHARDD_TESTS_CUDAFIX_H
#define SHARDD_TESTS_CUDAFIX_H

#include "backend/backend_impl.h"
#include "looprun.h"

#define CUDAFIX_DEVICES 8u

struct cudafix {
	struct looprun run;
	struct backend *b; /* the first */
	struct backend *all[CUDAFIX_DEVICES];
	unsigned n;
	unsigned memory; /* news so far, of all devices */
	unsigned lost;
};

/* A task that counts its callbacks. */
struct cudatask {
	struct backend_task task;
	unsigned issued, done;
	int status;
};

/* Is the driver's libcuda meant, and no simulator: SHARDD_TEST_BACKEND is cuda, and SHARDD_LIBCUDA is not
 * set? */
bool cudafix_on_gpu(void);
/* Have the simulator be what cuda_lib_open loads, if not cudafix_on_gpu: before anything else. */
void cudafix_env(void);

/* Start with @devices. Fails the test if it cannot. */
void cudafix_init(struct cudafix *f, unsigned devices);
void cudafix_deinit(struct cudafix *f);
/* Return: what backend_cuda_new does; f->n is 0 if it fails. The loop is there in any
 * case: cudafix_deinit. */
int cudafix_try(struct cudafix *f, const struct backend_cuda_options *o, struct fault *fault);

/* Ask until it is there. Return: what backend_alloc came to. */
int cudafix_ask(struct cudafix *f, struct backend *b, uint64_t bytes, enum backend_share share,
		struct backend_mem **ret);
struct backend_mem *cudafix_alloc(struct cudafix *f, uint64_t bytes);

/* A task with issued and done set, all else zero. */
struct cudatask cudatask_new(void);
void cudatask_submit(struct backend *b, struct cudatask *t);
/* Turn the loop until it is done. Return: its status. */
int cudatask_wait(struct cudafix *f, struct cudatask *t);

/* Submit @n kernels, synchronous, and wait. Return: the status. */
int cudafix_run(struct cudafix *f, struct backend *b, struct launch *launches, unsigned n);
/* Copy @bytes, host or device memory at both ends. Fails the test if it fails. */
void cudafix_copy(struct cudafix *f, void *dst, const void *src, uint64_t bytes);

#endif
