/*
 * libcuda, loaded with dlopen: one table of what we call, so that the same binary runs
 * where there is no driver. Used by the daemon's cuda backend and by the client library;
 * no other file includes cuda.h.
 *
 * In a build without the CUDA Toolkit (SHARDD_CUDA undefined) only cuda_lib_open exists,
 * and says so.
 */
#ifndef SHARDD_CUDA_LIB_H
#define SHARDD_CUDA_LIB_H

#include <stddef.h>

/* The CUDA version that a driver must support: 13.0, as the kernels are built for it. */
#define CUDA_LIB_MIN_DRIVER 13000

#ifdef SHARDD_CUDA
#include <cuda.h>

/* Every entry: the name as cuda.h spells it (its macros choose the version). */
#define CUDA_LIB_FUNCTIONS(X)                          \
	X(cuInit)                                      \
	X(cuDriverGetVersion)                          \
	X(cuGetErrorName)                              \
	X(cuGetErrorString)                            \
	X(cuDeviceGetCount)                            \
	X(cuDeviceGet)                                 \
	X(cuDeviceGetName)                             \
	X(cuDeviceGetUuid)                             \
	X(cuDeviceGetAttribute)                        \
	X(cuDeviceTotalMem)                            \
	X(cuDeviceCanAccessPeer)                       \
	X(cuDevicePrimaryCtxRetain)                    \
	X(cuDevicePrimaryCtxRelease)                   \
	X(cuCtxGetCurrent)                             \
	X(cuCtxSetCurrent)                             \
	X(cuCtxGetDevice)                              \
	X(cuCtxSynchronize)                            \
	X(cuCtxGetStreamPriorityRange)                 \
	X(cuMemGetInfo)                                \
	X(cuMemAlloc)                                  \
	X(cuMemFree)                                   \
	X(cuMemAllocHost)                              \
	X(cuMemFreeHost)                               \
	X(cuMemGetAddressRange)                        \
	X(cuPointerGetAttribute)                       \
	X(cuMemGetAllocationGranularity)               \
	X(cuMemCreate)                                 \
	X(cuMemRelease)                                \
	X(cuMemAddressReserve)                         \
	X(cuMemAddressFree)                            \
	X(cuMemMap)                                    \
	X(cuMemUnmap)                                  \
	X(cuMemSetAccess)                              \
	X(cuMemExportToShareableHandle)                \
	X(cuMemImportFromShareableHandle)              \
	X(cuMemRetainAllocationHandle)                 \
	X(cuMemcpyAsync)                               \
	X(cuMemcpyHtoDAsync)                           \
	X(cuMemcpyDtoHAsync)                           \
	X(cuMemcpyDtoDAsync)                           \
	X(cuMemsetD8Async)                             \
	X(cuMemsetD32Async)                            \
	X(cuStreamCreateWithPriority)                  \
	X(cuStreamDestroy)                             \
	X(cuStreamQuery)                               \
	X(cuStreamSynchronize)                         \
	X(cuStreamGetCtx)                              \
	X(cuStreamWaitEvent)                           \
	X(cuStreamWriteValue64)                        \
	X(cuStreamWaitValue64)                         \
	X(cuEventCreate)                               \
	X(cuEventDestroy)                              \
	X(cuEventRecord)                               \
	X(cuEventQuery)                                \
	X(cuEventSynchronize)                          \
	X(cuEventElapsedTime)                          \
	X(cuIpcGetMemHandle)                           \
	X(cuIpcOpenMemHandle)                          \
	X(cuIpcCloseMemHandle)                         \
	X(cuIpcGetEventHandle)                         \
	X(cuIpcOpenEventHandle)                        \
	X(cuModuleLoadData)                            \
	X(cuModuleUnload)                              \
	X(cuModuleGetFunction)                         \
	X(cuFuncGetAttribute)                          \
	X(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
	X(cuLaunchKernel)

struct cuda_lib {
#define CUDA_LIB_MEMBER(name) __typeof__(&name) name;
	CUDA_LIB_FUNCTIONS(CUDA_LIB_MEMBER)
#undef CUDA_LIB_MEMBER
	int driver_version; /* 13000 for 13.0 */
};

/* "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory". Any thread. Return: @buf. */
const char *cuda_lib_text(const struct cuda_lib *lib, CUresult r, char *buf, size_t bytes);

/* A device's UUID as "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", as nvidia-smi prints it.
 * Any thread. Return: 0 or the driver's error. */
CUresult cuda_lib_uuid(const struct cuda_lib *lib, CUdevice device, char ret[48]);
#else
struct cuda_lib;
#endif

/* Load the library (SHARDD_LIBCUDA in the environment, or libcuda.so.1), find every entry,
 * initialise it and check its version. The first successful call counts, later ones give
 * the same table; it is never unloaded. Never after a fork without exec. Any thread; may
 * take a second.
 * @why: one sentence if it fails: what is missing, too old or broken.
 * Return: 0, -ENOENT (no library), -ENOSYS (an entry is missing, or this build has no CUDA),
 * -ENODEV (no device, or the driver refuses), -EPROTO (driver too old). */
int cuda_lib_open(const struct cuda_lib **ret, char *why, size_t why_bytes);

#endif
