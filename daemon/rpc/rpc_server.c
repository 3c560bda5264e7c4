#include "rpc/rpc_server.h"

#include <errno.h>
#include <fcntl.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/support/log.h>
#include <grpc/support/time.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "rpc/rpc_server_impl.h"

#define N_ARMED        8u /* requests of a method that are awaited at once */
#define HEARTBEAT_US   1000000
#define METADATA_BYTES 16384u

/* ------------------------------------------------------------ the thread */

static void rpc_server_arm_all(struct rpc_server *s)
{
	for (size_t i = 0; i < s->n_slots; i++)
		while (s->slots[i].n_armed < N_ARMED)
			if (call_arm(&s->slots[i]) != 0)
				return; /* no memory: the next heartbeat tries again; or the end */
}

static void rpc_server_on_over(struct work *work);

static void *rpc_server_cq_main(void *userdata)
{
	struct rpc_server *s = userdata;

	rpc_server_arm_all(s);
	for (;;) {
		gpr_timespec wait = gpr_time_from_micros(HEARTBEAT_US, GPR_TIMESPAN);
		grpc_event ev;

		ev = grpc_completion_queue_next(
			s->cq, gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), wait), NULL);
		atomic_store_explicit(&s->heartbeat_us, clock_now_us(), memory_order_relaxed);
		if (ev.type == GRPC_QUEUE_SHUTDOWN)
			break;
		if (ev.type == GRPC_OP_COMPLETE)
			((struct tag *)ev.tag)->fn(ev.tag, ev.success != 0);
		else
			rpc_server_arm_all(s);
	}
	loopq_post(s->loopq, &s->over_work, rpc_server_on_over);
	return NULL;
}

static int rpc_server_start_thread(struct rpc_server *s)
{
	sigset_t all, old;
	int r;

	sigfillset(&all); /* signals are the loop's */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&s->thread, NULL, rpc_server_cq_main, s);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r)
		return -r;
	pthread_setname_np(s->thread, "shardd-cq");
	return 0;
}

/* ------------------------------------------------------------- start-up */

static const struct rpc_method *rpc_server_find_method(const struct rpc_service *service,
						       const char *name)
{
	for (const struct rpc_method *m = service->methods; m->name; m++)
		if (strcmp(m->name, name) == 0)
			return m;
	return NULL;
}

static size_t rpc_server_count_methods(const struct rpc_service *services, size_t n)
{
	size_t sum = 0;

	for (size_t i = 0; i < n; i++) {
		size_t handlers = 0;

		while (services[i].methods[handlers].name)
			handlers++;
		CHECK(handlers == services[i].desc->n_methods);
		sum += handlers;
	}
	return sum;
}

static void rpc_server_slot_init(struct slot *slot, struct rpc_server *s,
				 const struct rpc_service *service,
				 const ProtobufCMethodDescriptor *desc)
{
	int n = snprintf(slot->path, sizeof(slot->path), "/%s/%s", service->desc->name, desc->name);

	CHECK(n > 0 && (size_t)n < sizeof(slot->path));
	slot->server = s;
	slot->service = service;
	slot->method = rpc_server_find_method(service, desc->name);
	CHECK(slot->method && slot->method->fn);
	slot->input = desc->input;
	slot->registered = grpc_server_register_method(
		s->core, slot->path, NULL, GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
	CHECK(slot->registered);
}

static int rpc_server_slots_new(struct rpc_server *s, const struct rpc_service *services, size_t n)
{
	size_t n_methods = rpc_server_count_methods(services, n), next = 0;

	s->slots = calloc(n_methods + 1, sizeof(*s->slots));
	if (!s->slots)
		return -ENOMEM;
	s->n_slots = n_methods + 1;
	for (size_t i = 0; i < n; i++)
		for (unsigned k = 0; k < services[i].desc->n_methods; k++)
			rpc_server_slot_init(&s->slots[next++], s, &services[i],
					     &services[i].desc->methods[k]);
	s->slots[next].server = s;
	return 0;
}

static grpc_arg rpc_server_int_arg(const char *key, uint64_t value)
{
	int clamped = value > INT_MAX ? INT_MAX : (int)value;

	return (grpc_arg){ GRPC_ARG_INTEGER, (char *)key, { .integer = clamped } };
}

/* A last resort: net/gate keeps clients far below it. */
static grpc_resource_quota *rpc_server_core_quota(const struct rpc_options *options)
{
	grpc_resource_quota *quota = grpc_resource_quota_create("shardd");

	if (options->memory_bytes)
		grpc_resource_quota_resize(quota, options->memory_bytes);
	return quota;
}

static grpc_server *rpc_server_core_new(const struct rpc_options *options)
{
	grpc_resource_quota *quota = rpc_server_core_quota(options);
	grpc_server *core;
	grpc_arg args[] = {
		rpc_server_int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, options->max_message_bytes),
		rpc_server_int_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS,
				   (uint64_t)options->max_calls_per_conn + RPC_EXTRA_STREAMS),
		rpc_server_int_arg(GRPC_ARG_MAX_METADATA_SIZE, options->max_metadata_bytes
								       ? options->max_metadata_bytes
								       : METADATA_BYTES),
		rpc_server_int_arg(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, RPC_FRAME_BYTES),
		/* Refuse messages that are small on the wire and large when decompressed. */
		rpc_server_int_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0),
		/* A unix socket itself tells that the peer is gone; a client that computes for
		 * hours answers no ping. */
		rpc_server_int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, INT_MAX),
		/* A client may ping without a limit by core, with and without calls: core would end
		 * its session after a few pings. The gate limits pings, and logs it. */
		rpc_server_int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
		rpc_server_int_arg(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 0),
		rpc_server_int_arg(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0),
		rpc_server_int_arg(GRPC_ARG_HTTP2_BDP_PROBE, 0),
		rpc_server_int_arg(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1 << 20),
		{ GRPC_ARG_STRING,
		  (char *)GRPC_ARG_OPTIMIZATION_TARGET,
		  { .string = (char *)"latency" } },
		{ GRPC_ARG_POINTER,
		  (char *)GRPC_ARG_RESOURCE_QUOTA,
		  { .pointer = { quota, grpc_resource_quota_arg_vtable() } } },
	};
	grpc_channel_args list = { ARRAY_SIZE(args), args };

	core = grpc_server_create(&list, NULL);
	grpc_resource_quota_unref(quota); /* core has its own reference */
	return core;
}

