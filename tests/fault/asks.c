#include "asks.h"

#include "core/check.h"

enum { N = 1000, BUFFER_BYTES = 4096 };

#define ASK_ON(name, type, which)                                               \
	void name(struct scene *s, unsigned r)                                  \
	{                                                                       \
		nodefix_on_unit(s->n, s->m[r], type, s->which, scene_op(s, r)); \
	}
#define SUBMIT(s, r, type, msg) nodefix_submit((s)->n, (s)->m[r], type, &(msg).base, scene_op(s, r))

void ask_seed_plain(struct scene *s, unsigned r)
{
	nodefix_seed(s->n, s->m[r], s->plain, 1, scene_op(s, r));
}

void ask_seed(struct scene *s, unsigned r)
{
	nodefix_seed(s->n, s->m[r], s->u, 1, scene_op(s, r));
}

ASK_ON(ask_gradient_plain, "GradientBuffer", plain)
ASK_ON(ask_reduce_plain, "Reduce", plain)
ASK_ON(ask_gradient, "GradientBuffer", u)
ASK_ON(ask_reduce, "Reduce", u)
ASK_ON(ask_accumulate, "Accumulate", u)
ASK_ON(ask_gather, "Gather", u)
ASK_ON(ask_release, "Release", u)
ASK_ON(ask_summon, "SummonFull", u)
ASK_ON(ask_unit_buffers, "UnitBuffers", u)
ASK_ON(ask_shard_done, "ShardDone", u)

void ask_read_gathered(struct scene *s, unsigned r)
{
	Shardd__V1__ReadBytesRequest q = SHARDD__V1__READ_BYTES_REQUEST__INIT;

	q.memory_case = SHARDD__V1__READ_BYTES_REQUEST__MEMORY_GATHERED;
	q.gathered = s->u->id;
	q.offset = 8;
	q.bytes = 100;
	SUBMIT(s, r, "ReadBytes", q);
}

void ask_read_gradient(struct scene *s, unsigned r)
{
	Shardd__V1__ReadBytesRequest q = SHARDD__V1__READ_BYTES_REQUEST__INIT;

	q.memory_case = SHARDD__V1__READ_BYTES_REQUEST__MEMORY_GRADIENT;
	q.gradient = s->u->id;
	q.bytes = 100;
	SUBMIT(s, r, "ReadBytes", q);
}

void ask_write_gradient(struct scene *s, unsigned r)
{
	static uint8_t data[100];
	Shardd__V1__WriteBytesRequest q = SHARDD__V1__WRITE_BYTES_REQUEST__INIT;

	q.memory_case = SHARDD__V1__WRITE_BYTES_REQUEST__MEMORY_GRADIENT;
	q.gradient = s->u->id;
	q.data = (ProtobufCBinaryData){ sizeof(data), data };
	SUBMIT(s, r, "WriteBytes", q);
}

static void ask_copy_shard(struct scene *s, unsigned r, bool gradient, bool write)
{
	Shardd__V1__CopyShardRequest q = SHARDD__V1__COPY_SHARD_REQUEST__INIT;
	struct unit_run run;

	(void)unit_rank_run(s->u, r, 0, &run);
	q.unit = s->u->id;
	q.array = gradient ? SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_GRADIENT
			   : SHARDD__V1__COPY_SHARD_REQUEST__ARRAY__ARRAY_PARAMETERS;
	q.write = write;
	q.buffer = s->buffer[r];
	q.elements = run.n;
	SUBMIT(s, r, "CopyShard", q);
}

void ask_read_shard(struct scene *s, unsigned r)
{
	ask_copy_shard(s, r, false, false);
}

void ask_write_shard(struct scene *s, unsigned r)
{
	ask_copy_shard(s, r, false, true);
}

void ask_write_gradient_shard(struct scene *s, unsigned r)
{
	ask_copy_shard(s, r, true, true);
}

void ask_drop(struct scene *s, unsigned r)
{
	static uint32_t first = 0;
	Shardd__V1__DropGradientsRequest q = SHARDD__V1__DROP_GRADIENTS_REQUEST__INIT;

	q.unit = s->u->id;
	q.tensors = &first;
	q.n_tensors = 1;
	SUBMIT(s, r, "DropGradients", q);
}

