#include "publish/board.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/check.h"
#include "core/clock.h"
#include "mem/slab.h"

void board_init(struct board *b)
{
	*b = (struct board){ 0 };
	list_init(&b->readers);
	list_init(&b->closed);
}

/* --------------------------------------------------------------------------- memory */

static int board_take(const struct board_payer *payer, bool writable, struct slab **ret)
{
	int r = slab_new(payer->device, payer->quota, MEM_PUBLISHED, BACKEND_SHARE_FD,
			 sizeof(struct board_page), payer->job, -1, ret);

	if (r < 0)
		return r;
	(*ret)->writable = writable;
	if (!writable)
		r = backend_seal(payer->device->backend, (*ret)->mem);
	if (r < 0)
		*ret = slab_unref(*ret);
	return r;
}

int board_make(struct board *b, const struct board_payer *payer)
{
	int r = b->slab ? 0 : board_take(payer, false, &b->slab);

	if (r < 0 || b->page)
		return r;
	b->page = backend_addr(b->slab->mem);
	b->page->magic = BOARD_MAGIC;
	b->page->version = BOARD_VERSION;
	return 0;
}

uint64_t board_bytes(const struct board *b)
{
	const struct board_reader *r, *tmp;
	uint64_t bytes = b->slab ? b->slab->bytes : 0;

	list_for_each (r, tmp, (struct list *)(uintptr_t)&b->readers, link)
		bytes += r->slab->bytes;
	list_for_each (r, tmp, (struct list *)(uintptr_t)&b->closed, link)
		bytes += r->slab->bytes;
	return bytes;
}

/* -------------------------------------------------------------------------- readers */

int board_open(struct board *b, const struct board_payer *payer, struct board_reader **ret)
{
	struct board_reader *r = calloc(1, sizeof(*r));
	int e = r ? board_take(payer, true, &r->slab) : -ENOMEM;

	if (e < 0) {
		free(r);
		return e;
	}
	r->hold = backend_addr(r->slab->mem);
	r->opened_us = r->looked_us = clock_now_us();
	list_init(&r->link);
	list_init(&r->held);
	list_append(&b->readers, &r->link);
	*ret = r;
	return 0;
}

static void board_free_reader(struct board_reader *r)
{
	list_unlink(&r->link);
	list_unlink(&r->held);
	slab_unref(r->slab);
	user_charge_deinit(&r->cost);
	free(r);
}

/* Does a process have the page, or its descriptor? */
static bool board_reader_is_mapped(const struct board_reader *r)
{
	return r->slab && r->slab->exported &&
	       backend_is_held(r->slab->device->backend, r->slab->mem);
}

struct board_reader *board_close(struct board *b, struct board_reader *r)
{
	if (!r)
		return NULL;
	if (!b || !board_reader_is_mapped(r)) {
		board_free_reader(r);
		return NULL;
	}
	list_unlink(&r->link);
	list_unlink(&r->held);
	list_append(&b->closed, &r->link);
	return NULL;
}

void board_sweep(struct board *b)
{
	struct board_reader *r, *tmp;

	list_for_each (r, tmp, &b->closed, link)
		if (!board_reader_is_mapped(r))
			board_free_reader(r);
}

void board_end(struct board *b)
{
	struct board_reader *r, *tmp;

	list_for_each (r, tmp, &b->readers, link) {
		list_unlink(&r->link);
		r->p = NULL;
		r->hold = NULL;
		r->slab = slab_unref(r->slab);
	}
	while (!list_empty(&b->closed))
		board_free_reader(list_first(&b->closed, struct board_reader, link));
	if (b->page) {
		atomic_store(&b->page->over, 1);
		board_show(b, BOARD_NONE);
	}
	b->page = NULL;
	b->slab = slab_unref(b->slab);
}

/* ----------------------------------------------------------------------------- holds */

bool board_reader_holds(const struct board_reader *r, uint64_t word)
{
	for (unsigned i = 0; i < BOARD_HOLDS; i++)
		if (atomic_load(&r->hold->newest[i]) == word)
			return true;
	return false;
}

