/* What a node does with a recorded schedule: it starts by itself what is next, until somebody deviates.
 *
 * Joint entries (APPLY, decisions, marks) are announced and started by the leader in a schedule, too, once a
 * node has come to them. So nodes are never farther apart than what lies between two of them. */
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "order/order_impl.h"

void order_replay_deviate(struct order *o)
{
	struct order_msg msg = { .type = ORDER_MSG_DEVIATE,
				 .phase = o->me.phase,
				 .position = o->me.position };

	CHECK(o->me.mode == ORDER_RECORDED);
	o->me.mode = ORDER_FROZEN;
	o->me.waits = false;
	o->me.n_watches = 0;
	order_send(o, o->options.leader, &msg);
}

static bool order_replay_fits(const struct order_rec *rec, const struct order_pending *p)
{
	return rec && rec->set == p->set && rec->flags == p->flags &&
	       order_words_fit(rec, &p->print);
}

void order_replay_check(struct order *o, const struct order_pending *p)
{
	if (p->state == ORDER_REFUSED ||
	    (p->state == ORDER_ANNOUNCED &&
	     !order_replay_fits(order_schedule_find(&o->me.schedule, &p->key), p)))
		order_replay_deviate(o);
}

void order_replay_on_schedule(struct order *o, const struct order_msg *msg)
{
	struct order_history *h = &o->me.history;
	uint32_t n;

	if (o->me.mode != ORDER_NORMAL || !h->repeats ||
	    order_record_hash(o, &h->last, o->options.self, &n) != msg->hash || n != msg->n) {
		order_break_peer(o, o->options.leader, "a schedule that we have not recorded");
		return;
	}
	if (!order_schedule_begin(&o->me.schedule, h)) {
		order_break_memory(o);
		return;
	}
	order_history_reset(h);
	o->me.phase = msg->phase;
	o->me.mode = ORDER_RECORDED;
	o->me.waits = false;
	for (uint32_t i = 0; i < o->me.pending.n; i++) {
		struct order_pending *p = order_table_item(&o->me.pending, i);

		p->sent = false;
		if (o->me.mode == ORDER_RECORDED)
			order_replay_check(o, p);
	}
}

void order_replay_on_stop(struct order *o, const struct order_msg *msg)
{
	struct order_msg reply = { .type = ORDER_MSG_REACHED,
				   .phase = msg->phase,
				   .position = o->me.position };

	if (o->me.mode == ORDER_NORMAL || o->me.mode == ORDER_CATCH_UP || o->me.stopped) {
		order_break_peer(o, o->options.leader, "a stop without a schedule");
		return;
	}
	o->me.stopped = true;
	if (o->me.mode == ORDER_FROZEN)
		return; /* it has told how far it is when it deviated */
	o->me.mode = ORDER_FROZEN;
	o->me.waits = false;
	o->me.n_watches = 0;
	order_send(o, o->options.leader, &reply);
}

/* Position of the next joint entry. */
static uint64_t order_replay_barrier(const struct order *o)
{
	struct order_schedule s = o->me.schedule; /* the tables stay its own */

	order_schedule_skip(&s);
	return order_schedule_position(&s);
}

void order_replay_on_resume(struct order *o, const struct order_msg *msg)
{
	if (o->me.mode != ORDER_FROZEN || !o->me.stopped) {
		order_break_peer(o, o->options.leader, "a target without a stop");
		return;
	}
	if (msg->position < o->me.position || msg->position >= order_replay_barrier(o)) {
		order_break_peer(o, o->options.leader, "a target that is no place to go on");
		return;
	}
	o->me.mode = ORDER_CATCH_UP;
	o->me.phase = msg->phase;
	o->me.target = msg->position;
	o->me.stopped = false;
}

/* The order goes on from here. */
static void order_replay_caught_up(struct order *o)
{
	struct order_msg msg = { .type = ORDER_MSG_CAUGHT_UP, .phase = o->me.phase };

	o->me.mode = ORDER_NORMAL;
	o->me.waits = false;
	o->me.position = o->me.target;
	order_schedule_deinit(&o->me.schedule);
	order_send(o, o->options.leader, &msg);
	order_member_tell_all(o);
}

/* Others have begun what this node cannot do. */
static void order_replay_impossible(struct order *o, const struct order_pending *p)
{
	const char *name = o->options.names[o->options.self];

	if (p->state == ORDER_REFUSED)
		order_break(o, FAULT_ABORTED, "%.400s (node %s; other nodes have begun it)",
			    p->fault->text, name);
	else
		order_break(o, FAULT_STATE,
			    "ops differ at number %llu: rank %u (pid %d) on node %s asks for %s, "
			    "other nodes have begun what every step had there",
			    (unsigned long long)p->key.number, p->rank, p->pid, name,
			    p->print.text);
}

