#include "rawcall.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "json/json.h"
#include "daemonfix.h"
#include "request.h"

#define CALL_MS 30000u

struct rpc_client *raw_connect(const char *socket)
{
	struct rpc_client *c = NULL;
	struct shardd_error err = { 0 };

	if (rpc_client_connect(socket, 20000, &c, &err) < 0) {
		fprintf(stderr, "connect: %s\n", err.text);
		TRAINER_CHECK(!"connected");
	}
	return c;
}

struct rpc_pending *raw_start(struct rpc_client *c, const char *method,
			      const ProtobufCMessage *request)
{
	const char *service;
	const ProtobufCMethodDescriptor *m = request_method(method, &service);
	struct rpc_pending *p = NULL;
	struct shardd_error err = { 0 };
	char path[128];

	TRAINER_CHECK(m && request->descriptor == m->input);
	snprintf(path, sizeof(path), "/%s/%s", service, m->name);
	TRAINER_CHECK(rpc_client_start(c, path, request, m->output, false, CALL_MS, &p, &err) == 0);
	return p;
}

int raw_finish(struct rpc_pending *p, ProtobufCMessage **ret, struct shardd_error *err)
{
	ProtobufCMessage *reply = NULL;
	int r;

	TRAINER_CHECK(rpc_pending_wait(p, 2 * (int)CALL_MS));
	r = rpc_pending_result(p, &reply, err);
	rpc_pending_free(p);
	if (r == 0 && ret)
		*ret = reply;
	else if (r == 0)
		protobuf_c_message_free_unpacked(reply, NULL);
	return r;
}

int raw_call(struct rpc_client *c, const char *method, const ProtobufCMessage *request,
	     ProtobufCMessage **ret, struct shardd_error *err)
{
	return raw_finish(raw_start(c, method, request), ret, err);
}

void *raw_must(struct rpc_client *c, const char *method, const ProtobufCMessage *request)
{
	ProtobufCMessage *reply = NULL;
	struct shardd_error err = { 0 };

	if (raw_call(c, method, request, &reply, &err) < 0) {
		fprintf(stderr, "%s: %s: %s\n", method, shardd_code_name(err.code), err.text);
		TRAINER_CHECK(!"succeeded");
	}
	return reply;
}

void raw_done(struct rpc_client *c, const char *method, const ProtobufCMessage *request)
{
	ProtobufCMessage *reply = raw_must(c, method, request);

	protobuf_c_message_free_unpacked(reply, NULL);
}

bool raw_refusal_is(int r, const struct shardd_error *err, int code, const char *field,
		    const char *words)
{
	if (r == -code && (!field || strcmp(err->field, field) == 0) && strstr(err->text, words))
		return true;
	fprintf(stderr, "wanted %s, field '%s', with '%s'\nbut got %s, field '%s': %s\n",
		shardd_code_name(code), field ? field : "", words, shardd_code_name(r), err->field,
		err->text);
	return false;
}

void raw_finish_refused(struct rpc_pending *p, int code, const char *field, const char *words)
{
	struct shardd_error err = { 0 };
	int r = raw_finish(p, NULL, &err);

	TRAINER_CHECK(raw_refusal_is(r, &err, code, field, words));
}

void raw_refused(struct rpc_client *c, const char *method, const ProtobufCMessage *request,
		 int code, const char *field, const char *words)
{
	raw_finish_refused(raw_start(c, method, request), code, field, words);
}

/* ------------------------------------------------------------- being a trainer */

uint64_t raw_attach_token(struct rpc_client *c, uint8_t token[SHD1_TOKEN_BYTES])
{
	Shardd__V1__AttachRequest request = SHARDD__V1__ATTACH_REQUEST__INIT;
	Shardd__V1__AttachResponse *reply;
	uint64_t session;

	request.client_name = (char *)"raw";
	request.protocol = 1;
	reply = raw_must(c, "Attach", &request.base);
	session = reply->session;
	CHECK(reply->token.len == SHD1_TOKEN_BYTES);
	memcpy(token, reply->token.data, SHD1_TOKEN_BYTES);
	protobuf_c_message_free_unpacked(&reply->base, NULL);
	return session;
}

