/*
 * DistributedDataParallel: gradients of replicated units, reduced in buckets. Part of
 * shardd/shardd.h, which includes it and describes what holds for all calls.
 */
#ifndef SHARDD_DDP_H
#define SHARDD_DDP_H

#include "shardd/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Check that all ranks of the group have registered the same units in the same order (collective).
 * FAILED_PRECONDITION names the first difference. The contents of units are compared at
 * registration. */
struct shardd_verify_model_options {
	size_t size; /* sizeof(struct shardd_verify_model_options) */
	shardd_group group;
};
SHARDD_API int shardd_submit_verify_model(shardd_client *c,
					  const struct shardd_verify_model_options *options,
					  shardd_ticket *t, struct shardd_error *err);

/* Initialise several units from @root (collective), 250 MiB at a time, or one unit that is
 * larger. @bytes: of each unit's packed_elements in its storage_dtype. @data: for each unit these
 * elements, tensor after tensor without padding, borrowed during the call; NULL on all ranks but
 * @root.
 * Errors: as of shardd_alloc and shardd_init_broadcast. */
SHARDD_API int shardd_init_broadcast_all(shardd_client *c, const shardd_unit *units,
					 const uint64_t *bytes, size_t n, uint32_t root,
					 const void *const *data, struct shardd_error *err);

/* The properties of a tensor that PyTorch's assignment to buckets uses. */
struct shardd_bucket_tensor {
	uint64_t bytes; /* of its gradient */
	uint32_t key;   /* dtypes (gradient, reduce) and device: one key per bucket */
	bool sparse;    /* the tensor is alone in its bucket */
};

/* Compute PyTorch's assignment of gradients to buckets by size, as the daemon does: each key
 * has an open bucket, which is closed after the tensor that reaches the limit; the next bucket of
 * that key has the next limit, if there is one.
 * @limits: bytes; none: no limit. @map: the index of each tensor: buckets are in the order in which
 * they were closed; NULL: they are ordered by their smallest index.
 * @ret_tensors: @n indices, bucket after bucket. @ret_sizes: room for @n: number of tensors of each
 * bucket. @ret_n: number of buckets. Errors: RESOURCE_EXHAUSTED. Never blocks. Any thread. */
SHARDD_API int shardd_ddp_buckets(const struct shardd_bucket_tensor *tensors, uint32_t n,
				  const uint64_t *limits, unsigned n_limits, const uint32_t *map,
				  uint32_t *ret_tensors, uint32_t *ret_sizes, uint32_t *ret_n,
				  struct shardd_error *err);

typedef uint32_t shardd_ddp;

struct shardd_ddp_tensor {
	shardd_unit unit;
	uint32_t tensor; /* index in the unit */
};

/* A ddp: gradients of units with strategy REPLICATE and one of the DDP profiles, reduced in
 * buckets while backward still runs. Its tensors are those that have a gradient, unit after
 * unit. The functions below name them by their index in this order, from 0. */
struct shardd_ddp_create_options {
	size_t size; /* sizeof(struct shardd_ddp_create_options) */
	shardd_group group;
	const shardd_unit *units;
	size_t n_units;
	const struct shardd_ddp_tensor *sparse; /* tensors whose gradients are rows and values */
	size_t n_sparse;
	uint64_t bucket_bytes;       /* 0: 25 MiB */
	uint64_t first_bucket_bytes; /* 0: bucket_bytes if that is set, else 1 MiB */
	bool find_unused;            /* a backward may name tensors that it does not use */
	bool static_graph;           /* every pass uses the tensors that the first one used */
	/* Instead of the two sizes: @n_bucket_limits limits, at most 4096, each at least 1: of the
	 * first bucket, the second and so on; the last one holds for all later buckets. They hold
	 * from the first pass. NULL: none. */
	const uint64_t *bucket_limits;
	size_t n_bucket_limits;
};

/* Create a ddp (collective). All ranks must give the same options; the error names the first
 * difference. It lives until the epoch ends. */
SHARDD_API int shardd_submit_ddp_create(shardd_client *c,
					const struct shardd_ddp_create_options *options,
					shardd_ticket *t, struct shardd_error *err);

/* One tensor's gradient on this rank. */
struct shardd_ddp_view {
	shardd_unit unit;
	uint32_t tensor;   /* index in the unit */
	uint32_t bucket;   /* buckets are reduced in the order of their numbers */
	void *data;        /* writable, row-major; NULL: sparse */
	uint64_t elements; /* of the unit's gradient_dtype */
};

/* Call this before forward: it returns where this rank's gradients are. They move once, with their
 * contents, after the first pass that reduced them; before the first pass the contents are
 * undefined. The previous pass must have ended.
 * @views: room for all @n tensors. Errors: FAILED_PRECONDITION names the tensors of the previous
 * pass that have no gradient; RESOURCE_EXHAUSTED. */
struct shardd_ddp_forward_options {
	size_t size; /* sizeof(struct shardd_ddp_forward_options) */
	shardd_ddp ddp;
	struct shardd_ddp_view *views; /* filled when the ticket ends; borrowed until then */
	uint32_t n_views;
};
SHARDD_API int shardd_submit_ddp_forward(shardd_client *c,
					 const struct shardd_ddp_forward_options *options,
					 shardd_ticket *t, struct shardd_error *err);

