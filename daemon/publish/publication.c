#include "publish/publication.h"
#include "publish/publication_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "core/check.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/state.h"
#include "crc32c.h"
#include "job/job_journal.h"
#include "job/readers.h"
#include "mem/slab.h"
#include "publish/published_policy.h"
#include "publish/published_records.h"

/* So many numbers are taken with one entry of the journal. */
#define PUBLICATION_NUMBERS 1024u
/* Numbers of layouts are at most one more: JSON can hold them. */
#define PUBLICATION_LAYOUTS ((UINT64_C(1) << 52) - 1)
/* Policies up to this one drop what nobody has leased. */
#define PUBLICATION_DROPS SHARDD__V1__PUBLISHED_WHEN_FULL__PUBLISHED_WHEN_FULL_DROP_OLDEST

static const struct state_row published_states[] = {
	[PUBLISHED_EMPTY] = { "EMPTY", STATE_TO(PUBLISHED_MAKING) },
	[PUBLISHED_MAKING] = { "MAKING", STATE_TO(PUBLISHED_READY) | STATE_TO(PUBLISHED_EMPTY) },
	[PUBLISHED_READY] = { "READY", STATE_TO(PUBLISHED_MAKING) | STATE_TO(PUBLISHED_EMPTY) },
};

const char *published_state_name(enum published_state s)
{
	return s < ARRAY_SIZE(published_states) ? published_states[s].name : "?";
}

static void publication_move(struct published *g, enum published_state to)
{
	state_move(published_states, &g->state, (uint8_t)to);
}

static const view_declaration *publication_declared(const struct publication *p)
{
	return p->rec->declaration;
}

/* ----------------------------------------------------------------------------- buffers */

/* It is over, if there is one, and its leases are. */
static void publication_record(const struct published *g, const char *why)
{
	published_records_leases(g);
	if (g->state != PUBLISHED_EMPTY)
		published_records_generation(
			g, g->state == PUBLISHED_READY && publication_was_used(g), why);
}

/* @why: what it is freed for, for the records. */
static void publication_free_buffer(struct published *g, const char *why)
{
	struct publication_lease *l, *tmp;

	CHECK(g->state != PUBLISHED_MAKING);
	publication_record(g, why);
	list_for_each (l, tmp, &g->leases, link) {
		list_unlink(&l->link);
		l->g = NULL;
	}
	g->slab = slab_unref(g->slab);
	delta_free(&g->delta);
	g->assembly = assembly_unref(g->assembly);
	free(g->crc);
	g->crc = NULL;
	user_charge_deinit(&g->cost);
	if (g->state != PUBLISHED_READY)
		return;
	publication_move(g, PUBLISHED_EMPTY);
	publication_show(g->p); /* it may have been the newest one */
}

struct published *publication_newest(struct publication *p)
{
	struct published *newest = NULL;

	for (unsigned i = 0; i < p->n_buffers; i++) {
		struct published *g = &p->buffers[i];

		if (g->state == PUBLISHED_READY && (!newest || g->number > newest->number))
			newest = g;
	}
	return newest;
}

struct published *publication_numbered(struct publication *p, uint64_t number)
{
	for (unsigned i = 0; i < p->n_buffers; i++)
		if (p->buffers[i].state == PUBLISHED_READY && p->buffers[i].number == number)
			return &p->buffers[i];
	return NULL;
}

/* How many generations are newer. */
static unsigned publication_age(const struct publication *p, const struct published *g)
{
	unsigned newer = 0;

	for (unsigned i = 0; i < p->n_buffers; i++)
		newer += p->buffers[i].state == PUBLISHED_READY && p->buffers[i].number > g->number;
	return newer;
}

/* The oldest generation that nobody has leased, of those that have at least @age newer ones. */
static struct published *publication_oldest(struct publication *p, unsigned age)
{
	struct published *oldest = NULL;

