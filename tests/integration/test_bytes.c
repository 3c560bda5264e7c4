/* ReadBytes and WriteBytes: a trainer that maps nothing and has only gRPC. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "daemonfix.h"
#include "fdcheck.h"
#include "rawcall.h"
#include "request.h"
#include "trainfix.h"

TestSuite(bytes, .timeout = 120, .init = fdcheck_begin, .fini = fdcheck_end);

enum { N = 1000, MIB = 1 << 20 };

#define READ(field, FIELD, value, at, n)                                               \
	(Shardd__V1__ReadBytesRequest)                                                 \
	{                                                                              \
		PROTOBUF_C_MESSAGE_INIT(&shardd__v1__read_bytes_request__descriptor),  \
			.memory_case = SHARDD__V1__READ_BYTES_REQUEST__MEMORY_##FIELD, \
			.field = (value), .offset = (at), .bytes = (n)                 \
	}
#define WRITE(field, FIELD, value, at, n, from)                                         \
	(Shardd__V1__WriteBytesRequest)                                                 \
	{                                                                               \
		PROTOBUF_C_MESSAGE_INIT(&shardd__v1__write_bytes_request__descriptor),  \
			.memory_case = SHARDD__V1__WRITE_BYTES_REQUEST__MEMORY_##FIELD, \
			.field = (value), .offset = (at), .data = {                     \
				(n),                                                    \
				(uint8_t *)(from)                                       \
			}                                                               \
	}

static void expect_bytes(struct rpc_client *c, Shardd__V1__ReadBytesRequest r, const void *want)
{
	Shardd__V1__ReadBytesResponse *reply = raw_must(c, "ReadBytes", &r.base);

	TRAINER_CHECK(reply->data.len == r.bytes);
	TRAINER_CHECK(memcmp(reply->data.data, want, r.bytes) == 0);
	protobuf_c_message_free_unpacked(&reply->base, NULL);
}

static void write_bytes(struct rpc_client *c, Shardd__V1__WriteBytesRequest r)
{
	raw_done(c, "WriteBytes", &r.base);
}

static void on_unit(struct rpc_client *c, const char *method, uint32_t unit)
{
	Shardd__V1__SummonFullRequest r = SHARDD__V1__SUMMON_FULL_REQUEST__INIT;
	const ProtobufCMethodDescriptor *m = request_method(method, NULL);

	r.unit = unit;
	r.base.descriptor = m->input; /* begins in the same way, and is no longer */
	raw_done(c, method, &r.base);
}

static void init(struct rpc_client *c, uint32_t unit, const float *values)
{
	Shardd__V1__InitialiseRequest r = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__Own own = SHARDD__V1__OWN__INIT;

	r.unit = unit;
	r.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_OWN;
	r.own = &own;
	r.data = (ProtobufCBinaryData){ N * sizeof(*values), (uint8_t *)values };
	raw_done(c, "Initialise", &r.base);
}

static void refuse_read(struct rpc_client *c, Shardd__V1__ReadBytesRequest r, int code,
			const char *field, const char *words)
{
	raw_refused(c, "ReadBytes", &r.base, code, field, words);
}

static int train(const struct trainer *t)
{
	struct rpc_client *c = raw_trainer(t->socket, "bytes", 0, 1, false);
	Shardd__V1__ReturnFullRequest back = SHARDD__V1__RETURN_FULL_REQUEST__INIT;
	float params[N], grads[N];
	uint32_t u = raw_register(c, "u", N);

	for (unsigned i = 0; i < N; i++) {
		params[i] = (float)i;
		grads[i] = 2 * (float)i;
	}
	init(c, u, params);
	/* only what has been handed out */
	refuse_read(c, READ(gathered, GATHERED, u, 0, 4), SHARDD_FAILED_PRECONDITION, "",
		    "has not gathered unit 'u': call Gather first");
	refuse_read(c, READ(gradient, GRADIENT, u, 0, 4), SHARDD_FAILED_PRECONDITION, "",
		    "has no gradient buffer of unit 'u'");
	refuse_read(c, READ(summoned, SUMMONED, u, 0, 4), SHARDD_FAILED_PRECONDITION, "",
		    "has not summoned unit 'u'");
	refuse_read(c, READ(buffer, BUFFER, 7, 0, 4), SHARDD_NOT_FOUND, "buffer", "no buffer 7");

	on_unit(c, "Gather", u);
	expect_bytes(c, READ(gathered, GATHERED, u, 0, sizeof(params)), params);
	expect_bytes(c, READ(gathered, GATHERED, u, 4 * 17 + 1, 5), (char *)params + 4 * 17 + 1);
	refuse_read(c, READ(gathered, GATHERED, u, sizeof(params) - 3, 4), SHARDD_INVALID_ARGUMENT,
		    "offset", "do not fit 4000 bytes");
	refuse_read(c, READ(gathered, GATHERED, u, UINT64_MAX, 4), SHARDD_INVALID_ARGUMENT,
		    "offset", "18446744073709551615");
	refuse_read(c, READ(gathered, GATHERED, u, 0, 0), SHARDD_INVALID_ARGUMENT, "bytes", "1 to");
	refuse_read(c, READ(gathered, GATHERED, u, 0, MIB + 1), SHARDD_INVALID_ARGUMENT, "bytes",
		    "1048577");
	refuse_read(c, READ(gathered, _NOT_SET, u, 0, 4), SHARDD_INVALID_ARGUMENT, "memory",
		    "memory is missing");
	on_unit(c, "Release", u);
	refuse_read(c, READ(gathered, GATHERED, u, 0, 4), SHARDD_FAILED_PRECONDITION, "",
		    "has not gathered");

	on_unit(c, "GradientBuffer", u);
	write_bytes(c, WRITE(gradient, GRADIENT, u, 0, sizeof(grads), grads));
	grads[3] = -1;
	write_bytes(c, WRITE(gradient, GRADIENT, u, 12, 4, &grads[3]));
	expect_bytes(c, READ(gradient, GRADIENT, u, 0, sizeof(grads)), grads);

	on_unit(c, "SummonFull", u);
	expect_bytes(c, READ(summoned, SUMMONED, u, 0, sizeof(params)), params);
	params[N - 1] = 123;
	write_bytes(c, WRITE(summoned, SUMMONED, u, sizeof(params) - 4, 4, &params[N - 1]));
	back.unit = u;
	back.write = true;
	raw_done(c, "ReturnFull", &back.base);
	on_unit(c, "Gather", u);
	expect_bytes(c, READ(gathered, GATHERED, u, 0, sizeof(params)), params);
	rpc_client_close(c);
	return 0;
}

