#include "orderfix.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/fnv.h"
#include "order/order_impl.h"

#define PATIENCE_US 100u
#define STUCK_US    1000u

enum status { UNKNOWN, ANNOUNCED, STARTED, FAILED };

struct link {
	struct order_msg *msgs;
	uint32_t n;
};

struct node {
	struct orderfix *w;
	uint32_t self;
	struct order *o;
	uint32_t pc[ORDERFIX_TRACKS];
	uint8_t status[ORDERFIX_KEYS];
	bool refused[ORDERFIX_KEYS];
	bool announced[ORDERFIX_KEYS];
	uint16_t position[ORDERFIX_KEYS];
	uint64_t print[ORDERFIX_KEYS];
	uint64_t fingerprint[ORDERFIX_KEYS];
	uint64_t last; /* position */
	bool ended;
};

struct orderfix {
	const struct orderfix_plan *p;
	struct node nodes[ORDERFIX_NODES];
	struct link links[ORDERFIX_NODES][ORDERFIX_NODES]; /* from, to */
	uint8_t deciding[ORDERFIX_KEYS];                   /* 1: asked; 2: done; 3: refused */
	bool broken, cut, recorded;
	char wrong[256];
	char reason[512];
};

static const char *const names[ORDERFIX_NODES] = { "A", "B", "C", "D" };

