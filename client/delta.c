/* Deltas of generations: what is checked, and what becomes of a copy of the base. */
#include <stdlib.h>
#include <string.h>

#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "crc32c.h"
#include "delta_abi.h"
#include "live_impl.h"
#include "map.h"

/* A delta whose head was checked. */
struct delta {
	const struct delta_head *head;
	const struct delta_block *blocks;
	const char *payload;
	uint64_t payload_bytes;
	uint64_t n_blocks;
};

static int delta_is_bad(struct shardd_error *err, const char *why)
{
	return error_set(err, SHARDD_INVALID_ARGUMENT, "data", "this is no delta: %s", why);
}

static uint32_t delta_head_crc(const struct delta_head *h, uint64_t blocks)
{
	struct delta_head head = *h;

	head.crc = 0;
	return crc32c_add(crc32c_add(0, &head, sizeof(head)), h + 1,
			  blocks * sizeof(struct delta_block));
}

static int delta_read(const void *data, uint64_t bytes, struct delta *ret, struct shardd_error *err)
{
	const struct delta_head *h = data;
	uint64_t payload, blocks; /* read once: another process may write to them */

	if (!data || bytes < sizeof(*h) || h->magic != DELTA_MAGIC)
		return delta_is_bad(err, "it does not begin as one does");
	if (h->version != DELTA_VERSION)
		return error_set(err, SHARDD_UNIMPLEMENTED, "data",
				 "the delta has version %u; this library knows %u", h->version,
				 DELTA_VERSION);
	if ((uintptr_t)data % 8)
		return delta_is_bad(err, "it does not begin at a multiple of 8");
	if (h->bytes != bytes)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "bytes",
				 "the delta has %llu bytes, not %llu", (unsigned long long)h->bytes,
				 (unsigned long long)bytes);
	payload = h->payload;
	blocks = h->blocks;
	if (payload > bytes || payload < sizeof(*h) || payload % 8 ||
	    blocks > (payload - sizeof(*h)) / sizeof(struct delta_block))
		return delta_is_bad(err, "its blocks lie outside of it");
	if (delta_head_crc(h, blocks) != h->crc)
		return error_set(
			err, SHARDD_DATA_LOSS, NULL,
			"the head of the delta to generation %llu has another checksum than "
			"it had: read the whole generation",
			(unsigned long long)h->number);
	ret->head = h;
	ret->blocks = (const struct delta_block *)(h + 1);
	ret->payload = (const char *)data + payload;
	ret->payload_bytes = bytes - payload;
	ret->n_blocks = blocks;
	return 0;
}

/* The block as a copy: another process may write to the delta. */
static struct delta_block delta_block_at(const struct delta *d, uint64_t i)
{
	struct delta_block b;

	memcpy(&b, &d->blocks[i], sizeof(b));
	return b;
}

/* Does it lie in the payload? */
static bool delta_block_fits(const struct delta *d, const struct delta_block *b)
{
	return (b->size == 1 || b->size == 2 || b->size == 4) && b->n <= DELTA_BLOCK_ELEMENTS &&
	       b->changed <= b->n && b->at % 8 == 0 && b->at <= d->payload_bytes &&
	       delta_block_bytes(b) <= d->payload_bytes - b->at;
}

/* @b: block @i, as a copy. */
static int delta_check_block(const struct delta *d, uint64_t i, const struct delta_block *b,
			     struct shardd_error *err)
{
	if (!delta_block_fits(d, b))
		return delta_is_bad(err, "a block lies outside of it");
	if (crc32c_add(0, d->payload + b->at, delta_block_bytes(b)) != b->crc)
		return error_set(err, SHARDD_DATA_LOSS, NULL,
				 "block %llu of the delta to generation %llu has another checksum "
				 "than it had: read the whole generation",
				 (unsigned long long)i, (unsigned long long)d->head->number);
	return 0;
}

