/*
 * Readers of generations. A reader takes the newest generation from the publication's board by a store, a
 * barrier and a load (proto/board_abi.h); it calls the daemon when it is opened, for names and shapes, to
 * wait for a generation, and when the board says that the daemon does not run.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "client_error.h"
#include "core/check.h"
#include "core/cleanup.h"
#include "core/clock.h"
#include "device.h"
#include "live_impl.h"
#include "map.h"
#include "methods.h"
#include "publication.h"

#define LIVE_MAGIC 0x534c4956u

static int live_check(const struct shardd_live *l, struct shardd_error *err)
{
	if (!l)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "live", "the reader is NULL");
	MAGIC_CHECK(l, LIVE_MAGIC);
	return client_check(l->c, err);
}

/* ------------------------------------------------------------------ board and hold */

/* Map slab @slab, so that it stays. @ret: map_unpin. */
static int live_map_page(struct shardd_live *l, uint32_t slab, bool writable, void **ret,
			 struct shardd_error *err)
{
	struct map_place place = { .slab = slab,
				   .bytes = sizeof(struct board_page),
				   .writable = writable };
	int e = map_address(&l->c->map, &place, -1, ret, err);

	if (e < 0)
		return e;
	return map_pin(&l->c->map, *ret)
		       ? 0
		       : error_set(err, SHARDD_ABORTED, NULL,
				   "the daemon has ended while a reader was opened: try again");
}

static void live_unmap_pages(struct shardd_live *l)
{
	if (l->board)
		map_unpin(&l->c->map, l->board);
	if (l->hold)
		map_drop(&l->c->map, l->hold);
	l->board = NULL;
	l->hold = NULL;
}

static void live_note_beat(struct shardd_live *l, uint64_t beat)
{
	l->beat = beat;
	l->beat_us = clock_now_us();
}

static int live_map_pages(struct shardd_live *l, const Shardd__V1__OpenReaderResponse *r,
			  struct shardd_error *err)
{
	void *board = NULL, *hold = NULL;
	int e = live_map_page(l, r->board, false, &board, err);

	if (e < 0)
		return e;
	e = live_map_page(l, r->hold, true, &hold, err);
	if (e == 0 && ((const struct board_page *)board)->version != BOARD_VERSION)
		e = error_set(err, SHARDD_UNIMPLEMENTED, NULL,
			      "the daemon's boards have version %u; this library knows %u",
			      ((const struct board_page *)board)->version, BOARD_VERSION);
	if (e < 0) {
		map_unpin(&l->c->map, board);
		if (hold)
			map_drop(&l->c->map, hold);
		return e;
	}
	live_unmap_pages(l);
	l->board = board;
	l->hold = hold;
	l->reader = r->reader;
	l->slot = 0;
	l->word = BOARD_NONE;
	live_note_beat(l, atomic_load(&l->board->beat));
	live_watch_tell(l);
	return 0;
}

/* Has the connection been made again since the reader was opened? Then the reader has ended. */
static bool live_is_before(const struct shardd_live *l)
{
	return !l->reader || l->connection != atomic_load(&l->c->reconnect.count);
}

/* The daemon forgets the reader. */
static void live_end(struct shardd_live *l)
{
	Shardd__V1__CloseReaderRequest request = SHARDD__V1__CLOSE_READER_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	struct shardd_error ignored;

	if (live_is_before(l))
		return;
	request.reader = l->reader;
	(void)publication_call(l->c, METHOD_CloseReader, CLIENT_CALL_TIMEOUT_MS, &request.base,
			       &shardd__v1__close_reader_response__descriptor, &reply, &ignored);
}

/* What was opened has ended with its daemon or its publication: open what has the name now. */
static int live_begin(struct shardd_live *l, struct shardd_error *err)
{
	Shardd__V1__OpenReaderRequest request = SHARDD__V1__OPEN_READER_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;
	unsigned connection;
	int e;

	live_end(l);
	live_place_forget(l);
	l->reader = 0;
	request.job = l->job;
	request.name = l->name;
	connection = atomic_load(&l->c->reconnect.count);
	/* a reader that is opened twice ends with its session */
	e = call_again(l->c, METHOD_OpenReader, &request.base,
		       &shardd__v1__open_reader_response__descriptor, &reply, err);
	if (e == 0)
		e = live_map_pages(l, (const Shardd__V1__OpenReaderResponse *)reply, err);
	if (e == 0)
		l->connection = connection;
	return e;
}

