/* Every op of shardd.h: which call it is, and its request. */
#include "client_error.h"
#include "core/check.h"
#include "op.h"
#include "options.h"

static_assert((int)SHARDD_FP16 == SHARDD__V1__DTYPE__DTYPE_FP16, "dtypes");
static_assert((int)SHARDD_MIN == SHARDD__V1__REDUCE_OP__REDUCE_OP_MIN, "reduce ops");

/* ---------------------------------------------------------------- the table */

static void ops_gather_result(const ProtobufCMessage *m, struct shardd_result *ret,
			      const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__GatherResponse *reply = (const Shardd__V1__GatherResponse *)m;

	ret->references = reply->references;
	ret->copied = reply->copied;
	*ret_place = reply->place;
}

static void ops_release_result(const ProtobufCMessage *m, struct shardd_result *ret,
			       const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->references = ((const Shardd__V1__ReleaseResponse *)m)->references;
}

static void ops_gradient_result(const ProtobufCMessage *m, struct shardd_result *ret,
				const Shardd__V1__Placement **ret_place)
{
	(void)ret;
	*ret_place = ((const Shardd__V1__GradientBufferResponse *)m)->place;
}

static void ops_alloc_result(const ProtobufCMessage *m, struct shardd_result *ret,
			     const Shardd__V1__Placement **ret_place)
{
	const Shardd__V1__AllocBufferResponse *reply = (const Shardd__V1__AllocBufferResponse *)m;

	ret->buffer = reply->buffer;
	*ret_place = reply->place;
}

static void ops_reduce_result(const ProtobufCMessage *m, struct shardd_result *ret,
			      const Shardd__V1__Placement **ret_place)
{
	(void)ret_place;
	ret->skipped = ((const Shardd__V1__ReduceResponse *)m)->unused;
}

static int ops_reduce_keep(struct shardd_client *c, const ProtobufCMessage *m,
			   struct shardd_error *err)
{
	return places_take_unused(&c->places, (const Shardd__V1__ReduceResponse *)m, err);
}

/* Parameters of units that are no more. With a debugger's views they stay, to be told of. */
static int ops_drop_keep(struct shardd_client *c, const ProtobufCMessage *m,
			 struct shardd_error *err)
{
	const Shardd__V1__DropUnitsResponse *reply = (const Shardd__V1__DropUnitsResponse *)m;

	(void)err;
	for (size_t i = 0; !c->debug && i < reply->n_slabs; i++)
		map_forget(&c->map, reply->slabs[i]);
	return 0;
}

static void ops_unit_buffers_result(const ProtobufCMessage *m, struct shardd_result *ret,
				    const Shardd__V1__Placement **ret_place)
{
	(void)ret;
	*ret_place = ((const Shardd__V1__UnitBuffersResponse *)m)->place;
}

static int ops_convert_keep(struct shardd_client *c, const ProtobufCMessage *m,
			    struct shardd_error *err)
{
	const Shardd__V1__ConvertUnitsResponse *reply = (const Shardd__V1__ConvertUnitsResponse *)m;

	if (!reply->n_units)
		return error_set(err, SHARDD_INTERNAL, NULL,
				 "the units are converted, but the daemon had no memory to report "
				 "where their tensors are: register them again");
	return places_take(&c->places, reply->units, reply->n_units, err);
}

OP(initialise, Initialise, initialise, NULL);
OP(gather, Gather, gather, ops_gather_result);
OP(release, Release, release, ops_release_result);
OP(gradient, GradientBuffer, gradient_buffer, ops_gradient_result);
OP(alloc_buffer, AllocBuffer, alloc_buffer, ops_alloc_result);
OP(free_buffer, FreeBuffer, free_buffer, NULL);
OP_KEEPING(drop_units, DropUnits, drop_units, NULL, ops_drop_keep);
OP_KEEPING(reduce, Reduce, reduce, ops_reduce_result, ops_reduce_keep);
OP(all_reduce, AllReduce, all_reduce, NULL);
OP(broadcast, Broadcast, broadcast, NULL);
OP(barrier, Barrier, barrier, NULL);
OP(commit, Commit, commit, NULL);
OP(accumulate, Accumulate, accumulate, NULL);
OP(unit_buffers, UnitBuffers, unit_buffers, ops_unit_buffers_result);
OP(broadcast_buffers, BroadcastBuffers, broadcast_buffers, NULL);
OP_KEEPING(convert, ConvertUnits, convert_units, NULL, ops_convert_keep);

/* --------------------------------------------------------------- initialise */

static int ops_initialise_unused(const char *field, const char *from, struct shardd_error *err)
{
	return error_set(err, SHARDD_INVALID_ARGUMENT, field,
			 "%s is set, but from is %s, which does not use it: leave it 0", field,
			 from);
}

