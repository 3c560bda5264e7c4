/* Calls that are not ops, and what becomes of them when the daemon dies. Any thread. */
#ifndef SHARDD_CLIENT_CALL_H
#define SHARDD_CLIENT_CALL_H

#include "client.h"

/* Has the daemon ended since the last join? Then -SHARDD_ABORTED, else 0. Not with order held. */
int call_check_epoch(struct shardd_client *c, struct shardd_error *err);

/* @r, @err: what a call over link number @link ended with. If the connection is lost, wait for the
 * next one and say so. Not with order held. Return: @r, or a negative shardd_code. */
int call_after_loss(struct shardd_client *c, uint32_t link, int r, struct shardd_error *err);

/* Make one call that is not an op, and wait for the daemon if it comes back meanwhile: the call is
 * then not repeated, but answered with ABORTED. Not with order held. @method: its name in the
 * Shardd service. @ret: belongs to the caller (protobuf_c_message_free_unpacked). Return: 0 or a
 * negative shardd_code. */
int call_make(struct shardd_client *c, const char *method, const ProtobufCMessage *request,
	      const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret,
	      struct shardd_error *err);

/* The same for calls that may be repeated: they are, when the daemon is back. */
int call_again(struct shardd_client *c, const char *method, const ProtobufCMessage *request,
	       const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret,
	       struct shardd_error *err);

/* The same with order held: a lost connection stays lost. @ret_link: the number of the link that
 * the call went over, or NULL. */
int call_once(struct shardd_client *c, const char *method, const ProtobufCMessage *request,
	      const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret, uint32_t *ret_link,
	      struct shardd_error *err);

#endif
