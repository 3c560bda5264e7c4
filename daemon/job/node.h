/*
 * What all jobs of a node share, and the limits they live under. Filled by the
 * server, borrowed by everybody below it. Loop thread only.
 */
#ifndef SHARDD_JOB_NODE_H
#define SHARDD_JOB_NODE_H

#include <stdint.h>
#include <uv.h>

#include "backend/backend.h"
#include "engine/engine.h"
#include "mem/quarantine.h"
#include "mem/slab.h"

struct node_limits {
	uint64_t job_quota_bytes; /* default; 0: none */
	uint32_t job_ttl_s;       /* default */
	uint32_t op_timeout_ms;   /* default */
	uint32_t stall_after_ms;
	uint32_t max_jobs;
	uint32_t max_units_per_job;
	uint32_t max_world_size;
	uint32_t max_inflight_ops;     /* per session */
	uint32_t max_inflight_gathers; /* casts per job; 0: no limit */
};

struct node {
	uv_loop_t *loop;
	struct backend *backend;
	struct engine *engine;
	struct comm *comm; /* of all devices; size 1 with the local engine */
	struct device device;
	struct quarantine quarantine;
	struct node_limits limits;
	uint64_t started_us;
};

#endif