/* Call this before a backward that reduces. Under no_sync leave it out: gradients add up in the
 * views. @unused: tensors without a gradient on this rank, which contributes 0 for them.
 * @kept: the same, but the rank contributes the earlier contents of their views. Both only with
 * find_unused. A tensor that this rank has used under no_sync since its last pass that reduced
 * belongs to neither, even if this backward does not use it: mark it with shardd_ddp_ready at
 * once. */
struct shardd_ddp_backward_options {
	size_t size; /* sizeof(struct shardd_ddp_backward_options) */
	shardd_ddp ddp;
	const uint32_t *unused;
	size_t n_unused;
	const uint32_t *kept;
	size_t n_kept;
};
SHARDD_API int shardd_submit_ddp_backward(shardd_client *c,
					  const struct shardd_ddp_backward_options *options,
					  shardd_ticket *t, struct shardd_error *err);

/* Mark tensors whose gradients are complete in their views. A bucket that is complete on all ranks
 * is reduced when those before it are. Marking a tensor twice in a pass is FAILED_PRECONDITION with
 * the names; with static_graph each tensor is marked as often as in the first pass.
 * @sparse: mark one sparse tensor. The gradients of the rows @rows are at byte @values_offset of
 * @buffer, row after row; do not change the buffer until shardd_ddp_finish. @n_rows may be 0. */
struct shardd_ddp_ready_options {
	size_t size; /* sizeof(struct shardd_ddp_ready_options) */
	shardd_ddp ddp;
	const uint32_t *tensors;
	size_t n_tensors;
	bool sparse; /* the one tensor is sparse: its rows follow */
	const int64_t *rows;
	size_t n_rows;
	uint64_t buffer;
	uint64_t values_offset; /* bytes */
};
SHARDD_API int shardd_submit_ddp_ready(shardd_client *c,
				       const struct shardd_ddp_ready_options *options,
				       shardd_ticket *t, struct shardd_error *err);

/* Wait after backward for this rank's buckets. Then the views and the units have the averaged
 * gradients, ready for shardd_step. @untouched: NULL, or one byte per tensor: 1 if no rank has
 * used it; its view and gradient are then unchanged and the optimizer skips it.
 * Errors: FAILED_PRECONDITION names tensors that are not ready: mark them; INVALID_ARGUMENT
 * (@n_untouched is less than the ddp's tensors; the text says how many it has; nothing was
 * done). */
struct shardd_ddp_finish_options {
	size_t size; /* sizeof(struct shardd_ddp_finish_options) */
	shardd_ddp ddp;
	uint8_t *untouched; /* filled when the ticket ends; borrowed until then; NULL: not wanted */
	uint32_t n_untouched;
};
SHARDD_API int shardd_submit_ddp_finish(shardd_client *c,
					const struct shardd_ddp_finish_options *options,
					shardd_ticket *t, struct shardd_error *err);

/* Without buckets: add rows of every rank, in rank order, to the gradient of tensor @tensor of a
 * unit (collective; the number of rows may differ). They are divided before and after as the unit's
 * profile says. The gradient that the unit holds since the last step stays; the rest of it is 0.
 * Rows are added in fp32, on several devices those of each device first; with a 16-bit reduce_dtype
 * outside the DDP profiles, and with strategy HYBRID, as shardd_reduce adds a whole gradient.
 * Errors: INVALID_ARGUMENT (a row that the tensor does not have), FAILED_PRECONDITION (a unit that
 * is stepped in backward or by the trainer; a rank that has accumulated on top of what was reduced,
 * where shardd_reduce reduces that again). */
struct shardd_reduce_sparse_options {
	size_t size; /* sizeof(struct shardd_reduce_sparse_options) */
	shardd_unit unit;
	uint32_t tensor;
	const int64_t *rows;
	size_t n_rows;
	uint64_t buffer;
	uint64_t values_offset; /* bytes */
};
SHARDD_API int shardd_submit_reduce_sparse(shardd_client *c,
					   const struct shardd_reduce_sparse_options *options,
					   shardd_ticket *t, struct shardd_error *err);

/* Say that this rank has no more inputs. The daemon takes part in the group's collectives for it,
 * with zeros, until all ranks have called this; then the op ends. Until then the other ranks
 * may only use collectives that work without it: buckets, Reduce with a DDP profile, ReduceSparse,
 * BroadcastBuffers (if its root has no more inputs, the last rank that has some is the root),
 * Barrier, ClipGradNorm and Step. @divide_by_active: reductions divide by the number of ranks that
 * still have inputs instead of by all; all ranks give the same. @last: the rank that joined last,
 * which has the newest model. @surrogates: number of collectives in which a
 * surrogate of the daemon took part for this rank. Both are in the result.
 * @require_even: require the same of all ranks of the group (DDP's throw_on_early_termination). If
 * a rank that has not called this asks for a collective, the ranks that wait here get
 * FAILED_PRECONDITION. So does each collective of the other ranks until they have called this, too;
 * that call also fails. Then the group continues as before. Either all ranks of the group set
 * it, or none. */
struct shardd_join_uneven_options {
	size_t size; /* sizeof(struct shardd_join_uneven_options) */
	shardd_group group;
	bool divide_by_active;
	bool require_even; /* fail if a rank has more inputs */
};
SHARDD_API int shardd_submit_join_uneven(shardd_client *c,
					 const struct shardd_join_uneven_options *options,
					 shardd_ticket *t, struct shardd_error *err);

#ifdef __cplusplus
}
#endif

#endif
