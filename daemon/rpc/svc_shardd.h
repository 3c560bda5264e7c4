/* The services of trainers and readers (shardd.proto). Thin: calls into session/, op/
 * and job/. Loop thread only. */
#ifndef SHARDD_RPC_SVC_SHARDD_H
#define SHARDD_RPC_SVC_SHARDD_H

#include "core/slices.h"
#include "rpc/method.h"
#include "session/session.h"

enum { SVC_SHARDD_SERVICES = 6 };

struct svc_shardd {
	struct sessions *sessions; /* borrowed */
	struct jobs *jobs;         /* borrowed */
	struct slices *slices;     /* borrowed */
	uint64_t max_message_bytes;
	struct rpc_service services[SVC_SHARDD_SERVICES]; /* filled by init; for rpc_server_new */
};

void svc_shardd_init(struct svc_shardd *svc, struct sessions *sessions, struct jobs *jobs,
		     struct slices *slices, uint64_t max_message_bytes);

#endif
