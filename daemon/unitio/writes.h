/*
 * Parameters that a rank writes by itself (CopyShard) in a unit whose group spans nodes: nobody may have the
 * unit gathered on any node, and copies that are kept there become invalid.
 *
 *   ASKED --its entry of the order starts on all nodes--> ALLOWED --> written
 *     '--a node has the unit gathered: it refuses the entry--> REFUSED
 *
 * The rank's node tells the others, which announce the entry, or refuse it. From then on until it starts or
 * fails no rank of theirs gathers the unit. On the rank's node nobody does until it is written: the next
 * gather of other nodes waits for that. Loop thread only.
 */
#ifndef SHARDD_UNITIO_WRITES_H
#define SHARDD_UNITIO_WRITES_H

#include "op/op.h"

enum writes_state { WRITES_NONE, WRITES_ASKED, WRITES_ALLOWED, WRITES_REFUSED };

/* May @op's rank write parameters of op->unit now? The first time asks for it. RES_WAIT: @op is resumed when
 * that is known. RES_FAILED: @f. */
enum res writes_allow(struct op *op, struct fault *f);
/* It writes no more, or never will; nothing to do if it has not asked. */
void writes_end(struct op *op);

/* Another node asks for one of rank @rank, as job_ops.writes says. */
void writes_asked_elsewhere(struct job *job, struct unit *u, uint32_t rank, uint64_t number);
/* The entry of @key has started, or failed. Return: false: it is of no such write. */
bool writes_start(struct job *job, uint64_t key, uint64_t number);
bool writes_fail(struct job *job, uint64_t key, uint64_t number, const struct fault *f);

#endif
