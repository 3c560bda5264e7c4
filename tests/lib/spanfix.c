#include "spanfix.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "core/clock.h"
#include "gather/turn.h"
#include "op/op_list.h"
#include "op/uneven_nodes.h"
#include "step/apply.h"
#include "job/across_write.h"
#include "step/external.h"
#include "unitio/writes.h"

/* ------------------------------------------------------------------------ the store */

static struct {
	pthread_mutex_t lock;
	pthread_cond_t news;
	struct {
		char key[256];
		unsigned char value[8192];
		size_t bytes;
	} keys[1024];
	unsigned n;
} store = { .lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER };

static int spanfix_store_set(void *userdata, const char *key, const void *value, size_t bytes)
{
	(void)userdata;
	pthread_mutex_lock(&store.lock);
	CHECK(store.n < ARRAY_SIZE(store.keys) && bytes <= sizeof(store.keys[0].value));
	snprintf(store.keys[store.n].key, sizeof(store.keys[0].key), "%s", key);
	memcpy(store.keys[store.n].value, value, bytes);
	store.keys[store.n++].bytes = bytes;
	pthread_cond_broadcast(&store.news);
	pthread_mutex_unlock(&store.lock);
	return 0;
}

static long spanfix_store_find(const char *key, void *value, size_t capacity)
{
	for (unsigned i = 0; i < store.n; i++) {
		if (strcmp(store.keys[i].key, key) != 0)
			continue;
		CHECK(store.keys[i].bytes <= capacity);
		memcpy(value, store.keys[i].value, store.keys[i].bytes);
		return (long)store.keys[i].bytes;
	}
	return -ETIMEDOUT;
}

static long spanfix_store_get(void *userdata, const char *key, unsigned timeout_ms, void *value,
			      size_t capacity)
{
	struct timespec until;
	long r;

	(void)userdata;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += timeout_ms / 1000 + 1;
	pthread_mutex_lock(&store.lock);
	while ((r = spanfix_store_find(key, value, capacity)) == -ETIMEDOUT)
		if (pthread_cond_timedwait(&store.news, &store.lock, &until))
			break;
	pthread_mutex_unlock(&store.lock);
	return r;
}

static int spanfix_store_find_all(struct comm_exchange *x)
{
	char key[256];

	for (unsigned i = 0; i < x->size; i++) {
		snprintf(key, sizeof(key), "%s/%u", x->key, i);
		if (spanfix_store_find(key, (char *)x->all + i * x->bytes, x->bytes) < 0)
			return -ETIMEDOUT;
	}
	return 0;
}

static int spanfix_store_exchange(void *userdata, struct comm_exchange *x, unsigned timeout_ms)
{
	char key[256], old[8192];
	struct timespec until;
	int r;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += timeout_ms / 1000 + 1;
	snprintf(key, sizeof(key), "%s/%u", x->key, x->member);
	pthread_mutex_lock(&store.lock);
	r = spanfix_store_find(key, old, sizeof(old)) < 0;
	pthread_mutex_unlock(&store.lock);
	if (r)
		spanfix_store_set(userdata, key, x->value, x->bytes);
	x->missing = -1;
	pthread_mutex_lock(&store.lock);
	while ((r = spanfix_store_find_all(x)) == -ETIMEDOUT)
		if (pthread_cond_timedwait(&store.news, &store.lock, &until))
			break;
	pthread_mutex_unlock(&store.lock);
	return r;
}

/* ------------------------------------------------------------------------ the worlds */

struct spanfix spanfix;
bool spanfix_by_ranks, spanfix_queues;
unsigned spanfix_reason_ms;

unsigned spanfix_home(const struct spanfix *w, uint32_t rank)
{
	return w->spans ? w->node_of[rank] : 0;
}

struct nodefix *spanfix_node_of(struct spanfix *w, uint32_t rank)
{
	return &w->nodes[spanfix_home(w, rank)];
}

