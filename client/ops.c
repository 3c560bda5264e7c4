/* Every op of shardd.h: which call it is, and its request. */
#include "client_error.h"
#include "core/check.h"
#include "op.h"

static_assert((int)SHARDD_FP16 == SHARDD__V1__DTYPE__DTYPE_FP16, "dtypes");
static_assert((int)SHARDD_MIN == SHARDD__V1__REDUCE_OP__REDUCE_OP_MIN, "reduce ops");

/* ---------------------------------------------------------------- the table */

static void gather_result(const ProtobufCMessage *m, struct shardd_result *ret,
			  const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__GatherReply *reply = (const Shardd__V1__GatherReply *)m;

	ret->references = reply->references;
	ret->copied = reply->copied;
	*ret_place = reply->place;
}

static void release_result(const ProtobufCMessage *m, struct shardd_result *ret,
			   const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->references = ((const Shardd__V1__ReleaseReply *)m)->references;
}

static void gradient_result(const ProtobufCMessage *m, struct shardd_result *ret,
			    const Shardd__V1__Placement **ret_place)
{
	(void)ret;
	*ret_place = ((const Shardd__V1__GradientBufferReply *)m)->place;
}

static void alloc_result(const ProtobufCMessage *m, struct shardd_result *ret,
			 const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__AllocBufferReply *reply = (const Shardd__V1__AllocBufferReply *)m;

	ret->buffer = reply->buffer;
	*ret_place = reply->place;
}

static void clip_result(const ProtobufCMessage *m, struct shardd_result *ret,
			const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->total_norm = ((const Shardd__V1__ClipGradNormReply *)m)->total_norm;
}

static void reduce_result(const ProtobufCMessage *m, struct shardd_result *ret,
			  const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->skipped = ((const Shardd__V1__ReduceReply *)m)->unused;
}

static int reduce_keep(struct shardd_client *c, const ProtobufCMessage *m, struct shardd_error *err)
{
	return places_take_unused(&c->places, (const Shardd__V1__ReduceReply *)m, err);
}

static void unit_buffers_result(const ProtobufCMessage *m, struct shardd_result *ret,
				const Shardd__V1__Placement **ret_place)
{
	(void)ret;
	*ret_place = ((const Shardd__V1__UnitBuffersReply *)m)->place;
}

static int convert_keep(struct shardd_client *c, const ProtobufCMessage *m,
			struct shardd_error *err)
{
	const Shardd__V1__ConvertUnitsReply *reply = (const Shardd__V1__ConvertUnitsReply *)m;

	if (!reply->n_units)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "the units are converted, but the daemon had no memory to report "
				 "where their tensors are: register them again");
	return places_take(&c->places, reply->units, reply->n_units, err);
}

OP(initialise, Initialise, initialise, NULL);
OP(gather, Gather, gather, gather_result);
OP(release, Release, release, release_result);
OP(gradient, GradientBuffer, gradient_buffer, gradient_result);
OP(alloc_buffer, AllocBuffer, alloc_buffer, alloc_result);
OP(free_buffer, FreeBuffer, free_buffer, NULL);
OP_KEEPING(reduce, Reduce, reduce, reduce_result, reduce_keep);
OP(all_reduce, AllReduce, all_reduce, NULL);
OP(broadcast, Broadcast, broadcast, NULL);
OP(barrier, Barrier, barrier, NULL);
OP(clip_grad_norm, ClipGradNorm, clip_grad_norm, clip_result);
OP(step, Step, step, NULL);
OP(commit, Commit, commit, NULL);
OP(accumulate, Accumulate, accumulate, NULL);
OP(unit_buffers, UnitBuffers, unit_buffers, unit_buffers_result);
OP(broadcast_buffers, BroadcastBuffers, broadcast_buffers, NULL);
OP_KEEPING(convert, ConvertUnits, convert_units, NULL, convert_keep);

/* --------------------------------------------------------------- initialise */

int shardd_init_seed_submit(shardd_client *c, shardd_unit u, uint64_t seed, shardd_ticket *t,
			    struct shardd_error *err)
{
	Shardd__V1__InitialiseRequest q = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__Seed how = SHARDD__V1__SEED__INIT;

	how.seed = seed;
	q.unit = u;
	q.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_SEED;
	q.seed = &how;
	return op_submit(c, &initialise, &q.base, t, err);
}

