/* Reading a job without being a rank of it. */
#include <stdlib.h>
#include <string.h>

#include "client.h"
#include "call.h"
#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "methods.h"
#include "shardd.pb-c.h"

#define READER_MAGIC 0x53524452u

/* The daemon's own deadline is to come first: its error says what was waited for. */
#define GRACE_MS 2000u

/* Units may be added while they are listed: how often the listing starts again. */
#define MOST_LISTINGS 16u

/* What the daemon said of the job's units, in several answers. */
struct listing {
	ProtobufCMessage **pages; /* owned: names and shapes are theirs */
	size_t n_pages;
	struct shardd_read_unit *units;
	size_t n_units;
	struct shardd_read_tensor *tensors;
	size_t n_tensors;
	uint64_t generation;
};

struct shardd_reader {
	unsigned connection; /* of the client, by number, that the units were listed over */
	uint32_t magic;
	struct shardd_client *c; /* borrowed */
	char *job;
	struct listing all;
	bool held;
	bool told; /* of @all */
};

static void reader_listing_deinit(struct listing *l)
{
	for (size_t i = 0; i < l->n_pages; i++)
		protobuf_c_message_free_unpacked(l->pages[i], NULL);
	free(l->pages);
	free(l->units);
	free(l->tensors);
	*l = (struct listing){ 0 };
}

static struct shardd_reader *reader_free(struct shardd_reader *r)
{
	if (!r)
		return NULL;
	reader_listing_deinit(&r->all);
	free(r->job);
	r->magic = 0;
	free(r);
	return NULL;
}

static void reader_freep(struct shardd_reader **r)
{
	*r = reader_free(*r);
}

static int reader_check(const struct shardd_reader *r, struct shardd_error *err)
{
	if (!r)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "reader", "the reader is NULL");
	MAGIC_CHECK(r, READER_MAGIC);
	return client_check(r->c, err);
}

/* ---------------------------------------------------------------------- units */

static const Shardd__V1__ReadJobResponse *reader_page(const struct listing *l, size_t i)
{
	return (const Shardd__V1__ReadJobResponse *)l->pages[i];
}

static int reader_fetch_page(struct shardd_reader *r, struct listing *l, uint32_t first,
			     struct shardd_error *err)
{
	Shardd__V1__ReadJobRequest request = SHARDD__V1__READ_JOB_REQUEST__INIT;
	ProtobufCMessage **grown = realloc(l->pages, (l->n_pages + 1) * sizeof(*grown));
	int e;

	if (!grown)
		return error_memory(err);
	l->pages = grown;
	request.job = r->job;
	request.first = first;
	e = call_again(r->c, METHOD_ReadJob, &request.base,
		       &shardd__v1__read_job_response__descriptor, &l->pages[l->n_pages], err);
	if (e < 0)
		return e;
	l->n_pages++;
	return 0;
}

/* All answers, if they are of one generation. Return: 1: they are not. */
static int reader_fetch_pages(struct shardd_reader *r, struct listing *l, struct shardd_error *err)
{
	uint32_t next = 0;

	do {
		const Shardd__V1__ReadJobResponse *p;
		int e = reader_fetch_page(r, l, next, err);

		if (e < 0)
			return e;
		p = reader_page(l, l->n_pages - 1);
		if (p->next && p->next <= next)
			return error_set(err, SHARDD_INTERNAL, NULL,
					 "the daemon lists unit %u after unit %u", p->next, next);
		if (p->generation != reader_page(l, 0)->generation)
			return 1;
		next = p->next;
	} while (next);
	l->generation = reader_page(l, 0)->generation;
	return 0;
}

static int reader_take_tensor(struct shardd_reader *r, const Shardd__V1__ReadTensor *m,
			      struct shardd_read_tensor *t, struct shardd_error *err)
{
	struct map_place place = { .slab = m->slab,
				   .offset = m->offset,
				   .bytes = m->elements *
					    shardd_dtype_size((enum shardd_dtype)m->dtype) };
	void *at = NULL;
	int e;

