/* The gathered copy of a unit: see full.h. */
#include "copies/full.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "job/window.h"
#include "op/device_note.h"
#include "op/mesh_talk.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/queue_task.h"
#include "unit/optim.h"
#include "unit/pack.h"
#include "work/drain.h"

/* What is done on one device. */
struct cast_part {
	struct cast *cast;
	struct queue_task queue;
	struct launch launches[2]; /* of what is trained, of what is frozen */
	struct launch *unpack;     /* owned */
	struct region staged;      /* where the parts are brought together, if they are unpacked */
};

/* A copy under way: a cast of each device's shards into its copy, then all-gathers between
 * the copies (of what is trained, then of what is frozen), then a marker. Where the parts'
 * order is another than the gathered unit's, all this is done in memory beside, from which
 * it is unpacked. The op that began it waits like the others. */
struct cast {
	struct comm_op comm_op;
	struct node_comm *nc;      /* @between watches it, and it spans nodes: a user of it */
	struct queue_task between; /* watches what goes on between devices */
	uint64_t breaks;           /* of the communicators, at its start */
	struct mesh_talk *mesh;    /* owned: of a unit with sets of devices, from there on */
	uint64_t place;            /* comm_op.place */
	struct job *job;
	struct unit *unit;
	uint64_t version;     /* of the parameters that are read */
	uint64_t deadline_us; /* for the streams it waits for */
	unsigned pending;     /* parts whose stage is not over */
	unsigned issued;      /* parts whose marker is not issued */
	unsigned stage;       /* enum full_stage */
	bool ahead;           /* nobody had asked for it when it was begun */
	int status;
	struct cast_part parts[]; /* by part of the unit */
};

void full_invalidate(struct job *job, struct unit *u)
{
	if (u->copy != UNIT_COPY_KEPT || u->gathered_ranks || u->copy_reads)
		return;
	list_unlink(&u->idle);
	job_give_full(job, u);
}

/* Room for the copies, if need be in place of copies that nobody uses. */
static int full_take_full(struct job *job, struct unit *u, bool evict)
{
	int r;

	if (unit_has_copy(u))
		return 0;
	r = job_take_full(job, u);
	while (slab_is_short(r) && evict && job_evict(job, UINT64_MAX))
		r = job_take_full(job, u);
	return evict ? job_evict_later(job, r) : r;
}

/* End those that wait for the copy: all of them, or only those whose streams can wait for
 * the rest. The first one made it. */
static void full_answer_waiting(struct unit *u, int status, bool streams_only)
{
	struct list now = LIST_INIT(now);

	list_take_all(&now, &u->cast_done.waiters);
	u->copy_reads++; /* ops behind the first one must not take the copy from the others */
	while (!list_empty(&now)) {
		struct op *op =
			CONTAINER_OF(list_first(&now, struct waiter, link), struct op, waiter);

		list_unlink(&op->waiter.link);
		CHECK(op->type->copied && op->unit == u);
		if (streams_only && !op->stream)
			condition_wait(&u->cast_done, &op->waiter);
		else
			op->type->copied(op, status);
	}
	u->copy_reads--;
}

/* ------------------------------------------------------- how many at once */

bool full_valid(const struct unit *u)
{
	return unit_has_copy(u) && u->copy != UNIT_COPY_CASTING && u->full_version == u->version;
}

bool full_may_begin(const struct job *job)
{
	uint32_t most = job->node->limits.max_inflight_gathers;

	return !most || job->copies.casts < most;
}

enum res full_wait_turn(struct op *op)
{
	struct member *m = op->m;

	(void)op_wait(op, &m->casts);
	if (list_empty(&m->cast_turn))
		list_append(&m->job->copies.turns, &m->cast_turn);
	return RES_WAIT;
}

/* The first gather of the member whose turn it is; it goes behind the others then. Ops that
 * were ended meanwhile have left the list. */
