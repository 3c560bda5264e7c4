/*
 * Collectives between the host memories of several nodes, by Gloo (gloo_shim.h).
 *
 * Every communicator has a thread, its worker: it meets the other members, executes the operations
 * one after the other, as they were started, and takes leave. It alone blocks; it hands what
 * happened to the loop. A member may also be found gone while nothing runs, by a thread of the
 * shim.
 *
 *   loop     starts operations, stops the worker (comm_free), aborts the shim (which does not
 *            block), joins the worker when it says that it is gone
 *   worker   owns the shim; lists of the communicator under its lock
 *
 * An operation that fails ends the communicator: the owner is told by comm_broke, and that
 * operation and all others end with ENGINE_E_ABORTED. Connections often close before the owner has
 * heard why: so it is told reason_ms later, unless it aborts the communicator itself meanwhile.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "core/list.h"
#include "engine/engine_impl.h"
#include "engine/gloo_meet.h"
#include "engine/gloo_shim.h"

/* To meet the other members. */
#define GLOO_CONNECT_MS 30000
/* Longest wait for the others' good-byes. */
#define GLOO_GRACE_MS 2000

struct gloo {
	struct engine engine; /* first */
	struct loopq *loopq;
	unsigned reason_ms; /* see struct gloo_options */
	char *iface;
	char *address;
	struct list comms; /* of struct gloo_comm; their threads may run */
};

enum gloo_kind { GLOO_ALL_GATHER, GLOO_REDUCE_SCATTER, GLOO_ALL_REDUCE, GLOO_BROADCAST, GLOO_SUM };

/* One started operation. */
struct gloo_item {
	struct list link; /* gloo_comm.todo, then gloo_comm.ended */
	struct comm_op *op;
	enum gloo_kind kind;
	const void *send; /* ALL_REDUCE, BROADCAST: @recv; SUM: none */
	void *recv;
	uint64_t count; /* BROADCAST: bytes */
	enum dtype dtype;
	enum reduce_op reduce;
	unsigned root;
	struct comm_fold fold; /* SUM */
	bool whole, chained;   /* SUM */
	int status;
};

struct gloo_comm {
	struct comm comm; /* first */
	struct list link; /* gloo.comms; loop */
	struct comm_store store;
	struct gloo_shim *shim;
	pthread_t worker;
	bool freed;             /* loop: comm_free was called, or it was not made */
	struct comm_op *failed; /* loop: no memory to queue these; linked by impl */

	pthread_mutex_t lock;
	/* under the lock */
	pthread_cond_t wake; /* for the worker: an item, @stop, @dead, @abandoned */
	struct list todo;    /* of struct gloo_item */
	struct list ended;   /* likewise; not yet reported */
	struct work tick;
	bool posted;     /* @tick */
	bool stop;       /* no item follows */
	bool dead;       /* the shim is: @why */
	bool abandoned;  /* the owner has aborted it */
	bool reported;   /* GLOO_BROKE is, or was, in @events, or nobody has to know */
	bool left;       /* the worker does nothing more with it */
	bool orphaned;   /* the engine was closed: freed by the last of worker and @tick */
	unsigned events; /* GLOO_READY... not yet reported */
	bool told;       /* its owner has it; the loop's */
	int status;      /* GLOO_READY: 0, or why it was not made */
	char why[256];   /* it was not made, or broke */
};

enum {
	GLOO_READY = 1, /* it was made, or not */
	GLOO_BROKE = 2,
	GLOO_GONE = 4, /* the worker does nothing more */
};

static struct gloo *gloo_of(struct engine *e)
{
	return CONTAINER_OF(e, struct gloo, engine);
}

static struct gloo_comm *gloo_to_comm(struct comm *c)
{
	return CONTAINER_OF(c, struct gloo_comm, comm);
}

/* ------------------------------------------------------- from the threads to the loop */

static void gloo_on_tick(struct work *work);

/* With the lock held. */
static void gloo_post(struct gloo_comm *c, unsigned events)
{
	c->events |= events;
	if (c->posted || c->orphaned)
		return;
	c->posted = true;
	loopq_post(gloo_of(c->comm.engine)->loopq, &c->tick, gloo_on_tick);
}

/* The first reason counts. Any thread. The worker reports it. */
static void gloo_on_died(void *userdata, const char *why)
{
	struct gloo_comm *c = userdata;

	pthread_mutex_lock(&c->lock);
	if (!*c->why)
		snprintf(c->why, sizeof(c->why), "%s", why);
	c->dead = true;
	pthread_mutex_unlock(&c->lock);
	pthread_cond_signal(&c->wake);
}

