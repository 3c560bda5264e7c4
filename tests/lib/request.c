#include "request.h"

#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "daemonfix.h"
#include "publication.pb-c.h"

struct request_parts good;

static char huge[200001];
static uint8_t blob[200001];
static uint32_t small_numbers[64];
static uint32_t first_tensor;

static void set_number(const ProtobufCFieldDescriptor *f, void *at, uint64_t n)
{
	if (f->type == PROTOBUF_C_TYPE_UINT64)
		*(uint64_t *)at = n;
	else
		*(uint32_t *)at = (uint32_t)n; /* bools and enums are of this size, too */
}

static void set_list(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, struct request_value v)
{
	void *at = (char *)m + f->offset;

	if (f->type == PROTOBUF_C_TYPE_UINT64 || f->type == PROTOBUF_C_TYPE_INT64) {
		*(const uint64_t **)at = v.numbers;
	} else {
		TRAINER_CHECK(v.n <= ARRAY_SIZE(small_numbers));
		for (size_t i = 0; i < v.n; i++)
			small_numbers[i] = (uint32_t)v.numbers[i];
		*(uint32_t **)at = small_numbers;
	}
	*(size_t *)((char *)m + f->quantifier_offset) = v.n;
}

static void set_field(ProtobufCMessage *m, const ProtobufCFieldDescriptor *f,
		      struct request_value v)
{
	void *at = (char *)m + f->offset;