/* Refuse what the source of the values does not use. */
static int ops_initialise_check(const struct shardd_init_options *o, struct shardd_error *err)
{
	switch (o->from) {
	case SHARDD_FROM_SEED:
		if (o->root || o->buffer)
			return ops_initialise_unused(o->root ? "options.root" : "options.buffer",
						     "SHARDD_FROM_SEED", err);
		return 0;
	case SHARDD_FROM_ROOT:
		return o->seed ? ops_initialise_unused("options.seed", "SHARDD_FROM_ROOT", err) : 0;
	case SHARDD_FROM_OWN:
		if (o->root || o->seed)
			return ops_initialise_unused(o->root ? "options.root" : "options.seed",
						     "SHARDD_FROM_OWN", err);
		return 0;
	}
	return error_set(err, SHARDD_INVALID_ARGUMENT, "options.from",
			 "from is %d: set SHARDD_FROM_SEED, SHARDD_FROM_ROOT or SHARDD_FROM_OWN",
			 (int)o->from);
}

int shardd_submit_init(shardd_client *c, const struct shardd_init_options *options,
		       shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__InitialiseRequest q = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__Seed seed = SHARDD__V1__SEED__INIT;
	Shardd__V1__FromRank from_root = SHARDD__V1__FROM_RANK__INIT;
	Shardd__V1__Own own = SHARDD__V1__OWN__INIT;
	struct shardd_init_options room;
	const struct shardd_init_options *o = OPTIONS_READ(options, &room, err);
	int r = o ? ops_initialise_check(o, err) : -SHARDD_INVALID_ARGUMENT;

	if (r < 0)
		return r;
	q.unit = o->unit;
	q.buffer = o->buffer;
	if (o->from == SHARDD_FROM_SEED) {
		seed.seed = o->seed;
		q.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_SEED;
		q.seed = &seed;
	} else if (o->from == SHARDD_FROM_ROOT) {
		from_root.root = o->root;
		q.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_BROADCAST;
		q.broadcast = &from_root;
	} else {
		q.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_OWN;
		q.own = &own;
	}
	return op_submit(c, &initialise, &q.base, t, err);
}

/* ----------------------------------------------------- parameters, gradients */

int shardd_submit_gather(shardd_client *c, const struct shardd_gather_options *options,
			 shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__GatherRequest q = SHARDD__V1__GATHER_REQUEST__INIT;
	struct shardd_gather_options room;
	const struct shardd_gather_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	return op_submit(c, &gather, &q.base, t, err);
}

int shardd_submit_release(shardd_client *c, const struct shardd_release_options *options,
			  shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__ReleaseRequest q = SHARDD__V1__RELEASE_REQUEST__INIT;
	struct shardd_release_options room;
	const struct shardd_release_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	return op_submit(c, &release, &q.base, t, err);
}

int shardd_submit_gradient(shardd_client *c, const struct shardd_gradient_options *options,
			   shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__GradientBufferRequest q = SHARDD__V1__GRADIENT_BUFFER_REQUEST__INIT;
	struct shardd_gradient_options room;
	const struct shardd_gradient_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	return op_submit(c, &gradient, &q.base, t, err);
}

/* Options that exclude each other, and lists without a pointer. */
static int ops_reduce_check(const struct shardd_reduce_options *o, struct shardd_error *err)
{
	if (o->n_unused && !o->unused)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.unused",
				 "unused is NULL, but n_unused is %zu", o->n_unused);
	if (o->unit_unused && o->n_unused)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.unused",
				 "unit_unused is set and n_unused is %zu: give one of the two",
				 o->n_unused);
	return 0;
}

int shardd_submit_reduce(shardd_client *c, const struct shardd_reduce_options *options,
			 shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__ReduceRequest q = SHARDD__V1__REDUCE_REQUEST__INIT;
	struct shardd_reduce_options room;
	const struct shardd_reduce_options *o = OPTIONS_READ(options, &room, err);
	int r;

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	r = ops_reduce_check(o, err);
	if (r < 0)
		return r;
	q.unit = o->unit;
	q.more = o->more;
	q.unused = o->unit_unused;
	q.defer_all_reduce = o->deferred;
	q.unused_tensors = (uint32_t *)o->unused;
	q.n_unused_tensors = o->n_unused;
	return op_submit(c, &reduce, &q.base, t, err);
}

int shardd_submit_accumulate(shardd_client *c, const struct shardd_accumulate_options *options,
			     shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__AccumulateRequest q = SHARDD__V1__ACCUMULATE_REQUEST__INIT;
	struct shardd_accumulate_options room;
	const struct shardd_accumulate_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	return op_submit(c, &accumulate, &q.base, t, err);
}

/* -------------------------------------------------------------------- buffers */

int shardd_submit_alloc(shardd_client *c, const struct shardd_alloc_options *options,
			shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__AllocBufferRequest q = SHARDD__V1__ALLOC_BUFFER_REQUEST__INIT;
	struct shardd_alloc_options room;
	const struct shardd_alloc_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.bytes = o->bytes;
	return op_submit(c, &alloc_buffer, &q.base, t, err);
}

static int ops_submit_drop(shardd_client *c, const struct shardd_free_options *o, shardd_ticket *t,
			   struct shardd_error *err)
{
	Shardd__V1__DropUnitsRequest q = SHARDD__V1__DROP_UNITS_REQUEST__INIT;