/* ------------------------------------------------------------------- the worker */

/* It is dead. Until the owner knows why, or for reason_ms. With the lock held. */
static void gloo_await_reason(struct gloo_comm *c)
{
	const struct timespec until = clock_in(gloo_of(c->comm.engine)->reason_ms);
	int r = 0;

	while (!c->reported && !c->abandoned && !c->stop && r == 0)
		r = pthread_cond_timedwait(&c->wake, &c->lock, &until);
	if (!c->reported && !c->abandoned)
		gloo_post(c, GLOO_BROKE);
	c->reported = true;
}

/* Sums are rounded to the type at every addition, the rest once. */
static void gloo_fold(void *userdata, void *out, const void *const *in, uint64_t count)
{
	const struct gloo_item *item = userdata;
	const struct gloo_comm *c = item->op->impl;
	struct k_reduce sum = { .out = out,
				.out_dtype = item->dtype,
				.in = in,
				.k = c->comm.size,
				.in_dtype = item->dtype,
				.sum_dtype = item->dtype };
	struct k_all_reduce other = {
		.out = out, .in = in, .k = c->comm.size, .dtype = item->dtype, .op = item->reduce
	};

	if (item->reduce == REDUCE_SUM)
		kernels_host()->reduce(&sum, 0, count);
	else
		kernels_host()->all_reduce(&other, 0, count);
}

static int gloo_execute(struct gloo_comm *c, struct gloo_item *item, struct gloo_shim_error *error)
{
	uint64_t element = dtype_size(item->dtype);
	struct gloo_shim_fold fold = { gloo_fold, item, element };
	struct gloo_shim_link link = { item->fold.fn, item->fold.userdata, element };

	gloo_shim_set_place(c->shim, item->op->place);
	switch (item->kind) {
	case GLOO_ALL_GATHER:
		return gloo_shim_all_gather(c->shim, item->send, item->recv, item->count * element,
					    error);
	case GLOO_REDUCE_SCATTER:
		return gloo_shim_reduce_scatter(c->shim, item->send, item->recv, item->count, &fold,
						error);
	case GLOO_ALL_REDUCE:
		return gloo_shim_all_reduce(c->shim, item->recv, item->count, &fold, error);
	case GLOO_BROADCAST:
		return gloo_shim_broadcast(c->shim, item->recv, item->count, (int)item->root,
					   error);
	case GLOO_SUM:
		if (item->chained)
			return gloo_shim_chain(c->shim, item->recv, item->count, item->whole, &link,
					       error);
		return gloo_shim_sum(c->shim, item->recv, item->count, item->whole, &link, &fold,
				     error);
	}
	CHECK_NOT_REACHED();
}

/* One member alone: what it sends is the result. */
static void gloo_execute_alone(const struct gloo_item *item)
{
	if (item->kind == GLOO_SUM)
		item->fold.fn(item->fold.userdata, item->recv, 0, item->count, true);
	else if (item->send != item->recv)
		memcpy(item->recv, item->send, item->count * dtype_size(item->dtype));
}

static void gloo_run(struct gloo_comm *c, struct gloo_item *item)
{
	struct gloo_shim_error error = { "" };

	if (item->count == 0)
		return;
	if (c->comm.size == 1) {
		gloo_execute_alone(item);
		return;
	}
	item->status = gloo_execute(c, item, &error);
	if (item->status == 0)
		return;
	item->status = ENGINE_E_ABORTED;
	gloo_on_died(c, error.text);
}

/* Return: the next item, or NULL: none follows. */
static struct gloo_item *gloo_next_item(struct gloo_comm *c)
{
	struct gloo_item *item = NULL;

	pthread_mutex_lock(&c->lock);
	while (list_empty(&c->todo) && !c->stop) {
		if (c->dead && !c->reported)
			gloo_await_reason(c);
		else
			pthread_cond_wait(&c->wake, &c->lock);
	}
	if (!list_empty(&c->todo)) {
		item = list_first(&c->todo, struct gloo_item, link);
		list_unlink(&item->link);
	}
	pthread_mutex_unlock(&c->lock);
	return item;
}

static void gloo_give_back(struct gloo_comm *c, struct gloo_item *item)
{
	pthread_mutex_lock(&c->lock);
	if (item->status)
		gloo_await_reason(c); /* the owner hears of it first */
	list_append(&c->ended, &item->link);
	gloo_post(c, 0);
	pthread_mutex_unlock(&c->lock);
}