/* What is next is not there. Does something else wait because of it? */
static bool order_replay_wait(struct order *o)
{
	uint32_t ready = o->me.pending.n - o->me.n_failed - o->me.n_refused;

	if (ready && !o->me.waits)
		o->me.since_us = o->now_us;
	o->me.waits = ready;
	return false;
}

/* Only the leader starts it: announce it. */
static bool order_replay_joint(struct order *o, struct order_pending *p)
{
	if (!p)
		return order_replay_wait(o);
	o->me.waits = false;
	if (p->sent)
		return false;
	order_member_tell(o, p);
	return true;
}

/* Start what is next, if it is ready. */
static bool order_replay_next(struct order *o)
{
	struct order_rec rec = *order_schedule_next(&o->me.schedule);
	uint64_t position = order_schedule_position(&o->me.schedule);
	bool gather = rec.key.kind == ORDER_GATHER, others = o->me.mode == ORDER_CATCH_UP;
	struct order_pending *p;

	rec.key = order_schedule_key(&o->me.schedule);
	p = order_table_find(&o->me.pending, &rec.key);
	if (order_is_joint(&rec.key, rec.flags))
		return order_replay_joint(o, p);
	if (p && !(p->state == ORDER_ANNOUNCED && order_replay_fits(&rec, p))) {
		order_replay_impossible(o, p); /* it would have deviated if it were not behind */
		return false;
	}
	if (!p && !(gather && (others || !rec.asked)))
		return order_replay_wait(o);
	order_member_start(o, &rec, position);
	return true;
}

bool order_replay_advance(struct order *o)
{
	if (o->me.mode == ORDER_CATCH_UP &&
	    order_schedule_position(&o->me.schedule) > o->me.target) {
		order_replay_caught_up(o);
		return true;
	}
	if (o->me.mode != ORDER_RECORDED && o->me.mode != ORDER_CATCH_UP)
		return false;
	return order_replay_next(o);
}

void order_replay_watch(struct order *o, const struct order_key *key, uint64_t position, bool asked)
{
	if (o->me.n_watches == o->me.cap_watches) {
		uint32_t cap = o->me.cap_watches ? o->me.cap_watches * 2 : 8;
		struct order_watch *grown = realloc(o->me.watches, cap * sizeof(*grown));

		if (!grown) {
			order_break_memory(o);
			return;
		}
		o->me.watches = grown;
		o->me.cap_watches = cap;
	}
	o->me.watches[o->me.n_watches++] = (struct order_watch){
		.key = *key, .position = position, .since_us = o->now_us, .asked = asked
	};
}

void order_asked(struct order *o, const struct order_key *key)
{
	for (uint32_t i = 0; i < o->me.n_watches; i++) {
		struct order_watch *w = &o->me.watches[i];

		if (w->asked || !order_key_equal(&w->key, key))
			continue;
		w->asked = true;
		w->since_us = o->now_us;
	}
}

void order_done(struct order *o, uint64_t position)
{
	for (uint32_t i = 0; i < o->me.n_watches; i++)
		if (o->me.watches[i].position == position) {
			o->me.n_watches--;
			memmove(&o->me.watches[i], &o->me.watches[i + 1],
				(o->me.n_watches - i) * sizeof(*o->me.watches));
			return;
		}
}

static bool order_replay_too_long(const struct order *o, uint64_t since_us, uint64_t most_us)
{
	return o->now_us - since_us >= most_us;
}

/* A gather that this node's ranks wait for is not over for too long. */
static bool order_replay_needs(const struct order *o)
{
	for (uint32_t i = 0; i < o->me.n_watches; i++) {
		const struct order_watch *w = &o->me.watches[i];

		if (w->asked && order_replay_too_long(o, w->since_us, o->options.patience_us))
			return true;
	}
	return false;
}

void order_replay_tick(struct order *o)
{
	const struct order_options *p = &o->options;

	if (o->me.mode == ORDER_RECORDED) {
		if (order_replay_needs(o) ||
		    (o->me.waits && order_replay_too_long(o, o->me.since_us, p->patience_us)))
			order_replay_deviate(o);
	} else if (o->me.mode == ORDER_CATCH_UP && p->stuck_us && o->me.waits &&
		   order_replay_too_long(o, o->me.since_us, p->stuck_us)) {
		order_break(o, FAULT_ABORTED,
			    "node %s does other operations than in the steps before, and other "
			    "nodes have begun those already",
			    p->names[p->self]);
	}
}
