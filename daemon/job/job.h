/*
 * A job: the trainers that train one model, its units, groups and account.
 *
 * Persistent state is in the record (store/state.h). A job lives in the registry from creation to
 * deletion; deleted while processes still have its memory mapped, it stays as a zombie until the
 * last byte is back. Loop thread only.
 *
 *   FORMING --all ranks joined--> RUNNING --a rank dies or leaves--> FORMING ...
 *      ^--- first join ---.          '--drain--> DRAINING
 *   IDLE (no trainers) ---'
 *   TORN: a trainer died between a step and its commit; initialise again
 */
#ifndef SHARDD_JOB_JOB_H
#define SHARDD_JOB_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include "core/condition.h"
#include "core/fault.h"
#include "core/htab.h"
#include "core/list.h"
#include "core/quota.h"
#include "core/res.h"
#include "job/ddp.h"
#include "job/group.h"
#include "job/regcache.h"
#include "job/member.h"
#include "job/node.h"
#include "job/readers.h"
#include "store/state.h"
#include "unit/reads.h"
#include "unit/settings.h"
#include "unit/unit.h"

#define JOB_NAME_MAX   64
#define JOB_LABEL_MAX  (JOB_NAME_MAX + 11) /* UID/NAME */
#define JOB_RUN_MAX    64
#define JOB_MAX_BLOB   65536u
#define JOB_MAX_GROUPS 256u
/* Limits for all units of a job: their records are memory that no account pays for. */
#define JOB_MAX_TENSORS (1u << 20)

enum job_lifetime { JOB_EPHEMERAL = 1, JOB_KEEP = 2 };

/* What a joining rank wants if the job has state. Equal to the wire's OnExisting. */
enum job_on_existing { JOB_RESUME = 1, JOB_ERROR = 2, JOB_FRESH = 3 };

enum job_event_kind { JOB_EVENT_EPOCH_ENDED, JOB_EVENT_STALL, JOB_EVENT_DRAIN };

struct jobs;
struct job;

/* Callbacks for the layers to the left. Set once, before any job exists. */
struct job_ops {
	/* All waiting ops of the job must end with @fault; running ones continue. */
	void (*abort_ops)(struct job *job, const struct fault *fault);
	match_complete_cb complete; /* userdata: the group */
	match_failed_cb failed;
	/* News for one trainer. */
	void (*event)(struct member *m, enum job_event_kind kind, const char *text);
	/* (optional) The signals of a member are freed: do not look up their owner any more. */
	void (*signals_gone)(struct job *job, const struct backend_signals *signals);
	/* (optional) Fewer ranks or copies than before read the parameters of @u. */
	void (*unit_released)(struct job *job, struct unit *u);
	/* (optional) The job's epoch ended, why: for the log. */
	void (*epoch_ended)(struct job *job, const struct fault *why);
	/* (optional) Its time without trainers is over: it is deleted now. For the log. */
	void (*expired)(const struct job *job);
};

/* A step that all ranks have asked for and that is applied by the commit that
 * follows, or by the next op that needs the parameters. */
enum job_step_state { JOB_STEP_NONE, JOB_STEP_PREPARED, JOB_STEP_APPLYING };

/* The booleans are independent: a Commit runs with any of the states, and units of another group
 * may be stepped in backward between a Step and its application. */
struct job_step {
	uint8_t state;           /* enum job_step_state */
	struct step_rates rates; /* until it is applied */
	uint32_t group;
	uint64_t epoch;  /* in which applying began */
	bool abandoned;  /* it was not applied: its epoch ended before it could begin */
	bool committing; /* a commit runs: what was applied will be committed */
	bool scales;     /* gradients are multiplied by @factor before */
	float factor;
	uint32_t stepping; /* units whose optimizer runs in backward just now */
	bool mid;          /* units were stepped in backward since the last Step or Commit */
	bool counted;      /* and that is counted in uncommitted_steps */
	struct condition applied;
};

/* Whether it lives, and how it may go on. */
struct job_life {
	bool deleted;     /* a zombie: out of the registry's names */
	bool memory_gone; /* deleted, and nothing of it is used any more */
	bool draining;
	bool torn;
	bool crashed;           /* its last trainer did not leave cleanly */
	uint64_t idle_since_us; /* no trainers since; 0: there are some */
};

