/* What the leader does beside: it collects announcements, and gives entries their positions. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "order/order_impl.h"

int order_leader_init(struct order *o)
{
	struct order_leader *l = &o->lead;

	l->open.item_size = sizeof(struct order_open);
	l->units.item_size = sizeof(struct order_unit);
	l->compared.item_size = sizeof(struct order_compared);
	if (o->options.self != o->options.leader)
		return 0;
	l->ahead = calloc(o->options.n_nodes, sizeof(*l->ahead));
	if (!l->ahead)
		return -ENOMEM;
	l->need = 1;
	l->caught = o->sets[0].nodes;
	l->n_caught = o->options.n_nodes;
	return 0;
}

void order_leader_deinit(struct order_leader *l)
{
	order_table_deinit(&l->open);
	order_table_deinit(&l->units);
	order_table_deinit(&l->compared);
	order_history_deinit(&l->history);
	order_schedule_deinit(&l->schedule);
	free(l->ahead);
}

void order_leader_send_all(struct order *o, uint32_t set, const struct order_msg *msg)
{
	for (uint32_t i = 0; i < o->options.n_nodes; i++)
		if (order_set_has(o, set, i))
			order_send(o, i, msg);
}

static bool order_leader_all_heard(const struct order *o, const struct order_open *e)
{
	return e->n_heard == o->sets[e->set].n;
}

/* @e is not open any more: its nodes may announce others. */
static void order_leader_uncount(struct order *o, const struct order_open *e)
{
	for (uint32_t i = 0; i < o->options.n_nodes; i++)
		if (order_nodes_has(&e->heard, i)) {
			CHECK(o->lead.ahead[i]);
			o->lead.ahead[i]--;
		}
}

void order_leader_forget_open(struct order *o)
{
	struct order_table *t = &o->lead.open;

	CHECK(!o->lead.n_deciding);
	for (uint32_t i = t->n; i--;) {
		struct order_open *e = order_table_item(t, i);

		if (e->state == ORDER_OPEN)
			order_table_remove(t, e);
	}
	memset(o->lead.ahead, 0, o->options.n_nodes * sizeof(*o->lead.ahead));
}

/* Gathers of this unit up to this one are over. */
static bool order_leader_gather_over(struct order *o, const struct order_key *key)
{
	struct order_unit *u = order_unit_of(o, &o->lead.units, key);

	if (!u)
		return false;
	u->last = key->number > u->last ? key->number : u->last;
	return true;
}

/* The position that @e gets: the next one, or the one that the schedule has for it. */
static uint64_t order_leader_position(struct order *o)
{
	struct order_leader *l = &o->lead;

	if (l->state == ORDER_LEADS)
		return ++l->position;
	l->position = order_schedule_position(&l->schedule);
	order_schedule_advance(&l->schedule);
	order_schedule_skip(&l->schedule);
	return l->position;
}

static void order_leader_record(struct order *o, const struct order_open *e)
{
	struct order_rec rec = { .key = e->key, .set = e->set, .flags = e->flags };

	memcpy(rec.words, e->print.words, sizeof(rec.words));
	order_history_add(&o->lead.history, &rec, o->lead.position, o->options.max_recorded);
}

static void order_leader_start(struct order *o, struct order_open *e)
{
	struct order_msg msg = { .type = ORDER_MSG_START,
				 .flags = e->flags & ORDER_MSG_ALL,
				 .phase = o->lead.phase,
				 .key = e->key,
				 .nodes = o->sets[e->set].nodes };
	bool mark = e->flags & ORDER_MARK;

	if (e->key.kind == ORDER_GATHER && !order_leader_gather_over(o, &e->key))
		return;
	msg.position = order_leader_position(o);
	if (o->lead.state == ORDER_LEADS)
		order_leader_record(o, e);
	order_leader_send_all(o, e->set, &msg);
	order_leader_uncount(o, e);
	o->lead.n_deciding -= e->state == ORDER_DECIDING;
	order_table_remove(&o->lead.open, e);
	if (mark && o->lead.state == ORDER_LEADS)
		order_leader_mark(o);
}

