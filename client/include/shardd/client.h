/*
 * A client: its connection, its job and rank, its units, the waits for its ops, and its device
 * memory. Part of shardd/shardd.h, which includes it and describes what holds for all calls.
 */
#ifndef SHARDD_CLIENT_H
#define SHARDD_CLIENT_H

#include "shardd/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------- connection */

/* The version of the library, "major.minor.patch". Static string. Any thread. */
SHARDD_API const char *shardd_version(void);

/* How this process receives memory. */
enum shardd_handover {
	SHARDD_HANDOVER_FD = 1,  /* descriptors over the local channel */
	SHARDD_HANDOVER_IPC = 2, /* GPUs: CUDA IPC handles in the replies; no local channel.
				  * The job must have been made by such a trainer. */
};

/* What happens to a connection after the daemon has ended. */
enum shardd_connection_state {
	SHARDD_CONNECTION_LOST = 1,     /* it has broken; the library connects again */
	SHARDD_CONNECTION_RETRYING = 2, /* nobody answers yet; at most once a second */
	SHARDD_CONNECTION_BACK = 3,     /* connected again: join again */
	SHARDD_CONNECTION_GIVEN_UP = 4, /* for good: close the client */
};

struct shardd_connection_event {
	size_t size; /* sizeof(struct shardd_connection_event) */
	enum shardd_connection_state state;
	uint32_t attempt;    /* attempts to connect so far */
	uint32_t elapsed_ms; /* since the loss was found */
	const char *text;    /* a sentence; valid during the call */
};

#define SHARDD_NO_RECONNECT UINT32_MAX

struct shardd_options {
	size_t size;                   /* sizeof(struct shardd_options) */
	const char *socket;            /* NULL: $SHARDD_SOCKET, else /run/shardd/shardd.sock */
	const char *name;              /* shown in status; NULL: the program's name */
	uint32_t connect_timeout_ms;   /* how long to retry while no daemon listens; 0: 5000 */
	enum shardd_handover handover; /* 0: FD */
	/* The device on which this process computes: a GPU's UUID ("GPU-...") or a device's id
	 * ("host:0"). NULL: $SHARDD_DEVICE, else the GPU of the calling thread's current
	 * CUDA context, if it has one; else the daemon chooses. Borrowed during the call. */
	const char *device;
	/* Called by a thread that waits for a ticket, after @stall_ms and then every @stall_ms,
	 * with a sentence that names the op (of shardd_wait_any, the first) and, if the daemon
	 * tells it within 2 s, the rank that holds it up (shardd_blame). It may call
	 * shardd_cancel, shardd_interrupt and shardd_get_info, no other function. NULL: none. */
	void (*on_stall)(void *stall_data, uint64_t ticket, const char *text);
	void *stall_data;
	uint32_t stall_ms; /* with @on_stall: above 0 */
	/* How long to connect again when the daemon ends and its jobs outlive it (shardd-holder,
	 * systemd): 0: $SHARDD_RECONNECT_MS (0 there: not at all), else 60000;
	 * SHARDD_NO_RECONNECT: not at all. All calls and waits last until then. An op that was not
	 * answered ends with ABORTED, not before the process is connected again: the daemon may
	 * still read its gradients to finish a step. Join again after it. Memory that is mapped
	 * stays mapped at its addresses. A daemon that has lost its state gives DATA_LOSS. Not on
	 * GPUs, with SHARDD_HANDOVER_IPC and with SHARDD_DEBUG=1: there, the loss of the connection
	 * is UNAVAILABLE, and the client is of no more use. */
	uint32_t reconnect_ms;
	/* Called by a thread of the library when the state of the connection changes. It may call
	 * shardd_interrupt, no other function of this client. NULL: none. */
	void (*on_connection)(void *connection_data, const struct shardd_connection_event *event);
	void *connection_data;
};

/* Connect and open a session. Blocks at most twice the connect timeout, plus 10 s for the local
 * channel that hands over memory.
 * @options: borrowed; NULL: all defaults. @ret: belongs to the caller; end it with shardd_close.
 * The first call of a process writes the names of unknown SHARDD_ variables to standard error.
 * With SHARDD_DEBUG=1 in the environment a use of memory after it was given back ends the process
 * with a sentence (docs/debugging.md); the first such call sets a handler for SIGSEGV, which calls
 * the one that was set before.
 * Errors: UNAVAILABLE (no daemon listens; or the daemon closed the connection, as it
 * does when it does not admit this uid or gid), PERMISSION_DENIED (the socket's mode),
 * INVALID_ARGUMENT. Any thread. */
SHARDD_API int shardd_connect(const struct shardd_options *options, shardd_client **ret,
			      struct shardd_error *err);

/* End the session. The daemon drops all it holds for it, and every pointer that was handed out
 * becomes invalid. A rank that has not left counts as dead. NULL is allowed.
 * Blocks briefly. On a GPU it blocks up to 10 s while streams wait for the daemon or have not
 * reached the point where an op was submitted; memory that they still use then stays mapped until
 * the process ends. No other thread may use the client during the call. */
