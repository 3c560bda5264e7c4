/* The latest records of ops and devices. */
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "op/op.h"
#include "op/op_run.h"
#include "op/op_time.h"
#include "publish/publication.h"
#include "rpc/status_fill.h"

/* Pending ops in a reply. */
#define STATUS_PENDING_MOST 4096u

/* By the owner of the job at that time: the job may be gone, and its name may belong to another job
 * by now, which may be another user's. */
static bool status_records_visible(const struct status_scope *scope, uint32_t number, uid_t uid,
				   bool is_private)
{
	return (!scope->job || scope->job->number == number) &&
	       status_may_look(scope, uid, is_private);
}

/* @us on the wire, where times count from the start of the daemon and 0 means none. */
static uint64_t status_records_since(uint64_t start, uint64_t us)
{
	return us ? us - start : 0;
}

static bool status_records_seen(const struct status_scope *scope, const struct record_head *r)
{
	return r && status_records_visible(scope, r->job_number, r->uid, r->is_private);
}

static bool status_records_pending_seen(const struct status_scope *scope, const struct op *op)
{
	const state_job *job = op->m->job->rec;

	return status_records_visible(scope, job->number, job->uid, job->is_private);
}

static void status_records_fill_record(struct arena *a, const struct record *r, uint64_t start,
				       Shardd__V1__OpRecord *o)
{
	o->id = r->head.id;
	o->job = status_text(a, r->head.job);
	o->uid = r->head.uid;
	o->job_number = r->head.job_number;
	o->rank = r->rank;
	o->pid = r->pid;
	o->op = (char *)r->name;
	o->unit = status_text(a, r->unit);
	o->group = status_text(a, r->group);
	o->number = r->number;
	o->seq = r->seq;
	o->epoch = r->epoch;
	o->state = STATUS_STATE(OpState, op_state, r->error[0] ? "FAILED" : "DONE");
	o->announced_us = r->announced_us - start;
	o->active_us = status_records_since(start, r->active_us);
	o->started_us = status_records_since(start, r->started_us);
	o->finished_us = status_records_since(start, r->finished_us);
	o->step = r->step;
	o->bytes = r->bytes;
	o->error = status_text(a, r->error);
}

static void status_records_fill_pending(struct arena *a, const struct op *op, uint64_t start,
					Shardd__V1__OpRecord *o)
{
	char waits[512];

	op_waits_for(op, waits, sizeof(waits));
	o->id = op->recorded.id;
	o->job = status_text(a, op->m->job->rec->name);
	o->uid = op->m->job->rec->uid;
	o->job_number = op->m->job->number;
	o->rank = op->m->rank;
	o->pid = member_pid(op->m);
	o->op = (char *)op->type->name;
	o->unit = status_text(a, op->unit ? op->unit->rec->name : "");
	o->group = status_text(a, op->group ? op->group->rec->name : "");
	o->number = op->entry.number;
	o->seq = op->seq;
	o->epoch = op->m->epoch;
	o->state = STATUS_STATE(OpState, op_state, op_state_name(op->state));
	o->announced_us = op->announced_us - start;
	o->active_us = status_records_since(start, op->active_us);
	o->started_us = status_records_since(start, op->started_us);
	o->waits_for = status_text(a, waits);
}

/* Records of one kind, in the order in which they came. */
struct records_seen {
	const struct record_head **all;
	size_t n;
};

static int status_records_compare(const void *x, const void *y)
{
	const struct record_head *const *a = x, *const *b = y;

	return (*a)->id < (*b)->id ? -1 : (*a)->id > (*b)->id;
}

static const struct record_head *status_records_op_at(size_t i)
{
	const struct record *r = recorder_op_at(i);

	return r ? &r->head : NULL;
}

static const struct record_head *status_records_device_at(size_t i)
{
	const struct device_record *r = recorder_device_at(i);

	return r ? &r->head : NULL;
}

static const struct record_head *status_records_published_at(size_t i)
{
	const struct published_record *r = recorder_published_at(i);

	return r ? &r->head : NULL;
}

/* Those that @scope may see; the last @limit, 0: all. @at: the record at a place. */
static struct records_seen status_records_find(struct arena *a, const struct status_scope *scope,
					       uint32_t limit,
					       const struct record_head *(*at)(size_t i))
{
	struct records_seen s = { 0 };
	size_t n = 0, skip;

	for (size_t i = 0; i < recorder_size(); i++)
		n += status_records_seen(scope, at(i));
	s.all = arena_take(a, n * sizeof(struct record_head *));
	if (!s.all || !n)
		return s;
	for (size_t i = 0; i < recorder_size(); i++)
		if (status_records_seen(scope, at(i)))
			s.all[s.n++] = at(i);
	qsort(s.all, s.n, sizeof(*s.all), status_records_compare);
	skip = limit && s.n > limit ? s.n - limit : 0;
	s.all += skip;
	s.n -= skip;
	return s;
}

