#include "rpc/status_map.h"

#include <errno.h>
#include <grpc/status.h>
#include <stdlib.h>

#include "core/check.h"
#include "rpc/codec.h"
#include "rpc_status.pb-c.h"
#include "shardd.pb-c.h"

#define ERROR_INFO_URL "type.googleapis.com/shardd.v1.ErrorInfo"

int status_map_code(enum fault_code code)
{
	static const int codes[_FAULT_N] = {
		[FAULT_NONE] = GRPC_STATUS_OK,
		[FAULT_INVALID] = GRPC_STATUS_INVALID_ARGUMENT,
		[FAULT_STATE] = GRPC_STATUS_FAILED_PRECONDITION,
		[FAULT_NOT_FOUND] = GRPC_STATUS_NOT_FOUND,
		[FAULT_DENIED] = GRPC_STATUS_PERMISSION_DENIED,
		[FAULT_EXHAUSTED] = GRPC_STATUS_RESOURCE_EXHAUSTED,
		[FAULT_ABORTED] = GRPC_STATUS_ABORTED,
		[FAULT_DEADLINE] = GRPC_STATUS_DEADLINE_EXCEEDED,
		[FAULT_CANCELLED] = GRPC_STATUS_CANCELLED,
		[FAULT_UNAVAILABLE] = GRPC_STATUS_UNAVAILABLE,
		[FAULT_UNIMPLEMENTED] = GRPC_STATUS_UNIMPLEMENTED,
		[FAULT_LOST] = GRPC_STATUS_DATA_LOSS,
		[FAULT_INTERNAL] = GRPC_STATUS_INTERNAL,
	};

	CHECK(code < _FAULT_N);
	return codes[code];
}

/* Pack into new memory. Return: 0 or -ENOMEM. */
static int status_map_pack(const ProtobufCMessage *msg, uint8_t **ret, size_t *ret_bytes)
{
	size_t bytes = protobuf_c_message_get_packed_size(msg);
	uint8_t *data = malloc(bytes ? bytes : 1);

	if (!data)
		return -ENOMEM;
	CHECK(protobuf_c_message_pack(msg, data) == bytes);
	*ret = data;
	*ret_bytes = bytes;
	return 0;
}

/* @clean: a copy of the fault, whose texts @ret points to. */
static void status_map_fill(struct fault *clean, Shardd__V1__ErrorInfo *ret)
{
	codec_clean_text(clean->text);
	codec_clean_text(clean->field);
	ret->code = (char *)fault_code_name(clean->code);
	ret->domain = (char *)fault_domain_name(clean->domain);
	ret->native = clean->native;
	ret->field = clean->field;
	ret->text = clean->text;
}

uint32_t status_map_info(const struct fault *f, uint8_t *to, size_t bytes)
{
	Shardd__V1__ErrorInfo info = SHARDD__V1__ERROR_INFO__INIT;
	struct fault clean = *f;

	status_map_fill(&clean, &info);
	CHECK(protobuf_c_message_get_packed_size(&info.base) <= bytes);
	return (uint32_t)protobuf_c_message_pack(&info.base, to);
}

int status_map_details(const struct fault *f, uint8_t **ret, size_t *ret_bytes)
{
	Shardd__V1__ErrorInfo info = SHARDD__V1__ERROR_INFO__INIT;
	Shardd__Wire__V1__RpcStatus status = SHARDD__WIRE__V1__RPC_STATUS__INIT;
	Shardd__Wire__V1__Any any = SHARDD__WIRE__V1__ANY__INIT;
	Shardd__Wire__V1__Any *details[] = { &any };
	struct fault clean = *f;
	int r;

	status_map_fill(&clean, &info);
	r = status_map_pack(&info.base, &any.value.data, &any.value.len);
	if (r)
		return r;
	any.type_url = (char *)ERROR_INFO_URL;
	status.code = status_map_code(f->code);
	status.message = clean.text;
	status.details = details;
	status.n_details = ARRAY_SIZE(details);
	r = status_map_pack(&status.base, ret, ret_bytes);
	free(any.value.data);
	return r;
}
