/*
 * The engine of a single device: every communicator has one member, so a
 * collective is at most a copy. Operations of a communicator run one after the
 * other, as the contract says: the next may read what the last one wrote.
 */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/list.h"
#include "engine/engine_impl.h"

struct local {
	struct engine engine; /* first */
	struct loopq *loopq;
};

/* One queued operation. */
struct local_op {
	struct list link; /* local_comm.queue */
	struct comm_op *op;
	struct launch copy;    /* n == 0: nothing to copy */
	struct comm_fold fold; /* of a sum; fn may be NULL */
	void *values;          /* of the sum */
	uint64_t count;
};

struct local_comm {
	struct comm comm; /* first */
	struct work ready_work;

	struct list queue;      /* of struct local_op; the first is the one at work */
	struct comm_op *failed; /* no memory to queue these; linked by impl */
	struct work turn;       /* posted: look at the queue */
	bool posted;            /* @turn */
	bool copying;           /* @task is with the backend */
	struct backend_task task;
};

static struct local *engine_local_to_local(struct engine *e)
{
	return CONTAINER_OF(e, struct local, engine);
}

static struct local_comm *engine_local_to_comm(struct comm *c)
{
	return CONTAINER_OF(c, struct local_comm, comm);
}

static void engine_local_on_turn(struct work *work);

static void engine_local_post_turn(struct local_comm *c)
{
	if (c->posted || c->copying || (list_empty(&c->queue) && !c->failed))
		return;
	c->posted = true;
	loopq_post(engine_local_to_local(c->comm.engine)->loopq, &c->turn, engine_local_on_turn);
}

/* End the first operation; must be the last action, since its callback may free @c. */
static void engine_local_complete_first(struct local_comm *c, int status)
{
	struct local_op *first = list_first(&c->queue, struct local_op, link);
	struct comm_op *op = first->op;

	list_unlink(&first->link);
	free(first);
	engine_local_post_turn(c);
	comm_complete(&c->comm, op, c->comm.aborted ? ENGINE_E_ABORTED : status);
}

static void engine_local_on_copied(struct backend_task *task, int status)
{
	struct local_comm *c = CONTAINER_OF(task, struct local_comm, task);

	c->copying = false;
	engine_local_complete_first(c, status);
}

static void engine_local_complete_failed(struct local_comm *c)
{
	struct comm_op *op = c->failed;

	c->failed = op->impl;
	op->impl = NULL;
	engine_local_post_turn(c);
	comm_complete(&c->comm, op, -ENOMEM);
}

static void engine_local_on_turn(struct work *work)
{
	struct local_comm *c = CONTAINER_OF(work, struct local_comm, turn);
	struct local_op *first;

	c->posted = false;
	if (c->failed) {
		engine_local_complete_failed(c);
		return;
	}
	first = list_first(&c->queue, struct local_op, link);
	if (!c->comm.aborted && first->fold.fn && first->count > 0)
		first->fold.fn(first->fold.userdata, first->values, 0, first->count, true);
	if (c->comm.aborted || first->copy.n == 0) {
		engine_local_complete_first(c, 0);
		return;
	}
	c->copying = true;
	c->task = (struct backend_task){ .launches = &first->copy,
					 .n_launches = 1,
					 .queue = c->comm.queue,
					 .done = engine_local_on_copied };
	backend_submit(c->comm.devices[0], &c->task);
}

static void engine_local_queue(struct local_comm *c, const struct local_op *values)
{
	struct local_op *lo = malloc(sizeof(*lo));

	if (!lo) {
		values->op->impl = c->failed;
		c->failed = values->op;
		engine_local_post_turn(c);
		return;
	}
	*lo = *values;
	list_init(&lo->link);
	list_append(&c->queue, &lo->link);
	engine_local_post_turn(c);
}

/* Queue @op with a copy of @bytes; none when both addresses are the same. */
static void engine_local_queue_op(struct local_comm *c, struct comm_op *op, const void *src,
				  void *dst, uint64_t bytes)
{
	engine_local_queue(c, &(struct local_op){ .op = op,
						  .copy = { .kind = LAUNCH_COPY,
							    .n = src == dst ? 0 : bytes,
							    .copy = { .dst = dst, .src = src } } });
}

