/* Readers of generations. */
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "client.h"
#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "methods.h"
#include "publication.h"
#include "publication.pb-c.h"

#define LIVE_MAGIC 0x534c4956u

struct shardd_live {
	uint32_t magic;
	struct shardd_client *c; /* borrowed */
	char *job, *name;
	unsigned connection; /* of the client, by number, that the lease was given over */
	uint64_t lease;      /* 0: none */
	uint64_t number, step, layout;
	uint32_t checksum, slab;
	void *pinned; /* where its slab is mapped: nothing takes its place; NULL: it has none */
	bool moved;   /* since the caller was told */
	ProtobufCMessage **pages; /* owned: names and shapes of the layout are theirs */
	size_t n_pages;
	struct shardd_published_tensor *tensors; /* owned */
	size_t n_tensors;
};

static struct shardd_live *live_free(struct shardd_live *l)
{
	if (!l)
		return NULL;
	for (size_t i = 0; i < l->n_pages; i++)
		protobuf_c_message_free_unpacked(l->pages[i], NULL);
	free(l->pages);
	free(l->tensors);
	free(l->job);
	free(l->name);
	l->magic = 0;
	free(l);
	return NULL;
}

static void live_freep(struct shardd_live **l)
{
	*l = live_free(*l);
}

static int live_check(const struct shardd_live *l, struct shardd_error *err)
{
	if (!l)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "live", "the reader is NULL");
	MAGIC_CHECK(l, LIVE_MAGIC);
	return client_check(l->c, err);
}

/* Has the connection been made again since the lease was given? Then it has ended. */
static bool live_is_before(const struct shardd_live *l)
{
	return l->connection != atomic_load(&l->c->reconnect.count);
}

/* @wait_ms: 0: do not wait. */
static int live_ask(struct shardd_live *l, uint32_t wait_ms, uint64_t newer_than,
		    ProtobufCMessage **ret, struct shardd_error *err)
{
	Shardd__V1__AcquireGenerationRequest request = SHARDD__V1__ACQUIRE_GENERATION_REQUEST__INIT;

	request.job = l->job;
	request.name = l->name;
	request.newer_than = newer_than;
	request.wait = wait_ms;
	request.timeout_ms = wait_ms;
	return publication_call(l->c, METHOD_AcquireGeneration,
				wait_ms ? wait_ms : CLIENT_CALL_TIMEOUT_MS, &request.base,
				&shardd__v1__acquire_generation_response__descriptor, ret, err);
}

int shardd_live_open(shardd_client *c, const char *job, const char *name, shardd_live **ret,
		     struct shardd_error *err)
{
	_cleanup_(live_freep) struct shardd_live *l = NULL;
	Shardd__V1__AcquireGenerationRequest request = SHARDD__V1__ACQUIRE_GENERATION_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = publication_check(c, job, name, "name", err);
	if (e < 0)
		return e;
	if (!ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "the argument is NULL");
	l = calloc(1, sizeof(*l));
	if (l) {
		l->job = strdup(job);
		l->name = strdup(name);
	}
	if (!l || !l->job || !l->name)
		return error_memory(err);
	l->magic = LIVE_MAGIC;
	l->c = c;
	/* does it exist? No generation is newer than this one, so that the call may be repeated */
	request.job = l->job;
	request.name = l->name;
	request.newer_than = UINT64_MAX;
	e = call_again(c, METHOD_AcquireGeneration, &request.base,
		       &shardd__v1__acquire_generation_response__descriptor, &reply, err);
	if (e < 0)
		return e;
	*ret = STEAL_PTR(l);
	return 0;
}

/* ------------------------------------------------------------------------- tensors */

static int live_fetch_page(struct shardd_live *l, uint64_t lease, uint32_t first,
			   uint32_t *ret_next, struct shardd_error *err)
{
	Shardd__V1__DescribeGenerationRequest request =
		SHARDD__V1__DESCRIBE_GENERATION_REQUEST__INIT;
	ProtobufCMessage **more = realloc(l->pages, (l->n_pages + 1) * sizeof(*more));
	int e;

	if (!more)
		return error_memory(err);
	l->pages = more;
	request.lease = lease;
	request.first = first;
	e = publication_call(l->c, METHOD_DescribeGeneration, CLIENT_CALL_TIMEOUT_MS, &request.base,
			     &shardd__v1__describe_generation_response__descriptor,
			     &l->pages[l->n_pages], err);
	if (e < 0)
		return e;
	*ret_next = ((Shardd__V1__DescribeGenerationResponse *)l->pages[l->n_pages++])->next;
	return 0;
}

