/* What the files of service Shardd share. */
#ifndef SHARDD_RPC_SVC_IMPL_H
#define SHARDD_RPC_SVC_IMPL_H

#include "rpc/svc_shardd.h"
#include "shardd.pb-c.h"

/* The session of the call's connection, or NULL with the call ended. */
struct session *svc_session(struct rpc_call *call);
/* Its member, or NULL with the call ended. */
struct member *svc_member(struct rpc_call *call);

/* svc_shardd_ops.c: every op of op/table.c */
void svc_op(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);

/* svc_shardd_jobs.c */
void svc_create_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_delete_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_drain_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_join(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_leave(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_create_group(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_register(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);

#endif
