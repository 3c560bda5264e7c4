#include "rpc/svc_reflection.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/cleanup.h"
#include "reflection.pb-c.h"
#include "rpc/codec.h"
#include "rpc/status_map.h"

/* What is set of a oneof. */
#define REQUEST(kind)  GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##kind
#define RESPONSE(kind) GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##kind

/* Of a request: it is part of its answer. Names have 256 at most. */
#define SVC_REFLECTION_BYTES 4096u

/* Field 4 of a response and the length of a file with its tag. */
#define SVC_REFLECTION_HEAD 16u

static Grpc__Reflection__V1__ServerReflectionResponse svc_reflection_response_to(
	const Grpc__Reflection__V1__ServerReflectionRequest *req)
{
	Grpc__Reflection__V1__ServerReflectionResponse msg =
		GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;

	msg.valid_host = req->host;
	msg.original_request = (Grpc__Reflection__V1__ServerReflectionRequest *)req;
	return msg;
}

/* A refusal of this request; the stream goes on. Return: as rpc_call_send. */
static int svc_reflection_refuse(struct rpc_call *call,
				 const Grpc__Reflection__V1__ServerReflectionRequest *req,
				 struct fault *f)
{
	Grpc__Reflection__V1__ErrorResponse error = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;
	Grpc__Reflection__V1__ServerReflectionResponse msg = svc_reflection_response_to(req);

	codec_clean_text(f->text);
	error.error_code = status_map_code(f->code);
	error.error_message = f->text;
	msg.message_response_case = RESPONSE(ERROR_RESPONSE);
	msg.error_response = &error;
	return rpc_call_send(call, &msg.base);
}

static int svc_reflection_not_found(struct rpc_call *call,
				    const Grpc__Reflection__V1__ServerReflectionRequest *req,
				    const char *what, const char *name)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_NOT_FOUND, NULL, "there is no %s %.256s", what, name);
	return svc_reflection_refuse(call, req, &f);
}

/* Bytes of @n as a varint at @to. */
static size_t svc_reflection_varint(uint8_t *to, size_t n)
{
	size_t bytes = 0;

	for (; n >= 0x80; n >>= 7)
		to[bytes++] = (uint8_t)(n | 0x80);
	to[bytes++] = (uint8_t)n;
	return bytes;
}

/* The file is not copied: @file_descriptor_response is its field 1, in static memory. */
static int svc_reflection_file(struct rpc_call *call,
			       const Grpc__Reflection__V1__ServerReflectionRequest *req,
			       const struct descriptors_file *file)
{
	Grpc__Reflection__V1__ServerReflectionResponse msg = svc_reflection_response_to(req);
	size_t n = protobuf_c_message_get_packed_size(&msg.base);
	_cleanup_(freep) uint8_t *head = malloc(n + SVC_REFLECTION_HEAD);

	if (!head)
		return -ENOBUFS;
	CHECK(protobuf_c_message_pack(&msg.base, head) == n);
	head[n++] = 4 << 3 | 2; /* file_descriptor_response, of a length */
	n += svc_reflection_varint(head + n, file->bytes);
	return rpc_call_send_with(call, &(struct rpc_piece){ head, n },
				  &(struct rpc_piece){ file->field, file->bytes });
}

static int svc_reflection_list(struct rpc_call *call,
			       const Grpc__Reflection__V1__ServerReflectionRequest *req,
			       const struct svc_reflection *svc)
{
	Grpc__Reflection__V1__ListServiceResponse list =
		GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
	Grpc__Reflection__V1__ServerReflectionResponse msg = svc_reflection_response_to(req);
	Grpc__Reflection__V1__ServiceResponse names[32], *all[32];

	CHECK(svc->n <= ARRAY_SIZE(names));
	for (size_t i = 0; i < svc->n; i++) {
		grpc__reflection__v1__service_response__init(&names[i]);
		names[i].name = (char *)svc->services[i].desc->name;
		all[i] = &names[i];
	}
	list.n_service = svc->n;
	list.service = all;
	msg.message_response_case = RESPONSE(LIST_SERVICES_RESPONSE);
	msg.list_services_response = &list;
	return rpc_call_send(call, &msg.base);
}

/* No message of ours has extensions. */
static int svc_reflection_numbers(struct rpc_call *call,
				  const Grpc__Reflection__V1__ServerReflectionRequest *req,
				  const struct svc_reflection *svc)
{
	Grpc__Reflection__V1__ExtensionNumberResponse numbers =
		GRPC__REFLECTION__V1__EXTENSION_NUMBER_RESPONSE__INIT;
	Grpc__Reflection__V1__ServerReflectionResponse msg = svc_reflection_response_to(req);
	bool message = false;

	if (!descriptors_find_symbol(svc->descriptors, req->all_extension_numbers_of_type,
				     &message) ||
	    !message)
		return svc_reflection_not_found(call, req, "message",
						req->all_extension_numbers_of_type);
	numbers.base_type_name = req->all_extension_numbers_of_type;
	msg.message_response_case = RESPONSE(ALL_EXTENSION_NUMBERS_RESPONSE);
	msg.all_extension_numbers_response = &numbers;
	return rpc_call_send(call, &msg.base);
}

