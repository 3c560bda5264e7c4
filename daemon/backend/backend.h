/*
 * Backend: memory and kernels of one kind of device, for its users.
 *
 * Asynchronous throughout: a task is submitted from the loop thread, runs on the
 * backend's own threads (or the device), and its callback runs on the loop
 * thread, exactly once, never inside backend_submit. Tasks submitted without a
 * dependency between them may run at the same time in any order; who needs an
 * order submits the second task from the first one's callback.
 * Everything here: loop thread only.
 */
#ifndef SHARDD_BACKEND_H
#define SHARDD_BACKEND_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels.h"

struct backend;
struct backend_mem; /* one exportable allocation */

enum {
	BACKEND_E_FULL = 1, /* the device has no such amount left */
};

enum kop_kind {
	KOP_CAST,
	KOP_REDUCE,
	KOP_ALL_REDUCE,
	KOP_ADAMW,
	KOP_SGD,
	KOP_NORM,
	KOP_SCALE,
	KOP_FILL,
	KOP_COPY,
	_KOP_N
};

/* One kernel on @n elements (KOP_COPY: bytes). Pointers are device addresses. */
struct kop {
	enum kop_kind kind;
	uint64_t n;
	union {
		struct k_cast cast;
		struct k_reduce reduce;
		struct k_all_reduce all_reduce;
		struct k_adamw adamw;
		struct k_sgd sgd;
		struct k_norm norm;
		struct k_scale scale;
		struct k_fill fill;
		struct k_copy copy;
	};
};

struct backend_task;
/* @status: 0, or negative errno if the device failed the task. */
typedef void (*backend_done_cb)(struct backend_task *task, int status);

/* A set of kernels that are independent of each other. Embedded by its owner,
 * borrowed by the backend from submit to callback, with everything it points to. */
struct backend_task {
	struct kop *kops;
	unsigned n_kops;
	backend_done_cb done;
	void *impl; /* the backend's own */
};

struct backend_info {
	char id[32];             /* host:0 */
	const char *name;        /* host, cuda, fake */
	uint64_t capacity_bytes; /* of the device */
	uint64_t granularity;    /* allocations are multiples of this, bytes */
	unsigned threads;        /* that run kernels */
	char kernels[32];        /* which implementation */
	char detail[128];        /* for people: processor, NUMA nodes, huge pages */
};

const struct backend_info *backend_info(const struct backend *b);

/* Take @bytes (a multiple of the granularity), zero-filled, mapped for the
 * daemon. Does not touch the pages. @ret: the caller's, backend_free.
 * Return: 0, BACKEND_E_FULL, or negative errno. */
int backend_alloc(struct backend *b, uint64_t bytes, struct backend_mem **ret);

/* Give the memory back. Unmapping large memory takes long, so it happens on a
 * helper thread. NULL is allowed. */
void backend_free(struct backend *b, struct backend_mem *mem);

/* The daemon's address of the allocation (a device address on a GPU). */
void *backend_addr(const struct backend_mem *mem);
uint64_t backend_bytes(const struct backend_mem *mem);

/* A descriptor for another process, close-on-exec, the caller's to close.
 * @writable: false gives one that cannot be mapped for writing.
 * Return: 0 or negative errno. */
int backend_export(struct backend *b, struct backend_mem *mem, bool writable, int *ret_fd);

/* The inverse for memory that another daemon process allocated: checks size,
 * seals and kind of @fd (borrowed), maps it for writing.
 * Return: 0 or negative errno (-EINVAL: not memory of ours). */
int backend_import(struct backend *b, int fd, uint64_t bytes, struct backend_mem **ret);

/* Start @task; its callback comes later, from the loop, in every case. */
void backend_submit(struct backend *b, struct backend_task *task);

/* Tasks submitted whose callback has not run. */
unsigned backend_in_flight(const struct backend *b);

/* Stop the threads. No task may be in flight and all memory must be freed
 * (CHECKed). Blocks for the helper threads. NULL is allowed. Return: NULL. */
struct backend *backend_close(struct backend *b);

#endif
