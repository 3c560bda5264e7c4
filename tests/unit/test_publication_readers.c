/*
 * Readers of a publication: the board, the holds that keep a buffer, and the deltas that they apply.
 */
#include "delta_abi.h"
#include "pubfix.h"

TestSuite(publication_readers, .init = begin, .fini = end, .timeout = 60);

/* ------------------------------------------------------------------------------- the board */

static struct board_reader *open_reader(struct publication *p)
{
	struct board_reader *r = NULL;
	struct fault f = FAULT_NULL;

	cr_assert_eq(publication_open_reader(p, NULL, job->rec->uid, &r, &f), 0, "%s", f.text);
	return r;
}

/* As a reader takes the newest generation. */
static const struct board_generation *hold(struct board_reader *r, unsigned slot)
{
	const struct board_page *page = r->p->board.page;
	uint64_t word = atomic_load(&page->newest);
	const struct board_generation *g = &page->generations[word % BOARD_BUFFERS];

	cr_assert_neq(word, BOARD_NONE);
	atomic_store(&r->hold->newest[slot], word);
	atomic_store(&r->hold->used[word % BOARD_BUFFERS], g->number);
	cr_assert_eq(g->number, word / BOARD_BUFFERS);
	return g;
}

Test(publication_readers, the_board_shows_the_newest_generation)
{
	struct publication *p = declare();
	struct board_reader *r;
	struct published *g;
	const struct board_generation *shown;
	uint32_t changes;

	train(1);
	cr_assert_eq(newest(p), 1);
	r = open_reader(p); /* it comes after the first generation */
	g = publication_newest(p);
	shown = hold(r, 0);
	cr_assert_eq(shown->step, 1);
	cr_assert_eq(shown->slab, g->slab->id);
	cr_assert_eq(shown->layout, g->assembly->layout);
	cr_assert_eq(shown->checksum, g->checksum);
	cr_assert_eq(shown->bytes, g->assembly->bytes);
	cr_assert_eq(publication_slab_for(r, g->slab->id), g->slab);
	cr_assert_eq(publication_slab_for(r, p->board.slab->id), p->board.slab);
	cr_assert_eq(publication_slab_for(r, r->slab->id), r->slab);
	cr_assert_null(publication_slab_for(r, u->parts[0].params.slab->id), "masters");
	changes = atomic_load(&p->board.page->changes);
	train(2);
	cr_assert_eq(newest(p), 2);
	cr_assert_gt(atomic_load(&p->board.page->changes), changes);
	cr_assert_eq(hold(r, 1)->step, 2);
	cr_assert_eq(memory(), publications_bytes(job));
	publication_close_reader(r);
	cr_assert_eq(memory(), publications_bytes(job));
}

Test(publication_readers, a_held_generation_stays_as_it_is)
{
	struct publication *p = declare(); /* 3 buffers */
	struct board_reader *r = open_reader(p);
	static float before[ELEMENTS];
	struct published *g;

	train(1);
	cr_assert_eq(newest(p), 1);
	g = publication_newest(p);
	hold(r, 0);
	memcpy(before, committed, sizeof(before));
	for (uint64_t step = 2; step < 8; step++) {
		train(step);
		cr_assert_eq(newest(p), step);
		cr_assert_eq(g->number, 1);
		cr_assert_arr_eq(elements(g), before, sizeof(before));
	}
	cr_assert_eq(p->counts.dropped, 4);
	hold(r, 1); /* both of its slots count */
	train(8);
	cr_assert_eq(newest(p), 8, "the third buffer");
	train(9);
	cr_assert_eq(newest(p), 8);
	atomic_store(&r->hold->newest[0], BOARD_NONE);
	publications_tick(job, clock_now_us()); /* nobody says that a hold has ended */
	cr_assert_eq(newest(p), 9);
	cr_assert_eq(publication_newest(p)->step, 9);
	cr_assert_eq(p->counts.skipped, 0);
	cr_assert_neq(g->number, 1, "its buffer was used again");
	publication_close_reader(r);
}

