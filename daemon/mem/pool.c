/*
 * A slab of a pool is cut into free and used blocks without gaps, in the order of their offsets;
 * two free blocks are never adjacent. So giving back only merges blocks and cannot fail for lack of
 * memory.
 */
#include "mem/pool.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "mem/stagger.h"

struct block {
	struct list link; /* pool_slab.blocks */
	uint64_t offset;
	uint64_t bytes;
	bool used;
};

struct pool_slab {
	struct list link; /* pool.slabs */
	struct pool *pool;
	struct slab *slab;  /* holds a reference */
	struct list blocks; /* of struct block */
	uint64_t used;      /* bytes of used blocks */
};

void pool_init(struct pool *p, struct device *device, struct quota *payer, enum mem_class class,
	       enum backend_share share, const char *job, int owner_rank)
{
	*p = (struct pool){ .device = device,
			    .payer = payer,
			    .class = class,
			    .share = share,
			    .owner_rank = owner_rank };
	snprintf(p->job, sizeof(p->job), "%s", job);
	list_init(&p->slabs);
}

static struct block *pool_block_new(uint64_t offset, uint64_t bytes)
{
	struct block *b = calloc(1, sizeof(*b));

	if (!b)
		return NULL;
	b->offset = offset;
	b->bytes = bytes;
	list_init(&b->link);
	return b;
}

static void pool_block_free(struct block *b)
{
	list_unlink(&b->link);
	free(b);
}

/* Free a slab without a region in it: one block, all of it. */
static void pool_drop_slab(struct pool_slab *ps)
{
	struct pool *p = ps->pool;
	struct block *b = list_first(&ps->blocks, struct block, link);

	CHECK(ps->used == 0 && b->bytes == ps->slab->bytes);
	CHECK(p->bytes >= ps->slab->bytes);
	p->bytes -= ps->slab->bytes;
	pool_block_free(b);
	CHECK(list_empty(&ps->blocks));
	list_unlink(&ps->link);
	ps->slab->pool = NULL;
	slab_unref(ps->slab);
	free(ps);
}

void pool_deinit(struct pool *p)
{
	if (!p->device)
		return;
	CHECK(p->used == 0);
	while (!list_empty(&p->slabs))
		pool_drop_slab(list_first(&p->slabs, struct pool_slab, link));
	CHECK(p->bytes == 0);
	p->device = NULL;
}

/* Put @slab (consumed on success) into the pool. */
static struct pool_slab *pool_add_slab(struct pool *p, struct slab *slab)
{
	struct pool_slab *ps = calloc(1, sizeof(*ps));
	struct block *b = pool_block_new(0, slab->bytes);

	if (!ps || !b) {
		free(ps);
		free(b);
		return NULL;
	}
	list_init(&ps->blocks);
	list_append(&ps->blocks, &b->link);
	list_init(&ps->link);
	list_append(&p->slabs, &ps->link);
	ps->pool = p;
	ps->slab = slab;
	slab->pool = ps;
	p->bytes += slab->bytes;
	return ps;
}

static int pool_make(struct pool *p, uint64_t bytes, struct slab **ret)
{
	return slab_new(p->device, p->payer, p->class, p->share, bytes, p->job, p->owner_rank, ret);
}

/* Take a slab for @bytes: a large one, so that small regions share it, or just the needed size when
 * no more is left. The choice is remembered until the request is answered: a device that allocates
 * later must get the same request again. */
static int pool_grow(struct pool *p, uint64_t bytes, struct pool_slab **ret)
{
	uint64_t large = bytes < POOL_MIN_SLAB ? POOL_MIN_SLAB : bytes;
	uint64_t granularity = backend_info(p->device->backend)->granularity;
	struct slab *slab;
	int r;

	r = pool_make(p, p->small ? bytes : large, &slab);
	if (slab_is_short(r) && !p->small && large > bytes && granularity < large) {
		p->small = true;
		r = pool_make(p, bytes, &slab);
	}
	p->small = p->small && r == SLAB_E_LATER;
	if (r)
		return r;
	*ret = pool_add_slab(p, slab);
	if (!*ret) {
		slab_unref(slab);
		return -ENOMEM;
	}
	if (p->grown)
		p->grown(p->owner, slab);
	return 0;
}

