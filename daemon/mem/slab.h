/*
 * A slab: one allocation that can be exported, charged to one account.
 *
 * The charge lives in the slab: taken when it is built, returned when its last
 * reference goes. Loop thread only.
 */
#ifndef SHARDD_MEM_SLAB_H
#define SHARDD_MEM_SLAB_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "core/list.h"
#include "core/quota.h"

/* The memory of one device and who has it: backend, account, list of slabs. */
struct device {
	struct backend *backend; /* borrowed */
	struct quota quota;      /* of the whole device */
	struct list slabs;       /* of struct slab, by link */
	uint32_t next_slab;      /* ids are never used twice; 0: all have been */
	uint32_t n_slabs;
	uint32_t max_slabs;   /* each takes a descriptor and a mapping of ours */
	uint64_t quarantined; /* bytes */
};

struct slab {
	uint32_t magic;
	unsigned refs;
	uint32_t id;
	enum mem_class class;
	int owner_rank;        /* whose it is alone; -1: all ranks of the job */
	struct device *device; /* borrowed */
	struct quota *payer;   /* borrowed; outlives the slab */
	struct backend_mem *mem;
	uint64_t bytes;
	uint64_t quarantined; /* bytes of it that wait for a process to end: all or none */
	unsigned holds;       /* processes that it waits for; quarantine.c's own */
	unsigned exported;    /* descriptors handed out */
	void *pool;           /* pool.c's own; NULL outside of a pool */
	char job[65];         /* for status */
	struct list link;     /* device->slabs */
};

enum {
	SLAB_E_QUOTA = 1, /* the payer has no such amount left */
	SLAB_E_FULL = 2,  /* the device has no such amount left, or max_slabs */
};

/* A part of a slab. Borrowed view: holds no reference unless said so. */
struct region {
	struct slab *slab; /* NULL: none */
	uint64_t offset;   /* bytes */
	uint64_t bytes;
};

#define REGION_NULL ((struct region){ 0 })

/* Limit: the smaller of @limit (0: none) and the backend's capacity. */
void device_init(struct device *d, struct backend *backend, uint64_t limit);
/* CHECKs that no slab and no byte is left. */
void device_deinit(struct device *d);

/* @bytes is rounded up to the backend's granularity. @job: name for status.
 * @ret: the caller holds one reference.
 * Return: 0, SLAB_E_QUOTA, SLAB_E_FULL, or negative errno. */
int slab_new(struct device *d, struct quota *payer, enum mem_class class, uint64_t bytes,
	     const char *job, int owner_rank, struct slab **ret);

/* The same for memory that outlived another daemon: @fd is borrowed, @id is the
 * one it had. */
int slab_import(struct device *d, struct quota *payer, enum mem_class class, uint64_t bytes,
		const char *job, uint32_t id, int fd, struct slab **ret);

struct slab *slab_ref(struct slab *s);
/* Return: NULL. NULL is allowed. */
struct slab *slab_unref(struct slab *s);

/* Find by id among the device's slabs. Return: borrowed, or NULL. */
struct slab *slab_find(struct device *d, uint32_t id);

/* Descriptor for a client: writable only for MEM_GRAD. The caller's to close. */
int slab_export(struct slab *s, int *ret_fd, bool *ret_writable);

/* Address of a region for the daemon's kernels. */
void *region_addr(const struct region *r);

#endif