void ask_step(struct scene *s, unsigned r)
{
	nodefix_step(s->n, s->m[r], scene_op(s, r));
}

void ask_commit(struct scene *s, unsigned r)
{
	nodefix_commit(s->n, s->m[r], s->job->rec->step + 1, 100, scene_op(s, r));
}

static void ask_pass(struct scene *s, unsigned r, const char *type, int kind)
{
	Shardd__V1__BeginPassRequest begin = SHARDD__V1__BEGIN_PASS_REQUEST__INIT;
	Shardd__V1__EndPassRequest over = SHARDD__V1__END_PASS_REQUEST__INIT;

	begin.unit = over.unit = s->u->id;
	begin.pass = over.pass = (Shardd__V1__Pass)kind;
	if (*type == 'B')
		SUBMIT(s, r, type, begin);
	else
		SUBMIT(s, r, type, over);
}

void ask_begin_forward(struct scene *s, unsigned r)
{
	ask_pass(s, r, "BeginPass", PASS_KIND_FORWARD);
}

void ask_end_forward(struct scene *s, unsigned r)
{
	ask_pass(s, r, "EndPass", PASS_KIND_FORWARD);
}

void ask_next_shard(struct scene *s, unsigned r)
{
	Shardd__V1__NextShardRequest m = SHARDD__V1__NEXT_SHARD_REQUEST__INIT;

	SUBMIT(s, r, "NextShard", m);
}

void ask_gather_zero(struct scene *s, unsigned r)
{
	if (r == 0)
		ask_gather(s, r);
}

void ask_release_zero(struct scene *s, unsigned r)
{
	if (r == 0)
		ask_release(s, r);
}

void ask_plan(struct scene *s, unsigned r)
{
	static Shardd__V1__PlanBackwardRequest__Clip norm;
	Shardd__V1__PlanBackwardRequest m = SHARDD__V1__PLAN_BACKWARD_REQUEST__INIT;

	shardd__v1__plan_backward_request__clip__init(&norm);
	norm.max_norm = 1;
	m.clip = &norm;
	m.inv_scale = 0.5;
	SUBMIT(s, r, "PlanBackward", m);
}

void ask_own(struct scene *s, unsigned r)
{
	nodefix_own(s->n, s->m[r], s->u, s->buffer[r], scene_op(s, r));
}

void ask_from_root(struct scene *s, unsigned r)
{
	Shardd__V1__InitialiseRequest m = SHARDD__V1__INITIALISE_REQUEST__INIT;
	Shardd__V1__FromRank root = SHARDD__V1__FROM_RANK__INIT;

	m.unit = s->u->id;
	m.how_case = SHARDD__V1__INITIALISE_REQUEST__HOW_BROADCAST;
	m.broadcast = &root;
	m.buffer = r ? 0 : s->buffer[0];
	SUBMIT(s, r, "Initialise", m);
}

void ask_alloc(struct scene *s, unsigned r)
{
	nodefix_alloc(s->n, s->m[r], 3 << 20, scene_op(s, r));
}

void ask_free_buffer(struct scene *s, unsigned r)
{
	nodefix_free(s->n, s->m[r], s->buffer[r], scene_op(s, r));
}

void ask_reduce_twice(struct scene *s, unsigned r)
{
	ask_reduce(s, r);
	ask_gradient(s, r);
	ask_reduce(s, r);
}

void ask_defer(struct scene *s, unsigned r)
{
	nodefix_defer(s->n, s->m[r], s->u, scene_op(s, r));
}

void ask_leave_out(struct scene *s, unsigned r)
{
	static const uint32_t weight = 0;

	nodefix_leave_out(s->n, s->m[r], s->u, &weight, scene_op(s, r));
}

void ask_all_reduce(struct scene *s, unsigned r)
{
	nodefix_all_reduce(s->n, s->m[r], s->buffer[r], N, scene_op(s, r));
}

static void ask_average_or_most(struct scene *s, unsigned r, Shardd__V1__ReduceOp op)
{
	Shardd__V1__AllReduceRequest m = SHARDD__V1__ALL_REDUCE_REQUEST__INIT;

	m.buffer = s->buffer[r];
	m.count = N;
	m.dtype = SHARDD__V1__DTYPE__DTYPE_FP32;
	m.op = op;
	SUBMIT(s, r, "AllReduce", m);
}

