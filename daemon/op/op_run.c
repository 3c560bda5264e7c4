/*
 * The life of an op: taking in, order, dependencies, activation, the end.
 * Collectives go on in coll.c, helpers for op files are in op_util.c.
 */
#include "op/op_run.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/state.h"
#include "core/text.h"
#include "job/job_journal.h"
#include "op/guard.h"
#include "op/op.h"
#include "op/op_stats.h"
#include "op/queue_task.h"
#include "op/recorder.h"
#include "shardd.pb-c.h"

#define OP_MAGIC 0x4f504f50u

/* Collectives of a rank that have ended and that its peers have not come to. */
#define MAX_GIVEN_UP 1024u

/* Ops whose dependencies are over, to be activated one after the other: an op that
 * ends at once makes the next one ready, and a thousand of them must not nest. */
static struct list ready_queue = LIST_INIT(ready_queue);
static bool activating;

/* ----------------------------------------------------------------- states */

static const struct state_row op_states[] = {
	/* a surrogate begins BLOCKED: it has its peer's turn */
	[OP_HELD] = { "HELD", STATE_TO(OP_DEPS) | STATE_TO(OP_BLOCKED) | STATE_TO(OP_DONE) },
	[OP_DEPS] = { "DEPS", STATE_TO(OP_WAIT) | STATE_TO(OP_BLOCKED) | STATE_TO(OP_RUN) |
				      STATE_TO(OP_DONE) },
	[OP_WAIT] = { "WAIT", STATE_TO(OP_RUN) | STATE_TO(OP_DONE) },
	/* again: for something else */
	[OP_BLOCKED] = { "BLOCKED", STATE_TO(OP_BLOCKED) | STATE_TO(OP_WAIT) | STATE_TO(OP_RUN) |
					    STATE_TO(OP_DONE) },
	[OP_RUN] = { "RUN", STATE_TO(OP_DONE) },
	[OP_DONE] = { "DONE", 0 },
};

void op_state_move(struct op *op, enum op_state to)
{
	state_move(op_states, &op->state, (uint8_t)to);
}

const char *op_state_name(enum op_state s)
{
	return s < ARRAY_SIZE(op_states) ? op_states[s].name : "?";
}

/* ------------------------------------------------------------- recording */

static void op_record_begin(struct op *op)
{
	op->recorded.id = recorder_next_op();
	list_append(&recorder.pending, &op->recorded.link);
}

static void op_record_end(struct op *op)
{
	const state_job *job = op->m->job->rec;
	struct record *r = recorder_add(op->recorded.id, job->name, job->uid);

	list_unlink(&op->recorded.link);
	op->m->last.ended_us = clock_now_us();
	op_stats_count(op, op->m->last.ended_us);
	op->m->waits.us += op->active_us && op->started_us ? op->started_us - op->active_us : 0;
	if (!r)
		return;
	r->head.is_private = job->is_private;
	r->head.job_number = job->number;
	r->name = op->type->name;
	r->rank = op->m->rank;
	r->pid = member_pid(op->m);
	r->seq = op->seq;
	r->epoch = op->m->epoch;
	text_copy(r->unit, sizeof(r->unit), op->unit ? op->unit->rec->name : "");
	text_copy(r->group, sizeof(r->group), op->group ? op->group->rec->name : "");
	r->number = op->entry.number;
	r->announced_us = op->announced_us;
	r->active_us = op->active_us;
	r->started_us = op->started_us;
	r->finished_us = op->m->last.ended_us;
	r->step = job->step;
	r->bytes = op->fault.code ? 0 : op->result.place.bytes;
	r->error[0] = '\0';
	if (op->fault.code)
		snprintf(r->error, sizeof(r->error), "%s: %.130s", fault_code_name(op->fault.code),
			 op->fault.text);
	if (recorder.sink.op)
		recorder.sink.op(r, op, recorder.sink.userdata);
}

/* ---------------------------------------------------------- dependencies */

static bool op_touches_meet(const struct op *a, const struct op *b)
{
	if (!(a->touches & b->touches))
		return false;
	if (a->type->meets || b->type->meets)
		return a->type->meets ? a->type->meets(a, b) : b->type->meets(b, a);
	return !a->unit || !b->unit || a->unit == b->unit;
}

