/*
 * The node that fetches.
 *
 * The loop begins the stream. From then on the hands take chunk after chunk: the next one is asked of core
 * before this one is checked and written, so that it arrives meanwhile. What is wrong with one ends the
 * stream. When core has nothing of it any more the loop tells its owner.
 */
#include <errno.h>
#include <grpc/byte_buffer.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/text.h"
#include "peer/bulk_impl.h"

#define BULK_FETCH_MAGIC 0x66657463u
#define BULK_FETCH_TEXT  700
#define BULK_FETCH_SHOWN 100 /* bytes of a key in texts */

struct bulk_fetch {
	uint32_t magic;
	atomic_uint refs;
	struct list link; /* b->fetches */
	struct peers *ps;
	struct bulk_channel *channel;
	char key[BULK_KEY_BYTES + 1];
	struct bulk_want want; /* its texts: those of the channel, and key */
	bulk_done_cb done;
	void *userdata;
	struct bulk_watch watch;
	struct fault why; /* the loop has ended it */
	struct work over;

	/* Core's. */
	grpc_call *call;
	grpc_metadata_array initial, trailing;
	grpc_byte_buffer *request, *incoming;
	grpc_status_code status;
	grpc_slice details;
	struct bulk_tag begun, received, ended;

	/* The hands'. */
	pthread_mutex_t mu;
	bool greeted;     /* there was a first chunk */
	struct fault bad; /* what is wrong with a chunk, or with writing it */

	atomic_uint_least64_t bytes, chunks;
};

/* ---------------------------------------------------------------------------------- the end */

static void bulk_fetch_free(struct bulk_fetch *x)
{
	struct peers *ps = x->ps;

	list_unlink(&x->link);
	if (x->call)
		grpc_call_unref(x->call);
	if (x->request)
		grpc_byte_buffer_destroy(x->request);
	if (x->channel)
		bulk_dial_put(x->channel, x->status == GRPC_STATUS_UNAVAILABLE ||
						  x->why.code == FAULT_DEADLINE);
	grpc_metadata_array_destroy(&x->initial);
	grpc_metadata_array_destroy(&x->trailing);
	grpc_slice_unref(x->details);
	pthread_mutex_destroy(&x->mu);
	ps->bulk->n_fetches--;
	x->magic = 0;
	free(x);
	peers_drop(ps);
}

/* Of the status. */
static void bulk_fetch_blame(const struct bulk_fetch *x, struct fault *f)
{
	char *details = grpc_slice_to_c_string(x->details);

	peer_hello_clean(details);
	if (x->status == GRPC_STATUS_OK)
		fault_set(f, FAULT_ABORTED, "peer",
			  "node '%s' has ended it behind %llu of %llu bytes", x->channel->node,
			  (unsigned long long)x->bytes, (unsigned long long)x->want.bytes);
	else if (x->status != GRPC_STATUS_UNAVAILABLE)
		fault_set(f, bulk_hands_code(x->status), "peer", "%.300s", details);
	else if (x->greeted)
		fault_set(f, FAULT_UNAVAILABLE, "peer",
			  "node '%s' was lost behind %llu of %llu bytes: %.200s", x->channel->node,
			  (unsigned long long)x->bytes, (unsigned long long)x->want.bytes, details);
	else
		fault_set(f, FAULT_UNAVAILABLE, "peer", "node '%s' at %s: %.300s", x->channel->node,
			  x->channel->at, details);
	gpr_free(details);
}

/* Return: false: all is there. */
static bool bulk_fetch_why(struct bulk_fetch *x, struct fault *ret)
{
	struct fault why = FAULT_NULL;

	if (x->why.code)
		why = x->why;
	else if (x->bad.code)
		why = x->bad;
	else if (x->status == GRPC_STATUS_OK && x->bytes == x->want.bytes)
		return false;
	else
		bulk_fetch_blame(x, &why);
	*ret = FAULT_NULL;
	fault_set(ret, why.code, "peer", "fetching '%.*s%s' of node '%s': %.360s", BULK_FETCH_SHOWN,
		  x->key, strlen(x->key) > BULK_FETCH_SHOWN ? "..." : "", x->channel->node,
		  why.text);
	ret->domain = why.domain;
	ret->native = why.native;
	return true;
}

