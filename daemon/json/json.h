/*
 * Messages as JSON. The keys are the field names of the .proto; every field is
 * present, even if it is 0 or empty. 64-bit numbers are JSON integers (at most
 * 2^63-1), states are their names (json_state), other enums their whole names, bytes are their count, and a list of ClassBytes is one
 * object from name to bytes. Any thread.
 */
#ifndef SHARDD_JSON_JSON_H
#define SHARDD_JSON_JSON_H

#include <jansson.h>
#include <protobuf-c/protobuf-c.h>

/* Return: a new reference, or NULL without memory. */
json_t *json_from_message(const ProtobufCMessage *m);

/* A state's name without what all names of its @type begin with: RUNNING of JOB_STATE_RUNNING;
 * "" of UNSPECIFIED and of a value that this version does not know. Static. */
const char *json_state(const ProtobufCEnumDescriptor *type, int value);

/* A text as JSON; bytes that are no UTF-8 become '?'. */
json_t *json_from_text(const char *text);

/* Print @j and a newline. Return: 0 or -EIO. */
int json_print(const json_t *j, FILE *out);

static inline void json_freep(json_t **j)
{
	json_decref(*j);
	*j = NULL;
}

#endif
