/* What a node does when the leader orders: it announces, and starts what it is told. */
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/fnv.h"
#include "core/text.h"
#include "order/order_impl.h"

static void order_member_drop(struct order *o, struct order_pending *p)
{
	o->me.n_refused -= p->state == ORDER_REFUSED;
	o->me.n_failed -= p->state == ORDER_FAILED;
	free(p->fault);
	order_table_remove(&o->me.pending, p);
}

void order_member_deinit(struct order_member *m)
{
	for (uint32_t i = 0; i < m->pending.n; i++)
		free(((struct order_pending *)order_table_item(&m->pending, i))->fault);
	for (uint32_t i = 0; i < m->units.n; i++)
		free(((struct order_unit *)order_table_item(&m->units, i))->fault);
	order_table_deinit(&m->pending);
	order_table_deinit(&m->units);
	order_history_deinit(&m->history);
	order_schedule_deinit(&m->schedule);
	free(m->watches);
}

/* A copy of @f. Return: NULL if there is no memory (the epoch has ended). */
static struct fault *order_member_fault(struct order *o, const struct fault *f)
{
	struct fault *copy = malloc(sizeof(*copy));

	if (!copy) {
		order_break_memory(o);
		return NULL;
	}
	*copy = *f;
	return copy;
}

/* Take @p away and tell its owner. */
static void order_member_fail(struct order *o, struct order_pending *p, const struct fault *fault)
{
	struct order_key key = p->key;
	struct fault f = *fault; /* it may be @p's */

	order_member_drop(o, p);
	o->ops.fail(o->userdata, &key, &f);
}

/* In a schedule a node comes to a joint entry when it has started all before it: so all that have entries
 * in common must have the same fingerprints here. */
static void order_member_add_chains(const struct order *o, struct order_msg *msg)
{
	for (uint32_t i = 0; i < o->n_sets && msg->n_chains < ORDER_MSG_CHAINS; i++) {
		const struct order_set *s = &o->sets[i];
		struct order_chain *c = &msg->chains[msg->n_chains];

		if (!order_set_has(o, i, o->options.self))
			continue;
		c->set = FNV_BEGIN;
		for (unsigned k = 0; k < ARRAY_SIZE(s->nodes.words); k++)
			c->set = fnv_add(c->set, s->nodes.words[k]);
		c->value = s->chain;
		msg->n_chains++;
	}
}

static void order_member_send_entry(struct order *o, uint8_t type, const struct order_pending *p,
				    uint8_t flags)
{
	struct order_msg msg = { .type = type,
				 .flags = p->flags | flags,
				 .phase = o->me.phase,
				 .key = p->key,
				 .nodes = o->sets[p->set].nodes };

	if (type == ORDER_MSG_ANNOUNCE) {
		msg.print = p->print;
		msg.rank = p->rank;
		msg.pid = p->pid;
		if (o->me.mode == ORDER_RECORDED)
			order_member_add_chains(o, &msg);
	} else {
		msg.fault = *p->fault;
	}
	order_send(o, o->options.leader, &msg);
}

void order_member_tell(struct order *o, struct order_pending *p)
{
	bool again = p->sent;

	p->sent = true;
	if (p->state == ORDER_REFUSED)
		order_member_send_entry(o, ORDER_MSG_REFUSE, p, again ? ORDER_MSG_AGAIN : 0);
	else
		order_member_send_entry(o, ORDER_MSG_ANNOUNCE, p, 0);
}

/* The oldest that the leader has not been told of. */
static struct order_pending *order_member_unsent(struct order *o)
{
	struct order_pending *first = NULL;

	for (uint32_t i = 0; i < o->me.pending.n; i++) {
		struct order_pending *p = order_table_item(&o->me.pending, i);

		if (!p->sent && p->state != ORDER_FAILED && (!first || p->seq < first->seq))
			first = p;
	}
	return first;
}

/* A gather that waits for a turn that a later one of its unit has had. */
static struct order_pending *order_member_overtaken(struct order *o)
{
	for (uint32_t i = 0; i < o->me.pending.n; i++) {
		struct order_pending *p = order_table_item(&o->me.pending, i);

		if (order_unit_is_over(&o->me.units, &p->key))
			return p;
	}
	return NULL;
}

