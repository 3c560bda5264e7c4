/*
 * The state that must outlive a daemon: jobs, groups, units, slabs, committed step, epoch, blobs.
 * One module, one serialised form (proto/shardd/state/v1/state.proto).
 *
 * The records are the messages themselves, so there are no copies to keep consistent: a job or unit
 * at run time points to its record and keeps nothing persistent elsewhere. Records refer to each
 * other by number, never by pointer. The journal has them packed (store/change.h); beside it a
 * successor gets the slabs' descriptors.
 *
 * Records are malloc'ed as protobuf-c would; state_job_free frees all below.
 * Loop thread only.
 */
#ifndef SHARDD_STORE_STATE_H
#define SHARDD_STORE_STATE_H

#include <stddef.h>
#include <stdint.h>

#include "core/fault.h"
#include "mem/slab.h"
#include "state.pb-c.h"

/* The generated names are long; these stand for them everywhere. */
typedef Shardd__State__V1__State state_all;
typedef Shardd__State__V1__Job state_job;
typedef Shardd__State__V1__Unit state_unit;
typedef Shardd__State__V1__Tensor state_tensor;
typedef Shardd__State__V1__Buffer state_buffer;
typedef Shardd__State__V1__Optimizer state_optimizer;
typedef Shardd__State__V1__Group state_group;
typedef Shardd__State__V1__Slab state_slab;
typedef Shardd__State__V1__Pooled state_pooled;
typedef Shardd__State__V1__Region state_region;
typedef Shardd__State__V1__Part state_part;
typedef Shardd__State__V1__Blob state_blob;
typedef Shardd__State__V1__Checkpoints state_checkpoints;
typedef Shardd__State__V1__Doubt state_doubt;
typedef Shardd__State__V1__Applied state_applied;
typedef Shardd__State__V1__Published state_published;

#define STATE_VERSION 3u

/* New empty records; NULL without memory. @name is copied. */
state_job *state_job_new(const char *name, uint32_t world_size);
state_unit *state_unit_new(const char *name);
state_tensor *state_tensor_new(const char *name, const uint64_t *shape, size_t dims);
state_buffer *state_buffer_new(const char *name, const uint64_t *shape, size_t dims);
state_group *state_group_new(const char *name, const uint32_t *ranks, size_t n);

/* Free a record that is in no job, with everything below it. NULL is allowed. */
void state_job_free(state_job *j);
void state_unit_free(state_unit *u);
void state_group_free(state_group *g);
/* The unit is dropped: where its memory was is not known any more. */
void state_unit_drop(state_unit *u);

/* Append, taking ownership. Return: 0 or -ENOMEM (then still the caller's). */
int state_job_add_group(state_job *j, state_group *g);
int state_job_add_unit(state_job *j, state_unit *u);
int state_unit_add_tensor(state_unit *u, state_tensor *t);
int state_unit_add_buffer(state_unit *u, state_buffer *b);
/* Set the tensor of which @t is an alias; copied. Return: 0 or -ENOMEM. */
int state_tensor_set_alias(state_tensor *t, const char *unit, const char *tensor);
/* Copies @strides, one a dimension. Return: 0 or -ENOMEM. */
int state_tensor_set_strides(state_tensor *t, const uint64_t *strides, size_t dims);
int state_job_add_slab(state_job *j, const struct slab *s);
/* The same for a record. */
int state_job_take_slab(state_job *j, state_slab *s);

/* Drop the last @n slabs again: the undo of a registration that failed. */
void state_job_drop_slabs(state_job *j, size_t n);
/* Drop the one at @i; the others keep their order. */
void state_job_drop_slab(state_job *j, size_t i);
/* Bring them into the order of their numbers. */
void state_job_sort_slabs(state_job *j);

/* Append a record of @s, a slab of a pool. Return: it, the job's; or NULL without memory. */
state_pooled *state_job_add_pooled(state_job *j, const struct slab *s);
/* The same for a record. Return: 0 or -ENOMEM. */
int state_job_take_pooled(state_job *j, state_pooled *p);
/* Drop the one at @i; the last one takes its place. */
void state_job_drop_pooled(state_job *j, size_t i);

/* Append a part without regions. Return: it, the unit's; or NULL. */
state_part *state_unit_add_part(state_unit *u);
/* Store a region by number. Return: 0 or -ENOMEM. */
int state_region_set(state_region **field, const struct region *r);

/* None any more. */
void state_region_free(state_region **field);

/* What Job.kept is of: the units as they are now. */
void state_job_keep(state_job *j);
/* The units are as they were then; @all, or else those that have memory for a copy. Of them, those of
 * which nothing was kept are not initialised. */
