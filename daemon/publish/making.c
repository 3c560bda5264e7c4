#include "publish/making.h"

#include <errno.h>

#include "core/check.h"
#include "job/job_types.h"
#include "publish/tables.h"

/* Blocks of one task: 8 MiB of a generation, about a millisecond of the memory's time. */
#define MAKING_BLOCKS 64u

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

/* Blocks of the pass that are made by the next task. */
static uint32_t making_blocks(const struct making *m)
{
	uint32_t left = m->passes[m->at_pass].n - m->next;

	return m->tables || m->hurries || left < MAKING_BLOCKS ? left : MAKING_BLOCKS;
}

static void making_launch_pass(struct making *m)
{
	const struct making_pass *pass = &m->passes[m->at_pass];
	bool makes = pass->pass == K_ASSEMBLE_MAKE;
	uint32_t *crc = m->tables ? m->tables->crc : m->crc;

	if (m->delta && makes) {
		m->part = *m->delta;
		m->part.blocks += m->next;
	}
	m->launch = (struct launch){ .kind = LAUNCH_ASSEMBLE,
				     .n = making_blocks(m),
				     .assemble = { .tensors = m->tensors,
						   .blocks = pass->blocks + m->next,
						   .crc = makes ? crc + m->next : NULL,
						   .moves = m->moves,
						   .delta = m->delta && makes ? &m->part : NULL,
						   .pass = pass->pass,
						   .base = m->base } };
	m->next += (uint32_t)m->launch.n;
}

static void making_launch_copy(struct making *m, void *dst, const void *src, uint64_t bytes)
{
	m->launch = (struct launch){ .kind = LAUNCH_COPY,
				     .n = bytes,
				     .copy = { .dst = dst, .src = src } };
}

/* Is the task to be executed before the next step? Tasks of a queue come one after the other anyway. */
static bool making_waits(const struct making *m)
{
	return !m->tables || m->at == MAKING_FENCE || m->at == MAKING_CRC ||
	       (m->at == MAKING_PASS && m->n_fences > 0);
}

static void making_submit(struct making *m)
{
	struct backend *b = m->at == MAKING_FENCE ? m->fences[m->fenced] : m->backend;

	if (m->at == MAKING_TABLES)
		making_launch_copy(m, backend_addr(m->tables->slab->mem), m->tables->image,
				   m->tables->bytes);
	else if (m->at == MAKING_PASS)
		making_launch_pass(m);
	else if (m->at == MAKING_CRC)
		making_launch_copy(m, m->crc, m->tables->crc,
				   m->passes[MAKING_PASSES - 1].n * sizeof(*m->crc));
	m->task = (struct backend_task){ .launches = &m->launch,
					 .n_launches = m->at == MAKING_FENCE ? 0 : 1,
					 .sync = making_waits(m),
					 .done = making_on_done,
					 .owner = job_as_owner(m->job) };
	if (m->submits && m->at == MAKING_PASS)
		m->submits(m);
	backend_submit(b, &m->task);
}

/* Go to the step that is next. */
static void making_move(struct making *m)
{
	if (m->at == MAKING_FENCE && m->fenced == m->n_fences)
		m->at = m->tables && !m->tables->there ? MAKING_TABLES : MAKING_PASS;
	if (m->at == MAKING_PASS && !making_has_more(m))
		m->at = m->tables ? MAKING_CRC : MAKING_END;
}

/* The step is over. */
static void making_step(struct making *m)
{
	switch ((enum making_at)m->at) {
	case MAKING_FENCE:
		m->fenced++;
		break;
	case MAKING_TABLES:
		tables_are_there(m->tables);
		m->at = MAKING_PASS;
		break;
	case MAKING_PASS:
		break;
	case MAKING_CRC:
	case MAKING_END:
		m->at = MAKING_END;
		break;
	}
	making_move(m);
}

static void making_on_done(struct backend_task *task, int status)
{
	struct making *m = CONTAINER_OF(task, struct making, task);

	if (status == 0)
		making_step(m);
	if (m->at == MAKING_CRC && !m->ordered) {
		m->ordered = true;
		if (m->orders)
			m->orders(m);
	}
	if (status == 0 && !m->cancelled && m->at != MAKING_END) {
		making_submit(m);
		return;
	}
	list_unlink(&m->link);
	m->done(m, status ? status : m->cancelled ? -ECANCELED : 0);
}

void making_begin(struct making *m)
{
	CHECK(m->passes[MAKING_PASSES - 1].n && m->done);
	m->at = MAKING_FENCE;
	m->fenced = m->at_pass = m->next = 0;
	m->hurries = m->cancelled = m->ordered = false;
	making_move(m);
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
	return making_reads(job) ? RES_WAIT : RES_DONE;
}

bool making_reads(const struct job *job)
{
	struct list *all = (struct list *)(uintptr_t)&job->readers.makings;
	const struct making *m, *tmp;

	list_for_each (m, tmp, all, link)
		if (!m->ordered)
			return true;
	return false;
}

bool making_is_busy(const struct job *job)
{
	return !list_empty(&job->readers.makings);
}
