/*
 * DistributedDataParallel: gradients of replicated units, reduced in buckets. Part of
 * shardd/shardd.h, which includes it and says what holds for all calls.
 */
#ifndef SHARDD_DDP_H
#define SHARDD_DDP_H

#include "shardd/shardd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Have all ranks of the group registered the same units, in the same order (collective)?
 * FAILED_PRECONDITION names the first difference. What is in a unit is compared when it is
 * registered. */
SHARDD_API int shardd_verify_model(shardd_client *c, shardd_group g, struct shardd_error *err);

/* Initialise several units from @root (collective), 250 MiB at a time, or one unit that is
 * larger. @elements: packed_elements of each unit. @data: so many of each unit in fp32,
 * tensor after tensor without padding, borrowed during the
 * call; NULL on all ranks but @root. Errors: as of shardd_alloc and shardd_init_broadcast. */
SHARDD_API int shardd_init_broadcast_all(shardd_client *c, const shardd_unit *units,
					 const uint64_t *elements, size_t n, uint32_t root,
					 const float *const *data, struct shardd_error *err);

/* A tensor as PyTorch's assignment to buckets sees it. */
struct shardd_bucket_tensor {
	uint64_t bytes; /* of its gradient */
	uint32_t key;   /* dtypes (gradient, reduce) and device: a bucket has one */
	bool sparse;    /* alone in its bucket */
};

/* PyTorch's assignment of gradients to buckets by size, as the daemon makes it: each key
 * has an open bucket, which is closed when it has reached the limit, after the tensor was
 * added; the next bucket of that key has the next limit, if there is one.
 * @limits: bytes; none: no limit. @map: NULL, or the index of each tensor: then buckets come in
 * the order in which they were closed, else by their smallest index.
 * @ret_tensors: @n indices, bucket after bucket. @ret_sizes: room for @n, tensors of each.
 * @ret_n: how many buckets. Errors: RESOURCE_EXHAUSTED. Never blocks. Any thread. */
SHARDD_API int shardd_ddp_buckets(const struct shardd_bucket_tensor *tensors, uint32_t n,
				  const uint64_t *limits, unsigned n_limits, const uint32_t *map,
				  uint32_t *ret_tensors, uint32_t *ret_sizes, uint32_t *ret_n,
				  struct shardd_error *err);

typedef uint32_t shardd_ddp;

struct shardd_ddp_tensor {
	shardd_unit unit;
	uint32_t tensor; /* index in the unit */
};

/* Gradients of units with strategy REPLICATE and one of the DDP profiles, reduced in
 * buckets while backward still runs. Tensors are those that have a gradient, unit after
 * unit; below they are named by their index in this order, from 0. */
struct shardd_ddp_spec {
	size_t size; /* sizeof(struct shardd_ddp_spec) */
	shardd_group group;
	const shardd_unit *units;
	size_t n_units;
	const struct shardd_ddp_tensor *sparse; /* whose gradients are rows and values */
	size_t n_sparse;
	uint64_t bucket_bytes;       /* 0: 25 MiB */
	uint64_t first_bucket_bytes; /* 0: bucket_bytes if that is set, else 1 MiB */
	bool find_unused;            /* a backward may name tensors it does not use */
	bool static_graph;           /* every pass uses the tensors that the first one used */
	/* Instead of the two, @n_bucket_limits of them, at most 4096: of the first bucket, the
	 * second..., the last of all that follow; at least 1 each. They hold from the first pass
	 * on. NULL: none. */
	const uint64_t *bucket_limits;
	size_t n_bucket_limits;
};

/* Make it (collective): every rank says the same, or is told the first difference. It lives
 * until the epoch ends. @ret_tensors: how many it has; may be NULL. */
SHARDD_API int shardd_ddp_create(shardd_client *c, const struct shardd_ddp_spec *spec,
				 shardd_ddp *ret, uint32_t *ret_tensors, struct shardd_error *err);

/* One tensor's gradient on this rank. */
struct shardd_ddp_view {
	shardd_unit unit;
	uint32_t tensor;   /* index in the unit */
	uint32_t bucket;   /* they are reduced in the order of their numbers */
	void *data;        /* writable, its elements row-major; NULL: sparse */
	uint64_t elements; /* of the unit's gradient_dtype */
};

/* Before forward: where this rank's gradients are. They move once, after the first pass that
 * reduced them, with what is in them; before the first pass that is undefined. The pass
 * before must have ended.
 * @views: room for all @n tensors. Errors: FAILED_PRECONDITION names the tensors of the pass
 * before that have no gradient; RESOURCE_EXHAUSTED. */
SHARDD_API int shardd_ddp_forward(shardd_client *c, shardd_ddp d, struct shardd_ddp_view *views,
				  uint32_t n, struct shardd_error *err);