struct unit *spanfix_unit_of(struct spanfix *w, uint32_t rank)
{
	return job_unit_by_id(w->jobs[spanfix_home(w, rank)], w->unit);
}

unsigned spanfix_homes(const struct spanfix *w)
{
	return w->spans ? w->n_nodes : 1;
}

void spanfix_note(struct spanfix *w, const void *data, size_t bytes)
{
	if (w->n_notes + bytes > w->room) {
		w->room = 2 * (w->n_notes + bytes);
		w->notes = realloc(w->notes, w->room);
		CHECK(w->notes);
	}
	memcpy(w->notes + w->n_notes, data, bytes);
	w->n_notes += bytes;
}

/* -- the order */

static unsigned spanfix_node_of_job(const struct job *job)
{
	for (unsigned i = 0; i < spanfix.n_nodes; i++)
		if (spanfix.jobs[i] == job)
			return i;
	CHECK_NOT_REACHED();
}

static struct group *spanfix_group_of_key(struct job *job, uint64_t key)
{
	for (uint32_t i = 0; i < job->n_groups; i++)
		if (group_key(job->groups[i]) == key)
			return job->groups[i];
	CHECK_NOT_REACHED();
}

static struct unit *spanfix_unit_of_key(struct job *job, uint64_t key)
{
	for (uint32_t i = 0; i < job->n_units; i++)
		if (!job->units[i]->rec->dropped && job->units[i]->key == key)
			return job->units[i];
	return NULL;
}

static struct spanfix_sent *spanfix_send(enum spanfix_kind kind, unsigned from, unsigned to)
{
	struct spanfix *w = &spanfix;
	struct spanfix_sent *sent = &w->sent[(w->first_sent + w->n_sent++) % SPANFIX_SENT];

	CHECK(w->n_sent <= SPANFIX_SENT);
	*sent = (struct spanfix_sent){ .from = from, .to = to, .kind = kind };
	return sent;
}

static void spanfix_order_on_send(void *userdata, uint32_t node, const struct order_msg *msg)
{
	uint8_t bytes[ORDER_MSG_MAX];
	struct spanfix_sent *sent =
		spanfix_send(SPANFIX_ORDER, spanfix_node_of_job(userdata), node);

	CHECK(order_unpack(bytes, order_pack(msg, bytes), &sent->msg) == 0);
}

/* -- ranks without inputs */

static struct asked *spanfix_copy_asked(const struct asked *a, const struct job *job)
{
	struct asked *copy = asked_new(job->owner.user, a->bytes);

	CHECK(copy);
	copy->number = a->number;
	copy->rank = a->rank;
	copy->pid = a->pid;
	copy->print = a->print;
	copy->units = a->units;
	memcpy(copy->words, a->words, sizeof(a->words));
	memcpy(copy->type, a->type, sizeof(a->type));
	if (a->bytes)
		memcpy(copy->request, a->request, a->bytes);
	return copy;
}

/* To the leader, or from it to all nodes but @from. */
static void spanfix_pass_on(struct spanfix *w, const struct spanfix_sent *what, unsigned from,
			    unsigned self)
{
	for (unsigned i = 0; i < w->n_nodes; i++) {
		struct spanfix_sent *sent;

		if (i == from || i == self || (self && i))
			continue;
		sent = spanfix_send(what->kind, self, i);
		sent->group = what->group;
		sent->number = what->number;
		sent->last_number = what->last_number;
		sent->last = what->last;
		if (what->asked)
			sent->asked = spanfix_copy_asked(what->asked, w->jobs[i]);
	}
}

static void spanfix_on_joined(struct nodefix *n, struct group *g, uint64_t number,
			      uint64_t last_number, uint32_t last)
{
	const struct spanfix_sent what = { .kind = SPANFIX_JOINED,
					   .group = group_key(g),
					   .number = number,
					   .last_number = last_number,
					   .last = last };
	unsigned self = spanfix_node_of_job(g->job);

	(void)n;
	spanfix_pass_on(&spanfix, &what, self, self);
}

