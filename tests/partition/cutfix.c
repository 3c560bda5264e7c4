#include "cutfix.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/scale/scale.h"
#include "cluster/cluster_impl.h"
#include "coord/coord_impl.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/text.h"
#include "job/group.h"
#include "job/position.h"
#include "nodefix.h"

#define TICK_US   25000u
#define NOTICE_US 1250000u
#define LATE_US   300000u
#define ANSWER_US 2000000u /* CLUSTER_ANSWER_MS */
#define STEPS     64
#define CONDS     3
#define ELEMENTS  8

/* What the rank of a node does. */
enum rank_state { RANK_JOINS, RANK_ASKS, RANK_FILLS, RANK_REDUCES, RANK_STEPS, RANK_COMMITS };

struct cut_node {
	struct nodefix n;
	struct coord *coord;
	struct cluster *cluster;
	struct job *job;
	struct member *m;
	struct nodefix_op op;
	enum rank_state state;
	uint64_t next;    /* the step that it works on */
	uint64_t seen;    /* the last commit that was looked at */
	uint64_t lost_us; /* since then answers of the store are lost; 0: they are not */
	enum cutfix_fate fate;
	enum cutfix_delay delay;
	bool joins, stopped, asked; /* @asked: an answer of the store is there */
	struct job_step_id applied; /* that was looked at */
};

struct peers {
	unsigned node;
	bool closed;
	const struct peers_ops *ops;
	void *userdata;
};

struct peer {
	struct list link;
	struct peers *owner;
	struct peer *other;
	void *data;
	uint64_t gone_us; /* then this end notices; 0: it does not */
	bool dialled, over, told;
	char why[128];
};

struct news {
	struct list link;
	struct peer *to;
	bool up;
	size_t bytes;
	uint8_t packed[];
};

static struct {
	struct cut_node nodes[CUTFIX_NODES];
	struct peers peers[CUTFIX_NODES];
	unsigned n_peers;
	struct list under_way, ends;
	struct coord_fake *store;
	struct looprun look; /* of the one that looks into the store */
	struct coord *looks;
	uint64_t now_us, epoch_of[STEPS];
	uint64_t random;
	unsigned (*pick)(unsigned n); /* this or random, or what was sent first arrives first */
	bool turns;
	unsigned apart, events;
	bool schedules;
	void (*on_event)(void);
	char wrong[512];
} fix;

static void cutfix_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void cutfix_say(const char *format, ...)
{
	va_list args;

	if (*fix.wrong)
		return;
	va_start(args, format);
	vsnprintf(fix.wrong, sizeof(fix.wrong), format, args);
	va_end(args);
}

static void cutfix_event(void)
{
	fix.events++;
	if (fix.on_event)
		fix.on_event();
}

static struct cut_node *cutfix_enter(unsigned node)
{
	the_cluster = fix.nodes[node].cluster;
	return &fix.nodes[node];
}

/* ------------------------------------------------------------------ peer/peer.h */

static bool cutfix_is_cut(unsigned a, unsigned b)
{
	return (fix.apart >> a & 1) != (fix.apart >> b & 1);
}

static void cutfix_post(struct peer *to, bool up, const Shardd__V1__PeerMessage *m)
{
	size_t bytes = m ? shardd__v1__peer_message__get_packed_size(m) : 0;
	struct news *news = malloc(sizeof(*news) + bytes);

	CHECK(news);
	news->to = to;
	news->up = up;
	news->bytes = bytes;
	list_init(&news->link);
	list_append(&fix.under_way, &news->link);
	if (m)
		shardd__v1__peer_message__pack(m, news->packed);
}

int peers_new(struct loopq *loopq, const struct peers_options *o, const struct peers_ops *ops,
	      void *userdata, struct peers **ret, struct fault *f)
{
	struct peers *ps = &fix.peers[fix.n_peers];

	(void)loopq, (void)o, (void)f;
	CHECK(fix.n_peers < CUTFIX_NODES);
	*ps = (struct peers){ .node = fix.n_peers++, .ops = ops, .userdata = userdata };
	*ret = ps;
	return 0;
}

