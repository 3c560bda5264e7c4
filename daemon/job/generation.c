#include "job/generation.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/job_types.h"

/* A block has at least so many bytes, and there are about so many blocks at most: each copy is a
 * slab. */
#define BLOCK_BYTES (UINT64_C(4) << 20)
#define BLOCKS      512u

enum generation_state { GENERATION_LIVE, GENERATION_COPIED, GENERATION_LOST };

struct generation_block {
	_Atomic uint8_t state; /* enum generation_state */
	_Atomic uint64_t left; /* bytes that were not read yet */
	struct slab *copy;     /* owned; NULL: none */
	char *at;              /* COPIED: its memory */
};

struct generation_range {
	const char *at;
	uint64_t begin, bytes; /* @begin: in the generation */
};

struct generation {
	struct job *job;
	struct loopq *loopq;
	generation_cb changed;
	struct generation_range *ranges; /* owned, in order */
	size_t n_ranges, room;
	uint64_t bytes, block_bytes;
	struct generation_block *blocks; /* owned */
	size_t n_blocks;

	/* the copy */
	struct backend_task task;
	struct launch *launches; /* owned */
	bool copying;            /* until the reader has left the block that it is in */
	bool copied;             /* no block is LIVE */
	bool over;               /* to be freed when it does not copy any more */
	uint64_t copied_bytes;
	_Atomic bool lost;

	/* Copies made ahead, one block after the other, from the last one on: the reader comes from
	 * the first one. */
	struct backend_task ahead;
	struct launch *ahead_launches; /* owned; NULL: not begun */
	size_t ahead_at;               /* blocks that were not looked at */
	bool ahead_runs;               /* of block @ahead_at */
	bool asked;                    /* a writer waits for the end of that one */
	bool no_more;                  /* copies: other memory was needed */
	uint64_t ops;                  /* of the job, when it was opened */

	/* The block that the reader is in, counted from 1; 0: in none. The loop wants to know when it has
	 * left it. */
	_Atomic size_t reading;
	_Atomic bool wanted;
	struct work left;
};

struct generation *generation_new(struct job *job, struct loopq *loopq, generation_cb changed)
{
	struct generation *g = calloc(1, sizeof(*g));

	if (!g)
		return NULL;
	g->job = job;
	g->loopq = loopq;
	g->changed = changed;
	return g;
}

int generation_add(struct generation *g, const void *at, uint64_t bytes, uint64_t *ret)
{
	CHECK(!g->blocks);
	if (g->n_ranges == g->room) {
		size_t room = g->room ? 2 * g->room : 64;
		struct generation_range *more = reallocarray(g->ranges, room, sizeof(*g->ranges));

		if (!more)
			return -ENOMEM;
		g->ranges = more;
		g->room = room;
	}
	g->ranges[g->n_ranges++] =
		(struct generation_range){ .at = at, .begin = g->bytes, .bytes = bytes };
	*ret = g->bytes;
	g->bytes += bytes;
	return 0;
}

static uint64_t generation_block_bytes(const struct generation *g, size_t block)
{
	uint64_t begin = block * g->block_bytes;

	return g->bytes - begin < g->block_bytes ? g->bytes - begin : g->block_bytes;
}

