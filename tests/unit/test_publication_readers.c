/*
 * Readers of a publication: the board, the holds that keep a buffer, and the deltas that they apply.
 */
#include "delta_abi.h"
#include "mem/slab.h"
#include "op/recorder.h"
#include "pubfix.h"

TestSuite(publication_readers, .init = begin, .fini = end, .timeout = 60);
TestSuite(publication_records, .init = begin, .fini = end, .timeout = 60);

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
		publications_tick(job, clock_now_us());
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

/* Closed readers did not count, so a process that opened, mapped and closed them took pages without a bound. */
Test(publication_readers, one_that_keeps_its_page_counts)
{
	struct publication *p = declare();
	struct board_reader *r, *held;
	struct fault f = FAULT_NULL;
	uid_t other = job->rec->uid + 1;
	int fds[PUBLICATION_MAX_OTHERS];
	uint64_t bytes;
	bool writable;

	for (unsigned i = 0; i < PUBLICATION_MAX_OTHERS; i++) {
		cr_assert_eq(publication_open_reader(p, NULL, other, &r, &f), 0, "%s", f.text);
		cr_assert_eq(slab_export(r->slab, &fds[i], &writable), 0);
		cr_assert(writable);
		publication_close_reader(r);
	}
	bytes = board_bytes(&p->board);
	cr_assert_eq(publication_open_reader(p, NULL, other, &r, &f), FAULT_EXHAUSTED);
	cr_assert(strstr(f.text, "unmap their pages"), "%s", f.text);
	held = open_reader(p); /* the owner */
	publication_close_reader(held);
	close(fds[0]);
	f = FAULT_NULL;
	cr_assert_eq(publication_open_reader(p, NULL, other, &r, &f), 0, "%s", f.text);
	publication_close_reader(r);
	for (unsigned i = 1; i < PUBLICATION_MAX_OTHERS; i++)
		close(fds[i]);
	board_beat(&p->board);
	cr_assert_lt(board_bytes(&p->board), bytes);
	cr_assert(list_empty(&p->board.closed));
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

/* --------------------------------------------------------------------------- the records */

/* The latest record of @kind, of generation @number; 0: of any. NULL: there is none. */
static const struct published_record *record_of(enum published_kind kind, uint64_t number)
{
	const struct published_record *found = NULL;

	for (size_t i = 0; i < recorder_size(); i++) {
		const struct published_record *r = recorder_published_at(i);

		if (r && r->kind == kind && (!number || r->number == number) &&
		    (!found || r->head.id > found->head.id))
			found = r;
	}
	return found;
}

static unsigned count_records(enum published_kind kind)
{
	unsigned count = 0;

	for (size_t i = 0; i < recorder_size(); i++)
		count += recorder_published_at(i) && recorder_published_at(i)->kind == kind;
	return count;
}

Test(publication_records, a_generation_has_one_when_it_is_over)
{
	struct publication *p = declare(); /* 3 buffers, keep 1 */
	const struct published_record *r;
	struct publication_lease *l;

	train(1);
	cr_assert_eq(newest(p), 1);
	l = publication_lease(publication_newest(p));
	l->pid = 17;
	l->session = 4;
	train(2);
	cr_assert_eq(newest(p), 2);
	train(3);
	cr_assert_eq(newest(p), 3);
	cr_expect_eq(count_records(PUBLISHED_GENERATION), 0, "all are there");
	cr_expect_eq(count_records(PUBLISHED_LEASE), 0);
	train(4); /* in the buffer of 2 */
	cr_assert_eq(newest(p), 4);
	r = record_of(PUBLISHED_GENERATION, 0);
	cr_assert(r);
	cr_expect_eq(r->number, 2);
	cr_expect_eq(r->step, 2);
	cr_expect_eq(r->bytes, publication_newest(p)->assembly->bytes);
	cr_expect(!r->was_used && !r->why[0]);
	cr_expect(r->began_us <= r->made_us && r->made_us <= r->ended_us && r->made_us);
	cr_expect_str_eq(r->publication, "pub");
	cr_expect_str_eq(r->head.job, "job");
	publication_release(l);
	r = record_of(PUBLISHED_LEASE, 1);
	cr_assert(r);
	cr_expect_eq(r->pid, 17);
	cr_expect_eq(r->session, 4);
	cr_expect_eq(r->step, 1);
	cr_expect_eq(r->lease, PUBLISHED_BY_CALL);
	train(5);
	cr_assert_eq(newest(p), 5);
	cr_expect(record_of(PUBLISHED_GENERATION, 1)->was_used);
	publication_drop(p);
	nodefix_turns(&n);
	for (uint64_t i = 3; i <= 5; i++) {
		cr_assert(record_of(PUBLISHED_GENERATION, i), "%u", (unsigned)i);
		if (i > 3)
			cr_expect_str_eq(record_of(PUBLISHED_GENERATION, i)->why,
					 "the publication was dropped");
	}
	cr_expect_eq(count_records(PUBLISHED_GENERATION), 5, "each has one");
}

Test(publication_records, what_is_not_made_says_why)
{
	struct publication *p;
	struct publication_lease *l;

	d.buffers = 2;
	d.when_full = SHARDD__V1__PUBLISHED_WHEN_FULL__PUBLISHED_WHEN_FULL_SKIP;
	p = declare();
	train(1);
	cr_assert_eq(newest(p), 1);
	l = publication_lease(publication_newest(p));
	train(2);
	cr_assert_eq(newest(p), 2);
	train(3); /* one is leased, and the other is the newest */
	cr_assert_eq(newest(p), 2);
	cr_assert_eq(p->counts.skipped, 1);
	cr_assert_eq(count_records(PUBLISHED_SKIPPED), 1);
	cr_expect_eq(record_of(PUBLISHED_SKIPPED, 0)->step, 3);
	cr_expect_str_eq(record_of(PUBLISHED_SKIPPED, 0)->why, "all buffers are in use");
	publication_release(l);
	publication_drop(p);
}

/* One that waits for a buffer until the next commit comes. */
Test(publication_records, one_that_came_too_late_is_skipped)
{
	struct publication *p;
	struct publication_lease *l;

	d.buffers = 2;
	p = declare();
	train(1);
	cr_assert_eq(newest(p), 1);
	l = publication_lease(publication_newest(p));
	train(2);
	cr_assert_eq(newest(p), 2);
	train(3);
	cr_assert_eq(count_records(PUBLISHED_SKIPPED), 0);
	train(4);
	cr_assert_eq(p->counts.skipped, 1);
	cr_assert_eq(count_records(PUBLISHED_SKIPPED), 1);
	cr_expect(strstr(record_of(PUBLISHED_SKIPPED, 0)->why, "until the next commit"));
	publication_release(l);
}

Test(publication_records, a_failure_has_its_reason)
{
	struct publication *p = declare();

	train(1);
	cr_assert_eq(newest(p), 1);
	nodefix_register(job, nodefix_spec("late", 1000));
	train(2);
	cr_assert_eq(newest(p), 1);
	cr_assert_geq(count_records(PUBLISHED_FAILED), 1);
	cr_expect(strstr(record_of(PUBLISHED_FAILED, 0)->why, "'late' has no values"), "%s",
		  record_of(PUBLISHED_FAILED, 0)->why);
}

/* The daemon knows a lease by board to within its looks, which are ticks and new generations. */
Test(publication_records, leases_by_board_are_those_of_the_looks)
{
	struct publication *p = declare();
	struct board_reader *r = open_reader(p);
	const struct published_record *record;

	r->pid = 23;
	r->session = 5;
	train(1);
	cr_assert_eq(newest(p), 1);
	hold(r, 0);
	publications_tick(job, clock_now_us());
	publications_tick(job, clock_now_us());
	cr_expect_eq(count_records(PUBLISHED_LEASE), 0, "it goes on");
	cr_expect_leq(publication_reader_since(r, publication_newest(p), UINT64_MAX),
		      clock_now_us());
	train(2);
	cr_assert_eq(newest(p), 2);
	hold(r, 1);
	atomic_store(&r->hold->newest[0], BOARD_NONE);
	publications_tick(job, clock_now_us());
	record = record_of(PUBLISHED_LEASE, 0);
	cr_assert(record);
	cr_expect_eq(record->number, 1);
	cr_expect_eq(record->pid, 23);
	cr_expect_eq(record->session, 5);
	cr_expect_eq(record->lease, PUBLISHED_BY_BOARD);
	cr_expect_leq(record->began_us, record->ended_us);
	train(3);
	cr_assert_eq(newest(p), 3);
	hold(r, 0); /* and back before anybody looks */
	atomic_store(&r->hold->newest[0], BOARD_NONE);
	publications_tick(job, clock_now_us());
	record = record_of(PUBLISHED_LEASE, 3);
	cr_assert(record);
	cr_expect_eq(record->lease, PUBLISHED_BETWEEN_LOOKS);
	cr_expect_eq(count_records(PUBLISHED_LEASE), 2);
	publications_tick(job, clock_now_us());
	cr_expect_eq(count_records(PUBLISHED_LEASE), 2, "it is told once");
	publication_close_reader(r); /* it holds 2 */
	cr_expect_eq(record_of(PUBLISHED_LEASE, 2)->lease, PUBLISHED_BY_BOARD);
	cr_assert_eq(count_records(PUBLISHED_READER), 1);
	cr_expect_eq(record_of(PUBLISHED_READER, 0)->pid, 23);
	cr_expect_eq(record_of(PUBLISHED_READER, 0)->session, 5);
}

/* A look comes before a buffer is used again: what was used is still known by its number. */
Test(publication_records, a_lease_that_ends_before_its_buffer_is_used_again)
{
	struct publication *p = declare();
	struct board_reader *r = open_reader(p);

	train(1);
	cr_assert_eq(newest(p), 1);
	hold(r, 0);
	atomic_store(&r->hold->newest[0], BOARD_NONE); /* no tick comes */
	for (uint64_t step = 2; step < 6; step++) {
		train(step);
		cr_assert_eq(newest(p), step);
	}
	cr_assert(record_of(PUBLISHED_LEASE, 1));
	cr_expect(record_of(PUBLISHED_GENERATION, 1)->was_used);
	hold(r, 0);
	publication_drop(p); /* the reader is told, and its record is written */
	cr_expect(record_of(PUBLISHED_GENERATION, 5)->was_used, "by the board alone");
	cr_expect(!record_of(PUBLISHED_GENERATION, 4)->was_used);
	cr_expect_eq(count_records(PUBLISHED_READER), 1);
	publication_close_reader(r);
	cr_expect_eq(count_records(PUBLISHED_READER), 1);
}

/* What is in a hold is not trusted: only generations that are there have records. */
Test(publication_records, of_a_hold_that_has_anything)
{
	struct publication *p = declare();
	struct board_reader *r = open_reader(p);

	train(1);
	cr_assert_eq(newest(p), 1);
	for (unsigned i = 0; i < 200; i++) {
		memset(r->hold, (int)(i * 37 + 1), sizeof(*r->hold));
		atomic_store(&r->hold->newest[1], board_word(1000 + i, 0));
		publications_tick(job, clock_now_us());
	}
	cr_expect_eq(count_records(PUBLISHED_LEASE), 0);
	publication_close_reader(r);
}
