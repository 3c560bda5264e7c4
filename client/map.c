#include "map.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"

void map_init(struct map *m)
{
	*m = (struct map){ .ops = &map_host_ops };
	channel_init(&m->channel);
	pthread_mutex_init(&m->lock, NULL);
	pthread_mutex_init(&m->table, NULL);
}

void map_use(struct map *m, const struct map_ops *ops, void *device)
{
	for (size_t i = 0; i < m->count; i++) /* pages of the host may be there already */
		CHECK(m->items[i].ops == &map_host_ops || m->items[i].device == device);
	m->ops = ops;
	m->device = device;
}

void map_without_channel(struct map *m)
{
	snprintf(m->channel.why, sizeof(m->channel.why),
		 "this client takes CUDA IPC handles, and the daemon sent none");
}

void map_abandon(struct map *m)
{
	m->n_former = 0;
	m->count = 0;
	m->windows = NULL;
}

static void map_unmap(const struct mapping *item)
{
	item->ops->unmap(item->device, item);
}

void map_deinit(struct map *m)
{
	channel_deinit(&m->channel);
	while (m->windows)
		map_window_free(m, m->windows);
	for (size_t i = 0; i < m->count; i++)
		map_unmap(&m->items[i]);
	for (size_t i = 0; i < m->n_former; i++)
		map_unmap(&m->former[i]);
	free(STEAL_PTR(m->former));
	m->n_former = 0;
	free(STEAL_PTR(m->items));
	m->count = 0;
	m->room = 0;
}

/* ------------------------------------------------------------------- slabs */

