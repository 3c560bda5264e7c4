#include "mem/slab.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "core/check.h"
#include "core/cleanup.h"

#define SLAB_MAGIC 0x534c4142u
#define MOST_SLABS 32768u

/* Half of the descriptors are left for connections. Each slab also needs a mapping, of which the
 * kernel allows 65530 per process (vm.max_map_count). */
static uint32_t slab_most_slabs(void)
{
	struct rlimit limit = { .rlim_cur = RLIM_INFINITY };

	getrlimit(RLIMIT_NOFILE, &limit);
	return limit.rlim_cur / 2 < MOST_SLABS ? (uint32_t)limit.rlim_cur / 2 : MOST_SLABS;
}

void slab_device_init(struct device *d, struct backend *backend, uint64_t limit)
{
	uint64_t capacity = backend_info(backend)->capacity_bytes;

	CHECK(capacity > 0);
	*d = (struct device){ .backend = backend, .own = { .next = 1, .max = slab_most_slabs() } };
	quota_init(&d->quota, NULL, limit > 0 && limit < capacity ? limit : capacity);
	list_init(&d->own.slabs);
	d->table = &d->own;
}

void slab_device_follow(struct device *d, const struct device *first, unsigned index)
{
	CHECK(d->n_slabs == 0 && first->table == &first->own);
	d->table = first->table;
	d->index = index;
}

void slab_device_deinit(struct device *d)
{
	d->ready = slab_unref(d->ready);
	d->ready_ipc = slab_unref(d->ready_ipc);
	CHECK(d->n_slabs == 0);
	CHECK(d->quota.used == 0);
	CHECK(d->quarantined == 0);
}

/* A job's account may be a child of the device's account (one device), or separate (several). */
static bool slab_pays_for_device(const struct device *d, const struct quota *payer)
{
	return payer == &d->quota || payer->parent == &d->quota;
}

/* Charge @payer and the device. Return: 0, SLAB_E_QUOTA, or SLAB_E_FULL if it is the
 * device that has not that much left. */
static int slab_charge(struct device *d, struct quota *payer, enum mem_class class, uint64_t bytes)
{
	if (quota_charge(payer, class, bytes))
		return bytes > quota_left(&d->quota) ? SLAB_E_FULL : SLAB_E_QUOTA;
	if (slab_pays_for_device(d, payer) || quota_charge(&d->quota, class, bytes) == 0)
		return 0;
	quota_undo(payer, class, bytes);
	return SLAB_E_FULL;
}

static void slab_undo_charge(struct device *d, struct quota *payer, enum mem_class class,
			     uint64_t bytes)
{
	quota_undo(payer, class, bytes);
	if (!slab_pays_for_device(d, payer))
		quota_undo(&d->quota, class, bytes);
}

static void slab_uncharge(struct device *d, struct quota *payer, enum mem_class class,
			  uint64_t bytes)
{
	quota_return(payer, class, bytes);
	if (!slab_pays_for_device(d, payer))
		quota_return(&d->quota, class, bytes);
}

/* A slab without memory. */
static struct slab *slab_build(struct device *d, struct quota *payer, enum mem_class class,
			       uint64_t bytes, const char *job, int owner_rank)
{
	struct slab *s = calloc(1, sizeof(*s));

	if (!s)
		return NULL;
	*s = (struct slab){ .magic = SLAB_MAGIC,
			    .refs = 1,
			    .class = class,
			    .writable = class == MEM_GRAD,
			    .owner_rank = owner_rank,
			    .device = d,
			    .payer = payer,
			    .bytes = bytes };
	snprintf(s->job, sizeof(s->job), "%s", job);
	list_init(&s->link);
	return s;
}

/* Into the table, under a number. */
static void slab_enter(struct device *d, struct slab *s, uint32_t id)
{
	s->id = id;
	list_append(&d->table->slabs, &s->link);
	d->table->n++;
	d->n_slabs++;
}

struct slab *slab_device_ready(struct device *d, enum backend_share share)
{
	struct slab **at = share == BACKEND_SHARE_IPC ? &d->ready_ipc : &d->ready;
	struct backend_mem *mem;
	struct slab *s;

