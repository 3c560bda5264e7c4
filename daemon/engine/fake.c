/*
 * An engine inside one process: all members are local, on memory that the CPU reads,
 * and the reference kernels do the work when the operation completes, in member order.
 * This defines the result of a collective. Operations fail on demand and can be held back.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/list.h"
#include "engine/engine_impl.h"

struct fake_engine {
	struct engine engine; /* first */
	struct loopq *loopq;
	struct list ready; /* of struct fake_op; complete in the next turns */
	struct list held;  /* wait for engine_fake_hold(false) */
	struct work turn;  /* posted while @ready is not empty */
	bool posted;
	bool hold;
	unsigned calls;
	unsigned fail_in; /* the how-manieth operation from now on fails; 0: none */
	int fail_status;
};

struct fake_comm {
	struct comm comm; /* first */
	struct work ready_work;
};

struct fake_op;
typedef void (*fake_fn)(const struct fake_op *fo);

/* One started operation. */
struct fake_op {
	struct list link;
	struct comm *comm;
	struct comm_op *op;
	fake_fn execute;
	int status;
	uint64_t count;
	enum dtype dtype; /* DTYPE_NONE: bytes */
	enum reduce_op reduce;
	unsigned root;
	struct comm_sum sum;
	struct comm_fold *fold; /* of a sum, one per member; owned */
	const char **send;      /* one per member, behind this struct */
	char **recv;            /* likewise */
};

static struct fake_engine *engine_fake_of(struct engine *e)
{
	return CONTAINER_OF(e, struct fake_engine, engine);
}

static struct fake_comm *engine_fake_to_comm(struct comm *c)
{
	return CONTAINER_OF(c, struct fake_comm, comm);
}

static void engine_fake_move(char *dst, const char *src, uint64_t bytes)
{
	if (dst != src)
		memcpy(dst, src, bytes);
}

static void engine_fake_execute_gather(const struct fake_op *fo)
{
	uint64_t bytes = fo->count * dtype_size(fo->dtype);

	for (unsigned to = 0; to < fo->comm->size; to++)
		for (unsigned from = 0; from < fo->comm->size; from++)
			engine_fake_move(fo->recv[to] + from * bytes, fo->send[from], bytes);
}

/* A sum is rounded to its type at every addition, as NCCL rounds it at every hop. */
static void engine_fake_add_up(const struct fake_op *fo, const void *const *in, char *dst)
{
	struct k_reduce args = { .out = dst,
				 .out_dtype = fo->dtype,
				 .in = in,
				 .k = fo->comm->size,
				 .in_dtype = fo->dtype,
				 .sum_dtype = fo->dtype };

	kernels_ref()->reduce(&args, 0, fo->count);
}

/* Fold what the members have from @offset on into @dst. */
static void engine_fake_fold(const struct fake_op *fo, uint64_t offset, char *dst)
{
	const void *in[KERNEL_MAX_INPUTS];
	struct k_all_reduce args = {
		.out = dst, .in = in, .k = fo->comm->size, .dtype = fo->dtype, .op = fo->reduce
	};

	for (unsigned i = 0; i < fo->comm->size; i++)
		in[i] = fo->send[i] + offset;
	if (fo->reduce == REDUCE_SUM)
		engine_fake_add_up(fo, in, dst);
	else
		kernels_ref()->all_reduce(&args, 0, fo->count);
}

static void engine_fake_execute_reduce_scatter(const struct fake_op *fo)
{
	for (unsigned i = 0; i < fo->comm->size; i++)
		engine_fake_fold(fo, i * fo->count * dtype_size(fo->dtype), fo->recv[i]);
}

static void engine_fake_execute_all_reduce(const struct fake_op *fo)
{
	engine_fake_fold(fo, 0, fo->recv[0]);
	for (unsigned i = 1; i < fo->comm->size; i++)
		engine_fake_move(fo->recv[i], fo->recv[0], fo->count * dtype_size(fo->dtype));
}

static void engine_fake_execute_broadcast(const struct fake_op *fo)
{
	for (unsigned i = 0; i < fo->comm->size; i++)
		engine_fake_move(fo->recv[i], fo->send[fo->root], fo->count);
}