static void spanfix_on_asks(struct nodefix *n, struct group *g, const struct asked *a)
{
	const struct spanfix_sent what = { .kind = SPANFIX_ASKS,
					   .group = group_key(g),
					   .asked = (struct asked *)a };
	unsigned self = spanfix_node_of_job(g->job);

	(void)n;
	spanfix_pass_on(&spanfix, &what, self, self);
}

/* The nodes of @g. Return: NULL: all. */
static const struct order_nodes *spanfix_nodes_of(const struct group *g, struct order_nodes *ret)
{
	unsigned n = 0;

	*ret = (struct order_nodes){ 0 };
	for (uint32_t i = 0; i < group_size(g); i++)
		n += order_nodes_add(ret, span_node_of(g->job->across.span, g->rec->ranks[i]));
	return n == spanfix.n_nodes ? NULL : ret;
}

/* -- a rank that writes parameters by itself */

static void spanfix_fill_write(const struct job *job, const struct across_write *w,
			       struct order_nodes *nodes, struct order_print *print,
			       struct order_entry *e)
{
	*print = (struct order_print){ .words = { w->unit->key, w->rank }, .text = "CopyShard" };
	*e = (struct order_entry){ .key = { ORDER_COLLECTIVE, w->key, w->number },
				   .flags = ORDER_JOINT,
				   .nodes = spanfix_nodes_of(job->groups[w->unit->rec->group],
							     nodes),
				   .print = print,
				   .rank = w->rank };
}

static void spanfix_on_write_allowed(struct nodefix *n, struct job *job,
				     const struct across_write *w)
{
	struct order_nodes nodes;
	struct order_print print;
	struct order_entry e;

	(void)n;
	spanfix_fill_write(job, w, &nodes, &print, &e);
	if (spanfix.orders[spanfix_node_of_job(job)])
		(void)order_announce(spanfix.orders[spanfix_node_of_job(job)], &e);
}

static void spanfix_on_write_refused(struct nodefix *n, struct job *job,
				     const struct across_write *w, const struct fault *f)
{
	struct order_nodes nodes;
	struct order_print print;
	struct order_entry e;

	(void)n;
	spanfix_fill_write(job, w, &nodes, &print, &e);
	(void)order_refuse(spanfix.orders[spanfix_node_of_job(job)], &e, f);
}

static void spanfix_on_writes(struct nodefix *n, struct job *job, const struct across_write *w)
{
	const struct spanfix_sent what = {
		.kind = SPANFIX_WRITES, .group = w->unit->key, .number = w->number, .last = w->rank
	};
	unsigned self = spanfix_node_of_job(job);

	spanfix_pass_on(&spanfix, &what, self, self);
	spanfix_on_write_allowed(n, job, w);
}

static void spanfix_deliver(struct spanfix *w, struct spanfix_sent *sent)
{
	struct group *g;

	if (sent->kind == SPANFIX_ORDER) {
		order_receive(w->orders[sent->to], sent->from, &sent->msg);
		return;
	}
	if (!sent->to)
		spanfix_pass_on(w, sent, sent->from, 0);
	if (sent->kind == SPANFIX_WRITES) {
		struct job *job = w->jobs[sent->to];

		writes_asked_elsewhere(job, spanfix_unit_of_key(job, sent->group), sent->last,
				       sent->number);
		return;
	}
	g = spanfix_group_of_key(w->jobs[sent->to], sent->group);
	if (!g->here)
		asked_free(sent->asked);
	else if (sent->kind == SPANFIX_JOINED)
		CHECK(uneven_joined_elsewhere(g, sent->number, sent->last_number, sent->last) == 0);
	else
		CHECK(uneven_asked_elsewhere(g, sent->asked, 1000) == 0);
}

static uint32_t spanfix_flags_of(const struct op *op)
{
	if (op->type == &op_commit)
		return ORDER_DECISION | ORDER_MARK;
	return op->type == &op_step || op->type == &op_barrier ? ORDER_JOINT : 0;
}

