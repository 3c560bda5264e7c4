/*
 * A message from JSON: an object whose keys are the field names of the .proto. A string stands for a
 * message that has only its first field, and for a value of an enum: its name without what all of them
 * begin with, in capitals or not. What is not known is refused. Any thread.
 */
#ifndef SHARDD_JSON_JSON_MESSAGE_H
#define SHARDD_JSON_JSON_MESSAGE_H

#include <protobuf-c/protobuf-c.h>

#include "core/fault.h"

/* @ret: protobuf_c_message_free_unpacked. Return: 0, FAULT_INVALID: @f has the path of the field, behind
 * @field; FAULT_EXHAUSTED. */
int json_message(const char *text, const char *field, const ProtobufCMessageDescriptor *type,
		 ProtobufCMessage **ret, struct fault *f);

#endif
