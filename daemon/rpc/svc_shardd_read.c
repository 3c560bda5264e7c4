/* Readers: sessions that are not a rank. */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/log.h"
#include "rpc/arena.h"
#include "rpc/svc_shardd_impl.h"

/* An answer has units with this many tensors, and possibly more from its last unit. */
#define PAGE_TENSORS 4096u

/* ------------------------------------------------------------------- ReadJob */

/* A replica on this node's one device is as good as a unit that is nowhere else. */
static int svc_shardd_read_check_unit(const struct unit *u, struct fault *f)
{
	if (u->n_parts != 1)
		return fault_set(f, FAULT_UNIMPLEMENTED, NULL,
				 "unit '%.100s' is on %u devices: a session that is not a "
				 "rank can read only units on one device",
				 u->rec->name, u->n_parts);
	if (u->spread != 1)
		return fault_set(f, FAULT_UNIMPLEMENTED, NULL,
				 "unit '%.100s' is sharded over several nodes: a session that is "
				 "not a rank can read only units that are whole on its node",
				 u->rec->name);
	return 0;
}

/* Where the parameters are, for a process on none of the job's devices. */
static int svc_shardd_read_check_memory(const struct job *job, struct fault *f)
{
	const struct backend_info *info = backend_info(job->node->devices[0].backend);

	if (info->ordinal >= 0)
		return fault_set(f, FAULT_UNIMPLEMENTED, NULL,
				 "the parameters of job '%s' are in the memory of %s: a session "
				 "that is not a rank can read only host memory",
				 job->rec->name, info->id);
	for (uint32_t i = 0; i < job->n_units; i++)
		if (!job->units[i]->rec->dropped && svc_shardd_read_check_unit(job->units[i], f))
			return f->code;
	return 0;
}

static void svc_shardd_read_fill_tensor(const struct job *job, const struct unit *u, uint32_t i,
					Shardd__V1__ReadTensor *m)
{
	const struct unit_tensor *t = &u->tensors[i];
	const struct unit *of = t->alias ? job->units[t->of_unit - 1] : u;
	const struct unit_tensor *real = &of->tensors[t->alias ? t->of : i];
	const state_tensor *rec = u->rec->tensors[i];

	shardd__v1__read_tensor__init(m);
	m->name = rec->name;
	m->shape = rec->shape;
	m->n_shape = rec->n_shape;
	m->strides = rec->strides;
	m->n_strides = rec->n_strides;
	m->slab = of->parts[0].params.slab->id;
	m->offset = of->parts[0].params.offset +
		    unit_tensor_full(of, real) * dtype_size(unit_state_dtype(of->rec, 0));
	m->elements = real->elements;
	m->frozen = real->frozen;
	m->dtype = (Shardd__V1__Dtype)of->rec->storage_dtype;
}

static void svc_shardd_read_fill_unit(struct arena *a, const struct job *job, const struct unit *u,
				      Shardd__V1__ReadUnit *m)
{
	size_t n = u->rec->n_tensors;
	Shardd__V1__ReadTensor *tensors = arena_take(a, n * sizeof(*tensors));

	shardd__v1__read_unit__init(m);
	m->unit = u->id;
	m->name = u->rec->name;
	m->initialised = u->rec->initialised && !u->torn;
	m->tensors = arena_take(a, n * sizeof(*m->tensors));
	if (!tensors || !m->tensors)
		return;
	for (; m->n_tensors < n; m->n_tensors++) {
		m->tensors[m->n_tensors] = &tensors[m->n_tensors];
		svc_shardd_read_fill_tensor(job, u, (uint32_t)m->n_tensors, &tensors[m->n_tensors]);
	}
}

static size_t svc_shardd_read_tensors(const struct unit *u)
{
	return u->rec->dropped ? 0 : u->rec->n_tensors;
}

/* Units from index @first on. Return: the first one that is not among them. */
static uint32_t svc_shardd_read_page_end(const struct job *job, uint32_t first)
{
	size_t tensors = 0;

	while (first < job->n_units && tensors < PAGE_TENSORS)
		tensors += svc_shardd_read_tensors(job->units[first++]);
	return first;
}

