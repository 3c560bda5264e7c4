/*
 * The ops of a trainer: for each verb its options and the function that submits it. Part of
 * shardd/shardd.h, which includes it and describes what holds for all calls.
 *
 * All functions may be called from any thread. They wait only for another thread that is entering
 * the library. Options, and what they point to, are borrowed during the call unless a comment says
 * otherwise. @t: the ticket. The library holds no lock between calls: threads that use the same
 * unit must coordinate themselves.
 */
#ifndef SHARDD_OPS_H
#define SHARDD_OPS_H

#include "shardd/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The options of @verb with some fields set, for shardd_submit_VERB: a pointer to a struct that
 * lives as long as the block. C only; SHARDD_OPTIONS(gather, .unit = u). */
#ifndef __cplusplus
#define SHARDD_OPTIONS(verb, ...)                                                           \
	(&(struct shardd_##verb##_options){ .size = sizeof(struct shardd_##verb##_options), \
					    __VA_ARGS__ })
#endif

/* -------------------------------------------------------------- parameters */

/* Initialise a unit's parameters (collective) and zero its optimizer state. FROM_SEED: every
 * tensor by its init; values depend on seed, unit, tensor and index, not on the world size or
 * the layout. FROM_ROOT: all values from @root's buffer, which holds the unit's packed_elements
 * in storage_dtype, tensor after tensor without padding. FROM_OWN: each rank's shard from such a
 * buffer of that rank. Errors: INVALID_ARGUMENT (also a field that @from does not use and that
 * is not 0). */
enum shardd_init_from { SHARDD_FROM_SEED = 1, SHARDD_FROM_ROOT = 2, SHARDD_FROM_OWN = 3 };

struct shardd_init_options {
	size_t size; /* sizeof(struct shardd_init_options) */
	shardd_unit unit;
	enum shardd_init_from from; /* where the values come from */
	uint64_t seed;              /* FROM_SEED */
	uint32_t root;              /* FROM_ROOT: the rank */
	uint64_t buffer; /* FROM_ROOT: on @root, 0 on the others; FROM_OWN: on all ranks */
};
SHARDD_API int shardd_submit_init(shardd_client *c, const struct shardd_init_options *options,
				  shardd_ticket *t, struct shardd_error *err);

/* Gather the full parameters of a unit: N elements of compute_dtype, shared by all ranks
 * of the node, read-only. Gathers are counted: the same number of releases gives the memory back.
 * A unit that is gathered again while held has the same address. Does not wait for other ranks. */
struct shardd_gather_options {
	size_t size; /* sizeof(struct shardd_gather_options) */
	shardd_unit unit;
};
SHARDD_API int shardd_submit_gather(shardd_client *c, const struct shardd_gather_options *options,
				    shardd_ticket *t, struct shardd_error *err);

/* Drop one reference. Without references it does nothing. */
struct shardd_release_options {
	size_t size; /* sizeof(struct shardd_release_options) */
	shardd_unit unit;
};
SHARDD_API int shardd_submit_release(shardd_client *c, const struct shardd_release_options *options,
				     shardd_ticket *t, struct shardd_error *err);

/* ------------------------------------------------------------------ passes */

/* Guarded units are used in passes, in this order on each rank: begin and end of FORWARD, once for
 * each forward; begin of BACKWARD, reduce, end of BACKWARD. Forward may be computed again inside
 * backward. Steps, clipping, commits and initialisation are allowed while no unit is in a pass. A
 * call out of order is FAILED_PRECONDITION, which names the state, and changes nothing. */
enum shardd_pass { SHARDD_FORWARD = 1, SHARDD_BACKWARD = 2 };

/* Begin a pass and return the full parameters, as gather does; the pass has its own reference. They
 * stay until the end of the pass (backward: until the unit is reduced), or longer if the unit's
 * reshard policy says so; the address then stays the same. Does not wait for other ranks. */
