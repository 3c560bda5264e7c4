/* The latest records of ops and devices. */
#include <stdlib.h>
#include <string.h>

#include "op/op.h"
#include "op/op_run.h"
#include "op/op_time.h"
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
