/*
 * The board of a publication and the hold of a reader: shared memory in which a reader finds the
 * newest generation, and takes it, without a call.
 *
 * Only the daemon writes the board, which readers map read-only. A reader has a page of its own,
 * the hold: it writes there which generation it uses, and the daemon does not write to that one's
 * memory. Both are slabs of OpenReader's answer, and come over the local channel.
 *
 *   reader                                   daemon
 *   n = board.newest                         board.newest = n': one was made in another buffer
 *   hold.newest[i] = n                       barrier
 *   barrier                                  is any hold.newest[i] n? Then n's buffer stays;
 *   board.newest == n: n is the reader's       else it may become another generation's
 *   else: again
 *
 * All of these are sequentially consistent atomic operations, which is what the barrier means here,
 * so that at least one side sees the other's store: these are hazard pointers. The newest
 * generation's buffer is never written. A reader that stores 0 gives back what it holds. When the
 * session ends, its holds end.
 *
 * The daemon trusts nothing in a hold: a reader that writes what is not true keeps a buffer from
 * being used again, as a lease does, or reads what changes.
 */
#ifndef SHARDD_BOARD_ABI_H
#define SHARDD_BOARD_ABI_H

#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define BOARD_MAGIC   0x42444853u /* "SHDB" read as a little-endian word */
#define BOARD_VERSION 1u
#define BOARD_BUFFERS 16u
#define BOARD_HOLDS   2u

/* Of board.newest. A generation is its number times BOARD_BUFFERS, plus the index of its buffer. */
#define BOARD_NONE 0u

/* A generation, at the index of its buffer. It does not change while it is held. */
struct board_generation {
	uint64_t number;
	uint64_t step; /* the committed step that it is of */
	uint64_t
		layout; /* generations with the same one have the same tensors at the same places */
	uint64_t bytes;
	uint32_t slab; /* its memory */
	uint32_t checksum;
	uint64_t delta_base; /* the generation that @delta is applied to */
	uint32_t
		delta; /* the slab of a delta that makes this one (delta_abi.h); 0: there is none */
	uint32_t zero[3];
};

/* At the start of the board. */
struct board_page {
	uint32_t magic;
	uint32_t version;
	_Atomic(uint64_t) newest;
	/* Grows with each change of @newest: a futex to wait for it. */
	_Atomic(uint32_t) changes;
	/* 1: nothing will change here any more, because the publication was dropped, the job
	 * deleted, or the daemon has ended as it should. The reader asks the daemon. */
	_Atomic(uint32_t) over;
	/* Grows at least once a second. A reader that finds it unchanged for BOARD_BEAT_MS asks the
	 * daemon, which has died, or does not run. */
	_Atomic(uint64_t) beat;
	uint64_t zero[4];
	struct board_generation generations[BOARD_BUFFERS];
};

#define BOARD_BEAT_MS 3000u

/* At the start of a hold. */
struct board_hold {
	/* As in the board, of the generation that the reader uses; two, so that it has the next one
	 * before it gives the one before back. */
	_Atomic(uint64_t) newest[BOARD_HOLDS];
	uint64_t zero[6];
	/* The number of the generation that it used last, for each buffer: for statistics. */
	_Atomic(uint64_t) used[BOARD_BUFFERS];
};

static_assert(sizeof(struct board_generation) == 64, "board_generation");
static_assert(offsetof(struct board_page, generations) == 64, "board");
static_assert(sizeof(struct board_page) <= 4096, "a board is a page");
static_assert(sizeof(struct board_hold) <= 4096, "a hold is a page");

#endif
