/*
 * Gather: the full parameters of a unit. With equal storage and compute dtype a
 * reference to the shards, which lie side by side; else one cast into a copy that all
 * ranks of the node share. Waits for no other rank.
 */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "op/op_impl.h"

/* A cast under way; the op that began it waits like the others. */
struct cast {
	struct backend_task task;
	struct comm_op comm_op;
	struct kop kop;
	struct job *job;
	struct unit *unit;
	uint64_t version; /* of the parameters that are read */
};

static int decode(struct op *op, const ProtobufCMessage *msg, struct fault *f)
{
	const Shardd__V1__GatherRequest *r = (const Shardd__V1__GatherRequest *)msg;

	op->touches = TOUCH_PARAMS;
	return op_take_unit(op, r->unit, f);
}

static int check(struct op *op, struct fault *f)
{
	const struct member_unit *mu = member_unit_find(op->m, op->unit);

	if (op_check_not_torn(op, f) || op_check_in_group(op, f) || op_check_initialised(op, f))
		return f->code;
	if (mu && mu->gathers == UINT32_MAX)
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "unit '%.100s' is gathered %u times by this rank: release it",
				 op->unit->rec->name, mu->gathers);
	return 0;
}

/* Hand @place out and count it. */
static void give(struct op *op, struct region place, bool copied)
{
	struct member_unit *mu = member_unit(op->m, op->unit);

	if (op->state != OP_RUN)
		op_begin_run(op);
	if (!mu) {
		fault_errno(&op->fault, -ENOMEM, "counting a gather");
	} else if (op->m->state != MEMBER_JOINED) {
		fault_set(&op->fault, FAULT_ABORTED, NULL, "%s", op->m->ended.text);
	} else {
		member_gathered(op->m, op->unit, mu);
		op->result.place = place;
		op->result.references = mu->gathers;
		op->result.copied = copied;
	}
	op_end(op);
}

static struct region full_place(const struct unit *u)
{
	return (struct region){ u->full.slab, u->full.offset, unit_full_bytes(u) };
}

static void resume(struct parked *p);
static void begin_cast(struct op *op);

/* ------------------------------------------------------- copies and memory */

uint64_t full_evict(struct job *job, uint64_t want)
{
	struct unit *u, *tmp;

	list_for_each (u, tmp, &job->idle_full, idle) {
		list_unlink(&u->idle);
		pool_give(&job->full, &u->full);
		u->full_version = 0;
	}
	return pool_trim(&job->full, want);
}

void full_invalidate(struct job *job, struct unit *u)
{
	if (!u->full.slab || u->casting || u->gathered_ranks)
		return;
	list_unlink(&u->idle);
	pool_give(&job->full, &u->full);
	u->full_version = 0;
}

/* Room for the copy, if need be in place of copies that nobody uses. */
static int take_full(struct job *job, struct unit *u)
{
	uint64_t bytes = unit_full_room(u);
	int r;

	if (u->full.slab)
		return 0;
	r = pool_take(&job->full, bytes, &u->full);
	if (r == 0)
		return 0;
	full_evict(job, UINT64_MAX);
	return pool_take(&job->full, bytes, &u->full);
}

/* -------------------------------------------------------------- the cast */

