/*
 * Readers: the live parameters of a job, for a process that is no rank of it. Part of
 * shardd/shardd.h, which includes it and says what holds for all calls.
 *
 * A reader maps the daemon's own memory, read-only: nothing is copied, however many read. What is
 * there changes with training; it is a step's from hold to release.
 */
#ifndef SHARDD_READER_H
#define SHARDD_READER_H

#include "shardd/shardd.h"

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
	const float *data; /* mapped until the client is closed; a step's while that is held */
};

struct shardd_read_unit {
	const char *name;
	bool initialised; /* else what is there means nothing */
	const struct shardd_read_tensor *tensors;
	size_t n_tensors; /* another name of a tensor is where that is */
};

/* What is held. */
struct shardd_snapshot {
	uint64_t step;    /* as committed */
	uint32_t hold_ms; /* until the trainers may go on, if they wait for this reader */
	const struct shardd_read_unit *units;
	size_t n_units;
	bool changed; /* since the hold before: units, or where they are */
};

/* Read @job, whose trainers keep it in the memory of the host, with a client that has joined none.
 * @ret: shardd_reader_close, before the client is closed. One for each client.
 * Errors: NOT_FOUND (no such job), PERMISSION_DENIED (another user's), FAILED_PRECONDITION (the
 * client has joined, or reads another job), UNIMPLEMENTED (memory of a GPU). Blocks until the
 * daemon has answered. Any thread. */
SHARDD_API int shardd_reader_open(shardd_client *c, const char *job, shardd_reader **ret,
				  struct shardd_error *err);

/* Keep the parameters as they were last committed. Waits for a commit while they are past the last one, or
 * about to be. A client has one hold at a time. What the trainers do next waits for the release, or
 * until @hold_ms are over.
 * @hold_ms: 0: the daemon's reader_hold_ms, which is also the most. @timeout_ms: of the wait; 0: the
 * job's op_timeout_ms.
 * @ret: units and what they point to are valid until the next hold that says changed, or close.
 * Errors: DEADLINE_EXCEEDED (the text says what was waited for), NOT_FOUND (the job was deleted),
 * UNAVAILABLE (it drains), FAILED_PRECONDITION (held already), INVALID_ARGUMENT.
 * One thread at a time for each reader. */
SHARDD_API int shardd_reader_hold(shardd_reader *r, uint32_t hold_ms, uint32_t timeout_ms,
				  struct shardd_snapshot *ret, struct shardd_error *err);

/* Let the trainers go on. Return: 0: what was read is the step's. ABORTED: the hold was over before
 * this, by its time or with the job, and the parameters may have changed: what was read is not to
 * be used. FAILED_PRECONDITION: nothing is held. One thread at a time for each reader. */
SHARDD_API int shardd_reader_release(shardd_reader *r, struct shardd_error *err);

/* End it, with its hold. Memory stays mapped until the client is closed. NULL is allowed. One
 * thread at a time for each reader. */
SHARDD_API void shardd_reader_close(shardd_reader *r);

#ifdef __cplusplus
}
#endif

#endif
