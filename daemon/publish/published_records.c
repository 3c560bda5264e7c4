#include "publish/published_records.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/clock.h"
#include "core/text.h"
#include "job/readers.h"
#include "op/recorder.h"

/* Return: NULL if nothing is recorded, or the declaration is gone. */
static struct published_record *published_records_add(const struct publication *p,
						      enum published_kind kind)
{
	const state_job *job = p->job->rec;
	struct published_record *r = p->rec ? recorder_add_published(job->name, job->uid) : NULL;

	if (!r)
		return NULL;
	r->head.is_private = job->is_private;
	r->head.job_number = job->number;
	text_copy(r->publication, sizeof(r->publication), p->rec->declaration->name);
	r->kind = (uint8_t)kind;
	r->step = job->step;
	r->ended_us = clock_now_us();
	r->began_us = r->ended_us;
	return r;
}

void published_records_generation(const struct published *g, bool was_used, const char *why)
{
	struct published_record *r = published_records_add(g->p, PUBLISHED_GENERATION);

	if (!r)
		return;
	r->number = g->number;
	r->step = g->step;
	r->began_us = g->began_us;
	r->made_us = g->state == PUBLISHED_READY ? g->made_us : 0;
	r->was_used = was_used;
	r->bytes = g->assembly->bytes;
	r->delta_bytes = g->delta.made ? g->delta.bytes : 0;
	text_copy(r->why, sizeof(r->why), why);
}

void published_records_skipped(const struct publication *p, const char *why)
{
	struct published_record *r = published_records_add(p, PUBLISHED_SKIPPED);

	if (r)
		text_copy(r->why, sizeof(r->why), why);
}

void published_records_failed(const struct publication *p, const char *why)
{
	struct published_record *r = published_records_add(p, PUBLISHED_FAILED);

	if (r)
		text_copy(r->why, sizeof(r->why), why);
}

void published_records_lease(const struct publication_lease *l)
{
	struct published_record *r = published_records_add(l->g->p, PUBLISHED_LEASE);

	if (!r)
		return;
	r->lease = l->streams ? PUBLISHED_BY_STREAM : PUBLISHED_BY_CALL;
	r->pid = l->pid;
	r->session = l->session;
	r->number = l->g->number;
	r->step = l->g->step;
	r->began_us = l->since_us;
}

/* A hold may have anything: only what is there is recorded. Nobody's buffer was used again since the last look. */
static void published_records_on_use(const struct board_reader *from, const struct board_use *u)
{
	const struct published *g = &from->p->buffers[u->index];
	struct published_record *r;

	if (g->state != PUBLISHED_READY || g->number != u->number)
		return;
	r = published_records_add(from->p, PUBLISHED_LEASE);
	if (!r)
		return;
	r->lease = u->is_between ? PUBLISHED_BETWEEN_LOOKS : PUBLISHED_BY_BOARD;
	r->pid = from->pid;
	r->session = from->session;
	r->number = g->number;
	r->step = g->step;
	r->began_us = u->began_us;
	r->ended_us = u->ended_us;
}

void published_records_look(struct publication *p, uint64_t now_us)
{
	board_look(&p->board, now_us, published_records_on_use);
}

void published_records_reader(struct board_reader *from)
{
	struct published_record *r;

	board_reader_end(from, clock_now_us(), published_records_on_use);
	r = published_records_add(from->p, PUBLISHED_READER);
	if (!r)
		return;
	r->pid = from->pid;
	r->session = from->session;
	r->began_us = from->opened_us;
}

void published_records_leases(const struct published *g)
{
	const struct publication_lease *l, *tmp;

	list_for_each (l, tmp, (struct list *)(uintptr_t)&g->leases, link)
		published_records_lease(l);
}