bool board_holds(const struct board *b, uint64_t word)
{
	const struct board_reader *r, *tmp;

	list_for_each (r, tmp, (struct list *)(uintptr_t)&b->readers, link)
		if (board_reader_holds(r, word))
			return true;
	return false;
}

bool board_reader_used(const struct board_reader *r, unsigned index, uint64_t number)
{
	return atomic_load(&r->hold->used[index]) == number;
}

bool board_was_used(const struct board *b, unsigned index, uint64_t number)
{
	const struct board_reader *r, *tmp;

	list_for_each (r, tmp, (struct list *)(uintptr_t)&b->readers, link)
		if (board_reader_used(r, index, number))
			return true;
	return false;
}

/* --------------------------------------------------------------------------- the board */

void board_write(struct board *b, unsigned index, const struct board_generation *g)
{
	if (b->page)
		b->page->generations[index] = *g;
}

void board_show(struct board *b, uint64_t word)
{
	if (!b->page)
		return;
	atomic_store(&b->page->newest, word);
	atomic_fetch_add(&b->page->changes, 1);
	(void)syscall(SYS_futex, &b->page->changes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void board_beat(struct board *b)
{
	if (b->page)
		atomic_fetch_add(&b->page->beat, 1);
	board_sweep(b);
}

/* ---------------------------------------------------------------------------- looking */

uint64_t board_reader_since(const struct board_reader *r, uint64_t word, uint64_t now_us)
{
	for (unsigned i = 0; i < BOARD_HOLDS; i++)
		if (r->seen[i].word == word)
			return r->seen[i].since_us;
	return now_us;
}

/* A place of the hold has @word now. */
static void board_reader_see(struct board_reader *r, struct board_seen *seen, uint64_t word,
			     uint64_t now_us, board_use_cb ended)
{
	const struct board_use use = { .index = (unsigned)(seen->word % BOARD_BUFFERS),
				       .number = seen->word / BOARD_BUFFERS,
				       .began_us = seen->since_us,
				       .ended_us = now_us };

	if (word == seen->word)
		return;
	if (seen->word != BOARD_NONE)
		ended(r, &use);
	*seen = (struct board_seen){ word, now_us };
}

/* Which one of buffer @i it has used last. What it was seen to hold, before or now, is told by that. */
static void board_reader_see_used(struct board_reader *r, unsigned i,
				  const struct board_seen *before, uint64_t now_us,
				  board_use_cb ended)
{
	const struct board_use use = { .index = i,
				       .number = atomic_load(&r->hold->used[i]),
				       .began_us = r->looked_us,
				       .ended_us = now_us,
				       .is_between = true };
	const uint64_t word = board_word(use.number, i);

	if (use.number == r->used[i])
		return;
	r->used[i] = use.number;
	for (unsigned k = 0; k < BOARD_HOLDS; k++)
		if (before[k].word == word || r->seen[k].word == word)
			return;
	ended(r, &use);
}

static void board_reader_look(struct board_reader *r, uint64_t now_us, board_use_cb ended)
{
	struct board_seen before[BOARD_HOLDS];

	memcpy(before, r->seen, sizeof(before));
	for (unsigned i = 0; i < BOARD_HOLDS; i++)
		board_reader_see(r, &r->seen[i], atomic_load(&r->hold->newest[i]), now_us, ended);
	for (unsigned i = 0; i < BOARD_BUFFERS; i++)
		board_reader_see_used(r, i, before, now_us, ended);
	r->looked_us = now_us;
}

void board_look(struct board *b, uint64_t now_us, board_use_cb ended)
{
	struct board_reader *r, *tmp;

	list_for_each (r, tmp, &b->readers, link)
		board_reader_look(r, now_us, ended);
}

void board_reader_end(struct board_reader *r, uint64_t now_us, board_use_cb ended)
{
	board_reader_look(r, now_us, ended);
	for (unsigned i = 0; i < BOARD_HOLDS; i++)
		board_reader_see(r, &r->seen[i], BOARD_NONE, now_us, ended);
}
