/*
 * The memory of a job by the formulas of docs/semantics.md, and the memory in use. Loop thread
 * only.
 */
#ifndef SHARDD_RPC_STATUS_MEMORY_H
#define SHARDD_RPC_STATUS_MEMORY_H

#include "job/job.h"

/* Bytes by class. The account is charged this plus the unused rest of the slabs. */
struct status_memory {
	uint64_t used[_MEM_N];    /* in regions that are out */
	uint64_t formula[_MEM_N]; /* of what is registered, gathered and held now */
};

void status_memory(const struct job *job, struct status_memory *ret);

#endif