void ask_average(struct scene *s, unsigned r)
{
	ask_average_or_most(s, r, SHARDD__V1__REDUCE_OP__REDUCE_OP_AVG);
}

void ask_most(struct scene *s, unsigned r)
{
	ask_average_or_most(s, r, SHARDD__V1__REDUCE_OP__REDUCE_OP_MAX);
}

/* The buffer is given back behind it. */
void ask_all_reduce_and_free(struct scene *s, unsigned r)
{
	ask_all_reduce(s, r);
	ask_free_buffer(s, r);
}

void ask_broadcast(struct scene *s, unsigned r)
{
	nodefix_broadcast(s->n, s->m[r], s->buffer[r], N, scene_op(s, r));
}

void ask_barrier(struct scene *s, unsigned r)
{
	nodefix_barrier(s->n, s->m[r], 0, scene_op(s, r));
}

void ask_clip(struct scene *s, unsigned r)
{
	nodefix_clip(s->n, s->m[r], 0.5, scene_op(s, r));
}

void ask_clip_value(struct scene *s, unsigned r)
{
	Shardd__V1__ClipGradValueRequest m = SHARDD__V1__CLIP_GRAD_VALUE_REQUEST__INIT;

	m.value = 0.5;
	SUBMIT(s, r, "ClipGradValue", m);
}

void ask_unscale(struct scene *s, unsigned r)
{
	Shardd__V1__UnscaleRequest m = SHARDD__V1__UNSCALE_REQUEST__INIT;

	m.inv_scale = 0.5;
	SUBMIT(s, r, "Unscale", m);
}

/* Two steps: the second one applies the first. */
void ask_step_and_commit(struct scene *s, unsigned r)
{
	ask_step(s, r);
	ask_commit(s, r);
}

void ask_set_reshard(struct scene *s, unsigned r)
{
	Shardd__V1__SetReshardRequest m = SHARDD__V1__SET_RESHARD_REQUEST__INIT;

	m.units = &s->u->id;
	m.n_units = 1;
	m.reshard = SHARDD__V1__RESHARD__RESHARD_NEVER;
	SUBMIT(s, r, "SetReshard", m);
}

void ask_set_prefetch(struct scene *s, unsigned r)
{
	Shardd__V1__SetPrefetchRequest m = SHARDD__V1__SET_PREFETCH_REQUEST__INIT;

	m.unit = s->u->id;
	m.pass = SHARDD__V1__PASS__PASS_FORWARD;
	m.units = &s->plain->id;
	m.n_units = 1;
	SUBMIT(s, r, "SetPrefetch", m);
}

void ask_broadcast_buffers(struct scene *s, unsigned r)
{
	Shardd__V1__BroadcastBuffersRequest m = SHARDD__V1__BROADCAST_BUFFERS_REQUEST__INIT;

	SUBMIT(s, r, "BroadcastBuffers", m);
}

void ask_summon_state(struct scene *s, unsigned r)
{
	Shardd__V1__SummonFullRequest m = SHARDD__V1__SUMMON_FULL_REQUEST__INIT;

	m.unit = s->u->id;
	m.state = 1;
	SUBMIT(s, r, "SummonFull", m);
}

static void ask_return_full(struct scene *s, unsigned r, bool write)
{
	Shardd__V1__ReturnFullRequest m = SHARDD__V1__RETURN_FULL_REQUEST__INIT;

	m.unit = s->u->id;
	m.write = write;
	SUBMIT(s, r, "ReturnFull", m);
}

void ask_return_it(struct scene *s, unsigned r)
{
	ask_return_full(s, r, false);
}

void ask_return_written(struct scene *s, unsigned r)
{
	ask_return_full(s, r, true);
}

void ask_summon_and_return(struct scene *s, unsigned r)
{
	ask_summon(s, r);
	ask_return_written(s, r);
}

void ask_convert(struct scene *s, unsigned r)
{
	static uint32_t units[] = { 1 };
	static Shardd__V1__ConvertUnitsRequest m[SCENE_RANKS];

	m[r] = (Shardd__V1__ConvertUnitsRequest)SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
	m[r].units = units;
	m[r].n_units = 1;
	m[r].layout = SHARDD__V1__LAYOUT__LAYOUT_DIM0;
	SUBMIT(s, r, "ConvertUnits", m[r]);
}

