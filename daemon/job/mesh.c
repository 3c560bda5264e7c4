#include "job/mesh.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "job/job_types.h"
#include "job/span.h"

bool mesh_is_needed(const struct unit *u)
{
	return u->layout.sets;
}

/* The nodes of all devices, in their order. */
static unsigned mesh_node_of(const struct group *g, uint32_t index)
{
	return span_node_of(g->job->across.span, g->rec->ranks[index]);
}

/* The ranks of a set follow each other, since it has those of one replica. */
bool mesh_crosses(const struct group *g, const struct unit *u)
{
	uint32_t ranks = u->layout.ranks;

	CHECK(mesh_is_needed(u));
	for (uint32_t i = 0; group_spans(g) && i < group_size(g); i++)
		if (mesh_node_of(g, i) != mesh_node_of(g, i - i % ranks))
			return true;
	return false;
}

struct mesh *mesh_find(const struct group *g, const struct unit *u)
{
	struct list *all = (struct list *)&g->more_comms;
	struct mesh *m, *tmp;

	list_for_each (m, tmp, all, more.link)
		if (m->spread == u->spread)
			return m;
	return NULL;
}

/* The devices of this node, by the communicators of @way in which they are. */
static void mesh_fill(struct mesh *m, const struct group *g, enum mesh_way way)
{
	struct mesh_comm *all = m->comms[way];

	for (unsigned d = 0; d < g->n_devices; d++) {
		unsigned set = (g->first_device + d) / m->spread;
		unsigned place = (g->first_device + d) % m->spread;
		unsigned number = way == MESH_SETS ? set : place, i = 0;

		while (i < m->n[way] && all[i].number != number)
			i++;
		if (i == m->n[way])
			all[m->n[way]++] =
				(struct mesh_comm){ .number = number,
						    .member = way == MESH_SETS ? place : set };
		all[i].devices[all[i].n++] = (uint8_t)d;
	}
}

/* In the order of their numbers, in which all nodes make them. */
static int mesh_by_number(const void *a, const void *b)
{
	const struct mesh_comm *x = a, *y = b;

	return x->number < y->number ? -1 : x->number > y->number;
}

static void mesh_drop(struct mesh_comm *c, const char *why)
{
	struct node_comm *nc = c->nc;

	c->nc = NULL;
	if (nc && nc->spans)
		node_comm_end(nc, why);
	else if (nc)
		node_comm_leave(nc);
}

static void mesh_reset(struct group_more *more, const char *why)
{
	struct mesh *m = CONTAINER_OF(more, struct mesh, more);

	for (unsigned way = 0; way < _MESH_N; way++)
		for (unsigned i = 0; i < m->n[way]; i++)
			if (m->comms[way][i].nc && m->comms[way][i].nc->spans)
				mesh_drop(&m->comms[way][i], why);
}

static void mesh_free(struct group_more *more)
{
	struct mesh *m = CONTAINER_OF(more, struct mesh, more);

	for (unsigned way = 0; way < _MESH_N; way++)
		for (unsigned i = 0; i < m->n[way]; i++)
			mesh_drop(&m->comms[way][i], "the group is gone");
	free(m);
}

static struct mesh *mesh_new(struct group *g, unsigned spread)
{
	struct mesh *m = calloc(1, sizeof(*m));

	if (!m)
		return NULL;
	CHECK(g->n_devices && spread > 1 && g->all_devices % spread == 0);
	m->spread = spread;
	for (unsigned way = 0; way < _MESH_N; way++) {
		mesh_fill(m, g, (enum mesh_way)way);
		qsort(m->comms[way], m->n[way], sizeof(m->comms[way][0]), mesh_by_number);
	}
	m->more.reset = mesh_reset;
	m->more.free = mesh_free;
	list_init(&m->more.link);
	list_append(&g->more_comms, &m->more.link);
	return m;
}

static unsigned mesh_size(const struct mesh *m, const struct group *g, enum mesh_way way)
{
	return way == MESH_SETS ? m->spread : g->all_devices / m->spread;
}

static enum res mesh_comm_here(struct group *g, struct mesh_comm *c, struct device *const *devices,
			       struct fault *f)
{
	struct node_comm *nc = NULL;
	enum res r = node_comm(g->job->node, devices, c->n, &nc, f);

	if (nc && !c->nc) {
		c->nc = nc;
		nc->users++;
	}
	return r;
}

static enum res mesh_comm(struct mesh *m, struct group *g, enum mesh_way way, struct mesh_comm *c,
			  struct fault *f)
{
	static const char letters[_MESH_N] = { [MESH_SETS] = 's', [MESH_LIKE] = 'l' };
	struct device *devices[NODE_MAX_DEVICES];
	struct group_between b = {
		.devices = devices, .n = c->n, .size = mesh_size(m, g, way), .member = c->member
	};

	for (unsigned i = 0; i < c->n; i++)
		devices[i] = g->devices[c->devices[i]];
	if (b.n == b.size)
		return mesh_comm_here(g, c, devices, f);
	snprintf(b.name, sizeof(b.name), "/%c%u.%u", letters[way], m->spread, c->number);
	return group_comm_between(g, &b, &c->nc, f);
}

enum res mesh_comms(struct group *g, const struct unit *u, bool like, struct mesh **ret,
		    struct fault *f)
{
	struct mesh *m = mesh_find(g, u);
	unsigned ways = like ? _MESH_N : 1;
	bool later = false;

	CHECK(mesh_is_needed(u));
	m = m ? m : mesh_new(g, u->spread);
	if (!m)
		return res_of(fault_errno(f, -ENOMEM, "making communicators"));
	*ret = m;
	for (unsigned way = 0; way < ways; way++) {
		for (unsigned i = 0; i < m->n[way]; i++) {
			enum res r = mesh_comm(m, g, (enum mesh_way)way, &m->comms[way][i], f);

			if (r == RES_FAILED)
				return r;
			later = later || r == RES_WAIT;
		}
	}
	return later ? RES_WAIT : RES_DONE;
}

bool mesh_is_asked_for(const struct mesh *m)
{
	for (unsigned way = 0; m && way < _MESH_N; way++)
		for (unsigned i = 0; i < m->n[way]; i++)
			if (!m->comms[way][i].nc)
				return false;
	return m;
}

bool mesh_is_ready(const struct mesh *m, enum mesh_way way)
{
	for (unsigned i = 0; m && i < m->n[way]; i++)
		if (!m->comms[way][i].nc || m->comms[way][i].nc->state != COMM_READY)
			return false;
	return m;
}

const char *mesh_why(const struct mesh *m)
{
	for (unsigned way = 0; m && way < _MESH_N; way++)
		for (unsigned i = 0; i < m->n[way]; i++) {
			const struct node_comm *nc = m->comms[way][i].nc;

			if (nc && nc->state == COMM_BROKEN)
				return nc->why;
		}
	return "";
}

bool mesh_device_of(const struct group *g, const struct node_comm *nc, unsigned member,
		    unsigned *ret)
{
	struct list *all = (struct list *)&g->more_comms;
	struct mesh *m, *tmp;

	list_for_each (m, tmp, all, more.link)
		for (unsigned way = 0; way < _MESH_N; way++)
			for (unsigned i = 0; i < m->n[way]; i++) {
				const struct mesh_comm *c = &m->comms[way][i];

				if (c->nc != nc)
					continue;
				*ret = way == MESH_SETS ? c->number * m->spread + member
							: member * m->spread + c->number;
				return true;
			}
	return false;
}

bool mesh_uses(const struct group *g, const struct node_comm *nc)
{
	unsigned device;

	return mesh_device_of(g, nc, 0, &device);
}
