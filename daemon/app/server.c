/*
 * Start: backend, device, engine and its communicator, jobs, sessions, gRPC, and the
 * listener last, so that a client that connects finds everything ready. Stop is the reverse: drain,
 * connections, running ops, gRPC, memory, threads.
 */
#include "app/server.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "app/devices.h"
#include "app/nodes.h"
#include "app/process.h"
#include "app/survive.h"
#include "app/telemetry.h"
#include "app/web.h"
#include "copies/full.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/loopq.h"
#include "core/state.h"
#include "core/text.h"
#include "core/threads.h"
#include "job/events.h"
#include "job/history.h"
#include "job/loading.h"
#include "net/gate.h"
#include "net/listener.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_time.h"
#include "ring/rings.h"
#include "rpc/audit.h"
#include "rpc/rpc_server.h"
#include "rpc/status_stall.h"
#include "rpc/svc_admin.h"
#include "rpc/svc_health.h"
#include "rpc/svc_reflection.h"
#include "rpc/svc_shardd.h"
#include "rpc/svc_status.h"
#include "session/session.h"
#include "step/backward.h"
#include "step/doubt.h"
#include "work/drain.h"

#define SERVER_MAGIC 0x53525652u

/* How often deadlines are checked: with ops pending, and without. */
#define TICK_BUSY_MS 20
#define TICK_IDLE_MS 250
/* The completion-queue thread wakes at least once a second. */
#define HEARTBEAT_LIMIT_US (10u * 1000000u)
/* Collectives that still run when the last connection is closed: nobody needs their results, but
 * aborting them takes longer than letting them end. */
#define RUN_ON_US 500000u
/* From the end of the drain: answers that core has not written yet. */
#define ANSWERS_US          100000u
#define SERVER_POOL_THREADS 4u /* libuv's, which decode long registrations */
#define SERVER_HELPERS      7u /* log, gate, cq, unmap, fill, otlp; one to spare */
/* Replaces text that names units and processes of a job that is closed to administrators. */
#define PRIVATE "the job is private"

/* Calls of a connection beyond its ops: status, watches. */
#define EXTRA_CALLS 64u
/* Core's quota, as a multiple of the limit for incomplete messages: core also holds messages that
 * are being unpacked, and answers. */
#define CORE_SHARE 4u

enum server_state { RUNNING, DRAINING, CLOSING, ENDING };

static const struct state_row server_states[] = {
	[RUNNING] = { "RUNNING", STATE_TO(DRAINING) | STATE_TO(CLOSING) },
	[DRAINING] = { "DRAINING", STATE_TO(CLOSING) },
	[CLOSING] = { "CLOSING", STATE_TO(ENDING) },
	[ENDING] = { "ENDING", 0 },
};

struct server {
	uint32_t magic;
	uint8_t state; /* enum server_state */
	uv_loop_t *loop;
	struct config config;
	struct loopq loopq;
	struct node node;
	struct jobs jobs;
	struct survive survive; /* them, beyond this process */
	struct nodes nodes;     /* the other ones */
	struct sessions sessions;
	struct rings rings;
	struct slices slices;
	struct health health;
	struct svc_shardd svc_shardd;
	struct svc_status svc_status;
	struct svc_admin svc_admin;
	struct web web;
	struct telemetry telemetry;
	struct svc_reflection svc_reflection;
	struct rpc_service services[SVC_SHARDD_SERVICES + 3 + SVC_REFLECTION_SERVICES];
	struct rpc_server *rpc;
	struct gate *gate;
	uint64_t rpc_cpu_us; /* of the gRPC thread, when the watchdog last asked */
	struct listener *listener;
	struct list conns; /* of struct server_conn */
	uv_timer_t tick;
	uv_timer_t finish;
	bool for_good; /* DRAINING: no successor takes the jobs over */
	uint64_t drain_until_us;
	uint64_t answers_until_us; /* DRAINING: core writes what has been answered; 0: not yet */
	uint64_t run_until_us;     /* CLOSING: what still runs between devices */
	server_stopped_cb done;
	void *userdata;
};

/* A gRPC connection; local ones belong to session_local. */
struct server_conn {
	struct list link;
	struct server *server;
	struct conn *conn;
	struct gate_conn *gate; /* NULL: not made */
};

/* The daemon's one server: job callbacks carry no userdata of their own. */
static struct server *the_server;

static void server_state_move(struct server *s, enum server_state to)
{
	state_move(server_states, &s->state, (uint8_t)to);
}

/* --------------------------------------------------------------- connections */

