/*
 * The engine between the nodes, without connections: members meet as those of Gloo or of NCCL do, over the store
 * of the epoch. Operations end at once and move nothing.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <netinet/in.h>

#include "core/check.h"
#include "core/list.h"
#include "engine/gloo_card.h"
#include "scale.h"

struct scale_engine {
	struct engine engine;
	struct loopq *loopq;
	enum scale_way way;
	struct list making; /* of struct scale_comm */
};

struct scale_comm {
	struct comm comm;
	struct list link;
	struct comm_store store;
	char prefix[200];
	unsigned next;  /* the member whose key is looked for */
	uint8_t *cards; /* of all members; the own one behind them */
	struct work work;
};

struct scale_op {
	struct work work;
	struct comm *c;
	struct comm_op *op;
};

static void scale_op_on_work(struct work *work)
{
	struct scale_op *o = CONTAINER_OF(work, struct scale_op, work);

	comm_complete(o->c, o->op, o->c->aborted ? ENGINE_E_ABORTED : 0);
	free(o);
}

static void scale_op_begin(struct comm *c, struct comm_op *op)
{
	struct scale_op *o = calloc(1, sizeof(*o));

	CHECK(o);
	o->c = c;
	o->op = op;
	loopq_post(((struct scale_engine *)c->engine)->loopq, &o->work, scale_op_on_work);
}

static void scale_comm_ready(struct scale_comm *c)
{
	list_unlink(&c->link);
	free(c->cards);
	c->cards = NULL;
	c->comm.ready(c->comm.userdata, &c->comm, 0);
}

static void scale_comm_on_work(struct work *work)
{
	scale_comm_ready(CONTAINER_OF(work, struct scale_comm, work));
}

/* As gloo_meet.c. */
static void scale_comm_look_cards(struct scale_comm *c)
{
	struct comm_exchange x = { .key = c->prefix,
				   .size = c->comm.size,
				   .member = c->comm.member,
				   .bytes = GLOO_CARD_BYTES,
				   .value = c->cards + c->comm.size * GLOO_CARD_BYTES,
				   .all = c->cards };
	int r = c->store.exchange(c->store.userdata, &x, 0);

	if (r == -ETIMEDOUT)
		return;
	CHECK(r == 0);
	for (unsigned i = 0; i < c->comm.size; i++)
		CHECK(gloo_card_check(c->cards + i * GLOO_CARD_BYTES, (int)c->comm.size));
	scale_comm_ready(c);
}

/* Return: whether the value is there. */
static bool scale_comm_get(struct scale_comm *c, const char *what, const char *expected)
{
	char key[256], value[16];
	long got;

	snprintf(key, sizeof(key), "%s/%s", c->prefix, what);
	got = c->store.get(c->store.userdata, key, 0, value, sizeof(value));
	CHECK(got == -ETIMEDOUT ||
	      (got == (long)strlen(expected) && memcmp(value, expected, (size_t)got) == 0));
	return got > 0;
}

static int scale_comm_set(struct scale_comm *c, const char *what, const char *value)
{
	char key[256];

	snprintf(key, sizeof(key), "%s/%s", c->prefix, what);
	return c->store.set(c->store.userdata, key, value, strlen(value));
}

static int scale_comm_show_key(struct scale_comm *c)
{
	char what[16];

	snprintf(what, sizeof(what), "%u", c->comm.member);
	return scale_comm_set(c, what, "nccl");
}

/* As nccl_meet.c: member 0 makes the id when it has seen all others. */
static void scale_comm_look_keys(struct scale_comm *c)
{
	char what[16];

	if (c->comm.member) {
		if (scale_comm_get(c, "id", "id of all"))
			scale_comm_ready(c);
		return;
	}
	for (c->next += c->next == 0; c->next < c->comm.size; c->next++) {
		snprintf(what, sizeof(what), "%u", c->next);
		if (!scale_comm_get(c, what, "nccl"))
			return;
	}
	CHECK(scale_comm_set(c, "id", "id of all") == 0);
	scale_comm_ready(c);
}

void scale_engine_look(struct engine *e)
{
	struct scale_engine *s = (struct scale_engine *)e;
	struct scale_comm *c, *tmp;

	if (s->way == SCALE_AT_ONCE)
		return;
	list_for_each (c, tmp, &s->making, link)
		if (s->way == SCALE_GLOO)
			scale_comm_look_cards(c);
		else
			scale_comm_look_keys(c);
}

static int scale_comm_make_card(struct scale_comm *c)
{
	const struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(1) };
	struct sockaddr_storage address = { 0 };

	c->cards = calloc(c->comm.size + 1, GLOO_CARD_BYTES);
	CHECK(c->cards);
	memcpy(&address, &at, sizeof(at));
	return gloo_card_make(c->cards + c->comm.size * GLOO_CARD_BYTES, (int)c->comm.size,
			      &address);
}

static int scale_comm_new(struct engine *e, const struct comm_options *o)
{
	struct scale_engine *s = (struct scale_engine *)e;
	struct scale_comm *c = calloc(1, sizeof(*c));

	CHECK(c && o->group && comm_init(&c->comm, e, o, o->group->size, o->group->member) == 0);
	list_init(&c->link);
	list_append(&s->making, &c->link);
	if (s->way == SCALE_AT_ONCE) {
		loopq_post(s->loopq, &c->work, scale_comm_on_work);
		return 0;
	}
	c->store = *o->group->store;
	snprintf(c->prefix, sizeof(c->prefix), "%s", o->group->prefix);
	return s->way == SCALE_GLOO ? scale_comm_make_card(c) : scale_comm_show_key(c);
}

static void scale_comm_free(struct comm *c)
{
	struct scale_comm *s = CONTAINER_OF(c, struct scale_comm, comm);

	free(s->cards);
	free(s);
}

static void scale_comm_abort(struct comm *c)
{
	(void)c;
}

static void scale_all_gather(struct comm *c, struct comm_op *op, const void *const *send,
			     void *const *recv, uint64_t count, enum dtype dtype)
{
	(void)send, (void)recv, (void)count, (void)dtype;
	scale_op_begin(c, op);
}

static void scale_all_reduce(struct comm *c, struct comm_op *op, void *const *data, uint64_t count,
			     enum dtype dtype, enum reduce_op reduce)
{
	(void)data, (void)count, (void)dtype, (void)reduce;
	scale_op_begin(c, op);
}

static void scale_broadcast(struct comm *c, struct comm_op *op, void *const *data, uint64_t bytes,
			    unsigned root)
{
	(void)data, (void)bytes, (void)root;
	scale_op_begin(c, op);
}

static void scale_engine_close(struct engine *e)
{
	free(e);
}

int scale_engine_new(struct loopq *loopq, enum scale_way way, struct engine **ret)
{
	static const struct engine_ops ops = { .name = "scale",
					       .groups = true,
					       .comm_new = scale_comm_new,
					       .comm_free = scale_comm_free,
					       .abort = scale_comm_abort,
					       .all_gather = scale_all_gather,
					       .reduce_scatter = scale_all_gather,
					       .all_reduce = scale_all_reduce,
					       .broadcast = scale_broadcast,
					       .close = scale_engine_close };
	struct scale_engine *s = calloc(1, sizeof(*s));

	if (!s)
		return -ENOMEM;
	engine_init(&s->engine, &ops);
	s->loopq = loopq;
	s->way = way;
	list_init(&s->making);
	*ret = &s->engine;
	return 0;
}