/* Has core said something at that line of its source in this minute? At each try to reach a collector or a node it says
 * the same. Any thread. */
static bool rpc_server_core_repeats(const gpr_log_func_args *args)
{
	static _Atomic uint64_t told[64];
	const uint32_t place = (uint32_t)((uintptr_t)args->file >> 3) ^ (uint32_t)args->line;
	const uint64_t now = (clock_now_us() / 60000000u + 1) << 32 | place;

	return atomic_exchange(&told[place % ARRAY_SIZE(told)], now) == now;
}

static void rpc_server_log_core(gpr_log_func_args *args)
{
	const bool is_error = args->severity == GPR_LOG_SEVERITY_ERROR;
	enum log_level level = is_error && !rpc_server_core_repeats(args) ? LOG_WARN : LOG_DEBUG;

	log_write(level, "rpc", "%s", args->message);
}

static void rpc_server_on_down_tag(struct tag *tag, bool ok);

/* Creates all objects of core, but no thread. */
static int rpc_server_core_init(struct rpc_server *s, const struct rpc_options *options,
				const struct rpc_service *services, size_t n)
{
	int r;

	s->cq = grpc_completion_queue_create_for_next(NULL);
	s->core = rpc_server_core_new(options);
	s->creds = grpc_insecure_server_credentials_create();
	grpc_server_register_completion_queue(s->core, s->cq, NULL);
	r = rpc_server_slots_new(s, services, n);
	if (r == 0)
		grpc_server_start(s->core);
	return r;
}

/* Free what core_init made. The queue is shut down and drained. */
static void rpc_server_free(struct rpc_server *s)
{
	call_lend_stop(s);
	grpc_completion_queue_destroy(s->cq);
	grpc_server_credentials_release(s->creds);
	peer_table_deinit(&s->table);
	pthread_mutex_destroy(&s->arm_lock);
	free(s->slots);
	free(s);
	grpc_shutdown();
}

/* No thread was started and no request was made: free everything at once. */
static void rpc_server_abort(struct rpc_server *s)
{
	gpr_timespec never = gpr_inf_future(GPR_CLOCK_MONOTONIC);

	grpc_server_shutdown_and_notify(s->core, s->cq, &s->down_tag);
	CHECK(grpc_completion_queue_next(s->cq, never, NULL).type == GRPC_OP_COMPLETE);
	grpc_server_destroy(s->core);
	grpc_completion_queue_shutdown(s->cq);
	CHECK(grpc_completion_queue_next(s->cq, never, NULL).type == GRPC_QUEUE_SHUTDOWN);
	rpc_server_free(s);
}

int rpc_server_new(struct loopq *loopq, const struct rpc_options *options,
		   const struct rpc_service *services, size_t n, struct rpc_server **ret)
{
	struct rpc_server *s = calloc(1, sizeof(*s));
	int r;

	if (!s)
		return -ENOMEM;
	s->loopq = loopq;
	s->max_message_bytes = options->max_message_bytes;
	s->max_calls_per_conn = options->max_calls_per_conn;
	if (options->refusal)
		s->refusal = *options->refusal;
	s->down_tag.fn = rpc_server_on_down_tag;
	list_init(&s->peers);
	peer_table_init(&s->table);
	atomic_init(&s->n_live, 1);
	atomic_init(&s->n_answers, 0);
	pthread_mutex_init(&s->arm_lock, NULL);
	atomic_init(&s->heartbeat_us, clock_now_us());
	gpr_set_log_function(rpc_server_log_core);
	grpc_init();
	r = rpc_server_core_init(s, options, services, n);
	if (r == 0)
		r = rpc_server_start_thread(s);
	if (r) {
		rpc_server_abort(s);
		return r;
	}
	*ret = s;
	return 0;
}