/* Return: whether it was made. */
static bool gloo_make(struct gloo_comm *c)
{
	struct gloo_shim_error error = { "" };
	int r = gloo_shim_connect(c->shim, &error);

	pthread_mutex_lock(&c->lock);
	c->status = r;
	if (r)
		snprintf(c->why, sizeof(c->why), "%s", error.text);
	else
		gloo_post(c, GLOO_READY);
	pthread_mutex_unlock(&c->lock);
	return r == 0;
}

static void gloo_free_comm(struct gloo_comm *c)
{
	pthread_cond_destroy(&c->wake);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

/* The worker's last word. */
static void gloo_leave(struct gloo_comm *c, unsigned events)
{
	bool last;

	pthread_mutex_lock(&c->lock);
	c->left = true;
	gloo_post(c, events);
	last = c->orphaned && !c->posted;
	pthread_mutex_unlock(&c->lock);
	if (last)
		gloo_free_comm(c);
}

/* Nobody else finds it from here on. */
static struct gloo_shim *gloo_take_shim(struct gloo_comm *c)
{
	struct gloo_shim *shim;

	pthread_mutex_lock(&c->lock);
	shim = STEAL_PTR(c->shim);
	pthread_mutex_unlock(&c->lock);
	return shim;
}

static void *gloo_main(void *arg)
{
	struct gloo_comm *c = arg;
	bool made = gloo_make(c);
	struct gloo_item *item;

	while (made && (item = gloo_next_item(c))) {
		gloo_run(c, item);
		gloo_give_back(c, item);
	}
	gloo_shim_free(gloo_take_shim(c), GLOO_GRACE_MS);
	gloo_leave(c, made ? GLOO_GONE : GLOO_READY | GLOO_GONE);
	return NULL;
}

/* --------------------------------------------------------------------- the loop */

static void gloo_free_engine(struct gloo *g)
{
	free(g->iface);
	free(g->address);
	free(g);
}

static void gloo_on_gone(struct gloo_comm *c)
{
	pthread_join(c->worker, NULL); /* it has left */
	list_unlink(&c->link);
	gloo_free_comm(c);
}

static void gloo_on_not_made(struct gloo_comm *c)
{
	comm_ready_cb ready = c->comm.ready;
	void *userdata = c->comm.userdata;
	int status = c->status;

	snprintf(c->comm.engine->why, sizeof(c->comm.engine->why), "%s", c->why);
	comm_deinit(&c->comm);
	gloo_on_gone(c);
	ready(userdata, NULL, status);
}

static void gloo_end_ops(struct gloo_comm *c, struct list *ended)
{
	struct comm_op *op = STEAL_PTR(c->failed), *next;

	for (; op; op = next) {
		next = op->impl;
		comm_complete(&c->comm, op, -ENOMEM); /* the last op may free @c */
	}
	while (!list_empty(ended)) {
		struct gloo_item *item = list_first(ended, struct gloo_item, link);
		int status = c->comm.aborted ? ENGINE_E_ABORTED : item->status;

		op = item->op;
		list_unlink(&item->link);
		free(item);
		comm_complete(&c->comm, op, status);
	}
}

/* The engine was closed: no callback follows. With the lock held, which it releases. */
static void gloo_on_orphaned_tick(struct gloo_comm *c)
{
	bool last = c->left;

	pthread_mutex_unlock(&c->lock);
	if (last)
		gloo_free_comm(c);
}

static void gloo_on_tick(struct work *work)
{
	struct gloo_comm *c = CONTAINER_OF(work, struct gloo_comm, tick);
	struct list ended = LIST_INIT(ended);
	unsigned events;

	pthread_mutex_lock(&c->lock);
	c->posted = false;
	if (c->orphaned) {
		gloo_on_orphaned_tick(c);
		return;
	}
	list_take_all(&ended, &c->ended);
	events = c->events;
	c->told = c->told || events & GLOO_READY;
	if (!c->told) /* who breaks it may be faster than who makes it */
		events &= ~(unsigned)GLOO_BROKE;
	c->events &= ~events;
	pthread_mutex_unlock(&c->lock);
	if (events & GLOO_GONE) {
		if (events & GLOO_READY && c->status)
			gloo_on_not_made(c);
		else
			gloo_on_gone(c);
		return;
	}
	if (events & GLOO_READY)
		c->comm.ready(c->comm.userdata, &c->comm, 0);
	if (events & GLOO_BROKE && !c->freed)
		comm_broke(&c->comm, c->why);
	if (c->freed)
		return;
	gloo_end_ops(c, &ended);
}

/* ------------------------------------------------------------------ communicators */

static int gloo_check_options(const struct comm_options *options)
{
	const struct comm_group *group = options->group;

	if (!group || options->n_devices != 1 ||
	    strcmp(backend_info(options->devices[0])->name, "cuda") == 0)
		return -EINVAL;
	if (group->size > KERNEL_MAX_INPUTS || group->member >= group->size)
		return -EINVAL;
	return group->prefix && group->store && group->store->exchange ? 0 : -EINVAL;
}

static int gloo_new_shim(struct gloo_comm *c, const struct comm_group *group)
{
	struct gloo *g = gloo_of(c->comm.engine);
	struct gloo_shim_options options = {
		.iface = g->iface,
		.address = g->address,
		.prefix = group->prefix,
		.size = (int)group->size,
		.rank = (int)group->member,
		.connect_ms = group->connect_ms ? group->connect_ms : GLOO_CONNECT_MS,
		.meet = gloo_meet,
		.store = &c->store,
		.died = gloo_on_died,
		.userdata = c,
	};

	c->store = *group->store;
	return gloo_shim_new(&options, &c->shim);
}

/* With all signals blocked, in its threads too. */
static int gloo_start_worker(struct gloo_comm *c)
{
	sigset_t all, old;
	int r;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&c->worker, NULL, gloo_main, c);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r == 0)
		pthread_setname_np(c->worker, "shardd-gloo");
	return -r;
}