void order_member_tell_all(struct order *o)
{
	struct fault f = FAULT_NULL;
	struct order_pending *p;

	for (uint32_t i = 0; i < o->me.pending.n; i++)
		((struct order_pending *)order_table_item(&o->me.pending, i))->sent = false;
	order_overtaken_fault(&f);
	while ((p = order_member_overtaken(o)))
		order_member_fail(o, p, &f);
	while ((p = order_member_unsent(o)))
		order_member_tell(o, p);
}

static void order_member_check(const struct order *o, const struct order_entry *e)
{
	bool gather = e->key.kind == ORDER_GATHER;

	CHECK(e->key.kind && e->key.kind < _ORDER_KIND_N);
	CHECK(gather ? !e->flags && !e->print : !!e->print);
	CHECK(!(e->flags & ~(uint32_t)ORDER_FLAGS));
	CHECK(!e->nodes || order_nodes_has(e->nodes, o->options.self));
}

/* Make a new pending entry. Return: NULL if it cannot be (the epoch has ended). */
static struct order_pending *order_member_add(struct order *o, const struct order_entry *e)
{
	int32_t set = order_set_find(o, o->options.self, !e->nodes, e->nodes);
	struct order_pending *p = set < 0 ? NULL : order_table_add(&o->me.pending, &e->key);

	if (!p) {
		order_break_memory(o);
		return NULL;
	}
	CHECK(!(e->flags & ORDER_MARK) || !set);
	p->set = (uint32_t)set;
	p->flags = (uint8_t)(e->flags | (set ? 0 : ORDER_MSG_ALL));
	p->seq = o->me.seq++;
	p->rank = e->rank;
	p->pid = e->pid;
	if (e->print)
		p->print = *e->print;
	return p;
}

/* It has failed before its owner has come: the leader waits for that to forget it. */
static void order_member_known(struct order *o, struct order_pending *p,
			       const struct order_entry *e)
{
	int32_t set = order_set_find(o, o->options.self, !e->nodes, e->nodes);

	if (set < 0)
		return;
	p->set = (uint32_t)set;
	p->flags = (uint8_t)(e->flags | (set ? 0 : ORDER_MSG_ALL));
	order_member_send_entry(o, ORDER_MSG_ANNOUNCE, p, ORDER_MSG_KNOWN);
	order_member_fail(o, p, p->fault);
	order_run(o);
}

/* May a recorded step wait here until this node asks for the gather? Only if the ranks did so before they
 * asked for anything that comes later: else they might never come to it. */
static void order_member_asked_late(struct order *o, const struct order_unit *u)
{
	struct order_record *r = &o->me.history.now;
	uint32_t waiting = o->me.pending.n - o->me.n_failed;

	if (waiting || u->position < o->me.asked || o->me.mode != ORDER_NORMAL)
		return;
	o->me.asked = u->position;
	for (uint32_t i = r->n; r->valid && i-- && r->base + r->recs[i].at >= u->position;)
		r->recs[i].asked |= r->base + r->recs[i].at == u->position;
}

/* A gather that is over. Return: false if it is none. */
static bool order_member_absorb(struct order *o, const struct order_entry *e, int *ret)
{
	const struct order_key unit = { .kind = e->key.kind, .group = e->key.group };
	const struct order_unit *u =
		e->key.kind == ORDER_GATHER ? order_table_find(&o->me.units, &unit) : NULL;
	struct fault f;

	if (!u || e->key.number > u->last)
		return false;
	*ret = ORDER_E_STARTED;
	if (u->fault && e->key.number == u->last) {
		*ret = 0;
		f = *u->fault;
		o->ops.fail(o->userdata, &e->key, &f);
	} else if (e->key.number == u->last) {
		order_member_asked_late(o, u);
	}
	return true;
}

int order_announce(struct order *o, const struct order_entry *e)
{
	struct order_pending *p;
	int r;

	order_member_check(o, e);
	if (o->over)
		return ORDER_E_ENDED;
	p = order_table_find(&o->me.pending, &e->key);
	if (!p && order_member_absorb(o, e, &r))
		return r;
	if (p && p->state == ORDER_FAILED) {
		order_member_known(o, p, e);
		return 0;
	}
	if (p) {
		CHECK(e->key.kind == ORDER_GATHER);
		return 0;
	}
	if (o->me.pending.n - o->me.n_failed >= o->options.max_ahead)
		return ORDER_E_AHEAD;
	p = order_member_add(o, e);
	if (!p)
		return ORDER_E_ENDED;
	if (o->me.mode == ORDER_NORMAL)
		order_member_tell(o, p);
	else if (o->me.mode == ORDER_RECORDED)
		order_replay_check(o, p);
	order_run(o);
	return 0;
}