	for (unsigned i = 0; i < p->n_buffers; i++) {
		struct published *g = &p->buffers[i];

		if (g->state == PUBLISHED_READY && publication_age(p, g) >= age &&
		    (!oldest || g->number < oldest->number) && !publication_is_used(g))
			oldest = g;
	}
	return oldest;
}

/* A buffer for the next generation. Those with memory first. NULL: there is none. */
static struct published *publication_find_buffer(struct publication *p)
{
	struct published *g = publication_oldest(p, published_policy_keep(publication_declared(p)));

	for (unsigned i = 0; i < p->n_buffers && !g; i++)
		if (p->buffers[i].state == PUBLISHED_EMPTY)
			g = &p->buffers[i];
	if (g || publication_declared(p)->when_full > PUBLICATION_DROPS)
		return g;
	return publication_oldest(p, 1);
}

static struct board_payer publication_payer(struct publication *p, const struct assembly *a)
{
	return (struct board_payer){ a->device, &p->job->quota, p->job->rec->name };
}

/* Is the memory of its generations that of a GPU? */
static bool publication_is_on_gpu(const struct publication *p)
{
	return backend_info(p->assembly->device->backend)->order != BACKEND_ORDER_NONE;
}

/* The tables of a GPU, and the buffer's memory there. A GPU makes both at the same time. */
static int publication_take_slabs_once(struct publication *p, struct published *g)
{
	struct board_payer payer = publication_payer(p, p->assembly);
	bool later = false;
	int r = 0;

	if (publication_is_on_gpu(p))
		r = slab_note_later(assembly_take_tables(p->assembly, &payer), &later);
	if (r == 0 && !g->slab)
		r = slab_note_later(slab_new(payer.device, payer.quota, MEM_PUBLISHED,
					     job_share(p->job), p->assembly->bytes, payer.job, -1,
					     &g->slab),
				    &later);
	if (r == 0 && g->slab && !g->slab->exported)
		r = backend_seal(payer.device->backend, g->slab->mem);
	return r == 0 && later ? SLAB_E_LATER : r;
}

/* On a GPU deltas have room in the tables: generations without deltas are better than none. */
static int publication_take_slabs(struct publication *p, struct published *g)
{
	uint64_t room = publication_is_on_gpu(p) ? p->assembly->delta_room : 0;
	int r = publication_take_slabs_once(p, g);

	if (r == 0 || r == SLAB_E_LATER || !room)
		return r;
	assembly_set_delta_room(p->assembly, 0);
	r = publication_take_slabs_once(p, g);
	if (r != 0 && r != SLAB_E_LATER)
		assembly_set_delta_room(p->assembly, room); /* that was not it */
	return r;
}

/* A checksum for each block. Return: 0 or a fault code. */
static int publication_take_crc(struct publication *p, struct published *g, struct fault *f)
{
	size_t n = (size_t)p->assembly->n_blocks + 1;

	if (g->crc)
		return 0;
	if (user_charge(&g->cost, p->job->owner.user, USER_MEMORY, n * sizeof(*g->crc), f))
		return f->code;
	g->crc = calloc(n, sizeof(*g->crc));
	return g->crc ? 0
		      : (int)fault_set(f, FAULT_EXHAUSTED, NULL,
				       "no memory for the checksums of a generation of publication "
				       "'%s', %zu bytes",
				       publication_declared(p)->name, n * sizeof(*g->crc));
}

/* Memory for a generation of the present assembly. Return: 0 or a fault code. @later: ask again: the device makes it. */
static int publication_take_memory(struct publication *p, struct published *g, bool *later,
				   struct fault *f)
{
	struct job *job = p->job;
	int r = 0;

