/*
 * Publications: immutable generations of a job's weights, in the reader's types and layout, for
 * processes that are not ranks of it. Part of shardd/shardd.h, which includes it and describes
 * what holds for all calls. docs/publish.md explains declarations.
 *
 * A generation is of one committed step, and does not change while it is leased. The trainers do
 * not wait for readers: there is memory for a few generations, and no new one while all are
 * leased.
 */
#ifndef SHARDD_PUBLICATION_H
#define SHARDD_PUBLICATION_H

#include "shardd/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Declare a publication of @job: @json is the declaration, a JSON object (docs/publish.md). The
 * same declaration again is allowed. @ret_bytes: (optional) of one generation. Errors:
 * INVALID_ARGUMENT (the field says which part of the declaration, the text which tensor),
 * FAILED_PRECONDITION (one of this name is declared otherwise), NOT_FOUND, PERMISSION_DENIED,
 * RESOURCE_EXHAUSTED (the job has too many). Blocks until the daemon has answered. Any thread. */
SHARDD_API int shardd_publication_declare(shardd_client *c, const char *job, const char *json,
					  uint64_t *ret_bytes, struct shardd_error *err);

/* End a publication. Generations stay where they are mapped. Errors: NOT_FOUND, PERMISSION_DENIED.
 * Any thread. */
SHARDD_API int shardd_publication_drop(shardd_client *c, const char *job, const char *name,
				       struct shardd_error *err);

/* Make a generation of the last committed step, unless the newest one is of it. Waits for a commit
 * while the parameters are past the last one. @timeout_ms: 0: the job's op_timeout_ms.
 * @ret_number: (optional). Errors: DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED (no memory, or all of it
 * is leased), NOT_FOUND, PERMISSION_DENIED. Any thread. */
SHARDD_API int shardd_publication_publish(shardd_client *c, const char *job, const char *name,
					  uint32_t timeout_ms, uint64_t *ret_number,
					  struct shardd_error *err);

/* A reader of one publication. */
typedef struct shardd_live shardd_live;

struct shardd_published_tensor {
	const char *name;
	enum shardd_dtype dtype;
	uint32_t dims; /* 0: a scalar */
	const uint64_t *shape;
	uint64_t bytes;
	const void *data; /* mapped read-only until the client is closed */
};

/* A generation that is leased. */
struct shardd_generation {
	uint64_t number; /* later ones have larger numbers */
	uint64_t step;   /* the committed step that it is of */
	uint32_t checksum;
	const struct shardd_published_tensor *tensors; /* valid until the next acquire, or close */
	size_t n_tensors;
	bool moved; /* the data of tensors are elsewhere than in the previous generation */
};

/* Open a reader of the publication @name of @job, in host memory. The client may be a rank of a
 * job, too. @ret: end it with shardd_live_close before the client is closed. Errors: NOT_FOUND,
 * PERMISSION_DENIED. Any thread. */
SHARDD_API int shardd_live_open(shardd_client *c, const char *job, const char *name,
				shardd_live **ret, struct shardd_error *err);

/* Lease the newest generation, in place of the one that @l has, which it gives back. If there is
 * no newer one, @l keeps what it has: with wait_ms 0 the call gives that one, or NOT_FOUND if @l
 * has none; else the call waits until there is a newer one. Errors: DEADLINE_EXCEEDED (the text
 * says what was waited for), NOT_FOUND (also: the publication was dropped). One thread at a time
 * for each reader. */
SHARDD_API int shardd_live_acquire(shardd_live *l, uint32_t wait_ms, struct shardd_generation *ret,
				   struct shardd_error *err);

/* Give the generation back: its memory may become another one's. FAILED_PRECONDITION: @l has none.
 * One thread at a time for each reader. */
SHARDD_API int shardd_live_release(shardd_live *l, struct shardd_error *err);

/* Close the reader, and give back what it has. NULL is allowed. One thread at a time for each
 * reader. */
SHARDD_API void shardd_live_close(shardd_live *l);

#ifdef __cplusplus
}
#endif

#endif
