/* Publications of a job, their generations, and who has these. */
#include <string.h>

#include "core/check.h"
#include "core/clock.h"
#include "publish/publication.h"
#include "publish/published_policy.h"
#include "rpc/status_fill.h"

static void status_publications_fill_leases(struct arena *a, const struct published *g,
					    Shardd__V1__GenerationStatus *s)
{
	const struct publication_lease *l, *tmp;
	const struct board_reader *r, *tmp2;
	struct list *readers = (struct list *)(uintptr_t)&g->p->board.readers;
	uint64_t now = clock_now_us();
	size_t n = 0;

	list_for_each (l, tmp, (struct list *)(uintptr_t)&g->leases, link)
		n++;
	list_for_each (r, tmp2, readers, link)
		n++;
	s->leases = n ? STATUS_MESSAGES(a, n, LeaseStatus, lease_status) : NULL;
	if (!s->leases)
		return;
	list_for_each (l, tmp, (struct list *)(uintptr_t)&g->leases, link) {
		Shardd__V1__LeaseStatus *to = s->leases[s->n_leases++];

		to->session = l->session;
		to->pid = l->pid;
		to->held_ms = (now - l->since_us) / 1000;
		to->streams = l->streams;
		to->sent_bytes = l->sent;
	}
	list_for_each (r, tmp2, readers, link) {
		Shardd__V1__LeaseStatus *to = s->leases[s->n_leases];

		if (!publication_reader_holds(r, g))
			continue;
		to->session = r->session;
		to->pid = r->pid;
		to->held_ms = (now - publication_reader_since(r, g, now)) / 1000;
		s->n_leases++;
	}
}

static void status_publications_fill_generation(struct arena *a, const struct published *g,
						Shardd__V1__GenerationStatus *s)
{
	uint64_t since = g->state == PUBLISHED_READY ? g->made_us : g->began_us;

	s->number = g->number;
	s->step = g->step;
	s->state = STATUS_STATE(GenerationState, generation_state,
				published_state_name((enum published_state)g->state));
	s->age_ms = (clock_now_us() - since) / 1000;
	status_publications_fill_leases(a, g, s);
}

/* The one with the largest number below @below. Return: NULL: there is none. */
static const struct published *status_publications_next(const struct publication *p, uint64_t below)
{
	const struct published *next = NULL;

	for (unsigned i = 0; i < p->n_buffers; i++) {
		const struct published *g = &p->buffers[i];

		if (g->state != PUBLISHED_EMPTY && g->number < below &&
		    (!next || g->number > next->number))
			next = g;
	}
	return next;
}

static void status_publications_fill_generations(struct arena *a, const struct publication *p,
						 Shardd__V1__PublicationStatus *s)
{
	const struct published *g = status_publications_next(p, UINT64_MAX);
	size_t n = 0;

	for (unsigned i = 0; i < p->n_buffers; i++)
		n += p->buffers[i].state != PUBLISHED_EMPTY;
	s->generations = n ? STATUS_MESSAGES(a, n, GenerationStatus, generation_status) : NULL;
	for (; s->generations && g; g = status_publications_next(p, g->number))
		status_publications_fill_generation(a, g, s->generations[s->n_generations++]);
}

/* The status outlives the declaration. */
static uint32_t *status_publications_copy(struct arena *a, const uint32_t *ids, size_t n)
{
	uint32_t *to = arena_take(a, n * sizeof(*to) + 1);

	if (to && n)
		memcpy(to, ids, n * sizeof(*to));
	return to;
}

static void status_publications_fill_readers(struct arena *a, const view_declaration *d,
					     Shardd__V1__PublicationStatus *s)
{
	const Shardd__V1__PublishedReaders *r = d->readers;

	s->readers_may_publish = d->readers_may_publish;
	if (!r)
		return;
	s->reader_users = status_publications_copy(a, r->users, r->n_users);
	s->n_reader_users = s->reader_users ? r->n_users : 0;
	s->reader_groups = status_publications_copy(a, r->groups, r->n_groups);
	s->n_reader_groups = s->reader_groups ? r->n_groups : 0;
}

static unsigned status_publications_streams(const struct publication *p)
{
	const struct publication_lease *l, *tmp;
	unsigned n = 0;

	for (unsigned i = 0; i < p->n_buffers; i++)
		list_for_each (l, tmp, (struct list *)(uintptr_t)&p->buffers[i].leases, link)
			n += l->streams;
	return n;
}

static unsigned status_publications_readers(const struct publication *p)
{
	const struct board_reader *r, *tmp;
	unsigned n = 0;

	list_for_each (r, tmp, (struct list *)(uintptr_t)&p->board.readers, link)
		n++;
	return n;
}

static void status_publications_fill_one(struct arena *a, const struct publication *p,
					 Shardd__V1__PublicationStatus *s)
{
	const view_declaration *d = p->rec->declaration;
	const struct publication_wait *w, *tmp;

	s->name = status_text(a, d->name);
	s->tensors = p->assembly ? p->assembly->view->n : 0;
	s->bytes = p->assembly ? p->assembly->bytes : 0;
	s->every_steps = d->every_steps;
	s->keep = published_policy_keep(d);
	s->buffers = p->n_buffers;
	s->made = p->counts.made;
	s->made_bytes = p->counts.bytes;
	s->made_us = p->counts.made_us;
	s->skipped = p->counts.skipped;
	s->dropped = p->counts.dropped;
	s->failed = p->counts.failed;
	s->buffer_waits = p->counts.waits;
	s->buffer_waited_us = p->counts.waited_us;
	if (p->waits_since_us)
		s->buffer_waited_us += clock_now_us() - p->waits_since_us;
	s->waits_for_buffer = p->waits_since_us > 0;
	s->buffer_waits_expired = p->counts.expired;
	s->delta_percent = d->delta_percent;
	s->deltas = p->counts.deltas;
	s->delta_bytes = p->counts.delta_bytes;
	s->delta_us = p->counts.delta_us;
	s->changed = p->counts.changed;
	s->compared = p->counts.compared;
	s->not_deltas = p->counts.not_deltas;
	s->why = status_text(a, p->why);
	s->since_unix_us = p->since_unix_us;
	s->streams = status_publications_streams(p);
	s->readers = status_publications_readers(p);
	s->streamed_bytes = p->counts.streamed;
	status_publications_fill_readers(a, d, s);
	list_for_each (w, tmp, (struct list *)(uintptr_t)&p->waits, link)
		s->waiting++;
	status_publications_fill_generations(a, p, s);
}

void status_fill_publications(struct arena *a, const struct job *job, Shardd__V1__JobStatus *j)
{
	const struct publication *p, *tmp;
	struct list *all = (struct list *)(uintptr_t)&job->readers.publications;
	size_t n = 0;

	list_for_each (p, tmp, all, link)
		n += !p->gone;
	j->publications = n ? STATUS_MESSAGES(a, n, PublicationStatus, publication_status) : NULL;
	if (!j->publications)
		return;
	list_for_each (p, tmp, all, link)
		if (!p->gone)
			status_publications_fill_one(a, p, j->publications[j->n_publications++]);
}