/* The memory that its account pays for. */
struct job_memory {
	struct slab **slabs; /* of shards, owned refs */
	uint32_t n_slabs;
	struct slab **spare; /* owned refs: of a registration that goes on later */
	unsigned n_spare;
	struct pool full[NODE_MAX_DEVICES];    /* gathered copies, by device */
	struct pool scratch[NODE_MAX_DEVICES]; /* sums on their way between devices */
	struct pool grads[NODE_MAX_DEVICES];   /* gradient shards that exist only while needed */
	struct reads stray[NODE_MAX_DEVICES];  /* of copies whose memory went back to the pool */
	bool stale_partials;                   /* sums that will not be used are still there */
	bool stray_gradients;                  /* of units that have no gradient, perhaps */
};

/* The gathered copies of its units (copies/full.h). */
struct job_copies {
	struct list idle;   /* units whose full buffers nobody uses, oldest first */
	uint32_t casts;     /* that run now */
	uint32_t ahead;     /* of these: not requested yet */
	struct list drains; /* that wait for those to end; owned by work/drain.c */
	struct list turns;  /* members with gathers that wait for a cast to end, in turn */
};

/* What status says of its ops. */
struct job_ops_seen {
	uint64_t total;
	uint64_t failed;
	char last_error[256];
};

struct job {
	uint32_t magic;
	struct jobs *jobs;             /* borrowed, the registry */
	struct node *node;             /* borrowed */
	state_job *rec;                /* owned */
	char label[JOB_LABEL_MAX + 1]; /* UID/NAME: its key in the registry, and for logs */
	struct quota quota;
	uint32_t number;           /* no other living job has it; not 0 */
	struct user_charge owner;  /* one of its owner's jobs */
	struct user_charge memory; /* the daemon's own memory for it: job_own_bytes */
	struct job_life life;

	struct member **ranks;  /* by rank; the last member, in any state; owned ref */
	struct device **placed; /* by rank: its device; NULL: not known yet */
	uint32_t joined;        /* ranks in state JOINED */
	uint32_t present;       /* ranks in state JOINED or STALE */
	uint32_t members;       /* objects alive, of all ranks and epochs */
	struct group **groups;
	uint32_t n_groups;
	struct unit **units; /* by id - 1 */
	uint32_t n_units;
	struct htab unit_names;
	struct list registrations; /* rpc's: in progress; the first one is active */
	struct regcache knowns;    /* what was registered, as it came */
	struct ddp *ddps[DDP_MAX]; /* by id - 1, owned; NULL: none */
	struct job_memory mem;
	struct job_copies copies;
	struct job_step step;
	struct readers readers; /* sessions that are no rank */

	struct list waiting_tasks; /* on devices, for streams of trainers; owned by op/ */
	uint32_t running;          /* collectives and casts in the backend or engine */
	struct job_ops_seen ops;
	struct condition settled; /* signalled by job_settle: ops of an earlier epoch may be over */
	struct list link;         /* jobs->all or jobs->zombies */
};

struct jobs {
	struct node *node; /* borrowed */
	struct job_ops ops;
	struct htab names; /* by label */
	struct list all;
	struct list zombies;
	uint32_t count;
	uint32_t last_number; /* of a job */
	bool draining;        /* no new jobs and trainers */
};

void jobs_init(struct jobs *jobs, struct node *node, const struct job_ops *ops);
/* Delete every job; no member may be present and nothing may run (CHECKed). */
void jobs_deinit(struct jobs *jobs);
/* The first part of that: delete all jobs, give up quarantine. Then run the loop until jobs_gone:
 * engines release memory asynchronously. */
void jobs_end(struct jobs *jobs);
bool jobs_gone(struct jobs *jobs);

/* What a caller specifies for a job. A number of 0 means the node's default. */
struct job_spec {
	const char *name;
	uint32_t world_size;
	enum job_lifetime lifetime;
	uint64_t quota_bytes;
	uint32_t ttl_s;
	uint32_t op_timeout_ms;
	bool allow_torn;
	bool ipc;
	bool is_private;
	const uint8_t *instance; /* NODE_INSTANCE_BYTES: the daemon that has the caller's state;
				  * NULL: it expects none */
	enum job_on_existing on_existing; /* 0: JOB_RESUME */
	const char *run; /* of the caller's launcher, up to JOB_RUN_MAX; NULL: not known */
};

/* Create the job, or find it and check that it is the same. A plain name is one of @uid's own jobs;
 * a UID/NAME of another user must exist. @ret_created may be NULL. Return: 0, or a fault:
 * FAULT_LOST if spec->instance is another run of the daemon. */
int job_open(struct jobs *jobs, const struct job_spec *spec, uid_t uid, gid_t gid, struct job **ret,
	     bool *ret_created, struct fault *f);