static void svc_shardd_read_fill_page(struct arena *a, const struct job *job, uint32_t first,
				      Shardd__V1__ReadJobResponse *reply)
{
	uint32_t end = svc_shardd_read_page_end(job, first);
	Shardd__V1__ReadUnit *units = arena_take(a, (end - first) * sizeof(*units));

	reply->units = arena_take(a, (end - first) * sizeof(*reply->units));
	for (uint32_t i = first; units && reply->units && i < end; i++) {
		if (job->units[i]->rec->dropped)
			continue;
		reply->units[reply->n_units] = &units[reply->n_units];
		svc_shardd_read_fill_unit(a, job, job->units[i], &units[reply->n_units]);
		reply->n_units++;
	}
	reply->next = end < job->n_units ? end + 1 : 0;
	reply->generation = readers_generation(job);
	reply->world_size = job->rec->world_size;
	if (job->rec->has_commit) {
		reply->optional_step_case = SHARDD__V1__READ_JOB_RESPONSE__OPTIONAL_STEP_STEP;
		reply->step = job->rec->step;
	}
}

static int svc_shardd_read_check_first(const struct job *job, uint32_t first, struct fault *f)
{
	if (first <= job->n_units + 1)
		return 0;
	return fault_set(f, FAULT_INVALID, "first",
			 "first is %u; it must be at most %u, the next unit of the job", first,
			 job->n_units + 1);
}

void svc_read_job(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__ReadJobRequest *r = (const Shardd__V1__ReadJobRequest *)request;
	Shardd__V1__ReadJobResponse reply = SHARDD__V1__READ_JOB_RESPONSE__INIT;
	struct session *s = svc_session(call);
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct job *job;

	if (!s)
		return;
	if (svc_find_job(call, userdata, r->job, &job, &f) ||
	    job_check_open(job, proc_uid(s->proc), &f) || svc_shardd_read_check_memory(job, &f) ||
	    svc_shardd_read_check_first(job, r->first, &f) || session_read(s, job, &f)) {
		svc_refuse(call, "read", r->job, &f);
		return;
	}
	svc_shardd_read_fill_page(&a, job, r->first ? r->first - 1 : 0, &reply);
	if (a.failed) {
		fault_errno(&f, -ENOMEM, "listing a job's units");
		rpc_call_fail(call, &f);
	} else {
		rpc_call_reply(call, &reply.base);
	}
	arena_free(&a);
}

/* ---------------------------------------------------------------------- holds */

/* The reader of the call's session, or NULL with the call ended. */
static struct reader *svc_shardd_read_reader_of(struct rpc_call *call)
{
	struct session *s = svc_session(call);
	struct fault f = FAULT_NULL;

	if (!s || s->reader)
		return s ? s->reader : NULL;
	fault_set(&f, FAULT_STATE, NULL, "this session reads no job: call ReadJob");
	rpc_call_fail(call, &f);
	return NULL;
}

static void svc_shardd_read_on_granted(struct reader *r, const struct fault *f)
{
	Shardd__V1__HoldStepResponse reply = SHARDD__V1__HOLD_STEP_RESPONSE__INIT;
	struct rpc_call *call = r->userdata;

	rpc_call_on_cancelled(call, NULL, NULL);
	if (f) {
		rpc_call_fail(call, f);
		return;
	}
	reply.step = r->step;
	reply.generation = readers_generation(r->job);
	reply.hold_ms = r->hold_ms;
	rpc_call_reply(call, &reply.base);
}

static void svc_shardd_read_on_cancelled(struct rpc_call *call, void *userdata)
{
	struct fault f = FAULT_NULL;

	reader_give_up(userdata);
	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	rpc_call_fail(call, &f);
}

void svc_hold_step(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__HoldStepRequest *r = (const Shardd__V1__HoldStepRequest *)request;
	struct reader *reader = svc_shardd_read_reader_of(call);
	struct fault f = FAULT_NULL;
	uint64_t ms, until;

	(void)userdata;
	if (!reader)
		return;
	ms = !r->timeout_ms && reader->job ? reader->job->rec->op_timeout_ms : r->timeout_ms;
	until = ms ? clock_now_us() + ms * 1000u : UINT64_MAX;
	/* before the hold, which may be granted at once and end the call; its end removes this */
	rpc_call_on_cancelled(call, svc_shardd_read_on_cancelled, reader);
	if (reader_hold(reader, r->hold_ms, until, svc_shardd_read_on_granted, call, &f)) {
		rpc_call_on_cancelled(call, NULL, NULL);
		rpc_call_fail(call, &f);
	}
}

void svc_release_step(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	Shardd__V1__ReleaseStepResponse reply = SHARDD__V1__RELEASE_STEP_RESPONSE__INIT;
	struct reader *reader = svc_shardd_read_reader_of(call);
	struct fault f = FAULT_NULL;

	(void)request;
	(void)userdata;
	if (!reader)
		return;
	if (reader_release(reader, &f))
		rpc_call_fail(call, &f);
	else
		rpc_call_reply(call, &reply.base);
}
