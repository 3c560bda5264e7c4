/*
 * Generations as a copy in this process's own memory, from a daemon whose memory cannot be mapped here:
 * the one behind a forwarded socket.
 *
 * Each block is checked when it comes, and the whole at its end. What was checked stays: after a lost
 * connection the stream goes on behind it, if the generation is still there, or begins again with the
 * newest one.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "call.h"
#include "client.h"
#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "crc32c.h"
#include "delta_abi.h"
#include "methods.h"
#include "options.h"
#include "publication.h"
#include "publication.pb-c.h"

#define FETCH_MAGIC 0x46455443u
/* So often in a row the stream may end without a block. */
#define FETCH_TRIES 8u
/* Padding between blocks is less than this. */
#define FETCH_ALIGN 256u

typedef Shardd__V1__StreamGenerationResponse fetch_message;

struct shardd_fetched {
	uint32_t magic;
	char *memory; /* @room bytes: mapped here, or the caller's */
	uint64_t room;
	bool own;                 /* mapped here */
	uint64_t layout;          /* that @tensors are of, all of them; 0: none */
	uint64_t bytes;           /* of a generation of it */
	uint64_t lists;           /* of tensors that have come */
	ProtobufCMessage **pages; /* owned: names and shapes are theirs */
	size_t n_pages;
	struct shardd_published_tensor *tensors; /* owned */
	size_t n_tensors;
	uint64_t whole; /* number of the generation that is here as a whole; 0: none */
};

/* One that is under way. */
struct fetch {
	struct shardd_client *c; /* borrowed */
	struct shardd_fetched *to;
	const struct shardd_fetch_options *options;
	const char *job, *name;
	Shardd__V1__StreamedGeneration g; /* number 0: none yet */
	uint64_t next;                    /* behind the last block that was checked */
	uint32_t blocks, sum;             /* that were checked, and the checksum of theirs */
	unsigned tries;                   /* since the last block */
	char *delta;         /* owned: that comes in place of the generation; NULL: none */
	uint64_t delta_have; /* bytes of it that are here */
	bool moved;          /* the tensors are elsewhere than before */
};

static void fetch_free_memory(struct shardd_fetched *to)
{
	if (to->own && to->memory)
		munmap(to->memory, to->room);
	to->memory = NULL;
	to->room = 0;
}

static void fetch_free_tensors(struct shardd_fetched *to)
{
	while (to->n_pages)
		protobuf_c_message_free_unpacked(to->pages[--to->n_pages], NULL);
	free(STEAL_PTR(to->pages));
	free(STEAL_PTR(to->tensors));
	to->n_tensors = 0;
	to->layout = 0;
	to->whole = 0; /* a delta is nothing without its tensors */
}

void shardd_fetched_free(shardd_fetched *to)
{
	if (!to)
		return;
	MAGIC_CHECK(to, FETCH_MAGIC);
	fetch_free_tensors(to);
	fetch_free_memory(to);
	to->magic = 0;
	free(to);
}

/* ------------------------------------------------------------------------------ memory */

static int fetch_use_buffer(struct fetch *x, struct shardd_error *err)
{
	const struct shardd_fetch_options *o = x->options;

	if (x->to->own)
		fetch_free_memory(x->to);
	if (o->buffer_bytes < x->g.bytes)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "buffer_bytes",
				 "buffer_bytes is %" PRIu64 ", and generation %" PRIu64
				 " has %" PRIu64 " bytes",
				 o->buffer_bytes, x->g.number, x->g.bytes);
	x->moved |= x->to->memory != o->buffer;
	x->to->own = false;
	x->to->memory = o->buffer;
	x->to->room = o->buffer_bytes;
	return 0;
}

