/*
 * How many ops of each kind have ended, how long they took and how long they waited, since the daemon
 * started. Of all jobs and users together. Loop thread only.
 */
#ifndef SHARDD_OP_OP_STATS_H
#define SHARDD_OP_OP_STATS_H

#include <stddef.h>
#include <stdint.h>

struct op;

/* Buckets of a histogram of latencies; the last has no upper end. */
#define OP_STATS_BUCKETS 15u

/* Upper ends of the other buckets, inclusive, in microseconds, ascending. */
extern const uint64_t op_stats_bounds[OP_STATS_BUCKETS - 1];

/* Of one kind of op. Times are sums over ops, which may overlap. */
struct op_stats {
	uint64_t buckets
		[OP_STATS_BUCKETS]; /* by time from arrival to answer; they sum to all that have ended */
	uint64_t failed;            /* of these */
	uint64_t us;                /* from arrival to answer */
	uint64_t deps_us;           /* of it: for its turn, and for earlier ops of its session */
	uint64_t wait_us;           /* of it: then for other ranks, readers or memory */
};

/* @op has ended, at @now_us. */
void op_stats_count(const struct op *op, uint64_t now_us);

/* Kinds, for @i from 0 on. @ret: borrowed, zero for a kind of which none has ended. Return: the kind's name,
 * static; NULL: there are no more. */
const char *op_stats_at(size_t i, const struct op_stats **ret);

#endif
