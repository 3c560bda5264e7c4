/*
 * Publications: immutable generations of a job's weights, in the reader's types and layout, for
 * processes that are not ranks of it. Part of shardd/shardd.h, which includes it and describes
 * what holds for all calls. docs/publish.md explains declarations.
 *
 * A generation belongs to one committed step, and does not change while it is leased. Trainers do
 * not wait for readers: there is memory for a few generations, and no new one is made while no
 * memory is free.
 */
#ifndef SHARDD_PUBLICATION_H
#define SHARDD_PUBLICATION_H

#include "shardd/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Declare a publication of @job. @json: the declaration, a JSON object (docs/publish.md).
 * Repeating the same declaration is allowed. @ret_bytes: (optional) the size of one generation.
 * Errors: INVALID_ARGUMENT (the field names the part of the declaration, the text names the
 * tensor), FAILED_PRECONDITION (a publication with this name and another declaration exists),
 * NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED (the job has too many publications). Blocks
 * until the daemon has answered. Any thread. */
SHARDD_API int shardd_publication_declare(shardd_client *c, const char *job, const char *json,
					  uint64_t *ret_bytes, struct shardd_error *err);

/* End a publication. Mapped generations stay mapped. Errors: NOT_FOUND, PERMISSION_DENIED.
 * Any thread. */
SHARDD_API int shardd_publication_drop(shardd_client *c, const char *job, const char *name,
				       struct shardd_error *err);

/* Make a generation of the last committed step, unless the newest generation is of that step. If
 * the parameters are ahead of the last commit, the call waits for the next commit. It then waits
 * until the generation is complete. @timeout_ms: limit of both waits; 0: the job's op_timeout_ms.
 * @ret_number: (optional) the generation's number. Errors: DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED
 * (there is no memory, or all of it is leased), NOT_FOUND, PERMISSION_DENIED. Any thread. */
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

/* A leased generation, or a fetched one. */
struct shardd_generation {
	uint64_t number;                               /* later generations have larger numbers */
	uint64_t step;                                 /* the committed step */
	uint32_t checksum;                             /* CRC-32C of the CRC-32Cs of its blocks */
	const struct shardd_published_tensor *tensors; /* valid until the next acquire, or close */
	size_t n_tensors;
	bool moved; /* tensors, or their addresses, differ from the previous generation */
	/* Generations of this reader with the same layout have the same names, types and shapes. */
	uint64_t layout;
	/* UUID of this process's GPU that has the tensors; "": they are in host memory. Valid until
	 * the client is closed. */
	const char *uuid;
};

enum shardd_live_flags {
	/* Map all generations of a layout, and their tensors, at the same addresses. A tensor that
	 * is bound once shows the generation that was acquired last. No thread may read the tensors
	 * during shardd_live_acquire. If generations are on a GPU and the job hands out CUDA IPC
	 * handles, acquire returns UNIMPLEMENTED. If acquire can map neither the new generation nor
	 * the one that the reader has, the reader has none, and the field of the error is
	 * "generation". */
	SHARDD_LIVE_FIXED = 1,
	/* A write to a generation in host memory ends the process, because it is mapped read-only.
	 * With this flag, libshardd first prints the cause to standard error. It does this in a
	 * SIGSEGV handler, which the first acquire installs. The handler then runs the action that
	 * was set before. */
	SHARDD_LIVE_EXPLAIN = 2,
};

/* Open a reader of the publication @name of @job. The client may also be a rank of a job. If
 * generations are on a GPU, the reader maps them on the client's GPU: options.device or
 * SHARDD_DEVICE if that is a UUID, else the GPU of the current context, else the GPU of the
 * generations. @flags: of enum shardd_live_flags; 0: none. @ret: close it with shardd_live_close
 * before the client is closed. Errors: NOT_FOUND, PERMISSION_DENIED. Any thread. */
SHARDD_API int shardd_live_open(shardd_client *c, const char *job, const char *name, uint32_t flags,
				shardd_live **ret, struct shardd_error *err);

/* Lease the newest generation, and give back the one that @l holds. If there is no newer one, @l
 * keeps its generation. With @wait_ms 0 the call then returns that one, or NOT_FOUND if @l has
 * none. Otherwise the call waits for a newer one. Taking a generation needs no call to the daemon
 * if the reader knows its buffer and its layout. A reader notices within BOARD_BEAT_MS
 * (board_abi.h) that its daemon has died, and continues with the next one. Errors:
 * DEADLINE_EXCEEDED (the text says what the call waited for), NOT_FOUND (also if the publication
 * was dropped). One thread at a time for each reader. */
SHARDD_API int shardd_live_acquire(shardd_live *l, uint32_t wait_ms, struct shardd_generation *ret,
				   struct shardd_error *err);

/* As shardd_live_acquire, but lease only a generation with a number above @newer_than. If @l holds
 * such a generation, and there is no newer one, the call returns it. If there is no such
 * generation, @l keeps what it holds. With @wait_ms 0 the call then returns NOT_FOUND, otherwise it
 * waits. @newer_than 0: as shardd_live_acquire. Errors, thread: as there. */
SHARDD_API int shardd_live_acquire_newer(shardd_live *l, uint64_t newer_than, uint32_t wait_ms,
					 struct shardd_generation *ret, struct shardd_error *err);