void state_job_roll_back(state_job *j, bool all);

/* Append the place of the next rank's buffers. Return: 0 or -ENOMEM. */
int state_unit_add_buffer_region(state_unit *u, const struct region *r);

/* Note on which device rank @rank is. Return: 0 or -ENOMEM. */
int state_job_set_device(state_job *j, uint32_t rank, const char *id);
/* The nodes of its ranks, as text; "": this one. Return: 0 or -ENOMEM. */
int state_job_set_span(state_job *j, const char *text);

#define STATE_NEW_RANK UINT32_MAX

/* The ranks that a job will have. */
struct state_size {
	state_group *world;         /* taken; the job's only group */
	const char *const *devices; /* by rank, ids; copied, as are the numbers */
	const uint32_t *from;       /* by rank: which one it was; STATE_NEW_RANK: none */
	uint32_t launched;          /* with @numbers: as in Job */
	const uint32_t *numbers;    /* by rank; NULL: none */
};

/* Blobs go with their ranks, and those of ranks that there are no more are freed: @ret_gone, @ret_bytes:
 * how many, and their bytes. Return: 0 or -ENOMEM: nothing has changed. */
int state_job_resize(state_job *j, const struct state_size *to, uint32_t *ret_gone,
		     uint64_t *ret_bytes);
/* Drop the blobs of ranks from @ranks on. As above. */
void state_job_drop_blobs(state_job *j, uint32_t ranks, uint32_t *ret_gone, uint64_t *ret_bytes);

/* Note which run of a launcher the state belongs to; copied. Return: 0 or -ENOMEM. */
int state_job_set_run(state_job *j, const char *run);

/* Replace the policy by a copy of @c; NULL: there is none any more. Return: 0 or -ENOMEM. */
int state_job_set_checkpoints(state_job *j, const state_checkpoints *c);
/* Return: NULL without memory; ended by state_doubt_free, which takes NULL. */
state_doubt *state_doubt_new(void);
void state_doubt_free(state_doubt *d);
void state_blob_free(state_blob *b);
/* Append to d->blobs or d->marks a copy of @data. Return: 0 or -ENOMEM. */
int state_doubt_add_blob(state_blob ***list, size_t *n, uint32_t rank, uint64_t step,
			 const void *data, size_t bytes);
/* There is a record of the last Step of the group with key @group. Return: 0 or -ENOMEM. */
int state_job_reserve_applied(state_job *j, uint64_t group);
/* That record; NULL: there is none. */
state_applied *state_job_applied(const state_job *j, uint64_t group);
/* Append a publication with a copy of @declaration. Return: it, the job's; NULL without memory. */
state_published *state_job_add_published(state_job *j, const Shardd__V1__Publication *declaration);
/* Free it. */
void state_job_drop_published(state_job *j, state_published *p);
/* The same of said_checkpoints. */
int state_job_set_said_checkpoints(state_job *j, const state_checkpoints *c);

/* Replace rank @rank's blob; takes @data (malloc'ed). Return: 0 or -ENOMEM. */
int state_job_set_blob(state_job *j, uint32_t rank, uint8_t *data, size_t bytes, uint64_t step);
/* The same; takes *@b, and leaves NULL there. */
int state_job_take_blob(state_job *j, state_blob **b);
/* Return: the blob, or NULL. */
const state_blob *state_job_blob(const state_job *j, uint32_t rank);

/* The following are in state_check.c. */

/* Pack @jobs. @ret: malloc'ed, the caller's. Return: 0 or -ENOMEM. */
int state_encode(state_job *const *jobs, size_t n, uint32_t next_slab, uint8_t **ret,
		 size_t *ret_bytes);

/* Check every number that the rest of the daemon relies on (regions inside their slabs, groups of
 * existing ranks, known enums, finite factors). Return: 0 or a fault code. */
int state_check(const state_all *s, struct fault *f);

/* Unpack and check. @ret: state_free. Return: 0 or a fault code. */
int state_decode(const uint8_t *data, size_t bytes, state_all **ret, struct fault *f);

/* The groups and units of @j, as records without memory, and of a job whose name and world size alone are
 * set. @ret_bytes: of what is returned, malloc'ed, the caller's; NULL without memory. */
uint8_t *state_specs_encode(const state_job *j, size_t *ret_bytes);
/* Unpack and check them. @ret: state_job_free. Return: 0 or a fault code. */
int state_specs_decode(const uint8_t *data, size_t bytes, state_job **ret, struct fault *f);

/* Free, with every job that was not taken out (set its pointer to NULL). */
void state_free(state_all *s);

#endif