static void wrong(struct orderfix *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void wrong(struct orderfix *w, const char *fmt, ...)
{
	va_list args;

	if (w->wrong[0])
		return;
	va_start(args, fmt);
	vsnprintf(w->wrong, sizeof(w->wrong), fmt, args);
	va_end(args);
}

/* Programs */

static void key_of(char letter, uint32_t step, uint32_t *counts, struct orderfix_key *k)
{
	static const uint32_t masks[] = { 3, 6, 5 };
	bool sub_coll = letter >= 'u' && letter <= 'w', sub_gather = letter >= 'X' && letter <= 'Z';

	*k = (struct orderfix_key){ .all = !sub_coll && !sub_gather };
	k->mask = sub_coll ? masks[letter - 'u'] : sub_gather ? masks[letter - 'X'] : ~0u;
	k->flags = letter == 'M' || letter == 'Q' ? ORDER_MARK
		   : letter == 'D'                ? ORDER_MARK | ORDER_DECISION
		   : letter == 'C'                ? ORDER_DECISION
		   : letter == 'S'                ? ORDER_JOINT
						  : 0;
	if ((letter >= 'G' && letter <= 'K') || sub_gather) {
		k->key = (struct order_key){ ORDER_GATHER, (uint32_t)letter, step + 1 };
		return;
	}
	k->key.kind = letter == 'P' || letter == 'Q' ? ORDER_APPLY : ORDER_COLLECTIVE;
	k->key.group = (uint32_t)letter;
	k->key.number = ++counts[(unsigned char)letter];
}

static uint8_t plan_key(struct orderfix_plan *p, const struct orderfix_key *k)
{
	for (uint32_t i = 0; i < p->n_keys; i++)
		if (order_key_equal(&p->keys[i].key, &k->key))
			return (uint8_t)i;
	CHECK(p->n_keys < ORDERFIX_KEYS);
	p->keys[p->n_keys] = *k;
	p->keys[p->n_keys].mask &= (1u << p->c->n_nodes) - 1;
	for (uint32_t i = 0; i < p->c->n_nodes; i++)
		if (p->keys[p->n_keys].mask >> i & 1)
			order_nodes_add(&p->keys[p->n_keys].nodes, i);
	return (uint8_t)p->n_keys++;
}

/* Write @from with its repetitions. */
static void expand(const char *from, char *to, size_t size)
{
	size_t n = 0;

	while (*from) {
		const char *end = isdigit((unsigned char)*from) ? strchr(from, ')') : NULL;
		int times = end ? *from - '0' : 1;
		const char *part = end ? from + 2 : from;
		size_t bytes = end ? (size_t)(end - part) : 1;

		CHECK(n + bytes * (size_t)times < size);
		for (int i = 0; i < times; i++, n += bytes)
			memcpy(to + n, part, bytes);
		from = end ? end + 1 : from + 1;
	}
	to[n] = '\0';
}

static void plan_track(struct orderfix_plan *p, uint32_t node, uint32_t track, const char *program)
{
	uint32_t counts[256] = { 0 }, step = 0;
	char text[512];

	expand(program, text, sizeof(text));
	for (const char *at = text; *at; at++) {
		struct orderfix_item *i = &p->items[node][track][p->n_items[node][track]];
		struct orderfix_key k;

		if (*at == '/')
			step++;
		if (!isalpha((unsigned char)*at))
			continue;
		CHECK(p->n_items[node][track]++ < ORDERFIX_ITEMS);
		key_of(*at, step, counts, &k);
		step += (k.flags & ORDER_MARK) != 0;
		*i = (struct orderfix_item){ .announce = true,
					     .print = 7 + (k.flags ? 16 * k.key.number : 0) };
		i->key = plan_key(p, &k);
		CHECK(p->keys[i->key].mask >> node & 1);
		for (; at[1] && strchr("!-?.", at[1]); at++) {
			i->refuse |= at[1] == '!' || at[1] == '-';
			i->announce &= at[1] != '!';
			i->print += at[1] == '?' ? 1 + node : 0;
			i->wait |= at[1] == '.';
		}
	}
}

/* Behind the last step a schedule may have the gathers of later ones. */
static void plan_next(struct orderfix_plan *p)
{
	for (uint32_t i = 0, n = p->n_keys; i < n; i++) {
		struct orderfix_key k = p->keys[i];

		for (uint32_t more = 0; more < 8 && k.key.kind == ORDER_GATHER; more++) {
			k.key.number++;
			plan_key(p, &k);
		}
	}
}

void orderfix_plan(struct orderfix_plan *p, const struct orderfix_case *c)
{
	*p = (struct orderfix_plan){ .c = c };
	for (uint32_t i = 0; i < c->n_nodes; i++)
		for (uint32_t t = 0; t < ORDERFIX_TRACKS; t++)
			if (c->programs[i][t])
				plan_track(p, i, t, c->programs[i][t]);
	plan_next(p);
}

static uint32_t key_index(const struct orderfix *w, const struct order_key *key)
{
	for (uint32_t i = 0; i < w->p->n_keys; i++)
		if (order_key_equal(&w->p->keys[i].key, key))
			return i;
	CHECK_NOT_REACHED();
}

/* What the order calls, and the rules */

static void on_send(void *userdata, uint32_t to, const struct order_msg *msg)
{
	struct node *n = userdata;
	struct link *l = &n->w->links[n->self][to];
	struct order_msg copy;
	uint8_t bytes[ORDER_MSG_MAX];

	if (n->w->cut || n->w->broken)
		return;
	CHECK(order_unpack(bytes, order_pack(msg, bytes), &copy) == 0);
	l->msgs = realloc(l->msgs, (l->n + 1) * sizeof(*l->msgs));
	CHECK(l->msgs);
	l->msgs[l->n++] = copy;
}

static bool is_gather(const struct orderfix_key *k)
{
	return k->key.kind == ORDER_GATHER;
}

/* Invariant 1: at one position all nodes have the same. */
static void check_position(struct orderfix *w, struct node *n, uint32_t k,
			   const struct order_started *s)
{
	if (s->position <= n->last)
		wrong(w, "node %u starts position %u behind %u", n->self, (unsigned)s->position,
		      (unsigned)n->last);
	for (uint32_t i = 0; i < w->p->c->n_nodes; i++) {
		struct node *other = &w->nodes[i];

		for (uint32_t j = 0; j < w->p->n_keys; j++)
			if (other->status[j] == STARTED &&
			    (other->position[j] == s->position) != (j == k) && other != n)
				wrong(w, "nodes %u and %u differ at position %u", n->self, i,
				      (unsigned)s->position);
		if (other != n && other->status[k] == STARTED &&
		    other->fingerprint[k] != s->fingerprint)
			wrong(w, "nodes %u and %u have different fingerprints at position %u",
			      n->self, i, (unsigned)s->position);
	}
}

/* Invariants 2, 5 and 6: who must have announced it has. */
static void check_announced(struct orderfix *w, struct node *n, uint32_t k)
{
	const struct orderfix_key *key = &w->p->keys[k];
	bool joint = n->o->me.mode == ORDER_NORMAL || order_is_joint(&key->key, key->flags);
	bool any = false;

	for (uint32_t i = 0; i < w->p->c->n_nodes; i++) {
		struct node *other = &w->nodes[i];
		bool must = !is_gather(key) && (joint || other == n);

		any |= other->announced[k];
		if (must && key->mask >> i & 1 && !other->announced[k])
			wrong(w, "node %u starts key %u, which node %u has not announced", n->self,
			      k, i);
		if (must && joint && key->mask >> i & 1 && other->print[k] != n->print[k])
			wrong(w, "node %u starts key %u, for which node %u asks otherwise", n->self,
			      k, i);
	}
	if (is_gather(key) && n->o->me.mode == ORDER_NORMAL && !any)
		wrong(w, "node %u starts gather %u, which nobody wants", n->self, k);
	if (key->flags & ORDER_DECISION && w->deciding[k] != 2)
		wrong(w, "node %u starts key %u, which is not decided", n->self, k);
}

static void gather_done(struct orderfix *w, uint32_t k)
{
	for (uint32_t i = 0; i < w->p->c->n_nodes; i++)
		if (w->p->keys[k].mask >> i & 1 && w->nodes[i].status[k] != STARTED)
			return;
	for (uint32_t i = 0; i < w->p->c->n_nodes; i++)
		if (w->p->keys[k].mask >> i & 1)
			order_done(w->nodes[i].o, w->nodes[i].position[k]);
}

static void on_start(void *userdata, const struct order_started *s)
{
	struct node *n = userdata;
	uint32_t k = key_index(n->w, &s->key);

	if (n->status[k] == STARTED || n->status[k] == FAILED)
		wrong(n->w, "node %u starts key %u, which is over", n->self, k);
	if (n->ended)
		wrong(n->w, "node %u starts key %u after the end", n->self, k);
	check_position(n->w, n, k, s);
	check_announced(n->w, n, k);
	n->status[k] = STARTED;
	n->position[k] = (uint16_t)s->position;
	n->fingerprint[k] = s->fingerprint;
	n->last = s->position;
	for (uint32_t i = 0; i < n->w->p->c->n_nodes; i++)
		if (n->w->nodes[i].status[k] == FAILED)
			wrong(n->w, "node %u starts key %u, which has failed on node %u", n->self,
			      k, i);
	if (is_gather(&n->w->p->keys[k]))
		gather_done(n->w, k);
}

static void on_fail(void *userdata, const struct order_key *key, const struct fault *fault)
{
	struct node *n = userdata;
	uint32_t k = key_index(n->w, key);

	if (n->status[k] != ANNOUNCED)
		wrong(n->w, "node %u fails key %u in status %u", n->self, k, n->status[k]);
	if (!fault->code || !fault->text[0] || n->ended)
		wrong(n->w, "node %u fails key %u without a reason", n->self, k);
	n->status[k] = FAILED;
	for (uint32_t i = 0; i < n->w->p->c->n_nodes; i++)
		if (n->w->nodes[i].status[k] == STARTED)
			wrong(n->w, "node %u fails key %u, which has started on node %u", n->self,
			      k, i);
}

static void on_decide(void *userdata, const struct order_key *key)
{
	struct node *n = userdata;
	uint32_t k = key_index(n->w, key);

	if (n->w->deciding[k])
		wrong(n->w, "key %u is decided twice", k);
	n->w->deciding[k] = 1;
}

static void on_ended(void *userdata, const struct fault *fault)
{
	struct node *n = userdata;

	/* no node is at fault, and there is room for all */
	if (!n->w->p->c->may_break || strstr(fault->text, "cannot go on") ||
	    fault->code == FAULT_EXHAUSTED)
		wrong(n->w, "node %u ends the epoch: %s", n->self, fault->text);
	if (n->ended)
		wrong(n->w, "node %u ends the epoch twice", n->self);
	n->ended = true;
	n->w->broken = true;
	if (!n->w->reason[0])
		snprintf(n->w->reason, sizeof(n->w->reason), "%s", fault->text);
}

static const struct order_ops ops = { on_send, on_start, on_fail, on_decide, on_ended };

/* Life */

struct orderfix *orderfix_new(const struct orderfix_plan *p)
{
	struct orderfix *w = calloc(1, sizeof(*w));

	CHECK(w);
	w->p = p;
	for (uint32_t i = 0; i < p->c->n_nodes; i++) {
		struct order_options o = { .n_nodes = p->c->n_nodes,
					   .self = i,
					   .names = names,
					   .max_ahead = p->c->max_ahead ? p->c->max_ahead : 64,
					   .max_recorded = p->c->max_recorded,
					   .patience_us = PATIENCE_US,
					   .stuck_us = STUCK_US };

		w->nodes[i].w = w;
		w->nodes[i].self = i;
		CHECK(order_new(&o, &ops, &w->nodes[i], &w->nodes[i].o) == 0);
	}
	return w;
}

static void *copy(const void *from, size_t n)
{
	void *to = n ? malloc(n) : NULL;

	CHECK(to || !n);
	if (n)
		memcpy(to, from, n);
	return to;
}

static void clone_table(struct order_table *t)
{
	t->items = copy(t->items, t->cap * t->item_size);
	t->slots = copy(t->slots, t->n_slots * sizeof(*t->slots));
}

static void clone_record(struct order_record *r)
{
	r->recs = copy(r->recs, r->n * sizeof(*r->recs));
	r->cap = r->n;
}

static void clone_schedule(struct order_schedule *s)
{
	clone_record(&s->step);
	clone_table(&s->index);
	clone_table(&s->streams);
}

static void clone_units(struct order_table *t)
{
	clone_table(t);
	for (uint32_t i = 0; i < t->n; i++) {
		struct order_unit *u = order_table_item(t, i);

		u->fault = u->fault ? copy(u->fault, sizeof(*u->fault)) : NULL;
	}
}

static struct order *clone_order(const struct order *from, void *userdata)
{
	struct order *o = copy(from, sizeof(*o));

	CHECK((!o->queue_n || o->over) && !o->running);
	o->userdata = userdata;
	o->queue = NULL;
	o->queue_cap = o->queue_at = o->queue_n = 0;
	o->sets = copy(o->sets, o->cap_sets * sizeof(*o->sets));
	clone_table(&o->me.pending);
	for (uint32_t i = 0; i < o->me.pending.n; i++) {
		struct order_pending *p = order_table_item(&o->me.pending, i);

		p->fault = p->fault ? copy(p->fault, sizeof(*p->fault)) : NULL;
	}
	clone_units(&o->me.units);
	clone_units(&o->lead.units);
	clone_table(&o->lead.open);
	clone_table(&o->lead.compared);
	clone_record(&o->me.history.now);
	clone_record(&o->me.history.last);
	clone_record(&o->lead.history.now);
	clone_record(&o->lead.history.last);
	clone_schedule(&o->me.schedule);
	clone_schedule(&o->lead.schedule);
	o->me.watches = copy(o->me.watches, o->me.cap_watches * sizeof(*o->me.watches));
	if (o->lead.ahead)
		o->lead.ahead = copy(o->lead.ahead, o->options.n_nodes * sizeof(*o->lead.ahead));
	return o;
}

struct orderfix *orderfix_clone(const struct orderfix *from)
{
	struct orderfix *w = copy(from, sizeof(*w));

	for (uint32_t i = 0; i < w->p->c->n_nodes; i++) {
		w->nodes[i].w = w;
		w->nodes[i].o = clone_order(w->nodes[i].o, &w->nodes[i]);
		for (uint32_t k = 0; k < w->p->c->n_nodes; k++) {
			struct link *l = &w->links[i][k];

			l->msgs = copy(l->msgs, l->n * sizeof(*l->msgs));
		}
	}
	return w;
}

struct orderfix *orderfix_free(struct orderfix *w)
{
	for (uint32_t i = 0; w && i < w->p->c->n_nodes; i++) {
		order_free(w->nodes[i].o);
		for (uint32_t k = 0; k < w->p->c->n_nodes; k++)
			free(w->links[i][k].msgs);
	}
	free(w);
	return NULL;
}

/* What may happen */

static bool may_step(const struct orderfix *w, uint32_t node, uint32_t track)
{
	const struct node *n = &w->nodes[node];
	uint32_t pc = n->pc[track];
	const struct orderfix_item *before, *next;

	if (n->ended || pc >= w->p->n_items[node][track])
		return false;
	next = &w->p->items[node][track][pc];
	before = pc ? next - 1 : NULL;
	if (before && before->wait && n->status[before->key] == ANNOUNCED)
		return false;
	/* it would be refused for now */
	return next->refuse || n->status[next->key] != UNKNOWN ||
	       n->o->me.pending.n - n->o->me.n_failed < n->o->options.max_ahead;
}

static bool may_tick(const struct orderfix *w, uint32_t node)
{
	const struct order_member *m = &w->nodes[node].o->me;
	bool needs = false;

	for (uint32_t i = 0; i < m->n_watches; i++)
		needs = needs || m->watches[i].asked;
	return !w->nodes[node].ended && m->mode == ORDER_RECORDED && (m->waits || needs);
}

static bool is_stuck(const struct orderfix *w, uint32_t node)
{
	const struct order_member *m = &w->nodes[node].o->me;

	return !w->nodes[node].ended && m->mode == ORDER_CATCH_UP && m->waits;
}

struct events {
	struct orderfix_event *out;
	uint32_t n, most;
};

static void add_event(struct events *e, uint8_t kind, uint32_t a, uint32_t b)
{
	CHECK(e->n < e->most);
	e->out[e->n++] = (struct orderfix_event){ kind, (uint8_t)a, (uint8_t)b };
}

static void events_of_nodes(const struct orderfix *w, struct events *e)
{
	for (uint32_t i = 0; i < w->p->c->n_nodes; i++) {
		for (uint32_t t = 0; t < ORDERFIX_TRACKS; t++)
			if (may_step(w, i, t))
				add_event(e, ORDERFIX_STEP, i, t);
		for (uint32_t k = 0; k < w->p->c->n_nodes; k++)
			if (w->links[i][k].n && !w->nodes[k].ended)
				add_event(e, ORDERFIX_DELIVER, i, k);
		if ((w->broken || w->cut) && !w->nodes[i].ended)
			add_event(e, ORDERFIX_END, i, 0);
	}
}

static void events_of_decisions(const struct orderfix *w, struct events *e)
{
	for (uint32_t k = 0; k < w->p->n_keys && !w->nodes[0].ended; k++) {
		if (w->deciding[k] != 1)
			continue;
		add_event(e, ORDERFIX_DECIDE, k, 1);
		if (w->p->c->may_fail)
			add_event(e, ORDERFIX_DECIDE, k, 0);
	}
}

static void check_key_at_end(struct orderfix *w, uint32_t k)
{
	const struct orderfix_key *key = &w->p->keys[k];
	uint32_t announced = 0, started = 0, failed = 0, refused = 0, n = 0;

	for (uint32_t i = 0; i < w->p->c->n_nodes; i++) {
		const struct node *node = &w->nodes[i];

		if (!(key->mask >> i & 1))
			continue;
		n++;
		announced += node->status[k] != UNKNOWN && node->announced[k];
		refused += node->refused[k];
		started += node->status[k] == STARTED;
		failed += node->status[k] == FAILED;
	}
	/* a schedule starts what others may not ask for any more */
	if (!order_is_joint(&key->key, key->flags) && !failed && w->recorded &&
	    (is_gather(key) ? !announced : announced < n))
		return;
	if (started && started != n)
		wrong(w, "key %u has started on %u of %u nodes at the end", k, started, n);
	if (started && failed)
		wrong(w, "key %u has started and failed at the end", k);
	/* invariant 4 */
	if (is_gather(key) ? announced && !started && failed < announced
			   : announced == n && !started && failed < n)
		wrong(w, "key %u waits at the end", k);
	if (refused && !is_gather(key) && !started && failed < announced)
		wrong(w, "key %u, which was refused, waits at the end", k);
}

/* Nothing moves any more. */
static void check_end(struct orderfix *w)
{
	bool ended = w->cut || w->broken;

	if (w->p->c->must_break && !w->broken)
		wrong(w, "the epoch goes on");
	for (uint32_t k = 0; k < w->p->n_keys && !ended; k++)
		check_key_at_end(w, k);
	for (uint32_t i = 0; i < w->p->c->n_nodes && !ended; i++)
		for (uint32_t t = 0; t < ORDERFIX_TRACKS; t++)
			if (w->nodes[i].pc[t] < w->p->n_items[i][t])
				wrong(w, "node %u is stuck at item %u of track %u", i,
				      w->nodes[i].pc[t], t);
}

uint32_t orderfix_events(struct orderfix *w, struct orderfix_event *out, uint32_t most)
{
	struct events e = { .out = out, .most = most };

	events_of_nodes(w, &e);
	events_of_decisions(w, &e);
	if (w->p->c->cut && !w->cut && !w->broken && e.n)
		add_event(&e, ORDERFIX_CUT, 0, 0);
	for (uint32_t i = 0; i < w->p->c->n_nodes && (w->p->c->ticks || !e.n); i++)
		if (may_tick(w, i))
			add_event(&e, ORDERFIX_TICK, i, 0);
	for (uint32_t i = 0; i < w->p->c->n_nodes && !e.n; i++)
		if (is_stuck(w, i))
			add_event(&e, ORDERFIX_TICK, i, 0);
	if (!e.n)
		check_end(w);
	return e.n;
}

/* Has a later gather of the unit begun? */
static bool is_overtaken(const struct node *n, uint32_t k)
{
	const struct order_key *key = &n->w->p->keys[k].key;

	for (uint32_t i = 0; i < n->w->p->n_keys; i++) {
		const struct order_key *other = &n->w->p->keys[i].key;

		if (other->kind == key->kind && other->group == key->group &&
		    other->number > key->number &&
		    (n->status[i] == STARTED || n->status[i] == FAILED))
			return true;
	}
	return false;
}

static void apply_step(struct orderfix *w, uint32_t node, uint32_t track)
{
	struct node *n = &w->nodes[node];
	const struct orderfix_item *i = &w->p->items[node][track][n->pc[track]++];
	const struct orderfix_key *k = &w->p->keys[i->key];
	struct order_print print = { .words = { 0, i->print } };
	struct order_entry e = { .key = k->key,
				 .flags = k->flags,
				 .nodes = k->all ? NULL : &k->nodes,
				 .print = is_gather(k) ? NULL : &print,
				 .rank = node * 10,
				 .pid = (int)(100 + node) };
	struct fault f = FAULT_NULL;
	int r = 0;

	snprintf(print.text, sizeof(print.text), "Op %c of kind %u", (char)k->key.group,
		 (unsigned)i->print);
	fault_set(&f, FAULT_DEADLINE, NULL, "no time for %c", (char)k->key.group);
	if (n->status[i->key] == UNKNOWN)
		n->status[i->key] = ANNOUNCED;
	n->print[i->key] = i->print;
	if (i->announce) {
		n->announced[i->key] = true;
		r = order_announce(n->o, &e);
	}
	if (i->refuse && n->status[i->key] == ANNOUNCED && !n->ended) {
		n->refused[i->key] = true;
		r = order_refuse(n->o, &e, &f);
	}
	if (r == ORDER_E_STARTED && i->announce)
		order_asked(n->o, &e.key);
	if (r == ORDER_E_STARTED && is_overtaken(n, i->key))
		n->status[i->key] = n->status[i->key] == STARTED ? STARTED : FAILED;
	else if (r == ORDER_E_STARTED ? n->status[i->key] != STARTED : r && r != ORDER_E_ENDED)
		wrong(w, "node %u gets %d for key %u in status %u", node, r, i->key,
		      n->status[i->key]);
}

static void apply_deliver(struct orderfix *w, uint32_t from, uint32_t to)
{
	struct link *l = &w->links[from][to];
	struct order_msg msg = l->msgs[0];

	memmove(l->msgs, l->msgs + 1, --l->n * sizeof(*l->msgs));
	order_receive(w->nodes[to].o, from, &msg);
}

static void apply_decide(struct orderfix *w, uint32_t k, bool done)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "another node leads");
	w->deciding[k] = done ? 2 : 3;
	order_decided(w->nodes[0].o, &w->p->keys[k].key, done, &f);
}

