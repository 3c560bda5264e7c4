/*
 * The shards that trainers gave back, brought to all copies of their unit: what the ranks of a
 * device had is sent from there to the others, one device after the other; where replicas have sets of
 * devices, to those that have the same part, one set after the other. Where a device is
 * lost meanwhile the copies may differ: nobody can go on from them. Copies on several nodes: in the job's
 * line, so that nothing else is between the operations on any node.
 */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "engine/engine.h"
#include "job/line.h"
#include "job/mesh.h"
#include "op/mesh_talk.h"
#include "op/op.h"
#include "op/queue_task.h"
#include "step/apply.h"
#include "step/external.h"
#include "unit/optim.h"

struct copies_part {
	struct copies *copies;
	struct queue_task queue;
};

struct copies {
	struct line_item line; /* where they are on several nodes */
	struct job *job;
	struct unit *u;
	struct node_comm *nc; /* a user of it; NULL: it was gone already */
	uint64_t epoch;       /* in which they began */
	void (*done)(struct job *job, struct unit *u, int status);
	struct comm_op comm_op;
	struct queue_task between; /* watches what goes on between devices */
	uint64_t breaks;           /* of the communicators, at the start */
	/* owned: of a unit with sets of devices, in place of @nc and @between; NULL: it was gone already */
	struct mesh_talk *mesh;
	unsigned turn; /* the device that sends next; or the set, of which all do */
	unsigned pending;
	int status;
	struct copies_part parts[];
};

bool external_has_copies(const struct unit *u)
{
	return u->spread < u->all_parts;
}

static void external_copies_free(struct copies *c)
{
	for (unsigned d = 0; d < c->u->n_parts; d++)
		queue_task_deinit(&c->parts[d].queue);
	queue_task_deinit(&c->between);
	mesh_talk_free(c->mesh);
	if (c->nc)
		node_comm_leave(c->nc);
	free(c);
}

static void external_copies_finish(struct job *job, struct unit *u, int status,
				   void (*done)(struct job *job, struct unit *u, int status))
{
	CHECK(job->step.stepping > 0);
	unit_step_move(u, UNIT_STEP_NONE);
	unit_shards_move(u, u->shards_from ? UNIT_SHARDS_READY : UNIT_SHARDS_NONE);
	job->step.stepping--;
	done(job, u, status);
	apply_go_on(job);
	job_ran(job);
}

/* Other nodes may have what was sent: nobody goes on. */
static void external_copies_apart(struct job *job, const struct unit *u, int status)
{
	struct fault why = FAULT_NULL;

	fault_set(&why, FAULT_ABORTED, NULL,
		  "the shards of unit '%.100s' could not be brought to all nodes: error %d",
		  u->rec->name, status);
	job_epoch_end(job, &why);
}

static void external_copies_end(struct copies *c, int status)
{
	struct job *job = c->job;
	struct unit *u = c->u;
	void (*done)(struct job * job, struct unit * u, int status) = c->done;
	bool apart = status && line_is_in(&c->line) && c->epoch == job->rec->epoch;

	line_leave(&c->line);
	external_copies_free(c);
	job->running++;
	if (apart)
		external_copies_apart(job, u, status);
	external_copies_finish(job, u, status, done);
	job_ran(job);
}

static void external_copies_on_marker(struct backend_task *task, int status)
{
	struct copies_part *p = CONTAINER_OF(task, struct copies_part, queue.task);
	struct copies *c = p->copies;

	queue_task_done(&p->queue);
	c->status = c->status ? c->status : status;
	CHECK(c->pending > 0);
	if (--c->pending)
		return;
	if (c->mesh ? !mesh_talk_holds(c->mesh) : c->breaks != c->nc->breaks)
		c->status = c->status ? c->status : -EIO;
	external_copies_end(c, c->status);
}

/* What was sent is ordered: whoever reads it next may do so in another queue. */
static void external_copies_submit_markers(struct copies *c)
{
	c->pending = c->u->n_parts;
	for (unsigned d = 0; d < c->u->n_parts; d++) {
		struct copies_part *p = &c->parts[d];

		p->queue.task =
			(struct backend_task){ .sync = true, .done = external_copies_on_marker };
		queue_task_submit(&p->queue, c->u->parts[d].device->backend, 0);
	}
}

/* The devices of a set send to those that have the same part; @ret: what they send, by part here. */
static int external_copies_of_set(struct copies *c, unsigned set, void **data, uint64_t *bytes)
{
	size_t size = dtype_size(unit_state_dtype(c->u->rec, 0));
	int r = 0;

	for (unsigned d = 0; r == 0 && d < c->u->n_parts; d++) {
		unsigned place = unit_position(c->u, &c->u->parts[d]);
		uint64_t begin = 0, end = 0;

		r = external_share_of_device(c->job, c->u, set * c->u->spread + place, &begin,
					     &end);
		data[d] = unit_state_at(c->u->rec, &c->u->parts[d].params, 0, begin);
		bytes[d] = (end - begin) * size;
	}
	return r;
}