/* The daemon's answer comes when the board has a generation that is newer than what the reader has, and than
 * @newer_than. @wait_ms: 0: at once. */
static int live_ask(struct shardd_live *l, uint64_t newer_than, uint32_t wait_ms,
		    struct shardd_error *err)
{
	uint64_t has = l->word / BOARD_BUFFERS;
	Shardd__V1__AcquireGenerationRequest request = SHARDD__V1__ACQUIRE_GENERATION_REQUEST__INIT;
	_cleanup_(client_messagep) ProtobufCMessage *reply = NULL;

	request.reader = l->reader;
	request.newer_than = has > newer_than ? has : newer_than;
	request.wait = wait_ms;
	request.timeout_ms = wait_ms;
	return publication_call(l->c, METHOD_AcquireGeneration,
				wait_ms ? wait_ms : CLIENT_CALL_TIMEOUT_MS, &request.base,
				&shardd__v1__acquire_generation_response__descriptor, &reply, err);
}

/* Does the board say what the daemon would say? */
static bool live_board_is_good(struct shardd_live *l)
{
	uint64_t beat = atomic_load(&l->board->beat);

	if (beat != l->beat) {
		live_note_beat(l, beat);
		return true;
	}
	return clock_now_us() - l->beat_us <= BOARD_BEAT_MS * 1000u;
}

/* Have a board that can be believed, of the daemon that runs. */
static int live_find_board(struct shardd_live *l, struct shardd_error *err)
{
	int e;

	if (live_is_before(l) || atomic_load(&l->board->over))
		return live_begin(l, err);
	if (live_board_is_good(l))
		return 0;
	e = live_ask(l, 0, 0, err);
	if (e == 0)
		live_note_beat(l, atomic_load(&l->board->beat));
	return live_is_before(l) ? live_begin(l, err) : e;
}

/* -------------------------------------------------------------------------- taking */

/* Hold the newest generation in the slot that is free. Return: its word; BOARD_NONE: there is none but what
 * the reader has, or it is not newer than @newer_than. */
static uint64_t live_hold(struct shardd_live *l, uint64_t newer_than)
{
	unsigned slot = (l->slot + 1) % BOARD_HOLDS;
	uint64_t newest = atomic_load(&l->board->newest);

	while (newest != BOARD_NONE && newest != l->word && newest / BOARD_BUFFERS > newer_than) {
		uint64_t seen;

		atomic_store(&l->hold->newest[slot], newest);
		seen = atomic_load(&l->board->newest);
		if (seen == newest)
			return newest;
		newest = seen;
	}
	atomic_store(&l->hold->newest[slot], BOARD_NONE);
	return BOARD_NONE;
}

static void live_let_go(struct shardd_live *l, unsigned slot)
{
	atomic_store(&l->hold->newest[slot], BOARD_NONE);
}

/* The GPU has read what the reader has, as far as the reader has asked for that. */
static int live_wait(struct shardd_live *l, struct shardd_error *err)
{
	return l->here && l->here->layout->on_gpu ? device_wait(l->c, err) : 0;
}

/* Show @p at the fixed addresses. If neither it nor what the reader has can be mapped, the reader has nothing. */
static int live_show(struct shardd_live *l, struct live_place *p, struct shardd_error *err)
{
	const struct shardd_published_tensor *fixed;
	int e = live_window_show(l, p, &fixed, err);
	size_t n;

	if (e == 0 || !l->word || live_window_shows(l, l->here))
		return e;
	live_let_go(l, l->slot);
	l->word = BOARD_NONE;
	n = strlen(err->text);
	snprintf(err->text + n, sizeof(err->text) - n, "; the reader has no generation now");
	snprintf(err->field, sizeof(err->field), "generation");
	return e;
}

