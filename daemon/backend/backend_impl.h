/*
 * Backend, for implementations. Only backend.c calls a slot: the wrapper checks the contract,
 * counts, and calls. All slots are required unless marked; all are called on the loop thread.
 */
#ifndef SHARDD_BACKEND_IMPL_H
#define SHARDD_BACKEND_IMPL_H

#include "backend/backend.h"
#include "core/fault.h"
#include "core/loopq.h"

struct backend_ops {
	int (*alloc)(struct backend *b, uint64_t bytes, enum backend_share share,
		     struct backend_mem **ret);
	void (*free)(struct backend *b, struct backend_mem *mem); /* asynchronous inside */
	int (*export)(struct backend *b, struct backend_mem *mem, bool writable, int *ret_fd);
	int (*import)(struct backend *b, int fd, uint64_t bytes, struct backend_mem **ret);
	int (*store)(struct backend *b, struct backend_mem *mem, int *ret_fd);
	/* Must call backend_complete exactly once, from the loop, not from inside; before
	 * it backend_issued, if task->issued is set and the task has not failed. */
	void (*submit)(struct backend *b, struct backend_task *task);
	void (*close)(struct backend *b); /* frees @b */

	/* (optional) */
	void (*tick)(struct backend *b, uint64_t now_us);
	/* (optional) Of memory that the CPU reads. Any thread. */
	void (*run)(struct backend *b, struct launch *launch, struct backend_owner owner);
	/* (optional, together) Without them backend_is_held is always false and nothing is
	 * sealed. */
	bool (*is_held)(struct backend *b, struct backend_mem *mem);
	void (*empty)(struct backend *b, struct backend_mem *mem); /* asynchronous inside */
	int (*seal)(struct backend *b, struct backend_mem *mem);
	/* (optional) Of memory of the host. */
	struct host_room *(*room)(struct backend *b);
	/* (optional) Without it all of this kind reach each other. */
	bool (*reaches)(const struct backend *b, const struct backend *other,
			enum backend_share share);
	/* (optional) Without it there is no BACKEND_SHARE_IPC. */
	int (*export_ipc)(struct backend *b, struct backend_mem *mem, uint8_t *ret_handle);
	/* (optional, together) Without them the order is BACKEND_ORDER_NONE. */
	struct backend_mem *(*ready)(struct backend *b);
	/* (optional) Satisfy every wait for a word of @page, of a daemon that has ended. Blocks. */
	int (*release)(struct backend *b, struct backend_mem *page);
	/* (optional, together) Of a device, whose launches a successor runs again on it. */
	int (*redo_open)(struct backend *b, int fd, struct backend_mem **ret);
	uint64_t (*redo_last)(struct backend *b);
	int (*redo_run)(struct backend *b, const struct launch *launch, uint64_t number);
	struct backend_mem *(*ready_ipc)(struct backend *b); /* (optional) */
	int (*ready_event)(struct backend *b, enum backend_queue queue, unsigned i,
			   uint8_t *ret_handle);
	int (*signals_new)(struct backend *b, struct backend_mem *mem,
			   struct backend_signals **ret);
	int (*signals_events)(struct backend_signals *s, uint32_t slot,
			      const uint8_t *const *handles);
	void (*signals_poison)(struct backend_signals *s);
	void (*signals_free)(struct backend_signals *s, void (*freed)(void *userdata),
			     void *userdata);
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
	unsigned signals;    /* alive */
	backend_news_cb news;
	void *news_userdata;
};

struct backend_mem {
	void *addr;
	uint64_t bytes;
	enum backend_share share;
	uint64_t inode; /* of its memfd; 0: it has none */
	bool stored;    /* another process keeps it: its contents are not to be emptied */
	bool lasts;     /* nor while a process has it mapped */
};

/* First member of every implementation's own struct. */
struct backend_signals {
	struct backend *backend;
};

void backend_init(struct backend *b, const struct backend_ops *ops, struct loopq *loopq);

/* Report news to the callback, if there is one. Loop thread. */
void backend_tell(struct backend *b, enum backend_news news);

/* A task is in its queue and raises the queue's word to @ready. Loop thread. */
void backend_issued(struct backend *b, struct backend_task *task, uint64_t ready);

