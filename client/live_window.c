/*
 * The window: the same addresses for one generation after the other. Each buffer is mapped at a place of
 * its own, its home. To show one, its page table entries move from there into the window, and those of the
 * one before move back: so no page has to be found again by a fault.
 *
 * The kernel moves a whole entry of an upper level of the page table if the entry has nothing else in it. Homes and
 * windows therefore take whole GiB of addresses (1 GiB is one entry), also beyond the end of the buffer. Moving a
 * buffer of 64 MiB is then one entry, instead of 32.
 *
 * On a GPU the memory of a buffer is mapped into the window once more (struct map_ops), and unmapped for the next one.
 *
 * On the host the addresses are always mapped (MREMAP_DONTUNMAP): nothing else can take them meanwhile. Where the
 * kernel cannot do that for shared memory (before Linux 5.13), the buffer is mapped into the window once
 * more, and its pages come by faults.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "client_error.h"
#include "core/cleanup.h"
#include "live_impl.h"
#include "map.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

#define LIVE_WINDOW_BIG (2ull << 20)
#define LIVE_WINDOW_GIB (1ull << 30)

static bool live_window_move(uint8_t *from, uint64_t bytes, uint8_t *to)
{
	return mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) ==
	       to;
}

/* Another mapping of the same memory: what an old size of 0 means. */
static bool live_window_copy(uint8_t *from, uint64_t bytes, uint8_t *to)
{
	return mremap(from, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
}

/* Addresses for a window that shows @p. Smaller ones move quickly as they are. */
static uint64_t live_window_bytes(const struct live_place *p)
{
	uint64_t bytes = p->bytes;

	return p->layout->on_gpu || bytes < LIVE_WINDOW_BIG
		       ? bytes
		       : (bytes + LIVE_WINDOW_GIB - 1) / LIVE_WINDOW_GIB * LIVE_WINDOW_GIB;
}

/* Reserve @bytes of addresses; if a limit of addresses forbids it, @least of them. @bytes: how many. Return: as mmap. */
static uint8_t *live_window_reserve(uint64_t *bytes, uint64_t least)
{
	uint8_t *at = map_host_reserve(*bytes);

	if (at != MAP_FAILED)
		return at;
	*bytes = least;
	return map_host_reserve(least);
}

static int live_window_no_room(const struct live_place *p, struct shardd_error *err)
{
	return error_os(err, SHARDD_RESOURCE_EXHAUSTED, errno,
			"cannot reserve %llu bytes of addresses", (unsigned long long)p->bytes);
}

/* Its addresses. Return: 0 or a negative shardd_code. */
static int live_window_take(struct shardd_live *l, const struct live_place *p,
			    struct live_window *w, struct shardd_error *err)
{
	int e;

	w->bytes = live_window_bytes(p);
	if (!p->layout->on_gpu) {
		w->at = live_window_reserve(&w->bytes, p->bytes);
		return w->at == MAP_FAILED ? live_window_no_room(p, err) : 0;
	}
	e = map_window_new(&l->c->map, w->bytes, &w->gpu, err);
	if (e == 0)
		w->at = w->gpu->at;
	return e;
}

static void live_window_give_back(struct shardd_live *l, const struct live_window *w)
{
	live_fault_remove(l, w->at);
	map_window_free(&l->c->map, w->gpu);
	if (!w->gpu)
		munmap(w->at, w->bytes);
}

static int live_window_make(struct shardd_live *l, const struct live_place *p,
			    struct shardd_error *err)
{
	struct live_window *w = calloc(1, sizeof(*w));
	int e;

	if (!w)
		return error_memory(err);
	e = live_window_take(l, p, w, err);
	if (e < 0) {
		free(w);
		return e;
	}
	w->shows = p->bytes;
	w->layout = p->layout;
	w->tensors = live_place_tensors(p->layout, w->at, p->bytes);
	if (!w->tensors) {
		live_window_give_back(l, w);
		free(w);
		return error_memory(err);
	}
	if (!w->gpu)
		live_fault_add(l, w->at, p->bytes);
	w->former = l->window;
	l->window = w;
	return 0;
}

/* Give @p its home, of at most as many addresses as the window has. */
static int live_window_settle(const struct live_window *w, struct live_place *p,
			      struct shardd_error *err)
{
	if (p->home)
		return 0;
	p->home_bytes = w->bytes;
	p->home = live_window_reserve(&p->home_bytes, p->bytes);
	if (p->home == MAP_FAILED) {
		p->home = NULL;
		return live_window_no_room(p, err);
	}
	if (live_window_copy(p->base, p->home_bytes, p->home))
		return 0;
	munmap(STEAL_PTR(p->home), p->home_bytes);
	return live_window_no_room(p, err);
}

/* The window that has the entries of the page table of @p. */
static struct live_window *live_window_of(struct shardd_live *l, const struct live_place *p)
{
	struct live_window *w = l->window;

	while (w && w->shown != p)
		w = w->former;
	return w;
}

/* The window shows nothing. On the host, what it showed moves back to its home. */
static void live_window_clear(struct shardd_live *l, struct live_window *w)
{
	if (w->shown && w->gpu)
		(void)map_window_show(&l->c->map, w->gpu, NULL, NULL);
	else if (w->shown)
		(void)live_window_move(w->at, w->shown->home_bytes, w->shown->home);
	w->shown = NULL;
}

bool live_window_shows(struct shardd_live *l, const struct live_place *p)
{
	return live_window_of(l, p);
}

void live_window_leave(struct shardd_live *l, struct live_place *p)
{
	struct live_window *w = live_window_of(l, p);

	if (w)
		live_window_clear(l, w);
	if (p->home)
		munmap(p->home, p->home_bytes);
	p->home = NULL;
}

/* On a GPU. If @p cannot be mapped, the window shows what it showed. */
static int live_window_map(struct shardd_live *l, struct live_window *w, struct live_place *p,
			   struct shardd_error *err)
{
	int e = map_window_show(&l->c->map, w->gpu, p->base, err);

	if (e == 0)
		w->shown = p;
	else if (!w->gpu->shows)
		w->shown = NULL;
	return e;
}

/* The window is empty. */
static bool live_window_fill(struct live_window *w, struct live_place *p)
{
	bool fills = live_window_move(p->home, p->home_bytes, w->at) ||
		     live_window_copy(p->home, p->home_bytes, w->at);

	w->shown = fills ? p : NULL;
	return fills;
}

/* If @p cannot be mapped, the window shows what it showed. */
static int live_window_swap(struct shardd_live *l, struct live_window *w, struct live_place *p,
			    struct shardd_error *err)
{
	struct live_place *shown = w->shown;
	int e = live_window_settle(w, p, err);

	if (e < 0)
		return e;
	live_window_clear(l, w);
	if (live_window_fill(w, p))
		return 0;
	e = error_os(err, SHARDD_RESOURCE_EXHAUSTED, errno,
		     "cannot map a generation of %llu bytes at its address",
		     (unsigned long long)p->bytes);
	if (shown)
		(void)live_window_fill(w, shown);
	return e;
}

int live_window_show(struct shardd_live *l, struct live_place *p,
		     const struct shardd_published_tensor **ret, struct shardd_error *err)
{
	struct live_window *w = l->window;
	int e = 0;

	if (!w || w->layout != p->layout || w->shows != p->bytes)
		e = live_window_make(l, p, err);
	if (e < 0)
		return e;
	w = l->window;
	*ret = w->tensors;
	if (w->shown == p)
		return 0;
	return w->gpu ? live_window_map(l, w, p, err) : live_window_swap(l, w, p, err);
}

void live_window_free(struct shardd_live *l)
{
	while (l->window) {
		struct live_window *w = l->window;

		l->window = w->former;
		live_window_give_back(l, w);
		live_place_put_layout(l, w->layout);
		free(w->tensors);
		free(w);
	}
}
