#include "cutfix.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/scale/scale.h"
#include "cluster/cluster_impl.h"
#include "coord/coord_impl.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/text.h"
#include "job/group.h"
#include "job/launched.h"
#include "job/position.h"
#include "job/restore.h"
#include "job/saving_impl.h"
#include "nodefix.h"
#include "partition/cutbulk.h"
#include "partition/cutinner.h"
#include "partition/cutline.h"
#include "partition/cutlinks.h"

#define TICK_US        25000u
#define ANSWER_US      2000000u /* CLUSTER_ANSWER_MS */
#define STEPS          64
#define CONDS          3
#define ELEMENTS       8
#define GRACE_MS       300
#define CUT_NAME_BYTES 32

/* What the rank of a node does. */
enum rank_state { RANK_JOINS, RANK_ASKS, RANK_FILLS, RANK_REDUCES, RANK_STEPS, RANK_COMMITS };

/* DYING: nothing that it does has an effect. GONE: nothing of it is there. */
enum cut_life { CUT_LIVES, CUT_DYING, CUT_GONE };

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
	enum cut_life life;
	bool back;                  /* DYING: it comes back at once */
	struct job_step_id applied; /* that was looked at */
};

static struct {
	struct cut_node nodes[CUTFIX_NODES];
	unsigned n;
	bool elastic;
	uint64_t upto;
	struct coord_fake *store;
	struct looprun look; /* of the one that looks into the store */
	struct coord *looks;
	char names[CUTFIX_NODES][CUT_NAME_BYTES], label[JOB_LABEL_MAX + 1]; /* @label: of the job */
	uint64_t now_us, epoch_of[STEPS];
	unsigned events;
	bool schedules, refuses, died_asking, quiet; /* @quiet: what happens is no event */
	void (*on_event)(void);
	char wrong[512];
} fix;

void cutfix_say(const char *format, ...)
{
	va_list args;

	if (*fix.wrong)
		return;
	va_start(args, format);
	vsnprintf(fix.wrong, sizeof(fix.wrong), format, args);
	va_end(args);
}

void cutfix_event(void)
{
	if (fix.quiet)
		return;
	fix.events++;
	if (fix.on_event)
		fix.on_event();
}

void cutfix_enter(unsigned node)
{
	the_cluster = fix.nodes[node].cluster;
}

const char *cutfix_name(unsigned node)
{
	return fix.names[node];
}

static struct cut_node *cutfix_node(unsigned node)
{
	cutfix_enter(node);
	return &fix.nodes[node];
}

void cutfix_cut(unsigned apart, unsigned late)
{
	cutlinks_cut(apart, late);
}

void cutfix_heal(void)
{
	cutlinks_heal();
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

	for (unsigned i = 0; i < fix.n; i++)
		if (fix.nodes[i].coord == c)
			w = &fix.nodes[i];
	if (!w || !txn->n_changes)
		return __real_coord_txn(c, call, txn, timeout_ms);
	cutfix_event();
	if (w->life == CUT_DYING && !fix.quiet)
		fix.died_asking = true;
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

	snprintf(key, sizeof(key), "jobs/%s/step", fix.label);
	CHECK(coord_txn(fix.looks, &l.call, &t, 1000) == 0);
	while (l.call.impl)
		uv_run(&fix.look.loop, UV_RUN_NOWAIT);
	return l;
}

/* ------------------------------------------------------------------ the rules */

static bool cutfix_lives(unsigned node)
{
	return fix.nodes[node].life == CUT_LIVES;
}

uint64_t cutfix_step(unsigned node)
{
	const struct job *job = fix.nodes[node].job;

	return job && job->rec->has_commit ? job->rec->step : 0;
}

/* Each rank says with its commit in which epoch it makes it: as many bytes. */
uint64_t cutfix_epoch(unsigned node)
{
	const struct job *job = fix.nodes[node].job;
	const state_blob *b = NULL;
	uint32_t rank;

	if (job && launched_rank(job, node, &rank))
		b = state_job_blob(job->rec, rank);
	return b ? b->data.len : 0;
}

unsigned cutfix_leader(unsigned node)
{
	const struct cluster_job *cj =
		cluster_find(fix.nodes[node].cluster, fix.nodes[node].job->label);

	return (unsigned)strtoul(strrchr(cj->leader, '-') + 1, NULL, 10);
}

