/*
 * Selects the devices of the driver that we use. The driver applies CUDA_VISIBLE_DEVICES: a hidden
 * device does not exist here.
 */
#include "backend/cuda_impl.h"

#ifdef SHARDD_CUDA

#include <stdio.h>
#include <strings.h>

/* With or without the GPU- in front, in any case. */
static bool cuda_find_same_uuid(const char *a, const char *b)
{
	a += strncasecmp(a, "GPU-", 4) == 0 ? 4 : 0;
	b += strncasecmp(b, "GPU-", 4) == 0 ? 4 : 0;
	return strcasecmp(a, b) == 0;
}

static bool cuda_find_is_wanted(const struct backend_cuda_options *o, const char *uuid, bool *found)
{
	bool wanted = o->n_uuids == 0;

	for (unsigned i = 0; i < o->n_uuids; i++) {
		if (!cuda_find_same_uuid(o->uuids[i], uuid))
			continue;
		found[i] = true;
		wanted = true;
	}
	return wanted;
}

static int cuda_find_check_found(const struct backend_cuda_options *o, const bool *found, int n,
				 struct fault *f)
{
	for (unsigned i = 0; i < o->n_uuids; i++)
		if (!found[i])
			return fault_set(f, FAULT_NOT_FOUND, NULL,
					 "GPU %s is not among the %d that the driver shows",
					 o->uuids[i], n);
	return 0;
}

int cuda_find(const struct cuda_lib *lib, const struct backend_cuda_options *options, CUdevice *ret,
	      unsigned max, unsigned *ret_n, struct fault *f)
{
	bool found[CUDA_MAX_DEVICES] = { false };
	unsigned got = 0;
	CUresult r;
	int n;

	if (options->n_uuids > CUDA_MAX_DEVICES)
		return fault_set(f, FAULT_INVALID, NULL, "%u GPUs are named; the maximum is %u",
				 options->n_uuids, CUDA_MAX_DEVICES);
	r = lib->cuDeviceGetCount(&n);
	for (int i = 0; r == CUDA_SUCCESS && i < n && got < max; i++) {
		char uuid[48];
		CUdevice device;

		r = lib->cuDeviceGet(&device, i);
		if (r == CUDA_SUCCESS)
			r = cuda_lib_uuid(lib, device, uuid);
		if (r == CUDA_SUCCESS && cuda_find_is_wanted(options, uuid, found))
			ret[got++] = device;
	}
	if (r != CUDA_SUCCESS)
		return cuda_fault(lib, f, r, "the GPUs cannot be listed");
	*ret_n = got;
	return got < max ? cuda_find_check_found(options, found, n, f) : 0;
}

#endif
