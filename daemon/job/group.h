/* An ordered set of ranks of a job, and the matching of their collectives. Every
 * job has group 0, `world`. Of a job over several nodes (job/span.h) the members on this node are
 * matched here; their devices are some of the group's. Loop thread only. */
#ifndef SHARDD_JOB_GROUP_H
#define SHARDD_JOB_GROUP_H

#include <stdbool.h>
#include <stdint.h>

#include "core/condition.h"
#include "core/list.h"
#include "core/res.h"
#include "job/asked.h"
#include "job/match.h"
#include "job/node.h"
#include "store/state.h"
#include "unit/norm.h"
#include "unit/settings.h"
#include "unit/unit.h"

struct job;
struct op_joined_ops;

/* The plan for the gradients of a backward pass as they arrive, until its Step. */
struct pass_plan {
	bool set;
	bool has_clip;
	struct clip clip;
	double inv_scale; /* 0: none */
	struct step_rates rates;
};

/* Communicators of a group beside its own (job/mesh.h), embedded by what they belong to. */
struct group_more {
	struct list link; /* group->more_comms */
	/* The epoch has ended, for the reason @why: those with members on other nodes go. */
	void (*reset)(struct group_more *m, const char *why);
	/* The group goes: it is freed with all of them. */
	void (*free)(struct group_more *m);
};

struct group {
	uint32_t id;            /* index in its job */
	struct job *job;        /* borrowed, the parent */
	const state_group *rec; /* borrowed */
	uint32_t here;          /* members on this node */
	uint32_t *members;  /* their indices in the group, ascending; owned; NULL: all are here */
	struct match match; /* of these */
	struct device **devices; /* theirs, in the order of their first rank; owned */
	unsigned n_devices;      /* 0: not all ranks are placed yet */
	unsigned all_devices;    /* of the members of all nodes */
	unsigned first_device;   /* number of devices[0] among them */
	uint32_t most;           /* members on one device, at most */
	uint16_t *device_of;     /* by index: the number of its device among them; owned */
	struct list small; /* reductions that wait for the batch before them; owned by reduce/ */
	bool small_runs;   /* a batch of them is under way */
	struct condition joins; /* all ranks have joined uneven: its waiters are such ops */
	const struct op_joined_ops *joined; /* NULL: no rank has yet; op/op_run.h */
	uint32_t surrogates;                /* ops in place of these that are not announced yet */
	struct fault uneven;                /* why the untold ones fail; op/uneven.h */
	bool *untold;                       /* by member: its collectives fail; owned */
	uint32_t n_untold;
	struct asked_across across; /* ranks of other nodes without inputs; op/uneven_nodes.h */
	struct node_comm *nc;       /* borrowed from the node; NULL: never asked for */
	struct list more_comms;     /* of struct group_more: between some of its devices */

	/* of the present backward pass: job_pass_end */
	struct pass_plan plan;
	bool unscaled;  /* its gradients were, by Unscale */
	bool found_inf; /* by that, or as gradients arrived */
	struct condition
		shard_ready; /* the next unit is reduced that a trainer's optimizer steps */
};

/* Does the plan hold back the optimizer until the Step? */
bool group_plan_holds(const struct group *g);
/* Make @plan the present one; NULL: none. It keeps a reference of its own. */
void group_set_plan(struct group *g, const struct pass_plan *plan);

/* Return: 0 or -ENOMEM. */
int group_new(struct job *job, uint32_t id, const state_group *rec, match_complete_cb complete,
	      match_failed_cb failed, struct group **ret);
/* NULL is allowed. Return: NULL. */
struct group *group_free(struct group *g);

/* The job has another span, and the group no devices: find its members here again. No op of it is
 * alive. Return: as group_new. */
int group_find_again(struct group *g);
/* The job has another span: does the group follow the order of its epochs? No op of it is alive. */
void group_find_order(struct group *g);

/* A new epoch: forget its members' numbers; their ops fail with @fault. */
void group_reset(struct group *g, const struct fault *fault);

/* Determine the group's devices, if all its ranks are placed by now. They do not change: ranks of a
 * placed group do not move. RES_WAIT: not all are: wait for node.changed, then ask again. */
enum res group_place(struct group *g, struct fault *f);

/* The same with the devices @on of the members on this node, by their index here. Return: 0 or
 * -ENOMEM. */
int group_place_on(struct group *g, struct device *const *on);

/* Set @rec->sets (unit/layout.h), of a resolved record of one of its units. The group must be placed. */
void group_set_replicas(const struct group *g, state_unit *rec);

/* Can a unit that was saved with this layout have it on these devices? The same. */
bool group_can_have(const struct group *g, const struct layout *l);

/* Where the parts of its units are. The group must be placed. */
struct unit_place group_unit_place(const struct group *g);

/* The group's communicators; it must be placed. Return: as node_comm. */
enum res group_comms(struct group *g, struct fault *f);
/* A communicator of some of the group's devices that has members on other nodes. */
struct group_between {
	struct device *const *devices; /* @n of this node, in their order */
	unsigned n, size, member;      /* comm_group */
	char name[24];                 /* behind the group's prefix */
};
/* *@nc: made if it is NULL, and the caller is a user of it then. Return: as node_comm. */
enum res group_comm_between(struct group *g, const struct group_between *b, struct node_comm **nc,
			    struct fault *f);
/* Are they made only by what is the first in the job's line (job/line.h), since all nodes must make them
 * at the same place (engine_in_order)? */
bool group_makes_in_line(const struct group *g);

/* The device of the group's member @index; NULL: it is not placed yet, or on another node. */
struct device *group_device(const struct group *g, uint32_t index);
/* The number of that device among those of all members. The group must be placed. */
unsigned group_device_number(const struct group *g, uint32_t index);
/* Has it members on other nodes? */
bool group_spans(const struct group *g);
/* Do its collectives begin in the order of the job's epoch, with the commits that the store decides? */
bool group_is_ordered(const struct group *g);

/* The group's number on all nodes: they may have made their groups in another order. */
uint64_t group_key(const struct group *g);

/* Members on all nodes. */
uint32_t group_size(const struct group *g);
/* Index of a rank of the job in the group's order. Return: false if it is not a member. */
bool group_index(const struct group *g, uint32_t rank, uint32_t *ret);
/* The same among the members on this node. */
bool group_index_here(const struct group *g, uint32_t rank, uint32_t *ret);
/* Of member @i on this node: its index in the group. */
uint32_t group_member_here(const struct group *g, uint32_t i);
/* Is the group's member @index on this node? @ret: its index among those. */
bool group_is_here(const struct group *g, uint32_t index, uint32_t *ret);

#endif
