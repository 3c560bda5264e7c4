#include "config_keys.h"

#include <string.h>

#include "core/check.h"

#define KIB 1024ull
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)
#define TIB (1024 * GIB)

#define HOUR_S 3600ull
#define DAY_S  (24 * HOUR_S)
#define DAY_MS (DAY_S * 1000)

#define FIELD(key)                                            \
	.name = #key, .offset = offsetof(struct config, key), \
	.bytes = sizeof(((struct config *)0)->key)
#define LIST(key) FIELD(key), .count_offset = offsetof(struct config, n_##key)

/* A limit of each user: 0 is none. */
#define PER_USER(key, kind, most, value)                                          \
	FIELD(key), .type = CONFIG_##kind, .min = 1, .max = (most), .zero = true, \
		    .by_default = (value), .runtime = true

/* A socket address holds 108 bytes, the terminating 0 among them. */
#define SOCKET_PATH_MAX 107

/* clang-format off */
const struct config_key config_keys[] = {
	{ FIELD(socket), .type = CONFIG_TEXT, .min = 1, .max = SOCKET_PATH_MAX,
	  .by_default = "/run/shardd/shardd.sock",
	  .help = "Path of the socket trainers connect to. Not used when the service manager passes a\n"
		  "listening socket." },
	{ FIELD(socket_group), .type = CONFIG_TEXT, .min = 0, .max = 63, .by_default = "",
	  .help = "Group that owns the socket file. Empty: the daemon's own." },
	{ FIELD(socket_mode), .type = CONFIG_MODE, .min = 0, .max = 0777, .by_default = "0660",
	  .help = "Permissions of the socket file, octal: who may write to it may connect." },
	{ FIELD(backend), .type = CONFIG_CHOICE, .choices = "host|cuda|auto", .by_default = "auto",
	  .help = "Where training state lives. host: the memory of this machine. cuda: its GPUs. auto:\n"
		  "GPUs if there are any that can be used, else the memory of this machine." },
	{ FIELD(devices), .type = CONFIG_TEXT, .min = 0, .max = 831, .by_default = "",
	  .help = "UUIDs of the GPUs to use (nvidia-smi -L), separated by commas. Empty: all that\n"
		  "CUDA_VISIBLE_DEVICES leaves." },
	{ FIELD(engine), .type = CONFIG_CHOICE, .choices = "auto|local|nccl", .by_default = "auto",
	  .help = "What is between GPUs. auto: NCCL for jobs on several GPUs, nothing for jobs on one;\n"
		  "without NCCL a job can use one GPU. nccl: NCCL also where one GPU is all there is,\n"
		  "and the daemon does not start without it. local: never NCCL." },
	{ FIELD(gpu_order), .type = CONFIG_CHOICE, .choices = "auto|timeline|events",
	  .by_default = "auto",
	  .help = "How trainers' CUDA streams and the daemon's queues wait for each other. timeline:\n"
		  "64-bit words in GPU memory (stream memory operations). events: interprocess events.\n"
		  "auto: what a probe at start finds to work, timeline first." },
	{ FIELD(gpu_measure_overlap), .type = CONFIG_CHOICE, .choices = "yes|no",
	  .by_default = "yes",
	  .help = "Measure at start how kernels of two processes share each GPU, for shardctl status.\n"
		  "Takes a moment." },
	{ FIELD(prefault), .type = CONFIG_CHOICE, .choices = "yes|no", .by_default = "yes",
	  .help = "Make the pages of new memory of this machine before they are used, in time that\n"
		  "nobody else wants, as long as an eighth of the memory (of the machine, and of the\n"
		  "container's limit) is left." },
	{ FIELD(threads), .type = CONFIG_COUNT, .min = 1, .max = 1024, .zero = true, .by_default = "0",
	  .help = "Threads that run kernels. 0: one per processor core." },
	{ FIELD(memory_bytes), .type = CONFIG_BYTES, .min = MIB, .max = 1024 * TIB, .zero = true,
	  .by_default = "0",
	  .help = "Memory all jobs together may use. 0: of this machine's memory four fifths, of the\n"
		  "machine's or of the control group's limit, whichever is lower; of a GPU all there is.\n"
		  "More than the machine or the group has is refused at start." },
	{ FIELD(seal_parameters), .type = CONFIG_CHOICE, .choices = "yes|no", .by_default = "yes",
	  .help = "Seal the memory of parameters before it is handed out, so that nobody can map it\n"
		  "for writing any more, not even root or another process of the daemon's user\n"
		  "(F_SEAL_FUTURE_WRITE). no: for memory that another daemon process is to take over." },
	{ FIELD(job_quota_bytes), .type = CONFIG_BYTES, .min = MIB, .max = 1024 * TIB, .zero = true,
	  .by_default = "0", .runtime = true,
	  .help = "Memory one job may use unless it asks for less. 0: no limit of its own. Holds for\n"
		  "jobs made after a change." },
	{ FIELD(job_ttl_s), .type = CONFIG_SECONDS, .min = 1, .max = 365 * DAY_S, .by_default = "1d",
	  .runtime = true,
	  .help = "How long a job and its memory are kept after its last trainer has left." },
	{ FIELD(max_job_ttl_s), .type = CONFIG_SECONDS, .min = 1, .max = 365 * DAY_S,
	  .by_default = "7d", .runtime = true,
	  .help = "The longest time a job may ask to be kept; a longer one is refused. At least\n"
		  "job_ttl_s." },
	{ FIELD(uncommitted_ttl_s), .type = CONFIG_SECONDS, .min = 1, .max = 365 * DAY_S,
	  .zero = true, .by_default = "10min", .runtime = true,
	  .help = "How long an EPHEMERAL job is kept that never committed a step, after its last\n"
		  "trainer has died, if that is less than its own time: there is nothing to go on\n"
		  "from. 0: its own time." },
	{ FIELD(op_timeout_ms), .type = CONFIG_MILLIS, .min = 1, .max = 30 * DAY_MS,
	  .by_default = "10min", .runtime = true,
	  .help = "Deadline of an operation that names none; then it ends with DEADLINE_EXCEEDED." },
	{ FIELD(stall_after_ms), .type = CONFIG_MILLIS, .min = 1, .max = 30 * DAY_MS,
	  .by_default = "5s", .runtime = true,
	  .help = "An operation that waits longer for other ranks is reported, with who is missing." },
	{ FIELD(max_connections), .type = CONFIG_COUNT, .min = 1, .max = 1000000, .by_default = "4096",
	  .runtime = true,
	  .help = "Open connections; further ones are closed at once." },
	{ FIELD(reserved_connections), .type = CONFIG_COUNT, .min = 1, .max = 1000000, .zero = true,
	  .by_default = "64", .runtime = true,
	  .help = "Of these, places that only the superuser and the daemon's own user can take, so\n"
		  "that an operator gets in when others have taken the rest. More than half of them\n"
		  "counts as half." },
	{ FIELD(max_jobs), .type = CONFIG_COUNT, .min = 1, .max = 100000, .by_default = "256",
	  .runtime = true, .help = "Jobs at a time." },
	{ FIELD(max_units_per_job), .type = CONFIG_COUNT, .min = 1, .max = 10000000,
	  .by_default = "100000", .runtime = true, .help = "Units a job may register." },
	{ FIELD(max_world_size), .type = CONFIG_COUNT, .min = 1, .max = 1024, .by_default = "1024",
	  .runtime = true, .help = "Ranks a job may have on this node." },
	{ FIELD(max_inflight_ops), .type = CONFIG_COUNT, .min = 1, .max = 1000000,
	  .by_default = "1024",
	  .help = "Unanswered operations per session; further ones are refused." },
	{ FIELD(ring_spin_us), .type = CONFIG_COUNT, .min = 1, .max = 100000, .zero = true,
	  .by_default = "50", .runtime = true,
	  .help = "Microseconds for which the daemon and its trainers look for more on a ring before\n"
		  "they sleep. Only while there are more processor cores than trainers. 0: never." },
	{ FIELD(max_inflight_gathers), .type = CONFIG_COUNT, .min = 1, .max = 1000000, .zero = true,
	  .by_default = "64", .runtime = true,
	  .help = "Gathers with a cast that run at once in one job; further ones wait, the ranks in\n"
		  "turn. 0: no limit." },
	{ FIELD(reduce_batch_bytes), .type = CONFIG_BYTES, .min = 1, .max = GIB, .zero = true,
	  .by_default = "1MiB", .runtime = true,
	  .help = "On several devices: small units whose reductions wait at the same time are\n"
		  "reduced together, up to so many bytes of gradients of a rank. 0: never." },
	{ FIELD(reader_hold_ms), .type = CONFIG_MILLIS, .min = 1, .max = HOUR_S * 1000,
	  .by_default = "1s", .runtime = true,
	  .help = "How long a reader of live parameters may hold a step at most, and does if it says\n"
		  "nothing. What would change them waits so long, then goes on." },
	{ FIELD(max_message_bytes), .type = CONFIG_BYTES, .min = 64 * KIB, .max = GIB,
	  .by_default = "64MiB", .help = "Size of one gRPC message." },
	{ FIELD(hello_timeout_ms), .type = CONFIG_MILLIS, .min = 1, .max = HOUR_S * 1000,
	  .by_default = "5s", .runtime = true,
	  .help = "A connection that has not said by then what it is gets closed." },
	{ FIELD(grpc_header_bytes), .type = CONFIG_COUNT, .min = 1024, .max = 1048576,
	  .by_default = "16384",
	  .help = "Bytes of one header block of a gRPC connection, and of the headers of a call." },
	{ FIELD(grpc_continuations), .type = CONFIG_COUNT, .min = 1, .max = 1024, .by_default = "4",
	  .runtime = true,
	  .help = "CONTINUATION frames of one header block of a gRPC connection." },
	{ FIELD(grpc_unattached_streams), .type = CONFIG_COUNT, .min = 1, .max = 1000000,
	  .by_default = "32", .runtime = true,
	  .help = "Calls that a gRPC connection may have open before Attach; further ones wait." },
	{ FIELD(grpc_unattached_bytes), .type = CONFIG_BYTES, .min = 64 * KIB, .max = GIB,
	  .by_default = "1MiB", .runtime = true,
	  .help = "Bytes of messages that a gRPC connection has begun to send and not finished,\n"
		  "before Attach." },
	{ FIELD(grpc_connection_bytes), .type = CONFIG_BYTES, .min = MIB, .max = TIB,
	  .by_default = "128MiB", .runtime = true,
	  .help = "The same after Attach; at least max_message_bytes. What is more waits." },
	{ FIELD(grpc_total_bytes), .type = CONFIG_BYTES, .min = MIB, .max = TIB,
	  .by_default = "1GiB", .runtime = true,
	  .help = "The same of all gRPC connections. Beyond it they send in turn. What those of one\n"
		  "user may have: max_message_bytes_per_user." },
	{ FIELD(grpc_message_timeout_ms), .type = CONFIG_MILLIS, .min = 1, .max = HOUR_S * 1000,
	  .by_default = "1min", .runtime = true,
	  .help = "How long the message of a gRPC call may take to come. Then its connection is\n"
		  "closed, so that what it has sent holds no memory." },
	{ FIELD(grpc_idle_timeout_ms), .type = CONFIG_MILLIS, .min = 1, .max = HOUR_S * 1000,
	  .by_default = "1min", .runtime = true,
	  .help = "A gRPC connection without a session and without a call that sends nothing for so\n"
		  "long is closed." },
	{ FIELD(grpc_resets_per_s), .type = CONFIG_COUNT, .min = 10, .max = 1000000,
	  .by_default = "250", .runtime = true,
	  .help = "Calls that a gRPC connection may give up in a second; four times as many at once.\n"
		  "A tenth of it before Attach." },
	{ FIELD(grpc_pings_per_s), .type = CONFIG_COUNT, .min = 1, .max = 1000000,
	  .by_default = "100", .runtime = true,
	  .help = "PING frames of a gRPC connection in a second; four times as many at once." },
	{ FIELD(grpc_settings_per_s), .type = CONFIG_COUNT, .min = 1, .max = 1000000,
	  .by_default = "5", .runtime = true,
	  .help = "SETTINGS frames of a gRPC connection in a second; four times as many at once." },
	{ FIELD(grpc_control_per_s), .type = CONFIG_COUNT, .min = 10, .max = 1000000,
	  .by_default = "1000", .runtime = true,
	  .help = "Other frames of a gRPC connection in a second that carry nothing for a call; four\n"
		  "times as many at once. Each call and each KiB of answers allows for more." },
	{ FIELD(drain_timeout_ms), .type = CONFIG_MILLIS, .min = 0, .max = DAY_MS,
	  .by_default = "10s", .runtime = true,
	  .help = "How long trainers may take to commit and leave after SIGTERM. Keep it below the\n"
		  "service manager's own stop timeout." },
	{ FIELD(flight_recorder_ops), .type = CONFIG_COUNT, .min = 16, .max = 1048576,
	  .by_default = "4096",
	  .help = "How many of the last operations are kept for reports, and as many records of what\n"
		  "devices did for them." },
	{ PER_USER(max_connections_per_user, COUNT, 1000000, "2048"),
	  .help = "Open connections of one user. This and the limits that follow hold for each user,\n"
		  "but not for the superuser and the daemon's own user. 0: no limit." },
	{ PER_USER(max_unattached_per_user, COUNT, 1000000, "256"),
	  .help = "Connections of one user that are no trainer's yet: that have not said what they\n"
		  "are, or have not attached. A job's ranks that start at the same time count." },
	{ PER_USER(max_sessions_per_user, COUNT, 1000000, "1024"),
	  .help = "Attached processes (ranks, readers, tools) of one user." },
	{ PER_USER(max_jobs_per_user, COUNT, 100000, "64"),
	  .help = "Jobs of one user, from their creation until their memory is back." },
	{ PER_USER(max_slabs_per_user, COUNT, 1000000, "8192"),
	  .help = "Slabs of memory of one user's jobs. Each takes a descriptor of the daemon's." },
	{ PER_USER(max_state_bytes_per_user, BYTES, 1024 * TIB, "0"),
	  .help = "Memory of all jobs of one user, whatever the quotas of the jobs." },
	{ PER_USER(max_daemon_bytes_per_user, BYTES, TIB, "1GiB"),
	  .help = "The daemon's own memory that one user causes: rings, what is registered,\n"
		  "settings, tables of ranks and units, requests that are being worked on." },
	{ PER_USER(max_message_bytes_per_user, BYTES, TIB, "256MiB"),
	  .help = "Bytes of messages that one user's gRPC connections have begun to send and not\n"
		  "finished. Beyond it these connections send in turn." },
	{ PER_USER(max_fds_per_user, COUNT, 1000000, "256"),
	  .help = "Descriptors that wait until a process of one user receives them." },
	{ PER_USER(max_ops_per_user, COUNT, 100000000, "65536"),
	  .help = "Unanswered operations of all sessions of one user." },
	{ PER_USER(max_status_calls_per_user, COUNT, 1000000, "8"),
	  .help = "Unanswered calls of Status (shardctl) of one user." },
	{ LIST(user_limits), .type = CONFIG_LIMITS, .by_default = "", .runtime = true,
	  .help = "Other limits for single users and groups, in place of the max_..._per_user above:\n"
		  "\"alice:max_sessions=2000\", \"@ml:max_state_bytes=64GiB\", \"1000:max_jobs=0\". A\n"
		  "name or a number; a group has an @ before it; 0: no limit. One for the user comes\n"
		  "before those for groups; of several groups the highest counts. One that names the\n"
		  "superuser or the daemon's own user holds for them, too." },
	{ LIST(allow_uids), .type = CONFIG_UIDS, .max = UINT32_MAX - 1, .by_default = "",
	  .runtime = true,
	  .help = "Users that may connect, by name or number. Both lists empty: whoever may open the\n"
		  "socket. The superuser and the daemon's own user always may." },
	{ LIST(allow_gids), .type = CONFIG_GIDS, .max = UINT32_MAX - 1, .by_default = "",
	  .runtime = true,
	  .help = "Groups whose members may connect, by name or number." },
	{ FIELD(log_level), .type = CONFIG_CHOICE, .choices = "error|warn|info|debug",
	  .by_default = "info", .runtime = true, .help = "What is logged." },
	{ FIELD(log_format), .type = CONFIG_CHOICE, .choices = "text|json", .by_default = "text",
	  .runtime = true,
	  .help = "text: one line a message. json: one JSON object a line." },
	{ FIELD(log_file), .type = CONFIG_PATH, .min = 0, .max = 511, .by_default = "",
	  .runtime = true,
	  .help = "Append the log to this file; SIGHUP opens it anew. Empty: standard error." },
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
