#include "options.h"

#include <string.h>

#include "client_error.h"

const void *options_read_other(const void *options, void *room, size_t bytes, size_t first,
			       struct shardd_error *err)
{
	const unsigned char *from = options;
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
	for (size_t i = bytes; i < size; i++)
		if (from[i]) {
			error_set(err, SHARDD_INVALID_ARGUMENT, "options.size",
				  "options has a field at byte %zu that is not 0 and that this "
				  "library does not know: update libshardd",
				  i);
			return NULL;
		}
	memset(room, 0, bytes);
	memcpy(room, options, size < bytes ? size : bytes);
	return room;
}