	if (g->assembly != p->assembly) {
		publication_free_buffer(g, "the units have changed");
		g->assembly = assembly_ref(p->assembly);
	}
	if (publication_take_crc(p, g, f)) {
		publication_free_buffer(g, "there is no memory");
		return f->code;
	}
	r = publication_take_slabs(p, g);
	*later = r == SLAB_E_LATER;
	if (!r || *later)
		return 0;
	publication_free_buffer(g, "there is no memory");
	return fault_set(f, FAULT_EXHAUSTED, NULL,
			 "job '%s' has no memory for a generation of publication '%s', %" PRIu64
			 " bytes: raise its quota or memory_bytes, or publish less",
			 job->rec->name, publication_declared(p)->name, p->assembly->bytes);
}

/* ------------------------------------------------------------------------------- waits */

void publication_await(struct publication *p, struct publication_wait *w)
{
	list_init(&w->link);
	list_append(&p->waits, &w->link);
}

void publication_leave(struct publication_wait *w)
{
	list_unlink(&w->link);
}

static void publication_answer(struct publication_wait *w, const struct fault *f)
{
	list_unlink(&w->link);
	w->done(w, f);
}

/* An answer may lead to others: the caller's session first runs what it has submitted, which may commit.
 * So none is told before all that are due are out of the publication's list. */
static void publication_answer_all(struct list *due, const struct fault *f)
{
	while (!list_empty(due))
		publication_answer(list_first(due, struct publication_wait, link), f);
}

static void publication_take_wait(struct publication_wait *w, struct list *due)
{
	list_unlink(&w->link);
	list_append(due, &w->link);
}

/* There is a new generation. */
static void publication_tell_made(struct publication *p, const struct published *g)
{
	struct publication_wait *w, *tmp;
	struct list due = LIST_INIT(due);

	list_for_each (w, tmp, &p->waits, link)
		if (g->number > w->newer_than)
			publication_take_wait(w, &due);
	publication_answer_all(&due, NULL);
}

/* There will be none now: those who have asked for it are told. @all: the others, too. */
static void publication_tell_fault(struct publication *p, const struct fault *f, bool all)
{
	struct publication_wait *w, *tmp;
	struct list due = LIST_INIT(due);

	list_for_each (w, tmp, &p->waits, link)
		if (all || w->asks)
			publication_take_wait(w, &due);
	publication_answer_all(&due, f);
}

/* ------------------------------------------------------------------------------ making */

/* The one that was wanted is begun, or not made. */
static void publication_unwant(struct publication *p)
{
	if (p->waits_since_us)
		p->counts.waited_us += clock_now_us() - p->waits_since_us;
	p->waits_since_us = 0;
	p->wanted = false;
}

static void publication_fail(struct publication *p, const struct fault *f)
{
	publication_unwant(p);
	p->counts.failed++;
	published_records_failed(p, f->text);
	if (strcmp(p->why, f->text) != 0)
		log_warn("job", "generation not made job=%s publication=%s why=\"%s\"",
			 p->job->label, publication_declared(p)->name, f->text);
	snprintf(p->why, sizeof(p->why), "%.255s", f->text);
	publication_tell_fault(p, f, false);
}

/* Publications that are declared after it, perhaps under its name, have larger numbers. */
static void publication_note_end(const struct publication *p)
{
	struct jobs_published *all = &p->job->jobs->published;

	if (p->number > all->next)
		all->next = p->number;
}

static void publication_free(struct publication *p)
{
	CHECK(!p->making_at && list_empty(&p->waits));
	publication_end_board(p);
	for (unsigned i = 0; i < p->n_buffers; i++)
		publication_free_buffer(&p->buffers[i], "the job ends");
	assembly_unref(p->assembly);
	user_charge_deinit(&p->cost);
	list_unlink(&p->link);
	free(p);
}

static uint32_t publication_checksum(const struct published *g)
{
	uint32_t sum = 0;

	for (uint32_t i = 0; i < g->assembly->n_blocks; i++) {
		uint8_t le[4];

		for (unsigned b = 0; b < sizeof(le); b++)
			le[b] = (uint8_t)(g->crc[i] >> 8 * b);
		sum = crc32c_add(sum, le, sizeof(le));
	}
	return sum;
}