/* End all that wait for the cast. The first one made it. */
static void answer_waiting(struct unit *u, int status)
{
	struct list now = LIST_INIT(now);
	bool first = true;

	list_take_all(&now, &u->waiting);
	while (!list_empty(&now)) {
		struct op *op =
			CONTAINER_OF(list_first(&now, struct parked, link), struct op, parked);

		list_unlink(&op->parked.link);
		if (status) {
			fault_errno(&op->fault, status < 0 ? status : -ECANCELED, "casting a unit");
			op_end(op);
		} else {
			give(op, full_place(u), first);
		}
		first = false;
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

static void cast_end(struct cast *cast, int status)
{
	struct job *job = cast->job;
	struct unit *u = cast->unit;

	u->casting = false;
	u->full_version = status ? 0 : cast->version;
	free(cast);
	job->running--;
	job->casts--;
	answer_waiting(u, status);
	if (!u->gathered_ranks && u->full.slab && list_empty(&u->idle) && !u->casting)
		list_append(&job->idle_full, &u->idle);
	next_in_queue(job);
	job_settle(job);
}

static void on_gathered(struct comm_op *op, int status)
{
	cast_end(CONTAINER_OF(op, struct cast, comm_op), status);
}

static void on_cast(struct backend_task *task, int status)
{
	struct cast *cast = CONTAINER_OF(task, struct cast, task);
	struct comm *comm = cast->job->node->comm;
	enum dtype dtype = (enum dtype)cast->unit->rec->compute_dtype;
	char *full = region_addr(&cast->unit->full);
	uint64_t count = cast->unit->layout.padded / comm_size(comm); /* of each device */

	if (status) {
		cast_end(cast, status);
		return;
	}
	cast->comm_op.done = on_gathered;
	comm_all_gather(comm, &cast->comm_op, full + comm_member(comm) * count * dtype_size(dtype),
			full, count, dtype);
}

static void submit_cast(struct cast *cast)
{
	struct unit *u = cast->unit;

	cast->kop = (struct kop){ .kind = KOP_CAST, .n = u->layout.elements };
	cast->kop.cast = (struct k_cast){ .dst = region_addr(&u->full),
					  .src = region_addr(&u->params),
					  .dst_dtype = (enum dtype)u->rec->compute_dtype,
					  .src_dtype = (enum dtype)u->rec->storage_dtype };
	cast->task = (struct backend_task){ .kops = &cast->kop, .n_kops = 1, .done = on_cast };
	backend_submit(cast->job->node->backend, &cast->task);
}

static void refuse(struct op *op, int error)
{
	op_memory_fault(op->m->job, error, unit_full_room(op->unit), "a gathered unit", &op->fault);
	op_end(op);
}

static void begin_cast(struct op *op)
{
	struct job *job = op->m->job;
	struct unit *u = op->unit;
	struct cast *cast;
	int r;

	list_unlink(&u->idle);
	r = take_full(job, u);
	cast = r ? NULL : calloc(1, sizeof(*cast));
	if (!cast) {
		if (!u->gathered_ranks)
			pool_give(&job->full, &u->full);
		refuse(op, r ? r : -ENOMEM);
		return;
	}
	cast->job = job;
	cast->unit = u;
	cast->version = u->version;
	u->casting = true;
	job->casts++;
	job->running++;
	op_begin_run(op);
	list_append(&u->waiting, &op->parked.link);
	submit_cast(cast);
}

/* ------------------------------------------------------------------ the op */

static void start(struct op *op)
{
	struct job *job = op->m->job;
	struct unit *u = op->unit;
	uint32_t most = job->node->limits.max_inflight_gathers;

	op->state = OP_PARKED;
	if (!apply_ensure(job, &op->parked, resume))
		return;
	if (op_check_not_torn(op, &op->fault)) /* by the step that was applied meanwhile */
		op_end(op);
	else if (unit_is_direct(u))
		give(op, unit_direct_region(u), false);
	else if (u->casting)
		op_park(op, &u->waiting, resume);
	else if (u->full.slab && u->full_version == u->version)
		give(op, full_place(u), false);
	else if (most && job->casts >= most)
		op_park(op, &job->cast_queue, resume);
	else
		begin_cast(op);
}

static void resume(struct parked *p)
{
	start(CONTAINER_OF(p, struct op, parked));
}

static void encode(const struct op *op, op_reply_cb send, void *ctx)
{
	Shardd__V1__GatherReply reply = SHARDD__V1__GATHER_REPLY__INIT;
	Shardd__V1__Placement place;

	op_place(op, &place);
	reply.place = &place;
	reply.references = op->result.references;
	reply.copied = op->result.copied;
	op_send(op, &reply.base, &reply.info, send, ctx);
}

const struct op_type op_gather = {
	.name = "Gather",
	.request = &shardd__v1__gather_request__descriptor,
	.decode = decode,
	.check = check,
	.start = start,
	.encode = encode,
};
