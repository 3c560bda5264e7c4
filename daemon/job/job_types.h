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
#ifndef SHARDD_JOB_JOB_TYPES_H
#define SHARDD_JOB_JOB_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/condition.h"
#include "core/fault.h"
#include "core/htab.h"
#include "core/list.h"
#include "core/quota.h"
#include "core/res.h"
#include "job/match.h"
#include "job/node.h"
#include "mem/pool.h"
#include "store/state.h"
#include "unit/reads.h"
#include "unit/settings.h"
#include "unit/unit.h"

#define JOB_NAME_MAX      64
#define JOB_ON_NODE_BYTES 80                  /* " on node " and its name */
#define JOB_LABEL_MAX     (JOB_NAME_MAX + 11) /* UID/NAME */
#define JOB_RUN_MAX       64
#define JOB_MAX_BLOB      65536u
#define JOB_MAX_GROUPS    256u
#define JOB_MAX_DDPS      64u
/* Limits for all units of a job: their records are memory that no account pays for. */
#define JOB_MAX_TENSORS (1u << 20)

enum job_event_kind {
	JOB_EVENT_EPOCH_ENDED,
	JOB_EVENT_STALL,
	JOB_EVENT_STALL_ENDED,
	JOB_EVENT_DRAIN
};

enum job_lifetime { JOB_EPHEMERAL = 1, JOB_KEEP = 2, JOB_BASE = 3 };

struct across_write;
struct admission;
struct apply;
struct asked;
struct bufcopy;
struct coll;
struct commit;
struct ddp;
struct doubt;
struct elastic_turn;
struct generation;
struct group;
struct kept;
struct loading;
struct loading_options;
struct job;
struct jobs;
struct member;
struct redo;
struct resize;
struct restore;
struct saving;
struct saving_options;
struct span;

/* What the job goes on from after a rank was lost: the last applied step, if it is known, or the last
 * commit, of which a copy is kept. With NO_COPY a step of which some units were made and others not is
 * not rolled back (job/kept.h). Equal to the wire's Resume. */
enum job_resume { JOB_RESUME_APPLIED = 1, JOB_RESUME_COMMITTED = 2, JOB_RESUME_NO_COPY = 3 };

/* What is about to change parameters or optimizer state. */
enum job_change {
	JOB_CHANGE_WHOLE, /* a step as a whole, or something that is no step */
	JOB_CHANGE_EARLY  /* a unit that makes the step before the others (unit_steps_early) */
};

/* The same of jobs with ranks on several nodes. */
struct job_across_ops {
	/* (optional) What the ops at @number, which all members here have announced, wait for. "": nothing. */
	void (*waits)(const struct group *g, uint64_t number, char *buf, size_t bytes);
	/* (optional) A rank of this node has left a job with a span: job_left_elsewhere on the other nodes.
	 * It was the last one: left follows. */
	void (*rank_left)(struct job *job, const struct member *m);
	void (*left)(struct job *job);
	/* (optional) The epoch of a job with a span ends. */
	void (*ended)(struct job *job, const struct fault *why);
	/* (optional without such) Of a job with ranks on several nodes: have them save, or load, a
	 * checkpoint together: saving_part_begin, loading_part_open follow. Return: 0 or a fault code. */
	int (*save)(struct job *job, const struct saving_options *o, struct fault *f);
	int (*load)(struct job *job, const struct loading_options *o, struct fault *f);
	/* The caller here gives up the one, or the other (@loads), that was asked for, or it was cancelled. */
	void (*give_up)(struct job *job, bool loads);
	/* (optional) The nodes of the job make replicas of the commit that is about to be made, unless it is the
	 * turn of a checkpoint, which is @due. Return: they do. */
	bool (*replicate)(struct job *job, bool due);
	/* The policy of its checkpoints was set here: the other nodes need it. */
	void (*policy)(struct job *job);
};

