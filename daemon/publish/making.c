#include "publish/making.h"

#include <errno.h>

#include "core/check.h"
#include "job/job_types.h"
#include "publish/tables.h"

/* Blocks of one task: 8 MiB of a generation, about a millisecond of the memory's time. */
#define MAKING_BLOCKS 64u

static void making_on_done(struct backend_task *task, int status);

/* Is there anything left to begin? A pass begins when all of the one before is done. */
static bool making_has_more(struct making *m)
{
	while (m->at_pass < MAKING_PASSES && m->next == m->passes[m->at_pass].n && !m->running) {
		m->at_pass++;
		m->next = 0;
	}
	return m->at_pass < MAKING_PASSES && m->next < m->passes[m->at_pass].n;
}

/* Blocks of the pass that are made by the next task. */
static uint32_t making_blocks(const struct making *m)
{
	uint32_t left = m->passes[m->at_pass].n - m->next;

	return m->tables || m->hurries || left < MAKING_BLOCKS ? left : MAKING_BLOCKS;
}

static void making_launch_pass(struct making *m, struct making_task *t)
{
	const struct making_pass *pass = &m->passes[m->at_pass];
	bool makes = pass->pass == K_ASSEMBLE_MAKE;
	uint32_t *crc = m->tables ? m->tables->crc : m->crc;

	if (m->delta && makes) {
		t->part = m->tables ? m->tables->delta : *m->delta;
		t->part.base = m->delta->base;
		t->part.made = m->delta->made;
		t->part.blocks += m->next;
	}
	t->launch = (struct launch){ .kind = LAUNCH_ASSEMBLE,
				     .n = making_blocks(m),
				     .assemble = { .tensors = m->tensors,
						   .blocks = pass->blocks + m->next,
						   .crc = makes ? crc + m->next : NULL,
						   .moves = m->moves,
						   .delta = m->delta && makes ? &t->part : NULL,
						   .pass = pass->pass,
						   .base = m->base } };
	m->next += (uint32_t)t->launch.n;
}

static void making_launch_copy(struct making_task *t, void *dst, const void *src, uint64_t bytes)
{
	t->launch = (struct launch){ .kind = LAUNCH_COPY,
				     .n = bytes,
				     .copy = { .dst = dst, .src = src } };
}

/* Is the task to be executed before the next step? Tasks of a queue come one after the other anyway. */
static bool making_waits(const struct making *m)
{
	return !m->tables || m->at == MAKING_FENCE || m->at >= MAKING_CRC ||
	       (m->at == MAKING_PASS && m->n_fences > 0);
}

/* What is copied to or from the memory of a GPU. */
static void making_launch_table(const struct making *m, struct making_task *t)
{
	static const uint64_t none;
	const struct tables *on = m->tables;
	uint64_t blocks = m->passes[MAKING_PASSES - 1].n;

	if (m->at == MAKING_TABLES)
		making_launch_copy(t, backend_addr(on->slab->mem), on->image, on->bytes);
	else if (m->at == MAKING_USED)
		making_launch_copy(t, on->delta.used, &none, sizeof(none));
	else if (m->at == MAKING_CRC)
		making_launch_copy(t, m->crc, on->crc, blocks * sizeof(*m->crc));
	else if (m->at == MAKING_DELTAS)
		making_launch_copy(t, m->delta->blocks, on->delta.blocks,
				   blocks * sizeof(*m->delta->blocks));
	else if (m->at == MAKING_TAKEN)
		making_launch_copy(t, m->delta->used, on->delta.used, sizeof(*m->delta->used));
	else if (m->at == MAKING_CHANGES)
		making_launch_copy(t, m->delta->out, on->delta.out, *m->delta->used);
}

static void making_launch(struct making *m, struct making_task *t)
{
	if (m->at == MAKING_PASS)
		making_launch_pass(m, t);
	else
		making_launch_table(m, t);
}

static struct making_task *making_free_task(struct making *m)
{
	struct making_task *t = m->tasks;

	while (t->runs)
		t++;
	return t;
}

static void making_submit(struct making *m)
{
	struct backend *b = m->at == MAKING_FENCE ? m->fences[m->fenced] : m->backend;
	struct making_task *t = making_free_task(m);

	making_launch(m, t);
	t->m = m;
	t->runs = true;
	m->running++;
	t->task = (struct backend_task){ .launches = &t->launch,
					 .n_launches = m->at == MAKING_FENCE ? 0 : 1,
					 .sync = making_waits(m),
					 .done = making_on_done,
					 .owner = job_as_owner(m->job) };
	if (m->submits && m->at == MAKING_PASS)
		m->submits(m, &t->task);
	backend_submit(b, &t->task);
}

/* Submit what can be now. */
static void making_go_on(struct making *m)
{
	unsigned most = m->tables ? 1 : MAKING_TASKS;

	do
		making_submit(m);
	while (m->at == MAKING_PASS && m->running < most && making_has_more(m));
}

/* Is there nothing to do in the step? */
static bool making_skips(struct making *m)
{
	switch ((enum making_at)m->at) {
	case MAKING_FENCE:
		return m->fenced == m->n_fences;
	case MAKING_TABLES:
		return !m->tables || m->tables->there;
	case MAKING_USED:
		return !m->tables || !m->delta;
	case MAKING_PASS:
		return !m->running && !making_has_more(m);
	case MAKING_CRC:
		return !m->tables;
	case MAKING_DELTAS:
	case MAKING_TAKEN:
		return !m->tables || !m->delta;
	case MAKING_CHANGES: /* what has no room is no delta */
		return !m->tables || !m->delta || !*m->delta->used ||
		       *m->delta->used > m->delta->room;
	case MAKING_END:
		return false;
	}
	return false;
}

/* Go to the step that is next. */
static void making_move(struct making *m)
{
	while (making_skips(m))
		m->at++;
}

/* The step is over. */
static void making_step(struct making *m)
{
	if (m->at == MAKING_FENCE)
		m->fenced++;
	if (m->at == MAKING_TABLES)
		tables_are_there(m->tables);
	if (m->at != MAKING_FENCE && m->at != MAKING_PASS && m->at != MAKING_END)
		m->at++;
	making_move(m);
}

/* Nothing is begun any more. */
static bool making_ends(const struct making *m)
{
	return m->status || m->cancelled || m->at == MAKING_END;
}

static void making_on_done(struct backend_task *task, int status)
{
	struct making_task *t = CONTAINER_OF(task, struct making_task, task);
	struct making *m = t->m;

	t->runs = false;
	m->running--;
	m->status = m->status ? m->status : status;
	if (!m->status)
		making_step(m);
	if (m->at == MAKING_CRC && !m->ordered) {
		m->ordered = true;
		if (m->orders)
			m->orders(m);
	}
	if (!making_ends(m) && (m->at != MAKING_PASS || making_has_more(m)))
		making_go_on(m);
	if (m->running)
		return;
	CHECK(making_ends(m));
	list_unlink(&m->link);
	m->done(m, m->status ? m->status : m->cancelled ? -ECANCELED : 0);
}

void making_begin(struct making *m)
{
	CHECK(m->passes[MAKING_PASSES - 1].n && m->done);
	m->at = MAKING_FENCE;
	m->fenced = m->at_pass = m->next = m->running = 0;
	m->status = 0;
	m->hurries = m->cancelled = m->ordered = false;
	making_move(m);
	list_init(&m->link);
	list_append(&m->job->readers.makings, &m->link);
	making_go_on(m);
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
