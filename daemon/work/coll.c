/*
 * Collectives that run: made when the last member has announced, one for all.
 *
 * A collective is a row of stages, each begun when the one before is ordered on all devices
 * of the group: kernels on every device, or an operation between them. On devices with
 * queues of their own the end is a marker in each queue: ops of trainers that wait with
 * their streams are answered when it is in the queue, the others when it was executed.
 */
#include "work/coll_impl.h"

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

#define COLL_MAGIC 0x434f4c4cu

static void coll_part_free(struct coll_part *p)
{
	queue_task_deinit(&p->queue);
	free(p->members);
	free(p->inputs);
	free(p->found);
	free(p->launches);
}

static void coll_free(struct coll *c)
{
	c->magic = 0;
	for (unsigned i = 0; c->parts && i < c->n_parts; i++)
		coll_part_free(&c->parts[i]);
	free(c->fault);
	free(c->parts);
	free(c->part_of);
	free(c->members);
	free(c->ops);
	if (c->type->coll_free)
		c->type->coll_free(c);
	queue_task_deinit(&c->between);
	mesh_talk_free(c->mesh);
	if (c->nc)
		node_comm_leave(c->nc);
	free(c);
}

static int coll_part_init(struct coll *c, struct coll_part *p, struct device *d)
{
	uint32_t n = 0;

	p->coll = c;
	p->device = d;
	queue_task_init(&p->queue, c->job);
	for (uint32_t i = 0; i < c->n; i++)
		n += c->members[i]->device == d;
	p->members = calloc(n ? n : 1, sizeof(*p->members));
	p->inputs = calloc(n + 1, sizeof(*p->inputs));
	return p->members && p->inputs ? 0 : -ENOMEM;
}

static int coll_part_fill(struct coll *c, struct coll_part *p)
{
	for (uint32_t i = 0; i < c->n; i++) {
		if (c->members[i]->device != p->device)
			continue;
		c->part_of[i] = (uint32_t)(p - c->parts);
		p->members[p->n++] = i;
		if (queue_task_wait(&p->queue, c->ops[i]->after, c->ops[i]->n_after) < 0)
			return -ENOMEM;
		p->promised = p->promised || c->ops[i]->n_after;
	}
	return 0;
}

static int coll_make_parts(struct coll *c, struct group *g)
{
	enum res r = group_place(g, c->fault);
	uint32_t placed = 0;

	CHECK(r != RES_WAIT); /* all its ranks have joined, so they are placed */
	if (r == RES_FAILED)
		return -ENOMEM;
	c->parts = calloc(g->n_devices, sizeof(*c->parts));
	c->part_of = calloc(c->n, sizeof(*c->part_of));
	if (!c->parts || !c->part_of)
		return -ENOMEM;
	while (c->n_parts < g->n_devices) {
		struct coll_part *p = &c->parts[c->n_parts++];

		if (coll_part_init(c, p, g->devices[c->n_parts - 1]) < 0 ||
		    coll_part_fill(c, p) < 0)
			return -ENOMEM;
		placed += p->n;
	}
	CHECK(placed == c->n); /* each member is on one of the group's devices */
	return 0;
}

static void coll_resume(struct waiter *p)
{
	coll_go_on(CONTAINER_OF(p, struct coll, waiter));
}

static struct coll *coll_new(struct group *g, struct match_entry *const *entries, uint32_t n)
{
	const struct op_type *type = CONTAINER_OF(entries[0], struct op, entry)->type;
	struct coll *c = calloc(1, sizeof(*c) + type->coll_bytes);

	if (!c)
		return NULL;
	c->magic = COLL_MAGIC;
	c->type = type;
	c->group = g;
	c->job = g->job;
	c->n = n;
	line_item_init(&c->line);
	waiter_init(&c->waiter, coll_resume);
	queue_task_init(&c->between, c->job);
	c->fault = calloc(1, sizeof(*c->fault)); /* apart: malloc is slow above 1 KiB */
	c->ops = calloc(n, sizeof(struct op *));
	c->members = calloc(n, sizeof(struct member *));
	for (uint32_t i = 0; c->ops && c->members && i < n; i++) {
		c->ops[i] = CONTAINER_OF(entries[i], struct op, entry);
		c->members[i] = c->ops[i]->m;
		CHECK(c->ops[i]->type == type && c->ops[i]->unit == c->ops[0]->unit);
	}
	if (!c->fault || !c->ops || !c->members || coll_make_parts(c, g) < 0) {
		coll_free(c);
		return NULL;
	}
	c->unit = c->ops[0]->unit;
	c->place = entries[0]->place;
	c->leaves_out = c->unit && c->unit->turns.leaves_out;
	for (unsigned i = 0; i < c->n_parts; i++)
		c->parts[i].queue.note = (struct device_note){ .name = c->type->name,
							       .job = c->job,
							       .unit = c->unit,
							       .number = c->ops[0]->entry.number };
	return c;
}

