#include "client.h"

#include <string.h>
#include <unistd.h>

#include "client_error.h"
#include "core/check.h"
#include "options.h"

int client_check(const struct shardd_client *c, struct shardd_error *err)
{
	if (!c)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "client", "the client is NULL");
	MAGIC_CHECK(c, CLIENT_MAGIC);
	if (c->here ? !*c->here : c->pid != getpid())
		return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
				 "this client was connected by process %d, and this process is a "
				 "fork of it: connect again in this process",
				 (int)c->pid);
	return 0;
}

int client_check_size(const void *s, size_t bytes, const char *what, struct shardd_error *err)
{
	size_t size;

	memcpy(&size, s, sizeof(size));
	if (size < bytes || size > OPTIONS_MAX_BYTES)
		return error_set(err, SHARDD_INVALID_ARGUMENT, what,
				 "%s is %zu: set it to the size of the struct, at least %zu", what,
				 size, bytes);
	return options_check_tail(s, size, bytes, what, err);
}

int client_check_bytes(const struct shardd_client *c, size_t bytes, struct shardd_error *err)
{
	if (!c->daemon.max_message || bytes <= c->daemon.max_message)
		return 0;
	return error_set(
		err, SHARDD_RESOURCE_EXHAUSTED, NULL,
		"this request has %zu bytes, the daemon accepts at most %llu in one message", bytes,
		(unsigned long long)c->daemon.max_message);
}

int client_call(struct shardd_client *c, const char *method, const ProtobufCMessage *request,
		const ProtobufCMessageDescriptor *reply, ProtobufCMessage **ret,
		struct shardd_error *err)
{
	struct shardd_error scratch;
	int r = client_check_bytes(c, protobuf_c_message_get_packed_size(request), err);

	if (r < 0)
		return r;
	return rpc_client_call(c->rpc, method, request, reply, CLIENT_CALL_TIMEOUT_MS, ret,
			       err ? err : &scratch);
}
