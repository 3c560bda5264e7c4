/* Bases: frozen parameters, mapped. */
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "client.h"
#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "map.h"
#include "methods.h"
#include "shardd.pb-c.h"

#define BASE_MAGIC 0x53424153u

/* The daemon may be another one before all is mapped: how often it begins again. */
#define BASE_MOST_TRIES 4u

struct base {
	struct shardd_base seen; /* first: what the caller has */
	uint32_t magic;
	struct shardd_client *c;  /* borrowed */
	ProtobufCMessage **pages; /* owned: names and shapes are theirs */
	size_t n_pages;
	struct shardd_base_tensor *tensors; /* owned */
	void **pinned;                      /* owned: the slab of each tensor */
	size_t n_pinned;
};

static void base_free(struct base *b)
{
	if (!b)
		return;
	for (size_t i = 0; i < b->n_pinned; i++)
		map_unpin(&b->c->map, b->pinned[i]);
	for (size_t i = 0; i < b->n_pages; i++)
		protobuf_c_message_free_unpacked(b->pages[i], NULL);
	free(b->pages);
	free(b->tensors);
	free(b->pinned);
	b->magic = 0;
	free(b);
}

static void base_freep(struct base **b)
{
	base_free(*b);
}

static const Shardd__V1__ReadBaseResponse *base_page(const struct base *b, size_t i)
{
	return (const Shardd__V1__ReadBaseResponse *)b->pages[i];
}

static int base_fetch_page(struct base *b, const char *job, uint32_t first,
			   struct shardd_error *err)
{
	Shardd__V1__ReadBaseRequest request = SHARDD__V1__READ_BASE_REQUEST__INIT;
	ProtobufCMessage **grown = realloc(b->pages, (b->n_pages + 1) * sizeof(*grown));
	int e;

	if (!grown)
		return error_memory(err);
	b->pages = grown;
	request.job = (char *)(uintptr_t)job;
	request.first = first;
	e = call_again(b->c, METHOD_ReadBase, &request.base,
		       &shardd__v1__read_base_response__descriptor, &b->pages[b->n_pages], err);
	if (e == 0)
		b->n_pages++;
	return e;
}

static int base_fetch_pages(struct base *b, const char *job, struct shardd_error *err)
{
	uint32_t first = 0, next;

	do {
		int e = base_fetch_page(b, job, first, err);

		if (e < 0)
			return e;
		next = base_page(b, b->n_pages - 1)->next;
		if (next && next <= first)
			return error_set(err, SHARDD_INTERNAL, NULL,
					 "the daemon lists unit %u after unit %u", next, first);
		first = next;
	} while (next);
	return 0;
}

/* Map the tensor's slab, and pin it. */
static int base_map(struct base *b, const Shardd__V1__BaseTensor *m, uint64_t bytes,
		    struct shardd_error *err)
{
	struct map_place place = { .slab = m->slab, .bytes = m->offset + bytes };
	void *at = NULL;
	int e = map_address(&b->c->map, &place, -1, &at, err);

	if (e < 0)
		return e;
	if (!map_pin(&b->c->map, at))
		return error_set(err, SHARDD_ABORTED, NULL,
				 "the daemon has ended while a base was mapped: try again");
	b->pinned[b->n_pinned++] = at;
	return 0;
}

static int base_take_tensor(struct base *b, const Shardd__V1__BaseTensor *m,
			    struct shardd_error *err)
{
	uint64_t size = shardd_dtype_size((enum shardd_dtype)m->dtype);
	int e;

	if (!size || m->elements > UINT64_MAX / 2 / size || m->offset > UINT64_MAX / 2 ||
	    m->n_shape > UINT32_MAX || (m->n_strides && m->n_strides != m->n_shape))
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "the daemon sent an invalid description of a tensor");
	e = base_map(b, m, m->elements * size, err);
	if (e < 0)
		return e;
	b->tensors[b->seen.n_tensors++] = (struct shardd_base_tensor){
		.unit = m->unit,
		.name = m->name,
		.shape = m->shape,
		.strides = m->n_strides ? m->strides : NULL,
		.dims = (uint32_t)m->n_shape,
		.frozen = m->frozen,
		.elements = m->elements,
		.dtype = (enum shardd_dtype)m->dtype,
		.data = (const uint8_t *)b->pinned[b->n_pinned - 1] + m->offset,
	};
	return 0;
}

static int base_take_pages(struct base *b, struct shardd_error *err)
{
	size_t n = 0;

	for (size_t i = 0; i < b->n_pages; i++)
		n += base_page(b, i)->n_tensors;
	b->tensors = calloc(n + 1, sizeof(*b->tensors));
	b->pinned = calloc(n + 1, sizeof(*b->pinned));
	if (!b->tensors || !b->pinned)
		return error_memory(err);
	b->seen.tensors = b->tensors;
	for (size_t i = 0; i < b->n_pages; i++)
		for (size_t k = 0; k < base_page(b, i)->n_tensors; k++) {
			int e = base_take_tensor(b, base_page(b, i)->tensors[k], err);

			if (e < 0)
				return e;
		}
	return 0;
}

/* Over one connection. @ret_again: it was made again meanwhile, so slabs may have other numbers. */
static int base_try(struct shardd_client *c, const char *job, struct base **ret, bool *ret_again,
		    struct shardd_error *err)
{
	unsigned connection = atomic_load(&c->reconnect.count);
	_cleanup_(base_freep) struct base *b = calloc(1, sizeof(*b));
	int e;

	*ret_again = false;
	if (!b)
		return error_memory(err);
	b->magic = BASE_MAGIC;
	b->c = c;
	e = base_fetch_pages(b, job, err);
	if (e == 0)
		e = base_take_pages(b, err);
	*ret_again = connection != atomic_load(&c->reconnect.count);
	if (e == 0 && *ret_again)
		e = error_set(err, SHARDD_ABORTED, NULL,
			      "the daemon has ended while a base was mapped: try again");
	if (e == 0)
		*ret = STEAL_PTR(b);
	return e;
}

int shardd_base_open(shardd_client *c, const char *job, const struct shardd_base **ret,
		     struct shardd_error *err)
{
	struct shardd_error scratch;
	struct base *b = NULL;
	bool again = true;
	int e;

	err = err ? err : &scratch;
	e = client_check(c, err);
	if (e < 0)
		return e;
	if (!job || !ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, job ? "ret" : "job",
				 "the argument is NULL");
	for (unsigned i = 0; again && i < BASE_MOST_TRIES; i++)
		e = base_try(c, job, &b, &again, err);
	if (e == 0)
		*ret = &b->seen;
	return e;
}

void shardd_base_close(const struct shardd_base *seen)
{
	struct base *b =
		seen ? CONTAINER_OF((struct shardd_base *)(uintptr_t)seen, struct base, seen)
		     : NULL;

	if (b)
		MAGIC_CHECK(b, BASE_MAGIC);
	base_free(b);
}