uint64_t raw_attach(struct rpc_client *c)
{
	uint8_t token[SHD1_TOKEN_BYTES];

	return raw_attach_token(c, token);
}

uint64_t raw_join(struct rpc_client *c, const char *job, uint32_t rank, uint32_t world, bool keep)
{
	Shardd__V1__JoinRequest request = SHARDD__V1__JOIN_REQUEST__INIT;
	Shardd__V1__JobSpec spec = SHARDD__V1__JOB_SPEC__INIT;
	Shardd__V1__JoinResponse *reply;
	uint64_t epoch;

	spec.name = (char *)job;
	spec.world_size = world;
	spec.lifetime = keep ? SHARDD__V1__LIFETIME__LIFETIME_KEEP
			     : SHARDD__V1__LIFETIME__LIFETIME_EPHEMERAL;
	request.job = &spec;
	request.rank = rank;
	reply = raw_must(c, "Join", &request.base);
	epoch = reply->epoch;
	protobuf_c_message_free_unpacked(&reply->base, NULL);
	return epoch;
}

struct rpc_client *raw_trainer(const char *socket, const char *job, uint32_t rank, uint32_t world,
			       bool keep)
{
	struct rpc_client *c = raw_connect(socket);

	raw_attach(c);
	raw_join(c, job, rank, world, keep);
	return c;
}

uint32_t raw_register(struct rpc_client *c, const char *name, uint64_t elements)
{
	Shardd__V1__RegisterUnitsRequest request = SHARDD__V1__REGISTER_UNITS_REQUEST__INIT;
	Shardd__V1__UnitSpec unit = SHARDD__V1__UNIT_SPEC__INIT, *units = &unit;
	Shardd__V1__TensorSpec tensor = SHARDD__V1__TENSOR_SPEC__INIT, *tensors = &tensor;
	Shardd__V1__RegisterUnitsResponse *reply;
	uint32_t id;

	tensor.name = (char *)"t";
	tensor.shape = &elements;
	tensor.n_shape = 1;
	unit.name = (char *)name;
	unit.tensors = &tensors;
	unit.n_tensors = 1;
	request.units = &units;
	request.n_units = 1;
	reply = raw_must(c, "RegisterUnits", &request.base);
	TRAINER_CHECK(reply->n_units == 1 && reply->units[0]->elements == elements);
	id = reply->units[0]->unit;
	protobuf_c_message_free_unpacked(&reply->base, NULL);
	return id;
}

uint64_t raw_alloc(struct rpc_client *c, uint64_t bytes)
{
	Shardd__V1__AllocBufferRequest request = SHARDD__V1__ALLOC_BUFFER_REQUEST__INIT;
	Shardd__V1__AllocBufferResponse *reply;
	uint64_t id;

	request.bytes = bytes;
	reply = raw_must(c, "AllocBuffer", &request.base);
	TRAINER_CHECK(reply->place && reply->place->bytes == bytes && reply->place->writable);
	id = reply->buffer;
	protobuf_c_message_free_unpacked(&reply->base, NULL);
	return id;
}

void raw_init(struct rpc_client **world, unsigned n, uint32_t unit)
{
	Shardd__V1__InitialiseRequest request = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__Seed seed = SHARDD__V1__SEED__INIT;
	struct rpc_pending *pending[64];
	struct shardd_error err = { 0 };

	TRAINER_CHECK(n <= ARRAY_SIZE(pending));
	request.unit = unit;
	request.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_SEED;
	request.seed = &seed;
	for (unsigned i = 0; i < n; i++)
		pending[i] = raw_start(world[i], "Initialise", &request.base);
	for (unsigned i = 0; i < n; i++)
		TRAINER_CHECK(raw_finish(pending[i], NULL, &err) == 0);
}

