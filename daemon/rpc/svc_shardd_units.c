/*
 * Registration of units. A whole model may be ten thousand of them, times the ranks: the loop
 * is not held for it.
 *
 *   COMPARE --the job knows this request--------------------------------------> REPLY
 *      '--else--> DECODE --on a thread--> CHECK --a slice in a turn--> BUILD -----^
 *                    ^------ something has to be made first: WAIT -----'
 *                    '------ there is no memory: the line (job/admission.h)
 *
 * All but DECODE and WAIT is done in slices (core/slices.h). Those of one job come one after
 * the other, since they make or find the same units; nothing of the job changes before BUILD,
 * which is done in one go. So a caller that disconnects leaves all of its units or none.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#include "core/check.h"
#include "core/clock.h"
#include "job/admission.h"
#include "job/base.h"
#include "job/registration.h"
#include "rpc/register_reply.h"
#include "rpc/svc_shardd_impl.h"
#include "rpc/unit_spec.h"

/* Shorter requests are decoded on the loop: that is faster than waking a thread. */
#define DECODE_HERE_BYTES (16u << 10)
/* Items between two checks of the clock. */
#define COMPARE_BYTES (1u << 20)
#define STEP_TENSORS  64u

enum stage { COMPARE, DECODE, CHECK_SPECS, BUILD, REPLY };

struct registering {
	struct slice slice;
	struct list turn;     /* in job->registrations, but while it waits */
	struct waiter waiter; /* while it waits */
	struct admission_call line;
	struct rpc_call *call;
	struct svc_shardd *svc;
	struct member *m; /* a reference */
	enum stage stage;
	struct regcache_search search;
	bool searching;
	const uint8_t *request; /* the call's */
	size_t request_bytes;

	uv_work_t work;
	bool working;   /* a thread works on it and owns the following fields */
	bool gone;      /* its caller has gone meanwhile */
	bool undecoded; /* it is not a valid message */
	uint32_t most;  /* units in one call */
	struct fault fault;
	state_unit **specs;
	size_t n_specs;

	struct registration *reg;
	uint32_t *ids;
	size_t n;
	size_t replied; /* of these */
	uint64_t charged;
	struct register_reply reply;
};

static void svc_shardd_units_advance(struct slice *slice);

/* ------------------------------------------------------------------- the end */

static void svc_shardd_units_drop_specs(struct registering *r)
{
	registration_free(r->reg);
	r->reg = NULL;
	for (size_t i = 0; i < r->n_specs; i++)
		state_unit_free(r->specs[i]);
	free(r->specs);
	r->specs = NULL;
	r->n_specs = 0;
	free(r->ids);
	r->ids = NULL;
}

/* Start the next one of the job, if this one was active. */
static void svc_shardd_units_pass_turn(struct registering *r)
{
	struct job *job = r->m->job;
	bool first = job->registrations.next == &r->turn;

	list_unlink(&r->turn);
	if (first && !list_empty(&job->registrations)) {
		struct registering *next =
			list_first(&job->registrations, struct registering, turn);

		slices_add(r->svc->slices, &next->slice, svc_shardd_units_advance);
	}
}

/* Its call has ended. */
static void svc_shardd_units_registering_free(struct registering *r)
{
	struct job *job = r->m->job;

	CHECK(!r->working);
	slice_drop(&r->slice);
	waiter_leave(&r->waiter);
	admission_leave(&r->line);
	svc_shardd_units_pass_turn(r);
	svc_shardd_units_drop_specs(r);
	register_reply_deinit(&r->reply);
	member_unref(r->m);
	free(r);
	if (job->life.deleted)
		job_settle(job);
}

static void svc_shardd_units_fail(struct registering *r, const struct fault *f)
{
	if (f->code == FAULT_EXHAUSTED)
		svc_refuse(r->call, "register", r->m->job->label, f);
	else
		rpc_call_fail(r->call, f);
	svc_shardd_units_registering_free(r);
}

static void svc_shardd_units_give_up(struct registering *r)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_CANCELLED, NULL, "the caller has given up");
	svc_shardd_units_fail(r, &f);
}

static void svc_shardd_units_on_cancelled(struct rpc_call *call, void *userdata)
{
	struct registering *r = userdata;

	(void)call;
	/* Give back what was allocated for it so far. Another rank that waits for the same then
	 * takes longer. */
	if (!list_empty(&r->waiter.link))
		job_drop_spare(r->m->job);
	if (r->working)
		r->gone = true;
	else
		svc_shardd_units_give_up(r);
}

/* Is the requesting member still the same, and is it allowed? */
static int svc_shardd_units_check_member(const struct registering *r, struct fault *f)
{
	struct conn *c = rpc_call_conn(r->call);
	struct session *s = c ? conn_user(c) : NULL;

	if (!s || s->member != r->m)
		return fault_set(f, FAULT_STATE, NULL, "this session has ended, or left its job");
	return svc_check_joined(r->m, f) ||
			       base_check_change(r->m->job, "it gets no further units", f)
		       ? (int)f->code
		       : 0;
}

/* ------------------------------------------------------------------- decoding */