static void spanfix_starts(unsigned node, struct group *g, uint64_t number)
{
	const struct match_slot *s = match_slot(&g->match, number);

	uneven_starts(g, number,
		      spanfix_flags_of(CONTAINER_OF(s->first, struct op, entry)) ||
			      !order_is_recorded(spanfix.orders[node]));
}

static void spanfix_order_on_start(void *userdata, const struct order_started *s)
{
	struct job *job = userdata;
	unsigned node = spanfix_node_of_job(job);
	uint64_t place = s->fingerprint ^ (spanfix.astray == node + 1);
	struct group *g;
	struct unit *u;

	spanfix.started[node] += order_is_recorded(spanfix.orders[node]);
	if (s->key.kind == ORDER_GATHER) {
		u = spanfix_unit_of_key(job, s->key.group);
		if (!u) {
			u = spanfix_unit_of_key(job, unit_leaves_out_key(s->key.group));
			CHECK(u && !u->turns.leaves_out);
			u->turns.leaves_out = true;
			return;
		}
		CHECK(u->turns.n + 1 == s->key.number);
		CHECK(turn_start(job, u, s->position, place) == 0);
		return;
	}
	if (s->key.kind == ORDER_APPLY_UNIT) {
		CHECK(external_start(job, spanfix_unit_of_key(job, s->key.group), s->key.number));
		return;
	}
	if (s->key.kind == ORDER_COLLECTIVE && writes_start(job, s->key.group, s->key.number))
		return;
	g = spanfix_group_of_key(job, s->key.group);
	if (s->key.kind == ORDER_APPLY) {
		if (!(spanfix.deaf >> node & 1))
			apply_allow(job, s->key.group, s->key.number);
		return;
	}
	if (spanfix.deaf >> node & 1 &&
	    strstr(match_slot(&g->match, s->key.number)->first->print.text, "Commit"))
		return;
	spanfix_starts(node, g, s->key.number);
	CHECK(match_start(&g->match, s->key.number, place));
}

static void spanfix_order_on_fail(void *userdata, const struct order_key *key,
				  const struct fault *f)
{
	if (!writes_fail(userdata, key->group, key->number, f))
		match_fail(&spanfix_group_of_key(userdata, key->group)->match, key->number, f);
}

static void spanfix_order_on_decide(void *userdata, const struct order_key *key)
{
	if (!spanfix.undecided)
		order_decided(spanfix.orders[spanfix_node_of_job(userdata)], key, true, NULL);
}

static void spanfix_order_on_ended(void *userdata, const struct fault *f)
{
	(void)userdata;
	if (!spanfix.broken.code)
		spanfix.broken = *f;
}

void spanfix_begin_order(struct spanfix *w, unsigned i)
{
	static const char *const names[] = { "node0", "node1", "node2", "node3" };
	static const struct order_ops ops = { .send = spanfix_order_on_send,
					      .start = spanfix_order_on_start,
					      .fail = spanfix_order_on_fail,
					      .decide = spanfix_order_on_decide,
					      .ended = spanfix_order_on_ended };
	const struct order_options o = { .n_nodes = w->n_nodes,
					 .self = i,
					 .names = names,
					 .max_ahead = 1000,
					 .max_recorded = 1000,
					 .patience_us = 100000,
					 .stuck_us = 200000 };

	CHECK(order_new(&o, &ops, w->jobs[i], &w->orders[i]) == 0);
	order_tick(w->orders[i], clock_now_us());
}

static void spanfix_end_orders(struct spanfix *w)
{
	for (unsigned i = 0; i < w->n_nodes; i++)
		w->orders[i] = order_free(w->orders[i]);
	for (; w->n_sent; w->n_sent--) {
		asked_free(w->sent[w->first_sent].asked);
		w->first_sent = (w->first_sent + 1) % SPANFIX_SENT;
	}
}