/* The values of all members, one after the other, and as many behind them for their sum. */
static void engine_fake_execute_sum(const struct fake_op *fo)
{
	uint64_t n = fo->sum.whole ? fo->count : fo->count * fo->comm->size,
		 bytes = fo->count * dtype_size(fo->dtype), all = n * dtype_size(fo->dtype);
	const void *in[KERNEL_MAX_INPUTS];
	char *values = malloc((fo->comm->size + 1) * all), *out = values + fo->comm->size * all;
	struct fake_op added = *fo;

	CHECK(values); /* tests only: no way to continue */
	for (unsigned i = 0; i < fo->comm->size; i++) {
		char *to = fo->sum.chained ? out : values + i * all;

		in[i] = to;
		fo->fold[i].fn(fo->fold[i].userdata, to, 0, n, i == 0 || !fo->sum.chained);
	}
	added.count = n;
	if (!fo->sum.chained)
		engine_fake_add_up(&added, in, out);
	for (unsigned i = 0; i < fo->comm->size; i++)
		memcpy(fo->recv[i], out + (fo->sum.whole ? 0 : i * bytes), bytes);
	free(values);
}

static void engine_fake_queue_post(struct fake_engine *f);

/* One operation a turn; its callback comes last, since it may free everything. */
static void engine_fake_on_queue_turn(struct work *work)
{
	struct fake_engine *f = CONTAINER_OF(work, struct fake_engine, turn);
	struct fake_op *fo = list_first(&f->ready, struct fake_op, link);
	struct comm *comm = fo->comm;
	struct comm_op *op = fo->op;
	int status = comm->aborted ? ENGINE_E_ABORTED : fo->status;

	list_unlink(&fo->link);
	f->posted = false;
	engine_fake_queue_post(f);
	if (status == 0 && fo->count > 0)
		fo->execute(fo);
	free(fo->fold);
	free(fo);
	comm_complete(comm, op, status);
}

static void engine_fake_queue_post(struct fake_engine *f)
{
	if (f->posted || list_empty(&f->ready))
		return;
	f->posted = true;
	loopq_post(f->loopq, &f->turn, engine_fake_on_queue_turn);
}

static void engine_fake_start(struct comm *c, const void *const *send, void *const *recv,
			      const struct fake_op *values)
{
	struct fake_engine *f = engine_fake_of(c->engine);
	struct fake_op *fo = malloc(sizeof(*fo) + 2 * c->size * sizeof(void *));

	CHECK(fo); /* tests only: no way to continue */
	*fo = *values;
	fo->comm = c;
	fo->send = (const char **)(fo + 1);
	fo->recv = (char **)(fo->send + c->size);
	memcpy(fo->send, send, c->size * sizeof(void *));
	memcpy(fo->recv, recv, c->size * sizeof(void *));
	f->calls++;
	fo->status = f->fail_in > 0 && --f->fail_in == 0 ? f->fail_status : 0;
	list_init(&fo->link);
	list_append(f->hold && !c->aborted ? &f->held : &f->ready, &fo->link);
	engine_fake_queue_post(f);
}

static void engine_fake_all_gather(struct comm *c, struct comm_op *op, const void *const *send,
				   void *const *recv, uint64_t count, enum dtype dtype)
{
	engine_fake_start(c, send, recv,
			  &(struct fake_op){ .op = op,
					     .execute = engine_fake_execute_gather,
					     .count = count,
					     .dtype = dtype });
}

static void engine_fake_reduce_scatter(struct comm *c, struct comm_op *op, const void *const *send,
				       void *const *recv, uint64_t count, enum dtype dtype)
{
	engine_fake_start(c, send, recv,
			  &(struct fake_op){ .op = op,
					     .execute = engine_fake_execute_reduce_scatter,
					     .count = count,
					     .dtype = dtype,
					     .reduce = REDUCE_SUM });
}

static void engine_fake_all_reduce(struct comm *c, struct comm_op *op, void *const *data,
				   uint64_t count, enum dtype dtype, enum reduce_op reduce)
{
	engine_fake_start(c, (const void *const *)data, data,
			  &(struct fake_op){ .op = op,
					     .execute = engine_fake_execute_all_reduce,
					     .count = count,
					     .dtype = dtype,
					     .reduce = reduce });
}

static void engine_fake_broadcast(struct comm *c, struct comm_op *op, void *const *data,
				  uint64_t bytes, unsigned root)
{
	engine_fake_start(c, (const void *const *)data, data,
			  &(struct fake_op){ .op = op,
					     .execute = engine_fake_execute_broadcast,
					     .count = bytes,
					     .root = root });
}

