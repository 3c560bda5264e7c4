/* Calls that need something that is being created: they are tried again at every change of the
 * node, until they are answered or their caller gives up. */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "rpc/svc_shardd_impl.h"

struct later {
	struct waiter waiter;
	struct rpc_call *call;
	const ProtobufCMessage *request; /* the call's */
	struct node *node;
	void *userdata;
	svc_tick_cb tick;
	void (*given_up)(struct rpc_call *call);
};

static void svc_later_on_cancelled(struct rpc_call *call, void *userdata)
{
	struct later *l = userdata;
	struct fault f = FAULT_NULL;

	waiter_leave(&l->waiter);
	if (l->given_up)
		l->given_up(call);
	free(l);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

static void svc_later_wait(struct later *l)
{
	rpc_call_on_cancelled(l->call, svc_later_on_cancelled, l);
	condition_wait(&l->node->changed, &l->waiter);
}

/* The only caller of ticks. */
static enum res svc_later_tick(struct rpc_call *call, const ProtobufCMessage *request,
			       svc_tick_cb tick, void *userdata)
{
	struct fault f = FAULT_NULL;
	enum res r = tick(call, request, userdata, &f);

	CHECK((r == RES_FAILED) == (f.code != FAULT_NONE));
	if (r == RES_FAILED)
		rpc_call_fail(call, &f);
	return r;
}

static void svc_later_on_change(struct waiter *p)
{
	struct later *l = CONTAINER_OF(p, struct later, waiter);

	rpc_call_on_cancelled(l->call, NULL, NULL);
	if (svc_later_tick(l->call, l->request, l->tick, l->userdata) == RES_WAIT)
		svc_later_wait(l);
	else
		free(l);
}

void svc_later_run(struct rpc_call *call, const ProtobufCMessage *request, struct node *node,
		   svc_tick_cb tick, void (*given_up)(struct rpc_call *call), void *userdata)
{
	struct fault f = FAULT_NULL;
	struct later *l;

	if (svc_later_tick(call, request, tick, userdata) != RES_WAIT)
		return;
	l = calloc(1, sizeof(*l));
	if (!l) {
		if (given_up)
			given_up(call);
		fault_errno(&f, -ENOMEM, "waiting for memory or communicators");
		rpc_call_fail(call, &f);
		return;
	}
	*l = (struct later){ .call = call,
			     .request = request,
			     .node = node,
			     .userdata = userdata,
			     .tick = tick,
			     .given_up = given_up };
	waiter_init(&l->waiter, svc_later_on_change);
	svc_later_wait(l);
}