/* Callbacks for the layers to the left. Set once, before any job exists. */
struct job_ops {
	/* All waiting ops of the job must end with @fault; running ones continue. */
	void (*abort_ops)(struct job *job, const struct fault *fault);
	match_complete_cb complete; /* userdata: the group */
	match_failed_cb failed;
	/* News for one trainer. */
	void (*event)(struct member *m, enum job_event_kind kind, const char *text);
	/* (optional) The job stalls, or (@stalls false) does not any more (op/stall.h). */
	void (*stall)(struct job *job, bool stalls);
	/* (optional) The signals of a member are freed: do not look up their owner any more. */
	void (*signals_gone)(struct job *job, const struct backend_signals *signals);
	/* (optional) Parameters or state are about to change. RES_WAIT: not yet; readers_go_on
	 * follows. */
	enum res (*before_change)(struct job *job, enum job_change what);
	/* (optional) Nobody may read parameters from here on: wait for what still does, on devices and in
	 * trainers' streams. RES_WAIT: @w is resumed when it is over. RES_FAILED: no memory. */
	enum res (*drain)(struct job *job, struct waiter *w);
	/* (optional) The parameters of @u are those of an earlier time again. */
	void (*rolled_back)(struct job *job, struct unit *u);
	/* (optional) Fewer ranks or copies than before read the parameters of @u. */
	void (*unit_released)(struct job *job, struct unit *u);
	/* (optional) The job's epoch is about to end, or has no rank and the job is deleted: nothing of it has
	 * ended yet. */
	void (*epoch_ends)(struct job *job);
	/* (optional) The job's epoch ended, why: for the log. */
	void (*epoch_ended)(struct job *job, const struct fault *why);
	/* Of groups with members on other nodes (optional without such): all members here have announced
	 * at @number, or it has failed here (struct match_others). */
	void (*announce)(struct group *g, uint64_t number, const struct match_entry *first);
	void (*refuse)(struct group *g, uint64_t number, const struct fault *fault);
	/* Somebody here wants the @turn-th gathered copy of @u in this epoch, whose parts are on several
	 * nodes: turn_start follows. */
	void (*want)(struct job *job, struct unit *u, uint64_t turn);
	/* A rank here leaves tensors of @u, whose parts are on several nodes, out of a gradient: all nodes set
	 * unit_turns.leaves_out, at one place of the order, before that reduction. */
	void (*leave_out)(struct job *job, struct unit *u);
	/* Of groups with members on other nodes (optional without such): the ranks of this node have no more
	 * inputs: uneven_joined_elsewhere on the other nodes. @number: they have taken part in what comes
	 * before. @last_number, @last: their last one, and what it had taken part in itself. */
	void (*joined)(struct group *g, uint64_t number, uint64_t last_number, uint32_t last);
	/* For nodes without inputs: uneven_asked_elsewhere there. */
	void (*asks)(struct group *g, const struct asked *a);
	/* A rank here wants to write parameters of @w->unit, whose group spans nodes: writes_asked_elsewhere on
	 * the other nodes; writes_start or writes_fail follows on all of them. */
	void (*writes)(struct job *job, const struct across_write *w);
	/* This node lets a rank elsewhere do that, or does not. */
	void (*write_allowed)(struct job *job, const struct across_write *w);
	void (*write_refused)(struct job *job, const struct across_write *w, const struct fault *f);
	/* All ranks here have given back their shards of @u for the @turn-th time in this epoch:
	 * external_start follows when those of all nodes have. */
	void (*give)(struct job *job, struct unit *u, uint64_t turn);
	/* The gathered copy that was started at @position of the order is made, or has failed. */
	void (*made)(struct job *job, uint64_t position);
	/* (optional) What is in doubt never was (step/doubt.h). No rank is joined. */
	void (*drop_doubt)(struct job *job);
	/* (optional) @job is restored, and its record has something in doubt. Nothing else has been done yet. */
	void (*restored)(struct job *job);
	/* (optional) A Step of @g, which spans nodes, is prepared here: apply_allow follows. */
	void (*prepared)(struct group *g, uint64_t number);
	/* (optional) A rank of this node waits for the @turn-th, which has begun already. */
	void (*asked)(struct job *job, struct unit *u, uint64_t turn);
	/* (optional) Rank @rank wants to join. RES_WAIT: the nodes have not begun an epoch with it yet:
	 * job_settle follows. */
	enum res (*may_join)(struct job *job, uint32_t rank, struct fault *f);
	/* (optional) All ranks here have left. RES_WAIT: those of other nodes may be about to leave, too:
	 * job_settle follows, or the job is deleted. */
	enum res (*leaves)(const struct job *job);
	/* (optional) It is being deleted; nothing of it has ended yet. */
	void (*deleted)(struct job *job);
	/* (optional) A process that waits to join as @rank has given up. */
	void (*gave_up)(struct job *job, uint32_t rank);
	/* (optional) Does anybody wait for such an epoch? */
	bool (*is_awaited)(const struct job *job);
	/* (optional) Its time without trainers is over: it is deleted now. For the log. */
	void (*expired)(const struct job *job);
	struct job_across_ops across;
};

