/*
 * The methods that trainers and readers call: service, name, number in ring_entry.op, and whether a
 * ring carries them. Both sides use this table.
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
#define METHODS(X) \
	X(Session,  Attach,             1, false)     \
	X(Session,  Watch,              2, false)     \
	X(Job,      CreateJob,          3, false)     \
	X(Job,      DeleteJob,          4, false)     \
	X(Job,      DrainJob,           5, false)     \
	X(Job,      Join,               6, false)     \
	X(Job,      Leave,              7, false)     \
	X(Job,      CreateGroup,        8, false)     \
	X(Unit,     RegisterUnits,      9, false)     \
	X(Session,  ShareEvents,       10, false)     \
	X(Unit,     Initialise,        11, true)      \
	X(Training, Gather,            12, true)      \
	X(Training, Release,           13, true)      \
	X(Training, GradientBuffer,    14, true)      \
	X(Training, AllocBuffer,       15, true)      \
	X(Training, FreeBuffer,        16, true)      \
	X(Training, Reduce,            17, true)      \
	X(Training, AllReduce,         18, true)      \
	X(Training, Broadcast,         19, true)      \
	X(Training, Barrier,           20, true)      \
	X(Training, ClipGradNorm,      21, true)      \
	X(Training, Step,              22, true)      \
	X(Training, Commit,            23, true)      \
	X(Training, BeginPass,         24, true)      \
	X(Training, EndPass,           25, true)      \
	X(Unit,     SetReshard,        26, true)      \
	X(Unit,     UnitBuffers,       27, true)      \
	X(Unit,     BroadcastBuffers,  28, true)      \
	X(Unit,     SummonFull,        29, false)     \
	X(Unit,     ReturnFull,        30, true)      \
	X(Unit,     ConvertUnits,      31, false)     \
	X(Training, Accumulate,        32, true)      \
	X(Unit,     SetPrefetch,       33, true)      \
	X(Training, ClipGradValue,     34, true)      \
	X(Training, Unscale,           35, true)      \
	X(Training, PlanBackward,      36, true)      \
	X(Training, NextShard,         37, false)     \
	X(Training, ShardDone,         38, true)      \
	X(Unit,     VerifyModel,       39, true)      \
	X(Ddp,      DdpCreate,         40, true)      \
	X(Ddp,      DdpForward,        41, false)     \
	X(Ddp,      DdpBackward,       42, true)      \
	X(Ddp,      DdpReady,          43, true)      \
	X(Ddp,      DdpFinish,         44, false)     \
	X(Training, ReduceSparse,      45, true)      \
	X(Training, JoinUneven,        46, true)      \
	X(Unit,     SetFactors,        47, true)      \
	X(Reader,   ReadJob,           48, false)     \
	X(Reader,   HoldStep,          49, false)     \
	X(Reader,   ReleaseStep,       50, false) \
	X(Training, ReadBytes,         51, false)     \
	X(Training, WriteBytes,        52, true)      \
	X(Unit,     CopyShard,         53, true)      \
	X(Training, DropGradients,     54, true)
/* clang-format on */

struct method {
	const char *name; /* as in the .proto; NULL ends the table */
	const char *path; /* of the call: "/shardd.v1.TrainingService/Gather" */
	uint16_t number;
	bool carried;
};

#define METHODS_LINE(Service, Name, number, carried) \
	{ #Name, "/shardd.v1." #Service "Service/" #Name, number, carried },
static const struct method methods[] = { METHODS(METHODS_LINE){ NULL, NULL, 0, false } };
#undef METHODS_LINE

/* The path of each, as METHOD_Gather. */
#define METHODS_PATH(Service, Name, number, carried) \
	static const char METHOD_##Name[] = "/shardd.v1." #Service "Service/" #Name;
METHODS(METHODS_PATH)
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