SHARDD_API void shardd_close(shardd_client *c);

/* The device with this rank's memory. */
struct shardd_device {
	char id[32];      /* host:0, cuda:0 */
	char backend[16]; /* host, cuda */
	char uuid[48];    /* GPU-...; empty for the host */
	bool streams;     /* shardd_set_stream is supported */
};

/* What a client is connected to. */
struct shardd_info {
	size_t size; /* sizeof(struct shardd_info) */
	uint64_t session;
	const char *daemon_version; /* valid until shardd_close, as @instance */
	/* The identifier of this run of the daemon, 32 hexadecimal digits. A daemon that goes on
	 * with the state of an earlier one has its identifier; another one has no such state. */
	const char *instance;
	uint64_t daemon_started; /* when the run started, in seconds since 1970 */
	/* The job or the daemon has been asked to drain: commit and leave. As of the last answered
	 * op. */
	bool draining;
	struct shardd_device device; /* @id "" before the first join */
};

/* @ret: the caller sets @ret->size; fields that this library does not know become 0. Errors:
 * INVALID_ARGUMENT. Never blocks. Any thread. */
SHARDD_API int shardd_get_info(const shardd_client *c, struct shardd_info *ret,
			       struct shardd_error *err);

/* The status of the daemon, its devices, jobs with their units and ranks, and sessions, as one
 * JSON document: the one that `shardctl --json status` prints. @job: only this job; NULL: all
 * jobs that this uid may see. @ret: the caller frees it with free(). Errors: NOT_FOUND (no such
 * job). Blocks until the daemon has answered. Any thread. */
SHARDD_API int shardd_status(shardd_client *c, const char *job, char **ret,
			     struct shardd_error *err);

/* What holds up the ranks of the job that this client has joined, on all nodes: one sentence, that
 * of `shardctl blame`, to @ret (1,024 bytes are enough, a longer sentence is cut); "" if no rank
 * waits for another one. Errors: INVALID_ARGUMENT, FAILED_PRECONDITION (no job),
 * DEADLINE_EXCEEDED, UNAVAILABLE. Blocks for 2 s at most. Any thread. */
SHARDD_API int shardd_blame(shardd_client *c, char *ret, size_t bytes, struct shardd_error *err);

/* --------------------------------------------------------- jobs and ranks */

enum shardd_lifetime {
	SHARDD_EPHEMERAL = 1, /* freed when its last trainer leaves cleanly */
	SHARDD_KEEP = 2,      /* kept until it is deleted, or for ttl_s after its last trainer */
	/* A base: one rank loads frozen parameters and commits. From then on they are only read,
	 * and the job is kept until it is deleted, or for ttl_s after a process had it mapped. */
	SHARDD_BASE = 3,
};

/* What the job goes on from after a rank was lost. The job's first trainer decides. */
enum shardd_resume {
	/* The last applied step; torn, if nobody knows which one it is. Of units with an optimizer
	 * in backward, or of the trainers' own, the job keeps a copy while some have made a step
	 * and others not: their parameters and optimizer state need as much memory again. */
	SHARDD_RESUME_APPLIED = 1,
	SHARDD_RESUME_COMMITTED = 2, /* the last commit, of which the job keeps a copy: parameters
				      * and optimizer state need as much memory again */
	SHARDD_RESUME_NO_COPY = 3    /* as APPLIED, without a copy: torn also by a loss in the
				      * middle of such a step */
};

/* What to do if the job has state: a commit, or units with parameters. State of the same run is
 * continued from in any case, as is that of trainers that are in the job while a run is not
 * known. */
enum shardd_on_existing {
	SHARDD_RESUME = 1,            /* continue from that state */
	SHARDD_ERROR_IF_EXISTING = 2, /* FAILED_PRECONDITION, with a description of that state, or
				       * of trainers of another run that are in the job */
	SHARDD_FRESH = 3 /* delete the job and create it; FAILED_PRECONDITION if it has trainers */
};

/* When the daemon makes checkpoints of a job by itself: at a commit that is due by every_steps or
 * every_s (docs/checkpoints.md). */
struct shardd_checkpoints {
	size_t size;      /* sizeof(struct shardd_checkpoints) */
	const char *path; /* absolute, below one of the daemon's checkpoint_roots; it exists */
	uint64_t
		every_steps; /* at the first commit in each such number of steps; 0: not by steps */
	uint64_t every_s;    /* seconds after the last one was begun; 0: not by time */
	uint32_t keep;       /* how many of the newest stay when one is made; 0: all */
	uint64_t bytes_per_s; /* how fast they are written at most; 0: as fast as the disk is */
};

