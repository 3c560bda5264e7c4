/*
 * The GPU on which this rank's memory is, as this process sees it: libcuda, the context
 * in which memory is mapped, and a stream of our own for copies.
 *
 * The context is the calling thread's current one at the first join, where it has one,
 * else the device's primary context, which is retained until cuda_close. It may be
 * another one than that of the thread that calls later: every function that talks to the
 * driver enters it and restores what was.
 *
 * Without the CUDA Toolkit only cuda_current_uuid (there is none), cuda_open (which
 * refuses) and cuda_close are here. Any thread.
 */
#ifndef SHARDD_CLIENT_CUDA_CONTEXT_H
#define SHARDD_CLIENT_CUDA_CONTEXT_H

#include <pthread.h>
#include <stdbool.h>

#include "core/cuda_lib.h"
#include "shardd/shardd.h"

#define CUDA_UUID_BYTES 48u

struct cuda;

/* The GPU of the calling thread's current context, if libcuda is loaded here already.
 * Loads and starts nothing. Return: false: there is none. */
bool cuda_current_uuid(char ret[CUDA_UUID_BYTES]);

/* Load libcuda and find the GPU @uuid and a context on it. @reads: only to read generations: the current context may be
 * on another GPU. May take a second.
 * @ret: the caller's, cuda_close. Return: 0 or a negative shardd_code: no driver,
 * the GPU is not visible here, or the current context is on another one. */
int cuda_open(const char *uuid, bool reads, struct cuda **ret, struct shardd_error *err);

/* Release the context. Nothing may be mapped in it. NULL is allowed. Return: NULL. */
struct cuda *cuda_close(struct cuda *c);

#ifdef SHARDD_CUDA
struct streams;

struct cuda {
	const struct cuda_lib *lib;
	char uuid[CUDA_UUID_BYTES];
	CUdevice device;
	CUcontext context;
	bool reads;              /* as in cuda_open */
	bool retained;           /* it is the primary context, and ours to release */
	struct streams *streams; /* (optional) borrowed: whose waits a mapping must not meet */
	pthread_mutex_t copying; /* over what follows, while copies are put on the stream */
	CUstream copies;         /* non-blocking */
	CUevent before;          /* marks what a copy comes after */
};

/* What was current before cuda_enter. */
struct cuda_scope {
	const struct cuda *c;
	CUcontext before;
};

/* Make the context current. Return: 0 or a negative shardd_code. */
int cuda_enter(const struct cuda *c, struct cuda_scope *ret, struct shardd_error *err);
/* Restore; for _cleanup_: does nothing for a scope that was not entered. */
void cuda_leave(struct cuda_scope *s);

/* The driver refused with @r: domain cuda, native @r, its text at the end of the
 * sentence. Return: -SHARDD_INTERNAL, or -SHARDD_RESOURCE_EXHAUSTED (out of memory). */
int cuda_error(const struct cuda *c, CUresult r, struct shardd_error *err, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));
#endif

#endif
