/*
 * Stalls: a job stalls while one of its ops has waited, for other ranks, for readers or for memory, longer than
 * stall_after_ms. Work on devices is no stall. A collective over several nodes may be one,
 * when it has begun here: a node that follows a schedule does not know whether the others have, and asks them
 * (rpc/status_stall.h). Loop thread only.
 */
#ifndef SHARDD_OP_STALL_H
#define SHARDD_OP_STALL_H

#include <stddef.h>
#include <stdint.h>

struct job;
struct op;

/* Does @job stall, or not any more? Calls job_ops.stall when that changes. @stall_after_us: 0: never. */
void stall_tick(struct job *job, uint64_t now_us, uint64_t stall_after_us);

/* The op that waits longest, of a job that stalls, and since when; NULL: it does not. */
const struct op *stall_op(const struct job *job, uint64_t *ret_since_us);

#endif