static void bulk_fetch_on_over(struct work *w)
{
	struct bulk_fetch *x = CONTAINER_OF(w, struct bulk_fetch, over);
	struct fault f = FAULT_NULL;
	bool failed;

	MAGIC_CHECK(x, BULK_FETCH_MAGIC);
	pthread_mutex_lock(&x->mu); /* what the hands have written is seen */
	failed = bulk_fetch_why(x, &f);
	pthread_mutex_unlock(&x->mu);
	x->done(x->userdata, failed ? &f : NULL, x->bytes);
	bulk_fetch_free(x);
}

/* Any thread; @x is the loop's then, if it was the last one. */
static void bulk_fetch_unref(struct bulk_fetch *x)
{
	if (atomic_fetch_sub(&x->refs, 1) == 1)
		loopq_post(x->ps->loopq, &x->over, bulk_fetch_on_over);
}

/* --------------------------------------------------------------------------------- the hands */

/* Of the first chunk. */
static int bulk_fetch_greet(struct bulk_fetch *x, const Shardd__V1__FetchChunk *m)
{
	char why[PEER_WHY_BYTES];

	if (!m->hello)
		return fault_set(&x->bad, FAULT_ABORTED, "peer",
				 "the first chunk does not say which node sends it");
	if (peer_hello_check_call(x->ps, x->call, x->channel->at, x->channel->node, m->hello, why,
				  sizeof(why)))
		return fault_set(&x->bad, FAULT_DENIED, "peer", "%s", why);
	if (m->total != x->want.bytes)
		return fault_set(&x->bad, FAULT_ABORTED, "peer",
				 "node '%s' wants to send %llu bytes instead of %llu",
				 x->channel->node, (unsigned long long)m->total,
				 (unsigned long long)x->want.bytes);
	x->greeted = true;
	return 0;
}

/* How long the next chunk is: all have 1 MiB but the last one, or many small ones would count as progress
 * for ever. 0: none comes. */
static uint64_t bulk_fetch_due(const struct bulk_fetch *x)
{
	uint64_t left = x->want.bytes - x->bytes;

	return left < BULK_CHUNK_BYTES ? left : BULK_CHUNK_BYTES;
}

static int bulk_fetch_check(struct bulk_fetch *x, const struct bulk_chunk *c)
{
	uint64_t next = x->bytes, due = bulk_fetch_due(x);

	if (!x->greeted && bulk_fetch_greet(x, c->m))
		return (int)x->bad.code;
	if (c->m->offset != next)
		return fault_set(&x->bad, FAULT_ABORTED, "peer",
				 "a chunk begins at byte %llu; byte %llu is the next one",
				 (unsigned long long)c->m->offset, (unsigned long long)next);
	if (c->bytes != due || !due)
		return fault_set(&x->bad, FAULT_ABORTED, "peer",
				 "a chunk has %zu bytes behind %llu of %llu; %llu are expected",
				 c->bytes, (unsigned long long)next,
				 (unsigned long long)x->want.bytes, (unsigned long long)due);
	if (bulk_wire_crc(c) != c->m->crc)
		return fault_set(&x->bad, FAULT_ABORTED, "peer",
				 "the %zu bytes from byte %llu on have another checksum (CRC-32C) "
				 "than they were sent with",
				 c->bytes, (unsigned long long)next);
	return 0;
}

static int bulk_fetch_store(struct bulk_fetch *x, const struct bulk_chunk *c)
{
	int r = bulk_wire_write(c, x->want.fd, x->bytes);

	if (r)
		return fault_errno(&x->bad, r, "writing what came");
	atomic_fetch_add(&x->bytes, c->bytes);
	return 0;
}

static void bulk_fetch_take(struct bulk_fetch *x, const grpc_byte_buffer *buffer)
{
	struct bulk_chunk c;

	if (!bulk_wire_unpack(buffer, &c)) {
		fault_set(&x->bad, FAULT_ABORTED, "peer", "node '%s' has sent what is no chunk",
			  x->channel->node);
	} else {
		if (bulk_fetch_check(x, &c) == 0)
			bulk_fetch_store(x, &c);
		shardd__v1__fetch_chunk__free_unpacked(c.m, NULL);
	}
	atomic_fetch_add(&x->chunks, 1);
	if (x->bad.code)
		grpc_call_cancel(x->call, NULL);
}

