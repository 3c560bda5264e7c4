#include "engine/engine.h"

#include <errno.h>
#include <stddef.h>

#include "core/check.h"
#include "engine/engine_impl.h"

#define ENGINE_MAGIC 0x454e474eu
#define COMM_MAGIC   0x434f4d4du

void engine_init(struct engine *e, const struct engine_ops *ops)
{
	CHECK(ops->name && ops->comm_new && ops->comm_free && ops->abort && ops->close);
	CHECK(ops->all_gather && ops->reduce_scatter && ops->all_reduce && ops->broadcast);
	*e = (struct engine){ .magic = ENGINE_MAGIC, .ops = ops };
}

const char *engine_name(const struct engine *e)
{
	MAGIC_CHECK(e, ENGINE_MAGIC);
	return e->ops->name;
}

int engine_comm_new(struct engine *e, unsigned size, unsigned member, comm_ready_cb ready,
		    void *userdata)
{
	int r;

	MAGIC_CHECK(e, ENGINE_MAGIC);
	CHECK(size > 0 && member < size && ready);
	r = e->ops->comm_new(e, size, member, ready, userdata);
	CHECK(r <= 0);
	return r;
}

void comm_init(struct comm *c, struct engine *e, unsigned size, unsigned member)
{
	*c = (struct comm){ .magic = COMM_MAGIC, .engine = e, .size = size, .member = member };
	e->comms++;
}

void comm_abort(struct comm *c)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	if (c->aborted)
		return;
	c->aborted = true;
	c->engine->ops->abort(c);
}

struct comm *comm_free(struct comm *c)
{
	struct engine *e;

	if (!c)
		return NULL;
	MAGIC_CHECK(c, COMM_MAGIC);
	CHECK(c->in_flight == 0);
	e = c->engine;
	CHECK(e->comms > 0);
	e->comms--;
	c->magic = 0;
	e->ops->comm_free(c);
	return NULL;
}

unsigned comm_size(const struct comm *c)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	return c->size;
}

unsigned comm_member(const struct comm *c)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	return c->member;
}

/* The part of the contract that all operations share. */
static const struct engine_ops *begin(struct comm *c, const struct comm_op *op)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	CHECK(op && op->done);
	c->in_flight++;
	return c->engine->ops;
}

void comm_all_gather(struct comm *c, struct comm_op *op, const void *send, void *recv,
		     uint64_t count, enum dtype dtype)
{
	CHECK(count == 0 || (send && recv));
	CHECK(dtype_size(dtype) > 0);
	begin(c, op)->all_gather(c, op, send, recv, count, dtype);
}

void comm_reduce_scatter(struct comm *c, struct comm_op *op, const void *send, void *recv,
			 uint64_t count, enum dtype dtype)
{
	CHECK(count == 0 || (send && recv));
	CHECK(dtype_size(dtype) > 0);
	begin(c, op)->reduce_scatter(c, op, send, recv, count, dtype);
}

void comm_all_reduce(struct comm *c, struct comm_op *op, void *data, uint64_t count,
		     enum dtype dtype, enum reduce_op reduce)
{
	CHECK(count == 0 || data);
	CHECK(dtype_size(dtype) > 0);
	CHECK(reduce > REDUCE_NONE && reduce < _REDUCE_N);
	begin(c, op)->all_reduce(c, op, data, count, dtype, reduce);
}

void comm_broadcast(struct comm *c, struct comm_op *op, void *data, uint64_t bytes, unsigned root)
{
	CHECK(bytes == 0 || data);
	CHECK(root < comm_size(c));
	begin(c, op)->broadcast(c, op, data, bytes, root);
}

void comm_complete(struct comm *c, struct comm_op *op, int status)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	CHECK(c->in_flight > 0);
	CHECK(status <= ENGINE_E_ABORTED);
	c->in_flight--;
	op->done(op, status);
}

struct engine *engine_close(struct engine *e)
{
	if (!e)
		return NULL;
	MAGIC_CHECK(e, ENGINE_MAGIC);
	CHECK(e->comms == 0);
	e->magic = 0;
	e->ops->close(e);
	return NULL;
}
