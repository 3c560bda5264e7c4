/*
 * External optimizers (BY_TRAINER): NextShard hands each rank a copy of its share of parameters and
 * gradient (external.h), ShardDone takes the parameters back.
 *
 * Slabs of shards are all ranks' and a page may hold the shards of several, so a rank gets
 * its share in a buffer of its own, which it alone can write to: it cannot touch another's, and
 * one that dies in the middle of its step has changed nothing.
 *
 *   Reduce begins --> COMING --NextShard, when it is over--> GOING --> OUT --ShardDone--> BACK --> GIVEN_BACK
 *   DDP's last bucket of the unit ends --^
 *
 * for each rank and unit; units are handed out in the order of their Reduces. When all ranks
 * have given theirs back the unit's parameters are those of the next step: until then nobody
 * can gather it. Ranks on several nodes: each node hands out and takes back the shards of its own, and
 * tells the others when it has them all (job_ops.give). The unit is stepped on all nodes when all have:
 * an APPLY in the job's order, so that whoever gathers it then finds the shards of all nodes new, and the
 * copies of all nodes are made equal in one order. ShardDone waits until nobody has it gathered. The first one of a pass
 * counts as an uncommitted step, as with optimizers in backward.
 */
#include "step/external.h"

#include <errno.h>
#include <stdlib.h>

#include "copies/full.h"
#include "core/check.h"
#include "job/job_journal.h"
#include "op/device_note.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_util.h"
#include "op/queue_task.h"
#include "step/apply.h"
#include "step/gradient.h"
#include "unit/optim.h"
#include "work/coll.h"
#include "shardd.pb-c.h"

struct external_copy {
	struct queue_task queue;
	struct op *op;
	struct unit *unit;
	struct region place; /* the trainer's copy, held while it is copied */
	struct external_share share;
	struct launch *launches; /* owned; room for two a run */
};

static uint32_t external_index_of(const struct op *op, const struct unit *u)
{
	uint32_t index = 0;

	CHECK(group_index(op->m->job->groups[u->rec->group], op->m->rank, &index));
	return index;
}

static uint64_t external_elements_of(const struct op *op, struct unit *u)
{
	return external_share_elements(op->m->job, u, external_index_of(op, u));
}

