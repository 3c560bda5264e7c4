/*
 * Extents: bytes of a job as they lie on its devices, one range after the other, and copies between
 * them and memory of the daemon.
 *
 * Memory of the host can be read and written where it is, by any thread. That of other devices is
 * copied by their main queues, behind what was submitted there before: a commit that was answered may
 * not be executed yet. Loop thread, but for extents_read.
 */
#ifndef SHARDD_JOB_EXTENTS_H
#define SHARDD_JOB_EXTENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"
#include "mem/slab.h"

struct job;
struct node;

struct extent {
	struct device *device; /* borrowed */
	char *at;
	uint64_t begin, bytes; /* @begin: among all */
};

struct extents {
	struct extent *all; /* owned, in order */
	size_t n, room;
	uint64_t bytes; /* of all */
};

#define EXTENTS_NULL ((struct extents){ 0 })

/* Add @bytes bytes at @at, memory of @device. @ret: where they begin. Return: 0 or -ENOMEM. */
int extents_add(struct extents *x, struct device *device, void *at, uint64_t bytes, uint64_t *ret);
/* Safe to call twice. */
void extents_deinit(struct extents *x);

/* Is the memory of the node's devices that of the host? */
bool extents_in_place(const struct node *node);
/* Read bytes where they are (extents_in_place). Any thread; nothing is added meanwhile. */
void extents_read(const struct extents *x, uint64_t at, void *to, uint64_t bytes);

struct extents_copy;
/* All of it was executed, or has failed. @status: 0, or the negative errno of a device, never -ENOMEM. */
typedef void (*extents_copy_cb)(struct extents_copy *c, int status);

/* A copy, made of pieces; a task on each device that has any. Embedded by its owner. */
struct extents_copy {
	struct job *job; /* borrowed; pays for the devices' time */
	extents_copy_cb done;
	struct extents_copy_part *parts; /* owned, by device; NULL: nothing was added */
	unsigned pending;
	int status;
};

enum extents_way { EXTENTS_OUT, EXTENTS_IN }; /* to @host, from it */

void extents_copy_init(struct extents_copy *c, struct job *job, extents_copy_cb done);
/* Add @bytes bytes of @x from @at on; the others are at @host. Return: 0 or -ENOMEM. */
int extents_copy_add(struct extents_copy *c, const struct extents *x, uint64_t at, uint64_t bytes,
		     enum extents_way way, void *host);
bool extents_copy_is_empty(const struct extents_copy *c);
/* Begin it; it is not empty. c->done follows, not from here; from there on it is empty again. */
void extents_copy_submit(struct extents_copy *c);
/* It does not run. Safe to call twice. */
void extents_copy_deinit(struct extents_copy *c);

#endif