/* The generation @word is held: have it in place of the one before. */
static int live_take(struct shardd_live *l, uint64_t word, struct shardd_error *err)
{
	unsigned slot = (l->slot + 1) % BOARD_HOLDS;
	struct board_generation g = l->board->generations[word % BOARD_BUFFERS];
	struct live_place *p = NULL;
	int e = 0;

	if (g.number != word / BOARD_BUFFERS)
		e = error_set(err, SHARDD_INTERNAL, NULL, "the board has generation %llu for %llu",
			      (unsigned long long)g.number,
			      (unsigned long long)(word / BOARD_BUFFERS));
	if (e == 0)
		e = live_wait(l, err); /* before anything is unmapped, also if it was given back */
	if (e == 0)
		e = live_place_of(l, &g, &p, err);
	if (e == 0 && l->flags & SHARDD_LIVE_FIXED)
		e = live_show(l, p, err);
	if (e < 0) {
		live_let_go(l, slot);
		return e;
	}
	if (l->word)
		live_let_go(l, l->slot);
	atomic_store(&l->hold->used[word % BOARD_BUFFERS], g.number);
	l->slot = slot;
	l->word = word;
	l->here = p;
	l->number = g.number;
	l->step = g.step;
	l->checksum = g.checksum;
	live_watch_tell(l);
	return 0;
}

/* Take what is newer than what the reader has, and than @newer_than. Return: 1: that was done; 0: there is none; or
 * a negative shardd_code. */
static int live_take_newest(struct shardd_live *l, uint64_t newer_than, struct shardd_error *err)
{
	uint64_t word = live_hold(l, newer_than);
	int e = word == BOARD_NONE ? 0 : live_take(l, word, err);

	return word == BOARD_NONE || e < 0 ? e : 1;
}

/* There was none to take. */
static int live_none(const struct shardd_live *l, uint64_t newer_than, bool waited,
		     struct shardd_error *err)
{
	if (newer_than)
		return error_set(err, SHARDD_NOT_FOUND, NULL,
				 "publication '%s' of job '%s' has no generation newer than %llu%s",
				 l->name, l->job, (unsigned long long)newer_than,
				 waited ? " any more" : " yet");
	return error_set(err, SHARDD_NOT_FOUND, NULL,
			 "publication '%s' of job '%s' has no generation%s", l->name, l->job,
			 waited ? " any more" : " yet");
}

/* Take what is newer, or wait for it. */
static int live_acquire_once(struct shardd_live *l, uint64_t newer_than, uint32_t wait_ms,
			     struct shardd_error *err)
{
	int e = live_find_board(l, err);

	if (e == 0)
		e = live_take_newest(l, newer_than, err);
	if (e)
		return e < 0 ? e : 0;
	if (l->word && (newer_than ? l->number > newer_than : !wait_ms)) {
		live_watch_tell(l); /* what the descriptor was readable for is over */
		return l->flags & SHARDD_LIVE_FIXED ? live_show(l, l->here, err) : 0;
	}
	if (wait_ms)
		e = live_ask(l, newer_than, wait_ms, err);
	if (e == 0)
		e = live_take_newest(l, newer_than, err);
	if (e == 0)
		e = live_none(l, newer_than, wait_ms, err);
	return e < 0 ? e : 0;
}

static void live_give(struct shardd_live *l, struct shardd_generation *ret)
{
	const struct shardd_published_tensor *tensors =
		l->flags & SHARDD_LIVE_FIXED ? l->window->tensors : l->here->tensors;
	const uint8_t *at = l->flags & SHARDD_LIVE_FIXED ? l->window->at : l->here->base;

	*ret = (struct shardd_generation){ .number = l->number,
					   .step = l->step,
					   .checksum = (uint32_t)l->checksum,
					   .tensors = tensors,
					   .n_tensors = l->here->layout->n_tensors,
					   .moved = tensors != l->given || at != l->given_at,
					   .layout = l->here->layout->serial,
					   .uuid = l->here->layout->on_gpu ? device_uuid(l->c)
									   : "" };
	l->given = tensors;
	l->given_at = at;
}

/* --------------------------------------------------------------------- the functions */

static struct shardd_live *live_free(struct shardd_live *l)
{
	if (!l)
		return NULL;
	live_watch_free(l);
	live_drop_delta(l);
	live_place_drop_all(l);
	live_window_free(l);
	live_unmap_pages(l);
	free(l->job);
	free(l->name);
	l->magic = 0;
	free(l);
	return NULL;
}

