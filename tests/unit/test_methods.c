/* The ring's table of methods (methods.h) against the services and their messages. */
#include <criterion/criterion.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "fdcheck.h"
#include "op/op.h"
#include "op/op_util.h"
#include "methods.h"
#include "request.h"
#include "ring_abi.h"
#include "publication.pb-c.h"
#include "shardd.pb-c.h"

TestSuite(methods, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 20);

/* The services whose methods have a number. */
static const ProtobufCServiceDescriptor *const services[] = {
	&shardd__v1__session_service__descriptor, &shardd__v1__job_service__descriptor,
	&shardd__v1__unit_service__descriptor,    &shardd__v1__training_service__descriptor,
	&shardd__v1__ddp_service__descriptor,     &shardd__v1__publication_service__descriptor,
};

/* Numbers as released. A line here never changes: a client of another version uses them. */
static const struct {
	const char *name;
	uint16_t number;
} pinned[] = {
	{ "Attach", 1 },
	{ "Watch", 2 },
	{ "CreateJob", 3 },
	{ "DeleteJob", 4 },
	{ "DrainJob", 5 },
	{ "Join", 6 },
	{ "Leave", 7 },
	{ "CreateGroup", 8 },
	{ "RegisterUnits", 9 },
	{ "ShareEvents", 10 },
	{ "Initialise", 11 },
	{ "Gather", 12 },
	{ "Release", 13 },
	{ "GradientBuffer", 14 },
	{ "AllocBuffer", 15 },
	{ "FreeBuffer", 16 },
	{ "Reduce", 17 },
	{ "AllReduce", 18 },
	{ "Broadcast", 19 },
	{ "Barrier", 20 },
	{ "ClipGradNorm", 21 },
	{ "Step", 22 },
	{ "Commit", 23 },
	{ "BeginPass", 24 },
	{ "EndPass", 25 },
	{ "SetReshard", 26 },
	{ "UnitBuffers", 27 },
	{ "BroadcastBuffers", 28 },
	{ "SummonFull", 29 },
	{ "ReturnFull", 30 },
	{ "ConvertUnits", 31 },
	{ "Accumulate", 32 },
	{ "SetPrefetch", 33 },
	{ "ClipGradValue", 34 },
	{ "Unscale", 35 },
	{ "PlanBackward", 36 },
	{ "NextShard", 37 },
	{ "ShardDone", 38 },
	{ "VerifyModel", 39 },
	{ "DdpCreate", 40 },
	{ "DdpForward", 41 },
	{ "DdpBackward", 42 },
	{ "DdpReady", 43 },
	{ "DdpFinish", 44 },
	{ "ReduceSparse", 45 },
	{ "JoinUneven", 46 },
	{ "SetFactors", 47 },
	/* 48 to 50 were those of readers that held steps */
	{ "ReadBytes", 51 },
	{ "WriteBytes", 52 },
	{ "CopyShard", 53 },
	{ "DropGradients", 54 },
	{ "DropUnits", 55 },
	{ "Checkpoint", 56 },
	{ "LoadCheckpoint", 57 },
	{ "SetCheckpoints", 58 },
	{ "ResizeJob", 59 },
	{ "DeclarePublication", 60 },
	{ "DropPublication", 61 },
	{ "PublishGeneration", 62 },
	{ "AcquireGeneration", 63 },
	{ "DescribeGeneration", 64 },
	{ "ReleaseGeneration", 65 },
	{ "OpenReader", 68 },
	{ "CloseReader", 69 },
	{ "StreamGeneration", 70 },
	{ "ListPublications", 71 },
	{ "ReadBase", 72 },
};

/* Bytes of a field with a bound that the message does not show; 0: not such a field. */
static size_t bound_of(const char *field)
{
	if (strcmp(field, "ipc_handle") == 0)
		return 64; /* a CUDA handle */
	if (strcmp(field, "unused_bits") == 0)
		return 512; /* one bit for each of 4096 tensors */
	return 0;
}