static uint32_t delta_position(const struct delta *d, const struct delta_block *b, uint32_t i)
{
	uint16_t position = (uint16_t)i;

	if (!b->dense)
		memcpy(&position, d->payload + b->at + 2ull * i, sizeof(position));
	return position;
}

static uint32_t delta_count(const struct delta_block *b)
{
	return b->dense ? b->n : b->changed;
}

static const char *delta_values_of(const struct delta *d, const struct delta_block *b)
{
	return d->payload + b->at + (b->dense ? 0 : delta_padded(2ull * b->changed));
}

/* -------------------------------------------------------------------- further names */

/* Tensors that are one under several names: a delta has blocks of the first of them only, the owner. */
struct delta_names {
	uint32_t *owner; /* owned; by tensor: its owner; NULL: each is its own */
	uint32_t *next;  /* owned; by tensor: the next one of its owner; 0: none */
};

static void delta_names_deinit(struct delta_names *a)
{
	free(a->owner);
	free(a->next);
}

static int delta_compare_data(const void *a, const void *b, void *userdata)
{
	const struct shardd_published_tensor *tensors = userdata;
	const uint32_t *x = a, *y = b;
	uintptr_t p = (uintptr_t)tensors[*x].data, q = (uintptr_t)tensors[*y].data;

	return p != q ? (p > q) - (p < q) : (*x > *y) - (*x < *y);
}

static bool delta_has_data(const struct shardd_published_tensor *t)
{
	return t->data && t->bytes;
}

static bool delta_is_same(const struct shardd_published_tensor *a,
			  const struct shardd_published_tensor *b)
{
	return a->data == b->data && a->bytes == b->bytes && a->dtype == b->dtype;
}

/* As the tensors of a generation without further names are: no two can be the same. */
static bool delta_ascends(const struct shardd_published_tensor *tensors, size_t n)
{
	uintptr_t last = 0;

	for (size_t i = 0; i < n; i++) {
		if (!delta_has_data(&tensors[i]))
			continue;
		if ((uintptr_t)tensors[i].data <= last)
			return false;
		last = (uintptr_t)tensors[i].data;
	}
	return true;
}

/* Tensors with the same data are one. @ret: to be deinitialised, also after an error. */
static int delta_find_names(const struct shardd_published_tensor *tensors, size_t n,
			    struct delta_names *ret, struct shardd_error *err)
{
	_cleanup_(freep) uint32_t *order = NULL;
	size_t found = 0;

	*ret = (struct delta_names){ 0 };
	if (delta_ascends(tensors, n))
		return 0;
	order = calloc(n, sizeof(*order));
	ret->owner = calloc(n, sizeof(*ret->owner));
	ret->next = calloc(n, sizeof(*ret->next));
	if (!order || !ret->owner || !ret->next)
		return error_memory(err);
	for (size_t i = 0; i < n; i++) {
		ret->owner[i] = (uint32_t)i;
		if (delta_has_data(&tensors[i]))
			order[found++] = (uint32_t)i;
	}
	qsort_r(order, found, sizeof(*order), delta_compare_data, (void *)(uintptr_t)tensors);
	for (size_t i = 1; i < found; i++)
		if (delta_is_same(&tensors[order[i - 1]], &tensors[order[i]])) {
			ret->owner[order[i]] = ret->owner[order[i - 1]];
			ret->next[order[i - 1]] = order[i];
		}
	return 0;
}

static uint32_t delta_owner(const struct delta_names *a, uint32_t tensor)
{
	return a->owner ? a->owner[tensor] : tensor;
}

/* The next name of the same tensor; 0: there is none. */
static uint32_t delta_next(const struct delta_names *a, uint32_t tensor)
{
	return a->next ? a->next[tensor] : 0;
}

/* Of a tensor of which the delta says nothing. Return: INVALID_ARGUMENT. */
static int delta_no_blocks(const struct shardd_published_tensor *t, struct shardd_error *err)
{
	return error_set(err, SHARDD_INVALID_ARGUMENT, "tensors",
			 "the delta has nothing of tensor '%.150s': if that is a further name of "
			 "another tensor, both must have the same data",
			 t->name);
}

