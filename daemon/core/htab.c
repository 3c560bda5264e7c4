#include "core/htab.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/fnv.h"

struct htab_entry {
	char *key; /* owned; NULL: free */
	void *value;
};

/* FNV-1a, 64 bit. */
static uint64_t htab_hash(const char *key)
{
	return fnv_add_text(FNV_BEGIN, key);
}

/* The slot that holds @key, or the free slot for it. */
static size_t htab_slot_of(const struct htab *t, const char *key)
{
	size_t i = htab_hash(key) & (t->capacity - 1);

	while (t->entries[i].key && strcmp(t->entries[i].key, key) != 0)
		i = (i + 1) & (t->capacity - 1);
	return i;
}

static int htab_grow(struct htab *t)
{
	struct htab bigger = { .capacity = t->capacity ? t->capacity * 2 : 16, .count = t->count };

	bigger.entries = calloc(bigger.capacity, sizeof(*bigger.entries));
	if (!bigger.entries)
		return -ENOMEM;
	for (size_t i = 0; i < t->capacity; i++)
		if (t->entries[i].key)
			bigger.entries[htab_slot_of(&bigger, t->entries[i].key)] = t->entries[i];
	free(t->entries);
	*t = bigger;
	return 0;
}

int htab_add(struct htab *t, const char *key, void *value)
{
	size_t i;
	char *copy;

	if (t->count * 4 >= t->capacity * 3 && htab_grow(t) < 0)
		return -ENOMEM;
	i = htab_slot_of(t, key);
	if (t->entries[i].key)
		return -EEXIST;
	copy = strdup(key);
	if (!copy)
		return -ENOMEM;
	t->entries[i] = (struct htab_entry){ copy, value };
	t->count++;
	return 0;
}

void *htab_find(const struct htab *t, const char *key)
{
	return t->capacity ? t->entries[htab_slot_of(t, key)].value : NULL;
}

/* Close the gap at @hole: move up entries that would no longer be found. */
static void htab_close_gap(struct htab *t, size_t hole)
{
	size_t mask = t->capacity - 1;

	for (size_t i = (hole + 1) & mask; t->entries[i].key; i = (i + 1) & mask) {
		size_t home = htab_hash(t->entries[i].key) & mask;

		if (((i - home) & mask) >= ((i - hole) & mask)) {
			t->entries[hole] = t->entries[i];
			t->entries[i] = (struct htab_entry){ 0 };
			hole = i;
		}
	}
}

void *htab_remove(struct htab *t, const char *key)
{
	size_t i;
	void *value;

	if (!t->capacity)
		return NULL;
	i = htab_slot_of(t, key);
	if (!t->entries[i].key)
		return NULL;
	value = t->entries[i].value;
	free(t->entries[i].key);
	t->entries[i] = (struct htab_entry){ 0 };
	t->count--;
	htab_close_gap(t, i);
	return value;
}

void htab_deinit(struct htab *t)
{
	for (size_t i = 0; i < t->capacity; i++)
		free(t->entries[i].key);
	free(t->entries);
	*t = HTAB_NULL;
}