void pool_on_grown(struct pool *p, void (*grown)(void *owner, struct slab *s), void *owner)
{
	p->grown = grown;
	p->owner = owner;
}

int pool_adopt(struct pool *p, struct slab *s)
{
	CHECK(s->class == p->class && s->payer == p->payer && s->device == p->device && !s->pool);
	s->owner_rank = p->owner_rank;
	if (!pool_add_slab(p, slab_ref(s))) {
		slab_unref(s);
		return -ENOMEM;
	}
	return 0;
}

static struct block *pool_find_free(struct pool_slab *ps, uint64_t bytes)
{
	struct block *b, *tmp;

	if (ps->slab->bytes - ps->used < bytes)
		return NULL;
	list_for_each (b, tmp, &ps->blocks, link)
		if (!b->used && b->bytes >= bytes)
			return b;
	return NULL;
}

/* Cut @bytes off the start of the free block @b. Return: 0 or -ENOMEM. */
static int pool_carve(struct pool_slab *ps, struct block *b, uint64_t bytes)
{
	if (b->bytes > bytes) {
		struct block *rest = pool_block_new(b->offset + bytes, b->bytes - bytes);

		if (!rest)
			return -ENOMEM;
		list_append(b->link.next, &rest->link); /* before the next: after @b */
		b->bytes = bytes;
	}
	b->used = true;
	ps->used += bytes;
	ps->pool->used += bytes;
	return 0;
}

/* First fit. Return: the block, with its slab in @ret_slab, or NULL. */
static struct block *pool_find_fit(struct pool *p, uint64_t bytes, struct pool_slab **ret_slab)
{
	struct pool_slab *ps, *tmp;

	list_for_each (ps, tmp, &p->slabs, link) {
		struct block *b = pool_find_free(ps, bytes);

		if (b) {
			*ret_slab = ps;
			return b;
		}
	}
	return NULL;
}

/* Bytes of the block for a region of @bytes. */
static uint64_t pool_block_bytes(const struct pool *p, uint64_t bytes)
{
	uint64_t rounded = (bytes + POOL_ALIGN - 1) & ~(uint64_t)(POOL_ALIGN - 1);

	return rounded + stagger_room(p->device, bytes);
}

/* Where in its block a region begins; regions that all ranks share are not read beside others, and
 * so are not staggered. */
static uint64_t pool_begin_in_block(const struct pool *p, uint64_t bytes)
{
	uint32_t rank = p->owner_rank < 0 ? 0 : (uint32_t)p->owner_rank;

	return stagger_by(p->device, bytes, STAGGER_RANK(rank));
}

int pool_take(struct pool *p, uint64_t bytes, struct region *ret)
{
	struct pool_slab *ps;
	struct block *b;
	int r;

	CHECK(p->device);
	CHECK(bytes > 0);
	if (bytes > UINT64_MAX - POOL_ALIGN - STAGGER_ROOM)
		return SLAB_E_FULL;
	b = pool_find_fit(p, pool_block_bytes(p, bytes), &ps);
	if (!b) {
		r = pool_grow(p, pool_block_bytes(p, bytes), &ps);
		if (r)
			return r;
		b = list_first(&ps->blocks, struct block, link);
	}
	r = pool_carve(ps, b, pool_block_bytes(p, bytes));
	if (r)
		return r;
	*ret = (struct region){ .slab = ps->slab,
				.offset = b->offset + pool_begin_in_block(p, bytes),
				.bytes = bytes };
	return 0;
}

/* The used block of @r; the holder guarantees that it exists. */
static struct block *pool_find_used(struct pool_slab *ps, const struct region *r)
{
	uint64_t begin = r->offset - pool_begin_in_block(ps->pool, r->bytes);
	struct block *b, *tmp;

