#include "op/device_note.h"

#include "backend/launch.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/text.h"
#include "job/job.h"
#include "op/recorder.h"

static void device_note_on_seen(struct backend_task *task, int status)
{
	struct device_record *r = task->record;

	CHECK(r->pending > 0);
	r->pending--;
	if (!r->began_us)
		r->began_us = task->began_us;
	r->ended_us = task->ended_us ? task->ended_us : clock_now_us();
	if (!r->status)
		r->status = status;
	if (!r->pending)
		recorder_end_device(r);
}

static const char *device_note_queue_name(enum backend_queue queue)
{
	return queue == BACKEND_Q_GATHER ? "gather" : "main";
}

static struct device_record *device_note_begin(struct device_note *n, struct backend *b,
					       const struct backend_task *task)
{
	const state_job *job = n->job->rec;
	struct device_record *r = recorder_add_device(job->name, job->uid);

	if (!r)
		return NULL;
	n->record = r;
	n->id = r->head.id;
	r->head.is_private = job->is_private;
	r->head.job_number = job->number;
	r->name = n->name;
	r->queue = device_note_queue_name(task->queue);
	r->number = n->number;
	r->epoch = job->epoch;
	r->submitted_us = clock_now_us();
	text_copy(r->unit, sizeof(r->unit), n->what ? n->what : n->unit ? n->unit->rec->name : "");
	text_copy(r->device, sizeof(r->device), backend_info(b)->id);
	return r;
}

/* Return: the record of the tasks before; NULL: there are none, or it was overwritten. */
static struct device_record *device_note_resume(const struct device_note *n)
{
	struct device_record *r = n->record;

	if (!r || r->head.id != n->id)
		return NULL;
	if (!r->pending)
		recorder_resume_device(r);
	return r;
}

void device_note_task(struct device_note *n, struct backend *b, struct backend_task *task)
{
	struct device_record *r;

	task->seen = NULL;
	task->label = (struct backend_label){ 0 };
	if (!n->name)
		return;
	r = n->record ? device_note_resume(n) : device_note_begin(n, b, task);
	if (!r)
		return;
	r->pending++;
	r->kernels += task->n_launches;
	for (unsigned i = 0; i < task->n_launches; i++)
		r->bytes += launch_bytes(&task->launches[i]);
	task->record = r;
	task->label = (struct backend_label){ .op = r->name, .job = r->head.job, .unit = r->unit };
	task->seen = device_note_on_seen;
}
