/* The services of trainers and readers (shardd.proto, publication.proto). Thin: calls into session/, op/
 * and job/. Loop thread only. */
#ifndef SHARDD_RPC_SVC_SHARDD_H
#define SHARDD_RPC_SVC_SHARDD_H

#include "core/check.h"
#include "core/slices.h"
#include "rpc/method.h"
#include "session/session.h"
#include "methods.h"

enum { SVC_SHARDD_SERVICES = 6 };

struct svc_shardd {
	struct sessions *sessions;  /* borrowed */
	struct jobs *jobs;          /* borrowed */
	struct slices *slices;      /* borrowed */
	struct status_turns *turns; /* borrowed */
	uint64_t max_message_bytes;
	struct svc_streams *streams;                      /* svc_stream.c's; NULL: none is open */
	struct rpc_service services[SVC_SHARDD_SERVICES]; /* filled by init; for rpc_server_new */
	/* of all services, each ended by an empty one */
	struct rpc_method methods[ARRAY_SIZE(methods) + SVC_SHARDD_SERVICES];
};

void svc_shardd_init(struct svc_shardd *svc, struct sessions *sessions, struct jobs *jobs,
		     struct slices *slices, struct status_turns *turns, uint64_t max_message_bytes);

#endif