static void server_on_grpc_closed(struct conn *c, void *userdata)
{
	struct server_conn *sc = userdata;
	struct server *s = sc->server;
	struct session *session = conn_user(c);

	if (session) {
		if (session->member)
			audit(session->proc, "session ended", session->member->job->label,
			      "rank=%u session=%llu", session->member->rank,
			      (unsigned long long)session->id);
		session_end(session, "is gone");
	}
	rpc_server_forget(s->rpc, c);
	gate_conn_end(sc->gate);
	if (s->listener)
		listener_conn_ended(s->listener);
	list_unlink(&sc->link);
	free(sc);
}

static void server_on_local_closed(void *userdata)
{
	struct server *s = userdata;

	if (s->listener)
		listener_conn_ended(s->listener);
}

static void server_on_attached(struct conn *c, void *userdata)
{
	struct server_conn *sc = userdata;

	(void)c;
	gate_attached(sc->gate);
}

/* Of all connections of its user together; UINT64_MAX: none. */
static uint64_t server_message_bytes_limit(const struct conn *c)
{
	const struct user *u = conn_account(c);

	return u ? u->most[USER_MESSAGE_BYTES] : UINT64_MAX;
}

/* The gate before it, and core behind the gate. Return: 0 or negative errno. */
static int server_connect_grpc(struct server_conn *sc)
{
	_cleanup_(fd_closep) int fd = -1;
	int r = gate_open(sc->server->gate, sc->conn, server_message_bytes_limit(sc->conn), &fd,
			  &sc->gate);

	if (r < 0)
		return r;
	conn_on_ridden(sc->conn, server_on_attached, sc);
	return rpc_server_adopt(sc->server->rpc, sc->conn, fd);
}

static void server_take_grpc(struct server *s, struct conn *c)
{
	struct server_conn *sc = calloc(1, sizeof(*sc));
	int r;

	if (!sc) {
		log_warn("server", "connection refused pid=%d error=\"no memory\"",
			 (int)proc_pid(conn_proc(c)));
		listener_conn_ended(s->listener);
		conn_close(c);
		return;
	}
	sc->server = s;
	sc->conn = c;
	list_init(&sc->link);
	list_append(&s->conns, &sc->link);
	conn_on_closed(c, server_on_grpc_closed, sc);
	r = server_connect_grpc(sc);
	if (r < 0) {
		log_warn("server", "connection refused pid=%d error=\"%s\"",
			 (int)proc_pid(conn_proc(c)), strerror(-r));
		conn_close(c);
	}
}

static void server_on_connection(struct conn *c, void *userdata)
{
	struct server *s = userdata;
	pid_t pid = proc_pid(conn_proc(c));
	uid_t uid = proc_uid(conn_proc(c));
	int r;

	if (conn_protocol(c) == CONN_GRPC) {
		server_take_grpc(s, c);
		return;
	}
	r = session_local_new(&s->sessions, s->loop, c,
			      (uint64_t)s->config.hello_timeout_ms * 1000u, server_on_local_closed,
			      s);
	if (r < 0) {
		log_warn("server", "local channel refused uid=%u pid=%d error=\"%s\"", uid,
			 (int)pid, strerror(-r));
		listener_conn_ended(s->listener);
	}
}

static unsigned server_count_connections(void *userdata)
{
	struct server *s = userdata;

	return s->listener ? listener_connections(s->listener) : 0;
}

static uint32_t server_count_stored(uint32_t *ret_used, void *userdata)
{
	const struct survive *v = &((struct server *)userdata)->survive;

	*ret_used = survive_outlives(v) ? v->keeper.used : 0;
	return survive_outlives(v) ? v->keeper.most : 0;
}

static void server_fill_exports(struct arena *a, Shardd__V1__GetStatusResponse *reply,
				void *userdata)
{
	const struct server *s = userdata;

	web_fill(&s->web, a, reply);
	telemetry_fill(&s->telemetry, a, reply);
}

bool server_can_hand_over(const struct server *s)
{
	return survive_outlives(&s->survive);
}

/* The service ends on the signal, in a later turn of the loop. */
static int server_hand_over(void *userdata, struct fault *f)
{
	if (!server_can_hand_over(userdata))
		return fault_set(
			f, FAULT_STATE, NULL,
			"nothing would take the jobs over: this daemon was started without "
			"a descriptor store, or what kept its jobs has ended; run it as "
			"shardd.service or with "
			"shardd-holder, or use shardctl drain --wait and start it again");
	return kill(getpid(), SIGUSR2) < 0 ? fault_errno(f, -errno, "handing over") : 0;
}

