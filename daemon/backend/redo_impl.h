/* The memfd of redo tasks, for the files that redo.c is divided into. */
#ifndef SHARDD_BACKEND_REDO_IMPL_H
#define SHARDD_BACKEND_REDO_IMPL_H

#include <stdatomic.h>

#include "backend/backend.h"
#include "backend/redo.h"
#include "undo.h"

#define REDO_MAGIC  UINT64_C(0x31304f4445524853) /* "SHREDO01" */
#define REDO_TASKS  1024u
#define REDO_WINDOW (UINT64_C(64) << 10) /* the smallest; a multiple of the page size */

/* A task in the table. The table is the same in all formats. */
struct redo_entry {
	_Atomic uint64_t number; /* 0: none */
	uint64_t offset, bytes;  /* its window */
};

/* The begin of the memfd. */
struct redo_front {
	uint64_t magic;
	uint32_t format;
	uint32_t slots; /* that may be in use */
	uint64_t next;  /* number of the next task */
	struct redo_entry tasks[REDO_TASKS];
};

/* What a worker thread is doing. */
struct redo_slot {
	_Alignas(64) _Atomic uint64_t number; /* of the task; 0: none, and nothing else counts */
	uint64_t begin, end;                  /* elements of the launch */
	uint32_t launch;
	_Atomic uint32_t done; /* all of them are done, but not all cells are marked */
	struct k_undo undo;
};

#define REDO_SLOTS_AT   ((sizeof(struct redo_front) + 63) / 64 * 64)
#define REDO_SLOT_AT(i) (REDO_SLOTS_AT + (uint64_t)(i) * sizeof(struct redo_slot))
/* Front and slots; windows begin behind it. */
#define REDO_FRONT ((REDO_SLOT_AT(REDO_SLOTS) + REDO_WINDOW - 1) / REDO_WINDOW * REDO_WINDOW)

struct redo_launch {
	struct launch launch;
	struct redo_place at[REDO_ARRAYS]; /* as redo_arrays has them */
	uint64_t first_cell;
	_Atomic uint64_t number; /* on a device; 0: not launched */
	uint32_t phase;
};

/* The sizes are part of the format: a successor of another build refuses the launches of this one.
 * When one of these fails, raise REDO_FORMAT. */
_Static_assert(sizeof(struct redo_launch) == 368 && sizeof(struct redo_slot) == 2176,
	       "REDO_FORMAT 2");

/* The begin of a window. The cells are behind the launches. */
struct redo_head {
	uint32_t n, room; /* launches */
	uint64_t n_cells;
	struct redo_launch launches[];
};

struct redo_window {
	void *at; /* NULL: there is none */
	uint64_t offset, bytes;
	bool busy;
};

struct redo {
	int fd;
	uint64_t bytes; /* of the memfd */
	struct redo_front *front;
	unsigned threads; /* slots that have memory */
	bool foreign;     /* of another format: only the table is known */
	struct redo_window windows[REDO_TASKS];
};

struct redo_task {
	struct redo *redo;
	unsigned index;         /* in the table and of the window */
	uint64_t number;        /* 0: not published yet */
	struct redo_head *head; /* in the window */
	_Atomic uint8_t *cells; /* there too */
	uint64_t used;          /* cells of launches that were added */
};

static inline void *redo_at(void *base, uint64_t offset)
{
	return (char *)base + offset;
}

static inline uint64_t redo_cells_at(uint64_t launches)
{
	return sizeof(struct redo_head) + launches * sizeof(struct redo_launch);
}

static inline struct redo_slot *redo_slot(const struct redo *r, unsigned i)
{
	return redo_at(r->front, REDO_SLOT_AT(i));
}

struct redo *redo_alloc(void);
void redo_format(struct redo *r);
int redo_map_front(struct redo *r, unsigned threads);
int redo_map_window(struct redo *r, unsigned i, uint64_t offset, uint64_t bytes);
unsigned redo_arrays(struct launch *l, void **ret[REDO_ARRAYS]);
void redo_set_undo(struct launch *l, struct k_undo *undo);
void redo_mark_cells(struct redo_task *t, unsigned i, uint64_t begin, uint64_t end);
void redo_slot_begin(struct redo_slot *s, const struct redo_task *t, unsigned i, uint64_t begin,
		     uint64_t end);
void redo_slot_end(struct redo_slot *s, struct redo_task *t);
uint32_t redo_complete_phases(const struct redo_head *h);
/* Task @number and its launches, in @ret_launches (malloc), with addresses of this process. */
int redo_complete_load(struct redo *r, uint64_t number, redo_addr_cb addr, void *arg,
		       struct redo_task *ret, struct launch **ret_launches, struct fault *f);

#endif
