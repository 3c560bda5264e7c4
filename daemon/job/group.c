#include "job/group.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/fnv.h"
#include "job/job_types.h"
#include "job/span.h"

/* Which of its members are on this node. They may be anywhere in its order. Return: 0 or -ENOMEM. */
static int group_find_here(const struct group *g, uint32_t *ret_here, uint32_t **ret_members)
{
	uint32_t *members = malloc((group_size(g) + 1) * sizeof(*members)), n = 0;

	if (!members)
		return -ENOMEM;
	for (uint32_t i = 0; i < group_size(g); i++)
		if (span_is_here(g->job->across.span, g->rec->ranks[i]))
			members[n++] = i;
	if (n == group_size(g)) {
		free(members);
		members = NULL;
	}
	*ret_here = n;
	*ret_members = members;
	return 0;
}

static void group_on_here(void *userdata, uint64_t number, const struct match_entry *first)
{
	struct group *g = userdata;

	g->job->jobs->ops.announce(g, number, first);
}

static void group_on_refused(void *userdata, uint64_t number, const struct fault *fault)
{
	struct group *g = userdata;

	g->job->jobs->ops.refuse(g, number, fault);
}

static const struct match_others group_others = { .announce = group_on_here,
						  .refuse = group_on_refused };

void group_find_order(struct group *g)
{
	g->match.others = group_is_ordered(g) ? &group_others : NULL;
}

static int group_init_match(struct group *g, match_complete_cb complete, match_failed_cb failed)
{
	int r = match_init(&g->match, g->here ? g->here : 1, complete, failed, g);

	if (r == 0)
		group_find_order(g);
	return r;
}

int group_new(struct job *job, uint32_t id, const state_group *rec, match_complete_cb complete,
	      match_failed_cb failed, struct group **ret)
{
	struct group *g = calloc(1, sizeof(*g));
	int r;

	if (!g)
		return -ENOMEM;
	g->id = id;
	g->job = job;
	g->rec = rec;
	condition_init(&g->shard_ready, "a unit whose gradient is reduced");
	list_init(&g->small);
	list_init(&g->more_comms);
	condition_init(&g->joins, "all ranks to have no more inputs");
	asked_across_init(&g->across);
	g->untold = calloc(rec->n_ranks, sizeof(*g->untold));
	r = g->untold ? group_find_here(g, &g->here, &g->members) : -ENOMEM;
	if (r == 0)
		r = group_init_match(g, complete, failed);
	if (r < 0) {
		free(g->members);
		free(g->untold);
		free(g);
		return r;
	}
	g->match.user = job->owner.user;
	*ret = g;
	return 0;
}

/* Communicators with members on other nodes are of one epoch. */
static void group_drop_between(struct group *g, const char *why)
{
	struct node_comm *nc = g->nc;

	if (!nc || !nc->spans)
		return;
	g->nc = NULL;
	node_comm_end(nc, why);
}

static void group_reset_more(struct group *g, const char *why)
{
	struct group_more *m, *tmp;

	list_for_each (m, tmp, &g->more_comms, link)
		m->reset(m, why);
}

static void group_free_more(struct group *g)
{
	while (!list_empty(&g->more_comms)) {
		struct group_more *m = list_first(&g->more_comms, struct group_more, link);

		list_unlink(&m->link);
		m->free(m);
	}
}

struct group *group_free(struct group *g)
{
	if (g) {
		CHECK(condition_is_idle(&g->shard_ready));
		group_set_plan(g, NULL);
		match_deinit(&g->match);
		asked_across_reset(&g->across);
		free(g->members);
		free(g->devices);
		free(g->device_of);
		free(g->untold);
		group_free_more(g);
		group_drop_between(g, "the group is gone");
		if (g->nc)
			node_comm_leave(g->nc);
	}
	free(g);
	return NULL;
}

int group_find_again(struct group *g)
{
	match_complete_cb complete = g->match.complete;
	match_failed_cb failed = g->match.failed;
	uint32_t here = 0, *members = NULL;
	int r;

	CHECK(!g->n_devices && !g->nc && list_empty(&g->more_comms));
	r = group_find_here(g, &here, &members);
	if (r < 0)
		return r; /* it stays as it was */
	free(g->members);
	g->members = members;
	g->here = here;
	match_deinit(&g->match);
	r = group_init_match(g, complete, failed);
	g->match.complete = complete; /* also without memory: the next epoch tries again */
	g->match.failed = failed;
	g->match.user = g->job->owner.user;
	return r;
}