static bool op_conflict(const struct op *a, const struct op *b)
{
	if ((a->touches | b->touches) & TOUCH_ALL)
		return true;
	return op_touches_meet(a, b) || (a->buffer && a->buffer == b->buffer);
}

static void op_count_deps(struct op *op)
{
	struct op *other, *tmp;

	list_for_each (other, tmp, &op->m->ops, link)
		if (other != op && op_conflict(other, op))
			op->deps++;
}

/* @op is over: whoever came after it and shares something has one less to wait for. */
static void op_release_deps(struct op *op)
{
	for (struct list *l = op->link.next; l != &op->m->ops; l = l->next) {
		struct op *later = list_entry(l, struct op, link);

		if (later->state != OP_DEPS || !op_conflict(op, later))
			continue;
		CHECK(later->deps > 0);
		if (--later->deps == 0)
			list_append(&ready_queue, &later->ready);
	}
}

/* -------------------------------------------------------------- activation */

/* What the peers of a collective are told when this rank's part was refused. */
static void op_refusal(const struct op *op, const struct fault *own, struct fault *f)
{
	bool as_it_is = own->code == FAULT_DEADLINE || own->code == FAULT_ABORTED;

	fault_set(f, as_it_is ? own->code : FAULT_STATE, NULL,
		  "rank %u (pid %d) was refused its %s at number %llu: %.300s", op->m->rank,
		  member_pid(op->m), op->type->name, (unsigned long long)op->entry.number,
		  own->text);
}

static void op_refuse_peers(struct op *op, const struct fault *own)
{
	struct group *g = op->group;
	uint64_t op_number = op->entry.number;
	struct fault f = FAULT_NULL;

	if (!op->numbered)
		return;
	op_refusal(op, own, &f);
	match_refuse(&g->match, &op->entry, &f); /* and @op is gone, if it was announced */
	if (g->joined)
		g->joined->refuse(g, op_number, op, &f);
}

/* The peers' ends may at last end what this op waits for: nobody else is to start it or
 * to end it any more. */
static void op_fail_now(struct op *op)
{
	list_unlink(&op->ready);
	waiter_leave(&op->waiter);
	op_state_move(op, OP_RUN);
	op_refuse_peers(op, &op->fault);
	op_end(op);
}

void op_announce(struct op *op)
{
	CHECK(op->numbered && !op->announced);
	op_state_move(op, OP_WAIT);
	op->announced = true;
	if (op->surrogate) {
		CHECK(op->group->surrogates > 0);
		op->group->surrogates--;
	}
	if (match_announce(&op->group->match, &op->entry) < 0) {
		op->announced = false;
		if (op->surrogate)
			op->group->surrogates++;
		fault_errno(&op->fault, -ENOMEM, "announcing a collective");
		op_fail_now(op);
	}
}

static void op_announce_all(struct op *op)
{
	if (op->group->joined && op->group->joined->announce(op))
		op_fail_now(op);
	else
		op_announce(op);
}

/* The only caller of ticks. What it waits for may come while it runs: then it runs again. */
static void op_go_on(struct op *op)
{
	enum res r;

	MAGIC_CHECK(op, OP_MAGIC);
	op->woken = true;
	if (op->ticking)
		return;
	op->ticking = true;
	do {
		op->woken = false;
		r = op->type->tick(op);
	} while (r == RES_WAIT && op->woken);
	op->ticking = false;
	CHECK(r != RES_FAILED || op->fault.code);
	if (r == RES_WAIT && !op->fault.code) /* else it was cancelled meanwhile */
		CHECK(op->state == OP_BLOCKED || op->state == OP_RUN);
	else
		op_end(op);
}

static void op_resume(struct waiter *w)
{
	op_go_on(CONTAINER_OF(w, struct op, waiter));
}

static void op_activate(struct op *op)
{
	CHECK(op->state == OP_DEPS && !op->deps);
	if (!op->active_us)
		op->active_us = clock_now_us();
	if (!op->fault.code && guard_check(op, &op->fault) == 0 &&
	    (!op->type->check || op->type->check(op, &op->fault) == 0) && op->type->begin)
		op->type->begin(op, &op->fault);
	if (op->fault.code)
		op_fail_now(op);
	else if (op->type->collective)
		op_announce_all(op);
	else
		op_go_on(op);
}