static int server_shut_down(void *userdata, struct fault *f)
{
	(void)userdata;
	return kill(getpid(), SIGUSR1) < 0 ? fault_errno(f, -errno, "shutting down") : 0;
}

/* The gate counts these, on its own thread. */
static uint64_t server_count_message_bytes(uid_t uid, void *userdata)
{
	struct server *s = userdata;
	struct server_conn *sc, *tmp;
	uint64_t bytes = 0;

	list_for_each (sc, tmp, &s->conns, link)
		if (sc->gate && proc_uid(conn_proc(sc->conn)) == uid)
			bytes += gate_held_bytes(sc->gate);
	return bytes;
}

static void server_set_message_bytes_limits(struct server *s)
{
	struct server_conn *sc, *tmp;

	list_for_each (sc, tmp, &s->conns, link)
		if (sc->gate)
			gate_set_user_bytes(sc->gate, server_message_bytes_limit(sc->conn));
}

/* ---------------------------------------------------------------- job events */

static void server_tell_ranks(struct job *job, enum job_event_kind kind, const char *text)
{
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r])
			session_event(job->ranks[r], kind, text);
}

static void server_tell_stall(struct job *job, const char *text)
{
	log_warn("server", "stalled job=%s what=\"%s\"", job->label,
		 job->rec->is_private ? PRIVATE : text);
	text_copy(job->ops.stalled, sizeof(job->ops.stalled), text);
	events_add(job, EVENTS_STALL, "%s", text);
	server_tell_ranks(job, JOB_EVENT_STALL, text);
}

static void server_on_stall(struct job *job, bool stalls)
{
	const uint64_t ms = (clock_now_us() - job->ops.stalled_us) / 1000;
	char text[64];

	if (stalls) {
		status_stall_ask(job, server_tell_stall);
		return;
	}
	if (!*job->ops.stalled)
		return;
	log_info("server", "stall over job=%s ms=%llu", job->label, (unsigned long long)ms);
	snprintf(text, sizeof(text), "the job has stalled for %llu.%llu s",
		 (unsigned long long)(ms / 1000), (unsigned long long)(ms / 100 % 10));
	events_add(job, EVENTS_STALL_ENDED, "%s", text);
	server_tell_ranks(job, JOB_EVENT_STALL_ENDED, text);
}

static void server_on_epoch_ended(struct job *job, const struct fault *why)
{
	log_info("server", "epoch ended job=%s epoch=%llu ranks=%u why=\"%s\"", job->label,
		 (unsigned long long)job->rec->epoch, job->joined,
		 job->rec->is_private ? PRIVATE : why->text);
}

static void server_on_expired(const struct job *job)
{
	log_info("server", "job expired job=%s ttl_s=%u committed=%s crashed=%s bytes=%llu",
		 job->label, job->rec->ttl_s, job->rec->has_commit ? "yes" : "no",
		 job->life.crashed ? "yes" : "no", (unsigned long long)job->quota.used);
}

/* -------------------------------------------------------------------- start */

/* Return: 0, or -ENOMEM: those of users stay as they were. */
static int server_set_limits(struct server *s)
{
	const struct config *c = &s->config;
	struct user_limits users;

	s->node.limits = (struct node_limits){
		.job_quota_bytes = c->job_quota_bytes,
		.max_wait_for_memory_ms = c->ttl.max_wait_for_memory_ms,
		.job_ttl_s = c->ttl.job_s,
		.max_job_ttl_s = c->ttl.max_job_s,
		.uncommitted_ttl_s = c->ttl.uncommitted_s,
		.op_timeout_ms = c->op_timeout_ms,
		.stall_after_ms = c->stall_after_ms,
		.max_jobs = c->max_jobs,
		.max_units_per_job = c->max_units_per_job,
		.max_world_size = c->max_world_size,
		.max_inflight_ops = c->max_inflight_ops,
		.max_inflight_gathers = c->max_inflight_gathers,
		.reduce_batch_bytes = c->reduce_batch_bytes,
		.stream_bytes_per_s = c->readers.stream_bytes_per_s,
		.stream_stall_ms = c->readers.stream_stall_ms,
	};
	s->node.order_ranks = strcmp(c->peer.order, "ranks") == 0;
	s->node.loopq = &s->loopq;
	s->node.checkpoint_roots = c->checkpoint_roots;
	config_user_limits(c, &users);
	return users_configure(&s->node.users, &users);
}

static struct listener_options server_listener_options_of(struct server *s, int inherited_fd)
{
	const struct config *c = &s->config;