static void bulk_fetch_next(struct bulk_fetch *x)
{
	grpc_op op = { .op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &x->incoming };

	bulk_hands_submit(&x->received, &x->refs, x->call, &op, 1);
}

/* Another hand may have the next one before this one is done: it waits for the lock. */
static void bulk_fetch_on_received(void *fetch, bool ok)
{
	struct bulk_fetch *x = fetch;
	grpc_byte_buffer *buffer;

	(void)ok;
	MAGIC_CHECK(x, BULK_FETCH_MAGIC);
	pthread_mutex_lock(&x->mu);
	buffer = x->incoming;
	x->incoming = NULL;
	if (buffer) {
		bulk_fetch_next(x); /* the status comes behind all of them */
		if (!x->bad.code)
			bulk_fetch_take(x, buffer);
		grpc_byte_buffer_destroy(buffer);
	}
	pthread_mutex_unlock(&x->mu);
	bulk_fetch_unref(x);
}

static void bulk_fetch_on_other(void *fetch, bool ok)
{
	(void)ok; /* if it fails, so does the stream */
	bulk_fetch_unref(fetch);
}

/* ---------------------------------------------------------------------------------- to begin */

static grpc_byte_buffer *bulk_fetch_request(const struct bulk_fetch *x)
{
	Shardd__V1__FetchRequest m = SHARDD__V1__FETCH_REQUEST__INIT;
	Shardd__V1__PeerHello hello;
	grpc_byte_buffer *b;
	grpc_slice s;

	peer_hello_fill(x->ps, &hello);
	m.hello = &hello;
	m.to = x->channel->node;
	m.key = (char *)x->key;
	m.bytes = x->want.bytes;
	s = grpc_slice_malloc(shardd__v1__fetch_request__get_packed_size(&m));
	shardd__v1__fetch_request__pack(&m, GRPC_SLICE_START_PTR(s));
	b = grpc_raw_byte_buffer_create(&s, 1);
	grpc_slice_unref(s);
	return b;
}

static void bulk_fetch_start(struct bulk_fetch *x)
{
	grpc_op first[] = {
		{ .op = GRPC_OP_SEND_INITIAL_METADATA },
		{ .op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = x->request },
		{ .op = GRPC_OP_SEND_CLOSE_FROM_CLIENT },
		{ .op = GRPC_OP_RECV_INITIAL_METADATA,
		  .data.recv_initial_metadata.recv_initial_metadata = &x->initial },
	};
	grpc_op last = { .op = GRPC_OP_RECV_STATUS_ON_CLIENT,
			 .data.recv_status_on_client = { .trailing_metadata = &x->trailing,
							 .status = &x->status,
							 .status_details = &x->details } };

	pthread_mutex_lock(&x->mu); /* what is set is seen by the hands */
	bulk_hands_submit(&x->begun, &x->refs, x->call, first, ARRAY_SIZE(first));
	bulk_hands_submit(&x->ended, &x->refs, x->call, &last, 1);
	bulk_fetch_next(x);
	pthread_mutex_unlock(&x->mu);
	bulk_fetch_unref(x);
}

/* Return: NULL: no memory. */
static struct bulk_fetch *bulk_fetch_new(struct peers *ps, const struct bulk_want *want)
{
	struct bulk_fetch *x = calloc(1, sizeof(*x));

	if (!x)
		return NULL;
	x->channel = bulk_dial_get(ps->bulk, want->node, want->address);
	if (!x->channel) {
		free(x);
		return NULL;
	}
	x->magic = BULK_FETCH_MAGIC;
	x->refs = 1; /* until it has started */
	x->ps = ps;
	x->want = *want;
	text_copy(x->key, sizeof(x->key), want->key);
	x->want.node = x->channel->node;
	x->want.address = x->channel->at;
	x->want.key = x->key;
	x->watch.seen_us = clock_now_us();
	x->begun = (struct bulk_tag){ bulk_fetch_on_other, x };
	x->ended = (struct bulk_tag){ bulk_fetch_on_other, x };
	x->received = (struct bulk_tag){ bulk_fetch_on_received, x };
	x->details = grpc_empty_slice();
	grpc_metadata_array_init(&x->initial);
	grpc_metadata_array_init(&x->trailing);
	pthread_mutex_init(&x->mu, NULL);
	list_init(&x->link);
	list_append(&ps->bulk->fetches, &x->link);
	ps->bulk->n_fetches++;
	peers_hold(ps);
	return x;
}

