#include <criterion/criterion.h>
#include <errno.h>
#include <grpc/status.h>
#include <stdlib.h>
#include <string.h>

#include "fdcheck.h"
#include "rpc/status_map.h"
#include "rpc_status.pb-c.h"
#include "shardd.pb-c.h"

TestSuite(status_map, .init = fdcheck_begin, .fini = fdcheck_end, .timeout = 10);

Test(status_map, codes_are_those_of_grpc)
{
	static const struct {
		enum fault_code fault;
		int status;
	} table[] = {
		{ FAULT_NONE, 0 },      { FAULT_CANCELLED, 1 },      { FAULT_INVALID, 3 },
		{ FAULT_DEADLINE, 4 },  { FAULT_NOT_FOUND, 5 },      { FAULT_DENIED, 7 },
		{ FAULT_EXHAUSTED, 8 }, { FAULT_STATE, 9 },          { FAULT_ABORTED, 10 },
		{ FAULT_INTERNAL, 13 }, { FAULT_UNIMPLEMENTED, 12 }, { FAULT_UNAVAILABLE, 14 },
		{ FAULT_LOST, 15 },
	};

	cr_assert_eq(sizeof(table) / sizeof(table[0]), _FAULT_N);
	for (size_t i = 0; i < _FAULT_N; i++)
		cr_assert_eq(status_map_code(table[i].fault), table[i].status, "%s",
			     fault_code_name(table[i].fault));
}

Test(status_map, only_no_fault_is_ok)
{
	for (int code = FAULT_NONE + 1; code < _FAULT_N; code++)
		cr_assert_neq(status_map_code((enum fault_code)code), GRPC_STATUS_OK);
}

static Shardd__Wire__V1__RpcStatus *details(const struct fault *f)
{
	Shardd__Wire__V1__RpcStatus *status;
	uint8_t *bytes;
	size_t n;

	cr_assert_eq(status_map_details(f, &bytes, &n), 0);
	status = shardd__wire__v1__rpc_status__unpack(NULL, n, bytes);
	free(bytes);
	cr_assert_not_null(status);
	cr_assert_eq(status->n_details, 1);
	return status;
}

static Shardd__V1__ErrorInfo *error_info(const Shardd__Wire__V1__RpcStatus *status)
{
	const Shardd__Wire__V1__Any *any = status->details[0];
	Shardd__V1__ErrorInfo *info;

	cr_assert_str_eq(any->type_url, "type.googleapis.com/shardd.v1.ErrorInfo");
	info = shardd__v1__error_info__unpack(NULL, any->value.len, any->value.data);
	cr_assert_not_null(info);
	return info;
}

Test(status_map, details_hold_every_field)
{
	struct fault f = { .code = FAULT_EXHAUSTED,
			   .domain = FAULT_DOMAIN_NCCL,
			   .native = -7,
			   .field = "units[0].name",
			   .text = "who holds what" };
	Shardd__Wire__V1__RpcStatus *status = details(&f);
	Shardd__V1__ErrorInfo *info = error_info(status);

	cr_assert_eq(status->code, GRPC_STATUS_RESOURCE_EXHAUSTED);
	cr_assert_str_eq(status->message, "who holds what");
	cr_assert_str_eq(info->code, "RESOURCE_EXHAUSTED");
	cr_assert_str_eq(info->domain, "nccl");
	cr_assert_eq(info->native, -7);
	cr_assert_str_eq(info->field, "units[0].name");
	cr_assert_str_eq(info->text, "who holds what");
	shardd__v1__error_info__free_unpacked(info, NULL);
	shardd__wire__v1__rpc_status__free_unpacked(status, NULL);
}

/* Other languages refuse a message with a string that is not UTF-8, and texts quote
 * what clients sent and may be cut in the middle of a character. */
Test(status_map, details_are_valid_text_whatever_the_fault_says)
{
	struct fault f = { .code = FAULT_INVALID, .field = "a\x80z", .text = "\xc3\xa4 \xe2\x82" };
	Shardd__Wire__V1__RpcStatus *status = details(&f);
	Shardd__V1__ErrorInfo *info = error_info(status);

	cr_assert_str_eq(status->message, "\xc3\xa4 ??");
	cr_assert_str_eq(info->text, "\xc3\xa4 ??");
	cr_assert_str_eq(info->field, "a?z");
	shardd__v1__error_info__free_unpacked(info, NULL);
	shardd__wire__v1__rpc_status__free_unpacked(status, NULL);
}

Test(status_map, longest_fault_fits)
{
	struct fault f = { .code = FAULT_INTERNAL, .domain = FAULT_DOMAIN_OS, .native = EIO };
	Shardd__Wire__V1__RpcStatus *status;

	memset(f.text, 't', sizeof(f.text) - 1);
	memset(f.field, 'f', sizeof(f.field) - 1);
	status = details(&f);
	cr_assert_str_eq(status->message, f.text);
	shardd__wire__v1__rpc_status__free_unpacked(status, NULL);
}