static void coll_end_all(struct match_entry *const *entries, uint32_t n, int negative_errno)
{
	for (uint32_t i = 0; i < n; i++) {
		struct op *op = CONTAINER_OF(entries[i], struct op, entry);

		fault_errno(&op->fault, negative_errno, "starting a collective");
		op_end(op);
	}
}

/* Without memory. Other nodes do it: nobody goes on. */
static void coll_cannot_start(struct group *g, struct match_entry *const *entries, uint32_t n)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "there is no memory to start a collective of job '%s'",
		  g->job->rec->name);
	coll_end_all(entries, n, -ENOMEM);
	if (group_spans(g))
		job_epoch_end(g->job, &f);
}

/* The last one to come has cost the others the time since the first one came. */
static void coll_count_late(struct coll *c)
{
	const struct op *first = NULL;
	struct op *last = NULL;

	for (uint32_t i = 0; i < c->n; i++) {
		if (c->ops[i]->surrogate)
			continue;
		if (!first || c->ops[i]->active_us < first->active_us)
			first = c->ops[i];
		if (!last || c->ops[i]->active_us > last->active_us)
			last = c->ops[i];
	}
	if (last)
		last->m->waits.late_us += last->active_us - first->active_us;
	for (uint32_t i = 0; last && recorder.sink.op && i < c->n; i++)
		c->ops[i]->recorded.last_rank = last->m->rank + 1;
}

void coll_complete(struct match_entry *const *entries, uint32_t n, void *userdata)
{
	struct coll *c = coll_new(userdata, entries, n);

	if (!c) {
		coll_cannot_start(userdata, entries, n);
		return;
	}
	for (uint32_t i = 0; i < n; i++) {
		op_begin_run(c->ops[i]);
		c->ops[i]->runner = &c->waiter;
	}
	coll_count_late(c);
	c->job->running++;
	if (c->type->coll_begin)
		c->type->coll_begin(c);
	coll_line_enter(c);
}

/* ----------------------------------------------------------------- the end */

static void coll_give_scratch(struct coll *c)
{
	for (unsigned i = 0; i < c->n_parts; i++)
		for (unsigned k = 0; k < ARRAY_SIZE(c->parts[i].scratch); k++)
			pool_give(&c->job->mem.scratch[c->parts[i].device->index],
				  &c->parts[i].scratch[k]);
}

/* What it took for its members, while they are there. Safe twice. */
static void coll_let_go(struct coll *c)
{
	if (c->type->coll_let_go && !c->has_let_go)
		c->type->coll_let_go(c);
	c->has_let_go = true;
}

/* Its member's epoch ended while it ran: its result is of no use there. */
static void coll_tell_of_end(struct op *op)
{
	if (!op->type->lasts)
		(void)op_told_of_end(op);
}

static void coll_unit_is_written(struct coll *c)
{
	CHECK(!c->writes_unit || c->unit->shard_writes > 0);
	if (c->writes_unit && !--c->unit->shard_writes)
		condition_signal(&c->unit->step_done);
	c->writes_unit = false;
}

/* Nothing of it runs any more. */
static void coll_finish(struct coll *c, const struct fault *fault)
{
	struct job *job = c->job;

	CHECK(!c->ticking && !c->pending);
	coll_let_go(c);
	coll_unit_is_written(c);
	CHECK(job->readers.writing >= c->writes);
	job->readers.writing -= c->writes;
	for (uint32_t i = 0; i < c->n; i++) {
		if (c->marked)
			member_executed(c->members[i]);
		if (!c->ops[i])
			continue;
		if (fault && fault->code)
			c->ops[i]->fault = *fault;
		else
			coll_tell_of_end(c->ops[i]);
		op_end(c->ops[i]);
	}
	coll_free(c);
	node_wake(job->node); /* who waited for memory to be free of readers and writers */
	job_ran(job);
}