	return (struct listener_options){
		.path = c->socket,
		.inherited_fd = inherited_fd,
		.mode = c->socket_mode,
		.group = c->socket_group,
		.max_connections = c->max_connections,
		.reserved = c->reserved_connections,
		.users = &s->node.users,
		.max_pending_per_uid = c->max_connections / 2 + 1,
		.hello_timeout_us = (uint64_t)c->hello_timeout_ms * 1000u,
		.allow_uids = c->allow.uids,
		.n_allow_uids = c->allow.n_uids,
		.allow_gids = c->allow.gids,
		.n_allow_gids = c->allow.n_gids,
	};
}

/* -------------------------------------------------------------------- devices */

static void server_on_device_lost(struct node *node, struct device *device)
{
	(void)node;
	jobs_device_lost(&the_server->jobs, device);
}

static void server_on_comm_broke(struct node *node, struct node_comm *nc, const char *why)
{
	(void)node;
	log_warn("server", "communicator broke devices=%u why=\"%s\"", nc->n, why);
	jobs_comm_broke(&the_server->jobs, nc, why);
}

static struct gate_limits server_gate_limits_of(const struct config *c)
{
	/* One message has to fit, with frames that are not full. */
	uint64_t message = c->max_message_bytes + c->max_message_bytes / 16;

	return (struct gate_limits){
		.header_bytes = c->grpc.header_bytes,
		.continuations = c->grpc.continuations,
		.frame_bytes = RPC_FRAME_BYTES,
		.streams = c->max_inflight_ops + EXTRA_CALLS + RPC_EXTRA_STREAMS,
		.unattached_streams = c->grpc.unattached_streams,
		.unattached_bytes = c->grpc.unattached_bytes,
		.connection_bytes =
			c->grpc.connection_bytes > message ? c->grpc.connection_bytes : message,
		.total_bytes = c->grpc.total_bytes,
		.message_timeout_ms = c->grpc.message_timeout_ms,
		.idle_timeout_ms = c->grpc.idle_timeout_ms,
		.resets_per_s = c->grpc.resets_per_s,
		.pings_per_s = c->grpc.pings_per_s,
		.settings_per_s = c->grpc.settings_per_s,
		.control_per_s = c->grpc.control_per_s,
	};
}

static int server_start_gate(struct server *s, struct fault *f)
{
	struct gate_limits limits = server_gate_limits_of(&s->config);
	int r = gate_new(&s->loopq, &limits, &s->gate);

	return r < 0 ? fault_errno(f, r, "starting the gate of gRPC") : 0;
}

/* Threads of gRPC core: its executor and its event engine may have one per core each, and there are
 * four more. */
static unsigned server_core_threads(void)
{
	return 2 * uv_available_parallelism() + 8;
}

unsigned server_threads(const struct config *config)
{
	unsigned kernels = config->threads ? config->threads : uv_available_parallelism();

	return kernels + server_core_threads() + SERVER_POOL_THREADS + SERVER_HELPERS;
}

static void server_pool_nothing(uv_work_t *work)
{
	(void)work;
}

static void server_pool_started(uv_work_t *work, int status)
{
	(void)status;
	free(work);
}

/* libuv starts its threads with the first work item, and aborts if it cannot. So this happens
 * before trainers can connect. */
static int server_start_pool(struct server *s, struct fault *f)
{
	uv_work_t *work = calloc(1, sizeof(*work));

	if (!work)
		return fault_errno(f, -ENOMEM, "starting the pool of threads");
	CHECK(uv_queue_work(s->loop, work, server_pool_nothing, server_pool_started) == 0);
	return 0;
}

/* Return: 0, or -ENOMEM: they are unchanged. */
static int server_set_observers(struct server *s)
{
	return svc_status_set_observers(&s->svc_status, s->config.http.observers,
					s->config.http.n_observers);
}