	if (*at)
		return *at;
	mem = share == BACKEND_SHARE_IPC ? backend_ready_ipc(d->backend)
					 : backend_ready(d->backend);
	s = mem ? slab_build(d, &d->quota, MEM_CONTROL, backend_bytes(mem), "", -1) : NULL;
	if (!s)
		return NULL;
	s->mem = mem;
	s->borrowed = true;
	s->writable = false;
	slab_enter(d, s, d->table->next++);
	*at = s;
	return s;
}

/* Return: 0, -EOPNOTSUPP (it ends with the daemon), -EAGAIN, -ENOSPC, or another negative errno. */
static int slab_put_into_store(struct slab *s, bool spare)
{
	const struct slab_store *store = &s->device->table->store;
	_cleanup_(fd_closep) int fd = -1;
	int r;

	if (!store->add)
		return -EOPNOTSUPP;
	r = backend_store(s->device->backend, s->mem, &fd);
	if (r == -EOPNOTSUPP)
		return r;
	if (r == 0)
		r = store->add(store->arg, s->id, fd, spare);
	if (r == 0)
		s->stored = true;
	else
		backend_unstore(s->device->backend, s->mem);
	return r;
}

/* Shards are in the store from the begin on. Return: 0 or a result of slab_new. */
static int slab_keep_shards(struct slab *s)
{
	int r = s->class == MEM_SHARD ? slab_put_into_store(s, false) : 0;

	if (r == -EOPNOTSUPP)
		return 0;
	return r == -EAGAIN ? SLAB_E_LATER : r == -ENOSPC ? SLAB_E_FULL : r;
}

int slab_keep_pages(struct slab *s)
{
	CHECK(s->class != MEM_SHARD && !s->borrowed);
	return s->stored ? 0 : slab_put_into_store(s, true);
}

static void slab_take_from_store(struct slab *s)
{
	const struct slab_store *store = &s->device->table->store;

	if (!s->stored || s->device->leaving)
		return;
	s->stored = false;
	backend_unstore(s->device->backend, s->mem);
	if (store->drop)
		store->drop(store->arg, s->id);
}

int slab_new(struct device *d, struct quota *payer, enum mem_class class, enum backend_share share,
	     uint64_t bytes, const char *job, int owner_rank, struct slab **ret)
{
	_cleanup_(freep) struct slab *s = NULL;
	uint64_t granularity = backend_info(d->backend)->granularity;
	int r;

	CHECK(bytes > 0);
	backend_forget_shortage(d->backend);
	if (bytes > UINT64_MAX - granularity || d->table->n >= d->table->max || !d->table->next)
		return SLAB_E_FULL;
	bytes = (bytes + granularity - 1) / granularity * granularity;
	s = slab_build(d, payer, class, bytes, job, owner_rank);
	if (!s)
		return -ENOMEM;
	if (!user_has_room(payer->user, USER_SLABS, 1))
		return SLAB_E_QUOTA;
	r = slab_charge(d, payer, class, bytes);
	if (r)
		return r;
	r = backend_alloc(d->backend, bytes, share, &s->mem);
	if (r) {
		slab_undo_charge(d, payer, class, bytes);
		return r;
	}
	s->id = d->table->next;
	r = slab_keep_shards(s);
	if (r) {
		backend_free(d->backend, s->mem);
		slab_undo_charge(d, payer, class, bytes);
		return r;
	}
	CHECK(user_charge(&s->cost, payer->user, USER_SLABS, 1, NULL) == 0);
	slab_enter(d, s, d->table->next++);
	*ret = STEAL_PTR(s);
	return 0;
}

int slab_import(struct device *d, struct quota *payer, enum mem_class class, uint64_t bytes,
		const char *job, uint32_t id, int fd, struct slab **ret)
{
	_cleanup_(freep) struct slab *s = NULL;
	int r;

	/* From a file that may be damaged, so this is not a CHECK. */
	if (bytes == 0 || id == 0 || id == UINT32_MAX || slab_find(d, id))
		return -EINVAL;
	s = slab_build(d, payer, class, bytes, job, -1);
	if (!s)
		return -ENOMEM;
	r = slab_charge(d, payer, class, bytes);
	if (r)
		return r;
	r = backend_import(d->backend, fd, bytes, &s->mem);
	if (r) {
		slab_uncharge(d, payer, class, bytes);
		return r;
	}
	s->stored = true;
	backend_stored(d->backend, s->mem);
	/* it exists already: an owner with too many slabs gets no more, but keeps this one */
	(void)user_charge(&s->cost, payer->user, USER_SLABS, 1, NULL);
	slab_enter(d, s, id);
	if (d->table->next <= id)
		d->table->next = id + 1;
	*ret = STEAL_PTR(s);
	return 0;
}