uint16_t peers_port(const struct peers *ps)
{
	return (uint16_t)(ps->node + 1);
}

static struct peer *cutfix_end_new(unsigned node)
{
	struct peer *p = calloc(1, sizeof(*p));

	CHECK(p);
	p->owner = &fix.peers[node];
	list_init(&p->link);
	list_append(&fix.ends, &p->link);
	return p;
}

/* @at: "HOST:NUMBER OF THE NODE" */
int peers_connect(struct peers *ps, const char *name, const char *at, struct peer **ret,
		  struct fault *f)
{
	unsigned node = (unsigned)strtoul(strrchr(at, ':') + 1, NULL, 10);
	struct peer *here = cutfix_end_new(ps->node), *there = cutfix_end_new(node);

	(void)name, (void)f;
	here->dialled = true;
	here->other = there;
	there->other = here;
	*ret = here;
	if (cutfix_is_cut(ps->node, node)) {
		there->told = here->over = there->over = true;
		here->gone_us = fix.now_us + NOTICE_US;
		text_copy(here->why, sizeof(here->why), "it cannot be reached");
	} else {
		cutfix_post(there, true, NULL);
		cutfix_post(here, true, NULL);
	}
	return 0;
}

void peers_tick(struct peers *ps, uint64_t now_us)
{
	(void)ps, (void)now_us;
}

void peers_close(struct peers *ps, peers_closed_cb done, void *userdata)
{
	ps->closed = true;
	if (done)
		done(userdata);
}

void peer_send(struct peer *p, const Shardd__V1__PeerMessage *m)
{
	if (!p->over && !cutfix_is_cut(p->owner->node, p->other->owner->node))
		cutfix_post(p->other, false, m);
}

void peer_end(struct peer *p, const char *why)
{
	if (p->over)
		return;
	cutfix_say("node %u ends the link to node %u: %s", p->owner->node, p->other->owner->node,
		   why);
	p->over = p->other->over = true;
	p->gone_us = p->other->gone_us = fix.now_us;
}

const char *peer_name(const struct peer *p)
{
	return fix.nodes[p->other->owner->node].cluster->node;
}

struct peer *peers_find(struct peers *ps, const char *name)
{
	struct peer *p, *tmp;

	list_for_each (p, tmp, &fix.ends, link)
		if (p->owner == ps && !p->over && strcmp(peer_name(p), name) == 0)
			return p;
	return NULL;
}

bool peer_is_dialled(const struct peer *p)
{
	return p->dialled;
}

void peer_set_data(struct peer *p, void *data)
{
	p->data = data;
}

void *peer_data(const struct peer *p)
{
	return p->data;
}

static uint64_t cutfix_random(uint64_t most)
{
	fix.random ^= fix.random << 13;
	fix.random ^= fix.random >> 7;
	fix.random ^= fix.random << 17;
	return (fix.random >> 11) % most;
}

static bool cutfix_is_first_of_its_link(const struct news *news)
{
	struct news *n, *tmp;

	list_for_each (n, tmp, &fix.under_way, link) {
		if (n == news)
			return true;
		if (n->to == news->to)
			return false;
	}
	CHECK_NOT_REACHED();
}

static unsigned cutfix_which(unsigned n)
{
	if (n > 1 && fix.pick)
		return fix.pick(n);
	return n > 1 && fix.random ? (unsigned)cutfix_random(n) : 0;
}

/* What arrives next: each link keeps its order. Return: NULL: nothing, since a node goes on instead, which is
 * *@ret_node, or since nothing is under way; then that is CUTFIX_NODES. */
static struct news *cutfix_pick(unsigned *ret_node)
{
	struct news *news, *tmp, *first[2 * CUTFIX_NODES * CUTFIX_NODES];
	unsigned n = 0, which;

