/*
 * The .proto files of all services on the socket, and which of them has a symbol. Made once of the
 * descriptor set that the build puts into the program; not changed afterwards.
 */
#ifndef SHARDD_RPC_DESCRIPTORS_H
#define SHARDD_RPC_DESCRIPTORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct descriptors;

struct descriptors_file {
	const char *name; /* as in an import: "shardd/v1/status.proto" */
	/* Field 1 of a FileDescriptorSet, with its tag and length: a FileDescriptorResponse has the
	 * same. In static memory. */
	const uint8_t *field;
	size_t bytes;
};

/* @ret: descriptors_free. Return: 0 or -ENOMEM. */
int descriptors_new(struct descriptors **ret);
/* @d may be NULL. Return: NULL. */
struct descriptors *descriptors_free(struct descriptors *d);

/* Return: the file of that name, or NULL. Borrowed. */
const struct descriptors_file *descriptors_find_file(const struct descriptors *d, const char *name);

/* @name: the full name of a service, method, message, field, oneof, enum or enum value.
 * @ret_message: it is a message; may be NULL. Return: the file that has it, or NULL. Borrowed. */
const struct descriptors_file *descriptors_find_symbol(const struct descriptors *d,
						       const char *name, bool *ret_message);

#endif
