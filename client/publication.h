/* Calls about publications, for the files of the library. Any thread. */
#ifndef SHARDD_CLIENT_PUBLICATION_H
#define SHARDD_CLIENT_PUBLICATION_H

#include "client.h"

/* May @c be used, and are @job and @what there? @field: the name of @what. Return: 0 or a negative
 * shardd_code. */
int publication_check(const struct shardd_client *c, const char *job, const char *what,
		      const char *field, struct shardd_error *err);

/* A call that waits for @ms in the daemon; 0: for as long as the daemon says. @ret: belongs to the
 * caller. Return: 0 or a negative shardd_code. */
int publication_call(struct shardd_client *c, const char *method, uint32_t ms,
		     const ProtobufCMessage *request, const ProtobufCMessageDescriptor *type,
		     ProtobufCMessage **ret, struct shardd_error *err);

#endif