static void order_member_refuse(struct order *o, struct order_pending *p, const struct fault *fault)
{
	p->fault = order_member_fault(o, fault);
	if (!p->fault)
		return;
	p->state = ORDER_REFUSED;
	o->me.n_refused++;
	if (o->me.mode == ORDER_NORMAL)
		order_member_tell(o, p);
	else if (o->me.mode == ORDER_RECORDED)
		order_replay_deviate(o);
	order_run(o);
}

int order_refuse(struct order *o, const struct order_entry *e, const struct fault *fault)
{
	struct order_pending *p;
	int r;

	order_member_check(o, e);
	CHECK(fault->code);
	if (o->over)
		return ORDER_E_ENDED;
	p = order_table_find(&o->me.pending, &e->key);
	if (!p && order_member_absorb(o, e, &r))
		return r;
	if (p && p->state == ORDER_FAILED) {
		order_member_known(o, p, e);
		return 0;
	}
	if (p && p->state == ORDER_REFUSED)
		return 0;
	if (!p)
		p = order_member_add(o, e);
	if (!p)
		return ORDER_E_ENDED;
	order_member_refuse(o, p, fault);
	return 0;
}

/* What all with the same part in it have started, as a number. */
static uint64_t order_member_chain(struct order *o, const struct order_rec *rec, uint64_t position)
{
	struct order_set *s = &o->sets[rec->set];
	uint64_t h = fnv_add(fnv_add(s->chain, position), rec->key.kind);

	h = fnv_add(fnv_add(h, rec->key.group), rec->key.number);
	for (unsigned i = 0; i < ARRAY_SIZE(rec->words); i++)
		h = fnv_add(h, rec->words[i]);
	s->chain = h;
	return h;
}

static bool order_member_gathered(struct order *o, const struct order_key *key, uint64_t position)
{
	struct order_unit *u = order_unit_of(o, &o->me.units, key);

	if (!u)
		return false;
	free(u->fault);
	u->fault = NULL;
	u->last = key->number;
	u->position = position;
	return true;
}

/* The record, or the place in the schedule. */
static void order_member_move(struct order *o, const struct order_rec *rec, uint64_t position)
{
	if (o->me.mode != ORDER_NORMAL) {
		order_schedule_advance(&o->me.schedule);
		return;
	}
	order_history_add(&o->me.history, rec, position, o->options.max_recorded);
	if (rec->flags & ORDER_MARK)
		order_history_mark(&o->me.history, position);
}

void order_member_start(struct order *o, const struct order_rec *rec, uint64_t position)
{
	struct order_started s = { .key = rec->key, .position = position };
	struct order_pending *p = order_table_find(&o->me.pending, &rec->key);
	struct order_rec copy = *rec;

	if (rec->key.kind == ORDER_GATHER && !order_member_gathered(o, &rec->key, position))
		return;
	s.fingerprint = order_member_chain(o, rec, position);
	copy.asked = p && p->state == ORDER_ANNOUNCED;
	if (copy.asked)
		o->me.asked = position;
	if (p)
		order_member_drop(o, p);
	o->me.position = position;
	o->me.waits = false;
	if (o->me.mode == ORDER_RECORDED && rec->key.kind == ORDER_GATHER)
		order_replay_watch(o, &copy.key, position, copy.asked);
	order_member_move(o, &copy, position);
	if (!o->over)
		o->ops.start(o->userdata, &s);
}

/* What is started must be pending, unless it is a gather. Return: what is wrong, or NULL. */
static const char *order_member_start_wrong(const struct order *o, const struct order_msg *msg,
					    const struct order_pending *p)
{
	if (msg->position <= o->me.position)
		return "a start at a position that is over";
	if (msg->key.kind != ORDER_GATHER)
		return p && p->sent && p->state != ORDER_FAILED
			       ? NULL
			       : "a start of what was not announced";
	return order_unit_is_over(&o->me.units, &msg->key) ? "a second start of a gather" : NULL;
}

