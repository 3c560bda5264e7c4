/*
 * Every rank brings its own shard: what it owns, out of memory of its own, into the parts
 * that hold it. Where a rank's memory is on the one device that holds its shard the pieces
 * are copied there; else they are brought together in a shard's order, shown to all devices,
 * and taken apart where they belong. Of several replicas the first one's ranks are asked. All nodes go
 * through all ranks in turn; only the node of a rank has its memory.
 */
#include "unitio/import.h"

#include "core/check.h"
#include "job/mesh.h"
#include "op/op.h"
#include "unit/optim.h"
#include "unit/runs.h"
#include "work/coll.h"

/* Room for the pieces of several ranks at once. */
#define MORE_LAUNCHES 1024u

/* Has part @d the shard of rank @i of the group? */
static bool import_holds(const struct coll *c, unsigned d, uint32_t i)
{
	return unit_position(c->unit, &c->unit->parts[d]) == unit_rank_position(c->unit, i);
}

/* Is the device of rank @i of the group the one that has its shard? */
static bool import_is_at_home(const struct coll *c, uint32_t i)
{
	return c->unit->spread == coll_devices(c) &&
	       group_device_number(c->group, i) == unit_rank_position(c->unit, i);
}

/* Is it on this node? @ret: the index of its member. */
static bool import_is_here(const struct coll *c, uint32_t i, uint32_t *ret)
{
	return group_is_here(c->group, i, ret);
}

/* Bytes of an element of what is written. */
static size_t import_size(const struct coll *c)
{
	return dtype_size(unit_state_dtype(c->unit->rec, import_of(c)->state));
}

/* @n elements from element @at of @src. */
static void import_copy(const struct coll *c, unsigned d, void *dst, const void *src, uint64_t at,
			uint64_t n)
{
	coll_launch(&c->parts[d], LAUNCH_COPY, n * import_size(c))->copy =
		(struct k_copy){ dst, (const char *)src + at * import_size(c) };
}

/* Noted at the start: the collective, or its ops, hold that memory until it ends. */
static void import_note_sources(struct coll *c,
				const void *(*source)(const struct coll *c, uint32_t i))
{
	for (unsigned d = 0; d < c->n_parts; d++)
		for (uint32_t k = 0; k < c->parts[d].n; k++)
			c->parts[d].inputs[k] = source(c, c->parts[d].members[k]);
}

static const void *import_source_of(const struct coll *c, uint32_t i)
{
	const struct coll_part *p = coll_part(c, i);
	uint32_t k = 0;

	while (p->members[k] != i)
		CHECK(++k < p->n);
	return p->inputs[k];
}

static uint64_t import_source_at(const struct coll *c, const struct unit_run *run)
{
	return import_of(c)->packed ? c->unit->tensors[run->tensor].packed + run->first : run->full;
}

/* Optimizer state there is of what is trained alone. */
static bool import_run_of(const struct coll *c, uint32_t i, uint32_t tensor, struct unit_run *ret)
{
	return !(import_of(c)->state && c->unit->tensors[tensor].frozen) &&
	       unit_rank_run(c->unit, i, tensor, ret);
}

static void *import_target_at(const struct coll *c, unsigned d, uint64_t at)
{
	return unit_state_at(c->unit->rec, unit_state(&c->unit->parts[d], import_of(c)->state),
			     import_of(c)->state, at);
}

static void import_copy_home(struct coll *c, uint32_t i)
{
	struct unit_run run;
	const void *from;
	uint32_t m;
	unsigned d;

	if (!import_is_here(c, i, &m))
		return;
	from = import_source_of(c, m);
	d = c->part_of[m];
	for (uint32_t t = 0; t < c->unit->rec->n_tensors; t++)
		if (import_run_of(c, i, t, &run))
			import_copy(c, d, import_target_at(c, d, run.at), from,
				    import_source_at(c, &run), run.n);
}

/* As many as there is room for. */
static enum res import_copy_homes(struct coll *c)
{
	size_t each = c->unit->rec->n_tensors, left = each + MORE_LAUNCHES;

	RES_TRY(coll_need_launches(c, left));
	while (c->turn < c->unit->layout.ranks && import_is_at_home(c, c->turn) && left >= each) {
		import_copy_home(c, c->turn++);
		left -= each;
	}
	return coll_kernels(c);
}

static void *import_shown(const struct coll *c, unsigned d)
{
	return region_addr(&c->parts[d].scratch[0]);
}