static struct delta_end publication_end_of(const struct published *g)
{
	return (struct delta_end){ g->number, g->step, g->checksum };
}

/* The blocks of its delta are made, too, if there is one. */
static void publication_finish_delta(struct publication *p, struct published *g)
{
	const struct delta_end made = publication_end_of(g);

	if (!p->making.delta)
		return;
	if (delta_finish(&g->delta, g->assembly, &p->base, &made)) {
		p->counts.deltas++;
		p->counts.delta_bytes += g->delta.bytes;
		p->counts.delta_us += g->made_us - g->began_us;
	} else {
		p->counts.not_deltas++;
	}
	p->counts.changed += g->delta.changed;
	p->counts.compared += g->delta.elements;
}

static void publication_is_made(struct publication *p, struct published *g)
{
	publication_move(g, PUBLISHED_READY);
	g->made_us = clock_now_us();
	g->checksum = publication_checksum(g);
	publication_finish_delta(p, g);
	g->leased = 0;
	p->counts.made++;
	p->counts.bytes += g->assembly->bytes;
	p->counts.made_us += g->made_us - g->began_us;
	p->why[0] = '\0';
	publication_write(g);
	publication_show(p);
	publication_tell_made(p, g);
}

static void publication_is_not_made(struct published *g, int status)
{
	publication_record(g, status == -ECANCELED ? "cancelled" : "the device failed");
	publication_move(g, PUBLISHED_EMPTY);
}

static void publication_on_made(struct making *m, int status)
{
	struct publication *p = CONTAINER_OF(m, struct publication, making);
	struct published *g = p->making_at;
	struct job *job = p->job;
	struct fault f = FAULT_NULL;

	p->making_at = NULL;
	if (status == 0 && !p->gone)
		publication_is_made(p, g);
	else
		publication_is_not_made(g, status);
	if (status && status != -ECANCELED && !p->gone) {
		fault_errno(&f, status, "making a generation");
		publication_fail(p, &f);
	}
	if (p->gone)
		publication_free(p);
	else
		publication_go(p);
	readers_go_on(job);
}

static void publication_on_ordered(struct making *m)
{
	readers_go_on(m->job);
}

/* For the flight recorder. */
static void publication_on_submit(struct making *m, struct backend_task *task)
{
	struct publication *p = CONTAINER_OF(m, struct publication, making);

	device_note_task(&p->note, m->backend, task);
}

/* No generation of an earlier daemon had it. */
static uint64_t publication_take_number(struct publication *p)
{
	uint64_t number = p->number ? p->number : p->rec->next ? p->rec->next : 1;

	if (number >= p->rec->next) {
		p->rec->next = number + PUBLICATION_NUMBERS;
		job_journal_mark(p->job, JOB_JOURNAL_HEAD);
		job_journal_write(p->job);
	}
	p->number = number + 1;
	return number;
}

/* Begin the delta from the newest generation to @g, if one is declared and can be. Return: NULL: there is none. */
static const struct k_delta *publication_begin_delta(struct publication *p, struct published *g)
{
	const view_declaration *d = publication_declared(p);
	const struct published *base = publication_newest(p);
	struct board_payer payer =
		publication_is_on_gpu(p) ? publication_pages(p) : publication_payer(p, g->assembly);

	delta_clear(&g->delta);
	if (!d->delta_percent || !base || base->assembly != g->assembly ||
	    (d->full_every && g->number % d->full_every == 0))
		return NULL;
	if ((publication_is_on_gpu(p) && !g->assembly->delta_room) ||
	    delta_begin(&g->delta, g->assembly, &payer, backend_addr(base->slab->mem),
			backend_addr(g->slab->mem)) < 0) {
		p->counts.not_deltas++;
		return NULL;
	}
	p->base = publication_end_of(base);
	return &g->delta.kernel;
}