	if (o->buffer)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.buffer",
				 "buffer is %llu, and units are given: free one or the others",
				 (unsigned long long)o->buffer);
	if (!o->units)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "options.units", "units is NULL");
	q.units = (uint32_t *)o->units;
	q.n_units = o->n_units;
	return op_submit(c, &drop_units, &q.base, t, err);
}

int shardd_submit_free(shardd_client *c, const struct shardd_free_options *options,
		       shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__FreeBufferRequest q = SHARDD__V1__FREE_BUFFER_REQUEST__INIT;
	struct shardd_free_options room;
	const struct shardd_free_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	if (o->units || o->n_units)
		return ops_submit_drop(c, o, t, err);
	q.buffer = o->buffer;
	return op_submit(c, &free_buffer, &q.base, t, err);
}

/* --------------------------------------------------------------------- groups */

int shardd_submit_all_reduce(shardd_client *c, const struct shardd_all_reduce_options *options,
			     shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__AllReduceRequest q = SHARDD__V1__ALL_REDUCE_REQUEST__INIT;
	struct shardd_all_reduce_options room;
	const struct shardd_all_reduce_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.group = o->group;
	q.buffer = o->buffer;
	q.offset = o->offset;
	q.count = o->count;
	q.dtype = (Shardd__V1__Dtype)o->dtype;
	q.op = (Shardd__V1__ReduceOp)o->op;
	return op_submit(c, &all_reduce, &q.base, t, err);
}

int shardd_submit_broadcast(shardd_client *c, const struct shardd_broadcast_options *options,
			    shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__BroadcastRequest q = SHARDD__V1__BROADCAST_REQUEST__INIT;
	struct shardd_broadcast_options room;
	const struct shardd_broadcast_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.group = o->group;
	q.buffer = o->buffer;
	q.offset = o->offset;
	q.bytes = o->bytes;
	q.root = o->root;
	return op_submit(c, &broadcast, &q.base, t, err);
}

int shardd_submit_barrier(shardd_client *c, const struct shardd_barrier_options *options,
			  shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__BarrierRequest q = SHARDD__V1__BARRIER_REQUEST__INIT;
	struct shardd_barrier_options room;
	const struct shardd_barrier_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.group = o->group;
	return op_submit(c, &barrier, &q.base, t, err);
}

/* --------------------------------------------------------------------- commit */

int shardd_submit_commit(shardd_client *c, const struct shardd_commit_options *options,
			 shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__CommitRequest q = SHARDD__V1__COMMIT_REQUEST__INIT;
	struct shardd_commit_options room;
	const struct shardd_commit_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	if (o->bytes > SHARDD_MAX_BLOB || (o->bytes && !o->blob))
		return error_set(err, SHARDD_INVALID_ARGUMENT, "blob",
				 "the blob has %zu bytes%s; the maximum is %u", o->bytes,
				 o->blob ? "" : " at NULL", SHARDD_MAX_BLOB);
	q.step = o->step;
	q.blob.data = (uint8_t *)o->blob;
	q.blob.len = o->bytes;
	return op_submit(c, &commit, &q.base, t, err);
}

/* -------------------------------------------------------------------- layouts */

int shardd_submit_unit_buffers(shardd_client *c, const struct shardd_unit_buffers_options *options,
			       shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__UnitBuffersRequest q = SHARDD__V1__UNIT_BUFFERS_REQUEST__INIT;
	struct shardd_unit_buffers_options room;
	const struct shardd_unit_buffers_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	return op_submit(c, &unit_buffers, &q.base, t, err);
}

int shardd_submit_broadcast_buffers(shardd_client *c,
				    const struct shardd_broadcast_buffers_options *options,
				    shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__BroadcastBuffersRequest q = SHARDD__V1__BROADCAST_BUFFERS_REQUEST__INIT;
	struct shardd_broadcast_buffers_options room;
	const struct shardd_broadcast_buffers_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	q.unit = o->unit;
	q.group = o->group;
	q.root = o->root;
	return op_submit(c, &broadcast_buffers, &q.base, t, err);
}

int shardd_submit_convert(shardd_client *c, const struct shardd_convert_options *options,
			  shardd_ticket *t, struct shardd_error *err)
{
	Shardd__V1__ConvertUnitsRequest q = SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
	struct shardd_convert_options room;
	const struct shardd_convert_options *o = OPTIONS_READ(options, &room, err);

	if (!o)
		return -SHARDD_INVALID_ARGUMENT;
	if (o->n_units && !o->units)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "units", "units is NULL");
	if (o->n_unfreeze && !o->unfreeze)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "unfreeze", "unfreeze is NULL");
	q.unfreeze = (uint32_t *)o->unfreeze;
	q.n_unfreeze = o->n_unfreeze;
	q.optimizer_like = o->optimizer_like;
	q.units = (uint32_t *)o->units;
	q.n_units = o->n_units;
	q.layout = (Shardd__V1__Layout)o->layout;
	q.shard_multiple = o->shard_multiple;
	q.strategy = (Shardd__V1__Strategy)o->strategy;
	q.shard_ranks = o->shard_ranks;
	return op_submit(c, &convert, &q.base, t, err);
}
