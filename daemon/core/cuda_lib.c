#include "core/cuda_lib.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef SHARDD_CUDA

static struct cuda_lib table;
static bool loaded;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The macro's argument expanded first: cuMemAlloc is cuMemAlloc_v2 in the library. */
#define NAME_OF(name)  NAME_OF_(name)
#define NAME_OF_(name) #name

static const struct {
	const char *name;
	size_t offset;
} entries[] = {
#define ENTRY(name) { NAME_OF(name), offsetof(struct cuda_lib, name) },
	CUDA_LIB_FUNCTIONS(ENTRY)
#undef ENTRY
};

/* Return: the first that is missing, or NULL. */
static const char *cuda_lib_find_all(void *so, struct cuda_lib *lib)
{
	for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
		void *p = dlsym(so, entries[i].name);

		if (!p)
			return entries[i].name;
		memcpy((char *)lib + entries[i].offset, &p, sizeof(p));
	}
	return NULL;
}

const char *cuda_lib_text(const struct cuda_lib *lib, CUresult r, char *buf, size_t bytes)
{
	const char *name = NULL, *text = NULL;

	if (lib->cuGetErrorName(r, &name) != CUDA_SUCCESS || !name)
		name = "an unknown CUDA error";
	if (lib->cuGetErrorString(r, &text) != CUDA_SUCCESS || !text)
		text = "no description";
	snprintf(buf, bytes, "%s (%d): %s", name, (int)r, text);
	return buf;
}

CUresult cuda_lib_uuid(const struct cuda_lib *lib, CUdevice device, char ret[48])
{
	CUuuid uuid;
	CUresult r = lib->cuDeviceGetUuid(&uuid, device);
	size_t at = 4;

	if (r != CUDA_SUCCESS)
		return r;
	memcpy(ret, "GPU-", 5);
	for (unsigned i = 0; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			ret[at++] = '-';
		snprintf(ret + at, 48 - at, "%02x", (unsigned char)uuid.bytes[i]);
		at += 2;
	}
	return CUDA_SUCCESS;
}

static int cuda_lib_initialise(struct cuda_lib *lib, char *why, size_t bytes)
{
	char text[160];
	int n = 0;
	CUresult r = lib->cuInit(0);

	if (r == CUDA_SUCCESS)
		r = lib->cuDriverGetVersion(&lib->driver_version);
	if (r == CUDA_SUCCESS && lib->driver_version < CUDA_LIB_MIN_DRIVER) {
		snprintf(why, bytes,
			 "the NVIDIA driver supports CUDA %d.%d; %d.%d or newer is required",
			 lib->driver_version / 1000, lib->driver_version % 1000 / 10,
			 CUDA_LIB_MIN_DRIVER / 1000, CUDA_LIB_MIN_DRIVER % 1000 / 10);
		return -EPROTO;
	}
	if (r == CUDA_SUCCESS)
		r = lib->cuDeviceGetCount(&n);
	if (r != CUDA_SUCCESS && r != CUDA_ERROR_NO_DEVICE) {
		snprintf(why, bytes, "the NVIDIA driver cannot be initialized: %s",
			 cuda_lib_text(lib, r, text, sizeof(text)));
		return -ENODEV;
	}
	if (n > 0)
		return 0;
	snprintf(why, bytes, "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES is %s)",
		 getenv("CUDA_VISIBLE_DEVICES") ? getenv("CUDA_VISIBLE_DEVICES") : "not set");
	return -ENODEV;
}

static int cuda_lib_load(char *why, size_t bytes)
{
	const char *path = getenv("SHARDD_LIBCUDA");
	const char *missing;
	struct cuda_lib lib;
	void *so;
	int r;

	path = path && *path ? path : "libcuda.so.1";
	so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!so) {
		snprintf(why, bytes, "no NVIDIA driver: %s", dlerror());
		return -ENOENT;
	}
	missing = cuda_lib_find_all(so, &lib);
	if (missing) {
		snprintf(why, bytes, "the NVIDIA driver is too old: %s has no %s", path, missing);
		dlclose(so);
		return -ENOSYS;
	}
	/* from here on it stays loaded: a driver that was started cannot be unloaded */
	r = cuda_lib_initialise(&lib, why, bytes);
	if (r == 0)
		table = lib;
	return r;
}

int cuda_lib_open(const struct cuda_lib **ret, char *why, size_t why_bytes)
{
	int r = 0;

	pthread_mutex_lock(&lock);
	if (!loaded)
		r = cuda_lib_load(why, why_bytes);
	loaded = loaded || r == 0;
	pthread_mutex_unlock(&lock);
	if (r == 0)
		*ret = &table;
	return r;
}

#else

int cuda_lib_open(const struct cuda_lib **ret, char *why, size_t why_bytes)
{
	(void)ret;
	snprintf(why, why_bytes,
		 "this build has no CUDA support: it was built without the CUDA Toolkit");
	return -ENOSYS;
}

#endif