static struct waiter *full_take_turn(struct job *job)
{
	while (!list_empty(&job->copies.turns)) {
		struct member *m = list_first(&job->copies.turns, struct member, cast_turn);
		struct waiter *p;

		list_unlink(&m->cast_turn);
		if (condition_is_idle(&m->casts))
			continue;
		p = list_first(&m->casts.waiters, struct waiter, link);
		list_unlink(&p->link);
		if (!condition_is_idle(&m->casts))
			list_append(&job->copies.turns, &m->cast_turn);
		return p;
	}
	return NULL;
}

/* Not all of those that waited need a cast by now. */
static void full_next_in_queue(struct job *job)
{
	struct waiter *p;

	while (full_may_begin(job) && (p = full_take_turn(job)))
		p->resume(p);
}

/* -------------------------------------------------------------- the cast */

/* Its readers and writers are in the pool's queue. */
static void full_give_staged(struct cast *cast)
{
	for (unsigned d = 0; d < cast->unit->n_parts; d++)
		pool_give(&cast->job->mem.full[cast->unit->parts[d].device->index],
			  &cast->parts[d].staged);
}

static void full_cast_free(struct cast *cast)
{
	full_give_staged(cast);
	for (unsigned d = 0; d < cast->unit->n_parts; d++) {
		queue_task_deinit(&cast->parts[d].queue);
		free(cast->parts[d].unpack);
	}
	queue_task_deinit(&cast->between);
	mesh_talk_free(cast->mesh);
	if (cast->nc)
		node_comm_leave(cast->nc);
	free(cast);
}

/* Executed, or failed. */
static void full_cast_end(struct cast *cast, int status)
{
	struct job *job = cast->job;
	struct unit *u = cast->unit;

	CHECK(!cast->pending);
	CHECK(job->copies.casts > 0 && job->copies.ahead >= cast->ahead);
	unit_copy_move(u, UNIT_COPY_KEPT);
	u->full_version = status ? 0 : cast->version;
	job->copies.ahead -= cast->ahead;
	full_cast_free(cast);
	job->copies.casts--;
	full_answer_waiting(u, status, false);
	job_full_unused(job, u);
	if (!job->copies.ahead)
		drain_go_on(job);
	job_unit_released(job, u);
	full_next_in_queue(job);
	node_wake(job->node);
	job_ran(job);
}

static void full_on_marker_issued(struct backend_task *task, int status)
{
	struct cast_part *p = CONTAINER_OF(task, struct cast_part, queue.task);
	struct cast *cast = p->cast;
	struct unit *u = cast->unit;

	(void)status;
	CHECK(cast->issued > 0 && u->copy == UNIT_COPY_CASTING);
	u->parts[p - cast->parts].ready = task->ready;
	if (--cast->issued)
		return;
	unit_copy_move(u, UNIT_COPY_EXECUTING);
	u->full_version = cast->version;
	full_answer_waiting(u, 0, true);
}

static void full_go_on(struct cast *cast);

static void full_on_marker_executed(struct backend_task *task, int status)
{
	struct cast *cast = CONTAINER_OF(task, struct cast_part, queue.task)->cast;

	cast->status = cast->status ? cast->status : status;
	if ((cast->between.between && cast->breaks != cast->between.between->breaks) ||
	    (cast->mesh && !mesh_talk_holds(cast->mesh)))
		cast->status = cast->status ? cast->status : ENGINE_E_ABORTED;
	CHECK(cast->pending > 0);
	if (--cast->pending == 0)
		full_go_on(cast);
}

static bool full_has_queues(const struct unit *u)
{
	return backend_info(u->parts[0].device->backend)->order != BACKEND_ORDER_NONE;
}

/* The streams of the first stage are watched until the marker behind it was executed. */
static enum res full_submit_markers(struct cast *cast)
{
	struct unit *u = cast->unit;