const char *cutfix_waits(unsigned node)
{
	if (!cutfix_lives(node))
		return "its daemon is dead";
	return cluster_find(fix.nodes[node].cluster, fix.label)->why;
}

static bool cutfix_is_deciding(void)
{
	for (unsigned i = 0; i < fix.n; i++) {
		const struct cluster_job *cj =
			cutfix_lives(i) ? cluster_find(fix.nodes[i].cluster, fix.label) : NULL;

		if (cj && cj->commit.state != DECIDE_IDLE)
			return true;
	}
	return false;
}

enum cutfix_phase cutfix_phase(uint64_t step)
{
	unsigned has = 0, announced = 0;

	for (unsigned i = 0; i < fix.n; i++) {
		const struct cut_node *w = &fix.nodes[i];

		has += cutfix_step(i) > step;
		announced += w->state == RANK_COMMITS && w->op.op && w->next > step;
	}
	if (has)
		return has == fix.n ? CUTFIX_OVER : CUTFIX_STARTED;
	if (cutfix_look().step > step)
		return CUTFIX_DECIDED;
	return cutfix_is_deciding() ? CUTFIX_DECIDING
	       : announced          ? CUTFIX_ANNOUNCED
				    : CUTFIX_BEFORE;
}

/* A step has been committed in one epoch, or else two halves have. */
static void cutfix_note(uint64_t step, uint64_t epoch, const char *who)
{
	if (fix.elastic)
		return; /* steps are made again */
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
	if (fix.elastic) {
		decided = cutfix_look();
		cutline_decided(decided.step, decided.epoch);
		cutline_has(node, step, epoch);
		fix.nodes[node].seen = step;
		return;
	}
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
	cutfix_note(step, epoch, cutfix_name(node));
}

/* Invariant 8: nodes that train together at a step have that of one epoch. Another one is no less a commit that
 * the store has decided: others that went back to older copies have committed its number once more. */
