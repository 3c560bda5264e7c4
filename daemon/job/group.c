#include "job/group.h"

#include <errno.h>
#include <stdlib.h>

int group_new(struct job *job, uint32_t id, const state_group *rec, match_complete_cb complete,
	      match_failed_cb failed, struct group **ret)
{
	struct group *g = calloc(1, sizeof(*g));

	if (!g)
		return -ENOMEM;
	g->id = id;
	g->job = job;
	g->rec = rec;
	if (match_init(&g->match, (uint32_t)rec->n_ranks, complete, failed, g) < 0) {
		free(g);
		return -ENOMEM;
	}
	*ret = g;
	return 0;
}

struct group *group_free(struct group *g)
{
	if (g)
		match_deinit(&g->match);
	free(g);
	return NULL;
}

uint32_t group_size(const struct group *g)
{
	return (uint32_t)g->rec->n_ranks;
}

bool group_index(const struct group *g, uint32_t rank, uint32_t *ret)
{
	for (uint32_t i = 0; i < g->rec->n_ranks; i++) {
		if (g->rec->ranks[i] == rank) {
			*ret = i;
			return true;
		}
	}
	return false;
}
