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
	bool moved; /* tensors, or their data, are others than in the previous generation */
	/* Of this reader: with the same one, names, types and shapes are the same. */
	uint64_t layout;
	/* The GPU of this process on which the tensors are; "": they are in host memory. Valid
	 * until the client is closed. */
	const char *uuid;
};

enum shardd_live_flags {
	/* Each generation of the same layout is at the same addresses, and so are the tensors: what
	 * is bound to them once shows the generation that was acquired last. No thread may read
	 * them during shardd_live_acquire. For host memory: if generations are on a GPU, acquire
	 * answers UNIMPLEMENTED. */
	SHARDD_LIVE_FIXED = 1,
};

/* Open a reader of the publication @name of @job. The client may be a rank of a job, too. If
 * generations are on a GPU, the reader maps them on the client's: that of options.device or
 * SHARDD_DEVICE if it is a UUID, the one of the current context, or else the generations' own.
 * @flags: of enum shardd_live_flags; 0: none. @ret: end it with shardd_live_close before
 * the client is closed. Errors: NOT_FOUND, PERMISSION_DENIED. Any thread. */
SHARDD_API int shardd_live_open(shardd_client *c, const char *job, const char *name, uint32_t flags,
				shardd_live **ret, struct shardd_error *err);

/* Lease the newest generation, in place of the one that @l has, which it gives back. If there is
 * no newer one, @l keeps what it has: with wait_ms 0 the call gives that one, or NOT_FOUND if @l
 * has none; else the call waits until there is a newer one. To take one that is there costs no call
 * to the daemon once its buffer and its layout are known. A reader notices within
 * BOARD_BEAT_MS (board_abi.h) that its daemon has died, and continues with the next one. Errors:
 * DEADLINE_EXCEEDED (the text says what was waited for), NOT_FOUND (also: the publication was
 * dropped). One thread at a time for each reader. */
SHARDD_API int shardd_live_acquire(shardd_live *l, uint32_t wait_ms, struct shardd_generation *ret,
				   struct shardd_error *err);

/* Give the generation back: its memory may become another one's. On a GPU this call, and an acquire
 * that takes a newer one, wait for what the thread's stream holds (shardd_set_stream); without one
 * for all work of this process on the GPU. FAILED_PRECONDITION: @l has none.
 * One thread at a time for each reader. */
SHARDD_API int shardd_live_release(shardd_live *l, struct shardd_error *err);

/* A descriptor for poll, which is readable when there is a newer generation than the one that @l
 * has, or when an acquire would say what is wrong. Only shardd_live_acquire reads it. @ret: valid
 * until the reader is closed; the reader closes it. The first call starts a thread. One thread at a
 * time for each reader. */
SHARDD_API int shardd_live_fd(shardd_live *l, int *ret, struct shardd_error *err);

/* What has changed from one generation, the base, to a later one: for copies of the base, as an
 * engine has them in its own memory. */
struct shardd_delta {
	uint64_t base;              /* the number of the generation that it is applied to */
	uint64_t number;            /* of the one that it makes */
	uint64_t changed, elements; /* values that have changed, and all of them */
	uint64_t bytes;
	const void *data; /* bytes long, as delta_abi.h describes it: may be kept and sent */
};

/* The delta of the generation that @l has, if it was declared (delta_percent) and @base is the
 * number of the generation before. @ret: valid as long as the generation is held. Errors: NOT_FOUND
 * (there is none, or it is of another base: read the whole generation), FAILED_PRECONDITION (@l has
 * no generation). One thread at a time for each reader. */
SHARDD_API int shardd_live_delta(shardd_live *l, uint64_t base, struct shardd_delta *ret,
				 struct shardd_error *err);

enum shardd_delta_flags {
	/* Compare the checksum of the whole result with that of the generation: it reads all of it.
	 * */
	SHARDD_DELTA_CHECK = 1,
};

/* Apply a delta. @data, @bytes: it, from anywhere: it is not trusted. @tensors, @n: those of the
 * generation, or of its base. @copies: of each, bytes that are those of the base, and become those
 * of the generation; the copy of a further name (`also`) is not used. NULL: that tensor is left
 * out. Nothing is written unless the delta is whole: its form and the checksums of all its blocks
 * are checked first. Errors: DATA_LOSS (a checksum; with SHARDD_DELTA_CHECK the copies may have
 * been written: read the whole generation), INVALID_ARGUMENT (it is none, or of other tensors). Any
 * thread. */
SHARDD_API int shardd_delta_apply(const void *data, uint64_t bytes,
				  const struct shardd_published_tensor *tensors, size_t n,
				  void *const *copies, uint32_t flags, struct shardd_error *err);

/* The changed values of tensor @tensor, the index of one of @tensors: their flat indices,
 * ascending, and the values one after the other, in the tensor's type. @data to @n: as
 * shardd_delta_apply has them. No index is behind the end of the tensor. @room: of both arrays,
 * elements; 0: only @ret_n is wanted. @ret_n: how many there are. Errors: as shardd_delta_apply,
 * also if @room is too small. Any thread. */
SHARDD_API int shardd_delta_values(const void *data, uint64_t bytes,
				   const struct shardd_published_tensor *tensors, size_t n,
				   uint32_t tensor, uint64_t *indices, void *values, uint64_t room,
				   uint64_t *ret_n, struct shardd_error *err);

/* Close the reader, and give back what it has. NULL is allowed. One thread at a time for each
 * reader. */
SHARDD_API void shardd_live_close(shardd_live *l);

/* A generation as a copy in this process's own memory, for hosts without the daemon: over a socket
 * that is forwarded to it (docs/publish.md). */
typedef struct shardd_fetched shardd_fetched;

struct shardd_fetch_options {
	size_t size;               /* of this struct */
	uint64_t newer_than;       /* only a generation with a larger number; 0: any */
	uint32_t wait_ms;          /* for it, if it is not there; 0: do not wait */
	uint64_t bytes_per_second; /* at most, and at least 65536; 0: as fast as the daemon may */
	void *buffer;              /* where to put the copy; NULL: in memory that @to has */
	uint64_t buffer_bytes;     /* of @buffer */
};

/* Copy the newest generation of the publication @name of @job. Every block is checked against its
 * checksum, and the whole against the generation's. After a lost connection the call goes on behind
 * what it has, or begins again if that generation is gone.
 * @options: NULL: the defaults. @to: *@to is NULL, or what an earlier call of the same client gave
 * for the same publication: its memory, and the list of tensors, are used again. After an error it
 * has no generation. @ret: valid until the next call with @to, or shardd_fetched_free; tensors may
 * be written to.
 * Errors: NOT_FOUND (also: there is none that is newer), DEADLINE_EXCEEDED, PERMISSION_DENIED,
 * RESOURCE_EXHAUSTED, INVALID_ARGUMENT (the buffer is too small), INTERNAL (a wrong checksum).
 * Blocks. Any thread; one at a time for each @to. */
SHARDD_API int shardd_publication_fetch(shardd_client *c, const char *job, const char *name,
					const struct shardd_fetch_options *options,
					shardd_fetched **to, struct shardd_generation *ret,
					struct shardd_error *err);

/* Free the copy, unless it is in the caller's buffer. NULL is allowed. Any thread. */
SHARDD_API void shardd_fetched_free(shardd_fetched *to);

#ifdef __cplusplus
}
#endif

#endif