/* Why a communicator was aborted; "": nobody knows. */
static const char *coll_why(const struct coll *c)
{
	const struct node_comm *nc = c->nc ? c->nc : c->group->nc;
	const char *why = c->mesh ? mesh_talk_why(c->mesh) : "";

	if (!*why && c->unit && mesh_is_needed(c->unit))
		why = mesh_why(mesh_find(c->group, c->unit));
	return *why || !nc ? why : nc->why;
}

static void coll_status_fault(const struct coll *c, int status, struct fault *f)
{
	const struct member *m = c->members[0];
	const char *why = coll_why(c);

	op_device_fault(c->job, c->type->name, f);
	if (status == ENGINE_E_ABORTED && c->job->across.span && m->epoch != c->job->rec->epoch)
		fault_set(f, FAULT_ABORTED, NULL, "%s", m->ended.text); /* it was aborted with it */
	if (status == ENGINE_E_ABORTED)
		fault_set(f, FAULT_ABORTED, NULL, "%s: the communicator was aborted%s%s",
			  c->type->name, *why ? ": " : "", why);
	fault_errno(f, status, c->type->name);
}

/* The marker is in all queues, or never will be. */
static void coll_mark_members(struct coll *c)
{
	c->marking = false;
	for (uint32_t i = 0; i < c->n; i++)
		member_marked(c->members[i], c->parts[c->part_of[i]].ready);
}

/* Those who wait with their streams need not wait for us. */
static void coll_answer_streams(struct coll *c)
{
	for (uint32_t i = 0; i < c->n; i++) {
		const struct coll_part *p = &c->parts[c->part_of[i]];
		struct op *op = c->ops[i];

		if (!op || !op->stream)
			continue;
		op->result.queue = BACKEND_Q_MAIN;
		op->result.ready = p->ready;
		c->ops[i] = NULL;
		op_end(op);
	}
	node_wake(c->job->node); /* who waited to know when memory is free */
}

static void coll_on_marker_issued(struct backend_task *task, int status)
{
	struct coll_part *p = CONTAINER_OF(task, struct coll_part, queue.task);
	struct coll *c = p->coll;

	(void)status;
	p->ready = task->ready;
	CHECK(c->issued > 0);
	if (--c->issued)
		return;
	coll_mark_members(c);
	coll_answer_streams(c);
}

bool coll_promised(const struct coll *c)
{
	for (unsigned i = 0; i < c->n_parts; i++)
		if (c->parts[i].promised)
			return true;
	return false;
}

/* The inputs of a rank that has died cannot be trusted: its streams were released, so the
 * daemon may have read memory that the rank had not written yet. */
static void coll_check_promises(const struct coll *c, struct fault *f)
{
	const struct member *told = NULL;

	if (!c->type->reads_inputs)
		return;
	for (uint32_t i = 0; i < c->n; i++)
		if (c->members[i]->epoch != c->job->rec->epoch && *c->members[i]->ended.text)
			told = c->members[i];
	if (told && coll_promised(c))
		fault_set(f, FAULT_ABORTED, NULL, "%s", told->ended.text);
}

static void coll_on_marker_executed(struct backend_task *task, int status)
{
	struct coll *c = CONTAINER_OF(task, struct coll_part, queue.task)->coll;
	struct fault f = FAULT_NULL;

	MAGIC_CHECK(c, COLL_MAGIC);
	queue_task_done(&CONTAINER_OF(task, struct coll_part, queue.task)->queue);
	c->status = c->status ? c->status : status;
	CHECK(c->pending > 0);
	if (--c->pending)
		return;
	if (c->marking)
		coll_mark_members(c);
	if (c->status)
		coll_status_fault(c, c->status, &f);
	else
		coll_check_promises(c, &f);
	if ((c->between.between && c->breaks != c->between.between->breaks) ||
	    (c->mesh && !mesh_talk_holds(c->mesh)))
		coll_status_fault(c, ENGINE_E_ABORTED, &f);
	coll_finish(c, &f);
}