static int svc_shardd_units_decode_all(struct registering *r,
				       const Shardd__V1__RegisterUnitsRequest *q, struct fault *f)
{
	if (!q->n_units || q->n_units > r->most)
		return fault_set(f, FAULT_INVALID, "units",
				 "units has %zu entries; it must have 1 to %u", q->n_units,
				 r->most);
	r->specs = calloc(q->n_units, sizeof(*r->specs));
	if (!r->specs)
		return fault_errno(f, -ENOMEM, "registering units");
	for (; !f->code && r->n_specs < q->n_units; r->n_specs += !f->code)
		unit_spec_decode(q->units[r->n_specs], r->n_specs, &r->specs[r->n_specs], f);
	return f->code;
}

/* Any thread: touches nothing but @r. */
static void svc_shardd_units_decode(struct registering *r)
{
	const ProtobufCMessage *q = rpc_call_unpack(r->call);

	r->undecoded = !q;
	if (q)
		svc_shardd_units_decode_all(r, (const Shardd__V1__RegisterUnitsRequest *)q,
					    &r->fault);
	rpc_call_drop(r->call);
}

/* Return: false: the call has ended, and @r with it. */
static bool svc_shardd_units_decoded(struct registering *r)
{
	if (r->undecoded) {
		rpc_call_refuse(r->call);
		svc_shardd_units_registering_free(r);
		return false;
	}
	if (r->fault.code) {
		svc_shardd_units_fail(r, &r->fault);
		return false;
	}
	r->stage = CHECK_SPECS;
	return true;
}

static void svc_shardd_units_on_work(uv_work_t *work)
{
	svc_shardd_units_decode(CONTAINER_OF(work, struct registering, work));
}

static void svc_shardd_units_on_worked(uv_work_t *work, int status)
{
	struct registering *r = CONTAINER_OF(work, struct registering, work);

	CHECK(status == 0); /* nothing cancels it */
	r->working = false;
	if (r->gone)
		svc_shardd_units_give_up(r);
	else if (svc_shardd_units_decoded(r))
		slices_add(r->svc->slices, &r->slice, svc_shardd_units_advance);
}

/* ------------------------------------------------------------------- the steps */

/* How a stage ends. */
enum next {
	NEXT_OVER,  /* the call is answered, and @r is freed */
	NEXT_STAGE, /* go on at once, at the end of a slice in the next one */
	NEXT_AWAIT  /* a thread or a condition resumes it */
};

static enum next svc_shardd_units_compare(struct registering *r)
{
	const struct regcache_entry *known;
	int e;

	if (!r->searching)
		regcache_search_init(&r->search, r->m->job);
	r->searching = true;
	e = regcache_search(&r->search, r->m->job, r->request, r->request_bytes, COMPARE_BYTES,
			    &known);
	if (e == KNOWN_MORE)
		return NEXT_STAGE;
	r->stage = DECODE;
	if (e == KNOWN_NO)
		return NEXT_STAGE;
	r->ids = malloc(known->n * sizeof(*r->ids));
	if (!r->ids)
		return NEXT_STAGE;
	memcpy(r->ids, known->ids, known->n * sizeof(*r->ids));
	r->n = known->n;
	r->stage = REPLY;
	return NEXT_STAGE;
}

static enum next svc_shardd_units_begin_decoding(struct registering *r)
{
	r->most = r->svc->jobs->node->limits.max_units_per_job;
	if (r->request_bytes > DECODE_HERE_BYTES &&
	    uv_queue_work(r->m->job->node->loop, &r->work, svc_shardd_units_on_work,
			  svc_shardd_units_on_worked) == 0) {
		r->working = true;
		return NEXT_AWAIT;
	}
	svc_shardd_units_decode(r);
	return svc_shardd_units_decoded(r) ? NEXT_STAGE : NEXT_OVER;
}

static void svc_shardd_units_go_on(struct registering *r)
{
	struct job *job = r->m->job;
	bool first = list_empty(&job->registrations);

	list_append(&job->registrations, &r->turn);
	if (first)
		slices_add(r->svc->slices, &r->slice, svc_shardd_units_advance);
}

static void svc_shardd_units_on_change(struct waiter *p)
{
	svc_shardd_units_go_on(CONTAINER_OF(p, struct registering, waiter));
}

static void svc_shardd_units_on_turn(struct admission_call *line)
{
	svc_shardd_units_go_on(CONTAINER_OF(line, struct registering, line));
}

/* Something that it needs is being created, or is not there: start again after that. */
static enum next svc_shardd_units_wait_for_change(struct registering *r)
{
	svc_shardd_units_drop_specs(r);
	r->stage = DECODE;
	svc_shardd_units_pass_turn(r);
	if (!r->line.waits)
		condition_wait(&r->m->job->node->changed, &r->waiter);
	return NEXT_AWAIT;
}

static enum next svc_shardd_units_check_specs(struct registering *r)
{
	struct fault f = FAULT_NULL;