/* All nodes of @e are told; it stays until each has announced it. */
static void order_leader_fail(struct order *o, struct order_open *e, const struct fault *fault)
{
	struct order_msg msg = {
		.type = ORDER_MSG_FAIL, .phase = o->lead.phase, .key = e->key, .fault = *fault
	};

	order_leader_send_all(o, e->set, &msg);
	order_leader_uncount(o, e);
	o->lead.n_deciding -= e->state == ORDER_DECIDING;
	if (e->key.kind == ORDER_GATHER)
		order_leader_gather_over(o, &e->key);
	if (e->key.kind == ORDER_GATHER || order_leader_all_heard(o, e)) {
		order_table_remove(&o->lead.open, e);
		return;
	}
	e->state = ORDER_FAILING;
	if (++o->lead.n_failing > 4 * o->options.max_ahead)
		order_break(o, FAULT_EXHAUSTED,
			    "%u operations have failed that some node has not come to",
			    o->lead.n_failing);
}

/* Are all its nodes where the order goes on? */
static bool order_leader_may_start(const struct order *o, const struct order_open *e)
{
	const struct order_nodes *nodes = &o->sets[e->set].nodes;

	if (o->lead.n_caught == o->options.n_nodes)
		return true;
	for (unsigned i = 0; i < ARRAY_SIZE(nodes->words); i++)
		if (nodes->words[i] & ~o->lead.caught.words[i])
			return false;
	return true;
}

static bool order_leader_is_ready(const struct order *o, const struct order_open *e)
{
	return e->state == ORDER_OPEN && order_leader_may_start(o, e) &&
	       (e->key.kind == ORDER_GATHER || order_leader_all_heard(o, e));
}

/* Start @e, or let it be decided, if it is ready. */
static void order_leader_go_on(struct order *o, struct order_open *e)
{
	struct order_key key = e->key;
	struct fault f = FAULT_NULL;

	if (!order_leader_is_ready(o, e))
		return;
	if (order_unit_is_over(&o->lead.units, &key)) {
		order_overtaken_fault(&f);
		order_leader_fail(o, e, &f);
		return;
	}
	if (!(e->flags & ORDER_DECISION)) {
		order_leader_start(o, e);
		return;
	}
	e->state = ORDER_DECIDING;
	o->lead.n_deciding++;
	o->ops.decide(o->userdata, &key);
}

void order_leader_start_ready(struct order *o)
{
	struct order_open *first;

	do {
		first = NULL;
		for (uint32_t i = 0; i < o->lead.open.n; i++) {
			struct order_open *e = order_table_item(&o->lead.open, i);

			if (order_leader_is_ready(o, e) && (!first || e->seq < first->seq))
				first = e;
		}
		if (first)
			order_leader_go_on(o, first);
	} while (first && !o->over);
}

void order_decided(struct order *o, const struct order_key *key, bool done,
		   const struct fault *fault)
{
	struct order_open *e = o->over ? NULL : order_table_find(&o->lead.open, key);

	if (o->over)
		return;
	CHECK(e && e->state == ORDER_DECIDING && (done || fault->code));
	if (done)
		order_leader_start(o, e);
	else
		order_leader_fail(o, e, fault);
	if (!done && o->lead.state == ORDER_LETS_REPEAT)
		order_leader_stop(o); /* the schedule would go on behind it */
	if (o->lead.state == ORDER_STOPS)
		order_leader_resume(o);
	order_run(o);
}

static void order_leader_mismatch(struct order *o, struct order_open *e, uint32_t from,
				  const struct order_msg *msg)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_STATE, NULL,
		  "ops differ at number %llu: rank %u (pid %d) on node %s asks for %s, "
		  "rank %u (pid %d) on node %s for %s",
		  (unsigned long long)e->key.number, e->rank, e->pid, o->options.names[e->first],
		  e->print.text, msg->rank, msg->pid, o->options.names[from], msg->print.text);
	order_leader_fail(o, e, &f);
}

/* A node has announced an entry that has failed, or refused it: it may be the last. */
static void order_leader_hear_failed(struct order *o, struct order_open *e, uint32_t from)
{
	if (!order_set_has(o, e->set, from) || !order_nodes_add(&e->heard, from)) {
		order_break_peer(o, from, "the announcement of an operation twice");
		return;
	}
	e->n_heard++;
	if (!order_leader_all_heard(o, e))
		return;
	o->lead.n_failing--;
	order_table_remove(&o->lead.open, e);
}

static struct order_open *order_leader_add(struct order *o, uint32_t from, uint32_t set,
					   const struct order_msg *msg)
{
	struct order_open *e = order_table_add(&o->lead.open, &msg->key);

	if (!e) {
		order_break_memory(o);
		return NULL;
	}
	e->set = set;
	e->flags = msg->flags & (ORDER_FLAGS | ORDER_MSG_ALL);
	e->seq = o->lead.seq++;
	e->first = from;
	e->rank = msg->rank;
	e->pid = msg->pid;
	e->print = msg->print;
	return e;
}