struct shardd_job {
	size_t size;         /* sizeof(struct shardd_job) */
	const char *name;    /* 1 to 64 of [A-Za-z0-9._-], this user's; root and the daemon's
					* user: UID/NAME is another user's; NULL: $SHARDD_JOB */
	uint32_t world_size; /* 0: $WORLD_SIZE */
	uint32_t rank;       /* SHARDD_RANK_FROM_ENV: $RANK */
	enum shardd_lifetime lifetime; /* 0: unchanged; of a new job: EPHEMERAL */
	uint64_t quota_bytes;          /* 0: the daemon's default */
	uint32_t ttl_s;                /* up to its max_job_ttl_s; 0: the daemon's default */
	uint32_t op_timeout_ms;        /* default deadline of an op; 0: the daemon's default */
	bool allow_torn; /* continue though nobody knows which step the parameters are of */
	bool is_private; /* closed to other users, including root and the daemon's uid */
	enum shardd_on_existing on_existing; /* 0: SHARDD_RESUME */
	/* Identifier of the launcher's run, up to 64 printable ASCII characters: the same for all
	 * ranks and for trainers that it starts again. NULL: not known. Borrowed during the
	 * call. */
	const char *run;
	enum shardd_resume resume; /* 0: unchanged; of a new job: APPLIED */
	/* Both or neither: an elastic job. Ranks that join with another world_size between these
	 * give the job that size, if none of the former size is in it; its state stays. 0: of
	 * $SHARDD_JOB $SHARDD_MIN_RANKS and $SHARDD_MAX_RANKS, if they are set; else unchanged, and
	 * a new job is not elastic. */
	uint32_t min_ranks, max_ranks;
	/* An elastic job changes its number of ranks by itself. When ranks do not come back for so
	 * long, those that have joined again go on without them, in the same processes; a process
	 * with a rank that the job does not have, up to @max_ranks - 1, waits in shardd_join and is
	 * taken in at a commit. Then ops are ABORTED, and shardd_join says which rank of how many
	 * this process is now. All ranks give the same. 0: the job keeps its size; where @max_ranks
	 * is 0, too: of $SHARDD_JOB $SHARDD_JOIN_GRACE_MS, else unchanged. */
	uint32_t join_grace_ms;
	/* The same on all ranks; FAILED_PRECONDITION: another one than the job was created with.
	 * NULL: as the job has it; a new one has none. Borrowed during the call. */
	const struct shardd_checkpoints *checkpoints;
	/* The number of this process among the ranks of the job on this machine, and how many these
	 * are: for the choice of a device, and to learn at once that the daemon cannot reach the
	 * other ones. 0, 0: $LOCAL_RANK and $LOCAL_WORLD_SIZE, where both @world_size and @rank are
	 * of the environment, too; else not known. */
	uint32_t local_rank, local_world_size;
	/* In the line for memory a job is before those with a lower priority: -100 to 100, up to
	 * the limit that the administrator has set (0 by default). 0: of $SHARDD_JOB
	 * $SHARDD_PRIORITY, if it is set; else unchanged; of a new job: 0. */
	int32_t priority;
	/* How long shardd_register may wait in that line for memory that is not there. 0: of
	 * $SHARDD_JOB $SHARDD_WAIT_FOR_MEMORY_MS, if it is set; else unchanged, and in a new job it
	 * is RESOURCE_EXHAUSTED at once. */
	uint32_t wait_for_memory_ms;
};

#define SHARDD_RANK_FROM_ENV UINT32_MAX
#define SHARDD_MAX_BLOB      65536u

struct shardd_membership {
	uint64_t epoch; /* grows whenever the membership changes */
	/* With @join_grace_ms, these may be others than in struct shardd_job. They change with a
	 * join only. */
	uint32_t world_size, rank;
	bool resumed;    /* the job has state from before this join */
	bool has_commit; /* committed_step is valid, and step and blob are */
	bool torn; /* parameters were changed after the last commit, nobody knows to which step */
	uint64_t step;    /* of the parameters: continue after it; with @torn, the last commit's */
	const void *blob; /* this rank's last blob; valid until the next join or close */
	size_t blob_bytes;
	bool created;  /* this join created the job */
	bool has_step; /* step and blob are valid: of a commit, or of a step that had a number */
	uint64_t committed_step; /* at most @step */
	uint64_t blob_step;      /* that @blob belongs to. Below @step: later steps had no blob */
};

/* Join a job as a rank; the job is created if it does not exist. After ABORTED, call this again
 * on the same client, with the same @job: the daemon drops what the session held, op numbers
 * start again at 1, and unit ids stay. If the job has as many ranks as before, mapped addresses
 * stay, too; else register all units again and use the addresses that ops give from then on.
 * Blocks until ops of an earlier epoch have ended, and for a rank that the job does not have yet
 * until it has it (@join_grace_ms). Where the daemon is in a cluster, blocks until all ranks of
 * the job have joined, on whichever nodes; `shardctl status` says which have not. Other threads'
 * ops wait for it. @ret: may be NULL. A torn job can be joined (@ret says so): initialise all its
 * units and start again, because @step and @blob belong to parameters that no longer exist. A
 * program with state of its own compares @blob_step with @step.
 * Errors: INVALID_ARGUMENT (name, rank, world size; the ranks of a node do not follow each
 * other), FAILED_PRECONDITION (the job exists with another world size, lifetime or quota, or with
 * state that @job->on_existing refuses; the rank is taken; by @local_world_size there are ranks on
 * other machines, and the daemon is in no cluster), UNAVAILABLE (the job or the daemon drains),
 * PERMISSION_DENIED (another uid's private job), NOT_FOUND (UID/NAME), RESOURCE_EXHAUSTED.
 * DATA_LOSS: the job's state was in an earlier run of the daemon. Either $SHARDD_INSTANCE names
 * that run (as shardd_instance; launchers set it for trainers that they restart), or this process
 * joined the job there and has not left it. No job is created and nothing starts again at step 0.
 * SHARDD_INSTANCE=any turns this check off. Any thread. */