struct shardd_begin_pass_options {
	size_t size; /* sizeof(struct shardd_begin_pass_options) */
	shardd_unit unit;
	enum shardd_pass pass;
};
SHARDD_API int shardd_submit_begin_pass(shardd_client *c,
					const struct shardd_begin_pass_options *options,
					shardd_ticket *t, struct shardd_error *err);

/* End a pass. @sync: BACKWARD: true: the gradients of this pass were reduced; false: they are added
 * up for a later pass to reduce (no_sync), or there are none. FORWARD: ignored.
 * Errors: FAILED_PRECONDITION (also a backward with @sync but without a reduce). */
struct shardd_end_pass_options {
	size_t size; /* sizeof(struct shardd_end_pass_options) */
	shardd_unit unit;
	enum shardd_pass pass;
	bool sync; /* BACKWARD */
};
SHARDD_API int shardd_submit_end_pass(shardd_client *c,
				      const struct shardd_end_pass_options *options,
				      shardd_ticket *t, struct shardd_error *err);

/* Set this session's policy for guarded units from now on. @reshard: 0: as registered. @units:
 * @n_units entries, at least one. */
struct shardd_set_reshard_options {
	size_t size; /* sizeof(struct shardd_set_reshard_options) */
	const shardd_unit *units;
	size_t n_units;
	enum shardd_reshard reshard;
};
SHARDD_API int shardd_submit_set_reshard(shardd_client *c,
					 const struct shardd_set_reshard_options *options,
					 shardd_ticket *t, struct shardd_error *err);

/* Set the factors by which the reductions of a unit divide, from now until the end of the epoch
 * (collective; all ranks give the same). Fields and the meaning of 0 are as in shardd_unit_spec,
 * whatever the unit was registered with. Errors: INVALID_ARGUMENT (a factor that the unit's profile
 * does not have), FAILED_PRECONDITION (a pass is in progress: a rank has its gradient buffer, or an
 * all-reduce is deferred; or the ranks do not agree). */
struct shardd_set_factors_options {
	size_t size; /* sizeof(struct shardd_set_factors_options) */
	shardd_unit unit;
	double pre_divide;    /* FAIRSCALE, XLA, FSDP1_HOOK */
	double post_divide;   /* the same */
	double divide_factor; /* FSDP2 */
	bool force_sum;       /* FSDP2 */
};
SHARDD_API int shardd_submit_set_factors(shardd_client *c,
					 const struct shardd_set_factors_options *options,
					 shardd_ticket *t, struct shardd_error *err);

/* Start gathering @units, in this order, as soon as this session has @unit in @pass. @n_units: up
 * to 16; 0: removes the list. Without any list the daemon learns the order in one step and follows
 * it in the next. A list only saves time; it makes no op fail: see docs/protocol.md. */
struct shardd_set_prefetch_options {
	size_t size; /* sizeof(struct shardd_set_prefetch_options) */
	shardd_unit unit;
	enum shardd_pass pass;
	const shardd_unit *units;
	size_t n_units;
};
SHARDD_API int shardd_submit_set_prefetch(shardd_client *c,
					  const struct shardd_set_prefetch_options *options,
					  shardd_ticket *t, struct shardd_error *err);

/* Return this rank's buffer for a unit's full gradients: gradient_elements of gradient_dtype,
 * writable. Its contents are undefined: write all of it. A second call before the reduce returns
 * the same buffer. The reduce takes it back. */
struct shardd_gradient_options {
	size_t size; /* sizeof(struct shardd_gradient_options) */
	shardd_unit unit;
};
SHARDD_API int shardd_submit_gradient(shardd_client *c,
				      const struct shardd_gradient_options *options,
				      shardd_ticket *t, struct shardd_error *err);

/* Allocate and free a writable buffer of this session, for init, all_reduce and broadcast; or free
 * units that no rank needs any more (@units, collective): parameters, gradients, optimizer state
 * and buffers. No rank may have anything of them. Memory of units that were registered in one call
 * goes with the last of them: parameters are unmapped (of the host; pointers to them are invalid
 * from then on), buffers, and what a GPU has mapped, stay on the job's account until the process
 * ends.
 * Their numbers are used again when 1024 others have been dropped since, their names at once. */
