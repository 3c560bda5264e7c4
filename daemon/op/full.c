/* The gathered copy of a unit: see full.h. */
#include "op/full.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "job/window.h"

/* What is done on one device. */
struct cast_part {
	struct cast *cast;
	struct queue_task queue;
	struct kop kop;
};

/* A copy under way: a cast of each device's shards into its copy, then an all-gather between
 * the copies, then a marker. The op that began it waits like the others. */
struct cast {
	struct comm_op comm_op;
	struct queue_task between; /* watches what goes on between devices */
	uint64_t breaks;           /* of the communicators, at its start */
	struct job *job;
	struct unit *unit;
	uint64_t version;     /* of the parameters that are read */
	uint64_t deadline_us; /* for the streams it waits for */
	unsigned pending;     /* parts whose stage is not over */
	unsigned issued;      /* parts whose marker is not issued */
	int status;
	struct cast_part parts[]; /* by part of the unit */
};

uint64_t full_evict(struct job *job, uint64_t want)
{
	struct unit *u, *tmp;
	uint64_t freed = 0;

	list_for_each (u, tmp, &job->idle_full, idle) {
		list_unlink(&u->idle);
		job_give_full(job, u);
	}
	for (unsigned d = 0; d < job->node->n_devices && freed < want; d++)
		freed += pool_trim(&job->full[d], want - freed);
	return freed;
}

void full_invalidate(struct job *job, struct unit *u)
{
	if (!u->has_full || u->casting || u->executing || u->gathered_ranks)
		return;
	list_unlink(&u->idle);
	job_give_full(job, u);
}

/* Room for the copies, if need be in place of copies that nobody uses. */
static int take_full(struct job *job, struct unit *u)
{
	int r;

	if (u->has_full)
		return 0;
	r = job_take_full(job, u);
	if (r == 0 || r == SLAB_E_LATER)
		return r;
	full_evict(job, UINT64_MAX);
	return job_take_full(job, u);
}

/* -------------------------------------------------------------- the cast */

/* End those that wait for the copy: all of them, or only those whose streams can wait for
 * the rest. The first one made it. */
static void answer_waiting(struct unit *u, int status, bool streams_only)
{
	struct list now = LIST_INIT(now);

	list_take_all(&now, &u->waiting);
	while (!list_empty(&now)) {
		struct op *op =
			CONTAINER_OF(list_first(&now, struct parked, link), struct op, parked);

		list_unlink(&op->parked.link);
		if (streams_only && !op->stream)
			list_append(&u->waiting, &op->parked.link);
		else
			gather_answer(op, status);
	}
}

/* Gathers that waited for max_inflight_gathers; not all of them need a cast by now. */
static void next_in_queue(struct job *job)
{
	uint32_t most = job->node->limits.max_inflight_gathers;

	while (!list_empty(&job->cast_queue) && (!most || job->casts < most)) {
		struct parked *p = list_first(&job->cast_queue, struct parked, link);

		list_unlink(&p->link);
		p->resume(p);
	}
}

static void cast_free(struct cast *cast)
{
	for (unsigned d = 0; d < cast->unit->n_parts; d++)
		queue_task_deinit(&cast->parts[d].queue);
	queue_task_deinit(&cast->between);
	free(cast);
}

/* Executed, or failed. */
static void cast_end(struct cast *cast, int status)
{
	struct job *job = cast->job;
	struct unit *u = cast->unit;

	u->casting = false;
	u->executing = false;
	u->full_version = status ? 0 : cast->version;
	cast_free(cast);
	job->casts--;
	answer_waiting(u, status, false);
	if (!u->gathered_ranks && u->has_full && list_empty(&u->idle) && !u->casting &&
	    !u->executing)
		list_append(&job->idle_full, &u->idle);
	next_in_queue(job);
	node_wake(job->node);
	job->running--; /* only now: those resumed may have been the last of a deleted job */
	job_settle(job);
}

static void on_marker_issued(struct backend_task *task, int status)
{
	struct cast_part *p = CONTAINER_OF(task, struct cast_part, queue.task);
	struct cast *cast = p->cast;
	struct unit *u = cast->unit;

	(void)status;
	u->parts[p - cast->parts].ready = task->ready;
	if (--cast->issued)
		return;
	u->casting = false;
	u->executing = true;
	u->full_version = cast->version;
	answer_waiting(u, 0, true);
}

static void on_marker_executed(struct backend_task *task, int status)
{
	struct cast *cast = CONTAINER_OF(task, struct cast_part, queue.task)->cast;

	cast->status = cast->status ? cast->status : status;
	if (cast->between.between && cast->breaks != cast->between.between->breaks)
		cast->status = cast->status ? cast->status : ENGINE_E_ABORTED;
	if (--cast->pending == 0)
		cast_end(cast, cast->status);
}

static bool has_queues(const struct unit *u)
{
	return backend_info(u->parts[0].device->backend)->order != BACKEND_ORDER_NONE;
}

/* The streams of the first stage are watched until the marker behind it was executed. */
static void submit_markers(struct cast *cast)
{
	struct unit *u = cast->unit;

	cast->pending = cast->issued = u->n_parts;
	for (unsigned d = 0; d < u->n_parts; d++) {
		struct cast_part *p = &cast->parts[d];

		p->queue.task = (struct backend_task){ .queue = BACKEND_Q_GATHER,
						       .sync = true,
						       .issued = on_marker_issued,
						       .done = on_marker_executed };
		queue_task_follow(&p->queue, u->parts[d].device->backend);
	}
}

static void on_gathered(struct comm_op *op, int status)
{
	struct cast *cast = CONTAINER_OF(op, struct cast, comm_op);

	if (status || !has_queues(cast->unit))
		cast_end(cast, status);
	else
		submit_markers(cast);
}

