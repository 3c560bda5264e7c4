/* Where the buffers of a publication are mapped, and what is in them. */
#include <stdlib.h>
#include <string.h>

#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "device.h"
#include "live_impl.h"
#include "map.h"
#include "methods.h"
#include "publication.h"

/* -------------------------------------------------------------------------- layouts */

static const Shardd__V1__DescribeGenerationResponse *live_place_page(const struct live_layout *y,
								     size_t i)
{
	return (const Shardd__V1__DescribeGenerationResponse *)y->pages[i];
}

static void live_place_free_layout(struct live_layout *y)
{
	for (size_t i = 0; y && i < y->n_pages; i++)
		protobuf_c_message_free_unpacked(y->pages[i], NULL);
	if (y)
		free(y->pages);
	free(y);
}

static void live_place_free_layoutp(struct live_layout **y)
{
	live_place_free_layout(*y);
}

static int live_place_fetch_page(struct shardd_live *l, uint64_t number, struct live_layout *y,
				 uint32_t *next, struct shardd_error *err)
{
	Shardd__V1__DescribeGenerationRequest request =
		SHARDD__V1__DESCRIBE_GENERATION_REQUEST__INIT;
	ProtobufCMessage **more = realloc(y->pages, (y->n_pages + 1) * sizeof(*more));
	int e;

	if (!more)
		return error_memory(err);
	y->pages = more;
	request.reader = l->reader;
	request.number = number;
	request.first = *next;
	e = publication_call(l->c, METHOD_DescribeGeneration, CLIENT_CALL_TIMEOUT_MS, &request.base,
			     &shardd__v1__describe_generation_response__descriptor,
			     &y->pages[y->n_pages], err);
	if (e < 0)
		return e;
	y->n_pages++;
	*next = live_place_page(y, y->n_pages - 1)->next;
	y->n_tensors += (uint32_t)live_place_page(y, y->n_pages - 1)->n_tensors;
	return 0;
}

/* @ret: live_place_free_layout. */
static int live_place_fetch(struct shardd_live *l, const struct board_generation *g,
			    struct live_layout **ret, struct shardd_error *err)
{
	struct live_layout *y = calloc(1, sizeof(*y));
	uint32_t next = 0, before;
	int e;

	if (!y)
		return error_memory(err);
	y->number = g->layout;
	do {
		before = next;
		e = live_place_fetch_page(l, g->number, y, &next, err);
		if (e == 0 && next && next <= before)
			e = error_set(err, SHARDD_INTERNAL, NULL,
				      "the daemon lists tensor %u after tensor %u", next, before);
	} while (e == 0 && next);
	if (e < 0) {
		live_place_free_layout(y);
		return e;
	}
	y->on_gpu = *live_place_page(y, 0)->uuid != '\0';
	*ret = y;
	return 0;
}

/* Have @a and @b the same tensors at the same places? A daemon that has come since gave other numbers. */
static bool live_place_same_page(const ProtobufCMessage *a, const ProtobufCMessage *b)
{
	size_t bytes = protobuf_c_message_get_packed_size(a);
	uint8_t *one, *other;
	bool same;

	if (bytes != protobuf_c_message_get_packed_size(b))
		return false;
	one = malloc(2 * bytes + 1);
	if (!one)
		return false;
	other = one + bytes;
	protobuf_c_message_pack(a, one);
	protobuf_c_message_pack(b, other);
	same = memcmp(one, other, bytes) == 0;
	free(one);
	return same;
}

static bool live_place_same(const struct live_layout *a, const struct live_layout *b)
{
	bool same = a->n_pages == b->n_pages;

	for (size_t i = 0; i < a->n_pages && same; i++)
		same = live_place_same_page(a->pages[i], b->pages[i]);
	return same;
}

static bool live_place_has(const struct shardd_live *l, const struct live_layout *y)
{
	bool has = false;

	for (unsigned i = 0; i < l->n_places; i++)
		has |= l->places[i]->layout == y;
	for (const struct live_window *w = l->window; w; w = w->former)
		has |= w->layout == y;
	return has;
}

