#include "rpc/register_reply.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "unitio/registered.h"

/* A field: its key, and a varint. All numbers are below 16. */
#define FIELD_BYTES  11u
#define LENGTH_BYTES 10u
#define UNIT_FIELDS  7u
/* Key, length and fields of an entry of a list. */
#define TENSOR_BYTES (2 + 5 * FIELD_BYTES)
#define BUFFER_BYTES (2 + 2 * FIELD_BYTES)

static uint8_t *register_reply_put_varint(uint8_t *at, uint64_t v)
{
	for (; v > 127; v >>= 7)
		*at++ = (uint8_t)(v | 128);
	*at++ = (uint8_t)v;
	return at;
}

static uint8_t *register_reply_put(uint8_t *at, unsigned field, uint64_t v)
{
	if (!v)
		return at;
	*at++ = (uint8_t)(field << 3);
	return register_reply_put_varint(at, v);
}

/* The key of a message; its length, of one byte, is filled in by end_short. */
static uint8_t *register_reply_begin_short(uint8_t *at, unsigned field)
{
	*at = (uint8_t)(field << 3 | 2);
	return at + 2;
}

static uint8_t *register_reply_end_short(uint8_t *begin, uint8_t *at)
{
	CHECK(at - begin < 128);
	begin[-1] = (uint8_t)(at - begin);
	return at;
}

static uint8_t *register_reply_put_tensor(uint8_t *at, const Shardd__V1__TensorPlace *p)
{
	uint8_t *begin = at = register_reply_begin_short(at, 7);

	at = register_reply_put(at, 1, p->unit);
	at = register_reply_put(at, 2, p->offset);
	at = register_reply_put(at, 3, p->elements);
	at = register_reply_put(at, 4, p->shard_offset);
	at = register_reply_put(at, 5, p->shard_elements);
	return register_reply_end_short(begin, at);
}

static uint8_t *register_reply_put_buffer(uint8_t *at, const Shardd__V1__BufferPlace *p)
{
	uint8_t *begin = at = register_reply_begin_short(at, 9);

	at = register_reply_put(at, 1, p->offset);
	at = register_reply_put(at, 2, p->bytes);
	return register_reply_end_short(begin, at);
}

/* In the order of the field numbers, as usual. */
static uint8_t *register_reply_put_unit(uint8_t *at, const struct job *job, const struct unit *u,
					uint32_t rank)
{
	Shardd__V1__RegisteredUnit m;
	Shardd__V1__TensorPlace t;
	Shardd__V1__BufferPlace b[2];

	registered_unit(u, &m);
	at = register_reply_put(at, 1, m.unit);
	at = register_reply_put(at, 2, m.elements);
	at = register_reply_put(at, 3, m.shard_elements);
	at = register_reply_put(at, 4, m.initialised);
	at = register_reply_put(at, 5, m.optimizer_steps);
	at = register_reply_put(at, 6, m.gradient_elements);
	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		registered_tensor(job, u, i, rank, &t);
		at = register_reply_put_tensor(at, &t);
	}
	at = register_reply_put(at, 8, m.packed_elements);
	for (size_t i = 0; i < u->rec->n_buffers; i++) {
		registered_buffer(u, i, i ? &b[(i - 1) % 2] : NULL, &b[i % 2]);
		at = register_reply_put_buffer(at, &b[i % 2]);
	}
	return at;
}

static int register_reply_make_room(struct register_reply *r, size_t bytes)
{
	size_t room = r->room ? r->room : 4096;
	uint8_t *grown;

	while (room - r->n < bytes)
		room *= 2;
	if (room == r->room)
		return 0;
	grown = realloc(r->bytes, room);
	if (!grown)
		return -ENOMEM;
	r->bytes = grown;
	r->room = room;
	return 0;
}

int register_reply_add(struct register_reply *r, const struct job *job, const struct unit *u,
		       uint32_t rank)
{
	const state_unit *rec = u->rec;
	uint8_t *at, *body, length[LENGTH_BYTES];
	size_t n, k;

	if (register_reply_make_room(r, 1 + LENGTH_BYTES + UNIT_FIELDS * FIELD_BYTES +
						rec->n_tensors * TENSOR_BYTES +
						rec->n_buffers * BUFFER_BYTES) < 0)
		return -ENOMEM;
	at = r->bytes + r->n;
	*at++ = 1 << 3 | 2;
	/* its length is known when it is complete: then it is moved to its place */
	body = at + LENGTH_BYTES;
	n = (size_t)(register_reply_put_unit(body, job, u, rank) - body);
	k = (size_t)(register_reply_put_varint(length, n) - length);
	memcpy(at, length, k);
	memmove(at + k, body, n);
	r->n += 1 + k + n;
	return 0;
}

int register_reply_end(struct register_reply *r, uint64_t charged)
{
	if (register_reply_make_room(r, FIELD_BYTES) < 0)
		return -ENOMEM;
	r->n = (size_t)(register_reply_put(r->bytes + r->n, 2, charged) - r->bytes);
	return 0;
}

void register_reply_deinit(struct register_reply *r)
{
	free(r->bytes);
	*r = REGISTER_REPLY_NULL;
}