void spanfix_epoch_ends(struct spanfix *w, const char *why)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "%s", why);
	for (unsigned i = 0; i < w->n_nodes; i++)
		job_epoch_end(w->jobs[i], &f);
	spanfix_end_orders(w);
}

/* The messages of now, and the time. */
void spanfix_turn_orders(struct spanfix *w)
{
	for (unsigned n = w->n_sent; n && w->n_sent; n--) {
		struct spanfix_sent sent = w->sent[w->first_sent];

		w->first_sent = (w->first_sent + 1) % SPANFIX_SENT;
		w->n_sent--;
		if (sent.to + 1 == w->held)
			w->sent[(w->first_sent + w->n_sent++) % SPANFIX_SENT] = sent;
		else
			spanfix_deliver(w, &sent);
	}
	for (unsigned i = 0; i < w->n_nodes && w->orders[i]; i++)
		order_tick(w->orders[i], clock_now_us());
	if (w->broken.code && w->orders[0])
		spanfix_epoch_ends(w, w->broken.text);
}

bool spanfix_is_recorded(struct spanfix *w)
{
	for (unsigned i = 0; i < w->n_nodes; i++)
		if (!order_is_recorded(w->orders[i]))
			return false;
	return true;
}

static void spanfix_on_announce(struct nodefix *n, struct group *g, uint64_t number,
				const struct match_entry *first)
{
	const struct op *op = CONTAINER_OF(first, struct op, entry);
	struct order_nodes nodes;
	struct order_print print;
	struct order_entry e = { .key = { ORDER_COLLECTIVE, group_key(g), number },
				 .flags = spanfix_flags_of(op),
				 .nodes = spanfix_nodes_of(g, &nodes),
				 .print = &print,
				 .rank = first->rank };

	(void)n;
	memcpy(print.words, first->print.words, sizeof(print.words));
	snprintf(print.text, sizeof(print.text), "%s", first->print.text);
	uneven_announces(g, number);
	if (spanfix.orders[spanfix_node_of_job(g->job)])
		(void)order_announce(spanfix.orders[spanfix_node_of_job(g->job)], &e);
}

static void spanfix_on_refuse(struct nodefix *n, struct group *g, uint64_t number,
			      const struct fault *f)
{
	struct order_nodes nodes;
	struct order_print print = { 0 };
	struct order_entry e = { .key = { ORDER_COLLECTIVE, group_key(g), number },
				 .nodes = spanfix_nodes_of(g, &nodes),
				 .print = &print };

	(void)n;
	uneven_refuses(g, number);
	if (spanfix.orders[spanfix_node_of_job(g->job)])
		(void)order_refuse(spanfix.orders[spanfix_node_of_job(g->job)], &e, f);
}

static void spanfix_on_prepared(struct nodefix *n, struct group *g, uint64_t number)
{
	struct order_nodes nodes;
	struct order_print print = { 0 };
	struct order_entry e = { .key = { ORDER_APPLY, group_key(g), number },
				 .nodes = spanfix_nodes_of(g, &nodes),
				 .print = &print };

	(void)n;
	if (spanfix.orders[spanfix_node_of_job(g->job)])
		(void)order_announce(spanfix.orders[spanfix_node_of_job(g->job)], &e);
}

static void spanfix_on_want(struct nodefix *n, struct job *job, struct unit *u, uint64_t turn)
{
	const struct order_entry e = { .key = { ORDER_GATHER, u->key, turn } };

	(void)n;
	(void)order_announce(spanfix.orders[spanfix_node_of_job(job)], &e);
}

static void spanfix_on_made(struct nodefix *n, struct job *job, uint64_t position)
{
	(void)n;
	if (spanfix.orders[spanfix_node_of_job(job)])
		order_done(spanfix.orders[spanfix_node_of_job(job)], position);
}

static void spanfix_on_leave_out(struct nodefix *n, struct job *job, struct unit *u)
{
	struct order_nodes nodes;
	struct order_entry e = { .key = { ORDER_GATHER, unit_leaves_out_key(u->key), 1 },
				 .nodes = spanfix_nodes_of(job->groups[u->rec->group], &nodes) };

	(void)n;
	(void)order_announce(spanfix.orders[spanfix_node_of_job(job)], &e);
}

