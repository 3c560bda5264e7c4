/* Shared by the files of svc_shardd. */
#ifndef SHARDD_RPC_SVC_SHARDD_IMPL_H
#define SHARDD_RPC_SVC_SHARDD_IMPL_H

#include "core/res.h"
#include "job/job.h"
#include "rpc/svc_shardd.h"
#include "publication.pb-c.h"
#include "shardd.pb-c.h"

/* The session of the call's connection, or NULL with the call ended. */
struct session *svc_session(struct rpc_call *call);
/* Its member, or NULL with the call ended. */
struct member *svc_member(struct rpc_call *call);

/* The tick of a call that may have to wait for something of @node (svc_later.c). It is called now,
 * and again whenever something of @node has changed, for as long as it returns RES_WAIT. RES_DONE:
 * it has answered the call. RES_FAILED: @f is set, and the call fails with it. @given_up (NULL:
 * none): called when the caller has given up; there are no more ticks, and the connection may be
 * gone, too. */
typedef enum res (*svc_tick_cb)(struct rpc_call *call, const ProtobufCMessage *request,
				void *userdata, struct fault *f);
void svc_later_run(struct rpc_call *call, const ProtobufCMessage *request, struct node *node,
		   svc_tick_cb tick, void (*given_up)(struct rpc_call *call), void *userdata);

/* svc_shardd_jobs.c: functions for the other files. */
struct fault svc_not_connected(void);
/* @room: for what @ret points to. */
int svc_decode_job(const Shardd__V1__JobSpec *spec, state_checkpoints *room, struct job_spec *ret,
		   struct fault *f);
/* For the log: a job was made; a call about a job is refused, which ends the call. */
void svc_log_created(const struct proc *who, const struct job *job);
void svc_refuse(struct rpc_call *call, const char *what, const char *job, const struct fault *f);
/* May this member change things? Return: 0 or a fault code. */
int svc_check_joined(const struct member *m, struct fault *f);

/* Find a job for the caller of @call. @name: of the field "job". Return: 0 or a fault code. */
int svc_find_job(struct rpc_call *call, struct svc_shardd *svc, const char *name, struct job **ret,
		 struct fault *f);

/* svc_shardd_ops.c: every op of op/table.c */
void svc_op(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);

/* svc_shardd_jobs.c */
void svc_create_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_delete_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_drain_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_create_group(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);

/* svc_shardd_checkpoint.c */
void svc_checkpoint(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_load_checkpoint(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_set_checkpoints(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_resize_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);

/* svc_shardd_join.c */
void svc_join(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_leave(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_share_events(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);

/* svc_shardd_units.c */
void svc_register(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);

/* svc_shardd_publish.c */
void svc_declare_publication(struct rpc_call *call, const ProtobufCMessage *request,
			     void *userdata);
void svc_drop_publication(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_publish_generation(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_acquire_generation(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_describe_generation(struct rpc_call *call, const ProtobufCMessage *request,
			     void *userdata);
void svc_release_generation(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_open_reader(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
void svc_close_reader(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);
struct view_tensor;
/* @m: to be initialised; what it points to is @t's. */
void svc_shardd_publish_fill_tensor(const struct view_tensor *t, Shardd__V1__PublishedTensor *m);

/* svc_shardd_base.c */
void svc_read_base(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);

/* svc_shardd_list.c */
void svc_list_publications(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);

/* svc_stream.c */
void svc_stream_generation(struct rpc_call *call, const ProtobufCMessage *request, void *userdata);

#endif
