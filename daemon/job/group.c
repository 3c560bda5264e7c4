#include "job/group.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/job_types.h"

int group_new(struct job *job, uint32_t id, const state_group *rec, match_complete_cb complete,
	      match_failed_cb failed, struct group **ret)
{
	struct group *g = calloc(1, sizeof(*g));

	if (!g)
		return -ENOMEM;
	g->id = id;
	g->job = job;
	g->rec = rec;
	condition_init(&g->shard_ready, "a unit whose gradient is reduced");
	list_init(&g->small);
	condition_init(&g->joins, "all ranks to have no more inputs");
	g->untold = calloc(rec->n_ranks, sizeof(*g->untold));
	if (!g->untold || match_init(&g->match, (uint32_t)rec->n_ranks, complete, failed, g) < 0) {
		free(g->untold);
		free(g);
		return -ENOMEM;
	}
	g->match.user = job->owner.user;
	*ret = g;
	return 0;
}

struct group *group_free(struct group *g)
{
	if (g) {
		CHECK(condition_is_idle(&g->shard_ready));
		group_set_plan(g, NULL);
		match_deinit(&g->match);
		free(g->devices);
		free(g->untold);
		if (g->nc)
			node_comm_leave(g->nc);
	}
	free(g);
	return NULL;
}

void group_reset(struct group *g, const struct fault *fault)
{
	match_reset(&g->match, fault);
	memset(g->untold, 0, group_size(g) * sizeof(*g->untold));
	g->n_untold = 0;
}

static unsigned group_add_device(struct device **devices, unsigned n, struct device *d)
{
	for (unsigned i = 0; i < n; i++)
		if (devices[i] == d)
			return n;
	devices[n] = d;
	return n + 1;
}

struct device *group_device(const struct group *g, uint32_t index)
{
	struct device *d = g->job->placed[g->rec->ranks[index]];

	return d || g->job->node->n_devices > 1 ? d : &g->job->node->devices[0]; /* where else */
}

enum res group_place(struct group *g, struct fault *f)
{
	struct device *devices[NODE_MAX_DEVICES];
	unsigned n = 0;

	if (g->n_devices)
		return RES_DONE;
	for (uint32_t i = 0; i < group_size(g); i++) {
		struct device *d = group_device(g, i);

		if (!d)
			return RES_WAIT;
		n = group_add_device(devices, n, d);
	}
	g->devices = malloc(n * sizeof(*devices));
	if (!g->devices) {
		fault_errno(f, -ENOMEM, "placing a group");
		return RES_FAILED;
	}
	memcpy(g->devices, devices, n * sizeof(*devices));
	g->n_devices = n;
	return RES_DONE;
}

enum res group_comms(struct group *g, struct fault *f)
{
	struct node_comm *nc = NULL;
	enum res r;

	CHECK(g->n_devices > 0);
	r = node_comm(g->job->node, g->devices, g->n_devices, &nc, f);
	if (nc && !g->nc) {
		g->nc = nc;
		nc->users++;
	}
	return r;
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

bool group_plan_holds(const struct group *g)
{
	return g->plan.has_clip || g->plan.inv_scale != 0;
}

void group_set_plan(struct group *g, const struct pass_plan *plan)
{
	const struct pass_plan none = { 0 };
	struct step_rates rates = g->plan.rates;

	g->plan = plan ? *plan : none;
	settings_ref(g->plan.rates.settings);
	step_rates_clear(&rates);
}
