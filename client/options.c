#include "options.h"

#include <string.h>

#include "client_error.h"

int options_check_tail(const void *what, size_t size, size_t bytes, const char *name,
		       struct shardd_error *err)
{
	const unsigned char *from = what;

	for (size_t i = bytes; i < size; i++)
		if (from[i])
			return error_set(err, SHARDD_INVALID_ARGUMENT, name,
					 "%s has a field at byte %zu that is not 0 and that this "
					 "library does not know: update libshardd",
					 name, i);
	return 0;
}

const void *options_read_other(const void *options, void *room, size_t bytes, size_t first,
			       struct shardd_error *err)
{
	size_t size;

	if (!options) {
		error_set(err, SHARDD_INVALID_ARGUMENT, "options", "options is NULL");
		return NULL;
	}
	memcpy(&size, options, sizeof(size));
	if (size < first || size > OPTIONS_MAX_BYTES) {
		error_set(err, SHARDD_INVALID_ARGUMENT, "options.size",
			  "options.size is %zu: set it to the size of the struct, %zu", size,
			  bytes);
		return NULL;
	}
	if (options_check_tail(options, size, bytes, "options", err) < 0)
		return NULL;
	memset(room, 0, bytes);
	memcpy(room, options, size < bytes ? size : bytes);
	return room;
}