uint64_t rpc_server_heartbeat_us(const struct rpc_server *s)
{
	return atomic_load_explicit(&s->heartbeat_us, memory_order_relaxed);
}

uint64_t rpc_server_cpu_us(const struct rpc_server *s)
{
	struct timespec ts;
	clockid_t clock;

	if (pthread_getcpuclockid(s->thread, &clock) != 0 || clock_gettime(clock, &ts) < 0)
		return 0;
	return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

size_t rpc_server_calls(const struct rpc_server *s)
{
	return s->n_calls;
}

size_t rpc_server_answers(const struct rpc_server *s)
{
	return atomic_load(&s->n_answers);
}

const char *rpc_server_method_at(const struct rpc_server *s, size_t i, uint64_t *ret_calls,
				 uint64_t *ret_failed)
{
	if (i + 1 >= s->n_slots) /* the last one is not of a method */
		return NULL;
	*ret_calls = s->slots[i].calls;
	*ret_failed = s->slots[i].failed;
	return s->slots[i].path;
}

/* ---------------------------------------------------------- connections */

/* Core requires it. The flag belongs to the socket, so the original descriptor has it from then on,
 * too. */
static int rpc_server_set_nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return -errno;
	return 0;
}

int rpc_server_adopt(struct rpc_server *s, struct conn *c, int from)
{
	_cleanup_(freep) struct peer *p = calloc(1, sizeof(*p));
	_cleanup_(fd_closep) int fd = -1;
	int r;

	if (!p)
		return -ENOMEM;
	if (s->closing)
		return -ESHUTDOWN;
	fd = peer_table_dup(&s->table, from);
	if (fd < 0)
		return fd;
	r = rpc_server_set_nonblocking(fd);
	if (r < 0)
		return r;
	*p = (struct peer){ .conn = c, .fd = fd };
	r = peer_table_set(&s->table, p);
	if (r < 0)
		return r;
	list_init(&p->link);
	list_init(&p->calls);
	list_append(&s->peers, &p->link);
	p = NULL;
	grpc_server_add_channel_from_fd(s->core, STEAL_FD(fd), s->creds);
	return 0;
}

static void rpc_server_peer_free(struct rpc_server *s, struct peer *p)
{
	struct rpc_call *call, *tmp;

	peer_table_clear(&s->table, p);
	list_for_each (call, tmp, &p->calls, link) {
		call->peer = NULL;
		list_unlink(&call->link);
		grpc_call_cancel(call->core.call, NULL);
	}
	peer_let_go(p, p->held);
	list_unlink(&p->link);
	free(p);
}

void rpc_server_forget(struct rpc_server *s, struct conn *c)
{
	struct peer *p, *tmp;

	list_for_each (p, tmp, &s->peers, link)
		if (p->conn == c) {
			rpc_server_peer_free(s, p);
			return;
		}
}

/* ------------------------------------------------------------ the close */

/*
 * Order: core stops taking calls and cancels those it has; when that is done and
 * the last call is freed, nothing can start a batch any more, and the queue is
 * shut down; when it is empty the thread ends; then all is freed.
 */
void rpc_server_close(struct rpc_server *s, rpc_server_closed_cb done, void *userdata)
{
	CHECK(!s->closing);
	s->closing = true;
	s->closed_fn = done;
	s->closed_data = userdata;
	pthread_mutex_lock(&s->arm_lock);
	s->stopping = true;
	pthread_mutex_unlock(&s->arm_lock);
	grpc_server_shutdown_and_notify(s->core, s->cq, &s->down_tag);
	grpc_server_cancel_all_calls(s->core);
}

static void rpc_server_on_down(struct work *work)
{
	struct rpc_server *s = CONTAINER_OF(work, struct rpc_server, down_work);

	if (atomic_fetch_sub(&s->n_live, 1) == 1)
		server_idle(s);
}

static void rpc_server_on_down_tag(struct tag *tag, bool ok)
{
	struct rpc_server *s = CONTAINER_OF(tag, struct rpc_server, down_tag);

	(void)ok;
	loopq_post(s->loopq, &s->down_work, rpc_server_on_down);
}

void server_idle(struct rpc_server *s)
{
	grpc_server_destroy(s->core);
	grpc_completion_queue_shutdown(s->cq);
}

static void rpc_server_on_over(struct work *work)
{
	struct rpc_server *s = CONTAINER_OF(work, struct rpc_server, over_work);
	rpc_server_closed_cb fn = s->closed_fn;
	void *userdata = s->closed_data;
	struct peer *p, *tmp;

	CHECK(s->n_calls == 0);
	list_for_each (p, tmp, &s->peers, link)
		rpc_server_peer_free(s, p);
	pthread_join(s->thread, NULL); /* it has posted its last work */
	rpc_server_free(s);
	if (fn)
		fn(userdata);
}
