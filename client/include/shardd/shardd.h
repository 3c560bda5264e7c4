/*
 * libshardd: a trainer's way to the shardd of its node.
 *
 * A client is one connection and one session. A trainer joins a job as a rank,
 * registers its units, and then, step by step, gathers full parameters, hands in
 * gradients and lets the daemon reduce them and step the optimizer. Memory is
 * mapped, never copied through the socket.
 *
 * Calls come in two forms. The plain form blocks until the op is done. The
 * _submit form returns at once with a ticket; ops run in submission order where
 * they touch the same unit, and beside each other where they do not. A ticket is
 * ended by one successful shardd_wait or a shardd_poll that says done.
 *
 * Threads: a client may be used by several threads at once; the order of ops is
 * the order in which their calls entered the library. shardd_close must be the
 * last call on a client. No function may be called in a child after fork without
 * exec: connect in the child instead.
 *
 * Errors: functions return 0 or a negative enum shardd_code. Where an argument
 * `struct shardd_error *err` is not NULL it is filled on failure. An op that is
 * refused, or ends before its peers have come, has changed nothing.
 *
 * Sizes are in bytes or elements as said; shapes are row-major.
 */
#ifndef SHARDD_SHARDD_H
#define SHARDD_SHARDD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SHARDD_API __attribute__((visibility("default")))

/* ------------------------------------------------------------------ errors */

/* Numbers are those of gRPC status codes. Functions return them negated. */
enum shardd_code {
	SHARDD_OK = 0,
	SHARDD_CANCELLED = 1,
	SHARDD_UNKNOWN = 2,
	SHARDD_INVALID_ARGUMENT = 3,  /* field, value, what is allowed: in the text */
	SHARDD_DEADLINE_EXCEEDED = 4, /* the text says what was waited for */
	SHARDD_NOT_FOUND = 5,
	SHARDD_ALREADY_EXISTS = 6,
	SHARDD_PERMISSION_DENIED = 7,
	SHARDD_RESOURCE_EXHAUSTED = 8,  /* the text says who holds what */
	SHARDD_FAILED_PRECONDITION = 9, /* the text says in which state things are */
	SHARDD_ABORTED = 10,            /* a peer died or left: shardd_join again */
	SHARDD_UNIMPLEMENTED = 12,
	SHARDD_INTERNAL = 13,
	SHARDD_UNAVAILABLE = 14, /* the daemon is gone or about to go */
	SHARDD_DATA_LOSS = 15,   /* the daemon was restarted: the job's state is gone */
};

struct shardd_error {
	int code;        /* enum shardd_code, positive */
	int native;      /* errno and the like, 0 where there is none */
	char domain[16]; /* shardd, os, cuda, nccl */
	char field[96];  /* INVALID_ARGUMENT: which message field */
	char text[512];  /* one sentence */
};

/* OK, ABORTED... @code positive or negative. Static string. Any thread. */
SHARDD_API const char *shardd_code_name(int code);

/* Library version, "major.minor.patch". Static string. Any thread. */
SHARDD_API const char *shardd_version(void);

/* -------------------------------------------------------------- connection */

typedef struct shardd_client shardd_client;

/* How memory comes to this process. */
enum shardd_handover {
	SHARDD_HANDOVER_FD = 1,  /* descriptors over the local channel */
	SHARDD_HANDOVER_IPC = 2, /* GPUs: CUDA IPC handles in the replies; no local channel.
				  * The job must have been made by such a trainer. */
};

struct shardd_options {
	size_t size;                   /* sizeof(struct shardd_options) */
	const char *socket;            /* NULL: $SHARDD_SOCKET, else /run/shardd/shardd.sock */
	const char *name;              /* shown in status; NULL: the program's name */
	uint32_t connect_timeout_ms;   /* how long to try while nobody listens; 0: 5000 */
	enum shardd_handover handover; /* 0: FD */
	/* The device this process computes on: a GPU's UUID ("GPU-...") or a device's id
	 * ("host:0"). NULL: $SHARDD_DEVICE, else the GPU of the calling thread's current
	 * CUDA context, if it has one; else the daemon chooses. Borrowed during the call. */
	const char *device;
};

/* Connect and attach a session. Blocks at most twice the connect timeout, and 10 s for
 * the channel by which memory comes.
 * @options: borrowed; NULL for all defaults. @ret: the caller's, shardd_close.
 * The first call of a process names SHARDD_ variables that nothing reads on standard error.
 * Errors: UNAVAILABLE (nobody listens; or the daemon closed the connection, as it
 * does when it does not admit this uid or gid), PERMISSION_DENIED (the socket's mode),
 * INVALID_ARGUMENT. Any thread. */
SHARDD_API int shardd_connect(const struct shardd_options *options, shardd_client **ret,
			      struct shardd_error *err);

/* End the session: the daemon drops all it holds for it; every pointer handed out
 * becomes invalid. A rank that has not left counts as died. NULL is allowed.
 * Blocks shortly; on a GPU up to 10 s while streams still wait for the daemon, or have not come
 * to where an op was submitted on them: what they use then stays mapped until the process ends.
 * No other thread may be using the client. */
SHARDD_API void shardd_close(shardd_client *c);

/* The daemon's version and this session's number. Any thread. */
SHARDD_API const char *shardd_daemon_version(const shardd_client *c);
SHARDD_API uint64_t shardd_session(const shardd_client *c);

/* This run of the daemon: 32 hexadecimal digits, valid until shardd_close; and when it started,
 * seconds since 1970. A daemon that is started again is another run, without any state of the
 * first. Any thread. */
SHARDD_API const char *shardd_instance(const shardd_client *c);
SHARDD_API uint64_t shardd_daemon_started(const shardd_client *c);

/* What the daemon says of itself, its devices, jobs with their units and ranks, and sessions:
 * one JSON document, the one that `shardctl --json status` prints. @job: only this one; NULL:
 * all that this uid may see. @ret: the caller's, free(). Errors: NOT_FOUND (no such job).
 * Blocks until the daemon has answered. Any thread. */
SHARDD_API int shardd_status(shardd_client *c, const char *job, char **ret,
			     struct shardd_error *err);

/* --------------------------------------------------------- jobs and ranks */

enum shardd_lifetime {
	SHARDD_EPHEMERAL = 1, /* freed when its last trainer leaves cleanly */
	SHARDD_KEEP = 2,      /* until deleted, or ttl_s after its last trainer */
};