	*ret_node = CUTFIX_NODES;
	list_for_each (news, tmp, &fix.under_way, link)
		if (n < ARRAY_SIZE(first) && cutfix_is_first_of_its_link(news))
			first[n++] = news;
	if (!n)
		return NULL;
	which = cutfix_which(n + (fix.turns ? CUTFIX_NODES : 0));
	if (which < n)
		return first[which];
	*ret_node = which - n;
	return NULL;
}

static void cutfix_arrive(struct news *news)
{
	Shardd__V1__PeerMessage *m = NULL;
	struct peer *p = news->to;

	list_unlink(&news->link);
	if (!p->over && !p->owner->closed) {
		cutfix_enter(p->owner->node);
		if (news->up) {
			p->owner->ops->up(p->owner->userdata, p);
		} else {
			m = shardd__v1__peer_message__unpack(NULL, news->bytes, news->packed);
			CHECK(m);
			p->owner->ops->message(p->owner->userdata, p, m);
			shardd__v1__peer_message__free_unpacked(m, NULL);
		}
	}
	free(news);
}

static void cutfix_go_on(unsigned node);

/* Return: false: nothing is under way. */
static bool cutfix_deliver(void)
{
	struct news *news;
	unsigned node;

	if (list_empty(&fix.under_way))
		return false;
	cutfix_event();
	news = cutfix_pick(&node);
	if (news)
		cutfix_arrive(news);
	else if (node < CUTFIX_NODES)
		cutfix_go_on(node);
	return true; /* without either it was lost at this moment */
}

/* Ends of links notice that they are. */
static void cutfix_notice(void)
{
	struct peer *p, *tmp;

	list_for_each (p, tmp, &fix.ends, link) {
		if (!p->gone_us || p->told || fix.now_us < p->gone_us)
			continue;
		p->told = true;
		if (p->owner->closed)
			continue;
		cutfix_enter(p->owner->node);
		p->owner->ops->gone(p->owner->userdata, p, p->why);
	}
}

static void cutfix_lose_news(void)
{
	struct news *news, *tmp;

	list_for_each (news, tmp, &fix.under_way, link)
		if (cutfix_is_cut(news->to->owner->node, news->to->other->owner->node)) {
			list_unlink(&news->link);
			free(news);
		}
}

void cutfix_cut(unsigned apart, unsigned late)
{
	struct peer *p, *tmp;

	fix.apart = apart;
	cutfix_lose_news();
	list_for_each (p, tmp, &fix.ends, link) {
		unsigned node = p->owner->node;

		if (p->over || !cutfix_is_cut(node, p->other->owner->node))
			continue;
		p->over = true;
		p->gone_us = fix.now_us + NOTICE_US + (late >> node & 1 ? LATE_US : 0);
		text_copy(p->why, sizeof(p->why), "nothing has come from it");
	}
}

void cutfix_heal(void)
{
	fix.apart = 0;
}

/* ------------------------------------------------------------------ the store */

/* A transaction that is on its way to the store. */
struct late {
	struct coord_call call;
	char keys[CONDS + 1][CLUSTER_KEY_BYTES];
	struct coord_cond conds[CONDS];
	struct coord_change change;
	struct coord_txn txn;
	uint8_t value[256];
	enum cutfix_delay until;
	bool waits;
};

static void cutfix_delay(struct late *l, const struct coord_txn *t, enum cutfix_delay until)
{
	CHECK(t->n_conds <= CONDS && t->n_changes == 1);
	CHECK(t->changes[0].bytes <= sizeof(l->value));
	*l = (struct late){ .change = t->changes[0], .until = until, .waits = true };
	for (size_t i = 0; i < t->n_conds; i++) {
		text_copy(l->keys[i], sizeof(l->keys[i]), t->conds[i].key);
		l->conds[i] = t->conds[i];
		l->conds[i].key = l->keys[i];
	}
	text_copy(l->keys[CONDS], sizeof(l->keys[CONDS]), t->changes[0].key);
	l->change.key = l->keys[CONDS];
	if (l->change.bytes)
		memcpy(l->value, l->change.value, l->change.bytes);
	l->change.value = l->value;
	l->txn = (struct coord_txn){
		.conds = l->conds, .n_conds = t->n_conds, .changes = &l->change, .n_changes = 1
	};
}