static void apply_event(struct orderfix *w, struct orderfix_event e)
{
	switch (e.kind) {
	case ORDERFIX_STEP:
		apply_step(w, e.a, e.b);
		break;
	case ORDERFIX_DELIVER:
		apply_deliver(w, e.a, e.b);
		break;
	case ORDERFIX_DECIDE:
		apply_decide(w, e.a, e.b);
		break;
	case ORDERFIX_TICK:
		order_tick(w->nodes[e.a].o,
			   w->nodes[e.a].o->now_us + (w->nodes[e.a].o->me.mode == ORDER_CATCH_UP
							      ? STUCK_US
							      : PATIENCE_US));
		break;
	case ORDERFIX_CUT:
		w->cut = true;
		break;
	default:
		order_end(w->nodes[e.a].o);
		w->nodes[e.a].ended = true;
	}
}

void orderfix_apply(struct orderfix *w, struct orderfix_event e)
{
	apply_event(w, e);
	for (uint32_t i = 0; i < w->p->c->n_nodes; i++)
		w->recorded |= order_is_recorded(w->nodes[i].o);
}

/* States */

static uint64_t mix(uint64_t h)
{
	h ^= h >> 33;
	h *= UINT64_C(0xff51afd7ed558ccd);
	h ^= h >> 33;
	h *= UINT64_C(0xc4ceb9fe1a85ec53);
	return h ^ h >> 33;
}

