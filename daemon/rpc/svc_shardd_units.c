/* Registration of units. */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/registered.h"
#include "rpc/svc_impl.h"
#include "rpc/unit_spec.h"

/* All specs of a request, as records. */
static int decode_units(const Shardd__V1__RegisterRequest *r, state_unit **specs, struct fault *f)
{
	for (size_t i = 0; i < r->n_units; i++)
		if (unit_spec_decode(r->units[i], i, &specs[i], f))
			return f->code;
	return 0;
}

static int fill_units(struct registered *all, Shardd__V1__RegisteredUnit **units,
		      const struct member *m, const uint32_t *ids, size_t n)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < n; i++) {
		units[i] = &all[i].unit;
		r = registered_init(&all[i], m->job, m->job->units[ids[i] - 1], m->rank);
	}
	return r;
}

static void send_registered(struct rpc_call *call, const struct member *m, const uint32_t *ids,
			    size_t n, uint64_t charged)
{
	Shardd__V1__RegisterReply reply = SHARDD__V1__REGISTER_REPLY__INIT;
	struct registered *all = calloc(n, sizeof(*all));
	Shardd__V1__RegisteredUnit **units = calloc(n, sizeof(*units));
	struct fault f = FAULT_NULL;

	reply.units = units;
	reply.n_units = n;
	reply.charged_bytes = charged;
	if (all && units && fill_units(all, units, m, ids, n) == 0) {
		rpc_call_reply(call, &reply.base);
	} else {
		fault_errno(&f, -ENOMEM, "answering a registration");
		rpc_call_fail(call, &f);
	}
	for (size_t i = 0; all && i < n; i++)
		registered_deinit(&all[i]);
	free(all);
	free(units);
}

static int register_now(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__RegisterRequest *r = (const Shardd__V1__RegisterRequest *)request;
	struct member *m = svc_member(call);
	size_t n = r->n_units; /* the request is gone when the call is answered */
	state_unit **specs = calloc(n, sizeof(*specs));
	uint32_t *ids = calloc(n, sizeof(*ids));
	struct fault f = FAULT_NULL;
	uint64_t charged = 0;
	int e = 0;

	(void)userdata;
	if (m && (!specs || !ids))
		fault_errno(&f, -ENOMEM, "registering units");
	if (m && !f.code && svc_check_joined(m, &f) == 0 && decode_units(r, specs, &f) == 0)
		e = job_register(m->job, specs, n, ids, &charged, &f);
	for (size_t i = 0; m && !f.code && e != JOB_E_LATER && i < n; i++)
		if (member_registered(m, ids[i]) < 0)
			fault_errno(&f, -ENOMEM, "registering units");
	if (m && f.code)
		rpc_call_fail(call, &f);
	else if (m && e != JOB_E_LATER)
		send_registered(call, m, ids, n, charged);
	for (size_t i = 0; specs && i < n; i++)
		state_unit_free(specs[i]);
	free(specs);
	free(ids);
	return m && !f.code && e == JOB_E_LATER ? SVC_LATER : SVC_ENDED;
}

/* What was made for it so far. Another rank that waits for the same takes longer then. */
static void register_given_up(struct rpc_call *call)
{
	struct conn *c = rpc_call_conn(call);
	struct session *s = c ? conn_user(c) : NULL;
	struct fault f = FAULT_NULL;
	struct member *m = s ? session_member(s, &f) : NULL;

	if (m) /* else it has left the job, which has dropped it then */
		job_drop_spare(m->job);
}

void svc_register(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__RegisterRequest *r = (const Shardd__V1__RegisterRequest *)request;
	struct svc_shardd *svc = userdata;
	uint32_t most = svc->jobs->node->limits.max_units_per_job;
	struct fault f = FAULT_NULL;

	if (!r->n_units || r->n_units > most) {
		if (!svc_member(call))
			return;
		fault_set(&f, FAULT_INVALID, "units", "units has %zu entries: 1 to %u are allowed",
			  r->n_units, most);
		rpc_call_fail(call, &f);
		return;
	}
	svc_try(call, request, svc->jobs->node, register_now, register_given_up, svc);
}