/* The longest a packed message can be, with 6 bytes for each tag and length. SIZE_MAX: any length. */
static size_t longest(const ProtobufCMessageDescriptor *message)
{
	size_t sum = 0;

	for (unsigned i = 0; i < message->n_fields; i++) {
		const ProtobufCFieldDescriptor *f = &message->fields[i];
		size_t bytes = 10; /* of any number */

		if (f->type == PROTOBUF_C_TYPE_MESSAGE)
			bytes = longest(f->descriptor);
		else if (f->type == PROTOBUF_C_TYPE_BYTES && bound_of(f->name))
			bytes = bound_of(f->name);
		else if (f->type == PROTOBUF_C_TYPE_BYTES || f->type == PROTOBUF_C_TYPE_STRING)
			return SIZE_MAX;
		if (f->label == PROTOBUF_C_LABEL_REPEATED || bytes == SIZE_MAX)
			return SIZE_MAX;
		sum += bytes + 6;
	}
	return sum;
}

static const ProtobufCMethodDescriptor *method_of(const char *name)
{
	return request_method(name, NULL);
}

Test(methods, paths_name_the_service)
{
	for (const struct method *m = methods; m->name; m++) {
		const char *service = "none";
		char path[128];

		request_method(m->name, &service);
		snprintf(path, sizeof(path), "/%s/%s", service, m->name);
		cr_expect_str_eq(m->path, path);
	}
	cr_expect_str_eq(METHOD_Gather, methods_find("Gather")->path);
}

Test(methods, numbers_are_as_released)
{
	size_t n = 0;

	for (size_t i = 0; i < ARRAY_SIZE(pinned); i++) {
		const struct method *m = methods_find(pinned[i].name);

		cr_assert(m, "%s has lost its line", pinned[i].name);
		cr_expect_eq(m->number, pinned[i].number, "%s has number %u instead of %u", m->name,
			     m->number, pinned[i].number);
	}
	while (methods[n].name)
		n++;
	cr_expect_eq(n, ARRAY_SIZE(pinned), "a new method is pinned here, too");
}

Test(methods, no_number_has_two_methods)
{
	for (const struct method *a = methods; a->name; a++) {
		cr_expect_neq(a->number, RING_NOP, "%s", a->name);
		for (const struct method *b = a + 1; b->name; b++) {
			cr_expect_neq(a->number, b->number, "%s and %s", a->name, b->name);
			cr_expect_neq(strcmp(a->name, b->name), 0, "%s has two lines", a->name);
		}
	}
}

Test(methods, every_method_has_a_line)
{
	for (size_t i = 0; i < ARRAY_SIZE(services); i++)
		for (unsigned k = 0; k < services[i]->n_methods; k++)
			cr_expect(methods_find(services[i]->methods[k].name),
				  "%s.%s is missing in methods.h", services[i]->name,
				  services[i]->methods[k].name);
	for (const struct method *m = methods; m->name; m++)
		cr_expect(method_of(m->name), "no service has the method %s", m->name);
}

/* Else the daemon would stop at the first reply that is too long. */
Test(methods, replies_fit)
{
	for (const struct method *m = methods; m->name; m++) {
		const ProtobufCMethodDescriptor *d = method_of(m->name);

		if (d && m->carried)
			cr_expect_leq(longest(d->output), RING_LONG_BYTES,
				      "the reply of %s may exceed a long piece", m->name);
	}
}

/* Nothing moves to gRPC without a change of the table, and the other way round. */
Test(methods, carries_every_op_whose_reply_fits)
{
	for (const struct method *m = methods; m->name; m++) {
		const ProtobufCMethodDescriptor *d = method_of(m->name);
		bool fits = d && longest(d->output) <= RING_LONG_BYTES;

		cr_expect_eq(m->carried, fits && op_type_by_name(m->name), "%s", m->name);
	}
}
