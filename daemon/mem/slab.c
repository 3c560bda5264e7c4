#include "mem/slab.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "core/check.h"
#include "core/cleanup.h"

#define SLAB_MAGIC 0x534c4142u
#define MOST_SLABS 32768u

/* Half of the descriptors are left to connections; a mapping each is what the kernel
 * allows a process 65530 of (vm.max_map_count). */
static uint32_t most_slabs(void)
{
	struct rlimit limit = { .rlim_cur = RLIM_INFINITY };

	getrlimit(RLIMIT_NOFILE, &limit);
	return limit.rlim_cur / 2 < MOST_SLABS ? (uint32_t)limit.rlim_cur / 2 : MOST_SLABS;
}

void device_init(struct device *d, struct backend *backend, uint64_t limit)
{
	uint64_t capacity = backend_info(backend)->capacity_bytes;

	CHECK(capacity > 0);
	*d = (struct device){ .backend = backend, .next_slab = 1, .max_slabs = most_slabs() };
	quota_init(&d->quota, NULL, limit > 0 && limit < capacity ? limit : capacity);
	list_init(&d->slabs);
}

void device_deinit(struct device *d)
{
	CHECK(list_empty(&d->slabs));
	CHECK(d->quota.used == 0);
	CHECK(d->quarantined == 0);
}

/* Charge @payer. Return: 0, SLAB_E_QUOTA, or SLAB_E_FULL if it is the device that
 * has not that much left. */
static int charge(struct device *d, struct quota *payer, enum mem_class class, uint64_t bytes)
{
	if (quota_charge(payer, class, bytes) == 0)
		return 0;
	return bytes > quota_left(&d->quota) ? SLAB_E_FULL : SLAB_E_QUOTA;
}

/* A slab without memory. */
static struct slab *build(struct device *d, struct quota *payer, enum mem_class class,
			  uint64_t bytes, const char *job, int owner_rank)
{
	struct slab *s = calloc(1, sizeof(*s));

	if (!s)
		return NULL;
	*s = (struct slab){ .magic = SLAB_MAGIC,
			    .refs = 1,
			    .class = class,
			    .owner_rank = owner_rank,
			    .device = d,
			    .payer = payer,
			    .bytes = bytes };
	snprintf(s->job, sizeof(s->job), "%s", job);
	list_init(&s->link);
	return s;
}

int slab_new(struct device *d, struct quota *payer, enum mem_class class, uint64_t bytes,
	     const char *job, int owner_rank, struct slab **ret)
{
	_cleanup_(freep) struct slab *s = NULL;
	uint64_t granularity = backend_info(d->backend)->granularity;
	int r;

	CHECK(bytes > 0);
	if (bytes > UINT64_MAX - granularity || d->n_slabs >= d->max_slabs || !d->next_slab)
		return SLAB_E_FULL;
	bytes = (bytes + granularity - 1) / granularity * granularity;
	s = build(d, payer, class, bytes, job, owner_rank);
	if (!s)
		return -ENOMEM;
	r = charge(d, payer, class, bytes);
	if (r)
		return r;
	r = backend_alloc(d->backend, bytes, &s->mem);
	if (r) {
		quota_return(payer, class, bytes);
		return r == BACKEND_E_FULL ? SLAB_E_FULL : r;
	}
	s->id = d->next_slab++;
	list_append(&d->slabs, &s->link);
	d->n_slabs++;
	*ret = STEAL_PTR(s);
	return 0;
}

int slab_import(struct device *d, struct quota *payer, enum mem_class class, uint64_t bytes,
		const char *job, uint32_t id, int fd, struct slab **ret)
{
	_cleanup_(freep) struct slab *s = NULL;
	int r;

	/* From a file that may be damaged: not for us to CHECK. */
	if (bytes == 0 || id == 0 || id == UINT32_MAX || slab_find(d, id))
		return -EINVAL;
	s = build(d, payer, class, bytes, job, -1);
	if (!s)
		return -ENOMEM;
	r = charge(d, payer, class, bytes);
	if (r)
		return r;
	r = backend_import(d->backend, fd, bytes, &s->mem);
	if (r) {
		quota_return(payer, class, bytes);
		return r;
	}
	s->id = id;
	if (d->next_slab <= id)
		d->next_slab = id + 1;
	list_append(&d->slabs, &s->link);
	d->n_slabs++;
	*ret = STEAL_PTR(s);
	return 0;
}

struct slab *slab_ref(struct slab *s)
{
	MAGIC_CHECK(s, SLAB_MAGIC);
	CHECK(s->refs > 0);
	s->refs++;
	return s;
}

struct slab *slab_unref(struct slab *s)
{
	if (!s)
		return NULL;
	MAGIC_CHECK(s, SLAB_MAGIC);
	CHECK(s->refs > 0);
	if (--s->refs > 0)
		return NULL;
	CHECK(s->quarantined == 0 && !s->pool);
	list_unlink(&s->link);
	s->device->n_slabs--;
	backend_free(s->device->backend, s->mem);
	quota_return(s->payer, s->class, s->bytes);
	s->magic = 0;
	free(s);
	return NULL;
}

struct slab *slab_find(struct device *d, uint32_t id)
{
	struct slab *s, *tmp;

	list_for_each (s, tmp, &d->slabs, link)
		if (s->id == id)
			return s;
	return NULL;
}

int slab_export(struct slab *s, int *ret_fd, bool *ret_writable)
{
	bool writable;
	int r;

	MAGIC_CHECK(s, SLAB_MAGIC);
	writable = s->class == MEM_GRAD;
	r = backend_export(s->device->backend, s->mem, writable, ret_fd);
	if (r)
		return r;
	s->exported++;
	*ret_writable = writable;
	return 0;
}

void *region_addr(const struct region *r)
{
	MAGIC_CHECK(r->slab, SLAB_MAGIC);
	CHECK(r->offset <= r->slab->bytes && r->bytes <= r->slab->bytes - r->offset);
	return (char *)backend_addr(r->slab->mem) + r->offset;
}
