/*
 * Backend, for those who write one. Nobody but backend.c calls a slot: the
 * wrapper checks the contract, counts, and calls. All slots are required unless
 * marked; all are called on the loop thread.
 */
#ifndef SHARDD_BACKEND_IMPL_H
#define SHARDD_BACKEND_IMPL_H

#include "backend/backend.h"
#include "core/loopq.h"

struct backend_ops {
	int (*alloc)(struct backend *b, uint64_t bytes, struct backend_mem **ret);
	void (*free)(struct backend *b, struct backend_mem *mem); /* asynchronous inside */
	int (*export)(struct backend *b, struct backend_mem *mem, bool writable, int *ret_fd);
	int (*import)(struct backend *b, int fd, uint64_t bytes, struct backend_mem **ret);
	/* Must call backend_complete exactly once, from the loop, not from inside. */
	void (*submit)(struct backend *b, struct backend_task *task);
	void (*close)(struct backend *b); /* frees @b */
};

/* First member of every implementation's own struct. */
struct backend {
	uint32_t magic;
	const struct backend_ops *ops;
	struct backend_info info;
	struct loopq *loopq; /* borrowed */
	unsigned in_flight;  /* tasks */
	unsigned live;       /* allocations */
	uint64_t submitted;  /* tasks so far; tests look at it */
};

struct backend_mem {
	void *addr;
	uint64_t bytes;
};

void backend_init(struct backend *b, const struct backend_ops *ops, struct loopq *loopq);

/* A submitted task has ended. Loop thread. */
void backend_complete(struct backend *b, struct backend_task *task, int status);

/* Constructors of the implementations. @threads: kernel threads, 0: one per
 * core. @capacity: bytes, 0: the machine's memory. Return: 0 or negative errno. */
int backend_host_new(struct loopq *loopq, unsigned threads, uint64_t capacity,
		     struct backend **ret);

/* A complete backend on malloc'ed memfds whose kernels run inside the loop's next
 * turn; fails on demand. Tests. */
int backend_fake_new(struct loopq *loopq, uint64_t capacity, struct backend **ret);
/* Let the @n-th call from now on fail (1: the next), with @err; 0: none. Counted:
 * alloc, export, import, submit (the task's status). */
void backend_fake_fail(struct backend *b, unsigned n, int err);
/* Calls counted so far. */
unsigned backend_fake_calls(const struct backend *b);
/* Hold back completions until released (in submission order, or reversed). */
void backend_fake_hold(struct backend *b, bool hold);
void backend_fake_release(struct backend *b, bool reversed);

#endif