	cast->pending = cast->issued = u->n_parts;
	for (unsigned d = 0; d < u->n_parts; d++) {
		struct cast_part *p = &cast->parts[d];

		p->queue.task = (struct backend_task){ .queue = BACKEND_Q_GATHER,
						       .sync = true,
						       .issued = full_on_marker_issued,
						       .done = full_on_marker_executed };
		queue_task_follow(&p->queue, u->parts[d].device->backend);
	}
	return RES_WAIT;
}

static void full_on_kernels(struct backend_task *task, int status)
{
	struct cast *cast = CONTAINER_OF(task, struct cast_part, queue.task)->cast;

	cast->status = cast->status ? cast->status : status;
	CHECK(cast->pending > 0);
	if (--cast->pending == 0)
		full_go_on(cast);
}

static enum dtype full_compute_dtype(const struct cast *cast)
{
	return (enum dtype)cast->unit->rec->compute_dtype;
}

static enum res full_unpack(struct cast *cast)
{
	struct unit *u = cast->unit;

	cast->pending = u->n_parts;
	for (unsigned d = 0; d < u->n_parts; d++) {
		struct cast_part *p = &cast->parts[d];
		struct unit_array full = { region_addr(&u->parts[d].full),
					   full_compute_dtype(cast) };
		struct unit_array parts = { region_addr(&p->staged), full_compute_dtype(cast) };

		p->queue.task = (struct backend_task){ .launches = p->unpack,
						       .queue = BACKEND_Q_GATHER,
						       .done = full_on_kernels };
		p->queue.task.n_launches =
			unit_unpack_launches(u, UNIT_ALL, &full, &parts, p->unpack);
		CHECK(p->queue.task.n_launches <= u->rec->n_tensors);
		queue_task_follow(&p->queue, u->parts[d].device->backend);
	}
	return RES_WAIT;
}

/* Where the parts are brought together on each device. */
static const struct region *full_together(const struct cast *cast, unsigned d)
{
	return cast->parts[d].staged.slab ? &cast->parts[d].staged : &cast->unit->parts[d].full;
}

static bool full_is_sent_as_it_is(const struct unit *u)
{
	return u->rec->compute_dtype == u->rec->storage_dtype;
}

/* All devices' copies, and, where the shards themselves are sent, those too. */
static void full_check_windows(struct cast *cast, struct node_comm *nc)
{
	struct region full[NODE_MAX_DEVICES], shards[NODE_MAX_DEVICES];
	struct unit *u = cast->unit;

	for (unsigned d = 0; d < u->n_parts; d++) {
		full[d] = *full_together(cast, d);
		shards[d] = u->parts[d].params;
	}
	window_check(nc, BACKEND_Q_GATHER, full);
	if (full_is_sent_as_it_is(u))
		window_check(nc, BACKEND_Q_GATHER, shards);
}

static void full_on_gathered(struct comm_op *op, int status)
{
	struct cast *cast = CONTAINER_OF(op, struct cast, comm_op);

	cast->status = status;
	full_go_on(cast);
}

static void full_on_mesh_gathered(struct mesh_talk *t, int status)
{
	struct cast *cast = t->userdata;

	cast->status = status;
	full_go_on(cast);
}

/* Of the epoch in which it began. */
static struct node_comm *full_comm_of(const struct cast *cast)
{
	return cast->nc ? cast->nc : cast->job->groups[cast->unit->rec->group]->nc;
}

/* It may have broken while the shards were cast. */
static bool full_can_talk(struct cast *cast)
{
	const struct node_comm *nc = full_comm_of(cast);

	if (cast->mesh ? !mesh_talk_holds(cast->mesh) : !nc || nc->state != COMM_READY)
		cast->status = cast->status ? cast->status : ENGINE_E_ABORTED;
	return !cast->status;
}

/* Each device sends its shards as they are, or what it has cast of them, which lies where
 * it belongs already. */
