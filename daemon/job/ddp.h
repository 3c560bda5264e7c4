/*
 * DistributedDataParallel: the gradients of replicated units, reduced in buckets.
 *
 * A ddp has its tensors in a fixed order and assigns them to buckets twice: when it is made,
 * and once more in the order in which gradients arrived on its first rank. Each rank has a
 * buffer with the gradients of all its buckets, and says of one tensor after the other that
 * it is there. A rank's bucket is launched when all its tensors are ready and every bucket before
 * it has been launched; when all ranks have launched it, op/ reduces it.
 *
 * On several nodes each has the same ddp with the state of its own ranks; what it has to know of the
 * others, the buckets show (ddp/op_ddp_bucket.c).
 *
 * A pass of one rank:
 *
 *   NONE --backward--> OPEN --ready... (launches)--> all launched --finish--> NONE
 *
 * This module is arithmetic and bookkeeping; ops and memory belong to op/. A ddp lives as long as
 * the epoch in which it was created, and then until nothing of it runs. Loop thread only.
 */
#ifndef SHARDD_JOB_DDP_H
#define SHARDD_JOB_DDP_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "core/fault.h"
#include "job/group.h"
#include "unit/runs.h"
#include "unit/unit.h"

struct job;

#define DDP_MAX_WAITS  8u
#define DDP_MAX_LIMITS 4096u

struct ddp_tensor {
	struct unit *unit; /* borrowed */
	uint32_t tensor;   /* index in its record */
	uint64_t elements;
	bool sparse;
};

/* One assignment. */
struct ddp_buckets {
	uint32_t n;
	uint32_t *tensors;  /* indices, bucket after bucket */
	uint32_t *begin;    /* by bucket: index of its first in @tensors; one more at the end */
	uint32_t *of;       /* by tensor: its bucket */
	uint64_t *offset;   /* by tensor: byte in a rank's buffer */
	uint64_t *elements; /* by bucket: of all its tensors; 0: a sparse one */
	uint64_t bytes;     /* of a rank's buffer; 0: all tensors are sparse */
};

enum { DDP_READY = 1, DDP_UNUSED = 2, DDP_ZERO = 4, DDP_NAMED = 8 };

/* Entries of a sparse gradient. */
struct ddp_rows {
	int64_t *rows; /* our own copy: a trainer cannot change it after it was checked */
	uint64_t n;
	uint64_t buffer, values_offset; /* of the values */
};

/* Make a copy, charged to the payer. Return: 0 or a fault code. */
int ddp_rows_copy(struct job *job, const int64_t *rows, size_t n, struct ddp_rows *ret,
		  struct fault *f);
/* Safe to call twice. */
void ddp_rows_deinit(struct job *job, struct ddp_rows *r);

struct ddp_rank {
	struct ddp *ddp;
	uint64_t buffer;       /* id among its member's buffers; 0: none */
	unsigned layout;       /* which assignment it has */
	bool open;             /* in a pass */
	bool moving;           /* a forward is under way */
	bool finishing;        /* a finish is */
	uint64_t begun;        /* passes */
	uint64_t passes;       /* finished */
	uint8_t *flags;        /* by tensor, of the present pass */
	bool counted;          /* static graph: the first pass is over */
	uint32_t *hooks;       /* static graph, by tensor: gradients in the first pass; NULL else */
	uint32_t *left;        /* of these, in the present pass */
	uint32_t *missing;     /* by bucket: tensors that are not ready */
	struct ddp_rows *rows; /* by tensor; NULL: none is sparse */
	uint32_t launched;     /* buckets */
	uint32_t under_way;    /* of these, of an earlier pass perhaps: what they read must stay */
	struct backend_wait waits[DDP_MAX_WAITS]; /* points that its streams must have reached */
	unsigned n_waits;
	struct fault fault; /* of the first bucket that failed in this pass */
};

struct ddp {
	uint32_t id;
	uint64_t number; /* of the DdpCreate in its group: the same on all nodes */
	uint64_t epoch;  /* it was made in */
	struct job *job;
	struct group *group; /* borrowed */
	uint32_t n;
	struct ddp_tensor *tensors;
	bool any_sparse, find_unused, static_graph;
	bool in_backward; /* some of its units are stepped there */
	uint64_t *limits; /* of the first bucket, the second..., the last of all others */
	unsigned n_limits;
	bool limits_hold;              /* also before the order of arrival is known */
	struct ddp_buckets layouts[2]; /* of which the second comes with the rebuild */
	unsigned n_layouts;
	uint32_t *arrival; /* tensors in the order in which they got ready on the first rank */
	uint32_t n_arrived;
	uint8_t *untouched;     /* by tensor: no rank used it in the last pass */
	uint32_t *untouched_of; /* room for the answer: their indices */
	uint64_t *reduced;      /* by tensor: passes that all ranks had begun when it was last */
	struct ddp_rank *ranks; /* by index among the group's members on this node */
	uint32_t n_ranks;       /* of these */
	uint64_t stood_in;      /* passes in which none of these had inputs, and others had */
	bool has_first;         /* ranks[0] is the first of the group */
	uint64_t charged;
};

