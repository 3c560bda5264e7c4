/*
 * A hash table from names to pointers. Keys are copied; values are borrowed.
 * Insertion order is not kept. Not thread-safe.
 */
#ifndef SHARDD_CORE_HTAB_H
#define SHARDD_CORE_HTAB_H

#include <stddef.h>
#include <stdint.h>

struct htab_entry;

struct htab {
	struct htab_entry *entries;
	size_t capacity; /* a power of two, or 0 */
	size_t count;
};

#define HTAB_NULL ((struct htab){ 0 })

/* Return: 0, -EEXIST if @key is there (nothing changed), -ENOMEM. */
int htab_add(struct htab *t, const char *key, void *value);

/* Return: the value, or NULL. */
void *htab_find(const struct htab *t, const char *key);

/* Return: the value that was there, or NULL. */
void *htab_remove(struct htab *t, const char *key);

/* Free keys and table; safe after HTAB_NULL and twice. */
void htab_deinit(struct htab *t);

#endif