/* Before a backward that reduces (under no_sync it is left out, and gradients add up in the
 * views). @unused: tensors without a gradient on this rank, which contributes 0 for them;
 * @kept: the same, but with what their view holds from before. Both only with find_unused. What
 * this rank has used under no_sync since its last pass that reduced is in neither, even if this
 * backward does not use it: it is marked with shardd_ddp_ready at once. */
SHARDD_API int shardd_ddp_backward_submit(shardd_client *c, shardd_ddp d, const uint32_t *unused,
					  size_t n_unused, const uint32_t *kept, size_t n_kept,
					  shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_ddp_backward(shardd_client *c, shardd_ddp d, const uint32_t *unused,
				   size_t n_unused, const uint32_t *kept, size_t n_kept,
				   struct shardd_error *err);

/* These tensors have their gradients in their views. A bucket that is complete on all ranks is
 * reduced when those before it are. Marking one twice in a pass is FAILED_PRECONDITION with
 * the names; with static_graph each is marked as often as in the first pass. */
SHARDD_API int shardd_ddp_ready_submit(shardd_client *c, shardd_ddp d, const uint32_t *tensors,
				       size_t n, shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_ddp_ready(shardd_client *c, shardd_ddp d, const uint32_t *tensors, size_t n,
				struct shardd_error *err);

/* The same for one sparse tensor: gradients of the rows @rows, row after row at byte
 * @values_offset of @buffer, which stays untouched until shardd_ddp_finish. @n may be 0. */
SHARDD_API int shardd_ddp_ready_rows(shardd_client *c, shardd_ddp d, uint32_t tensor,
				     const int64_t *rows, size_t n, uint64_t buffer,
				     uint64_t values_offset, struct shardd_error *err);

/* After backward: wait for this rank's buckets. The views hold averaged gradients then, and
 * so do the units, for shardd_step. @untouched: NULL, or one byte a tensor: 1 where no rank has
 * used it, so that view and gradient are as they were and the optimizer leaves it alone.
 * @n: of @untouched. Errors: FAILED_PRECONDITION names tensors that are not ready: mark them. */
SHARDD_API int shardd_ddp_finish(shardd_client *c, shardd_ddp d, uint8_t *untouched, uint32_t n,
				 struct shardd_error *err);

/* Without buckets: add rows to the gradient of tensor @tensor of a unit, of every rank in
 * their order, divided before and after as the unit's profile has it (collective; how many
 * rows may differ). What the unit holds since the last step stays; the rest of it is 0. They
 * are added in fp32, on several devices those of each device first; with a 16-bit reduce_dtype
 * outside the DDP profiles, and with strategy HYBRID, as shardd_reduce adds a whole gradient. Errors:
 * INVALID_ARGUMENT (a row that the tensor does not have), FAILED_PRECONDITION (a unit that is
 * stepped in backward or by the trainer; a rank that has accumulated on top of what was reduced,
 * where shardd_reduce reduces that again). */
SHARDD_API int shardd_reduce_sparse_submit(shardd_client *c, shardd_unit u, uint32_t tensor,
					   const int64_t *rows, size_t n, uint64_t buffer,
					   uint64_t values_offset, shardd_ticket *t,
					   struct shardd_error *err);
SHARDD_API int shardd_reduce_sparse(shardd_client *c, shardd_unit u, uint32_t tensor,
				    const int64_t *rows, size_t n, uint64_t buffer,
				    uint64_t values_offset, struct shardd_error *err);

/* This rank has no more inputs: it takes part in the group's collectives with zeros until
 * all its ranks have called this, and returns then. Until then only collectives that can be
 * done without it are allowed to the others: buckets, Reduce with a DDP profile, ReduceSparse,
 * BroadcastBuffers (whose root, if it is such a rank, is the last one that is not), Barrier,
 * ClipGradNorm and Step.
 * @divide_by_active: reductions divide by the ranks that still have inputs instead of by all;
 * all ranks say the same. @last: the rank that joined last, whose model is the newest;
 * @shadowed: collectives in which this rank was replaced. Both may be NULL. */
SHARDD_API int shardd_join_uneven_submit(shardd_client *c, shardd_group g, bool divide_by_active,
					 shardd_ticket *t, struct shardd_error *err);
SHARDD_API int shardd_join_uneven(shardd_client *c, shardd_group g, bool divide_by_active,
				  uint32_t *last, uint64_t *shadowed, struct shardd_error *err);

/* This rank has no more inputs, and nor have the others of its group, or it is an error on all of
 * them (DDP's throw_on_early_termination): as soon as one that has not called this asks for a
 * collective, those that wait here get FAILED_PRECONDITION, and so does each
 * collective of the others until they have called this too, which tells them once more.
 * Then the group goes on as before. All ranks of the group call this, or all
 * shardd_join_uneven. */
SHARDD_API int shardd_join_even_submit(shardd_client *c, shardd_group g, shardd_ticket *t,
				       struct shardd_error *err);
SHARDD_API int shardd_join_even(shardd_client *c, shardd_group g, struct shardd_error *err);

#ifdef __cplusplus
}
#endif

#endif