void slab_last(struct slab *s)
{
	MAGIC_CHECK(s, SLAB_MAGIC);
	s->lasts = true;
	backend_last(s->device->backend, s->mem);
}

struct slab *slab_ref(struct slab *s)
{
	MAGIC_CHECK(s, SLAB_MAGIC);
	CHECK(s->refs > 0);
	s->refs++;
	return s;
}

static void slab_count_kept(struct slab *s, uint64_t bytes)
{
	struct device *d = s->device;

	CHECK(d->quarantined >= s->quarantined);
	d->quarantined += bytes - s->quarantined;
	d->n_kept = bytes ? d->n_kept + 1 : d->n_kept - 1;
	s->quarantined = bytes;
	s->kept = bytes > 0;
}

static void slab_keep(struct slab *s)
{
	slab_count_kept(s, s->bytes);
	backend_empty(s->device->backend, s->mem);
}

/* What is left to a successor is not kept, because that would empty it. */
static bool slab_must_be_kept(const struct slab *s)
{
	return !s->borrowed && (s->exported || s->lasts) && !s->spare && !s->stored &&
	       !s->device->letting_go && backend_is_held(s->device->backend, s->mem);
}

static void slab_end(struct slab *s)
{
	list_unlink(&s->link);
	s->device->n_slabs--;
	s->device->table->n--;
	if (!s->borrowed) {
		backend_free(s->device->backend, s->mem);
		slab_uncharge(s->device, s->payer, s->class, s->bytes);
	}
	user_charge_deinit(&s->cost);
	s->magic = 0;
	free(s);
}

void slab_bury(struct slab *s)
{
	MAGIC_CHECK(s, SLAB_MAGIC);
	CHECK(s->refs == 0 && !s->leave);
	if (s->gone)
		s->gone(s, s->gone_arg);
	slab_take_from_store(s);
	if (slab_must_be_kept(s))
		slab_keep(s);
	else
		slab_end(s);
}

void slabs_sweep(struct device *d)
{
	struct slab *s, *tmp;

	if (!d->n_kept)
		return;
	list_for_each (s, tmp, &d->table->slabs, link) {
		if (!s->kept || s->device != d)
			continue;
		if (slab_must_be_kept(s)) {
			backend_empty(d->backend, s->mem);
		} else {
			slab_count_kept(s, 0);
			slab_end(s);
		}
	}
}

void slabs_let_go(struct device *d)
{
	d->letting_go = true;
	slabs_sweep(d);
}

void slabs_leave(struct device *d)
{
	d->leaving = true;
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
	if (s->leave)
		s->leave(s);
	else
		slab_bury(s);
	return NULL;
}

struct slab *slab_find(const struct device *d, uint32_t id)
{
	struct slab *s, *tmp;

	list_for_each (s, tmp, &d->table->slabs, link)
		if (s->id == id)
			return s;
	return NULL;
}

int slab_export(struct slab *s, int *ret_fd, bool *ret_writable)
{
	int r;

	MAGIC_CHECK(s, SLAB_MAGIC);
	if (s->device->seals && !s->stored && s->class == MEM_SHARD && !s->writable &&
	    !s->exported) {
		r = backend_seal(s->device->backend, s->mem);
		if (r && r != -EINVAL) /* a kernel without that seal */
			return r;
	}
	r = backend_export(s->device->backend, s->mem, s->writable, ret_fd);
	if (r)
		return r;
	s->exported++;
	*ret_writable = s->writable;
	return 0;
}

int slab_export_ipc(struct slab *s, uint8_t ret_handle[BACKEND_IPC_BYTES])
{
	int r;

	MAGIC_CHECK(s, SLAB_MAGIC);
	r = backend_export_ipc(s->device->backend, s->mem, ret_handle);
	if (r == 0)
		s->exported++;
	return r;
}

void *region_addr(const struct region *r)
{
	MAGIC_CHECK(r->slab, SLAB_MAGIC);
	CHECK(r->offset <= r->slab->bytes && r->bytes <= r->slab->bytes - r->offset);
	return (char *)backend_addr(r->slab->mem) + r->offset;
}