static uint64_t add(uint64_t h, uint64_t x)
{
	return mix(h * 31 + x + UINT64_C(0x9e3779b97f4a7c15));
}

static uint64_t hash_key(uint64_t h, const struct order_key *k)
{
	return add(add(add(h, k->kind), k->group), k->number);
}

static uint64_t hash_record(uint64_t h, const struct order_record *r)
{
	h = add(add(add(h, r->n), r->valid), r->valid ? r->base : 0);
	for (uint32_t i = 0; i < r->n; i++) {
		h = add(add(hash_key(h, &r->recs[i].key), r->recs[i].at), r->recs[i].shift);
		h = add(add(h, r->recs[i].words[1]), r->recs[i].set);
		h = add(h, r->recs[i].flags | (uint64_t)r->recs[i].asked << 8);
	}
	return h;
}

static uint64_t hash_history(uint64_t h, const struct order_history *y)
{
	return add(hash_record(hash_record(h, &y->now), &y->last), y->repeats);
}

static uint64_t hash_schedule(uint64_t h, const struct order_schedule *s)
{
	return hash_record(add(add(add(h, s->at), s->turn), s->base), &s->step);
}

static uint64_t hash_pending(uint64_t h, const struct order_table *t)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < t->n; i++) {
		const struct order_pending *p = order_table_item(t, i);
		uint64_t x = add(hash_key(1, &p->key), p->state | p->flags << 8 | p->sent << 16),
			 before = 0;

		for (uint32_t k = 0; k < t->n; k++)
			before += ((struct order_pending *)order_table_item(t, k))->seq < p->seq;
		sum += add(add(x, before), p->print.words[1]);
	}
	return add(h, sum);
}