struct shardd_alloc_options {
	size_t size; /* sizeof(struct shardd_alloc_options) */
	uint64_t bytes;
};
SHARDD_API int shardd_submit_alloc(shardd_client *c, const struct shardd_alloc_options *options,
				   shardd_ticket *t, struct shardd_error *err);
struct shardd_free_options {
	size_t size; /* sizeof(struct shardd_free_options) */
	uint64_t buffer;
	const shardd_unit *units; /* instead of @buffer: of one group, ascending; NULL: none */
	size_t n_units;
};
SHARDD_API int shardd_submit_free(shardd_client *c, const struct shardd_free_options *options,
				  shardd_ticket *t, struct shardd_error *err);

/* Reduce the gradient buffers of all ranks of the unit's group, and what they have
 * accumulated, into their fp32 gradient shards (collective). Values are divided, cast and added in
 * the order of the unit's reduce profile, and added to what the shard holds since the last step.
 * @unused: trained tensors that this rank has not used. It has filled their part of its gradient
 * buffer with zeros, which count if another rank has used them. A tensor that no rank has used has
 * no gradient (shardd_unit_unused): the next step skips it and its optimizer state, and does not
 * count for it. @unit_unused: the same for the whole unit; all of the buffer is zeros. If all ranks
 * set it and none has accumulated, nothing is reduced, and the next step skips the unit as if it
 * had been in no backward pass. The result's skipped: no rank has used any tensor of the unit.
 * @more: an optimizer in backward, a plan and the trainer's own optimizer wait for the last reduce.
 * @deferred: reduce inside each replica only (HYBRID, REPLICATE). The sums are kept, and the next
 * reduce adds its own to them before the all-reduce over replicas. Errors: INVALID_ARGUMENT (no
 * such tensors; options that exclude each other). */
struct shardd_reduce_options {
	size_t size; /* sizeof(struct shardd_reduce_options) */
	shardd_unit unit;
	const uint32_t *unused; /* trained tensors by their index, ascending; NULL: none */
	size_t n_unused;
	bool more;        /* not the unit's last reduce before the step */
	bool deferred;    /* inside each replica only */
	bool unit_unused; /* this rank has used no tensor of the unit */
};
SHARDD_API int shardd_submit_reduce(shardd_client *c, const struct shardd_reduce_options *options,
				    shardd_ticket *t, struct shardd_error *err);

/* Add this rank's gradient buffer to what it has accumulated for the unit since the last reduce,
 * without communication (no_sync). The next reduce takes all of it. The buffer is given back: ask
 * for it again. Needs the memory of a gradient buffer until the next reduce. */
struct shardd_accumulate_options {
	size_t size; /* sizeof(struct shardd_accumulate_options) */
	shardd_unit unit;
};
SHARDD_API int shardd_submit_accumulate(shardd_client *c,
					const struct shardd_accumulate_options *options,
					shardd_ticket *t, struct shardd_error *err);

enum shardd_reduce_op { SHARDD_SUM = 1, SHARDD_AVG = 2, SHARDD_MAX = 3, SHARDD_MIN = 4 };

/* Reduce @count elements at byte @offset of each member's buffer; all members get the result
 * (collective). Computed in fp32 in the group's order. */
struct shardd_all_reduce_options {
	size_t size; /* sizeof(struct shardd_all_reduce_options) */
	shardd_group group;
	uint64_t buffer;
	uint64_t offset; /* bytes */
	uint64_t count;  /* elements */
	enum shardd_dtype dtype;
	enum shardd_reduce_op op;
};
SHARDD_API int shardd_submit_all_reduce(shardd_client *c,
					const struct shardd_all_reduce_options *options,
					shardd_ticket *t, struct shardd_error *err);