/* What a caller specifies. @units: of the job, the same group, REPLICATE. */
struct ddp_spec {
	struct group *group;
	const uint32_t *units;
	size_t n_units;
	bool (*is_sparse)(const void *arg, uint32_t unit, uint32_t tensor);
	const void *arg;
	const uint64_t *limits; /* of buckets, none 0; copied */
	unsigned n_limits;      /* at least 1 */
	bool limits_hold;       /* also before the order of arrival is known */
	bool find_unused, static_graph;
	uint64_t number; /* of the op that asks for it */
};

/* Create one in the present epoch; those of earlier epochs are freed. Return: 0 or a fault code. */
int ddp_new(struct job *job, const struct ddp_spec *spec, struct ddp **ret, struct fault *f);
/* Free all ddps of a job whose members are gone. */
void ddps_free(struct job *job);
/* By id, of the epoch @epoch. Return: NULL if there is none. */
struct ddp *ddp_by_id(struct job *job, uint32_t id, uint64_t epoch);

/* Make the second assignment, in the order of arrival. Return: 0 or -ENOMEM. */
int ddp_rebuild(struct ddp *d);
/* Will there be one? */
bool ddp_rebuilds(const struct ddp *d);
/* May ranks leave tensors out? */
bool ddp_may_leave_out(const struct ddp *d);
/* The order of arrival on the first rank, of the node that has it; nothing to do if it is known.
 * @order: d->n tensors. Return: 0, -EINVAL (it is no order of these), or -ENOMEM. */
int ddp_arrived_elsewhere(struct ddp *d, const uint32_t *order);
/* The state of a rank of the job; NULL: no member of the ddp's group on this node. */
struct ddp_rank *ddp_rank_of(const struct ddp *d, uint32_t rank);

/* "unit.tensor" of tensor @i. Return: @buf. */
const char *ddp_tensor_name(const struct ddp *d, uint32_t i, char *buf, size_t bytes);

/* The piece of a tensor that a part of its unit holds; n is 0: nothing. */
struct unit_run ddp_run(const struct ddp *d, unsigned part, uint32_t tensor);
const struct ddp_buckets *ddp_buckets_of(const struct ddp_rank *r);

/* All functions below return 0, or a fault code; in that case nothing has changed. */

/* Is @u in the buckets of a ddp? */
bool ddp_has_unit(const struct job *job, const struct unit *u);
/* Is any rank in a pass with the buckets that contain @u, or are such buckets being reduced? */
bool ddp_unit_is_busy(const struct job *job, const struct unit *u);
/* Number of passes that rank @rank has ended, in all ddps that contain @u. */
uint64_t ddp_unit_passes(const struct job *job, const struct unit *u, uint32_t rank);
/* Is the rank in a pass in which it has handed over all gradients of @u? That is: named them
 * unused, reported them ready, or will do so at the end of the pass (the first pass of a static
 * graph). */
bool ddp_unit_is_ready(const struct job *job, const struct unit *u, uint32_t rank);
/* A forward of @r begins. @ret_layout: the assignment that it must have after it. */
int ddp_forward(struct ddp_rank *r, unsigned *ret_layout, struct fault *f);
/* The rank has these buffers now. */
void ddp_moved(struct ddp_rank *r, unsigned layout, uint64_t buffer);
/* A pass begins, in which the tensors in @unused and @kept have no gradient. */
int ddp_backward(struct ddp_rank *r, const uint32_t *unused, size_t n_unused, const uint32_t *kept,
		 size_t n_kept, struct fault *f);
/* These gradients are ready. @rows: of a sparse one, taken over on success; may be NULL. */
int ddp_ready(struct ddp_rank *r, const uint32_t *tensors, size_t n, struct ddp_rows *rows,
	      struct fault *f);
/* The pass should end: is everything launched, or ready for launch? */
int ddp_finish(struct ddp_rank *r, struct fault *f);
/* End the first pass of a static graph: everything is ready, and tensors without a gradient are
 * unused. */
void ddp_end_first_static(struct ddp_rank *r);

/* Tensor @i was reduced in the present pass. Return: whether it was the last of its unit. */
bool ddp_reduced(struct ddp *d, uint32_t i);

/* Take the next bucket of @r that can be launched now; it counts as launched. Return: its number,
 * or -1. */
int64_t ddp_launch(struct ddp_rank *r);

/* Add streams of the rank for which its buckets wait. Return: 0 or a fault code. */
int ddp_wait(struct ddp_rank *r, const struct backend_wait *waits, unsigned n, struct fault *f);

#endif
