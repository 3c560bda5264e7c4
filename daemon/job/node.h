/*
 * Shared by all jobs of a node: its devices, the communicators between them, and the limits. Filled
 * by the server, borrowed by all code below it. Loop thread only.
 */
#ifndef SHARDD_JOB_NODE_H
#define SHARDD_JOB_NODE_H

#include <stdint.h>
#include <uv.h>

#include "backend/backend.h"
#include "backend/host_room.h"
#include "core/closer.h"
#include "core/condition.h"
#include "core/fault.h"
#include "core/loopq.h"
#include "core/res.h"
#include "core/user.h"
#include "engine/engine.h"
#include "mem/quarantine.h"
#include "mem/slab.h"

#define NODE_MAX_DEVICES    16
#define NODE_INSTANCE_BYTES 16

struct node_limits {
	uint64_t job_quota_bytes; /* default; 0: none */
	uint32_t max_wait_for_memory_ms;
	uint32_t job_ttl_s;         /* default */
	uint32_t max_job_ttl_s;     /* the most a job may ask for; 0: no limit */
	uint32_t uncommitted_ttl_s; /* of crashed jobs without a commit; 0: their own */
	uint32_t op_timeout_ms;     /* default */
	uint32_t stall_after_ms;
	uint32_t max_jobs;
	uint32_t max_units_per_job;
	uint32_t max_world_size;
	uint32_t max_inflight_ops;     /* per session */
	uint32_t max_inflight_gathers; /* casts per job; 0: no limit */
	uint64_t reduce_batch_bytes;   /* of gradients that are reduced together; 0: never */
	uint64_t stream_bytes_per_s;   /* of generations that are streamed, together; 0: any */
	uint32_t stream_stall_ms;      /* the most that a reader of one may take nothing */
};

struct node_comm;

/* Jobs that wait for memory (job/admission.h), and how it has ended for those that did. */
struct node_line {
	struct list jobs; /* of struct admission, in the order in which they came */
	uint64_t admitted, given_up, waited_us;
};

struct node {
	uv_loop_t *loop;
	struct loopq *loopq;          /* borrowed */
	const char *checkpoint_roots; /* borrowed: folders, separated by colons */
	struct device devices[NODE_MAX_DEVICES];
	unsigned n_devices;
	struct device
		pages; /* of the host, on a node of GPUs; else without a backend: node_pages */
	struct engine *local;        /* for what is on one device */
	struct engine *engine;       /* between devices; NULL: there is none */
	struct engine *nodes_engine; /* between nodes; NULL: there is none */
	char engine_why[256];        /* why not */
	bool engine_for_one;         /* also for sets of one device */
	bool order_ranks;            /* sums between nodes are made in rank order */
	struct list comms;           /* of struct node_comm */
	struct condition changed; /* memory was made, a communicator is there or broke, a rank was
				   * placed, something was executed: look again */
	struct work wakes;        /* node_wake_later */
	bool waking;              /* @wakes is posted */
	struct quarantine quarantine;
	struct node_limits limits;
	struct host_room room; /* of the machine, for copies of what is on GPUs (job/staging.h) */
	struct closer closer;  /* of memory that is no slab (job/replica.h) */
	struct node_line line;
	struct users users; /* the users, and how much of all this each uses */
	uint64_t started_us;
	uint8_t instance[NODE_INSTANCE_BYTES]; /* of this run of the daemon: random */
	uint64_t started_unix_s;               /* when it started, for people */
	/* (optional) A communicator broke; @why is one sentence. */
	void (*comm_broke)(struct node *node, struct node_comm *nc, const char *why);
};

/*
 * The communicators of one set of devices, in its order: one per queue. Created at the first
 * request, kept while a job uses them (those of all devices for the life of the daemon), created
 * again after they broke.
 *
 *   MAKING --both there--> READY --one breaks--> BROKEN --asked for, nothing runs--> MAKING
 *      '---------------------fails----------------^
 */
