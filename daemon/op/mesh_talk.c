#include "op/mesh_talk.h"

#include <stdlib.h>

#include "core/check.h"

static void mesh_talk_watch(struct mesh_watched *w, struct mesh_talk *t, struct job *job,
			    const struct mesh_comm *of, uint64_t deadline_us)
{
	CHECK(of->nc && of->nc->state == COMM_READY);
	w->talk = t;
	w->of = of;
	w->nc = of->nc;
	w->nc->users++;
	w->breaks = of->nc->breaks;
	queue_task_init(&w->task, job);
	queue_task_watch(&w->task, w->nc, deadline_us);
}

struct mesh_talk *mesh_talk_new(struct job *job, const struct mesh *m, bool like,
				enum backend_queue queue, uint64_t deadline_us)
{
	struct mesh_talk *t = calloc(1, sizeof(*t));

	if (!t)
		return NULL;
	t->mesh = m;
	t->queue = queue;
	for (unsigned way = 0; way < (like ? _MESH_N : 1); way++) {
		t->ways[way] = calloc(m->n[way], sizeof(*t->ways[way]));
		if (!t->ways[way])
			return mesh_talk_free(t);
		for (; t->n[way] < m->n[way]; t->n[way]++)
			mesh_talk_watch(&t->ways[way][t->n[way]], t, job, &m->comms[way][t->n[way]],
					deadline_us);
	}
	return t;
}

struct mesh_talk *mesh_talk_free(struct mesh_talk *t)
{
	if (!t)
		return NULL;
	CHECK(!t->pending);
	for (unsigned way = 0; way < _MESH_N; way++) {
		for (unsigned i = 0; i < t->n[way]; i++) {
			queue_task_deinit(&t->ways[way][i].task);
			node_comm_leave(t->ways[way][i].nc);
		}
		free(t->ways[way]);
	}
	free(t);
	return NULL;
}

bool mesh_talk_holds(const struct mesh_talk *t)
{
	for (unsigned way = 0; way < _MESH_N; way++)
		for (unsigned i = 0; i < t->n[way]; i++)
			if (t->ways[way][i].nc->breaks != t->ways[way][i].breaks)
				return false;
	return true;
}

const char *mesh_talk_why(const struct mesh_talk *t)
{
	for (unsigned way = 0; way < _MESH_N; way++)
		for (unsigned i = 0; i < t->n[way]; i++)
			if (*t->ways[way][i].nc->why)
				return t->ways[way][i].nc->why;
	return "";
}

static void mesh_talk_on_done(struct comm_op *op, int status)
{
	struct mesh_talk *t = CONTAINER_OF(op, struct mesh_watched, op)->talk;

	t->status = t->status ? t->status : status;
	CHECK(t->pending > 0);
	if (--t->pending == 0)
		t->done(t, t->status);
}

/* On all communicators of @way; the operations end later. */
static void mesh_talk_begin(struct mesh_talk *t, enum mesh_way way, uint64_t place)
{
	CHECK(!t->pending && t->n[way]);
	t->status = 0;
	t->pending = t->n[way];
	for (unsigned i = 0; i < t->n[way]; i++)
		t->ways[way][i].op = (struct comm_op){ .done = mesh_talk_on_done, .place = place };
}

static struct comm *mesh_talk_comm(const struct mesh_talk *t, const struct mesh_watched *w)
{
	CHECK(w->nc->comm[t->queue]);
	return w->nc->comm[t->queue];
}

/* Those of the devices of @w. */
static void mesh_talk_pick(const struct mesh_watched *w, const void *const *of, const void **ret)
{
	for (unsigned i = 0; i < w->of->n; i++)
		ret[i] = of[w->of->devices[i]];
}

static void mesh_talk_pick_data(const struct mesh_watched *w, void *const *of, void **ret)
{
	for (unsigned i = 0; i < w->of->n; i++)
		ret[i] = of[w->of->devices[i]];
}

/* In each set: comm_all_gather or comm_reduce_scatter. */
static void mesh_talk_in_sets(struct mesh_talk *t, uint64_t place, const void *const *send,
			      void *const *recv, uint64_t count, enum dtype dtype,
			      __typeof__(comm_all_gather) *call)
{
	const void *from[NODE_MAX_DEVICES];
	void *to[NODE_MAX_DEVICES];

	mesh_talk_begin(t, MESH_SETS, place);
	for (unsigned i = 0; i < t->n[MESH_SETS]; i++) {
		struct mesh_watched *w = &t->ways[MESH_SETS][i];

		mesh_talk_pick(w, send, from);
		mesh_talk_pick_data(w, recv, to);
		call(mesh_talk_comm(t, w), &w->op, from, to, count, dtype);
	}
}

void mesh_all_gather(struct mesh_talk *t, uint64_t place, const void *const *send,
		     void *const *recv, uint64_t count, enum dtype dtype)
{
	mesh_talk_in_sets(t, place, send, recv, count, dtype, comm_all_gather);
}

void mesh_reduce_scatter(struct mesh_talk *t, uint64_t place, const void *const *send,
			 void *const *recv, uint64_t count, enum dtype dtype)
{
	mesh_talk_in_sets(t, place, send, recv, count, dtype, comm_reduce_scatter);
}

void mesh_sum(struct mesh_talk *t, uint64_t place, const struct comm_sum *sum,
	      const struct comm_fold *fold, void *const *recv)
{
	struct comm_fold folds[NODE_MAX_DEVICES];
	void *to[NODE_MAX_DEVICES];

	mesh_talk_begin(t, MESH_SETS, place);
	for (unsigned i = 0; i < t->n[MESH_SETS]; i++) {
		struct mesh_watched *w = &t->ways[MESH_SETS][i];

		for (unsigned k = 0; k < w->of->n; k++)
			folds[k] = fold[w->of->devices[k]];
		mesh_talk_pick_data(w, recv, to);
		comm_sum(mesh_talk_comm(t, w), &w->op, sum, folds, to);
	}
}

void mesh_all_reduce(struct mesh_talk *t, uint64_t place, void *const *data, uint64_t count,
		     enum dtype dtype, enum reduce_op reduce)
{
	void *of[NODE_MAX_DEVICES];

	mesh_talk_begin(t, MESH_LIKE, place);
	for (unsigned i = 0; i < t->n[MESH_LIKE]; i++) {
		struct mesh_watched *w = &t->ways[MESH_LIKE][i];

		mesh_talk_pick_data(w, data, of);
		comm_all_reduce(mesh_talk_comm(t, w), &w->op, of, count, dtype, reduce);
	}
}

bool mesh_broadcast(struct mesh_talk *t, void *const *data, const uint64_t *bytes, unsigned root)
{
	void *of[NODE_MAX_DEVICES];
	unsigned none = 0;

	mesh_talk_begin(t, MESH_LIKE, 0);
	for (unsigned i = 0; i < t->n[MESH_LIKE]; i++) {
		struct mesh_watched *w = &t->ways[MESH_LIKE][i];
		uint64_t n = bytes[w->of->devices[0]];

		none += !n;
		mesh_talk_pick_data(w, data, of);
		if (n)
			comm_broadcast(mesh_talk_comm(t, w), &w->op, of, n, root);
	}
	t->pending -= none;
	return t->pending;
}