/* Where @slab is among the items, or where it belongs. Table locked. */
static size_t map_position(const struct map *m, uint32_t slab)
{
	size_t low = 0;
	size_t high = m->count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (m->items[middle].slab < slab)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static bool map_find(struct map *m, uint32_t slab, struct mapping *ret)
{
	bool found;
	size_t i;

	pthread_mutex_lock(&m->table);
	i = map_position(m, slab);
	found = i < m->count && m->items[i].slab == slab;
	if (found)
		*ret = m->items[i];
	pthread_mutex_unlock(&m->table);
	return found;
}

/* Table locked. Return: 0 or -ENOMEM. */
static int map_make_room(struct map *m)
{
	size_t room = m->room ? m->room * 2 : 16;
	struct mapping *bigger;

	if (m->count < m->room)
		return 0;
	bigger = realloc(m->items, room * sizeof(*bigger));
	if (!bigger)
		return -ENOMEM;
	m->items = bigger;
	m->room = room;
	return 0;
}

static int map_insert(struct map *m, const struct mapping *item)
{
	size_t at;
	int r;

	pthread_mutex_lock(&m->table);
	r = map_make_room(m);
	if (r == 0) {
		at = map_position(m, item->slab);
		memmove(m->items + at + 1, m->items + at, (m->count - at) * sizeof(*m->items));
		m->items[at] = *item;
		m->count++;
	}
	pthread_mutex_unlock(&m->table);
	return r;
}

void map_forget(struct map *m, uint32_t slab)
{
	struct mapping item;
	bool found = false;
	size_t i;

	pthread_mutex_lock(&m->table);
	i = map_position(m, slab);
	if (i < m->count && m->items[i].slab == slab && !m->items[i].writable &&
	    m->items[i].ops == &map_host_ops && !m->items[i].pins) {
		item = m->items[i];
		memmove(m->items + i, m->items + i + 1, (--m->count - i) * sizeof(*m->items));
		found = true;
	}
	pthread_mutex_unlock(&m->table);
	if (found)
		map_unmap(&item);
}

/* ------------------------------------------------------------- after a reconnection */

/* The memory of @slab is no longer the daemon's. Table locked. Return: 0 or -ENOMEM. */
static int map_retire(struct map *m, uint32_t slab)
{
	size_t i = map_position(m, slab);
	struct mapping *more;

	if (i == m->count || m->items[i].slab != slab)
		return 0; /* another thread has forgotten it */
	more = realloc(m->former, (m->n_former + 1) * sizeof(*more));
	if (!more)
		return -ENOMEM;
	m->former = more;
	more[m->n_former++] = m->items[i];
	memmove(m->items + i, m->items + i + 1, (--m->count - i) * sizeof(*m->items));
	return 0;
}

static const struct map_ops *map_ops_of(const struct map *m, const struct map_source *s)
{
	return s->pages ? &map_host_ops : m->ops;
}

/* The place of a former slab that one of @s may take: the addresses were handed out in an epoch that
 * has ended. Return: NULL: none. */
static uint8_t *map_take_place(struct map *m, const struct map_source *s)
{
	uint8_t *place = NULL;

	if (map_ops_of(m, s) != &map_host_ops)
		return NULL;
	pthread_mutex_lock(&m->table);
	for (size_t i = 0; i < m->n_former && !place; i++) {
		if (m->former[i].bytes != s->bytes || m->former[i].writable != s->writable ||
		    m->former[i].ops != &map_host_ops || m->former[i].pins)
			continue;
		place = m->former[i].base;
		m->former[i] = m->former[--m->n_former];
	}
	pthread_mutex_unlock(&m->table);
	return place;
}

static void map_give_place(struct map *m, const struct map_source *s, uint8_t *place)
{
	pthread_mutex_lock(&m->table);
	m->former[m->n_former++] = (struct mapping){
		.writable = s->writable, .base = place, .bytes = s->bytes, .ops = &map_host_ops
	};
	pthread_mutex_unlock(&m->table);
}

static bool map_is_same(const struct mapping *item, const struct map_source *s)
{
	bool same =
		item->ops->by_number ? item->lasts && s->lasts : map_host_file(s->fd) == item->file;

	return same && s->bytes == item->bytes && s->writable == item->writable;
}

/* @s came for a slab that is mapped, if it is. Return: 1: it is the same memory; 0: map
 * it; or a negative shardd_code. */
static int map_compare(struct map *m, const struct map_source *s, struct shardd_error *err)
{
	int r = 0;
	size_t i;

	pthread_mutex_lock(&m->table);
	i = map_position(m, s->slab);
	if (i < m->count && m->items[i].slab == s->slab) {
		r = map_is_same(&m->items[i], s);
		if (r)
			m->items[i].unchecked = false;
		else if (map_retire(m, s->slab) < 0)
			r = -ENOMEM;
	}
	pthread_mutex_unlock(&m->table);
	return r < 0 ? error_memory(err) : r;
}

void map_take_channel(struct map *m, struct channel *channel)
{
	m->channel = *channel;
	channel_init(channel);
}

void map_reconnected(struct map *m, struct channel *channel)
{
	pthread_mutex_lock(&m->lock);
	channel_deinit(&m->channel);
	map_take_channel(m, channel);
	pthread_mutex_lock(&m->table);
	for (size_t i = 0; i < m->count; i++)
		m->items[i].unchecked = true;
	pthread_mutex_unlock(&m->table);
	pthread_mutex_unlock(&m->lock);
}

/* @ret_gone: the daemon cannot have it. */
static bool map_next_unchecked(struct map *m, uint32_t *ret, bool *ret_gone)
{
	bool found = false;

	pthread_mutex_lock(&m->table);
	for (size_t i = 0; i < m->count && !found; i++) {
		found = m->items[i].unchecked;
		*ret = m->items[i].slab;
		*ret_gone = m->items[i].ops->by_number && !m->items[i].lasts;
	}
	pthread_mutex_unlock(&m->table);
	return found;
}

static int map_install(struct map *m, const struct map_source *s, int timeout_ms,
		       struct shardd_error *err)
{
	struct map_source at = *s;
	struct mapping item = {
		.slab = s->slab, .writable = s->writable, .bytes = s->bytes, .ipc = s->ipc != NULL
	};
	int r;

	at.over = map_take_place(m, s);
	item.file = s->fd < 0 ? 0 : map_host_file(s->fd);
	item.lasts = s->lasts;
	item.ops = map_ops_of(m, s);
	item.device = item.ops == m->ops ? m->device : NULL;
	r = item.ops->map(item.device, &at, timeout_ms, &item.base, err);
	if (r < 0 && at.over)
		map_give_place(m, s, at.over);
	if (r < 0)
		return r;
	if (map_insert(m, &item) < 0) {
		map_unmap(&item);
		return error_memory(err);
	}
	return 0;
}

/* Map the slab that has arrived. When it cannot be mapped at the moment it stays for the
 * next try. */
static int map_install_arrived(struct map *m, int timeout_ms, struct shardd_error *err)
{
	const struct shd1_slab *slab = &m->channel.in.slab;
	struct map_source s = { .slab = slab->slab,
				.writable = slab->writable != 0,
				.bytes = slab->bytes,
				.fd = m->channel.in_fd,
				.lasts = slab->lasts != 0,
				.pages = slab->pages != 0 };
	int r = map_compare(m, &s, err);

	if (r == 0)
		r = map_install(m, &s, timeout_ms, err);
	if (!error_is_again(r, err))
		channel_installed(&m->channel);
	return r < 0 ? r : 0;
}

static int map_left_ms(uint64_t deadline)
{
	uint64_t now = clock_now_us();

	return now >= deadline ? 0 : (int)((deadline - now + 999) / 1000);
}

/* Take part in the exchange until @slab is mapped. Locked. @whole: the caller has the
 * time that the device may take. */
static int map_fetch(struct map *m, uint32_t slab, uint64_t deadline, bool whole,
		     struct mapping *ret, struct shardd_error *err)
{
	struct channel *c = &m->channel;

	while (!map_find(m, slab, ret) || ret->unchecked) {
		int r = c->arrived ? 0 : channel_exchange(c, slab, deadline, err);

		if (r == 0)
			r = map_install_arrived(m, whole ? -1 : map_left_ms(deadline), err);
		/* What went wrong with another thread's slab it will be told itself. */
		if (r < 0 && (c->asked == slab || c->fd < 0 || error_is_again(r, err)))
			return r;
	}
	return 0;
}

static int map_open_ipc(struct map *m, const struct map_place *p, int timeout_ms,
			struct mapping *ret, struct shardd_error *err)
{
	struct map_source s = { .slab = p->slab,
				.writable = p->writable,
				.bytes = p->slab_bytes,
				.fd = -1,
				.ipc = p->ipc };
	int r = map_find(m, p->slab, ret) ? 0 : map_install(m, &s, timeout_ms, err);

	if (r == 0)
		CHECK(map_find(m, p->slab, ret));
	return r;
}

static int map_lock(struct map *m, int timeout_ms, struct shardd_error *err)
{
	if (timeout_ms == 0)
		return pthread_mutex_trylock(&m->lock) == 0 ? 0 : channel_again(err);
	pthread_mutex_lock(&m->lock);
	return 0;
}

static int map_address_of(const struct mapping *found, const struct map_place *p, void **ret,
			  struct shardd_error *err)
{
	if (p->offset > found->bytes || p->bytes > found->bytes - p->offset)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "the daemon placed %llu bytes at %llu in slab %u, which has %llu",
				 (unsigned long long)p->bytes, (unsigned long long)p->offset,
				 p->slab, (unsigned long long)found->bytes);
	if (p->writable && !found->writable)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "the daemon placed a writable buffer in slab %u, which it handed "
				 "out read-only",
				 p->slab);
	*ret = found->base + p->offset;
	return 0;
}