/* A step that all ranks have asked for and that is applied by the commit that
 * follows, or by the next op that needs the parameters. */
enum job_step_state { JOB_STEP_NONE, JOB_STEP_PREPARED, JOB_STEP_APPLYING };

struct position_mark;

/* A Step, as all nodes know it. */
struct job_step_id {
	uint64_t epoch, group, number; /* key of the group; number of the collective in it */
};

/* The booleans are independent: a Commit runs with any of the states, and units of another group
 * may be stepped in backward between a Step and its application. */
struct job_step {
	uint8_t state;           /* enum job_step_state */
	struct step_rates rates; /* until it is applied */
	uint32_t group;
	uint64_t epoch;        /* in which applying began */
	bool abandoned;        /* it was not applied: its epoch ended before it could begin */
	bool committing;       /* a commit runs: what was applied will be committed */
	bool recorded;         /* and is in the job's record already, together with the step */
	struct commit *commit; /* it, owned (step/commit.h) */
	bool covered;          /* the commit and the step are recorded together before it runs */
	/* PREPARED: of a group with ranks on other nodes: it takes effect on all nodes or on none. */
	bool across;
	bool gated; /* it may not be applied yet: another node may not have it (apply_allow) */
	bool skips; /* it has no gradients: it only counts */
	struct job_step_id id; /* PREPARED: which one */
	struct apply *ready;   /* PREPARED: its launches; owned; NULL: not made yet */
	bool redoes;           /* APPLYING: a part of that is done at each tick */
	uint64_t old_redo;     /* PREPARED: a task of a predecessor that makes it; 0: none */
	struct doubt *doubt;   /* what is not known of it, and of a commit (step/doubt.h); owned */
	bool scales;           /* gradients are multiplied by @factor before */
	float factor;
	uint32_t stepping; /* units whose optimizer runs in backward just now */
	bool numbered;     /* the Step has said @number; until it is applied */
	uint64_t number;
	struct position_mark *
		*marks;  /* by rank, NULL: none; owned (job/position.h); NULL: no Step */
	bool positioned; /* the record knows of it already */
	bool mid;        /* units were stepped in backward since the last Step or Commit */
	bool counted;    /* and that is counted in uncommitted_steps */
	struct condition applied;
};

/* Whether it lives, and how it may go on. */
struct job_life {
	bool deleted;     /* a zombie: out of the registry's names */
	bool finished;    /* deleted, because all its ranks have left: not by a call */
	bool memory_gone; /* deleted, and nothing of it is used any more */
	bool draining;
	bool torn;
	bool crashed;            /* its last trainer did not leave cleanly */
	uint8_t why;             /* enum history_why; 0: by a call */
	uint32_t changing;       /* what runs and changes parameters in place */
	struct resize *resize;   /* under way (job/resize.h); owned; NULL: none */
	struct restore *restore; /* the same (job/restore.h) */
	uint64_t idle_since_us;  /* no trainers since; 0: there are some */
};

enum pooled_store { POOLED_STORED, POOLED_WAITS, POOLED_LEFT_OUT };

