/* Service shardd.v1.Status: who holds what. Callers see their own jobs; root and the
 * daemon's uid see all. Loop thread only.
 *
 * An answer about a large job takes the loop milliseconds. So a user gets a tenth of its time
 * for that: the next call of the same user begins when nine times what the last one took has
 * gone by. Calls of others, and everything else, go on meanwhile. */
#ifndef SHARDD_RPC_SVC_STATUS_H
#define SHARDD_RPC_SVC_STATUS_H

#include "rpc/method.h"
#include "session/session.h"

struct svc_status {
	struct sessions *sessions;               /* borrowed */
	struct jobs *jobs;                       /* borrowed */
	unsigned (*connections)(void *userdata); /* open now */
	void *userdata;
	uv_timer_t timer;           /* for calls whose turn has not come */
	struct rpc_service service; /* filled by init */
};

void svc_status_init(struct svc_status *svc, struct sessions *sessions, struct jobs *jobs,
		     unsigned (*connections)(void *userdata), void *userdata);

/* No call is left. Safe if it was never begun. */
void svc_status_close(struct svc_status *svc);

#endif
