#include "job/aliases.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "job/job_types.h"

/* Length limit of a chain of aliases: only a cycle is longer. */
#define MAX_STEPS 64

struct alias_table {
	struct alias_table *next;
	struct htab names; /* values: index + 1 */
};

void aliases_init(struct aliases *a, struct job *job)
{
	*a = (struct aliases){ .job = job };
}

void aliases_deinit(struct aliases *a)
{
	while (a->first) {
		struct alias_table *t = a->first;

		a->first = t->next;
		htab_deinit(&t->names);
		free(t);
	}
	htab_deinit(&a->tables);
	htab_deinit(&a->specs);
}

int aliases_add(struct aliases *a, state_unit *spec)
{
	int r = htab_add(&a->specs, spec->name, spec);

	return r == -EEXIST ? 0 : r;
}

static const state_unit *aliases_find_unit(const struct aliases *a, const char *name)
{
	const struct unit *u = htab_find(&a->job->unit_names, name);

	return u ? u->rec : htab_find(&a->specs, name);
}

static int aliases_fill_table(struct alias_table *t, const state_unit *rec)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < rec->n_tensors; i++) {
		r = htab_add(&t->names, rec->tensors[i]->name, (void *)(uintptr_t)(i + 1));
		r = r == -EEXIST ? 0 : r; /* in a saved state: the first one it is */
	}
	return r;
}

/* Return: NULL without memory. */
static struct alias_table *aliases_table_of(struct aliases *a, const state_unit *rec)
{
	struct alias_table *t = htab_find(&a->tables, rec->name);

	if (t)
		return t;
	t = calloc(1, sizeof(*t));
	if (!t)
		return NULL;
	t->next = a->first;
	a->first = t;
	return aliases_fill_table(t, rec) == 0 && htab_add(&a->tables, rec->name, t) == 0 ? t
											  : NULL;
}

static bool aliases_same_shape(const state_tensor *a, const state_tensor *b)
{
	return a->n_shape == b->n_shape &&
	       (!a->n_shape || memcmp(a->shape, b->shape, a->n_shape * sizeof(*a->shape)) == 0);
}

static int aliases_missing(const state_unit *rec, const state_tensor *t, const char *what,
			   struct fault *f)
{
	return fault_set(f, FAULT_INVALID, "units.tensors.alias_of",
			 "unit '%.64s': tensor '%.64s' is an alias of '%.64s' of unit '%.64s', %s",
			 rec->name, t->name, t->alias_of, t->alias_unit, what);
}

/* Follow one alias from tensor @at of @rec. */
static int aliases_step(struct aliases *a, const state_unit **rec, uint32_t *at, struct fault *f)
{
	const state_tensor *t = (*rec)->tensors[*at];
	const state_unit *of = aliases_find_unit(a, t->alias_unit);
	struct alias_table *table = of ? aliases_table_of(a, of) : NULL;
	uintptr_t found;

	if (!of)
		return aliases_missing(*rec, t, "which does not exist", f);
	if (!table)
		return fault_errno(f, -ENOMEM, "resolving aliases");
	found = (uintptr_t)htab_find(&table->names, t->alias_of);
	if (!found)
		return aliases_missing(*rec, t, "which has no such tensor", f);
	if (!aliases_same_shape(t, of->tensors[found - 1]))
		return aliases_missing(*rec, t, "which has a different shape", f);
	if (of->group != (*rec)->group)
		return aliases_missing(*rec, t, "which is in a different group", f);
	*rec = of;
	*at = (uint32_t)(found - 1);
	return 0;
}

/* Follow an alias to the tensor that it stands for. */
static int aliases_end_of(struct aliases *a, const state_unit **rec, uint32_t *at, struct fault *f)
{
	const state_unit *first = *rec;
	const state_tensor *t = first->tensors[*at];

	for (unsigned i = 0; i < MAX_STEPS; i++) {
		if (!unit_is_alias((*rec)->tensors[*at]))
			return 0;
		if (aliases_step(a, rec, at, f))
			return f->code;
	}
	return aliases_missing(first, t, "which leads to a cycle of aliases", f);
}

int aliases_check(struct aliases *a, const state_unit *rec, struct fault *f)
{
	for (uint32_t i = 0; i < rec->n_tensors; i++) {
		const state_unit *of = rec;
		uint32_t at = i;

		if (aliases_end_of(a, &of, &at, f))
			return f->code;
	}
	return 0;
}

int aliases_resolve(struct aliases *a, struct unit *u, struct fault *f)
{
	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		const state_unit *of = u->rec;
		const struct unit *target;
		uint32_t at = i;

		if (!u->tensors[i].alias)
			continue;
		if (aliases_end_of(a, &of, &at, f))
			return f->code;
		target = htab_find(&a->job->unit_names, of->name);
		CHECK(target);
		u->tensors[i].of_unit = target->id;
		u->tensors[i].of = at;
	}
	return 0;
}