static void cutfix_check_alike(unsigned node)
{
	uint64_t begun = fix.nodes[node].job->rec->begun, epoch = cutfix_epoch(node);

	for (unsigned i = 0; fix.elastic && begun && epoch && i < fix.n; i++) {
		if (!cutfix_lives(i) || fix.nodes[i].job->rec->begun != begun ||
		    cutfix_step(i) != cutfix_step(node) || !cutfix_epoch(i) ||
		    cutfix_epoch(i) == epoch)
			continue;
		cutfix_say("in epoch %u node %u has step %u of epoch %u, and node %u that of epoch "
			   "%u",
			   (unsigned)begun, node, (unsigned)cutfix_step(node), (unsigned)epoch, i,
			   (unsigned)cutfix_epoch(i));
	}
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
	for (unsigned i = 0; i < fix.n; i++) {
		const struct job *job = fix.nodes[i].job;
		const struct job_step *step = job ? &job->step : NULL;

		if (!cutfix_lives(i) || (fix.elastic && job->rec->begun != id.epoch))
			continue; /* they are not of its group */
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

	if (r == RES_FAILED && fix.refuses)
		w->joins = false;
	else if (r == RES_FAILED)
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
		nodefix_register(w->job, nodefix_spec("u", ELEMENTS * fix.n));
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
		if (w->m->state != MEMBER_JOINED) { /* no op of it says that the epoch has ended */
			w->state = RANK_JOINS;
			return;
		}
		if (!cutfix_register(w))
			return;
		u = cutfix_unit(w);
		w->next = cutfix_step((unsigned)(w - fix.nodes)) + 1;
		if (w->next > fix.upto)
			return;
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
	if (fix.elastic)
		cutline_decided(decided.step, decided.epoch);
	fix.now_us += TICK_US;
	clock_fake(fix.now_us);
	coord_fake_pass(fix.store, TICK_US / 1000);
	cutlinks_notice(fix.now_us);
	for (unsigned i = 0; i < fix.n; i++) {
		struct cut_node *w = cutfix_node(i);

		if (!cutfix_lives(i))
			continue;
		cutfix_lose_answers(w);
		if (!w->cluster->closing)
			w->cluster->timer.timer_cb(&w->cluster->timer);
		if (fix.elastic)
			jobs_tick(&w->n.jobs, fix.now_us);
	}
}

/* Do threads write a part, or read some? What comes of it is always at the same moment. */
static bool cutfix_is_busy(const struct cut_node *w)
{
	const struct saving *s = w->job->checkpoints.memory;

	return (s && s->running) || restore_is_busy(w->job);
}

static void cutfix_await_threads(struct cut_node *w)
{
	for (unsigned k = 0; k < 100000 && cutfix_is_busy(w); k++)
		nodefix_turn(&w->n);
}

void cutfix_go_on(unsigned node)
{
	struct cut_node *w;

	if (!cutfix_lives(node))
		return;
	if (fix.nodes[node].asked)
		cutfix_event(); /* the answer arrives */
	w = cutfix_node(node);
	w->asked = false;
	cutbulk_end(node);
	for (unsigned k = 0; k < 4; k++)
		nodefix_turn(&w->n);
	if (fix.elastic)
		cutfix_await_threads(w);
	cutline_begun(node, w->job->rec->begun);
	cutfix_rank_goes_on(w);
	cutfix_check_commit(node);
	cutfix_check_alike(node);
	cutfix_check_applied(node);
}

/* ------------------------------------------------------------------ the beginning and the end of a node */

static void cutfix_make_job(struct cut_node *w)
{
	const struct job_spec spec = { .name = "job",
				       .world_size = fix.n,
				       .lifetime = JOB_KEEP,
				       .min_ranks = 1,
				       .max_ranks = fix.n,
				       .join_grace_ms = GRACE_MS };
	struct fault f = FAULT_NULL;

	if (!fix.elastic) {
		w->job = nodefix_job(&w->n, "job", fix.n, 0);
		return;
	}
	CHECK(job_open(&w->n.jobs, &spec, getuid(), getgid(), &w->job, NULL, &f) == 0);
	w->job->across.elastic = true;
}

/* @again: it has been there before. */
static void cutfix_begin_node(unsigned i, bool again)
{
	struct cut_node *w = &fix.nodes[i];
	char *name = fix.names[i], at[32];
	struct cluster_options o = { .node = name,
				     .advertise = at,
				     .peers = { .cluster = "cut" },
				     .schedules = fix.schedules,
				     .replicas = fix.elastic };
	struct fault f = FAULT_NULL;

	snprintf(name, CUT_NAME_BYTES, "node-%u", i);
	snprintf(at, sizeof(at), "10.0.0.1:%u", i);
	nodefix_begin(&w->n, &(struct nodefix_options){ .beside = i > 0 || again });
	w->n.beside = i > 0;
	cluster_set_slots(&w->n.jobs.ops);
	CHECK(scale_engine_new(&w->n.run.queue, SCALE_AT_ONCE, &w->n.node.nodes_engine) == 0);
	CHECK(coord_fake_open(fix.store, &w->n.run.queue, &w->coord) == 0);
	the_cluster = NULL;
	CHECK(cluster_new(&w->n.run.loop, &w->n.run.queue, &w->n.jobs, w->coord, &o, &w->cluster,
			  &f) == 0);
	uv_timer_stop(&w->cluster->timer); /* ticks are ours */
	cutfix_make_job(w);
	w->op.over = true;
}

static void cutfix_on_stopped(void *userdata)
{
	((struct cut_node *)userdata)->stopped = true;
}

static void cutfix_stop_node(unsigned i)
{
	struct cut_node *w = cutfix_node(i);

	if (w->m)
		nodefix_drop(&w->n, w->m, "the run is over");
	cluster_stop(w->cluster, cutfix_on_stopped, w);
}

/* ------------------------------------------------------------------ a daemon dies */

void cutfix_die(const struct cutfix_death *death)
{
	struct cut_node *w = &fix.nodes[death->node];

	CHECK(fix.elastic && w->life == CUT_LIVES && death->fate != CUTFIX_ANSWERED);
	w->life = CUT_DYING;
	w->back = death->back;
	w->delay = death->delay;
	cutfix_set_fate(w, death->fate);
	cutlinks_die(death->node, death->loses);
}

bool cutfix_has_died_asking(void)
{
	return fix.died_asking;
}

void cutfix_come_back(unsigned node)
{
	CHECK(fix.nodes[node].life == CUT_GONE);
	fix.nodes[node] = (struct cut_node){ .joins = true };
	cutfix_begin_node(node, true);
	clock_fake(fix.now_us);
}

/* It ends as a daemon that is stopped does; nobody hears of it. */
static void cutfix_bury(unsigned node)
{
	struct cut_node *w = &fix.nodes[node];
	bool back = w->back;

	fix.quiet = true;
	cutfix_set_fate(w, CUTFIX_LOST_BEFORE);
	cutfix_stop_node(node);
	while (!w->stopped) {
		cutfix_enter(node);
		if (w->cluster->coord)
			coord_fake_lose(w->coord);
		cutbulk_end(node);
		nodefix_turn(&w->n);
	}
	w->cluster = cluster_free(w->cluster);
	w->n.beside = true; /* the others go on */
	nodefix_end(&w->n);
	clock_fake(fix.now_us);
	*w = (struct cut_node){ .life = CUT_GONE };
	cutline_forgets(node);
	fix.quiet = false;
	if (back)
		cutfix_come_back(node);
}

/* Where nothing of them is under way in this thread. */
static void cutfix_bury_the_dead(void)
{
	for (unsigned i = 0; i < fix.n; i++)
		if (fix.nodes[i].life == CUT_DYING)
			cutfix_bury(i);
}

/* ------------------------------------------------------------------ time passes */

/* Until nothing more happens without that time passes. */
static void cutfix_round(void)
{
	unsigned before;

	do {
		before = fix.events;
		for (unsigned i = 0; i < fix.n; i++) {
			cutfix_go_on(i);
			cutfix_bury_the_dead();
		}
		while (cutlinks_deliver())
			cutfix_bury_the_dead();
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
	for (unsigned i = 0; i < fix.n; i++)
		if (cutfix_lives(i) && cutfix_step(i) < step)
			return false;
	return true;
}

bool cutfix_train(uint64_t step, unsigned ms)
{
	if (fix.elastic)
		fix.upto = step;
	for (uint64_t until = fix.now_us + (uint64_t)ms * 1000;
	     fix.now_us < until && !*fix.wrong;) {
		if (cutfix_have(step))
			return true;
		cutfix_round();
	}
	return cutfix_have(step);
}

void cutfix_copies(bool are_made)
{
	for (unsigned i = 0; i < fix.n; i++)
		if (cutfix_lives(i))
			fix.nodes[i].cluster->replicas = are_made;
}

/* ------------------------------------------------------------------ beginning and end */

void cutfix_begin(const struct cutfix_options *o)
{
	memset(&fix, 0, sizeof(fix));
	late.waits = false;
	fix.n = o->nodes ? o->nodes : CUTFIX_NODES;
	fix.elastic = o->elastic;
	fix.upto = o->elastic ? 0 : UINT64_MAX;
	cutline_begin();
	fix.schedules = o->schedules;
	fix.refuses = o->refuses;
	cutlinks_begin(fix.n, o);
	fix.now_us = 1000000000;
	clock_fake(fix.now_us);
	CHECK(coord_fake_new(&fix.store) == 0);
	looprun_init(&fix.look);
	CHECK(coord_fake_open(fix.store, &fix.look.queue, &fix.looks) == 0);
	for (unsigned i = 0; i < fix.n; i++)
		cutfix_begin_node(i, false);
	text_copy(fix.label, sizeof(fix.label), fix.nodes[0].job->label);
	cutfix_pass(1000);
	fix.nodes[o->leader].joins = true;
	cutfix_pass(1000);
	for (unsigned i = 0; i < fix.n; i++)
		fix.nodes[i].joins = true;
	fix.on_event = o->on_event;
}

void cutfix_end(void)
{
	fix.on_event = NULL;
	cutfix_heal();
	for (unsigned i = 0; i < fix.n; i++)
		cutfix_store(i, CUTFIX_ANSWERED, 0);
	for (unsigned i = 0; i < fix.n; i++)
		cutfix_stop_node(i);
	for (unsigned i = 0; i < fix.n; i++)
		while (!fix.nodes[i].stopped) {
			cutfix_enter(i);
			nodefix_turn(&fix.nodes[i].n);
		}
	for (unsigned i = fix.n; i-- > 0;) {
		fix.nodes[i].cluster = cluster_free(fix.nodes[i].cluster);
		nodefix_end(&fix.nodes[i].n);
	}
	coord_close(fix.looks);
	looprun_deinit(&fix.look);
	cutlinks_end();
	coord_fake_free(fix.store);
}
