/* From a gRPC status to a struct shardd_error. */
#include <errno.h>
#include <grpc/slice.h>
#include <stdio.h>
#include <string.h>

#include "client_error.h"
#include "rpc_client_impl.h"
#include "rpc_status.pb-c.h"
#include "shardd.pb-c.h"

#define DETAILS_KEY    "grpc-status-details-bin"
#define ERROR_INFO_URL "type.googleapis.com/shardd.v1.ErrorInfo"

static void rpc_error_copy(char *to, size_t bytes, const char *from)
{
	snprintf(to, bytes, "%s", from);
}

void error_from_info(struct shardd_error *err, int code, const struct Shardd__V1__ErrorInfo *info)
{
	*err = (struct shardd_error){ .code = code, .native = info->native };
	rpc_error_copy(err->domain, sizeof(err->domain), info->domain);
	rpc_error_copy(err->field, sizeof(err->field), info->field);
	rpc_error_copy(err->text, sizeof(err->text), info->text);
}

/* Return: false: @value is not such a message. */
static bool rpc_error_read_info(struct shardd_error *err, const ProtobufCBinaryData *value)
{
	Shardd__V1__ErrorInfo *info;

	info = shardd__v1__error_info__unpack(NULL, value->len, value->data);
	if (!info)
		return false;
	error_from_info(err, err->code, info);
	shardd__v1__error_info__free_unpacked(info, NULL);
	return true;
}

static bool rpc_error_read_details(struct shardd_error *err, grpc_slice bytes)
{
	Shardd__Wire__V1__RpcStatus *status;
	bool found = false;

	status = shardd__wire__v1__rpc_status__unpack(NULL, GRPC_SLICE_LENGTH(bytes),
						      GRPC_SLICE_START_PTR(bytes));
	if (!status)
		return false;
	for (size_t i = 0; i < status->n_details && !found; i++)
		if (strcmp(status->details[i]->type_url, ERROR_INFO_URL) == 0)
			found = rpc_error_read_info(err, &status->details[i]->value);
	shardd__wire__v1__rpc_status__free_unpacked(status, NULL);
	return found;
}

static bool rpc_error_find_details(const struct rpc_pending *p, struct shardd_error *err)
{
	for (size_t i = 0; i < p->trailing.count; i++)
		if (grpc_slice_str_cmp(p->trailing.metadata[i].key, DETAILS_KEY) == 0)
			return rpc_error_read_details(err, p->trailing.metadata[i].value);
	return false;
}

/* Told by error_is_lost, too: a daemon that dies at that moment does the same. */
static int rpc_error_unanswered(const struct rpc_client *c, struct shardd_error *err)
{
	error_set(
		err, SHARDD_UNAVAILABLE, NULL,
		"the daemon at %s closed the connection before it answered: it has died just then, "
		"it does not admit uid %u (allow_uids, allow_gids), or a limit on connections is "
		"reached (max_connections, max_connections_per_user, max_unattached_per_user): "
		"see the daemon's log",
		c->path, (unsigned)c->uid);
	if (err)
		err->native = ECONNRESET;
	return -SHARDD_UNAVAILABLE;
}

/* The connection ended, and the daemon did not say why. */
static int rpc_error_lost(const struct rpc_pending *p, struct shardd_error *err)
{
	const struct rpc_client *c = p->c;

	if (!c)
		return error_set(err, SHARDD_UNAVAILABLE, NULL, "the connection has been closed");
	if (!c->answered)
		return rpc_error_unanswered(c, err);
	return error_lost(err, "the daemon at %s closed the connection: %s was not answered",
			  c->path, p->method);
}

/* A status without our details: core's own, on this side or the other. */
static int rpc_error_plain(const struct rpc_pending *p, struct shardd_error *err)
{
	int n = (int)GRPC_SLICE_LENGTH(p->status_text);
	const char *text = (const char *)GRPC_SLICE_START_PTR(p->status_text);
	enum shardd_code code = (enum shardd_code)p->status;

	if (p->status == GRPC_STATUS_UNAVAILABLE)
		return rpc_error_lost(p, err);
	if (p->status == GRPC_STATUS_DEADLINE_EXCEEDED && p->timeout_ms)
		return error_set(err, code, NULL, "%s was not answered within %u ms", p->method,
				 p->timeout_ms);
	if (p->status == GRPC_STATUS_CANCELLED)
		return error_set(err, code, NULL, "%s was cancelled", p->method);
	return error_set(err, code, NULL, "%s: %.*s", p->method, n ? n : 18,
			 n ? text : "the daemon gave no reason");
}

int pending_error(struct rpc_pending *p, struct shardd_error *err)
{
	struct shardd_error found = { .code = (int)p->status };

	if (p->status == GRPC_STATUS_OK)
		return 0;
	if (!rpc_error_find_details(p, &found))
		return rpc_error_plain(p, err);
	if (err)
		*err = found;
	return -found.code;
}