static enum res import_take_apart(struct coll *c)
{
	uint32_t i = c->turn++;
	struct unit_run run;

	RES_TRY(coll_need_launches(c, c->unit->rec->n_tensors));
	for (unsigned d = 0; d < c->n_parts; d++)
		for (uint32_t t = 0; import_holds(c, d, i) && t < c->unit->rec->n_tensors; t++)
			if (import_run_of(c, i, t, &run))
				import_copy(c, d, import_target_at(c, d, run.at),
					    import_shown(c, d), run.shard, run.n);
	return coll_kernels(c);
}

static enum res import_show(struct coll *c)
{
	const struct layout *l = &c->unit->layout;
	void *data[NODE_MAX_DEVICES];

	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++)
		data[d] = import_shown(c, d);
	coll_broadcast(c, data, (l->shard_elements + l->frozen_shard) * import_size(c),
		       group_device_number(c->group, c->turn));
	return RES_WAIT;
}

static enum res import_bring_together(struct coll *c)
{
	uint32_t i = c->turn, m;
	struct unit_run run;
	const void *from;
	unsigned d;

	RES_TRY(coll_need_launches(c, c->unit->rec->n_tensors));
	if (!import_is_here(c, i, &m))
		return coll_kernels(c);
	from = import_source_of(c, m);
	d = c->part_of[m];
	for (uint32_t t = 0; t < c->unit->rec->n_tensors; t++)
		if (import_run_of(c, i, t, &run))
			import_copy(c, d, (char *)import_shown(c, d) + run.shard * import_size(c),
				    from, import_source_at(c, &run), run.n);
	return coll_kernels(c);
}

enum import_stage { IMPORT_NEXT_RANK, IMPORT_SHOW, IMPORT_TAKE_APART };

enum res import_write_tick(struct coll *c)
{
	switch ((enum import_stage)import_of(c)->stage) {
	case IMPORT_NEXT_RANK:
		if (c->turn == c->unit->layout.ranks)
			return RES_DONE;
		if (import_is_at_home(c, c->turn))
			return import_copy_homes(c);
		import_of(c)->stage = IMPORT_SHOW;
		return import_bring_together(c);
	case IMPORT_SHOW:
		import_of(c)->stage = IMPORT_TAKE_APART;
		return import_show(c);
	case IMPORT_TAKE_APART:
		import_of(c)->stage = IMPORT_NEXT_RANK;
		return import_take_apart(c);
	}
	CHECK_NOT_REACHED();
}

enum res import_ready(struct coll *c)
{
	const struct layout *l = &c->unit->layout;

	if (coll_is_alone(c))
		return RES_DONE;
	RES_TRY(coll_ready(c));
	return coll_need_scratch(c, 0, (l->shard_elements + l->frozen_shard) * sizeof(float));
}

void import_write(struct coll *c, const void *(*source)(const struct coll *c, uint32_t i),
		  bool packed, unsigned state)
{
	CHECK(c->unit->layout.ranks <= coll_size(c) && import_of(c)->stage == 0);
	import_note_sources(c, source);
	import_of(c)->packed = packed;
	import_of(c)->state = state;
	c->turn = 0;
}

enum res import_gather_array(struct coll *c, const struct region *const *arrays, unsigned state,
			     bool frozen)
{
	const struct unit *u = c->unit;
	uint64_t trained = unit_part_elements(u);
	uint64_t count = frozen ? unit_frozen_elements(u) : trained;
	const void *send[NODE_MAX_DEVICES];
	void *recv[NODE_MAX_DEVICES];
	enum dtype dtype = unit_state_dtype(u->rec, state);

	if (!count)
		return RES_DONE;
	RES_TRY(coll_can_talk(c));
	for (unsigned d = 0; d < c->n_parts; d++) {
		CHECK(c->parts[d].scratch[0].bytes >=
		      ((frozen ? trained : 0) + count) * u->spread * dtype_size(dtype));
		send[d] = unit_state_at(u->rec, arrays[d], state, frozen ? trained : 0);
		recv[d] = unit_state_at(u->rec, &c->parts[d].scratch[0], state,
					frozen ? trained * u->spread : 0);
	}
	if (mesh_is_needed(u))
		coll_talks_over(c, COLL_OVER_SETS);
	coll_all_gather(c, send, recv, count, dtype);
	return RES_WAIT;
}