/* What no correct node sends. Return: what it is, or NULL. */
static const char *order_leader_wrong(const struct order *o, uint32_t from, uint32_t set,
				      const struct order_msg *msg, const struct order_open *e)
{
	uint8_t flags = msg->flags & ORDER_FLAGS;
	/* A node that refuses an operation may not know what it is. */
	bool refused = msg->type == ORDER_MSG_REFUSE || (e && e->state == ORDER_FAILING);

	if (!order_set_has(o, set, from))
		return "an operation of other nodes";
	if (msg->key.kind == ORDER_GATHER ? flags : (flags & ORDER_MARK && set))
		return "a mark that is none";
	if (o->lead.state == ORDER_LEADS && !order_nodes_has(&o->lead.caught, from))
		return "an operation before it has caught up";
	if (e && e->set != set)
		return "an operation of other nodes than another node has there";
	if (e && !refused && (e->flags ^ msg->flags) & ORDER_FLAGS)
		return "an operation that is joint on some nodes only";
	if (e && order_nodes_has(&e->heard, from))
		return "the announcement of an operation twice";
	if (msg->type == ORDER_MSG_ANNOUNCE && o->lead.ahead[from] >= o->options.max_ahead)
		return "more operations than may wait";
	return NULL;
}

/* The entry that @msg is about, known or new. Return: NULL if the epoch has ended. */
static struct order_open *order_leader_entry(struct order *o, uint32_t from,
					     const struct order_msg *msg)
{
	struct order_open *e = order_table_find(&o->lead.open, &msg->key);
	int32_t set = order_set_find(o, from, msg->flags & ORDER_MSG_ALL, &msg->nodes);
	const char *wrong = set < 0 ? NULL : order_leader_wrong(o, from, (uint32_t)set, msg, e);

	if (wrong)
		order_break_peer(o, from, wrong);
	if (set < 0 || wrong)
		return NULL;
	return e ? e : order_leader_add(o, from, (uint32_t)set, msg);
}

/* The turn of the gather is over: its start has crossed the announcement, unless a later gather of the unit
 * has overtaken it. A node that has got the start ignores the failure. */
static bool order_leader_is_over(struct order *o, uint32_t from, const struct order_msg *msg)
{
	struct order_msg reply = { .type = ORDER_MSG_FAIL,
				   .phase = o->lead.phase,
				   .key = msg->key };

	if (!order_unit_is_over(&o->lead.units, &msg->key))
		return false;
	order_overtaken_fault(&reply.fault);
	if (order_unit_of(o, &o->lead.units, &msg->key)->last > msg->key.number)
		order_send(o, from, &reply);
	return true;
}

/* While a schedule is followed only what is joint is announced, and only in its place. */
static bool order_leader_is_next(const struct order *o, const struct order_msg *msg)
{
	const struct order_rec *rec = order_schedule_next(&o->lead.schedule);
	struct order_key key = order_schedule_key(&o->lead.schedule);

	return order_key_equal(&key, &msg->key) && msg->flags == rec->flags;
}

/* Return: false: it is not what another node has started, or there is no memory; the epoch has ended. */
static bool order_leader_compare_one(struct order *o, uint32_t from, const struct order_open *e,
				     const struct order_chain *c)
{
	const struct order_key key = { .kind = ORDER_COLLECTIVE,
				       .group = c->set,
				       .number = e->seq };
	struct order_compared *first = order_table_find(&o->lead.compared, &key);

	if (!first) {
		first = order_table_add(&o->lead.compared, &key);
		if (!first) {
			order_break_memory(o);
			return false;
		}
		first->value = c->value;
		first->node = from;
	}
	if (first->value == c->value)
		return true;
	order_break(o, FAULT_STATE,
		    "nodes %s and %s started different operations since the previous step, "
		    "although both followed the recorded order",
		    o->options.names[first->node], o->options.names[from]);
	return false;
}

/* In a schedule: has @from started what the others have? */
static bool order_leader_compare(struct order *o, uint32_t from, const struct order_open *e,
				 const struct order_msg *msg)
{
	if (e->n_heard == 1) /* that of the joint entry before has no use any more */
		order_table_deinit(&o->lead.compared);
	for (uint32_t i = 0; i < msg->n_chains; i++)
		if (!order_leader_compare_one(o, from, e, &msg->chains[i]))
			return false;
	return true;
}

