/* StatusService.Events. Loop thread only. */
#ifndef SHARDD_RPC_SVC_EVENTS_H
#define SHARDD_RPC_SVC_EVENTS_H

#include <uv.h>

#include "rpc/method.h"

/* Answer @call, whose user pays for it, at once or when there is an event. @view: as whom it sees jobs. */
void svc_events_run(struct rpc_call *call, const ProtobufCMessage *request, uid_t view,
		    uv_loop_t *loop);

#endif
