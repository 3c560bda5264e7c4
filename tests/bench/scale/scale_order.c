/* What the order takes by itself: two nodes, links that are a queue, and no operations. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "order/order.h"
#include "scale.h"

#define ORDER_NODES   2u
#define ORDER_ENTRIES 64u /* of a step, and its mark */
#define ORDER_STEPS   2000u
#define ORDER_WARM    200u

struct scale_order_node {
	struct order *o;
	uint32_t self;
	uint64_t starts;
};

struct scale_order {
	struct scale_order_node nodes[ORDER_NODES];
	struct {
		uint32_t from, to;
		struct order_msg msg;
	} wire[1024];
	unsigned at, n;
};

static struct scale_order scale_order;

static void scale_order_on_send(void *userdata, uint32_t to, const struct order_msg *msg)
{
	const struct scale_order_node *node = userdata;
	struct scale_order *s = &scale_order;

	CHECK(s->n < ARRAY_SIZE(s->wire));
	s->wire[s->n].from = node->self;
	s->wire[s->n].to = to;
	s->wire[s->n++].msg = *msg;
}

static void scale_order_on_start(void *userdata, const struct order_started *started)
{
	struct scale_order_node *node = userdata;

	node->starts++;
	order_done(node->o, started->position);
}

static void scale_order_on_fail(void *userdata, const struct order_key *key,
				const struct fault *fault)
{
	(void)userdata;
	(void)key;
	(void)fault;
	CHECK_NOT_REACHED();
}

static void scale_order_on_decide(void *userdata, const struct order_key *key)
{
	(void)userdata;
	(void)key;
	CHECK_NOT_REACHED();
}

static void scale_order_on_ended(void *userdata, const struct fault *fault)
{
	(void)userdata;
	(void)fault;
	CHECK_NOT_REACHED();
}

static void scale_order_deliver(void)
{
	struct scale_order *s = &scale_order;

	for (; s->at < s->n; s->at++)
		order_receive(s->nodes[s->wire[s->at].to].o, s->wire[s->at].from,
			      &s->wire[s->at].msg);
	s->at = s->n = 0;
}

static void scale_order_announce(uint32_t node, uint64_t number, uint32_t flags)
{
	struct order_print print = { .words = { 7 }, .text = "Op" };
	struct order_entry e = { .key = { ORDER_COLLECTIVE, 1, number },
				 .flags = flags,
				 .print = &print,
				 .rank = node,
				 .pid = 1 };

	CHECK(order_announce(scale_order.nodes[node].o, &e) == 0);
}

/* The entries of a step on both nodes, and then its mark. @ret_us: grows by the time of the entries alone. */
static void scale_order_step(uint64_t step, uint64_t *ret_us)
{
	const uint64_t first = step * (ORDER_ENTRIES + 1) + 1, begun = clock_now_us();

	for (uint64_t i = 0; i < ORDER_ENTRIES; i++) {
		for (uint32_t node = 0; node < ORDER_NODES; node++)
			scale_order_announce(node, first + i, 0);
		scale_order_deliver();
	}
	*ret_us += clock_now_us() - begun;
	for (uint32_t node = 0; node < ORDER_NODES; node++)
		scale_order_announce(node, first + ORDER_ENTRIES, ORDER_MARK);
	scale_order_deliver();
}

double scale_order_ns(bool recorded)
{
	static const char *const names[ORDER_NODES] = { "a", "b" };
	static const struct order_ops ops = { scale_order_on_send, scale_order_on_start,
					      scale_order_on_fail, scale_order_on_decide,
					      scale_order_on_ended };
	uint64_t us = 0;

	memset(&scale_order, 0, sizeof(scale_order));
	for (uint32_t i = 0; i < ORDER_NODES; i++) {
		struct order_options o = { .n_nodes = ORDER_NODES,
					   .self = i,
					   .names = names,
					   .max_ahead = 2 * ORDER_ENTRIES,
					   .max_recorded = 1024,
					   .no_schedules = !recorded,
					   .patience_us = 100000 };

		scale_order.nodes[i].self = i;
		CHECK(order_new(&o, &ops, &scale_order.nodes[i], &scale_order.nodes[i].o) == 0);
	}
	for (uint64_t step = 0; step < ORDER_WARM + ORDER_STEPS; step++) {
		if (step == ORDER_WARM)
			us = 0;
		scale_order_step(step, &us);
	}
	for (uint32_t i = 0; i < ORDER_NODES; i++) {
		CHECK(order_is_recorded(scale_order.nodes[i].o) == recorded);
		CHECK(scale_order.nodes[i].starts ==
		      (ORDER_WARM + ORDER_STEPS) * (ORDER_ENTRIES + 1));
		order_free(scale_order.nodes[i].o);
	}
	return (double)us * 1000 / (ORDER_STEPS * ORDER_ENTRIES * ORDER_NODES);
}