static uint64_t external_array_bytes(uint64_t elements, enum dtype dtype)
{
	uint64_t bytes = (elements ? elements : 1) * dtype_size(dtype);

	return (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
}

/* Parameters, as they are stored, and the gradient behind them. */
static uint64_t external_params_bytes(const struct unit *u, uint64_t elements)
{
	return external_array_bytes(elements, unit_state_dtype(u->rec, 0));
}

static uint64_t external_bytes(const struct unit *u, uint64_t elements)
{
	return external_params_bytes(u, elements) + external_array_bytes(elements, DTYPE_FP32);
}

/* -------------------------------------------------------------------- copies */

static void external_copy_free(struct external_copy *copy)
{
	if (!copy)
		return;
	pool_give(&copy->op->m->pool, &copy->place);
	queue_task_deinit(&copy->queue);
	external_share_deinit(&copy->share);
	free(copy->launches);
	free(copy);
}

/* Return: NULL without memory. */
static struct external_copy *external_copy_new(struct op *op, struct unit *u)
{
	struct external_copy *copy = calloc(1, sizeof(*copy));

	if (!copy)
		return NULL;
	copy->op = op;
	copy->unit = u;
	queue_task_init(&copy->queue, op->m->job);
	copy->queue.note =
		(struct device_note){ .name = op->type->name, .job = op->m->job, .unit = u };
	copy->launches = calloc(2 * u->rec->n_tensors, sizeof(*copy->launches));
	if (!copy->launches ||
	    external_share_init(&copy->share, op->m->job, u, external_index_of(op, u)) < 0) {
		external_copy_free(copy);
		return NULL;
	}
	copy->queue.task = (struct backend_task){ .launches = copy->launches, .sync = true };
	return copy;
}

/* All elements of the share between @array of the part, of that type, and @place; pieces that
 * follow each other on both sides in one. */
static void external_copy_share(struct external_copy *copy, char *place, const struct region *array,
				enum dtype dtype, bool back)
{
	const struct external_share *s = &copy->share;
	size_t size = dtype_size(dtype);

	for (unsigned i = 0, next; i < s->n_runs; i = next) {
		const struct unit_run *run = &s->runs[i];
		char *there = (char *)region_addr(array) + run->at * size;
		char *here = place + run->shard * size;
		struct launch *launch = &copy->launches[copy->queue.task.n_launches++];
		uint64_t n = run->n;

		CHECK(copy->queue.task.n_launches <= 2 * copy->unit->rec->n_tensors);
		for (next = i + 1; next < s->n_runs && s->runs[next].at == run->at + n &&
				   s->runs[next].shard == run->shard + n;
		     next++)
			n += s->runs[next].n;
		*launch = (struct launch){ .kind = LAUNCH_COPY, .n = n * size };
		launch->copy = (struct k_copy){ back ? there : here, back ? here : there };
	}
}

/* ------------------------------------------------------------------ the Reduce */

/* Those on other nodes are one. */
static uint32_t external_left_at_first(const struct coll *c)
{
	return c->n + group_spans(c->group);
}

static void external_promise(struct coll *c)
{
	CHECK(!c->unit->shards_from && !c->unit->shards_left);
	unit_shards_move(c->unit, UNIT_SHARDS_PROMISED);
	c->unit->shards_from = c->ops[0]->entry.number;
	c->unit->shards_left = external_left_at_first(c);
	for (uint32_t i = 0; i < c->n; i++)
		member_shard_move(member_unit_find(c->members[i], c->unit), SHARD_COMING);
}

void external_begin(struct coll *c)
{
	if (!gradient_of(c)->begun)
		external_promise(c);
	gradient_of(c)->begun = true;
}

/* A unit that is reduced in buckets is coming when the last of them is over: before, nobody
 * knows which one that will be. Until then NextShard waits as it does before any Reduce. */
void external_ready(struct coll *c)
{
	if (!gradient_of(c)->begun)
		external_promise(c);
	CHECK(c->unit->shards_left == external_left_at_first(c));
	unit_shards_move(c->unit, UNIT_SHARDS_READY);
	condition_signal(&c->group->shard_ready);
}

void external_failed(struct coll *c)
{
	if (!gradient_of(c)->begun || c->unit->shards == UNIT_SHARDS_READY ||
	    c->unit->shards == UNIT_SHARDS_MIXED)
		return;
	unit_shards_drop(c->unit);
	for (uint32_t i = 0; i < c->n; i++)
		member_shard_drop(member_unit_find(c->members[i], c->unit));
}

/* ------------------------------------------------------------------- NextShard */

static int external_next_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__NextShardRequest *r = (const Shardd__V1__NextShardRequest *)msg;

	return op_take_group(op, r->group, f);
}

static int external_next_check(struct op *op, struct fault *f)
{
	return op_check_not_torn(op, f);
}

/* The first in the order of the Reduces that this rank has not got. */
static struct unit *external_first_coming(const struct op *op)
{
	const struct job *job = op->m->job;
	struct unit *first = NULL;

	for (uint32_t i = 0; i < job->n_units; i++) {
		struct unit *u = job->units[i];
		const struct member_unit *mu = member_unit_find(op->m, u);

		if (u->rec->group == op->group->id && u->shards_from && mu &&
		    mu->shard_state == SHARD_COMING &&
		    (!first || u->shards_from < first->shards_from))
			first = u;
	}
	return first;
}

static void external_on_handed_out(struct backend_task *task, int status)
{
	struct external_copy *copy = CONTAINER_OF(task, struct external_copy, queue.task);
	struct op *op = copy->op;
	struct job *job = op->m->job;
	struct member_unit *mu = member_unit_find(op->m, copy->unit);

	if (!op_told_of_end(op)) {
		CHECK(!mu->shard.slab);
		member_shard_move(mu, status ? SHARD_COMING : SHARD_OUT);
		if (status)
			fault_errno(&op->fault, status, "handing out a shard");
		else
			mu->shard = region_steal(&copy->place);
	}
	external_copy_free(copy);
	op_end(op);
	job_ran(job);
}

static void external_hand_out(struct op *op, struct unit *u, struct external_copy *copy)
{
	const struct external_share *s = &copy->share;
	uint64_t params = external_params_bytes(u, s->elements);
	char *place = region_addr(&copy->place);
	struct member_unit *mu = member_unit_find(op->m, u);

	CHECK(copy->place.bytes >= external_bytes(u, s->elements));
	CHECK(s->part->grads.slab && s->part->device == op->m->device);
	member_shard_move(mu, SHARD_GOING);
	member_note_held(op->m, mu);
	op_begin_run(op);
	*external_outcome(op) = (struct external_outcome){ .unit = u,
							   .elements = s->elements,
							   .gradient_offset = params };
	op->result.place = copy->place;
	op->result.place.bytes = external_bytes(u, s->elements);
	op->result.writable = true;
	external_copy_share(copy, place, &s->part->params, unit_state_dtype(u->rec, 0), false);
	external_copy_share(copy, place + params, &s->part->grads, DTYPE_FP32, false);
	copy->queue.task.done = external_on_handed_out;
	op->m->job->running++;
	queue_task_submit(&copy->queue, op->m->device->backend, op->deadline_us);
}

