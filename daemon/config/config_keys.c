#include "config/config_keys.h"

#include <string.h>

#include "core/check.h"

#define KIB 1024ull
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)
#define TIB (1024 * GIB)

#define HOUR_S 3600ull
#define DAY_S  (24 * HOUR_S)
#define DAY_MS (DAY_S * 1000)

#define FIELD_AS(key, field)                                     \
	.name = (key), .offset = offsetof(struct config, field), \
	.bytes = sizeof(((struct config *)0)->field)
#define FIELD(key) FIELD_AS(#key, key)
/* @list: of a group of fields, with its count in n_@list. */
#define LIST(key, group, list) \
	FIELD_AS(key, group.list), .count_offset = offsetof(struct config, group.n_##list)

/* A limit for each user; 0 means no limit. */
#define PER_USER(key, field, kind, most, value)                                        \
	FIELD_AS(key, per_user.field), .type = CONFIG_##kind, .min = 1, .max = (most), \
				       .zero = true, .by_default = (value), .runtime = true

/* A socket address holds 108 bytes, the terminating 0 among them. */
#define SOCKET_PATH_MAX 107

/* clang-format off */
const struct config_key config_keys[] = {
	{ FIELD(socket), .type = CONFIG_TEXT, .min = 1, .max = SOCKET_PATH_MAX,
	  .by_default = "/run/shardd/shardd.sock",
	  .help = "Path of the socket that trainers connect to. Not used when the service manager\n"
		  "passes a listening socket." },
	{ FIELD(socket_group), .type = CONFIG_TEXT, .min = 0, .max = 63, .by_default = "",
	  .help = "Group that owns the socket file. Empty: the daemon's own." },
	{ FIELD(socket_mode), .type = CONFIG_MODE, .min = 0, .max = 0777, .by_default = "0660",
	  .help = "Permissions of the socket file, octal. A process that may write to it may connect." },
	{ FIELD(backend), .type = CONFIG_CHOICE, .choices = "host|cuda|auto", .by_default = "auto",
	  .help = "Where training state lives. host: the memory of this machine. cuda: its GPUs. auto:\n"
		  "usable GPUs if there are any, else the memory of this machine." },
	{ FIELD(devices), .type = CONFIG_TEXT, .min = 0, .max = 831, .by_default = "",
	  .help = "UUIDs of the GPUs to use (nvidia-smi -L), separated by commas. Empty: all that\n"
		  "CUDA_VISIBLE_DEVICES leaves." },
	{ FIELD(engine), .type = CONFIG_CHOICE, .choices = "auto|local|nccl", .by_default = "auto",
	  .help = "How GPUs communicate. auto: NCCL for jobs on several GPUs, nothing for jobs on one;\n"
		  "without NCCL a job can use one GPU. nccl: NCCL even on a machine with one GPU, and\n"
		  "the daemon does not start without it. local: never NCCL." },
	{ FIELD(gpu_order), .type = CONFIG_CHOICE, .choices = "auto|timeline|events",
	  .by_default = "auto",
	  .help = "How trainers' CUDA streams and the daemon's queues wait for each other. timeline:\n"
		  "64-bit words in GPU memory (stream memory operations). events: interprocess events.\n"
		  "auto: the first that works in a probe at start, timeline before events." },
	{ FIELD(gpu_measure_overlap), .type = CONFIG_CHOICE, .choices = "yes|no",
	  .by_default = "yes",
	  .help = "Measure at start how kernels of two processes share each GPU, for shardctl status.\n"
		  "This takes a moment." },
	{ FIELD(prefault), .type = CONFIG_CHOICE, .choices = "yes|no", .by_default = "yes",
	  .help = "Allocate the pages of new host memory before they are used, at idle priority,\n"
		  "as long as an eighth of the memory (of the machine, and of the container's limit)\n"
		  "is left." },
	{ FIELD(threads), .type = CONFIG_COUNT, .min = 1, .max = 1024, .zero = true, .by_default = "0",
	  .help = "Threads that run kernels. 0: one per processor core." },
	{ FIELD(memory_bytes), .type = CONFIG_BYTES, .min = MIB, .max = 1024 * TIB, .zero = true,
	  .by_default = "0",
	  .help = "Memory that all jobs together may use. 0: four fifths of the machine's memory or\n"
		  "of the control group's limit, whichever is lower; on a GPU, all of its memory. The\n"
		  "daemon does not start if the value exceeds what the machine or the control group has." },
	{ FIELD(seal_parameters), .type = CONFIG_CHOICE, .choices = "yes|no", .by_default = "yes",
	  .help = "Seal the memory of parameters before it is handed out (F_SEAL_FUTURE_WRITE), so\n"
		  "that nobody can map it for writing, not even root or another process of the\n"
		  "daemon's user. no: for memory that another daemon process takes over." },
	{ FIELD(job_quota_bytes), .type = CONFIG_BYTES, .min = MIB, .max = 1024 * TIB, .zero = true,
	  .by_default = "0", .runtime = true,
	  .help = "Memory that one job may use unless it asks for less. 0: no limit per job. A change\n"
		  "applies to jobs created after it." },
	{ FIELD_AS("job_ttl_s", ttl.job_s), .type = CONFIG_SECONDS, .min = 1, .max = 365 * DAY_S, .by_default = "1d",
	  .runtime = true,
	  .help = "How long a job and its memory are kept after its last trainer has left." },
	{ FIELD_AS("max_job_ttl_s", ttl.max_job_s), .type = CONFIG_SECONDS, .min = 1, .max = 365 * DAY_S,
	  .by_default = "7d", .runtime = true,
	  .help = "The longest time that a job may ask to be kept; the daemon refuses a longer one.\n"
		  "At least job_ttl_s." },
	{ FIELD_AS("uncommitted_ttl_s", ttl.uncommitted_s), .type = CONFIG_SECONDS, .min = 1, .max = 365 * DAY_S,
	  .zero = true, .by_default = "10min", .runtime = true,
	  .help = "How long an EPHEMERAL job that has never committed a step is kept after its last\n"
		  "trainer died: there is nothing to resume from. Applies if the job's own time is\n"
		  "longer. 0: the job's own time." },
	{ FIELD_AS("max_wait_for_memory_ms", ttl.max_wait_for_memory_ms), .type = CONFIG_MILLIS, .min = 1, .max = 30 * DAY_MS, .zero = true,
	  .by_default = "1h", .runtime = true,
	  .help = "The longest time that a job may ask to wait in the line for memory; the daemon\n"
		  "refuses a longer one. While a job waits, others behind it get no memory for shards\n"
		  "on the devices that it asks for. 0: no job waits." },
	{ FIELD(op_timeout_ms), .type = CONFIG_MILLIS, .min = 1, .max = 30 * DAY_MS,
	  .by_default = "10min", .runtime = true,
	  .help = "Deadline of an operation that does not set one. When it passes, the operation ends\n"
		  "with DEADLINE_EXCEEDED." },
	{ FIELD(stall_after_ms), .type = CONFIG_MILLIS, .min = 1, .max = 30 * DAY_MS,
	  .by_default = "5s", .runtime = true,
	  .help = "A job stalls when one of its operations has waited longer than this, for other\n"
		  "ranks, for readers or for memory. The log, shardctl status, shardctl health and\n"
		  "the job's ranks are told who holds it up, and when it goes on." },
	{ FIELD(max_connections), .type = CONFIG_COUNT, .min = 1, .max = 1000000, .by_default = "4096",
	  .runtime = true,
	  .help = "Maximum number of open connections. The daemon closes further ones at once." },
	{ FIELD(reserved_connections), .type = CONFIG_COUNT, .min = 1, .max = 1000000, .zero = true,
	  .by_default = "64", .runtime = true,
	  .help = "How many of max_connections only the superuser and the daemon's own user can take,\n"
		  "so that an operator can connect when others have taken the rest. More than half of\n"
		  "max_connections counts as half." },
	{ FIELD(max_jobs), .type = CONFIG_COUNT, .min = 1, .max = 100000, .by_default = "256",
	  .runtime = true, .help = "Maximum number of jobs at a time." },
	{ FIELD(max_units_per_job), .type = CONFIG_COUNT, .min = 1, .max = 10000000,
	  .by_default = "100000", .runtime = true, .help = "Maximum number of units in a job." },
	{ FIELD(max_world_size), .type = CONFIG_COUNT, .min = 1, .max = 1024, .by_default = "1024",
	  .runtime = true, .help = "Maximum number of ranks of a job, on all of its nodes together." },
	{ FIELD(max_inflight_ops), .type = CONFIG_COUNT, .min = 1, .max = 1000000,
	  .by_default = "1024",
	  .help = "Maximum number of unanswered operations per session; further ones are refused." },
	{ FIELD(ring_spin_us), .type = CONFIG_COUNT, .min = 1, .max = 100000, .zero = true,
	  .by_default = "50", .runtime = true,
	  .help = "Microseconds for which the daemon and its trainers poll a ring before they sleep.\n"
		  "They poll only while there are more processor cores than trainers. 0: never." },
	{ FIELD(max_inflight_gathers), .type = CONFIG_COUNT, .min = 1, .max = 1000000, .zero = true,
	  .by_default = "64", .runtime = true,
	  .help = "Maximum number of gathers with a cast that run at once in one job. Further ones\n"
		  "wait; the ranks take turns. 0: no limit." },
	{ FIELD(reduce_batch_bytes), .type = CONFIG_BYTES, .min = 1, .max = GIB, .zero = true,
	  .by_default = "1MiB", .runtime = true,
	  .help = "On several devices, small units whose reductions wait at the same time are reduced\n"
		  "together, up to this many bytes of gradients per rank. 0: never." },
	{ FIELD_AS("stream_bytes_per_s", readers.stream_bytes_per_s), .type = CONFIG_BYTES, .min = 64 * KIB,
	  .max = 1024 * GIB, .zero = true, .by_default = "0", .runtime = true,
	  .help = "Limit, in bytes per second, for all generations that the daemon sends to readers that\n"
		  "do not map them (StreamGeneration). The readers share it and take turns. 0: no limit." },
	{ FIELD_AS("stream_stall_ms", readers.stream_stall_ms), .type = CONFIG_MILLIS, .min = 100,
	  .max = HOUR_S * 1000, .by_default = "30s", .runtime = true,
	  .help = "A reader that does not accept the next part of a streamed generation (up to 1 MiB)\n"
		  "within this time loses its lease: the call ends with DEADLINE_EXCEEDED, and the\n"
		  "memory may be reused." },
	{ FIELD(checkpoint_roots), .type = CONFIG_TEXT, .min = 0, .max = 511, .by_default = "",
	  .help = "Folders below which users may have the daemon write checkpoints of their jobs, absolute\n"
		  "paths separated by colons. Files belong to the owner of the job, which takes\n"
		  "CAP_SETUID and CAP_SETGID unless that is the daemon's own user. Empty: nowhere." },
	{ FIELD(max_message_bytes), .type = CONFIG_BYTES, .min = 64 * KIB, .max = GIB,
	  .by_default = "64MiB", .help = "Maximum size of one gRPC message." },
	{ FIELD(hello_timeout_ms), .type = CONFIG_MILLIS, .min = 1, .max = HOUR_S * 1000,
	  .by_default = "5s", .runtime = true,
	  .help = "The daemon closes a connection that has not identified its protocol within this time." },
	{ FIELD_AS("grpc_header_bytes", grpc.header_bytes), .type = CONFIG_COUNT, .min = 1024,
	  .max = 1048576,
	  .by_default = "16384",
	  .help = "Maximum number of bytes in one header block of a gRPC connection, and in the headers\n"
		  "of a call. More closes the connection." },
	{ FIELD_AS("grpc_continuations", grpc.continuations), .type = CONFIG_COUNT, .min = 1,
	  .max = 1024, .by_default = "4",
	  .runtime = true,
	  .help = "Maximum number of CONTINUATION frames in one header block. More closes the gRPC\n"
		  "connection." },
	{ FIELD_AS("grpc_unattached_streams", grpc.unattached_streams), .type = CONFIG_COUNT,
	  .min = 1, .max = 1000000,
	  .by_default = "32", .runtime = true,
	  .help = "Maximum number of open calls of a gRPC connection before Attach; further calls wait." },
	{ FIELD_AS("grpc_unattached_bytes", grpc.unattached_bytes), .type = CONFIG_BYTES,
	  .min = 64 * KIB, .max = GIB,
	  .by_default = "1MiB", .runtime = true,
	  .help = "Maximum number of bytes in incomplete messages of one gRPC connection before Attach." },
	{ FIELD_AS("grpc_connection_bytes", grpc.connection_bytes), .type = CONFIG_BYTES,
	  .min = MIB, .max = TIB,
	  .by_default = "128MiB", .runtime = true,
	  .help = "Maximum number of bytes in incomplete messages of one gRPC connection after Attach;\n"
		  "further bytes wait. The daemon raises the value to max_message_bytes if it is lower." },
	{ FIELD_AS("grpc_total_bytes", grpc.total_bytes), .type = CONFIG_BYTES, .min = MIB,
	  .max = TIB,
	  .by_default = "1GiB", .runtime = true,
	  .help = "Bytes in incomplete messages of all gRPC connections. Above this limit the\n"
		  "connections send in turn. The limit for one user is max_message_bytes_per_user." },
	{ FIELD_AS("grpc_message_timeout_ms", grpc.message_timeout_ms), .type = CONFIG_MILLIS,
	  .min = 1, .max = HOUR_S * 1000,
	  .by_default = "1min", .runtime = true,
	  .help = "How long a gRPC call may take to send its message. Then the daemon closes the\n"
		  "connection and frees the memory of what it sent." },
	{ FIELD_AS("grpc_idle_timeout_ms", grpc.idle_timeout_ms), .type = CONFIG_MILLIS, .min = 1,
	  .max = HOUR_S * 1000,
	  .by_default = "1min", .runtime = true,
	  .help = "The daemon closes a gRPC connection that has no session and no call and sends\n"
		  "nothing for this long." },
	{ FIELD_AS("grpc_resets_per_s", grpc.resets_per_s), .type = CONFIG_COUNT, .min = 10,
	  .max = 1000000,
	  .by_default = "250", .runtime = true,
	  .help = "Calls that a gRPC connection may cancel per second, with bursts of four times as\n"
		  "many. A tenth of that before Attach." },
	{ FIELD_AS("grpc_pings_per_s", grpc.pings_per_s), .type = CONFIG_COUNT, .min = 1,
	  .max = 1000000,
	  .by_default = "100", .runtime = true,
	  .help = "PING frames of a gRPC connection per second, with bursts of four times as many." },
	{ FIELD_AS("grpc_settings_per_s", grpc.settings_per_s), .type = CONFIG_COUNT, .min = 1,
	  .max = 1000000,
	  .by_default = "5", .runtime = true,
	  .help = "SETTINGS frames of a gRPC connection per second, with bursts of four times as many." },
	{ FIELD_AS("grpc_control_per_s", grpc.control_per_s), .type = CONFIG_COUNT, .min = 10,
	  .max = 1000000,
	  .by_default = "1000", .runtime = true,
	  .help = "Other control frames of a gRPC connection per second, with bursts of four times as\n"
		  "many. Each call and each KiB of answers allows more." },
	{ FIELD(drain_timeout_ms), .type = CONFIG_MILLIS, .min = 0, .max = DAY_MS,
	  .by_default = "10s", .runtime = true,
	  .help = "How long trainers may take to commit and leave after SIGTERM. Keep it below the\n"
		  "service manager's own stop timeout." },
	{ FIELD_AS("flight_recorder_ops", records.ops), .type = CONFIG_COUNT, .min = 16, .max = 1048576,
	  .by_default = "4096",
	  .help = "How many operations that have ended are kept for reports, with as many records of the\n"
		  "work that devices did for them, and a quarter as many of publications. Each job\n"
		  "has its share: a busy job does not push out the records of another one.\n"
		  "Operations that have not ended do not count." },
	{ FIELD_AS("history_jobs", records.jobs), .type = CONFIG_COUNT, .min = 0, .max = 4096,
	  .by_default = "256",
	  .help = "How many jobs that have ended are kept for `shardctl history`. Each user has a share: one\n"
		  "with many jobs does not push out those of another one. They outlive the daemon where\n"
		  "jobs do." },
	{ FIELD_AS("recent_events", records.events), .type = CONFIG_COUNT, .min = 16, .max = 8192,
	  .by_default = "1024",
	  .help = "How many events of jobs are kept for `shardctl events`. Each user has a share." },
	{ PER_USER("max_connections_per_user", max_connections, COUNT, 1000000, "2048"),
	  .help = "Maximum number of open connections of one user. This limit and those below apply to\n"
		  "each user except the superuser and the daemon's own user. 0: no limit." },
	{ PER_USER("max_unattached_per_user", max_unattached, COUNT, 1000000, "256"),
	  .help = "Maximum number of connections of one user that belong to no session yet. Each rank of\n"
		  "a starting job counts until it has attached." },
	{ PER_USER("max_sessions_per_user", max_sessions, COUNT, 1000000, "1024"),
	  .help = "Maximum number of attached processes (ranks, readers, tools) of one user." },
	{ PER_USER("max_jobs_per_user", max_jobs, COUNT, 100000, "64"),
	  .help = "Maximum number of jobs of one user, counted from their creation until their memory is\n"
		  "freed." },
	{ PER_USER("max_slabs_per_user", max_slabs, COUNT, 1000000, "8192"),
	  .help = "Maximum number of memory slabs of one user's jobs. The daemon needs a descriptor for\n"
		  "each." },
	{ PER_USER("max_state_bytes_per_user", max_state_bytes, BYTES, 1024 * TIB, "0"),
	  .help = "Memory of all jobs of one user together, regardless of the quotas of the jobs." },
	{ PER_USER("max_daemon_bytes_per_user", max_daemon_bytes, BYTES, TIB, "1GiB"),
	  .help = "The daemon's own memory used on behalf of one user: rings; records of ranks, units\n"
		  "and settings; requests in progress." },
	{ PER_USER("max_message_bytes_per_user", max_message_bytes, BYTES, TIB, "256MiB"),
	  .help = "Bytes in incomplete messages of all gRPC connections of one user. Above this limit\n"
		  "the connections send in turn." },
	{ PER_USER("max_fds_per_user", max_fds, COUNT, 1000000, "256"),
	  .help = "Maximum number of descriptors that the daemon has sent to one user's processes and\n"
		  "that they have not received yet." },
	{ PER_USER("max_ops_per_user", max_ops, COUNT, 100000000, "65536"),
	  .help = "Maximum number of unanswered operations of all sessions of one user." },
	{ PER_USER("max_status_calls_per_user", max_status_calls, COUNT, 1000000, "8"),
	  .help = "Maximum number of unanswered Status calls (shardctl) of one user." },
	{ LIST("user_limits", per_user, limits), .type = CONFIG_LIMITS, .by_default = "", .runtime = true,
	  .help = "Limits of single users and groups that replace the max_..._per_user above:\n"
		  "\"alice:max_sessions=2000\", \"@ml:max_state_bytes=64GiB\", \"1000:max_jobs=0\". Users\n"
		  "and groups are names or numbers, groups with an @ before them; 0: no limit. An\n"
		  "entry for a user takes precedence over entries for groups; of several groups the\n"
		  "highest limit applies. An entry for the superuser or the daemon's own user applies\n"
		  "to them, too. \"alice:worker_weight=300\": while users wait for the host's kernel\n"
		  "threads, alice gets three times the share of a user with the default of 100 (1 to\n"
		  "10000). \"@ml:total_state_bytes=1TiB\": a limit of what the members of a group use\n"
		  "together, without the superuser and the daemon's own user; total_connections,\n"
		  "total_unattached, total_sessions, total_jobs, total_slabs and total_daemon_bytes\n"
		  "are the others. \"alice:priority=50\": the highest priority that a job of alice may\n"
		  "have in the line for memory (0 to 100; default 0)." },
	{ LIST("allow_uids", allow, uids), .type = CONFIG_UIDS, .max = UINT32_MAX - 1, .by_default = "",
	  .runtime = true,
	  .help = "Users that may connect, by name or number. If this list and allow_gids are empty,\n"
		  "every process that may open the socket may connect. The superuser and the daemon's\n"
		  "own user always may." },
	{ LIST("allow_gids", allow, gids), .type = CONFIG_GIDS, .max = UINT32_MAX - 1, .by_default = "",
	  .runtime = true,
	  .help = "Groups whose members may connect, by name or number." },
	{ LIST("observer_uids", http, observers), .type = CONFIG_UIDS, .max = UINT32_MAX - 1,
	  .by_default = "", .runtime = true,
	  .help = "Users, by name or number, who see the status of all jobs as the daemon's own user does,\n"
		  "and may change nothing: the user of a monitoring system. Others see their own jobs." },
	{ FIELD_AS("http", http.address), .type = CONFIG_TEXT, .min = 0, .max = 263, .by_default = "",
	  .help = "HOST:PORT, or unix: and a path, where the daemon serves metrics for Prometheus, the\n"
		  "status as JSON and a page that shows it, over HTTP. Users of this machine see what\n"
		  "shardctl shows them; all others must show the token. Empty: nowhere." },
	{ FIELD_AS("http_token_file", http.token_file), .type = CONFIG_PATH, .min = 0, .max = 511,
	  .by_default = "", .runtime = true,
	  .help = "File with the token, one line of 16 to 255 characters: who shows it over HTTP\n"
		  "(Authorization: Bearer TOKEN) sees the status of all jobs. Only the daemon's user and\n"
		  "group may have access to the file. Required if http is not localhost or unix:." },
	{ FIELD_AS("otlp", otlp.url), .type = CONFIG_TEXT, .min = 0, .max = 299, .by_default = "",
	  .help = "Address of an OpenTelemetry collector, as http://HOST:PORT or https://HOST:PORT. The daemon\n"
		  "sends metrics, and traces of steps, to it by OTLP over gRPC. The usual port is 4317.\n"
		  "http: the connection is not encrypted. Empty: nothing is sent." },
	{ FIELD_AS("otlp_ca", otlp.ca), .type = CONFIG_PATH, .min = 0, .max = 511,
	  .by_default = "",
	  .help = "File with the CA certificates (PEM) that may sign the collector's certificate. Empty: those\n"
		  "of the machine. Only with https." },
	{ FIELD_AS("otlp_headers_file", otlp.headers_file), .type = CONFIG_PATH, .min = 0, .max = 511,
	  .by_default = "", .runtime = true,
	  .help = "File with headers that each request to the collector carries, such as the line\n"
		  "authorization: Bearer TOKEN. Only the daemon's user and group may have access to the\n"
		  "file. Only with https, or with a collector on this machine." },
	{ FIELD_AS("otlp_interval_ms", otlp.interval_ms), .type = CONFIG_MILLIS, .min = 100,
	  .max = HOUR_S * 1000, .by_default = "10s", .runtime = true,
	  .help = "Time between two exports of metrics, and the longest time that a span waits before it is\n"
		  "sent." },
	{ FIELD_AS("otlp_trace_every", otlp.trace_every), .type = CONFIG_COUNT, .min = 1,
	  .max = 1000000000, .zero = true, .by_default = "100", .runtime = true,
	  .help = "N: the daemon traces the steps of a job whose number is a multiple of N, the same ones on\n"
		  "all nodes. 1: all steps. 0: none." },
	{ FIELD_AS("coord", coord.store), .type = CONFIG_TEXT, .min = 1, .max = 511,
	  .by_default = "none",
	  .help = "The store in which the nodes of a cluster agree. none: this node is alone. embedded: etcd,\n"
		  "which the nodes in coord_seeds run. etcd://HOST:PORT,HOST:PORT: an etcd that runs\n"
		  "already." },
	{ FIELD_AS("coord_user", coord.user), .type = CONFIG_TEXT, .min = 0, .max = 63,
	  .by_default = "",
	  .help = "User of that etcd. Empty: it asks for none. With coord_password_file only." },
	{ FIELD_AS("coord_password_file", coord.password_file), .type = CONFIG_PATH, .min = 0,
	  .max = 511, .by_default = "",
	  .help = "File with the password of coord_user, one line of at most 255 characters. Only the\n"
		  "daemon's user and group may have access to it." },
	{ FIELD_AS("coord_ca", coord.ca), .type = CONFIG_PATH, .min = 0, .max = 511,
	  .by_default = "",
	  .help = "CA certificates (PEM) that the certificate of that etcd must be signed by. Empty: the\n"
		  "connection is not encrypted." },
	{ FIELD_AS("coord_cert", coord.cert), .type = CONFIG_PATH, .min = 0, .max = 511,
	  .by_default = "",
	  .help = "Certificate (PEM) that the daemon shows to that etcd. With coord_ca and coord_key." },
	{ FIELD_AS("coord_key", coord.key), .type = CONFIG_PATH, .min = 0, .max = 511,
	  .by_default = "",
	  .help = "Private key (PEM) of coord_cert." },
	{ FIELD_AS("node_name", coord.node_name), .type = CONFIG_TEXT, .min = 0, .max = 63,
	  .by_default = "",
	  .help = "Name of this node, which no other node of the cluster has: 1 to 63 letters, digits,\n"
		  "'.', '_' and '-'. Empty: the host name up to its first dot." },
	{ FIELD_AS("cluster", coord.cluster), .type = CONFIG_TEXT, .min = 1, .max = 63,
	  .by_default = "shardd",
	  .help = "Name of the cluster, in the characters of node_name. Its keys in etcd begin with\n"
		  "/shardd/CLUSTER/." },
	{ FIELD_AS("coord_seeds", coord.seeds), .type = CONFIG_WORDS, .max = 2047,
	  .by_default = "",
	  .help = "coord: embedded: the nodes that run etcd, the same list on all nodes: NODE=HOST or\n"
		  "NODE=HOST:CLIENTPORT:PEERPORT; or dns:NAME alone: the nodes X-0, X-1 and X-2 at\n"
		  "X-0.NAME and so on, where X is that of this node's name X-N (the pods of a\n"
		  "StatefulSet and its headless Service)." },
	{ FIELD_AS("coord_nodes", coord.nodes), .type = CONFIG_COUNT, .min = 1, .max = 100000,
	  .zero = true, .by_default = "0",
	  .help = "coord: embedded: how many nodes the cluster is going to have. Of one or two the first\n"
		  "of coord_seeds runs etcd, of three and more the first three do. 0: as many as\n"
		  "coord_seeds lists." },
	{ FIELD_AS("coord_dir", coord.dir), .type = CONFIG_PATH, .min = 1, .max = 511,
	  .by_default = "/var/lib/shardd/etcd",
	  .help = "coord: embedded: folder for the data of etcd, which is made if it does not exist. It\n"
		  "must outlive the daemon and the machine's restart." },
	{ FIELD_AS("coord_client_port", coord.client_port), .type = CONFIG_COUNT, .min = 1,
	  .max = 65535, .by_default = "2379",
	  .help = "coord: embedded: port on which etcd serves the daemons, unless coord_seeds says another." },
	{ FIELD_AS("coord_peer_port", coord.peer_port), .type = CONFIG_COUNT, .min = 1,
	  .max = 65535, .by_default = "2380",
	  .help = "coord: embedded: port on which the members of etcd reach each other, unless coord_seeds\n"
		  "says another." },
	{ FIELD_AS("coord_etcd", coord.etcd), .type = CONFIG_PATH, .min = 0, .max = 511,
	  .by_default = "",
	  .help = "coord: embedded: the program etcd, 3.4 or newer. Empty: the first in PATH." },
	{ FIELD_AS("peer_listen", peer.listen), .type = CONFIG_TEXT, .min = 0, .max = 263,
	  .by_default = "",
	  .help = "ADDRESS:PORT on which the daemon accepts connections of other nodes; an embedded etcd\n"
		  "listens on ADDRESS, too. Required unless coord is none." },
	{ FIELD_AS("peer_advertise", peer.advertise), .type = CONFIG_TEXT, .min = 0, .max = 263,
	  .by_default = "",
	  .help = "HOST:PORT at which other nodes reach peer_listen. Empty: peer_listen, which must not\n"
		  "be a wildcard address such as 0.0.0.0 then." },
	{ FIELD_AS("peer_ca", peer.ca), .type = CONFIG_PATH, .min = 0, .max = 511,
	  .by_default = "",
	  .help = "CA certificates (PEM) that the certificates of all nodes are signed by. With peer_cert\n"
		  "and peer_key; an embedded etcd uses all three." },
	{ FIELD_AS("peer_cert", peer.cert), .type = CONFIG_PATH, .min = 0, .max = 511,
	  .by_default = "",
	  .help = "Certificate (PEM) of this node, for servers and clients. It has the node's name as a\n"
		  "DNS name, and its HOST in coord_seeds if it runs etcd." },
	{ FIELD_AS("peer_key", peer.key), .type = CONFIG_PATH, .min = 0, .max = 511,
	  .by_default = "",
	  .help = "Private key (PEM) of peer_cert." },
	{ FIELD_AS("peer_allow", peer.allow), .type = CONFIG_WORDS, .max = 2047,
	  .by_default = "",
	  .help = "Names of the nodes whose connections are accepted. Empty: each node with a certificate\n"
		  "of peer_ca. An embedded etcd does not read this key: it accepts every certificate of\n"
		  "peer_ca, which is therefore a CA of this cluster alone." },
	{ FIELD_AS("peer_insecure", peer.insecure), .type = CONFIG_CHOICE, .choices = "yes|no",
	  .by_default = "no",
	  .help = "yes: the daemon accepts connections of other nodes without certificates, also on\n"
		  "addresses that are not loopback. Each process that reaches the port can change\n"
		  "all jobs." },
	{ FIELD_AS("recorded_order", peer.recorded_order), .type = CONFIG_CHOICE,
	  .choices = "yes|no", .by_default = "yes",
	  .help = "yes: the nodes of a job whose step repeats do its operations in the order of that step,\n"
		  "without messages. no: each operation is announced to the node that leads the job, and\n"
		  "started by it. The key of that node counts." },
	{ FIELD_AS("replicas", peer.replicas), .type = CONFIG_COUNT, .min = 0, .max = 1,
	  .by_default = "0",
	  .help = "1: in a job with ranks on several nodes, each keeps a copy of what the one before it\n"
		  "has committed, in memory. A node that is gone with its memory gets it back from there.\n"
		  "Beside its state each node needs memory for two such copies, and for four while new\n"
		  "ones are made. The key of the node that leads the job counts: set it alike on all\n"
		  "nodes." },
	{ FIELD_AS("order", peer.order), .type = CONFIG_CHOICE, .choices = "devices|ranks",
	  .by_default = "devices",
	  .help = "How nodes add the gradients of their ranks. devices: each adds its own first. ranks: in\n"
		  "the order of all ranks, with the bits of one node that has them all; running sums go\n"
		  "from node to node, which takes longer. Set it alike on all nodes." },
	{ FIELD_AS("data_interface", peer.data_interface), .type = CONFIG_TEXT, .min = 0,
	  .max = 15, .by_default = "",
	  .help = "Network interface for the data of collectives between nodes. Empty: that of\n"
		  "data_address." },
	{ FIELD_AS("data_address", peer.data_address), .type = CONFIG_TEXT, .min = 0, .max = 255,
	  .by_default = "",
	  .help = "Address or host name of this node for the data of collectives between nodes. Empty:\n"
		  "the host of peer_advertise." },
	{ FIELD_AS("log_level", log.level), .type = CONFIG_CHOICE,
	  .choices = "error|warn|info|debug",
	  .by_default = "info", .runtime = true, .help = "Least severe level that is logged." },
	{ FIELD_AS("log_format", log.format), .type = CONFIG_CHOICE, .choices = "text|json",
	  .by_default = "text",
	  .runtime = true,
	  .help = "text: one line per message; if standard error is the systemd journal, a message with\n"
		  "its priority and fields instead. json: one JSON object per line." },
	{ FIELD_AS("log_file", log.file), .type = CONFIG_PATH, .min = 0, .max = 511,
	  .by_default = "",
	  .runtime = true,
	  .help = "Append the log to this file; SIGHUP reopens it. Empty: standard error." },
};
/* clang-format on */

const size_t config_n_keys = ARRAY_SIZE(config_keys);

const struct config_key *config_key_find(const char *name)
{
	for (size_t i = 0; i < config_n_keys; i++)
		if (strcmp(config_keys[i].name, name) == 0)
			return &config_keys[i];
	return NULL;
}

void *config_key_field(struct config *c, const struct config_key *k)
{
	return (char *)c + k->offset;
}

const void *config_key_value(const struct config *c, const struct config_key *k)
{
	return (const char *)c + k->offset;
}
