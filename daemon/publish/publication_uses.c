/* Uses of generations: leases, and holds of readers by the board. */
#include <stdlib.h>

#include "core/check.h"
#include "core/clock.h"
#include "job/readers.h"
#include "mem/slab.h"
#include "publish/publication_impl.h"
#include "publish/published_records.h"

static_assert(BOARD_BUFFERS == PUBLICATION_MAX_BUFFERS, "a buffer has a place in the board");

/* ------------------------------------------------------------------------------ leases */

struct publication_lease *publication_lease(struct published *g)
{
	struct publication_lease *l = calloc(1, sizeof(*l));

	CHECK(g->state == PUBLISHED_READY);
	if (!l)
		return NULL;
	l->g = g;
	l->since_us = clock_now_us();
	list_init(&l->link);
	list_init(&l->held);
	list_append(&g->leases, &l->link);
	g->leased++;
	return l;
}

struct publication_lease *publication_release(struct publication_lease *l)
{
	struct published *g = l ? l->g : NULL;

	if (g)
		published_records_lease(l);
	if (l) {
		list_unlink(&l->link);
		list_unlink(&l->held);
	}
	free(l);
	if (g)
		publication_go(g->p); /* one that waits for a buffer */
	return NULL;
}

/* ----------------------------------------------------------------------------- readers */

static unsigned publication_uses_index(const struct published *g)
{
	return (unsigned)(g - g->p->buffers);
}

static uint64_t publication_uses_word(const struct published *g)
{
	return board_word(g->number, publication_uses_index(g));
}

bool publication_reader_holds(const struct board_reader *r, const struct published *g)
{
	return board_reader_holds(r, publication_uses_word(g));
}

bool publication_was_used(const struct published *g)
{
	return g->leased || board_was_used(&g->p->board, publication_uses_index(g), g->number);
}

uint64_t publication_reader_since(const struct board_reader *r, const struct published *g,
				  uint64_t now_us)
{
	return board_reader_since(r, publication_uses_word(g), now_us);
}

bool publication_is_used(const struct published *g)
{
	return !list_empty(&g->leases) || board_holds(&g->p->board, publication_uses_word(g));
}

void publication_write(const struct published *g)
{
	const struct board_generation shown = { .number = g->number,
						.step = g->step,
						.layout = g->assembly->layout,
						.bytes = g->assembly->bytes,
						.slab = g->slab->id,
						.checksum = g->checksum,
						.delta_base = g->delta.base,
						.delta = g->delta.made ? g->delta.slab->id : 0 };

	board_write(&g->p->board, publication_uses_index(g), &shown);
}

/* The newest one is another one. */
void publication_show(struct publication *p)
{
	const struct published *g = publication_newest(p);

	board_show(&p->board, g ? publication_uses_word(g) : BOARD_NONE);
}

/* The memory of boards and holds is charged to the job, unless it is on GPUs: its quota is of their memory then. */
struct board_payer publication_pages(struct publication *p)
{
	struct device *d = node_pages(p->job->node);

	return (struct board_payer){ d, d == &p->job->node->devices[0] ? &p->job->quota : &d->quota,
				     p->job->rec->name };
}

/* The board is made for the first reader. */
static int publication_uses_make_board(struct publication *p, const struct board_payer *payer)
{
	bool is_there = p->board.page;
	int r = board_make(&p->board, payer);

	if (r < 0 || is_there)
		return r;
	for (unsigned i = 0; i < p->n_buffers; i++)
		if (p->buffers[i].state == PUBLISHED_READY)
			publication_write(&p->buffers[i]);
	publication_show(p);
	return 0;
}

/* Of user @uid, and @ret_all: of everybody. */
static unsigned publication_uses_count(const struct list *readers, uid_t uid, unsigned *ret_all)
{
	const struct board_reader *r, *tmp;
	unsigned of_user = 0;

	list_for_each (r, tmp, (struct list *)(uintptr_t)readers, link) {
		(*ret_all)++;
		of_user += r->uid == uid;
	}
	return of_user;
}

