/* Service shardd.v1.Status: who holds what. Callers see their own jobs; root and the
 * daemon's uid see all. Loop thread only. */
#ifndef SHARDD_RPC_SVC_STATUS_H
#define SHARDD_RPC_SVC_STATUS_H

#include "rpc/method.h"
#include "session/session.h"

struct svc_status {
	struct sessions *sessions;               /* borrowed */
	struct jobs *jobs;                       /* borrowed */
	unsigned (*connections)(void *userdata); /* open now */
	void *userdata;
	struct rpc_service service; /* filled by init */
};

void svc_status_init(struct svc_status *svc, struct sessions *sessions, struct jobs *jobs,
		     unsigned (*connections)(void *userdata), void *userdata);

#endif
