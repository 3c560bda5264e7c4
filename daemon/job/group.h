/* An ordered set of ranks of a job, and the matching of their collectives. Every
 * job has group 0, `world`. Loop thread only. */
#ifndef SHARDD_JOB_GROUP_H
#define SHARDD_JOB_GROUP_H

#include <stdbool.h>
#include <stdint.h>

#include "job/match.h"
#include "job/node.h"
#include "store/state.h"

struct job;

struct group {
	uint32_t id;            /* index in its job */
	struct job *job;        /* borrowed, the parent */
	const state_group *rec; /* borrowed */
	struct match match;
	struct device **devices; /* of its ranks, in the order of their first rank; owned */
	unsigned n_devices;      /* 0: not all ranks are placed yet */
	struct node_comm *nc;    /* borrowed from the node; NULL: never asked for */
};

/* Return: 0 or -ENOMEM. */
int group_new(struct job *job, uint32_t id, const state_group *rec, match_complete_cb complete,
	      match_failed_cb failed, struct group **ret);
/* NULL is allowed. Return: NULL. */
struct group *group_free(struct group *g);

/* Find out the group's devices, if all its ranks are placed by now. They stay: ranks of a
 * placed group do not move. Return: 0 (placed), NODE_E_LATER, or -ENOMEM. */
int group_place(struct group *g);

/* The group's communicators; it must be placed. Return: as node_comm. */
int group_comms(struct group *g, struct fault *f);

uint32_t group_size(const struct group *g);
/* Index of a rank of the job in the group's order. Return: false if it is no member. */
bool group_index(const struct group *g, uint32_t rank, uint32_t *ret);

#endif
