/*
 * A write of parameters by one rank that all nodes of its group have to know of (unitio/writes.h). Loop thread
 * only.
 */
#ifndef SHARDD_JOB_ACROSS_WRITE_H
#define SHARDD_JOB_ACROSS_WRITE_H

#include "core/condition.h"
#include "core/fault.h"
#include "core/list.h"

struct job;
struct op;
struct unit;

struct across_write {
	struct list link;  /* job->across.writes */
	struct unit *unit; /* counts it in shard_writes */
	uint32_t rank;
	uint64_t key, number;   /* of its entry in the order */
	uint8_t state;          /* enum writes_state */
	struct op *op;          /* of a rank here; NULL: of one elsewhere, or it has ended */
	struct condition known; /* with @op: whether it may write */
	struct fault fault;     /* why it may not */
};

/* The epoch has ended: what no op of this node waits for is forgotten, and the others have ended. */
void across_writes_end(struct job *job);

#endif