static const Shardd__V1__DescribeGenerationResponse *live_page(const struct shardd_live *l,
							       size_t i)
{
	return (const Shardd__V1__DescribeGenerationResponse *)l->pages[i];
}

/* What a generation of a new layout has; @tensors: how many there are. */
static int live_fetch(struct shardd_live *l, uint64_t lease, uint32_t tensors,
		      struct shardd_error *err)
{
	uint32_t next = 0;
	size_t n = 0;
	int e;

	while (l->n_pages)
		protobuf_c_message_free_unpacked(l->pages[--l->n_pages], NULL);
	free(l->tensors);
	l->n_tensors = 0;
	l->tensors = calloc((size_t)tensors + 1, sizeof(*l->tensors));
	if (!l->tensors)
		return error_memory(err);
	do {
		e = live_fetch_page(l, lease, next, &next, err);
		if (e < 0)
			return e;
		n += live_page(l, l->n_pages - 1)->n_tensors;
	} while (next && n <= tensors);
	if (n == tensors)
		return 0;
	return error_set(err, SHARDD_INTERNAL, NULL, "the daemon lists %zu tensors of %u", n,
			 tensors);
}

/* Where the tensor is. */
static int live_place(struct shardd_live *l, uint32_t slab, const Shardd__V1__PublishedTensor *m,
		      struct shardd_published_tensor *t, struct shardd_error *err)
{
	struct map_place place = { .slab = slab, .offset = m->offset, .bytes = m->bytes };
	void *at = NULL;
	int e = map_address(&l->c->map, &place, -1, &at, err);

	if (e < 0)
		return e;
	*t = (struct shardd_published_tensor){ .name = m->name,
					       .dtype = (enum shardd_dtype)m->type,
					       .dims = (uint32_t)m->n_shape,
					       .shape = m->shape,
					       .bytes = m->bytes,
					       .data = at };
	return 0;
}

static int live_place_all(struct shardd_live *l, uint32_t slab, struct shardd_error *err)
{
	l->n_tensors = 0;
	for (size_t i = 0; i < l->n_pages; i++)
		for (size_t k = 0; k < live_page(l, i)->n_tensors; k++) {
			int e = live_place(l, slab, live_page(l, i)->tensors[k],
					   &l->tensors[l->n_tensors], err);

			if (e < 0)
				return e;
			l->n_tensors++;
		}
	return 0;
}

/* ---------------------------------------------------------------------------- leases */

static int live_give_back(struct shardd_live *l, uint64_t lease, struct shardd_error *err)
{
	Shardd__V1__ReleaseGenerationRequest request = SHARDD__V1__RELEASE_GENERATION_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;

	request.lease = lease;
	return publication_call(l->c, METHOD_ReleaseGeneration, CLIENT_CALL_TIMEOUT_MS,
				&request.base, &shardd__v1__release_generation_response__descriptor,
				&reply, err);
}

static void live_unpin(struct shardd_live *l)
{
	if (l->pinned)
		map_unpin(&l->c->map, STEAL_PTR(l->pinned));
}

/* Map the slab, and have it stay where it is: the daemon may end, and then another reader of this client, or
 * its ops, would get the next daemon's memory in its place. @ret: map_unpin. */
static int live_pin(struct shardd_live *l, uint32_t slab, void **ret, struct shardd_error *err)
{
	struct map_place place = { .slab = slab };
	void *at = NULL;
	int e = map_address(&l->c->map, &place, -1, &at, err);

	if (e < 0)
		return e;
	if (!map_pin(&l->c->map, at))
		return error_set(err, SHARDD_ABORTED, NULL,
				 "the daemon has ended while slab %u was mapped: acquire again",
				 slab);
	*ret = at;
	return 0;
}

