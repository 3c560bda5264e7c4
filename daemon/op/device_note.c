#include "op/device_note.h"

#include "backend/launch.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/text.h"
#include "op/recorder.h"

static void device_note_on_seen(struct backend_task *task, int status)
{
	struct device_record *r = recorder_find_device(task->record);

	if (!r)
		return; /* overwritten meanwhile */
	CHECK(r->pending > 0);
	r->pending--;
	if (!r->began_us)
		r->began_us = task->began_us;
	r->ended_us = task->ended_us ? task->ended_us : clock_now_us();
	if (!r->status)
		r->status = status;
}

static const char *device_note_queue_name(enum backend_queue queue)
{
	return queue == BACKEND_Q_GATHER ? "gather" : "main";
}

static struct device_record *device_note_begin(struct device_note *n, struct backend *b,
					       const struct backend_task *task)
{
	struct device_record *r = recorder_add_device();

	if (!r)
		return NULL;
	n->record = r->id;
	r->name = n->name;
	r->queue = device_note_queue_name(task->queue);
	r->uid = n->job->rec->uid;
	r->is_private = n->job->rec->is_private;
	r->number = n->number;
	r->epoch = n->job->rec->epoch;
	r->submitted_us = clock_now_us();
	text_copy(r->job, sizeof(r->job), n->job->rec->name);
	text_copy(r->unit, sizeof(r->unit), n->unit ? n->unit->rec->name : "");
	text_copy(r->device, sizeof(r->device), backend_info(b)->id);
	return r;
}

void device_note_task(struct device_note *n, struct backend *b, struct backend_task *task)
{
	struct device_record *r;

	task->seen = NULL;
	if (!n->name)
		return;
	r = n->record ? recorder_find_device(n->record) : device_note_begin(n, b, task);
	if (!r)
		return;
	r->pending++;
	r->kernels += task->n_launches;
	for (unsigned i = 0; i < task->n_launches; i++)
		r->bytes += launch_bytes(&task->launches[i]);
	task->record = r->id;
	task->seen = device_note_on_seen;
}
