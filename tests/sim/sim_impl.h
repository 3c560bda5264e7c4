/*
 * The inner parts of the software libcuda.so.1.
 *
 * One lock (sim_lock) protects all tables; a stream's thread takes it between items and
 * gives it back while it executes one. What other processes see too (a page of values, an
 * interprocess event) is in memfds, with atomics and futexes.
 *
 *   context    the primary one of each device, sticky error
 *   block      physical memory: a memfd and where the CPU sees it; counted references
 *   range      addresses: what is mapped where, and who may use it
 *   handle     what cuMemCreate and cuMemImportFromShareableHandle give
 *   stream     a thread and its queue of items
 *   event      the place in a stream at which it was recorded last
 *
 * Streams, events, handles and modules are never freed (a few hundred bytes each): so an
 * object used after its end is recognised.
 */
#ifndef SHARDD_TESTS_SIM_IMPL_H
#define SHARDD_TESTS_SIM_IMPL_H

#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "sim.h"

#define SIM_DEVICES     8
#define SIM_GRANULARITY (2ull << 20)

extern pthread_mutex_t sim_lock;

/* -- environment, randomness, entering (sim_enter.c) -------------------------- */

enum need {
	NEED_NOTHING, /* also before cuInit */
	NEED_START,   /* after cuInit, also beside a broken context */
	NEED_INIT,    /* and a current context, if there is one, that works */
	NEED_CTX,     /* a current context that works */
	NEED_END,     /* gives something back: done even where the context is broken */
};

struct ctx;

/* Begins every entry: counts the call, fails it where the environment wants so.
 * @function: __func__. @ret: the current context or NULL; may be NULL. */
CUresult sim_enter(const char *function, enum need need, struct ctx **ret);
/* The end of a NEED_END entry: the context's error, or success. */
CUresult sim_leave(const struct ctx *c);
/* Microseconds of a clock that all processes share. */
uint64_t sim_clock_us(void);
void sim_futex_wait(_Atomic uint32_t *word, uint32_t value, uint32_t mask);
/* As that, for 10 ms at most. */
void sim_futex_nap(_Atomic uint32_t *word, uint32_t value);
void sim_futex_wake(_Atomic uint32_t *word, uint32_t mask);

/* -- objects that remember their end (sim_objects.c) --------------------------- */

enum object_state { OBJECT_UNKNOWN, OBJECT_LIVE, OBJECT_ENDED };

/* All objects of one kind; each begins with a uint32_t that is 1 while it lives. */
struct objects {
	const char *what; /* for messages: "stream" */
	size_t size;
	char **chunks;
	unsigned n_chunks, used; /* used: of the last chunk */
};

/* Zeroed, live. With the lock. */
void *objects_new(struct objects *o);
/* @p if it lives, else NULL; one that ended is a breach of @function. With the lock. */
void *objects_get(const struct objects *o, const void *p, const char *function);
/* Calls @fn for all that live. With the lock. */
void objects_each(const struct objects *o, void (*fn)(void *object, void *arg), void *arg);

/* -- devices and contexts (sim_device.c) ---------------------------------------- */

struct stream;

struct ctx {
	int device; /* CUdevice */
	_Atomic unsigned retains;
	_Atomic int error; /* CUresult: all work fails from here on */
	struct stream *legacy;
	_Atomic unsigned long long launches;
};

/* The process that called cuInit; 0: none yet. */
extern _Atomic pid_t sim_started_in;
CUresult sim_init(void);
unsigned sim_devices(void);
/* With or without the lock. NULL: none. */
struct ctx *sim_current(void);
struct ctx *sim_ctx(int device);
/* Sticky, from now on; wakes whatever waits in the context's streams. Without the lock. */
void sim_ctx_break(struct ctx *c, CUresult error);
/* A kernel is being launched: SHARDD_SIM_LOSE. */
void sim_device_launch(struct ctx *c);

/* -- memory (sim_memory.c) ------------------------------------------------------ */

enum block_kind { BLOCK_VMM = 1, BLOCK_MALLOC, BLOCK_HOST };

/* The last page of a memory's memfd; shared between processes. */
struct block_head {
	char magic[8];
	uint64_t bytes;
	int32_t physical;      /* device; -1: host */
	uint32_t kind;         /* enum block_kind */
	_Atomic uint32_t bell; /* counts values written by streams: waits sleep on it */
};

struct block {
	unsigned refs;
	int fd;
	uint64_t bytes;
	char *shadow; /* where the CPU reaches it */
	struct block_head *head;
	int charged; /* CUdevice that it was taken from; -1: made by somebody else */
};

enum range_kind { RANGE_VMM, RANGE_MALLOC, RANGE_IPC, RANGE_HOST };

struct range {
	uint64_t addr, bytes;
	enum range_kind kind;
	struct block *block;
	int device;                     /* CUdevice it belongs to */
	uint8_t access[SIM_DEVICES];    /* CUmemAccess_flags of each, RANGE_VMM */
	uint64_t ipc_token, ipc_object; /* RANGE_IPC: of the exporter */
	uint64_t exported;              /* RANGE_MALLOC: number it was exported under, or 0 */
	unsigned opens;                 /* RANGE_IPC */
};

/* With the lock, all of these. */
CUresult block_new(enum block_kind kind, int device, uint64_t bytes, struct block **ret);
/* @fd: borrowed. -> CUDA_ERROR_INVALID_VALUE if it is no such memory. */
CUresult block_import(int fd, enum block_kind kind, struct block **ret);
void block_unref(struct block *b);
uint64_t block_used(int device);