static uint64_t hash_open(uint64_t h, const struct order_table *t)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < t->n; i++) {
		const struct order_open *p = order_table_item(t, i);
		uint64_t x = add(hash_key(1, &p->key), p->state | p->flags << 8 | p->set << 16),
			 before = 0;

		for (uint32_t k = 0; k < t->n; k++)
			before += ((struct order_open *)order_table_item(t, k))->seq < p->seq;
		x = add(add(x, before), p->heard.words[0]);
		sum += add(add(x, p->first), p->print.words[1]);
	}
	return add(h, sum);
}

static uint64_t hash_units(uint64_t h, const struct order_table *t)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < t->n; i++) {
		const struct order_unit *u = order_table_item(t, i);

		sum += add(add(add(hash_key(1, &u->key), u->last), u->position), !!u->fault);
	}
	return add(h, sum);
}

static uint64_t hash_member(uint64_t h, const struct order_member *m)
{
	h = add(add(add(add(h, m->mode), m->phase), m->position), m->asked);
	h = add(add(add(h, m->mode == ORDER_CATCH_UP ? m->target : 0), m->stopped), m->waits);
	h = hash_units(hash_pending(h, &m->pending), &m->units);
	h = hash_schedule(hash_history(h, &m->history), &m->schedule);
	for (uint32_t i = 0; i < m->n_watches; i++)
		h = add(add(h, m->watches[i].position), m->watches[i].asked);
	return h;
}

