/*
 * A pool: regions that come and go, cut from slabs of one class, one job and one
 * owner, so that memory is never handed from one job or one rank to another.
 *
 * First fit over each slab's free ranges; a slab is added when nothing fits and
 * given back by pool_trim. Loop thread only.
 */
#ifndef SHARDD_MEM_POOL_H
#define SHARDD_MEM_POOL_H

#include "core/formula.h"
#include "mem/slab.h"

struct pool_slab;

struct pool {
	struct device *device; /* borrowed */
	struct quota *payer;   /* borrowed */
	enum mem_class class;
	enum backend_share share;
	int owner_rank;
	char job[65];
	struct list slabs; /* of struct pool_slab */
	uint64_t bytes;    /* of all slabs */
	uint64_t used;     /* bytes in regions that are out */
	bool small; /* a large slab was refused: the next one is made as small as it may be */
	/* (optional) It has a new slab. */
	void (*grown)(void *owner, struct slab *s);
	void *owner;
};

/* Smallest slab a pool makes, bytes: small regions share one. */
#define POOL_MIN_SLAB (1u << 20)
/* Regions start at multiples of this, bytes (a pair of cache lines; enough for 16-byte device
 * accesses). */
#define POOL_ALIGN FORMULA_ALIGN

void pool_init(struct pool *p, struct device *device, struct quota *payer, enum mem_class class,
	       enum backend_share share, const char *job, int owner_rank);
/* Frees the slabs; every region must be back (CHECKed). Safe to call twice. */
void pool_deinit(struct pool *p);

/* Call @grown with each slab that is made for the pool. */
void pool_on_grown(struct pool *p, void (*grown)(void *owner, struct slab *s), void *owner);
/* Put @s, of the class and payer of @p, into the pool: it takes a reference. Its contents do not
 * matter. Return: 0 or -ENOMEM. */
int pool_adopt(struct pool *p, struct slab *s);

/* Take @bytes (more than 0). The contents are undefined.
 * Return: 0, SLAB_E_QUOTA, SLAB_E_FULL, SLAB_E_LATER, or another negative errno. */
int pool_take(struct pool *p, uint64_t bytes, struct region *ret);

/* Give a region back; *r becomes REGION_NULL. Safe on REGION_NULL. */
void pool_give(struct pool *p, struct region *r);

/* Bytes of @s that are in regions of its pool; all of it if it is in none. */
uint64_t pool_slab_used(const struct slab *s);

/* Its slabs are those of rank @owner_rank from now on, as status says. */
void pool_renumber(struct pool *p, int owner_rank);
/* Call @fn with each slab of the pool; it may take references, not change the pool. */
void pool_each_slab(struct pool *p, void (*fn)(struct slab *s, void *arg), void *arg);

/* Give back slabs without a region in them, largest first, until @want bytes are
 * freed (UINT64_MAX: all). Return: bytes freed. */
uint64_t pool_trim(struct pool *p, uint64_t want);

#endif