struct shardd_job {
	size_t size;         /* sizeof(struct shardd_job) */
	const char *name;    /* 1 to 64 of [A-Za-z0-9._-], this user's; root and the daemon's
					* user: UID/NAME is another user's; NULL: $SHARDD_JOB */
	uint32_t world_size; /* 0: $WORLD_SIZE */
	uint32_t rank;       /* SHARDD_RANK_FROM_ENV: $RANK */
	enum shardd_lifetime lifetime; /* 0: as it is; a new job: EPHEMERAL */
	uint64_t quota_bytes;          /* 0: the daemon's default */
	uint32_t ttl_s;                /* up to its max_job_ttl_s; 0: the daemon's default */
	uint32_t op_timeout_ms;        /* default deadline of an op; 0: the daemon's default */
	bool allow_torn;               /* go on from a step that was applied but not committed */
	bool is_private; /* closed to other users, root and the daemon's uid among them */
};

#define SHARDD_RANK_FROM_ENV UINT32_MAX
#define SHARDD_MAX_BLOB      65536u

struct shardd_membership {
	uint64_t epoch; /* grows whenever the membership changes */
	uint32_t world_size;
	uint32_t rank;
	bool resumed;     /* the job has state from before */
	bool has_commit;  /* step and blob mean something */
	bool torn;        /* a step was applied after that commit */
	uint64_t step;    /* last committed step */
	const void *blob; /* this rank's, stored with it; valid until the next join or close */
	size_t blob_bytes;
	bool created; /* this join made the job */
};

/* Join a job as a rank; the job is made if it is not there. After ABORTED, call
 * it again on the same client: what the session held is dropped, op numbers start
 * anew, unit ids and mapped addresses stay. Blocks until what an earlier epoch still
 * runs has ended; other threads' ops wait for it. @ret: may be NULL. A job that is
 * torn can be joined (@ret says so): initialise all its units and begin anew, for @step
 * and @blob belong to parameters that are no more.
 * Errors: INVALID_ARGUMENT (name, rank, world size), FAILED_PRECONDITION (the job
 * is there with another world size, lifetime or quota; the rank is taken), UNAVAILABLE
 * (the job or the daemon drains), PERMISSION_DENIED (another uid's private job), NOT_FOUND
 * (UID/NAME), RESOURCE_EXHAUSTED.
 * DATA_LOSS: the job's state was in an earlier run of the daemon: $SHARDD_INSTANCE names that run
 * (as shardd_instance; launchers set it for trainers that they start again), or this process
 * joined the job there and has not left it. No job is made and nothing starts again at step 0.
 * SHARDD_INSTANCE=any turns this check off. Any thread. */
SHARDD_API int shardd_join(shardd_client *c, const struct shardd_job *job,
			   struct shardd_membership *ret, struct shardd_error *err);

/* Has the job or the daemon been asked to drain? Then commit and leave. Known as of
 * the last op that was answered. Never blocks. Any thread. */
SHARDD_API bool shardd_draining(const shardd_client *c);

/* The device on which this rank's memory is. */
struct shardd_device {
	char id[32];      /* host:0, cuda:0 */
	char backend[16]; /* host, cuda */
	char uuid[48];    /* GPU-...; empty for the host */
	bool streams;     /* shardd_set_stream may be used */
};

/* Return: 0, or FAILED_PRECONDITION before the first join. Never blocks. Any thread. */
SHARDD_API int shardd_get_device(const shardd_client *c, struct shardd_device *ret,
				 struct shardd_error *err);

/* Leave cleanly. Ops of this session must be done. Blocks until the daemon has
 * answered. Any thread. */
SHARDD_API int shardd_leave(shardd_client *c, struct shardd_error *err);

typedef uint32_t shardd_group;
#define SHARDD_WORLD ((shardd_group)0)

/* Make or find the group @name with exactly these ranks in this order. Every
 * member calls it; it does not wait for the others. Blocks until the daemon has
 * answered. Any thread. */
SHARDD_API int shardd_group_create(shardd_client *c, const char *name, const uint32_t *ranks,
				   size_t n, shardd_group *ret, struct shardd_error *err);

/* ------------------------------------------------------------------- units */

enum shardd_dtype { SHARDD_FP32 = 1, SHARDD_BF16 = 2, SHARDD_FP16 = 3 };

/* Bytes of an element; 0 if @dtype is none of the enum. Any thread. */
SHARDD_API size_t shardd_dtype_size(enum shardd_dtype dtype);

enum shardd_init { SHARDD_INIT_CONSTANT = 1, SHARDD_INIT_UNIFORM = 2, SHARDD_INIT_NORMAL = 3 };

