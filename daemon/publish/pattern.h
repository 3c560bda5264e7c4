/*
 * Patterns of tensors' names. A name has components with dots between them. {x} stands for one of them
 * or a part of one, {x...} for one or more; the same placeholder has the same value wherever it is. All
 * else stands for itself. A component has at most one placeholder, and a pattern at most one {x...}, so
 * that a match takes no longer than the square of the name. Pure functions, any thread.
 */
#ifndef SHARDD_PUBLISH_PATTERN_H
#define SHARDD_PUBLISH_PATTERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"

#define PATTERN_MAX_BYTES 512u
/* Placeholders of one pattern. */
#define PATTERN_MAX 8u

/* A placeholder and its value: pieces of a pattern and of a name, which must outlive it. */
struct pattern_value {
	const char *key, *value;
	size_t key_bytes, value_bytes;
};

struct pattern_values {
	struct pattern_value all[PATTERN_MAX];
	unsigned n;
	uint32_t steps; /* so far: pieces of patterns that were compared */
};

/* Is @pattern well formed? Otherwise @f says what is wrong with @field. Return: 0 or FAULT_INVALID. */
int pattern_check(const char *pattern, const char *field, struct fault *f);

/* Bytes in front of the first placeholder: every name that matches begins with them. */
size_t pattern_prefix(const char *pattern);

/* Does @pattern have the placeholder @key, of @bytes bytes? */
bool pattern_has(const char *pattern, const char *key, size_t bytes);

/* The first placeholder of @pattern that @of has not. Return: its key in @pattern, or NULL. */
const char *pattern_lacks(const char *pattern, const char *of, size_t *ret_bytes);

/* Does @name match, with what @values has already? Then the others are added to @values. */
bool pattern_match(const char *pattern, const char *name, struct pattern_values *values);

/* The name that @values make of @pattern; all its placeholders have one. Return: malloc'ed, the caller's;
 * NULL without memory. */
char *pattern_expand(const char *pattern, const struct pattern_values *values);

/* Return: the value of a placeholder, or NULL. */
const struct pattern_value *pattern_find(const struct pattern_values *values, const char *key,
					 size_t bytes);

#endif
