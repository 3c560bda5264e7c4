/*
 * gRPC core is not instrumented, so the thread sanitizer does not know that what a thread has done before it gives
 * gRPC a tag comes before what another thread does when it gets the tag back. These functions, which the linker
 * puts around gRPC's, tell it.
 */
#include <grpc/grpc.h>

void __tsan_acquire(void *at);
void __tsan_release(void *at);

__typeof__(grpc_completion_queue_next) __real_grpc_completion_queue_next,
	__wrap_grpc_completion_queue_next;
__typeof__(grpc_call_start_batch) __real_grpc_call_start_batch, __wrap_grpc_call_start_batch;
__typeof__(grpc_server_request_call) __real_grpc_server_request_call,
	__wrap_grpc_server_request_call;
__typeof__(grpc_server_request_registered_call) __real_grpc_server_request_registered_call,
	__wrap_grpc_server_request_registered_call;
__typeof__(grpc_channel_watch_connectivity_state) __real_grpc_channel_watch_connectivity_state,
	__wrap_grpc_channel_watch_connectivity_state;
__typeof__(grpc_server_shutdown_and_notify) __real_grpc_server_shutdown_and_notify,
	__wrap_grpc_server_shutdown_and_notify;

grpc_event __wrap_grpc_completion_queue_next(grpc_completion_queue *cq, gpr_timespec deadline,
					     void *reserved)
{
	grpc_event ev = __real_grpc_completion_queue_next(cq, deadline, reserved);

	if (ev.type == GRPC_OP_COMPLETE)
		__tsan_acquire(ev.tag);
	return ev;
}

grpc_call_error __wrap_grpc_call_start_batch(grpc_call *call, const grpc_op *ops, size_t n,
					     void *tag, void *reserved)
{
	__tsan_release(tag);
	return __real_grpc_call_start_batch(call, ops, n, tag, reserved);
}

grpc_call_error __wrap_grpc_server_request_call(grpc_server *server, grpc_call **call,
						grpc_call_details *details,
						grpc_metadata_array *metadata,
						grpc_completion_queue *bound,
						grpc_completion_queue *notified, void *tag)
{
	__tsan_release(tag);
	return __real_grpc_server_request_call(server, call, details, metadata, bound, notified,
					       tag);
}

grpc_call_error __wrap_grpc_server_request_registered_call(
	grpc_server *server, void *method, grpc_call **call, gpr_timespec *deadline,
	grpc_metadata_array *metadata, grpc_byte_buffer **payload, grpc_completion_queue *bound,
	grpc_completion_queue *notified, void *tag)
{
	__tsan_release(tag);
	return __real_grpc_server_request_registered_call(server, method, call, deadline, metadata,
							  payload, bound, notified, tag);
}

void __wrap_grpc_channel_watch_connectivity_state(grpc_channel *channel,
						  grpc_connectivity_state last,
						  gpr_timespec deadline, grpc_completion_queue *cq,
						  void *tag)
{
	__tsan_release(tag);
	__real_grpc_channel_watch_connectivity_state(channel, last, deadline, cq, tag);
}

void __wrap_grpc_server_shutdown_and_notify(grpc_server *server, grpc_completion_queue *cq,
					    void *tag)
{
	__tsan_release(tag);
	__real_grpc_server_shutdown_and_notify(server, cq, tag);
}