static void gloo_init_comm(struct gloo_comm *c)
{
	pthread_condattr_t attr;

	list_init(&c->link);
	list_init(&c->todo);
	list_init(&c->ended);
	pthread_mutex_init(&c->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&c->wake, &attr);
	pthread_condattr_destroy(&attr);
}

static int gloo_comm_new(struct engine *e, const struct comm_options *options)
{
	struct gloo_comm *c;
	int r = gloo_check_options(options);

	if (r)
		return r;
	c = calloc(1, sizeof(*c));
	if (!c)
		return -ENOMEM;
	gloo_init_comm(c);
	r = comm_init(&c->comm, e, options, options->group->size, options->group->member);
	if (r) {
		gloo_free_comm(c);
		return r;
	}
	r = gloo_new_shim(c, options->group);
	if (r == 0)
		r = gloo_start_worker(c);
	if (r) {
		gloo_shim_free(c->shim, 0);
		comm_deinit(&c->comm);
		gloo_free_comm(c);
		return r;
	}
	list_append(&gloo_of(e)->comms, &c->link);
	return 0;
}

static void gloo_comm_free(struct comm *comm)
{
	struct gloo_comm *c = gloo_to_comm(comm);

	c->freed = true;
	pthread_mutex_lock(&c->lock);
	c->stop = true;
	pthread_mutex_unlock(&c->lock);
	pthread_cond_signal(&c->wake);
}

static void gloo_abort(struct comm *comm)
{
	struct gloo_comm *c = gloo_to_comm(comm);

	pthread_mutex_lock(&c->lock);
	c->abandoned = true;
	pthread_mutex_unlock(&c->lock);
	pthread_cond_signal(&c->wake);
	gloo_shim_abort(c->shim);
}

/* --------------------------------------------------------------------- operations */

/* The others must not wait for an operation that is missing here. */
static void gloo_no_memory(struct gloo_comm *c, struct comm_op *op)
{
	op->impl = c->failed;
	c->failed = op;
	gloo_shim_abort(c->shim);
	gloo_on_died(c, "no memory to start an operation");
	pthread_mutex_lock(&c->lock);
	gloo_post(c, 0); /* for those of c->failed */
	pthread_mutex_unlock(&c->lock);
}

static void gloo_start(struct comm *comm, const struct gloo_item *values)
{
	struct gloo_comm *c = gloo_to_comm(comm);
	struct gloo_item *item = malloc(sizeof(*item));

	if (!item) {
		gloo_no_memory(c, values->op);
		return;
	}
	*item = *values;
	item->op->impl = c;
	list_init(&item->link);
	pthread_mutex_lock(&c->lock);
	list_append(&c->todo, &item->link);
	pthread_mutex_unlock(&c->lock);
	pthread_cond_signal(&c->wake);
}

static void gloo_all_gather(struct comm *c, struct comm_op *op, const void *const *send,
			    void *const *recv, uint64_t count, enum dtype dtype)
{
	gloo_start(c, &(struct gloo_item){ .op = op,
					   .kind = GLOO_ALL_GATHER,
					   .send = send[0],
					   .recv = recv[0],
					   .count = count,
					   .dtype = dtype });
}

