/*
 * Messages as JSON: the keys are the field names of the .proto, every field is
 * there, also when it is 0 or empty. 64-bit numbers are JSON integers (above
 * 2^63-1: that), enums their names, bytes their number, a list of ClassBytes one
 * object from name to bytes. Any thread.
 */
#ifndef SHARDD_CTL_JSON_H
#define SHARDD_CTL_JSON_H

#include <jansson.h>
#include <protobuf-c/protobuf-c.h>

/* Return: a new reference, or NULL without memory. */
json_t *json_from_message(const ProtobufCMessage *m);

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
