/*
 * libshardd: the client library for the shardd of the node.
 *
 * A client is one connection and one session. A trainer joins a job as a rank,
 * registers its units, and then, step by step, gathers full parameters, hands in
 * gradients and lets the daemon reduce them and step the optimizer. Memory is
 * mapped; it is never copied through the socket.
 *
 * Calls come in two forms. The plain form blocks until the op is done. The
 * _submit form returns at once with a ticket. Ops that use the same unit run in
 * submission order; other ops run concurrently. A ticket ends with one successful
 * shardd_wait, or with a shardd_poll that reports that the op is done.
 *
 * Threads: a client may be used by several threads at once; the order of ops is
 * the order in which their calls entered the library. shardd_close must be the
 * last call on a client. No function may be called in a child after fork without
 * exec: connect in the child instead.
 *
 * Errors: functions return 0 or a negative enum shardd_code. Where an argument
 * `struct shardd_error *err` is not NULL it is filled on failure. An op that is
 * refused, or that ends before its peers have called it, has changed nothing.
 *
 * Each size says whether it is in bytes or elements; shapes are row-major.
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
	SHARDD_INVALID_ARGUMENT = 3,  /* the text says field, value and what is allowed */
	SHARDD_DEADLINE_EXCEEDED = 4, /* the text says what was waited for */
	SHARDD_NOT_FOUND = 5,
	SHARDD_ALREADY_EXISTS = 6,
	SHARDD_PERMISSION_DENIED = 7,
	SHARDD_RESOURCE_EXHAUSTED = 8,  /* the text says who holds what */
	SHARDD_FAILED_PRECONDITION = 9, /* the text names the state */
	SHARDD_ABORTED = 10,            /* a peer died or left: call shardd_join again */
	SHARDD_UNIMPLEMENTED = 12,
	SHARDD_INTERNAL = 13,
	SHARDD_UNAVAILABLE = 14, /* the daemon has ended, is about to end, or cannot be reached */
	SHARDD_DATA_LOSS = 15,   /* the daemon was restarted: the job's state is lost */
};

struct shardd_error {
	int code;        /* enum shardd_code, positive */
	int native;      /* the domain's own number, such as errno; 0: none */
	char domain[16]; /* shardd, os, cuda, nccl */
	char field[96];  /* INVALID_ARGUMENT: the field of the message */
	char text[512];  /* one sentence */
};

/* The name of a code, such as "ABORTED". @code: positive or negative. Static string. Any thread. */
SHARDD_API const char *shardd_code_name(int code);

/* The version of the library, "major.minor.patch". Static string. Any thread. */
SHARDD_API const char *shardd_version(void);

/* -------------------------------------------------------------- connection */

typedef struct shardd_client shardd_client;

/* How this process receives memory. */
enum shardd_handover {
	SHARDD_HANDOVER_FD = 1,  /* descriptors over the local channel */
	SHARDD_HANDOVER_IPC = 2, /* GPUs: CUDA IPC handles in the replies; no local channel.
				  * The job must have been made by such a trainer. */
};

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

/* The daemon's version and this session's number. Any thread. */
SHARDD_API const char *shardd_daemon_version(const shardd_client *c);
SHARDD_API uint64_t shardd_session(const shardd_client *c);

/* The identifier of this run of the daemon, 32 hexadecimal digits, valid until shardd_close; and
 * when the run started, in seconds since 1970. A restarted daemon is another run and has no state
 * of the earlier one. Any thread. */
SHARDD_API const char *shardd_instance(const shardd_client *c);
SHARDD_API uint64_t shardd_daemon_started(const shardd_client *c);

/* The status of the daemon, its devices, jobs with their units and ranks, and sessions, as one
 * JSON document: the one that `shardctl --json status` prints. @job: only this job; NULL: all
 * jobs that this uid may see. @ret: the caller frees it with free(). Errors: NOT_FOUND (no such
 * job). Blocks until the daemon has answered. Any thread. */
SHARDD_API int shardd_status(shardd_client *c, const char *job, char **ret,
			     struct shardd_error *err);

/* --------------------------------------------------------- jobs and ranks */

enum shardd_lifetime {
	SHARDD_EPHEMERAL = 1, /* freed when its last trainer leaves cleanly */
	SHARDD_KEEP = 2,      /* kept until it is deleted, or for ttl_s after its last trainer */
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
	bool allow_torn;               /* continue from a step that was applied but not committed */
	bool is_private; /* closed to other users, including root and the daemon's uid */
};

#define SHARDD_RANK_FROM_ENV UINT32_MAX
#define SHARDD_MAX_BLOB      65536u

