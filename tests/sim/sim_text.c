/* Names and sentences of the errors that the simulator gives or that tests inject. */
#include "sim_impl.h"

struct text {
	CUresult code;
	const char *name, *text;
};

#define TEXT(code, text)                         \
	{                                        \
		CUDA_##code, "CUDA_" #code, text \
	}

static const struct text texts[] = {
	TEXT(SUCCESS, "no error"),
	TEXT(ERROR_INVALID_VALUE, "invalid argument"),
	TEXT(ERROR_OUT_OF_MEMORY, "out of memory"),
	TEXT(ERROR_NOT_INITIALIZED, "initialization error"),
	TEXT(ERROR_DEINITIALIZED, "driver shutting down"),
	TEXT(ERROR_STUB_LIBRARY, "the library is a stub"),
	TEXT(ERROR_DEVICE_UNAVAILABLE, "the device is busy or unavailable"),
	TEXT(ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
	TEXT(ERROR_INVALID_DEVICE, "invalid device ordinal"),
	TEXT(ERROR_INVALID_IMAGE, "device kernel image is invalid"),
	TEXT(ERROR_INVALID_CONTEXT, "invalid device context"),
	TEXT(ERROR_MAP_FAILED, "mapping of buffer object failed"),
	TEXT(ERROR_UNMAP_FAILED, "unmapping of buffer object failed"),
	TEXT(ERROR_ALREADY_MAPPED, "resource already mapped"),
	TEXT(ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
	TEXT(ERROR_NOT_MAPPED, "resource not mapped"),
	TEXT(ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
	TEXT(ERROR_NVLINK_UNCORRECTABLE, "uncorrectable NVLink error detected"),
	TEXT(ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
	TEXT(ERROR_INVALID_HANDLE, "invalid resource handle"),
	TEXT(ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
	TEXT(ERROR_NOT_FOUND, "named symbol not found"),
	TEXT(ERROR_NOT_READY, "device not ready"),
	TEXT(ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
	TEXT(ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
	TEXT(ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
	TEXT(ERROR_TOO_MANY_PEERS, "peer mapping resources exhausted"),
	TEXT(ERROR_MISALIGNED_ADDRESS, "misaligned address"),
	TEXT(ERROR_LAUNCH_FAILED, "unspecified launch failure"),
	TEXT(ERROR_NOT_PERMITTED, "operation not permitted"),
	TEXT(ERROR_NOT_SUPPORTED, "operation not supported"),
	TEXT(ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
	TEXT(ERROR_SYSTEM_DRIVER_MISMATCH,
	     "system has unsupported display driver / cuda driver combination"),
	TEXT(ERROR_MPS_CONNECTION_FAILED,
	     "MPS client failed to connect to the MPS control daemon or server"),
	TEXT(ERROR_MPS_SERVER_NOT_READY,
	     "MPS server is not ready to accept new MPS client requests"),
	TEXT(ERROR_MPS_CLIENT_TERMINATED, "MPS client has been terminated"),
	TEXT(ERROR_UNKNOWN, "unknown error"),
};

static const struct text *find(CUresult code)
{
	for (unsigned i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
		if (texts[i].code == code)
			return &texts[i];
	return NULL;
}

CUresult cuGetErrorName(CUresult error, const char **ret)
{
	const struct text *t = find(error);

	*ret = t ? t->name : NULL;
	return t ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **ret)
{
	const struct text *t = find(error);

	*ret = t ? t->text : NULL;
	return t ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