static struct late late;

static void cutfix_on_late(struct coord_call *call, const struct coord_reply *r)
{
	(void)call, (void)r; /* whoever has asked does not hear of it */
}

__typeof__(coord_txn) __real_coord_txn, __wrap_coord_txn;

/* @behind: the transaction, on @key, has just been made. */
static void cutfix_late_arrives(const char *key, bool behind)
{
	const char *until = late.until < CUTFIX_BEFORE_COMMIT ? "/epoch" : "/step";

	if (!late.waits || !strstr(key, until) ||
	    behind != (late.until == CUTFIX_BEHIND_EPOCH || late.until == CUTFIX_BEHIND_COMMIT))
		return;
	late.waits = false;
	late.call.done = cutfix_on_late;
	CHECK(__real_coord_txn(fix.looks, &late.call, &late.txn, 1000) == 0);
	while (late.call.impl)
		uv_run(&fix.look.loop, UV_RUN_NOWAIT);
}

static void cutfix_set_fate(struct cut_node *w, enum cutfix_fate fate)
{
	static const enum coord_fake_fate as[] = { [CUTFIX_ANSWERED] = COORD_FAKE_ANSWERED,
						   [CUTFIX_LOST_BEFORE] = COORD_FAKE_LOST_BEFORE,
						   [CUTFIX_LOST_AFTER] = COORD_FAKE_LOST_AFTER,
						   [CUTFIX_DELAYED] = COORD_FAKE_LOST_BEFORE };

	w->fate = fate;
	coord_fake_fate(w->coord, as[fate]);
}

int __wrap_coord_txn(struct coord *c, struct coord_call *call, const struct coord_txn *txn,
		     uint32_t timeout_ms)
{
	struct cut_node *w = NULL;
	bool arrives;
	int r;

	for (unsigned i = 0; i < CUTFIX_NODES; i++)
		if (fix.nodes[i].coord == c)
			w = &fix.nodes[i];
	if (!w || !txn->n_changes)
		return __real_coord_txn(c, call, txn, timeout_ms);
	cutfix_event();
	arrives = w->fate == CUTFIX_ANSWERED || w->fate == CUTFIX_LOST_AFTER;
	if (arrives)
		cutfix_late_arrives(txn->changes[0].key, false);
	if (w->fate == CUTFIX_DELAYED)
		cutfix_delay(&late, txn, w->delay);
	r = __real_coord_txn(c, call, txn, timeout_ms);
	if (arrives)
		cutfix_late_arrives(txn->changes[0].key, true);
	w->asked = w->fate == CUTFIX_ANSWERED;
	if (!w->asked)
		cutfix_set_fate(w, CUTFIX_LOST_BEFORE);
	return r;
}

void cutfix_store(unsigned node, enum cutfix_fate fate, enum cutfix_delay delay)
{
	struct cut_node *w = &fix.nodes[node];

	w->delay = delay;
	w->lost_us = fate == CUTFIX_ANSWERED ? 0 : fix.now_us + ANSWER_US;
	cutfix_set_fate(w, fate);
	if (fate == CUTFIX_ANSWERED)
		coord_fake_lose(w->coord);
}

static void cutfix_lose_answers(struct cut_node *w)
{
	if (!w->lost_us || fix.now_us < w->lost_us)
		return;
	w->lost_us = fix.now_us + ANSWER_US;
	coord_fake_lose(w->coord);
}

struct cut_look {
	struct coord_call call;
	uint64_t step, epoch;
};