struct shardd_membership {
	uint64_t epoch; /* grows whenever the membership changes */
	uint32_t world_size;
	uint32_t rank;
	bool resumed;     /* the job has state from before this join */
	bool has_commit;  /* step and blob are valid */
	bool torn;        /* a step was applied after that commit */
	uint64_t step;    /* last committed step */
	const void *blob; /* this rank's blob of that commit; valid until the next join or close */
	size_t blob_bytes;
	bool created; /* this join created the job */
};

/* Join a job as a rank; the job is created if it does not exist. After ABORTED, call this again on
 * the same client: the daemon drops what the session held, op numbers start again at 1, unit ids
 * and mapped addresses stay. Blocks until ops of an earlier epoch have ended; other threads' ops
 * wait for it. @ret: may be NULL. A torn job can be joined (@ret says so): initialise all its units
 * and start again, because @step and @blob belong to parameters that no longer exist.
 * Errors: INVALID_ARGUMENT (name, rank, world size), FAILED_PRECONDITION (the job
 * exists with another world size, lifetime or quota; the rank is taken), UNAVAILABLE
 * (the job or the daemon is draining), PERMISSION_DENIED (another uid's private job), NOT_FOUND
 * (UID/NAME), RESOURCE_EXHAUSTED.
 * DATA_LOSS: the job's state was in an earlier run of the daemon. Either $SHARDD_INSTANCE names
 * that run (as shardd_instance; launchers set it for trainers that they restart), or this process
 * joined the job there and has not left it. No job is created and nothing starts again at step 0.
 * SHARDD_INSTANCE=any turns this check off. Any thread. */
SHARDD_API int shardd_join(shardd_client *c, const struct shardd_job *job,
			   struct shardd_membership *ret, struct shardd_error *err);

/* Has the job or the daemon been asked to drain? If so, commit and leave. The answer is as of the
 * last answered op. Never blocks. Any thread. */
SHARDD_API bool shardd_draining(const shardd_client *c);

/* The device with this rank's memory. */
struct shardd_device {
	char id[32];      /* host:0, cuda:0 */
	char backend[16]; /* host, cuda */
	char uuid[48];    /* GPU-...; empty for the host */
	bool streams;     /* shardd_set_stream is supported */
};

/* Return: 0, or FAILED_PRECONDITION before the first join. Never blocks. Any thread. */
SHARDD_API int shardd_get_device(const shardd_client *c, struct shardd_device *ret,
				 struct shardd_error *err);

/* Leave cleanly. Ops of this session must be done. Blocks until the daemon has
 * answered. Any thread. */
SHARDD_API int shardd_leave(shardd_client *c, struct shardd_error *err);

typedef uint32_t shardd_group;
#define SHARDD_WORLD ((shardd_group)0)

/* Create the group @name with exactly these ranks in this order, or find it. Every
 * member calls this; it does not wait for the others. Blocks until the daemon has
 * answered. Any thread. */
SHARDD_API int shardd_group_create(shardd_client *c, const char *name, const uint32_t *ranks,
				   size_t n, shardd_group *ret, struct shardd_error *err);

/* ------------------------------------------------------------------- units */

enum shardd_dtype { SHARDD_FP32 = 1, SHARDD_BF16 = 2, SHARDD_FP16 = 3 };

/* Bytes per element; 0 if @dtype is not a value of the enum. Any thread. */
SHARDD_API size_t shardd_dtype_size(enum shardd_dtype dtype);

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
	SHARDD_OPTIM_BY_TRAINER = 3, /* by the trainer's own, on the mapped shards; kind is 0 */
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

/* How a unit's elements are divided into shards. */
enum shardd_layout {
	SHARDD_LAYOUT_FLAT = 1, /* as one flat parameter; with shard_multiple as in PyTorch/XLA */
	SHARDD_LAYOUT_DIM0 = 2, /* every tensor by its rows, as in FSDP2 */
};

enum shardd_strategy {
	SHARDD_SHARD = 1,     /* over all ranks of the group */
	SHARDD_REPLICATE = 2, /* a full copy on every rank, as in DDP */
	SHARDD_HYBRID = 3,    /* sharded over each shard_ranks consecutive ranks, else replicated */
};

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

/* When a gathered unit is released. */
enum shardd_reshard {
	SHARDD_RESHARD_AFTER_FORWARD = 1,  /* released after forward, gathered for backward */
	SHARDD_RESHARD_AFTER_BACKWARD = 2, /* kept from forward to the end of backward */
	SHARDD_RESHARD_NEVER = 3,          /* kept until the parameters change */
	/* released after forward, gathered again for backward, then kept as with NEVER */
	SHARDD_RESHARD_AFTER_FORWARD_ONLY = 4,
};