/* Of job_open: may a rank with @spec join @job, which may have state
 * (job_existing.c)? @ret_replace: with JOB_FRESH and no trainers in it, a job that is created takes
 * its place; @spec has got its settings where it has none of its own. Return: 0 or a fault. */
int job_existing_check(const struct job *job, struct job_spec *spec, bool *ret_replace,
		       struct fault *f);
/* A rank of the launcher's run @run has joined: if no other is there, the state is of its run from
 * now on. */
void job_existing_joined(struct job *job, const char *run);

/* Find by NAME or UID/NAME, for its owner or an administrator (job_names.c). For all other users
 * the job does not exist. Return: 0 or a fault. */
int job_find(struct jobs *jobs, const char *name, uid_t uid, struct job **ret, struct fault *f);
/* The owner, or an administrator: root, and the user that the daemon runs as. */
bool job_may_use(const struct job *job, uid_t uid);
bool job_is_admin(uid_t uid);
/* May @uid see what is in the job: units, pids, ops? */
bool job_may_look(const struct job *job, uid_t uid);
/* As job_may_look, but with a fault that says who has no access to the job. */
int job_check_open(const struct job *job, uid_t uid, struct fault *f);
/* Memory was refused: give back idle copies, and what pools keep for the next step; of other jobs,
 * too, if @job has nothing. Return: bytes freed. */
uint64_t job_evict(struct job *job, uint64_t want);
/* pool_take, if need be in place of what job_evict gives back. Return: as pool_take. */
int job_take(struct job *job, struct pool *pool, uint64_t bytes, struct region *ret);

/* A rank has let go of @u, or a copy of it was made: what waits for that goes on. */
static inline void job_unit_released(struct job *job, struct unit *u)
{
	if (job->jobs->ops.unit_released)
		job->jobs->ops.unit_released(job, u);
}

/* The name of a job: NAME, or UID/NAME. */
struct job_ref {
	bool has_uid;
	uid_t uid;
	const char *name; /* points into the text */
};
/* @field: of the request. Return: 0 or FAULT_INVALID. */
int job_ref_parse(const char *text, const char *field, struct job_ref *ret, struct fault *f);
/* Move job->step.state. CHECKs that the move is in the table (job.c, docs/states.md). */
void job_step_move(struct job *job, enum job_step_state to);

void job_label(uid_t uid, const char *name, char ret[JOB_LABEL_MAX + 1]);

/* The owner of work on a device. */
static inline struct backend_owner job_as_owner(const struct job *job)
{
	return (struct backend_owner){ .user = job->rec->uid,
				       .job = job->number,
				       .weight = job->owner.user->worker_weight };
}

/* How a trainer joins. */
struct job_joining {
	uint32_t rank;
	const char *device; /* id or UUID; "": where the rank was, or as the daemon chooses */
	bool no_channel;    /* it can take memory only as CUDA IPC handles */
};

/* Join. @again: the caller's member if it joins again, else NULL; @ret gets a reference
 * that the session keeps. RES_WAIT: ops of an earlier epoch still run: wait for job.settled, then join
 * again. */
enum res job_join(struct job *job, const struct job_joining *how, struct proc *proc,
		  uint64_t session, struct member *again, struct member **ret, struct fault *f);

/* Which device rank @rank is on (job_place.c): the one that @name names, or the known one, or the
 * default: rank * devices / world size. A rank of a group that has units or has run collectives
 * stays where it is. Return: 0 or a fault. */
int job_place(struct job *job, uint32_t rank, const char *name, struct fault *f);
enum backend_share job_share(const struct job *job);

/* Leave cleanly: fails if its ops are not over. RES_WAIT: devices still work on them: wait for
 * node.changed, then leave again. Or be gone (job_lost, @why says how). May free the job. */
enum res job_leave(struct member *m, bool *ret_freed, struct fault *f);
void job_lost(struct member *m, const char *why);

/* Delete: with trainers present only if @force. Return: 0 or a fault. */
int job_delete(struct job *job, bool force, uint64_t *ret_freed, struct fault *f);
/* Ask the trainers to commit and leave; no rank may join any more. Return: ranks told. */
uint32_t job_drain(struct job *job);

/* Find or make a group. Return: 0 or a fault. */
int job_group(struct job *job, const char *name, const uint32_t *ranks, size_t n,
	      struct group **ret, struct fault *f);
/* @m has left cleanly: end the collectives of @g that it has not announced. */
void job_group_left(struct group *g, const struct member *m);
/* Append the run-time group of the last group of the record. Return: 0 or -ENOMEM. */
int job_add_group(struct job *job);
/* By id. Return: NULL if there is none. */
struct group *job_group_by_id(struct job *job, uint32_t id);