SHARDD_API int shardd_join(shardd_client *c, const struct shardd_job *job,
			   struct shardd_membership *ret, struct shardd_error *err);

/* Leave cleanly. Ops of this session must be done; it waits for those that were detached, and
 * returns CANCELLED with native EINTR if shardd_interrupt ends that wait: call it again. Blocks
 * until the daemon has answered. Any thread. */
SHARDD_API int shardd_leave(shardd_client *c, struct shardd_error *err);

/* What was loaded. */
struct shardd_loaded {
	size_t size;               /* sizeof(struct shardd_loaded) */
	uint64_t step;             /* of the checkpoint, and the job's last commit now */
	uint64_t bytes;            /* of all tensors, buffers and blobs */
	uint32_t world_size;       /* of the job that was saved */
	uint32_t blobs_left_out;   /* of ranks that this job does not have */
	uint32_t buffers_left_out; /* the same of buffers */
	/* The checkpoint has no buffers: so many buffers of the job's units are as they were. */
	uint32_t buffers_missing;
};

/* Load a checkpoint that the daemon has saved into @job (NULL: $SHARDD_JOB), whose units are
 * registered and which has no step of its own. One process calls it, a rank or not.
 * @path: the folder of checkpoints, absolute, below the daemon's checkpoint_roots. @step: which
 * one; NULL: the newest. The job then has the commit of the checkpoint, with buffers and blobs of
 * its ranks, and the epoch has ended: all ranks, this one too, join again. World size, layout and
 * strategy may differ from the job that was saved; a rank that it did not have gets the buffers of
 * its first one. @ret: with its size set; may be NULL. Blocks for the
 * disk. Return: 0 or a negative code; FAILED_PRECONDITION: the job has state of its own, or the
 * checkpoint has other units; DATA_LOSS: it is damaged: then the units have to be initialised. */
SHARDD_API int shardd_load_checkpoint(shardd_client *c, const char *job, const char *path,
				      const uint64_t *step, struct shardd_loaded *ret,
				      struct shardd_error *err);

/* Create the group @name with exactly these ranks in this order, or find it. Every
 * member calls this; it does not wait for the others. Blocks until the daemon has
 * answered. Any thread. */
SHARDD_API int shardd_group_create(shardd_client *c, const char *name, const uint32_t *ranks,
				   size_t n, shardd_group *ret, struct shardd_error *err);

/* ------------------------------------------------------------------- units */

enum shardd_init { SHARDD_INIT_CONSTANT = 1, SHARDD_INIT_UNIFORM = 2, SHARDD_INIT_NORMAL = 3 };

struct shardd_tensor {
	const char *name;      /* unique in its unit, up to 255 printable bytes */
	const uint64_t *shape; /* row-major */
	uint32_t dims;         /* 0: a scalar */
	enum shardd_init init; /* for shardd_init_seed; 0: constant 0 */
	double a, b;           /* CONSTANT a; UNIFORM [a,b); NORMAL mean a, deviation b */
	bool frozen;           /* no gradient, no optimizer; laid out apart from the others */
	/* The tensor of the same shape that this is another name of. It was registered before, or
	 * comes earlier in the same call, in unit @alias_unit (NULL: this unit). NULL: no alias. */
	const char *alias_of;
	const char *alias_unit;
	/* Instead of the unit's values, for example for biases. */
	bool has_weight_decay;
	double weight_decay;
	bool has_lr_factor;
	double lr_factor; /* multiplies the learning rate */
	/* Distance in elements from one index of a dimension to the next, @dims entries; NULL:
	 * row-major. Must be a permutation of dimensions without gaps (channels_last). The daemon
	 * keeps the elements in this order. */
	const uint64_t *strides;
};

enum shardd_buffer_dtype {
	SHARDD_BUFFER_FP32 = 1,
	SHARDD_BUFFER_BF16 = 2,
	SHARDD_BUFFER_FP16 = 3,
	SHARDD_BUFFER_FP64 = 4,
	SHARDD_BUFFER_INT64 = 5,
	SHARDD_BUFFER_INT32 = 6,
	SHARDD_BUFFER_UINT8 = 7, /* and bool */
};

/* A tensor that is not a parameter (running statistics): every rank has its own, unsharded. */
struct shardd_buffer {
	const char *name;               /* unique among the unit's tensors and buffers */
	const uint64_t *shape;          /* row-major */
	uint32_t dims;                  /* 0: a scalar */
	enum shardd_buffer_dtype dtype; /* 0: FP32 */
};

enum shardd_optimizer_kind { SHARDD_SGD = 1, SHARDD_ADAMW = 2, SHARDD_ADAM = 3 };