static void op_activate_ready(void)
{
	if (activating)
		return;
	activating = true;
	while (!list_empty(&ready_queue)) {
		struct op *op = list_first(&ready_queue, struct op, ready);

		list_unlink(&op->ready);
		op_activate(op);
	}
	activating = false;
}

/* --------------------------------------------------------------- the order */

/* @op has no number, so nothing behind it has: peers would meet it one collective too early. */
static void op_stop_numbers(const struct op *op, const struct fault *why)
{
	struct fault told = FAULT_NULL;

	fault_set(&told, FAULT_ABORTED, NULL, "rank %u (pid %d) was refused its %s: %.300s",
		  op->m->rank, member_pid(op->m), op->type->name, why->text);
	match_stop(&op->group->match, op->entry.index, &told);
}

/* Slots are kept until all members have passed them. A rank that gives up one collective
 * after the other while its peers are elsewhere must not fill the memory with them. */
static void op_number(struct op *op)
{
	struct match *match = &op->group->match;
	uint64_t ahead = match_ahead(match, op->entry.index);

	if (op->group->joined && op->group->joined->check(op))
		return;
	if (match->stopped[op->entry.index]) {
		fault_set(&op->fault, FAULT_EXHAUSTED, NULL,
			  "a collective of rank %u in group '%.64s' was refused, and what follows "
			  "it has no number: join again",
			  op->m->rank, op->group->rec->name);
		return;
	}
	if (ahead >= (uint64_t)op->m->job->node->limits.max_inflight_ops + MAX_GIVEN_UP) {
		fault_set(
			&op->fault, FAULT_EXHAUSTED, NULL,
			"rank %u is %llu collectives ahead of a peer in group '%.64s': join again",
			op->m->rank, (unsigned long long)ahead, op->group->rec->name);
		op_stop_numbers(op, &op->fault);
		return;
	}
	/* without memory for a slot it has its number, and fails there when it is announced */
	if (match_reserve(match, op->entry.index, &op->fault) == MATCH_E_LIMIT) {
		op_stop_numbers(op, &op->fault);
		return;
	}
	match_number(match, &op->entry);
	op->numbered = true;
	if (op->group->joined)
		op->group->joined->number(op);
}

/* In its turn: from here on its place among the session's ops is fixed. */
static void op_enter(struct op *op)
{
	struct member *m = op->m;

	CHECK(!op->deps && list_empty(&op->link));
	if (op->type->enter && !op->fault.code)
		op->type->enter(op);
	list_append(&m->ops, &op->link);
	op_state_move(op, OP_DEPS);
	if (op->seq)
		m->next_seq = op->seq + 1;
	m->last.op = op->type->name;
	text_copy(m->last.unit, sizeof(m->last.unit), op->unit ? op->unit->rec->name : "");
	if (op->type->collective && op->group) /* also one that was cancelled before its turn */
		op_number(op);
	op_count_deps(op);
	if (op->deps)
		op->active_us = 0;
	else
		list_append(&ready_queue, &op->ready);
}

/* Put an op that came early where it belongs. Return: false if its seq is there. */
static bool op_hold(struct op *op)
{
	struct member *m = op->m;
	struct op *other, *tmp;
	struct list *before = &m->held;

	CHECK(op->seq > m->next_seq);
	list_for_each (other, tmp, &m->held, link) {
		if (other->seq == op->seq)
			return false;
		if (other->seq > op->seq) {
			before = &other->link;
			break;
		}
	}
	list_append(before, &op->link); /* appending to an element puts it before it */
	return true;
}

static void op_enter_held(struct member *m)
{
	while (!list_empty(&m->held)) {
		struct op *op = list_first(&m->held, struct op, link);

		if (op->seq != m->next_seq)
			return;
		list_unlink(&op->link);
		op_enter(op);
	}
}

/* ------------------------------------------------------------------ taking in */

