#include "publish/making.h"

#include <errno.h>

#include "core/check.h"
#include "job/job_types.h"

/* Blocks of one task: 4 MiB of a generation, about a millisecond of the memory's time. */
#define MAKING_BLOCKS 32u

static void making_on_done(struct backend_task *task, int status);

/* Is there anything left to begin? A pass begins when all of the one before is done, since each launch is waited for. */
static bool making_has_more(struct making *m)
{
	while (m->at_pass < MAKING_PASSES && m->next == m->passes[m->at_pass].n) {
		m->at_pass++;
		m->next = 0;
	}
	return m->at_pass < MAKING_PASSES;
}

static void making_submit(struct making *m)
{
	const struct making_pass *pass = &m->passes[m->at_pass];
	uint32_t left = pass->n - m->next;
	uint32_t n = m->hurries || left < MAKING_BLOCKS ? left : MAKING_BLOCKS;
	bool makes = pass->pass == K_ASSEMBLE_MAKE;

	if (m->delta && makes) {
		m->part = *m->delta;
		m->part.blocks += m->next;
	}
	m->launch = (struct launch){ .kind = LAUNCH_ASSEMBLE,
				     .n = n,
				     .assemble = { .tensors = m->tensors,
						   .blocks = pass->blocks + m->next,
						   .crc = makes ? m->crc + m->next : NULL,
						   .moves = m->moves,
						   .delta = m->delta && makes ? &m->part : NULL,
						   .pass = pass->pass } };
	m->next += n;
	m->task = (struct backend_task){ .launches = &m->launch,
					 .n_launches = 1,
					 .sync = true,
					 .done = making_on_done,
					 .owner = job_as_owner(m->job) };
	if (m->submits)
		m->submits(m);
	backend_submit(m->backend, &m->task);
}

static void making_on_done(struct backend_task *task, int status)
{
	struct making *m = CONTAINER_OF(task, struct making, task);

	if (status == 0 && !m->cancelled && making_has_more(m)) {
		making_submit(m);
		return;
	}
	list_unlink(&m->link);
	m->done(m, status ? status : m->cancelled ? -ECANCELED : 0);
}

void making_begin(struct making *m)
{
	CHECK(m->passes[MAKING_PASSES - 1].n && m->done);
	m->at_pass = m->next = 0;
	making_has_more(m);
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