void group_reset(struct group *g, const struct fault *fault)
{
	match_reset(&g->match, fault);
	memset(g->untold, 0, group_size(g) * sizeof(*g->untold));
	g->n_untold = 0;
	asked_across_reset(&g->across);
	group_reset_more(g, fault->text);
	group_drop_between(g, fault->text);
}

uint32_t group_member_here(const struct group *g, uint32_t i)
{
	CHECK(i < g->here);
	return g->members ? g->members[i] : i;
}

bool group_is_here(const struct group *g, uint32_t index, uint32_t *ret)
{
	uint32_t lo = 0, hi = g->here;

	while (hi - lo > 1) {
		uint32_t mid = (lo + hi) / 2;

		if (group_member_here(g, mid) <= index)
			lo = mid;
		else
			hi = mid;
	}
	*ret = lo;
	return g->here > 0 && group_member_here(g, lo) == index;
}

struct device *group_device(const struct group *g, uint32_t index)
{
	struct device *d = g->job->placed[g->rec->ranks[index]];
	uint32_t here;

	if (!group_is_here(g, index, &here))
		return NULL;
	return d || g->job->node->n_devices > 1 ? d : &g->job->node->devices[0]; /* where else */
}

unsigned group_device_number(const struct group *g, uint32_t index)
{
	CHECK(g->device_of && index < group_size(g));
	return g->device_of[index];
}

bool group_spans(const struct group *g)
{
	return g->here != group_size(g);
}

bool group_is_ordered(const struct group *g)
{
	return group_spans(g) ||
	       (!g->id && span_is_alone(g->job->across.span, g->job->rec->join_grace_ms));
}

#define GROUP_NO_NUMBER UINT16_MAX /* of a device that has none yet */

/* Is member @i on the device of member @k? @on: of those on this node. */
static bool group_shares_device(const struct group *g, struct device *const *on, uint32_t i,
				uint32_t k)
{
	const struct span *s = g->job->across.span;
	uint32_t i_here, k_here;
	bool is_here = group_is_here(g, i, &i_here);

	if (is_here != group_is_here(g, k, &k_here))
		return false;
	if (is_here)
		return on[i_here] == on[k_here];
	return span_device_of(s, g->rec->ranks[i]) == span_device_of(s, g->rec->ranks[k]);
}

static uint16_t group_number_device(struct group *g, struct device *const *on, uint32_t first,
				    uint32_t index, unsigned *n)
{
	uint32_t here;

	for (uint32_t i = first; i < index; i++)
		if (group_shares_device(g, on, i, index))
			return g->device_of[i];
	if (group_is_here(g, index, &here)) {
		if (!g->n_devices)
			g->first_device = *n;
		g->devices[g->n_devices++] = on[here];
	}
	return (uint16_t)(*n)++;
}

/* Those of the node that member @first is on: that is the first member there. Numbers of a node are
 * consecutive, wherever its members are in the group's order. */
static void group_number_node(struct group *g, struct device *const *on, uint32_t first,
			      unsigned *n)
{
	const struct span *s = g->job->across.span;
	unsigned node = group_spans(g) ? span_node_of(s, g->rec->ranks[first]) : 0;
	uint32_t left = group_spans(g) ? s->nodes[node].n : group_size(g);

	for (uint32_t i = first; left && i < group_size(g); i++) {
		if (group_spans(g) && span_node_of(s, g->rec->ranks[i]) != node)
			continue;
		g->device_of[i] = group_number_device(g, on, first, i, n);
		left--;
	}
}

static int group_count_most(struct group *g)
{
	uint32_t *on = calloc(g->all_devices, sizeof(*on));

	for (uint32_t i = 0; on && i < group_size(g); i++)
		if (++on[g->device_of[i]] > g->most)
			g->most = on[g->device_of[i]];
	free(on);
	return on ? 0 : -ENOMEM;
}

