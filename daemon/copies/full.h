/*
 * The gathered copy of a unit, on each of its devices: its memory, and its making. A cast of
 * each device's shards into the copy there, then an all-gather between the copies. It is
 * shared by all ranks of a device; without users it stays until memory is needed or the
 * parameters change. Loop thread only.
 */
#ifndef SHARDD_COPIES_FULL_H
#define SHARDD_COPIES_FULL_H

#include "op/op.h"

/* Begin to make the copy of @u; none may be in the making (CHECKed). Its end answers all ops
 * that wait for u->cast_done by their op_type.copied.
 * @deadline_us: for streams of trainers that it waits for.
 * @op: runs from here on and waits for it, as if it waited for u->cast_done; or NULL: nobody
 * has asked for it yet, and no other copy goes for it.
 * RES_DONE: it is begun. RES_WAIT: nothing was: wait for node.changed, then call it again. */
enum res full_begin(struct job *job, struct unit *u, uint64_t deadline_us, struct op *op,
		    struct fault *f);

/* The same of a copy that all nodes begin now; ops may wait for u->cast_done already. @place: comm_op.place of
 * its operations between them. */
enum res full_begin_together(struct job *job, struct unit *u, uint64_t place, struct fault *f);

/* Is the copy there, or, executing, as good as there for who waits with a stream? */
bool full_valid(const struct unit *u);

/* Is there room under max_inflight_gathers? */
bool full_may_begin(const struct job *job);
/* If not: wait for this op's turn. Ranks take turns, each with its ops in their order, so that one
 * that asks for a hundred units keeps nobody waiting for all of them. Return: RES_WAIT. */
enum res full_wait_turn(struct op *op);

/* Parameters of @u have changed: an idle copy is of no use any more. */
void full_invalidate(struct job *job, struct unit *u);

#endif
