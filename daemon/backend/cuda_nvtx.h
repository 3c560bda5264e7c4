/*
 * Ranges of NVTX around what the executor puts on a stream, so that a tool such as Nsight Systems shows which op kernels
 * belong to: domain "shardd", "Reduce train/layer.0". A tool is there if NVTX_INJECTION64_PATH in the environment names
 * its library; without one a range costs a test. In a build without the header of NVTX there are none.
 */
#ifndef SHARDD_BACKEND_CUDA_NVTX_H
#define SHARDD_BACKEND_CUDA_NVTX_H

#include "backend/backend.h"

/* Load the tool's library, if there is one: once, before the first range. Any thread; may take a moment. */
void cuda_nvtx_open(void);
/* The range of @task begins, or ends: on one thread. A task without launches has none. */
void cuda_nvtx_begin(const struct backend_task *task);
void cuda_nvtx_end(const struct backend_task *task);

#endif