/* What it makes is made with the tables in the device's memory. */
static void publication_use_tables(struct publication *p, struct assembly *a)
{
	p->making.tables = &a->tables;
	p->making.tensors = a->tables.tensors;
	p->making.n_fences = assembly_others(a, p->job, p->making.fences);
}

static void publication_begin(struct publication *p, struct published *g)
{
	struct assembly *a = p->assembly;

	if (g->state == PUBLISHED_READY && !publication_was_used(g))
		p->counts.dropped++;
	publication_record(g, "");
	publication_unwant(p);
	publication_move(g, PUBLISHED_MAKING);
	g->number = publication_take_number(p);
	g->step = p->job->rec->step;
	g->commit = p->job->readers.commits;
	g->began_us = clock_now_us();
	p->making_at = g;
	p->making = (struct making){ .job = p->job,
				     .backend = g->slab->device->backend,
				     .tensors = a->tensors,
				     .base = (uintptr_t)backend_addr(g->slab->mem),
				     .crc = g->crc,
				     .moves = a->moves,
				     .delta = publication_begin_delta(p, g),
				     .done = publication_on_made,
				     .orders = publication_on_ordered,
				     .submits = publication_on_submit };
	p->note = (struct device_note){ .name = "Publish",
					.job = p->job,
					.what = publication_declared(p)->name,
					.number = g->number };
	if (publication_is_on_gpu(p))
		publication_use_tables(p, a);
	assembly_passes(a, p->making.passes);
	making_begin(&p->making);
}

/* Memory of the daemon that it takes, without assemblies and checksums. */
static uint64_t publication_own_bytes(const struct publication *p)
{
	return sizeof(*p) + shardd__v1__publication__get_packed_size(publication_declared(p));
}

/* A number that no other layout has, of any daemon: readers keep lists of tensors by it. */
static uint64_t publication_take_layout(struct jobs *jobs)
{
	uint64_t *layouts = &jobs->published.layouts;

	if (!*layouts && getrandom(layouts, sizeof(*layouts), 0) != (ssize_t)sizeof(*layouts))
		*layouts = clock_unix_us();
	*layouts &= PUBLICATION_LAYOUTS;
	return ++*layouts;
}

static bool publication_fits(const struct publication *p)
{
	return p->assembly && p->units == readers_generation(p->job);
}

/* The assembly is of the units as they are. Return: 0 or a fault code. */
static int publication_fit(struct publication *p, struct fault *f)
{
	uint64_t units = readers_generation(p->job);
	struct assembly *a;

	if (publication_fits(p))
		return 0;
	if (assembly_new(p->job, publication_declared(p), &a, f))
		return f->code;
	assembly_unref(p->assembly);
	a->layout = publication_take_layout(p->job->jobs);
	p->assembly = a;
	p->units = units;
	return 0;
}

/* Has its owner's turn to have an assembly made come? Each commit and each request may ask for one, and the loop makes
 * it. */
static bool publication_may_fit(const struct publication *p)
{
	return publication_fits(p) ||
	       user_turn_has_come(p->job->owner.user, USER_TURN_TABLES, clock_now_us());
}

/* As publication_fit, in a turn of its owner. */
static int publication_fit_in_turn(struct publication *p, struct fault *f)
{
	uint64_t began_us = clock_now_us();
	int r;

	if (publication_fits(p))
		return 0;
	r = publication_fit(p, f);
	user_turn_took(p->job->owner.user, USER_TURN_TABLES, began_us, clock_now_us());
	return r;
}

static void publication_skip(struct publication *p, const char *why)
{
	publication_unwant(p);
	p->counts.skipped++;
	published_records_skipped(p, why);
}

/* Does it wait for a buffer, or go on to? With WAIT not for too long. With DROP_OLDEST one that is due is made as soon
 * as a reader gives a buffer back, unless another commit comes first: so that readers get the last step of a training,
 * too. */
