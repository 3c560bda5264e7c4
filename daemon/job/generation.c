#include "job/generation.h"

#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/extents.h"
#include "job/job_types.h"
#include "job/staging.h"

/* A block has at least so many bytes, and there are about so many blocks at most: each copy is a
 * slab, or a mapping of staging. */
#define BLOCK_BYTES    (UINT64_C(4) << 20)
#define BLOCKS         512u
#define STAGING_BLOCKS 8192u
/* Blocks of GPUs that are copied for the reader, from the one that it is in on. */
#define WINDOW 3u

enum generation_state { GENERATION_LIVE, GENERATION_COPIED, GENERATION_LOST };

/* Copies ahead of a change. OVER: all are made, or other memory was needed. */
enum generation_ahead { GENERATION_NOT_YET, GENERATION_AHEAD, GENERATION_OVER };

struct generation_block {
	_Atomic uint8_t state; /* enum generation_state */
	_Atomic uint64_t left; /* bytes that were not read yet */
	struct slab *copy;     /* owned: of host memory */
	char *at;              /* its memory: in @copy, or staging, owned; NULL: it has none */
};

struct generation {
	struct job *job;
	struct loopq *loopq;
	generation_cb changed;
	struct extents all; /* owned */
	bool in_place;      /* they can be read where they are */
	uint64_t block_bytes;
	struct generation_block *blocks; /* owned */
	size_t n_blocks;

	/* the copy before a change */
	struct extents_copy copy;
	bool copying; /* until the reader has left the block that it is in */
	bool copied;  /* no block is LIVE */
	bool over;    /* to be freed when it does not copy any more */
	uint64_t copied_bytes;
	_Atomic int lost; /* generation_lost */

	/* Copies of single blocks: ahead of a change, from the last one on, since the reader comes from
	 * the first one; and for the reader. */
	struct extents_copy single;
	uint8_t goes;    /* enum generation_ahead */
	size_t ahead_at; /* blocks that were not looked at */
	size_t block;    /* the one that is copied */
	bool block_runs;
	bool asked;   /* a writer waits for the end of that one */
	bool starved; /* ops wait for memory of copies */
	bool missed;  /* the last eviction has left a block that the reader was in */
	uint64_t ops; /* of the job, when it was opened */

	/* Of GPUs: where the reader has come to, and whether it waits for that block (counted from 1; 0: it
	 * does not). It posts @told when either has changed. */
	_Atomic size_t at, waits;
	_Atomic bool tells; /* @told is posted */
	struct work told;
	sem_t came;
	size_t window, window_end; /* blocks that are copied for it; the loop's */

	/* The block that the reader is in, counted from 1; 0: in none. The loop wants to know when it has
	 * left it. */
	_Atomic size_t reading;
	_Atomic bool wanted;
	struct work left;
};

static void generation_on_copied(struct extents_copy *copy, int status);
static void generation_on_single(struct extents_copy *single, int status);

struct generation *generation_new(struct job *job, struct loopq *loopq, generation_cb changed)
{
	struct generation *g = calloc(1, sizeof(*g));

	if (!g)
		return NULL;
	g->job = job;
	g->loopq = loopq;
	g->changed = changed;
	g->in_place = extents_in_place(job->node);
	sem_init(&g->came, 0, 0);
	extents_copy_init(&g->copy, job, generation_on_copied);
	extents_copy_init(&g->single, job, generation_on_single);
	return g;
}

int generation_add(struct generation *g, struct device *device, void *at, uint64_t bytes,
		   uint64_t *ret)
{
	CHECK(!g->blocks);
	return extents_add(&g->all, device, at, bytes, ret);
}

static uint64_t generation_block_bytes(const struct generation *g, size_t block)
{
	uint64_t begin = block * g->block_bytes;

	return g->all.bytes - begin < g->block_bytes ? g->all.bytes - begin : g->block_bytes;
}