	if (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
		*(uint32_t *)((char *)m + f->quantifier_offset) = f->id;
	switch (v.kind) {
	case NUMBER:
		set_number(f, at, v.number);
		break;
	case REAL:
		*(double *)at = v.real;
		break;
	case TEXT:
		*(const char **)at = v.text;
		break;
	case LONG_TEXT:
		memset(huge, 'x', v.number);
		huge[v.number] = '\0';
		*(char **)at = huge;
		break;
	case BYTES:
		*(ProtobufCBinaryData *)at = (ProtobufCBinaryData){ v.number, blob };
		break;
	case NUMBERS:
		set_list(m, f, v);
		break;
	case NOTHING:
		if (f->label == PROTOBUF_C_LABEL_REPEATED)
			*(size_t *)((char *)m + f->quantifier_offset) = 0;
		else if (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
			*(int *)((char *)m + f->quantifier_offset) = 0;
		else
			*(void **)at = NULL;
		break;
	}
}

/* "units.tensors.shape": of lists of messages the first one. */
void request_set(ProtobufCMessage *m, const char *path, struct request_value v)
{
	char name[64];
	size_t n = strcspn(path, ".");
	const ProtobufCFieldDescriptor *f;
	void *at;

	snprintf(name, sizeof(name), "%.*s", (int)n, path);
	f = protobuf_c_message_descriptor_get_field_by_name(m->descriptor, name);
	TRAINER_CHECK(f);
	if (!path[n]) {
		set_field(m, f, v);
		return;
	}
	at = *(void **)((char *)m + f->offset);
	m = f->label == PROTOBUF_C_LABEL_REPEATED ? ((ProtobufCMessage **)at)[0] : at;
	request_set(m, path + n + 1, v);
}

static void good_unit(unsigned i, const char *name)
{
	Shardd__V1__UnitSpec *u = &good.unit[i];

	shardd__v1__unit_spec__init(u);
	u->name = (char *)name;
	u->tensors = good.tensors;
	u->n_tensors = 2;
	u->optimizer = &good.optimizer;
	good.units[i] = u;
}

/* Two rows of tensor 0 of unit 2, in its ddp, too. */
static void reset_rows(void)
{
	shardd__v1__ddp_tensor__init(&good.sparse);
	good.sparse.unit = good.unit_id[0] = 2;
	good.sparses[0] = &good.sparse;
	shardd__v1__sparse_rows__init(&good.rows);
	good.row[1] = 3;
	good.rows.rows = good.row;
	good.rows.n_rows = 2;
	good.rows.buffer = good.buffer;
}

void request_reset(void)
{
	uint64_t buffer = good.buffer;

	memset(&good, 0, sizeof(good));
	good.buffer = buffer;
	shardd__v1__job_spec__init(&good.job);
	good.job.name = (char *)"other";
	good.job.world_size = 2;
	shardd__v1__op_header__init(&good.header);
	shardd__v1__init__init(&good.init);
	shardd__v1__seed__init(&good.seed);
	shardd__v1__from_rank__init(&good.from);
	shardd__v1__optimizer__init(&good.optimizer);
	good.optimizer.kind = SHARDD__V1__OPTIMIZER__KIND__KIND_ADAMW;
	good.optimizer.lr = 0.1;
	good.optimizer.beta1 = 0.9;
	good.optimizer.beta2 = 0.99;
	good.optimizer.eps = 1e-8;
	good.shape[0] = 4;
	good.shape[1] = 2;
	good.ranks[0] = 1; /* not the order of the world */
	for (unsigned i = 0; i < 2; i++) {
		shardd__v1__tensor_spec__init(&good.tensor[i]);
		good.tensor[i].name = (char *)(i ? "b" : "a");
		good.tensor[i].shape = good.shape;
		good.tensor[i].n_shape = 2;
		good.tensor[i].init = &good.init;
		good.tensors[i] = &good.tensor[i];
	}
	shardd__v1__step_settings__init(&good.setting);
	good.setting.lr = 0.1;
	good.settings[0] = &good.setting;
	good_unit(0, "new0");
	good_unit(1, "new1");
	reset_rows();
}

/* What a request of @m needs beside zeros. */
static void fill_job_calls(ProtobufCMessage *m, const char *method)
{
	if (strcmp(method, "CreateJob") == 0) {
		((Shardd__V1__CreateJobRequest *)m)->job = &good.job;
	} else if (strcmp(method, "Join") == 0) {
		((Shardd__V1__JoinRequest *)m)->job = &good.job;
	} else if (strcmp(method, "Attach") == 0) {
		((Shardd__V1__AttachRequest *)m)->protocol = 1;
	} else if (strcmp(method, "CreateGroup") == 0) {
		Shardd__V1__CreateGroupRequest *r = (Shardd__V1__CreateGroupRequest *)m;

		r->name = (char *)"g";
		r->ranks = good.ranks;
		r->n_ranks = 2;
	} else if (strcmp(method, "RegisterUnits") == 0) {
		Shardd__V1__RegisterUnitsRequest *r = (Shardd__V1__RegisterUnitsRequest *)m;

		r->units = good.units;
		r->n_units = 2;
	}
}

static void fill_ops(ProtobufCMessage *m, const char *method)
{
	if (strcmp(method, "Initialise") == 0) {
		Shardd__V1__InitialiseRequest *r = (Shardd__V1__InitialiseRequest *)m;

		r->unit = 1;
		r->how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_BROADCAST;
		r->broadcast = &good.from;
		r->buffer = good.buffer;
	} else if (strcmp(method, "Reduce") == 0) {
		((Shardd__V1__ReduceRequest *)m)->unit = 1;
	} else if (strcmp(method, "AllReduce") == 0) {
		Shardd__V1__AllReduceRequest *r = (Shardd__V1__AllReduceRequest *)m;

		r->buffer = good.buffer;
		r->count = 4;
		r->dtype = SHARDD__V1__DTYPE__DTYPE_FP32;
		r->op = SHARDD__V1__REDUCE_OP__REDUCE_OP_SUM;
	} else if (strcmp(method, "Broadcast") == 0) {
		Shardd__V1__BroadcastRequest *r = (Shardd__V1__BroadcastRequest *)m;

		r->buffer = good.buffer;
		r->bytes = 16;
	} else if (strcmp(method, "DropUnits") == 0) {
		static uint32_t unit = 1;

		((Shardd__V1__DropUnitsRequest *)m)->units = &unit;
		((Shardd__V1__DropUnitsRequest *)m)->n_units = 1;
	} else if (strcmp(method, "ConvertUnits") == 0) {
		static uint32_t unit = 1;

		((Shardd__V1__ConvertUnitsRequest *)m)->units = &unit;
		((Shardd__V1__ConvertUnitsRequest *)m)->n_units = 1;
	} else if (strcmp(method, "ClipGradNorm") == 0) {
		((Shardd__V1__ClipGradNormRequest *)m)->max_norm = 1;
	} else if (strcmp(method, "BeginPass") == 0) {
		((Shardd__V1__BeginPassRequest *)m)->unit = 1;
		((Shardd__V1__BeginPassRequest *)m)->pass = SHARDD__V1__PASS__PASS_FORWARD;
	} else if (strcmp(method, "EndPass") == 0) {
		((Shardd__V1__EndPassRequest *)m)->unit = 1;
		((Shardd__V1__EndPassRequest *)m)->pass = SHARDD__V1__PASS__PASS_FORWARD;
	} else if (strcmp(method, "SetPrefetch") == 0) {
		((Shardd__V1__SetPrefetchRequest *)m)->unit = 1;
		((Shardd__V1__SetPrefetchRequest *)m)->pass = SHARDD__V1__PASS__PASS_FORWARD;
	} else if (strcmp(method, "SummonFull") == 0) {
		((Shardd__V1__SummonFullRequest *)m)->unit = 1;
	} else if (strcmp(method, "ReturnFull") == 0) {
		((Shardd__V1__ReturnFullRequest *)m)->unit = 1;
	} else if (strcmp(method, "SetFactors") == 0) {
		((Shardd__V1__SetFactorsRequest *)m)->unit = 1;
	} else if (strcmp(method, "Step") == 0) {
		((Shardd__V1__StepRequest *)m)->settings = good.settings;
		((Shardd__V1__StepRequest *)m)->n_settings = 1;
	} else if (strcmp(method, "PlanBackward") == 0) {
		((Shardd__V1__PlanBackwardRequest *)m)->settings = good.settings;
		((Shardd__V1__PlanBackwardRequest *)m)->n_settings = 1;
	} else if (strcmp(method, "CopyShard") == 0) {
		((Shardd__V1__CopyShardRequest *)m)->unit = 1;
		((Shardd__V1__CopyShardRequest *)m)->array =
			SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_PARAMETERS;
	} else if (strcmp(method, "DropGradients") == 0) {
		((Shardd__V1__DropGradientsRequest *)m)->unit = 1;
		((Shardd__V1__DropGradientsRequest *)m)->tensors = &first_tensor;
		((Shardd__V1__DropGradientsRequest *)m)->n_tensors = 1;
	} else if (strcmp(method, "Unscale") == 0) {
		((Shardd__V1__UnscaleRequest *)m)->inv_scale = 1;
	}
}

static void fill_ddp(ProtobufCMessage *m, const char *method)
{
	if (strcmp(method, "DdpCreate") == 0) {
		Shardd__V1__DdpCreateRequest *r = (Shardd__V1__DdpCreateRequest *)m;

		r->units = good.unit_id;
		r->sparse = good.sparses;
		r->n_units = r->n_sparse = 1;
	} else if (strcmp(method, "DdpForward") == 0) {
		((Shardd__V1__DdpForwardRequest *)m)->ddp = 1;
	} else if (strcmp(method, "DdpBackward") == 0) {
		((Shardd__V1__DdpBackwardRequest *)m)->ddp = 1;
	} else if (strcmp(method, "DdpReady") == 0) {
		Shardd__V1__DdpReadyRequest *r = (Shardd__V1__DdpReadyRequest *)m;

		r->ddp = 1;
		r->tensors = good.place;
		r->n_tensors = 1;
		r->rows = &good.rows;
	} else if (strcmp(method, "DdpFinish") == 0) {
		((Shardd__V1__DdpFinishRequest *)m)->ddp = 1;
	} else if (strcmp(method, "ReduceSparse") == 0) {
		((Shardd__V1__ReduceSparseRequest *)m)->unit = 2;
		((Shardd__V1__ReduceSparseRequest *)m)->rows = &good.rows;
	}
}

const ProtobufCMethodDescriptor *request_method(const char *name, const char **ret_service)
{
	static const ProtobufCServiceDescriptor *const services[] = {
		&shardd__v1__session_service__descriptor,
		&shardd__v1__job_service__descriptor,
		&shardd__v1__unit_service__descriptor,
		&shardd__v1__training_service__descriptor,
		&shardd__v1__ddp_service__descriptor,
		&shardd__v1__publication_service__descriptor,
	};
	const ProtobufCServiceDescriptor *service = &shardd__v1__status_service__descriptor;
	const ProtobufCMethodDescriptor *m = NULL;

	if (strncmp(name, "Status/", 7) == 0)
		m = protobuf_c_service_descriptor_get_method_by_name(service, name + 7);
	for (size_t i = 0; !m && i < ARRAY_SIZE(services); i++) {
		service = services[i];
		m = protobuf_c_service_descriptor_get_method_by_name(service, name);
	}
	if (m && ret_service)
		*ret_service = service->name;
	return m;
}

static const ProtobufCMessageDescriptor *input_of(const char *method)
{
	const ProtobufCMethodDescriptor *m = request_method(method, NULL);

	TRAINER_CHECK(m);
	return m->input;
}

/* @room: of any request. */
ProtobufCMessage *request_good(const char *method, void *room)
{
	const ProtobufCMessageDescriptor *d = input_of(method);
	const ProtobufCFieldDescriptor *header =
		protobuf_c_message_descriptor_get_field_by_name(d, "header");
	ProtobufCMessage *m = room;

	request_reset();
	d->message_init(m);
	if (header)
		*(Shardd__V1__OpHeader **)((char *)m + header->offset) = &good.header;
	fill_job_calls(m, method);
	fill_ops(m, method);
	fill_ddp(m, method);
	return m;
}

ProtobufCMessage *request_of_unit(const char *method, uint32_t unit)
{
	static _Alignas(16) char room[REQUEST_ROOM];
	ProtobufCMessage *m = request_good(method, room);

	request_set(m, "unit", N(unit));
	return m;
}

ProtobufCMessage *request_plain(const char *method)
{
	static _Alignas(16) char room[REQUEST_ROOM];

	return request_good(method, room);
}