/* The arithmetic to match bitwise: PyTorch's on a CPU, or all in double, rounded at the stores. */
enum shardd_optimizer_profile {
	SHARDD_OPTIM_EAGER_SINGLE = 1,
	SHARDD_OPTIM_FOREACH = 2,
	SHARDD_OPTIM_FUSED = 3,
	SHARDD_OPTIM_REFERENCE_F64 = 4, /* ADAM, ADAMW */
};

enum shardd_optimizer_when {
	SHARDD_OPTIM_AT_STEP = 1, /* by shardd_step, on the gradient shard */
	/* by the unit's reduce or by the last of its buckets; this frees the gradient shard */
	SHARDD_OPTIM_IN_BACKWARD = 2,
	SHARDD_OPTIM_BY_TRAINER = 3, /* by the trainer's own, on a copy of its shard; kind is 0 */
};

/* A setting that the kind does not use and that is not 0 is refused. */
struct shardd_optimizer {
	enum shardd_optimizer_kind kind; /* 0: none, the unit takes no step */
	double lr;
	double weight_decay;
	double momentum; /* SGD */
	bool nesterov;   /* SGD */
	/* ADAM, ADAMW; all 0: 0.9, 0.999, 1e-8. Refused if some are 0, unless @complete is set. */
	double beta1, beta2, eps;
	enum shardd_optimizer_profile profile; /* 0: EAGER_SINGLE */
	enum shardd_optimizer_when when;       /* 0: AT_STEP */
	bool amsgrad;                          /* ADAM, ADAMW */
	bool maximize;
	bool complete;    /* ADAM, ADAMW: a beta1, beta2 or eps of 0 is meant; the macros set it */
	double dampening; /* SGD */
};

/* Initialisers with PyTorch's defaults; fields in the parentheses replace them:
 *	.optimizer = SHARDD_ADAMW_DEFAULTS(.lr = 3e-4, .eps = 1e-6)
 * C only: C++ cannot replace a field in an initialiser. */
#ifndef __cplusplus
#define SHARDD_ADAMW_DEFAULTS(...)                                                             \
	SHARDD_DEFAULTS_(.kind = SHARDD_ADAMW, .lr = 1e-3, .weight_decay = 1e-2, .beta1 = 0.9, \
			 .beta2 = 0.999, .eps = 1e-8, .complete = true, __VA_ARGS__)
#define SHARDD_ADAM_DEFAULTS(...)                                                       \
	SHARDD_DEFAULTS_(.kind = SHARDD_ADAM, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, \
			 .eps = 1e-8, .complete = true, __VA_ARGS__)
#define SHARDD_SGD_DEFAULTS(...) SHARDD_DEFAULTS_(.kind = SHARDD_SGD, .lr = 1e-3, __VA_ARGS__)
#define SHARDD_DEFAULTS_(...)                                                                 \
	__extension__({                                                                       \
		_Pragma("GCC diagnostic push") _Pragma(                                       \
			"GCC diagnostic ignored \"-Woverride-init\"") struct shardd_optimizer \
			shardd_defaults_ = { __VA_ARGS__ };                                   \
		_Pragma("GCC diagnostic pop") shardd_defaults_;                               \
	})
#endif

/* The order in which a gradient is cast, divided and added: docs/protocol.md. */
enum shardd_reduce_profile {
	SHARDD_PROFILE_FAIRSCALE = 1,
	SHARDD_PROFILE_XLA = 2,
	SHARDD_PROFILE_FSDP1_HOOK = 3, /* reduce_dtype BF16 or FP16: the compressing hooks */
	SHARDD_PROFILE_FSDP2 = 4,
	SHARDD_PROFILE_DDP = 5,
	SHARDD_PROFILE_DDP_HOOK = 6,        /* reduce_dtype BF16 or FP16: the compressing hooks */
	SHARDD_PROFILE_DDP_BUCKET_VIEW = 7, /* gradient_as_bucket_view */
};

/* How a gradient is divided by a factor that is not a power of two. 0: as PyTorch does on the
 * device, TRUE on a CPU, RECIPROCAL on a GPU (XLA's profile: TRUE on both). */
enum shardd_div_mode {
	SHARDD_DIV_TRUE = 1,       /* x / d */
	SHARDD_DIV_RECIPROCAL = 2, /* x * fp32(1 / d), with the inverse computed in fp64 */
};

/* A unit: parameters that are gathered and reduced together. FLAT: the flat
 * parameter is the row-major concatenation of the tensors in this order; rank r of W owns
 * elements [r*S, (r+1)*S), S = ceil(N/W) rounded up to a multiple of shard_multiple,
 * zero-padded at the end (fairscale's flat layout; m > 1: XLA's). DIM0: of every tensor rank r
 * owns rows [r*R, (r+1)*R), R = ceil(rows/W) (FSDP2's). Frozen tensors are laid out apart,
 * after the others. shardd_tensor_places returns the place of every tensor. */
