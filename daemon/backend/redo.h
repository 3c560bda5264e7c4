/*
 * Redo: tasks that change arrays in place, kept so that a successor of this process completes them,
 * whatever instruction this process is killed at.
 *
 * One memfd has all of it:
 *
 *   header | table of tasks | a slot per worker thread | windows, one per task
 *
 * The window of a task has its launches, with arrays as (slab, offset), and a byte per cell: elements
 * [i * KERNEL_NORM_BLOCK, (i + 1) * KERNEL_NORM_BLOCK) of a launch. The byte is set when the cell is
 * done. The slot of a thread says which elements it works on, and has the old contents of the block
 * that it changes (kernels/undo.h). A successor restores those blocks, completes those elements, and
 * then runs the cells that are not done.
 *
 * A number of a task is never used twice. Whether a task counts is decided elsewhere: the journal
 * names the task's number together with what holds when it is done, before the first launch runs. A
 * task that the journal does not name was never begun.
 *
 * On a device kernels keep old contents in the device's memory (backend_redo_open), and neither slots
 * nor cells are used. Each launch gets a number before it is put on the device's queue; the device's
 * memory tells which number was under way, and so which launches are complete.
 *
 * Loop thread, but for redo_run, which is a worker's, and redo_number, an executor's.
 */
#ifndef SHARDD_BACKEND_REDO_H
#define SHARDD_BACKEND_REDO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "kernels.h"

struct launch;
struct redo;      /* the memfd */
struct redo_task; /* one task of it */

/* Of the windows and slots, struct launch and the kernels' arguments included. */
#define REDO_FORMAT 2u
/* Of the worker threads, those with a lower index can run such tasks. */
#define REDO_SLOTS 1024u
/* Arrays of one launch. */
#define REDO_ARRAYS 5u

/* Where an array begins. */
struct redo_place {
	uint64_t offset; /* bytes */
	uint32_t slab;   /* 0: there is no array */
};
typedef struct redo_place (*redo_place_cb)(void *arg, const void *at);

/* @threads: slots that can be used. Return: 0 or negative errno. */
int redo_new(unsigned threads, struct redo **ret);
/* NULL is allowed. Return: NULL. */
struct redo *redo_free(struct redo *r);
/* Borrowed. */
int redo_fd(const struct redo *r);

/* Can @launch be run again by a successor? */
bool redo_can(const struct launch *launch);
uint64_t redo_cells(uint64_t elements);

/* Room for a task of @launches launches that have @cells cells together. Return: NULL without
 * memory. */
struct redo_task *redo_task_new(struct redo *r, unsigned launches, uint64_t cells);
/* The next launch of it, with redo_can. Launches of a higher @phase run after all of a lower one.
 * @place says where its arrays are. */
void redo_task_add(struct redo_task *t, unsigned phase, const struct launch *launch,
		   redo_place_cb place, void *arg);
/* All launches have been added. Return: the number of the task, not 0. Safe twice. */
uint64_t redo_task_publish(struct redo_task *t);
/* All launches are done, or it was not begun. NULL is allowed. Return: NULL. */
struct redo_task *redo_task_free(struct redo_task *t);

/* Elements [@begin, @end) of @launch, number @i of @t. Both are multiples of KERNEL_NORM_BLOCK, but
 * for the end of the launch. @slot: the thread's, below the number of threads. */
void redo_run(struct redo_task *t, unsigned i, unsigned slot, const struct kernels *k,
	      const struct launch *launch, uint64_t begin, uint64_t end);

/* On a device: launch @i of @t is put on the queue now, under that number. */
void redo_number(struct redo_task *t, unsigned i, uint64_t number);

/* ------------------------------------------------------------- a predecessor's */

/* What a predecessor left in @fd, which is duplicated. Return: 0, FAULT_INVALID (damage), or another
 * fault code. */
int redo_open(int fd, unsigned threads, struct redo **ret, struct fault *f);
/* Is there a task of that number? */
bool redo_has(const struct redo *r, uint64_t number);
/* The address of @bytes bytes at @place. Return: NULL if there is no such memory. */
typedef void *(*redo_addr_cb)(void *arg, struct redo_place place, uint64_t bytes);
/* Put back what threads were changing for that task when the process died. To be called for all
 * tasks before one of them is completed: completing overwrites the threads' places. May be called
 * again. Return: as redo_complete. */
int redo_repair(struct redo *r, uint64_t number, const struct kernels *k, redo_addr_cb addr,
		void *arg, struct fault *f);
/* Complete that task, on @threads threads, after redo_repair of it or as the only one. Blocks. May be killed, and called again by the next
 * process. Return: 0, FAULT_INVALID (another format, damage), or another fault code. */
int redo_complete(struct redo *r, uint64_t number, const struct kernels *k, unsigned threads,
		  redo_addr_cb addr, void *arg, struct fault *f);
/* As redo_addr_cb, and the backend of that memory. */
typedef struct backend *(*redo_backend_cb)(void *arg, struct redo_place place);
/* The same two for a task on devices (backend_numbers_redo): what was under way is completed by
 * redo_device_repair, for all tasks, and the rest by redo_device_complete. Both block. */
int redo_device_repair(struct redo *r, uint64_t number, redo_addr_cb addr, redo_backend_cb backend,
		       void *arg, struct fault *f);
int redo_device_complete(struct redo *r, uint64_t number, redo_addr_cb addr,
			 redo_backend_cb backend, void *arg, struct fault *f);
/* Forget all tasks. */
void redo_clear(struct redo *r);
/* Forget all but those of @numbers: they are completed later (redo_complete_some), or dropped. One that cannot be kept is
 * forgotten, too. */
void redo_keep(struct redo *r, const uint64_t *numbers, size_t n);
/* A task that was kept is done, or never will be. Not there: nothing to do. */
void redo_drop(struct redo *r, uint64_t number);
/* Of a task on devices that was kept, and of which nothing was launched: a task of this process, as redo_task_new's, and
 * its launches, with addresses of this process; both the caller's (malloc). Return: as redo_complete. */
int redo_take(struct redo *r, uint64_t number, redo_addr_cb addr, void *arg, struct redo_task **ret,
	      struct launch **ret_launches, struct fault *f);
unsigned redo_task_count(const struct redo_task *t);
/* Of launch @i: its phase, and where the first array is that it changes. */
uint32_t redo_task_phase(const struct redo_task *t, unsigned i);
struct redo_place redo_task_place(const struct redo_task *t, unsigned i);
/* Do some cells of a task that was kept, at most @cells, on this thread, whose slot is @slot. @ret_left: there are more.
 * Return: as redo_complete. */
int redo_complete_some(struct redo *r, uint64_t number, const struct kernels *k, unsigned slot,
		       size_t cells, redo_addr_cb addr, void *arg, bool *ret_left, struct fault *f);

#endif
