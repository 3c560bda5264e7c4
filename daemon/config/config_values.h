/* The values of all configuration keys. */
#ifndef SHARDD_CONFIG_VALUES_H
#define SHARDD_CONFIG_VALUES_H

#include <stdint.h>
#include <sys/types.h>

#include "core/user.h"

#define CONFIG_MAX_IDS 64

/* Limits of the gate before gRPC (net/gate_limits.h): grpc_... */
struct config_grpc {
	uint32_t header_bytes;       /* of one header block; 16384 */
	uint32_t continuations;      /* CONTINUATION frames of a header block; 4 */
	uint32_t unattached_streams; /* calls at once before Attach; 32 */
	uint64_t unattached_bytes;   /* of messages not complete, before Attach; 1048576 */
	uint64_t connection_bytes;   /* the same after Attach; 134217728 */
	uint64_t total_bytes;        /* the same of all; 1073741824 */
	uint32_t message_timeout_ms; /* until the message of a call is complete; 60000 */
	uint32_t idle_timeout_ms;    /* without a byte, before Attach; 60000 */
	uint32_t resets_per_s;       /* 250 */
	uint32_t pings_per_s;        /* 100 */
	uint32_t settings_per_s;     /* 5 */
	uint32_t control_per_s;      /* other frames that carry nothing; 1000 */
};

/* Limits of each user, 0: no limit (max_..._per_user), and those of single users and groups. */
struct config_per_user {
	uint32_t max_connections;                    /* 2048 */
	uint32_t max_unattached;                     /* 256 */
	uint32_t max_sessions;                       /* 1024 */
	uint32_t max_jobs;                           /* 64 */
	uint32_t max_slabs;                          /* 8192 */
	uint64_t max_state_bytes;                    /* 0 */
	uint64_t max_daemon_bytes;                   /* 1073741824 */
	uint64_t max_message_bytes;                  /* 268435456 */
	uint32_t max_fds;                            /* 256 */
	uint32_t max_ops;                            /* 65536 */
	uint32_t max_status_calls;                   /* 8 */
	struct user_override limits[CONFIG_MAX_IDS]; /* user_limits */
	uint32_t n_limits;
};

/* The users and groups that may connect: allow_... */
struct config_allow {
	uid_t uids[CONFIG_MAX_IDS];
	uint32_t n_uids;
	gid_t gids[CONFIG_MAX_IDS];
	uint32_t n_gids;
};

/* The log: log_... */
struct config_log {
	char level[16];  /* error, warn, info, debug; info */
	char format[16]; /* text, json; text */
	char file[512];  /* "": stderr */
};

/* How long jobs live without trainers, and how long they wait for memory. */
struct config_ttl {
	uint32_t job_s;                  /* 86400 */
	uint32_t max_job_s;              /* the most a job may ask for; 604800 */
	uint32_t uncommitted_s;          /* of crashed jobs without a commit; 0: their own; 600 */
	uint32_t max_wait_for_memory_ms; /* 3600000 */
};

/* The HTTP server: http..., and who sees the status of all jobs. */
struct config_http {
	char address[512];    /* HOST:PORT or unix:PATH; "": none */
	char token_file[512]; /* "": none */
	uid_t observers[CONFIG_MAX_IDS];
	uint32_t n_observers;
};

/* Traces and metrics for a collector of OpenTelemetry: otlp... */
struct config_otlp {
	char url[300];          /* http://HOST:PORT, https://HOST:PORT; "": none */
	char ca[512];           /* "": the machine's */
	char headers_file[512]; /* "": none */
	uint32_t interval_ms;   /* 10000 */
	uint32_t trace_every;   /* of each job's steps; 0: no traces; 100 */
};

/* The store in which nodes agree: coord_..., and who this node is. */
struct config_coord {
	char store[512]; /* none, embedded, etcd://HOST:PORT,...; none */
	char user[64];   /* "": none */
	char password_file[512];
	char ca[512]; /* "": no TLS */
	char cert[512];
	char key[512];
	char node_name[64];   /* "": the host name (config_node_name) */
	char cluster[64];     /* shardd */
	char seeds[2048];     /* with commas (config_seeds) */
	uint32_t nodes;       /* of the cluster; 0: as many as @seeds */
	char dir[512];        /* /var/lib/shardd/etcd */
	uint32_t client_port; /* 2379 */
	uint32_t peer_port;   /* 2380 */
	char etcd[512];       /* the program; "": in PATH */
};

/* The other nodes: peer_..., data_... */
struct config_peer {
	char listen[264];    /* ADDRESS:PORT; "": none */
	char advertise[264]; /* HOST:PORT; "": @listen (config_peer_advertise) */
	char ca[512];        /* "": no TLS */
	char cert[512];
	char key[512];
	char allow[2048];       /* names with commas; "": all that have a certificate */
	char insecure[8];       /* yes, no */
	char recorded_order[8]; /* yes, no */
	uint32_t replicas;      /* 0, 1 */
	char order[8];          /* devices, ranks */
	char data_interface[16];
	char data_address[256]; /* "": the host of @advertise (config_data_address) */
};

/* Processes that read what trainers train. */
struct config_readers {
	uint64_t stream_bytes_per_s; /* of generations that are sent, together; 0: no limit */
	uint32_t stream_stall_ms;    /* a reader of one may take nothing for so long; 30000 */
};

/* How many records are kept of what has ended. */
struct config_records {
	uint32_t ops;    /* in the flight recorder; 4096 */
	uint32_t jobs;   /* 256 */
	uint32_t events; /* of jobs; 1024 */
};

struct config {
	char socket[512];            /* path of the socket */
	char socket_group[64];       /* its group; "": unchanged */
	uint32_t socket_mode;        /* 0660 */
	char backend[16];            /* host, cuda, auto */
	char devices[832];           /* UUIDs of the GPUs to use, with commas; "": all */
	char engine[16];             /* between GPUs: auto, local, nccl */
	char gpu_order[16];          /* auto, timeline, events */
	char gpu_measure_overlap[8]; /* yes, no */
	char prefault[8];            /* yes, no */
	uint32_t threads;            /* kernel threads; 0: one per core */
	uint64_t memory_bytes;       /* of the device that may be used; 0: a share of it */
	char seal_parameters[8];     /* against new writable mappings */
	uint64_t job_quota_bytes;    /* default of a job; 0: no own limit */
	struct config_ttl ttl;
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
	uint64_t reduce_batch_bytes;   /* of gradients reduced together; 0: never; 1048576 */
	struct config_readers readers;
	char checkpoint_roots[512];    /* folders below which they may be, with colons; "": none */
	uint64_t max_message_bytes;    /* of one gRPC message; 67108864 */
	uint32_t hello_timeout_ms;     /* until a connection says what it is; 5000 */
	uint32_t drain_timeout_ms;     /* SIGTERM: how long trainers may take to leave; 10000 */
	struct config_records records; /* of what has been */
	struct config_grpc grpc;
	struct config_allow allow;
	struct config_per_user per_user;
	struct config_log log;
	struct config_http http;
	struct config_otlp otlp;
	struct config_coord coord;
	struct config_peer peer;
};

#endif