static bool publication_waits(struct publication *p)
{
	const view_declaration *d = publication_declared(p);
	uint64_t now_us = clock_now_us();

	if (d->when_full == SHARDD__V1__PUBLISHED_WHEN_FULL__PUBLISHED_WHEN_FULL_WAIT) {
		if (p->waits_since_us &&
		    now_us - p->waits_since_us >= published_policy_wait_us(d)) {
			p->counts.expired++;
			return false;
		}
	} else if (d->when_full > PUBLICATION_DROPS || !d->every_steps) {
		return false;
	}
	if (!p->waits_since_us) {
		p->counts.waits++;
		p->waits_since_us = now_us;
	}
	return true;
}

static void publication_is_full(struct publication *p)
{
	const view_declaration *d = publication_declared(p);
	struct fault f = FAULT_NULL;
	bool waits = publication_waits(p);

	if (waits && d->when_full > PUBLICATION_DROPS)
		return;
	if (!waits)
		publication_skip(p, "all buffers are in use");
	fault_set(&f, FAULT_EXHAUSTED, NULL,
		  "all %u buffers of publication '%s' of job '%s' are in use: a reader must "
		  "release its generation first (shardctl publications shows who has them)",
		  p->n_buffers, d->name, p->job->rec->name);
	publication_tell_fault(p, &f, false);
}

bool publication_is_current(struct publication *p)
{
	const struct published *g = publication_newest(p);

	return g && g->commit == p->job->readers.commits && readers_may_hold(p->job);
}

/* Begin to make one, if it is wanted and can be made now. */
void publication_go(struct publication *p)
{
	struct fault f = FAULT_NULL;
	struct published *g;
	bool later = false;

	if (!p->wanted || p->making_at || p->gone || p->job->life.deleted ||
	    !readers_may_hold(p->job))
		return;
	if (publication_is_current(p)) {
		publication_unwant(p);
		return;
	}
	if (!publication_may_fit(p)) /* it is asked for again at the next commit, or tick */
		return;
	if (publication_fit_in_turn(p, &f) || assembly_check_values(p->assembly, p->job, &f)) {
		publication_fail(p, &f);
		return;
	}
	g = publication_find_buffer(p);
	if (g) /* what it had is not told by the holds any more */
		published_records_look(p, clock_now_us());
	if (!g)
		publication_is_full(p);
	else if (publication_take_memory(p, g, &later, &f))
		publication_fail(p, &f);
	else if (!later) /* else it is asked for again at the next commit, or tick */
		publication_begin(p, g);
}

void publication_want(struct publication *p)
{
	p->wanted = true;
	publication_go(p);
}

/* -------------------------------------------------------------------- declare and drop */

struct publication *publication_find(const struct job *job, const char *name)
{
	struct publication *p, *tmp;

	list_for_each (p, tmp, &job->readers.publications, link)
		if (!p->gone && !strcmp(publication_declared(p)->name, name))
			return p;
	return NULL;
}

static struct publication *publication_new(struct job *job, state_published *rec)
{
	struct publication *p = calloc(1, sizeof(*p));

	if (!p)
		return NULL;
	p->job = job;
	p->rec = rec;
	p->n_buffers = published_policy_buffers(rec->declaration);
	p->since_unix_us = clock_unix_us();
	if (p->n_buffers > PUBLICATION_MAX_BUFFERS) /* of a daemon that allows more */
		p->n_buffers = PUBLICATION_MAX_BUFFERS;
	list_init(&p->waits);
	board_init(&p->board);
	list_init(&p->link);
	for (unsigned i = 0; i < p->n_buffers; i++) {
		p->buffers[i].p = p;
		list_init(&p->buffers[i].leases);
	}
	list_append(&job->readers.publications, &p->link);
	return p;
}

/* One that is made at commits has the last one's generation, too, if all that it reads was committed. */
static void publication_want_last(struct publication *p)
{
	struct fault f = FAULT_NULL;

	if (publication_declared(p)->every_steps && p->job->rec->has_commit &&
	    assembly_check_values(p->assembly, p->job, &f) == 0)
		publication_want(p);
}