	list_for_each (b, tmp, &ps->blocks, link)
		if (b->offset == begin)
			break;
	CHECK(&b->link != &ps->blocks && b->used &&
	      b->bytes == pool_block_bytes(ps->pool, r->bytes));
	return b;
}

static struct pool_slab *pool_slab_of(const struct pool *p, const struct region *r)
{
	struct pool_slab *ps = r->slab->pool;

	CHECK(ps && ps->pool == p && ps->slab == r->slab);
	return ps;
}

/* Merge @b with its free neighbours. */
static void pool_coalesce(struct pool_slab *ps, struct block *b)
{
	struct block *prev = list_entry(b->link.prev, struct block, link);
	struct block *next = list_entry(b->link.next, struct block, link);

	if (&next->link != &ps->blocks && !next->used) {
		b->bytes += next->bytes;
		pool_block_free(next);
	}
	if (&prev->link != &ps->blocks && !prev->used) {
		prev->bytes += b->bytes;
		pool_block_free(b);
	}
}

void pool_give(struct pool *p, struct region *r)
{
	struct pool_slab *ps;
	struct block *b;

	if (!r->slab)
		return;
	ps = pool_slab_of(p, r);
	b = pool_find_used(ps, r);
	CHECK(p->used >= b->bytes && ps->used >= b->bytes);
	p->used -= b->bytes;
	ps->used -= b->bytes;
	b->used = false;
	pool_coalesce(ps, b);
	*r = REGION_NULL;
}

/* Legacy CUDA IPC: what another process has opened may be freed only when it has closed it,
 * so such a slab stays until the end of its pool, and quarantine handles it then. */
static bool pool_can_drop(const struct pool_slab *ps)
{
	return ps->used == 0 && !(ps->slab->exported && ps->pool->share == BACKEND_SHARE_IPC);
}

static struct pool_slab *pool_largest_empty(struct pool *p)
{
	struct pool_slab *ps, *tmp, *best = NULL;

	list_for_each (ps, tmp, &p->slabs, link)
		if (pool_can_drop(ps) && (!best || ps->slab->bytes > best->slab->bytes))
			best = ps;
	return best;
}

/* Another allocation waits for its charge. Living ranks have it mapped, but may not use it. */
static void pool_spare_slab(struct pool_slab *ps)
{
	ps->slab->spare = true;
	pool_drop_slab(ps);
}

static uint64_t pool_trim_all(struct pool *p)
{
	struct pool_slab *ps, *tmp;
	uint64_t before = p->bytes;

	list_for_each (ps, tmp, &p->slabs, link)
		if (pool_can_drop(ps))
			pool_spare_slab(ps);
	return before - p->bytes;
}

uint64_t pool_trim(struct pool *p, uint64_t want)
{
	struct pool_slab *ps;
	uint64_t freed = 0;

	if (want == UINT64_MAX)
		return pool_trim_all(p); /* the order does not matter: one walk */
	while (freed < want && (ps = pool_largest_empty(p))) {
		freed += ps->slab->bytes;
		pool_spare_slab(ps);
	}
	return freed;
}

void pool_each_slab(struct pool *p, void (*fn)(struct slab *s, void *arg), void *arg)
{
	struct pool_slab *ps, *tmp;

	if (!p->device)
		return;
	list_for_each (ps, tmp, &p->slabs, link)
		fn(ps->slab, arg);
}

void pool_renumber(struct pool *p, int owner_rank)
{
	struct pool_slab *ps, *tmp;

	p->owner_rank = owner_rank;
	if (!p->device)
		return;
	list_for_each (ps, tmp, &p->slabs, link)
		ps->slab->owner_rank = owner_rank;
}

uint64_t pool_slab_used(const struct slab *s)
{
	const struct pool_slab *ps = s->pool;

	return ps ? ps->used : s->bytes;
}