static int server_start_rpc(struct server *s, struct fault *f)
{
	static const struct svc_status_sources status_sources = {
		.connections = server_count_connections,
		.message_bytes = server_count_message_bytes,
		.store = server_count_stored,
		.exports = server_fill_exports,
	};
	static const struct svc_admin_actions admin_actions = {
		.hand_over = server_hand_over,
		.shut_down = server_shut_down,
	};
	struct rpc_options options = { .max_message_bytes = s->config.max_message_bytes,
				       .max_calls_per_conn =
					       s->config.max_inflight_ops + EXTRA_CALLS,
				       .max_metadata_bytes = s->config.grpc.header_bytes,
				       .memory_bytes = CORE_SHARE * s->config.grpc.total_bytes };
	int r;

	/* memory that devices have taken is not available to it */
	if (threads_probe(server_core_threads() + SERVER_POOL_THREADS + 1, f) ||
	    server_start_pool(s, f))
		return f->code;
	r = svc_reflection_init(&s->svc_reflection, s->services, ARRAY_SIZE(s->services));
	if (r < 0)
		return fault_errno(f, r, "reading the descriptors of the services");
	health_init(&s->health, s->services, ARRAY_SIZE(s->services));
	svc_shardd_init(&s->svc_shardd, &s->sessions, &s->jobs, &s->slices, &s->svc_status.turns,
			s->config.max_message_bytes);
	svc_status_init(&s->svc_status, &s->sessions, &s->jobs, &status_sources, s);
	if (server_set_observers(s) < 0)
		return fault_errno(f, -ENOMEM, "setting the observers");
	svc_admin_init(&s->svc_admin, &s->jobs, &admin_actions, s);
	memcpy(s->services, s->svc_shardd.services, sizeof(s->svc_shardd.services));
	s->services[SVC_SHARDD_SERVICES] = s->svc_status.service;
	s->services[SVC_SHARDD_SERVICES + 1] = *health_service(&s->health);
	s->services[SVC_SHARDD_SERVICES + 2] = s->svc_admin.service;
	memcpy(&s->services[SVC_SHARDD_SERVICES + 3], s->svc_reflection.own,
	       sizeof(s->svc_reflection.own));
	process_deadline(
		"gRPC core did not start: threads or memory may be missing (ulimit -u, -v)");
	r = rpc_server_new(&s->loopq, &options, s->services, ARRAY_SIZE(s->services), &s->rpc);
	process_deadline_over();
	return r < 0 ? fault_errno(f, r, "starting gRPC") : 0;
}

/* For a probe. The watchdog's question (server_healthy) remembers when it was asked. */
static bool server_responds(void *userdata)
{
	const struct server *s = userdata;
	const uint64_t now = clock_now_us();

	return s->rpc && now - rpc_server_heartbeat_us(s->rpc) < HEARTBEAT_LIMIT_US &&
	       now - gate_heartbeat_us(s->gate) < HEARTBEAT_LIMIT_US;
}

static int server_start_web(struct server *s, struct fault *f)
{
	s->web = (struct web){ .jobs = &s->jobs,
			       .rings = &s->rings,
			       .rpc = s->rpc,
			       .healthy = server_responds,
			       .userdata = s };
	if (web_start(&s->web, s->loop, &s->config, &s->svc_status, f))
		return (int)f->code;
	return telemetry_start(&s->telemetry, s->loop, &s->loopq, &s->config, &s->svc_status,
			       &s->web, f);
}

static int server_start_listener(struct server *s, struct inherited *in, struct fault *f)
{
	struct listener_options options = server_listener_options_of(s, in->socket);

	if (listener_new(s->loop, &options, server_on_connection, s, &s->listener, f))
		return f->code;
	in->socket = -1;
	return 0;
}

static void server_on_tick(uv_timer_t *timer);
static void server_tick_soon(void *userdata);

/* Return: 0 or negative errno. */
static int server_open_history(struct server *s, const struct inherited *in)
{
	long dropped = 0;
	int r = history_open(s->config.records.jobs, in->history, &dropped);

	if (r == 0 && dropped < 0)
		log_warn("server", "the history of jobs that was kept cannot be read: it is of "
				   "another version, or damaged; a new one begins");
	else if (r == 0 && dropped > 0)
		log_warn("server", "records of ended jobs are dropped n=%ld history_jobs=%u",
			 dropped, s->config.records.jobs);
	return r;
}