uint64_t coll_deadline(const struct coll *c)
{
	uint64_t least = UINT64_MAX;

	for (uint32_t i = 0; i < c->n; i++)
		if (c->ops[i] && c->ops[i]->deadline_us < least)
			least = c->ops[i]->deadline_us;
	return least;
}

static bool coll_has_queues(const struct coll *c)
{
	return backend_info(c->parts[0].device->backend)->order != BACKEND_ORDER_NONE;
}

/* The first on a part waits for the streams that brought its inputs. What follows stands
 * behind that, and is watched in its place: they need not have come when it is submitted. */
static void coll_submit_part(struct coll_part *p, uint64_t deadline_us)
{
	if (p->queue.number)
		queue_task_follow(&p->queue, p->device->backend);
	else
		queue_task_submit(&p->queue, p->device->backend, deadline_us);
}

static void coll_submit_markers(struct coll *c)
{
	uint64_t deadline = coll_deadline(c);

	c->status = 0;
	c->pending = c->issued = c->n_parts;
	c->marked = c->marking = true;
	for (uint32_t i = 0; i < c->n; i++)
		member_will_execute(c->members[i]);
	for (unsigned i = 0; i < c->n_parts; i++) {
		struct coll_part *p = &c->parts[i];

		p->queue.task = (struct backend_task){ .sync = true,
						       .issued = coll_on_marker_issued,
						       .done = coll_on_marker_executed };
		coll_submit_part(p, deadline);
	}
}

/* It failed after a part of it was submitted: its members need not wait for the rest, but
 * somebody has to see to it that the streams it waits for come. */
static void coll_fail_early(struct coll *c, const struct fault *fault)
{
	coll_submit_markers(c);
	coll_let_go(c);
	for (uint32_t i = 0; i < c->n; i++) {
		struct op *op = c->ops[i];

		c->ops[i] = NULL;
		op->fault = *fault;
		op_end(op);
	}
}

/* The other nodes may have done what has failed on this one: nobody goes on. */
static bool coll_fails_here(const struct coll *c)
{
	return c->fault->code && group_spans(c->group) && !c->everywhere &&
	       c->members[0]->epoch == c->job->rec->epoch;
}

/* All ops of the collective end, with c->fault or well. What was submitted is ordered by now, not
 * executed: memory goes back to pools of its queue. */
static void coll_end(struct coll *c)
{
	bool submitted = c->on_device && coll_has_queues(c), apart = coll_fails_here(c);
	struct job *job = c->job;
	struct fault why = FAULT_NULL;
	char node[JOB_ON_NODE_BYTES];

	if (apart)
		fault_set(&why, FAULT_ABORTED, NULL, "rank %u (pid %d)%s: %.400s",
			  c->members[0]->rank, member_pid(c->members[0]), job_on_node(job, node),
			  c->fault->text);

	job->running++; /* the next in line may be the last of a deleted job */
	coll_line_leave(c);
	coll_give_scratch(c);
	if (!c->fault->code && submitted)
		coll_submit_markers(c);
	else if (c->fault->code && submitted && coll_promised(c))
		coll_fail_early(c, c->fault);
	else
		coll_finish(c, c->fault);
	if (apart)
		job_epoch_end(job, &why);
	job_ran(job);
}

/* -------------------------------------------------------------------- ticks */

static enum res coll_tick(struct coll *c)
{
	if (c->makes)
		RES_TRY(coll_ready(c));
	c->makes = false;
	return c->type->coll_tick(c);
}

/* The only caller of ticks. What it waits for may come while it runs: then it runs again. */
void coll_go_on(struct coll *c)
{
	enum res r;

	MAGIC_CHECK(c, COLL_MAGIC);
	c->woken = true;
	if (c->ticking)
		return;
	c->ticking = true;
	do {
		c->woken = false;
		r = c->fault->code ? RES_FAILED
		    : c->status    ? coll_fail(c, c->status)
				   : coll_tick(c);
	} while (r == RES_WAIT && c->woken);
	c->ticking = false;
	CHECK((r == RES_FAILED) == (c->fault->code != FAULT_NONE));
	if (r != RES_WAIT)
		coll_end(c);
}

enum res coll_wait_for_node(struct coll *c)
{
	condition_wait(&c->job->node->changed, &c->waiter);
	return RES_WAIT;
}