int shardd_init_seed(shardd_client *c, shardd_unit u, uint64_t seed, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_init_seed_submit(c, u, seed, &t, err), &t, NULL, err);
}

int shardd_init_broadcast_submit(shardd_client *c, shardd_unit u, uint32_t root, uint64_t buffer,
				 shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__InitialiseRequest q = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__FromRank how = SHARDD__V1__FROM_RANK__INIT;

	how.root = root;
	q.unit = u;
	q.buffer = buffer;
	q.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_BROADCAST;
	q.broadcast = &how;
	return op_submit(c, &initialise, &q.base, t, err);
}

int shardd_init_broadcast(shardd_client *c, shardd_unit u, uint32_t root, uint64_t buffer,
			  struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_init_broadcast_submit(c, u, root, buffer, &t, err), &t, NULL,
			 err);
}

int shardd_init_own_submit(shardd_client *c, shardd_unit u, uint64_t buffer, shardd_ticket *t,
			   struct shardd_error *err)
{
	Shardd__V1__InitialiseRequest q = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__Own how = SHARDD__V1__OWN__INIT;

	q.unit = u;
	q.buffer = buffer;
	q.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_OWN;
	q.own = &how;
	return op_submit(c, &initialise, &q.base, t, err);
}

int shardd_init_own(shardd_client *c, shardd_unit u, uint64_t buffer, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_init_own_submit(c, u, buffer, &t, err), &t, NULL, err);
}

/* ----------------------------------------------------- parameters, gradients */

int shardd_gather_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
			 struct shardd_error *err)
{
	Shardd__V1__GatherRequest q = SHARDD__V1__GATHER_REQUEST__INIT;

	q.unit = u;
	return op_submit(c, &gather, &q.base, t, err);
}

int shardd_gather(shardd_client *c, shardd_unit u, const void **data, struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t;
	int r = op_finish(c, shardd_gather_submit(c, u, &t, err), &t, &result, err);

	if (r == 0 && data)
		*data = result.data;
	return r;
}

int shardd_release_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
			  struct shardd_error *err)
{
	Shardd__V1__ReleaseRequest q = SHARDD__V1__RELEASE_REQUEST__INIT;

	q.unit = u;
	return op_submit(c, &release, &q.base, t, err);
}

int shardd_release(shardd_client *c, shardd_unit u, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_release_submit(c, u, &t, err), &t, NULL, err);
}

int shardd_gradient_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
			   struct shardd_error *err)
{
	Shardd__V1__GradientBufferRequest q = SHARDD__V1__GRADIENT_BUFFER_REQUEST__INIT;

	q.unit = u;
	return op_submit(c, &gradient, &q.base, t, err);
}

int shardd_gradient(shardd_client *c, shardd_unit u, void **data, struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t;
	int r = op_finish(c, shardd_gradient_submit(c, u, &t, err), &t, &result, err);

	if (r == 0 && data)
		*data = result.data;
	return r;
}

int shardd_reduce_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
			 struct shardd_error *err)
{
	Shardd__V1__ReduceRequest q = SHARDD__V1__REDUCE_REQUEST__INIT;

	q.unit = u;
	return op_submit(c, &reduce, &q.base, t, err);
}

int shardd_reduce(shardd_client *c, shardd_unit u, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_reduce_submit(c, u, &t, err), &t, NULL, err);
}

int shardd_reduce_deferred_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
				  struct shardd_error *err)
{
	Shardd__V1__ReduceRequest q = SHARDD__V1__REDUCE_REQUEST__INIT;

	q.unit = u;
	q.defer_all_reduce = 1;
	return op_submit(c, &reduce, &q.base, t, err);
}

int shardd_reduce_deferred(shardd_client *c, shardd_unit u, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_reduce_deferred_submit(c, u, &t, err), &t, NULL, err);
}

int shardd_accumulate_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
			     struct shardd_error *err)
{
	Shardd__V1__AccumulateRequest q = SHARDD__V1__ACCUMULATE_REQUEST__INIT;

	q.unit = u;
	return op_submit(c, &accumulate, &q.base, t, err);
}

int shardd_accumulate(shardd_client *c, shardd_unit u, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_accumulate_submit(c, u, &t, err), &t, NULL, err);
}

/* -------------------------------------------------------------------- buffers */