static int publication_uses_check_readers(struct publication *p, uid_t uid, struct fault *f)
{
	unsigned all = 0, of_user;

	board_sweep(&p->board);
	of_user = publication_uses_count(&p->board.readers, uid, &all);
	of_user += publication_uses_count(&p->board.closed, uid, &all);
	if (all >= PUBLICATION_MAX_READERS)
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "publication '%s' of job '%s' has %u readers, the most that are "
				 "possible: close some, and unmap their pages",
				 p->rec->declaration->name, p->job->rec->name, all);
	if (uid != p->job->rec->uid && of_user >= PUBLICATION_MAX_OTHERS)
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "uid %u has %u readers of publication '%s', the most that are "
				 "possible for a user who does not own the job: close some, and "
				 "unmap their pages",
				 (unsigned)uid, of_user, p->rec->declaration->name);
	return 0;
}

/* A hold stays for as long as a process has it mapped. So it is one of the slabs of the reader's user: the
 * owner's would be taken by readers that come and go. Return: 0 or FAULT_EXHAUSTED. */
static int publication_uses_charge_hold(struct board_reader *r, struct user *payer, struct fault *f)
{
	if (!payer)
		return 0;
	user_charge_deinit(&r->slab->cost);
	return user_charge(&r->slab->cost, payer, USER_SLABS, 1, f);
}

int publication_open_reader(struct publication *p, struct user *payer, uid_t uid,
			    struct board_reader **ret, struct fault *f)
{
	struct job *job = p->job;
	struct board_payer pages = publication_pages(p);
	struct board_reader *r;

	if (publication_uses_check_readers(p, uid, f))
		return f->code;
	if (publication_uses_make_board(p, &pages) < 0 || board_open(&p->board, &pages, &r) < 0)
		return fault_set(f, FAULT_EXHAUSTED, NULL,
				 "job '%s' has no memory for one more reader of publication '%s': "
				 "raise its quota or memory_bytes, or close readers",
				 job->rec->name, p->rec->declaration->name);
	if (user_charge(&r->cost, payer, USER_MEMORY, sizeof(*r), f) ||
	    publication_uses_charge_hold(r, payer, f)) {
		board_close(NULL, r);
		return f->code;
	}
	r->p = p;
	r->uid = uid;
	*ret = r;
	return 0;
}

/* What it has used is not told by anybody else any more. */
static void publication_uses_note_reader(struct publication *p, struct board_reader *r)
{
	published_records_reader(r);
	for (unsigned i = 0; i < p->n_buffers; i++)
		p->buffers[i].leased += p->buffers[i].state == PUBLISHED_READY &&
					board_reader_used(r, i, p->buffers[i].number);
}

void publication_end_board(struct publication *p)
{
	struct board_reader *r, *tmp;

	list_for_each (r, tmp, &p->board.readers, link)
		publication_uses_note_reader(p, r);
	board_end(&p->board);
}

struct board_reader *publication_close_reader(struct board_reader *r)
{
	struct publication *p = r ? r->p : NULL;

	if (p)
		publication_uses_note_reader(p, r);
	board_close(p ? &p->board : NULL, r);
	if (p)
		publication_go(p);
	return NULL;
}

struct slab *publication_slab_for(const struct board_reader *r, uint32_t id)
{
	if (!r->p)
		return NULL;
	if (r->slab->id == id)
		return r->slab;
	if (r->p->board.slab->id == id)
		return r->p->board.slab;
	for (unsigned i = 0; i < r->p->n_buffers; i++) {
		const struct published *g = &r->p->buffers[i];

		if (g->state == PUBLISHED_READY && g->slab->id == id)
			return g->slab;
		if (g->state == PUBLISHED_READY && g->delta.made && g->delta.slab->id == id)
			return g->delta.slab;
	}
	return NULL;
}
