/*
 * Tied tensors: resolves the other names of a tensor to the tensor of the job, across its units and
 * those that are being registered. Loop thread only.
 */
#ifndef SHARDD_JOB_ALIASES_H
#define SHARDD_JOB_ALIASES_H

#include "core/fault.h"
#include "core/htab.h"
#include "store/state.h"

struct alias_table;
struct job;
struct unit;

struct aliases {
	struct job *job;    /* borrowed */
	struct htab specs;  /* of state_unit: units that the job does not have yet */
	struct htab tables; /* of struct alias_table: tensors by name, of units asked for */
	struct alias_table *first;
};

void aliases_init(struct aliases *a, struct job *job);
void aliases_deinit(struct aliases *a);
/* @spec: borrowed; an existing one of the same name is used instead. Return: 0 or -ENOMEM. */
int aliases_add(struct aliases *a, state_unit *spec);

/* Check that every alias of @rec leads to a tensor of the same shape, in a unit of the same group,
 * that is not an alias itself. Return: 0 or a fault code. */
int aliases_check(struct aliases *a, const state_unit *rec, struct fault *f);
/* Record what the aliases among u->tensors stand for; all units belong to the job by now. Return: 0
 * or a fault code. */
int aliases_resolve(struct aliases *a, struct unit *u, struct fault *f);

#endif
