/*
 * A collective that runs: one for the ops of all members of a group. It is a sequence of stages; each begins when the previous one is ordered on all devices. Loop thread only.
 */
#ifndef SHARDD_WORK_COLL_H
#define SHARDD_WORK_COLL_H

#include <stddef.h>

#include "core/check.h"
#include "core/res.h"
#include "job/line.h"
#include "op/op.h"

/* Pieces of memory that a collective has on a device: four for sums on their way, one
 * that is told of an infinity, and one for what nodes show each other (work/share.h). */
#define COLL_SCRATCH   6
#define COLL_FOUND_INF 4
#define COLL_SHARED    5

/* Between which devices an operation is. */
enum coll_over {
	COLL_OVER_GROUP, /* all of the group's */
	COLL_OVER_SETS, /* of c->unit, whose replicas have sets of devices (job/mesh.h): those of each */
	COLL_OVER_LIKE /* those that have the same part of it */
};

/* How the next operation between devices is. */
struct coll_next {
	bool last;               /* there is none behind it */
	uint8_t over;            /* enum coll_over */
	struct coll_talk *waits; /* owned: what it is, while it waits for its turn in line */
};

/* What a collective does on one device of its group. */
struct coll_part {
	struct coll *coll;
	struct device *device;
	uint32_t n;                /* members on it */
	uint32_t *members;         /* their indices, ascending */
	const void **inputs;       /* n + 1 pointers, for kernels with several inputs */
	const void **found;        /* owned: what each device of all nodes has; coll_need_found */
	struct launch *launches;   /* of the present stage */
	unsigned n_launches, room; /* that there are, that there can be */
	struct queue_task queue; /* of the present stage; streams of the members: until they came */
	bool promised;           /* there were such streams */
	struct region scratch[COLL_SCRATCH];
	float found_inf;  /* read back: of what was unscaled */
	const void *sums; /* Reduce: what this device has of the sum over devices */
	uint64_t ready;   /* point of the queue at which all is over */
};

/* A collective that runs: the ops of all members of a group on this node. Those on other nodes run the
 * same there (docs/nodes.md). */
struct coll {
	uint32_t magic;
	const struct op_type *type;
	struct group *group;
	struct job *job;
	struct unit *unit;
	uint32_t n;
	struct op **ops;         /* by member index; NULL: answered */
	struct member **members; /* the same; held by their ops, then by member_will_execute */
	uint32_t *part_of;       /* by member index: which part its device is */
	struct coll_part *parts; /* by device, in the group's order */
	unsigned n_parts;

	/* its tick */
	struct line_item line; /* where it spans nodes (coll_talk.c) */
	uint64_t place;        /* of its operations between nodes: comm_op.place */
	bool has_begun;        /* in line: it was ticked */
	bool makes;            /* in line: it makes the group's communicators before */
	struct coll_next next; /* of the next of them */
	bool leaves_out;       /* unit_turns.leaves_out, when it was started */
	unsigned stage;        /* where it goes on: an enum of the file that has it; 0 at first */
	struct fault *fault;   /* owned: why it has returned RES_FAILED */
	bool everywhere;       /* it fails so on all nodes: they decide by the same */
	bool ticking;          /* it runs now */
	bool woken;            /* what it waits for came meanwhile */
	struct waiter waiter;
	bool has_let_go; /* op_type.coll_let_go was called */

	/* what was submitted */
	unsigned pending; /* parts whose stage is not over */
	unsigned issued;  /* parts whose marker is not issued */
	int status;       /* of the present stage */
	bool on_device;   /* something was submitted */
	bool marked;      /* markers were submitted: its members are told when they are reached */
	bool marking;     /* not all of them are in their queues yet */
	struct comm_op comm_op;
	struct node_comm
		*nc; /* @between watches it, and it has members on other nodes: a user of it */
	struct queue_task between; /* watches what goes on between devices, from its start */
	uint64_t breaks;           /* of the communicators, then */
	struct mesh_talk *mesh;    /* owned: what goes on in sets of them; NULL: nothing so far */
	bool writes;               /* counted in the job's readers.writing */
	bool writes_unit;          /* counted in the unit's shard_writes */

	uint32_t turn; /* of what is done once a member */
	/* the type's own: op_type.coll_bytes; see coll_own */
	_Alignas(max_align_t) unsigned char own[];
};

/* The state of the type of @c, @bytes of it: the modules that have some wrap this in a function that
 * returns their struct. */
static inline void *coll_own(const struct coll *c, size_t bytes)
{
	CHECK(c->type->coll_bytes >= bytes);
	return (void *)c->own;
}

/* The collective whose state is at @own. */
static inline struct coll *coll_of_own(void *own)
{
	return CONTAINER_OF(own, struct coll, own);
}

/* Slot job_ops.complete: all members have announced, so the collective begins. @userdata: the
 * group. */
void coll_complete(struct match_entry *const *entries, uint32_t n, void *userdata);

