#include "job/window.h"

#include <stdlib.h>
#include <string.h>

#include "core/check.h"

struct window {
	struct list link; /* nc->windows, while it is registered or can be */
	struct node_comm *nc;
	enum backend_queue queue;
	unsigned n;
	struct slab *slabs[NODE_MAX_DEVICES];
	bool left[NODE_MAX_DEVICES]; /* freed: waits for the engine */
	void *addr[NODE_MAX_DEVICES];
	uint64_t bytes;
};

static struct comm *window_comm_of(const struct window *w)
{
	return w->nc->state == COMM_READY ? w->nc->comm[w->queue] : NULL;
}

/* The engine has released the slabs: release them, too. */
static void window_on_unregistered(void *userdata)
{
	struct window *w = userdata;

	CHECK(w->nc->ending > 0);
	w->nc->ending--;
	for (unsigned i = 0; i < w->n; i++) {
		w->slabs[i]->window = NULL;
		w->slabs[i]->leave = NULL;
		if (w->left[i])
			slab_bury(w->slabs[i]);
	}
	node_wake(w->nc->node);
	free(w);
}

static void window_let_go(struct window *w)
{
	struct comm *comm = window_comm_of(w);

	if (list_empty(&w->link))
		return;
	list_unlink(&w->link);
	w->nc->ending++;
	if (comm)
		comm_unregister(comm, w->addr, window_on_unregistered, w);
	else
		window_on_unregistered(w);
}

static void window_on_leave(struct slab *s)
{
	struct window *w = s->window;

	for (unsigned i = 0; i < w->n; i++)
		if (w->slabs[i] == s)
			w->left[i] = true;
	window_let_go(w);
}

/* The communicators were created again: register the existing slabs. */
static void window_on_made_again(struct node_comm *nc)
{
	struct window *w, *tmp;

	list_for_each (w, tmp, &nc->windows, link)
		comm_register(nc->comm[w->queue], w->addr, w->bytes);
}

static void window_offer(struct node_comm *nc, enum backend_queue q, const struct region *regions)
{
	struct window *w = calloc(1, sizeof(*w));

	if (!w)
		return; /* advice only */
	w->nc = nc;
	w->queue = q;
	w->n = nc->n;
	w->bytes = regions[0].slab->bytes;
	for (unsigned i = 0; i < nc->n; i++) {
		w->slabs[i] = regions[i].slab;
		w->addr[i] = backend_addr(regions[i].slab->mem);
		regions[i].slab->window = w;
		regions[i].slab->leave = window_on_leave;
	}
	list_init(&w->link);
	list_append(&nc->windows, &w->link);
	nc->made_again = window_on_made_again;
	comm_register(nc->comm[q], w->addr, w->bytes);
}

static bool window_in_step(const struct node_comm *nc, const struct region *regions)
{
	for (unsigned i = 1; i < nc->n; i++)
		if (regions[i].offset != regions[0].offset ||
		    regions[i].slab->bytes != regions[0].slab->bytes ||
		    regions[i].slab->window != regions[0].slab->window)
			return false;
	return true;
}

void window_check(struct node_comm *nc, enum backend_queue q, const struct region *regions)
{
	if (!nc || nc->spans || nc->n < 2 || nc->state != COMM_READY)
		return;
	if (!window_in_step(nc, regions)) {
		for (unsigned i = 0; i < nc->n; i++)
			if (regions[i].slab->window)
				window_let_go(regions[i].slab->window);
	} else if (!regions[0].slab->window) {
		window_offer(nc, q, regions);
	}
}
