/*
 * The blocking form of each verb: it submits, waits until the op has ended, at the latest at its
 * deadline, and copies the result out. Part of shardd/shardd.h, which includes it; shardd/ops.h and
 * shardd/ddp.h describe the verbs, and errors are theirs. On failure pointers, numbers and flags
 * that are copied out are NULL, 0 and false; a struct shardd_result is unchanged. shardd_interrupt
 * makes a blocking form cancel its op, or detach it if it cannot be cancelled. Inline: nothing here
 * is exported. Any thread.
 */
#ifndef SHARDD_BLOCKING_H
#define SHARDD_BLOCKING_H

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "shardd/client.h"
#include "shardd/ddp.h"
#include "shardd/ops.h"

static inline bool shardd_was_interrupted_(int r, const struct shardd_error *e)
{
	return r == -SHARDD_CANCELLED && e->native == EINTR;
}

/* Wait for ticket @t of a submission that returned @submitted. If the wait is interrupted, cancel
 * the op and wait until it has ended; return its result, or CANCELLED with native EINTR. If it
 * cannot be cancelled (sent over gRPC), detach it: a failure of the op is then
 * returned by the next submission. */
static inline int shardd_finish_(shardd_client *c, int submitted, shardd_ticket t,
				 struct shardd_result *ret, struct shardd_error *err)
{
	struct shardd_error e;
	bool detached = false, interrupted;
	int r;

	if (submitted < 0)
		return submitted;
	r = shardd_wait(c, t, -1, ret, &e);
	interrupted = shardd_was_interrupted_(r, &e);
	if (interrupted && shardd_cancel(c, t, NULL) < 0)
		detached = shardd_detach(c, t, NULL) == 0;
	while (!detached && shardd_was_interrupted_(r, &e))
		r = shardd_wait(c, t, -1, ret, &e);
	if (interrupted && r == -SHARDD_CANCELLED)
		e.native = EINTR;
	if (r < 0 && err)
		*err = e;
	return r;
}

/* --------------------------------------------------------------------- ops */

