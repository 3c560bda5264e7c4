/*
 * The options structs of shardd.h, which begin with their size: an older caller's is shorter, a newer
 * caller's longer. Any thread.
 */
#ifndef SHARDD_CLIENT_OPTIONS_H
#define SHARDD_CLIENT_OPTIONS_H

#include <stddef.h>

#include "shardd/shardd.h"

/* A size above this is no size of a struct. */
#define OPTIONS_MAX_BYTES 4096u

/* What a caller's struct @name of @size bytes has behind the @bytes that this library knows must be
 * 0. Return: 0 or -SHARDD_INVALID_ARGUMENT. */
int options_check_tail(const void *what, size_t size, size_t bytes, const char *name,
		       struct shardd_error *err);

/* As options_read, where the size is not the library's own. */
const void *options_read_other(const void *options, void *room, size_t bytes, size_t first,
			       struct shardd_error *err);

/* Read a caller's options. @room: for a copy, @bytes, the size in this library. @first: the size in
 * the first version. Return: the options, all @bytes of them, in @room or the caller's own; NULL
 * with @err: they are NULL, shorter than the first version's, or ask for what this library does
 * not know. */
static inline const void *options_read(const void *options, void *room, size_t bytes, size_t first,
				       struct shardd_error *err)
{
	if (options && *(const size_t *)options == bytes)
		return options;
	return options_read_other(options, room, bytes, first, err);
}

/* The same for structs that have not grown yet. */
#define OPTIONS_READ(options, room, err) \
	options_read((options), (room), sizeof(*(room)), sizeof(*(room)), (err))

#endif