/* Room for the generation. */
static int fetch_take_memory(struct fetch *x, struct shardd_error *err)
{
	void *at;

	if (x->options->buffer)
		return fetch_use_buffer(x, err);
	if (x->to->own && x->to->room >= x->g.bytes)
		return 0;
	if (x->to->own)
		fetch_free_memory(x->to);
	at = mmap(NULL, x->g.bytes ? x->g.bytes : 1, PROT_READ | PROT_WRITE,
		  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	x->to->memory = NULL;
	x->to->room = 0;
	if (at == MAP_FAILED)
		return error_memory(err);
	x->to->own = x->moved = true;
	x->to->memory = at;
	x->to->room = x->g.bytes ? x->g.bytes : 1;
	return 0;
}

static int fetch_bad(const struct fetch *x, struct shardd_error *err, const char *what)
{
	return error_set(err, SHARDD_INTERNAL, NULL,
			 "the daemon's stream of publication '%s' of job '%s' is not valid: %s",
			 x->name, x->job, what);
}

/* Is a whole generation at the place of this one, so that a delta can make this one of it? */
static bool fetch_has_base(const struct fetch *x)
{
	const struct shardd_fetch_options *o = x->options;

	if (!x->to->whole)
		return false;
	return o->buffer ? x->to->memory == o->buffer && x->to->room == o->buffer_bytes
			 : x->to->own;
}

/* ----------------------------------------------------------------------------- messages */

/* Are the tensors that are here those of @g? A daemon that gives another list the same number is not believed. */
static bool fetch_has_tensors(const struct shardd_fetched *to,
			      const Shardd__V1__StreamedGeneration *g)
{
	return to->layout && to->layout == g->layout && to->n_tensors == g->tensors &&
	       to->bytes == g->bytes;
}

/* A delta follows: it is put together, and applied at the end. */
static int fetch_begin_delta(struct fetch *x, const Shardd__V1__StreamedGeneration *g,
			     struct shardd_error *err)
{
	if (x->delta && x->g.number == g->number && x->g.delta_bytes == g->delta_bytes)
		return x->g.checksum == g->checksum && x->g.layout == g->layout
			       ? 0
			       : fetch_bad(x, err, "a generation has changed");
	if (!fetch_has_base(x) || !fetch_has_tensors(x->to, g) ||
	    g->delta_bytes > 2 * x->to->room + (1u << 20))
		return fetch_bad(x, err, "it has a delta that was not asked for");
	x->g = *g;
	x->next = 0;
	free(x->delta);
	x->delta_have = 0;
	x->delta = malloc(g->delta_bytes);
	return x->delta ? 0 : error_memory(err);
}

/* The first one of a stream. */
static int fetch_take_first(struct fetch *x, const Shardd__V1__StreamedGeneration *g,
			    struct shardd_error *err)
{
	if (g->delta_bytes)
		return fetch_begin_delta(x, g, err);
	free(STEAL_PTR(x->delta));
	if (x->g.number && x->g.number == g->number && !x->g.delta_bytes) {
		if (g->checksum == x->g.checksum && g->bytes == x->g.bytes)
			return 0;
		return fetch_bad(x, err, "a generation has changed");
	}
	x->to->whole = 0;
	x->g = *g;
	x->next = 0;
	x->blocks = x->sum = 0;
	if (!fetch_has_tensors(x->to, g)) {
		fetch_free_tensors(x->to);
		x->moved = true;
	}
	return fetch_take_memory(x, err);
}

/* @m: the fetch's from here on, if 0 is returned. */
static int fetch_take_page(struct fetch *x, fetch_message *m, struct shardd_error *err)
{
	struct shardd_fetched *to = x->to;
	ProtobufCMessage **more = realloc(to->pages, (to->n_pages + 1) * sizeof(*more));

	if (!more)
		return error_memory(err);
	to->pages = more;
	if (!to->tensors)
		to->tensors = calloc((size_t)x->g.tensors + 1, sizeof(*to->tensors));
	if (!to->tensors)
		return error_memory(err);
	if (m->n_tensors > x->g.tensors - to->n_tensors)
		return fetch_bad(x, err, "there are too many tensors");
	for (size_t i = 0; i < m->n_tensors; i++) {
		const Shardd__V1__PublishedTensor *t = m->tensors[i];

		if (t->offset > x->g.bytes || t->bytes > x->g.bytes - t->offset)
			return fetch_bad(x, err, "a tensor is outside of its generation");
		to->tensors[to->n_tensors++] = (struct shardd_published_tensor){
			.name = t->name,
			.dtype = publication_dtype(t->type),
			.dims = (uint32_t)t->n_shape,
			.shape = t->shape,
			.bytes = t->bytes,
		};
	}
	to->pages[to->n_pages++] = &m->base;
	if (to->n_tensors == x->g.tensors) {
		to->layout = x->g.layout;
		to->bytes = x->g.bytes;
		to->lists++;
	}
	return 0;
}

static int fetch_take_block(struct fetch *x, const fetch_message *m,
			    const Shardd__V1__StreamedBlock *b, struct shardd_error *err)
{
	uint32_t sum;
	uint8_t le[4];

	if (b->offset < x->next || b->offset - x->next >= FETCH_ALIGN || b->offset < m->offset ||
	    b->offset - m->offset > m->data.len || b->bytes > m->data.len - (b->offset - m->offset))
		return fetch_bad(x, err, "a block is out of order");
	sum = crc32c_add(0, x->to->memory + b->offset, b->bytes);
	if (sum != b->checksum)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "byte %" PRIu64 " of generation %" PRIu64 " of publication '%s': "
				 "the next %u bytes have checksum %08x, not %08x",
				 b->offset, x->g.number, x->name, b->bytes, sum, b->checksum);
	for (unsigned i = 0; i < sizeof(le); i++)
		le[i] = (uint8_t)(sum >> 8 * i);
	x->sum = crc32c_add(x->sum, le, sizeof(le));
	x->blocks++;
	x->next = b->offset + b->bytes;
	x->tries = 0;
	return 0;
}

