#include "cuda_context.h"

#ifdef SHARDD_CUDA

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"

/* ------------------------------------------------------------------- errors */

/* After these the driver answers every call in this context with an error. */
static bool cuda_context_is_lost(CUresult r)
{
	switch (r) {
	case CUDA_ERROR_DEVICE_UNAVAILABLE:
	case CUDA_ERROR_ECC_UNCORRECTABLE:
	case CUDA_ERROR_ILLEGAL_ADDRESS:
	case CUDA_ERROR_LAUNCH_TIMEOUT:
	case CUDA_ERROR_CONTEXT_IS_DESTROYED:
	case CUDA_ERROR_HARDWARE_STACK_ERROR:
	case CUDA_ERROR_ILLEGAL_INSTRUCTION:
	case CUDA_ERROR_MISALIGNED_ADDRESS:
	case CUDA_ERROR_INVALID_ADDRESS_SPACE:
	case CUDA_ERROR_INVALID_PC:
	case CUDA_ERROR_LAUNCH_FAILED:
		return true;
	default:
		return false;
	}
}

int cuda_error(const struct cuda *c, CUresult r, struct shardd_error *err, const char *fmt, ...)
{
	int code = r == CUDA_ERROR_OUT_OF_MEMORY ? SHARDD_RESOURCE_EXHAUSTED : SHARDD_INTERNAL;
	char text[160];
	va_list ap;
	size_t n;

	if (!err)
		return -code;
	*err = (struct shardd_error){ .code = code, .native = (int)r, .domain = "cuda" };
	va_start(ap, fmt);
	vsnprintf(err->text, sizeof(err->text), fmt, ap);
	va_end(ap);
	n = strlen(err->text);
	snprintf(err->text + n, sizeof(err->text) - n, ": %s%s",
		 cuda_lib_text(c->lib, r, text, sizeof(text)),
		 cuda_context_is_lost(r) ? "; this process has lost its GPU work: restart it" : "");
	return -code;
}

/* ------------------------------------------------------------------ context */

int cuda_enter(const struct cuda *c, struct cuda_scope *ret, struct shardd_error *err)
{
	CUcontext before = NULL;
	CUresult r = c->lib->cuCtxGetCurrent(&before);

	if (r == CUDA_SUCCESS && before != c->context)
		r = c->lib->cuCtxSetCurrent(c->context);
	if (r != CUDA_SUCCESS)
		return cuda_error(c, r, err, "cannot make the context on GPU %s current", c->uuid);
	*ret = (struct cuda_scope){ c, before };
	return 0;
}

void cuda_leave(struct cuda_scope *s)
{
	if (s->c && s->before != s->c->context)
		s->c->lib->cuCtxSetCurrent(s->before);
	s->c = NULL;
}

/* The library that this process has loaded itself, or NULL. The reference that it
 * takes is given back at once: whoever loaded it keeps it. */
static void *cuda_context_loaded_already(void)
{
	const char *path = getenv("SHARDD_LIBCUDA");
	void *so = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);

	if (so)
		dlclose(so);
	return so;
}

bool cuda_current_uuid(char ret[CUDA_UUID_BYTES])
{
	__typeof__(&cuCtxGetCurrent) get_current = NULL;
	const struct cuda_lib *lib;
	void *so = cuda_context_loaded_already();
	CUcontext current = NULL;
	char why[256];
	CUdevice device;
	void *p;

	/* Asked of the library alone: cuda_lib_open would start a driver that this process
	 * has not started. */
	p = so ? dlsym(so, "cuCtxGetCurrent") : NULL;
	memcpy(&get_current, &p, sizeof(p));
	if (!get_current || get_current(&current) != CUDA_SUCCESS || !current)
		return false;
	return cuda_lib_open(&lib, why, sizeof(why)) == 0 &&
	       lib->cuCtxGetDevice(&device) == CUDA_SUCCESS &&
	       cuda_lib_uuid(lib, device, ret) == CUDA_SUCCESS;
}

static const char *cuda_context_visible(void)
{
	const char *v = getenv("CUDA_VISIBLE_DEVICES");

	return v ? v : "not set";
}

/* Why this GPU. */
static const char *cuda_context_reason(const struct cuda *c)
{
	return c->reads ? "this reader uses" : "the daemon put this rank on";
}

static int cuda_context_find_device(struct cuda *c, struct shardd_error *err)
{
	char uuid[CUDA_UUID_BYTES];
	int n = 0;
	CUresult r = c->lib->cuDeviceGetCount(&n);

	for (int i = 0; i < n && r == CUDA_SUCCESS; i++) {
		r = c->lib->cuDeviceGet(&c->device, i);
		if (r == CUDA_SUCCESS)
			r = cuda_lib_uuid(c->lib, c->device, uuid);
		if (r == CUDA_SUCCESS && strcmp(uuid, c->uuid) == 0)
			return 0;
	}
	if (r != CUDA_SUCCESS)
		return cuda_error(c, r, err, "cannot list the GPUs");
	return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
			 "%s GPU %s, which is not visible in this process "
			 "(CUDA_VISIBLE_DEVICES is %s): make it visible",
			 cuda_context_reason(c), c->uuid, cuda_context_visible());
}

