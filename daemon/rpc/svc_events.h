/* StatusService.Events. Loop thread only. */
#ifndef SHARDD_RPC_SVC_EVENTS_H
#define SHARDD_RPC_SVC_EVENTS_H

#include <uv.h>

#include "rpc/arena.h"
#include "rpc/method.h"
#include "status.pb-c.h"

/* Answer @call, whose user pays for it, at once or when there is an event. @view: as whom it sees jobs. */
void svc_events_run(struct rpc_call *call, const ProtobufCMessage *request, uid_t view,
		    uv_loop_t *loop);

/* The events that @request asks for, as @view sees them, without a wait. The arena says if there was no memory. Return: 0
 * or a fault code. */
int svc_events_list(struct arena *a, uid_t view, const Shardd__V1__EventsRequest *request,
		    Shardd__V1__EventsResponse *reply, struct fault *f);

#endif