static const Shardd__V1__OpHeader *op_header_of(const struct op_type *type,
						const ProtobufCMessage *msg)
{
	const ProtobufCFieldDescriptor *field = &type->request->fields[0];

	CHECK(msg->descriptor == type->request && strcmp(field->name, "header") == 0);
	return *(Shardd__V1__OpHeader *const *)((const char *)msg + field->offset);
}

static int op_check_member(const struct member *m, uint64_t epoch, struct fault *f)
{
	if (m->state == MEMBER_STALE || m->state == MEMBER_DEAD)
		return fault_set(f, FAULT_ABORTED, NULL, "%s", m->ended.text);
	if (m->state != MEMBER_JOINED)
		return fault_set(f, FAULT_STATE, NULL, "this session has left job '%s': join again",
				 m->job->rec->name);
	if (epoch && epoch != m->epoch)
		return fault_set(f, FAULT_ABORTED, NULL,
				 "header.epoch is %llu, but this rank has joined epoch %llu",
				 (unsigned long long)epoch, (unsigned long long)m->epoch);
	return 0;
}

static int op_check_seq(const struct member *m, uint64_t seq, struct fault *f)
{
	uint32_t most = m->job->node->limits.max_inflight_ops;

	if (seq && seq < m->next_seq)
		return fault_set(f, FAULT_INVALID, "header.seq",
				 "header.seq is %llu: the next one of this session is %llu",
				 (unsigned long long)seq, (unsigned long long)m->next_seq);
	/* the one that all the others wait for is let in, else they would wait for ever */
	if (m->pending >= most && (seq != m->next_seq || list_empty(&m->held)))
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "%u ops of this session are unanswered, which is max_inflight_ops",
				 m->pending);
	if (m->user->used[USER_OPS] >= m->user->most[USER_OPS] &&
	    (seq != m->next_seq || list_empty(&m->held)))
		return user_refuse(m->user, USER_OPS, 1, f);
	return 0;
}

static uint64_t op_deadline_of(const struct member *m, const Shardd__V1__OpHeader *h, uint64_t now,
			       uint64_t caller_us)
{
	uint32_t ms = h && h->timeout_ms ? h->timeout_ms : m->job->rec->op_timeout_ms;
	uint64_t own = ms ? now + (uint64_t)ms * 1000u : UINT64_MAX;

	return caller_us && caller_us < own ? caller_us : own;
}

/* The address sanitizer would not see who uses an op that is over. */
#if defined(__SANITIZE_ADDRESS__)
#define KEEPS_OPS false
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KEEPS_OPS false
#endif
#endif
#ifndef KEEPS_OPS
#define KEEPS_OPS true
#endif

/* Ops that have ended, for the next ones: malloc is slow above 1 KiB. */
static struct op *spare_ops[64];
static unsigned n_spare_ops;

static struct op *op_alloc(void)
{
	struct op *op;

	if (!n_spare_ops)
		return calloc(1, sizeof(*op));
	op = spare_ops[--n_spare_ops];
	memset(op, 0, sizeof(*op));
	return op;
}

static void op_give_back(struct op *op)
{
	op->magic = 0;
	if (KEEPS_OPS && n_spare_ops < ARRAY_SIZE(spare_ops))
		spare_ops[n_spare_ops++] = op;
	else
		free(op);
}

static struct op *op_new(struct member *m, const struct op_type *type)
{
	struct op *op = op_alloc();

	if (!op)
		return NULL;
	op->magic = OP_MAGIC;
	op->type = type;
	op->move = type->move;
	op->m = m;
	op->announced_us = clock_now_us();
	list_init(&op->link);
	list_init(&op->ready);
	list_init(&op->recorded.link);
	waiter_init(&op->waiter, op_resume);
	return op;
}

