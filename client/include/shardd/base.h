/*
 * Bases: frozen parameters that are in a machine's memory once, for all processes. Part of
 * shardd/shardd.h, which includes it and describes what holds for all calls. docs/adapters.md
 * explains bases.
 *
 * A base is a job of lifetime SHARDD_BASE after its commit. Processes map the daemon's own memory
 * read-only. Nothing is copied, and the contents do not change.
 */
#ifndef SHARDD_BASE_H
#define SHARDD_BASE_H

#include "shardd/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct shardd_base_tensor {
	const char *unit; /* both names as registered */
	const char *name;
	const uint64_t *shape;   /* @dims extents */
	const uint64_t *strides; /* elements; NULL: row-major */
	uint32_t dims;           /* 0: a scalar */
	bool frozen;
	uint64_t elements;       /* number of elements */
	enum shardd_dtype dtype; /* of the elements */
	const void *data;        /* mapped until the client is closed */
};

/* A mapped base. */
struct shardd_base {
	const struct shardd_base_tensor *tensors;
	size_t n_tensors; /* with aliases, which have the address of their tensor */
};

/* Map the base @job. The mapping stays valid when the daemon ends and another one takes over the
 * base, and you need not open it again. A base that is mapped is deleted only by force, and its
 * memory then keeps its contents. A client may have 16 bases, and may also join a job. @ret: close
 * it with shardd_base_close before the client is closed.
 * Errors: NOT_FOUND (there is no such job, or it is another user's), PERMISSION_DENIED,
 * FAILED_PRECONDITION (the job is not a base, or is not loaded yet), RESOURCE_EXHAUSTED (too many
 * bases). Blocks until the daemon has answered. Any thread. */
SHARDD_API int shardd_base_open(shardd_client *c, const char *job, const struct shardd_base **ret,
				struct shardd_error *err);

/* Free the list of tensors. The memory stays mapped, and the base in use, until the client is
 * closed. NULL is allowed. Any thread. */
SHARDD_API void shardd_base_close(const struct shardd_base *b);

#ifdef __cplusplus
}
#endif

#endif