/* How a gradient is divided by a factor that is not a power of two. 0: as PyTorch does on the
 * device, TRUE on a CPU, RECIPROCAL on a GPU (XLA's profile: TRUE on both). */
enum shardd_div_mode {
	SHARDD_DIV_TRUE = 1,       /* x / d */
	SHARDD_DIV_RECIPROCAL = 2, /* x * fp32(1 / d), with the inverse computed in fp64 */
};

/* A unit: parameters that are gathered and reduced together, fp32 in the daemon. FLAT: the flat
 * parameter is the row-major concatenation of the tensors in this order; rank r of W owns
 * elements [r*S, (r+1)*S), S = ceil(N/W) rounded up to a multiple of shard_multiple,
 * zero-padded at the end (fairscale's flat layout; m > 1: XLA's). DIM0: of every tensor rank r
 * owns rows [r*R, (r+1)*R), R = ceil(rows/W) (FSDP2's). Frozen tensors are laid out apart,
 * behind the others. shardd_tensor_places returns the place of every tensor. */
struct shardd_unit_spec {
	size_t size;      /* sizeof(struct shardd_unit_spec) */
	const char *name; /* unique in the job, up to 255 printable bytes */
	const struct shardd_tensor *tensors;
	size_t n_tensors;
	shardd_group group;
	enum shardd_dtype compute_dtype;  /* type of gathered parameters; 0: FP32 */
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

typedef uint32_t shardd_unit;

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

typedef uint64_t shardd_ticket;

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
};

/* Check whether an op is done. Return: 1 (done: the ticket has ended and @ret, if not NULL, is
 * filled), 0 (not yet), or a negative code (the op failed and the ticket has ended;
 * INVALID_ARGUMENT with native EBADF: no such ticket). Never blocks. Any thread. */
SHARDD_API int shardd_poll(shardd_client *c, shardd_ticket t, struct shardd_result *ret,
			   struct shardd_error *err);

/* Wait for an op, at most @timeout_ms (-1: until the op's own deadline). Return: 0 or a
 * negative code; DEADLINE_EXCEEDED with native EAGAIN means that only the wait
 * ended: the op continues and the ticket stays valid. Any thread. */
SHARDD_API int shardd_wait(shardd_client *c, shardd_ticket t, int timeout_ms,
			   struct shardd_result *ret, struct shardd_error *err);

/* Set the deadline of ops that are submitted on this client after this call; 0: the job's.
 * An op whose deadline passes ends with DEADLINE_EXCEEDED, also for its peers. Never
 * blocks. Any thread. */
SHARDD_API void shardd_set_timeout(shardd_client *c, uint32_t ms);

/* All functions below may be called from any thread. A _submit form waits only for another
 * thread that is entering the library. The plain form blocks until its op has ended, at the
 * latest at its deadline. The library holds no lock between calls: threads that use the same unit
 * must coordinate themselves. */

/* ------------------------------------------------------------ device memory */

/* Copy to or from memory that ops hand out; return when the copy is done. @dst (write) or @src
 * (read) is such a pointer. On the host it is ordinary memory. On a GPU it is a device address in
 * the current CUDA context or, if there is none, in the device's primary context, which the
 * library retains. If this thread has a stream (shardd_set_stream), the copy begins after the work
 * on it. Errors: INVALID_ARGUMENT (outside the memory that was handed out), INTERNAL (the device
 * refused). Any thread. */
SHARDD_API int shardd_write(shardd_client *c, void *dst, const void *src, size_t bytes,
			    struct shardd_error *err);
SHARDD_API int shardd_read(shardd_client *c, void *dst, const void *src, size_t bytes,
			   struct shardd_error *err);

/* GPUs: order the ops that this thread submits from now on with @stream (a CUstream or
 * cudaStream_t of the client's context; NULL is CUDA's default stream) instead of with the
 * CPU. An op begins on the device after the work that is on the stream when it is
 * submitted. The daemon answers when it has queued the op; shardd_wait or the plain form returns
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
 * thread. */
SHARDD_API int shardd_set_stream(shardd_client *c, void *stream, struct shardd_error *err);
/* Order ops with the CPU again: an op is answered when it has been executed. Never blocks. */
SHARDD_API void shardd_clear_stream(shardd_client *c);

/* Initialise a unit's parameters (collective) and zero its optimizer state.
 * seed: every tensor by its init; values depend on seed, unit, tensor and index,
 * not on the world size or the layout. broadcast: all values from @root's buffer, which holds the
 * unit's packed_elements in fp32, tensor after tensor without padding (other ranks pass 0). own:
 * each rank's shard from such a buffer of that rank. */
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