static void spanfix_on_give(struct nodefix *n, struct job *job, struct unit *u, uint64_t turn)
{
	const struct order_print print = { .text = "the step of a unit" };
	struct order_nodes nodes;
	struct order_entry e = { .key = { ORDER_APPLY_UNIT, u->key, turn },
				 .nodes = spanfix_nodes_of(job->groups[u->rec->group], &nodes),
				 .print = &print };

	(void)n;
	(void)order_announce(spanfix.orders[spanfix_node_of_job(job)], &e);
}

/* -- their beginning and end */

void spanfix_turn(struct spanfix *w)
{
	for (unsigned i = 0; i < spanfix_homes(w); i++)
		nodefix_turn(&w->nodes[i]);
	if (w->spans)
		spanfix_turn_orders(w);
}

void spanfix_turn_until(struct spanfix *w, bool (*done)(struct spanfix *w))
{
	const struct timespec pause = { 0, 100000 };
	uint64_t until = clock_now_us() + 20000000;

	while (!done(w)) {
		spanfix_turn(w);
		nanosleep(&pause, NULL);
		cr_assert_lt(clock_now_us(), until, "it does not end");
	}
}

struct span *spanfix_new_span(const struct spanfix *w, unsigned self, const char *prefix)
{
	static const uint16_t devices[SPANFIX_RANKS];
	const struct comm_store s = { spanfix_store_set, spanfix_store_get, spanfix_store_exchange,
				      NULL };
	struct span_node nodes[SPANFIX_NODES] = { 0 };
	struct span *span = NULL;
	struct fault f = FAULT_NULL;
	uint32_t first = 0;

	for (unsigned i = 0; i < w->n_nodes; i++) {
		snprintf(nodes[i].name, sizeof(nodes[i].name), "node%u", i);
		nodes[i].first = first;
		nodes[i].n = w->ranks[i];
		nodes[i].devices = devices;
		first += w->ranks[i];
	}
	cr_assert_eq(span_new(nodes, w->n_nodes, self, prefix, &s, &span, &f), 0, "%s", f.text);
	return span;
}

static void spanfix_join(struct spanfix *w, uint32_t rank)
{
	struct nodefix *n = spanfix_node_of(w, rank);
	struct fault f = FAULT_NULL;
	char device[32];
	struct job_joining how = { .rank = rank, .device = device };

	snprintf(device, sizeof(device), "fake:%u",
		 w->spans || spanfix_by_ranks ? 0 : w->node_of[rank]);
	cr_assert_eq(job_join(w->jobs[spanfix_home(w, rank)], &how, n->proc, rank + 1, NULL,
			      &w->members[rank], &f),
		     RES_DONE, "%s", f.text);
	n->members[n->n_members++] = w->members[rank];
}

void spanfix_make_node(struct spanfix *w, unsigned i)
{
	const struct nodefix_options o = { .beside = i > 0,
					   .queues = spanfix_queues,
					   .devices =
						   w->spans || spanfix_by_ranks ? 1 : w->n_nodes };
	const struct gloo_options gloo = { .address = "127.0.0.1", .reason_ms = spanfix_reason_ms };
	struct nodefix *n = &w->nodes[i];

	nodefix_begin(n, &o);
	n->node.order_ranks = spanfix_by_ranks;
	n->node.limits.reduce_batch_bytes = w->spans ? 1 << 20 : 0;
	n->announce = spanfix_on_announce;
	n->refuse = spanfix_on_refuse;
	n->want = spanfix_on_want;
	n->made = spanfix_on_made;
	n->give = spanfix_on_give;
	n->prepared = spanfix_on_prepared;
	n->leave_out = spanfix_on_leave_out;
	n->joined = spanfix_on_joined;
	n->asks = spanfix_on_asks;
	n->writes = spanfix_on_writes;
	n->write_allowed = spanfix_on_write_allowed;
	n->write_refused = spanfix_on_write_refused;
	w->jobs[i] = nodefix_job(n, "job", w->size, 0);
	if (w->spans)
		cr_assert_eq(engine_gloo_new(&n->run.queue, &gloo, &n->node.nodes_engine), 0);
}