/* ----------------------------------------------------------------------------- apply */

static size_t delta_size(enum shardd_dtype t)
{
	return t == SHARDD_FP32 ? 4 : t == SHARDD_BF16 || t == SHARDD_FP16 ? 2 : 1;
}

/* Does the block belong to these tensors? */
static int delta_check_tensor(const struct delta_block *b,
			      const struct shardd_published_tensor *tensors, size_t n,
			      struct shardd_error *err)
{
	const struct shardd_published_tensor *t = b->tensor < n ? &tensors[b->tensor] : NULL;

	if (t && delta_size(t->dtype) == b->size && b->first <= t->bytes / b->size &&
	    b->n <= t->bytes / b->size - b->first)
		return 0;
	return error_set(
		err, SHARDD_INVALID_ARGUMENT, "tensors",
		"the delta is of other tensors: it has elements %llu to %llu of tensor %u%s%s",
		(unsigned long long)b->first, (unsigned long long)(b->first + b->n), b->tensor,
		t ? ", which is " : "", t ? t->name : "");
}

/* Its positions are inside the block, and ascend. */
static int delta_check_positions(const struct delta *d, const struct delta_block *b,
				 struct shardd_error *err)
{
	uint32_t next = 0;

	for (uint32_t i = 0; !b->dense && i < b->changed; i++) {
		uint32_t position = delta_position(d, b, i);

		if (position >= b->n)
			return delta_is_bad(err, "a position lies outside of its block");
		if (position < next)
			return delta_is_bad(err, "the positions of a block do not ascend");
		next = position + 1;
	}
	return 0;
}

/* Where the next block may begin. */
struct delta_order {
	uint32_t tensor;
	uint64_t first;
};

/* Blocks come in the order of tensors, and do not overlap: so what they change together is no more than all
 * tensors have, however many there are. */
static int delta_check_order(struct delta_order *o, const struct delta_block *b,
			     struct shardd_error *err)
{
	if (b->tensor < o->tensor || (b->tensor == o->tensor && b->first < o->first))
		return delta_is_bad(err, "its blocks are not in order");
	*o = (struct delta_order){ b->tensor, b->first + b->n };
	return 0;
}

/* All that is checked of block @i, of which @b is a copy. */
static int delta_check(const struct delta *d, uint64_t i,
		       const struct shardd_published_tensor *tensors, size_t n,
		       struct delta_order *order, const struct delta_block *b,
		       struct shardd_error *err)
{
	int e = delta_check_block(d, i, b, err);

	if (e == 0)
		e = delta_check_tensor(b, tensors, n, err);
	if (e == 0)
		e = delta_check_order(order, b, err);
	return e == 0 ? delta_check_positions(d, b, err) : e;
}

static int delta_check_all(const struct delta *d, const struct shardd_published_tensor *tensors,
			   size_t n, struct shardd_error *err)
{
	struct delta_order order = { 0 };
	int e = 0;

	for (uint64_t i = 0; e == 0 && i < d->n_blocks; i++) {
		struct delta_block b = delta_block_at(d, i);

		e = delta_check(d, i, tensors, n, &order, &b, err);
	}
	return e;
}

static int delta_changes(struct shardd_error *err)
{
	return error_set(
		err, SHARDD_DATA_LOSS, NULL,
		"the delta changes while it is applied: its generation is not held any more; "
		"read the whole generation");
}

/* @to: the copy of the tensor. What was checked may have changed since: nothing is written outside. */
static int delta_apply_block(const struct delta *d, const struct delta_block *b, char *to,
			     struct shardd_error *err)
{
	const char *values = delta_values_of(d, b);

