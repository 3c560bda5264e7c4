/*
 * The board of a publication: a page in which readers find the newest generation, and the holds in which
 * they say what they use (proto/board_abi.h), so that a reader takes a generation without a call. A hold
 * keeps a buffer as a lease does. The board is made for the first reader. Loop thread only.
 */
#ifndef SHARDD_PUBLISH_BOARD_H
#define SHARDD_PUBLISH_BOARD_H

#include <stdbool.h>
#include <stdint.h>

#include "board_abi.h"
#include "core/list.h"
#include "core/user.h"

struct device;
struct publication;
struct quota;
struct slab;

/* Whose memory the pages are. */
struct board_payer {
	struct device *device;
	struct quota *quota;
	const char *job; /* its name */
};

struct board {
	struct slab *slab; /* owned ref; NULL: there was no reader yet */
	struct board_page *page;
	struct list readers; /* of struct board_reader */
	/* The same: readers that were closed, whose page a process still has. They hold nothing, but they
	 * count: otherwise a process that opens, maps and closes readers takes pages without a bound. */
	struct list closed;
};

/* What was in a place of a hold. */
struct board_seen {
	uint64_t word;     /* as board_page.newest has it */
	uint64_t since_us; /* the look that saw it first */
};

/* A reader has used a generation, and does not any more. */
struct board_use {
	unsigned index;  /* of the buffer, as the hold says */
	uint64_t number; /* that, too: it may be anything */
	uint64_t began_us, ended_us;
	bool is_between; /* no look has seen it: it was some time between these two */
};

/* A reader with a hold. Owned by its session. */
struct board_reader {
	struct list link; /* board.readers; unlinked: the publication is gone */
	struct list held; /* the session's */
	uint64_t id;      /* the session's */
	uint64_t session; /* for status */
	int pid;
	uid_t uid; /* the owner's */
	uint64_t opened_us;
	uint64_t looked_us; /* when board_look saw: */
	struct board_seen seen[BOARD_HOLDS];
	uint64_t used[BOARD_BUFFERS]; /* as in the hold */
	struct publication *p;        /* the owner's; NULL: it is gone */
	struct slab *slab;            /* owned ref: the hold; NULL without @p */
	struct board_hold *hold;
	struct user_charge cost;
};

/* As board_page.newest has it. @index: of the buffer. */
static inline uint64_t board_word(uint64_t number, unsigned index)
{
	return number * BOARD_BUFFERS + index;
}

void board_init(struct board *b);
/* Readers are told that nothing comes any more, and lose their holds. Safe to call twice. */
void board_end(struct board *b);
/* Have a board, which is empty at first. Return: 0, or the negative errno of slab_new. */
int board_make(struct board *b, const struct board_payer *payer);

/* A reader of a board that was made; the caller sets @p. @ret: board_close. Return: 0, -ENOMEM, or the
 * negative errno of slab_new. */
int board_open(struct board *b, const struct board_payer *payer, struct board_reader **ret);
/* What it holds is given back. @b: its board; NULL: the board has ended. @r is freed when no process has its
 * page any more, or with the board. NULL is allowed for @r. Return: NULL. */
struct board_reader *board_close(struct board *b, struct board_reader *r);
/* Free closed readers whose page no process has any more. */
void board_sweep(struct board *b);

/* What is in buffer @index, which nobody holds. */
void board_write(struct board *b, unsigned index, const struct board_generation *g);
/* The newest generation, or BOARD_NONE; readers that wait wake up. */
void board_show(struct board *b, uint64_t word);
/* The daemon is there, and looks at closed readers: call at least once a second. */
void board_beat(struct board *b);

typedef void (*board_use_cb)(const struct board_reader *r, const struct board_use *u);
/* See what the holds have now. @ended: called for each use that has ended since the last look. */
void board_look(struct board *b, uint64_t now_us, board_use_cb ended);
/* The same of @r, which holds nothing from now on. */
void board_reader_end(struct board_reader *r, uint64_t now_us, board_use_cb ended);

/* Does any reader hold @word? */
bool board_holds(const struct board *b, uint64_t word);
/* Since when @r holds @word, as board_look has seen it. Return: @now_us if it has not yet. */
uint64_t board_reader_since(const struct board_reader *r, uint64_t word, uint64_t now_us);
/* Does @r? */
bool board_reader_holds(const struct board_reader *r, uint64_t word);
/* Is generation @number the last one of buffer @index that @r has used? */
bool board_reader_used(const struct board_reader *r, unsigned index, uint64_t number);
/* The same for any reader. */
bool board_was_used(const struct board *b, unsigned index, uint64_t number);
/* Bytes of the board and of the holds. */
uint64_t board_bytes(const struct board *b);

#endif