static void engine_local_all_gather(struct comm *c, struct comm_op *op, const void *const *send,
				    void *const *recv, uint64_t count, enum dtype dtype)
{
	engine_local_queue_op(engine_local_to_comm(c), op, send[0], recv[0],
			      count * dtype_size(dtype));
}

/* The sum over one member is what it sent. */
static void engine_local_reduce_scatter(struct comm *c, struct comm_op *op, const void *const *send,
					void *const *recv, uint64_t count, enum dtype dtype)
{
	engine_local_queue_op(engine_local_to_comm(c), op, send[0], recv[0],
			      count * dtype_size(dtype));
}

/* In place: the average, sum, maximum and minimum of one value are that value. */
static void engine_local_all_reduce(struct comm *c, struct comm_op *op, void *const *data,
				    uint64_t count, enum dtype dtype, enum reduce_op reduce)
{
	(void)count;
	(void)dtype;
	(void)reduce;
	engine_local_queue_op(engine_local_to_comm(c), op, data[0], data[0], 0);
}

static void engine_local_broadcast(struct comm *c, struct comm_op *op, void *const *data,
				   uint64_t bytes, unsigned root)
{
	(void)bytes;
	(void)root;
	engine_local_queue_op(engine_local_to_comm(c), op, data[0], data[0], 0);
}

/* The values of the only member are the sum; on the loop. */
static void engine_local_sum(struct comm *c, struct comm_op *op, const struct comm_sum *sum,
			     const struct comm_fold *fold, void *const *recv)
{
	engine_local_queue(engine_local_to_comm(c), &(struct local_op){ .op = op,
									.fold = fold[0],
									.values = recv[0],
									.count = sum->count });
}

/* Queued operations end in the next turns; a copy in progress first runs to its end, since until
 * then the backend writes to its target. */
static void engine_local_abort(struct comm *c)
{
	engine_local_post_turn(engine_local_to_comm(c));
}

static void engine_local_on_ready(struct work *work)
{
	struct local_comm *c = CONTAINER_OF(work, struct local_comm, ready_work);

	c->comm.ready(c->comm.userdata, &c->comm, 0);
}

static int engine_local_comm_new(struct engine *e, const struct comm_options *options)
{
	struct local_comm *c;
	int r;

	if (options->n_devices != 1)
		return -EINVAL; /* several devices need an engine that connects them */
	c = calloc(1, sizeof(*c));
	if (!c)
		return -ENOMEM;
	r = comm_init(&c->comm, e, options, 1, 0);
	if (r) {
		free(c);
		return r;
	}
	list_init(&c->queue);
	loopq_post(engine_local_to_local(e)->loopq, &c->ready_work, engine_local_on_ready);
	return 0;
}

static void engine_local_comm_free(struct comm *comm)
{
	struct local_comm *c = engine_local_to_comm(comm);

	CHECK(list_empty(&c->queue) && !c->failed && !c->posted && !c->copying);
	free(c);
}

static void engine_local_close(struct engine *e)
{
	free(engine_local_to_local(e));
}

static const struct engine_ops local_ops = {
	.name = "local",
	.comm_new = engine_local_comm_new,
	.comm_free = engine_local_comm_free,
	.abort = engine_local_abort,
	.all_gather = engine_local_all_gather,
	.reduce_scatter = engine_local_reduce_scatter,
	.all_reduce = engine_local_all_reduce,
	.broadcast = engine_local_broadcast,
	.close = engine_local_close,
	.sum = engine_local_sum,
};

int engine_local_new(struct loopq *loopq, struct engine **ret)
{
	struct local *l = calloc(1, sizeof(*l));

	if (!l)
		return -ENOMEM;
	engine_init(&l->engine, &local_ops);
	l->loopq = loopq;
	*ret = &l->engine;
	return 0;
}