static uint64_t hash_leader(uint64_t h, const struct order_leader *l)
{
	h = add(add(add(add(h, l->state), l->phase), l->position), l->need);
	h = hash_units(hash_open(h, &l->open), &l->units);
	h = hash_schedule(hash_history(h, &l->history), &l->schedule);
	h = add(h, l->caught.words[0]);
	return l->state == ORDER_STOPS ? add(add(h, l->told.words[0]), l->reached) : h;
}

static uint64_t hash_node(const struct orderfix *w, const struct node *n)
{
	uint64_t h = add(n->ended, n->last);

	for (uint32_t t = 0; t < ORDERFIX_TRACKS; t++)
		h = add(h, n->pc[t]);
	for (uint32_t k = 0; k < w->p->n_keys; k++)
		h = add(h, n->status[k] | (uint64_t)n->refused[k] << 8 |
				   (uint64_t)n->position[k] << 16 |
				   (uint64_t)n->announced[k] << 32);
	if (n->ended)
		return h;
	for (uint32_t i = 0; i < n->o->n_sets; i++)
		h = add(h, n->o->sets[i].chain);
	h = hash_member(h, &n->o->me);
	return n->self == 0 ? hash_leader(h, &n->o->lead) : h;
}

static uint64_t hash_msg(uint64_t h, const struct order_msg *m)
{
	h = add(add(h, m->type | m->flags << 8 | (uint64_t)m->phase << 16), m->position);
	return add(add(hash_key(h, &m->key), m->print.words[1]), m->fault.code);
}

