#include "work/coll_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "op/mesh_talk.h"
#include "op/op.h"

enum coll_talk_kind {
	TALK_ALL_GATHER,
	TALK_REDUCE_SCATTER,
	TALK_ALL_REDUCE,
	TALK_BROADCAST,
	TALK_SUM
};

/* An operation that waits for its turn. */
struct coll_talk {
	enum coll_talk_kind kind;
	enum coll_over over;
	uint64_t count; /* BROADCAST: bytes */
	enum dtype dtype;
	enum reduce_op reduce;
	unsigned root;
	struct comm_sum sum;
	struct comm_fold fold[NODE_MAX_DEVICES];
	const void *send[NODE_MAX_DEVICES];
	void *recv[NODE_MAX_DEVICES];
};

static void coll_talk_on_mesh(struct mesh_talk *m, int status)
{
	coll_talked(m->userdata, status);
}

/* The sets of devices of c->unit are watched from here on; those of a unit before it no more. Return: 0
 * or -ENOMEM. */
static int coll_talk_take_mesh(struct coll *c)
{
	const struct mesh *m = mesh_find(c->group, c->unit);

	if (c->mesh && c->mesh->mesh == m)
		return 0;
	c->mesh = mesh_talk_free(c->mesh);
	c->mesh = mesh_talk_new(c->job, m, true, BACKEND_Q_MAIN, coll_deadline(c));
	if (!c->mesh)
		return -ENOMEM;
	c->mesh->done = coll_talk_on_mesh;
	c->mesh->userdata = c;
	return 0;
}

static void coll_talk_issue_on_mesh(struct coll *c, const struct coll_talk *t)
{
	struct mesh_talk *m = c->mesh;

	CHECK((t->over == COLL_OVER_LIKE) == (t->kind == TALK_ALL_REDUCE));
	switch (t->kind) {
	case TALK_ALL_GATHER:
		mesh_all_gather(m, c->place, t->send, t->recv, t->count, t->dtype);
		return;
	case TALK_REDUCE_SCATTER:
		mesh_reduce_scatter(m, c->place, t->send, t->recv, t->count, t->dtype);
		return;
	case TALK_ALL_REDUCE:
		mesh_all_reduce(m, c->place, t->recv, t->count, t->dtype, t->reduce);
		return;
	case TALK_SUM:
		mesh_sum(m, c->place, &t->sum, t->fold, t->recv);
		return;
	case TALK_BROADCAST:
		break;
	}
	CHECK_NOT_REACHED();
}

static void coll_talk_issue(struct coll *c, const struct coll_talk *t)
{
	struct comm *between;

	if (t->over != COLL_OVER_GROUP) {
		coll_talk_issue_on_mesh(c, t);
		return;
	}
	between = coll_between(c);

	switch (t->kind) {
	case TALK_ALL_GATHER:
		comm_all_gather(between, coll_comm(c), t->send, t->recv, t->count, t->dtype);
		return;
	case TALK_REDUCE_SCATTER:
		comm_reduce_scatter(between, coll_comm(c), t->send, t->recv, t->count, t->dtype);
		return;
	case TALK_ALL_REDUCE:
		comm_all_reduce(between, coll_comm(c), t->recv, t->count, t->dtype, t->reduce);
		return;
	case TALK_BROADCAST:
		comm_broadcast(between, coll_comm(c), t->recv, t->count, t->root);
		return;
	case TALK_SUM:
		comm_sum(between, coll_comm(c), &t->sum, t->fold, t->recv);
		return;
	}
	CHECK_NOT_REACHED();
}

void coll_talks_last(struct coll *c)
{
	c->next.last = true;
}

void coll_talks_over(struct coll *c, enum coll_over over)
{
	CHECK(over == COLL_OVER_GROUP || mesh_is_needed(c->unit));
	c->next.over = (uint8_t)over;
}

/* It was issued. */
static void coll_talk_issued(struct coll *c)
{
	line_talked(&c->line);
	if (c->next.last)
		line_leave(&c->line);
}

