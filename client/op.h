/*
 * An op from submission to result: what all ops have in common.
 *
 * The functions of shardd.h fill a request and pass it on. The header (epoch,
 * number, deadline) is added and the message sent under one lock, so the
 * order of submission is the order of the numbers.
 */
#ifndef SHARDD_CLIENT_OP_H
#define SHARDD_CLIENT_OP_H

#include <assert.h>
#include <stddef.h>

#include "client.h"
#include "methods.h"
#include "shardd.pb-c.h"

/* One kind of op. Static. */
struct op {
	const char *method; /* "/shardd.v1.TrainingService/Gather" */
	const ProtobufCMessageDescriptor *reply;
	/* (optional) Fill @ret with what only this reply has. @ret_place: where its
	 * memory is, for replies that have some; borrowed from @reply. */
	void (*result)(const ProtobufCMessage *reply, struct shardd_result *ret,
		       const Shardd__V1__Placement **ret_place);
	/* (optional) Keep what it says of units. Return: 0 or a negative shardd_code. */
	int (*keep)(struct shardd_client *c, const ProtobufCMessage *reply,
		    struct shardd_error *err);
	/* (optional) Fill what the caller gave room for. @ret: as filled by now, with the address
	 * of its memory. Return: 0 or a negative code. */
	int (*out)(const ProtobufCMessage *reply, const struct shardd_result *ret,
		   const struct op_out *to, struct shardd_error *err);
};

/* The start of every request and every reply of an op. */
struct op_request {
	ProtobufCMessage base;
	Shardd__V1__OpHeader *header;
};

struct op_reply {
	ProtobufCMessage base;
	Shardd__V1__OpInfo *info;
};

/* A kind of op as a static @variable. @Name: of the rpc; @lower: as protobuf-c spells it;
 * the functions: those of struct op. */
#define OP_FULL(variable, Name, lower, result_fn, keep_fn, out_fn)                       \
	static_assert(offsetof(Shardd__V1__##Name##Request, header) ==                   \
			      offsetof(struct op_request, header),                       \
		      "the header comes first");                                         \
	static_assert(offsetof(Shardd__V1__##Name##Response, info) ==                    \
			      offsetof(struct op_reply, info),                           \
		      "the info comes first");                                           \
	static const struct op variable = { METHOD_##Name,                               \
					    &shardd__v1__##lower##_response__descriptor, \
					    result_fn, keep_fn, out_fn }
/* Ops without a keep and an out function; ops with a keep function. */
#define OP(variable, Name, lower, result_fn) OP_FULL(variable, Name, lower, result_fn, NULL, NULL)
#define OP_KEEPING(variable, Name, lower, result_fn, keep_fn) \
	OP_FULL(variable, Name, lower, result_fn, keep_fn, NULL)

/* Send @request, which begins as struct op_request; borrowed.
 * Return: 0 with a ticket in @t, or a negative shardd_code without one. */
int op_submit(struct shardd_client *c, const struct op *op, ProtobufCMessage *request,
	      shardd_ticket *t, struct shardd_error *err);

/* End the detached tickets whose ops have ended, or, with @all, wait for all. Return: 0, CANCELLED
 * with native EINTR (the wait for all was interrupted; they stay), or the code of a detached op that
 * failed and whose failure was not told yet, with @err. */
int op_detached(struct shardd_client *c, bool all, struct shardd_error *err);

/* The same for an op that has an @out. @to: the caller's, until the ticket ends; data NULL: not
 * wanted. */
int op_submit_out(struct shardd_client *c, const struct op *op, ProtobufCMessage *request,
		  struct op_out to, shardd_ticket *t, struct shardd_error *err);

#endif
