/* Which methods go over the ring: the same rule on both sides. */
#ifndef SHARDD_RING_RULE_H
#define SHARDD_RING_RULE_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <string.h>

/* Bytes that are never many: a handle of CUDA's, and a bit for each of 4096 tensors. */
static inline bool ring_are_few(const char *field)
{
	return strcmp(field, "ipc_handle") == 0 || strcmp(field, "unused_bits") == 0;
}

/* Is a message of this kind never longer than RING_LONG_BYTES? So it is without lists and texts. */
static inline bool ring_fits(const ProtobufCMessageDescriptor *message)
{
	for (unsigned i = 0; i < message->n_fields; i++) {
		const ProtobufCFieldDescriptor *f = &message->fields[i];

		if (f->label == PROTOBUF_C_LABEL_REPEATED || f->type == PROTOBUF_C_TYPE_STRING)
			return false;
		if (f->type == PROTOBUF_C_TYPE_BYTES && !ring_are_few(f->name))
			return false;
		if (f->type == PROTOBUF_C_TYPE_MESSAGE && !ring_fits(f->descriptor))
			return false;
	}
	return true;
}

/* A request that is too long goes over gRPC, as is seen when it is there; that a reply
 * is must be known before. Not every such method is an op. */
static inline bool ring_carries(const ProtobufCMethodDescriptor *method)
{
	return ring_fits(method->output);
}

#endif