static enum res external_next_start(struct op *op)
{
	struct unit *u = external_first_coming(op);
	struct region place = REGION_NULL;
	struct external_copy *copy;
	uint64_t bytes;

	if (!u || u->shards == UNIT_SHARDS_PROMISED)
		return op_wait(op, &op->group->shard_ready);
	bytes = external_bytes(u, external_elements_of(op, u));
	RES_TRY(op_need_memory(op, bytes, "a shard for the trainer", &place));
	copy = external_copy_new(op, u);
	if (copy) {
		copy->place = region_steal(&place);
		op->owned = external_pieces_new(&copy->share);
	}
	if (copy && op->owned) {
		external_hand_out(op, u, copy);
		return RES_WAIT;
	}
	external_copy_free(copy);
	pool_give(&op->m->pool, &place);
	op_memory_fault(op->m->job, -ENOMEM, bytes, "a shard for the trainer", &op->fault);
	return RES_FAILED;
}

static void external_next_encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__NextShardResponse reply = SHARDD__V1__NEXT_SHARD_RESPONSE__INIT;
	const struct external_pieces *pieces = op->owned;
	Shardd__V1__Placement place;
	uint8_t handle[BACKEND_IPC_BYTES];

	op_place(op, &place, handle);
	reply.place = &place;
	reply.pieces = pieces->pointers;
	reply.n_pieces = pieces->n;
	reply.unit = external_outcome(op)->unit->id;
	reply.elements = external_outcome(op)->elements;
	reply.gradient_offset = external_outcome(op)->gradient_offset;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

/* Both have no move: they come while other units are still in backward. Those of their own
 * unit are over with its last Reduce, which is what NextShard waits for. */
const struct op_type op_next_shard = {
	.name = "NextShard",
	.request = &shardd__v1__next_shard_request__descriptor,
	.decode = external_next_decode,
	.check = external_next_check,
	.tick = external_next_start,
	.encode = external_next_encode,
};

/* ------------------------------------------------------------------- ShardDone */

static int external_done_decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__ShardDoneRequest *r = (const Shardd__V1__ShardDoneRequest *)msg;

	op->touches = TOUCH_PARAMS | TOUCH_GRADS;
	return op_take_unit(op, r->unit, f);
}

static int external_done_check(struct op *op, struct fault *f)
{
	static const char *const why[] = {
		[SHARD_NONE] = "its last Reduce has not come",
		[SHARD_COMING] = "it has not been handed out by NextShard",
		[SHARD_GOING] = "NextShard has not been answered",
		[SHARD_OUT] = "",
		[SHARD_BACK] = "it is being given back already",
		[SHARD_GIVEN_BACK] = "it has been given back already",
	};
	const struct member_unit *mu = member_unit_find(op->m, op->unit);
	enum shard_state state = mu ? mu->shard_state : SHARD_NONE;

	if (op_check_not_torn(op, f) || op_check_in_group(op, f))
		return f->code;
	if (op->unit->rec->optimizer->when != OPTIM_BY_TRAINER)
		return fault_set(f, FAULT_STATE, NULL,
				 "the optimizer of unit '%.100s' is not BY_TRAINER",
				 op->unit->rec->name);
	if (state != SHARD_OUT)
		return fault_set(f, FAULT_STATE, NULL,
				 "this rank's shard of unit '%.100s' cannot be given back: %s",
				 op->unit->rec->name, why[state]);
	if (mu->gathers)
		return fault_set(f, FAULT_STATE, NULL,
				 "unit '%.100s' is gathered by this rank: release it before its "
				 "shard is given back",
				 op->unit->rec->name);
	return 0;
}

/* All shards are new, in all copies: the unit is stepped. */
static void external_unit_failed(struct job *job, struct unit *u)
{
	if (!group_spans(job->groups[u->rec->group])) {
		apply_failed(job);
		return;
	}
	CHECK(!u->shards_from); /* its epoch has ended, by this or before: what follows is as there */
	if (job->rec->rollback)
		return;
	u->rec->initialised = false; /* no copy is more correct than another */
	job_journal_mark_unit(job, u);
	job->readers.changes++;
}

