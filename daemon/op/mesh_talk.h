/*
 * Operations on the communicators of a mesh (job/mesh.h), all of one way at once: each device talks to
 * the others of its set, or to those that have the same part. It is watched from the beginning, as an
 * operation on one communicator is (op/queue_task.h), and what ends with the epoch stays until the
 * end. Loop thread only.
 */
#ifndef SHARDD_OP_MESH_TALK_H
#define SHARDD_OP_MESH_TALK_H

#include "job/job.h"
#include "job/mesh.h"
#include "op/queue_task.h"

struct mesh_talk;

/* One communicator, watched. */
struct mesh_watched {
	struct mesh_talk *talk;
	const struct mesh_comm *of; /* borrowed from the mesh */
	struct node_comm *nc;       /* a user of it */
	uint64_t breaks;            /* of it, at the beginning */
	struct queue_task task;
	struct comm_op op;
};

struct mesh_talk {
	/* The operation is over; @status: as comm_done_cb. Called later, once for each. */
	void (*done)(struct mesh_talk *t, int status);
	void *userdata;
	const struct mesh *mesh; /* borrowed from its group */
	enum backend_queue queue;
	unsigned pending; /* communicators on which it runs */
	int status;
	unsigned n[_MESH_N];
	struct mesh_watched *ways[_MESH_N]; /* owned, in the order of the mesh's */
};

/* For @job, in @queue, until @deadline_us (0: the job's op_timeout_ms). @like: of both ways; else of
 * the sets alone. They must be ready (CHECKed). Return: NULL without memory. */
struct mesh_talk *mesh_talk_new(struct job *job, const struct mesh *m, bool like,
				enum backend_queue queue, uint64_t deadline_us);
/* No operation runs. NULL is allowed. Return: NULL. */
struct mesh_talk *mesh_talk_free(struct mesh_talk *t);

/* Has none of them broken since the beginning, or ended with its epoch? */
bool mesh_talk_holds(const struct mesh_talk *t);
/* Why one is broken; "": none is. */
const char *mesh_talk_why(const struct mesh_talk *t);

/* As those of engine.h. Arrays: by device of the group on this node. @place: comm_op.place. The last one
 * is over, and all communicators hold. */
void mesh_all_gather(struct mesh_talk *t, uint64_t place, const void *const *send,
		     void *const *recv, uint64_t count, enum dtype dtype);
void mesh_reduce_scatter(struct mesh_talk *t, uint64_t place, const void *const *send,
			 void *const *recv, uint64_t count, enum dtype dtype);
void mesh_sum(struct mesh_talk *t, uint64_t place, const struct comm_sum *sum,
	      const struct comm_fold *fold, void *const *recv);
/* Between the devices that have the same part. */
void mesh_all_reduce(struct mesh_talk *t, uint64_t place, void *const *data, uint64_t count,
		     enum dtype dtype, enum reduce_op reduce);
/* The same, from those of set @root; @bytes: by device, those of one communicator alike; 0: nothing
 * is sent there. Return: false: nothing is sent at all, so that it is over. */
bool mesh_broadcast(struct mesh_talk *t, void *const *data, const uint64_t *bytes, unsigned root);

#endif