int generation_open(struct generation *g)
{
	CHECK(!g->job->generation && !g->blocks);
	g->block_bytes = BLOCK_BYTES;
	while (g->all.bytes / g->block_bytes >= (g->in_place ? BLOCKS : STAGING_BLOCKS))
		g->block_bytes *= 2;
	g->n_blocks = (size_t)((g->all.bytes + g->block_bytes - 1) / g->block_bytes);
	g->blocks = calloc(g->n_blocks + 1, sizeof(*g->blocks));
	if (!g->blocks)
		return -ENOMEM;
	for (size_t i = 0; i < g->n_blocks; i++)
		atomic_init(&g->blocks[i].left, generation_block_bytes(g, i));
	g->job->generation = g;
	g->ahead_at = g->n_blocks;
	g->ops = g->job->ops.total;
	return 0;
}

/* ------------------------------------------------------------------------------ reading */

static void generation_leave(struct generation *g);
static void generation_on_told(struct work *w);

static void generation_on_left(struct work *w)
{
	generation_leave(CONTAINER_OF(w, struct generation, left));
}

static void generation_is_left(struct generation *g)
{
	atomic_store(&g->reading, 0);
	if (atomic_exchange(&g->wanted, false))
		loopq_post(g->loopq, &g->left, generation_on_left);
}

/* The loop reads @at and @waits after it has taken @tells back, so that it sees these or is told again. */
static void generation_tell(struct generation *g, size_t i)
{
	atomic_store(&g->at, i);
	if (!atomic_exchange(&g->tells, true))
		loopq_post(g->loopq, &g->told, generation_on_told);
}

/* Block @i is LIVE, on a GPU: wait until it is not any more. */
static void generation_wait_for(struct generation *g, size_t i)
{
	atomic_store(&g->waits, i + 1);
	generation_tell(g, i);
	while (sem_wait(&g->came) < 0)
		CHECK(errno == EINTR);
}

/* @n bytes of block @i. Return: false: it is LOST. */
static bool generation_read_block(struct generation *g, size_t i, uint64_t at, char *to, uint64_t n)
{
	const struct generation_block *b = &g->blocks[i];
	uint8_t state;

	if (!g->in_place && at == i * g->block_bytes)
		generation_tell(g, i);
	atomic_store(&g->reading, i + 1);
	while ((state = atomic_load(&b->state)) == GENERATION_LIVE && !g->in_place) {
		generation_is_left(g);
		generation_wait_for(g, i);
		atomic_store(&g->reading, i + 1);
	}
	if (state == GENERATION_LIVE)
		extents_read(&g->all, at, to, n);
	else if (state == GENERATION_COPIED)
		memcpy(to, b->at + (at - i * g->block_bytes), n);
	generation_is_left(g);
	return state != GENERATION_LOST;
}

int generation_read(struct generation *g, uint64_t at, void *to, size_t bytes)
{
	char *out = to;

	CHECK(at <= g->all.bytes && bytes <= g->all.bytes - at);
	while (bytes) {
		size_t i = (size_t)(at / g->block_bytes);
		struct generation_block *b = &g->blocks[i];
		uint64_t offset = at - i * g->block_bytes;
		uint64_t n = generation_block_bytes(g, i) - offset;

		n = n < bytes ? n : bytes;
		if (!generation_read_block(g, i, at, out, n))
			return generation_lost(g) ? generation_lost(g) : -ENOMEM;
		atomic_fetch_sub(&b->left, n);
		out += n;
		at += n;
		bytes -= n;
	}
	return 0;
}

/* ------------------------------------------------------------------------------ copying */

/* Give the memory of a block's copy back. */
static void generation_drop(struct generation *g, size_t i)
{
	struct generation_block *b = &g->blocks[i];

	if (b->copy)
		b->copy = slab_unref(b->copy);
	else
		staging_give(g->job, b->at, generation_block_bytes(g, i));
	b->at = NULL;
}

/* Copies that are read; not of one that is being made. */
static void generation_give_read(struct generation *g)
{
	for (size_t i = 0; i < g->n_blocks; i++)
		if (!atomic_load(&g->blocks[i].left) &&
		    atomic_load(&g->blocks[i].state) == GENERATION_COPIED)
			generation_drop(g, i);
}

/* Ops that wait for memory of copies look again. */
static void generation_feed(struct generation *g)
{
	if (g->starved)
		node_wake_later(g->job->node);
	g->starved = false;
}