static void external_unit_done(struct job *job, struct unit *u, int status)
{
	if (status)
		external_unit_failed(job, u);
	if (u->shards_from) /* else: an epoch ended while copies were made equal */
		unit_step_move(u, UNIT_STEP_STEPPED);
	u->has_gradient = false;
	u->version++;
	unit_stepped(u);
	job_journal_mark_steps(job, u);
	full_invalidate(job, u);
	job_give_grads(job, u);
	condition_signal(&u->step_done);
}

static void external_all_given(struct job *job, struct unit *u)
{
	if (external_has_copies(u))
		external_copies(job, u, external_unit_done);
	else
		external_unit_done(job, u, 0);
}

bool external_start(struct job *job, struct unit *u, uint64_t turn)
{
	if (u->shards_left != 1 || u->turns.given != turn)
		return false;
	u->shards_left = 0;
	external_all_given(job, u);
	return true;
}

/* One rank less has its shard of @u. */
static void external_given(struct job *job, struct unit *u)
{
	bool spans = group_spans(job->groups[u->rec->group]);

	CHECK(u->shards_left > spans);
	u->shards_left--;
	if (spans && u->shards_left == 1)
		job->jobs->ops.give(job, u, ++u->turns.given);
	else if (!u->shards_left)
		external_all_given(job, u);
}

static void external_on_given_back(struct backend_task *task, int status)
{
	struct external_copy *copy = CONTAINER_OF(task, struct external_copy, queue.task);
	struct op *op = copy->op;
	struct job *job = op->m->job;
	struct unit *u = copy->unit;
	struct member_unit *mu = member_unit_find(op->m, u);

	external_copy_free(copy);
	job_change_end(job);
	if (status) {
		apply_failed(job);
		fault_errno(&op->fault, status, "taking a shard back");
	}
	if (!op_told_of_end(op)) {
		member_shard_move(mu, SHARD_GIVEN_BACK);
		external_given(job, u);
	}
	op_end(op);
	job_ran(job);
}

/* After the streams that wrote the shard, and those that read the parameters themselves. */
static int external_take_waits(struct external_copy *copy, const struct op *op)
{
	const struct reads *reads = &unit_part_on(op->unit, op->m->device)->reads;
	int r = queue_task_wait(&copy->queue, op->after, op->n_after);

	if (r == 0 && unit_is_direct(op->unit))
		r = queue_task_wait(&copy->queue, reads->waits, reads->n);
	return r;
}

static enum res external_done_start(struct op *op)
{
	struct unit *u = op->unit;
	struct member_unit *mu = member_unit_find(op->m, u);
	struct external_copy *copy;

	if (unit_is_read(u))
		return op_wait(op, &u->step_done);
	op_state_move(op, OP_BLOCKED);
	RES_TRY(readers_let(op->m->job, JOB_CHANGE_EARLY, &op->waiter));
	CHECK(mu->shard_state == SHARD_OUT && mu->shard.slab); /* its session's ops wait */
	copy = external_copy_new(op, u);
	op_begin_run(op);
	if (!copy || external_take_waits(copy, op) < 0) {
		external_copy_free(copy);
		fault_errno(&op->fault, -ENOMEM, "taking a shard back");
		return RES_FAILED;
	}
	member_shard_move(mu, SHARD_BACK);
	copy->place = region_steal(&mu->shard);
	apply_mark(op->m->job);
	job_change_begin(op->m->job);
	if (external_has_copies(u) && u->shards == UNIT_SHARDS_READY)
		unit_shards_move(u, UNIT_SHARDS_MIXED);
	external_copy_share(copy, region_addr(&copy->place), &copy->share.part->params,
			    unit_state_dtype(u->rec, 0), true);
	copy->queue.task.done = external_on_given_back;
	op->m->job->running++;
	queue_task_submit(&copy->queue, op->m->device->backend, op->deadline_us);
	return RES_WAIT;
}

static bool external_done_waits_for_readers(const struct op *op)
{
	return op->state == OP_BLOCKED;
}

const struct op_type op_shard_done = {
	.name = "ShardDone",
	.request = &shardd__v1__shard_done_request__descriptor,
	.decode = external_done_decode,
	.check = external_done_check,
	.tick = external_done_start,
	.reply = &shardd__v1__shard_done_response__descriptor,
	.waits_for_readers = external_done_waits_for_readers,
};
