/*
 * Accounts of bytes. Every slab is charged to one account by class when it is
 * built and returned by its destructor; an account charges its parent (a job's
 * account its device's). Loop thread only.
 */
#ifndef SHARDD_CORE_QUOTA_H
#define SHARDD_CORE_QUOTA_H

#include <stdint.h>

#include "core/user.h"

enum mem_class {
	MEM_SHARD = 0, /* master parameters, gradient shards, optimizer state: hard */
	MEM_FULL,      /* gathered copies: pooled, revocable */
	MEM_GRAD,      /* what trainers write: gradient and other buffers: pooled */
	MEM_CONTROL,   /* blobs of commits, copies for checkpoints */
	MEM_PUBLISHED, /* generations of publications */
	_MEM_N,
};

struct quota {
	struct quota *parent; /* borrowed; outlives this one; may be NULL */
	struct user *user;    /* borrowed; NULL: none. Charged with USER_STATE beside */
	uint64_t limit;       /* bytes; 0: none */
	uint64_t used;        /* bytes, sum of @by_class */
	uint64_t by_class[_MEM_N];
	uint64_t peak_used; /* the most there was before something was given back */
	uint64_t peak[_MEM_N];
};

enum {
	QUOTA_E_LIMIT = 1, /* this account or a parent does not have that much left */
};

/* Limit @limit bytes (0: none), no user. Allocates nothing. */
void quota_init(struct quota *q, struct quota *parent, uint64_t limit);

/* Take @bytes from this account and all above, or nothing.
 * Return: 0 or QUOTA_E_LIMIT. */
int quota_charge(struct quota *q, enum mem_class class, uint64_t bytes);

/* Give back what was charged; CHECKs that it was. */
void quota_return(struct quota *q, enum mem_class class, uint64_t bytes);

/* The same for a charge without memory: the allocation failed after the charge. */
void quota_undo(struct quota *q, enum mem_class class, uint64_t bytes);

/* The same for memory that is not the parents': of the machine, for a job on a GPU. Only this account
 * and its user are charged. */
int quota_charge_here(struct quota *q, enum mem_class class, uint64_t bytes);
void quota_return_here(struct quota *q, enum mem_class class, uint64_t bytes);

/* The most that was ever charged, of one class and in all. */
uint64_t quota_peak(const struct quota *q, enum mem_class class);
uint64_t quota_peak_used(const struct quota *q);

/* Bytes that could still be charged here. */
uint64_t quota_left(const struct quota *q);

/* shard, full, grad, control, published. Return: static string. */
const char *mem_class_name(enum mem_class class);

#endif
