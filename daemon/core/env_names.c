#include "core/env_names.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/check.h"

#define ENV_PREFIX   "SHARDD_"
#define ENV_NAME_MAX 64u
#define ENV_NEAR     3u /* maximum number of wrong, missing or extra letters */

/* Those of the daemon's configuration, in the order of its keys; tests/unit/test_env_names.c
 * compares them with config/config_keys.c. */
const char *const env_names_config[] = {
	"SHARDD_SOCKET",
	"SHARDD_SOCKET_GROUP",
	"SHARDD_SOCKET_MODE",
	"SHARDD_BACKEND",
	"SHARDD_DEVICES",
	"SHARDD_ENGINE",
	"SHARDD_GPU_ORDER",
	"SHARDD_GPU_MEASURE_OVERLAP",
	"SHARDD_PREFAULT",
	"SHARDD_THREADS",
	"SHARDD_MEMORY_BYTES",
	"SHARDD_SEAL_PARAMETERS",
	"SHARDD_JOB_QUOTA_BYTES",
	"SHARDD_JOB_TTL_S",
	"SHARDD_MAX_JOB_TTL_S",
	"SHARDD_UNCOMMITTED_TTL_S",
	"SHARDD_MAX_WAIT_FOR_MEMORY_MS",
	"SHARDD_OP_TIMEOUT_MS",
	"SHARDD_STALL_AFTER_MS",
	"SHARDD_MAX_CONNECTIONS",
	"SHARDD_RESERVED_CONNECTIONS",
	"SHARDD_MAX_JOBS",
	"SHARDD_MAX_UNITS_PER_JOB",
	"SHARDD_MAX_WORLD_SIZE",
	"SHARDD_MAX_INFLIGHT_OPS",
	"SHARDD_RING_SPIN_US",
	"SHARDD_MAX_INFLIGHT_GATHERS",
	"SHARDD_REDUCE_BATCH_BYTES",
	"SHARDD_STREAM_BYTES_PER_S",
	"SHARDD_STREAM_STALL_MS",
	"SHARDD_CHECKPOINT_ROOTS",
	"SHARDD_MAX_MESSAGE_BYTES",
	"SHARDD_HELLO_TIMEOUT_MS",
	"SHARDD_GRPC_HEADER_BYTES",
	"SHARDD_GRPC_CONTINUATIONS",
	"SHARDD_GRPC_UNATTACHED_STREAMS",
	"SHARDD_GRPC_UNATTACHED_BYTES",
	"SHARDD_GRPC_CONNECTION_BYTES",
	"SHARDD_GRPC_TOTAL_BYTES",
	"SHARDD_GRPC_MESSAGE_TIMEOUT_MS",
	"SHARDD_GRPC_IDLE_TIMEOUT_MS",
	"SHARDD_GRPC_RESETS_PER_S",
	"SHARDD_GRPC_PINGS_PER_S",
	"SHARDD_GRPC_SETTINGS_PER_S",
	"SHARDD_GRPC_CONTROL_PER_S",
	"SHARDD_DRAIN_TIMEOUT_MS",
	"SHARDD_FLIGHT_RECORDER_OPS",
	"SHARDD_HISTORY_JOBS",
	"SHARDD_RECENT_EVENTS",
	"SHARDD_MAX_CONNECTIONS_PER_USER",
	"SHARDD_MAX_UNATTACHED_PER_USER",
	"SHARDD_MAX_SESSIONS_PER_USER",
	"SHARDD_MAX_JOBS_PER_USER",
	"SHARDD_MAX_SLABS_PER_USER",
	"SHARDD_MAX_STATE_BYTES_PER_USER",
	"SHARDD_MAX_DAEMON_BYTES_PER_USER",
	"SHARDD_MAX_MESSAGE_BYTES_PER_USER",
	"SHARDD_MAX_FDS_PER_USER",
	"SHARDD_MAX_OPS_PER_USER",
	"SHARDD_MAX_STATUS_CALLS_PER_USER",
	"SHARDD_USER_LIMITS",
	"SHARDD_ALLOW_UIDS",
	"SHARDD_ALLOW_GIDS",
	"SHARDD_OBSERVER_UIDS",
	"SHARDD_HTTP",
	"SHARDD_HTTP_TOKEN_FILE",
	"SHARDD_OTLP",
	"SHARDD_OTLP_CA",
	"SHARDD_OTLP_HEADERS_FILE",
	"SHARDD_OTLP_INTERVAL_MS",
	"SHARDD_OTLP_TRACE_EVERY",
	"SHARDD_COORD",
	"SHARDD_COORD_USER",
	"SHARDD_COORD_PASSWORD_FILE",
	"SHARDD_COORD_CA",
	"SHARDD_COORD_CERT",
	"SHARDD_COORD_KEY",
	"SHARDD_NODE_NAME",
	"SHARDD_CLUSTER",
	"SHARDD_COORD_SEEDS",
	"SHARDD_COORD_NODES",
	"SHARDD_COORD_DIR",
	"SHARDD_COORD_CLIENT_PORT",
	"SHARDD_COORD_PEER_PORT",
	"SHARDD_COORD_ETCD",
	"SHARDD_PEER_LISTEN",
	"SHARDD_PEER_ADVERTISE",
	"SHARDD_PEER_CA",
	"SHARDD_PEER_CERT",
	"SHARDD_PEER_KEY",
	"SHARDD_PEER_ALLOW",
	"SHARDD_PEER_INSECURE",
	"SHARDD_RECORDED_ORDER",
	"SHARDD_REPLICAS",
	"SHARDD_ORDER",
	"SHARDD_DATA_INTERFACE",
	"SHARDD_DATA_ADDRESS",
	"SHARDD_LOG_LEVEL",
	"SHARDD_LOG_FORMAT",
	"SHARDD_LOG_FILE",
	NULL,
};