struct shardd_unit_spec {
	size_t size;      /* sizeof(struct shardd_unit_spec) */
	const char *name; /* unique in the job, up to 255 printable bytes */
	const struct shardd_tensor *tensors;
	size_t n_tensors;
	shardd_group group;
	/* Type of the stored parameters; 0: FP32. BF16, FP16: the daemon steps FP32 only, so the
	 * optimizer is none or SHARDD_OPTIM_BY_TRAINER. Gradient shards are FP32 in any case. */
	enum shardd_dtype storage_dtype;
	enum shardd_dtype compute_dtype;  /* type of gathered parameters; 0: storage_dtype */
	enum shardd_dtype gradient_dtype; /* type of the gradient buffer; 0: compute_dtype */
	uint32_t shard_multiple;          /* 0: 1; with profile XLA and FLAT 128 */
	double pre_divide, post_divide;   /* of gradients; both 0: fairscale's factors for W */
	struct shardd_optimizer optimizer;
	enum shardd_layout layout;                 /* 0: FLAT */
	enum shardd_strategy strategy;             /* 0: SHARD */
	uint32_t shard_ranks;                      /* HYBRID: a divisor of the group's size */
	enum shardd_dtype reduce_dtype;            /* type of the sum; 0: the profile's */
	enum shardd_reduce_profile reduce_profile; /* 0: FAIRSCALE */
	double divide_factor;                      /* FSDP2: the user's factor; 0: none */
	bool force_sum;                            /* FSDP2: sum, never AVG */
	const struct shardd_buffer *buffers;
	size_t n_buffers;
	enum shardd_reshard reshard; /* 0: AFTER_FORWARD */
	bool guarded;                /* its ops are checked against the passes */
	enum shardd_div_mode div_mode;
};

struct shardd_unit_info {
	shardd_unit unit;        /* the unit's id in every op */
	uint64_t elements;       /* N */
	uint64_t shard_elements; /* S */
	bool initialised;        /* the unit has parameters from before */
	uint64_t optimizer_steps;
	uint64_t gradient_elements; /* of a gradient buffer: trained tensors; 0: there are none */
	uint64_t packed_elements;   /* of init's buffer: all tensors, without padding */
};

/* The place of a tensor, in elements, in the memory of gather and summon and, if it is trained,
 * in a gradient buffer. An alias has the place of its tensor. */
struct shardd_tensor_place {
	shardd_unit unit; /* of an alias, possibly another unit */
	uint64_t offset;
	uint64_t elements;
	uint64_t shard_offset;   /* in this rank's shard: trained tensors, then frozen ones */
	uint64_t shard_elements; /* how many of the tensor this rank owns; contiguous */
};

/* The place of a buffer in the memory of shardd_unit_buffers, in bytes. */
struct shardd_buffer_place {
	uint64_t offset;
	uint64_t bytes;
};

/* Register a whole model in one call: all units or none. Every rank registers the
 * same units; FAILED_PRECONDITION names the first difference. Existing units are
 * found. @ret: @n entries, in the order given.
 * Errors: INVALID_ARGUMENT (which field, which value), RESOURCE_EXHAUSTED. Blocks until
 * the daemon has answered. Any thread. */
SHARDD_API int shardd_register(shardd_client *c, const struct shardd_unit_spec *units, size_t n,
			       struct shardd_unit_info *ret, struct shardd_error *err);

/* The places of a unit's tensors and buffers, as of this client's last registration or
 * conversion of the unit. @ret: @n entries, one for each tensor (buffer) of its spec, in their
 * order. Errors: NOT_FOUND (not registered by this client), INVALID_ARGUMENT (@n). Never
 * blocks. Any thread. */
SHARDD_API int shardd_tensor_places(shardd_client *c, shardd_unit u,
				    struct shardd_tensor_place *ret, size_t n,
				    struct shardd_error *err);
SHARDD_API int shardd_buffer_places(shardd_client *c, shardd_unit u,
				    struct shardd_buffer_place *ret, size_t n,
				    struct shardd_error *err);

/* --------------------------------------------------------------- ops */

/* The result of an op. Pointers are valid until the op's memory is given back
 * (release, reduce, free) or the session ends. */
struct shardd_result {
	/* gather, begin_pass: read-only; gradient, alloc, summon, buffers: writable */
	void *data;
	uint64_t bytes;      /* of data */
	uint64_t buffer;     /* alloc: the buffer's id */
	double total_norm;   /* clip_grad_norm: before clipping */
	uint32_t references; /* gather, release: this session's, after the op */
	bool copied;         /* gather: this call made a cast copy */
	uint64_t number;     /* collectives: position in the group's order */
	uint64_t waited_us;  /* in the daemon: for order and for peers */
	uint64_t ran_us;
	bool kept;                /* end_pass: the policy keeps the unit gathered */
	bool found_inf;           /* unscale, step */
	bool skipped;             /* step; reduce: unused by all */
	bool has_total_norm;      /* step: the plan has a clip; total_norm is its norm */
	shardd_unit unit;         /* next_shard: whose shard data is */
	uint64_t elements;        /* next_shard: of parameters, and of gradient */
	uint64_t gradient_offset; /* next_shard: bytes from data to the gradient */
	uint64_t optimizer_steps; /* summon: how many the unit has had */
	uint32_t ddp;             /* ddp_create: its id */
	uint32_t tensors;         /* ddp_create: how many it has */
	uint32_t last;            /* join_uneven: the rank that joined last */
	uint64_t surrogates;  /* join_uneven: collectives in which the daemon replaced this rank */
	uint64_t reserved[8]; /* 0 */
};