/* Did it wait for streams of its members? Then, if its epoch has ended, they may have been
 * let go of, and what was read is garbage. */
bool coll_promised(const struct coll *c);

/* -- for ticks -------------------------------------------------------------------------
 *
 * A type's tick (op_type.coll_tick) is a switch over c->stage. It is called when the collective
 * begins, and again whenever what it has returned RES_WAIT for has come; a device's or an
 * engine's failure ends the collective before that. RES_DONE: all its ops end well. RES_FAILED:
 * with c->fault. Functions that return RES_WAIT because a condition does not hold are asked
 * again at the next tick; those that have submitted something (coll_kernels, coll_comm) are
 * over then, so c->stage is set to what follows before they are called. */

/* c->fault: a negative status of backend or engine. Return: RES_FAILED. */
enum res coll_fail(struct coll *c, int status);

/* It writes the parameters of c->unit from here on: until that is executed nobody gathers them, be it for
 * another node. */
void coll_writes_unit(struct coll *c);

/* For a collective that waited: has its epoch ended meanwhile (what its members brought may be
 * gone), or was the job torn and does that matter? Then it has failed. */
enum res coll_check_epoch(struct coll *c, bool torn_matters);

/* Room for @n launches on each part, none of them used. Never waits. */
enum res coll_need_launches(struct coll *c, size_t n);

/* Run the launches of all parts. It is over when they are ordered everywhere, or, sync, when they
 * were executed and the host can read what they say. Return: RES_WAIT. */
enum res coll_kernels(struct coll *c);
enum res coll_kernels_sync(struct coll *c);

/* Can the group's devices talk, and those of c->unit's sets? */
enum res coll_ready(struct coll *c);
/* The same with @u, one of the group's, in place of c->unit. */
enum res coll_ready_for(struct coll *c, const struct unit *u);

/* Can they still, at a later stage? Never waits. */
enum res coll_can_talk(struct coll *c);

/* For comm_* calls, set up so that the collective is ticked when it is over. */
struct comm_op *coll_comm(struct coll *c);

/* Operations between the devices of the group (engine.h; coll_talk.c): at once, or, where it has members
 * on other nodes, when the collective is the first in the job's line, so that the operations on a
 * communicator are the same on all nodes. They are over at the next tick. Arrays: one address per part.
 * After coll_can_talk. */
void coll_all_gather(struct coll *c, const void *const *send, void *const *recv, uint64_t count,
		     enum dtype dtype);
void coll_reduce_scatter(struct coll *c, const void *const *send, void *const *recv, uint64_t count,
			 enum dtype dtype);
void coll_all_reduce(struct coll *c, void *const *data, uint64_t count, enum dtype dtype,
		     enum reduce_op reduce);
void coll_broadcast(struct coll *c, void *const *data, uint64_t bytes, unsigned root);
/* See work/chain.h. */
void coll_sum(struct coll *c, const struct comm_sum *sum, const struct comm_fold *fold,
	      void *const *recv);

/* The next operation is between these devices: not a broadcast; COLL_OVER_LIKE: an all-reduce. */
void coll_talks_over(struct coll *c, enum coll_over over);

/* The next operation between devices is the last one: what comes behind in the line goes on as soon as it is
 * issued. For collectives behind whose end nothing has to wait that does not wait for their ops. */
void coll_talks_last(struct coll *c);

/* Memory on every device until the end of the collective: p->scratch[@k] of @bytes. */
enum res coll_need_scratch(struct coll *c, unsigned k, uint64_t bytes);

/* Wait until node_wake. Return: RES_WAIT. */
enum res coll_wait_for_node(struct coll *c);

/* What it waited for has come: tick it. With c->status (of a device or engine) or c->fault it
 * fails instead. May end it; within its own tick it goes on behind that. */
void coll_go_on(struct coll *c);

/* The next of the launches that there is room for. */
struct launch *coll_launch(struct coll_part *p, enum launch_kind kind, uint64_t n);

/* p->found of every part, for as many devices as all nodes have. Never waits. */
enum res coll_need_found(struct coll *c);

/* The communicator of the group's devices; one address per part. After coll_can_talk. */
struct comm *coll_between(const struct coll *c);

/* Members on all nodes, and their devices. Are all of them on one device? */
uint32_t coll_size(const struct coll *c);
unsigned coll_devices(const struct coll *c);
bool coll_is_alone(const struct coll *c);

/* Rank @rank is one (CHECKed). Its index, if it is on this node; else COLL_ELSEWHERE. The number of its
 * device among those of all nodes. */
#define COLL_ELSEWHERE UINT32_MAX
uint32_t coll_index(const struct coll *c, uint32_t rank);
unsigned coll_device_of(const struct coll *c, uint32_t rank);

/* The part that member @index is on. */
struct coll_part *coll_part(const struct coll *c, uint32_t index);

/* By how many ranks the gradients of a collective are divided: all, or (divide_by_active) those
 * that have inputs. */
uint32_t coll_divide_by(const struct coll *c);

#endif
