/* StatusService.Events. Loop thread only. */
#ifndef SHARDD_RPC_SVC_EVENTS_H
#define SHARDD_RPC_SVC_EVENTS_H

#include <uv.h>

#include "rpc/method.h"
#include "rpc/status_fill.h"
#include "rpc/status_turns.h"

/* Answer @call, whose user pays for it, at once, or when there is an event and the turn of its user has come. @scope:
 * what it sees of all jobs. */
void svc_events_begin(struct rpc_call *call, const ProtobufCMessage *request,
		      const struct status_scope *scope, struct status_turns *turns,
		      uv_loop_t *loop);

/* The events that @request asks for, without a wait. The arena says if there was no memory. Return: 0 or a fault
 * code. */
int svc_events_list(struct arena *a, const struct status_scope *scope,
		    const Shardd__V1__EventsRequest *request, Shardd__V1__EventsResponse *reply,
		    struct fault *f);

#endif
