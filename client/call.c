#include "call.h"

#include <string.h>

#include "client_error.h"
#include "methods.h"
#include "reconnect.h"

/* Daemons that may die of one call. */
#define CALL_TRIES 3u

/* A disk may be slow. */
static uint32_t call_timeout_ms(const char *method)
{
	return strcmp(method, METHOD_LoadCheckpoint) == 0 ? CLIENT_LOAD_TIMEOUT_MS
							  : CLIENT_CALL_TIMEOUT_MS;
}

int call_check_epoch(struct shardd_client *c, struct shardd_error *err)
{
	uint64_t ended;

	pthread_mutex_lock(&c->order);
	ended = c->joined ? 0 : c->ended_epoch;
	pthread_mutex_unlock(&c->order);
	return ended ? reconnect_outcome(c, 0, ended, err) : 0;
}

int call_after_loss(struct shardd_client *c, uint32_t link, int r, struct shardd_error *err)
{
	if (!error_is_lost(r, err) || !reconnect_is_on(c))
		return r;
	reconnect_wait(c, link, -1);
	return reconnect_outcome(c, link, 0, err);
}

int call_once(struct shardd_client *c, const char *method, const ProtobufCMessage *request,
	      const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret, uint32_t *ret_link,
	      struct shardd_error *err)
{
	struct shardd_error scratch;
	struct link *l;
	int r = client_check_bytes(c, protobuf_c_message_get_packed_size(request), err);

	if (r < 0)
		return r;
	l = client_use_link(c);
	r = rpc_client_call(l->rpc, method, request, reply, call_timeout_ms(method), ret,
			    err ? err : &scratch);
	if (ret_link)
		*ret_link = l->number;
	client_unuse_link(c, l);
	return r;
}

int call_make(struct shardd_client *c, const char *method, const ProtobufCMessage *request,
	      const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret,
	      struct shardd_error *err)
{
	uint32_t link = 0;
	struct shardd_error e = { 0 };
	int r = call_once(c, method, request, reply, ret, &link, &e);

	r = link ? call_after_loss(c, link, r, &e) : r;
	if (r < 0 && err)
		*err = e;
	return r;
}

int call_again(struct shardd_client *c, const char *method, const ProtobufCMessage *request,
	       const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret,
	       struct shardd_error *err)
{
	int r = -SHARDD_ABORTED;

	for (unsigned i = 0; r == -SHARDD_ABORTED && i < CALL_TRIES; i++)
		r = call_make(c, method, request, reply, ret, err);
	return r;
}