static enum res full_all_gather(struct cast *cast, bool frozen)
{
	struct unit *u = cast->unit;
	enum dtype dtype = full_compute_dtype(cast);
	uint64_t trained = unit_part_elements(u);
	uint64_t count = frozen ? unit_frozen_elements(u) : trained;
	const void *send[NODE_MAX_DEVICES];
	void *recv[NODE_MAX_DEVICES];

	for (unsigned d = 0; d < u->n_parts; d++) {
		char *to = region_addr(full_together(cast, d));

		recv[d] = to + (frozen ? trained * u->spread : 0) * dtype_size(dtype);
		send[d] = full_is_sent_as_it_is(u)
				  ? (char *)unit_state_at(u->rec, &u->parts[d].params, 0,
							  frozen ? trained : 0)
				  : (char *)recv[d] + unit_position(u, &u->parts[d]) * count *
							      dtype_size(dtype);
	}
	if (cast->mesh) {
		mesh_all_gather(cast->mesh, cast->place, send, recv, count, dtype);
		return RES_WAIT;
	}
	cast->comm_op = (struct comm_op){ .done = full_on_gathered, .place = cast->place };
	comm_all_gather(full_comm_of(cast)->comm[BACKEND_Q_GATHER], &cast->comm_op, send, recv,
			count, dtype);
	return RES_WAIT;
}

static void full_watch(struct cast *cast)
{
	struct node_comm *nc = full_comm_of(cast);

	/* memory is registered with one communicator at a time: that of all devices */
	if (cast->mesh || cast->unit->all_parts == 1 || !nc || nc->state != COMM_READY)
		return;
	cast->breaks = nc->breaks;
	queue_task_watch(&cast->between, nc, cast->deadline_us);
	full_check_windows(cast, nc);
}

enum full_stage { FULL_CAST, FULL_TRAINED, FULL_FROZEN, FULL_UNPACK, FULL_MARK, FULL_DONE };

/* Begun when the shards are cast. RES_FAILED: cast->status. */
static enum res full_tick(struct cast *cast)
{
	const struct unit *u = cast->unit;

