/* shardctl health: for probes and scripts. */
#include <stdio.h>

#include "core/cleanup.h"
#include "ctl/ctl.h"
#include "health.pb-c.h"

int ctl_health(struct ctl *ctl, int argc, char **argv)
{
	Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
	_cleanup_(ctl_messagep) ProtobufCMessage *reply = NULL;
	const Grpc__Health__V1__HealthCheckResponse *h;
	const ProtobufCEnumValue *name;
	int r = ctl_no_arguments(argc, argv);

	if (r == CTL_OK)
		r = ctl_call(ctl, "/grpc.health.v1.Health/Check", &request.base,
			     &grpc__health__v1__health_check_response__descriptor, &reply);
	if (r != CTL_OK)
		return r;
	h = (const Grpc__Health__V1__HealthCheckResponse *)reply;
	if (ctl->json) {
		r = ctl_print_json(json_from_message(reply));
	} else {
		name = protobuf_c_enum_descriptor_get_value(
			&grpc__health__v1__health_check_response__serving_status__descriptor,
			(int)h->status);
		puts(name ? name->name : "UNKNOWN");
	}
	if (h->status != GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING)
		return CTL_FAILED;
	return r;
}