/* Gather the full parameters of a unit: N elements of compute_dtype, shared by all ranks
 * of the node, read-only. Gathers are counted: the same number of releases gives the memory back.
 * A unit that is gathered again while held has the same address. Does not wait for other ranks. */
SHARDD_API int shardd_gather_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				    struct shardd_error *err);
SHARDD_API int shardd_gather(shardd_client *c, shardd_unit u, const void **data,
			     struct shardd_error *err);

/* Drop one reference. Without references it does nothing. */
SHARDD_API int shardd_release_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				     struct shardd_error *err);
SHARDD_API int shardd_release(shardd_client *c, shardd_unit u, struct shardd_error *err);

/* ------------------------------------------------------------------ passes */

/* Guarded units are used in passes, in this order on each rank: begin and end of FORWARD, once for
 * each forward; begin of BACKWARD, reduce, end of BACKWARD. Forward may be computed again inside
 * backward. Steps, clipping, commits and initialisation are allowed while no unit is in a pass. A
 * call out of order is FAILED_PRECONDITION, which names the state, and changes nothing. */
enum shardd_pass { SHARDD_FORWARD = 1, SHARDD_BACKWARD = 2 };

/* Begin a pass and return the full parameters, as gather does; the pass has its own reference. They
 * stay until the end of the pass (backward: until the unit is reduced), or longer if the unit's
 * reshard policy says so; the address then stays the same. Does not wait for other ranks. */
SHARDD_API int shardd_begin_pass_submit(shardd_client *c, shardd_unit u, enum shardd_pass pass,
					shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_begin_pass(shardd_client *c, shardd_unit u, enum shardd_pass pass,
				 const void **data, struct shardd_error *err);

/* End a pass. @sync: BACKWARD: true: the gradients of this pass were reduced; false: they are added
 * up for a later pass to reduce (no_sync), or there are none. FORWARD: ignored.
 * Errors: FAILED_PRECONDITION (also a backward with @sync but without a reduce). */
SHARDD_API int shardd_end_pass_submit(shardd_client *c, shardd_unit u, enum shardd_pass pass,
				      bool sync, shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_end_pass(shardd_client *c, shardd_unit u, enum shardd_pass pass, bool sync,
			       struct shardd_error *err);

/* Set this session's policy for guarded units from now on. @reshard: 0: as registered. @units:
 * @n entries, at least one. */
SHARDD_API int shardd_set_reshard_submit(shardd_client *c, const shardd_unit *units, size_t n,
					 enum shardd_reshard reshard, shardd_ticket *t,
					 struct shardd_error *err);
SHARDD_API int shardd_set_reshard(shardd_client *c, const shardd_unit *units, size_t n,
				  enum shardd_reshard reshard, struct shardd_error *err);

/* The factors by which reductions divide. Fields and the meaning of 0 are as in shardd_unit_spec,
 * whatever the unit was registered with. */
struct shardd_factors {
	size_t size;                    /* sizeof(struct shardd_factors) */
	double pre_divide, post_divide; /* FAIRSCALE, XLA, FSDP1_HOOK */
	double divide_factor;           /* FSDP2 */
	bool force_sum;                 /* FSDP2 */
};

/* Set the factors for the reductions of @u from now until the end of the epoch (collective; all
 * ranks give the same). Errors: INVALID_ARGUMENT (a factor that the unit's profile does not have),
 * FAILED_PRECONDITION (a pass is in progress: a rank has its gradient buffer, or an all-reduce is
 * deferred; or the ranks do not agree). */
SHARDD_API int shardd_set_factors_submit(shardd_client *c, shardd_unit u,
					 const struct shardd_factors *factors, shardd_ticket *t,
					 struct shardd_error *err);
SHARDD_API int shardd_set_factors(shardd_client *c, shardd_unit u,
				  const struct shardd_factors *factors, struct shardd_error *err);

/* Start gathering @units, in this order, as soon as this session has @u in @pass. @n: up to 16;
 * 0: removes the list. Without any list the daemon learns the order in one step and follows it in
 * the next. A list only saves time; it makes no op fail: see docs/protocol.md. */
SHARDD_API int shardd_set_prefetch_submit(shardd_client *c, shardd_unit u, enum shardd_pass pass,
					  const shardd_unit *units, size_t n, shardd_ticket *t,
					  struct shardd_error *err);
SHARDD_API int shardd_set_prefetch(shardd_client *c, shardd_unit u, enum shardd_pass pass,
				   const shardd_unit *units, size_t n, struct shardd_error *err);

/* Return this rank's buffer for a unit's full gradients: gradient_elements of gradient_dtype,
 * writable. Its contents are undefined: write all of it. A second call before the reduce returns
 * the same buffer. The reduce takes it back. */
SHARDD_API int shardd_gradient_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				      struct shardd_error *err);
SHARDD_API int shardd_gradient(shardd_client *c, shardd_unit u, void **data,
			       struct shardd_error *err);

/* Allocate and free a writable buffer of this session, for init, all_reduce and broadcast. */
SHARDD_API int shardd_alloc_submit(shardd_client *c, uint64_t bytes, shardd_ticket *t,
				   struct shardd_error *err);
SHARDD_API int shardd_alloc(shardd_client *c, uint64_t bytes, uint64_t *buffer, void **data,
			    struct shardd_error *err);
SHARDD_API int shardd_free_submit(shardd_client *c, uint64_t buffer, shardd_ticket *t,
				  struct shardd_error *err);
SHARDD_API int shardd_free(shardd_client *c, uint64_t buffer, struct shardd_error *err);

/* Reduce the gradient buffers of all ranks of the unit's group, and what they have
 * accumulated, into their fp32 gradient shards (collective). Values are divided, cast and added in
 * the order of the unit's reduce profile, and added to what the shard holds since the last step. */
SHARDD_API int shardd_reduce_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				    struct shardd_error *err);
SHARDD_API int shardd_reduce(shardd_client *c, shardd_unit u, struct shardd_error *err);