/* Copy @bytes at @offset of @root's buffer into the buffer of every member (collective). @root: a
 * rank of the job that is a member of the group. */
struct shardd_broadcast_options {
	size_t size; /* sizeof(struct shardd_broadcast_options) */
	shardd_group group;
	uint64_t buffer;
	uint64_t offset;
	uint64_t bytes;
	uint32_t root;
};
SHARDD_API int shardd_submit_broadcast(shardd_client *c,
				       const struct shardd_broadcast_options *options,
				       shardd_ticket *t, struct shardd_error *err);

struct shardd_barrier_options {
	size_t size; /* sizeof(struct shardd_barrier_options) */
	shardd_group group;
};
SHARDD_API int shardd_submit_barrier(shardd_client *c, const struct shardd_barrier_options *options,
				     shardd_ticket *t, struct shardd_error *err);

/* Make the daemon answer without doing anything, to see whether its loop answers and how fast. Not
 * an op: it has no number and needs no job. UNIMPLEMENTED without a ring (SHARDD_RING=off, handover
 * by IPC handle, an older daemon). */
struct shardd_nop_options {
	size_t size; /* sizeof(struct shardd_nop_options) */
};
SHARDD_API int shardd_submit_nop(shardd_client *c, const struct shardd_nop_options *options,
				 shardd_ticket *t, struct shardd_error *err);

/* -- clipping, scaling, plans ------------------------------------------------- */

/* Which clipping factor follows from a norm (docs/protocol.md). */
enum shardd_clip_profile {
	SHARDD_CLIP_FAIRSCALE = 1, /* applied only if below 1: a NaN changes nothing */
	SHARDD_CLIP_XLA = 2,       /* clamped to [0, 1], always applied */
	SHARDD_CLIP_TORCH = 3,     /* at most 1, always applied: a NaN makes all NaN */
};

/* Scale the gradient shards of all units of the group so that their total norm is at most @max_norm
 * (collective): coef = max_norm/(total + 1e-6). With FAIRSCALE's rule it is applied only if below
 * 1: a NaN norm changes nothing. The result's total_norm: before clipping. @by_value: clamp every
 * element to [-@value, @value] instead. Errors: INVALID_ARGUMENT. */
struct shardd_clip_options {
	size_t size; /* sizeof(struct shardd_clip_options) */
	shardd_group group;
	double max_norm;
	double norm_type;                 /* above 0, or INFINITY; 0: 2 */
	enum shardd_clip_profile profile; /* 0: FAIRSCALE */
	bool error_if_nonfinite;          /* FAILED_PRECONDITION, without any change */
	const shardd_unit *units;         /* of the group; NULL: all of it. Not for a plan */
	size_t n_units;
	bool whole_job; /* units of every group; with SHARDD_WORLD, no units, not for a plan */
	bool by_value;  /* clamp elements instead; without all but group, value, units */
	double value;
};

SHARDD_API int shardd_submit_clip(shardd_client *c, const struct shardd_clip_options *options,
				  shardd_ticket *t, struct shardd_error *err);

/* Undo the scaling of the loss: multiply the gradient shards of the group's units by
 * @inv_scale (collective). Once per step. The result's found_inf: a shard of any rank had an
 * infinity or NaN; the next step can use it, too. */
struct shardd_unscale_options {
	size_t size; /* sizeof(struct shardd_unscale_options) */
	shardd_group group;
	double inv_scale;
};
SHARDD_API int shardd_submit_unscale(shardd_client *c, const struct shardd_unscale_options *options,
				     shardd_ticket *t, struct shardd_error *err);

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

/* Step the optimizer of every unit of the group that has a gradient, and clear the gradients
 * (collective). No rank may have these units gathered. The step is applied as a whole by the
 * following commit, or earlier by the next gather, reduce, clip, initialise or step. If a trainer
 * dies before it is applied, the parameters do not change. The result: skipped, found_inf and, with
 * a plan, total_norm. Errors of settings: INVALID_ARGUMENT (a number out of range, a tensor that is
 * not trained, twice, or of another group; momentum for a unit that was registered without),
 * NOT_FOUND (no such unit), FAILED_PRECONDITION (ranks that do not agree). */
