/* An ordered set of ranks of a job, and the matching of their collectives. Every
 * job has group 0, `world`. Loop thread only. */
#ifndef SHARDD_JOB_GROUP_H
#define SHARDD_JOB_GROUP_H

#include <stdbool.h>
#include <stdint.h>

#include "job/match.h"
#include "store/state.h"

struct job;

struct group {
	uint32_t id;            /* index in its job */
	struct job *job;        /* borrowed, the parent */
	const state_group *rec; /* borrowed */
	struct match match;
};

/* Return: 0 or -ENOMEM. */
int group_new(struct job *job, uint32_t id, const state_group *rec, match_complete_cb complete,
	      match_failed_cb failed, struct group **ret);
/* NULL is allowed. Return: NULL. */
struct group *group_free(struct group *g);

uint32_t group_size(const struct group *g);
/* Index of a rank of the job in the group's order. Return: false if it is no member. */
bool group_index(const struct group *g, uint32_t rank, uint32_t *ret);

#endif