enum res coll_fail(struct coll *c, int status)
{
	CHECK(!c->fault->code);
	coll_status_fault(c, status, c->fault);
	return RES_FAILED;
}

void coll_writes_unit(struct coll *c)
{
	CHECK(!c->writes_unit);
	c->writes_unit = true;
	c->unit->shard_writes++;
}

enum res coll_check_epoch(struct coll *c, bool torn_matters)
{
	const struct op *op = c->ops[0];

	/* no member can have joined again: its op of the old epoch still runs */
	if (op->m->epoch != c->job->rec->epoch)
		fault_set(c->fault, FAULT_ABORTED, NULL, "%s", op->m->ended.text);
	else if (torn_matters)
		(void)op_check_not_torn(op, c->fault);
	return c->fault->code ? RES_FAILED : RES_DONE;
}

/* ------------------------------------------------------------------- stages */

static void coll_stage_over(struct coll *c)
{
	if (!c->type->coll_arrived || !c->type->coll_arrived(c))
		coll_go_on(c);
}

static void coll_on_kernels(struct backend_task *task, int status)
{
	struct coll_part *p = CONTAINER_OF(task, struct coll_part, queue.task);
	struct coll *c = p->coll;

	MAGIC_CHECK(c, COLL_MAGIC);
	if (task->sync)
		queue_task_done(&p->queue); /* executed: those streams have come */
	c->status = c->status ? c->status : status;
	CHECK(c->pending > 0);
	if (--c->pending == 0)
		coll_stage_over(c);
}

static void coll_submit(struct coll *c, bool sync)
{
	uint64_t deadline = coll_deadline(c);

	CHECK(!c->pending);
	c->status = 0;
	c->on_device = true;
	c->pending = c->n_parts;
	for (unsigned i = 0; i < c->n_parts; i++) {
		struct coll_part *p = &c->parts[i];

		CHECK(p->n_launches <= p->room); /* also of those who fill p->launches themselves */
		p->queue.task = (struct backend_task){ .launches = p->launches,
						       .n_launches = p->n_launches,
						       .sync = sync,
						       .done = coll_on_kernels };
		coll_submit_part(p, deadline);
	}
}

void coll_talked(struct coll *c, int status)
{
	MAGIC_CHECK(c, COLL_MAGIC);
	c->status = status;
	coll_stage_over(c);
}

static void coll_on_comm(struct comm_op *op, int status)
{
	coll_talked(CONTAINER_OF(op, struct coll, comm_op), status);
}

/* What ends with the epoch is there as long as it is watched. */
static void coll_hold_comm(struct coll *c)
{
	if (!c->group->nc->spans || c->nc)
		return;
	c->nc = c->group->nc;
	c->nc->users++;
}

struct comm_op *coll_comm(struct coll *c)
{
	if (!coll_is_alone(c) && list_empty(&c->between.link)) {
		c->breaks = c->group->nc->breaks;
		coll_hold_comm(c);
		queue_task_watch(&c->between, c->group->nc, coll_deadline(c));
	}
	c->comm_op = (struct comm_op){ .done = coll_on_comm, .place = c->place };
	return &c->comm_op;
}

enum res coll_kernels(struct coll *c)
{
	coll_submit(c, false);
	return RES_WAIT;
}

enum res coll_kernels_sync(struct coll *c)
{
	coll_submit(c, true);
	return RES_WAIT;
}

struct comm *coll_between(const struct coll *c)
{
	CHECK(c->group->nc && c->group->nc->state == COMM_READY);
	return c->group->nc->comm[BACKEND_Q_MAIN];
}

struct launch *coll_launch(struct coll_part *p, enum launch_kind kind, uint64_t n)
{
	struct launch *launch = &p->launches[p->n_launches];

	CHECK(p->n_launches < p->room);
	p->n_launches++;
	*launch = (struct launch){ .kind = kind, .n = n };
	return launch;
}

static void coll_check_windows(const struct coll *c, unsigned k)
{
	struct region scratch[NODE_MAX_DEVICES];

	for (unsigned i = 0; i < c->n_parts; i++)
		scratch[i] = c->parts[i].scratch[k];
	window_check(c->group->nc, BACKEND_Q_MAIN, scratch);
}

uint32_t coll_size(const struct coll *c)
{
	return group_size(c->group);
}