/* Reduce inside each replica only (HYBRID, REPLICATE; collective). The sums are kept, and the next
 * shardd_reduce adds its own to them before the all-reduce over replicas. */
SHARDD_API int shardd_reduce_deferred_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
					     struct shardd_error *err);
SHARDD_API int shardd_reduce_deferred(shardd_client *c, shardd_unit u, struct shardd_error *err);

/* Add this rank's gradient buffer to what it has accumulated for the unit since the last reduce,
 * without communication (no_sync). The next reduce takes all of it. The buffer is given back: ask
 * for it again. Needs the memory of a gradient buffer until the next reduce. */
SHARDD_API int shardd_accumulate_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
					struct shardd_error *err);
SHARDD_API int shardd_accumulate(shardd_client *c, shardd_unit u, struct shardd_error *err);

enum shardd_reduce_op { SHARDD_SUM = 1, SHARDD_AVG = 2, SHARDD_MAX = 3, SHARDD_MIN = 4 };

/* Reduce @count elements at byte @offset of each member's buffer; all members get the result
 * (collective). Computed in fp32 in the group's order. */
SHARDD_API int shardd_all_reduce_submit(shardd_client *c, shardd_group g, uint64_t buffer,
					uint64_t offset, uint64_t count, enum shardd_dtype dtype,
					enum shardd_reduce_op op, shardd_ticket *t,
					struct shardd_error *err);
SHARDD_API int shardd_all_reduce(shardd_client *c, shardd_group g, uint64_t buffer, uint64_t offset,
				 uint64_t count, enum shardd_dtype dtype, enum shardd_reduce_op op,
				 struct shardd_error *err);

/* Copy @bytes at @offset of @root's buffer into everybody's buffer (collective). @root: a rank
 * of the job that is a member of the group. */