static void engine_fake_sum(struct comm *c, struct comm_op *op, const struct comm_sum *sum,
			    const struct comm_fold *fold, void *const *recv)
{
	struct comm_fold *copy = malloc(c->size * sizeof(*copy));

	CHECK(copy); /* tests only: no way to continue */
	memcpy(copy, fold, c->size * sizeof(*copy));
	engine_fake_start(c, (const void *const *)recv, recv,
			  &(struct fake_op){ .op = op,
					     .execute = engine_fake_execute_sum,
					     .count = sum->count,
					     .dtype = sum->dtype,
					     .sum = *sum,
					     .fold = copy });
}

/* Operations that are held back complete now, with the others in the order of their start. */
static void engine_fake_abort(struct comm *c)
{
	struct fake_engine *f = engine_fake_of(c->engine);
	struct fake_op *fo, *tmp;

	list_for_each (fo, tmp, &f->held, link) {
		if (fo->comm != c)
			continue;
		list_unlink(&fo->link);
		list_append(&f->ready, &fo->link);
	}
	engine_fake_queue_post(f);
}

static void engine_fake_on_comm_ready(struct work *work)
{
	struct fake_comm *c = CONTAINER_OF(work, struct fake_comm, ready_work);

	c->comm.ready(c->comm.userdata, &c->comm, 0);
}

static int engine_fake_comm_new(struct engine *e, const struct comm_options *options)
{
	struct fake_comm *c;
	int r;

	if (options->n_devices > KERNEL_MAX_INPUTS)
		return -EINVAL;
	c = calloc(1, sizeof(*c));
	if (!c)
		return -ENOMEM;
	r = comm_init(&c->comm, e, options, options->n_devices, 0);
	if (r) {
		free(c);
		return r;
	}
	loopq_post(engine_fake_of(e)->loopq, &c->ready_work, engine_fake_on_comm_ready);
	return 0;
}

static void engine_fake_comm_free(struct comm *c)
{
	free(engine_fake_to_comm(c));
}

static void engine_fake_close(struct engine *e)
{
	struct fake_engine *f = engine_fake_of(e);

	CHECK(list_empty(&f->ready) && list_empty(&f->held) && !f->posted);
	free(f);
}

static const struct engine_ops fake_ops = {
	.name = "fake",
	.comm_new = engine_fake_comm_new,
	.comm_free = engine_fake_comm_free,
	.abort = engine_fake_abort,
	.all_gather = engine_fake_all_gather,
	.reduce_scatter = engine_fake_reduce_scatter,
	.all_reduce = engine_fake_all_reduce,
	.broadcast = engine_fake_broadcast,
	.close = engine_fake_close,
	.sum = engine_fake_sum,
};

void engine_fake_fail(struct engine *e, unsigned n, int status)
{
	struct fake_engine *f = engine_fake_of(e);

	CHECK(e->ops == &fake_ops);
	CHECK(n == 0 || status != 0);
	f->fail_in = n;
	f->fail_status = status;
}

unsigned engine_fake_calls(const struct engine *e)
{
	CHECK(e->ops == &fake_ops);
	return CONTAINER_OF(e, const struct fake_engine, engine)->calls;
}

void engine_fake_hold(struct engine *e, bool hold)
{
	struct fake_engine *f = engine_fake_of(e);

	CHECK(e->ops == &fake_ops);
	f->hold = hold;
	while (!hold && !list_empty(&f->held)) {
		struct list *link = f->held.next;

		list_unlink(link);
		list_append(&f->ready, link);
	}
	engine_fake_queue_post(f);
}

bool engine_fake_step(struct engine *e)
{
	struct fake_engine *f = engine_fake_of(e);
	struct list *link = f->held.next;

	CHECK(e->ops == &fake_ops && f->hold);
	if (list_empty(&f->held))
		return false;
	list_unlink(link);
	list_append(&f->ready, link);
	engine_fake_queue_post(f);
	return true;
}

int engine_fake_new(struct loopq *loopq, struct engine **ret)
{
	struct fake_engine *f = calloc(1, sizeof(*f));

	if (!f)
		return -ENOMEM;
	engine_init(&f->engine, &fake_ops);
	f->loopq = loopq;
	list_init(&f->ready);
	list_init(&f->held);
	*ret = &f->engine;
	return 0;
}