/* Addresses that no CPU can use; never the same twice until all were used. 0: none. */
uint64_t addr_take(uint64_t bytes, uint64_t align);
bool addr_is_device(uint64_t addr);
void addr_reserve(uint64_t addr, uint64_t bytes);
bool addr_reserved(uint64_t addr, uint64_t bytes);
bool addr_unreserve(uint64_t addr, uint64_t bytes);

struct range *range_add(const struct range *r); /* takes the block's reference over */
struct range *range_find(uint64_t addr);        /* holding @addr, or NULL */
struct range *range_next(uint64_t addr);        /* the first one that ends behind @addr */
void range_remove(struct range *r);             /* gives the block's reference back */
/* May @device use it so? @copy: by a copy, which the device that has it can do too. */
bool range_allows(const struct range *r, int device, bool write, bool copy);
/* All of it in one range and allowed. */
bool range_usable(int device, uint64_t addr, uint64_t bytes, bool write, bool copy);
struct range *range_first(void);
struct range *range_after(const struct range *r);

/* For the stream's thread; without the lock. As sim_translate. */
void *item_translate(uint64_t addr, uint64_t bytes, bool write, bool copy);
/* As that, with the memory's bell. */
void *item_word(uint64_t addr, bool write, _Atomic uint32_t **ret_bell);

/* A breach, if any stream waits for a value that it does not have. With the lock. */
void sim_no_waits(const char *function);

/* -- handing over between processes (sim_ipc.c) ---------------------------------- */

enum ipc_kind { IPC_MEMORY = 1, IPC_EVENT };

/* What a CUipcMemHandle or CUipcEventHandle holds. */
struct ipc_handle {
	char magic[8];
	uint32_t kind, pid;
	uint64_t token, object, bytes, check;
	char zero[16];
};

/* @fd: borrowed until ipc_withdraw. With the lock. Return: the object's number, or 0. */
uint64_t ipc_offer(int fd, enum ipc_kind kind);
void ipc_handle_make(void *ret, enum ipc_kind kind, uint64_t object, uint64_t bytes);
/* 0: none. With the lock; ipc_settle must follow. */
void ipc_withdraw(uint64_t object);
/* Without the lock: the thread that nobody needs any more ends, with its socket. */
void ipc_settle(void);
/* Has another process this memory open? With the lock. */
bool ipc_in_use(const struct range *v);
/* What everybody checks of a handle first. */
CUresult ipc_handle_check(const struct ipc_handle *h, enum ipc_kind kind);
/* Fetch the descriptor. May block shortly:
 * without the lock. */
CUresult ipc_fetch(const struct ipc_handle *h, int *ret_fd);

/* -- streams (sim_stream.c, sim_queue.c) ------------------------------------------- */

struct item;
typedef void (*item_fn)(struct stream *s, struct item *item);

struct dep {
	struct stream *stream;
	uint64_t seq;
};

struct item {
	struct item *next;
	item_fn run;
	void (*free)(struct item *item); /* what it owns; may be NULL */
	const char *what;                /* for messages */
	bool always;                     /* runs in a broken context too */
	struct dep *deps;
	unsigned n_deps;
	_Alignas(16) char payload[];
};

struct stream {
	uint32_t live;
	struct ctx *ctx;
	unsigned flags;
	int priority;
	bool legacy;
	struct stream *next; /* whose thread runs, also if it was destroyed */
	pthread_t thread;
	pthread_cond_t work;     /* for the thread: something changed */
	pthread_cond_t progress; /* executed grew */
	struct item *first, **last;
	uint64_t enqueued, executed;
	unsigned hurry; /* threads that wait for it: no delays */
	bool ending;    /* destroyed: ends when empty */
	bool kicked;
	_Atomic bool killed;    /* its context is gone: drops everything */
	_Atomic uint32_t *bell; /* sleeping in a wait for a value of this memory */
	const char *current;    /* what it executes, for messages; its thread only */
	struct block *pins[64]; /* in use by the current item; its thread only */
	struct block **more_pins;
	unsigned n_pins, max_more;
};

extern struct objects stream_objects;

/* The stream behind @h with the lock held; also the default ones. NULL: no such. */
struct stream *stream_get(CUstream h, struct ctx *c, const char *function);
CUresult stream_new(struct ctx *c, unsigned flags, int priority, bool legacy, struct stream **ret);
/* With the lock. */
void stream_kill_all(struct ctx *c);
struct item *item_new(item_fn run, const char *what, size_t payload);
/* The item must wait for that place of another stream first. */
void item_after(struct item *item, struct stream *s, uint64_t seq);
/* With the lock. Return: its number in the stream. */
uint64_t stream_put(struct stream *s, struct item *item);
/* Until executed reached @seq, or the context broke. With the lock, which it gives up. */
void stream_wait(struct stream *s, uint64_t seq);
void stream_wake_all(struct ctx *c);
/* What the stream's thread is about to sleep on, NULL: not any more. Without the lock. */
void stream_set_bell(struct stream *s, _Atomic uint32_t *bell);
/* The stream whose thread calls, or NULL. */
struct stream *stream_self(void);
/* The thread is to stop what it does: the context broke or is gone. */
bool stream_stopped(const struct stream *s);
/* A fault of what the stream's thread executes. Without the lock. */
void stream_fault(CUresult error, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void stream_unpin(struct stream *s);
/* The block is used until the end of the item. With the lock. */
void stream_pin(struct stream *s, struct block *b);
/* Does this item wait for a value that is not there? With the lock. */
bool item_waits(const struct item *item);

/* -- kernels (sim_kernel.c, sim_run.c) ----------------------------------------------- */

/* Run one launch of kernel @fn (enum cuda_fn) with these arguments. Stream thread. */
void kernel_run(unsigned fn, const void *args, unsigned blocks);

#endif
