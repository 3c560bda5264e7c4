/*
 * The methods of the trainers' services, their numbers in ring_entry.op, and whether a ring carries
 * them. Both sides use this table.
 *
 * A number is part of the ring's ABI: it never changes, and the number of a method that was removed
 * is never used again. A new method gets the next number, also if the ring does not carry it.
 *
 * The ring carries ops whose reply never exceeds RING_LONG_BYTES: a reply's length must be known
 * before the call. A single request that is too long goes over gRPC. tests/unit/test_ring_methods
 * compares this table with the services and their messages.
 */
#ifndef SHARDD_RING_METHODS_H
#define SHARDD_RING_METHODS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct ring_method {
	const char *name; /* as in the .proto, without its service; NULL ends the table */
	uint16_t number;
	bool carried;
};

/* clang-format off */
static const struct ring_method ring_methods[] = {
	{ "Attach",             1, false },
	{ "Watch",              2, false },
	{ "CreateJob",          3, false },
	{ "DeleteJob",          4, false },
	{ "DrainJob",           5, false },
	{ "Join",               6, false },
	{ "Leave",              7, false },
	{ "CreateGroup",        8, false },
	{ "RegisterUnits",      9, false },
	{ "ShareEvents",       10, false },
	{ "Initialise",        11, true },
	{ "Gather",            12, true },
	{ "Release",           13, true },
	{ "GradientBuffer",    14, true },
	{ "AllocBuffer",       15, true },
	{ "FreeBuffer",        16, true },
	{ "Reduce",            17, true },
	{ "AllReduce",         18, true },
	{ "Broadcast",         19, true },
	{ "Barrier",           20, true },
	{ "ClipGradNorm",      21, true },
	{ "Step",              22, true },
	{ "Commit",            23, true },
	{ "BeginPass",         24, true },
	{ "EndPass",           25, true },
	{ "SetReshard",        26, true },
	{ "UnitBuffers",       27, true },
	{ "BroadcastBuffers",  28, true },
	{ "SummonFull",        29, false },
	{ "ReturnFull",        30, true },
	{ "ConvertUnits",      31, false },
	{ "Accumulate",        32, true },
	{ "SetPrefetch",       33, true },
	{ "ClipGradValue",     34, true },
	{ "Unscale",           35, true },
	{ "PlanBackward",      36, true },
	{ "NextShard",         37, false },
	{ "ShardDone",         38, true },
	{ "VerifyModel",       39, true },
	{ "DdpCreate",         40, true },
	{ "DdpForward",        41, false },
	{ "DdpBackward",       42, true },
	{ "DdpReady",          43, true },
	{ "DdpFinish",         44, false },
	{ "ReduceSparse",      45, true },
	{ "JoinUneven",        46, true },
	{ "SetFactors",        47, true },
	{ "ReadJob",           48, false },
	{ "HoldStep",          49, false },
	{ "ReleaseStep",       50, false },
	{ NULL, 0, false },
};
/* clang-format on */

/* Return: the line of the method @name (borrowed), or NULL: there is none. */
static inline const struct ring_method *ring_methods_find(const char *name)
{
	for (const struct ring_method *m = ring_methods; m->name; m++)
		if (strcmp(m->name, name) == 0)
			return m;
	return NULL;
}

#endif