void live_place_put_layout(struct shardd_live *l, struct live_layout *y)
{
	if (y && !live_place_has(l, y))
		live_place_free_layout(y);
}

/* The layout of @g: one that is known, or the daemon's. */
static int live_place_layout(struct shardd_live *l, const struct board_generation *g,
			     struct live_layout **ret, struct shardd_error *err)
{
	struct live_layout *y = NULL;
	int e;

	for (unsigned i = 0; i < l->n_places; i++)
		if (l->places[i]->slab && l->places[i]->layout->number == g->layout) {
			*ret = l->places[i]->layout;
			return 0;
		}
	e = live_place_fetch(l, g, &y, err);
	if (e < 0)
		return e;
	*ret = y;
	y->serial = ++l->layouts;
	if (l->here && live_place_same(y, l->here->layout)) {
		*ret = l->here->layout;
		(*ret)->number = y->number;
		live_place_free_layout(y);
	}
	return 0;
}

struct shardd_published_tensor *live_place_tensors(const struct live_layout *layout,
						   const uint8_t *base, uint64_t bytes)
{
	struct shardd_published_tensor *all = calloc((size_t)layout->n_tensors + 1, sizeof(*all));
	size_t n = 0;

	for (size_t i = 0; all && i < layout->n_pages; i++)
		for (size_t k = 0; k < live_place_page(layout, i)->n_tensors; k++) {
			const Shardd__V1__PublishedTensor *m =
				live_place_page(layout, i)->tensors[k];

			if (m->offset > bytes || m->bytes > bytes - m->offset) {
				free(all);
				return NULL;
			}
			all[n++] = (struct shardd_published_tensor){
				.name = m->name,
				.dtype = publication_dtype(m->type),
				.dims = (uint32_t)m->n_shape,
				.shape = m->shape,
				.bytes = m->bytes,
				.data = base + m->offset,
			};
		}
	return all;
}

/* --------------------------------------------------------------------------- places */

static void live_place_drop(struct shardd_live *l, unsigned i)
{
	struct live_place *p = l->places[i];
	struct live_layout *y = p->layout;

	live_window_leave(l, p);
	if (p->tensors) /* else its base was not shown */
		live_fault_remove(l, p->base);
	l->places[i] = l->places[--l->n_places];
	if (l->here == p)
		l->here = NULL;
	if (y->on_gpu)
		map_drop(&l->c->map, p->base); /* memory of a GPU is scarce */
	else
		map_unpin(&l->c->map, p->base);
	free(p->tensors);
	free(p);
	live_place_put_layout(l, y);
}

void live_place_drop_all(struct shardd_live *l)
{
	while (l->n_places)
		live_place_drop(l, 0);
}

void live_place_forget(struct shardd_live *l)
{
	for (unsigned i = l->n_places; i-- > 0;)
		if (l->places[i] != l->here)
			live_place_drop(l, i);
	if (l->here)
		l->here->slab = 0;
}

/* The client needs the GPU that generations are on, or another one that reaches it. */
static int live_place_use_device(struct shardd_live *l, const struct live_layout *y,
				 struct shardd_error *err)
{
	const Shardd__V1__DescribeGenerationResponse *page = live_place_page(y, 0);

	if (!y->on_gpu)
		return 0;
	if (l->flags & SHARDD_LIVE_FIXED && page->ipc_handle.len)
		return error_set(
			err, SHARDD_UNIMPLEMENTED, "flags",
			"generations of publication '%s' are in the memory of %s, which the job "
			"hands out as CUDA IPC handles. CUDA maps those at addresses of its own: "
			"open the reader without SHARDD_LIVE_FIXED, or let the job use descriptors",
			l->name, page->device);
	return device_open(l->c, page->uuid, err);
}