/* A slab of one of its pools, beside its record (job/pooled.h). */
struct pooled {
	struct job *job;   /* borrowed */
	struct slab *slab; /* borrowed: it tells when it goes */
	uint32_t at;       /* in job->rec->pooled and job->mem.pooled */
	uint8_t store;     /* enum pooled_store */
	bool saved;        /* the journal knows it */
	bool lent;         /* an earlier daemon's: its process has not joined yet */
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
	struct pooled **pooled;                /* owned, with what is there: as rec->pooled */
	uint32_t pooled_room;
	uint32_t pooled_waiting, pooled_left_out; /* of them, in these states */
	struct admission *admission; /* it waits for memory (job/admission.h); NULL: it does not */
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
struct job_counts {
	uint64_t commits, epochs_ended, deaths; /* deaths: of ranks, without a Leave */
	uint64_t checkpoints, checkpoints_failed;
	uint64_t stalls, stalled_us; /* that have begun; how long those lasted that are over */
	uint64_t since_unix_us;      /* when they were 0 */
};

struct job_ops_seen {
	uint64_t total;
	uint64_t failed;
	char last_error[256];
	uint64_t last_error_us;  /* when that was */
	uint64_t stalled_us;     /* since when it stalls (op/stall.h); 0: it does not */
	char stalled[512];       /* what the log and its ranks were told of that; "": nothing */
	uint64_t commits;        /* since the last event of one (job/events.h) */
	uint64_t stride;         /* steps between the last two commits; 0: not known */
	uint64_t commit_told_us; /* that event; 0: there was none */
	struct job_counts counts;
};

/* What reads its parameters where they are (job/readers.h). */
struct readers {
	struct list all;
	struct list waiting; /* in the order in which they asked */
	struct list holds;
	struct condition writers; /* until nobody holds */
	unsigned writing;         /* collectives that were allowed and have not ended */
	uint64_t changes;         /* of where parameters are, beside new units */
	bool rewritten;           /* since the last commit, by something that is not a step */
	bool look_again;          /* writers: their epoch has ended */
	struct list makings;      /* of generations (publish/making.h) */
	struct list publications; /* publish/publication.h */
	struct list of_base;      /* of struct base_reader (job/base.h) */
	uint64_t commits;         /* so far: what was read between two of them is of one */
};

#define KNOWN_MAX 4u

/* What its ranks have registered (job/regcache.h). */
struct regcache_entry {
	uint8_t *bytes; /* owned, as all in one piece */
	size_t n_bytes;
	uint32_t *ids; /* of the units, in the order of the request */
	uint32_t n;
};

struct regcache {
	struct regcache_entry all[KNOWN_MAX];
	unsigned next;    /* to be replaced */
	uint64_t changes; /* how often something was kept or dropped */
};

/* The copy of the state that a loss is rolled back to (job/kept.h). */
struct job_kept {
	struct kept *run; /* to or from it; owned; NULL: none */
	bool wanted;      /* somebody waits for memory to make it */
	bool without;     /* there is none: its units come from a daemon that kept none */
	bool asks_torn;   /* once it is rolled back: is it known at which step (job_tear)? */
};

/* Memory of a copy of buffers: of the host, which the device of a node without GPUs gives. */
struct bufcopy_memory {
	struct slab *slab; /* owned ref; NULL: @staged, or none */
	void *staged;      /* owned: staging (job/staging.h), beside GPUs */
	uint64_t bytes;
};

/* Copies of its units' buffers (job/bufcopy.h). */
struct bufcopies {
	struct bufcopy *last; /* of the last commit, or as left; owned ref; NULL: none */
	struct bufcopy *next; /* being made, or of a Commit that has not taken effect; owned ref */
	struct bufcopy_memory spare; /* of a former one, or none */
	bool runs;                   /* @next is being made */
	bool lacks;                  /* there was no memory for the last one that was tried */
	struct condition made;
};

/* Its checkpoints. */
struct job_checkpoints {
	struct saving *saving;   /* the last one that was made (job/saving.h); owned; NULL: none */
	struct saving *memory;   /* one into memory (job/replica.h); owned; NULL: none */
	struct loading *loading; /* one becomes its state (job/loading.h); owned; NULL: none */
	bool reads;              /* LOADING: its memory is being written */
	struct bufcopies buffers;
	/* Of the policy: when the last one was begun, by it or by a call; or since when it counts. */
	uint64_t step, us;
};

/* It changes its number of ranks by itself (job/elastic.h). */
struct job_elastic {
	struct list newcomers;     /* in the order in which they came */
	uint64_t since_us;         /* when the last rank or newcomer came that others wait for */
	uint32_t waits;            /* newcomers that were, since all were there or it was resized */
	unsigned failures;         /* tries in a row that failed */
	char why[200];             /* the last of them; "": none */
	struct elastic_turn *turn; /* in the loop queue; NULL: none */
};

/* A job over several nodes (docs/nodes.md). */
struct job_across {
	struct span *span;  /* where its ranks are; owned; NULL: all on this node */
	struct list line;   /* what spans nodes and was started (job/line.h) */
	struct list writes; /* of parameters, by single ranks (job/across_write.h) */
	uint64_t n_writes;  /* that ranks here have asked for in this epoch */
	struct unit_turns
		replaced; /* the largest of units whose numbers are used again, in this epoch */
	/* By rank: of those of other nodes that have left in this epoch, the process; else 0. Owned; NULL:
	 * none has. */
	int *left;
	bool elastic;         /* it changes its number of ranks, some of which are on other nodes */
	struct list replicas; /* of parts of its state (job/replica.h) */
	char replica_why[200]; /* why the last ones were not made; "": they were */
};

/* What of it is not in the journal yet (job/job_journal.h). */
struct job_unsaved {
	uint8_t parts;   /* enum job_journal_part */
	uint32_t *slabs; /* owned: numbers of those that the journal has, in order */
	uint32_t n_slabs;
	uint32_t *pooled_gone; /* owned: numbers of slabs of pools that it has still */
	uint32_t n_pooled_gone, pooled_gone_room;
	struct list link; /* jobs->unsaved, while there are such parts */
};

/* Numbers of units that were dropped, the oldest first. The oldest are used again when there are more
 * than JOB_DROPPED_KEPT, so that a job may register and drop as often as it likes. */
#define JOB_DROPPED_KEPT 1024u
struct job_dropped {
	uint32_t *numbers;
	uint32_t n, room;
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
	struct job_dropped dropped;
	struct htab unit_names;
	struct list registrations;      /* rpc's: in progress; the first one is active */
	struct regcache knowns;         /* what was registered, as it came */
	struct ddp *ddps[JOB_MAX_DDPS]; /* by id - 1, owned; NULL: none */
	struct job_memory mem;
	struct job_copies copies;
	struct job_step step;
	struct readers readers;        /* sessions that are no rank */
	struct generation *generation; /* open (job/generation.h); NULL: none */
	struct job_kept kept;
	struct job_checkpoints checkpoints;
	struct job_elastic elastic;
	struct job_across across;