int shardd_alloc_submit(shardd_client *c, uint64_t bytes, shardd_ticket *t,
			struct shardd_error *err)
{
	Shardd__V1__AllocBufferRequest q = SHARDD__V1__ALLOC_BUFFER_REQUEST__INIT;

	q.bytes = bytes;
	return op_submit(c, &alloc_buffer, &q.base, t, err);
}

int shardd_alloc(shardd_client *c, uint64_t bytes, uint64_t *buffer, void **data,
		 struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t;
	int r = op_finish(c, shardd_alloc_submit(c, bytes, &t, err), &t, &result, err);

	if (r == 0 && buffer)
		*buffer = result.buffer;
	if (r == 0 && data)
		*data = result.data;
	return r;
}

int shardd_free_submit(shardd_client *c, uint64_t buffer, shardd_ticket *t,
		       struct shardd_error *err)
{
	Shardd__V1__FreeBufferRequest q = SHARDD__V1__FREE_BUFFER_REQUEST__INIT;

	q.buffer = buffer;
	return op_submit(c, &free_buffer, &q.base, t, err);
}

int shardd_free(shardd_client *c, uint64_t buffer, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_free_submit(c, buffer, &t, err), &t, NULL, err);
}

/* --------------------------------------------------------------------- groups */

int shardd_all_reduce_submit(shardd_client *c, shardd_group g, uint64_t buffer, uint64_t offset,
			     uint64_t count, enum shardd_dtype dtype, enum shardd_reduce_op op,
			     shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__AllReduceRequest q = SHARDD__V1__ALL_REDUCE_REQUEST__INIT;

	q.group = g;
	q.buffer = buffer;
	q.offset = offset;
	q.count = count;
	q.dtype = (Shardd__V1__Dtype)dtype;
	q.op = (Shardd__V1__ReduceOp)op;
	return op_submit(c, &all_reduce, &q.base, t, err);
}

int shardd_all_reduce(shardd_client *c, shardd_group g, uint64_t buffer, uint64_t offset,
		      uint64_t count, enum shardd_dtype dtype, enum shardd_reduce_op op,
		      struct shardd_error *err)
{
	shardd_ticket t;
	int r = shardd_all_reduce_submit(c, g, buffer, offset, count, dtype, op, &t, err);

	return op_finish(c, r, &t, NULL, err);
}

int shardd_broadcast_submit(shardd_client *c, shardd_group g, uint64_t buffer, uint64_t offset,
			    uint64_t bytes, uint32_t root, shardd_ticket *t,
			    struct shardd_error *err)
{
	Shardd__V1__BroadcastRequest q = SHARDD__V1__BROADCAST_REQUEST__INIT;

	q.group = g;
	q.buffer = buffer;
	q.offset = offset;
	q.bytes = bytes;
	q.root = root;
	return op_submit(c, &broadcast, &q.base, t, err);
}

int shardd_broadcast(shardd_client *c, shardd_group g, uint64_t buffer, uint64_t offset,
		     uint64_t bytes, uint32_t root, struct shardd_error *err)
{
	shardd_ticket t;
	int r = shardd_broadcast_submit(c, g, buffer, offset, bytes, root, &t, err);

	return op_finish(c, r, &t, NULL, err);
}

int shardd_barrier_submit(shardd_client *c, shardd_group g, shardd_ticket *t,
			  struct shardd_error *err)
{
	Shardd__V1__BarrierRequest q = SHARDD__V1__BARRIER_REQUEST__INIT;

	q.group = g;
	return op_submit(c, &barrier, &q.base, t, err);
}

int shardd_barrier(shardd_client *c, shardd_group g, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_barrier_submit(c, g, &t, err), &t, NULL, err);
}

/* ----------------------------------------------------------------------- step */

int shardd_clip_grad_norm_submit(shardd_client *c, shardd_group g, double max_norm,
				 double norm_type, shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__ClipGradNormRequest q = SHARDD__V1__CLIP_GRAD_NORM_REQUEST__INIT;

	q.group = g;
	q.max_norm = max_norm;
	q.norm_type = norm_type;
	return op_submit(c, &clip_grad_norm, &q.base, t, err);
}

int shardd_clip_grad_norm(shardd_client *c, shardd_group g, double max_norm, double norm_type,
			  double *total_norm, struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t;
	int r = shardd_clip_grad_norm_submit(c, g, max_norm, norm_type, &t, err);

	r = op_finish(c, r, &t, &result, err);
	if (r == 0 && total_norm)
		*total_norm = result.total_norm;
	return r;
}