/* Wait for an op, at most @timeout_ms (-1: until the op's own deadline). Return: 0 or a negative
 * code; DEADLINE_EXCEEDED with native EAGAIN means that only the wait ended: the op continues and
 * the ticket stays valid; so does CANCELLED with native EINTR (shardd_interrupt). Errors besides
 * those of the op: INVALID_ARGUMENT with native EBADF (no such ticket), FAILED_PRECONDITION
 * (another thread waits for it). Any thread. */
SHARDD_API int shardd_wait(shardd_client *c, shardd_ticket t, int timeout_ms,
			   struct shardd_result *ret, struct shardd_error *err);

/* Wait until one of @n ops has ended, whether it succeeded or failed, at most @timeout_ms (-1:
 * until the deadline of one of them). Tickets that are 0 are left out. @ret: the index of a ticket
 * whose op has ended; of several the first. The ticket stays: shardd_wait then returns the result
 * and ends the ticket; it blocks only to map memory that this process has not mapped before.
 * Errors: those of a wait that only ends itself, as shardd_wait has them; INVALID_ARGUMENT (no
 * ticket is given; with native EBADF: no such ticket), FAILED_PRECONDITION (a thread is waiting
 * for one of them already, or it is given twice), RESOURCE_EXHAUSTED (the library starts a thread
 * for a list of which some ops are in the ring and others were sent over gRPC, and cannot). Any
 * thread. */
SHARDD_API int shardd_wait_any(shardd_client *c, const shardd_ticket *tickets, size_t n,
			       int timeout_ms, size_t *ret, struct shardd_error *err);

/* A descriptor for poll, epoll, libuv and the like: readable when an op of this session may have
 * ended since it was last drained. Drain it, then look:
 *	uint64_t n;
 *	read(fd, &n, sizeof(n));
 *	while (shardd_wait_any(c, tickets, n_tickets, 0, &i, &err) == 0)
 *		... shardd_wait(c, tickets[i], -1, &result, &err), then tickets[i] = 0 ...
 * It is an eventfd, non-blocking. Level-triggered: it stays readable until it is read; one read
 * of 8 bytes drains it however many ops have ended. An op that ends after the read makes it
 * readable again, so none is missed if the read comes first. It is readable at first, and may be
 * so without news: ops count that another thread waited for, that were detached, that failed,
 * whose deadline has passed, or that the daemon will not answer because it is gone, and so do
 * calls that are not ops. @ret: the library's; do not close it or change its flags. Each call
 * returns the same descriptor; shardd_close closes it. The first call starts one thread, or two
 * with a ring, which take no signals; from then on a blocking wait costs one more switch of
 * threads. Errors: RESOURCE_EXHAUSTED (no descriptor, no thread). Any thread. */
SHARDD_API int shardd_completion_fd(shardd_client *c, int *ret, struct shardd_error *err);

/* Detach an op: its ticket has ended and needs no wait. What the op hands out stays held until it
 * is given back, and is not mapped. If the op fails, the failure is kept, and the next submission
 * or shardd_leave returns it instead of doing anything; call that again. shardd_join forgets
 * failures of the earlier epoch. Errors: those of shardd_wait for a ticket that does not exist or
 * that another thread waits for. Any thread. */
SHARDD_API int shardd_detach(shardd_client *c, shardd_ticket t, struct shardd_error *err);

/* Ask the daemon to cancel an op. The ticket stays: its wait returns CANCELLED, or the result of an
 * op that already ran. The peers of a cancelled collective get FAILED_PRECONDITION. Errors:
 * INVALID_ARGUMENT with native EBADF (no such ticket), FAILED_PRECONDITION (the op was sent over
 * gRPC: cancelling the call before the daemon has seen it would leave a gap in the order of the
 * session's ops; use a deadline, shardd_set_timeout). Needs no room in the ring: works with as
 * many ops under way as the session may have. Never blocks. Any thread, also while another one
 * waits for the ticket. */
SHARDD_API int shardd_cancel(shardd_client *c, shardd_ticket t, struct shardd_error *err);

/* End the waits for tickets that block now, in all threads, within 100 ms: they return CANCELLED
 * with native EINTR, and their ops continue. A blocking form (shardd/blocking.h) cancels its op
 * instead, or detaches it if it cannot be cancelled. If no wait blocks, the next one that would
 * block ends so. Does not end calls that are not ops, such as shardd_join. Async-signal-safe. Any
 * thread. */
SHARDD_API void shardd_interrupt(shardd_client *c);

/* Set the deadline of ops that are submitted on this client after this call; 0: the job's.
 * An op whose deadline passes ends with DEADLINE_EXCEEDED, also for its peers. Never
 * blocks. Any thread. */