static int server_start(struct server *s, struct inherited *in, struct fault *f)
{
	struct job_ops ops = { .abort_ops = op_abort_all,
			       .before_change = loading_let,
			       .drain = drain_wait,
			       .rolled_back = full_invalidate,
			       .unit_released = backward_released,
			       .complete = coll_complete,
			       .failed = op_failed,
			       .event = session_event,
			       .stall = server_on_stall,
			       .signals_gone = queue_tasks_forget,
			       .epoch_ended = server_on_epoch_ended,
			       .epoch_ends = doubt_epoch_ends,
			       .restored = doubt_restored,
			       .drop_doubt = doubt_drop_all,
			       .expired = server_on_expired };
	int r;

	/* first what cannot fail: if something below fails, all of it is ended again */
	survive_init(&s->survive, &s->jobs, server_tick_soon, s);
	node_init(&s->node, s->loop);
	s->node.comm_broke = server_on_comm_broke;
	s->node.started_us = clock_now_us();
	s->node.started_unix_s = (uint64_t)time(NULL);
	if (getrandom(s->node.instance, NODE_INSTANCE_BYTES, 0) != NODE_INSTANCE_BYTES)
		return fault_errno(f, -errno, "making an instance id");
	r = server_set_limits(s);
	cluster_set_slots(&ops);
	jobs_init(&s->jobs, &s->node, &ops);
	sessions_init(&s->sessions, &s->jobs);
	slices_init(&s->slices, s->loop);
	rings_init(&s->rings, s->loop, &s->sessions, s->config.max_inflight_ops,
		   s->config.ring_spin_us);
	if (r < 0)
		return fault_errno(f, r, "setting the limits of users");
	r = loopq_init(&s->loopq, s->loop);
	if (r < 0)
		return fault_errno(f, r, "starting the loop's queue");
	if (recorder_init(s->config.records.ops) < 0)
		return fault_errno(f, -ENOMEM, "making the flight recorder");
	if (events_init(s->config.records.events) < 0)
		return fault_errno(f, -ENOMEM, "making the record of events");
	r = server_open_history(s, in);
	if (r < 0)
		return fault_errno(f, r, "making the history of jobs");
	if (devices_start(&s->node, &s->loopq, &s->config, server_on_device_lost, f) ||
	    survive_start(&s->survive, in, f) ||
	    nodes_start(&s->nodes, s->loop, &s->loopq, &s->jobs, &s->config, f) ||
	    server_start_rpc(s, f) || server_start_gate(s, f) || server_start_web(s, f) ||
	    server_start_listener(s, in, f))
		return f->code;
	health_set(&s->health, true);
	return 0;
}

static void server_close_rpc(struct server *s);

static void server_ignore_stopped(void *userdata)
{
	*(bool *)userdata = true;
}

int server_new(uv_loop_t *loop, const struct config *config, struct inherited *in,
	       struct server **ret, struct fault *f)
{
	struct server *s = calloc(1, sizeof(*s));
	bool gone = false;

	if (!s)
		return fault_errno(f, -ENOMEM, "starting");
	CHECK(!the_server);
	the_server = s;
	s->magic = SERVER_MAGIC;
	s->loop = loop;
	s->config = *config;
	list_init(&s->conns);
	uv_timer_init(loop, &s->tick);
	s->tick.data = s;
	if (server_start(s, in, f)) {
		s->done = server_ignore_stopped;
		s->userdata = &gone;
		server_state_move(s, CLOSING);
		server_close_rpc(s);
		while (!gone)
			uv_run(loop, UV_RUN_ONCE);
		return f->code;
	}
	uv_timer_start(&s->tick, server_on_tick, TICK_IDLE_MS, 0);
	*ret = s;
	return 0;
}

void server_reconfigure(struct server *s, const struct config *config)
{
	struct config new = *config;
	struct listener_options options;
	struct gate_limits limits;

	config_keep_fixed(&new, &s->config);
	s->config = new;
	if (server_set_limits(s) < 0)
		log_error("server", "no memory: the limits of users are unchanged");
	rings_set_spin(&s->rings, s->config.ring_spin_us);
	options = server_listener_options_of(s, -1);
	limits = server_gate_limits_of(&s->config);
	if (s->listener)
		listener_reconfigure(s->listener, &options);
	gate_reconfigure(s->gate, &limits);
	server_set_message_bytes_limits(s);
	web_reconfigure(&s->web, &s->config);
	telemetry_reconfigure(&s->telemetry, &s->config);
	if (server_set_observers(s) < 0)
		log_error("server", "no memory: the observers are unchanged");
}

/* ----------------------------------------------------------------------- stop */

/* The last handle: its owner can be freed. */
static void server_on_finish_closed(uv_handle_t *handle)
{
	struct server *s = handle->data;
	server_stopped_cb done = s->done;
	void *userdata = s->userdata;

	s->magic = 0;
	free(s);
	the_server = NULL;
	done(userdata);
}

/* A turn after the other handles were closed: their callbacks have run. */
static void server_on_finish(uv_timer_t *timer)
{
	uv_close((uv_handle_t *)timer, server_on_finish_closed);
}