static struct generation *generation_free(struct generation *g)
{
	CHECK(!g->copying && !g->block_runs && !atomic_load(&g->waits));
	generation_feed(g); /* they may wait for what the reader was in */
	if (g->job->generation == g)
		g->job->generation = NULL;
	for (size_t i = 0; i < g->n_blocks; i++)
		generation_drop(g, i);
	extents_copy_deinit(&g->single);
	extents_copy_deinit(&g->copy);
	extents_deinit(&g->all);
	sem_destroy(&g->came);
	free(g->blocks);
	free(g);
	return NULL;
}

/* The reader goes on, if what it waits for is not LIVE any more. */
static void generation_answer(struct generation *g)
{
	size_t i = atomic_load(&g->waits);

	if (!i || atomic_load(&g->blocks[i - 1].state) == GENERATION_LIVE)
		return;
	atomic_store(&g->waits, 0);
	sem_post(&g->came);
}

/* No reader is in a LIVE block any more, and none will be. */
static void generation_leave(struct generation *g)
{
	struct job *job = g->job;
	generation_cb changed = g->changed;

	g->copying = false;
	generation_feed(g);
	if (g->over)
		generation_free(g);
	changed(job);
}

/* @why: generation_lost. */
static void generation_lose_block(struct generation *g, size_t i, int why)
{
	atomic_store(&g->lost, why);
	atomic_store(&g->blocks[i].state, GENERATION_LOST);
}

/* What was to be copied is there, or has failed with @status. Blocks that were copied before stay: the
 * reader may be in one of them. */
static void generation_settle(struct generation *g, int status)
{
	for (size_t i = 0; i < g->n_blocks; i++) {
		struct generation_block *b = &g->blocks[i];

		if (atomic_load(&b->state) != GENERATION_LIVE)
			continue;
		if (status)
			generation_drop(g, i);
		if (b->at)
			atomic_store(&b->state, GENERATION_COPIED);
		else if (atomic_load(&b->left))
			generation_lose_block(g, i, status);
		else
			atomic_store(&b->state, GENERATION_LOST); /* nobody needs it */
	}
	if (status)
		atomic_store(&g->lost, status);
	g->copied = true;
	extents_copy_deinit(&g->copy);
	generation_answer(g);
	atomic_store(&g->wanted, true);
}

/* The reader tells it, if it is in a block. */
static bool generation_has_left(struct generation *g)
{
	return !atomic_load(&g->reading) && atomic_exchange(&g->wanted, false);
}

static void generation_on_copied(struct extents_copy *copy, int status)
{
	struct generation *g = CONTAINER_OF(copy, struct generation, copy);

	generation_settle(g, status);
	if (generation_has_left(g))
		generation_leave(g);
}

/* Memory for the copy of a block. Return: 0, or -ENOMEM for whatever reason. */
static int generation_take(struct generation *g, size_t block)
{
	struct job *job = g->job;
	struct generation_block *b = &g->blocks[block];
	uint64_t bytes = generation_block_bytes(g, block);
	void *at = NULL;

	if (!g->in_place && staging_take(job, bytes, &at))
		return -ENOMEM;
	if (g->in_place && slab_new(&job->node->devices[0], &job->quota, MEM_CONTROL,
				    BACKEND_SHARE_FD, bytes, job->rec->name, -1, &b->copy))
		return -ENOMEM;
	b->at = g->in_place ? backend_addr(b->copy->mem) : at;
	return 0;
}

/* Memory for it, and what copies it. Return: 0 or -ENOMEM. */
static int generation_prepare_block(struct generation *g, size_t i, struct extents_copy *copy)
{
	if (generation_take(g, i))
		return -ENOMEM;
	if (extents_copy_add(copy, &g->all, i * g->block_bytes, generation_block_bytes(g, i),
			     EXTENTS_OUT, g->blocks[i].at) == 0)
		return 0;
	generation_drop(g, i);
	extents_copy_deinit(copy);
	return -ENOMEM;
}

/* Copy what was not read. Return: 0 or -ENOMEM. */
static int generation_prepare(struct generation *g)
{
	for (size_t i = 0; i < g->n_blocks; i++) {
		if (!atomic_load(&g->blocks[i].left) || g->blocks[i].at)
			continue;
		if (generation_prepare_block(g, i, &g->copy))
			return -ENOMEM;
		g->copied_bytes += generation_block_bytes(g, i);
	}
	return 0;
}

