/*
 * Calls to a daemon below the public library, which would refuse some of them itself:
 * one connection is one session. For trainers only (tests/lib/daemonfix.h): a call
 * that does not end as expected ends the trainer with 1. Link shardd_ctl.
 */
#ifndef SHARDD_TESTS_RAWCALL_H
#define SHARDD_TESTS_RAWCALL_H

#include "local_abi.h"
#include "rpc_client.h"
#include "shardd.pb-c.h"
#include "status.pb-c.h"

/* Connect. @ret: rpc_client_close. */
struct rpc_client *raw_connect(const char *socket);

/* "Join" or "Status/GetStatus": start the call. @ret: raw_finish. */
struct rpc_pending *raw_start(struct rpc_client *c, const char *method,
			      const ProtobufCMessage *request);
/* Wait for its end, at most 30 s. @ret: the reply, the caller's, or NULL to drop it.
 * Return: 0 or a negative shardd_code, then @err says more. */
int raw_finish(struct rpc_pending *p, ProtobufCMessage **ret, struct shardd_error *err);
/* Both. */
int raw_call(struct rpc_client *c, const char *method, const ProtobufCMessage *request,
	     ProtobufCMessage **ret, struct shardd_error *err);
/* Both; it must succeed. Return: the reply, the caller's. */
void *raw_must(struct rpc_client *c, const char *method, const ProtobufCMessage *request);
/* The same, and the reply is dropped. */
void raw_done(struct rpc_client *c, const char *method, const ProtobufCMessage *request);
/* Both; it must fail with @code, name @field (NULL: none) and say @words. */
void raw_refused(struct rpc_client *c, const char *method, const ProtobufCMessage *request,
		 int code, const char *field, const char *words);
/* Was it refused so (see raw_refused)? If not, says how. @r, @err: of raw_call. */
bool raw_refusal_is(int r, const struct shardd_error *err, int code, const char *field,
		    const char *words);
/* raw_refused for a call that was started. */
void raw_finish_refused(struct rpc_pending *p, int code, const char *field, const char *words);

/* Attach. @token: for the session's local channel. Return: the session's number. */
uint64_t raw_attach(struct rpc_client *c);
uint64_t raw_attach_token(struct rpc_client *c, uint8_t token[SHD1_TOKEN_BYTES]);
/* Join @job as @rank of @world (KEEP if @keep). Return: the epoch. */
uint64_t raw_join(struct rpc_client *c, const char *job, uint32_t rank, uint32_t world, bool keep);
/* Connect, attach, join. */
struct rpc_client *raw_trainer(const char *socket, const char *job, uint32_t rank, uint32_t world,
			       bool keep);

/* Register one fp32 unit of one tensor with @elements. Return: its id. */
uint32_t raw_register(struct rpc_client *c, const char *name, uint64_t elements);
/* A buffer of the session. Return: its id. */
uint64_t raw_alloc(struct rpc_client *c, uint64_t bytes);
/* All of a world of @n sessions of this process: Initialise from a seed. */
void raw_init(struct rpc_client **world, unsigned n, uint32_t unit);

/* What the daemon says about itself with units and slabs, as JSON text without what a
 * refused call may change (counters, ages, the last error). @ret: free(). */
char *raw_state(struct rpc_client *c);
/* Are both the same? If not, says where they differ. */
bool raw_same_state(const char *before, const char *after, const char *what);

#endif