/* Give the generation back. Its memory may be reused for another one. On a GPU this call, and an
 * acquire that takes a newer generation, wait for the work on the thread's stream
 * (shardd_set_stream); without a stream they wait for all work of this process on the GPU.
 * FAILED_PRECONDITION: @l has no generation. One thread at a time for each reader. */
SHARDD_API int shardd_live_release(shardd_live *l, struct shardd_error *err);

/* Get a descriptor for poll. It is readable when there is a newer generation than that of @l, or
 * when an acquire would return an error. Only shardd_live_acquire may read it. @ret: valid until
 * the reader is closed, which also closes the descriptor. The first call starts a thread. One
 * thread at a time for each reader. */
SHARDD_API int shardd_live_fd(shardd_live *l, int *ret, struct shardd_error *err);

/* The changes from one generation, the base, to the next one. For copies of the base, such as those
 * that an engine has in its own memory. */
struct shardd_delta {
	uint64_t base;              /* number of the generation that the delta is applied to */
	uint64_t number;            /* number of the resulting generation */
	uint64_t changed, elements; /* numbers of changed values, and of all values */
	uint64_t bytes;             /* of @data */
	const void *data;           /* in the format of delta_abi.h; you can store or send it */
};

/* Get the delta of the generation that @l holds, if the publication declares deltas
 * (delta_percent) and @base is the number of the previous generation. @ret: valid while the
 * generation is held. Errors: NOT_FOUND (there is no delta, or it has another base: read the whole
 * generation), FAILED_PRECONDITION (@l has no generation). One thread at a time for each reader. */
SHARDD_API int shardd_live_delta(shardd_live *l, uint64_t base, struct shardd_delta *ret,
				 struct shardd_error *err);

enum shardd_delta_flags {
	/* Compare the checksum of the copies with that of the base first. This reads all copies,
	 * and only those of further names may be NULL. */
	SHARDD_DELTA_CHECK = 1,
};

/* Apply a delta. @data, @bytes: the delta, from any source; it is not trusted. @tensors, @n: the
 * tensors of the generation, or of its base. @copies: one copy for each tensor. It has the bytes
 * of the base, and gets those of the generation. NULL: that tensor is left out. Tensors with the
 * same data are one tensor with further names (`also`). The call first checks the format of the
 * delta and the checksums of all its blocks. Without SHARDD_DELTA_CHECK it does not check the
 * copies: those of another generation than the base become a mixture of generations, without an
 * error. Errors: DATA_LOSS (a checksum is wrong: read the whole generation), INVALID_ARGUMENT
 * (this is not a delta, it is of other tensors, or it has nothing for a tensor that has a copy).
 * After an error nothing was written. Any thread. */
SHARDD_API int shardd_delta_apply(const void *data, uint64_t bytes,
				  const struct shardd_published_tensor *tensors, size_t n,
				  void *const *copies, uint32_t flags, struct shardd_error *err);

/* Get the changed values of one tensor. @data, @bytes, @tensors, @n: as for shardd_delta_apply.
 * @tensor: its index in @tensors; a further name gives the values of its tensor. @indices: flat
 * indices, ascending; none is beyond the end of the tensor. @values: the values in the same order,
 * in the tensor's type. @room: capacity of both arrays, in elements; 0: return only @ret_n.
 * @ret_n: number of changed values. Errors: as for shardd_delta_apply; INVALID_ARGUMENT also if
 * @room is too small. Any thread. */
SHARDD_API int shardd_delta_values(const void *data, uint64_t bytes,
				   const struct shardd_published_tensor *tensors, size_t n,
				   uint32_t tensor, uint64_t *indices, void *values, uint64_t room,
				   uint64_t *ret_n, struct shardd_error *err);

/* Close the reader, and give its generation back. NULL is allowed. One thread at a time for each
 * reader. */
SHARDD_API void shardd_live_close(shardd_live *l);

/* A copy of a generation in this process's own memory. For processes on other hosts than the
 * daemon, over a forwarded socket (docs/publish.md). */
typedef struct shardd_fetched shardd_fetched;

struct shardd_fetch_options {
	size_t size;               /* of this struct */
	uint64_t newer_than;       /* only a generation with a larger number; 0: any */
	uint32_t wait_ms;          /* how long to wait for such a generation; 0: do not wait */
	uint64_t bytes_per_second; /* limit, 65536 or more; 0: only the daemon's limit */
	void *buffer;              /* destination of the copy; NULL: memory of @to */
	uint64_t buffer_bytes;     /* of @buffer */
};

/* Copy the newest generation of the publication @name of @job. The call checks every block against
 * its checksum, and all blocks against the generation's checksum. After a lost connection it
 * continues after the last block, or starts again if that generation no longer exists.
 * @options: NULL: the defaults. @to: *@to is NULL, or the result of an earlier call of the same
 * client for the same publication. Its memory and its list of tensors are reused. @ret: valid until
 * the next call with @to, or shardd_fetched_free. The caller may write to the tensors. After an
 * error ret->number is the generation that *@to still has as a whole; 0: none.
 * Errors: NOT_FOUND (also if there is no newer generation), DEADLINE_EXCEEDED, PERMISSION_DENIED,
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