/* A submitted task has ended. Loop thread. */
void backend_complete(struct backend *b, struct backend_task *task, int status);

/* Constructors of the implementations. @threads: kernel threads, 0: one per
 * core. @capacity: bytes, 0: the machine's memory. @prefault: make pages of new memory
 * before they are used (host_fill.h). Return: 0 or negative errno. */
int backend_host_new(struct loopq *loopq, unsigned threads, uint64_t capacity, bool prefault,
		     struct backend **ret);

/* Pages of the host beside GPUs (pages.c). It runs no tasks. Return: 0 or -ENOMEM. */
int backend_pages_new(struct loopq *loopq, struct backend **ret);

/* GPUs by libcuda. One backend per device that CUDA_VISIBLE_DEVICES and @uuids (NULL or
 * empty: all) leave, at most @max of them, each with its own threads.
 * @order: TIMELINE or EVENTS forces that; NONE: probe, TIMELINE if it works.
 * @measure: measure how kernels of two processes share each device (takes a moment), with the help
 * of @program: a path of this program, whose main passes the arguments after --gpu-overlap-child to
 * backend_cuda_overlap_child and exits with its result. NULL: not measured.
 * @ret: as many as *ret_n. @f: one sentence if there is none.
 * Return: 0 or a fault code. */
struct backend_cuda_options {
	const char *const *uuids;
	unsigned n_uuids;
	enum backend_order order;
	bool measure;
	const char *program; /* /proc/self/exe */
};
int backend_cuda_new(struct loopq *loopq, const struct backend_cuda_options *options,
		     struct backend **ret, unsigned max, unsigned *ret_n, struct fault *f);
/* The other process of that measurement. Return: an exit status. */
int backend_cuda_overlap_child(const char *uuid);
/* For the nccl engine: the stream behind a queue and the context to be current, as
 * void * so that this header needs no cuda.h. Any thread. */
void *backend_cuda_stream(struct backend *b, enum backend_queue queue);
void *backend_cuda_context(struct backend *b);
/* While a queue is held, we put nothing on its stream and do not allocate or free the device's
 * memory: NCCL needs the stream for itself while one of its calls is in progress. Holds nest. Any
 * thread but the loop's: blocks for as long as issuing a task or allocating memory takes. */
void backend_cuda_hold(struct backend *b, enum backend_queue queue);
/* Work that ends only if another node does its part is put on @b's streams: from here on no memory is
 * made, until backend_cuda_wait_end, which follows when it has been executed. They nest. Any thread.
 * Return: false: there is memory to make first, do not put it there: ask again. */
bool backend_cuda_wait_begin(struct backend *b);
void backend_cuda_wait_end(struct backend *b);
void backend_cuda_let(struct backend *b, enum backend_queue queue);

/* A complete backend on malloc'ed memfds whose kernels run inside the loop's next
 * turn; fails on demand. Tests. */
int backend_fake_new(struct loopq *loopq, uint64_t capacity, struct backend **ret);
/* Let the @n-th call from now on fail (1: the next), with @err; 0: none. Counted:
 * alloc, export, import, submit (the task's status). */
void backend_fake_fail(struct backend *b, unsigned n, int err);
/* Calls counted so far. */
unsigned backend_fake_calls(const struct backend *b);
/* Hold back completions until released (in submission order, or reversed). A thread in backend_run waits
 * until they are released, too. */
void backend_fake_hold(struct backend *b, bool hold);
void backend_fake_release(struct backend *b, bool reversed);
/* While completions are held back: let one through, the oldest. With queues: when no task is left
 * to issue, the oldest issued task that can be executed. Return: false: there is none. */
bool backend_fake_step(struct backend *b);
/* Give it its own queues, as on a GPU (BACKEND_ORDER_TIMELINE); before its first use.
 * Return: 0 or negative errno. */
int backend_fake_queues(struct backend *b);
/* From now on memory is allocated later (BACKEND_E_LATER, then BACKEND_NEWS_MEMORY), as on a GPU:
 * when nothing else is left to let through. */
void backend_fake_later(struct backend *b, bool later);
/* Slots of signals were raised, or poisoned: tasks may be able to run. */
void backend_fake_look(struct backend *b);

#endif