	to += b->first * b->size;
	if (b->dense) {
		memcpy(to, values, (size_t)b->n * b->size);
		return 0;
	}
	for (uint32_t i = 0; i < b->changed; i++) {
		uint32_t position = delta_position(d, b, i);

		if (position >= b->n)
			return delta_changes(err);
		if (b->size == 2)
			memcpy(to + position * 2, values + i * 2, 2);
		else
			memcpy(to + (size_t)position * b->size, values + (size_t)i * b->size,
			       b->size);
	}
	return 0;
}

/* The copies that a delta is applied to, by tensor. */
struct delta_copies {
	const struct shardd_published_tensor *tensors;
	void *const *all;
	size_t n;
	struct delta_names names;
};

/* Do the copies of further names have what the tensor's own copy has? */
static int delta_check_names(const struct delta_copies *c, const struct delta_block *b,
			     struct shardd_error *err)
{
	const char *own = c->all[b->tensor];
	const uint64_t at = b->first * b->size;

	for (uint32_t k = delta_next(&c->names, b->tensor); k; k = delta_next(&c->names, k)) {
		const char *other = c->all[k];

		if (other && other != own &&
		    memcmp(other + at, own + at, (size_t)b->n * b->size) != 0)
			return error_set(err, SHARDD_DATA_LOSS, "copies",
					 "the copies of '%.120s' and '%.120s' differ, which are "
					 "one tensor: read the whole generation",
					 c->tensors[b->tensor].name, c->tensors[k].name);
	}
	return 0;
}

/* Are the copies what the delta starts from? */
static int delta_check_base(const struct delta *d, const struct delta_copies *c,
			    struct shardd_error *err)
{
	uint32_t sum = 0;

	for (uint64_t i = 0; i < d->n_blocks; i++) {
		struct delta_block b = delta_block_at(d, i);
		const char *copy;
		uint8_t le[4];
		uint32_t crc;

		if (!delta_block_fits(d, &b) || delta_check_tensor(&b, c->tensors, c->n, NULL) < 0)
			return delta_changes(err);
		copy = c->all[b.tensor];
		if (!copy)
			return error_set(
				err, SHARDD_INVALID_ARGUMENT, "copies",
				"there is no copy of tensor %u, '%.150s': without it the base "
				"cannot be checked",
				b.tensor, c->tensors[b.tensor].name);
		if (delta_check_names(c, &b, err) < 0)
			return -SHARDD_DATA_LOSS;
		crc = crc32c_add(0, copy + b.first * b.size, (size_t)b.n * b.size);
		for (unsigned k = 0; k < sizeof(le); k++)
			le[k] = (uint8_t)(crc >> 8 * k);
		sum = crc32c_add(sum, le, sizeof(le));
	}
	return sum == d->head->base_checksum
		       ? 0
		       : error_set(
				 err, SHARDD_DATA_LOSS, "copies",
				 "the copies have checksum %08x, and generation %llu, the delta's "
				 "base, has %08x: they are another generation, or were changed; "
				 "read all of generation %llu",
				 sum, (unsigned long long)d->head->base_number,
				 d->head->base_checksum, (unsigned long long)d->head->number);
}

/* A copy that would get nothing would stay what it is, without a word. */
static int delta_check_all_have_blocks(const struct delta *d, const struct delta_copies *c,
				       struct shardd_error *err)
{
	_cleanup_(freep) bool *has = calloc(c->n + 1, sizeof(*has));

	if (!has)
		return error_memory(err);
	for (uint64_t i = 0; i < d->n_blocks; i++) {
		uint32_t tensor = delta_block_at(d, i).tensor;

		if (tensor < c->n)
			has[tensor] = true;
	}
	for (size_t i = 0; i < c->n; i++)
		if (!has[delta_owner(&c->names, (uint32_t)i)] && c->all[i] && c->tensors[i].bytes)
			return delta_no_blocks(&c->tensors[i], err);
	return 0;
}

static int delta_check_copies(const struct delta *d, const struct delta_copies *c, bool base,
			      struct shardd_error *err)
{
	int e = delta_check_all(d, c->tensors, c->n, err);

