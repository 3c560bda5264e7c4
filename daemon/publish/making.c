#include "publish/making.h"

#include <errno.h>

#include "core/check.h"
#include "job/job_types.h"

/* Blocks of one task: 4 MiB of a generation, about a millisecond of the memory's time. */
#define MAKING_BLOCKS 32u

static void making_on_done(struct backend_task *task, int status);

static void making_submit(struct making *m)
{
	uint32_t left = m->n - m->next;
	uint32_t n = m->hurries || left < MAKING_BLOCKS ? left : MAKING_BLOCKS;

	m->launch = (struct launch){ .kind = LAUNCH_ASSEMBLE,
				     .n = n,
				     .assemble = { m->tensors, m->blocks + m->next,
						   m->crc + m->next, m->moves } };
	m->next += n;
	m->task = (struct backend_task){ .launches = &m->launch,
					 .n_launches = 1,
					 .sync = true,
					 .done = making_on_done,
					 .owner = job_as_owner(m->job) };
	backend_submit(m->backend, &m->task);
}

static void making_on_done(struct backend_task *task, int status)
{
	struct making *m = CONTAINER_OF(task, struct making, task);

	if (status == 0 && !m->cancelled && m->next < m->n) {
		making_submit(m);
		return;
	}
	list_unlink(&m->link);
	m->done(m, status ? status : m->cancelled ? -ECANCELED : 0);
}

void making_begin(struct making *m)
{
	CHECK(m->n && m->done);
	m->next = 0;
	m->hurries = m->cancelled = false;
	list_init(&m->link);
	list_append(&m->job->readers.makings, &m->link);
	making_submit(m);
}

void making_cancel(struct making *m)
{
	m->cancelled = true;
}

enum res making_let(struct job *job)
{
	struct making *m, *tmp;

	list_for_each (m, tmp, &job->readers.makings, link)
		m->hurries = true;
	return making_is_busy(job) ? RES_WAIT : RES_DONE;
}

bool making_is_busy(const struct job *job)
{
	return !list_empty(&job->readers.makings);
}