struct shardd_step_options {
	size_t size; /* sizeof(struct shardd_step_options) */
	shardd_group group;
	const double *lr;   /* for this step; NULL: the units' own, or the plan's */
	bool skip_if_found; /* if the last unscale found an infinity: drop gradients, do not step */
	bool discard;       /* drop gradients and do not step in any case */
	/* for this step; NULL: none. @lr then applies to the tensors that they do not name */
	const struct shardd_step_settings *settings;
	size_t n_settings;
	/* The number of this step, above the one before it, and with it this rank's own state, as
	 * in shardd_submit_commit. Both take effect when the step is applied: a trainer that joins
	 * after a death finds them (struct shardd_membership), without a commit. Group 0 only,
	 * the same number on all ranks. NULL: without. A blob of 0 bytes: the last one stays */
	const uint64_t *number;
	const void *blob;
	size_t blob_bytes;
};

SHARDD_API int shardd_submit_step(shardd_client *c, const struct shardd_step_options *options,
				  shardd_ticket *t, struct shardd_error *err);

/* Which tensors of @u no rank has used, as of the unit's last reduce whose end this client has
 * seen. @ret: @n entries, one for each tensor of the unit. Errors: NOT_FOUND (not registered by
 * this client), INVALID_ARGUMENT (@n is not how many there are). Never blocks. Any thread. */
SHARDD_API int shardd_unit_unused(shardd_client *c, shardd_unit u, bool *ret, size_t n,
				  struct shardd_error *err);

struct shardd_plan_backward_options {
	size_t size; /* sizeof(struct shardd_plan_backward_options) */
	shardd_group group;
	const struct shardd_clip_options *clip; /* NULL: none */
	double inv_scale;                       /* 0: none; found_inf skips the step */
	const double *lr; /* for the steps of this pass; NULL: the units' own */
	const struct shardd_step_settings *settings; /* for the steps of this pass */
	size_t n_settings;
};

/* Say before a backward pass what is done with its gradients as they arrive, until the step
 * (collective). With a clip or an inv_scale, optimizers in backward wait for the step, which
 * applies all or skips all. The norm comes with the step. */
SHARDD_API int shardd_submit_plan_backward(shardd_client *c,
					   const struct shardd_plan_backward_options *options,
					   shardd_ticket *t, struct shardd_error *err);

/* A shard for the trainer's own optimizer: copies of parameters, in storage_dtype, which it
 * changes, and of their gradient, in FP32. Every trained element of the unit is in the shard of
 * exactly one rank, whatever the strategy. A rank may have no elements. */
struct shardd_shard {
	shardd_unit unit;
	uint64_t elements;
	void *params;
	const float *gradient;
};

/* SHARDD_OPTIM_BY_TRAINER: return this rank's shard of the next unit of the group whose last reduce
 * has ended, in the order of the reduces, each exactly once. Waits for it, at most until the op's
 * deadline. With a ticket, shardd_result has the values. */
struct shardd_next_shard_options {
	size_t size; /* sizeof(struct shardd_next_shard_options) */
	shardd_group group;
};
SHARDD_API int shardd_submit_next_shard(shardd_client *c,
					const struct shardd_next_shard_options *options,
					shardd_ticket *t, struct shardd_error *err);

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
struct shardd_shard_done_options {
	size_t size; /* sizeof(struct shardd_shard_done_options) */
	shardd_unit unit;
};
SHARDD_API int shardd_submit_shard_done(shardd_client *c,
					const struct shardd_shard_done_options *options,
					shardd_ticket *t, struct shardd_error *err);

