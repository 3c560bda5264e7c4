/*
 * Generations for readers that cannot map them: a stream of the list of tensors, and of the bytes.
 *
 *   WAITS --a generation is there--> SENDS <----------------.
 *                                      '--taken--> READY --its turn, within the rates--> SENDS ...
 *                                                    '--memory of a GPU--> COPIES --copied--> SENDS
 *                                      '--taken, and all is sent--> the end
 *                                      '--nothing is taken for stream_stall_ms--> ENDS
 *
 * A stream has one message under way. The bytes are lent to core (rpc_call_send_lent): nothing is copied
 * here, and the loop writes none of them. The checksums are those that the generation got when it was
 * made. What is in the memory of a GPU is copied first, message by message. A stream that has sent a message comes after all others that are ready, so that streams share the
 * daemon's rate equally. A stream has a lease until its call ends, whatever the reason.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "mem/slab.h"
#include "rpc/arena.h"
#include "rpc/svc_publication.h"

#define SVC_STREAM_CHUNK    (1u << 20)
#define SVC_STREAM_BLOCKS   256u /* of a message */
#define SVC_STREAM_TENSORS  512u /* of a message */
#define SVC_STREAM_MAX      256u /* streams, of all users */
#define SVC_STREAM_USER_MAX 64u
#define SVC_STREAM_SHARED   128u /* if there are more, a user may have SVC_STREAM_SHARE */
#define SVC_STREAM_SHARE    8u
#define SVC_STREAM_MIN_RATE (64u << 10)
#define SVC_STREAM_COST     (256u << 10) /* what a stream may take of the daemon's own memory */
/* Of what is on a GPU, beside that: the message that is copied, and the one before. */
#define SVC_STREAM_COPIES_COST (2 * (SVC_STREAM_CHUNK + KERNEL_ASSEMBLE_BYTES))
#define SVC_STREAM_TICK_MS     250u
#define SVC_STREAM_DATA        (15u << 3 | 2u) /* the tag of data */
#define SVC_STREAM_TAG_MORE    11u             /* bytes of this tag and a length, at most */

enum svc_stream_state {
	SVC_STREAM_WAITS,
	SVC_STREAM_READY,
	SVC_STREAM_COPIES,
	SVC_STREAM_SENDS,
	SVC_STREAM_ENDS
};

/* All that are open; made with the first one, freed after the last one. */
struct svc_streams {
	struct svc_shardd *svc;
	struct list all; /* of struct svc_stream; the one to be served next comes first */
	unsigned n;
	uint64_t next_us; /* when the rate allows the next message */
	uv_timer_t timer;
};

struct svc_stream {
	struct list link; /* svc_streams.all */
	struct svc_streams *streams;
	struct rpc_call *call;
	const Shardd__V1__StreamGenerationRequest *request; /* valid until the call ends */
	enum svc_stream_state state;
	uid_t uid;
	struct user_charge cost;
	struct publication *p;     /* WAITS; NULL: it does not wait */
	struct publication_wait w; /* WAITS */
	uint64_t session;
	int pid;
	struct publication_lease *lease; /* owned; NULL in WAITS */
	struct assembly *assembly;       /* owned ref */
	struct slab *slab;               /* owned ref */
	uint32_t tensor, block;          /* the next one to send */
	uint64_t delta, delta_bytes;     /* the next byte of the delta that is sent; 0: none is */
	uint64_t next_us;                /* when its own rate allows the next message */
	uint64_t since_us;               /* SENDS: since when */
	struct svc_stream_copy *copy;    /* COPIES */
};

/* Blocks that are copied from a GPU. Freed when that is done, also if the stream has ended before. */
struct svc_stream_copy {
	struct svc_stream *st; /* NULL: it has ended */
	struct backend_task task;
	struct launch launch;
	struct slab *slab; /* owned ref */
	uint8_t *to;       /* owned, until it is lent */
	uint32_t first, n; /* blocks */
	uint64_t offset, bytes;
};