enum node_comm_state { COMM_MAKING, COMM_READY, COMM_BROKEN };

struct node_comm {
	struct list link; /* node->comms */
	struct node *node;
	uint8_t state;   /* enum node_comm_state */
	unsigned users;  /* groups */
	bool left;       /* by the last of them */
	uint64_t breaks; /* how often it broke: operations that began before have failed */
	struct device *devices[NODE_MAX_DEVICES];
	unsigned n;
	/* members on other nodes, too; of one epoch, and never made again */
	bool spans;
	struct comm_group group;         /* of both, but for the prefix */
	char prefix[216];                /* theirs begin with it */
	struct comm *comm[_BACKEND_Q_N]; /* owned */
	unsigned making;                 /* of them that are not there yet */
	struct list windows;             /* of struct window (window.c) */
	/* The window module's: the communicators are there. NULL: there were no windows yet. */
	void (*made_again)(struct node_comm *nc);
	unsigned ending; /* windows that the engine has not released yet */
	bool tell;       /* creation failed: the next request gets the error */
	char why[256];   /* BROKEN */
};

/* Of this run of the daemon: 32 hexadecimal digits. */
void node_instance_text(const struct node *node, char ret[2 * NODE_INSTANCE_BYTES + 1]);

/* The device whose memory processes share with the daemon by the CPU: borrowed. */
static inline struct device *node_pages(struct node *node)
{
	return node->pages.backend ? &node->pages : &node->devices[0];
}

/* No devices yet. */
void node_init(struct node *node, uv_loop_t *loop);
/* Free the communicators; nothing may run on them. What is being closed is closed. Safe to call twice. */
void node_deinit(struct node *node);

/* Free communicators that nobody uses any more, and signal node->changed. */
void node_wake(struct node *node);
/* node_wake, from the loop: the caller is in the middle of something. */
void node_wake_later(struct node *node);

/* A device by id or UUID (upper and lower case are the same). Return: NULL: none. */
struct device *node_device(struct node *node, const char *name);
/* Are its devices GPUs? */
bool node_has_gpus(const struct node *node);
/* The list of devices, for texts: "cuda:0 (GPU-...), cuda:1 (GPU-...)". */
void node_list_devices(const struct node *node, char *buf, size_t bytes);

/* The communicators of @n devices. @ret: also with RES_WAIT; a caller that keeps it counts as a
 * user (nc->users) until node_comm_leave. RES_WAIT: they are being created: wait for
 * node.changed, then ask again. RES_FAILED: @f is set. */
enum res node_comm(struct node *node, struct device *const *devices, unsigned n,
		   struct node_comm **ret, struct fault *f);

/* Communicators of @n devices here and those of other nodes, as @group says (its prefix: of both). The
 * caller is a user. Return: NULL without memory. */
struct node_comm *node_comm_new(struct node *node, struct device *const *devices, unsigned n,
				const struct comm_group *group);
/* The same as node_comm for those. */
enum res node_comm_there(struct node_comm *nc, struct fault *f);

/* Its epoch has ended: abort those, and one user less. */
void node_comm_end(struct node_comm *nc, const char *why);

/* Its operations do not end: abort it, and report it as if it had broken by itself. */
void node_comm_break(struct node_comm *nc, const char *why);

/* One user less. Communicators of some of the devices that nobody uses any more are freed;
 * the server is a user of those of all devices, so they stay warm. */
void node_comm_leave(struct node_comm *nc);

/* Communicators with @device are broken. Those between the remaining devices are derived from them,
 * if the engine can do that, so that the next job finds them warm. */
void node_device_lost(struct node *node, struct device *device);

/* Where room for memory of this machine is counted that is no slab: with the slabs, if theirs is of the
 * machine, too. Borrowed until node_deinit. */
struct host_room *node_room(struct node *node);

/* Bytes that all jobs hold on all devices, and the limit of all. */
uint64_t node_used(const struct node *node);
uint64_t node_capacity(const struct node *node);

#endif