int shardd_step_submit(shardd_client *c, shardd_group g, const double *lr, shardd_ticket *t,
		       struct shardd_error *err)
{
	Shardd__V1__StepRequest q = SHARDD__V1__STEP_REQUEST__INIT;

	q.group = g;
	if (lr) {
		q.optional_lr_case = SHARDD__V1__STEP_REQUEST__OPTIONAL_LR_LR;
		q.lr = *lr;
	}
	return op_submit(c, &step, &q.base, t, err);
}

int shardd_step(shardd_client *c, shardd_group g, const double *lr, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_step_submit(c, g, lr, &t, err), &t, NULL, err);
}

int shardd_commit_submit(shardd_client *c, uint64_t step_number, const void *blob, size_t bytes,
			 shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__CommitRequest q = SHARDD__V1__COMMIT_REQUEST__INIT;

	if (bytes > SHARDD_MAX_BLOB || (bytes && !blob))
		return error_set(err, SHARDD_INVALID_ARGUMENT, "blob",
				 "the blob has %zu bytes%s, at most %u are allowed", bytes,
				 blob ? "" : " at NULL", SHARDD_MAX_BLOB);
	q.step = step_number;
	q.blob.data = (uint8_t *)blob;
	q.blob.len = bytes;
	return op_submit(c, &commit, &q.base, t, err);
}

int shardd_commit(shardd_client *c, uint64_t step_number, const void *blob, size_t bytes,
		  struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_commit_submit(c, step_number, blob, bytes, &t, err), &t, NULL,
			 err);
}

/* -------------------------------------------------------------------- layouts */

int shardd_unit_buffers_submit(shardd_client *c, shardd_unit u, shardd_ticket *t,
			       struct shardd_error *err)
{
	Shardd__V1__UnitBuffersRequest q = SHARDD__V1__UNIT_BUFFERS_REQUEST__INIT;

	q.unit = u;
	return op_submit(c, &unit_buffers, &q.base, t, err);
}

int shardd_unit_buffers(shardd_client *c, shardd_unit u, void **data, struct shardd_error *err)
{
	struct shardd_result result;
	shardd_ticket t;
	int r = op_finish(c, shardd_unit_buffers_submit(c, u, &t, err), &t, &result, err);

	if (r == 0 && data)
		*data = result.data;
	return r;
}

int shardd_broadcast_buffers_submit(shardd_client *c, shardd_unit u, shardd_group g, uint32_t root,
				    shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__BroadcastBuffersRequest q = SHARDD__V1__BROADCAST_BUFFERS_REQUEST__INIT;

	q.unit = u;
	q.group = g;
	q.root = root;
	return op_submit(c, &broadcast_buffers, &q.base, t, err);
}

int shardd_broadcast_buffers(shardd_client *c, shardd_unit u, shardd_group g, uint32_t root,
			     struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_broadcast_buffers_submit(c, u, g, root, &t, err), &t, NULL, err);
}

int shardd_convert_submit(shardd_client *c, const shardd_unit *units, size_t n,
			  const struct shardd_conversion *to, shardd_ticket *t,
			  struct shardd_error *err)
{
	Shardd__V1__ConvertUnitsRequest q = SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
	int r = client_check(c, err);

	if (r == 0 && (!to || (n && !units)))
		r = error_set(err, SHARDD_INVALID_ARGUMENT, to ? "units" : "to",
			      to ? "units is NULL" : "to is NULL");
	if (r == 0)
		r = client_check_size(to->size, sizeof(*to), "to.size", err);
	if (r < 0)
		return r;
	q.units = (uint32_t *)units;
	q.n_units = n;
	q.layout = (Shardd__V1__Layout)to->layout;
	q.shard_multiple = to->shard_multiple;
	q.strategy = (Shardd__V1__Strategy)to->strategy;
	q.shard_ranks = to->shard_ranks;
	return op_submit(c, &convert, &q.base, t, err);
}

int shardd_convert(shardd_client *c, const shardd_unit *units, size_t n,
		   const struct shardd_conversion *to, struct shardd_error *err)
{
	shardd_ticket t;

	return op_finish(c, shardd_convert_submit(c, units, n, to, &t, err), &t, NULL, err);
}
