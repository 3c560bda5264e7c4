#include "order/order.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/fnv.h"
#include "order/order_impl.h"

static void order_check_options(const struct order_options *p)
{
	CHECK(p->n_nodes && p->n_nodes <= ORDER_MAX_NODES && p->names);
	CHECK(p->self < p->n_nodes && p->leader < p->n_nodes && p->max_ahead);
}

/* The set of all nodes. */
static int order_init_sets(struct order *o)
{
	o->cap_sets = 8;
	o->sets = calloc(o->cap_sets, sizeof(*o->sets));
	if (!o->sets)
		return -ENOMEM;
	o->n_sets = 1;
	o->sets[0] = (struct order_set){ .n = o->options.n_nodes, .chain = FNV_BEGIN };
	for (uint32_t i = 0; i < o->options.n_nodes; i++)
		order_nodes_add(&o->sets[0].nodes, i);
	return 0;
}

int order_new(const struct order_options *options, const struct order_ops *ops, void *userdata,
	      struct order **ret)
{
	struct order *o;

	order_check_options(options);
	CHECK(ops->send && ops->start && ops->fail && ops->decide && ops->ended);
	o = calloc(1, sizeof(*o));
	if (!o)
		return -ENOMEM;
	o->options = *options;
	o->ops = *ops;
	o->userdata = userdata;
	o->me.pending.item_size = sizeof(struct order_pending);
	o->me.units.item_size = sizeof(struct order_unit);
	if (order_init_sets(o) || order_leader_init(o)) {
		order_free(o);
		return -ENOMEM;
	}
	*ret = o;
	return 0;
}

struct order *order_free(struct order *o)
{
	if (!o)
		return NULL;
	CHECK(!o->running);
	order_member_deinit(&o->me);
	order_leader_deinit(&o->lead);
	free(o->queue);
	free(o->sets);
	free(o);
	return NULL;
}

void order_break(struct order *o, enum fault_code code, const char *fmt, ...)
{
	struct fault f = FAULT_NULL;
	char text[sizeof(f.text)];
	va_list args;

	if (o->over)
		return;
	va_start(args, fmt);
	vsnprintf(text, sizeof(text), fmt, args);
	va_end(args);
	fault_set(&f, code, NULL, "%s", text);
	o->over = true;
	o->ops.ended(o->userdata, &f);
}

void order_break_peer(struct order *o, uint32_t node, const char *what)
{
	order_break(o, FAULT_ABORTED, "node %s sent %s: the order of this epoch cannot go on",
		    o->options.names[node], what);
}

void order_break_memory(struct order *o)
{
	order_break(o, FAULT_EXHAUSTED, "no memory for the order of this epoch");
}

void order_end(struct order *o)
{
	o->over = true;
}

bool order_is_recorded(const struct order *o)
{
	return o->me.mode != ORDER_NORMAL;
}

bool order_is_joint(const struct order_key *key, uint32_t flags)
{
	return key->kind == ORDER_APPLY || key->kind == ORDER_APPLY_UNIT || flags & ORDER_FLAGS;
}

/* How many nodes @nodes has. Return: 0 if some of them do not exist. */
static uint32_t order_set_count(const struct order *o, const struct order_nodes *nodes)
{
	uint32_t n = 0;

	for (unsigned i = 0; i < ARRAY_SIZE(nodes->words); i++) {
		if (nodes->words[i] & ~o->sets[0].nodes.words[i])
			return 0;
		n += (uint32_t)__builtin_popcountll(nodes->words[i]);
	}
	return n;
}

static int32_t order_set_add(struct order *o, const struct order_nodes *nodes, uint32_t n)
{
	if (o->n_sets == o->cap_sets) {
		uint32_t cap = o->cap_sets ? o->cap_sets * 2 : 8;
		struct order_set *grown =
			cap <= ORDER_MAX_SETS ? realloc(o->sets, cap * sizeof(*grown)) : NULL;

		if (!grown) {
			order_break(o, FAULT_EXHAUSTED, "no room for another set of nodes");
			return -1;
		}
		o->sets = grown;
		o->cap_sets = cap;
	}
	o->sets[o->n_sets] = (struct order_set){ .nodes = *nodes, .n = n, .chain = FNV_BEGIN };
	return (int32_t)o->n_sets++;
}

