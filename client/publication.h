/* Calls about publications, for the files of the library. Any thread. */
#ifndef SHARDD_CLIENT_PUBLICATION_H
#define SHARDD_CLIENT_PUBLICATION_H

#include "client.h"
#include "publication.pb-c.h"

/* May @c be used, and are @job and @what there? @field: the name of @what. Return: 0 or a negative
 * shardd_code. */
int publication_check(const struct shardd_client *c, const char *job, const char *what,
		      const char *field, struct shardd_error *err);

/* The declaration @json with numbers in place of the names of users and groups in its readers. @ret: the
 * caller's (free); NULL: there are none, and @json is as good. Blocks while names are looked up. Return:
 * 0 or a negative shardd_code. */
int publication_readers_resolve(const char *json, char **ret, struct shardd_error *err);

/* A call that waits for @ms in the daemon; 0: for as long as the daemon says. @ret: belongs to the
 * caller. Return: 0 or a negative shardd_code. */
int publication_call(struct shardd_client *c, const char *method, uint32_t ms,
		     const ProtobufCMessage *request, const ProtobufCMessageDescriptor *type,
		     ProtobufCMessage **ret, struct shardd_error *err);

/* The elements of a published tensor: the numbers of the two differ from the fourth on. */
enum shardd_dtype publication_dtype(Shardd__V1__PublishedType type);

#endif
