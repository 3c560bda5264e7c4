/* Publications: their declarations. */
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "client.h"
#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "methods.h"
#include "publication.h"
#include "publication.pb-c.h"

/* The daemon's own deadline is to come first: its error says what was waited for. */
#define PUBLICATION_GRACE_MS 2000u

/* ------------------------------------------------------------------- declarations */

int publication_check(const struct shardd_client *c, const char *job, const char *what,
		      const char *field, struct shardd_error *err)
{
	int e = client_check(c, err);

	if (e < 0)
		return e;
	return job && what ? 0
			   : error_set(err, SHARDD_INVALID_ARGUMENT, job ? field : "job",
				       "the argument is NULL");
}

int shardd_publication_declare(shardd_client *c, const char *job, const char *json,
			       uint64_t *ret_bytes, struct shardd_error *err)
{
	Shardd__V1__DeclarePublicationRequest request =
		SHARDD__V1__DECLARE_PUBLICATION_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	_cleanup_(freep) char *resolved = NULL;
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = publication_check(c, job, json, "json", err);
	if (e == 0)
		e = publication_readers_resolve(json, &resolved, err);
	if (e < 0)
		return e;
	request.job = (char *)(uintptr_t)job;
	request.json = resolved ? resolved : (char *)(uintptr_t)json;
	e = call_again(c, METHOD_DeclarePublication, &request.base,
		       &shardd__v1__declare_publication_response__descriptor, &reply, err);
	if (e == 0 && ret_bytes)
		*ret_bytes = ((Shardd__V1__DeclarePublicationResponse *)reply)->bytes;
	return e;
}

int shardd_publication_drop(shardd_client *c, const char *job, const char *name,
			    struct shardd_error *err)
{
	Shardd__V1__DropPublicationRequest request = SHARDD__V1__DROP_PUBLICATION_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = publication_check(c, job, name, "name", err);
	if (e < 0)
		return e;
	request.job = (char *)(uintptr_t)job;
	request.name = (char *)(uintptr_t)name;
	return call_make(c, METHOD_DropPublication, &request.base,
			 &shardd__v1__drop_publication_response__descriptor, &reply, err);
}

int publication_call(struct shardd_client *c, const char *method, uint32_t ms,
		     const ProtobufCMessage *request, const ProtobufCMessageDescriptor *type,
		     ProtobufCMessage **ret, struct shardd_error *err)
{
	const uint32_t longest = INT32_MAX - PUBLICATION_GRACE_MS;
	struct link *l = client_use_link(c);
	uint32_t link = l->number;
	int e = rpc_client_call(l->rpc, method, request, type,
				ms ? (ms > longest ? longest : ms) + PUBLICATION_GRACE_MS : 0, ret,
				err);

	client_unuse_link(c, l);
	return call_after_loss(c, link, e, err);
}

int shardd_publication_publish(shardd_client *c, const char *job, const char *name,
			       uint32_t timeout_ms, uint64_t *ret_number, struct shardd_error *err)
{
	Shardd__V1__PublishGenerationRequest request = SHARDD__V1__PUBLISH_GENERATION_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = publication_check(c, job, name, "name", err);
	if (e < 0)
		return e;
	request.job = (char *)(uintptr_t)job;
	request.name = (char *)(uintptr_t)name;
	request.timeout_ms = timeout_ms;
	e = publication_call(c, METHOD_PublishGeneration, timeout_ms, &request.base,
			     &shardd__v1__publish_generation_response__descriptor, &reply, err);
	if (e == 0 && ret_number)
		*ret_number = ((Shardd__V1__PublishGenerationResponse *)reply)->number;
	return e;
}

enum shardd_dtype publication_dtype(Shardd__V1__PublishedType type)
{
	return type == SHARDD__V1__PUBLISHED_TYPE__PUBLISHED_TYPE_E4M3 ? SHARDD_E4M3
								       : (enum shardd_dtype)type;
}