/* Which streams of its trainer the op comes after, and how it is answered. */
static int op_take_streams(struct op *op, const Shardd__V1__OpHeader *h, struct fault *f)
{
	struct backend_signals *signals = member_signals(op->m);

	if (!h || (!h->stream && !h->n_after))
		return 0;
	if (!signals)
		return fault_set(
			f, FAULT_INVALID, "header.stream",
			"this rank has no streams: it joined without them, or its device %s "
			"has none",
			backend_info(op->m->device->backend)->id);
	if (h->n_after > OP_MAX_AFTER)
		return fault_set(f, FAULT_INVALID, "header.after",
				 "header.after has %zu points; the maximum is %u", h->n_after,
				 OP_MAX_AFTER);
	for (size_t i = 0; i < h->n_after; i++) {
		const Shardd__V1__StreamPoint *p = h->after[i];

		if (p->slot >= BACKEND_SIGNAL_SLOTS || p->value > INT64_MAX)
			return fault_set(f, FAULT_INVALID, "header.after",
					 "header.after names slot %u and value %llu; the slot must "
					 "be 0 to %u and "
					 "the value below 2^63",
					 p->slot, (unsigned long long)p->value,
					 BACKEND_SIGNAL_SLOTS - 1);
		op->after[op->n_after++] = (struct backend_wait){ signals, p->slot, p->value };
	}
	op->stream = h->stream;
	return 0;
}

/* A request whose fields are wrong still takes its turn, so that the ops behind it are
 * not held up for ever. */
static void op_decode(struct op *op, const ProtobufCMessage *request)
{
	if (op_take_streams(op, op_header_of(op->type, request), &op->fault) == 0 &&
	    op->type->decode(op, request, &op->fault) == 0 && op->group) {
		op->entry.rank = op->m->rank;
		op->entry.pid = member_pid(op->m);
		if (!group_index_here(op->group, op->m->rank, &op->entry.index))
			fault_set(&op->fault, FAULT_INVALID, "group",
				  "rank %u is no member of group '%.64s'", op->m->rank,
				  op->group->rec->name);
	}
	if (op->fault.code)
		op->group = NULL; /* it takes part in nothing */
}

/* The number of a unit that was dropped is not used again while an op names it. */
static void op_name_unit(const struct op *op)
{
	if (op->unit)
		op->unit->ops++;
}

int op_submit(struct member *m, const struct op_type *type, const ProtobufCMessage *request,
	      uint64_t deadline_us, op_done_cb done, void *userdata, struct op **ret,
	      struct fault *f)
{
	const Shardd__V1__OpHeader *h = op_header_of(type, request);
	uint64_t seq = h ? h->seq : 0;
	struct op *op;

	if (op_check_member(m, h ? h->epoch : 0, f) || op_check_seq(m, seq, f))
		return f->code;
	op = op_new(m, type);
	if (!op)
		return fault_errno(f, -ENOMEM, "taking in an op");
	op->seq = seq;
	op->done = done;
	op->userdata = userdata;
	op->request = request;
	op->deadline_us = op_deadline_of(m, h, op->announced_us, deadline_us);
	if (seq > m->next_seq && !op_hold(op)) {
		op_give_back(op);
		return fault_set(f, FAULT_INVALID, "header.seq", "header.seq %llu came twice",
				 (unsigned long long)seq);
	}
	*ret = op;
	member_op_begun(m);
	m->job->ops.total++;
	op_decode(op, request);
	op_name_unit(op);
	op_record_begin(op);
	if (list_empty(&op->link)) {
		op->active_us = op->announced_us; /* if nothing is before it */
		op_enter(op);
	}
	op_enter_held(m);
	op_activate_ready();
	return 0;
}

static void op_nobody_waits(struct op *op, void *userdata)
{
	(void)op;
	(void)userdata;
}

struct op *op_new_surrogate(struct op *join, struct op *of)
{
	struct op *op = op_new(join->m, of->type);

	CHECK(of->numbered && !of->surrogate && join->group == of->group);
	if (!op)
		return NULL;
	op->surrogate = OP_SURROGATE;
	op_state_move(op, OP_BLOCKED);
	op->deadline_us = of->deadline_us;
	op->done = op_nobody_waits;
	op->group = of->group;
	op->unit = of->unit;
	op_name_unit(op);
	memcpy(op->args, of->args, sizeof(op->args));
	op->entry.rank = op->m->rank;
	op->entry.pid = member_pid(op->m);
	op->entry.index = join->entry.index;
	member_op_begun(op->m);
	op_record_begin(op);
	list_append(&op->m->ops, &op->link);
	match_number(&op->group->match, &op->entry);
	op->numbered = true;
	op->group->surrogates++;
	return op;
}