/* Any word: what is no generation's keeps nothing, and one that is keeps its buffer. */
Test(publication_readers, a_hold_may_have_anything)
{
	struct publication *p = declare();
	struct board_reader *r = open_reader(p);

	for (uint64_t step = 1; step < 40; step++) {
		memset(r->hold, (int)(step * 37), sizeof(*r->hold));
		atomic_store(&r->hold->newest[0], step * 7919 % 200);
		board_beat(&p->board, step);
		train(step);
		cr_assert_eq(newest(p), step);
	}
	publication_close_reader(r);
}

Test(publication_readers, readers_are_bounded)
{
	struct publication *p = declare();
	struct board_reader *r[PUBLICATION_MAX_OTHERS], *one;
	struct fault f = FAULT_NULL;
	uid_t other = job->rec->uid + 1;

	for (unsigned i = 0; i < PUBLICATION_MAX_OTHERS; i++)
		cr_assert_eq(publication_open_reader(p, NULL, other, &r[i], &f), 0, "%s", f.text);
	cr_assert_eq(publication_open_reader(p, NULL, other, &one, &f), FAULT_EXHAUSTED);
	one = open_reader(p); /* the owner */
	publication_close_reader(r[0]);
	f = FAULT_NULL;
	cr_assert_eq(publication_open_reader(p, NULL, other, &r[0], &f), 0, "%s", f.text);
	for (unsigned i = 0; i < PUBLICATION_MAX_OTHERS; i++)
		publication_close_reader(r[i]);
	publication_close_reader(one);
}

/* Its page stays for as long as a process has it mapped. */
Test(publication_readers, a_page_is_one_of_the_slabs_of_the_readers_user)
{
	struct publication *p = declare();
	struct user *other = users_get(job->owner.user->users, job->rec->uid + 1, NULL, 0);
	uint64_t owners = job->owner.user->used[USER_SLABS];
	struct board_reader *r;
	struct fault f = FAULT_NULL;

	cr_assert(other);
	other->most[USER_SLABS] = 1;
	cr_assert_eq(publication_open_reader(p, other, other->uid, &r, &f), 0, "%s", f.text);
	cr_assert_eq(other->used[USER_SLABS], 1);
	cr_assert_eq(job->owner.user->used[USER_SLABS], owners + 1, "the board");
	cr_assert_eq(publication_open_reader(p, other, other->uid, &r, &f), FAULT_EXHAUSTED);
	cr_assert_eq(other->used[USER_SLABS], 1);
	publication_close_reader(list_first(&p->board.readers, struct board_reader, link));
	cr_assert_eq(other->used[USER_SLABS], 0);
	user_unref(other);
}

Test(publication_readers, a_board_ends_with_its_publication)
{
	struct publication *p = declare();
	struct board_reader *r = open_reader(p);
	struct slab *board = slab_ref(p->board.slab);
	const struct board_page *page = p->board.page;

	train(1);
	cr_assert_eq(newest(p), 1);
	hold(r, 0);
	publication_drop(p);
	cr_assert_null(r->p);
	cr_assert_null(publication_slab_for(r, 1));
	cr_assert_eq(atomic_load(&page->over), 1);
	cr_assert_eq(atomic_load(&page->newest), BOARD_NONE);
	slab_unref(board);
	cr_assert_eq(memory(), 0);
	publication_close_reader(r);
}

/* ------------------------------------------------------------------------------- deltas */