/* Return: does it still go on? */
static bool generation_copy(struct generation *g)
{
	int r = g->over ? -ECANCELED : generation_prepare(g);

	g->copying = true;
	if (r == 0 && !extents_copy_is_empty(&g->copy)) {
		extents_copy_submit(&g->copy);
		return true;
	}
	generation_settle(g, r);
	g->copying = !generation_has_left(g);
	return g->copying;
}

enum res generation_let(struct job *job)
{
	struct generation *g = job->generation;

	if (!g || (g->copied && !g->copying))
		return RES_DONE;
	if (g->block_runs) {
		g->asked = true;
		return RES_WAIT;
	}
	return g->copying || generation_copy(g) ? RES_WAIT : RES_DONE;
}

bool generation_is_copying(const struct job *job)
{
	return job->generation && (job->generation->copying || job->generation->asked);
}

/* ----------------------------------------------------------------------- single blocks */

/* A writer has come meanwhile, or nobody reads it any more. */
static void generation_single_settle(struct generation *g)
{
	struct job *job = g->job;
	generation_cb changed = g->changed;

	if (g->over)
		generation_free(g);
	else if (g->asked) {
		g->asked = false;
		if (generation_copy(g))
			return;
	}
	changed(job);
}

static bool generation_needs_copy(const struct generation *g, size_t i)
{
	return atomic_load(&g->blocks[i].state) == GENERATION_LIVE && !g->blocks[i].at &&
	       atomic_load(&g->blocks[i].left);
}

static bool generation_is_in_window(const struct generation *g, size_t i)
{
	return i >= g->window && i < g->window_end;
}

/* Return: n_blocks: there is none. */
static size_t generation_next_to_read(const struct generation *g)
{
	size_t i = g->window;

	while (i < g->window_end && !generation_needs_copy(g, i))
		i++;
	return i < g->window_end ? i : g->n_blocks;
}

/* From the last one on, to where the reader has been. Return: n_blocks: there is none. */
static size_t generation_next_ahead(struct generation *g)
{
	while (g->goes == GENERATION_AHEAD && g->ahead_at) {
		size_t i = --g->ahead_at;

		if (generation_needs_copy(g, i))
			return i;
		if (!atomic_load(&g->blocks[i].left))
			g->ahead_at = 0;
	}
	return g->n_blocks;
}

/* No more copies than what the reader waits for. */
static void generation_stop_ahead(struct generation *g)
{
	size_t waits = atomic_load(&g->waits);

	g->goes = GENERATION_OVER;
	g->window_end = g->window_end > waits ? waits : g->window_end;
}

static uint64_t generation_evict_all(struct generation *g, enum generation_state to);

/* There is no memory to copy block @i. Return: is it worth another try? */
static bool generation_is_short(struct generation *g, size_t i)
{
	bool waits = i + 1 == atomic_load(&g->waits);

	generation_stop_ahead(g);
	if (waits && generation_evict_all(g, GENERATION_LIVE))
		return true;
	if (waits)
		generation_lose_block(g, i, -ENOMEM);
	generation_answer(g);
	return false;
}

/* The next block; one at a time, so that ops of the job come in between. */
static void generation_go(struct generation *g)
{
	size_t i;

	if (g->copied || g->copying || g->block_runs || g->asked || g->over)
		return;
	if (!g->in_place)
		generation_give_read(g);
	do {
		i = generation_next_to_read(g);
		i = i < g->n_blocks ? i : generation_next_ahead(g);
		if (i == g->n_blocks)
			return;
		if (generation_prepare_block(g, i, &g->single) == 0) {
			g->block = i;
			g->block_runs = true;
			extents_copy_submit(&g->single);
			return;
		}
	} while (generation_is_short(g, i));
}

static void generation_block_ended(struct generation *g, int status)
{
	size_t i = g->block;

	g->block_runs = false;
	if (status == 0) {
		g->copied_bytes += generation_is_in_window(g, i) ? 0 : generation_block_bytes(g, i);
		atomic_store(&g->blocks[i].state, GENERATION_COPIED);
		return;
	}
	generation_drop(g, i);
	generation_stop_ahead(g);
	if (!g->in_place) /* else the reader needs no copy */
		generation_lose_block(g, i, status);
}