/* ---------------------------------------------------------------- its state */

/* An empty text may lie in memory that is not to be written. */
static void blank(char *text)
{
	if (*text)
		*text = '\0';
}

/* Made when a job first needs one, kept for all that come later; and a device gives memory
 * back, with its descriptor, when it comes to it. */
static void forget_devices(Shardd__V1__GetStatusResponse *s)
{
	if (strcmp(daemonfix_backend(), "host") != 0)
		s->open_descriptors = 0;
	while (s->n_comms > 0)
		shardd__v1__comm_status__free_unpacked(s->comms[--s->n_comms], NULL);
	for (size_t i = 0; i < s->n_devices; i++)
		s->devices[i]->overhead_bytes = 0;
}

/* What is used stays as it was; a call of Status before this one may not be over yet. */
static void forget_peaks(Shardd__V1__GetStatusResponse *s)
{
	for (size_t i = 0; i < s->n_users; i++)
		for (size_t k = 0; k < s->users[i]->n_usage; k++) {
			Shardd__V1__UserUsage *u = s->users[i]->usage[k];

			u->peak = 0;
			u->refused = 0;
			if (strcmp(u->name, "status_calls") == 0)
				u->used = 0;
		}
}

static void forget_counters(Shardd__V1__GetStatusResponse *s)
{
	s->uptime_s = 0;
	forget_devices(s);
	forget_peaks(s);
	for (size_t i = 0; i < s->n_jobs; i++) {
		Shardd__V1__JobStatus *j = s->jobs[i];

		j->ops_total = 0;
		j->ops_failed = 0;
		blank(j->last_error);
		j->last_error_us = 0;
		for (size_t k = 0; k < j->n_ranks; k++) {
			blank(j->ranks[k]->last_op);
			j->ranks[k]->next_number = 0;
			j->ranks[k]->waited_us = 0;
			j->ranks[k]->late_us = 0;
		}
	}
	for (size_t i = 0; i < s->n_sessions; i++) {
		s->sessions[i]->age_s = 0;
		s->sessions[i]->ops_total = 0;
	}
}

static bool has_deleted_jobs(const Shardd__V1__GetStatusResponse *s)
{
	for (size_t i = 0; i < s->n_jobs; i++)
		if (s->jobs[i]->state == SHARDD__V1__JOB_STATE__JOB_STATE_DELETED)
			return true;
	return false;
}

/* One that was made by a call and refused goes when its devices have done with it. */
static Shardd__V1__GetStatusResponse *settled_status(struct rpc_client *c)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	const struct timespec pause = { 0, 2000000 };
	Shardd__V1__GetStatusResponse *reply;

	request.with_units = true;
	request.with_slabs = true;
	for (unsigned i = 0;; i++) {
		reply = raw_must(c, "Status/GetStatus", &request.base);
		if (!has_deleted_jobs(reply))
			return reply;
		TRAINER_CHECK(i < 2500);
		protobuf_c_message_free_unpacked(&reply->base, NULL);
		nanosleep(&pause, NULL);
	}
}

char *raw_state(struct rpc_client *c)
{
	Shardd__V1__GetStatusResponse *reply = settled_status(c);
	json_t *j;
	char *text;

	forget_counters(reply);
	j = json_from_message(&reply->base);
	text = json_dumps(j, JSON_INDENT(1));
	json_decref(j);
	protobuf_c_message_free_unpacked(&reply->base, NULL);
	TRAINER_CHECK(text);
	return text;
}

bool raw_same_state(const char *before, const char *after, const char *what)
{
	size_t at = 0, begin;

	if (strcmp(before, after) == 0)
		return true;
	while (before[at] == after[at])
		at++;
	begin = at > 200 ? at - 200 : 0;
	fprintf(stderr, "%s: the state has changed\n--- before: %.300s\n--- after: %.300s\n", what,
		before + begin, after + begin);
	return false;
}