struct shardd_tensor {
	const char *name;      /* unique in its unit, up to 255 printable bytes */
	const uint64_t *shape; /* row-major */
	uint32_t dims;         /* 0: a scalar */
	enum shardd_init init; /* for shardd_init_seed; 0: constant 0 */
	double a, b;           /* CONSTANT a; UNIFORM [a,b); NORMAL mean a, deviation b */
	bool frozen;           /* no gradient, no optimizer; flattened apart from the others */
	/* Another name of a tensor of the same shape that is registered already, or before it in
	 * the same call: of unit @alias_unit (NULL: this unit). NULL: a tensor of its own. */
	const char *alias_of;
	const char *alias_unit;
	/* Instead of the unit's: for biases, say. */
	bool has_weight_decay;
	double weight_decay;
	bool has_lr_factor;
	double lr_factor; /* times the learning rate */
	/* Elements from one index of a dimension to the next, @dims of them; NULL: row-major.
	 * Only a permutation of dimensions, without gaps (channels_last): the daemon keeps the
	 * elements as they lie. */
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

/* What is no parameter (running statistics): every rank has its own, unsharded. */
struct shardd_buffer {
	const char *name;               /* unique among the unit's tensors and buffers */
	const uint64_t *shape;          /* row-major */
	uint32_t dims;                  /* 0: a scalar */
	enum shardd_buffer_dtype dtype; /* 0: FP32 */
};

enum shardd_optimizer_kind { SHARDD_SGD = 1, SHARDD_ADAMW = 2, SHARDD_ADAM = 3 };

/* Whose bits: PyTorch's on a CPU, or everything in double, rounded at the stores. */
enum shardd_optimizer_profile {
	SHARDD_OPTIM_EAGER_SINGLE = 1,
	SHARDD_OPTIM_FOREACH = 2,
	SHARDD_OPTIM_FUSED = 3,
	SHARDD_OPTIM_REFERENCE_F64 = 4, /* ADAM, ADAMW */
};

enum shardd_optimizer_when {
	SHARDD_OPTIM_AT_STEP = 1, /* by shardd_step, on the gradient shard */
	/* by the unit's reduce, or the last of its buckets, which frees the gradient shard */
	SHARDD_OPTIM_IN_BACKWARD = 2,
	SHARDD_OPTIM_BY_TRAINER = 3, /* the trainer's own, on the mapped shards; kind is 0 */
};

struct shardd_optimizer {
	enum shardd_optimizer_kind kind; /* 0: none, the unit takes no step */
	double lr;
	double weight_decay;
	double momentum;                       /* SGD */
	bool nesterov;                         /* SGD */
	double beta1, beta2, eps;              /* ADAM, ADAMW; all 0: 0.9, 0.999, 1e-8 */
	enum shardd_optimizer_profile profile; /* 0: EAGER_SINGLE */
	enum shardd_optimizer_when when;       /* 0: AT_STEP */
	bool amsgrad;                          /* ADAM, ADAMW */
	bool maximize;
	double dampening; /* SGD */
};

/* How a unit's elements are cut into shards. */
enum shardd_layout {
	SHARDD_LAYOUT_FLAT = 1, /* one flat parameter; with shard_multiple PyTorch/XLA's */
	SHARDD_LAYOUT_DIM0 = 2, /* every tensor by its rows: FSDP2's */
};

enum shardd_strategy {
	SHARDD_SHARD = 1,     /* over all ranks of the group */
	SHARDD_REPLICATE = 2, /* every rank has all of it: DDP */
	SHARDD_HYBRID = 3,    /* sharded inside shard_ranks consecutive ranks, else replicated */
};

/* In which order a gradient is cast, divided and added: docs/protocol.md. */
enum shardd_reduce_profile {
	SHARDD_PROFILE_FAIRSCALE = 1,
	SHARDD_PROFILE_XLA = 2,
	SHARDD_PROFILE_FSDP1_HOOK = 3, /* reduce_dtype BF16 or FP16: the compressing hooks */
	SHARDD_PROFILE_FSDP2 = 4,
	SHARDD_PROFILE_DDP = 5,
	SHARDD_PROFILE_DDP_HOOK = 6,        /* reduce_dtype BF16 or FP16: the compressing hooks */
	SHARDD_PROFILE_DDP_BUCKET_VIEW = 7, /* gradient_as_bucket_view */
};

/* What becomes of the gathered unit between forward and backward. */
enum shardd_reshard {
	SHARDD_RESHARD_AFTER_FORWARD = 1,  /* released, gathered again for backward */
	SHARDD_RESHARD_AFTER_BACKWARD = 2, /* kept from forward to the end of backward */
	SHARDD_RESHARD_NEVER = 3,          /* kept until the parameters change */
	/* released, gathered again for backward, and kept from then on as with NEVER */
	SHARDD_RESHARD_AFTER_FORWARD_ONLY = 4,
};

/* How a gradient is divided by a factor that is no power of two. 0: as PyTorch does on the
 * device, TRUE on a CPU, RECIPROCAL on a GPU (XLA's profile: TRUE on both). */
enum shardd_div_mode {
	SHARDD_DIV_TRUE = 1,       /* x / d */
	SHARDD_DIV_RECIPROCAL = 2, /* x * fp32(1 / d), the inverse taken in fp64 */
};

/* Parameters that are gathered and reduced together, fp32 in the daemon. FLAT: its flat
 * parameter is the row-major concatenation of its tensors in this order; rank r of W owns
 * elements [r*S, (r+1)*S), S = ceil(N/W) rounded up to a multiple of shard_multiple,
 * zero-padded at the end (fairscale's flat layout; m > 1: XLA's). DIM0: rank r owns of every
 * tensor rows [r*R, (r+1)*R), R = ceil(rows/W) (FSDP2's). Frozen tensors are laid out apart,
 * behind the others; shardd_tensor_places says where everything is. */
struct shardd_unit_spec {
	size_t size;      /* sizeof(struct shardd_unit_spec) */
	const char *name; /* unique in the job, up to 255 printable bytes */
	const struct shardd_tensor *tensors;
	size_t n_tensors;
	shardd_group group;
	enum shardd_dtype compute_dtype;  /* what gather hands out; 0: FP32 */
	enum shardd_dtype gradient_dtype; /* what the gradient buffer holds; 0: compute_dtype */
	uint32_t shard_multiple;          /* 0: 1; with profile XLA and FLAT 128 */
	double pre_divide, post_divide;   /* gradients; both 0: fairscale's factors for W */
	struct shardd_optimizer optimizer;
	enum shardd_layout layout;                 /* 0: FLAT */
	enum shardd_strategy strategy;             /* 0: SHARD */
	uint32_t shard_ranks;                      /* HYBRID: a divisor of the group's size */
	enum shardd_dtype reduce_dtype;            /* of the sum; 0: what the profile has */
	enum shardd_reduce_profile reduce_profile; /* 0: FAIRSCALE */
	double divide_factor;                      /* FSDP2: the user's; 0: none */
	bool force_sum;                            /* FSDP2: never AVG */
	const struct shardd_buffer *buffers;
	size_t n_buffers;
	enum shardd_reshard reshard; /* 0: AFTER_FORWARD */
	bool guarded;                /* its ops are checked against the passes */
	enum shardd_div_mode div_mode;
};

typedef uint32_t shardd_unit;

struct shardd_unit_info {
	shardd_unit unit;        /* names it in every op */
	uint64_t elements;       /* N */
	uint64_t shard_elements; /* S */
	bool initialised;        /* by an earlier life of the job */
	uint64_t optimizer_steps;
	uint64_t gradient_elements; /* of a gradient buffer: what is trained; 0: nothing is */
	uint64_t packed_elements;   /* of what init takes: all tensors, without padding */
};

/* Where a tensor is, in elements: in what gather and summon hand out and, if it is trained,
 * in a gradient buffer. An alias is where what it stands for is. */
struct shardd_tensor_place {
	shardd_unit unit; /* an alias's may be another one */
	uint64_t offset;
	uint64_t elements;
	uint64_t shard_offset;   /* in this rank's shard: what is trained, then what is frozen */
	uint64_t shard_elements; /* of the tensor that this rank owns; they are contiguous */
};

/* Where a buffer is in what shardd_unit_buffers hands out, in bytes. */
struct shardd_buffer_place {
	uint64_t offset;
	uint64_t bytes;
};

/* Register a whole model in one call: all units or none. Every rank registers the
 * same; a difference is FAILED_PRECONDITION naming the first one. Units that are
 * there already are found. @ret: @n entries, in the order given.
 * Errors: INVALID_ARGUMENT (which field, which value), RESOURCE_EXHAUSTED. Blocks until
 * the daemon has answered. Any thread. */
SHARDD_API int shardd_register(shardd_client *c, const struct shardd_unit_spec *units, size_t n,
			       struct shardd_unit_info *ret, struct shardd_error *err);

/* Where the tensors and the buffers of a unit are, as this client's last registration or
 * conversion of it said. @ret: @n entries, one for each tensor (buffer) of its spec, in their
 * order. Errors: NOT_FOUND (not registered by this client), INVALID_ARGUMENT (@n). Never
 * blocks. Any thread. */
SHARDD_API int shardd_tensor_places(shardd_client *c, shardd_unit u,
				    struct shardd_tensor_place *ret, size_t n,
				    struct shardd_error *err);
SHARDD_API int shardd_buffer_places(shardd_client *c, shardd_unit u,
				    struct shardd_buffer_place *ret, size_t n,
				    struct shardd_error *err);

/* --------------------------------------------------------------- ops */

typedef uint64_t shardd_ticket;

/* What an op hands back. Pointers are valid until the op's memory is given back
 * (release, reduce, free) or the session ends. */
struct shardd_result {
	/* gather, begin_pass: read-only; gradient, alloc, summon, buffers: to be written */
	void *data;
	uint64_t bytes;      /* of data */
	uint64_t buffer;     /* alloc: names the buffer */
	double total_norm;   /* clip_grad_norm: before clipping */
	uint32_t references; /* gather, release: this session's, after the op */
	bool copied;         /* gather: a cast was made for this call */
	uint64_t number;     /* collectives: position in the group's order */
	uint64_t waited_us;  /* in the daemon: for order and for peers */
	uint64_t ran_us;
	bool kept;                /* end_pass: the unit is still gathered, by its policy */
	bool found_inf;           /* unscale, step */
	bool skipped;             /* step; reduce: unused by all */
	bool has_total_norm;      /* step: the plan has a clip, total_norm is its */
	shardd_unit unit;         /* next_shard: whose shard data is */
	uint64_t elements;        /* next_shard: of parameters, and of gradient */
	uint64_t gradient_offset; /* next_shard: bytes from data to the gradient */
	uint64_t optimizer_steps; /* summon: that the unit has had */
};

/* Done? Return: 1 (then the ticket is ended and @ret, if not NULL, is filled), 0 (not
 * yet), or a negative code (the op failed: the ticket is ended; INVALID_ARGUMENT
 * with native EBADF: no such ticket). Never blocks. Any thread. */
SHARDD_API int shardd_poll(shardd_client *c, shardd_ticket t, struct shardd_result *ret,
			   struct shardd_error *err);

/* Wait at most @timeout_ms (-1: as long as the op's own deadline). Return: 0 or a
 * negative code; DEADLINE_EXCEEDED with native EAGAIN means that only the wait
 * ended: the op goes on and the ticket stays. Any thread. */
SHARDD_API int shardd_wait(shardd_client *c, shardd_ticket t, int timeout_ms,
			   struct shardd_result *ret, struct shardd_error *err);

/* Deadline of the ops submitted after this call, on this client; 0: the job's.
 * An op whose deadline passes ends with DEADLINE_EXCEEDED, for its peers too. Never
 * blocks. Any thread. */
SHARDD_API void shardd_set_timeout(shardd_client *c, uint32_t ms);

/* From here on, any thread for all: a _submit form waits for nothing but another
 * thread's call that enters the library, the plain form blocks until its op has ended,
 * at the latest by its deadline. What one thread submits to a unit and another waits
 * for is theirs to agree on: the library keeps no lock between calls. */

/* ------------------------------------------------------------ device memory */

/* On a GPU the pointers that ops hand out are device addresses in this process: of the
 * current CUDA context, or, where there is none, of the device's primary context, which
 * the library retains. On the host they are ordinary memory. These copy either way, and
 * return when the copy is done: @dst (write) or @src (read) is such a pointer. Where this
 * thread has a stream (shardd_set_stream) the copy begins after the work that is on it.
 * Errors: INVALID_ARGUMENT (outside of what was handed out), INTERNAL (the device
 * refused). Any thread. */
SHARDD_API int shardd_write(shardd_client *c, void *dst, const void *src, size_t bytes,
			    struct shardd_error *err);
SHARDD_API int shardd_read(shardd_client *c, void *dst, const void *src, size_t bytes,
			   struct shardd_error *err);

/* GPUs: ops that this thread submits from here on are ordered with @stream (a CUstream or
 * cudaStream_t of the client's context; NULL is CUDA's default stream) instead of with the
 * CPU. An op begins on the device after the work that is on the stream when it is
 * submitted. Its answer, and so the end of shardd_wait or of the plain form, comes when the
 * daemon has queued it, and work put on the stream after that runs after the op: nothing
 * waits for the device. Results for the CPU (total_norm) are exact in any case.
 * The first op that names new memory waits for the streams, since nothing can be mapped
 * while one waits for the daemon. Where a device has no stream memory operations, a
 * submission waits while 16 earlier ones of its stream are unanswered.
 * Do not capture such a stream into a graph, and do not destroy it while ops are under way.
 * An op whose stream does not get so far within the op's deadline ends this session.
 * Errors: FAILED_PRECONDITION (not joined, or the device has no streams),
 * INVALID_ARGUMENT (a stream of another context, or the per-thread default stream),
 * RESOURCE_EXHAUSTED (512 streams at most). May block at the first use of a stream. Any
 * thread. */
SHARDD_API int shardd_set_stream(shardd_client *c, void *stream, struct shardd_error *err);
/* Back to the CPU: answers come when ops have been executed. Never blocks. */
SHARDD_API void shardd_clear_stream(shardd_client *c);

/* Initialise a unit's parameters (collective). Optimizer state is zeroed.
 * seed: every tensor by its init; values depend on seed, unit, tensor and index,
 * not on the world size or the layout. broadcast: all from @root's buffer, which holds the
 * unit's packed_elements in fp32, tensor after tensor without padding (others pass 0). own:
 * each rank's shard from its own such buffer. */
SHARDD_API int shardd_init_seed_submit(shardd_client *c, shardd_unit u, uint64_t seed,
				       shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_init_seed(shardd_client *c, shardd_unit u, uint64_t seed,
				struct shardd_error *err);
SHARDD_API int shardd_init_broadcast_submit(shardd_client *c, shardd_unit u, uint32_t root,
					    uint64_t buffer, shardd_ticket *t,
					    struct shardd_error *err);
SHARDD_API int shardd_init_broadcast(shardd_client *c, shardd_unit u, uint32_t root,
				     uint64_t buffer, struct shardd_error *err);
SHARDD_API int shardd_init_own_submit(shardd_client *c, shardd_unit u, uint64_t buffer,
				      shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_init_own(shardd_client *c, shardd_unit u, uint64_t buffer,
			       struct shardd_error *err);

/* The full parameters of a unit: N elements of compute_dtype, shared by all ranks
 * of the node, read-only. Counted: as many releases as gathers give it back.
 * Gathered again while held: the same address. Waits for no other rank. */
SHARDD_API int shardd_gather_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				    struct shardd_error *err);
SHARDD_API int shardd_gather(shardd_client *c, shardd_unit u, const void **data,
			     struct shardd_error *err);

/* Drop one reference; with none left it does nothing. */
SHARDD_API int shardd_release_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				     struct shardd_error *err);
SHARDD_API int shardd_release(shardd_client *c, shardd_unit u, struct shardd_error *err);

/* ------------------------------------------------------------------ passes */

/* Guarded units are used in passes, in this order on each rank: begin and end of FORWARD,
 * as often as there is one; begin of BACKWARD, reduce, end of BACKWARD. Forward may be
 * computed again inside backward. Steps, clipping, commits and initialisation come when no
 * unit is in a pass. What does not fit is FAILED_PRECONDITION with the state, and changes
 * nothing. */
enum shardd_pass { SHARDD_FORWARD = 1, SHARDD_BACKWARD = 2 };

/* The full parameters, as of gather; the pass has one reference of its own. They stay until
 * the end of the pass, in backward until the unit is reduced, and longer if the unit's
 * reshard policy says so: then the address stays the same. Waits for no other rank. */
SHARDD_API int shardd_begin_pass_submit(shardd_client *c, shardd_unit u, enum shardd_pass pass,
					shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_begin_pass(shardd_client *c, shardd_unit u, enum shardd_pass pass,
				 const void **data, struct shardd_error *err);

/* @sync: BACKWARD: the gradients of this pass were reduced; false: they are added up, for a
 * later pass to reduce (no_sync), or there are none. FORWARD: ignored.
 * Errors: FAILED_PRECONDITION (also of a backward with @sync and without a reduce). */
SHARDD_API int shardd_end_pass_submit(shardd_client *c, shardd_unit u, enum shardd_pass pass,
				      bool sync, shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_end_pass(shardd_client *c, shardd_unit u, enum shardd_pass pass, bool sync,
			       struct shardd_error *err);

/* This session's policy for guarded units, from here on; @reshard 0: as registered. @units:
 * @n of them, at least one. */
SHARDD_API int shardd_set_reshard_submit(shardd_client *c, const shardd_unit *units, size_t n,
					 enum shardd_reshard reshard, shardd_ticket *t,
					 struct shardd_error *err);
SHARDD_API int shardd_set_reshard(shardd_client *c, const shardd_unit *units, size_t n,
				  enum shardd_reshard reshard, struct shardd_error *err);

/* By what reductions divide: fields of shardd_unit_spec. What is 0 is left open, whatever the
 * unit was registered with. */
struct shardd_factors {
	size_t size;                    /* sizeof(struct shardd_factors) */
	double pre_divide, post_divide; /* FAIRSCALE, XLA, FSDP1_HOOK */
	double divide_factor;           /* FSDP2 */
	bool force_sum;                 /* FSDP2 */
};

/* The same of all ranks (collective), for the reductions of @u from here on, until the end of the
 * epoch. Errors: INVALID_ARGUMENT (a factor that the unit's profile does not have),
 * FAILED_PRECONDITION (in the middle of a pass: a rank has its gradient buffer, or
 * an all-reduce is deferred; ranks that do not agree). */
SHARDD_API int shardd_set_factors_submit(shardd_client *c, shardd_unit u,
					 const struct shardd_factors *factors, shardd_ticket *t,
					 struct shardd_error *err);
SHARDD_API int shardd_set_factors(shardd_client *c, shardd_unit u,
				  const struct shardd_factors *factors, struct shardd_error *err);

/* As soon as this session has @u in @pass, begin to gather @units (@n up to 16, in this
 * order; 0: none any more). Without any such list the daemon learns the order in one step
 * and follows it in the next. It saves time only, and fails nothing: see docs/protocol.md. */
SHARDD_API int shardd_set_prefetch_submit(shardd_client *c, shardd_unit u, enum shardd_pass pass,
					  const shardd_unit *units, size_t n, shardd_ticket *t,
					  struct shardd_error *err);
SHARDD_API int shardd_set_prefetch(shardd_client *c, shardd_unit u, enum shardd_pass pass,
				   const shardd_unit *units, size_t n, struct shardd_error *err);

/* This rank's buffer for a unit's full gradients: gradient_elements of gradient_dtype,
 * writable, contents undefined: write all of it. Asked again before the reduce:
 * the same buffer. The reduce takes it back. */
SHARDD_API int shardd_gradient_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				      struct shardd_error *err);
SHARDD_API int shardd_gradient(shardd_client *c, shardd_unit u, void **data,
			       struct shardd_error *err);

/* A writable buffer of this session's own, for init, all_reduce and broadcast. */
SHARDD_API int shardd_alloc_submit(shardd_client *c, uint64_t bytes, shardd_ticket *t,
				   struct shardd_error *err);
SHARDD_API int shardd_alloc(shardd_client *c, uint64_t bytes, uint64_t *buffer, void **data,
			    struct shardd_error *err);
SHARDD_API int shardd_free_submit(shardd_client *c, uint64_t buffer, shardd_ticket *t,
				  struct shardd_error *err);
SHARDD_API int shardd_free(shardd_client *c, uint64_t buffer, struct shardd_error *err);

/* Reduce the gradient buffers of all ranks of the unit's group, and what they have
 * accumulated, into their fp32 gradient shards (collective): divided, cast and added in the
 * order of the unit's reduce profile, added to what the shard holds since the last step. */
SHARDD_API int shardd_reduce_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				    struct shardd_error *err);
SHARDD_API int shardd_reduce(shardd_client *c, shardd_unit u, struct shardd_error *err);

/* The same inside each replica only (HYBRID, REPLICATE; collective): the sums are kept, and
 * the next shardd_reduce adds its own to them before the replicas' all-reduce. */
SHARDD_API int shardd_reduce_deferred_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
					     struct shardd_error *err);
