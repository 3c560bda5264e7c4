#include "publish/board.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/check.h"
#include "mem/slab.h"

void board_init(struct board *b)
{
	*b = (struct board){ 0 };
	list_init(&b->readers);
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
	list_init(&r->link);
	list_init(&r->held);
	list_append(&b->readers, &r->link);
	*ret = r;
	return 0;
}

struct board_reader *board_close(struct board_reader *r)
{
	if (!r)
		return NULL;
	list_unlink(&r->link);
	list_unlink(&r->held);
	slab_unref(r->slab);
	user_charge_deinit(&r->cost);
	free(r);
	return NULL;
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

/* What is in the hold, added up: it changes with what is held. */
static uint64_t board_sum(const struct board_hold *h)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < BOARD_HOLDS; i++)
		sum += atomic_load(&h->newest[i]);
	return sum;
}

uint64_t board_reader_held_us(const struct board_reader *r, uint64_t now_us)
{
	return board_sum(r->hold) == r->since_of ? now_us - r->since_us : 0;
}

void board_beat(struct board *b, uint64_t now_us)
{
	struct board_reader *r, *tmp;

	if (b->page)
		atomic_fetch_add(&b->page->beat, 1);
	list_for_each (r, tmp, &b->readers, link) {
		uint64_t holds = board_sum(r->hold);

		if (holds != r->since_of) {
			r->since_of = holds;
			r->since_us = now_us;
		}
	}
}