/* It is its turn to begin; or it has begun, and is the first now. */
static void coll_talk_go_on(struct line_item *i)
{
	struct coll *c = CONTAINER_OF(i, struct coll, line);
	struct coll_talk *t = STEAL_PTR(c->next.waits);

	if (!c->has_begun) {
		c->has_begun = true;
		coll_go_on(c);
		return;
	}
	if (!t)
		return; /* it is busy with something else */
	if (coll_can_talk(c) == RES_DONE) {
		coll_talk_issue(c, t);
		free(t);
		coll_talk_issued(c);
		return;
	}
	free(t);
	coll_go_on(c); /* to its end: the communicator has broken */
}

void coll_line_enter(struct coll *c)
{
	c->makes = group_makes_in_line(c->group) &&
		   (!c->group->nc || c->type->of_units ||
		    (c->unit && mesh_is_needed(c->unit) &&
		     !mesh_is_asked_for(mesh_find(c->group, c->unit))));
	if (group_spans(c->group))
		line_enter(&c->line, c->job, c->makes, coll_talk_go_on);
	else
		coll_go_on(c);
}

void coll_line_leave(struct coll *c)
{
	free(c->next.waits);
	c->next.waits = NULL;
	line_leave(&c->line);
}

/* Now, or in turn. */
static void coll_talk_make(struct coll *c, struct coll_talk *t)
{
	t->over = (enum coll_over)c->next.over;
	c->next.over = COLL_OVER_GROUP;
	if (t->over != COLL_OVER_GROUP && coll_talk_take_mesh(c) < 0) {
		c->status = -ENOMEM;
		coll_go_on(c);
		return;
	}
	if (!line_is_in(&c->line) || line_is_first(&c->line)) {
		coll_talk_issue(c, t);
		coll_talk_issued(c);
		return;
	}
	CHECK(!c->next.waits);
	c->next.waits = malloc(sizeof(*t));
	if (c->next.waits) {
		*c->next.waits = *t;
		return;
	}
	c->status = -ENOMEM;
	coll_go_on(c);
}

static void coll_talk_copy(const struct coll *c, struct coll_talk *t, const void *const *send,
			   void *const *recv)
{
	CHECK(c->n_parts <= NODE_MAX_DEVICES);
	if (send)
		memcpy(t->send, send, c->n_parts * sizeof(*send));
	memcpy(t->recv, recv, c->n_parts * sizeof(*recv));
}

void coll_all_gather(struct coll *c, const void *const *send, void *const *recv, uint64_t count,
		     enum dtype dtype)
{
	struct coll_talk t = { .kind = TALK_ALL_GATHER, .count = count, .dtype = dtype };

	coll_talk_copy(c, &t, send, recv);
	coll_talk_make(c, &t);
}

void coll_reduce_scatter(struct coll *c, const void *const *send, void *const *recv, uint64_t count,
			 enum dtype dtype)
{
	struct coll_talk t = { .kind = TALK_REDUCE_SCATTER, .count = count, .dtype = dtype };

	coll_talk_copy(c, &t, send, recv);
	coll_talk_make(c, &t);
}

void coll_all_reduce(struct coll *c, void *const *data, uint64_t count, enum dtype dtype,
		     enum reduce_op reduce)
{
	struct coll_talk t = {
		.kind = TALK_ALL_REDUCE, .count = count, .dtype = dtype, .reduce = reduce
	};

	coll_talk_copy(c, &t, NULL, data);
	coll_talk_make(c, &t);
}

void coll_broadcast(struct coll *c, void *const *data, uint64_t bytes, unsigned root)
{
	struct coll_talk t = { .kind = TALK_BROADCAST, .count = bytes, .root = root };

	coll_talk_copy(c, &t, NULL, data);
	coll_talk_make(c, &t);
}

void coll_sum(struct coll *c, const struct comm_sum *sum, const struct comm_fold *fold,
	      void *const *recv)
{
	struct coll_talk t = { .kind = TALK_SUM, .sum = *sum };

	memcpy(t.fold, fold, c->n_parts * sizeof(*fold));
	coll_talk_copy(c, &t, NULL, recv);
	coll_talk_make(c, &t);
}