static void external_copies_next_set(struct copies *c)
{
	unsigned sets = c->u->all_parts / c->u->spread;
	void *data[NODE_MAX_DEVICES];
	uint64_t bytes[NODE_MAX_DEVICES];
	bool sends = false;
	int r = 0;

	while (r == 0 && !sends && c->turn < sets) {
		r = c->mesh && mesh_talk_holds(c->mesh) ? 0 : -EIO;
		if (r == 0)
			r = external_copies_of_set(c, c->turn, data, bytes);
		if (r == 0)
			sends = mesh_broadcast(c->mesh, data, bytes, c->turn++);
	}
	if (r)
		external_copies_end(c, r);
	else if (!sends)
		external_copies_submit_markers(c);
}

static void external_copies_on_set_sent(struct mesh_talk *t, int status)
{
	struct copies *c = t->userdata;

	if (status)
		external_copies_end(c, status);
	else
		external_copies_next_set(c);
}

/* Those that the last Reduce had. */
static void external_copies_take_mesh(struct copies *c)
{
	const struct mesh *m = mesh_find(c->job->groups[c->u->rec->group], c->u);

	if (!mesh_is_ready(m, MESH_SETS) || !mesh_is_ready(m, MESH_LIKE))
		return;
	c->mesh = mesh_talk_new(c->job, m, true, BACKEND_Q_MAIN, 0);
	if (!c->mesh)
		return;
	c->mesh->done = external_copies_on_set_sent;
	c->mesh->userdata = c;
}

static void external_copies_on_sent(struct comm_op *op, int status);

static void external_copies_send_out(struct copies *c, uint64_t begin, uint64_t end)
{
	void *data[NODE_MAX_DEVICES];

	CHECK(c->turn < c->u->all_parts && end <= unit_part_elements(c->u));
	for (unsigned d = 0; d < c->u->n_parts; d++)
		data[d] = unit_state_at(c->u->rec, &c->u->parts[d].params, 0, begin);
	c->comm_op = (struct comm_op){ .done = external_copies_on_sent };
	comm_broadcast(c->nc->comm[BACKEND_Q_MAIN], &c->comm_op, data,
		       (end - begin) * dtype_size(unit_state_dtype(c->u->rec, 0)), c->turn++);
}

static void external_copies_next_device(struct copies *c)
{
	uint64_t begin = 0, end = 0;
	int r = c->nc && c->nc->state == COMM_READY ? 0 : -EIO;

	while (r == 0 && begin == end && c->turn < c->u->all_parts) {
		r = external_share_of_device(c->job, c->u, c->turn, &begin, &end);
		c->turn += begin == end;
	}
	if (r)
		external_copies_end(c, r);
	else if (begin < end)
		external_copies_send_out(c, begin, end);
	else
		external_copies_submit_markers(c);
}

static void external_copies_on_sent(struct comm_op *op, int status)
{
	struct copies *c = CONTAINER_OF(op, struct copies, comm_op);

	if (status)
		external_copies_end(c, status);
	else
		external_copies_next_device(c);
}

static struct copies *external_copies_new(struct job *job, struct unit *u)
{
	struct copies *c = calloc(1, sizeof(*c) + u->n_parts * sizeof(c->parts[0]));

	if (!c)
		return NULL;
	c->job = job;
	c->u = u;
	c->epoch = job->rec->epoch;
	line_item_init(&c->line);
	c->nc = job->groups[u->rec->group]->nc;
	if (c->nc)
		c->nc->users++;
	queue_task_init(&c->between, job);
	for (unsigned d = 0; d < u->n_parts; d++) {
		c->parts[d].copies = c;
		queue_task_init(&c->parts[d].queue, job);
	}
	return c;
}

static void external_copies_begin(struct line_item *line)
{
	struct copies *c = CONTAINER_OF(line, struct copies, line);

	if (mesh_is_needed(c->u)) {
		external_copies_take_mesh(c);
		external_copies_next_set(c);
		return;
	}
	if (c->nc)
		c->breaks = c->nc->breaks;
	if (c->nc && c->nc->state == COMM_READY)
		queue_task_watch(&c->between, c->nc, 0);
	external_copies_next_device(c);
}

void external_copies(struct job *job, struct unit *u,
		     void (*done)(struct job *job, struct unit *u, int status))
{
	struct copies *c = external_copies_new(job, u);

	CHECK((u->spread == 1 || mesh_is_needed(u)) && external_has_copies(u) && !u->shards_left);
	unit_step_move(u, UNIT_STEP_STEPPING);
	job->step.stepping++;
	job->running++;
	if (!c) {
		if (group_spans(job->groups[u->rec->group]))
			external_copies_apart(job, u, -ENOMEM);
		external_copies_finish(job, u, -ENOMEM, done);
		return;
	}
	c->done = done;
	if (group_spans(job->groups[u->rec->group]))
		line_enter(&c->line, job, true, external_copies_begin);
	else
		external_copies_begin(&c->line);
}