SHARDD_API int shardd_reduce_deferred(shardd_client *c, shardd_unit u, struct shardd_error *err);

/* Without communication: add this rank's gradient buffer to what it has accumulated of the
 * unit since its last reduce, all of which the next reduce takes (no_sync). The buffer is
 * gone: ask for it again. Costs the memory of a gradient buffer until then. */
SHARDD_API int shardd_accumulate_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
					struct shardd_error *err);
SHARDD_API int shardd_accumulate(shardd_client *c, shardd_unit u, struct shardd_error *err);

enum shardd_reduce_op { SHARDD_SUM = 1, SHARDD_AVG = 2, SHARDD_MAX = 3, SHARDD_MIN = 4 };

/* @count elements at byte @offset of each member's buffer become the same on all
 * (collective). Folded in fp32 in the group's order. */
SHARDD_API int shardd_all_reduce_submit(shardd_client *c, shardd_group g, uint64_t buffer,
					uint64_t offset, uint64_t count, enum shardd_dtype dtype,
					enum shardd_reduce_op op, shardd_ticket *t,
					struct shardd_error *err);
SHARDD_API int shardd_all_reduce(shardd_client *c, shardd_group g, uint64_t buffer, uint64_t offset,
				 uint64_t count, enum shardd_dtype dtype, enum shardd_reduce_op op,
				 struct shardd_error *err);