void ask_unfreeze(struct scene *s, unsigned r)
{
	static uint32_t units[] = { 1 }, tensors[] = { 1 };
	static Shardd__V1__ConvertUnitsRequest m[SCENE_RANKS];

	m[r] = (Shardd__V1__ConvertUnitsRequest)SHARDD__V1__CONVERT_UNITS_REQUEST__INIT;
	m[r].units = units;
	m[r].n_units = 1;
	m[r].layout = SHARDD__V1__LAYOUT__LAYOUT_DIM0;
	m[r].unfreeze = tensors;
	m[r].n_unfreeze = 1;
	SUBMIT(s, r, "ConvertUnits", m[r]);
}

void ask_drop_units(struct scene *s, unsigned r)
{
	static uint32_t units[SCENE_RANKS];
	static Shardd__V1__DropUnitsRequest m[SCENE_RANKS];

	units[r] = s->u->id;
	m[r] = (Shardd__V1__DropUnitsRequest)SHARDD__V1__DROP_UNITS_REQUEST__INIT;
	m[r].units = &units[r];
	m[r].n_units = 1;
	SUBMIT(s, r, "DropUnits", m[r]);
}

void ask_verify(struct scene *s, unsigned r)
{
	Shardd__V1__VerifyModelRequest m = SHARDD__V1__VERIFY_MODEL_REQUEST__INIT;

	SUBMIT(s, r, "VerifyModel", m);
}

void ask_set_factors(struct scene *s, unsigned r)
{
	Shardd__V1__SetFactorsRequest m = SHARDD__V1__SET_FACTORS_REQUEST__INIT;

	m.unit = s->u->id;
	m.pre_divide = 2;
	m.post_divide = 1;
	SUBMIT(s, r, "SetFactors", m);
}

void ask_join_uneven(struct scene *s, unsigned r)
{
	Shardd__V1__JoinUnevenRequest m = SHARDD__V1__JOIN_UNEVEN_REQUEST__INIT;

	SUBMIT(s, r, "JoinUneven", m);
}

void ask_uneven_reduce(struct scene *s, unsigned r)
{
	if (r + 1 < s->stage->ranks)
		ask_reduce(s, r);
	ask_join_uneven(s, r);
}

void ask_uneven_reduce_twice(struct scene *s, unsigned r)
{
	if (r + 1 < s->stage->ranks)
		ask_reduce_twice(s, r);
	ask_join_uneven(s, r);
}

void ask_join_even(struct scene *s, unsigned r)
{
	Shardd__V1__JoinUnevenRequest m = SHARDD__V1__JOIN_UNEVEN_REQUEST__INIT;

	m.error_if_uneven = true;
	if (r)
		ask_barrier(s, r);
	SUBMIT(s, r, "JoinUneven", m);
}

void ask_ddp_create(struct scene *s, unsigned r)
{
	static Shardd__V1__DdpCreateRequest m[SCENE_RANKS];
	static Shardd__V1__DdpTensor sparse, *list[] = { &sparse };
	static uint64_t limits[] = { 8, 100 };
	static uint32_t unit;

	unit = s->u->id;
	shardd__v1__ddp_tensor__init(&sparse);
	sparse.unit = unit;
	sparse.tensor = 1;
	m[r] = (Shardd__V1__DdpCreateRequest)SHARDD__V1__DDP_CREATE_REQUEST__INIT;
	m[r].units = &unit;
	m[r].sparse = list;
	m[r].bucket_limits = limits;
	m[r].n_units = m[r].n_sparse = 1;
	m[r].n_bucket_limits = 2;
	SUBMIT(s, r, "DdpCreate", m[r]);
}