unsigned coll_devices(const struct coll *c)
{
	return c->group->all_devices;
}

bool coll_is_alone(const struct coll *c)
{
	return coll_devices(c) == 1;
}

uint32_t coll_index(const struct coll *c, uint32_t rank)
{
	uint32_t index = 0;

	CHECK(group_index(c->group, rank, &index));
	return group_index_here(c->group, rank, &index) ? index : COLL_ELSEWHERE;
}

unsigned coll_device_of(const struct coll *c, uint32_t rank)
{
	uint32_t index = 0;

	CHECK(group_index(c->group, rank, &index));
	return group_device_number(c->group, index);
}

enum res coll_need_found(struct coll *c)
{
	bool there = true;

	for (unsigned d = 0; d < c->n_parts; d++) {
		struct coll_part *p = &c->parts[d];

		if (!p->found)
			p->found = calloc(coll_devices(c), sizeof(*p->found));
		there = there && p->found;
	}
	return there ? RES_DONE : coll_fail(c, -ENOMEM);
}

struct coll_part *coll_part(const struct coll *c, uint32_t index)
{
	CHECK(index < c->n);
	return &c->parts[c->part_of[index]];
}

uint32_t coll_divide_by(const struct coll *c)
{
	uint32_t active = coll_size(c) - c->n; /* those elsewhere have inputs: op/uneven.c */
	bool by_active = false;

	for (uint32_t i = 0; i < c->n; i++) {
		active += !c->ops[i]->surrogate;
		by_active = by_active || c->ops[i]->surrogate == OP_SURROGATE_BY_ACTIVE;
	}
	return by_active ? active : coll_size(c);
}

static bool coll_sets_can_talk(const struct coll *c)
{
	const struct mesh *m;

	if (c->mesh && !mesh_talk_holds(c->mesh))
		return false;
	if (!c->unit || !mesh_is_needed(c->unit))
		return true;
	m = mesh_find(c->group, c->unit);
	if (c->mesh && c->mesh->mesh == m)
		return true;
	return mesh_is_ready(m, MESH_SETS) && mesh_is_ready(m, MESH_LIKE);
}

enum res coll_can_talk(struct coll *c)
{
	if (c->group->nc && c->group->nc->state == COMM_READY && coll_sets_can_talk(c))
		return RES_DONE;
	return coll_fail(c, ENGINE_E_ABORTED);
}

enum res coll_ready_for(struct coll *c, const struct unit *u)
{
	enum res r = group_comms(c->group, c->fault), of_sets = RES_DONE;
	struct mesh *m;

	if (r != RES_FAILED && u && mesh_is_needed(u)) /* all are made at once */
		of_sets = mesh_comms(c->group, u, true, &m, c->fault);
	if (r == RES_FAILED || of_sets == RES_FAILED)
		return RES_FAILED;
	return r == RES_WAIT || of_sets == RES_WAIT ? coll_wait_for_node(c) : RES_DONE;
}

enum res coll_ready(struct coll *c)
{
	return coll_ready_for(c, c->unit);
}

enum res coll_need_launches(struct coll *c, size_t n)
{
	bool there = true;

	CHECK(!c->pending); /* a device reads them */
	for (unsigned i = 0; i < c->n_parts; i++) {
		struct coll_part *p = &c->parts[i];

		free(p->launches);
		p->launches = calloc(n ? n : 1, sizeof(*p->launches));
		p->n_launches = 0;
		p->room = (unsigned)n;
		there = there && p->launches;
	}
	return there ? RES_DONE : coll_fail(c, -ENOMEM);
}

enum res coll_need_scratch(struct coll *c, unsigned k, uint64_t bytes)
{
	bool later = false;
	int r = 0;

	for (unsigned i = 0; r == 0 && i < c->n_parts; i++) {
		struct coll_part *p = &c->parts[i];
		struct pool *pool = &c->job->mem.scratch[p->device->index];

		if (p->scratch[k].slab)
			continue;
		r = job_take(c->job, pool, bytes, &p->scratch[k]);
		r = slab_note_later(r, &later);
	}
	if (r) {
		op_memory_fault(c->job, r, bytes, "sums between devices", c->fault);
		return RES_FAILED;
	}
	if (later)
		return coll_wait_for_node(c);
	coll_check_windows(c, k);
	return RES_DONE;
}