static void order_leader_hear(struct order *o, uint32_t from, const struct order_msg *msg)
{
	struct order_open *e;

	if (order_leader_is_over(o, from, msg))
		return;
	e = order_leader_entry(o, from, msg);
	if (!e)
		return;
	if (e->state == ORDER_FAILING) {
		order_leader_hear_failed(o, e, from);
		return;
	}
	order_nodes_add(&e->heard, from);
	e->n_heard++;
	o->lead.ahead[from]++;
	if (o->lead.state == ORDER_LETS_REPEAT && !order_leader_compare(o, from, e, msg))
		return;
	if (memcmp(e->print.words, msg->print.words, sizeof(e->print.words)) == 0)
		order_leader_go_on(o, e);
	else if (o->lead.state == ORDER_LETS_REPEAT)
		order_leader_stop(o); /* it fails when they tell of it again, in no schedule */
	else
		order_leader_mismatch(o, e, from, msg);
}

/* It is known to fail, and the node has told its own. */
static void order_leader_on_known(struct order *o, uint32_t from, const struct order_msg *msg)
{
	struct order_open *e = order_table_find(&o->lead.open, &msg->key);

	if (e && e->state == ORDER_FAILING)
		order_leader_hear_failed(o, e, from);
	else
		order_break_peer(o, from, "an operation as failed that has not");
}

static void order_leader_on_announce(struct order *o, uint32_t from, const struct order_msg *msg)
{
	if (msg->flags & ORDER_MSG_KNOWN)
		order_leader_on_known(o, from, msg);
	else if (o->lead.state == ORDER_STOPS)
		return; /* it comes again in the next phase */
	else if (o->lead.state == ORDER_LETS_REPEAT && !order_leader_is_next(o, msg))
		order_break_peer(o, from, "an operation that is not next in the schedule");
	else
		order_leader_hear(o, from, msg);
}

/* The refusal of something that it has announced. */
static void order_leader_refuse_again(struct order *o, uint32_t from, const struct order_msg *msg)
{
	struct order_open *e = order_table_find(&o->lead.open, &msg->key);

	if (e && e->state == ORDER_DECIDING) { /* a decision that takes effect cannot be refused */
		order_break(o, FAULT_ABORTED, "node %s has given up what is being decided: %.350s",
			    o->options.names[from], msg->fault.text);
		return;
	}
	if (!e || e->state != ORDER_OPEN)
		return; /* it was started or failed meanwhile, and the node gets to know that */
	if (order_nodes_has(&e->heard, from))
		order_leader_fail(o, e, &msg->fault);
	else
		order_break_peer(o, from, "an operation as announced that was not");
}

static void order_leader_on_refuse(struct order *o, uint32_t from, const struct order_msg *msg)
{
	struct order_open *e;

	if (o->lead.state != ORDER_LEADS) {
		order_break_peer(o, from, "a refusal, and has not left the schedule");
		return;
	}
	if (order_leader_is_over(o, from, msg))
		return;
	if (msg->flags & ORDER_MSG_AGAIN) {
		order_leader_refuse_again(o, from, msg);
		return;
	}
	e = order_leader_entry(o, from, msg);
	if (!e)
		return;
	if (e->state == ORDER_FAILING) {
		order_leader_hear_failed(o, e, from);
		return;
	}
	order_nodes_add(&e->heard, from);
	e->n_heard++;
	o->lead.ahead[from]++;
	order_leader_fail(o, e, &msg->fault);
}

void order_leader_receive(struct order *o, uint32_t from, const struct order_msg *msg)
{
	bool entry = msg->type == ORDER_MSG_ANNOUNCE || msg->type == ORDER_MSG_REFUSE;

	/* a schedule begins without a word of the nodes: what has crossed it comes again */
	if (entry && msg->phase + 1 == o->lead.phase && o->lead.state != ORDER_LEADS &&
	    !(msg->flags & ORDER_MSG_KNOWN))
		return;
	if (msg->phase != o->lead.phase)
		order_break_peer(o, from, "a message of another phase");
	else if (msg->type == ORDER_MSG_ANNOUNCE)
		order_leader_on_announce(o, from, msg);
	else if (msg->type == ORDER_MSG_REFUSE)
		order_leader_on_refuse(o, from, msg);
	else if (msg->type == ORDER_MSG_CAUGHT_UP)
		order_leader_on_caught_up(o, from);
	else
		order_leader_on_told(o, from, msg);
}
