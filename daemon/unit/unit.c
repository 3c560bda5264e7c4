#include "unit/unit.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/fnv.h"
#include "core/state.h"

#define UNIT_MAGIC 0x554e4954u

static uint64_t unit_aligned(uint64_t bytes)
{
	return (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
}

uint64_t unit_array_bytes(const struct layout *l, unsigned spread)
{
	return unit_aligned(layout_part(l, spread) * sizeof(float));
}

uint64_t unit_params_bytes(const state_unit *rec, const struct layout *l, unsigned spread)
{
	return unit_aligned((layout_part(l, spread) + layout_frozen_part(l, spread)) *
			    dtype_size(unit_state_dtype(rec, 0)));
}

unsigned unit_state_arrays(const state_unit *rec)
{
	if (rec->optimizer->kind == OPTIM_ADAMW || rec->optimizer->kind == OPTIM_ADAM)
		return rec->optimizer->amsgrad ? 3 : 2;
	return rec->optimizer->kind == OPTIM_SGD && rec->optimizer->momentum != 0 ? 1 : 0;
}

struct region *unit_state(struct unit_part *p, unsigned i)
{
	struct region *const arrays[] = { &p->params, &p->state1, &p->state2, &p->state3 };

	static_assert(ARRAY_SIZE(arrays) == 1 + UNIT_MAX_STATES, "all of them");
	CHECK(i < ARRAY_SIZE(arrays));
	return arrays[i];
}

enum dtype unit_state_dtype(const state_unit *rec, unsigned i)
{
	return i ? DTYPE_FP32 : (enum dtype)rec->storage_dtype;
}

void *unit_state_at(const state_unit *rec, const struct region *r, unsigned i, uint64_t at)
{
	return (char *)region_addr(r) + at * dtype_size(unit_state_dtype(rec, i));
}

bool unit_pools_gradient(const state_unit *rec)
{
	return rec->optimizer->when == OPTIM_IN_BACKWARD ||
	       rec->optimizer->when == OPTIM_BY_TRAINER;
}

bool unit_steps_early(const state_unit *rec)
{
	const state_optimizer *o = rec->optimizer;

	return o->when == OPTIM_BY_TRAINER ||
	       (o->when == OPTIM_IN_BACKWARD && o->kind != OPTIM_NONE);
}

/* Allocates parts and tensors, or neither. The caller sets the memory. */
static int unit_make_arrays(struct unit *u, const struct layout *layout)
{
	u->parts = calloc(u->n_parts, sizeof(*u->parts));
	u->tensors = unit_tensors_new(u->rec, layout, &u->packed);
	if (u->parts && u->tensors)
		return 0;
	free(u->parts);
	free(u->tensors);
	return -ENOMEM;
}

/* In DIM0 the gaps between tensors are included. */
uint64_t unit_end_at(const struct unit *u, unsigned position)
{
	const struct layout *l = &u->layout;

	return l->dim0 ? unit_tensors_end(u, position) : layout_part_owned(l, u->spread, position);
}

unsigned unit_position(const struct unit *u, const struct unit_part *p)
{
	return (u->first_part + (unsigned)(p - u->parts)) % u->spread;
}

int unit_new(uint32_t id, state_unit *rec, const struct layout *layout,
	     const struct unit_place *place, struct unit **ret)
{
	struct unit *u = calloc(1, sizeof(*u));

	CHECK(place->n > 0 && place->first + place->n <= place->all);
	if (!u)
		return -ENOMEM;
	u->rec = rec;
	u->n_parts = place->n;
	u->all_parts = place->all;
	u->first_part = place->first;
	if (unit_make_arrays(u, layout) < 0) {
		free(u);
		return -ENOMEM;
	}
	u->magic = UNIT_MAGIC;
	u->id = id;
	u->key = fnv_add_text(FNV_BEGIN, rec->name);
	u->version = 1;
	condition_init(&u->cast_done, "a cast");
	list_init(&u->idle);
	condition_init(&u->step_done, "the step of the unit in backward");
	unit_lay_out(u, layout, place->devices);
	*ret = u;
	return 0;
}

void unit_lay_out(struct unit *u, const struct layout *layout, struct device *const *devices)
{
	u->layout = *layout;
	u->spread = layout_spread(layout, u->all_parts);
	if (layout->dim0)
		u->layout.elements = unit_part_elements(u) * u->spread;
	for (unsigned d = 0; d < u->n_parts; d++) {
		struct unit_part *p = &u->parts[d];

		p->device = devices ? devices[d] : p->device;
		p->begin = unit_part_elements(u) * unit_position(u, p);
		p->n = unit_end_at(u, unit_position(u, p));
	}
}

bool unit_is_read(const struct unit *u)
{
	return u->gathered_ranks || u->summoned_ranks || unit_is_copying(u);
}

static const struct state_row unit_copy_states[] = {
	[UNIT_COPY_NONE] = { "NONE", STATE_TO(UNIT_COPY_KEPT) },
	[UNIT_COPY_KEPT] = { "KEPT", STATE_TO(UNIT_COPY_CASTING) | STATE_TO(UNIT_COPY_NONE) },
	[UNIT_COPY_CASTING] = { "CASTING",
				STATE_TO(UNIT_COPY_EXECUTING) | STATE_TO(UNIT_COPY_KEPT) },
	[UNIT_COPY_EXECUTING] = { "EXECUTING", STATE_TO(UNIT_COPY_KEPT) },
};

void unit_copy_move(struct unit *u, enum unit_copy to)
{
	state_move(unit_copy_states, &u->copy, (uint8_t)to);
}

static const struct state_row unit_step_states[] = {
	[UNIT_STEP_NONE] = { "NONE", STATE_TO(UNIT_STEP_ARRIVED) | STATE_TO(UNIT_STEP_DUE) |
					     STATE_TO(UNIT_STEP_STEPPING) |
					     STATE_TO(UNIT_STEP_STEPPED) },
	[UNIT_STEP_ARRIVED] = { "ARRIVED", STATE_TO(UNIT_STEP_NONE) },
	[UNIT_STEP_DUE] = { "DUE", STATE_TO(UNIT_STEP_STEPPING) | STATE_TO(UNIT_STEP_NONE) },
	[UNIT_STEP_STEPPING] = { "STEPPING",
				 STATE_TO(UNIT_STEP_STEPPED) | STATE_TO(UNIT_STEP_NONE) },
	[UNIT_STEP_STEPPED] = { "STEPPED", STATE_TO(UNIT_STEP_NONE) },
};

void unit_step_move(struct unit *u, enum unit_step to)
{
	state_move(unit_step_states, &u->step, (uint8_t)to);
}

static const struct state_row unit_shards_states[] = {
	[UNIT_SHARDS_NONE] = { "NONE", STATE_TO(UNIT_SHARDS_PROMISED) },
	[UNIT_SHARDS_PROMISED] = { "PROMISED",
				   STATE_TO(UNIT_SHARDS_READY) | STATE_TO(UNIT_SHARDS_NONE) },
	[UNIT_SHARDS_READY] = { "READY", STATE_TO(UNIT_SHARDS_MIXED) | STATE_TO(UNIT_SHARDS_NONE) },
	[UNIT_SHARDS_MIXED] = { "MIXED", STATE_TO(UNIT_SHARDS_READY) | STATE_TO(UNIT_SHARDS_NONE) },
};

void unit_shards_move(struct unit *u, enum unit_shards to)
{
	state_move(unit_shards_states, &u->shards, (uint8_t)to);
}

void unit_shards_drop(struct unit *u)
{
	u->shards_from = 0;
	u->shards_left = 0;
	if (u->shards == UNIT_SHARDS_NONE ||
	    (u->shards == UNIT_SHARDS_MIXED && u->step == UNIT_STEP_STEPPING))
		return; /* that makes the copies equal */
	unit_shards_move(u, UNIT_SHARDS_NONE);
}

void unit_pass_end(struct unit *u)
{
	if (u->step != UNIT_STEP_NONE && u->step != UNIT_STEP_STEPPING)
		unit_step_move(u, UNIT_STEP_NONE);
	unit_shards_drop(u);
	free(u->norms);
	u->norms = NULL;
}

struct unit *unit_free(struct unit *u)
{
	if (!u)
		return NULL;
	MAGIC_CHECK(u, UNIT_MAGIC);
	CHECK(!u->gathered_ranks && !u->summoned_ranks && u->copy == UNIT_COPY_NONE);
	CHECK(condition_is_idle(&u->cast_done) && list_empty(&u->idle));
	CHECK(u->step != UNIT_STEP_STEPPING && !u->shard_writes);
	CHECK(condition_is_idle(&u->step_done));
	free(u->norms);
	for (unsigned d = 0; d < u->n_parts; d++)
		reads_deinit(&u->parts[d].reads);
	free(u->parts);
	free(u->tensors);
	free(u->buffers);
	free(u->lacks);
	u->magic = 0;
	free(u);
	return NULL;
}

struct unit_part *unit_part_on(struct unit *u, const struct device *device)
{
	unsigned d = 0;

	while (d < u->n_parts && u->parts[d].device != device)
		d++;
	CHECK(d < u->n_parts);
	return &u->parts[d];
}

uint64_t unit_part_elements(const struct unit *u)
{
	return layout_part(&u->layout, u->spread);
}

uint64_t unit_frozen_elements(const struct unit *u)
{
	return layout_frozen_part(&u->layout, u->spread);
}

bool unit_is_trained(const struct unit *u)
{
	return u->layout.shard_elements > 0;
}

bool unit_is_direct(const struct unit *u)
{
	return u->spread == 1 && u->rec->compute_dtype == u->rec->storage_dtype;
}

uint64_t unit_full_elements(const struct unit *u)
{
	return layout_full(&u->layout, u->spread);
}

uint64_t unit_full_bytes(const struct unit *u)
{
	return unit_full_elements(u) * dtype_size(u->rec->compute_dtype);
}

uint64_t unit_full_room(const struct unit *u)
{
	return (unit_part_elements(u) + unit_frozen_elements(u)) * u->spread *
	       dtype_size(u->rec->compute_dtype);
}

uint64_t unit_gradient_bytes(const struct unit *u)
{
	return u->layout.elements * dtype_size(u->rec->gradient_dtype);
}

uint64_t unit_shard_bytes(const struct unit *u)
{
	unsigned arrays = !unit_pools_gradient(u->rec) + unit_state_arrays(u->rec);

	return u->n_parts * (unit_params_bytes(u->rec, &u->layout, u->spread) +
			     unit_array_bytes(&u->layout, u->spread) * arrays);
}

struct region unit_direct_region(const struct unit *u, const struct unit_part *p)
{
	CHECK(unit_is_direct(u));
	return (struct region){ p->params.slab, p->params.offset, unit_full_bytes(u) };
}

int unit_track_gradients(struct unit *u)
{
	if (!u->lacks)
		u->lacks = calloc(u->rec->n_tensors + 1, 1);
	return u->lacks ? 0 : -ENOMEM;
}

void unit_got_gradient(struct unit *u, uint32_t tensor)
{
	CHECK(u->lacks && tensor < u->rec->n_tensors);
	if (!u->has_gradient)
		memset(u->lacks, 1, u->rec->n_tensors);
	if (!u->has_gradient)
		u->some_lack = true;
	u->has_gradient = true;
	u->lacks[tensor] = 0;
}

bool unit_trains(const struct unit *u, uint32_t tensor)
{
	return !u->tensors[tensor].frozen && !u->tensors[tensor].alias;
}

bool unit_lacks_gradient(const struct unit *u, uint32_t tensor)
{
	return !u->has_gradient || (u->some_lack && u->lacks[tensor]);
}

void unit_stepped(struct unit *u)
{
	u->rec->optimizer->steps++;
	if (u->unsaved == UNIT_SAVED || u->some_lack)
		u->unsaved = u->some_lack ? UNIT_UNSAVED_ALL : UNIT_UNSAVED_STEPS;
	for (uint32_t i = 0; u->some_lack && i < u->rec->n_tensors; i++)
		u->rec->tensors[i]->missed += u->lacks[i];
	u->some_lack = false;
}

uint64_t unit_steps(const struct unit *u, uint32_t tensor)
{
	uint64_t steps = u->rec->optimizer->steps, missed = u->rec->tensors[tensor]->missed;

	CHECK(missed <= steps);
	return steps - missed;
}

void unit_forget_steps(struct unit *u)
{
	u->rec->optimizer->steps = 0;
	u->unsaved = UNIT_UNSAVED_ALL;
	for (uint32_t i = 0; i < u->rec->n_tensors; i++)
		u->rec->tensors[i]->missed = 0;
}