/* A job that hands out CUDA IPC handles has one for each buffer. @page: what has it; to be freed. */
static int live_place_find_handle(struct shardd_live *l, const struct board_generation *g,
				  const struct live_layout *y, struct live_layout **page,
				  struct map_place *place, struct shardd_error *err)
{
	const Shardd__V1__DescribeGenerationResponse *r = live_place_page(y, 0);
	uint32_t next = 0;
	int e = 0;

	if (r->ipc_handle.len == 0)
		return 0;
	*page = calloc(1, sizeof(**page));
	if (!*page)
		return error_memory(err);
	e = live_place_fetch_page(l, g->number, *page, &next, err);
	if (e < 0)
		return e;
	r = live_place_page(*page, 0);
	if (r->ipc_handle.len != MAP_IPC_BYTES)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "the daemon sent a handle of %zu bytes, which has %u",
				 r->ipc_handle.len, MAP_IPC_BYTES);
	place->ipc = r->ipc_handle.data;
	place->slab_bytes = r->slab_bytes;
	return 0;
}

/* Map the slab, and have it stay where it is: the daemon may end, and then another reader of this client, or
 * its ops, would get the next daemon's memory in its place. @ret: map_unpin. */
static int live_place_pin(struct shardd_live *l, const struct board_generation *g,
			  struct live_place *p, struct shardd_error *err)
{
	struct map_place place = { .slab = g->slab, .bytes = g->bytes };
	_cleanup_(live_place_free_layoutp) struct live_layout *page = NULL;
	void *at = NULL;
	int e = live_place_find_handle(l, g, p->layout, &page, &place, err);

	if (e == 0)
		e = map_address(&l->c->map, &place, -1, &at, err);

	if (e < 0)
		return e;
	p->bytes = map_pin(&l->c->map, at);
	if (!p->bytes)
		return error_set(err, SHARDD_ABORTED, NULL,
				 "the daemon has ended while slab %u was mapped: acquire again",
				 g->slab);
	p->base = at;
	p->slab = g->slab;
	return 0;
}

static int live_place_make(struct shardd_live *l, const struct board_generation *g,
			   struct live_place *p, struct shardd_error *err)
{
	int e = live_place_layout(l, g, &p->layout, err);

	if (e == 0)
		e = live_place_use_device(l, p->layout, err);
	if (e == 0)
		e = live_place_pin(l, g, p, err);
	if (e < 0 || l->flags & SHARDD_LIVE_FIXED)
		return e;
	p->tensors = live_place_tensors(p->layout, p->base, p->bytes);
	if (p->tensors && !p->layout->on_gpu)
		live_fault_add(l, p->base, p->bytes);
	return p->tensors ? 0 : error_memory(err);
}

/* Room for one more: buffers that are no generation's any more are let go of. */
static void live_place_make_room(struct shardd_live *l)
{
	for (unsigned i = l->n_places; i-- > 0;) {
		bool known = l->places[i] == l->here;

		for (unsigned k = 0; k < BOARD_BUFFERS; k++)
			known |= l->places[i]->slab && /* else the daemon's that has ended */
				 l->board->generations[k].slab == l->places[i]->slab;
		if (!known)
			live_place_drop(l, i);
	}
	for (unsigned i = l->n_places; i-- > 0 && l->n_places == BOARD_BUFFERS + 1;)
		if (l->places[i] != l->here)
			live_place_drop(l, i);
}

int live_place_of(struct shardd_live *l, const struct board_generation *g, struct live_place **ret,
		  struct shardd_error *err)
{
	struct live_place *p;
	int e;

	for (unsigned i = 0; i < l->n_places; i++)
		if (l->places[i]->slab == g->slab && l->places[i]->layout->number == g->layout) {
			*ret = l->places[i];
			return 0;
		}
	live_place_make_room(l);
	p = calloc(1, sizeof(*p));
	if (!p)
		return error_memory(err);
	e = live_place_make(l, g, p, err);
	if (e < 0) {
		if (p->base)
			map_unpin(&l->c->map, p->base);
		live_place_put_layout(l, p->layout);
		free(p);
		return e;
	}
	l->places[l->n_places++] = p;
	*ret = p;
	return 0;
}