/* Its arguments, from what the other node has said. */
static int op_take_asked(struct op *op, const struct asked *a, struct fault *f)
{
	const struct op_type *type = op->type;
	ProtobufCMessage *msg;
	int r;

	if (type->asked)
		return type->asked(op, a->words, f);
	msg = protobuf_c_message_unpack(type->request, NULL, a->bytes, a->request);
	if (!msg)
		return fault_set(f, FAULT_INVALID, NULL, "its request cannot be read");
	r = type->decode(op, msg, f);
	/* what points to it is the peer's own: surrogate_init */
	protobuf_c_message_free_unpacked(msg, NULL);
	return r;
}

struct op *op_new_peer(struct op *join, const struct op_type *type, const struct asked *a,
		       struct fault *f)
{
	struct group *g = join->group;
	struct op *op = op_new(join->m, type);

	if (!op) {
		fault_errno(f, -ENOMEM, "taking part for a rank that has joined");
		return NULL;
	}
	op->deadline_us = UINT64_MAX; /* its rank's node ends it */
	op->group = g;
	op->entry = (struct match_entry){ .number = a->number,
					  .generation = g->match.generation,
					  .index = join->entry.index,
					  .rank = a->rank,
					  .pid = a->pid,
					  .print = a->print };
	if (type->surrogates && (a->bytes || type->asked) && op_take_asked(op, a, f) == 0 &&
	    op->group != g)
		fault_set(f, FAULT_INVALID, NULL, "%.32s: it is of another group", a->type);
	op_name_unit(op);
	op->numbered = true;
	if (!f->code)
		return op;
	op_free_peer(op);
	return NULL;
}

int op_spawn(struct op *by, const struct op_type *type, void (*fill)(struct op *op, void *arg),
	     void *arg, op_done_cb done, void *userdata)
{
	struct op *op = op_new(by->m, type);

	if (!op)
		return -ENOMEM;
	op->deadline_us = by->deadline_us;
	op->stream = by->stream;
	op->done = done;
	op->userdata = userdata;
	fill(op, arg);
	op_name_unit(op);
	if (op->group) {
		op->entry.rank = op->m->rank;
		op->entry.pid = member_pid(op->m);
		CHECK(group_index_here(op->group, op->m->rank, &op->entry.index));
	}
	member_op_begun(op->m);
	op->m->job->ops.total++;
	op_record_begin(op);
	op_enter(op);
	return 0;
}

void op_give_up(struct op *by, const struct op_type *type, struct group *g, const struct fault *why)
{
	struct match_entry e = { .rank = by->m->rank, .pid = member_pid(by->m) };
	struct fault f = FAULT_NULL;

	CHECK(group_index_here(g, by->m->rank, &e.index));
	if (g->n_untold && g->untold[e.index])
		return; /* its collectives have no numbers */
	match_number(&g->match, &e);
	if (g->joined)
		g->joined->skip(g, e.number);
	fault_set(&f, FAULT_STATE, NULL, "rank %u (pid %d) cannot take part in %s: %.300s", e.rank,
		  e.pid, type->name, why->text);
	match_refuse(&g->match, &e, &f);
	match_passed(&g->match, &e);
}

/* ------------------------------------------------------------------- the end */

void op_begin_run(struct op *op)
{
	waiter_leave(&op->waiter);
	op_state_move(op, OP_RUN);
	if (!op->started_us)
		op->started_us = clock_now_us();
}

enum res op_wait(struct op *op, struct condition *c)
{
	CHECK(!op->announced); /* a collective waits by its coll */
	op_state_move(op, OP_BLOCKED);
	condition_wait(c, &op->waiter);
	return RES_WAIT;
}

static void op_free_args(struct op *op)
{
	if (op->type->forget)
		op->type->forget(op);
	if (op->unit)
		op->unit->ops--;
	free(op->owned);
}

void op_free_peer(struct op *op)
{
	CHECK(list_empty(&op->link) && op->state == OP_HELD);
	op_free_args(op);
	op_give_back(op);
}

/* Tell who asked; once. */
static void op_answer(struct op *op)
{
	if (op->answered)
		return;
	op->answered = true;
	if (op->fault.code)
		job_note_error(op->m->job, &op->fault);
	op_record_end(op);
	job_journal_write(op->m->job);
	op->done(op, op->userdata);
}