/* In a schedule the leader starts what is joint, in its place. */
static const char *order_member_start_early(const struct order *o, const struct order_msg *msg)
{
	const struct order_schedule *s = &o->me.schedule;
	struct order_key key;

	if (o->me.mode == ORDER_NORMAL)
		return NULL;
	if (o->me.mode == ORDER_CATCH_UP)
		return "a start before we have caught up";
	key = order_schedule_key(s);
	return order_is_joint(&key, order_schedule_next(s)->flags) &&
			       order_key_equal(&key, &msg->key) &&
			       order_schedule_position(s) == msg->position
		       ? NULL
		       : "a start that is not next in the schedule";
}

static void order_member_on_start(struct order *o, const struct order_msg *msg)
{
	struct order_pending *p = order_table_find(&o->me.pending, &msg->key);
	int32_t set = order_set_find(o, o->options.leader, msg->flags & ORDER_MSG_ALL, &msg->nodes);
	struct order_rec rec = { .key = msg->key };
	const char *wrong;

	if (set < 0)
		return;
	wrong = order_member_start_wrong(o, msg, p);
	wrong = wrong ? wrong : order_member_start_early(o, msg);
	if (!wrong &&
	    (!order_set_has(o, (uint32_t)set, o->options.self) || (p && p->set != (uint32_t)set)))
		wrong = "a start for other nodes";
	if (wrong) {
		order_break_peer(o, o->options.leader, wrong);
		return;
	}
	rec.set = (uint32_t)set;
	rec.flags = p ? p->flags : (uint8_t)(set ? 0 : ORDER_MSG_ALL);
	if (p)
		memcpy(rec.words, p->print.words, sizeof(rec.words));
	order_member_start(o, &rec, msg->position);
}

/* Its owner gets the reason when it announces the entry. */
static void order_member_keep_failed(struct order *o, const struct order_msg *msg)
{
	struct order_pending *p = NULL;
	struct fault *f;

	if (o->me.n_failed >= 4 * o->options.max_ahead) {
		order_break(o, FAULT_EXHAUSTED,
			    "%u operations have failed on other nodes that node %s has not "
			    "come to",
			    o->me.n_failed, o->options.names[o->options.self]);
		return;
	}
	f = order_member_fault(o, &msg->fault);
	p = f ? order_table_add(&o->me.pending, &msg->key) : NULL;
	if (!p) {
		free(f);
		order_break_memory(o);
		return;
	}
	p->state = ORDER_FAILED;
	p->fault = f;
	o->me.n_failed++;
}

/* Later announcements of the gather fail, too. Return: false if it was over already. */
static bool order_member_gather_failed(struct order *o, const struct order_msg *msg)
{
	struct order_unit *u;

	if (order_unit_is_over(&o->me.units, &msg->key) ||
	    !order_member_gathered(o, &msg->key, o->me.position))
		return false;
	u = order_unit_of(o, &o->me.units, &msg->key);
	u->fault = order_member_fault(o, &msg->fault);
	return u->fault;
}

static void order_member_on_fail(struct order *o, const struct order_msg *msg)
{
	struct order_pending *p = order_table_find(&o->me.pending, &msg->key);

	if (msg->key.kind == ORDER_GATHER)
		order_member_gather_failed(o, msg);
	if (p && p->state == ORDER_FAILED)
		order_break_peer(o, o->options.leader, "a failure twice");
	else if (p && !o->over)
		order_member_fail(o, p, &msg->fault);
	else if (msg->key.kind != ORDER_GATHER)
		order_member_keep_failed(o, msg);
}

void order_member_receive(struct order *o, const struct order_msg *msg)
{
	bool next = msg->type == ORDER_MSG_SCHEDULE || msg->type == ORDER_MSG_RESUME;

	if (msg->phase != o->me.phase + next) {
		order_break_peer(o, o->options.leader, "a message of another phase");
		return;
	}
	switch (msg->type) {
	case ORDER_MSG_START:
		order_member_on_start(o, msg);
		break;
	case ORDER_MSG_FAIL:
		order_member_on_fail(o, msg);
		break;
	case ORDER_MSG_SCHEDULE:
		order_replay_on_schedule(o, msg);
		break;
	case ORDER_MSG_STOP:
		order_replay_on_stop(o, msg);
		break;
	case ORDER_MSG_RESUME:
		order_replay_on_resume(o, msg);
		break;
	default:
		order_break_peer(o, o->options.leader, "a message of no known type");
	}
}