/* Take the current context if it is on the GPU. A rank computes there; a reader may have another GPU current. Return:
 * 1: there is none. */
static int cuda_context_take_current(struct cuda *c, struct shardd_error *err)
{
	char uuid[CUDA_UUID_BYTES];
	CUresult r = c->lib->cuCtxGetCurrent(&c->context);
	CUdevice device;

	if (r == CUDA_SUCCESS && !c->context)
		return 1;
	if (r == CUDA_SUCCESS)
		r = c->lib->cuCtxGetDevice(&device);
	if (r == CUDA_SUCCESS)
		r = cuda_lib_uuid(c->lib, device, uuid);
	if (r != CUDA_SUCCESS)
		return cuda_error(c, r, err, "cannot use the current CUDA context");
	if (strcmp(uuid, c->uuid) == 0) {
		c->device = device;
		return 0;
	}
	c->context = NULL;
	if (c->reads)
		return 1;
	return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
			 "this thread's CUDA context is on GPU %s, but the daemon put this rank on "
			 "GPU %s: set shardd_options.device to the first, or compute on the second",
			 uuid, c->uuid);
}

static int cuda_context_take_context(struct cuda *c, struct shardd_error *err)
{
	int r = cuda_context_take_current(c, err);
	CUresult cr;

	if (r <= 0)
		return r;
	r = cuda_context_find_device(c, err);
	if (r < 0)
		return r;
	cr = c->lib->cuDevicePrimaryCtxRetain(&c->context, c->device);
	if (cr != CUDA_SUCCESS)
		return cuda_error(c, cr, err, "cannot create a context on GPU %s", c->uuid);
	c->retained = true;
	return 0;
}

/* Everything of our own that must not be made while a stream waits. */
static int cuda_context_make_own(struct cuda *c, struct shardd_error *err)
{
	_cleanup_(cuda_leave) struct cuda_scope scope = { 0 };
	int r = cuda_enter(c, &scope, err);
	CUresult cr;

	if (r < 0)
		return r;
	cr = c->lib->cuStreamCreateWithPriority(&c->copies, CU_STREAM_NON_BLOCKING, 0);
	if (cr == CUDA_SUCCESS)
		cr = c->lib->cuEventCreate(&c->before, CU_EVENT_DISABLE_TIMING);
	if (cr != CUDA_SUCCESS)
		return cuda_error(c, cr, err, "cannot create a stream on GPU %s", c->uuid);
	return 0;
}

static void cuda_context_closep(struct cuda **c)
{
	*c = cuda_close(*c);
}

int cuda_open(const char *uuid, bool reads, struct cuda **ret, struct shardd_error *err)
{
	_cleanup_(cuda_context_closep) struct cuda *c = calloc(1, sizeof(*c));
	char why[256];
	int r;

	if (!c)
		return error_memory(err);
	pthread_mutex_init(&c->copying, NULL);
	snprintf(c->uuid, sizeof(c->uuid), "%s", uuid);
	c->reads = reads;
	if (cuda_lib_open(&c->lib, why, sizeof(why)) < 0)
		return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
				 "%s GPU %s, but in this process %s", cuda_context_reason(c), uuid,
				 why);
	r = cuda_context_take_context(c, err);
	if (r == 0)
		r = cuda_context_make_own(c, err);
	if (r < 0)
		return r;
	*ret = STEAL_PTR(c);
	return 0;
}

struct cuda *cuda_close(struct cuda *c)
{
	struct cuda_scope scope = { 0 };

	if (!c)
		return NULL;
	if ((c->copies || c->before) && cuda_enter(c, &scope, NULL) == 0) {
		if (c->before)
			c->lib->cuEventDestroy(c->before);
		if (c->copies)
			c->lib->cuStreamDestroy(c->copies);
		cuda_leave(&scope);
	}
	if (c->retained)
		c->lib->cuDevicePrimaryCtxRelease(c->device);
	pthread_mutex_destroy(&c->copying);
	free(c);
	return NULL;
}

#else

#include <stddef.h>

#include "client_error.h"

bool cuda_current_uuid(char ret[CUDA_UUID_BYTES])
{
	(void)ret;
	return false;
}

int cuda_open(const char *uuid, bool reads, struct cuda **ret, struct shardd_error *err)
{
	(void)ret;
	return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
			 "the daemon put this rank on GPU %s, but libshardd was built without CUDA",
			 uuid);
}

struct cuda *cuda_close(struct cuda *c)
{
	(void)c;
	return NULL;
}

#endif