/* Devices return memory when their queues no longer use it. */
static void server_on_devices(uv_timer_t *timer)
{
	struct server *s = timer->data;

	if (!jobs_gone(&s->jobs) || !devices_idle(&s->node) || !nodes_stopped(&s->nodes) ||
	    !telemetry_stopped(&s->telemetry)) {
		uv_timer_start(&s->tick, server_on_devices, 1, 0);
		return;
	}
	telemetry_end(&s->telemetry);
	jobs_deinit(&s->jobs);
	survive_deinit(&s->survive);
	recorder_deinit();
	history_close();
	events_deinit();
	rings_close(&s->rings); /* a ring that a client still has is on its user's account */
	devices_end(&s->node);  /* with the users */
	nodes_end(&s->nodes);
	svc_status_close(&s->svc_status);
	slices_close(&s->slices);
	s->gate = gate_close(s->gate);
	loopq_close(&s->loopq);
	uv_close((uv_handle_t *)&s->tick, NULL);
	uv_timer_init(s->loop, &s->finish);
	s->finish.data = s;
	uv_timer_start(&s->finish, server_on_finish, 1, 0);
}

/* Nothing has them after this. */
static void server_log_given_up(const struct server *s)
{
	struct job *job, *tmp;

	list_for_each (job, tmp, &s->jobs.all, link)
		log_info("server",
			 "job ends with the daemon job=%s uid=%u lifetime=%s step=%llu "
			 "committed=%s bytes=%llu state=\"%s\"",
			 job->label, job->rec->uid, job_lifetime_word(job->rec->lifetime),
			 (unsigned long long)job->rec->step, job->rec->has_commit ? "yes" : "no",
			 (unsigned long long)job->quota.used, job_state_place(job));
}

static void server_on_rpc_closed(void *userdata)
{
	struct server *s = userdata;

	if (s->state != ENDING) /* else server_tick_stop did */
		server_state_move(s, ENDING);
	if (s->rpc)
		health_deinit(&s->health);
	svc_reflection_deinit(&s->svc_reflection);
	if (s->for_good || !survive_outlives(&s->survive))
		server_log_given_up(s);
	if (!s->for_good)
		survive_leave(&s->survive);
	nodes_stop(&s->nodes);
	jobs_end(&s->jobs);
	uv_timer_start(&s->tick, server_on_devices, 0, 0);
}

static void server_close_rpc(struct server *s)
{
	telemetry_stop(&s->telemetry, s->for_good || !survive_outlives(&s->survive));
	s->web.http = http_close(s->web.http);
	if (s->rpc)
		rpc_server_close(s->rpc, server_on_rpc_closed, s);
	else
		server_on_rpc_closed(s);
}

static uint32_t server_trainers(const struct server *s)
{
	struct job *job, *tmp;
	uint32_t n = 0;

	list_for_each (job, tmp, &s->jobs.all, link)
		n += job->present;
	return n;
}

/* Ops that run in the backend, of jobs alive and deleted. */
static bool server_anything_runs(const struct server *s)
{
	struct job *job, *tmp;
	bool runs = false;

	list_for_each (job, tmp, &s->jobs.all, link)
		runs = runs || job->running || job->step.state == JOB_STEP_APPLYING;
	list_for_each (job, tmp, &s->jobs.zombies, link)
		runs = runs || job->running || job->step.state == JOB_STEP_APPLYING;
	return runs;
}

static void server_close_connections(struct server *s)
{
	struct server_conn *sc, *tmp;

	log_info("server", "closing trainers=%u connections=%u", server_trainers(s),
		 server_count_connections(s));
	server_state_move(s, CLOSING);
	s->run_until_us = clock_now_us() + RUN_ON_US;
	s->listener = listener_close(s->listener);
	rings_stop(&s->rings);
	list_for_each (sc, tmp, &s->conns, link)
		conn_close(sc->conn);
	/* also those that belong to no session: we are told of their end */
	sessions_close_locals(&s->sessions);
}

void server_stop(struct server *s, bool for_good, uint32_t timeout_ms, server_stopped_cb done,
		 void *userdata)
{
	struct job *job, *tmp;

	MAGIC_CHECK(s, SERVER_MAGIC);
	if (s->state == DRAINING)
		s->drain_until_us = clock_now_us();
	if (s->state != RUNNING)
		return;
	server_state_move(s, DRAINING);
	s->done = done;
	s->userdata = userdata;
	s->drain_until_us = clock_now_us() + (uint64_t)timeout_ms * 1000u;
	s->jobs.draining = true;
	health_set(&s->health, false);
	s->for_good = for_good;
	if (for_good)
		process_notify_for_good();
	if (survive_outlives(&s->survive) &&
	    !for_good) { /* the trainers' work goes on with a successor */
		s->drain_until_us = clock_now_us();
		log_info("server", "leaving jobs=%u trainers=%u", s->jobs.count,
			 server_trainers(s));
		list_for_each (job, tmp, &s->jobs.all, link)
			log_info("server",
				 "left for the next daemon job=%s uid=%u step=%llu bytes=%llu",
				 job->label, job->rec->uid, (unsigned long long)job->rec->step,
				 (unsigned long long)job->quota.used);
	} else {
		log_info("server", "draining trainers=%u timeout_ms=%u", server_trainers(s),
			 timeout_ms);
		list_for_each (job, tmp, &s->jobs.all, link)
			job_drain(job);
	}
	uv_timer_start(&s->tick, server_on_tick, 0, 0);
}

