#include "engine/engine.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

const char *engine_why(const struct engine *e)
{
	MAGIC_CHECK(e, ENGINE_MAGIC);
	return e->why;
}

bool engine_in_order(const struct engine *e)
{
	MAGIC_CHECK(e, ENGINE_MAGIC);
	return e->ops->in_order;
}

static void engine_check_options(const struct comm_options *options)
{
	CHECK(options->ready && options->devices && options->n_devices > 0);
	CHECK((unsigned)options->queue < _BACKEND_Q_N);
	for (unsigned i = 0; i < options->n_devices; i++)
		CHECK(options->devices[i]);
}

int engine_comm_new(struct engine *e, const struct comm_options *options)
{
	int r;

	MAGIC_CHECK(e, ENGINE_MAGIC);
	engine_check_options(options);
	e->why[0] = '\0';
	if (options->group && !e->ops->groups)
		return -EOPNOTSUPP;
	r = e->ops->comm_new(e, options);
	CHECK(r <= 0);
	return r;
}

int comm_shrink(struct comm *c, const bool *gone, const struct comm_options *options)
{
	int r;

	MAGIC_CHECK(c, COMM_MAGIC);
	engine_check_options(options);
	CHECK(options->n_devices <= c->n_local);
	if (!c->engine->ops->shrink)
		return -EOPNOTSUPP;
	r = c->engine->ops->shrink(c, gone, options);
	CHECK(r <= 0);
	return r;
}

int comm_init(struct comm *c, struct engine *e, const struct comm_options *options, unsigned size,
	      unsigned member)
{
	unsigned n = options->n_devices;

	MAGIC_CHECK(e, ENGINE_MAGIC);
	CHECK(member + n <= size);
	*c = (struct comm){ .magic = COMM_MAGIC,
			    .engine = e,
			    .n_local = n,
			    .size = size,
			    .member = member,
			    .queue = options->queue,
			    .ready = options->ready,
			    .failed = options->failed,
			    .userdata = options->userdata };
	c->devices = calloc(n, sizeof(struct backend *));
	if (!c->devices)
		return -ENOMEM;
	memcpy(c->devices, options->devices, n * sizeof(struct backend *));
	snprintf(c->name, sizeof(c->name), "%s", options->name ? options->name : "");
	e->comms++;
	return 0;
}

void comm_deinit(struct comm *c)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	CHECK(c->engine->comms > 0);
	c->engine->comms--;
	c->magic = 0;
	free(c->devices);
	c->devices = NULL;
}

void comm_abort(struct comm *c)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	if (c->aborted)
		return;
	c->aborted = true;
	c->engine->ops->abort(c);
}

void comm_broke(struct comm *c, const char *why)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	if (c->aborted)
		return;
	c->aborted = true;
	if (c->failed)
		c->failed(c->userdata, c, why);
}

struct comm *comm_free(struct comm *c)
{
	struct engine *e;

	if (!c)
		return NULL;
	MAGIC_CHECK(c, COMM_MAGIC);
	CHECK(c->in_flight == 0);
	e = c->engine;
	comm_deinit(c);
	e->ops->comm_free(c);
	return NULL;
}

unsigned comm_in_flight(const struct comm *c)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	return c->in_flight;
}

void comm_info(const struct comm *c, struct comm_info *ret)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	*ret = (struct comm_info){ .name = c->name,
				   .engine = c->engine->ops->name,
				   .gather = "copy",
				   .detail = c->engine->detail,
				   .size = c->size,
				   .ops = c->ops };
	if (c->engine->ops->info)
		c->engine->ops->info(c, ret);
}

static void engine_check_addresses(const struct comm *c, const void *const *addr, uint64_t n)
{
	CHECK(addr);
	for (unsigned i = 0; n > 0 && i < c->n_local; i++)
		CHECK(addr[i]);
}

void comm_register(struct comm *c, void *const *addr, uint64_t bytes)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	engine_check_addresses(c, (const void *const *)addr, bytes);
	CHECK(bytes > 0);
	if (c->engine->ops->reg)
		c->engine->ops->reg(c, addr, bytes);
}

void comm_unregister(struct comm *c, void *const *addr, void (*done)(void *userdata),
		     void *userdata)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	engine_check_addresses(c, (const void *const *)addr, 1);
	if (c->engine->ops->unreg)
		c->engine->ops->unreg(c, addr, done, userdata);
	else
		done(userdata);
}

/* The part of the contract that all operations share. */
static const struct engine_ops *engine_begin(struct comm *c, const struct comm_op *op)
{
	CHECK(op && op->done);
	c->in_flight++;
	c->ops++;
	return c->engine->ops;
}

void comm_all_gather(struct comm *c, struct comm_op *op, const void *const *send, void *const *recv,
		     uint64_t count, enum dtype dtype)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	engine_check_addresses(c, send, count);
	engine_check_addresses(c, (const void *const *)recv, count);
	CHECK(dtype_size(dtype) > 0);
	engine_begin(c, op)->all_gather(c, op, send, recv, count, dtype);
}

void comm_reduce_scatter(struct comm *c, struct comm_op *op, const void *const *send,
			 void *const *recv, uint64_t count, enum dtype dtype)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	engine_check_addresses(c, send, count);
	engine_check_addresses(c, (const void *const *)recv, count);
	CHECK(dtype_size(dtype) > 0);
	engine_begin(c, op)->reduce_scatter(c, op, send, recv, count, dtype);
}

void comm_all_reduce(struct comm *c, struct comm_op *op, void *const *data, uint64_t count,
		     enum dtype dtype, enum reduce_op reduce)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	engine_check_addresses(c, (const void *const *)data, count);
	CHECK(dtype_size(dtype) > 0);
	CHECK(reduce > REDUCE_NONE && reduce < _REDUCE_N);
	engine_begin(c, op)->all_reduce(c, op, data, count, dtype, reduce);
}

void comm_broadcast(struct comm *c, struct comm_op *op, void *const *data, uint64_t bytes,
		    unsigned root)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	engine_check_addresses(c, (const void *const *)data, bytes);
	CHECK(root < c->size);
	engine_begin(c, op)->broadcast(c, op, data, bytes, root);
}

bool comm_can_sum(const struct comm *c)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	return c->engine->ops->sum && strcmp(backend_info(c->devices[0])->name, "cuda") != 0;
}

void comm_sum(struct comm *c, struct comm_op *op, const struct comm_sum *sum,
	      const struct comm_fold *fold, void *const *recv)
{
	CHECK(comm_can_sum(c) && fold);
	for (unsigned i = 0; i < c->n_local; i++)
		CHECK(fold[i].fn);
	engine_check_addresses(c, (const void *const *)recv, sum->count);
	CHECK(dtype_size(sum->dtype) > 0);
	engine_begin(c, op)->sum(c, op, sum, fold, recv);
}

void comm_complete(struct comm *c, struct comm_op *op, int status)
{
	MAGIC_CHECK(c, COMM_MAGIC);
	CHECK(c->in_flight > 0);
	CHECK(status <= 0);
	c->in_flight--;
	op->done(op, status);
}

void engine_abandon(struct engine *e, const void *userdata)
{
	MAGIC_CHECK(e, ENGINE_MAGIC);
	if (e->ops->abandon)
		e->ops->abandon(e, userdata);
}

unsigned engine_leaving(const struct engine *e)
{
	MAGIC_CHECK(e, ENGINE_MAGIC);
	return e->ops->leaving ? e->ops->leaving(e) : 0;
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
