#include "core/buckets.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"

/* The bucket of a key that takes tensors. */
struct open_bucket {
	uint32_t key;
	bool is_open;
	uint32_t bucket;
	uint64_t bytes;
	unsigned cursor; /* its limit */
};

struct assignment {
	struct open_bucket *open; /* by first tensor of the key; owned */
	uint32_t n_open;
	uint32_t *of;     /* by tensor: its bucket, numbered as they were opened; owned */
	uint32_t *closed; /* by bucket: how many were closed before it; owned */
	uint32_t n_opened;
	uint32_t n_closed;
};

static void buckets_assignment_deinit(struct assignment *a)
{
	free(STEAL_PTR(a->open));
	free(STEAL_PTR(a->of));
	free(STEAL_PTR(a->closed));
}

static int buckets_assignment_init(struct assignment *a, uint32_t n)
{
	size_t room = n ? n : 1;

	a->open = calloc(room, sizeof(*a->open));
	a->of = calloc(room, sizeof(*a->of));
	a->closed = calloc(room, sizeof(*a->closed));
	return a->open && a->of && a->closed ? 0 : -ENOMEM;
}

static struct open_bucket *buckets_open_of(struct assignment *a, uint32_t key)
{
	struct open_bucket *o;

	for (uint32_t i = 0; i < a->n_open; i++)
		if (a->open[i].key == key)
			return &a->open[i];
	o = &a->open[a->n_open++];
	*o = (struct open_bucket){ .key = key };
	return o;
}

static void buckets_add(struct assignment *a, const struct bucket_tensor *t, uint32_t index,
			const uint64_t *limits, unsigned n_limits)
{
	struct open_bucket *o;

	if (t->sparse) {
		a->of[index] = a->n_opened++;
		a->closed[a->of[index]] = a->n_closed++;
		return;
	}
	o = buckets_open_of(a, t->key);
	if (!o->is_open) {
		o->bucket = a->n_opened++;
		o->bytes = 0;
		o->is_open = true;
	}
	a->of[index] = o->bucket;
	o->bytes += t->bytes;
	if (!n_limits || o->bytes < limits[o->cursor])
		return;
	a->closed[o->bucket] = a->n_closed++;
	o->is_open = false;
	if (o->cursor + 1 < n_limits)
		o->cursor++;
}

/* The position of bucket @b in the result: without a map the order of opening, which is that of the
 * smallest index. */
static uint32_t buckets_place_of(const struct assignment *a, uint32_t b, const uint32_t *map)
{
	return map ? a->closed[b] : b;
}

static int buckets_write_out(const struct assignment *a, uint32_t n, const uint32_t *map,
			     uint32_t *ret_tensors, uint32_t *ret_sizes)
{
	_cleanup_(freep) uint32_t *next = calloc((size_t)a->n_opened + 1, sizeof(*next));

	if (!next)
		return -ENOMEM;
	memset(ret_sizes, 0, a->n_opened * sizeof(*ret_sizes));
	for (uint32_t i = 0; i < n; i++)
		ret_sizes[buckets_place_of(a, a->of[i], map)]++;
	for (uint32_t b = 0; b < a->n_opened; b++)
		next[b + 1] = next[b] + ret_sizes[b];
	for (uint32_t i = 0; i < n; i++)
		ret_tensors[next[buckets_place_of(a, a->of[i], map)]++] = map ? map[i] : i;
	return 0;
}

int64_t buckets_assign(const struct bucket_tensor *tensors, uint32_t n, const uint64_t *limits,
		       unsigned n_limits, const uint32_t *map, uint32_t *ret_tensors,
		       uint32_t *ret_sizes)
{
	_cleanup_(buckets_assignment_deinit) struct assignment a = { 0 };
	int r = buckets_assignment_init(&a, n);

	if (r < 0)
		return r;
	for (uint32_t i = 0; i < n; i++)
		buckets_add(&a, &tensors[i], i, limits, n_limits);
	for (uint32_t k = 0; k < a.n_open; k++)
		if (a.open[k].is_open)
			a.closed[a.open[k].bucket] = a.n_closed++;
	CHECK(a.n_closed == a.n_opened);
	r = buckets_write_out(&a, n, map, ret_tensors, ret_sizes);
	return r < 0 ? r : (int64_t)a.n_opened;
}

int buckets_reverse(uint32_t *tensors, uint32_t *sizes, uint32_t n_buckets)
{
	uint32_t total = 0, at = 0;
	uint32_t *copy;

	for (uint32_t b = 0; b < n_buckets; b++)
		total += sizes[b];
	copy = malloc((total + (size_t)1) * sizeof(*copy));
	if (!copy)
		return -ENOMEM;
	for (uint32_t b = n_buckets; b--; at += sizes[b])
		memcpy(copy + at, tensors + total - at - sizes[b], sizes[b] * sizeof(*copy));
	memcpy(tensors, copy, total * sizeof(*copy));
	free(copy);
	for (uint32_t b = 0; b < n_buckets / 2; b++) {
		uint32_t other = sizes[b];

		sizes[b] = sizes[n_buckets - 1 - b];
		sizes[n_buckets - 1 - b] = other;
	}
	return 0;
}