/* Give back what an unfinished registration took; safe if there is none. */
void job_drop_spare(struct job *job);
uint64_t job_spare_bytes(const struct job *job);
/* Add slabs to the job, in the order of their numbers; the job takes its own reference on each. All
 * or none. Return: 0 or -ENOMEM. */
int job_add_slabs(struct job *job, struct slab *const *slabs, size_t n);
/* Let go of slabs of shards in which no unit has anything any more. */
void job_drop_unused_slabs(struct job *job);
void job_units_free(struct job *job);
struct unit *job_unit_by_id(struct job *job, uint32_t id);

/* May this member have slab @id, and for writing? Return: borrowed, or NULL. */
struct slab *job_slab_for(struct member *m, uint32_t id);
/* May a reader of the job? Those of parameters alone. */
struct slab *job_slab_for_reader(const struct job *job, uint32_t id);

/* The job as a saved record and its slabs; the inverse makes the job (job_restore.c; only tests
 * link it, see store/state.h).
 * @fds: one per slab of the record, in its order, borrowed; -1: there is none, which is an error.
 * Takes @rec on success. */
int job_restore(struct jobs *jobs, state_job *rec, const int *fds, struct job **ret,
		struct fault *f);

/* The contents of @device are lost: every job that has memory there becomes TORN. */
void jobs_device_lost(struct jobs *jobs, struct device *device);
/* Collectives of the jobs that use @nc have failed: their epochs end. */
void jobs_comm_broke(struct jobs *jobs, struct node_comm *nc, const char *why);

/* Begin a new epoch: waiting ops end with @fault, members become STALE. */
void job_epoch_end(struct job *job, const struct fault *fault);

/* Mark the job TORN if a restart has no state to continue from: a step was applied after the last
 * commit. */
void job_tear(struct job *job);

/* Call now and then: ends jobs without trainers whose time is up, and empty zombies. */
void jobs_tick(struct jobs *jobs, uint64_t now_us);

/* Free a deleted job whose last byte is back. job_settle's. */
void job_free_zombie(struct job *job);

/* Something of the job has ended: continue what waited for that (joins, a deletion). May free the
 * job. */
void job_settle(struct job *job);

/* What was counted in job->running is over. Behind all that it resumes: that may have been the last
 * of a deleted job, which this frees. */
void job_ran(struct job *job);

/* IDLE, FORMING, RUNNING, TORN, DRAINING, DELETED. Return: static string. */
const char *job_state_name(const struct job *job);

/* Take memory for the gathered copies of @u on all its devices, or none of it. Return: as
 * pool_take. */
int job_take_full(struct job *job, struct unit *u);
/* Give it back; streams that may still read it are remembered. Safe if there is none. */
void job_give_full(struct job *job, struct unit *u);

/* No rank holds @u any more, or the making of its copy has ended: the copy stays until memory is
 * needed or the parameters change, or is freed at once (unit.drop). Does nothing if the copy is in
 * use. */
void job_full_unused(struct job *job, struct unit *u);
/* Gradient shards of @u on all its devices, if they come from a pool: take them, or none of
 * them, or give them back (job_grads.c). Return: as pool_take. */
int job_take_grads(struct job *job, struct unit *u);
void job_give_grads(struct job *job, struct unit *u);
/* Give back those of units without a gradient, when nothing of the job runs. */
void job_give_stray_grads(struct job *job);
/* The backward pass is over for the units of @g (NULL: of all groups): clear its records. */
void job_pass_end(struct job *job, struct group *g);

/* Free the sums that were kept for the replicas' all-reduce and are no longer needed;
 * job_drop_partials: those of all units, as soon as nothing runs. */
void job_give_partials(struct job *job, struct unit *u);
void job_drop_partials(struct job *job);

/* Upper bound of the daemon's own bytes for a job of @units and @tensors: records, and each rank's
 * state of each unit. */
uint64_t job_own_bytes(const struct job *job, uint64_t units, uint64_t tensors);
/* The account refused a slab of @bytes. If the owner's limits were the reason, @f says so.
 * Return: 0, or a fault code. */
int job_owner_fault(const struct job *job, uint64_t bytes, struct fault *f);

/* Describe how much each job and class holds, for RESOURCE_EXHAUSTED texts. */
void job_holders(const struct job *job, char *buf, size_t bytes);

/* Note a failed op for status. */
void job_note_error(struct job *job, const struct fault *f);

#endif
