/*
 * A slab: one allocation that can be exported, charged to one account.
 *
 * The charge lives in the slab: taken when it is built, returned when its last
 * reference is gone and nobody else can hold the memory. A process that received a descriptor may
 * have passed it on, or forked. So a slab that is held according to the backend stays, charged and
 * quarantined, until slabs_sweep finds it free.
 *
 *   referenced --last slab_unref--> nobody holds it ------------------> freed
 *                     '-----------> held: KEPT, emptied --free at last-----^
 *
 * Loop thread only.
 */
#ifndef SHARDD_MEM_SLAB_H
#define SHARDD_MEM_SLAB_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "core/list.h"
#include "core/quota.h"

struct slab;

/* Where descriptors of shards are that outlive the daemon. */
struct slab_store {
	/* Hold a duplicate of @fd for slab @id. @spare: a successor can do without it: it gets no
	 * place that shards may need. Return: 0, -EAGAIN (later: what was asked before is not done
	 * yet), -ENOSPC (it is full). NULL: there is no store. */
	int (*add)(void *arg, uint32_t id, int fd, bool spare);
	/* Slab @id is not needed any more. */
	void (*drop)(void *arg, uint32_t id);
	void *arg;
};

/* The slabs of all devices of a node: a slab's number is unique among them. */
struct slab_table {
	struct slab_store store; /* of slabs of MEM_SHARD, and of pools (slab_keep_pages) */
	struct list slabs;       /* of struct slab, by link */
	uint32_t next;           /* ids are never used twice; 0: all have been */
	uint32_t n;
	uint32_t max; /* each takes a descriptor and a mapping of ours */
};

/* The memory of one device and its holders: backend, account, slabs. */
struct device {
	struct backend *backend;  /* borrowed */
	unsigned index;           /* in the node's devices */
	struct quota quota;       /* of the whole device */
	struct slab_table *table; /* @own, or that of the node's first device */
	struct slab_table own;
	uint32_t n_slabs;       /* on this device */
	uint32_t n_kept;        /* of them, kept only because others hold them */
	bool letting_go;        /* none is kept any more */
	bool leaving;           /* what the store has is left to a successor */
	bool seals;             /* parameters are sealed before they are handed out */
	uint64_t quarantined;   /* bytes */
	struct slab *ready;     /* the backend's ready page, for clients; NULL: not asked for yet */
	struct slab *ready_ipc; /* the same for jobs with CUDA IPC handles */
};

struct slab {
	uint32_t magic;
	unsigned refs;
	uint32_t id;
	enum mem_class class;
	bool writable;           /* for those it is exported to; may be set before that */
	bool borrowed;           /* @mem is the backend's own, charged to nobody */
	int owner_rank;          /* whose it is alone; -1: all ranks of the job */
	struct device *device;   /* borrowed */
	struct quota *payer;     /* borrowed; outlives the slab */
	struct user_charge cost; /* one of the payer's user's slabs */
	struct backend_mem *mem;
	uint64_t bytes;
	uint64_t quarantined; /* bytes of it that wait for a process to end: all or none */
	unsigned holds;       /* processes that it waits for; quarantine.c's own */
	unsigned exported;    /* descriptors handed out */
	bool kept;            /* without a reference, for as long as others hold it */
	bool stored;          /* the table's store has its descriptor */
	bool used;            /* job_drop_unused_slabs's own */
	bool lasts;           /* slab_last */
	bool spare;           /* its pool gave it up early: its charge does not wait for others */
	void *pool;           /* pool.c's own; NULL outside of a pool */
	/* It is registered with an engine: slab_unref calls @leave instead of freeing it, and that
	 * calls slab_bury when the engine has released it. Both NULL otherwise. */
	void *window;
	void (*leave)(struct slab *s);
	/* (optional) Nothing refers to it any more: told once, before anything is done with it. */
	void (*gone)(struct slab *s, void *arg);
	void *gone_arg;
	char job[65];     /* for status */
	struct list link; /* device->table->slabs */
};

/* Errno values in results of slab_new and pool_take. */
enum {
	SLAB_E_QUOTA = -EDQUOT, /* the payer lacks the bytes, or its user has too many slabs */
	SLAB_E_FULL = BACKEND_E_FULL, /* the device has no such amount left, or the table is full */
	SLAB_E_LATER = BACKEND_E_LATER, /* the backend is making it: ask again at its news */
};