static void cutfix_on_look(struct coord_call *call, const struct coord_reply *r)
{
	struct cut_look *l = CONTAINER_OF(call, struct cut_look, call);
	unsigned long long step = 0, epoch = 0;
	char text[64] = "";

	CHECK(r->status == COORD_OK && r->n <= 1);
	if (r->n)
		snprintf(text, sizeof(text), "%.*s", (int)r->kvs[0].bytes,
			 (const char *)r->kvs[0].value);
	CHECK(sscanf(text, "%llu %llu", &step, &epoch) == (r->n ? 2 : EOF));
	l->step = step;
	l->epoch = epoch;
}

/* The last commit that the store has decided. */
static struct cut_look cutfix_look(void)
{
	struct cut_look l = { .call = { .done = cutfix_on_look } };
	char key[CLUSTER_KEY_BYTES];
	struct coord_txn t = { .read = key };

	snprintf(key, sizeof(key), "jobs/%s/step", fix.nodes[0].job->label);
	CHECK(coord_txn(fix.looks, &l.call, &t, 1000) == 0);
	while (l.call.impl)
		uv_run(&fix.look.loop, UV_RUN_NOWAIT);
	return l;
}

/* ------------------------------------------------------------------ the rules */

uint64_t cutfix_step(unsigned node)
{
	const state_job *rec = fix.nodes[node].job->rec;

	return rec->has_commit ? rec->step : 0;
}

/* Each rank says with its commit in which epoch it makes it: as many bytes. */
uint64_t cutfix_epoch(unsigned node)
{
	const state_blob *b = state_job_blob(fix.nodes[node].job->rec, node);

	return b ? b->data.len : 0;
}

unsigned cutfix_leader(unsigned node)
{
	const struct cluster_job *cj =
		cluster_find(fix.nodes[node].cluster, fix.nodes[node].job->label);

	return (unsigned)strtoul(strrchr(cj->leader, '-') + 1, NULL, 10);
}

static bool cutfix_is_deciding(void)
{
	for (unsigned i = 0; i < CUTFIX_NODES; i++) {
		const struct cluster_job *cj =
			cluster_find(fix.nodes[i].cluster, fix.nodes[i].job->label);

		if (cj && cj->commit.state != DECIDE_IDLE)
			return true;
	}
	return false;
}

enum cutfix_phase cutfix_phase(uint64_t step)
{
	unsigned has = 0, announced = 0;

	for (unsigned i = 0; i < CUTFIX_NODES; i++) {
		const struct cut_node *w = &fix.nodes[i];

		has += cutfix_step(i) > step;
		announced += w->state == RANK_COMMITS && w->op.op && w->next > step;
	}
	if (has)
		return has == CUTFIX_NODES ? CUTFIX_OVER : CUTFIX_STARTED;
	if (cutfix_look().step > step)
		return CUTFIX_DECIDED;
	return cutfix_is_deciding() ? CUTFIX_DECIDING
	       : announced          ? CUTFIX_ANNOUNCED
				    : CUTFIX_BEFORE;
}

/* A step has been committed in one epoch, or else two halves have. */
static void cutfix_note(uint64_t step, uint64_t epoch, const char *who)
{
	CHECK(step < STEPS);
	if (step && fix.epoch_of[step] && fix.epoch_of[step] != epoch)
		cutfix_say("%s has committed step %u of epoch %u, another one that of epoch %u",
			   who, (unsigned)step, (unsigned)epoch, (unsigned)fix.epoch_of[step]);
	fix.epoch_of[step] = epoch;
}