/* Make @step the step from which a restarted trainer continues, on all ranks or on none
 * (collective over the job). @blob: up to 64 KiB of this rank's own state (data
 * position, random generators); copied. With 0 bytes the rank has no blob afterwards, unless the
 * Step of this number gave one: that stays. Checkpoints of this step have the buffers of units as
 * they were written before; on a GPU, by the stream of shardd_set_stream, too. */
struct shardd_commit_options {
	size_t size; /* sizeof(struct shardd_commit_options) */
	uint64_t step;
	const void *blob; /* copied */
	size_t bytes;     /* of @blob, at most SHARDD_MAX_BLOB */
};
SHARDD_API int shardd_submit_commit(shardd_client *c, const struct shardd_commit_options *options,
				    shardd_ticket *t, struct shardd_error *err);

/* Return this rank's own buffers of a unit, readable and writable, initially zero. They stay with
 * the job, even when this trainer ends. */
struct shardd_unit_buffers_options {
	size_t size; /* sizeof(struct shardd_unit_buffers_options) */
	shardd_unit unit;
};
SHARDD_API int shardd_submit_unit_buffers(shardd_client *c,
					  const struct shardd_unit_buffers_options *options,
					  shardd_ticket *t, struct shardd_error *err);

/* Copy @root's buffers to all ranks (collective): of one unit, or with @unit 0 of all units of
 * @group. */
struct shardd_broadcast_buffers_options {
	size_t size;      /* sizeof(struct shardd_broadcast_buffers_options) */
	shardd_unit unit; /* 0: all units of @group */
	shardd_group group;
	uint32_t root;
};
SHARDD_API int shardd_submit_broadcast_buffers(
	shardd_client *c, const struct shardd_broadcast_buffers_options *options, shardd_ticket *t,
	struct shardd_error *err);

/* Return the stored parameters of a unit, in storage_dtype, in writable memory of this rank's
 * own, laid out as in gather (collective); or array @state of the optimizer's state, in FP32.
 * Adam, AdamW: 1 exp_avg, 2 exp_avg_sq, 3 max_exp_avg_sq (amsgrad); SGD with momentum: 1. Frozen
 * elements are 0 in it. The result's optimizer_steps: how many steps the unit has had.
 * INVALID_ARGUMENT: the optimizer has no such array. The unit must not be gathered. Until
 * shardd_return it cannot be gathered, reduced, initialised, converted or stepped. */
struct shardd_summon_options {
	size_t size; /* sizeof(struct shardd_summon_options) */
	shardd_unit unit;
	uint32_t state; /* 0: the parameters */
};
SHARDD_API int shardd_submit_summon(shardd_client *c, const struct shardd_summon_options *options,
				    shardd_ticket *t, struct shardd_error *err);

/* Return the memory of a summon (collective). With @write, each rank's own shard of it becomes the
 * parameters, or that array; what a rank wrote outside its shard is dropped. */
struct shardd_return_options {
	size_t size; /* sizeof(struct shardd_return_options) */
	shardd_unit unit;
	bool write;
	/* The number of steps that the unit has had becomes this, with @write: up to 2^52, the same
	 * on all ranks. NULL: unchanged. */
	const uint64_t *optimizer_steps;
	/* Steps of each tensor, none above @optimizer_steps; ignored for tensors that are not
	 * trained. NULL: all tensors get @optimizer_steps if that changes, else they keep
	 * theirs. */
	const uint64_t *tensor_steps;
	size_t n_tensors; /* of @tensor_steps: all of the unit's, or 0 */
};

SHARDD_API int shardd_submit_return(shardd_client *c, const struct shardd_return_options *options,
				    shardd_ticket *t, struct shardd_error *err);

/* Copy this rank's piece of a tensor between the unit and a buffer of this session (shardd_alloc):
 * the tensor's rows or elements that the rank's shard has: parameters in storage_dtype, the
 * gradient in FP32. It waits for no other rank.
 * Ranks of several replicas have the same pieces, and each of them writes. Parameters: not while
 * the unit is summoned, written ones not while a rank has it gathered; a write counts as a step
 * that is not committed. Gradient: the reduced one, from its reduce to the step. What other ranks
 * gather is undefined until all of them have written: use a barrier before and after. Errors:
 * INVALID_ARGUMENT (@elements is not what the rank has, which shardd_tensor_places tells),
 * FAILED_PRECONDITION, UNIMPLEMENTED (the piece is on another device). */