/* Could @error go away when other memory is given back? */
static inline bool slab_is_short(int error)
{
	return error == SLAB_E_QUOTA || error == SLAB_E_FULL;
}

/* For requests that are made beside each other, so that devices allocate in parallel: note in
 * *@later that one has to be repeated. Return: @error, or 0 instead of SLAB_E_LATER. */
static inline int slab_note_later(int error, bool *later)
{
	*later = *later || error == SLAB_E_LATER;
	return error == SLAB_E_LATER ? 0 : error;
}

/* A part of a slab. Borrowed view: holds no reference unless said so. */
struct region {
	struct slab *slab; /* NULL: none */
	uint64_t offset;   /* bytes */
	uint64_t bytes;
};

#define REGION_NULL ((struct region){ 0 })

/* Take @r over: *r becomes REGION_NULL, so that it has one holder. */
static inline struct region region_steal(struct region *r)
{
	struct region taken = *r;

	*r = REGION_NULL;
	return taken;
}

/* Limit: the smaller of @limit (0: none) and the backend's capacity. */
void slab_device_init(struct device *d, struct backend *backend, uint64_t limit);
/* One of several devices of a node: number its slabs with those of @first, which has
 * none yet. */
void slab_device_follow(struct device *d, const struct device *first, unsigned index);
/* The ready page that clients of a job of that kind can open, for a backend with queues. Return:
 * borrowed, or NULL without memory. */
struct slab *slab_device_ready(struct device *d, enum backend_share share);
/* CHECKs that no slab and no byte is left. */
void slab_device_deinit(struct device *d);

/* @bytes is rounded up to the backend's granularity. @payer: charged beside the device;
 * the device's own account is allowed. @job: name for status. Writable for clients if
 * @class is MEM_GRAD, or made so. @ret: the caller holds one reference.
 * Return: 0, SLAB_E_QUOTA, SLAB_E_FULL (also of the store), SLAB_E_LATER, or another negative
 * errno. */
int slab_new(struct device *d, struct quota *payer, enum mem_class class, enum backend_share share,
	     uint64_t bytes, const char *job, int owner_rank, struct slab **ret);

/* The same for memory that outlived another daemon: @fd is borrowed, @id is the
 * one it had. */
int slab_import(struct device *d, struct quota *payer, enum mem_class class, uint64_t bytes,
		const char *job, uint32_t id, int fd, struct slab **ret);

/* Put a slab of a pool into the store, so that a successor has its pages. Return: 0, -EAGAIN (later),
 * -ENOSPC (there is no room for what a successor can do without), -EOPNOTSUPP (it ends with this
 * daemon), or another negative errno. */
int slab_keep_pages(struct slab *s);

/* Its contents stay as they are for as long as a process has them mapped, also one that an earlier daemon has
 * handed them to, and after its last reference. */
void slab_last(struct slab *s);

struct slab *slab_ref(struct slab *s);
/* Free a slab whose last reference is gone; for the code that set @leave. */
void slab_bury(struct slab *s);
/* Return: NULL. NULL is allowed. */
struct slab *slab_unref(struct slab *s);

/* Free kept slabs that no process holds any more; empty the rest again. Call now and then. */
void slabs_sweep(struct device *d);
/* Stop keeping slabs: for the end of the daemon. Memory that others still hold is empty then,
 * unless it is sealed. */
void slabs_let_go(struct device *d);
/* From now on slabs in the store keep their contents when they are freed: a successor takes them
 * over. */
void slabs_leave(struct device *d);

/* Find by id among the slabs of the device's table. Return: borrowed, or NULL. */
struct slab *slab_find(const struct device *d, uint32_t id);

/* Descriptor for a client. The caller's to close. */
int slab_export(struct slab *s, int *ret_fd, bool *ret_writable);
/* The IPC handle of a slab. Return: 0 or negative errno. */
int slab_export_ipc(struct slab *s, uint8_t ret_handle[BACKEND_IPC_BYTES]);

/* Address of a region for the daemon's kernels. */
void *region_addr(const struct region *r);

#endif