int generation_open(struct generation *g)
{
	CHECK(!g->job->generation && !g->blocks);
	g->block_bytes = BLOCK_BYTES;
	while (g->bytes / g->block_bytes >= BLOCKS)
		g->block_bytes *= 2;
	g->n_blocks = (size_t)((g->bytes + g->block_bytes - 1) / g->block_bytes);
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

/* The range that has byte @at. */
static size_t generation_range_of(const struct generation *g, uint64_t at)
{
	size_t lo = 0, hi = g->n_ranges;

	CHECK(at < g->bytes);
	while (hi - lo > 1) {
		size_t mid = lo + (hi - lo) / 2;

		if (g->ranges[mid].begin <= at)
			lo = mid;
		else
			hi = mid;
	}
	return lo;
}

/* The piece of one range at @at, at most @bytes. Return: its bytes. */
static uint64_t generation_piece(const struct generation *g, size_t range, uint64_t at,
				 uint64_t bytes, const char **ret)
{
	const struct generation_range *r = &g->ranges[range];
	uint64_t n = r->begin + r->bytes - at;

	*ret = r->at + (at - r->begin);
	return n < bytes ? n : bytes;
}

/* ------------------------------------------------------------------------------ reading */

static void generation_leave(struct generation *g);

static void generation_on_left(struct work *w)
{
	generation_leave(CONTAINER_OF(w, struct generation, left));
}

static void generation_read_live(const struct generation *g, uint64_t at, char *to, uint64_t bytes)
{
	const char *from;

	for (size_t i = generation_range_of(g, at); bytes; i++) {
		uint64_t n = generation_piece(g, i, at, bytes, &from);

		memcpy(to, from, n);
		to += n;
		at += n;
		bytes -= n;
	}
}

/* @n bytes of block @i. Return: false: it is LOST. */
static bool generation_read_block(struct generation *g, size_t i, uint64_t at, char *to, uint64_t n)
{
	const struct generation_block *b = &g->blocks[i];
	uint8_t state;

	atomic_store(&g->reading, i + 1);
	state = atomic_load(&b->state);
	if (state == GENERATION_LIVE)
		generation_read_live(g, at, to, n);
	else if (state == GENERATION_COPIED)
		memcpy(to, b->at + (at - i * g->block_bytes), n);
	atomic_store(&g->reading, 0);
	if (atomic_exchange(&g->wanted, false))
		loopq_post(g->loopq, &g->left, generation_on_left);
	return state != GENERATION_LOST;
}

int generation_read(struct generation *g, uint64_t at, void *to, size_t bytes)
{
	char *out = to;

	CHECK(at <= g->bytes && bytes <= g->bytes - at);
	while (bytes) {
		size_t i = (size_t)(at / g->block_bytes);
		struct generation_block *b = &g->blocks[i];
		uint64_t offset = at - i * g->block_bytes;
		uint64_t n = generation_block_bytes(g, i) - offset;

		n = n < bytes ? n : bytes;
		if (!generation_read_block(g, i, at, out, n))
			return -ENOMEM;
		atomic_fetch_sub(&b->left, n);
		out += n;
		at += n;
		bytes -= n;
	}
	return 0;
}

/* ------------------------------------------------------------------------------ copying */

static void generation_give(struct generation *g)
{
	for (size_t i = 0; i < g->n_blocks; i++)
		g->blocks[i].copy = slab_unref(g->blocks[i].copy);
}

/* Copies that are read; not of one that is being made. */
static void generation_give_read(struct generation *g)
{
	for (size_t i = 0; i < g->n_blocks; i++)
		if (!atomic_load(&g->blocks[i].left) &&
		    atomic_load(&g->blocks[i].state) == GENERATION_COPIED)
			g->blocks[i].copy = slab_unref(g->blocks[i].copy);
}

static struct generation *generation_free(struct generation *g)
{
	CHECK(!g->copying && !g->ahead_runs);
	if (g->job->generation == g)
		g->job->generation = NULL;
	generation_give(g);
	free(g->ahead_launches);
	free(g->launches);
	free(g->blocks);
	free(g->ranges);
	free(g);
	return NULL;
}

/* No reader is in a LIVE block any more, and none will be. */
static void generation_leave(struct generation *g)
{
	struct job *job = g->job;
	generation_cb changed = g->changed;

	g->copying = false;
	if (g->over)
		generation_free(g);
	changed(job);
}

/* @state: of all blocks that were to be copied. Those that were copied ahead stay: the reader may be in
 * one of them. */
static void generation_settle(struct generation *g, enum generation_state state)
{
	for (size_t i = 0; i < g->n_blocks; i++) {
		struct generation_block *b = &g->blocks[i];

		if (atomic_load(&b->state) == GENERATION_COPIED)
			continue;
		if (state == GENERATION_LOST)
			b->copy = slab_unref(b->copy);
		atomic_store(&b->state, (uint8_t)(b->copy ? state : GENERATION_LOST));
	}
	atomic_store(&g->lost, state == GENERATION_LOST);
	g->copied = true;
	free(g->launches);
	g->launches = NULL;
	atomic_store(&g->wanted, true);
}

/* The reader tells it, if it is in a block. */
static bool generation_has_left(struct generation *g)
{
	return !atomic_load(&g->reading) && atomic_exchange(&g->wanted, false);
}

static void generation_on_copied(struct backend_task *task, int status)
{
	struct generation *g = CONTAINER_OF(task, struct generation, task);

	generation_settle(g, status ? GENERATION_LOST : GENERATION_COPIED);
	if (generation_has_left(g))
		generation_leave(g);
}

static int generation_take(struct generation *g, size_t block)
{
	struct job *job = g->job;
	struct generation_block *b = &g->blocks[block];
	int r = slab_new(&job->node->devices[0], &job->quota, MEM_CONTROL, BACKEND_SHARE_FD,
			 generation_block_bytes(g, block), job->rec->name, -1, &b->copy);

	if (r == 0)
		b->at = backend_addr(b->copy->mem);
	return r;
}

/* What copies block @block, from launch @n of @launches on. Return: the number of launches after it. */
static size_t generation_launch(const struct generation *g, size_t block, struct launch *launches,
				size_t n)
{
	uint64_t begin = block * g->block_bytes, bytes = generation_block_bytes(g, block);
	const char *from;

	for (uint64_t at = begin; at < begin + bytes;) {
		uint64_t piece = generation_piece(g, generation_range_of(g, at), at,
						  begin + bytes - at, &from);

		launches[n++] = (struct launch){
			.kind = LAUNCH_COPY,
			.n = piece,
			.copy = { .dst = g->blocks[block].at + (at - begin), .src = from },
		};
		at += piece;
	}
	return n;
}

/* Copy what was not read. Return: the number of launches; or -errno. */
static ssize_t generation_prepare(struct generation *g)
{
	size_t n = 0;

	g->launches = calloc(g->n_ranges + g->n_blocks + 1, sizeof(*g->launches));
	if (!g->launches)
		return -ENOMEM;
	for (size_t i = 0; i < g->n_blocks; i++) {
		if (!atomic_load(&g->blocks[i].left) || g->blocks[i].copy)
			continue;
		if (generation_take(g, i))
			return -ENOMEM;
		n = generation_launch(g, i, g->launches, n);
		g->copied_bytes += generation_block_bytes(g, i);
	}
	return (ssize_t)n;
}

/* Return: does it still go on? */
static bool generation_copy(struct generation *g)
{
	ssize_t n = g->over ? -ECANCELED : generation_prepare(g);

	g->copying = true;
	if (n > 0) {
		g->task = (struct backend_task){ .launches = g->launches,
						 .n_launches = (unsigned)n,
						 .sync = true,
						 .done = generation_on_copied,
						 .owner = job_as_owner(g->job) };
		backend_submit(g->job->node->devices[0].backend, &g->task);
		return true;
	}
	generation_settle(g, n < 0 ? GENERATION_LOST : GENERATION_COPIED);
	g->copying = !generation_has_left(g);
	return g->copying;
}

enum res generation_let(struct job *job)
{
	struct generation *g = job->generation;

	if (!g || (g->copied && !g->copying))
		return RES_DONE;
	if (g->ahead_runs) {
		g->asked = true;
		return RES_WAIT;
	}
	return g->copying || generation_copy(g) ? RES_WAIT : RES_DONE;
}

bool generation_is_copying(const struct job *job)
{
	return job->generation && (job->generation->copying || job->generation->asked);
}

/* ------------------------------------------------------------------------------- ahead */

static void generation_ahead(struct generation *g);

/* A writer has come meanwhile, or nobody reads it any more. */
static void generation_ahead_settle(struct generation *g)
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

static void generation_on_ahead(struct backend_task *task, int status)
{
	struct generation *g = CONTAINER_OF(task, struct generation, ahead);
	struct generation_block *b = &g->blocks[g->ahead_at];

	g->ahead_runs = false;
	if (status) {
		b->copy = slab_unref(b->copy);
		g->ahead_at = 0;
	} else {
		g->copied_bytes += generation_block_bytes(g, g->ahead_at);
		atomic_store(&b->state, GENERATION_COPIED);
	}
	if (g->over || g->asked)
		generation_ahead_settle(g);
	else if (!g->no_more)
		generation_ahead(g);
}

static void generation_ahead_submit(struct generation *g)
{
	g->ahead = (struct backend_task){
		.launches = g->ahead_launches,
		.n_launches = (unsigned)generation_launch(g, g->ahead_at, g->ahead_launches, 0),
		.sync = true,
		.done = generation_on_ahead,
		.owner = job_as_owner(g->job),
	};
	g->ahead_runs = true;
	backend_submit(g->job->node->devices[0].backend, &g->ahead);
}

/* The next block; one at a time, so that ops of the job come in between. Without memory none: a writer
 * tries again. */
static void generation_ahead(struct generation *g)
{
	if (!g->ahead_launches)
		g->ahead_launches = calloc(g->n_ranges + 1, sizeof(*g->ahead_launches));
	while (g->ahead_launches && g->ahead_at) {
		g->ahead_at--;
		if (!atomic_load(&g->blocks[g->ahead_at].left))
			return; /* the reader has been here */
		if (generation_take(g, g->ahead_at) == 0) {
			generation_ahead_submit(g);
			return;
		}
		g->ahead_at = 0;
	}
}

/* Until the first change after the commit the trainers compute: the processors are theirs, but the
 * memory has time. A job that stands still is not copied. */
static bool generation_may_go_ahead(const struct generation *g)
{
	return !g->copied && !g->copying && !g->ahead_runs && !g->over && !g->no_more &&
	       g->ahead_at == g->n_blocks && g->job->ops.total != g->ops;
}

/* ------------------------------------------------------------------------------- eviction */

/* Let a copy that is not read yet go: @to is LIVE, if nothing has changed since, or LOST. The reader
 * says that it is in a block before it looks at its state, so that it has either seen the new state
 * or is seen here. Return: its bytes. */
static uint64_t generation_evict_block(struct generation *g, size_t i, enum generation_state to)
{
	struct generation_block *b = &g->blocks[i];
	uint64_t bytes = b->copy ? b->copy->bytes : 0;

	if (!bytes || atomic_load(&b->state) != GENERATION_COPIED)
		return 0;
	atomic_store(&b->state, (uint8_t)to);
	if (atomic_load(&g->reading) == i + 1) {
		atomic_store(&b->state, GENERATION_COPIED);
		return 0;
	}
	b->copy = slab_unref(b->copy);
	return bytes;
}

uint64_t generation_evict(struct job *job, bool lose)
{
	struct generation *g = job->generation;
	enum generation_state to = lose ? GENERATION_LOST : GENERATION_LIVE;
	uint64_t freed = 0;

	if (!g || g->over || g->copied != lose || g->copying)
		return 0;
	g->ahead_at = g->ahead_runs ? g->ahead_at : 0; /* no more of them */
	g->no_more = true;
	for (size_t i = 0; i < g->n_blocks; i++)
		if (!g->ahead_runs || i != g->ahead_at)
			freed += generation_evict_block(g, i, to);
	if (freed && lose)
		atomic_store(&g->lost, true);
	return freed;
}

void generation_tick(struct job *job)
{
	struct generation *g = job->generation;

	if (!g)
		return;
	if (generation_may_go_ahead(g))
		generation_ahead(g);
	if (g->copied || g->ahead_at < g->n_blocks)
		generation_give_read(g);
}

bool generation_is_lost(const struct generation *g)
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
	if (g->copying || g->ahead_runs)
		return NULL;
	return generation_free(g);
}