int32_t order_set_find(struct order *o, uint32_t from, bool all, const struct order_nodes *nodes)
{
	uint32_t n;

	if (all)
		return 0;
	for (uint32_t i = 0; i < o->n_sets; i++)
		if (memcmp(&o->sets[i].nodes, nodes, sizeof(*nodes)) == 0)
			return (int32_t)i;
	n = order_set_count(o, nodes);
	if (!n) {
		order_break_peer(o, from, "a set of nodes that do not exist");
		return -1;
	}
	return order_set_add(o, nodes, n);
}

bool order_set_has(const struct order *o, uint32_t set, uint32_t node)
{
	return order_nodes_has(&o->sets[set].nodes, node);
}

struct order_unit *order_unit_of(struct order *o, struct order_table *t,
				 const struct order_key *key)
{
	struct order_key unit = { .kind = key->kind, .group = key->group };
	struct order_unit *u = order_table_find(t, &unit);

	if (u)
		return u;
	u = t->n < ORDER_MAX_UNITS ? order_table_add(t, &unit) : NULL;
	if (!u)
		order_break_memory(o);
	return u;
}

bool order_unit_is_over(const struct order_table *t, const struct order_key *key)
{
	const struct order_key unit = { .kind = key->kind, .group = key->group };
	const struct order_unit *u = key->kind == ORDER_GATHER ? order_table_find(t, &unit) : NULL;

	return u && key->number <= u->last;
}

void order_overtaken_fault(struct fault *f)
{
	fault_set(f, FAULT_STATE, NULL,
		  "another node has gathered a later version of the unit already");
}

/* Twice the room; what is queued begins at 0 then. */
static bool order_queue_grow(struct order *o)
{
	uint32_t cap = o->queue_cap ? o->queue_cap * 2 : 4;
	struct order_queued *grown = malloc(cap * sizeof(*grown));

	if (!grown)
		return false;
	for (uint32_t i = 0; i < o->queue_n; i++)
		grown[i] = o->queue[(o->queue_at + i) % o->queue_cap];
	free(o->queue);
	o->queue = grown;
	o->queue_cap = cap;
	o->queue_at = 0;
	return true;
}

static void order_queue_add(struct order *o, uint32_t from, const struct order_msg *msg)
{
	struct order_queued *q;

	if (o->queue_n == o->queue_cap && !order_queue_grow(o)) {
		order_break_memory(o);
		return;
	}
	q = &o->queue[(o->queue_at + o->queue_n++) % o->queue_cap];
	q->from = from;
	q->msg = *msg;
}

void order_send(struct order *o, uint32_t node, const struct order_msg *msg)
{
	if (o->over)
		return;
	if (node == o->options.self)
		order_queue_add(o, node, msg);
	else
		o->ops.send(o->userdata, node, msg);
}

static bool order_is_to_leader(uint8_t type)
{
	return type == ORDER_MSG_ANNOUNCE || type == ORDER_MSG_REFUSE ||
	       type == ORDER_MSG_DEVIATE || type == ORDER_MSG_REACHED ||
	       type == ORDER_MSG_CAUGHT_UP;
}

static void order_take(struct order *o, uint32_t from, const struct order_msg *msg)
{
	if (order_is_to_leader(msg->type))
		order_leader_receive(o, from, msg);
	else
		order_member_receive(o, msg);
}

/* One message to ourselves. Return: false if there is none. */
static bool order_take_queued(struct order *o)
{
	struct order_queued q;

	if (!o->queue_n)
		return false;
	q = o->queue[o->queue_at]; /* the place may move or be used again meanwhile */
	o->queue_at = (o->queue_at + 1) % o->queue_cap;
	o->queue_n--;
	order_take(o, q.from, &q.msg);
	return true;
}

void order_run(struct order *o)
{
	if (o->running)
		return;
	o->running = true;
	while (!o->over && (order_take_queued(o) || order_replay_advance(o)))
		;
	o->running = false;
}

void order_receive(struct order *o, uint32_t from, const struct order_msg *msg)
{
	bool to_leader = order_is_to_leader(msg->type);

	CHECK(from < o->options.n_nodes && from != o->options.self);
	if (o->over)
		return;
	if (to_leader ? o->options.self != o->options.leader : from != o->options.leader) {
		order_break_peer(o, from,
				 to_leader ? "what only the leader may get"
					   : "what only the leader may send");
		return;
	}
	if (o->running || o->queue_n) {
		order_queue_add(o, from, msg);
	} else {
		o->running = true;
		order_take(o, from, msg);
		o->running = false;
	}
	order_run(o);
}

void order_tick(struct order *o, uint64_t now_us)
{
	o->now_us = now_us;
	if (o->over)
		return;
	order_replay_tick(o);
	order_run(o);
}