void op_end(struct op *op)
{
	struct member *m = op->m;
	struct group *stood_in = op->surrogate ? op->group : NULL;

	MAGIC_CHECK(op, OP_MAGIC);
	CHECK(op->state != OP_DONE && !op->ticking);
	if (!op->fault.code)
		guard_done(op);
	if (op->state != OP_HELD)
		op_release_deps(op);
	op_state_move(op, OP_DONE);
	waiter_leave(&op->waiter);
	list_unlink(&op->ready);
	list_unlink(&op->link);
	if (op->numbered)
		match_passed(&op->group->match, &op->entry);
	if (op->surrogate && !op->announced) {
		CHECK(op->group->surrogates > 0);
		op->group->surrogates--;
	}
	if (op->type->leave && !op->surrogate)
		op->type->leave(op);
	op->held = member_buffer_unref(op->held);
	op_answer(op);
	op_free_args(op);
	op_give_back(op);
	if (stood_in && stood_in->joined->over)
		stood_in->joined->over(stood_in);
	member_op_ended(m);
	op_activate_ready();
}

/* The other nodes may have what the store decides, so the leader says what becomes of it: it fails on all, it
 * starts, or the epoch ends and it is in doubt. */
static void op_give_up_decided(struct op *op)
{
	struct fault told = FAULT_NULL;

	if (!match_is_here(&op->group->match, op->entry.number)) {
		op_refuse_peers(op, &op->fault);
		return;
	}
	op_refusal(op, &op->fault, &told);
	op->fault = FAULT_NULL;
	op->deadline_us = UINT64_MAX;
	match_ask(&op->group->match, op->entry.number, &told);
}

/* An op that waits ends with op->fault, and so does its slot. One that is ended before
 * its turn is answered and keeps its turn, so that those behind it get theirs. */
static void op_end_waiting(struct op *op)
{
	CHECK(op->state != OP_RUN && op->fault.code);
	if (op->state == OP_HELD)
		op_answer(op);
	else if (op->announced && op->type->decided)
		op_give_up_decided(op);
	else if (op->announced)
		op_refuse_peers(op, &op->fault); /* ends this op too, by op_failed */
	else
		op_fail_now(op);
}

void op_cancel(struct op *op, enum fault_code code, const char *why)
{
	MAGIC_CHECK(op, OP_MAGIC);
	if (op->state == OP_RUN)
		return;
	fault_set(&op->fault, code, NULL, "%s", why);
	if (op->ticking)
		waiter_leave(&op->waiter); /* op_go_on ends it */
	else
		op_end_waiting(op);
}

void op_failed(struct match_entry *entry, const struct fault *fault, void *userdata)
{
	struct op *op = CONTAINER_OF(entry, struct op, entry);

	(void)userdata;
	MAGIC_CHECK(op, OP_MAGIC);
	fault_set(&op->fault, fault->code, NULL, "%s", fault->text);
	op_end(op);
}

static struct op *op_first_waiting(struct list *ops)
{
	struct op *op, *tmp;

	list_for_each (op, tmp, ops, link)
		if (op->state != OP_RUN && !(op->ticking && op->fault.code))
			return op;
	return NULL;
}

/* Ending one may end others (peers of a slot), so look again after each. */
static void op_abort_member(struct member *m, const struct fault *fault)
{
	struct op *op;

	while ((op = op_first_waiting(&m->ops)) || (op = op_first_waiting(&m->held))) {
		fault_set(&op->fault, fault->code, NULL, "%s", fault->text);
		if (op->announced)
			match_refuse(&op->group->match, &op->entry, fault);
		else if (op->ticking)
			waiter_leave(&op->waiter); /* op_go_on ends it */
		else
			op_end(op);
	}
}

void op_abort_all(struct job *job, const struct fault *fault)
{
	bool was = activating;

	queue_tasks_epoch_ends(job);
	activating = true; /* nothing new starts while old ones are ended */
	for (uint32_t r = 0; r < job->rec->world_size; r++)
		if (job->ranks[r])
			op_abort_member(job->ranks[r], fault);
	activating = was;
	op_activate_ready();
}
