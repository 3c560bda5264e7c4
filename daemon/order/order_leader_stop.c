/* The leader's part in schedules: when one begins, and where the order goes on after it. */
#include <string.h>

#include "core/check.h"
#include "order/order_impl.h"

/* After this many repeats a step may become a schedule at last, however often schedules had to stop. */
#define ORDER_MAX_NEED 64u

/* Does all that waits have a place in the schedule? Else it would be stopped at once. */
static bool order_leader_stop_open_fits(const struct order *o, const struct order_schedule *s)
{
	for (uint32_t i = 0; i < o->lead.open.n; i++) {
		const struct order_open *e = order_table_item(&o->lead.open, i);
		const struct order_rec *rec = order_schedule_find(s, &e->key);

		if (!rec || rec->set != e->set || rec->flags != e->flags ||
		    !order_words_fit(rec, &e->print))
			return false;
	}
	return true;
}

static void order_leader_stop_send_schedule(struct order *o)
{
	struct order_msg msg = { .type = ORDER_MSG_SCHEDULE, .phase = o->lead.phase };

	for (uint32_t i = 0; i < o->options.n_nodes; i++) {
		/* the same for all, if all have part in all */
		if (i == 0 || o->n_sets > 1)
			msg.hash = order_record_hash(o, &o->lead.history.last, i, &msg.n);
		order_send(o, i, &msg);
	}
}

void order_leader_mark(struct order *o)
{
	struct order_leader *l = &o->lead;

	order_history_mark(&l->history, l->position);
	if (o->options.no_schedules || l->history.repeats < l->need || l->n_deciding ||
	    l->n_failing)
		return;
	if (!order_schedule_begin(&l->schedule, &l->history)) {
		order_break_memory(o);
		return;
	}
	if (!order_leader_stop_open_fits(o, &l->schedule)) {
		order_schedule_deinit(&l->schedule);
		return;
	}
	l->phase++;
	l->state = ORDER_LETS_REPEAT;
	order_schedule_skip(&l->schedule);
	order_leader_stop_send_schedule(o);
	order_history_reset(&l->history);
	order_leader_forget_open(o);
}

void order_leader_stop(struct order *o)
{
	struct order_msg msg = { .type = ORDER_MSG_STOP, .phase = o->lead.phase };

	o->lead.state = ORDER_STOPS;
	o->lead.told = (struct order_nodes){ 0 };
	o->lead.n_told = 0;
	o->lead.reached = 0;
	order_leader_send_all(o, 0, &msg);
}

void order_leader_resume(struct order *o)
{
	struct order_leader *l = &o->lead;
	struct order_msg msg = { .type = ORDER_MSG_RESUME };

	/* what is being decided is started or failed first: its nodes wait for it in the schedule */
	if (l->n_told < o->options.n_nodes || l->n_deciding)
		return;
	/* what the leader has started itself may have crossed what a node has told */
	l->position = l->reached > l->position ? l->reached : l->position;
	l->phase++;
	l->state = ORDER_LEADS;
	l->need = l->need < ORDER_MAX_NEED ? l->need * 2 : l->need;
	l->caught = (struct order_nodes){ 0 };
	l->n_caught = 0;
	order_schedule_deinit(&l->schedule);
	order_leader_forget_open(o);
	msg.phase = l->phase;
	msg.position = l->position;
	order_leader_send_all(o, 0, &msg);
}

void order_leader_on_told(struct order *o, uint32_t from, const struct order_msg *msg)
{
	struct order_leader *l = &o->lead;

	if (l->state == ORDER_LEADS ||
	    (l->state == ORDER_LETS_REPEAT && msg->type == ORDER_MSG_REACHED)) {
		order_break_peer(o, from, "its place in a schedule that there is not");
		return;
	}
	if (l->state == ORDER_LETS_REPEAT)
		order_leader_stop(o);
	if (msg->position >= order_schedule_position(&l->schedule) ||
	    !order_nodes_add(&l->told, from)) {
		order_break_peer(o, from, "a place in the schedule that it cannot have");
		return;
	}
	l->n_told++;
	l->reached = msg->position > l->reached ? msg->position : l->reached;
	order_leader_resume(o);
}

void order_leader_on_caught_up(struct order *o, uint32_t from)
{
	if (o->lead.state != ORDER_LEADS || !order_nodes_add(&o->lead.caught, from)) {
		order_break_peer(o, from, "that it has caught up, and has not been behind");
		return;
	}
	o->lead.n_caught++;
	order_leader_start_ready(o);
}