/* Invariant 6. */
static void cutfix_check_commit(unsigned node)
{
	uint64_t step = cutfix_step(node), epoch = cutfix_epoch(node);
	struct cut_look decided;

	if (step == fix.nodes[node].seen)
		return;
	if (step < fix.nodes[node].seen)
		cutfix_say("node %u had committed step %u, and has %u now", node,
			   (unsigned)fix.nodes[node].seen, (unsigned)step);
	fix.nodes[node].seen = step;
	decided = cutfix_look();
	cutfix_note(decided.step, decided.epoch, "the store");
	if (step > decided.step || (step == decided.step && epoch != decided.epoch))
		cutfix_say("node %u has committed step %u of epoch %u, the store step %u of epoch "
			   "%u",
			   node, (unsigned)step, (unsigned)epoch, (unsigned)decided.step,
			   (unsigned)decided.epoch);
	cutfix_note(step, epoch, fix.nodes[node].cluster->node);
}

static struct job_step_id cutfix_applied(unsigned node)
{
	const struct job *job = fix.nodes[node].job;
	const state_applied *a = state_job_applied(job->rec, group_key(job->groups[0]));

	return a ? (struct job_step_id){ a->epoch, a->group, a->number }
		 : (struct job_step_id){ 0 };
}

static bool cutfix_is_behind(const struct job_step_id *a, const struct job_step_id *b)
{
	return a->epoch < b->epoch || (a->epoch == b->epoch && a->number < b->number);
}

/* Invariant 5: when a node has applied a step, each other one has it prepared, or has applied it. */
static void cutfix_check_applied(unsigned node)
{
	struct job_step_id id = cutfix_applied(node), other;

	if (id.epoch == fix.nodes[node].applied.epoch &&
	    id.number == fix.nodes[node].applied.number)
		return;
	fix.nodes[node].applied = id;
	for (unsigned i = 0; i < CUTFIX_NODES; i++) {
		const struct job_step *step = &fix.nodes[i].job->step;

		other = cutfix_applied(i);
		if (cutfix_is_behind(&other, &id) &&
		    (step->state == JOB_STEP_NONE || step->id.epoch != id.epoch ||
		     step->id.number != id.number))
			cutfix_say("node %u has applied step number %u of epoch %u, which node %u "
				   "has not prepared",
				   node, (unsigned)id.number, (unsigned)id.epoch, i);
	}
}

const char *cutfix_wrong(void)
{
	return fix.wrong;
}

unsigned cutfix_events(void)
{
	return fix.events;
}

/* ------------------------------------------------------------------ the ranks */

static void cutfix_join(struct cut_node *w)
{
	unsigned rank = (unsigned)(w - fix.nodes);
	struct fault f = FAULT_NULL;
	struct member *m = NULL;
	enum res r = nodefix_try_join(&w->n, w->job, rank, NULL, w->m, &m, &f);

	if (r == RES_FAILED)
		cutfix_say("rank %u is refused: %s", rank, f.text);
	if (r != RES_DONE)
		return;
	w->m = m;
	w->state = RANK_ASKS;
}

static struct unit *cutfix_unit(struct cut_node *w)
{
	return w->job->n_units ? w->job->units[0] : NULL;
}

/* The unit is registered when the communicators are there. Return: false: they are not yet. */
static bool cutfix_register(struct cut_node *w)
{
	struct group *world = w->job->groups[0];
	struct fault f = FAULT_NULL;

	if (group_place(world, &f) != RES_DONE || group_comms(world, &f) != RES_DONE)
		return false;
	if (!cutfix_unit(w))
		nodefix_register(w->job, nodefix_spec("u", ELEMENTS * CUTFIX_NODES));
	return true;
}