/* Bring the slab here. */
static int map_bring(struct map *m, const struct map_place *p, int timeout_ms, struct mapping *ret,
		     struct shardd_error *err)
{
	bool whole = timeout_ms < 0 || timeout_ms >= CHANNEL_TIMEOUT_MS;
	uint64_t limit = (uint64_t)(whole ? CHANNEL_TIMEOUT_MS : timeout_ms) * 1000u;
	int r = map_lock(m, timeout_ms, err);

	if (r < 0)
		return r;
	if (p->ipc)
		r = map_open_ipc(m, p, timeout_ms, ret, err);
	else
		r = map_fetch(m, p->slab, clock_now_us() + limit, whole, ret, err);
	pthread_mutex_unlock(&m->lock);
	if (whole && !p->ipc && error_is_again(r, err))
		r = error_set(err, SHARDD_UNAVAILABLE, NULL,
			      "the daemon did not hand over slab %u within %d s", p->slab,
			      CHANNEL_TIMEOUT_MS / 1000);
	return r;
}

int map_open(struct map *m, const char *path, const uint8_t token[SHD1_TOKEN_BYTES],
	     uint64_t session, struct shardd_error *err)
{
	struct shardd_error scratch;

	return channel_open(&m->channel, path, token, session, err ? err : &scratch);
}

