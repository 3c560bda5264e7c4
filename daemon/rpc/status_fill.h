/* Parts of the Status service's answers, filled from an arena: one file for each kind of object.
 * Without memory a part is left out and the arena is marked as failed. Loop thread only. */
#ifndef SHARDD_RPC_STATUS_FILL_H
#define SHARDD_RPC_STATUS_FILL_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "core/quota.h"
#include "rpc/arena.h"
#include "session/session.h"
#include "status.pb-c.h"

/* The subject of a query, and what the caller may see. */
struct status_scope {
	uid_t uid;             /* (uid_t)-1: of nobody */
	bool sees_all;         /* jobs of others, too: as an administrator or an observer */
	const struct job *job; /* NULL: all */
	bool with_nodes;       /* what the ranks of all nodes do, as they have said (cluster_ask) */
};

/* What belongs to @uid: is it shown at all? */
bool status_sees(const struct status_scope *scope, uid_t uid);
/* And what is in it: units, pids, ops? Of private jobs of others it is not. */
bool status_may_look(const struct status_scope *scope, uid_t uid, bool is_private);
bool status_may_look_at(const struct status_scope *scope, const struct job *job);

/* Was this job requested, and may the caller know of it? */
bool status_visible(const struct status_scope *scope, const struct job *job);

/* A copy. An empty string if it could not be copied: fields must not be NULL. A name that was cut
 * may end inside a character. */
char *status_text(struct arena *a, const char *s);

/* The value of @type whose name ends in the state's @name: "RUN" of OpState is OP_STATE_RUN.
 * Return: 0 (UNSPECIFIED) if there is none. */
int status_state(const ProtobufCEnumDescriptor *type, const char *name);

#define STATUS_STATE(Type, lower, name) \
	((Shardd__V1__##Type)status_state(&shardd__v1__##lower##__descriptor, (name)))

/* @n messages of @type and pointers to them. Return: the pointers, NULL without memory. */
void *status_messages(struct arena *a, size_t n, const ProtobufCMessageDescriptor *type);

#define STATUS_MESSAGES(a, n, type, name) \
	((Shardd__V1__##type **)status_messages((a), (n), &shardd__v1__##name##__descriptor))

Shardd__V1__ClassBytes **status_classes(struct arena *a, const struct quota *q, size_t *ret_n);

void status_fill_devices(struct arena *a, const struct node *node,
			 Shardd__V1__GetStatusResponse *reply);
void status_fill_cluster(struct arena *a, Shardd__V1__GetStatusResponse *reply);
void status_fill_comms(struct arena *a, const struct node *node,
		       Shardd__V1__GetStatusResponse *reply);
void status_fill_slabs(struct arena *a, struct jobs *jobs, const struct status_scope *scope,
		       Shardd__V1__GetStatusResponse *reply);
void status_fill_jobs(struct arena *a, struct jobs *jobs, const struct status_scope *scope,
		      bool with_units, Shardd__V1__GetStatusResponse *reply);
/* The publications of a job (status_publications.c). */
void status_fill_publications(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j);
/* What the ranks of all nodes do, into what status_fill_jobs has filled (status_told.c). */
void status_fill_told(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j);
/* What a job needs of what the functions above fill, of all that is told of it to those who may look at it. */
void status_fill_job(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j);
void status_fill_sessions(struct arena *a, struct sessions *sessions,
			  const struct status_scope *scope, Shardd__V1__GetStatusResponse *reply);
void status_fill_users(struct arena *a, const struct users *users, const struct status_scope *scope,
		       Shardd__V1__GetStatusResponse *reply);
void status_fill_memory_line(struct arena *a, const struct node *node,
			     Shardd__V1__GetStatusResponse *reply);
/* Of groups that overrides name: all, or those of the caller. */
void status_fill_groups(struct arena *a, const struct users *users,
			const struct status_scope *scope, Shardd__V1__GetStatusResponse *reply);

/* The last @limit records; 0: all. @start: when the daemon began, in microseconds. */
void status_fill_ops(struct arena *a, const struct status_scope *scope, uint32_t limit,
		     uint64_t start, Shardd__V1__OpsResponse *reply);
void status_fill_device_records(struct arena *a, const struct status_scope *scope, uint32_t limit,
				uint64_t start, Shardd__V1__OpsResponse *reply);
/* What there is of publications, and the last @limit records of what is over; 0: all. */
void status_fill_published_records(struct arena *a, struct jobs *jobs,
				   const struct status_scope *scope, uint32_t limit,
				   Shardd__V1__OpsResponse *reply);

/* Of jobs that have ended those that @uid may know of. @ref: only this one; NULL: all. */
void status_fill_history(struct arena *a, const struct status_scope *scope,
			 const struct job_ref *ref, const Shardd__V1__HistoryRequest *request,
			 Shardd__V1__HistoryResponse *reply);

#endif
