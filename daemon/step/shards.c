/*
 * What collectives do with gradient shards: which of them, unscaling, norms. Clip, Unscale
 * and the Reduce of a planned backward pass are made of these.
 */
#include "step/shards.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/fnv.h"
#include "op/op.h"
#include "op/op_list.h"
#include "unit/norm.h"
#include "unit/optim.h"
#include "work/coll.h"
#include "step/clip.h"

void shards_free(struct coll *c)
{
	share_end(&shards_of(c)->share);
}

/* ------------------------------------------------------------- which of them */

static int shards_compare_ids(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

/* By its group. A collective of the whole job has all its devices. */
static bool shards_is_asked_for(const struct coll *c, const struct unit *u)
{
	return u->rec->group == c->group->id || clip_args(c->ops[0])->whole_job;
}

bool shards_take_part(const struct coll *c, const struct unit *u)
{
	const struct op *op = c->ops[0];

	CHECK(!c->unit || c->unit->rec->group == c->group->id);
	if (c->unit)
		return u == c->unit;
	if (!u->has_gradient || !shards_is_asked_for(c, u))
		return false;
	return !clip_args(op)->n_units || bsearch(&u->id, op->owned, clip_args(op)->n_units,
						  sizeof(uint32_t), shards_compare_ids);
}

/* The units to ask shards_take_part of: all, or the one. */
static uint32_t shards_first_of(const struct coll *c)
{
	return c->unit ? c->unit->id - 1 : 0;
}

static uint32_t shards_end_of(const struct coll *c)
{
	return c->unit ? c->unit->id : c->job->n_units;
}

static int shards_check_unit(const struct op *op, uint32_t id, struct fault *f)
{
	const struct unit *u = job_unit_by_number(op->m->job, id);

	if (!u)
		return fault_set(f, FAULT_NOT_FOUND, "units",
				 "there is no unit %u in job '%s': its units are 1 to %u", id,
				 op->m->job->rec->name, op->m->job->n_units);
	if (u->rec->group == op->group->id)
		return 0;
	return fault_set(f, FAULT_INVALID, "units",
			 "unit %u ('%.100s') is of another group than '%.64s'", id, u->rec->name,
			 op->group->rec->name);
}

int shards_take_units(struct op *op, const uint32_t *units, size_t n, struct fault *f)
{
	uint32_t *ids;
	size_t kept = 0;

	if (!n)
		return 0;
	if (n > op->m->job->n_units)
		return fault_set(f, FAULT_INVALID, "units",
				 "units has %zu entries: job '%s' has %u units", n,
				 op->m->job->rec->name, op->m->job->n_units);
	for (size_t i = 0; i < n; i++)
		if (shards_check_unit(op, units[i], f))
			return f->code;
	ids = malloc(n * sizeof(*ids));
	if (!ids)
		return fault_errno(f, -ENOMEM, "choosing units");
	memcpy(ids, units, n * sizeof(*ids));
	qsort(ids, n, sizeof(*ids), shards_compare_ids);
	for (size_t i = 0; i < n; i++)
		if (!kept || ids[kept - 1] != ids[i])
			ids[kept++] = ids[i];
	op->owned = ids;
	clip_args(op)->n_units = kept;
	return 0;
}

/* FNV-1a. */
uint64_t shards_word(const struct op *op)
{
	const uint32_t *ids = op->owned;
	uint64_t h = FNV_BEGIN;

	for (size_t i = 0; i < clip_args(op)->n_units; i++)
		h = fnv_add(h, ids[i]);
	return h;
}

int shards_check_whole(const struct coll *c, struct fault *f)
{
	for (uint32_t i = 0; i < c->job->n_units; i++) {
		const struct unit *u = c->job->units[i];

		if (!shards_is_asked_for(c, u))
			continue;
		if (u->step == UNIT_STEP_STEPPED || u->step == UNIT_STEP_STEPPING ||
		    u->step == UNIT_STEP_DUE)
			return fault_set(f, FAULT_STATE, NULL,
					 "the optimizer of unit '%.100s' used its gradient in "
					 "backward: clip and unscale by PlanBackward, before the "
					 "backward pass",
					 u->rec->name);
		if (u->shards_from)
			return fault_set(f, FAULT_STATE, NULL,
					 "the gradient of unit '%.100s' belongs to the "
					 "trainers' own optimizers since its Reduce",
					 u->rec->name);
		if (u->step == UNIT_STEP_ARRIVED)
			return fault_set(f, FAULT_STATE, NULL,
					 "the gradient of unit '%.100s' belongs to the plan of "
					 "this backward pass",
					 u->rec->name);
	}
	return 0;
}

const struct unit_part *shards_part(const struct coll *c, const struct unit *u, unsigned d)
{
	for (unsigned i = 0; i < u->n_parts; i++)
		if (u->parts[i].device == c->parts[d].device)
			return &u->parts[i];
	return NULL;
}

/* Launches on one device: one for each unit. */
static size_t shards_launches_room(const struct coll *c)
{
	return shards_end_of(c) - shards_first_of(c);
}

/* ---------------------------------------------------------------- unscaling */

static enum res shards_clear_found(struct coll *c)
{
	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++)
		coll_launch(&c->parts[d], LAUNCH_FILL, 1)->fill =
			(struct k_fill){ .dst = region_addr(&c->parts[d].scratch[COLL_FOUND_INF]),
					 .kind = FILL_CONSTANT };
	return coll_kernels(c);
}