static void generation_on_single(struct extents_copy *single, int status)
{
	struct generation *g = CONTAINER_OF(single, struct generation, single);
	bool starved;

	generation_block_ended(g, status);
	generation_answer(g);
	starved = g->starved;
	generation_feed(g);
	if (g->over || g->asked)
		generation_single_settle(g);
	else if (!starved) /* else the ops come first, and generation_tick goes on */
		generation_go(g);
}

static void generation_on_told(struct work *w)
{
	struct generation *g = CONTAINER_OF(w, struct generation, told);
	size_t i, n = g->goes == GENERATION_OVER ? 1 : WINDOW;

	atomic_store(&g->tells, false);
	i = atomic_load(&g->at);
	g->window = i;
	g->window_end = g->n_blocks - i < n ? g->n_blocks : i + n;
	generation_answer(g);
	generation_go(g);
}

/* ------------------------------------------------------------------------------- eviction */

/* Let a copy that is not read yet go: @to is LIVE, if nothing has changed since, or LOST. The reader
 * says that it is in a block before it looks at its state, so that it has either seen the new state
 * or is seen here. Return: its bytes. */
static uint64_t generation_evict_block(struct generation *g, size_t i, enum generation_state to)
{
	struct generation_block *b = &g->blocks[i];
	uint64_t bytes = b->copy ? b->copy->bytes : generation_block_bytes(g, i);

	if (!b->at || atomic_load(&b->state) != GENERATION_COPIED)
		return 0;
	atomic_store(&b->state, (uint8_t)to);
	if (atomic_load(&g->reading) == i + 1) {
		atomic_store(&b->state, GENERATION_COPIED);
		g->missed = true;
		return 0;
	}
	generation_drop(g, i);
	return bytes;
}

static uint64_t generation_evict_all(struct generation *g, enum generation_state to)
{
	uint64_t freed = 0;

	for (size_t i = 0; i < g->n_blocks; i++)
		freed += generation_evict_block(g, i, to);
	return freed;
}

/* What is staged takes no memory of GPUs: it is only the job's own limit that it counts for. */
static bool generation_may_help(const struct generation *g)
{
	return g->in_place || g->job->quota.limit;
}

uint64_t generation_evict(struct job *job, bool lose)
{
	struct generation *g = job->generation;
	uint64_t freed;

	if (!g || g->over || g->copied != lose || g->copying || !generation_may_help(g))
		return 0;
	generation_stop_ahead(g);
	g->missed = false;
	freed = generation_evict_all(g, lose ? GENERATION_LOST : GENERATION_LIVE);
	if (freed && lose)
		atomic_store(&g->lost, -ENOMEM);
	return freed;
}

bool generation_gives_later(struct job *job)
{
	struct generation *g = job->generation;
	size_t reading = g ? atomic_load(&g->reading) : 0;
	bool is_read = reading && g->blocks[reading - 1].at;

	if (!g || !generation_may_help(g) || !(g->copying || g->block_runs || is_read || g->missed))
		return false;
	g->missed = false;
	g->starved = true;
	return true;
}

/* Until the first change after the commit the trainers compute: the processors are theirs, but the
 * memory has time. A job that stands still is not copied. */
static bool generation_may_go_ahead(const struct generation *g)
{
	return g->goes == GENERATION_NOT_YET && !g->copied && g->job->ops.total != g->ops;
}

void generation_tick(struct job *job)
{
	struct generation *g = job->generation;

	if (!g)
		return;
	generation_feed(g);
	if (generation_may_go_ahead(g))
		g->goes = GENERATION_AHEAD;
	generation_go(g);
	if (job->running) /* to give pages back takes processor time, too */
		return;
	if (g->copied || g->goes != GENERATION_NOT_YET || !g->in_place)
		generation_give_read(g);
}

int generation_lost(const struct generation *g)
{
	return atomic_load(&g->lost);
}

uint64_t generation_copied(const struct generation *g)
{
	return g->copied_bytes;
}

struct generation *generation_end(struct generation *g)
{
	if (!g)
		return NULL;
	g->over = true;
	if (g->copying || g->block_runs)
		return NULL;
	return generation_free(g);
}