	switch ((enum full_stage)cast->stage) {
	case FULL_CAST:
		cast->stage = FULL_MARK;
		if (u->spread == 1 && u->all_parts > 1) /* each device has all of it */
			return full_tick(cast);
		full_watch(cast);
		fallthrough;
	case FULL_TRAINED:
		cast->stage = FULL_FROZEN;
		if (!full_can_talk(cast))
			return RES_FAILED;
		if (unit_part_elements(u))
			return full_all_gather(cast, false);
		fallthrough;
	case FULL_FROZEN:
		cast->stage = FULL_UNPACK;
		if (!full_can_talk(cast))
			return RES_FAILED;
		if (unit_frozen_elements(u))
			return full_all_gather(cast, true);
		fallthrough;
	case FULL_UNPACK:
		cast->stage = FULL_MARK;
		if (!full_can_talk(cast))
			return RES_FAILED;
		if (unit_is_packed(u))
			return full_unpack(cast);
		fallthrough;
	case FULL_MARK:
		full_give_staged(cast);
		cast->stage = FULL_DONE;
		if (full_has_queues(u))
			return full_submit_markers(cast);
		fallthrough;
	case FULL_DONE:
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

static void full_go_on(struct cast *cast)
{
	enum res r = cast->status ? RES_FAILED : full_tick(cast);

	CHECK((r == RES_FAILED) == (cast->status != 0));
	if (r != RES_WAIT)
		full_cast_end(cast, cast->status);
}

/* @n elements from @from of the part's parameters to @to of the copy. */
static void full_cast_launch(struct cast *cast, unsigned d, uint64_t to, uint64_t from, uint64_t n)
{
	struct cast_part *p = &cast->parts[d];
	enum dtype dtype = full_compute_dtype(cast);
	struct launch *launch = &p->launches[p->queue.task.n_launches];
	char *dst = region_addr(full_together(cast, d));

	if (!n || full_is_sent_as_it_is(cast->unit))
		return;
	CHECK(p->queue.task.n_launches < ARRAY_SIZE(p->launches));
	*launch = (struct launch){ .kind = LAUNCH_CAST, .n = n };
	launch->cast = (struct k_cast){ .dst = dst + to * dtype_size(dtype),
					.src = unit_state_at(cast->unit->rec,
							     &cast->unit->parts[d].params, 0, from),
					.dst_dtype = dtype,
					.src_dtype = (enum dtype)cast->unit->rec->storage_dtype };
	p->queue.task.n_launches++;
}

/* Padding that is handed out is cast too. */
static void full_cast_part(struct cast *cast, unsigned d)
{
	struct unit *u = cast->unit;
	struct unit_part *p = &u->parts[d];
	struct cast_part *part = &cast->parts[d];
	uint64_t trained = unit_part_elements(u), frozen = unit_frozen_elements(u);
	bool padded = u->layout.dim0 || frozen;

	part->queue.task = (struct backend_task){ .launches = part->launches,
						  .queue = BACKEND_Q_GATHER,
						  .done = full_on_kernels };
	full_cast_launch(cast, d, p->begin, 0, padded ? trained : p->n);
	full_cast_launch(cast, d, trained * u->spread + frozen * unit_position(u, p), trained,
			 frozen);
	queue_task_submit(&part->queue, p->device->backend, cast->deadline_us);
}

/* Streams that may still read what was in this memory before. */
static int full_take_reads(struct cast *cast, unsigned d)
{
	struct unit_part *p = &cast->unit->parts[d];
	struct reads *stray = &cast->job->mem.stray[p->device->index];
	struct queue_task *t = &cast->parts[d].queue;

	if (queue_task_wait(t, p->reads.waits, p->reads.n) < 0 ||
	    queue_task_wait(t, stray->waits, stray->n) < 0)
		return -ENOMEM;
	return 0;
}

static void full_forget_reads(struct cast *cast)
{
	for (unsigned d = 0; d < cast->unit->n_parts; d++) {
		struct unit_part *p = &cast->unit->parts[d];

		reads_deinit(&p->reads);
		reads_deinit(&cast->job->mem.stray[p->device->index]);
	}
}

/* Return: NULL without memory. */
static struct cast *full_cast_new(struct job *job, struct unit *u, uint64_t deadline_us)
{
	struct cast *cast = calloc(1, sizeof(*cast) + u->n_parts * sizeof(cast->parts[0]));
	int r = 0;

	if (!cast)
		return NULL;
	cast->job = job;
	cast->unit = u;
	cast->version = u->version;
	cast->deadline_us = deadline_us;
	cast->pending = u->n_parts;
	queue_task_init(&cast->between, cast->job);
	for (unsigned d = 0; d < u->n_parts; d++) {
		cast->parts[d].cast = cast;
		queue_task_init(&cast->parts[d].queue, cast->job);
	}
	for (unsigned d = 0; r == 0 && d < u->n_parts; d++)
		r = full_take_reads(cast, d);
	for (unsigned d = 0; r == 0 && unit_is_packed(u) && d < u->n_parts; d++) {
		cast->parts[d].unpack = calloc(u->rec->n_tensors, sizeof(struct launch));
		r = cast->parts[d].unpack ? 0 : -ENOMEM;
	}
	if (r == 0)
		return cast;
	full_cast_free(cast);
	return NULL;
}

/* Memory in which the parts are brought together, on every device. Return: as pool_take. */
static int full_stage(struct cast *cast)
{
	struct unit *u = cast->unit;
	uint64_t bytes = unit_full_room(u);
	bool later = false;
	int r = 0;

	for (unsigned d = 0; r == 0 && unit_is_packed(u) && d < u->n_parts; d++) {
		struct pool *pool = &cast->job->mem.full[u->parts[d].device->index];

		r = job_take(cast->job, pool, bytes, &cast->parts[d].staged);
		r = slab_note_later(r, &later);
	}
	return r || !later ? r : SLAB_E_LATER;
}

/* The first thing that is done: it may be the last thing that the op sees. */
static void full_enter(struct cast *cast, struct op *op)
{
	struct unit *u = cast->unit;

	full_forget_reads(cast);
	unit_copy_move(u, UNIT_COPY_CASTING);
	cast->job->copies.casts++;
	cast->job->running++;
	cast->ahead = !op;
	cast->job->copies.ahead += cast->ahead;
	for (unsigned d = 0; d < u->n_parts; d++)
		cast->parts[d].queue.note = (struct device_note){
			.name = cast->ahead ? "Gather ahead" : "Gather", .job = cast->job, .unit = u
		};
	if (!op)
		return;
	op_begin_run(op);
	condition_wait(&u->cast_done, &op->waiter);
}

/* Communicators with other nodes may end with the epoch: it has them until it is over. */
static void full_hold_comm(struct cast *cast)
{
	struct node_comm *nc = full_comm_of(cast);

	if (cast->mesh || !nc || !nc->spans)
		return;
	cast->nc = nc;
	nc->users++;
}

/* What it needs to be made. */
static enum res full_comms(struct job *job, const struct unit *u, struct mesh **ret_mesh,
			   struct fault *f)
{
	struct group *g = job->groups[u->rec->group];

	return mesh_is_needed(u) ? mesh_comms(g, u, false, ret_mesh, f) : group_comms(g, f);
}

/* Return: 0 or -ENOMEM. */
static int full_take_mesh(struct cast *cast, const struct mesh *m)
{
	if (!m)
		return 0;
	cast->mesh = mesh_talk_new(cast->job, m, false, BACKEND_Q_GATHER, cast->deadline_us);
	if (!cast->mesh)
		return -ENOMEM;
	cast->mesh->done = full_on_mesh_gathered;
	cast->mesh->userdata = cast;
	return 0;
}

/* @together: with all nodes, at this place; NULL: not. */
static enum res full_begin_as(struct job *job, struct unit *u, uint64_t deadline_us, struct op *op,
			      const uint64_t *together, struct fault *f)
{
	bool evict = op || together;
	struct mesh *mesh = NULL;
	struct cast *cast;
	int r;

	CHECK(!unit_is_copying(u));
	RES_TRY(full_comms(job, u, &mesh, f));
	list_unlink(&u->idle);
	r = full_take_full(job, u, evict);
	if (r == SLAB_E_LATER)
		return RES_WAIT;
	cast = r ? NULL : full_cast_new(job, u, deadline_us);
	if (!r)
		r = cast ? full_stage(cast) : -ENOMEM;
	if (!r)
		r = full_take_mesh(cast, mesh);
	if (r) {
		if (cast)
			full_cast_free(cast);
		if (!u->gathered_ranks && !u->copy_reads)
			job_give_full(job, u);
		if (r == SLAB_E_LATER)
			return RES_WAIT;
		return res_of(op_memory_fault(job, r, unit_full_room(u), "a gathered unit", f));
	}
	cast->place = together ? *together : 0;
	full_hold_comm(cast);
	full_enter(cast, op);
	for (unsigned d = 0; d < u->n_parts; d++)
		full_cast_part(cast, d);
	return RES_DONE;
}

enum res full_begin(struct job *job, struct unit *u, uint64_t deadline_us, struct op *op,
		    struct fault *f)
{
	return full_begin_as(job, u, deadline_us, op, NULL, f);
}

enum res full_begin_together(struct job *job, struct unit *u, uint64_t place, struct fault *f)
{
	return full_begin_as(job, u, UINT64_MAX, NULL, &place, f);
}