static enum res shards_multiply(struct coll *c)
{
	RES_TRY(coll_need_launches(c, shards_launches_room(c)));
	for (uint32_t i = shards_first_of(c); i < shards_end_of(c); i++) {
		const struct unit *u = c->job->units[i];

		CHECK(!shards_take_part(c, u) || u->n_parts == c->n_parts);
		for (unsigned d = 0; shards_take_part(c, u) && d < c->n_parts; d++)
			if (u->parts[d].n)
				coll_launch(&c->parts[d], LAUNCH_UNSCALE, u->parts[d].n)->unscale =
					(struct k_unscale){
						optim_at(&u->parts[d].grads, 0),
						shards_of(c)->factor,
						region_addr(&c->parts[d].scratch[COLL_FOUND_INF])
					};
	}
	return coll_kernels(c);
}

static enum res shards_read_found(struct coll *c)
{
	RES_TRY(coll_need_launches(c, 1));
	for (unsigned d = 0; d < c->n_parts; d++)
		coll_launch(&c->parts[d], LAUNCH_COPY, sizeof(float))->copy =
			(struct k_copy){ &c->parts[d].found_inf,
					 region_addr(&c->parts[d].scratch[COLL_FOUND_INF]) };
	return coll_kernels_sync(c);
}

/* What an epoch that has ended has found is not the next one's. */
static void shards_keep_found(struct coll *c)
{
	for (unsigned d = 0; c->ops[0]->m->epoch == c->job->rec->epoch && d < coll_devices(c); d++)
		if (*(const float *)share_slot(&shards_of(c)->share, d) != 0)
			c->group->found_inf = true;
}

static enum res shards_show_found(struct coll *c)
{
	RES_TRY(share_begin(c, &shards_of(c)->share, sizeof(float)));
	for (unsigned d = 0; d < c->n_parts; d++)
		*(float *)share_own(c, &shards_of(c)->share, d) = c->parts[d].found_inf;
	return RES_DONE;
}

enum shards_stage { SHARDS_CLEAR, SHARDS_MULTIPLY, SHARDS_READ, SHARDS_SHOW, SHARDS_KEEP };