uint64_t orderfix_hash(const struct orderfix *w)
{
	uint64_t h = add(w->broken, w->cut);

	for (uint32_t i = 0; i < w->p->c->n_nodes; i++) {
		h = add(h, hash_node(w, &w->nodes[i]));
		for (uint32_t k = 0; k < w->p->c->n_nodes; k++) {
			h = add(h, w->links[i][k].n);
			for (uint32_t m = 0; m < w->links[i][k].n; m++)
				h = hash_msg(h, &w->links[i][k].msgs[m]);
		}
	}
	for (uint32_t k = 0; k < w->p->n_keys; k++)
		h = add(h, w->deciding[k]);
	return h ? h : 1;
}

const char *orderfix_wrong(const struct orderfix *w)
{
	return w->wrong[0] ? w->wrong : NULL;
}

bool orderfix_is_recorded(const struct orderfix *w)
{
	return w->recorded;
}

const char *orderfix_reason(const struct orderfix *w)
{
	return w->reason;
}

void orderfix_describe(const struct orderfix *w, struct orderfix_event e, char *text, size_t size)
{
	static const char *const kinds[] = { "step", "deliver", "decide", "tick", "cut", "end" };
	static const char *const types[] = { "",        "ANNOUNCE", "REFUSE",   "START",
					     "FAIL",    "SCHEDULE", "DEVIATE",  "STOP",
					     "REACHED", "RESUME",   "CAUGHT_UP" };

	if (e.kind == ORDERFIX_STEP) {
		const struct orderfix_item *i = &w->p->items[e.a][e.b][w->nodes[e.a].pc[e.b]];
		const struct order_key *k = &w->p->keys[i->key].key;

		snprintf(text, size, "node %u %s %c%llu", e.a, i->refuse ? "refuses" : "announces",
			 (char)k->group, (unsigned long long)k->number);
	} else if (e.kind == ORDERFIX_DELIVER) {
		const struct order_msg *m = &w->links[e.a][e.b].msgs[0];

		snprintf(text, size, "%u -> %u: %s %c%llu at %llu, phase %u", e.a, e.b,
			 types[m->type], m->key.group ? (char)m->key.group : ' ',
			 (unsigned long long)m->key.number, (unsigned long long)m->position,
			 m->phase);
	} else {
		snprintf(text, size, "%s %u %u", kinds[e.kind], e.a, e.b);
	}
}
