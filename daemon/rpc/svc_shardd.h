/* Service shardd.v1.Shardd: sessions, jobs, units, ops. Thin: calls into session/, op/
 * and job/. Loop thread only. */
#ifndef SHARDD_RPC_SVC_SHARDD_H
#define SHARDD_RPC_SVC_SHARDD_H

#include "core/slices.h"
#include "rpc/method.h"
#include "session/session.h"

struct svc_shardd {
	struct sessions *sessions; /* borrowed */
	struct jobs *jobs;         /* borrowed */
	struct slices *slices;     /* borrowed */
	uint64_t max_message_bytes;
	struct rpc_service service; /* filled by init; give it to rpc_server_new */
};

void svc_shardd_init(struct svc_shardd *svc, struct sessions *sessions, struct jobs *jobs,
		     struct slices *slices, uint64_t max_message_bytes);

#endif