/* Locked. @gone: the daemon cannot have it. */
static int map_check_one(struct map *m, uint32_t slab, bool gone, struct shardd_error *err)
{
	struct mapping found;
	int r = gone ? -SHARDD_NOT_FOUND
		     : map_fetch(m, slab, clock_now_us() + CHANNEL_TIMEOUT_MS * 1000u, true, &found,
				 err);

	if (r != -SHARDD_NOT_FOUND)
		return r;
	pthread_mutex_lock(&m->table);
	r = map_retire(m, slab);
	pthread_mutex_unlock(&m->table);
	return r < 0 ? error_memory(err) : 0;
}

/* Table locked. Take one out that is memory of a device, and that nobody reads. */
static bool map_take_former(struct map *m, struct mapping *ret)
{
	for (size_t i = 0; i < m->n_former; i++) {
		if (!m->former[i].ops->by_number || m->former[i].pins)
			continue;
		*ret = m->former[i];
		m->former[i] = m->former[--m->n_former];
		return true;
	}
	return false;
}

/* Locked. Device memory of earlier daemons is held by these mappings alone. */
static void map_unmap_former(struct map *m)
{
	struct mapping gone;

	pthread_mutex_lock(&m->table);
	while (map_take_former(m, &gone)) {
		pthread_mutex_unlock(&m->table);
		map_unmap(&gone);
		pthread_mutex_lock(&m->table);
	}
	pthread_mutex_unlock(&m->table);
}

int map_check(struct map *m, struct shardd_error *err)
{
	uint32_t slab;
	bool gone;
	int r = 0;

	pthread_mutex_lock(&m->lock);
	while (r == 0 && map_next_unchecked(m, &slab, &gone))
		r = map_check_one(m, slab, gone, err);
	if (r == 0)
		map_unmap_former(m);
	pthread_mutex_unlock(&m->lock);
	return r;
}

int map_address(struct map *m, const struct map_place *p, int timeout_ms, void **ret,
		struct shardd_error *err)
{
	struct shardd_error scratch;
	struct mapping found;
	int r;

	err = err ? err : &scratch;
	r = map_find(m, p->slab, &found) && !found.unchecked
		    ? 0
		    : map_bring(m, p, timeout_ms, &found, err);
	return r < 0 ? r : map_address_of(&found, p, ret, err);
}

/* -------------------------------------------------------------------- pins */

/* Table locked. Return: NULL: nothing is mapped there. */
static struct mapping *map_at_base(struct map *m, const void *base)
{
	for (size_t i = 0; i < m->count; i++)
		if (m->items[i].base == base)
			return &m->items[i];
	for (size_t i = 0; i < m->n_former; i++)
		if (m->former[i].base == base)
			return &m->former[i];
	return NULL;
}