	r->n = r->n_specs;
	if (!r->reg) {
		r->ids = calloc(r->n, sizeof(*r->ids));
		if (!r->ids || registration_new(r->m->job, r->specs, r->n, r->ids, &r->reg) < 0)
			fault_errno(&f, -ENOMEM, "registering units");
		else
			registration_may_wait(r->reg, &r->line);
	}
	if (!f.code && registration_check(r->reg, STEP_TENSORS, &f) == 0) {
		if (registration_is_checked(r->reg))
			r->stage = BUILD;
		return NEXT_STAGE;
	}
	job_drop_spare(r->m->job);
	svc_shardd_units_fail(r, &f);
	return NEXT_OVER;
}

static enum next svc_shardd_units_build(struct registering *r)
{
	struct fault f = FAULT_NULL;

	switch (registration_build(r->reg, &r->charged, &f)) {
	case RES_WAIT:
		return svc_shardd_units_wait_for_change(r);
	case RES_FAILED:
		svc_shardd_units_fail(r, &f);
		return NEXT_OVER;
	case RES_DONE:
		break;
	}
	regcache_add(r->m->job, r->request, r->request_bytes, r->ids, (uint32_t)r->n);
	r->stage = REPLY;
	return NEXT_STAGE;
}

/* One that was there may be dropped while the reply is made. */
static int svc_shardd_units_check_there(const struct registering *r, struct fault *f)
{
	struct job *job = r->m->job;

	for (size_t i = 0; i < r->n; i++)
		if (!job_unit_by_id(job, r->ids[i]))
			return fault_set(f, FAULT_STATE, NULL,
					 "unit '%.100s' was dropped (DropUnits) while it was "
					 "registered: register it again",
					 job->units[r->ids[i] - 1]->rec->name);
	return 0;
}

static int svc_shardd_units_add_replies(struct registering *r)
{
	struct job *job = r->m->job;
	size_t seen = 0;

	while (r->replied < r->n && seen < STEP_TENSORS) {
		uint32_t id = r->ids[r->replied];
		const struct unit *u = job->units[id - 1];

		if (member_registered(r->m, id) < 0 ||
		    register_reply_add(&r->reply, job, u, r->m->rank) < 0)
			return -ENOMEM;
		seen += 1 + u->rec->n_tensors;
		r->replied++;
	}
	return 0;
}

static enum next svc_shardd_units_reply(struct registering *r)
{
	struct fault f = FAULT_NULL;
	int e;

	if (svc_shardd_units_check_there(r, &f)) {
		svc_shardd_units_fail(r, &f);
		return NEXT_OVER;
	}
	e = svc_shardd_units_add_replies(r);
	if (e == 0 && r->replied < r->n)
		return NEXT_STAGE;
	if (e == 0)
		e = register_reply_end(&r->reply, r->charged);
	if (e == 0) {
		rpc_call_reply_packed(r->call, r->reply.bytes, r->reply.n);
		svc_shardd_units_registering_free(r);
	} else {
		fault_errno(&f, e, "answering a registration");
		svc_shardd_units_fail(r, &f);
	}
	return NEXT_OVER;
}

static enum next svc_shardd_units_step(struct registering *r)
{
	switch (r->stage) {
	case COMPARE:
		return svc_shardd_units_compare(r);
	case DECODE:
		return svc_shardd_units_begin_decoding(r);
	case CHECK_SPECS:
		return svc_shardd_units_check_specs(r);
	case BUILD:
		return svc_shardd_units_build(r);
	case REPLY:
		return svc_shardd_units_reply(r);
	}
	return NEXT_OVER;
}

/* Run until the end of the slice. */
static void svc_shardd_units_advance(struct slice *slice)
{
	struct registering *r = CONTAINER_OF(slice, struct registering, slice);
	uint64_t end = clock_now_us() + SLICE_US;
	struct fault f = FAULT_NULL;
	enum next next = NEXT_STAGE;

	if (svc_shardd_units_check_member(r, &f)) {
		svc_shardd_units_fail(r, &f);
		return;
	}
	while (next == NEXT_STAGE && clock_now_us() < end)
		next = svc_shardd_units_step(r);
	if (next == NEXT_STAGE)
		slices_add(r->svc->slices, &r->slice, svc_shardd_units_advance);
}

void svc_register(struct rpc_call *call, const ProtobufCMessage *request, void *userdata)
{
	struct member *m = svc_member(call);
	struct registering *r = m ? calloc(1, sizeof(*r)) : NULL;
	struct fault f = FAULT_NULL;

	(void)request;
	if (!m)
		return;
	if (!r) {
		fault_errno(&f, -ENOMEM, "registering units");
		rpc_call_fail(call, &f);
		return;
	}
	*r = (struct registering){ .call = call, .svc = userdata, .m = member_ref(m) };
	list_init(&r->slice.link);
	list_init(&r->turn);
	waiter_init(&r->waiter, svc_shardd_units_on_change);
	admission_call_init(&r->line, svc_shardd_units_on_turn);
	r->request = rpc_call_packed(call, &r->request_bytes);
	rpc_call_on_cancelled(call, svc_shardd_units_on_cancelled, r);
	list_append(&m->job->registrations, &r->turn);
	if (m->job->registrations.next == &r->turn)
		svc_shardd_units_advance(&r->slice);
}