Test(bytes, of_everything_that_is_handed_out)
{
	struct daemonfix d;

	daemonfix_start(&d, NULL);
	trainers_run(&d, "unused", 1, train, NULL, 60);
	daemonfix_stop(&d);
}

/* As much as one call may have, at the end of a buffer; and nothing behind it. */
static int buffers(const struct trainer *t)
{
	struct rpc_client *c = raw_trainer(t->socket, "bytes", 0, 1, false);
	Shardd__V1__WriteBytesRequest w;
	uint64_t b = raw_alloc(c, 2 * MIB);
	uint8_t *data = malloc(MIB), *zeros = calloc(1, MIB);

	TRAINER_CHECK(data && zeros);
	for (unsigned i = 0; i < MIB; i++)
		data[i] = (uint8_t)(i * 7 + (i >> 8));
	write_bytes(c, WRITE(buffer, BUFFER, b, MIB, MIB, data));
	expect_bytes(c, READ(buffer, BUFFER, b, 0, MIB), zeros);
	expect_bytes(c, READ(buffer, BUFFER, b, MIB, MIB), data);
	w = WRITE(buffer, BUFFER, b, MIB + 1, MIB, data);
	raw_refused(c, "WriteBytes", &w.base, SHARDD_INVALID_ARGUMENT, "offset", "do not fit");
	w = WRITE(buffer, BUFFER, b, 0, 0, NULL);
	raw_refused(c, "WriteBytes", &w.base, SHARDD_INVALID_ARGUMENT, "bytes", "1 to");
	expect_bytes(c, READ(buffer, BUFFER, b, MIB, MIB), data);
	free(data);
	free(zeros);
	rpc_client_close(c);
	return 0;
}

Test(bytes, of_a_buffer_a_mebibyte_at_a_time)
{
	struct daemonfix d;

	daemonfix_start(&d, NULL);
	trainers_run(&d, "unused", 1, buffers, NULL, 60);
	daemonfix_stop(&d);
}

/* -- a unit of a group that the rank is not in ----------------------------------- */

static uint32_t group_of(struct rpc_client *c, uint32_t rank)
{
	Shardd__V1__CreateGroupRequest r = SHARDD__V1__CREATE_GROUP_REQUEST__INIT;
	Shardd__V1__CreateGroupResponse *reply;
	uint32_t id;

	r.name = (char *)"zero";
	r.ranks = &rank;
	r.n_ranks = 1;
	reply = raw_must(c, "CreateGroup", &r.base);
	id = reply->group;
	protobuf_c_message_free_unpacked(&reply->base, NULL);
	return id;
}

static void register_in(struct rpc_client *c, uint32_t group)
{
	Shardd__V1__RegisterUnitsRequest request = SHARDD__V1__REGISTER_UNITS_REQUEST__INIT;
	Shardd__V1__UnitSpec unit = SHARDD__V1__UNIT_SPEC__INIT, *units = &unit;
	Shardd__V1__TensorSpec tensor = SHARDD__V1__TENSOR_SPEC__INIT, *tensors = &tensor;
	uint64_t elements = N;

	tensor.name = (char *)"t";
	tensor.shape = &elements;
	tensor.n_shape = 1;
	unit.name = (char *)"of zero";
	unit.group = group;
	unit.tensors = &tensors;
	unit.n_tensors = 1;
	request.units = &units;
	request.n_units = 1;
	raw_done(c, "RegisterUnits", &request.base);
}

/* On several devices that unit has no part on the device of rank 1. */
static int foreign(const struct trainer *t)
{
	struct rpc_client *c = raw_trainer(t->socket, "foreign", t->rank, 2, false);
	Shardd__V1__BarrierRequest barrier = SHARDD__V1__BARRIER_REQUEST__INIT;

	if (t->rank == 0)
		register_in(c, group_of(c, 0));
	raw_done(c, "Barrier", &barrier.base);
	(void)raw_register(c, "of both", N);
	if (t->rank == 1)
		refuse_read(c, READ(gathered, GATHERED, 1, 0, 4), SHARDD_INVALID_ARGUMENT, "unit",
			    "rank 1 is no member of the group of unit 'of zero'");
	raw_done(c, "Barrier", &barrier.base);
	rpc_client_close(c);
	return 0;
}

Test(bytes, not_of_a_unit_of_a_foreign_group)
{
	struct daemonfix d;

	daemonfix_start(&d, NULL);
	trainers_run(&d, "unused", 2, foreign, NULL, 60);
	daemonfix_stop(&d);
}