/* ------------------------------------------------------------------------ tick */

static bool server_ops_pending(const struct server *s)
{
	struct session *session, *tmp;

	list_for_each (session, tmp, &s->sessions.all, link)
		if (session->member && session->member->pending)
			return true;
	return false;
}

/* A collective that hangs would delay the shutdown until its op's deadline. This includes those
 * that start now. */
static void server_limit_running(struct server *s)
{
	struct job *job, *tmp;

	list_for_each (job, tmp, &s->jobs.all, link)
		queue_tasks_limit(job, s->run_until_us);
	list_for_each (job, tmp, &s->jobs.zombies, link)
		queue_tasks_limit(job, s->run_until_us);
}

/* The caller who asked for the stop, for one, has its answer before its connection is closed.
 * A client that does not read holds this up for ANSWERS_US. */
static bool server_has_answered(struct server *s, uint64_t now)
{
	if (!s->answers_until_us)
		s->answers_until_us = now + ANSWERS_US;
	return !s->rpc || rpc_server_answers(s->rpc) == 0 || now >= s->answers_until_us;
}

static void server_tick_stop(struct server *s, uint64_t now)
{
	if (s->state == DRAINING && (!server_trainers(s) || now >= s->drain_until_us) &&
	    server_has_answered(s, now))
		server_close_connections(s);
	if (s->state == CLOSING)
		server_limit_running(s);
	if (s->state == CLOSING && list_empty(&s->conns) && !s->sessions.count &&
	    list_empty(&s->sessions.locals) && !server_anything_runs(s)) {
		server_state_move(s, ENDING);
		server_close_rpc(s);
	}
}

/* The keeper reads quickly, unless the machine is very busy. */
static void server_tick_soon(void *userdata)
{
	struct server *s = userdata;

	if (s->state == RUNNING)
		uv_timer_start(&s->tick, server_on_tick, 1, 0);
}

static void server_on_tick(uv_timer_t *timer)
{
	struct server *s = timer->data;
	uint64_t now = clock_now_us();

	MAGIC_CHECK(s, SERVER_MAGIC);
	ops_tick(&s->jobs, now, (uint64_t)s->node.limits.stall_after_ms * 1000u);
	jobs_tick(&s->jobs, now);
	survive_tick(&s->survive);
	devices_tick(&s->node, now);
	server_tick_stop(s, now);
	if (s->survive.behind && s->state == RUNNING)
		server_tick_soon(s);
	else if (s->state == DRAINING && s->answers_until_us)
		uv_timer_start(&s->tick, server_on_tick, 1, 0);
	else if (s->state != ENDING)
		uv_timer_start(&s->tick, server_on_tick,
			       s->state != RUNNING || server_ops_pending(s) ? TICK_BUSY_MS
									    : TICK_IDLE_MS,
			       0);
}

/* A gRPC thread that does not answer but uses the processor is busy with what some client sent:
 * that is no reason to restart the daemon, which would cost all others their state. A thread that
 * does neither hangs. */
static bool server_rpc_alive(struct server *s)
{
	uint64_t before = s->rpc_cpu_us;

	if (!s->rpc)
		return false;
	s->rpc_cpu_us = rpc_server_cpu_us(s->rpc);
	if (clock_now_us() - rpc_server_heartbeat_us(s->rpc) < HEARTBEAT_LIMIT_US)
		return true;
	log_warn("server", "the gRPC thread does not respond cpu_us=%llu",
		 (unsigned long long)(s->rpc_cpu_us - before));
	return s->rpc_cpu_us != before;
}

bool server_healthy(struct server *s)
{
	return server_rpc_alive(s) &&
	       clock_now_us() - gate_heartbeat_us(s->gate) < HEARTBEAT_LIMIT_US;
}

void server_summary(const struct server *s, char *buf, size_t bytes)
{
	snprintf(buf, bytes, "%s%u jobs, %u trainers, %llu MiB held",
		 s->state == RUNNING ? "" : "draining: ", s->jobs.count, server_trainers(s),
		 (unsigned long long)(node_used(&s->node) >> 20));
}