	if (m->elements > UINT64_MAX / sizeof(float) ||
	    !shardd_dtype_size((enum shardd_dtype)m->dtype) || m->n_shape > UINT32_MAX ||
	    (m->n_strides && m->n_strides != m->n_shape))
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "the daemon sent an invalid description of a tensor");
	e = map_address(&r->c->map, &place, -1, &at, err);
	if (e < 0)
		return e;
	*t = (struct shardd_read_tensor){ .name = m->name,
					  .shape = m->shape,
					  .strides = m->n_strides ? m->strides : NULL,
					  .dims = (uint32_t)m->n_shape,
					  .frozen = m->frozen,
					  .elements = m->elements,
					  .dtype = (enum shardd_dtype)m->dtype,
					  .data = at };
	return 0;
}

static int reader_make_room(struct listing *l)
{
	size_t units = 0, tensors = 0;

	for (size_t i = 0; i < l->n_pages; i++) {
		units += reader_page(l, i)->n_units;
		for (size_t k = 0; k < reader_page(l, i)->n_units; k++)
			tensors += reader_page(l, i)->units[k]->n_tensors;
	}
	l->units = calloc(units + 1, sizeof(*l->units));
	l->tensors = calloc(tensors + 1, sizeof(*l->tensors));
	return l->units && l->tensors ? 0 : -1;
}

static int reader_take_unit(struct shardd_reader *r, struct listing *l,
			    const Shardd__V1__ReadUnit *m, struct shardd_error *err)
{
	struct shardd_read_tensor *first = &l->tensors[l->n_tensors];

	for (size_t i = 0; i < m->n_tensors; i++) {
		int e = reader_take_tensor(r, m->tensors[i], &first[i], err);

		if (e < 0)
			return e;
	}
	l->n_tensors += m->n_tensors;
	l->units[l->n_units++] =
		(struct shardd_read_unit){ m->name, m->initialised, first, m->n_tensors };
	return 0;
}

static int reader_take_pages(struct shardd_reader *r, struct listing *l, struct shardd_error *err)
{
	if (reader_make_room(l) < 0)
		return error_memory(err);
	for (size_t i = 0; i < l->n_pages; i++)
		for (size_t k = 0; k < reader_page(l, i)->n_units; k++) {
			int e = reader_take_unit(r, l, reader_page(l, i)->units[k], err);

			if (e < 0)
				return e;
		}
	return 0;
}

/* Replaces what is known. */
static int reader_list_units(struct shardd_reader *r, struct shardd_error *err)
{
	unsigned connection = atomic_load(&r->c->reconnect.count);
	struct listing l = { 0 };
	int e = 1;

	for (unsigned i = 0; e > 0 && i < MOST_LISTINGS; i++) {
		reader_listing_deinit(&l);
		e = reader_fetch_pages(r, &l, err);
	}
	if (e > 0)
		e = error_set(err, SHARDD_UNAVAILABLE, NULL,
			      "the units of job '%s' changed while they were listed: try again",
			      r->job);
	if (e == 0)
		e = reader_take_pages(r, &l, err);
	if (e < 0) {
		reader_listing_deinit(&l);
		return e;
	}
	reader_listing_deinit(&r->all);
	r->all = l;
	r->connection = connection;
	r->told = false;
	return 0;
}

/* ------------------------------------------------------------------- open, close */

int shardd_reader_open(shardd_client *c, const char *job, shardd_reader **ret,
		       struct shardd_error *err)
{
	_cleanup_(reader_freep) struct shardd_reader *r = NULL;
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = client_check(c, err);
	if (e < 0)
		return e;
	if (!job || !ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, job ? "ret" : "job",
				 "the argument is NULL");
	r = calloc(1, sizeof(*r));
	if (r)
		r->job = strdup(job);
	if (!r || !r->job)
		return error_memory(err);
	r->magic = READER_MAGIC;
	r->c = c;
	e = reader_list_units(r, err);
	if (e < 0)
		return e;
	*ret = STEAL_PTR(r);
	return 0;
}