/* What the delta of @g makes of @base, whose tensor is of fp32. */
static void apply(const struct published *g, float *base)
{
	const struct delta_head *head = backend_addr(g->delta.slab->mem);
	const struct delta_block *blocks = (const struct delta_block *)(head + 1);
	const char *payload = (const char *)head + head->payload;

	for (uint64_t i = 0; i < head->blocks; i++) {
		const char *at = payload + blocks[i].at;
		uint64_t values = blocks[i].dense ? 0 : delta_padded(2ull * blocks[i].changed);

		cr_assert_eq(crc32c_add(0, at, delta_block_bytes(&blocks[i])), blocks[i].crc);
		for (uint32_t k = 0; k < (blocks[i].dense ? blocks[i].n : blocks[i].changed); k++) {
			uint16_t position = (uint16_t)k;

			if (!blocks[i].dense)
				memcpy(&position, at + 2ull * k, sizeof(position));
			memcpy(&base[blocks[i].first + position], at + values + 4ull * k, 4);
		}
	}
}

/* Every hundredth master changes: a step does it to all, so it is done by hand here. */
static void change_some(uint64_t step)
{
	float *masters = (float *)(uintptr_t)nodefix_params(u);

	for (unsigned i = 0; i < ELEMENTS; i += 100)
		masters[i] += 1 + (float)step;
}

Test(publication_readers, a_delta_makes_a_generation_of_the_one_before)
{
	static float before[ELEMENTS];
	const struct delta_head *head;
	struct publication *p;
	struct published *g;
	uint64_t numbers = 0;

	d.every_steps = 0;
	d.delta_percent = 10;
	d.full_every = 4;
	train(1);
	p = declare();
	publication_want(p);
	cr_assert_eq(newest(p), 1);
	cr_assert_not(publication_newest(p)->delta.made, "there is nothing before");
	for (uint64_t step = 2; step < 12; step++) {
		memcpy(before, elements(publication_newest(p)), sizeof(before));
		submit_commit(step);
		both_ok("Commit");
		change_some(step);
		publication_want(p);
		cr_assert_eq(newest(p), step);
		g = publication_newest(p);
		if (step % 4 == 0) {
			cr_assert_not(g->delta.made, "each fourth one is full");
			continue;
		}
		cr_assert(g->delta.made);
		numbers++;
		head = backend_addr(g->delta.slab->mem);
		cr_assert_eq(head->magic, DELTA_MAGIC);
		cr_assert_eq(head->base_number, step - 1);
		cr_assert_eq(head->number, step);
		cr_assert_eq(head->checksum, g->checksum);
		cr_assert_eq(head->changed, ELEMENTS / 100);
		cr_assert_eq(head->elements, ELEMENTS);
		cr_assert_leq(head->bytes, 3 * sizeof(before) / 100);
		apply(g, before);
		cr_assert_arr_eq(before, elements(g), sizeof(before));
	}
	cr_assert_eq(p->counts.deltas, numbers);
	cr_assert_eq(p->counts.changed, numbers * ELEMENTS / 100);
	cr_assert_eq(memory(), publications_bytes(job));
}

Test(publication_readers, too_many_changes_give_no_delta)
{
	struct publication *p;

	d.delta_percent = 10;
	p = declare();
	train(1);
	cr_assert_eq(newest(p), 1);
	train(2); /* changes all */
	cr_assert_eq(newest(p), 2);
	cr_assert_not(publication_newest(p)->delta.made);
	cr_assert_eq(p->counts.not_deltas, 1);
	cr_assert_arr_eq(elements(publication_newest(p)), committed, sizeof(committed));
}

Test(publication_readers, deltas_that_cannot_be_are_refused)
{
	struct publication *p = NULL;
	struct fault f = FAULT_NULL;

	d.delta_percent = 101;
	cr_assert_eq(publication_declare(job, &d, &p, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "delta_percent");
	d.delta_percent = 0;
	d.full_every = 2;
	f = FAULT_NULL;
	cr_assert_eq(publication_declare(job, &d, &p, &f), FAULT_INVALID);
	cr_assert_str_eq(f.field, "full_every");
	d.delta_percent = 5;
	d.full_every = 1;
	f = FAULT_NULL;
	cr_assert_eq(publication_declare(job, &d, &p, &f), FAULT_INVALID);
}
