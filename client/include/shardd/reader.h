/*
 * Readers: the live parameters of a job, for a process that is not a rank of it. Part of
 * shardd/shardd.h, which includes it and describes what holds for all calls.
 *
 * A reader maps the daemon's own memory, read-only: nothing is copied, for any number of readers.
 * Training changes the parameters; between hold and release they belong to one step.
 */
#ifndef SHARDD_READER_H
#define SHARDD_READER_H

#include "shardd/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct shardd_reader shardd_reader;

/* The parameters of a tensor. */
struct shardd_read_tensor {
	const char *name;
	const uint64_t *shape;   /* @dims extents */
	const uint64_t *strides; /* elements; NULL: row-major */
	uint32_t dims;           /* 0: a scalar */
	bool frozen;
	uint64_t elements;
	enum shardd_dtype dtype; /* of the elements */
	const void *data;        /* mapped until the client is closed; of a step while it is held */
};

struct shardd_read_unit {
	const char *name;
	bool initialised; /* false: the parameters are undefined */
	const struct shardd_read_tensor *tensors;
	size_t n_tensors; /* an alias has the place of its tensor */
};

/* The parameters that are held. */
struct shardd_snapshot {
	uint64_t step;    /* the committed step */
	uint32_t hold_ms; /* time until trainers that wait for this reader may continue */
	const struct shardd_read_unit *units;
	size_t n_units;
	bool changed; /* units or their places changed since the previous hold */
};

/* Open a reader of @job, which must be in host memory. The client must not have joined a job.
 * @ret: end it with shardd_reader_close before the client is closed. One reader for each client.
 * Errors: NOT_FOUND (no such job), PERMISSION_DENIED (another user's), FAILED_PRECONDITION (the
 * client has joined, or reads another job), UNIMPLEMENTED (the job is in GPU memory). Blocks until
 * the daemon has answered. Any thread. */
SHARDD_API int shardd_reader_open(shardd_client *c, const char *job, shardd_reader **ret,
				  struct shardd_error *err);

/* Hold the parameters at the last commit. Waits for a commit while they are past the last one or
 * about to be. A client has one hold at a time. Ops of the trainers that change parameters wait for
 * the release, or until @hold_ms have passed.
 * @hold_ms: at most the daemon's reader_hold_ms; 0: reader_hold_ms. @timeout_ms: how long to wait
 * for a commit; 0: the job's op_timeout_ms. @ret: units and what they point to are valid until
 * close or the next hold that sets changed. Errors: DEADLINE_EXCEEDED (the text says what was
 * waited for), NOT_FOUND (the job was deleted), UNAVAILABLE (it is draining), FAILED_PRECONDITION
 * (already held), INVALID_ARGUMENT. One thread at a time for each reader. */
SHARDD_API int shardd_reader_hold(shardd_reader *r, uint32_t hold_ms, uint32_t timeout_ms,
				  struct shardd_snapshot *ret, struct shardd_error *err);

/* End the hold and let the trainers continue. Return: 0: what was read belongs to the step.
 * ABORTED: the hold ended earlier, by its time limit or with the job, and the parameters may have
 * changed: discard what was read. FAILED_PRECONDITION: nothing is held. One thread at a time for
 * each reader. */
SHARDD_API int shardd_reader_release(shardd_reader *r, struct shardd_error *err);

/* Close the reader and end its hold. Memory stays mapped until the client is closed. NULL is
 * allowed. One thread at a time for each reader. */
SHARDD_API void shardd_reader_close(shardd_reader *r);

#ifdef __cplusplus
}
#endif

#endif