/* The next op of the rank, behind the one that has ended well. */
static void cutfix_next(struct cut_node *w)
{
	struct unit *u = cutfix_unit(w);
	uint64_t at = 0;

	switch (w->state) {
	case RANK_JOINS:
		CHECK_NOT_REACHED();
	case RANK_ASKS:
		if (!cutfix_register(w))
			return;
		u = cutfix_unit(w);
		w->next = cutfix_step((unsigned)(w - fix.nodes)) + 1;
		if (!u->rec->initialised) {
			nodefix_seed(&w->n, w->m, u, 7, &w->op);
			return;
		}
		if (position_of(w->job->rec, &at) && at == w->next) {
			w->state = RANK_COMMITS; /* its step is applied */
			nodefix_commit(&w->n, w->m, w->next, w->job->rec->epoch, &w->op);
			return;
		}
		w->state = RANK_FILLS;
		nodefix_on_unit(&w->n, w->m, "GradientBuffer", u, &w->op);
		return;
	case RANK_FILLS:
		memset(region_addr(&w->op.result.place), 0, w->op.result.place.bytes);
		w->state = RANK_REDUCES;
		nodefix_reduce(&w->n, w->m, u, false, &w->op);
		return;
	case RANK_REDUCES:
		w->state = RANK_STEPS;
		nodefix_step(&w->n, w->m, &w->op);
		return;
	case RANK_STEPS:
		w->state = RANK_COMMITS;
		nodefix_commit(&w->n, w->m, w->next, w->job->rec->epoch, &w->op);
		return;
	case RANK_COMMITS:
		w->state = RANK_ASKS;
		w->op = (struct nodefix_op){ .over = true };
		return;
	}
}

static void cutfix_rank_goes_on(struct cut_node *w)
{
	if (w->state == RANK_JOINS) {
		if (w->joins)
			cutfix_join(w);
		return;
	}
	if (w->op.op && !w->op.over)
		return;
	if (w->op.fault.code && w->op.fault.code != FAULT_ABORTED)
		cutfix_say("an op of rank %u: %s", (unsigned)(w - fix.nodes), w->op.fault.text);
	if (w->op.fault.code) {
		w->op = (struct nodefix_op){ .over = true };
		w->state = RANK_JOINS;
		return;
	}
	cutfix_next(w);
}

/* ------------------------------------------------------------------ what happens next */

static void cutfix_tick(void)
{
	struct cut_look decided = cutfix_look();

	cutfix_note(decided.step, decided.epoch, "the store");
	fix.now_us += TICK_US;
	clock_fake(fix.now_us);
	coord_fake_pass(fix.store, TICK_US / 1000);
	cutfix_notice();
	for (unsigned i = 0; i < CUTFIX_NODES; i++) {
		struct cut_node *w = cutfix_enter(i);

		cutfix_lose_answers(w);
		if (!w->cluster->closing)
			w->cluster->timer.timer_cb(&w->cluster->timer);
	}
}

static void cutfix_go_on(unsigned node)
{
	struct cut_node *w;

	if (fix.nodes[node].asked)
		cutfix_event(); /* the answer arrives */
	w = cutfix_enter(node);
	w->asked = false;
	for (unsigned k = 0; k < 4; k++)
		nodefix_turn(&w->n);
	cutfix_rank_goes_on(w);
	cutfix_check_commit(node);
	cutfix_check_applied(node);
}

/* Until nothing more happens without that time passes. */
static void cutfix_round(void)
{
	unsigned before;

	do {
		before = fix.events;
		for (unsigned i = 0; i < CUTFIX_NODES; i++)
			cutfix_go_on(i);
		while (cutfix_deliver())
			;
	} while (fix.events != before);
	cutfix_tick();
}

void cutfix_pass(unsigned ms)
{
	for (uint64_t until = fix.now_us + (uint64_t)ms * 1000; fix.now_us < until && !*fix.wrong;)
		cutfix_round();
}

static bool cutfix_have(uint64_t step)
{
	for (unsigned i = 0; i < CUTFIX_NODES; i++)
		if (cutfix_step(i) < step)
			return false;
	return true;
}

bool cutfix_train(uint64_t step, unsigned ms)
{
	for (uint64_t until = fix.now_us + (uint64_t)ms * 1000;
	     fix.now_us < until && !*fix.wrong;) {
		if (cutfix_have(step))
			return true;
		cutfix_round();
	}
	return cutfix_have(step);
}

/* ------------------------------------------------------------------ beginning and end */

