/* Bases: sessions that map them. */
#include <errno.h>

#include "job/base.h"
#include "rpc/arena.h"
#include "rpc/svc_shardd_impl.h"

/* An answer has units with this many tensors, and possibly more from its last unit. */
#define SVC_BASE_PAGE 4096u

static void svc_shardd_base_fill_tensor(const struct job *job, const struct unit *u, uint32_t i,
					Shardd__V1__BaseTensor *m)
{
	const struct unit_tensor *t = &u->tensors[i];
	const struct unit *of = t->alias ? job->units[t->of_unit - 1] : u;
	const struct unit_tensor *real = &of->tensors[t->alias ? t->of : i];
	const state_tensor *rec = u->rec->tensors[i];

	shardd__v1__base_tensor__init(m);
	m->unit = u->rec->name;
	m->name = rec->name;
	m->shape = rec->shape;
	m->n_shape = rec->n_shape;
	m->strides = rec->strides;
	m->n_strides = rec->n_strides;
	m->dtype = (Shardd__V1__Dtype)of->rec->storage_dtype;
	m->frozen = real->frozen;
	m->slab = of->parts[0].params.slab->id;
	m->offset = of->parts[0].params.offset +
		    unit_tensor_full(of, real) * dtype_size(unit_state_dtype(of->rec, 0));
	m->elements = real->elements;
}

static size_t svc_shardd_base_tensors(const struct unit *u)
{
	return u->rec->dropped || !u->rec->initialised ? 0 : u->rec->n_tensors;
}

/* Is there a value? An alias has none if its tensor's unit was not initialised. */
static bool svc_shardd_base_has(const struct job *job, const struct unit *u, uint32_t i)
{
	const struct unit_tensor *t = &u->tensors[i];

	return !t->alias || job->units[t->of_unit - 1]->rec->initialised;
}

static void svc_shardd_base_fill_page(struct arena *a, const struct job *job, uint32_t first,
				      Shardd__V1__ReadBaseResponse *reply)
{
	Shardd__V1__BaseTensor *tensors;
	uint32_t end = first;
	size_t n = 0;

	while (end < job->n_units && n < SVC_BASE_PAGE)
		n += svc_shardd_base_tensors(job->units[end++]);
	reply->next = end < job->n_units ? end + 1 : 0;
	tensors = arena_take(a, n * sizeof(*tensors));
	reply->tensors = arena_take(a, n * sizeof(*reply->tensors));
	if (!tensors || !reply->tensors)
		return;
	for (uint32_t k = first; k < end; k++)
		for (uint32_t i = 0; i < svc_shardd_base_tensors(job->units[k]); i++) {
			if (!svc_shardd_base_has(job, job->units[k], i))
				continue;
			svc_shardd_base_fill_tensor(job, job->units[k], i, tensors);
			reply->tensors[reply->n_tensors++] = tensors++;
		}
}

static int svc_shardd_base_check_first(const struct job *job, uint32_t first, struct fault *f)
{
	if (first <= job->n_units)
		return 0;
	return fault_set(f, FAULT_INVALID, "first", "first is %u: the base has %u units", first,
			 job->n_units);
}

void svc_read_base(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	const Shardd__V1__ReadBaseRequest *r = (const Shardd__V1__ReadBaseRequest *)request;
	Shardd__V1__ReadBaseResponse reply = SHARDD__V1__READ_BASE_RESPONSE__INIT;
	struct session *s = svc_session(call);
	struct arena a = ARENA_NULL;
	struct fault f = FAULT_NULL;
	struct job *job;

	if (!s)
		return;
	if (svc_find_job(call, userdata, r->job, &job, &f) ||
	    job_check_open(job, proc_uid(s->proc), &f) ||
	    svc_shardd_base_check_first(job, r->first, &f) || session_read_base(s, job, &f)) {
		svc_refuse(call, "read", r->job, &f);
		return;
	}
	svc_shardd_base_fill_page(&a, job, r->first ? r->first - 1 : 0, &reply);
	if (a.failed) {
		fault_errno(&f, -ENOMEM, "listing the tensors of a base");
		rpc_call_fail(call, &f);
	} else {
		rpc_call_reply(call, &reply.base);
	}
	arena_free(&a);
}
