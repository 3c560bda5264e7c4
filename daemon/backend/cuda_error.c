/*
 * CUDA's errors: what they mean to us, and after which a device is lost.
 */
#include "backend/cuda_impl.h"

#ifdef SHARDD_CUDA

#include <errno.h>
#include <stdio.h>

#include "core/check.h"

/* After these the context, or the whole device, answers nothing but errors. */
static bool cuda_error_is_sticky(CUresult r)
{
	switch ((int)r) {
	case CUDA_ERROR_DEINITIALIZED:
	case CUDA_ERROR_DEVICE_UNAVAILABLE:
	case CUDA_ERROR_NO_DEVICE:
	case CUDA_ERROR_ECC_UNCORRECTABLE:
	case CUDA_ERROR_NVLINK_UNCORRECTABLE:
	case CUDA_ERROR_ILLEGAL_ADDRESS:
	case CUDA_ERROR_LAUNCH_TIMEOUT:
	case CUDA_ERROR_CONTEXT_IS_DESTROYED:
	case CUDA_ERROR_ASSERT:
	case CUDA_ERROR_HARDWARE_STACK_ERROR:
	case CUDA_ERROR_ILLEGAL_INSTRUCTION:
	case CUDA_ERROR_MISALIGNED_ADDRESS:
	case CUDA_ERROR_INVALID_ADDRESS_SPACE:
	case CUDA_ERROR_INVALID_PC:
	case CUDA_ERROR_LAUNCH_FAILED:
	case CUDA_ERROR_CONTAINED:
	case CUDA_ERROR_SYSTEM_NOT_READY:
	case CUDA_ERROR_MPS_CONNECTION_FAILED:
	case CUDA_ERROR_MPS_RPC_FAILURE:
	case CUDA_ERROR_MPS_SERVER_NOT_READY:
	case CUDA_ERROR_MPS_CLIENT_TERMINATED:
	case CUDA_ERROR_UNKNOWN:
		return true;
	default:
		return false;
	}
}

/* The device is lost: remember why, and tell all threads. */
static void cuda_error_lose(struct cuda *c, const char *why)
{
	pthread_mutex_lock(&c->lock);
	if (!atomic_load(&c->lost)) {
		snprintf(c->lost_text, sizeof(c->lost_text), "%s", why);
		atomic_store(&c->lost, true);
		pthread_cond_broadcast(&c->work);
		pthread_cond_broadcast(&c->setup);
		cuda_tick(c);
	}
	pthread_mutex_unlock(&c->lock);
}

int cuda_result(struct cuda *c, CUresult r, const char *call)
{
	char text[100], why[160];

	if (r == CUDA_SUCCESS)
		return 0;
	if (r == CUDA_ERROR_OUT_OF_MEMORY)
		return -ENOMEM;
	if (cuda_error_is_sticky(r)) {
		snprintf(why, sizeof(why), "%s is lost: %s returned %s", c->backend.info.id, call,
			 cuda_lib_text(c->lib, r, text, sizeof(text)));
		cuda_error_lose(c, why);
		return -EIO;
	}
	return r == CUDA_ERROR_INVALID_VALUE || r == CUDA_ERROR_INVALID_HANDLE ? -EINVAL : -EIO;
}

int cuda_drain(struct cuda *c, CUstream stream)
{
	int r = cuda_result(c, c->lib->cuStreamSynchronize(stream), "waiting for a stream");

	if (r && !atomic_load(&c->lost))
		r = cuda_result(c, c->lib->cuStreamSynchronize(stream), "waiting for a stream");
	if (r && !atomic_load(&c->lost))
		cuda_error_lose(c, "it is no longer possible to tell what the device has executed");
	return r ? -EIO : 0;
}

int cuda_fault(const struct cuda_lib *lib, struct fault *f, CUresult r, const char *what)
{
	char text[160];

	fault_set(f, r == CUDA_ERROR_OUT_OF_MEMORY ? FAULT_EXHAUSTED : FAULT_INTERNAL, NULL,
		  "%s: %s", what, cuda_lib_text(lib, r, text, sizeof(text)));
	f->domain = FAULT_DOMAIN_CUDA;
	f->native = (int)r;
	return f->code;
}

#endif