	struct list waiting_tasks; /* on devices, for streams of trainers; owned by op/ */
	/* Collectives and casts in the backend or engine. The loop's; the thread that writes a checkpoint
	 * reads it. */
	_Atomic uint32_t running;
	struct job_ops_seen ops;
	struct job_unsaved unsaved;
	struct condition settled; /* signalled by job_settle: ops of an earlier epoch may be over */
	struct list link;         /* jobs->all or jobs->zombies */
};

/* New jobs are refused. */
struct jobs_cordon {
	bool on;
	uint32_t uid; /* of the administrator who has said so */
	uint64_t unix_s;
};

/* Of the publications of all jobs, so far. */
struct jobs_published {
	uint64_t layouts; /* assembly.layout */
	uint64_t next;    /* those that have ended gave smaller numbers to their generations */
};

struct jobs {
	struct node *node; /* borrowed */
	struct job_ops ops;
	struct htab names; /* by label */
	struct list all;
	struct list zombies;
	struct work ends; /* zombies of which nothing runs any more go, from the loop queue */
	bool ends_posted;
	uint32_t count;
	uint32_t last_number;    /* of a job */
	struct journal *journal; /* borrowed; NULL: nothing outlives the daemon */
	bool keeper_lost;        /* nor does anything then, though the journal is written */
	struct redo *redo;       /* borrowed; NULL: a successor cannot complete steps */
	/* Do a part of a predecessor's task. @ret_left: there is more. Return: 0 or a fault code. */
	int (*redo_some)(struct jobs *jobs, uint64_t number, bool *ret_left, struct fault *f);
	/* In place of it on devices: the whole task, to be run as one of this process (redo_take). */
	int (*redo_take)(struct jobs *jobs, uint64_t number, struct redo_task **ret,
			 struct launch **ret_launches, struct fault *f);
	void *redo_arg;
	struct list unsaved; /* jobs with parts that are not in it yet */
	bool draining;       /* no new jobs and trainers */
	struct jobs_cordon cordon;
	struct jobs_published published;
};

/* A rank has let go of @u, or a copy of it was made: what waits for that goes on. */
static inline void job_unit_released(struct job *job, struct unit *u)
{
	if (job->jobs->ops.unit_released)
		job->jobs->ops.unit_released(job, u);
}

/* The owner of work on a device. */
static inline struct backend_owner job_as_owner(const struct job *job)
{
	return (struct backend_owner){ .user = job->rec->uid,
				       .job = job->number,
				       .weight = job->owner.user->worker_weight };
}

/* How memory of the job reaches its trainers. */
static inline enum backend_share job_share(const struct job *job)
{
	return job->rec->ipc ? BACKEND_SHARE_IPC : BACKEND_SHARE_FD;
}

/* By id. Return: NULL if there is none. */
static inline struct group *job_group_by_id(struct job *job, uint32_t id)
{
	return id < job->n_groups ? job->groups[id] : NULL;
}

/* The same, also of one that was dropped. */
static inline struct unit *job_unit_by_number(struct job *job, uint32_t id)
{
	return id && id <= job->n_units ? job->units[id - 1] : NULL;
}

/* The same; nor if it was dropped. */
static inline struct unit *job_unit_by_id(struct job *job, uint32_t id)
{
	struct unit *u = job_unit_by_number(job, id);

	return u && !u->rec->dropped ? u : NULL;
}

#endif
