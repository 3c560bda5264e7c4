/*
 * The window: the same addresses for one generation after the other. Each buffer is mapped at a place of
 * its own, its home. To show one, its page table entries move from there into the window, and those of the
 * one before move back: so no page is mapped twice, and none has to be found again by a fault.
 *
 * The addresses are always mapped (MREMAP_DONTUNMAP): nothing else can take them meanwhile. Where the
 * kernel cannot do that for shared memory (before Linux 5.13), the buffer is mapped into the window once
 * more, and its pages come by faults.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "client_error.h"
#include "live_impl.h"
#include "map.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

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

static int live_window_make(struct shardd_live *l, const struct live_place *p,
			    struct shardd_error *err)
{
	struct live_window *w = calloc(1, sizeof(*w));

	if (!w)
		return error_memory(err);
	w->at = map_host_reserve(p->bytes);
	if (w->at == MAP_FAILED) {
		free(w);
		return error_os(err, SHARDD_RESOURCE_EXHAUSTED, errno,
				"cannot reserve %llu bytes of addresses",
				(unsigned long long)p->bytes);
	}
	w->bytes = p->bytes;
	w->layout = p->layout;
	w->tensors = live_place_tensors(p->layout, w->at, p->bytes);
	if (!w->tensors) {
		munmap(w->at, w->bytes);
		free(w);
		return error_memory(err);
	}
	w->former = l->window;
	l->window = w;
	return 0;
}

/* The window that has the entries of the page table of @base. */
static struct live_window *live_window_of(struct shardd_live *l, const uint8_t *base)
{
	struct live_window *w = l->window;

	while (w && w->shown != base)
		w = w->former;
	return w;
}

void live_window_leave(struct shardd_live *l, const struct live_place *p)
{
	struct live_window *w = live_window_of(l, p->base);

	if (!w)
		return;
	(void)live_window_move(w->at, w->bytes, p->base);
	w->shown = NULL;
}

int live_window_show(struct shardd_live *l, const struct live_place *p,
		     const struct shardd_published_tensor **ret, struct shardd_error *err)
{
	struct live_window *w = l->window;

	if (!w || w->layout != p->layout || w->bytes != p->bytes) {
		int e = live_window_make(l, p, err);

		if (e < 0)
			return e;
		w = l->window;
	}
	*ret = w->tensors;
	if (w->shown == p->base)
		return 0;
	if (w->shown)
		(void)live_window_move(w->at, w->bytes, w->shown);
	w->shown = NULL;
	if (!live_window_move(p->base, w->bytes, w->at) &&
	    !live_window_copy(p->base, w->bytes, w->at))
		return error_os(err, SHARDD_RESOURCE_EXHAUSTED, errno,
				"cannot map a generation of %llu bytes at its address",
				(unsigned long long)w->bytes);
	w->shown = p->base;
	return 0;
}

void live_window_free(struct shardd_live *l)
{
	while (l->window) {
		struct live_window *w = l->window;

		l->window = w->former;
		munmap(w->at, w->bytes);
		live_place_put_layout(l, w->layout);
		free(w->tensors);
		free(w);
	}
}