enum shardd_array { SHARDD_PARAMETERS = 1, SHARDD_GRADIENT = 2 };
struct shardd_copy_shard_options {
	size_t size; /* sizeof(struct shardd_copy_shard_options) */
	shardd_unit unit;
	uint32_t tensor; /* index in the unit's spec; not an alias */
	enum shardd_array array;
	bool write;        /* from the buffer into the unit; false: into the buffer */
	uint64_t buffer;   /* of shardd_alloc */
	uint64_t offset;   /* bytes into it */
	uint64_t elements; /* of the piece */
};
SHARDD_API int shardd_submit_copy_shard(shardd_client *c,
					const struct shardd_copy_shard_options *options,
					shardd_ticket *t, struct shardd_error *err);

/* Drop the reduced gradients of some tensors (collective; all ranks name the same): the next step
 * skips them and their optimizer state, as if no rank had used them, unless they are reduced again.
 * @tensors: by their index in the spec, ascending. Errors: INVALID_ARGUMENT, FAILED_PRECONDITION
 * (the unit has no reduced gradient, or its optimizer steps in backward). */
struct shardd_drop_gradients_options {
	size_t size; /* sizeof(struct shardd_drop_gradients_options) */
	shardd_unit unit;
	const uint32_t *tensors;
	size_t n_tensors;
};
SHARDD_API int shardd_submit_drop_gradients(shardd_client *c,
					    const struct shardd_drop_gradients_options *options,
					    shardd_ticket *t, struct shardd_error *err);

/* How many steps each tensor of @u had had at the last summon whose end this client has seen. @ret:
 * @n entries, one for each tensor of the unit. Fewer than the unit's steps if no rank used the
 * tensor in some of them (shardd_reduce). Errors: NOT_FOUND (not registered by this client),
 * INVALID_ARGUMENT (@n is not how many there are, or it was not summoned). Never blocks. Any
 * thread. */
SHARDD_API int shardd_unit_steps(shardd_client *c, shardd_unit u, uint64_t *ret, size_t n,
				 struct shardd_error *err);

/* The new layout of units. */
struct shardd_convert_options {
	size_t size;              /* sizeof(struct shardd_convert_options) */
	const shardd_unit *units; /* of one group, ascending */
	size_t n_units;
	enum shardd_layout layout;     /* 0: FLAT */
	uint32_t shard_multiple;       /* FLAT; 0: 1 */
	enum shardd_strategy strategy; /* 0: unchanged */
	uint32_t shard_ranks;          /* with HYBRID */
	/* Frozen tensors of the one unit in @units, by their index, ascending, that are trained
	 * from here on. Their optimizer state is 0, and they have had no step. NULL: none. */
	const uint32_t *unfreeze;
	size_t n_unfreeze;
	/* With @unfreeze, of a unit without an optimizer: the unit whose settings of the optimizer
	 * it gets. 0: it stays without one. */
	shardd_unit optimizer_like;
};

/* Change the layout of units, and which tensors are trained (collective). Parameters, gradients and
 * optimizer state keep their bits. @units: @n_units of one group, ascending. No rank may have them
 * gathered or summoned, or have a gradient buffer of them. From then on they are registered with
 * the new layout. The conversion needs memory for both layouts; the old memory is given back when
 * all units that were registered in one call have been converted. If it is refused, nothing
 * changes.
 * shardd_tensor_places returns the new places once the ticket has ended. */
SHARDD_API int shardd_submit_convert(shardd_client *c, const struct shardd_convert_options *options,
				     shardd_ticket *t, struct shardd_error *err);

#ifdef __cplusplus
}
#endif

#endif