static void spanfix_begin_node(struct spanfix *w, unsigned i)
{
	struct fault f = FAULT_NULL;

	spanfix_make_node(w, i);
	if (!w->spans)
		return;
	cr_assert_eq(job_set_span(w->jobs[i], spanfix_new_span(w, i, "job/1"), 1, &f), 0, "%s",
		     f.text);
	spanfix_begin_order(w, i);
}

void spanfix_begin(struct spanfix *w, bool spans, const unsigned *ranks)
{
	uint32_t rank = 0;

	*w = (struct spanfix){ .spans = spans };
	store.n = 0;
	while (w->n_nodes < SPANFIX_NODES && ranks[w->n_nodes])
		w->size += w->ranks[w->n_nodes] = ranks[w->n_nodes], w->n_nodes++;
	for (unsigned i = 0; i < spanfix_homes(w); i++)
		spanfix_begin_node(w, i);
	for (unsigned i = 0; i < w->n_nodes; i++)
		for (unsigned r = 0; r < ranks[i]; r++) {
			w->node_of[rank] = i;
			spanfix_join(w, rank++);
		}
}

bool spanfix_is_idle(struct spanfix *w)
{
	for (unsigned i = 0; i < spanfix_homes(w); i++)
		if (w->jobs[i]->running)
			return false;
	return true;
}

static bool spanfix_has_left(struct spanfix *w)
{
	for (unsigned i = 0; i < w->n_nodes; i++)
		if (engine_leaving(w->nodes[i].node.nodes_engine))
			return false;
	return true;
}

/* The communicators of all nodes end together. */
static void spanfix_leave_all(struct spanfix *w)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_ABORTED, NULL, "it is over");
	for (unsigned i = 0; i < w->n_nodes; i++) {
		job_epoch_end(w->jobs[i], &f);
		node_wake(&w->nodes[i].node);
	}
	spanfix_end_orders(w);
	spanfix_turn_until(w, spanfix_has_left);
}

void spanfix_end(struct spanfix *w)
{
	spanfix_turn_until(w, spanfix_is_idle);
	if (w->spans)
		spanfix_leave_all(w);
	for (unsigned i = spanfix_homes(w); i--;)
		nodefix_end(&w->nodes[i]);
}

/* -- their ops */

bool spanfix_ops_are_over(struct spanfix *w)
{
	for (uint32_t r = 0; r < w->size; r++)
		if (!w->ops[r].over)
			return false;
	return true;
}

void spanfix_all_ok(struct spanfix *w, const char *what)
{
	spanfix_turn_until(w, spanfix_ops_are_over);
	for (uint32_t r = 0; r < w->size; r++)
		cr_assert_eq(w->ops[r].fault.code, 0, "%s of rank %u: %s", what, r,
			     w->ops[r].fault.text);
}

bool spanfix_is_placed(struct spanfix *w)
{
	struct fault f = FAULT_NULL;
	bool all = true;

	for (unsigned i = 0; i < spanfix_homes(w); i++) {
		struct job *job = w->jobs[i];

		for (uint32_t k = 0; k < job->n_groups; k++) {
			struct group *g = job->groups[k];

			if (!g->here)
				continue;
			all = group_place(g, &f) == RES_DONE && group_comms(g, &f) == RES_DONE &&
			      all;
			cr_assert_eq(f.code, 0, "%s", f.text);
		}
	}
	return all;
}

void spanfix_add_named_unit(struct spanfix *w, const char *name, uint64_t elements,
			    void (*change)(state_unit *spec))
{
	spanfix_turn_until(w, spanfix_is_placed);
	for (unsigned i = 0; i < spanfix_homes(w); i++) {
		state_unit *spec = nodefix_spec(name, elements);

		if (change)
			change(spec);
		w->unit = nodefix_register(w->jobs[i], spec)->id;
	}
}