enum res shards_unscale_tick(struct coll *c)
{
	switch ((enum shards_stage)shards_of(c)->stage) {
	case SHARDS_CLEAR:
		shards_of(c)->stage = SHARDS_MULTIPLY;
		return shards_clear_found(c);
	case SHARDS_MULTIPLY:
		shards_of(c)->stage = SHARDS_READ;
		return shards_multiply(c);
	case SHARDS_READ:
		shards_of(c)->stage = SHARDS_SHOW;
		return shards_read_found(c);
	case SHARDS_SHOW:
		RES_TRY(shards_show_found(c));
		shards_of(c)->stage = SHARDS_KEEP;
		fallthrough;
	case SHARDS_KEEP:
		RES_TRY(share_tick(c, &shards_of(c)->share));
		shards_of(c)->stage = SHARDS_CLEAR;
		shards_keep_found(c);
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

/* -------------------------------------------------------------------- norms */

/* The number of the part of @u on device @number of the collective's. UINT_MAX: it has none there. */
static unsigned shards_number_on(const struct coll *c, const struct unit *u, unsigned number)
{
	const struct group *all = c->group, *g = c->job->groups[u->rec->group];

	for (uint32_t i = 0; g != all && i < group_size(g); i++)
		if (group_device_number(all, g->rec->ranks[i]) == number)
			return group_device_number(g, i);
	return g == all ? number : UINT_MAX;
}

/* Blocks of @u that count on device @number of the collective's. */
static size_t shards_blocks(const struct coll *c, const struct unit *u, unsigned number)
{
	unsigned part = shards_take_part(c, u) ? shards_number_on(c, u, number) : UINT_MAX;

	return norm_blocks_of(u, part);
}

/* Of all units. */
static size_t shards_all_blocks(const struct coll *c, unsigned number)
{
	size_t n = 0;

	for (uint32_t i = shards_first_of(c); i < shards_end_of(c); i++)
		n += shards_blocks(c, c->job->units[i], number);
	return n;
}

/* A slot for the blocks of each device. */
static enum res shards_norm_begin(struct coll *c)
{
	size_t most = 0;

	for (unsigned d = 0; d < coll_devices(c); d++) {
		size_t n = shards_all_blocks(c, d);

		most = n > most ? n : most;
	}
	return share_begin(c, &shards_of(c)->share, most * sizeof(double));
}

static enum res shards_norm(struct coll *c, double type)
{
	RES_TRY(shards_norm_begin(c));
	RES_TRY(coll_need_launches(c, shards_launches_room(c)));
	for (unsigned d = 0; d < c->n_parts; d++) {
		double *at = share_own(c, &shards_of(c)->share, d);

		for (uint32_t i = shards_first_of(c); i < shards_end_of(c); i++) {
			const struct unit *u = c->job->units[i];
			const struct unit_part *p =
				shards_take_part(c, u) ? shards_part(c, u, d) : NULL;

			if (!p || !norm_counts(u, (unsigned)(p - u->parts)))
				continue;
			norm_launch(coll_launch(&c->parts[d], LAUNCH_NORM, 0), p, type, at);
			at += norm_blocks(p);
		}
	}
	return coll_kernels_sync(c);
}

enum shards_norm_stage { NORM_BEGIN, NORM_SHOW };

enum res shards_norm_tick(struct coll *c, double type)
{
	switch ((enum shards_norm_stage)shards_of(c)->norm_stage) {
	case NORM_BEGIN:
		shards_of(c)->norm_stage = NORM_SHOW;
		return shards_norm(c, type);
	case NORM_SHOW:
		RES_TRY(share_tick(c, &shards_of(c)->share));
		shards_of(c)->norm_stage = NORM_BEGIN;
		return RES_DONE;
	}
	CHECK_NOT_REACHED();
}

double shards_total(const struct coll *c, double type)
{
	double sum = 0;

	for (unsigned d = 0; d < coll_devices(c); d++) {
		const double *at = share_slot(&shards_of(c)->share, d);
		size_t n = shards_all_blocks(c, d);

		for (size_t i = 0; i < n; i++)
			sum = norm_add(sum, at[i], type);
	}
	return norm_of(sum, type);
}

double *shards_take_norms(const struct coll *c)
{
	double *norms = malloc((norm_partials(c->unit) + 1) * sizeof(*norms)), *to = norms;

	for (unsigned d = 0; norms && d < coll_devices(c); d++) {
		size_t n = shards_all_blocks(c, d);

		memcpy(to, share_slot(&shards_of(c)->share, d), n * sizeof(*norms));
		to += n;
	}
	return norms;
}