static int bulk_fetch_refuse(const struct peers *ps, const struct bulk_want *w, struct fault *f)
{
	if (ps->closing) /* a callback of one that has ended may begin another one */
		return fault_set(f, FAULT_UNAVAILABLE, "peer", "this daemon ends");
	if (peers_check_connect(ps, w->node, w->address, f))
		return (int)f->code;
	if (!bulk_hands_key_is_good(w->key))
		return fault_set(f, FAULT_INVALID, "key",
				 "'%.100s' is not a key of a fetch: use 1 to %u bytes of printable "
				 "ASCII",
				 w->key, BULK_KEY_BYTES);
	if (!w->bytes || w->bytes > INT64_MAX)
		return fault_set(f, FAULT_INVALID, "bytes",
				 "%llu bytes are none, or more than a file can have",
				 (unsigned long long)w->bytes);
	if (ps->bulk->n_fetches >= BULK_MAX_FETCHES)
		return fault_set(f, FAULT_EXHAUSTED, "peer",
				 "there are %u fetches from other nodes, the limit: wait for one",
				 ps->bulk->n_fetches);
	return 0;
}

int bulk_fetch(struct peers *ps, const struct bulk_want *want, bulk_done_cb done, void *userdata,
	       struct bulk_fetch **ret, struct fault *f)
{
	struct bulk_fetch *x;

	CHECK(want->fd >= 0 && want->idle_us && done);
	if (bulk_fetch_refuse(ps, want, f))
		return (int)f->code;
	x = bulk_fetch_new(ps, want);
	if (!x)
		return fault_errno(f, -ENOMEM, "fetching from another node");
	x->done = done;
	x->userdata = userdata;
	x->request = bulk_fetch_request(x);
	x->call = grpc_channel_create_call(x->channel->channel, NULL, GRPC_PROPAGATE_DEFAULTS,
					   ps->bulk->cq, grpc_slice_from_static_string(BULK_METHOD),
					   NULL, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
	bulk_fetch_start(x);
	*ret = x;
	return 0;
}

/* ------------------------------------------------------------------------------- the loop */

static void bulk_fetch_end(struct bulk_fetch *x, enum fault_code code, const char *why)
{
	fault_set(&x->why, code, "peer", "%s", why);
	grpc_call_cancel(x->call, NULL);
}

void bulk_cancel(struct bulk_fetch *x)
{
	MAGIC_CHECK(x, BULK_FETCH_MAGIC);
	bulk_fetch_end(x, FAULT_CANCELLED, "it is not wanted any more");
}

uint64_t bulk_bytes(const struct bulk_fetch *x)
{
	return atomic_load(&x->bytes);
}

void bulk_fetch_tick(struct bulk *b, uint64_t now_us, uint64_t blocked_us)
{
	struct bulk_fetch *x, *tmp;

	list_for_each (x, tmp, &b->fetches, link) {
		char why[128];

		if (x->why.code || bulk_hands_silent_us(&x->watch, atomic_load(&x->chunks), now_us,
							blocked_us) < x->want.idle_us)
			continue;
		snprintf(why, sizeof(why), "it has sent nothing for %.2f s, behind %llu bytes",
			 (double)x->want.idle_us / 1e6, (unsigned long long)bulk_bytes(x));
		bulk_fetch_end(x, FAULT_DEADLINE, why);
	}
}

void bulk_fetch_close(struct bulk *b)
{
	struct bulk_fetch *x, *tmp;

	list_for_each (x, tmp, &b->fetches, link)
		bulk_fetch_end(x, FAULT_UNAVAILABLE, "this daemon ends");
}
