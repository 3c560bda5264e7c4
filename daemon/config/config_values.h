/* The values of all configuration keys. */
#ifndef SHARDD_CONFIG_VALUES_H
#define SHARDD_CONFIG_VALUES_H

#include <stdint.h>
#include <sys/types.h>

#include "core/user.h"

#define CONFIG_MAX_IDS 64

struct config {
	char socket[512];              /* path of the socket */
	char socket_group[64];         /* its group; "": unchanged */
	uint32_t socket_mode;          /* 0660 */
	char backend[16];              /* host, cuda, auto */
	char devices[832];             /* UUIDs of the GPUs to use, with commas; "": all */
	char engine[16];               /* between GPUs: auto, local, nccl */
	char gpu_order[16];            /* auto, timeline, events */
	char gpu_measure_overlap[8];   /* yes, no */
	char prefault[8];              /* yes, no */
	uint32_t threads;              /* kernel threads; 0: one per core */
	uint64_t memory_bytes;         /* of the device that may be used; 0: a share of it */
	char seal_parameters[8];       /* against new writable mappings */
	uint64_t job_quota_bytes;      /* default of a job; 0: no own limit */
	uint32_t job_ttl_s;            /* how long a job lives without trainers; default 86400 */
	uint32_t max_job_ttl_s;        /* the most a job may ask for; default 604800 */
	uint32_t uncommitted_ttl_s;    /* of crashed jobs without a commit; 0: their own; 600 */
	uint32_t op_timeout_ms;        /* default deadline of an op; default 600000 */
	uint32_t stall_after_ms;       /* an op that waits longer is reported; 5000 */
	uint32_t max_connections;      /* 4096 */
	uint32_t reserved_connections; /* of these, for root and the daemon's user; 64 */
	uint32_t max_jobs;             /* 256 */
	uint32_t max_units_per_job;    /* 100000 */
	uint32_t max_world_size;       /* ranks of a job on this node; 1024 */
	uint32_t max_inflight_ops;     /* unanswered, per session; 1024 */
	uint32_t ring_spin_us;         /* looked for more before sleeping; 0: never; 50 */
	uint32_t max_inflight_gathers; /* casts that run at once, per job; 0: no limit; 64 */
	uint64_t reduce_batch_bytes;   /* of gradients reduced together; 0: never; 262144 */
	uint32_t reader_hold_ms;       /* the most a reader may hold a step; 1000 */
	uint64_t max_message_bytes;    /* of one gRPC message; 67108864 */
	uint32_t hello_timeout_ms;     /* until a connection says what it is; 5000 */
	uint32_t drain_timeout_ms;     /* SIGTERM: how long trainers may take to leave; 10000 */
	uint32_t flight_recorder_ops;  /* how many last ops are kept; 4096 */

	/* Limits of the gate before gRPC (net/gate_limits.h). */
	uint32_t grpc_header_bytes;       /* of one header block; 16384 */
	uint32_t grpc_continuations;      /* CONTINUATION frames of a header block; 4 */
	uint32_t grpc_unattached_streams; /* calls at once before Attach; 32 */
	uint64_t grpc_unattached_bytes;   /* of messages not complete, before Attach; 1048576 */
	uint64_t grpc_connection_bytes;   /* the same after Attach; 134217728 */
	uint64_t grpc_total_bytes;        /* the same of all; 1073741824 */
	uint32_t grpc_message_timeout_ms; /* until the message of a call is complete; 60000 */
	uint32_t grpc_idle_timeout_ms;    /* without a byte, before Attach; 60000 */
	uint32_t grpc_resets_per_s;       /* 250 */
	uint32_t grpc_pings_per_s;        /* 100 */
	uint32_t grpc_settings_per_s;     /* 5 */
	uint32_t grpc_control_per_s;      /* other frames that carry nothing; 1000 */

	uid_t allow_uids[CONFIG_MAX_IDS];
	uint32_t n_allow_uids;
	gid_t allow_gids[CONFIG_MAX_IDS];
	uint32_t n_allow_gids;
	/* of one user; 0: no limit */
	uint32_t max_connections_per_user;                /* 2048 */
	uint32_t max_unattached_per_user;                 /* 256 */
	uint32_t max_sessions_per_user;                   /* 1024 */
	uint32_t max_jobs_per_user;                       /* 64 */
	uint32_t max_slabs_per_user;                      /* 8192 */
	uint64_t max_state_bytes_per_user;                /* 0 */
	uint64_t max_daemon_bytes_per_user;               /* 1073741824 */
	uint64_t max_message_bytes_per_user;              /* 268435456 */
	uint32_t max_fds_per_user;                        /* 256 */
	uint32_t max_ops_per_user;                        /* 65536 */
	uint32_t max_status_calls_per_user;               /* 8 */
	struct user_override user_limits[CONFIG_MAX_IDS]; /* for single users and groups */
	uint32_t n_user_limits;
	char log_level[16];  /* error, warn, info, debug; info */
	char log_format[16]; /* text, json; text */
	char log_file[512];  /* "": stderr */
};

#endif