static void cutfix_begin_node(unsigned i)
{
	struct cut_node *w = &fix.nodes[i];
	char name[32], at[32];
	struct cluster_options o = { .node = name,
				     .advertise = at,
				     .peers = { .cluster = "cut" },
				     .schedules = fix.schedules };
	struct fault f = FAULT_NULL;

	snprintf(name, sizeof(name), "node-%u", i);
	snprintf(at, sizeof(at), "10.0.0.1:%u", i);
	nodefix_begin(&w->n, &(struct nodefix_options){ .beside = i > 0 });
	cluster_set_slots(&w->n.jobs.ops);
	CHECK(scale_engine_new(&w->n.run.queue, false, &w->n.node.nodes_engine) == 0);
	CHECK(coord_fake_open(fix.store, &w->n.run.queue, &w->coord) == 0);
	the_cluster = NULL;
	CHECK(cluster_new(&w->n.run.loop, &w->n.run.queue, &w->n.jobs, w->coord, &o, &w->cluster,
			  &f) == 0);
	uv_timer_stop(&w->cluster->timer); /* ticks are ours */
	w->job = nodefix_job(&w->n, "job", CUTFIX_NODES, 0);
	w->op.over = true;
}

void cutfix_begin(const struct cutfix_options *o)
{
	memset(&fix, 0, sizeof(fix));
	late.waits = false;
	fix.random = o->random;
	fix.pick = o->pick;
	fix.turns = o->turns;
	fix.schedules = o->schedules;
	list_init(&fix.under_way);
	list_init(&fix.ends);
	fix.now_us = 1000000000;
	clock_fake(fix.now_us);
	CHECK(coord_fake_new(&fix.store) == 0);
	looprun_init(&fix.look);
	CHECK(coord_fake_open(fix.store, &fix.look.queue, &fix.looks) == 0);
	for (unsigned i = 0; i < CUTFIX_NODES; i++)
		cutfix_begin_node(i);
	cutfix_pass(1000);
	fix.nodes[o->leader].joins = true;
	cutfix_pass(1000);
	for (unsigned i = 0; i < CUTFIX_NODES; i++)
		fix.nodes[i].joins = true;
	fix.on_event = o->on_event;
}

static void cutfix_on_stopped(void *userdata)
{
	((struct cut_node *)userdata)->stopped = true;
}

static void cutfix_stop_node(unsigned i)
{
	struct cut_node *w = cutfix_enter(i);

	if (w->m)
		nodefix_drop(&w->n, w->m, "the run is over");
	cluster_stop(w->cluster, cutfix_on_stopped, w);
}

static void cutfix_free_links(void)
{
	while (!list_empty(&fix.under_way)) {
		struct news *news = list_first(&fix.under_way, struct news, link);

		list_unlink(&news->link);
		free(news);
	}
	while (!list_empty(&fix.ends)) {
		struct peer *p = list_first(&fix.ends, struct peer, link);

		list_unlink(&p->link);
		free(p);
	}
}

void cutfix_end(void)
{
	fix.on_event = NULL;
	cutfix_heal();
	for (unsigned i = 0; i < CUTFIX_NODES; i++)
		cutfix_store(i, CUTFIX_ANSWERED, 0);
	for (unsigned i = 0; i < CUTFIX_NODES; i++)
		cutfix_stop_node(i);
	for (unsigned i = 0; i < CUTFIX_NODES; i++)
		while (!fix.nodes[i].stopped) {
			cutfix_enter(i);
			nodefix_turn(&fix.nodes[i].n);
		}
	for (unsigned i = CUTFIX_NODES; i-- > 0;) {
		fix.nodes[i].cluster = cluster_free(fix.nodes[i].cluster);
		nodefix_end(&fix.nodes[i].n);
	}
	coord_close(fix.looks);
	looprun_deinit(&fix.look);
	cutfix_free_links();
	coord_fake_free(fix.store);
}
