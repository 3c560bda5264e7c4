/*
 * Communicators between some devices of a group, for units whose replicas have sets of devices of
 * their own (unit/layout.h): those of each set, in which a replica is gathered and reduced, and those of
 * all devices that have the same part of a replica, between which the replicas are added. Made when an
 * operation needs them. Those with members on other nodes are of one epoch. Loop thread only.
 */
#ifndef SHARDD_JOB_MESH_H
#define SHARDD_JOB_MESH_H

#include <stdbool.h>

#include "core/res.h"
#include "job/group.h"

enum mesh_way {
	MESH_SETS, /* the devices of each set */
	MESH_LIKE, /* of each place in a set, those of all sets */
	_MESH_N
};

/* Of those with a device on this node. */
struct mesh_comm {
	struct node_comm *nc; /* borrowed from the node, a user of it; NULL: not asked for yet */
	unsigned number;      /* the set; or the place */
	unsigned member;      /* which of its members the first one here is */
	unsigned n;
	uint8_t devices[NODE_MAX_DEVICES]; /* here, in their order: indexes in group->devices */
};

struct mesh {
	struct group_more more;
	unsigned spread; /* devices of a set */
	unsigned n[_MESH_N];
	struct mesh_comm comms[_MESH_N][NODE_MAX_DEVICES];
};

/* Are there communicators for @u, a unit of @g: is each of its replicas on a set of devices? */
bool mesh_is_needed(const struct unit *u);

/* Has a set of @u's devices on several nodes? The same answer on all nodes. */
bool mesh_crosses(const struct group *g, const struct unit *u);

/* Those of @u, which needs some; @g must be placed. @like: both ways; else those of the sets alone.
 * @ret: also with RES_WAIT; borrowed, lives as long as the group. RES_WAIT: they are being made: wait
 * for node.changed, then ask again. RES_FAILED: @f is set. */
enum res mesh_comms(struct group *g, const struct unit *u, bool like, struct mesh **ret,
		    struct fault *f);

/* The same without making anything. Return: NULL: nothing was asked for yet. */
struct mesh *mesh_find(const struct group *g, const struct unit *u);
/* Were all of them asked for? Are all those of @way ready? NULL is allowed. */
bool mesh_is_asked_for(const struct mesh *m);
bool mesh_is_ready(const struct mesh *m, enum mesh_way way);
/* Why one of them is broken; "": none is. */
const char *mesh_why(const struct mesh *m);

/* Is @nc one of @g's? @member: one of its members. @ret: the number of that device among all of @g's. */
bool mesh_device_of(const struct group *g, const struct node_comm *nc, unsigned member,
		    unsigned *ret);
bool mesh_uses(const struct group *g, const struct node_comm *nc);

#endif
