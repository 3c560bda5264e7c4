/* Deadlines and stalls of ops. Loop thread only. */
#ifndef SHARDD_OP_OP_TIME_H
#define SHARDD_OP_OP_TIME_H

#include <stddef.h>
#include <stdint.h>

struct jobs;
struct op;

/* Deadlines and stalls of all ops of @jobs. @stall_after_us: 0: no reports. */
void ops_tick(struct jobs *jobs, uint64_t now_us, uint64_t stall_after_us);

/* What a pending op waits for, in words; "" for one that runs. */
void op_waits_for(const struct op *op, char *buf, size_t bytes);

/* "Barrier of rank 0 (number 3) waits for ..." */
void op_describe(const struct op *op, char *buf, size_t bytes);

#endif