int group_place_on(struct group *g, struct device *const *on)
{
	unsigned n = 0;

	CHECK(!g->n_devices && g->here > 0);
	g->device_of = calloc(group_size(g), sizeof(*g->device_of));
	g->devices = calloc(NODE_MAX_DEVICES, sizeof(struct device *));
	if (!g->device_of || !g->devices) {
		free(g->device_of);
		free(g->devices);
		g->device_of = NULL;
		g->devices = NULL;
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < group_size(g); i++)
		g->device_of[i] = GROUP_NO_NUMBER;
	for (uint32_t i = 0; i < group_size(g); i++)
		if (g->device_of[i] == GROUP_NO_NUMBER)
			group_number_node(g, on, i, &n);
	g->all_devices = n;
	return group_count_most(g);
}

enum res group_place(struct group *g, struct fault *f)
{
	struct device **on;
	int r = 0;

	if (g->n_devices)
		return RES_DONE;
	if (!g->here)
		return res_of(fault_set(f, FAULT_INVALID, "group",
					"group '%.64s' has no rank on this node", g->rec->name));
	on = calloc(g->here + 1, sizeof(struct device *));
	for (uint32_t i = 0; on && r == 0 && i < g->here; i++) {
		on[i] = group_device(g, group_member_here(g, i));
		r = on[i] ? 0 : -EAGAIN;
	}
	if (r == 0)
		r = on ? group_place_on(g, on) : -ENOMEM;
	free(on);
	if (r == -EAGAIN)
		return RES_WAIT;
	return r < 0 ? res_of(fault_errno(f, r, "placing a group")) : RES_DONE;
}

void group_set_replicas(const struct group *g, state_unit *rec)
{
	CHECK(g->n_devices > 0);
	rec->sets = layout_has_sets(g->device_of, group_size(g), rec->shard_ranks, g->all_devices);
}

bool group_can_have(const struct group *g, const struct layout *l)
{
	return !l->sets || layout_has_sets(g->device_of, group_size(g), l->ranks, g->all_devices);
}

struct unit_place group_unit_place(const struct group *g)
{
	CHECK(g->n_devices > 0);
	return (struct unit_place){ .devices = g->devices,
				    .n = g->n_devices,
				    .all = g->all_devices,
				    .first = g->first_device };
}

enum res group_comm_between(struct group *g, const struct group_between *b, struct node_comm **nc,
			    struct fault *f)
{
	const struct span *s = g->job->across.span;
	char prefix[216];
	const struct comm_group where = { .size = b->size,
					  .member = b->member,
					  .prefix = prefix,
					  .store = &s->store,
					  .connect_ms = g->job->rec->op_timeout_ms };

	if (s->over) {
		*f = s->ended;
		return res_of(fault_set(f, FAULT_ABORTED, NULL,
					"the epoch of job '%s' has ended: join again",
					g->job->rec->name));
	}
	if (!g->job->node->nodes_engine)
		return res_of(fault_set(f, FAULT_UNAVAILABLE, NULL,
					"group '%.64s' has ranks on other nodes, and this node has "
					"no engine between nodes: %.200s",
					g->rec->name, g->job->node->engine_why));
	snprintf(prefix, sizeof(prefix), "%s/%016llx%s", s->prefix,
		 (unsigned long long)group_key(g), b->name);
	if (!*nc)
		*nc = node_comm_new(g->job->node, b->devices, b->n, &where);
	if (!*nc)
		return res_of(fault_errno(f, -ENOMEM, "making a communicator"));
	return node_comm_there(*nc, f);
}

/* That of this epoch, of all devices, with members on other nodes. */
static enum res group_comms_between(struct group *g, struct fault *f)
{
	const struct group_between all = { .devices = g->devices,
					   .n = g->n_devices,
					   .size = g->all_devices,
					   .member = g->first_device };

	return group_comm_between(g, &all, &g->nc, f);
}

bool group_makes_in_line(const struct group *g)
{
	const struct engine *e = g->job->node->nodes_engine;

	return group_spans(g) && e && engine_in_order(e);
}

uint64_t group_key(const struct group *g)
{
	return fnv_add_text(FNV_BEGIN, g->rec->name);
}

enum res group_comms(struct group *g, struct fault *f)
{
	struct node_comm *nc = NULL;
	enum res r;

	CHECK(g->n_devices > 0);
	if (group_spans(g))
		return group_comms_between(g, f);
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

bool group_index_here(const struct group *g, uint32_t rank, uint32_t *ret)
{
	uint32_t index;

	return group_index(g, rank, &index) && group_is_here(g, index, ret);
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
