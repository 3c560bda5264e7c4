/* Which methods go over the ring. Both sides use this rule. */
#ifndef SHARDD_RING_RULE_H
#define SHARDD_RING_RULE_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <string.h>

/* Fields of bytes with a small bound: a CUDA handle, and one bit for each of 4096 tensors. */
static inline bool ring_are_few(const char *field)
{
	return strcmp(field, "ipc_handle") == 0 || strcmp(field, "unused_bits") == 0;
}

/* Is a message of this kind never longer than RING_LONG_BYTES? True without lists and texts. */
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

/* A single request that is too long goes over gRPC. A reply's length must be known before the
 * call, so the rule is about replies. Not every such method is an op. */
static inline bool ring_carries(const ProtobufCMethodDescriptor *method)
{
	return ring_fits(method->output);
}

#endif
