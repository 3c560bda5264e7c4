/*
 * An engine without a wire: every other member is taken to send what this one
 * sends, so a communicator of any size gives results that a test can compute.
 * The work is done by the reference kernels when the operation completes.
 * Operations fail on demand and can be held back.
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
	struct list held;  /* wait for engine_fake_release */
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
	comm_ready_cb ready;
	void *userdata;
};

/* One started operation. @repeat copies of @src go to @dst, or, with a reduction,
 * as many are folded into it. */
struct fake_op {
	struct list link;
	struct comm *comm;
	struct comm_op *op;
	int status;
	const char *src;
	char *dst;
	uint64_t count; /* elements of @src */
	enum dtype dtype;
	enum reduce_op reduce; /* REDUCE_NONE: copies */
};

static struct fake_engine *to_fake(struct engine *e)
{
	return CONTAINER_OF(e, struct fake_engine, engine);
}

static struct fake_comm *to_comm(struct comm *c)
{
	return CONTAINER_OF(c, struct fake_comm, comm);
}

static void fold(const struct fake_op *fo)
{
	const void *in[KERNEL_MAX_INPUTS];
	struct k_all_reduce args = {
		.out = fo->dst, .in = in, .k = fo->comm->size, .dtype = fo->dtype, .op = fo->reduce
	};

	for (unsigned i = 0; i < fo->comm->size; i++)
		in[i] = fo->src;
	kernels_ref()->all_reduce(&args, 0, fo->count);
}

static void execute(const struct fake_op *fo)
{
	uint64_t bytes = fo->count * dtype_size(fo->dtype);

	if (fo->count == 0)
		return;
	if (fo->reduce != REDUCE_NONE) {
		fold(fo);
		return;
	}
	for (unsigned i = 0; i < fo->comm->size; i++)
		if (fo->dst + i * bytes != fo->src)
			memcpy(fo->dst + i * bytes, fo->src, bytes);
}

static void post(struct fake_engine *f);

/* One operation a turn; its callback comes last, since it may free everything. */
static void on_turn(struct work *work)
{
	struct fake_engine *f = CONTAINER_OF(work, struct fake_engine, turn);
	struct fake_op *first = list_first(&f->ready, struct fake_op, link);
	struct fake_op fo = *first;

	list_unlink(&first->link);
	free(first);
	f->posted = false;
	post(f);
	if (fo.comm->aborted)
		fo.status = ENGINE_E_ABORTED;
	if (fo.status == 0)
		execute(&fo);
	comm_complete(fo.comm, fo.op, fo.status);
}

static void post(struct fake_engine *f)
{
	if (f->posted || list_empty(&f->ready))
		return;
	f->posted = true;
	loopq_post(f->loopq, &f->turn, on_turn);
}

static void start(struct comm *c, const struct fake_op *values)
{
	struct fake_engine *f = to_fake(c->engine);
	struct fake_op *fo = malloc(sizeof(*fo));

	CHECK(fo); /* tests only: nothing to go on with */
	*fo = *values;
	fo->comm = c;
	f->calls++;
	fo->status = f->fail_in > 0 && --f->fail_in == 0 ? f->fail_status : 0;
	list_init(&fo->link);
	list_append(f->hold && !c->aborted ? &f->held : &f->ready, &fo->link);
	post(f);
}

static void fake_all_gather(struct comm *c, struct comm_op *op, const void *send, void *recv,
			    uint64_t count, enum dtype dtype)
{
	start(c, &(struct fake_op){
			 .op = op, .src = send, .dst = recv, .count = count, .dtype = dtype });
}

static void fake_reduce_scatter(struct comm *c, struct comm_op *op, const void *send, void *recv,
				uint64_t count, enum dtype dtype)
{
	const char *segment = send;

	if (count > 0)
		segment += c->member * count * dtype_size(dtype);
	start(c, &(struct fake_op){ .op = op,
				    .src = segment,
				    .dst = recv,
				    .count = count,
				    .dtype = dtype,
				    .reduce = REDUCE_SUM });
}

static void fake_all_reduce(struct comm *c, struct comm_op *op, void *data, uint64_t count,
			    enum dtype dtype, enum reduce_op reduce)
{
	start(c, &(struct fake_op){ .op = op,
				    .src = data,
				    .dst = data,
				    .count = count,
				    .dtype = dtype,
				    .reduce = reduce });
}

static void fake_broadcast(struct comm *c, struct comm_op *op, void *data, uint64_t bytes,
			   unsigned root)
{
	(void)data;
	(void)bytes;
	(void)root;
	start(c, &(struct fake_op){ .op = op });
}

/* What is held back ends now, with the others in the order of their start. */
static void fake_abort(struct comm *c)
{
	struct fake_engine *f = to_fake(c->engine);
	struct fake_op *fo, *tmp;

	list_for_each (fo, tmp, &f->held, link) {
		if (fo->comm != c)
			continue;
		list_unlink(&fo->link);
		list_append(&f->ready, &fo->link);
	}
	post(f);
}

static void on_comm_ready(struct work *work)
{
	struct fake_comm *c = CONTAINER_OF(work, struct fake_comm, ready_work);

	c->ready(c->userdata, &c->comm, 0);
}

static int fake_comm_new(struct engine *e, unsigned size, unsigned member, comm_ready_cb ready,
			 void *userdata)
{
	struct fake_comm *c;

	if (size > KERNEL_MAX_INPUTS)
		return -EINVAL;
	c = calloc(1, sizeof(*c));
	if (!c)
		return -ENOMEM;
	comm_init(&c->comm, e, size, member);
	c->ready = ready;
	c->userdata = userdata;
	loopq_post(to_fake(e)->loopq, &c->ready_work, on_comm_ready);
	return 0;
}

static void fake_comm_free(struct comm *c)
{
	free(to_comm(c));
}

static void fake_close(struct engine *e)
{
	struct fake_engine *f = to_fake(e);

	CHECK(list_empty(&f->ready) && list_empty(&f->held) && !f->posted);
	free(f);
}

static const struct engine_ops fake_ops = {
	.name = "fake",
	.comm_new = fake_comm_new,
	.comm_free = fake_comm_free,
	.abort = fake_abort,
	.all_gather = fake_all_gather,
	.reduce_scatter = fake_reduce_scatter,
	.all_reduce = fake_all_reduce,
	.broadcast = fake_broadcast,
	.close = fake_close,
};

void engine_fake_fail(struct engine *e, unsigned n, int status)
{
	struct fake_engine *f = to_fake(e);

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
	struct fake_engine *f = to_fake(e);

	CHECK(e->ops == &fake_ops);
	f->hold = hold;
	while (!hold && !list_empty(&f->held)) {
		struct list *link = f->held.next;

		list_unlink(link);
		list_append(&f->ready, link);
	}
	post(f);
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