/* All devices' copies, and, where the shards themselves are sent, those too. */
static void check_windows(struct cast *cast, struct node_comm *nc)
{
	struct region full[NODE_MAX_DEVICES], shards[NODE_MAX_DEVICES];
	struct unit *u = cast->unit;

	for (unsigned d = 0; d < u->n_parts; d++) {
		full[d] = u->parts[d].full;
		shards[d] = u->parts[d].params;
	}
	window_check(nc, BACKEND_Q_GATHER, full);
	if (u->rec->compute_dtype == u->rec->storage_dtype)
		window_check(nc, BACKEND_Q_GATHER, shards);
}

/* Each device sends its shards as they are, or what it has cast of them, which lies where
 * it belongs already. */
static void between_devices(struct cast *cast)
{
	struct unit *u = cast->unit;
	struct node_comm *nc = cast->job->groups[u->rec->group]->nc;
	enum dtype dtype = (enum dtype)u->rec->compute_dtype;
	uint64_t count = unit_part_elements(u);
	const void *send[NODE_MAX_DEVICES];
	void *recv[NODE_MAX_DEVICES];

	if (nc->state != COMM_READY) { /* it broke while the shards were cast */
		cast_end(cast, ENGINE_E_ABORTED);
		return;
	}
	for (unsigned d = 0; d < u->n_parts; d++) {
		struct unit_part *p = &u->parts[d];

		recv[d] = region_addr(&p->full);
		send[d] = u->rec->compute_dtype == u->rec->storage_dtype
				  ? region_addr(&p->params)
				  : (char *)recv[d] + d * count * dtype_size(dtype);
	}
	cast->comm_op.done = on_gathered;
	if (u->n_parts > 1) {
		cast->breaks = nc->breaks;
		queue_task_watch(&cast->between, nc, cast->deadline_us);
	}
	check_windows(cast, nc);
	comm_all_gather(nc->comm[BACKEND_Q_GATHER], &cast->comm_op, send, recv, count, dtype);
}

static void on_cast(struct backend_task *task, int status)
{
	struct cast *cast = CONTAINER_OF(task, struct cast_part, queue.task)->cast;

	cast->status = cast->status ? cast->status : status;
	if (--cast->pending)
		return;
	if (cast->status)
		cast_end(cast, cast->status);
	else
		between_devices(cast);
}

static void cast_part(struct cast *cast, unsigned d)
{
	struct unit *u = cast->unit;
	struct unit_part *p = &u->parts[d];
	struct cast_part *part = &cast->parts[d];
	enum dtype dtype = (enum dtype)u->rec->compute_dtype;
	bool cast_needed = u->rec->compute_dtype != u->rec->storage_dtype && p->n;

	part->kop = (struct kop){ .kind = KOP_CAST, .n = p->n };
	part->kop.cast = (struct k_cast){ .dst = (char *)region_addr(&p->full) +
						 p->begin * dtype_size(dtype),
					  .src = region_addr(&p->params),
					  .dst_dtype = dtype,
					  .src_dtype = (enum dtype)u->rec->storage_dtype };
	part->queue.task = (struct backend_task){ .kops = &part->kop,
						  .n_kops = cast_needed,
						  .queue = BACKEND_Q_GATHER,
						  .done = on_cast };
	queue_task_submit(&part->queue, p->device->backend, cast->deadline_us);
}

/* Streams that may still read what was in this memory before. */
static int take_reads(struct cast *cast, unsigned d)
{
	struct unit_part *p = &cast->unit->parts[d];
	struct reads *stray = &cast->job->stray[p->device->index];
	struct queue_task *t = &cast->parts[d].queue;

	if (queue_task_wait(t, p->reads.waits, p->reads.n) < 0 ||
	    queue_task_wait(t, stray->waits, stray->n) < 0)
		return -ENOMEM;
	return 0;
}

static void forget_reads(struct cast *cast)
{
	for (unsigned d = 0; d < cast->unit->n_parts; d++) {
		struct unit_part *p = &cast->unit->parts[d];

		reads_deinit(&p->reads);
		reads_deinit(&cast->job->stray[p->device->index]);
	}
}

/* Return: NULL without memory. */
static struct cast *cast_new(struct job *job, struct unit *u, uint64_t deadline_us)
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
		r = take_reads(cast, d);
	if (r == 0)
		return cast;
	cast_free(cast);
	return NULL;
}

/* The first thing that is done: it may be the last thing that the op sees. */
static void enter(struct cast *cast, struct op *op)
{
	struct unit *u = cast->unit;

	forget_reads(cast);
	u->casting = true;
	cast->job->casts++;
	cast->job->running++;
	if (!op)
		return;
	op_begin_run(op);
	list_append(&u->waiting, &op->parked.link);
}

int full_begin(struct job *job, struct unit *u, uint64_t deadline_us, struct op *op,
	       struct fault *f)
{
	struct cast *cast;
	int r = group_comms(job->groups[u->rec->group], f);

	CHECK(!u->casting && !u->executing);
	if (r)
		return r;
	list_unlink(&u->idle);
	r = take_full(job, u);
	if (r == SLAB_E_LATER)
		return NODE_E_LATER;
	cast = r ? NULL : cast_new(job, u, deadline_us);
	if (!cast) {
		if (!u->gathered_ranks)
			job_give_full(job, u);
		return op_memory_fault(job, r ? r : -ENOMEM, unit_full_room(u), "a gathered unit",
				       f);
	}
	enter(cast, op);
	for (unsigned d = 0; d < u->n_parts; d++)
		cast_part(cast, d);
	return 0;
}
