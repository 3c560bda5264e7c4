/*
 * A generation: bytes of a job as they were at one moment, which another thread reads while the job
 * goes on. They lie on any of the job's devices.
 *
 * It costs nothing to begin one. Before something writes to such bytes (readers_let asks
 * generation_let), all that was not read yet is copied, once, to memory that the job pays for. Much of
 * it may be copied before that, while the trainers compute: block by block, from the end on. A block
 * of the copy is given back when it has been read. The bytes lie one after the other, in the order
 * in which they were added, and are copied and given back in blocks.
 *
 *   block:  LIVE --a writer comes--> COPIED
 *             '----there is no memory for copies--> LOST: what is read of it fails
 *
 * The thread reads LIVE blocks of host memory in place. A writer waits until it has left the one that
 * it is in. LIVE blocks of GPUs are copied to memory of the host for it (job/staging.h), a few of them
 * ahead of the one that it waits for; what is copied before a change goes there, too.
 * At most one generation of a job is open. Loop thread, but for generation_read.
 */
#ifndef SHARDD_JOB_GENERATION_H
#define SHARDD_JOB_GENERATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "core/loopq.h"
#include "core/res.h"

struct device;
struct generation;
struct job;

/* All is copied, or it is over: writers may go on. Not called by generation_end itself. */
typedef void (*generation_cb)(struct job *job);

/* Empty, not open yet. @changed: called from the loop. Return: NULL without memory. */
struct generation *generation_new(struct job *job, struct loopq *loopq, generation_cb changed);
/* Add @bytes bytes at @at, memory of @device that the job does not free while the generation is
 * open and not copied. They are best added in the order in which they will be read. @ret: where they
 * begin in it. Return: 0 or -ENOMEM. */
int generation_add(struct generation *g, struct device *device, void *at, uint64_t bytes,
		   uint64_t *ret);
/* From here on writers copy first. Return: 0 or -ENOMEM. */
int generation_open(struct generation *g);
/* Nobody reads it any more. It is freed now, or when its copy is made. NULL is allowed. Return: NULL. */
struct generation *generation_end(struct generation *g);

/* May the job's bytes be written? RES_WAIT: they are being copied; @changed comes when it is over. */
enum res generation_let(struct job *job);
/* Is the copy being made just now? */
bool generation_is_copying(const struct job *job);
/* Other memory is needed: give copies back that are not read yet. Those that were made ahead may be
 * made again; without others (@lose) the generation is lost. Return: bytes. */
uint64_t generation_evict(struct job *job, bool lose);
/* Will a copy that is being made or read just now give memory back? Then generation_evict may free
 * more afterwards: node->changed is signalled. */
bool generation_gives_later(struct job *job);
/* Give the memory of copies back that have been read; while the job works, copy ahead of its first
 * change. Call now and then. */
void generation_tick(struct job *job);
/* Why there are LOST blocks: -ENOMEM, or the negative errno of a device that failed. 0: there are none.
 * Any thread. */
int generation_lost(const struct generation *g);
/* Bytes that were copied before a change, so far. */
uint64_t generation_copied(const struct generation *g);

/* Read @bytes bytes at @at, each byte once. One thread at a time, not the loop's: it waits for copies of
 * what is on GPUs. Return: 0, or what generation_lost says: they are LOST. */
int generation_read(struct generation *g, uint64_t at, void *to, size_t bytes);

#endif