/* Variables that are read in addition to the configuration's keys. */
static const char *const env_others[] = {
	"SHARDD_JOB", "SHARDD_RING", "SHARDD_DEBUG", "SHARDD_DEVICE", "SHARDD_INSTANCE",
	"SHARDD_LIBCUDA", "SHARDD_LIBNCCL", "SHARDD_KERNELS", "SHARDD_GUARD", "SHARDD_LIBRARY",
	"SHARDD_RUN", "SHARDD_MIN_RANKS", "SHARDD_MAX_RANKS", "SHARDD_JOIN_GRACE_MS",
	"SHARDD_PRIORITY", "SHARDD_WAIT_FOR_MEMORY_MS", "SHARDD_ON_EXISTING", "SHARDD_RECONNECT_MS",
	/* the build and the tests */
	"SHARDD_BIN_DIR", "SHARDD_BUILD_DIR", "SHARDD_LIB_DIR", "SHARDD_SOURCE_DIR",
	"SHARDD_GOLDEN", "SHARDD_CUDA_HOME", "SHARDD_BOOT_INSIDE", "SHARDD_KILL_POINTS",
	"SHARDD_LINT_VENV", "SHARDD_LINT_NCCL", "SHARDD_TORCH_VENV", "SHARDD_GRPC_VENV",
	"SHARDD_KUBERNETES_VENV", "SHARDD_UNIT"
};

/* Whole families: those of the tests, and those that Kubernetes sets for a service called
 * shardd. */
static const char *const env_families[] = { "SHARDD_TEST_", "SHARDD_SIM_", "SHARDD_SERVICE_",
					    "SHARDD_PORT" };

/* Return: the @i-th known name, or NULL past the end. */
static const char *env_names_known(size_t i)
{
	if (i < ARRAY_SIZE(env_others))
		return env_others[i];
	return env_names_config[i - ARRAY_SIZE(env_others)];
}

/* Edit distance: letters to change, add or remove. */
static unsigned env_names_distance(const char *a, const char *b)
{
	unsigned row[ENV_NAME_MAX + 1];
	size_t n = strlen(b);

	for (size_t j = 0; j <= n; j++)
		row[j] = (unsigned)j;
	for (size_t i = 1; a[i - 1]; i++) {
		unsigned above = row[0];

		row[0] = (unsigned)i;
		for (size_t j = 1; j <= n; j++) {
			unsigned best = above + (a[i - 1] != b[j - 1]);

			above = row[j];
			best = row[j] + 1 < best ? row[j] + 1 : best;
			row[j] = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
		}
	}
	return row[n];
}

static bool env_names_in_family(const char *name)
{
	for (size_t i = 0; i < ARRAY_SIZE(env_families); i++)
		if (strncmp(name, env_families[i], strlen(env_families[i])) == 0)
			return true;
	return false;
}

static void env_names_look(const char *name, env_names_cb fn, void *userdata)
{
	const char *known, *nearest = NULL;
	unsigned least = ENV_NEAR + 1;

	for (size_t i = 0; (known = env_names_known(i)); i++) {
		unsigned d = strcmp(name, known) == 0 ? 0 : env_names_distance(name, known);

		if (!d)
			return;
		/* SHARDD_JOB is three changes at most from every name of three letters */
		if (d >= least || (d > 1 && name[strlen(ENV_PREFIX)] != known[strlen(ENV_PREFIX)]))
			continue;
		least = d;
		nearest = known;
	}
	fn(name, nearest, userdata);
}

void env_names_unknown(env_names_cb fn, void *userdata)
{
	for (char **e = environ; e && *e; e++) {
		char name[ENV_NAME_MAX];
		size_t n = strcspn(*e, "=");

		if (strncmp(*e, ENV_PREFIX, strlen(ENV_PREFIX)) != 0)
			continue;
		n = n < sizeof(name) ? n : sizeof(name) - 1;
		memcpy(name, *e, n);
		name[n] = '\0';
		if (!env_names_in_family(name))
			env_names_look(name, fn, userdata);
	}
}