/* @bytes at @offset of @root's buffer into everybody's (collective). @root: a rank
 * of the job that is a member of the group. */
SHARDD_API int shardd_broadcast_submit(shardd_client *c, shardd_group g, uint64_t buffer,
				       uint64_t offset, uint64_t bytes, uint32_t root,
				       shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_broadcast(shardd_client *c, shardd_group g, uint64_t buffer, uint64_t offset,
				uint64_t bytes, uint32_t root, struct shardd_error *err);

SHARDD_API int shardd_barrier_submit(shardd_client *c, shardd_group g, shardd_ticket *t,
				     struct shardd_error *err);
SHARDD_API int shardd_barrier(shardd_client *c, shardd_group g, struct shardd_error *err);

/* Does nothing in the daemon: to see whether its loop answers, and how fast. Not an op: it has
 * no number and needs no job. -SHARDD_UNIMPLEMENTED without a ring (SHARDD_RING=off, handover
 * by IPC handle, an older daemon). */
SHARDD_API int shardd_nop_submit(shardd_client *c, shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_nop(shardd_client *c, struct shardd_error *err);

/* Scale the gradient shards of all units of the group so that their total norm is
 * at most @max_norm (collective): coef = max_norm/(total + 1e-6), applied only if
 * below 1 (fairscale's rule: a NaN norm changes nothing). @norm_type: above 0, or
 * INFINITY. @total_norm: before clipping; may be NULL. */
SHARDD_API int shardd_clip_grad_norm_submit(shardd_client *c, shardd_group g, double max_norm,
					    double norm_type, shardd_ticket *t,
					    struct shardd_error *err);
SHARDD_API int shardd_clip_grad_norm(shardd_client *c, shardd_group g, double max_norm,
				     double norm_type, double *total_norm,
				     struct shardd_error *err);

/* Step the optimizer of every unit of the group that has a gradient, and empty the
 * gradients (collective). @lr: for this step instead of the units' own; NULL: own.
 * No rank may hold a gather of these units. The step is applied as a whole by the
 * commit that follows; or before that by the next gather, reduce, clip, initialise or
 * step. A trainer that dies before it is applied leaves the parameters as they were. */
SHARDD_API int shardd_step_submit(shardd_client *c, shardd_group g, const double *lr,
				  shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_step(shardd_client *c, shardd_group g, const double *lr,
			   struct shardd_error *err);

/* -- gradients in all ways ---------------------------------------------------- */

/* Which factor the norm leads to (docs/protocol.md). */
enum shardd_clip_profile {
	SHARDD_CLIP_FAIRSCALE = 1, /* only a factor below 1 is applied: a NaN changes nothing */
	SHARDD_CLIP_XLA = 2,       /* clamped to [0, 1], always applied */
	SHARDD_CLIP_TORCH = 3,     /* at most 1, always applied: a NaN makes all NaN */
};

struct shardd_clip {
	size_t size; /* sizeof(struct shardd_clip) */
	double max_norm;
	double norm_type;                 /* above 0, or INFINITY; 0: 2 */
	enum shardd_clip_profile profile; /* 0: FAIRSCALE */
	bool error_if_nonfinite;          /* FAILED_PRECONDITION, and nothing has changed */
	const shardd_unit *units;         /* of the group; NULL: all of it. Not for a plan */
	size_t n_units;
	bool whole_job; /* units of every group; with SHARDD_WORLD, no units, not for a plan */
};

/* As shardd_clip_grad_norm, with all that can be said. */
SHARDD_API int shardd_clip_submit(shardd_client *c, shardd_group g, const struct shardd_clip *clip,
				  shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_clip(shardd_client *c, shardd_group g, const struct shardd_clip *clip,
			   double *total_norm, struct shardd_error *err);

/* Clamp every element of the gradient shards of the group's units to [-@value, @value]
 * (collective). @units: of the group; NULL: all of it. */
SHARDD_API int shardd_clip_value_submit(shardd_client *c, shardd_group g, double value,
					const shardd_unit *units, size_t n, shardd_ticket *t,
					struct shardd_error *err);
SHARDD_API int shardd_clip_value(shardd_client *c, shardd_group g, double value,
				 const shardd_unit *units, size_t n, struct shardd_error *err);

/* Undo the scaling of the loss: multiply the gradient shards of the group's units by
 * @inv_scale (collective). @found_inf: did one of them, on any rank, hold an infinity or
 * NaN? May be NULL: the next step can ask for it too. Once a step. */
SHARDD_API int shardd_unscale_submit(shardd_client *c, shardd_group g, double inv_scale,
				     shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_unscale(shardd_client *c, shardd_group g, double inv_scale, bool *found_inf,
			      struct shardd_error *err);

/* What the optimizer goes by in one step, in place of what tensors were registered with: all of
 * it counts, whatever is 0. */
struct shardd_step_settings {
	double lr;    /* no multiple of the tensor's is taken of it */
	bool lr_fp32; /* Adam, AdamW: it is computed with in fp32, as PyTorch does if it is a tensor */
	double weight_decay;
	double momentum, dampening; /* SGD; momentum 0 for units registered with 0 */
	bool nesterov;              /* SGD */
	double beta1, beta2, eps;   /* Adam, AdamW */
	bool maximize;
	/* Whose: tensor tensors[i], by its index in the spec, of unit units[i]. n 0: of all that no
	 * others of the same step name. */
	const shardd_unit *units;
	const uint32_t *tensors;
	size_t n;
};

struct shardd_step_options {
	size_t size;        /* sizeof(struct shardd_step_options) */
	const double *lr;   /* for this step; NULL: the units' own, or the plan's */
	bool skip_if_found; /* found_inf of the last unscale: no step, no count, no gradients */
	bool discard;       /* the same in any case */
	/* for this step; NULL: none. @lr is then for the tensors that they leave out */
	const struct shardd_step_settings *settings;
	size_t n_settings;
};

/* As shardd_step. @ret: skipped, found_inf and, with a plan, total_norm; may be NULL. Errors of
 * settings: INVALID_ARGUMENT (a number out of range, a tensor that is not trained, twice, or of
 * another group; momentum for a unit that was registered without), NOT_FOUND (no such unit),
 * FAILED_PRECONDITION (ranks that do not agree). */
SHARDD_API int shardd_step_with_submit(shardd_client *c, shardd_group g,
				       const struct shardd_step_options *o, shardd_ticket *t,
				       struct shardd_error *err);
SHARDD_API int shardd_step_with(shardd_client *c, shardd_group g,
				const struct shardd_step_options *o, struct shardd_result *ret,
				struct shardd_error *err);

/* As shardd_reduce, but not the unit's last one before the step: an optimizer in backward,
 * a plan and the trainer's own optimizer wait for that. */
SHARDD_API int shardd_reduce_more_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
					 struct shardd_error *err);
SHARDD_API int shardd_reduce_more(shardd_client *c, shardd_unit u, struct shardd_error *err);

/* As shardd_reduce, of a rank that has not used the unit in this pass: it has filled its gradient
 * buffer with zeros, which count if another rank has used it. If all ranks say so (@by_all, or
 * the result's skipped; NULL: not asked) and none has accumulated, nothing is reduced: the next step leaves the unit alone, as if it had been in no
 * backward pass. */
SHARDD_API int shardd_reduce_unused_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
					   struct shardd_error *err);
SHARDD_API int shardd_reduce_unused(shardd_client *c, shardd_unit u, bool *by_all,
				    struct shardd_error *err);

struct shardd_reduce_options {
	size_t size;            /* sizeof(struct shardd_reduce_options) */
	const uint32_t *unused; /* trained tensors by their index, ascending; NULL: none */
	size_t n_unused;
	bool more; /* as shardd_reduce_more */
};

/* As shardd_reduce, of a rank that has used some tensors of the unit and not those in @o: it has
 * filled their part of its gradient buffer with zeros, which count if another rank has used
 * them. What no rank has used has no gradient (shardd_unit_unused): the next step leaves it
 * and its optimizer state alone, and does not count for it. @ret: skipped: nothing of the unit was used by any
 * rank. May be NULL. Errors: INVALID_ARGUMENT (no such tensors). */
SHARDD_API int shardd_reduce_with_submit(shardd_client *c, shardd_unit u,
					 const struct shardd_reduce_options *o, shardd_ticket *t,
					 struct shardd_error *err);
SHARDD_API int shardd_reduce_with(shardd_client *c, shardd_unit u,
				  const struct shardd_reduce_options *o, struct shardd_result *ret,
				  struct shardd_error *err);

/* Which tensors of @u no rank has used, by the unit's reduce whose end this client heard of last:
 * all @n of the unit's into @ret. Errors: NOT_FOUND (not registered by this client),
 * INVALID_ARGUMENT (@n is not how many there are). Never blocks. Any thread. */
SHARDD_API int shardd_unit_unused(shardd_client *c, shardd_unit u, bool *ret, size_t n,
				  struct shardd_error *err);

struct shardd_plan {
	size_t size;                    /* sizeof(struct shardd_plan) */
	const struct shardd_clip *clip; /* NULL: none */
	double inv_scale;               /* 0: none; found_inf skips the step */
	const double *lr;               /* for the steps of this pass; NULL: the units' own */
	const struct shardd_step_settings *settings; /* the same, as of a step */
	size_t n_settings;
};

/* Say before a backward pass what becomes of its gradients as they arrive, until the step
 * (collective). With a clip or an inv_scale, optimizers in backward wait for the step, which
 * applies all or skips all. The norm comes with shardd_step_with. */
SHARDD_API int shardd_plan_backward_submit(shardd_client *c, shardd_group g,
					   const struct shardd_plan *plan, shardd_ticket *t,
					   struct shardd_error *err);
SHARDD_API int shardd_plan_backward(shardd_client *c, shardd_group g,
				    const struct shardd_plan *plan, struct shardd_error *err);

/* A shard for the trainer's own optimizer: fp32 copies, the parameters to be changed. Every
 * trained element of the unit is in the shard of exactly one rank, whatever its strategy. There
 * may be none for a rank. */
struct shardd_shard {
	shardd_unit unit;
	uint64_t elements;
	float *params;
	const float *gradient;
};

/* SHARDD_OPTIM_BY_TRAINER: the next unit of the group whose last reduce is over, in the
 * order of the reduces, each exactly once. Waits for it, at most until the op's deadline.
 * With a ticket: shardd_result has the numbers. */
SHARDD_API int shardd_next_shard_submit(shardd_client *c, shardd_group g, shardd_ticket *t,
					struct shardd_error *err);
SHARDD_API int shardd_next_shard(shardd_client *c, shardd_group g, struct shardd_shard *ret,
				 struct shardd_error *err);

/* Elements [first, first + elements) of a tensor, from element at of the shard on. */
struct shardd_shard_piece {
	uint32_t tensor; /* index in the unit's spec; never an alias */
	uint64_t first;
	uint64_t elements;
	uint64_t at;
};

/* What the shard of @u that this client was handed out last consists of: up to @n pieces into
 * @ret, ascending; what lies between them is padding. @ret_n: how many there are. Every time the
 * same, until the unit is converted. Errors: NOT_FOUND (not registered by this client). Never
 * blocks. Any thread. */
SHARDD_API int shardd_shard_pieces(shardd_client *c, shardd_unit u, struct shardd_shard_piece *ret,
				   size_t n, size_t *ret_n, struct shardd_error *err);

/* The changed parameters go back into the unit, when no rank has it gathered any more; the
 * shard's memory is gone. The unit can be gathered again when all ranks have done this. */
SHARDD_API int shardd_shard_done_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
					struct shardd_error *err);
SHARDD_API int shardd_shard_done(shardd_client *c, shardd_unit u, struct shardd_error *err);

/* The scale of a loss, by the rule of PyTorch's GradScaler: every rank has its own and they
 * stay equal, since found_inf is everybody's. Calls nothing. */
struct shardd_scaler {
	float scale; /* multiply the loss by it */
	double growth_factor;
	double backoff_factor;
	uint32_t growth_interval; /* steps without an infinity until it grows */
	uint32_t steps;           /* since it changed */
};

/* 65536, 2, 0.5, 2000. Any thread. */
SHARDD_API void shardd_scaler_init(struct shardd_scaler *s);
/* For shardd_unscale. Any thread. */
SHARDD_API double shardd_scaler_inverse(const struct shardd_scaler *s);
/* After a step: did it find an infinity? Not for two threads at once. */
SHARDD_API void shardd_scaler_update(struct shardd_scaler *s, bool found_inf);

/* Make @step the step a restarted trainer goes on from, on all ranks or on none
 * (collective over the job). @blob: up to 64 KiB of this rank's own state (data
 * position, random generators); copied. */
SHARDD_API int shardd_commit_submit(shardd_client *c, uint64_t step, const void *blob, size_t bytes,
				    shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_commit(shardd_client *c, uint64_t step, const void *blob, size_t bytes,
			     struct shardd_error *err);

/* This rank's own buffers of a unit: to be read and written, zero at first. They stay with
 * the job, also when this trainer ends. */
SHARDD_API int shardd_unit_buffers_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
					  struct shardd_error *err);
SHARDD_API int shardd_unit_buffers(shardd_client *c, shardd_unit u, void **data,
				   struct shardd_error *err);

/* The buffers of all ranks become those of @root (collective): of one unit, or with @u 0 of
 * all units of group @g. */
SHARDD_API int shardd_broadcast_buffers_submit(shardd_client *c, shardd_unit u, shardd_group g,
					       uint32_t root, shardd_ticket *t,
					       struct shardd_error *err);
SHARDD_API int shardd_broadcast_buffers(shardd_client *c, shardd_unit u, shardd_group g,
					uint32_t root, struct shardd_error *err);

/* The parameters of a unit as they are stored, fp32, in memory of this rank's own that it may
 * write to (collective); laid out as gather's. The unit must not be gathered, and until it
 * is returned it is not gathered, reduced, initialised, converted or stepped. */
SHARDD_API int shardd_summon_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				    struct shardd_error *err);
SHARDD_API int shardd_summon(shardd_client *c, shardd_unit u, void **data,
			     struct shardd_error *err);
/* Give that memory back (collective). With @write each rank's own shard of it becomes the
 * parameters; what a rank wrote elsewhere is dropped. */
SHARDD_API int shardd_return_submit(shardd_client *c, shardd_unit u, bool write, shardd_ticket *t,
				    struct shardd_error *err);
SHARDD_API int shardd_return(shardd_client *c, shardd_unit u, bool write, struct shardd_error *err);

/* The same of an array of the optimizer's state, by its number @state; 0: the parameters. Adam,
 * AdamW: 1 exp_avg, 2 exp_avg_sq, 3 max_exp_avg_sq (amsgrad); SGD with momentum: 1. What is frozen
 * is 0 in it. @optimizer_steps: how many the unit has had; may be NULL. INVALID_ARGUMENT: its
 * optimizer has no such array. */
SHARDD_API int shardd_summon_state_submit(shardd_client *c, shardd_unit u, uint32_t state,
					  shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_summon_state(shardd_client *c, shardd_unit u, uint32_t state, void **data,
				   uint64_t *optimizer_steps, struct shardd_error *err);
/* Give that memory back (collective). With @write each rank's own shard of it becomes that array;
 * then @optimizer_steps, if not NULL and the same on all ranks, is how many steps the unit has had
 * from then on, up to 2^52. */
SHARDD_API int shardd_return_state_submit(shardd_client *c, shardd_unit u, bool write,
					  const uint64_t *optimizer_steps, shardd_ticket *t,
					  struct shardd_error *err);
SHARDD_API int shardd_return_state(shardd_client *c, shardd_unit u, bool write,
				   const uint64_t *optimizer_steps, struct shardd_error *err);

struct shardd_return_options {
	size_t size; /* sizeof(struct shardd_return_options) */
	bool write;
	const uint64_t *optimizer_steps; /* NULL: as they are */
	/* By tensor, none more than @optimizer_steps; of what is not trained it does not matter. NULL:
	 * if @optimizer_steps changes all of them have had as many, else what they had. */
	const uint64_t *tensor_steps;
	size_t n_tensors; /* of @tensor_steps: all of the unit's, or 0 */
};

/* As shardd_return_state, for units with tensors that were not used in every step. */
SHARDD_API int shardd_return_with_submit(shardd_client *c, shardd_unit u,
					 const struct shardd_return_options *o, shardd_ticket *t,
					 struct shardd_error *err);
SHARDD_API int shardd_return_with(shardd_client *c, shardd_unit u,
				  const struct shardd_return_options *o, struct shardd_error *err);

/* How many steps each tensor of @u had had when it was summoned last, as far as this client has heard
 * of its end: all @n of the unit's into @ret. Less than the unit's where no rank had used the tensor
 * (shardd_reduce_with). Errors: NOT_FOUND (not registered by this client), INVALID_ARGUMENT (@n is
 * not how many there are, or it was not summoned). Never blocks. Any thread. */
SHARDD_API int shardd_unit_steps(shardd_client *c, shardd_unit u, uint64_t *ret, size_t n,
				 struct shardd_error *err);

/* How units are to be laid out. */
struct shardd_conversion {
	size_t size;                   /* sizeof(struct shardd_conversion) */
	enum shardd_layout layout;     /* 0: FLAT */
	uint32_t shard_multiple;       /* FLAT; 0: 1 */
	enum shardd_strategy strategy; /* 0: as it is */
	uint32_t shard_ranks;          /* with HYBRID */
};

/* Lay units out anew (collective): the bits of parameters, gradients and optimizer state stay.
 * @units: @n of one group, ascending; nobody may have them gathered, summoned, or a gradient
 * buffer of them. From then on they are registered with the new layout. Memory for both
 * layouts is needed while it lasts; the old memory is given back when all units that were
 * registered in one call have been converted. Refused, all is as it was.
 * The places that shardd_tensor_places tells are the new ones when the plain form, or
 * shardd_wait or shardd_poll of the other, has returned. */
SHARDD_API int shardd_convert_submit(shardd_client *c, const shardd_unit *units, size_t n,
				     const struct shardd_conversion *to, shardd_ticket *t,
				     struct shardd_error *err);
SHARDD_API int shardd_convert(shardd_client *c, const shardd_unit *units, size_t n,
			      const struct shardd_conversion *to, struct shardd_error *err);

#ifdef __cplusplus
}
#endif

#include "shardd/ddp.h"
#include "shardd/reader.h"

#endif
