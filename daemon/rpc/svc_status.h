/* Service shardd.v1.StatusService: jobs, sessions, users, memory and ops. Callers see their own jobs; root
 * and the daemon's uid see all. Loop thread only. */
#ifndef SHARDD_RPC_SVC_STATUS_H
#define SHARDD_RPC_SVC_STATUS_H

#include "rpc/method.h"
#include "rpc/status_fill.h"
#include "rpc/status_turns.h"
#include "session/session.h"

/* Callbacks for values that only the server knows. Each gets the userdata of svc_status_init. */
struct svc_status_sources {
	unsigned (*connections)(void *userdata); /* open now */
	uint64_t (*message_bytes)(uid_t uid,
				  void *userdata); /* of messages that are not complete */
	/* Of the store that outlives the daemon. Return: how many descriptors fit; 0: none. */
	uint32_t (*store)(uint32_t *ret_used, void *userdata);
	/* (optional) The HTTP server and the exporter to OpenTelemetry, into @reply. */
	void (*exports)(struct arena *a, Shardd__V1__GetStatusResponse *reply, void *userdata);
};

/* What is asked for. */
struct status_query {
	struct status_scope scope;
	bool with_units, with_slabs;
};

struct svc_status {
	struct sessions *sessions;                /* borrowed */
	struct jobs *jobs;                        /* borrowed */
	const struct svc_status_sources *sources; /* borrowed */
	void *userdata;
	struct status_turns turns;
	uid_t *observers; /* owned: who sees what the daemon's user sees */
	size_t n_observers;
	uint32_t descriptors;       /* of this process, when they were last counted */
	uint64_t counted_us;        /* then; 0: never */
	struct rpc_service service; /* filled by init */
};

void svc_status_init(struct svc_status *svc, struct sessions *sessions, struct jobs *jobs,
		     const struct svc_status_sources *sources, void *userdata);

/* All that @q asks for, in @a. @reply: initialised; nothing in it points to memory that the loop changes. */
void svc_status_fill(struct svc_status *svc, const struct status_query *q, struct arena *a,
		     Shardd__V1__GetStatusResponse *reply);
/* The same of the flight recorder: all pending ops, and the last @limit of the others; 0: all. */
void svc_status_fill_ops(struct svc_status *svc, const struct status_scope *scope, uint32_t limit,
			 bool with_devices, struct arena *a, Shardd__V1__OpsResponse *reply);

/* From now on. Return: 0, or -ENOMEM: nothing changed. */
int svc_status_set_observers(struct svc_status *svc, const uid_t *uids, size_t n);
bool svc_status_is_observer(const struct svc_status *svc, uid_t uid);
/* What @uid sees, of all jobs. */
struct status_scope svc_status_scope_of(const struct svc_status *svc, uid_t uid);

/* No call is left. Safe if it was never begun. */
void svc_status_close(struct svc_status *svc);

#endif