SHARDD_API void shardd_set_timeout(shardd_client *c, uint32_t ms);

/* ------------------------------------------------------------ device memory */

/* Copy to or from memory that ops hand out; return when the copy is done. @dst (write) or @src
 * (read) is such a pointer. On the host it is ordinary memory. On a GPU it is a device address in
 * the current CUDA context or, if there is none, in the device's primary context, which the
 * library retains. If this thread has a stream (shardd_set_stream), the copy begins after the work
 * on it. Errors: INVALID_ARGUMENT (outside the memory that was handed out), INTERNAL (the device
 * refused). Any thread. */
enum shardd_direction { SHARDD_TO_DEVICE = 1, SHARDD_FROM_DEVICE = 2 };
SHARDD_API int shardd_copy(shardd_client *c, enum shardd_direction direction, void *dst,
			   const void *src, size_t bytes, struct shardd_error *err);

static inline int shardd_write(shardd_client *c, void *dst, const void *src, size_t bytes,
			       struct shardd_error *err)
{
	return shardd_copy(c, SHARDD_TO_DEVICE, dst, src, bytes, err);
}

static inline int shardd_read(shardd_client *c, void *dst, const void *src, size_t bytes,
			      struct shardd_error *err)
{
	return shardd_copy(c, SHARDD_FROM_DEVICE, dst, src, bytes, err);
}

/* GPUs: order the ops that this thread submits from now on with @stream (a CUstream or
 * cudaStream_t of the client's context; NULL is CUDA's default stream) instead of with the
 * CPU. An op begins on the device after the work that is on the stream when it is
 * submitted. The daemon answers when it has queued the op; shardd_wait returns
 * then. Work that is put on the stream later runs after the op, and the CPU does not wait for the
 * device. Results for the CPU (total_norm) are always exact.
 * The first op that names new memory waits for the streams, since memory cannot be mapped
 * while a stream waits for the daemon. If the device has no stream memory operations, a
 * submission waits while 16 earlier ones of its stream are unanswered.
 * Do not capture such a stream into a graph, and do not destroy it while ops are in progress.
 * An op whose stream does not reach it within the op's deadline ends this session.
 * Errors: FAILED_PRECONDITION (not joined, or the device has no streams),
 * INVALID_ARGUMENT (a stream of another context, or the per-thread default stream),
 * RESOURCE_EXHAUSTED (512 streams at most). May block at the first use of a stream. Any
 * thread.
 * SHARDD_NO_STREAM: order ops with the CPU again, so that an op is answered when it has been
 * executed. Never blocks, never fails. */
#define SHARDD_NO_STREAM ((void *)UINTPTR_MAX)
SHARDD_API int shardd_set_stream(shardd_client *c, void *stream, struct shardd_error *err);

/* ------------------------------------------------------------------- faults */

/* Tensors of a framework keep pointers into gathered parameters across release and gather. With a
 * region for each unit, a use of released memory and a write to gathered memory are explained: a
 * line on standard error names the parameter, and then the process ends by SIGSEGV as it would
 * without the region. */

/* A parameter in a unit's memory. */
struct shardd_region_part {
	const char *name;
	uint64_t offset, bytes;
};

/* For a program that turns a read of released memory into an error of its own. The handler of
 * SIGSEGV writes to it. It must live as long as its regions. */
struct shardd_region_fault {
	volatile int32_t
		expected; /* by the caller: the read gives zeros, and the process goes on */
	volatile int32_t happened; /* by the handler: since the caller has set it to 0 */
	char text[888];            /* of the first one since: the sentence, terminated */
};

struct shardd_region_options {
	size_t size; /* sizeof(struct shardd_region_options) */
	const char *unit;
	uint64_t bytes; /* of its gathered memory */
	const struct shardd_region_part *parts;
	size_t n_parts;
	struct shardd_region_fault *fault; /* NULL: every fault ends the process */
};

/* Reserve addresses, not memory, that stand for a unit's memory while it is released. @options:
 * names are copied. @ret_at: the first address, until the region ends. Each access to it faults.
 * The first call of a process installs a handler of SIGSEGV, which calls the earlier one. Errors:
 * INVALID_ARGUMENT, RESOURCE_EXHAUSTED (addresses). Never blocks. Any thread. */
typedef struct shardd_region shardd_region;
SHARDD_API int shardd_region_new(const struct shardd_region_options *options, shardd_region **ret,
				 void **ret_at, struct shardd_error *err);
enum shardd_region_state {
	SHARDD_REGION_RELEASED = 0, /* the addresses fault again, if they have given zeros */
	SHARDD_REGION_GATHERED = 1, /* the unit's memory is at @at */
	SHARDD_REGION_ENDED = 2,    /* gives the addresses back; @r is not valid any more */
};
/* @at: used with GATHERED only. @r NULL: nothing happens. Never blocks. One thread per region. */
SHARDD_API void shardd_region_set(shardd_region *r, enum shardd_region_state state, const void *at);

#ifdef __cplusplus
}
#endif

#endif