static inline int shardd_init_seed(shardd_client *c, shardd_unit u, uint64_t seed,
				   struct shardd_error *err)
{
	struct shardd_init_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.from = SHARDD_FROM_SEED;
	o.seed = seed;
	r = shardd_submit_init(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_init_broadcast(shardd_client *c, shardd_unit u, uint32_t root,
					uint64_t buffer, struct shardd_error *err)
{
	struct shardd_init_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.from = SHARDD_FROM_ROOT;
	o.root = root;
	o.buffer = buffer;
	r = shardd_submit_init(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_init_own(shardd_client *c, shardd_unit u, uint64_t buffer,
				  struct shardd_error *err)
{
	struct shardd_init_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.from = SHARDD_FROM_OWN;
	o.buffer = buffer;
	r = shardd_submit_init(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_gather(shardd_client *c, shardd_unit u, const void **data,
				struct shardd_error *err)
{
	struct shardd_gather_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	r = shardd_submit_gather(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (data)
		*data = r == 0 ? result.data : NULL;
	return r;
}

static inline int shardd_release(shardd_client *c, shardd_unit u, struct shardd_error *err)
{
	struct shardd_release_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	r = shardd_submit_release(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_begin_pass(shardd_client *c, shardd_unit u, enum shardd_pass pass,
				    const void **data, struct shardd_error *err)
{
	struct shardd_begin_pass_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.pass = pass;
	r = shardd_submit_begin_pass(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (data)
		*data = r == 0 ? result.data : NULL;
	return r;
}

static inline int shardd_end_pass(shardd_client *c, shardd_unit u, enum shardd_pass pass, bool sync,
				  struct shardd_error *err)
{
	struct shardd_end_pass_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.pass = pass;
	o.sync = sync;
	r = shardd_submit_end_pass(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_set_reshard(shardd_client *c, const shardd_unit *units, size_t n,
				     enum shardd_reshard reshard, struct shardd_error *err)
{
	struct shardd_set_reshard_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.units = units;
	o.n_units = n;
	o.reshard = reshard;
	r = shardd_submit_set_reshard(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_set_prefetch(shardd_client *c, shardd_unit u, enum shardd_pass pass,
				      const shardd_unit *units, size_t n, struct shardd_error *err)
{
	struct shardd_set_prefetch_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.pass = pass;
	o.units = units;
	o.n_units = n;
	r = shardd_submit_set_prefetch(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_set_factors(shardd_client *c,
				     const struct shardd_set_factors_options *options,
				     struct shardd_error *err)
{
	shardd_ticket t = 0;
	int r = shardd_submit_set_factors(c, options, &t, err);

	return shardd_finish_(c, r, t, NULL, err);
}

static inline int shardd_gradient(shardd_client *c, shardd_unit u, void **data,
				  struct shardd_error *err)
{
	struct shardd_gradient_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	r = shardd_submit_gradient(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (data)
		*data = r == 0 ? result.data : NULL;
	return r;
}

/* @buffer, @data: may be NULL. */
static inline int shardd_alloc(shardd_client *c, uint64_t bytes, uint64_t *buffer, void **data,
			       struct shardd_error *err)
{
	struct shardd_alloc_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.bytes = bytes;
	r = shardd_submit_alloc(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (buffer)
		*buffer = r == 0 ? result.buffer : 0;
	if (data)
		*data = r == 0 ? result.data : NULL;
	return r;
}

static inline int shardd_free(shardd_client *c, uint64_t buffer, struct shardd_error *err)
{
	struct shardd_free_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.buffer = buffer;
	r = shardd_submit_free(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_reduce(shardd_client *c, shardd_unit u, struct shardd_error *err)
{
	struct shardd_reduce_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	r = shardd_submit_reduce(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

/* With all options. @ret: may be NULL. */
static inline int shardd_reduce_with(shardd_client *c, const struct shardd_reduce_options *options,
				     struct shardd_result *ret, struct shardd_error *err)
{
	shardd_ticket t = 0;
	int r = shardd_submit_reduce(c, options, &t, err);

	return shardd_finish_(c, r, t, ret, err);
}

/* With unit_unused. @by_all: no rank has used the unit; may be NULL. */
static inline int shardd_reduce_unused(shardd_client *c, shardd_unit u, bool *by_all,
				       struct shardd_error *err)
{
	struct shardd_reduce_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.unit_unused = true;
	r = shardd_submit_reduce(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (by_all)
		*by_all = r == 0 ? result.skipped : false;
	return r;
}

static inline int shardd_accumulate(shardd_client *c, shardd_unit u, struct shardd_error *err)
{
	struct shardd_accumulate_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	r = shardd_submit_accumulate(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_all_reduce(shardd_client *c, shardd_group g, uint64_t buffer,
				    uint64_t offset, uint64_t count, enum shardd_dtype dtype,
				    enum shardd_reduce_op op, struct shardd_error *err)
{
	struct shardd_all_reduce_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.group = g;
	o.buffer = buffer;
	o.offset = offset;
	o.count = count;
	o.dtype = dtype;
	o.op = op;
	r = shardd_submit_all_reduce(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_broadcast(shardd_client *c, shardd_group g, uint64_t buffer,
				   uint64_t offset, uint64_t bytes, uint32_t root,
				   struct shardd_error *err)
{
	struct shardd_broadcast_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.group = g;
	o.buffer = buffer;
	o.offset = offset;
	o.bytes = bytes;
	o.root = root;
	r = shardd_submit_broadcast(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_barrier(shardd_client *c, shardd_group g, struct shardd_error *err)
{
	struct shardd_barrier_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.group = g;
	r = shardd_submit_barrier(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_nop(shardd_client *c, struct shardd_error *err)
{
	struct shardd_nop_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	r = shardd_submit_nop(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

/* @total_norm: before clipping; may be NULL. */
static inline int shardd_clip_grad_norm(shardd_client *c, shardd_group g, double max_norm,
					double norm_type, double *total_norm,
					struct shardd_error *err)
{
	struct shardd_clip_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.group = g;
	o.max_norm = max_norm;
	o.norm_type = norm_type;
	r = shardd_submit_clip(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (total_norm)
		*total_norm = r == 0 ? result.total_norm : 0;
	return r;
}

/* With all options. @total_norm: before clipping; may be NULL. */
static inline int shardd_clip(shardd_client *c, const struct shardd_clip_options *options,
			      double *total_norm, struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t = 0;
	int r = shardd_submit_clip(c, options, &t, err);

	r = shardd_finish_(c, r, t, &result, err);
	if (total_norm)
		*total_norm = r == 0 ? result.total_norm : 0;
	return r;
}

/* @found_inf: may be NULL. */
static inline int shardd_unscale(shardd_client *c, shardd_group g, double inv_scale,
				 bool *found_inf, struct shardd_error *err)
{
	struct shardd_unscale_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.group = g;
	o.inv_scale = inv_scale;
	r = shardd_submit_unscale(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (found_inf)
		*found_inf = r == 0 ? result.found_inf : false;
	return r;
}

/* @lr: NULL: the units' own. */
static inline int shardd_step(shardd_client *c, shardd_group g, const double *lr,
			      struct shardd_error *err)
{
	struct shardd_step_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.group = g;
	o.lr = lr;
	r = shardd_submit_step(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

/* With all options. @ret: may be NULL. */
static inline int shardd_step_with(shardd_client *c, const struct shardd_step_options *options,
				   struct shardd_result *ret, struct shardd_error *err)
{
	shardd_ticket t = 0;
	int r = shardd_submit_step(c, options, &t, err);

	return shardd_finish_(c, r, t, ret, err);
}

static inline int shardd_plan_backward(shardd_client *c,
				       const struct shardd_plan_backward_options *options,
				       struct shardd_error *err)
{
	shardd_ticket t = 0;
	int r = shardd_submit_plan_backward(c, options, &t, err);

	return shardd_finish_(c, r, t, NULL, err);
}

static inline int shardd_next_shard(shardd_client *c, shardd_group g, struct shardd_shard *ret,
				    struct shardd_error *err)
{
	struct shardd_next_shard_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.group = g;
	r = shardd_submit_next_shard(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (!ret)
		return r;
	memset(ret, 0, sizeof(*ret));
	if (r < 0)
		return r;
	ret->unit = result.unit;
	ret->elements = result.elements;
	ret->params = result.data;
	ret->gradient = (const float *)((const char *)result.data + result.gradient_offset);
	return r;
}

static inline int shardd_shard_done(shardd_client *c, shardd_unit u, struct shardd_error *err)
{
	struct shardd_shard_done_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	r = shardd_submit_shard_done(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

/* @elements: of this rank's piece of tensor @tensor. */
static inline int shardd_copy_shard(shardd_client *c, shardd_unit u, uint32_t tensor,
				    enum shardd_array array, bool write, uint64_t buffer,
				    uint64_t elements, struct shardd_error *err)
{
	struct shardd_copy_shard_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.tensor = tensor;
	o.array = array;
	o.write = write;
	o.buffer = buffer;
	o.elements = elements;
	r = shardd_submit_copy_shard(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_drop_gradients(shardd_client *c, shardd_unit u, const uint32_t *tensors,
					size_t n_tensors, struct shardd_error *err)
{
	struct shardd_drop_gradients_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.tensors = tensors;
	o.n_tensors = n_tensors;
	r = shardd_submit_drop_gradients(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_commit(shardd_client *c, uint64_t step, const void *blob, size_t bytes,
				struct shardd_error *err)
{
	struct shardd_commit_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.step = step;
	o.blob = blob;
	o.bytes = bytes;
	r = shardd_submit_commit(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_unit_buffers(shardd_client *c, shardd_unit u, void **data,
				      struct shardd_error *err)
{
	struct shardd_unit_buffers_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	r = shardd_submit_unit_buffers(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (data)
		*data = r == 0 ? result.data : NULL;
	return r;
}

static inline int shardd_broadcast_buffers(shardd_client *c, shardd_unit u, shardd_group g,
					   uint32_t root, struct shardd_error *err)
{
	struct shardd_broadcast_buffers_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.group = g;
	o.root = root;
	r = shardd_submit_broadcast_buffers(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_summon(shardd_client *c, shardd_unit u, void **data,
				struct shardd_error *err)
{
	struct shardd_summon_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	r = shardd_submit_summon(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (data)
		*data = r == 0 ? result.data : NULL;
	return r;
}

/* @optimizer_steps: may be NULL. */
static inline int shardd_summon_state(shardd_client *c, shardd_unit u, uint32_t state, void **data,
				      uint64_t *optimizer_steps, struct shardd_error *err)
{
	struct shardd_summon_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.state = state;
	r = shardd_submit_summon(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (data)
		*data = r == 0 ? result.data : NULL;
	if (optimizer_steps)
		*optimizer_steps = r == 0 ? result.optimizer_steps : 0;
	return r;
}

static inline int shardd_return(shardd_client *c, shardd_unit u, bool write,
				struct shardd_error *err)
{
	struct shardd_return_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.write = write;
	r = shardd_submit_return(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

/* @optimizer_steps: NULL: unchanged. */
static inline int shardd_return_state(shardd_client *c, shardd_unit u, bool write,
				      const uint64_t *optimizer_steps, struct shardd_error *err)
{
	struct shardd_return_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.write = write;
	o.optimizer_steps = optimizer_steps;
	r = shardd_submit_return(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

/* With all options. */
static inline int shardd_return_with(shardd_client *c, const struct shardd_return_options *options,
				     struct shardd_error *err)
{
	shardd_ticket t = 0;
	int r = shardd_submit_return(c, options, &t, err);

	return shardd_finish_(c, r, t, NULL, err);
}

static inline int shardd_convert(shardd_client *c, const struct shardd_convert_options *options,
				 struct shardd_error *err)
{
	shardd_ticket t = 0;
	int r = shardd_submit_convert(c, options, &t, err);

	return shardd_finish_(c, r, t, NULL, err);
}

/* ------------------------------------------------------------------- ddp */

static inline int shardd_verify_model(shardd_client *c, shardd_group g, struct shardd_error *err)
{
	struct shardd_verify_model_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.group = g;
	r = shardd_submit_verify_model(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

/* @ret, @ret_tensors: may be NULL. */
static inline int shardd_ddp_create(shardd_client *c,
				    const struct shardd_ddp_create_options *options,
				    shardd_ddp *ret, uint32_t *ret_tensors,
				    struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t = 0;
	int r = shardd_submit_ddp_create(c, options, &t, err);

	r = shardd_finish_(c, r, t, &result, err);
	if (ret)
		*ret = r == 0 ? result.ddp : 0;
	if (ret_tensors)
		*ret_tensors = r == 0 ? result.tensors : 0;
	return r;
}

static inline int shardd_ddp_forward(shardd_client *c, shardd_ddp d, struct shardd_ddp_view *views,
				     uint32_t n, struct shardd_error *err)
{
	struct shardd_ddp_forward_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.ddp = d;
	o.views = views;
	o.n_views = n;
	r = shardd_submit_ddp_forward(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_ddp_backward(shardd_client *c, shardd_ddp d, const uint32_t *unused,
				      size_t n_unused, const uint32_t *kept, size_t n_kept,
				      struct shardd_error *err)
{
	struct shardd_ddp_backward_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.ddp = d;
	o.unused = unused;
	o.n_unused = n_unused;
	o.kept = kept;
	o.n_kept = n_kept;
	r = shardd_submit_ddp_backward(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_ddp_ready(shardd_client *c, shardd_ddp d, const uint32_t *tensors,
				   size_t n, struct shardd_error *err)
{
	struct shardd_ddp_ready_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.ddp = d;
	o.tensors = tensors;
	o.n_tensors = n;
	r = shardd_submit_ddp_ready(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

/* One sparse tensor. */
static inline int shardd_ddp_ready_rows(shardd_client *c, shardd_ddp d, uint32_t tensor,
					const int64_t *rows, size_t n, uint64_t buffer,
					uint64_t values_offset, struct shardd_error *err)
{
	struct shardd_ddp_ready_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.ddp = d;
	o.tensors = &tensor;
	o.n_tensors = 1;
	o.sparse = true;
	o.rows = rows;
	o.n_rows = n;
	o.buffer = buffer;
	o.values_offset = values_offset;
	r = shardd_submit_ddp_ready(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_ddp_finish(shardd_client *c, shardd_ddp d, uint8_t *untouched, uint32_t n,
				    struct shardd_error *err)
{
	struct shardd_ddp_finish_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.ddp = d;
	o.untouched = untouched;
	o.n_untouched = n;
	r = shardd_submit_ddp_finish(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

static inline int shardd_reduce_sparse(shardd_client *c, shardd_unit u, uint32_t tensor,
				       const int64_t *rows, size_t n, uint64_t buffer,
				       uint64_t values_offset, struct shardd_error *err)
{
	struct shardd_reduce_sparse_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.unit = u;
	o.tensor = tensor;
	o.rows = rows;
	o.n_rows = n;
	o.buffer = buffer;
	o.values_offset = values_offset;
	r = shardd_submit_reduce_sparse(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

/* @last, @surrogates: may be NULL. */
static inline int shardd_join_uneven(shardd_client *c, shardd_group g, bool divide_by_active,
				     uint32_t *last, uint64_t *surrogates, struct shardd_error *err)
{
	struct shardd_join_uneven_options o;
	struct shardd_result result;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.group = g;
	o.divide_by_active = divide_by_active;
	r = shardd_submit_join_uneven(c, &o, &t, err);
	r = shardd_finish_(c, r, t, &result, err);
	if (last)
		*last = r == 0 ? result.last : 0;
	if (surrogates)
		*surrogates = r == 0 ? result.surrogates : 0;
	return r;
}

/* With require_even. */
static inline int shardd_join_even(shardd_client *c, shardd_group g, struct shardd_error *err)
{
	struct shardd_join_uneven_options o;
	shardd_ticket t = 0;
	int r;

	memset(&o, 0, sizeof(o));
	o.size = sizeof(o);
	o.group = g;
	o.require_even = true;
	r = shardd_submit_join_uneven(c, &o, &t, err);
	r = shardd_finish_(c, r, t, NULL, err);
	return r;
}

#endif
