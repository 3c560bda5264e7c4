/* The latest records of ops and devices. */
#include <string.h>

#include "op/op.h"
#include "op/op_run.h"
#include "op/op_time.h"
#include "rpc/status_fill.h"

/* By the owner of the job at that time: the job may be gone, and its name may belong to another
 * user by now. */
static bool status_records_record_visible(const struct status_scope *scope, const char *job,
					  uid_t uid, bool is_private)
{
	if (!status_named(scope, uid, job))
		return false;
	return scope->uid == uid || (!is_private && job_is_admin(scope->uid));
}

/* @us on the wire, where times count from the start of the daemon and 0 means none. */
static uint64_t status_records_since(uint64_t start, uint64_t us)
{
	return us ? us - start : 0;
}

static const char *status_records_record_state(const struct record *r)
{
	if (r->op)
		return op_state_name(r->op->state);
	return r->error[0] ? "FAILED" : "DONE";
}

static void status_records_fill_record(struct arena *a, const struct record *r, uint64_t start,
				       Shardd__V1__OpRecord *o)
{
	char waits[512] = "";

	if (r->op)
		op_waits_for(r->op, waits, sizeof(waits));
	o->id = r->id;
	o->job = status_text(a, r->job);
	o->uid = r->uid;
	o->rank = r->rank;
	o->pid = r->pid;
	o->op = (char *)r->name;
	o->unit = status_text(a, r->unit);
	o->group = status_text(a, r->group);
	o->number = r->op ? r->op->entry.number : r->number;
	o->seq = r->seq;
	o->epoch = r->epoch;
	o->state = STATUS_STATE(OpState, op_state, status_records_record_state(r));
	o->announced_us = r->announced_us - start;
	o->active_us = status_records_since(start, r->op ? r->op->active_us : r->active_us);
	o->started_us = status_records_since(start, r->op ? r->op->started_us : r->started_us);
	o->finished_us = status_records_since(start, r->finished_us);
	o->bytes = r->bytes;
	o->error = status_text(a, r->error);
	o->waits_for = status_text(a, waits);
}

void status_fill_ops(struct arena *a, const struct status_scope *scope, uint32_t limit,
		     uint64_t start, Shardd__V1__OpsResponse *reply)
{
	const struct record *rec;
	size_t n = 0, skip;

	for (size_t i = 0; (rec = recorder_at(i)); i++)
		n += status_records_record_visible(scope, rec->job, rec->uid, rec->is_private);
	skip = limit && n > limit ? n - limit : 0;
	reply->ops = STATUS_MESSAGES(a, n - skip, OpRecord, op_record);
	for (size_t i = 0; reply->ops && (rec = recorder_at(i)); i++) {
		if (!status_records_record_visible(scope, rec->job, rec->uid, rec->is_private))
			continue;
		if (skip)
			skip--;
		else
			status_records_fill_record(a, rec, start, reply->ops[reply->n_ops++]);
	}
}

static void status_records_fill_device_record(struct arena *a, const struct device_record *r,
					      uint64_t start, Shardd__V1__DeviceRecord *d)
{
	d->id = r->id;
	d->job = status_text(a, r->job);
	d->uid = r->uid;
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
	const struct device_record *rec;
	size_t n = 0, skip;

	for (size_t i = 0; (rec = recorder_device_at(i)); i++)
		n += status_records_record_visible(scope, rec->job, rec->uid, rec->is_private);
	skip = limit && n > limit ? n - limit : 0;
	reply->devices = STATUS_MESSAGES(a, n - skip, DeviceRecord, device_record);
	for (size_t i = 0; reply->devices && (rec = recorder_device_at(i)); i++) {
		if (!status_records_record_visible(scope, rec->job, rec->uid, rec->is_private))
			continue;
		if (skip)
			skip--;
		else
			status_records_fill_device_record(a, rec, start,
							  reply->devices[reply->n_devices++]);
	}
}