static unsigned publication_count(const struct job *job)
{
	const struct publication *p, *tmp;
	unsigned n = 0;

	list_for_each (p, tmp, &job->readers.publications, link)
		n++;
	return n;
}

static int publication_add(struct job *job, const view_declaration *d, struct publication **ret,
			   struct fault *f)
{
	state_published *rec;
	struct publication *p;

	if (publication_count(job) >= PUBLICATIONS_MAX)
		return fault_set(
			f, FAULT_EXHAUSTED, NULL,
			"job '%s' has %u publications, the most that are possible: drop one",
			job->rec->name, PUBLICATIONS_MAX);
	rec = state_job_add_published(job->rec, d);
	if (!rec)
		return fault_errno(f, -ENOMEM, "a publication");
	rec->next = job->jobs->published.next;
	p = publication_new(job, rec);
	if (!p)
		fault_errno(f, -ENOMEM, "a publication");
	else if (user_charge(&p->cost, job->owner.user, USER_MEMORY, publication_own_bytes(p), f) ==
		 0)
		publication_fit(p, f);
	if (f->code) {
		if (p)
			publication_free(p);
		state_job_drop_published(job->rec, rec);
		return f->code;
	}
	job_journal_mark(job, JOB_JOURNAL_HEAD);
	job_journal_write(job); /* before the answer */
	publication_want_last(p);
	*ret = p;
	return 0;
}

int publication_declare(struct job *job, const view_declaration *d, struct publication **ret,
			struct fault *f)
{
	struct publication *p = publication_find(job, d->name);

	if (published_policy_check(d, PUBLICATION_MAX_BYTES, PUBLICATION_MAX_BUFFERS, f))
		return f->code;
	if (!p)
		return publication_add(job, d, ret, f);
	if (!view_is_same(publication_declared(p), d))
		return fault_set(
			f, FAULT_STATE, NULL,
			"publication '%s' of job '%s' is declared otherwise: drop it first, or "
			"give this one another name",
			d->name, job->rec->name);
	/* it may be of an earlier daemon, or of the units before */
	if (!p->making_at && publication_fit(p, f))
		return f->code;
	*ret = p;
	return 0;
}

void publication_drop(struct publication *p)
{
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_NOT_FOUND, NULL, "publication '%s' of job '%s' was dropped",
		  publication_declared(p)->name, p->job->rec->name);
	publication_tell_fault(p, &f, true);
	publication_note_end(p);
	publication_end_board(p);
	for (unsigned i = 0; i < p->n_buffers; i++)
		publication_record(&p->buffers[i], "the publication was dropped");
	state_job_drop_published(p->job->rec, p->rec);
	p->rec = NULL;
	job_journal_mark(p->job, JOB_JOURNAL_HEAD);
	job_journal_write(p->job);
	p->gone = true;
	if (p->making_at)
		making_cancel(&p->making);
	else
		publication_free(p);
}

/* ---------------------------------------------------------------------------- the job's */

/* Is one due at the step that was committed? */
static bool publication_is_due(struct publication *p)
{
	uint64_t every = publication_declared(p)->every_steps;
	const struct published *g = publication_newest(p);
	uint64_t step = p->job->rec->step;

	return every && (!g || step < g->step || step - g->step >= every);
}

void publications_committed(struct job *job)
{
	struct publication *p, *tmp;

	list_for_each (p, tmp, &job->readers.publications, link) {
		if (p->gone)
			continue;
		if (p->waits_since_us && publication_declared(p)->every_steps) {
			p->counts.skipped++; /* the one of the commit before */
			published_records_skipped(p,
						  "all buffers were in use until the next commit");
		}
		p->wanted |= publication_is_due(p);
		publication_go(p);
	}
}