	if (e == 0)
		e = delta_check_all_have_blocks(d, c, err);
	return e == 0 && base ? delta_check_base(d, c, err) : e;
}

/* To the copy of the tensor, and to those of its further names. */
static int delta_apply_to_all(const struct delta *d, const struct delta_block *b,
			      const struct delta_copies *c, struct shardd_error *err)
{
	char *own = c->all[b->tensor];
	int e = own ? delta_apply_block(d, b, own, err) : 0;

	for (uint32_t k = delta_next(&c->names, b->tensor); e == 0 && k;
	     k = delta_next(&c->names, k))
		if (c->all[k] && c->all[k] != own)
			e = delta_apply_block(d, b, c->all[k], err);
	return e;
}

static int delta_apply(const struct delta *d, const struct delta_copies *c,
		       struct shardd_error *err)
{
	int e = 0;

	for (uint64_t i = 0; e == 0 && i < d->n_blocks; i++) {
		struct delta_block b = delta_block_at(d, i);

		if (!delta_block_fits(d, &b) || delta_check_tensor(&b, c->tensors, c->n, NULL) < 0)
			return delta_changes(err);
		e = delta_apply_to_all(d, &b, c, err);
	}
	return e;
}

int shardd_delta_apply(const void *data, uint64_t bytes,
		       const struct shardd_published_tensor *tensors, size_t n, void *const *copies,
		       uint32_t flags, struct shardd_error *err)
{
	struct delta_copies c = { .tensors = tensors, .all = copies, .n = n };
	struct shardd_error scratch;
	struct delta d;
	int e;

	err = err ? err : &scratch;
	if (!tensors || !copies)
		return error_set(err, SHARDD_INVALID_ARGUMENT, tensors ? "copies" : "tensors",
				 "the argument is NULL");
	if (flags & ~(uint32_t)SHARDD_DELTA_CHECK)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "flags",
				 "flags has 0x%x, which this library does not know",
				 flags & ~(uint32_t)SHARDD_DELTA_CHECK);
	e = delta_read(data, bytes, &d, err);
	if (e == 0)
		e = delta_find_names(tensors, n, &c.names, err);
	if (e == 0)
		e = delta_check_copies(&d, &c, flags & SHARDD_DELTA_CHECK, err);
	if (e == 0)
		e = delta_apply(&d, &c, err);
	delta_names_deinit(&c.names);
	return e;
}

/* ---------------------------------------------------------------------------- values */

/* Both arrays have room for it. What was checked may have changed since: no index is outside of the block. */
static int delta_list_block(const struct delta *d, const struct delta_block *b, uint64_t *indices,
			    char *values, struct shardd_error *err)
{
	for (uint32_t i = 0; i < delta_count(b); i++) {
		uint32_t position = delta_position(d, b, i);

		if (position >= b->n)
			return delta_changes(err);
		indices[i] = b->first + position;
	}
	memcpy(values, delta_values_of(d, b), (size_t)delta_count(b) * b->size);
	return 0;
}

static int delta_no_room(uint32_t tensor, uint64_t room, struct shardd_error *err)
{
	return error_set(err, SHARDD_INVALID_ARGUMENT, "room",
			 "tensor %u has more than %llu changed values", tensor,
			 (unsigned long long)room);
}

/* The changed values of @tensor, which has blocks of its own unless it is empty. */
static int delta_list(const struct delta *d, const struct shardd_published_tensor *tensors,
		      size_t n, uint32_t tensor, uint64_t *indices, char *values, uint64_t room,
		      uint64_t *ret_n, struct shardd_error *err)
{
	struct delta_order order = { 0 };
	uint64_t found = 0, blocks = 0;
	int e = 0;

	for (uint64_t i = 0; e == 0 && i < d->n_blocks; i++) {
		struct delta_block b = delta_block_at(d, i);

		if (b.tensor != tensor)
			continue;
		blocks++;
		e = delta_check(d, i, tensors, n, &order, &b, err);
		if (e == 0 && room && delta_count(&b) > room - found)
			e = delta_no_room(tensor, room, err);
		if (e == 0 && room)
			e = delta_list_block(d, &b, indices + found, values + found * b.size, err);
		found += delta_count(&b);
	}
	if (e == 0 && !blocks && tensor < n && tensors[tensor].bytes)
		e = delta_no_blocks(&tensors[tensor], err);
	if (e == 0)
		*ret_n = found;
	return e;
}