static int fetch_take_delta(struct fetch *x, const fetch_message *m, struct shardd_error *err)
{
	if (m->offset != x->delta_have || m->data.len > x->g.delta_bytes - x->delta_have)
		return fetch_bad(x, err, "a part of a delta is out of order");
	memcpy(x->delta + x->delta_have, m->data.data, m->data.len);
	x->delta_have += m->data.len;
	x->tries = 0;
	return 0;
}

static int fetch_take_data(struct fetch *x, const fetch_message *m, struct shardd_error *err)
{
	int e = 0;

	if (x->delta)
		return fetch_take_delta(x, m, err);
	if (m->offset > x->g.bytes || m->data.len > x->g.bytes - m->offset)
		return fetch_bad(x, err, "a message is outside of its generation");
	memcpy(x->to->memory + m->offset, m->data.data, m->data.len);
	for (size_t i = 0; i < m->n_blocks && e == 0; i++)
		e = fetch_take_block(x, m, m->blocks[i], err);
	return e;
}

/* *@m is NULL afterwards, if the fetch has kept it. */
static int fetch_take(struct fetch *x, ProtobufCMessage **m, struct shardd_error *err)
{
	fetch_message *message = (fetch_message *)*m;
	int e;

	if (message->generation)
		return fetch_take_first(x, message->generation, err);
	if (!x->g.number)
		return fetch_bad(x, err, "it does not begin with a generation");
	if (!message->n_tensors)
		return fetch_take_data(x, message, err);
	e = fetch_take_page(x, message, err);
	if (e == 0)
		*m = NULL;
	return e;
}

/* ------------------------------------------------------------------------------ streams */

/* Where the tensors are. */
static void fetch_place(struct shardd_fetched *to)
{
	size_t n = 0;

	for (size_t i = 0; i < to->n_pages; i++) {
		const fetch_message *m = (const fetch_message *)to->pages[i];

		for (size_t k = 0; k < m->n_tensors; k++)
			to->tensors[n++].data = to->memory + m->tensors[k]->offset;
	}
}

