#include "reduce/reduce_batch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/window.h"
#include "op/op.h"
#include "reduce/reduce_run.h"
#include "work/coll.h"

#define BATCH_MAX 64

struct reduce_batch {
	struct group *group;
	struct coll *colls[BATCH_MAX]; /* in their order; the last one submits for all */
	unsigned n;
	unsigned stage;   /* enum reduce_batch_stage */
	unsigned pending; /* of what was submitted */
	int status;
	bool began;                                /* their streams are waited for */
	struct launch *launches[NODE_MAX_DEVICES]; /* of all, in the present stage; owned */
	struct launch *own[NODE_MAX_DEVICES];      /* the last one's own meanwhile */
	unsigned own_room[NODE_MAX_DEVICES];
	struct region sums[NODE_MAX_DEVICES];
	enum reduce_stage then; /* where each of them goes on */
};

static struct coll *reduce_batch_last_of(const struct reduce_batch *b)
{
	return b->colls[b->n - 1];
}

bool reduce_batch_takes(const struct coll *c)
{
	/* on one device nothing is gained: what a reduction costs there is its own kernel */
	return !coll_is_alone(c) && !group_spans(c->group) && !reduce_of(c)->run->defer &&
	       !reduce_of(c)->run->crossed && !reduce_of(c)->run->chained &&
	       !reduce_of(c)->run->sets &&
	       unit_gradient_bytes(c->unit) <= c->job->node->limits.reduce_batch_bytes;
}

static void reduce_batch_next_batch(struct group *g);

static void reduce_batch_free_batch(struct reduce_batch *b, const struct coll *c)
{
	for (unsigned d = 0; d < ARRAY_SIZE(b->launches); d++)
		free(b->launches[d]);
	for (unsigned d = 0; d < c->n_parts; d++)
		pool_give(&c->job->mem.scratch[c->parts[d].device->index], &b->sums[d]);
	free(b);
}

/* Each goes its own way again. */
static void reduce_batch_part(struct reduce_batch *b)
{
	struct group *g = b->group;
	struct coll *colls[BATCH_MAX];
	unsigned n = b->n, then = b->then;
	int status = b->status;
	struct job *job = g->job;

	CHECK(!b->pending && g->small_runs);
	memcpy(colls, b->colls, n * sizeof(colls[0]));
	reduce_batch_free_batch(b, colls[0]);
	g->small_runs = false;
	job->running++; /* the last of them may be the last of a deleted job */
	for (unsigned i = 0; i < n; i++) {
		reduce_of(colls[i])->batch = NULL;
		colls[i]->status = status;
		colls[i]->stage = then;
		coll_go_on(colls[i]);
	}
	reduce_batch_next_batch(g);
	job_ran(job);
}

/* ------------------------------------------------------------------- kernels */

static void reduce_batch_go_on(struct reduce_batch *b);

bool reduce_batch_arrived(struct coll *c)
{
	struct reduce_batch *b = reduce_of(c)->batch;
	struct coll *last;

	if (!b)
		return false;
	last = reduce_batch_last_of(b);
	b->status = b->status ? b->status : c->status;
	CHECK(b->pending > 0);
	if (--b->pending)
		return true;
	for (unsigned d = 0; d < last->n_parts && b->own[d]; d++) {
		last->parts[d].launches = b->own[d];
		last->parts[d].room = b->own_room[d];
		b->own[d] = NULL;
	}
	reduce_batch_go_on(b);
	return true;
}

/* What all of them have to do on device @d, into b->launches. */
static int reduce_batch_collect(struct reduce_batch *b, unsigned d)
{
	struct coll_part *last = &reduce_batch_last_of(b)->parts[d];
	struct launch *all;
	unsigned n = 0;

	for (unsigned i = 0; i < b->n; i++)
		n += b->colls[i]->parts[d].n_launches;
	all = realloc(b->launches[d], (n ? n : 1) * sizeof(*all));
	if (!all)
		return -ENOMEM;
	b->launches[d] = all;
	b->own_room[d] = last->room;
	last->room = n;
	n = 0;
	for (unsigned i = 0; i < b->n; i++) {
		struct coll_part *p = &b->colls[i]->parts[d];

		memcpy(all + n, p->launches, p->n_launches * sizeof(*all));
		n += p->n_launches;
		p->n_launches = 0;
	}
	last->n_launches = n;
	return 0;
}

static enum backend_order reduce_batch_order(const struct coll *c)
{
	return backend_info(c->parts[0].device->backend)->order;
}

/* One task on each device, behind the streams of all: the others' first tasks are empty and
 * stand before it in the order of the device. */