static int svc_reflection_by_name(struct rpc_call *call,
				  const Grpc__Reflection__V1__ServerReflectionRequest *req,
				  const struct svc_reflection *svc)
{
	const struct descriptors_file *file =
		descriptors_find_file(svc->descriptors, req->file_by_filename);

	return file ? svc_reflection_file(call, req, file)
		    : svc_reflection_not_found(call, req, "file", req->file_by_filename);
}

static int svc_reflection_by_symbol(struct rpc_call *call,
				    const Grpc__Reflection__V1__ServerReflectionRequest *req,
				    const struct svc_reflection *svc)
{
	const struct descriptors_file *file =
		descriptors_find_symbol(svc->descriptors, req->file_containing_symbol, NULL);

	return file ? svc_reflection_file(call, req, file)
		    : svc_reflection_not_found(call, req, "symbol", req->file_containing_symbol);
}

/* Return: as rpc_call_send. */
static int svc_reflection_reply(struct rpc_call *call,
				const Grpc__Reflection__V1__ServerReflectionRequest *req,
				const struct svc_reflection *svc)
{
	struct fault f = FAULT_NULL;

	switch (req->message_request_case) {
	case REQUEST(FILE_BY_FILENAME):
		return svc_reflection_by_name(call, req, svc);
	case REQUEST(FILE_CONTAINING_SYMBOL):
		return svc_reflection_by_symbol(call, req, svc);
	case REQUEST(FILE_CONTAINING_EXTENSION):
		return svc_reflection_not_found(call, req, "extension of",
						req->file_containing_extension->containing_type);
	case REQUEST(ALL_EXTENSION_NUMBERS_OF_TYPE):
		return svc_reflection_numbers(call, req, svc);
	case REQUEST(LIST_SERVICES):
		return svc_reflection_list(call, req, svc);
	default:
		fault_set(&f, FAULT_INVALID, NULL, "message_request is not set");
		return svc_reflection_refuse(call, req, &f);
	}
}

static void svc_reflection_on_request(struct rpc_call *call, const ProtobufCMessage *request,
				      const struct fault *why, void *userdata);

static void svc_reflection_answer(struct rpc_call *call, const ProtobufCMessage *request,
				  struct svc_reflection *svc)
{
	size_t bytes = protobuf_c_message_get_packed_size(request);
	struct fault f = FAULT_NULL;

	if (bytes > SVC_REFLECTION_BYTES)
		fault_set(&f, FAULT_INVALID, NULL,
			  "the request is %zu bytes long; it must be at most %u", bytes,
			  SVC_REFLECTION_BYTES);
	else if (svc_reflection_reply(
			 call, (const Grpc__Reflection__V1__ServerReflectionRequest *)request,
			 svc) != 0)
		fault_set(&f, FAULT_EXHAUSTED, NULL, "no memory for the answer");
	if (f.code)
		rpc_call_fail(call, &f);
	else
		rpc_call_next(call, svc_reflection_on_request, svc);
}

static void svc_reflection_on_request(struct rpc_call *call, const ProtobufCMessage *request,
				      const struct fault *why, void *userdata)
{
	if (request)
		svc_reflection_answer(call, request, userdata);
	else if (why->code)
		rpc_call_fail(call, why);
	else
		rpc_call_end(call);
}

static void svc_reflection_on_cancelled(struct rpc_call *call, void *userdata)
{
	(void)userdata;
	rpc_call_end(call);
}

/* A stream has no state: the answer to a request depends on nothing else. */
static void svc_reflection_info(struct rpc_call *call, const ProtobufCMessage *request,
				void *userdata)
{
	rpc_call_on_cancelled(call, svc_reflection_on_cancelled, NULL);
	svc_reflection_answer(call, request, userdata);
}

static const struct rpc_method svc_reflection_methods[] = {
	{ "ServerReflectionInfo", svc_reflection_info, true, false },
	{ NULL, NULL, false, false },
};

int svc_reflection_init(struct svc_reflection *svc, const struct rpc_service *services, size_t n)
{
	const ProtobufCServiceDescriptor *v1 = &grpc__reflection__v1__server_reflection__descriptor;

	*svc = (struct svc_reflection){ .services = services, .n = n, .alpha = *v1 };
	svc->alpha.name = "grpc.reflection.v1alpha.ServerReflection";
	svc->alpha.package = "grpc.reflection.v1alpha";
	svc->own[0] = (struct rpc_service){ v1, svc_reflection_methods, svc };
	svc->own[1] = (struct rpc_service){ &svc->alpha, svc_reflection_methods, svc };
	return descriptors_new(&svc->descriptors);
}

void svc_reflection_deinit(struct svc_reflection *svc)
{
	svc->descriptors = descriptors_free(svc->descriptors);
}
