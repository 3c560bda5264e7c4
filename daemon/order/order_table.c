/* A table of items that begin with a key. Items lie side by side, and move when one is removed; open
 * addressing finds them. */
#include "order/order_impl.h"

#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/fnv.h"

bool order_key_equal(const struct order_key *a, const struct order_key *b)
{
	return a->number == b->number && a->group == b->group && a->kind == b->kind;
}

void *order_table_item(const struct order_table *t, uint32_t i)
{
	return (char *)t->items + (size_t)i * t->item_size;
}

static uint32_t order_table_home(const struct order_table *t, const struct order_key *key)
{
	uint64_t h = fnv_add(fnv_add(fnv_add(FNV_BEGIN, key->kind), key->group), key->number);

	return (uint32_t)(h ^ h >> 32) & (t->n_slots - 1);
}

/* The slot that has @key, or the empty one where it would be. */
static uint32_t order_table_slot(const struct order_table *t, const struct order_key *key)
{
	uint32_t s = order_table_home(t, key);

	while (t->slots[s] && !order_key_equal(order_table_item(t, t->slots[s] - 1), key))
		s = (s + 1) & (t->n_slots - 1);
	return s;
}

void *order_table_find(const struct order_table *t, const struct order_key *key)
{
	uint32_t s = t->n ? t->slots[order_table_slot(t, key)] : 0;

	return s ? order_table_item(t, s - 1) : NULL;
}

/* Room for twice as many; at most half of the slots are used. */
static bool order_table_grow(struct order_table *t)
{
	uint32_t cap = t->cap ? t->cap * 2 : 8;
	uint32_t *slots = calloc((size_t)cap * 2, sizeof(*slots));
	void *items = slots ? realloc(t->items, cap * t->item_size) : NULL;

	if (!items) {
		free(slots);
		return false;
	}
	free(t->slots);
	t->slots = slots;
	t->n_slots = cap * 2;
	t->items = items;
	t->cap = cap;
	for (uint32_t i = 0; i < t->n; i++)
		t->slots[order_table_slot(t, order_table_item(t, i))] = i + 1;
	return true;
}

void *order_table_add(struct order_table *t, const struct order_key *key)
{
	struct order_key *item;

	if (t->n == t->cap && !order_table_grow(t))
		return NULL;
	t->slots[order_table_slot(t, key)] = t->n + 1;
	item = order_table_item(t, t->n++);
	memset(item, 0, t->item_size);
	*item = *key;
	return item;
}

/* Close the gap at @s: what was put behind its place because of it moves up. */
static void order_table_close(struct order_table *t, uint32_t s)
{
	uint32_t mask = t->n_slots - 1;

	for (uint32_t next = (s + 1) & mask; t->slots[next]; next = (next + 1) & mask) {
		uint32_t home = order_table_home(t, order_table_item(t, t->slots[next] - 1));

		if (((next - home) & mask) >= ((next - s) & mask)) {
			t->slots[s] = t->slots[next];
			s = next;
		}
	}
	t->slots[s] = 0;
}

void order_table_remove(struct order_table *t, void *item)
{
	uint32_t i = (uint32_t)((size_t)((char *)item - (char *)t->items) / t->item_size);
	uint32_t last = t->n - 1;

	CHECK(i < t->n);
	order_table_close(t, order_table_slot(t, item));
	if (i != last) {
		t->slots[order_table_slot(t, order_table_item(t, last))] = i + 1;
		memcpy(item, order_table_item(t, last), t->item_size);
	}
	t->n--;
}

void order_table_deinit(struct order_table *t)
{
	free(t->items);
	free(t->slots);
	*t = (struct order_table){ .item_size = t->item_size };
}