uint64_t map_pin(struct map *m, const void *base)
{
	struct mapping *at;
	uint64_t bytes = 0;

	pthread_mutex_lock(&m->table);
	at = map_at_base(m, base);
	if (at) {
		at->pins++;
		bytes = at->bytes;
	}
	pthread_mutex_unlock(&m->table);
	return bytes;
}

void map_unpin(struct map *m, const void *base)
{
	struct mapping *at;

	pthread_mutex_lock(&m->table);
	at = map_at_base(m, base);
	if (at) {
		CHECK(at->pins);
		at->pins--;
	}
	pthread_mutex_unlock(&m->table);
}

/* Table locked. Take what is at @base out of the table, if nobody has pinned it. */
static bool map_take_out(struct map *m, const void *base, struct mapping *ret)
{
	struct mapping *at = map_at_base(m, base);
	size_t i;

	if (!at || at->pins)
		return false;
	*ret = *at;
	if (at >= m->former && at < m->former + m->n_former) {
		*at = m->former[--m->n_former];
		return true;
	}
	i = (size_t)(at - m->items);
	memmove(at, at + 1, (--m->count - i) * sizeof(*at));
	return true;
}

void map_drop(struct map *m, const void *base)
{
	struct mapping gone;
	bool found;

	map_unpin(m, base);
	pthread_mutex_lock(&m->table);
	found = map_take_out(m, base, &gone);
	pthread_mutex_unlock(&m->table);
	if (found)
		map_unmap(&gone);
}

/* ------------------------------------------------------------------ copies */

/* Is all of [@at, @at + @bytes) in the @size bytes at @base? */
static bool map_is_inside(const void *at, size_t bytes, const uint8_t *base, uint64_t size)
{
	uintptr_t from = (uintptr_t)at, first = (uintptr_t)base;

	return from >= first && from - first <= size && bytes <= size - (from - first);
}

/* Which slab has all of [@at, @at + @bytes), or which window? */
static bool map_find_range(struct map *m, const void *at, size_t bytes, struct mapping *ret)
{
	bool found = false;

	pthread_mutex_lock(&m->table);
	for (size_t i = 0; i < m->count && !found; i++) {
		found = map_is_inside(at, bytes, m->items[i].base, m->items[i].bytes);
		if (found)
			*ret = m->items[i];
	}
	for (const struct map_window *w = m->windows; w && !found; w = w->next) {
		found = w->shows && map_is_inside(at, bytes, w->at, w->bytes);
		if (found)
			*ret = (struct mapping){ .ops = m->ops, .device = m->device };
	}
	pthread_mutex_unlock(&m->table);
	return found;
}

static int map_unknown_pointer(const char *field, const void *at, size_t bytes,
			       struct shardd_error *err)
{
	return error_set(err, SHARDD_INVALID_ARGUMENT, field,
			 "%s: the %zu bytes at %p are not all in memory that the daemon handed out",
			 field, bytes, at);
}

int map_write(struct map *m, void *dst, const void *src, size_t bytes, struct shardd_error *err)
{
	struct mapping in;

	if (!map_find_range(m, dst, bytes, &in))
		return map_unknown_pointer("dst", dst, bytes, err);
	if (!bytes) /* @in may be the slab that ends at @dst */
		return 0;
	if (!in.writable)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "dst",
				 "dst: the memory at %p was handed out read-only", dst);
	return in.ops->copy_in(in.device, dst, src, bytes, err);
}

int map_read(struct map *m, void *dst, const void *src, size_t bytes, struct shardd_error *err)
{
	struct mapping in;

	if (!map_find_range(m, src, bytes, &in))
		return map_unknown_pointer("src", src, bytes, err);
	if (!bytes)
		return 0;
	return in.ops->copy_out(in.device, dst, src, bytes, err);
}
