/*
 * A unit that gets another layout: the record and the unit as they will be, and new memory for its
 * arrays. The caller copies the elements and makes the exchange. Loop thread only.
 */
#ifndef SHARDD_JOB_RELAYOUT_H
#define SHARDD_JOB_RELAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "job/node.h"
#include "store/state.h"
#include "unit/unit.h"

struct job;

/* The arrays of a part: 0: parameters, 1: gradients, from 2: optimizer state. */
#define RELAYOUT_ARRAYS (2 + UNIT_MAX_STATES)

struct relayout {
	struct unit *old;
	state_unit
		rec; /* as it will be; owned are its parts, and tensors that are not the unit's */
	struct unit *fresh; /* laid out by that; owned */
	bool copied;        /* it gets memory for a copy, too (job/kept.h) */
};

/* New memory, by device of the node. */
enum relayout_slab { RELAYOUT_PARAMS, RELAYOUT_OTHERS, RELAYOUT_KEPT, RELAYOUT_SLABS };

struct relayout_memory {
	struct {
		uint64_t bytes[RELAYOUT_SLABS];
		uint64_t at[RELAYOUT_SLABS];
		struct slab *slabs[RELAYOUT_SLABS]; /* owned */
	} on[NODE_MAX_DEVICES];
};

/* unit_state_at and unit_state_dtype say the same of all arrays from 1 on, so that they may be asked
 * with these numbers. */
struct region *relayout_array(struct unit_part *p, unsigned i);
/* Array @i of @p and of its record becomes @r. Return: 0 or -ENOMEM. */
int relayout_set_array(struct unit_part *p, state_part *rec, unsigned i, const struct region *r);

/* Free what is its own but its tensors. Safe to call twice. */
void relayout_deinit(struct relayout *x);

/* Bytes of array @i of each part of @u. */
uint64_t relayout_array_bytes(const struct unit *u, unsigned i);
/* Will the unit have array @i? */
bool relayout_has_array(const struct relayout *x, unsigned i);
/* Add what its arrays take to m->on[].bytes. */
void relayout_sum(const struct relayout *x, struct relayout_memory *m);

/* Request all slabs at once, so that devices make them in parallel; call again after SLAB_E_LATER.
 * Return: 0, SLAB_E_*, or negative errno. */
int relayout_take(struct job *job, struct relayout_memory *m);
/* One slab of shards, if need be in place of what job_evict gives back. Return: as slab_new. */
int relayout_take_slab(struct job *job, struct device *d, uint64_t bytes, struct slab **ret);
/* Bytes on all devices. */
uint64_t relayout_bytes(const struct relayout_memory *m);
/* A place for each of its arrays, in the unit and in the record. Call it for the units in the order
 * of relayout_sum. Return: 0 or -ENOMEM. */
int relayout_place(struct relayout *x, struct relayout_memory *m);
/* The slabs become the job's, too. Return: 0 or -ENOMEM. */
int relayout_enter(struct job *job, const struct relayout_memory *m);
/* Give the references back. Safe to call twice. */
void relayout_memory_deinit(struct relayout_memory *m);

#endif
