/* Shared by the files of restore: restore.c (its course), restore_plan.c (the units as they will be),
 * restore_needs.c (which parts they need), restore_layout.c and restore_world.c (the job gets them, and
 * its ranks). */
#ifndef SHARDD_JOB_RESTORE_IMPL_H
#define SHARDD_JOB_RESTORE_IMPL_H

#include <pthread.h>

#include "checkpoint/parts.h"
#include "core/htab.h"
#include "core/loopq.h"
#include "job/job.h"
#include "job/restore.h"

struct restore {
	struct job *job;
	uint8_t stage;
	uint64_t step;
	uint32_t world;
	struct span *span;          /* owned, until it is the job's */
	struct parts_memory *parts; /* owned */
	unsigned n_parts;
	state_job *specs;  /* owned; as they will be, but for the numbers of groups */
	uint32_t launched; /* of an elastic job, as is: */
	uint32_t *started; /* by rank: as which it was started; owned; NULL: it is not elastic */
	struct htab elsewhere; /* of these by name: units of groups that have no rank here */
	struct index x;
	struct waiter waiter; /* for readers, devices, memory */
	bool writes;          /* counted in the job's readers.writing */
	/* LAYING_OUT: what is registered. Owned: the list, and what is in it. Those with numbers come first. */
	state_unit **units;
	size_t n_units;
	uint32_t *numbers, *ids;
	uint32_t n_numbers;
	bool cancelled;
	bool posted; /* @ended is, or the thread runs */
	pthread_t thread;
	struct work ended;
	struct fault f;
	restore_cb done;
	void *userdata;
};

/* Can the job's ranks be where @span says? Return: 0 or a fault code: INVALID. */
int restore_check_span(const struct job *job, const struct span *span, struct fault *f);

/* -- restore_plan.c */

/* What groups need of a job that has these records and ranks; without memory. */
struct restore_plan {
	struct job job;
};

/* @ret: the records, for ranks that are where @o says, without groups' places; state_job_free. Return: 0 or a fault
 * code. */
int restore_plan_decode(const struct job *job, const struct restore_options *o, state_job **ret,
			struct fault *f);
/* @specs, @span: borrowed. @p: restore_plan_deinit, also after an error. Return: 0 or a fault code. */
int restore_plan_init(struct restore_plan *p, const struct job *job, state_job *specs,
		      struct span *span, struct fault *f);
/* A unit as it will be, without memory. @ret: NULL: it only has to be possible. */
int restore_plan_unit(const struct restore_plan *p, state_unit *rec, struct unit **ret,
		      struct fault *f);
/* Safe after an initialiser of zeros, and twice. */
void restore_plan_deinit(struct restore_plan *p);

/* Unpack @o's specs, and lay them out for ranks that are where @o says. @elsewhere: empty before; gets the units
 * of groups that have no rank on this node. Return: 0 or a fault code: both are empty. */
int restore_plan(struct job *job, const struct restore_options *o, state_job **ret_specs,
		 struct htab *elsewhere, struct fault *f);

/* Blobs and buffers in @x are of ranks of the new world. @specs: as decoded, whose numbers are those of the world
 * that was saved. */
void restore_plan_renumber(const state_job *specs, const uint32_t *numbers, uint32_t world,
			   struct index *x);

/* -- restore_world.c */

/* Its ranks and groups are those that the span says. All units are dropped. Return: 0 or negative errno. */
int restore_world_change(struct restore *r);
/* The same where memory stays: ranks that are not placed yet are. */
int restore_world_keep(struct job *job, const struct span *s);
/* Has the job other processes as its ranks than it will have? */
bool restore_world_is_renumbered(const struct restore *r);

/* -- restore_layout.c */

/* The job's units that do not fit go, and its ranks are where the span says: which is the job's then. Return: 0 or
 * a fault code. */
int restore_make_room(struct restore *r);
/* Register those that it needs. RES_WAIT: memory comes later: @r->waiter is told. */
enum res restore_register(struct restore *r);
void restore_layout_deinit(struct restore *r);

#endif