/* What is here becomes the generation. It must have the checksum of the base: somebody may have written to it. If it
 * does not, it is nothing any more, and the next stream has all of it. */
static int fetch_apply(struct fetch *x, struct shardd_error *err)
{
	struct shardd_fetched *to = x->to;
	const struct delta_head *head = (const struct delta_head *)x->delta;
	_cleanup_(freep) void **copies = calloc(to->n_tensors + 1, sizeof(*copies));
	uint64_t base = to->whole;
	int e;

	if (!copies)
		return error_memory(err);
	if (x->delta_have != x->g.delta_bytes || x->g.delta_bytes < sizeof(*head) ||
	    head->base_number != base || head->number != x->g.number ||
	    head->checksum != x->g.checksum)
		return fetch_bad(x, err, "its delta is of another generation");
	fetch_place(to);
	for (size_t i = 0; i < to->n_tensors; i++)
		copies[i] = (void *)(uintptr_t)to->tensors[i].data;
	to->whole = 0;
	e = shardd_delta_apply(x->delta, x->g.delta_bytes, to->tensors, to->n_tensors, copies,
			       SHARDD_DELTA_CHECK, err);
	if (e == 0)
		to->whole = x->g.number;
	return e;
}

/* The whole stream is there. */
static int fetch_end(struct fetch *x, struct shardd_error *err)
{
	struct shardd_fetched *to = x->to;

	if (!x->g.number)
		return error_set(
			err, SHARDD_NOT_FOUND, NULL,
			"publication '%s' of job '%s' has no generation newer than %" PRIu64,
			x->name, x->job, x->options->newer_than);
	if (x->delta)
		return fetch_apply(x, err);
	if (to->layout != x->g.layout || x->blocks != x->g.blocks)
		return fetch_bad(x, err, "it ends before its generation");
	if (x->sum != x->g.checksum)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "generation %" PRIu64
				 " of publication '%s' has checksum %08x, not "
				 "%08x",
				 x->g.number, x->name, x->sum, x->g.checksum);
	to->whole = x->g.number;
	return 0;
}

static int fetch_stream(struct fetch *x, struct rpc_client *rpc, struct shardd_error *err)
{
	Shardd__V1__StreamGenerationRequest request = SHARDD__V1__STREAM_GENERATION_REQUEST__INIT;
	struct rpc_pending *p;
	int e;

	request.job = (char *)(uintptr_t)x->job;
	request.name = (char *)(uintptr_t)x->name;
	request.number = x->g.number;
	request.offset = x->next;
	request.newer_than = x->g.number ? 0 : x->options->newer_than;
	request.wait = !x->g.number && x->options->wait_ms;
	request.timeout_ms = x->options->wait_ms;
	request.bytes_per_second = x->options->bytes_per_second;
	if (!x->to->layout)
		fetch_free_tensors(x->to);
	request.layout = x->to->layout;
	request.delta_of = fetch_has_base(x) ? x->to->whole : 0;
	request.delta_offset = x->delta && request.delta_of ? x->delta_have : 0;
	e = rpc_client_start(rpc, METHOD_StreamGeneration, &request.base,
			     &shardd__v1__stream_generation_response__descriptor, true, 0, &p, err);
	while (e == 0) {
		ProtobufCMessage *m = NULL;
		int r = rpc_pending_next(p, -1, &m, err);

		if (r <= 0) {
			e = r;
			break;
		}
		e = fetch_take(x, &m, err);
		if (m)
			protobuf_c_message_free_unpacked(m, NULL);
	}
	rpc_pending_free(p);
	return e == 0 ? fetch_end(x, err) : e;
}

/* The generation is gone. */
static void fetch_begin_again(struct fetch *x)
{
	shardd__v1__streamed_generation__init(&x->g);
	x->next = 0;
	free(STEAL_PTR(x->delta));
}