/* Those that are pending, the oldest first. Return: how many. */
static size_t status_records_count_pending(const struct status_scope *scope,
					   Shardd__V1__OpsResponse *reply)
{
	struct op *op, *tmp;
	size_t n = 0;

	list_for_each (op, tmp, &recorder.pending, recorded.link)
		n += status_records_pending_seen(scope, op);
	if (n > STATUS_PENDING_MOST)
		reply->pending_left_out = (uint32_t)(n - STATUS_PENDING_MOST);
	return n - reply->pending_left_out;
}

void status_fill_ops(struct arena *a, const struct status_scope *scope, uint32_t limit,
		     uint64_t start, Shardd__V1__OpsResponse *reply)
{
	const struct records_seen ended =
		status_records_find(a, scope, limit, status_records_op_at);
	const size_t pending = status_records_count_pending(scope, reply);
	struct op *op, *tmp;

	reply->ops = STATUS_MESSAGES(a, pending + ended.n, OpRecord, op_record);
	if (!reply->ops)
		return;
	list_for_each (op, tmp, &recorder.pending, recorded.link)
		if (reply->n_ops < pending && status_records_pending_seen(scope, op))
			status_records_fill_pending(a, op, start, reply->ops[reply->n_ops++]);
	for (size_t i = 0; i < ended.n; i++)
		status_records_fill_record(a, (const struct record *)ended.all[i], start,
					   reply->ops[reply->n_ops++]);
}

static void status_records_fill_device_record(struct arena *a, const struct device_record *r,
					      uint64_t start, Shardd__V1__DeviceRecord *d)
{
	d->id = r->head.id;
	d->job = status_text(a, r->head.job);
	d->uid = r->head.uid;
	d->job_number = r->head.job_number;
	d->device = status_text(a, r->device);
	d->queue = (char *)r->queue;
	d->op = (char *)r->name;
	d->unit = status_text(a, r->unit);
	d->number = r->number;
	d->epoch = r->epoch;
	d->submitted_us = r->submitted_us - start;
	d->began_us = status_records_since(start, r->began_us);
	d->ended_us = r->pending ? 0 : status_records_since(start, r->ended_us);
	d->kernels = r->kernels;
	d->bytes = r->bytes;
	d->error = status_text(a, r->status ? strerror(-r->status) : "");
}

void status_fill_device_records(struct arena *a, const struct status_scope *scope, uint32_t limit,
				uint64_t start, Shardd__V1__OpsResponse *reply)
{
	const struct records_seen seen =
		status_records_find(a, scope, limit, status_records_device_at);

	reply->devices = STATUS_MESSAGES(a, seen.n, DeviceRecord, device_record);
	for (size_t i = 0; reply->devices && i < seen.n; i++)
		status_records_fill_device_record(a, (const struct device_record *)seen.all[i],
						  start, reply->devices[reply->n_devices++]);
}

/* ---------------------------------------------------------------------------- publications */

/* What goes on, which is counted first and then filled. */
struct records_now {
	struct arena *a;
	uint64_t start;
	size_t n;
	Shardd__V1__PublicationRecord **to; /* NULL: only count */
};

/* Return: the next one, or NULL: it was counted. */
static Shardd__V1__PublicationRecord *status_records_now(struct records_now *now,
							 const struct publication *p,
							 Shardd__V1__PublicationRecordKind kind,
							 uint64_t began_us)
{
	Shardd__V1__PublicationRecord *to = now->to ? now->to[now->n] : NULL;
	const state_job *job = p->job->rec;

	now->n++;
	if (!to)
		return NULL;
	to->job = status_text(now->a, job->name);
	to->uid = job->uid;
	to->job_number = job->number;
	to->publication = status_text(now->a, p->rec->declaration->name);
	to->kind = kind;
	to->step = job->step;
	to->began_us = began_us - now->start;
	return to;
}

static void status_records_now_leased(struct records_now *now, const struct published *g, int pid,
				      uint64_t session, uint64_t since_us,
				      Shardd__V1__LeaseRecordSource source)
{
	Shardd__V1__PublicationRecord *to = status_records_now(
		now, g->p, SHARDD__V1__PUBLICATION_RECORD_KIND__PUBLICATION_RECORD_KIND_LEASE,
		since_us);

	if (!to)
		return;
	to->number = g->number;
	to->step = g->step;
	to->pid = pid;
	to->session = session;
	to->source = source;
}