/* Has the connection been made again since the units were listed? */
static bool reader_is_before(const struct shardd_reader *r)
{
	return r->connection != atomic_load(&r->c->reconnect.count);
}

static int reader_release(struct shardd_reader *r, struct shardd_error *err)
{
	Shardd__V1__ReleaseStepRequest request = SHARDD__V1__RELEASE_STEP_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;

	r->held = false;
	if (reader_is_before(r))
		return error_set(err, SHARDD_ABORTED, NULL,
				 "the daemon was restarted while the step was held: what was read "
				 "may be of several steps; hold a step again");
	return call_make(r->c, METHOD_ReleaseStep, &request.base,
			 &shardd__v1__release_step_response__descriptor, &reply, err);
}

void shardd_reader_close(shardd_reader *r)
{
	struct shardd_error ignored;

	if (!r || reader_check(r, NULL) < 0)
		return;
	if (r->held)
		(void)reader_release(r, &ignored);
	reader_free(r);
}

/* ---------------------------------------------------------------------- holds */

static int reader_ask(struct shardd_reader *r, uint32_t hold_ms, uint32_t timeout_ms,
		      ProtobufCMessage **ret, struct shardd_error *err)
{
	Shardd__V1__HoldStepRequest request = SHARDD__V1__HOLD_STEP_REQUEST__INIT;
	uint32_t longest = INT32_MAX - GRACE_MS;
	struct shardd_error ignored;
	struct link *l;
	uint32_t link;
	int e;

	request.hold_ms = hold_ms;
	request.timeout_ms = timeout_ms;
	l = client_use_link(r->c);
	e = rpc_client_call(
		l->rpc, METHOD_HoldStep, &request.base, &shardd__v1__hold_step_response__descriptor,
		!timeout_ms ? 0 : (timeout_ms > longest ? longest : timeout_ms) + GRACE_MS, ret,
		err);
	link = l->number;
	client_unuse_link(r->c, l);
	e = call_after_loss(r->c, link, e, err);
	if (e ==
	    -SHARDD_DEADLINE_EXCEEDED) /* perhaps of the call alone, and it was granted since */
		(void)reader_release(r, &ignored);
	return e;
}

int shardd_reader_hold(shardd_reader *r, uint32_t hold_ms, uint32_t timeout_ms,
		       struct shardd_snapshot *ret, struct shardd_error *err)
{
	_cleanup_(client_messagep) ProtobufCMessage *message = NULL;
	const Shardd__V1__HoldStepResponse *reply;
	struct shardd_error scratch, ignored;
	int e;

	err = err ? err : &scratch;
	e = reader_check(r, err);
	if (e == 0 && !ret)
		e = error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL");
	if (e == 0 && reader_is_before(r)) /* the new daemon does not know the reader */
		e = reader_list_units(r, err);
	if (e == 0)
		e = reader_ask(r, hold_ms, timeout_ms, &message, err);
	if (e < 0)
		return e;
	r->held = true;
	reply = (const Shardd__V1__HoldStepResponse *)message;
	if (reply->generation != r->all.generation)
		e = reader_list_units(r, err);
	if (e < 0) {
		(void)reader_release(r, &ignored);
		return e;
	}
	*ret = (struct shardd_snapshot){ .step = reply->step,
					 .hold_ms = reply->hold_ms,
					 .units = r->all.units,
					 .n_units = r->all.n_units,
					 .changed = !r->told };
	r->told = true;
	return 0;
}

int shardd_reader_release(shardd_reader *r, struct shardd_error *err)
{
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = reader_check(r, err);
	return e < 0 ? e : reader_release(r, err);
}