void spanfix_add_unit(struct spanfix *w, uint64_t elements, void (*change)(state_unit *spec))
{
	spanfix_add_named_unit(w, "u", elements, change);
}

void spanfix_fill(const struct region *r, uint32_t rank, unsigned salt)
{
	/* Of two NaNs, which one a sum keeps is the compiler's choice: the lower half, read as
	 * bf16 or fp16, is below 2, too. */
	const uint32_t top_exponent_bit = 0x4000;
	uint32_t *p = region_addr(r);

	for (uint64_t i = 0; i < r->bytes / sizeof(*p); i++) {
		float v =
			(float)((i * 2654435761u + rank * 40503u + salt * 97u) % 10007u) / 9973.0f -
			0.5f;

		memcpy(&p[i], &v, sizeof(v));
		p[i] &= ~top_exponent_bit;
	}
}

const struct region *spanfix_result(struct spanfix *w, uint32_t rank)
{
	return &w->ops[rank].result.place;
}

void spanfix_note_results(struct spanfix *w)
{
	for (uint32_t r = 0; r < w->size; r++)
		spanfix_note(w, region_addr(spanfix_result(w, r)), spanfix_result(w, r)->bytes);
}

void spanfix_gather_and_note(struct spanfix *w)
{
	ALL(w, nodefix_on_unit(n, m, "Gather", u, op));
	spanfix_note_results(w);
	ALL(w, nodefix_on_unit(n, m, "Release", u, op));
}

void spanfix_run(void (*script)(struct spanfix *w), const unsigned *ranks)
{
	unsigned char *notes;
	size_t n;

	spanfix_begin(&spanfix, false, ranks);
	script(&spanfix);
	spanfix_end(&spanfix);
	notes = spanfix.notes;
	n = spanfix.n_notes;
	spanfix_begin(&spanfix, true, ranks);
	script(&spanfix);
	spanfix_end(&spanfix);
	cr_assert_gt(n, 0);
	cr_assert_eq(spanfix.n_notes, n);
	cr_expect(memcmp(spanfix.notes, notes, n) == 0, "nodes differ from devices");
	free(spanfix.notes);
	free(notes);
}

void spanfix_replicated(state_unit *spec)
{
	spec->strategy = STRATEGY_REPLICATE;
	spec->shard_ranks = 1;
}

void spanfix_fill_gradients(struct spanfix *w, unsigned salt)
{
	ALL(w, nodefix_on_unit(n, m, "GradientBuffer", u, op));
	for (uint32_t r = 0; r < w->size; r++)
		spanfix_fill(spanfix_result(w, r), r, salt);
}

void spanfix_in_bf16(state_unit *spec)
{
	spec->compute_dtype = DTYPE_BF16;
}

void spanfix_next_epoch(struct spanfix *w, const char *prefix)
{
	spanfix_turn_until(w, spanfix_is_idle);
	for (unsigned i = 0; i < w->n_nodes; i++) {
		struct fault f = FAULT_NULL;

		cr_assert_eq(job_set_span(w->jobs[i], spanfix_new_span(w, i, prefix), 100, &f), 0,
			     "%s", f.text);
		spanfix_begin_order(w, i);
	}
	w->broken = FAULT_NULL;
	for (uint32_t r = 0; r < w->size; r++) {
		struct member *m = NULL;
		struct fault f = FAULT_NULL;

		cr_assert_eq(nodefix_try_join(spanfix_node_of(w, r), w->jobs[spanfix_home(w, r)], r,
					      NULL, w->members[r], &m, &f),
			     RES_DONE, "%s", f.text);
		cr_assert_eq(m, w->members[r]);
		cr_assert_eq(m->epoch, 100);
	}
	spanfix_turn_until(w, spanfix_is_placed);
}