static void status_records_now_leases(struct records_now *now, const struct published *g)
{
	const struct publication_lease *l, *tmp;
	const struct board_reader *r, *tmp2;
	const uint64_t time = clock_now_us();

	list_for_each (l, tmp, (struct list *)(uintptr_t)&g->leases, link)
		status_records_now_leased(
			now, g, l->pid, l->session, l->since_us,
			l->streams ? SHARDD__V1__LEASE_RECORD_SOURCE__LEASE_RECORD_SOURCE_STREAM
				   : SHARDD__V1__LEASE_RECORD_SOURCE__LEASE_RECORD_SOURCE_CALL);
	list_for_each (r, tmp2, (struct list *)(uintptr_t)&g->p->board.readers, link)
		if (publication_reader_holds(r, g))
			status_records_now_leased(
				now, g, r->pid, r->session, publication_reader_since(r, g, time),
				SHARDD__V1__LEASE_RECORD_SOURCE__LEASE_RECORD_SOURCE_BOARD);
}

static void status_records_now_generation(struct records_now *now, const struct published *g)
{
	Shardd__V1__PublicationRecord *to = status_records_now(
		now, g->p, SHARDD__V1__PUBLICATION_RECORD_KIND__PUBLICATION_RECORD_KIND_GENERATION,
		g->began_us);
	const bool is_made = g->state == PUBLISHED_READY;

	if (to) {
		to->number = g->number;
		to->step = g->step;
		to->made_us = is_made ? status_records_since(now->start, g->made_us) : 0;
		to->bytes = g->assembly->bytes;
		to->delta_bytes = is_made && g->delta.made ? g->delta.bytes : 0;
		to->was_used = is_made && publication_was_used(g);
	}
	if (is_made)
		status_records_now_leases(now, g);
}

static void status_records_now_publication(struct records_now *now, const struct publication *p)
{
	const struct board_reader *r, *tmp;

	list_for_each (r, tmp, (struct list *)(uintptr_t)&p->board.readers, link) {
		Shardd__V1__PublicationRecord *to = status_records_now(
			now, p, SHARDD__V1__PUBLICATION_RECORD_KIND__PUBLICATION_RECORD_KIND_READER,
			r->opened_us);

		if (!to)
			continue;
		to->pid = r->pid;
		to->session = r->session;
	}
	for (unsigned i = 0; i < p->n_buffers; i++)
		if (p->buffers[i].state != PUBLISHED_EMPTY)
			status_records_now_generation(now, &p->buffers[i]);
}

static void status_records_now_all(struct records_now *now, struct jobs *jobs,
				   const struct status_scope *scope)
{
	struct job *job, *tmp;
	const struct publication *p, *tmp2;

	now->n = 0;
	list_for_each (job, tmp, &jobs->all, link) {
		if ((scope->job && scope->job != job) || !status_may_look_at(scope, job))
			continue;
		list_for_each (p, tmp2, &job->readers.publications, link)
			if (!p->gone)
				status_records_now_publication(now, p);
	}
}

static void status_records_fill_published(struct arena *a, const struct published_record *r,
					  uint64_t start, Shardd__V1__PublicationRecord *to)
{
	to->id = r->head.id;
	to->job = status_text(a, r->head.job);
	to->uid = r->head.uid;
	to->job_number = r->head.job_number;
	to->publication = status_text(a, r->publication);
	to->kind = (Shardd__V1__PublicationRecordKind)(r->kind + 1);
	to->number = r->number;
	to->step = r->step;
	to->began_us = r->began_us - start;
	to->made_us = status_records_since(start, r->made_us);
	to->ended_us = r->ended_us - start;
	to->bytes = r->bytes;
	to->delta_bytes = r->delta_bytes;
	to->was_used = r->was_used;
	if (r->kind == PUBLISHED_LEASE)
		to->source = (Shardd__V1__LeaseRecordSource)(r->lease + 1);
	to->pid = r->pid;
	to->session = r->session;
	to->why = status_text(a, r->why);
}

static_assert(PUBLISHED_LEASE + 1 ==
		      (int)SHARDD__V1__PUBLICATION_RECORD_KIND__PUBLICATION_RECORD_KIND_LEASE,
	      "the same order");
static_assert(PUBLISHED_BETWEEN_LOOKS + 1 ==
		      (int)SHARDD__V1__LEASE_RECORD_SOURCE__LEASE_RECORD_SOURCE_BETWEEN_LOOKS,
	      "the same order");

void status_fill_published_records(struct arena *a, struct jobs *jobs,
				   const struct status_scope *scope, uint32_t limit,
				   Shardd__V1__OpsResponse *reply)
{
	const struct records_seen over =
		status_records_find(a, scope, limit, status_records_published_at);
	struct records_now now = { .a = a, .start = jobs->node->started_us };

	status_records_now_all(&now, jobs, scope);
	reply->publications =
		STATUS_MESSAGES(a, now.n + over.n, PublicationRecord, publication_record);
	if (!reply->publications)
		return;
	now.to = reply->publications;
	status_records_now_all(&now, jobs, scope);
	reply->n_publications = now.n;
	for (size_t i = 0; i < over.n; i++)
		status_records_fill_published(a, (const struct published_record *)over.all[i],
					      now.start,
					      reply->publications[reply->n_publications++]);
}