int shardd_delta_values(const void *data, uint64_t bytes,
			const struct shardd_published_tensor *tensors, size_t n, uint32_t tensor,
			uint64_t *indices, void *values, uint64_t room, uint64_t *ret_n,
			struct shardd_error *err)
{
	struct delta_names names = { 0 };
	struct shardd_error scratch;
	struct delta d;
	int e;

	err = err ? err : &scratch;
	if (!tensors || !ret_n || (room && (!indices || !values)))
		return error_set(err, SHARDD_INVALID_ARGUMENT,
				 !tensors ? "tensors"
				 : !ret_n ? "ret_n"
					  : "values",
				 "the argument is NULL");
	e = delta_read(data, bytes, &d, err);
	if (e == 0)
		e = delta_find_names(tensors, n, &names, err);
	if (e == 0)
		e = delta_list(&d, tensors, n, tensor < n ? delta_owner(&names, tensor) : tensor,
			       indices, values, room, ret_n, err);
	delta_names_deinit(&names);
	return e;
}

/* --------------------------------------------------------------------------- readers */

void live_drop_delta(struct shardd_live *l)
{
	if (l->delta)
		map_unpin(&l->c->map, l->delta);
	l->delta = NULL;
}

static int delta_none(const struct shardd_live *l, uint64_t base, const struct board_generation *g,
		      struct shardd_error *err)
{
	unsigned long long number = l->number;

	if (!g->delta)
		return error_set(
			err, SHARDD_NOT_FOUND, NULL,
			"generation %llu of publication '%s' has no delta: none is declared "
			"(delta_percent is 0), it is a full one (full_every), more has changed "
			"than delta_percent allows (shardctl publications shows how much), or "
			"there was no memory for it; read all of it",
			number, l->name);
	if (!base)
		return error_set(
			err, SHARDD_NOT_FOUND, "base",
			"this reader had no generation before %llu, from which a delta could "
			"start: read all of it",
			number);
	return error_set(
		err, SHARDD_NOT_FOUND, "base",
		"the delta of generation %llu of publication '%s' is from generation %llu, not "
		"from %llu: read all of it",
		number, l->name, (unsigned long long)g->delta_base, (unsigned long long)base);
}

int live_delta(struct shardd_live *l, uint64_t base, struct shardd_delta *ret,
	       struct shardd_error *err)
{
	const struct board_generation *g = &l->board->generations[l->word % BOARD_BUFFERS];
	struct map_place place = { .slab = g->delta };
	const struct delta_head *h;
	struct delta d;
	void *at = NULL;
	int e;

	if (!g->delta || g->delta_base != base)
		return delta_none(l, base, g, err);
	e = map_address(&l->c->map, &place, -1, &at, err);
	if (e < 0)
		return e;
	h = at;
	place.bytes = h->bytes;
	e = map_address(&l->c->map, &place, -1, &at, err);
	if (e == 0)
		e = delta_read(at, h->bytes, &d, err);
	if (e == 0 && !map_pin(&l->c->map, at))
		e = error_set(err, SHARDD_ABORTED, NULL,
			      "the daemon has ended while a delta was mapped: acquire again");
	if (e < 0)
		return e;
	live_drop_delta(l);
	l->delta = at;
	*ret = (struct shardd_delta){ .base = h->base_number,
				      .number = h->number,
				      .changed = h->changed,
				      .elements = h->elements,
				      .bytes = h->bytes,
				      .data = at };
	return 0;
}