static void live_freep(struct shardd_live **l)
{
	*l = live_free(*l);
}

int shardd_live_open(shardd_client *c, const char *job, const char *name, uint32_t flags,
		     shardd_live **ret, struct shardd_error *err)
{
	_cleanup_(live_freep) struct shardd_live *l = NULL;
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = publication_check(c, job, name, "name", err);
	if (e < 0)
		return e;
	if (!ret)
		return error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "the argument is NULL");
	if (flags & ~(uint32_t)(SHARDD_LIVE_FIXED | SHARDD_LIVE_EXPLAIN))
		return error_set(err, SHARDD_INVALID_ARGUMENT, "flags",
				 "flags has 0x%x, which this library does not know",
				 flags & ~(uint32_t)(SHARDD_LIVE_FIXED | SHARDD_LIVE_EXPLAIN));
	l = calloc(1, sizeof(*l));
	if (!l)
		return error_memory(err);
	l->magic = LIVE_MAGIC;
	l->c = c;
	l->flags = flags;
	l->job = strdup(job);
	l->name = strdup(name);
	if (!l->job || !l->name)
		return error_memory(err);
	e = live_begin(l, err);
	if (e < 0)
		return e;
	*ret = STEAL_PTR(l);
	return 0;
}

int shardd_live_acquire(shardd_live *l, uint32_t wait_ms, struct shardd_generation *ret,
			struct shardd_error *err)
{
	return shardd_live_acquire_newer(l, 0, wait_ms, ret, err);
}

int shardd_live_acquire_newer(shardd_live *l, uint64_t newer_than, uint32_t wait_ms,
			      struct shardd_generation *ret, struct shardd_error *err)
{
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = live_check(l, err);
	if (e == 0 && !ret)
		e = error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL");
	if (e < 0)
		return e;
	e = live_acquire_once(l, newer_than, wait_ms, err);
	/* The daemon may have ended after it last changed the board, which a reader that was idle does not see: ask
	 * it, or the next one. */
	if (e == -SHARDD_ABORTED || e == -SHARDD_UNAVAILABLE) {
		l->beat_us = 0;
		l->beat = atomic_load(&l->board->beat);
		e = live_acquire_once(l, newer_than, wait_ms, err);
	}
	if (e == 0)
		live_give(l, ret);
	return e;
}

int shardd_live_release(shardd_live *l, struct shardd_error *err)
{
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = live_check(l, err);
	if (e < 0)
		return e;
	if (!l->word)
		return error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
				 "this reader of publication '%s' has no generation", l->name);
	e = live_wait(l, err);
	if (e < 0)
		return e;
	l->word = BOARD_NONE;
	live_let_go(l, l->slot);
	live_watch_tell(l);
	return 0;
}

int shardd_live_fd(shardd_live *l, int *ret, struct shardd_error *err)
{
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = live_check(l, err);
	if (e == 0 && !ret)
		e = error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL");
	if (e == 0 && live_is_before(l))
		e = live_begin(l, err);
	if (e == 0 && !l->watch)
		e = live_watch_new(l, err);
	if (e == 0)
		*ret = live_watch_fd(l);
	return e;
}

int shardd_live_delta(shardd_live *l, uint64_t base, struct shardd_delta *ret,
		      struct shardd_error *err)
{
	struct shardd_error scratch;
	int e;

	err = err ? err : &scratch;
	e = live_check(l, err);
	if (e == 0 && !ret)
		e = error_set(err, SHARDD_INVALID_ARGUMENT, "ret", "ret is NULL");
	if (e == 0 && !l->word)
		e = error_set(err, SHARDD_FAILED_PRECONDITION, NULL,
			      "this reader of publication '%s' has no generation", l->name);
	return e < 0 ? e : live_delta(l, base, ret, err);
}

void shardd_live_close(shardd_live *l)
{
	struct shardd_error ignored;

	if (!l || live_check(l, NULL) < 0)
		return;
	(void)live_wait(l, &ignored);
	live_end(l);
	live_free(l);
}