/* What a wait for a generation waits for, in words; "" for what cannot be told. */
static void publication_wait_for(struct publication *p, char *buf, size_t bytes)
{
	readers_wait_for(p->job, buf, bytes);
	if (!*buf && p->wanted && !p->making_at && !publication_find_buffer(p))
		snprintf(buf, bytes,
			 "a reader that releases one of its %u buffers, all of which are in use",
			 p->n_buffers);
	else if (!*buf && p->wanted && !p->making_at && !publication_may_fit(p))
		snprintf(buf, bytes,
			 "its tables, which take long to make of the units as they are now");
	else if (!*buf && !p->wanted && !p->making_at)
		snprintf(buf, bytes,
			 publication_declared(p)->every_steps
				 ? "the next commit that is due, or a request (PublishGeneration)"
				 : "a request (PublishGeneration): it is not made at commits");
}

static void publication_end_waits(struct publication *p, uint64_t now_us)
{
	struct publication_wait *w, *tmp;
	struct list due = LIST_INIT(due);
	char waits[256];

	list_for_each (w, tmp, &p->waits, link)
		if (w->deadline_us <= now_us)
			publication_take_wait(w, &due);
	while (!list_empty(&due)) {
		struct fault f = FAULT_NULL;

		w = list_first(&due, struct publication_wait, link);
		publication_wait_for(p, waits, sizeof(waits));
		fault_set(
			&f, FAULT_DEADLINE, NULL,
			"timed out waiting for a generation of publication '%s' newer than %" PRIu64
			"%s%s%s%s",
			publication_declared(p)->name, w->newer_than, *waits ? ", for " : "", waits,
			*p->why ? "; the last one was not made: " : "", p->why);
		publication_answer(w, &f);
	}
}

void publications_tick(struct job *job, uint64_t now_us)
{
	struct publication *p, *tmp;

	list_for_each (p, tmp, &job->readers.publications, link) {
		if (p->gone)
			continue;
		publication_end_waits(p, now_us);
		board_beat(&p->board);
		published_records_look(p, now_us);
		publication_go(p);
	}
}

int publications_restore(struct job *job, struct fault *f)
{
	for (size_t i = 0; i < job->rec->n_published; i++) {
		struct publication *p = publication_new(job, job->rec->published[i]);

		if (!p)
			return fault_errno(f, -ENOMEM, "restoring a publication");
		if (user_charge(&p->cost, job->owner.user, USER_MEMORY, publication_own_bytes(p),
				f))
			return f->code;
		p->wanted = publication_declared(p)->every_steps && job->rec->has_commit;
	}
	return 0;
}

void publications_end(struct job *job)
{
	struct publication *p, *tmp;
	struct fault f = FAULT_NULL;

	fault_set(&f, FAULT_NOT_FOUND, NULL, "job '%s' was deleted", job->rec->name);
	list_for_each (p, tmp, &job->readers.publications, link) {
		p->wanted = false;
		publication_note_end(p);
		publication_tell_fault(p, &f, true);
		if (p->making_at)
			making_cancel(&p->making);
	}
}

void publications_free(struct job *job)
{
	while (!list_empty(&job->readers.publications))
		publication_free(list_first(&job->readers.publications, struct publication, link));
}

static uint64_t publication_buffer_bytes(const struct published *g)
{
	return (g->slab ? g->slab->bytes : 0) + (g->delta.slab ? g->delta.slab->bytes : 0);
}

/* On a GPU. */
static uint64_t publication_tables_slab_bytes(const struct publication *p)
{
	const struct slab *slab = p->assembly ? p->assembly->tables.slab : NULL;

	return slab ? slab->bytes : 0;
}

uint64_t publications_bytes(const struct job *job)
{
	const struct publication *p, *tmp;
	uint64_t bytes = 0;

	list_for_each (p, tmp, &job->readers.publications, link)
		for (unsigned i = 0; i < p->n_buffers; i++)
			bytes += publication_buffer_bytes(&p->buffers[i]);
	list_for_each (p, tmp, &job->readers.publications, link)
		bytes += board_bytes(&p->board) + publication_tables_slab_bytes(p);
	return bytes;
}