static enum res reduce_batch_submit(struct reduce_batch *b)
{
	struct coll *last = reduce_batch_last_of(b);

	CHECK(!b->pending && b->n > 0);
	for (unsigned d = 0; b->status == 0 && d < last->n_parts; d++)
		b->status = reduce_batch_collect(b, d);
	if (b->status)
		return RES_FAILED;
	for (unsigned d = 0; d < last->n_parts; d++) {
		CHECK(!b->own[d]);
		b->own[d] = last->parts[d].launches;
		last->parts[d].launches = b->launches[d];
	}
	b->began = b->began || reduce_batch_order(last) == BACKEND_ORDER_NONE;
	b->pending = b->began ? 1 : b->n;
	for (unsigned i = 0; !b->began && i + 1 < b->n; i++)
		coll_kernels(b->colls[i]);
	b->began = true;
	return coll_kernels(last);
}

static void reduce_batch_forget_launches(struct coll *c)
{
	for (unsigned d = 0; d < c->n_parts; d++)
		c->parts[d].n_launches = 0;
}

/* ------------------------------------------------------------ between devices */

static size_t reduce_batch_element(const struct coll *c)
{
	return dtype_size(reduce_of(c)->run->plan.sum_dtype);
}

static uint64_t reduce_batch_segments_of(const struct reduce_batch *b)
{
	uint64_t all = 0;

	for (unsigned i = 0; i < b->n; i++)
		all += reduce_segment(b->colls[i]);
	return all;
}

static enum res reduce_batch_finish(struct reduce_batch *b)
{
	for (unsigned i = 0; i < b->n; i++) {
		struct coll *c = b->colls[i];

		reduce_batch_forget_launches(c);
		for (unsigned d = 0; d < c->n_parts; d++)
			reduce_finish(c, d);
	}
	return reduce_batch_submit(b);
}

static enum res reduce_batch_talk(struct reduce_batch *b)
{
	struct coll *last = reduce_batch_last_of(b);
	const void *send[NODE_MAX_DEVICES];
	void *recv[NODE_MAX_DEVICES];
	uint64_t count = reduce_batch_segments_of(b);
	enum dtype dtype = reduce_of(last)->run->plan.sum_dtype;

	if (!last->group->nc || last->group->nc->state != COMM_READY) {
		b->status = ENGINE_E_ABORTED;
		return RES_FAILED;
	}
	b->pending = 1;
	for (unsigned i = 0; i < b->n; i++)
		(void)coll_comm(b->colls[i]); /* watched, each by its own deadline */
	for (unsigned d = 0; d < last->n_parts; d++) {
		send[d] = region_addr(&b->sums[d]);
		recv[d] = last->unit->spread == 1
				  ? region_addr(&b->sums[d])
				  : (char *)send[d] + (last->unit->first_part + d) * count *
							      dtype_size(dtype);
	}
	if (last->unit->spread == 1)
		comm_all_reduce(coll_between(last), &last->comm_op, recv, count, dtype, REDUCE_SUM);
	else
		comm_reduce_scatter(coll_between(last), &last->comm_op, send, recv, count, dtype);
	return RES_WAIT;
}

/* @c's sums to where all lie side by side, in every device's segment behind those of the
 * @before elements of others. */
static void reduce_batch_bring(const struct reduce_batch *b, struct coll *c, unsigned d,
			       uint64_t before)
{
	struct coll_part *p = &c->parts[d];
	uint64_t all = reduce_batch_segments_of(b), own = reduce_segment(c);
	char *to = region_addr(&b->sums[d]);
	const char *from = region_addr(&p->scratch[reduce_sums(c)]);

	CHECK(before + own <= all);
	for (unsigned s = 0; s < c->unit->spread; s++)
		coll_launch(p, LAUNCH_COPY, own * reduce_batch_element(c))->copy =
			(struct k_copy){ .dst = to + (s * all + before) * reduce_batch_element(c),
					 .src = from + s * own * reduce_batch_element(c) };
	p->sums = to + ((c->unit->spread == 1 ? 0 : (c->unit->first_part + d) * all) + before) *
			       reduce_batch_element(c);
}

static bool reduce_batch_take_sums(struct reduce_batch *b)
{
	struct coll *c = reduce_batch_last_of(b);
	uint64_t bytes = reduce_batch_segments_of(b) * c->unit->spread * reduce_batch_element(c);
	int r = 0;

	for (unsigned d = 0; r == 0 && d < c->n_parts; d++)
		r = pool_take(&c->job->mem.scratch[c->parts[d].device->index], bytes, &b->sums[d]);
	if (r == 0)
		window_check(c->group->nc, BACKEND_Q_MAIN, b->sums);
	return r == 0;
}

