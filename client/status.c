/* What the daemon says of itself, for a program that asks: the JSON of shardctl. */
#include <stdlib.h>

#include "client.h"
#include "call.h"
#include "client_error.h"
#include "core/cleanup.h"
#include "ctl/json.h"
#include "status.pb-c.h"

static int status_as_text(const ProtobufCMessage *m, char **ret, struct shardd_error *err)
{
	_cleanup_(json_freep) json_t *j = json_from_message(m);
	char *text;

	/* They were not asked for: an empty list would say that there are none. */
	if (j)
		json_object_del(j, "slabs");
	text = j ? json_dumps(j, JSON_COMPACT) : NULL;
	if (!text)
		return error_memory(err);
	*ret = text;
	return 0;
}

int shardd_status(shardd_client *c, const char *job, char **ret, struct shardd_error *err)
{
	Shardd__V1__GetStatusRequest request = SHARDD__V1__GET_STATUS_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	struct shardd_error scratch;
	int r;

	err = err ? err : &scratch;
	r = client_check(c, err);
	if (r == 0 && !ret)
		r = error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL");
	if (r < 0)
		return r;
	if (job)
		request.job = (char *)job;
	request.with_units = true;
	r = call_again(c, "/shardd.v1.StatusService/GetStatus", &request.base,
		       &shardd__v1__get_status_response__descriptor, &reply, err);
	return r < 0 ? r : status_as_text(reply, ret, err);
}