#define ASK_DDP(name, Name, UPPER)                                                   \
	void name(struct scene *s, unsigned r)                                       \
	{                                                                            \
		Shardd__V1__##Name##Request m = SHARDD__V1__##UPPER##_REQUEST__INIT; \
                                                                                     \
		m.ddp = 1;                                                           \
		SUBMIT(s, r, #Name, m);                                              \
	}
ASK_DDP(ask_ddp_forward, DdpForward, DDP_FORWARD)
ASK_DDP(ask_ddp_backward, DdpBackward, DDP_BACKWARD)
ASK_DDP(ask_ddp_finish, DdpFinish, DDP_FINISH)

static Shardd__V1__SparseRows ask_two_rows(const struct scene *s, unsigned r)
{
	static int64_t rows[] = { 2, 0 };
	Shardd__V1__SparseRows m = SHARDD__V1__SPARSE_ROWS__INIT;

	m.rows = rows;
	m.n_rows = 2;
	m.buffer = s->buffer[r];
	return m;
}

static void ask_ready(struct scene *s, unsigned r, uint32_t tensor)
{
	static uint32_t tensors[] = { 0, 1 };
	Shardd__V1__DdpReadyRequest m = SHARDD__V1__DDP_READY_REQUEST__INIT;
	Shardd__V1__SparseRows rows = ask_two_rows(s, r);

	m.ddp = 1;
	m.tensors = &tensors[tensor];
	m.n_tensors = 1;
	m.rows = tensor ? &rows : NULL;
	SUBMIT(s, r, "DdpReady", m);
}

void ask_ready_dense(struct scene *s, unsigned r)
{
	ask_ready(s, r, 0);
}

void ask_ready_rows(struct scene *s, unsigned r)
{
	ask_ready(s, r, 1);
}

/* The last pass of the backward, to its end. */
void ask_ready_and_finish(struct scene *s, unsigned r)
{
	ask_ready_rows(s, r);
	ask_ready_dense(s, r);
	ask_ddp_finish(s, r);
}

void ask_uneven_pass(struct scene *s, unsigned r)
{
	if (r + 1 < s->stage->ranks)
		ask_ready_and_finish(s, r);
	ask_join_uneven(s, r);
}

void ask_reduce_sparse(struct scene *s, unsigned r)
{
	static Shardd__V1__ReduceSparseRequest m[SCENE_RANKS];
	static Shardd__V1__SparseRows rows[SCENE_RANKS];

	rows[r] = ask_two_rows(s, r);
	m[r] = (Shardd__V1__ReduceSparseRequest)SHARDD__V1__REDUCE_SPARSE_REQUEST__INIT;
	m[r].unit = s->u->id;
	m[r].tensor = 1;
	m[r].rows = &rows[r];
	SUBMIT(s, r, "ReduceSparse", m[r]);
}

/* One has no inputs in the next pass: its peers' is ready but for the gradients. */
void ask_backward_but_last(struct scene *s, unsigned r)
{
	if (r + 1 < s->stage->ranks)
		ask_ddp_backward(s, r);
}

const ask_fn all_asks[] = {
	ask_seed_plain,
	ask_seed,
	ask_step,
	ask_commit,
	ask_begin_forward,
	ask_end_forward,
	ask_next_shard,
	ask_gather_zero,
	ask_release_zero,
	ask_plan,
	ask_own,
	ask_from_root,
	ask_alloc,
	ask_free_buffer,
	ask_reduce_twice,
	ask_defer,
	ask_leave_out,
	ask_all_reduce,
	ask_average,
	ask_most,
	ask_all_reduce_and_free,
	ask_broadcast,
	ask_barrier,
	ask_clip,
	ask_clip_value,
	ask_unscale,
	ask_step_and_commit,
	ask_set_reshard,
	ask_set_prefetch,
	ask_broadcast_buffers,
	ask_summon_state,
	ask_return_it,
	ask_return_written,
	ask_summon_and_return,
	ask_convert,
	ask_verify,
	ask_set_factors,
	ask_read_shard,
	ask_write_shard,
	ask_write_gradient_shard,
	ask_drop,
	ask_join_uneven,
	ask_uneven_reduce,
	ask_uneven_reduce_twice,
	ask_join_even,
	ask_ddp_create,
	ask_ready_dense,
	ask_ready_rows,
	ask_ready_and_finish,
	ask_uneven_pass,
	ask_reduce_sparse,
	ask_backward_but_last,
	ask_gradient_plain,
	ask_reduce_plain,
	ask_gradient,
	ask_reduce,
	ask_accumulate,
	ask_gather,
	ask_release,
	ask_summon,
	ask_unit_buffers,
	ask_shard_done,
	ask_ddp_forward,
	ask_ddp_backward,
	ask_ddp_finish,
};
const size_t n_all_asks = ARRAY_SIZE(all_asks);