/* A message's bytes, which core has. */
struct svc_stream_loan {
	struct slab *slab; /* owned ref; NULL: the bytes are */
	uint8_t *bytes;    /* owned */
};

/* ------------------------------------------------------------------------------ the end */

static void svc_stream_all_on_closed(uv_handle_t *handle)
{
	free(CONTAINER_OF((uv_timer_t *)handle, struct svc_streams, timer));
}

/* The call has ended, or is about to. */
static void svc_stream_free(struct svc_stream *st)
{
	struct svc_streams *all = st->streams;

	if (st->p)
		publication_leave(&st->w);
	if (st->copy)
		st->copy->st = NULL;
	publication_release(st->lease);
	assembly_unref(st->assembly);
	slab_unref(st->slab);
	user_charge_deinit(&st->cost);
	list_unlink(&st->link);
	free(st);
	if (--all->n)
		return;
	all->svc->streams = NULL;
	uv_close((uv_handle_t *)&all->timer, svc_stream_all_on_closed);
}

static void svc_stream_fail(struct svc_stream *st, const struct fault *f)
{
	struct rpc_call *call = st->call;

	rpc_call_on_cancelled(call, NULL, NULL);
	svc_stream_free(st);
	rpc_call_fail(call, f);
}

static void svc_stream_on_cancelled(struct rpc_call *call, void *userdata)
{
	struct fault f = FAULT_NULL;

	svc_stream_free(userdata);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

/* The reader gets the reason; its messages that wait go nowhere. */
static void svc_stream_stalled(struct svc_stream *st, uint32_t ms)
{
	struct fault f = FAULT_NULL;

	st->state = SVC_STREAM_ENDS;
	fault_set(&f, FAULT_DEADLINE, NULL,
		  "this reader has taken nothing of generation %" PRIu64 " for %u ms "
		  "(stream_stall_ms): ask for the same number from the offset on that it has",
		  st->lease->g ? st->lease->g->number : 0, ms);
	rpc_call_abort(st->call, &f); /* on_cancelled follows */
}

/* ------------------------------------------------------------------------------ messages */

/* Is the slab no memory that core could read? */
static bool svc_stream_is_on_gpu(const struct slab *slab)
{
	return backend_info(slab->device->backend)->order != BACKEND_ORDER_NONE;
}

static uint64_t svc_stream_block_offset(const struct assembly *a, uint32_t i)
{
	const struct view_tensor *t = &a->view->tensors[a->blocks[i].tensor];

	return t->offset + a->blocks[i].first * dtype_size(t->dtype);
}

static uint64_t svc_stream_block_bytes(const struct assembly *a, uint32_t i)
{
	return a->blocks[i].n * dtype_size(a->view->tensors[a->blocks[i].tensor].dtype);
}

/* The first block that does not end before @offset. */
static uint32_t svc_stream_find(const struct assembly *a, uint64_t offset)
{
	uint32_t from = 0, to = a->n_blocks;

	while (from < to) {
		uint32_t i = from + (to - from) / 2;

		if (svc_stream_block_offset(a, i) + svc_stream_block_bytes(a, i) <= offset)
			from = i + 1;
		else
			to = i;
	}
	return from;
}

static void svc_stream_fill_page(struct arena *a, struct svc_stream *st,
				 Shardd__V1__StreamGenerationResponse *m)
{
	const struct view *v = st->assembly->view;
	uint32_t left = v->n - st->tensor,
		 n = left < SVC_STREAM_TENSORS ? left : SVC_STREAM_TENSORS;
	Shardd__V1__PublishedTensor *tensors = arena_take(a, n * sizeof(*tensors) + 1);

	m->tensors = arena_take(a, n * sizeof(*m->tensors) + 1);
	if (!tensors || !m->tensors)
		return;
	for (; m->n_tensors < n; m->n_tensors++) {
		m->tensors[m->n_tensors] = &tensors[m->n_tensors];
		svc_shardd_publish_fill_tensor(&v->tensors[st->tensor++], &tensors[m->n_tensors]);
	}
}

/* Queue @m, unless the arena has failed. */
static void svc_stream_send(struct svc_stream *st, struct arena *a,
			    const Shardd__V1__StreamGenerationResponse *m)
{
	struct fault f = FAULT_NULL;

	st->state = SVC_STREAM_SENDS;
	st->since_us = clock_now_us();
	if (!a->failed && rpc_call_send(st->call, &m->base) == 0)
		return;
	fault_errno(&f, -ENOMEM, "sending a generation");
	svc_stream_fail(st, &f);
}

static void svc_stream_send_page(struct svc_stream *st)
{
	Shardd__V1__StreamGenerationResponse m = SHARDD__V1__STREAM_GENERATION_RESPONSE__INIT;
	struct arena a = ARENA_NULL;

	svc_stream_fill_page(&a, st, &m);
	svc_stream_send(st, &a, &m);
	arena_free(&a);
}

static void svc_stream_send_first(struct svc_stream *st)
{
	Shardd__V1__StreamGenerationResponse m = SHARDD__V1__STREAM_GENERATION_RESPONSE__INIT;
	Shardd__V1__StreamedGeneration head = SHARDD__V1__STREAMED_GENERATION__INIT;
	const struct published *g = st->lease->g;
	struct arena none = ARENA_NULL;

	head.number = g->number;
	head.step = g->step;
	head.checksum = g->checksum;
	head.layout = st->assembly->layout;
	head.bytes = st->assembly->bytes;
	head.tensors = st->assembly->view->n;
	head.blocks = st->assembly->n_blocks;
	head.delta_bytes = st->delta_bytes;
	m.generation = &head;
	svc_stream_send(st, &none, &m);
}

static void svc_stream_on_returned(void *userdata)
{
	struct svc_stream_loan *l = userdata;

	slab_unref(l->slab);
	free(l->bytes);
	free(l);
}

static size_t svc_stream_put(uint8_t *at, uint64_t v)
{
	size_t n = 0;

	for (; v >= 0x80; v >>= 7)
		at[n++] = (uint8_t)(v | 0x80);
	at[n++] = (uint8_t)v;
	return n;
}

/* Lend @bytes at @data behind @m. @copied: data, which is taken in any case; NULL: it is of the slab. Return: 0 or
 * -ENOMEM. */
static int svc_stream_lend(struct svc_stream *st, struct arena *a,
			   const Shardd__V1__StreamGenerationResponse *m, const uint8_t *data,
			   uint64_t bytes, uint8_t *copied)
{
	size_t packed = shardd__v1__stream_generation_response__get_packed_size(m);
	uint8_t *head = arena_take(a, packed + SVC_STREAM_TAG_MORE);
	struct rpc_piece pieces[2] = { { head, packed }, { data, (size_t)bytes } };
	struct svc_stream_loan *l = malloc(sizeof(*l));

	if (!head || !l) {
		free(copied);
		free(l);
		return -ENOMEM;
	}
	shardd__v1__stream_generation_response__pack(m, head);
	head[pieces[0].n++] = SVC_STREAM_DATA;
	pieces[0].n += svc_stream_put(head + pieces[0].n, bytes);
	l->slab = copied ? NULL : slab_ref(st->slab);
	l->bytes = copied;
	if (rpc_call_send_lent(st->call, &pieces[0], &pieces[1], svc_stream_on_returned, l) == 0)
		return 0;
	svc_stream_on_returned(l);
	return -ENOMEM;
}

/* How many blocks of the message that begins with st->block: within @most bytes, but at least one.
 * @ret: bytes up to the end of the last one. */
static uint32_t svc_stream_count(const struct svc_stream *st, uint64_t most, uint64_t *ret)
{
	const struct assembly *a = st->assembly;
	uint64_t from = svc_stream_block_offset(a, st->block);
	uint32_t n = 0;

	while (n < SVC_STREAM_BLOCKS && st->block + n < a->n_blocks) {
		uint64_t to = svc_stream_block_offset(a, st->block + n) +
			      svc_stream_block_bytes(a, st->block + n);

		if (n && to - from > most)
			break;
		*ret = to - from;
		n++;
	}
	return n;
}

static void svc_stream_fill_blocks(struct arena *a, const struct svc_stream *st, uint32_t first,
				   uint32_t n, Shardd__V1__StreamGenerationResponse *m)
{
	Shardd__V1__StreamedBlock *blocks = arena_take(a, n * sizeof(*blocks));

	m->blocks = arena_take(a, n * sizeof(*m->blocks));
	if (!blocks || !m->blocks)
		return;
	for (uint32_t i = 0; i < n; i++) {
		m->blocks[m->n_blocks++] = &blocks[i];
		shardd__v1__streamed_block__init(&blocks[i]);
		blocks[i].offset = svc_stream_block_offset(st->assembly, first + i);
		blocks[i].bytes = (uint32_t)svc_stream_block_bytes(st->assembly, first + i);
		blocks[i].checksum = st->lease->g->crc[first + i];
	}
}

/* The next part of the delta. Return: its bytes. */
static uint64_t svc_stream_next_of_delta(struct svc_stream *st, uint64_t most,
					 Shardd__V1__StreamGenerationResponse *m)
{
	uint64_t left = st->delta_bytes - st->delta, bytes = left < most ? left : most;

	m->offset = st->delta;
	st->delta += bytes;
	return bytes;
}

/* The next blocks. Return: their bytes. */
static uint64_t svc_stream_next_blocks(struct svc_stream *st, struct arena *a, uint64_t most,
				       Shardd__V1__StreamGenerationResponse *m)
{
	uint64_t bytes = 0;
	uint32_t n = svc_stream_count(st, most, &bytes);

	m->offset = svc_stream_block_offset(st->assembly, st->block);
	svc_stream_fill_blocks(a, st, st->block, n, m);
	st->block += n;
	return bytes;
}

/* A message with @bytes is on its way. */
static void svc_stream_sends(struct svc_stream *st, uint64_t bytes)
{
	st->state = SVC_STREAM_SENDS;
	st->since_us = clock_now_us();
	st->lease->sent += bytes;
	st->lease->g->p->counts.streamed += bytes;
}

static void svc_stream_fail_errno(struct svc_stream *st, int error, const char *what)
{
	struct fault f = FAULT_NULL;

	fault_errno(&f, error, what);
	svc_stream_fail(st, &f);
}

/* -- from a GPU */

static bool svc_stream_is_gone(struct svc_stream *st);

static void svc_stream_copy_free(struct svc_stream_copy *c)
{
	if (c->st)
		c->st->copy = NULL;
	slab_unref(c->slab);
	free(c->to);
	free(c);
}

/* Send what was copied. Return: 0 or -ENOMEM. */
static int svc_stream_send_copy(struct svc_stream *st, struct svc_stream_copy *c)
{
	Shardd__V1__StreamGenerationResponse m = SHARDD__V1__STREAM_GENERATION_RESPONSE__INIT;
	struct arena a = ARENA_NULL;
	uint8_t *to = c->to;
	int r = -ENOMEM;

	m.offset = c->offset;
	svc_stream_fill_blocks(&a, st, c->first, c->n, &m);
	if (!a.failed) {
		c->to = NULL; /* core's from here on */
		r = svc_stream_lend(st, &a, &m, to, c->bytes, to);
	}
	arena_free(&a);
	return r;
}

static void svc_stream_on_copied(struct backend_task *task, int status)
{
	struct svc_stream_copy *c = CONTAINER_OF(task, struct svc_stream_copy, task);
	struct svc_stream *st = c->st;
	uint64_t bytes = c->bytes;
	int r = status;

	if (r == 0 && st && st->state == SVC_STREAM_COPIES && st->lease->g)
		r = svc_stream_send_copy(st, c);
	svc_stream_copy_free(c);
	if (!st || st->state != SVC_STREAM_COPIES || svc_stream_is_gone(st))
		return;
	if (r < 0)
		svc_stream_fail_errno(st, r, "sending a generation from a GPU");
	else
		svc_stream_sends(st, bytes);
}

/* Copy @n blocks from the next one on; they are sent when they are there. Return: 0 or -ENOMEM. */
static int svc_stream_copy(struct svc_stream *st, uint32_t n, uint64_t bytes)
{
	struct svc_stream_copy *c = calloc(1, sizeof(*c));

	if (!c)
		return -ENOMEM;
	c->to = malloc(bytes);
	if (!c->to) {
		free(c);
		return -ENOMEM;
	}
	c->st = st;
	c->slab = slab_ref(st->slab);
	c->first = st->block;
	c->n = n;
	c->offset = svc_stream_block_offset(st->assembly, st->block);
	c->bytes = bytes;
	c->launch = (struct launch){
		.kind = LAUNCH_COPY,
		.n = bytes,
		.copy = { .dst = c->to, .src = (uint8_t *)backend_addr(c->slab->mem) + c->offset }
	};
	c->task = (struct backend_task){ .launches = &c->launch,
					 .n_launches = 1,
					 .queue = BACKEND_Q_GATHER,
					 .sync = true,
					 .done = svc_stream_on_copied };
	st->copy = c;
	st->state = SVC_STREAM_COPIES;
	st->block += n;
	backend_submit(c->slab->device->backend, &c->task);
	return 0;
}

/* Return: how many bytes; 0: the stream has failed. */
static uint64_t svc_stream_copy_blocks(struct svc_stream *st, uint64_t most)
{
	uint64_t bytes = 0;
	uint32_t n = svc_stream_count(st, most, &bytes);
	int r = svc_stream_copy(st, n, bytes);

	if (r == 0)
		return bytes;
	svc_stream_fail_errno(st, r, "sending a generation from a GPU");
	return 0;
}

/* Send what comes next, about @most bytes. Return: how many bytes; 0: the stream has failed. */
static uint64_t svc_stream_send_blocks(struct svc_stream *st, uint64_t most)
{
	Shardd__V1__StreamGenerationResponse m = SHARDD__V1__STREAM_GENERATION_RESPONSE__INIT;
	const uint8_t *base = backend_addr(st->slab->mem);
	struct arena a = ARENA_NULL;
	uint64_t bytes;

	if (svc_stream_is_on_gpu(st->slab))
		return svc_stream_copy_blocks(st, most);
	bytes = st->delta_bytes ? svc_stream_next_of_delta(st, most, &m)
				: svc_stream_next_blocks(st, &a, most, &m);
	if (a.failed || svc_stream_lend(st, &a, &m, base + m.offset, bytes, NULL) < 0) {
		arena_free(&a);
		svc_stream_fail_errno(st, -ENOMEM, "sending a generation");
		return 0;
	}
	arena_free(&a);
	svc_stream_sends(st, bytes);
	return bytes;
}

/* --------------------------------------------------------------------------------- turns */

/* The generation went with its publication, its job or its device. */
static bool svc_stream_is_gone(struct svc_stream *st)
{
	struct fault f = FAULT_NULL;

	if (st->lease->g)
		return false;
	fault_set(&f, FAULT_NOT_FOUND, NULL,
		  "the generation is gone: its publication was dropped, or its job has changed");
	svc_stream_fail(st, &f);
	return true;
}

static const struct node_limits *svc_stream_all_limits(const struct svc_streams *all)
{
	return &all->svc->jobs->node->limits;
}

/* Bytes of a message: what the lower rate allows in a twentieth of a second, at least a block. */
static uint64_t svc_stream_most(uint64_t one, uint64_t other)
{
	uint64_t rate = one && (!other || one < other) ? one : other;

	return rate && rate / 20 < SVC_STREAM_CHUNK ? rate / 20 : SVC_STREAM_CHUNK;
}

static uint64_t svc_stream_after(uint64_t at_us, uint64_t now_us, uint64_t bytes, uint64_t rate)
{
	return rate ? (at_us > now_us ? at_us : now_us) + bytes * 1000000u / rate : 0;
}

/* A message of @st, which is READY and may send. */
static void svc_stream_all_serve(struct svc_streams *all, struct svc_stream *st, uint64_t now_us)
{
	uint64_t own = st->request->bytes_per_second;
	uint64_t rate = svc_stream_all_limits(all)->stream_bytes_per_s;
	uint64_t bytes = svc_stream_send_blocks(st, svc_stream_most(own, rate));

	if (!bytes)
		return;
	list_unlink(&st->link);
	list_append(&all->all, &st->link);
	st->next_us = svc_stream_after(st->next_us, now_us, bytes, own);
	all->next_us = svc_stream_after(all->next_us, now_us, bytes, rate);
}

static void svc_stream_all_on_timer(uv_timer_t *timer);

/* Serve those who are ready, one message each, for as long as the rate allows. */
static void svc_stream_all_run(struct svc_streams *all)
{
	struct svc_stream *st, *tmp;
	uint64_t now = clock_now_us(), soon = now + SVC_STREAM_TICK_MS * 1000u;
	bool last = false;

	if (!svc_stream_all_limits(all)->stream_bytes_per_s)
		all->next_us = 0; /* the limit is gone */
	all->n++;                 /* @all stays, although the last stream may end here */
	list_for_each (st, tmp, &all->all, link) {
		uint64_t at = st->next_us > all->next_us ? st->next_us : all->next_us;

		if (st->state == SVC_STREAM_READY && svc_stream_is_gone(st))
			continue;
		if (st->state == SVC_STREAM_READY && at <= now)
			svc_stream_all_serve(all, st, now);
		else if (st->state == SVC_STREAM_READY && at < soon)
			soon = at;
	}
	last = --all->n == 0;
	uv_timer_start(&all->timer, svc_stream_all_on_timer, (soon - now + 999) / 1000, 0);
	if (!last)
		return;
	all->svc->streams = NULL;
	uv_close((uv_handle_t *)&all->timer, svc_stream_all_on_closed);
}

static void svc_stream_all_on_timer(uv_timer_t *timer)
{
	struct svc_streams *all = CONTAINER_OF(timer, struct svc_streams, timer);
	uint32_t ms = svc_stream_all_limits(all)->stream_stall_ms;
	struct svc_stream *st, *tmp;
	uint64_t now = clock_now_us();

	list_for_each (st, tmp, &all->all, link)
		if (st->state == SVC_STREAM_SENDS && now - st->since_us >= ms * UINT64_C(1000))
			svc_stream_stalled(st, ms);
	svc_stream_all_run(all);
}

static bool svc_stream_has_more(const struct svc_stream *st)
{
	return st->delta_bytes ? st->delta < st->delta_bytes : st->block < st->assembly->n_blocks;
}

/* What comes next, after all that was sent has been taken. */
static void svc_stream_on_taken(struct rpc_call *call, void *userdata)
{
	struct svc_stream *st = userdata;
	struct svc_streams *all = st->streams;

	if (st->state != SVC_STREAM_SENDS || svc_stream_is_gone(st))
		return;
	if (st->tensor < st->assembly->view->n) {
		svc_stream_send_page(st);
	} else if (svc_stream_has_more(st)) {
		st->state = SVC_STREAM_READY;
		svc_stream_all_run(all);
	} else {
		rpc_call_on_cancelled(call, NULL, NULL);
		svc_stream_free(st);
		rpc_call_end(call);
	}
}

/* --------------------------------------------------------------------------------- begin */

/* Which one the request is about. @ret: NULL: none is newer. Return: 0 or FAULT_NOT_FOUND. */
static int svc_stream_choose(struct publication *p, const Shardd__V1__StreamGenerationRequest *r,
			     struct published **ret, struct fault *f)
{
	struct published *newest = publication_newest(p);

	if (!r->number) {
		*ret = newest && newest->number > r->newer_than ? newest : NULL;
		return 0;
	}
	*ret = publication_numbered(p, r->number);
	if (*ret)
		return 0;
	return fault_set(f, FAULT_NOT_FOUND, "number",
			 "generation %" PRIu64 " of publication '%s' of job '%s' is not there: "
			 "the newest is %" PRIu64 "%s",
			 r->number, p->rec->declaration->name, p->job->rec->name,
			 newest ? newest->number : 0, newest ? "" : " (there is none)");
}

/* The reader has the base of @g's delta, and what it needs to read that. */
static bool svc_stream_wants_delta(const struct svc_stream *st, const struct published *g)
{
	const Shardd__V1__StreamGenerationRequest *r = st->request;

	return r->delta_of && g->delta.made && g->delta.base == r->delta_of && !r->offset &&
	       r->delta_offset <= g->delta.bytes && r->layout == g->assembly->layout;
}

/* Lease @g and begin to send it. Fails the stream if that cannot be. */
static void svc_stream_begin(struct svc_stream *st, struct published *g)
{
	struct fault f = FAULT_NULL;

	st->p = NULL;
	if (st->request->offset > g->assembly->bytes)
		fault_set(&f, FAULT_INVALID, "offset",
			  "offset %" PRIu64 " is behind the end of generation %" PRIu64
			  ", which has %" PRIu64 " bytes",
			  st->request->offset, g->number, g->assembly->bytes);
	else if (!svc_stream_is_on_gpu(g->slab) ||
		 user_charge_resize(&st->cost, SVC_STREAM_COST + SVC_STREAM_COPIES_COST, &f) == 0)
		st->lease = publication_lease(g);
	if (!f.code && !st->lease)
		fault_errno(&f, -ENOMEM, "leasing a generation");
	if (f.code) {
		svc_stream_fail(st, &f);
		return;
	}
	st->lease->session = st->session;
	st->lease->pid = st->pid;
	st->lease->streams = true;
	st->assembly = assembly_ref(g->assembly);
	st->delta_bytes = svc_stream_wants_delta(st, g) ? g->delta.bytes : 0;
	st->delta = st->delta_bytes ? st->request->delta_offset : 0;
	st->slab = slab_ref(st->delta_bytes ? g->delta.slab : g->slab);
	st->block = svc_stream_find(g->assembly, st->request->offset);
	st->tensor = st->request->layout == g->assembly->layout ? g->assembly->view->n : 0;
	rpc_call_on_taken(st->call, svc_stream_on_taken, st);
	svc_stream_send_first(st);
}

static void svc_stream_on_wait(struct publication_wait *w, const struct fault *f)
{
	struct svc_stream *st = CONTAINER_OF(w, struct svc_stream, w);
	struct publication *p = st->p;

	st->p = NULL;
	if (f)
		svc_stream_fail(st, f);
	else
		svc_stream_begin(st, publication_newest(p));
}

static void svc_stream_await(struct svc_stream *st, struct publication *p)
{
	uint64_t ms =
		st->request->timeout_ms ? st->request->timeout_ms : p->job->rec->op_timeout_ms;

	st->p = p;
	st->w = (struct publication_wait){
		.newer_than = st->request->newer_than,
		.deadline_us = ms ? clock_now_us() + ms * 1000u : UINT64_MAX,
		.done = svc_stream_on_wait,
	};
	publication_await(p, &st->w);
}

static struct svc_streams *svc_stream_all_get(struct svc_shardd *svc)
{
	struct svc_streams *all = svc->streams;

	if (all)
		return all;
	all = calloc(1, sizeof(*all));
	if (!all)
		return NULL;
	all->svc = svc;
	list_init(&all->all);
	uv_timer_init(svc->jobs->node->loop, &all->timer);
	uv_timer_start(&all->timer, svc_stream_all_on_timer, SVC_STREAM_TICK_MS, 0);
	svc->streams = all;
	return all;
}

static int svc_stream_check_count(const struct svc_streams *all, uid_t uid, struct fault *f)
{
	const struct svc_stream *st, *tmp;
	unsigned own = 0, most;

	if (!all)
		return 0;
	list_for_each (st, tmp, (struct list *)(uintptr_t)&all->all, link)
		own += st->uid == uid;
	most = all->n < SVC_STREAM_SHARED ? SVC_STREAM_USER_MAX : SVC_STREAM_SHARE;
	if (all->n < SVC_STREAM_MAX && own < most)
		return 0;
	return fault_set(
		f, FAULT_EXHAUSTED, NULL,
		"%u generations are being sent, %u of them to uid %u: at most %u and %u are "
		"possible",
		all->n, own, (unsigned)uid, SVC_STREAM_MAX, most);
}

static int svc_stream_check(const Shardd__V1__StreamGenerationRequest *r, struct fault *f)
{
	if (r->number && (r->newer_than || r->wait))
		return fault_set(f, FAULT_INVALID, r->wait ? "wait" : "newer_than",
				 "number names a generation: newer_than and wait do not");
	if (r->offset && !r->number)
		return fault_set(f, FAULT_INVALID, "offset",
				 "offset is of the generation that number names, and number is 0");
	if (r->delta_offset && (!r->number || !r->delta_of || r->offset))
		return fault_set(
			f, FAULT_INVALID, "delta_offset",
			"delta_offset is of the delta from delta_of to number, which must both be "
			"set, and offset must be 0");
	if (r->bytes_per_second && r->bytes_per_second < SVC_STREAM_MIN_RATE)
		return fault_set(f, FAULT_INVALID, "bytes_per_second",
				 "bytes_per_second is %" PRIu64 "; it must be at least %u, or 0",
				 r->bytes_per_second, SVC_STREAM_MIN_RATE);
	return 0;
}

/* Return: NULL: @f says why. */
static struct svc_stream *svc_stream_new(struct rpc_call *call, struct svc_shardd *svc,
					 const Shardd__V1__StreamGenerationRequest *r,
					 struct fault *f)
{
	const struct session *s = conn_user(rpc_call_conn(call));
	struct svc_streams *all;
	struct svc_stream *st;

	if (svc_stream_check_count(svc->streams, proc_uid(s->proc), f))
		return NULL;
	st = calloc(1, sizeof(*st));
	all = st ? svc_stream_all_get(svc) : NULL;
	if (!all) {
		free(st);
		fault_errno(f, -ENOMEM, "sending a generation");
		return NULL;
	}
	st->streams = all;
	st->call = call;
	st->request = r;
	st->uid = proc_uid(s->proc);
	st->session = s->id;
	st->pid = (int)proc_pid(s->proc);
	all->n++;
	list_init(&st->link);
	list_append(&all->all, &st->link);
	if (user_charge(&st->cost, session_account(s), USER_MEMORY, SVC_STREAM_COST, f) == 0)
		return st;
	svc_stream_free(st);
	return NULL;
}

void svc_stream_generation(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__StreamGenerationRequest *r =
		(const Shardd__V1__StreamGenerationRequest *)request;
	struct publication *p =
		svc_publication_find(call, userdata, r->job, r->name, SVC_PUBLICATION_READ);
	struct published *g = NULL;
	struct svc_stream *st;
	struct fault f = FAULT_NULL;

	if (!p)
		return;
	if (svc_stream_check(r, &f) || svc_stream_choose(p, r, &g, &f)) {
		rpc_call_fail(call, &f);
		return;
	}
	if (!g && !r->wait) {
		rpc_call_end(call);
		return;
	}
	st = svc_stream_new(call, userdata, r, &f);
	if (!st) {
		rpc_call_fail(call, &f);
		return;
	}
	rpc_call_on_cancelled(call, svc_stream_on_cancelled, st);
	if (g)
		svc_stream_begin(st, g);
	else
		svc_stream_await(st, p);
}