static enum res reduce_batch_bring_all(struct reduce_batch *b)
{
	uint64_t before = 0;

	for (unsigned i = 0; i < b->n; i++) {
		struct coll *c = b->colls[i];

		reduce_batch_forget_launches(c);
		for (unsigned d = 0; d < c->n_parts; d++)
			reduce_batch_bring(b, c, d, before);
		before += reduce_segment(c);
	}
	return reduce_batch_submit(b);
}

/* ------------------------------------------------------------------ the batch */

/* The next kernels of each. Return: RES_DONE: none has any left before devices talk. */
static enum res reduce_batch_fold(struct reduce_batch *b)
{
	bool any = false;

	for (unsigned i = 0; i < b->n; i++) {
		reduce_batch_forget_launches(b->colls[i]);
		any = reduce_next_stage(b->colls[i]) || any;
	}
	return any ? reduce_batch_submit(b) : RES_DONE;
}

enum reduce_batch_stage { BATCH_FOLD, BATCH_TALK, BATCH_FINISH, BATCH_DONE };

/* Without memory for the sums of all, and if it is but one, each goes on by itself. */
static enum res reduce_batch_tick(struct reduce_batch *b)
{
	switch ((enum reduce_batch_stage)b->stage) {
	case BATCH_FOLD:
		RES_TRY(reduce_batch_fold(b));
		b->then = REDUCE_BETWEEN;
		if (b->n == 1 || !reduce_batch_take_sums(b))
			return RES_DONE;
		b->stage = BATCH_TALK;
		return reduce_batch_bring_all(b);
	case BATCH_TALK:
		b->stage = BATCH_FINISH;
		return reduce_batch_talk(b);
	case BATCH_FINISH:
		b->stage = BATCH_DONE;
		return reduce_batch_finish(b);
	case BATCH_DONE:
		b->then = REDUCE_ARRIVE;
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

static void reduce_batch_go_on(struct reduce_batch *b)
{
	enum res r = b->status ? RES_FAILED : reduce_batch_tick(b);

	CHECK((r == RES_FAILED) == (b->status != 0));
	if (r != RES_WAIT)
		reduce_batch_part(b);
}

static struct coll *reduce_batch_first_small(const struct group *g)
{
	return coll_of_own(list_first(&g->small, struct reduce_state, small));
}

/* Side by side in one collective? */
static bool reduce_batch_goes_with(const struct coll *c, const struct coll *first)
{
	return reduce_of(c)->run->plan.sum_dtype == reduce_of(first)->run->plan.sum_dtype &&
	       c->unit->spread == first->unit->spread;
}

static void reduce_batch_take(struct reduce_batch *b)
{
	struct group *g = b->group;
	uint64_t bytes = 0;

	while (!list_empty(&g->small) && b->n < BATCH_MAX) {
		struct coll *c = reduce_batch_first_small(g);

		bytes += unit_gradient_bytes(c->unit);
		if (b->n && (bytes > g->job->node->limits.reduce_batch_bytes ||
			     !reduce_batch_goes_with(c, b->colls[0])))
			return;
		list_unlink(&reduce_of(c)->small);
		if (coll_check_epoch(c, true) != RES_DONE) { /* while it waited */
			coll_go_on(c);
			continue;
		}
		CHECK(!reduce_of(c)->batch);
		reduce_of(c)->batch = b;
		b->colls[b->n++] = c;
	}
}

/* Without memory for a batch the first of them ends. */
static void reduce_batch_next_batch(struct group *g)
{
	while (!g->small_runs && !list_empty(&g->small)) {
		struct coll *first = reduce_batch_first_small(g);
		struct reduce_batch *b = calloc(1, sizeof(*b));

		if (!b) {
			list_unlink(&reduce_of(first)->small);
			first->status = -ENOMEM;
			coll_go_on(first);
			continue;
		}
		b->group = g;
		g->small_runs = true;
		reduce_batch_take(b);
		if (b->n) {
			reduce_batch_go_on(b);
			continue;
		}
		g->small_runs = false;
		free(b);
	}
}

enum res reduce_batch_add(struct coll *c)
{
	struct group *g = c->group;
	struct job *job = c->job;

	list_init(&reduce_of(c)->small);
	list_append(&g->small, &reduce_of(c)->small);
	job->running++; /* what ends meanwhile may be the last of a deleted job */
	reduce_batch_next_batch(g);
	job_ran(job);
	return RES_WAIT;
}