static void gloo_reduce_scatter(struct comm *c, struct comm_op *op, const void *const *send,
				void *const *recv, uint64_t count, enum dtype dtype)
{
	gloo_start(c, &(struct gloo_item){ .op = op,
					   .kind = GLOO_REDUCE_SCATTER,
					   .send = send[0],
					   .recv = recv[0],
					   .count = count,
					   .dtype = dtype,
					   .reduce = REDUCE_SUM });
}

static void gloo_all_reduce(struct comm *c, struct comm_op *op, void *const *data, uint64_t count,
			    enum dtype dtype, enum reduce_op reduce)
{
	gloo_start(c, &(struct gloo_item){ .op = op,
					   .kind = GLOO_ALL_REDUCE,
					   .send = data[0],
					   .recv = data[0],
					   .count = count,
					   .dtype = dtype,
					   .reduce = reduce });
}

static void gloo_broadcast(struct comm *c, struct comm_op *op, void *const *data, uint64_t bytes,
			   unsigned root)
{
	gloo_start(c, &(struct gloo_item){ .op = op,
					   .kind = GLOO_BROADCAST,
					   .send = data[0],
					   .recv = data[0],
					   .count = bytes,
					   .root = root });
}

static void gloo_sum(struct comm *c, struct comm_op *op, const struct comm_sum *sum,
		     const struct comm_fold *fold, void *const *recv)
{
	gloo_start(c, &(struct gloo_item){ .op = op,
					   .kind = GLOO_SUM,
					   .recv = recv[0],
					   .count = sum->count,
					   .dtype = sum->dtype,
					   .reduce = REDUCE_SUM,
					   .fold = fold[0],
					   .whole = sum->whole,
					   .chained = sum->chained });
}

/* --------------------------------------------------------------------- the engine */

static unsigned gloo_leaving(const struct engine *e)
{
	const struct gloo *g = CONTAINER_OF(e, const struct gloo, engine);
	const struct gloo_comm *c, *tmp;
	unsigned n = 0;

	list_for_each (c, tmp, &g->comms, link)
		n += c->freed;
	return n;
}

static void gloo_abandon(struct engine *e, const void *userdata)
{
	struct gloo *g = gloo_of(e);
	struct gloo_comm *c, *tmp;

	list_for_each (c, tmp, &g->comms, link) {
		if (c->told || c->comm.userdata != userdata)
			continue;
		pthread_mutex_lock(&c->lock);
		if (c->shim)
			gloo_shim_cancel(c->shim);
		pthread_mutex_unlock(&c->lock);
	}
}

/* Workers that take leave go on alone. A tick that was posted still runs, and finds the orphan. */
static void gloo_close(struct engine *e)
{
	struct gloo *g = gloo_of(e);
	struct gloo_comm *c, *tmp;

	list_for_each (c, tmp, &g->comms, link) {
		list_unlink(&c->link);
		pthread_detach(c->worker);
		pthread_mutex_lock(&c->lock);
		CHECK(!c->left || c->posted);
		c->orphaned = true;
		pthread_mutex_unlock(&c->lock);
	}
	gloo_free_engine(g);
}

static const struct engine_ops gloo_ops = {
	.name = "gloo",
	.groups = true,
	.comm_new = gloo_comm_new,
	.comm_free = gloo_comm_free,
	.abort = gloo_abort,
	.all_gather = gloo_all_gather,
	.reduce_scatter = gloo_reduce_scatter,
	.all_reduce = gloo_all_reduce,
	.broadcast = gloo_broadcast,
	.close = gloo_close,
	.sum = gloo_sum,
	.leaving = gloo_leaving,
	.abandon = gloo_abandon,
};

static int gloo_copy(const char *text, char **ret)
{
	if (!text)
		return 0;
	*ret = strdup(text);
	return *ret ? 0 : -ENOMEM;
}

int engine_gloo_new(struct loopq *loopq, const struct gloo_options *options, struct engine **ret)
{
	struct gloo *g;

	if (!options->iface && !options->address)
		return -EINVAL;
	g = calloc(1, sizeof(*g));
	if (!g)
		return -ENOMEM;
	engine_init(&g->engine, &gloo_ops);
	g->loopq = loopq;
	g->reason_ms = options->reason_ms;
	list_init(&g->comms);
	if (gloo_copy(options->iface, &g->iface) || gloo_copy(options->address, &g->address)) {
		gloo_free_engine(g);
		return -ENOMEM;
	}
	snprintf(g->engine.detail, sizeof(g->engine.detail), "Gloo over TCP, %s",
		 options->iface ? options->iface : options->address);
	*ret = &g->engine;
	return 0;
}
