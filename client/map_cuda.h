/*
 * Slabs of GPU memory: a descriptor is imported with CUDA's virtual memory management, a
 * handle opened with CUDA's legacy IPC. The device of map_use is a struct cuda.
 */
#ifndef SHARDD_CLIENT_MAP_CUDA_H
#define SHARDD_CLIENT_MAP_CUDA_H

#include "map.h"

/* Empty in a build without the CUDA Toolkit. */
extern const struct map_ops map_cuda_ops;

#endif