/* Names, shapes and places of what the answer has. */
static int live_lay_out(struct shardd_live *l, const Shardd__V1__AcquireGenerationResponse *r,
			bool other, struct shardd_error *err)
{
	int e = other ? live_fetch(l, r->lease, r->tensors, err) : 0;

	return e < 0 ? e : live_place_all(l, r->slab, err);
}

/* The answer has a lease. The one before ends, when the new one is mapped. */
static int live_take(struct shardd_live *l, const Shardd__V1__AcquireGenerationResponse *r,
		     struct shardd_error *err)
{
	bool other = !l->layout || l->layout != r->layout, moved = other || l->slab != r->slab;
	uint64_t former = l->lease;
	struct shardd_error ignored;
	void *pinned = NULL;
	int e = live_pin(l, r->slab, &pinned, err);

	if (e == 0 && moved) {
		l->layout = 0;
		e = live_lay_out(l, r, other, err);
	}
	if (e < 0) {
		if (pinned)
			map_unpin(&l->c->map, pinned);
		(void)live_give_back(l, r->lease, &ignored);
		return e;
	}
	live_unpin(l);
	l->pinned = pinned;
	l->moved |= moved;
	l->lease = r->lease;
	l->number = r->number;
	l->step = r->step;
	l->checksum = r->checksum;
	l->layout = r->layout;
	l->slab = r->slab;
	return former ? live_give_back(l, former, err) : 0;
}

/* Nothing that the daemon before has leased is known to this one. */
static void live_forget(struct shardd_live *l)
{
	l->lease = l->layout = 0;
	l->connection = atomic_load(&l->c->reconnect.count);
}

/* What was leased ends with its daemon: the next one is asked for what it has. */
static int live_ask_again(struct shardd_live *l, uint32_t wait_ms, ProtobufCMessage **ret,
			  struct shardd_error *err)
{
	int e;

	if (live_is_before(l))
		live_forget(l);
	/* without a layout: what came after the one that it has could not be mapped, and is to come again */
	e = live_ask(l, wait_ms, l->lease && l->layout ? l->number : 0, ret, err);
	if (e != -SHARDD_ABORTED || !live_is_before(l))
		return e;
	live_forget(l);
	return live_ask(l, wait_ms, 0, ret, err);
}

static void live_give(struct shardd_live *l, struct shardd_generation *ret)
{
	*ret = (struct shardd_generation){ .number = l->number,
					   .step = l->step,
					   .checksum = l->checksum,
					   .tensors = l->tensors,
					   .n_tensors = l->n_tensors,
					   .moved = l->moved };
	l->moved = false;
}

int shardd_live_acquire(shardd_live *l, uint32_t wait_ms, struct shardd_generation *ret,
			struct shardd_error *err)
{
	_cleanup_(client_messagep) ProtobufCMessage *message = NULL;
	const Shardd__V1__AcquireGenerationResponse *reply;
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = live_check(l, err);
	if (e == 0 && !ret)
		e = error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL");
	if (e < 0)
		return e;
	e = live_ask_again(l, wait_ms, &message, err);
	if (e < 0)
		return e;
	reply = (const Shardd__V1__AcquireGenerationResponse *)message;
	if (reply->lease)
		e = live_take(l, reply, err);
	else if (!l->lease)
		e = error_set(err, SHARDD_NOT_FOUND, NULL,
			      "publication '%s' of job '%s' has no generation yet", l->name,
			      l->job);
	if (e == 0)
		live_give(l, ret);
	return e;
}

int shardd_live_release(shardd_live *l, struct shardd_error *err)
{
	struct shardd_error scratch;
	uint64_t lease;
	int e;

	err = err ? err : &scratch;
	e = live_check(l, err);
	if (e < 0)
		return e;
	if (!l->lease && !l->pinned)
		return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
				 "this reader of publication '%s' has no generation", l->name);
	live_unpin(l);
	lease = l->lease;
	l->lease = 0;
	/* its lease has ended with its daemon */
	return !lease || live_is_before(l) ? 0 : live_give_back(l, lease, err);
}

void shardd_live_close(shardd_live *l)
{
	struct shardd_error ignored;

	if (!l || live_check(l, NULL) < 0)
		return;
	if (l->lease || l->pinned)
		(void)shardd_live_release(l, &ignored);
	live_free(l);
}