SHARDD_API int shardd_broadcast_submit(shardd_client *c, shardd_group g, uint64_t buffer,
				       uint64_t offset, uint64_t bytes, uint32_t root,
				       shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_broadcast(shardd_client *c, shardd_group g, uint64_t buffer, uint64_t offset,
				uint64_t bytes, uint32_t root, struct shardd_error *err);

SHARDD_API int shardd_barrier_submit(shardd_client *c, shardd_group g, shardd_ticket *t,
				     struct shardd_error *err);
SHARDD_API int shardd_barrier(shardd_client *c, shardd_group g, struct shardd_error *err);

/* Make the daemon answer without doing anything, to see whether its loop answers and how fast. Not
 * an op: it has no number and needs no job. UNIMPLEMENTED without a ring (SHARDD_RING=off, handover
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

/* Step the optimizer of every unit of the group that has a gradient, and clear the
 * gradients (collective). @lr: learning rate of this step; NULL: the units' own.
 * No rank may have these units gathered. The step is applied as a whole by the
 * following commit, or earlier by the next gather, reduce, clip, initialise or
 * step. If a trainer dies before it is applied, the parameters do not change. */
SHARDD_API int shardd_step_submit(shardd_client *c, shardd_group g, const double *lr,
				  shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_step(shardd_client *c, shardd_group g, const double *lr,
			   struct shardd_error *err);

/* -- clipping, scaling, plans ------------------------------------------------- */

/* Which clipping factor follows from a norm (docs/protocol.md). */
enum shardd_clip_profile {
	SHARDD_CLIP_FAIRSCALE = 1, /* applied only if below 1: a NaN changes nothing */
	SHARDD_CLIP_XLA = 2,       /* clamped to [0, 1], always applied */
	SHARDD_CLIP_TORCH = 3,     /* at most 1, always applied: a NaN makes all NaN */
};

struct shardd_clip {
	size_t size; /* sizeof(struct shardd_clip) */
	double max_norm;
	double norm_type;                 /* above 0, or INFINITY; 0: 2 */
	enum shardd_clip_profile profile; /* 0: FAIRSCALE */
	bool error_if_nonfinite;          /* FAILED_PRECONDITION, without any change */
	const shardd_unit *units;         /* of the group; NULL: all of it. Not for a plan */
	size_t n_units;
	bool whole_job; /* units of every group; with SHARDD_WORLD, no units, not for a plan */
};

/* As shardd_clip_grad_norm, with all options. */
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
 * @inv_scale (collective). Once per step. @found_inf: true if a shard of any rank had an infinity
 * or NaN. May be NULL: the next step can use it, too. */
SHARDD_API int shardd_unscale_submit(shardd_client *c, shardd_group g, double inv_scale,
				     shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_unscale(shardd_client *c, shardd_group g, double inv_scale, bool *found_inf,
			      struct shardd_error *err);

/* The optimizer's settings for one step. They replace all settings that the tensors were registered
 * with, including those that are 0 here. */
struct shardd_step_settings {
	double lr;    /* not multiplied by the tensor's lr_factor */
	bool lr_fp32; /* Adam, AdamW: compute with lr in fp32, as PyTorch does with a tensor */
	double weight_decay;
	double momentum, dampening; /* SGD; momentum 0 for units registered with 0 */
	bool nesterov;              /* SGD */
	double beta1, beta2, eps;   /* Adam, AdamW */
	bool maximize;
	/* The tensors with these settings: tensors[i], by its index in the spec, of unit units[i].
	 * n 0: all tensors that no other settings of the step name. */
	const shardd_unit *units;
	const uint32_t *tensors;
	size_t n;
};

struct shardd_step_options {
	size_t size;        /* sizeof(struct shardd_step_options) */
	const double *lr;   /* for this step; NULL: the units' own, or the plan's */
	bool skip_if_found; /* if the last unscale found an infinity: drop gradients, do not step */
	bool discard;       /* drop gradients and do not step in any case */
	/* for this step; NULL: none. @lr then applies to the tensors that they do not name */
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

/* As shardd_reduce, but not the unit's last reduce before the step: an optimizer in backward,
 * a plan and the trainer's own optimizer wait for the last one. */
SHARDD_API int shardd_reduce_more_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
					 struct shardd_error *err);
SHARDD_API int shardd_reduce_more(shardd_client *c, shardd_unit u, struct shardd_error *err);

/* As shardd_reduce, for a rank that has not used the unit in this pass and has filled its gradient
 * buffer with zeros; the zeros count if another rank has used the unit. If all ranks call this and
 * none has accumulated, nothing is reduced, and the next step skips the unit as if it had been in
 * no backward pass. @by_all (and the result's skipped): true in that case; may be NULL. */
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

/* As shardd_reduce, for a rank that has used some tensors of the unit but not those in @o. It has
 * filled their part of its gradient buffer with zeros, which count if another rank has used
 * them. A tensor that no rank has used has no gradient (shardd_unit_unused): the next step skips it
 * and its optimizer state, and does not count for it. @ret: skipped: no rank has used any tensor of
 * the unit. May be NULL. Errors: INVALID_ARGUMENT (no such tensors). */
SHARDD_API int shardd_reduce_with_submit(shardd_client *c, shardd_unit u,
					 const struct shardd_reduce_options *o, shardd_ticket *t,
					 struct shardd_error *err);
SHARDD_API int shardd_reduce_with(shardd_client *c, shardd_unit u,
				  const struct shardd_reduce_options *o, struct shardd_result *ret,
				  struct shardd_error *err);

/* Which tensors of @u no rank has used, as of the unit's last reduce whose end this client has
 * seen. @ret: @n entries, one for each tensor of the unit. Errors: NOT_FOUND (not registered by
 * this client), INVALID_ARGUMENT (@n is not how many there are). Never blocks. Any thread. */
SHARDD_API int shardd_unit_unused(shardd_client *c, shardd_unit u, bool *ret, size_t n,
				  struct shardd_error *err);

struct shardd_plan {
	size_t size;                    /* sizeof(struct shardd_plan) */
	const struct shardd_clip *clip; /* NULL: none */
	double inv_scale;               /* 0: none; found_inf skips the step */
	const double *lr;               /* for the steps of this pass; NULL: the units' own */
	const struct shardd_step_settings *settings; /* for the steps of this pass */
	size_t n_settings;
};

/* Say before a backward pass what is done with its gradients as they arrive, until the step
 * (collective). With a clip or an inv_scale, optimizers in backward wait for the step, which
 * applies all or skips all. The norm comes with shardd_step_with. */
SHARDD_API int shardd_plan_backward_submit(shardd_client *c, shardd_group g,
					   const struct shardd_plan *plan, shardd_ticket *t,
					   struct shardd_error *err);
SHARDD_API int shardd_plan_backward(shardd_client *c, shardd_group g,
				    const struct shardd_plan *plan, struct shardd_error *err);

/* A shard for the trainer's own optimizer: fp32 copies of parameters, which it changes, and of
 * their gradient. Every trained element of the unit is in the shard of exactly one rank, whatever
 * the strategy. A rank may have no elements. */
struct shardd_shard {
	shardd_unit unit;
	uint64_t elements;
	float *params;
	const float *gradient;
};

/* SHARDD_OPTIM_BY_TRAINER: return this rank's shard of the next unit of the group whose last reduce
 * has ended, in the order of the reduces, each exactly once. Waits for it, at most until the op's
 * deadline. With a ticket, shardd_result has the values. */
SHARDD_API int shardd_next_shard_submit(shardd_client *c, shardd_group g, shardd_ticket *t,
					struct shardd_error *err);
SHARDD_API int shardd_next_shard(shardd_client *c, shardd_group g, struct shardd_shard *ret,
				 struct shardd_error *err);

/* Elements [first, first + elements) of a tensor; they begin at element at of the shard. */
struct shardd_shard_piece {
	uint32_t tensor; /* index in the unit's spec; never an alias */
	uint64_t first;
	uint64_t elements;
	uint64_t at;
};

/* The pieces of the shard of @u that this client received last, ascending; padding lies between
 * them. @ret: room for @n pieces. @ret_n: how many there are. They stay the same until the unit is
 * converted. Errors: NOT_FOUND (not registered by this client). Never
 * blocks. Any thread. */
SHARDD_API int shardd_shard_pieces(shardd_client *c, shardd_unit u, struct shardd_shard_piece *ret,
				   size_t n, size_t *ret_n, struct shardd_error *err);

/* Return the changed parameters to the unit. They are taken when no rank has the unit gathered any
 * more. The shard's memory becomes invalid. The unit can be gathered again when all ranks have
 * called this. */
SHARDD_API int shardd_shard_done_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
					struct shardd_error *err);
SHARDD_API int shardd_shard_done(shardd_client *c, shardd_unit u, struct shardd_error *err);

/* The scale of a loss, by the rule of PyTorch's GradScaler. Every rank has its own; they stay
 * equal, since found_inf is the same on all ranks. These functions make no call to the daemon. */
struct shardd_scaler {
	float scale; /* multiply the loss by it */
	double growth_factor;
	double backoff_factor;
	uint32_t growth_interval; /* steps without an infinity until the scale grows */
	uint32_t steps;           /* since the scale changed */
};

/* Set the defaults: scale 65536, factors 2 and 0.5, interval 2000. Any thread. */
SHARDD_API void shardd_scaler_init(struct shardd_scaler *s);
/* The inverse of the scale, for shardd_unscale. Any thread. */
SHARDD_API double shardd_scaler_inverse(const struct shardd_scaler *s);
/* Update the scale after a step. @found_inf: of that step. One thread at a time. */
SHARDD_API void shardd_scaler_update(struct shardd_scaler *s, bool found_inf);

/* Make @step the step from which a restarted trainer continues, on all ranks or on none
 * (collective over the job). @blob: up to 64 KiB of this rank's own state (data
 * position, random generators); copied. */
SHARDD_API int shardd_commit_submit(shardd_client *c, uint64_t step, const void *blob, size_t bytes,
				    shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_commit(shardd_client *c, uint64_t step, const void *blob, size_t bytes,
			     struct shardd_error *err);

/* Return this rank's own buffers of a unit, readable and writable, initially zero. They stay with
 * the job, even when this trainer ends. */
SHARDD_API int shardd_unit_buffers_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
					  struct shardd_error *err);
SHARDD_API int shardd_unit_buffers(shardd_client *c, shardd_unit u, void **data,
				   struct shardd_error *err);

/* Copy @root's buffers to all ranks (collective): of one unit, or with @u 0 of all units of group
 * @g. */
SHARDD_API int shardd_broadcast_buffers_submit(shardd_client *c, shardd_unit u, shardd_group g,
					       uint32_t root, shardd_ticket *t,
					       struct shardd_error *err);
SHARDD_API int shardd_broadcast_buffers(shardd_client *c, shardd_unit u, shardd_group g,
					uint32_t root, struct shardd_error *err);

/* Return the stored fp32 parameters of a unit in writable memory of this rank's own, laid out as in
 * gather (collective). The unit must not be gathered. Until shardd_return it cannot be gathered,
 * reduced, initialised, converted or stepped. */
SHARDD_API int shardd_summon_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				    struct shardd_error *err);
SHARDD_API int shardd_summon(shardd_client *c, shardd_unit u, void **data,
			     struct shardd_error *err);
/* Return that memory (collective). With @write, each rank's own shard of it becomes the
 * parameters; what a rank wrote outside its shard is dropped. */
SHARDD_API int shardd_return_submit(shardd_client *c, shardd_unit u, bool write, shardd_ticket *t,
				    struct shardd_error *err);
SHARDD_API int shardd_return(shardd_client *c, shardd_unit u, bool write, struct shardd_error *err);

/* As shardd_summon, for array @state of the optimizer's state; 0: the parameters. Adam, AdamW:
 * 1 exp_avg, 2 exp_avg_sq, 3 max_exp_avg_sq (amsgrad); SGD with momentum: 1. Frozen elements are 0
 * in it. @optimizer_steps: how many steps the unit has had; may be NULL. INVALID_ARGUMENT: the
 * optimizer has no such array. */
SHARDD_API int shardd_summon_state_submit(shardd_client *c, shardd_unit u, uint32_t state,
					  shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_summon_state(shardd_client *c, shardd_unit u, uint32_t state, void **data,
				   uint64_t *optimizer_steps, struct shardd_error *err);
/* Return that memory (collective). With @write, each rank's own shard of it becomes that array, and
 * @optimizer_steps, if not NULL, becomes the number of steps that the unit has had: up to 2^52, and
 * the same on all ranks. */
SHARDD_API int shardd_return_state_submit(shardd_client *c, shardd_unit u, bool write,
					  const uint64_t *optimizer_steps, shardd_ticket *t,
					  struct shardd_error *err);
SHARDD_API int shardd_return_state(shardd_client *c, shardd_unit u, bool write,
				   const uint64_t *optimizer_steps, struct shardd_error *err);

struct shardd_return_options {
	size_t size; /* sizeof(struct shardd_return_options) */
	bool write;
	const uint64_t *optimizer_steps; /* NULL: unchanged */
	/* Steps of each tensor, none above @optimizer_steps; ignored for tensors that are not
	 * trained. NULL: all tensors get @optimizer_steps if that changes, else they keep theirs. */
	const uint64_t *tensor_steps;
	size_t n_tensors; /* of @tensor_steps: all of the unit's, or 0 */
};

/* As shardd_return_state, for units with tensors that were not used in every step. */
SHARDD_API int shardd_return_with_submit(shardd_client *c, shardd_unit u,
					 const struct shardd_return_options *o, shardd_ticket *t,
					 struct shardd_error *err);
SHARDD_API int shardd_return_with(shardd_client *c, shardd_unit u,
				  const struct shardd_return_options *o, struct shardd_error *err);

/* How many steps each tensor of @u had had at the last summon whose end this client has seen. @ret:
 * @n entries, one for each tensor of the unit. Fewer than the unit's steps if no rank used the
 * tensor in some of them (shardd_reduce_with). Errors: NOT_FOUND (not registered by this client),
 * INVALID_ARGUMENT (@n is not how many there are, or it was not summoned). Never blocks. Any
 * thread. */
SHARDD_API int shardd_unit_steps(shardd_client *c, shardd_unit u, uint64_t *ret, size_t n,
				 struct shardd_error *err);

/* The new layout of units. */
struct shardd_conversion {
	size_t size;                   /* sizeof(struct shardd_conversion) */
	enum shardd_layout layout;     /* 0: FLAT */
	uint32_t shard_multiple;       /* FLAT; 0: 1 */
	enum shardd_strategy strategy; /* 0: unchanged */
	uint32_t shard_ranks;          /* with HYBRID */
};

/* Change the layout of units (collective). Parameters, gradients and optimizer state keep their
 * bits. @units: @n of one group, ascending. No rank may have them gathered or summoned, or have a
 * gradient buffer of them. From then on they are registered with the new layout. The conversion
 * needs memory for both layouts; the old memory is given back when all units that were
 * registered in one call have been converted. If it is refused, nothing changes.
 * shardd_tensor_places returns the new places once the plain form, or shardd_wait or shardd_poll
 * of the _submit form, has returned. */
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