/* May the fetch go on after the end @e of a stream? */
static bool fetch_goes_on(struct fetch *x, int e)
{
	/* also: what was here was not the base of the delta, or is not any more */
	bool is_gone =
		(e == -SHARDD_NOT_FOUND && x->g.number) || (e == -SHARDD_DATA_LOSS && x->delta);

	/* CANCELLED: the daemon ends, and the connection will */
	if (!is_gone && e != -SHARDD_ABORTED && e != -SHARDD_CANCELLED &&
	    !(e == -SHARDD_DEADLINE_EXCEEDED && x->g.number))
		return false;
	if (is_gone)
		fetch_begin_again(x);
	return ++x->tries <= FETCH_TRIES;
}

static int fetch_run(struct fetch *x, struct shardd_error *err)
{
	int e;

	do {
		struct link *l = client_use_link(x->c);
		uint32_t link = l->number;

		e = fetch_stream(x, l->rpc, err);
		client_unuse_link(x->c, l);
		e = call_after_loss(x->c, link, e, err);
	} while (e < 0 && fetch_goes_on(x, e));
	return e;
}

/* --------------------------------------------------------------------------------- the call */

static const struct shardd_fetch_options fetch_defaults = { .size = sizeof(fetch_defaults) };

static int fetch_check(const struct shardd_client *c, const char *job, const char *name,
		       const struct shardd_fetch_options *o, shardd_fetched *const *to,
		       const struct shardd_generation *ret, struct shardd_error *err)
{
	int e = publication_check(c, job, name, "name", err);

	if (e < 0)
		return e;
	if (!to || !ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, to ? "ret" : "to",
				 "the argument is NULL");
	if (!o->buffer != !o->buffer_bytes)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "buffer",
				 "buffer and buffer_bytes are both set, or none of them");
	return 0;
}

static int fetch_into(struct fetch *x, struct shardd_generation *ret, struct shardd_error *err)
{
	struct shardd_fetched *to = x->to;
	int e;

	e = fetch_run(x, err);
	free(STEAL_PTR(x->delta));
	if (e < 0)
		return e;
	fetch_place(to);
	*ret = (struct shardd_generation){ .uuid = "",
					   .number = x->g.number,
					   .step = x->g.step,
					   .checksum = x->g.checksum,
					   .tensors = to->tensors,
					   .n_tensors = to->n_tensors,
					   .moved = x->moved,
					   .layout = to->lists };
	return 0;
}

static int fetch_generation(shardd_client *c, const char *job, const char *name,
			    const struct shardd_fetch_options *options, shardd_fetched **to,
			    struct shardd_generation *ret, struct shardd_error *err)
{
	struct shardd_fetch_options room;
	struct shardd_error scratch;
	struct fetch x = { .c = c, .job = job, .name = name };
	int e;

	err = err ? err : &scratch;
	x.options = options ? OPTIONS_READ(options, &room, err) : &fetch_defaults;
	if (!x.options)
		return -err->code;
	e = fetch_check(c, job, name, x.options, to, ret, err);
	if (e < 0)
		return e;
	shardd__v1__streamed_generation__init(&x.g);
	x.to = *to ? *to : calloc(1, sizeof(*x.to));
	if (!x.to)
		return error_memory(err);
	x.to->magic = FETCH_MAGIC;
	e = fetch_into(&x, ret, err);
	if (e < 0 && !*to)
		shardd_fetched_free(x.to);
	else
		*to = x.to;
	return e;
}

int shardd_publication_fetch(shardd_client *c, const char *job, const char *name,
			     const struct shardd_fetch_options *options, shardd_fetched **to,
			     struct shardd_generation *ret, struct shardd_error *err)
{
	int e = fetch_generation(c, job, name, options, to, ret, err);

	if (e < 0 && ret)
		*ret = (struct shardd_generation){ .number = to && *to ? (*to)->whole : 0 };
	return e;
}
