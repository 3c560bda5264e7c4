/*
 * The methods that trainers and readers call: service, name, number in ring_entry.op, and whether a
 * ring carries them; of an OP also its struct op_type in the daemon. Both sides use this table. All
 * tables of ops in the daemon are made of it: a new op is a line here, its messages and its method
 * in shardd.proto, and its file.
 *
 * A number is part of the ring's ABI: it never changes, and the number of a method that was removed
 * is never used again. A new method gets the next number, also if the ring does not carry it.
 *
 * The ring carries ops whose reply never exceeds RING_LONG_BYTES: a reply's length must be known
 * before the call. A single request that is too long goes over gRPC. tests/unit/test_methods
 * compares this table with the services and their messages.
 */
#ifndef SHARDD_METHODS_H
#define SHARDD_METHODS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* clang-format off */
#define METHODS(CALL, OP)                                                \
	CALL(Session, Attach,            1, false)                       \
	CALL(Session, Watch,             2, false)                       \
	CALL(Job,     CreateJob,         3, false)                       \
	CALL(Job,     DeleteJob,         4, false)                       \
	CALL(Job,     DrainJob,          5, false)                       \
	CALL(Job,     Join,              6, false)                       \
	CALL(Job,     Leave,             7, false)                       \
	CALL(Job,     CreateGroup,       8, false)                       \
	CALL(Unit,    RegisterUnits,     9, false)                       \
	CALL(Session, ShareEvents,      10, false)                       \
	OP(Unit,      Initialise,       11, true,  op_init)              \
	OP(Training,  Gather,           12, true,  op_gather)            \
	OP(Training,  Release,          13, true,  op_release)           \
	OP(Training,  GradientBuffer,   14, true,  op_gradient)          \
	OP(Training,  AllocBuffer,      15, true,  op_alloc_buffer)      \
	OP(Training,  FreeBuffer,       16, true,  op_free_buffer)       \
	OP(Training,  Reduce,           17, true,  op_reduce)            \
	OP(Training,  AllReduce,        18, true,  op_all_reduce)        \
	OP(Training,  Broadcast,        19, true,  op_broadcast)         \
	OP(Training,  Barrier,          20, true,  op_barrier)           \
	OP(Training,  ClipGradNorm,     21, true,  op_clip)              \
	OP(Training,  Step,             22, true,  op_step)              \
	OP(Training,  Commit,           23, true,  op_commit)            \
	OP(Training,  BeginPass,        24, true,  op_begin_pass)        \
	OP(Training,  EndPass,          25, true,  op_end_pass)          \
	OP(Unit,      SetReshard,       26, true,  op_set_reshard)       \
	OP(Unit,      UnitBuffers,      27, true,  op_unit_buffers)      \
	OP(Unit,      BroadcastBuffers, 28, true,  op_broadcast_buffers) \
	OP(Unit,      SummonFull,       29, false, op_summon)            \
	OP(Unit,      ReturnFull,       30, true,  op_return)            \
	OP(Unit,      ConvertUnits,     31, false, op_convert)           \
	OP(Training,  Accumulate,       32, true,  op_accumulate)        \
	OP(Unit,      SetPrefetch,      33, true,  op_set_prefetch)      \
	OP(Training,  ClipGradValue,    34, true,  op_clip_value)        \
	OP(Training,  Unscale,          35, true,  op_unscale)           \
	OP(Training,  PlanBackward,     36, true,  op_plan)              \
	OP(Training,  NextShard,        37, false, op_next_shard)        \
	OP(Training,  ShardDone,        38, true,  op_shard_done)        \
	OP(Unit,      VerifyModel,      39, true,  op_verify)            \
	OP(Ddp,       DdpCreate,        40, true,  op_ddp_create)        \
	OP(Ddp,       DdpForward,       41, false, op_ddp_forward)       \
	OP(Ddp,       DdpBackward,      42, true,  op_ddp_backward)      \
	OP(Ddp,       DdpReady,         43, true,  op_ddp_ready)         \
	OP(Ddp,       DdpFinish,        44, false, op_ddp_finish)        \
	OP(Training,  ReduceSparse,     45, true,  op_sparse)            \
	OP(Training,  JoinUneven,       46, true,  op_join_uneven)       \
	OP(Unit,      SetFactors,       47, true,  op_set_factors)       \
	OP(Training,  ReadBytes,        51, false, op_read_bytes)        \
	OP(Training,  WriteBytes,       52, true,  op_write_bytes)       \
	OP(Unit,      CopyShard,        53, true,  op_copy_shard)        \
	OP(Training,  DropGradients,    54, true,  op_drop)              \
	OP(Unit,      DropUnits,        55, false, op_drop_units)        \
	CALL(Job,     Checkpoint,       56, false)                       \
	CALL(Job,     LoadCheckpoint,   57, false)                       \
	CALL(Job,     SetCheckpoints,   58, false)                       \
	CALL(Job,     ResizeJob,        59, false)                       \
	CALL(Publication, DeclarePublication, 60, false)                 \
	CALL(Publication, DropPublication,    61, false)                 \
	CALL(Publication, PublishGeneration,  62, false)                 \
	CALL(Publication, AcquireGeneration,  63, false)                 \
	CALL(Publication, DescribeGeneration, 64, false)                 \
	CALL(Publication, ReleaseGeneration,  65, false)                 \
	CALL(Publication, OpenReader,         68, false)                 \
	CALL(Publication, CloseReader,        69, false)                 \
	CALL(Publication, StreamGeneration,   70, false)                 \
	CALL(Publication, ListPublications,   71, false)                 \
	CALL(Job,     ReadBase,         72, false)
/* clang-format on */

struct method {
	const char *name; /* as in the .proto; NULL ends the table */
	const char *path; /* of the call: "/shardd.v1.TrainingService/Gather" */
	uint16_t number;
	bool carried;
};

#define METHODS_LINE(Service, Name, number, carried, ...) \
	{ #Name, "/shardd.v1." #Service "Service/" #Name, number, carried },
static const struct method methods[] = { METHODS(METHODS_LINE, METHODS_LINE){ NULL, NULL, 0,
									      false } };
#undef METHODS_LINE

/* The path of each, as METHOD_Gather. */
#define METHODS_PATH(Service, Name, ...) \
	static const char METHOD_##Name[] = "/shardd.v1." #Service "Service/" #Name;
METHODS(METHODS_PATH, METHODS_PATH)
#undef METHODS_PATH

/* Return: the line of the method @name (borrowed), or NULL: there is none. */
static inline const struct method *methods_find(const char *name)
{
	for (const struct method *m = methods; m->name; m++)
		if (strcmp(m->name, name) == 0)
			return m;
	return NULL;
}

#endif
