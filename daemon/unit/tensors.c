/* The tensors of a unit: their number of elements, and the place of each. */
#include <stdlib.h>

#include "core/check.h"
#include "unit/unit.h"

bool unit_is_alias(const state_tensor *t)
{
	return *t->alias_of;
}

bool unit_elements(const state_unit *rec, uint64_t *ret)
{
	uint64_t sum = 0, n;

	for (size_t i = 0; i < rec->n_tensors; i++) {
		const state_tensor *t = rec->tensors[i];

		if (!layout_numel(t->shape, (uint32_t)t->n_shape, &n))
			return false;
		sum += unit_is_alias(t) ? 0 : n;
		if (sum > LAYOUT_MAX_ELEMENTS)
			return false;
	}
	*ret = sum;
	return sum > 0;
}

/* FLAT: @n elements by the rule of layout_flat, which has no empty ones. */
static bool tensors_flat_shard(uint64_t n, const struct layout *l, uint32_t multiple, uint64_t *ret)
{
	struct layout flat = { 0 };

	if (n && !layout_flat(n, l->ranks, multiple, &flat))
		return false;
	*ret = flat.shard_elements;
	return true;
}

/* DIM0: the pieces of one rank, all tensors'. */
static bool tensors_dim0_shards(const state_unit *rec, struct layout *l)
{
	for (size_t i = 0; i < rec->n_tensors; i++) {
		const state_tensor *t = rec->tensors[i];
		uint64_t d0 = t->n_shape ? t->shape[0] : 1, n, *shard;

		if (unit_is_alias(t))
			continue;
		CHECK(layout_numel(t->shape, (uint32_t)t->n_shape, &n));
		shard = t->frozen ? &l->frozen_shard : &l->shard_elements;
		*shard += layout_rows(d0, l->ranks) * (n / d0);
		if (*shard > LAYOUT_MAX_ELEMENTS / l->ranks)
			return false;
	}
	return true;
}

bool unit_layout(const state_unit *rec, uint32_t ranks, struct layout *ret)
{
	uint32_t shard = rec->shard_ranks ? rec->shard_ranks : ranks;
	struct layout l = { .ranks = shard, .dim0 = rec->layout == LAYOUT_DIM0, .sets = rec->sets };
	uint64_t all, n;

	if (!unit_elements(rec, &all) || !ranks || ranks % shard || !rec->shard_multiple)
		return false;
	l.replicas = ranks / shard;
	for (size_t i = 0; i < rec->n_tensors; i++) {
		const state_tensor *t = rec->tensors[i];

		CHECK(layout_numel(t->shape, (uint32_t)t->n_shape, &n));
		l.frozen += t->frozen && !unit_is_alias(t) ? n : 0;
	}
	l.elements = all - l.frozen;
	if (l.dim0 ? !tensors_dim0_shards(rec, &l)
		   : !tensors_flat_shard(l.elements, &l, rec->shard_multiple, &l.shard_elements) ||
			     !tensors_flat_shard(l.frozen, &l, rec->shard_multiple,
						 &l.frozen_shard))
		return false;
	l.padded = l.shard_elements * l.ranks;
	*ret = l;
	return true;
}

static void tensors_lay_out_tensor(struct unit_tensor *ut, const state_tensor *t,
				   const struct layout *l, uint64_t *at)
{
	uint64_t d0 = t->n_shape ? t->shape[0] : 1;

	CHECK(layout_numel(t->shape, (uint32_t)t->n_shape, &ut->elements));
	ut->frozen = t->frozen;
	ut->row = ut->elements / d0;
	ut->piece = layout_rows(d0, l->ranks) * ut->row;
	ut->at = at[t->frozen];
	at[t->frozen] += l->dim0 ? ut->piece : ut->elements;
}

struct unit_tensor *unit_tensors_new(const state_unit *rec, const struct layout *layout,
				     uint64_t *ret_packed)
{
	struct unit_tensor *all = calloc(rec->n_tensors, sizeof(*all));
	uint64_t at[2] = { 0 }, packed = 0;

	for (size_t i = 0; all && i < rec->n_tensors; i++) {
		all[i].alias = unit_is_alias(rec->tensors[i]);
		if (all[i].alias)
			continue;
		tensors_lay_out_tensor(&all[i], rec->tensors[i], layout, at);
		all[i].packed = packed;
		packed += all[i].elements;
	}
	*ret_packed = packed;
	return all;
}

uint64_t unit_tensor_full(const struct unit *u, const struct unit_tensor *t)
{
	uint64_t ranks = layout_part_ranks(&u->layout, u->spread) * u->spread;
	uint64_t begin = t->frozen ? unit_part_elements(u) * u->spread : 0;

	CHECK(!t->alias);
	return begin + (u->layout.dim0 ? t->at * ranks : t->at);
}

uint64_t unit_frozen_numel(const struct unit *u)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < u->rec->n_tensors; i++)
		sum += u->tensors[i].frozen ? u->tensors[i].elements : 0;
	return sum;
}

const char *unit_layout_name(uint32_t layout)
{
	return layout == LAYOUT_FLAT ? "flat" : layout == LAYOUT_DIM0 ? "dim0" : "?";
}

const char *unit_strategy_name(uint32_t strategy)
{
	static const char *const names[_STRATEGY_N] = { "?", "shard", "replicate", "hybrid" };

	return strategy < _STRATEGY_N ? names[strategy] : "?";
}

struct unit_ranks unit_part_ranks(const struct unit *u, unsigned position)
{
	uint32_t each = layout_part_ranks(&u->layout, u->spread), ranks = u->layout.ranks;
	uint32_t lo = position * each < ranks ? position * each : ranks;

	return (struct unit_ranks){ lo, lo + each < ranks ? lo + each : ranks, position };
}

void unit_tensor_cut(const struct unit *u, const struct unit_tensor *t, const struct unit_ranks *r,
		     uint64_t *ret_begin, uint64_t *ret_end)
{
	uint64_t shard = t->frozen ? u->layout.frozen_shard : u->layout.shard_elements;
	uint64_t lo = u->layout.dim0 ? r->lo * t->piece : r->lo * shard;
	uint64_t hi = u->layout.dim0 ? r->hi * t->piece : r->hi * shard;
	uint64_t at = u->layout.dim0 ? 0 : t->at;
	uint64_t begin = lo > at ? lo - at : 0, end = hi > at ? hi - at : 0;

	end = end < t->elements ? end : t->elements;
	*ret_begin = begin < end ? begin : end;
	*ret_end = end;
}

uint64_t unit_tensor_at(const struct unit *u, const struct unit_tensor *t,
			const struct unit_ranks *r, uint64_t first)
{
	uint64_t each = layout_part_ranks(&u->layout, u->spread), before = each * r->position;
	uint64_t shard = t->frozen ? u->layout.frozen_shard : u->layout.shard_elements;
	uint64_t base = t->frozen ? unit_part_elements(u) : 0;

	if (u->layout.dim0)
		return base + each * t->at + first - before * t->piece;
	return base + t->at + first - before * shard;
}

uint64_t unit_tensors_end(const struct unit *u, unsigned position)
{
	struct unit_ranks r = unit_part_ranks(u, position);
	uint64_t last = 0;

	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		const struct unit_tensor *t = &u->tensors[i];
		uint64_t begin, end;

		if (t->frozen || t->alias)
			continue;
		unit_tensor_cut(u, t, &r, &begin, &end);
		if (begin < end)
			last = unit_tensor_at(u, t, &r, begin) + end - begin;
	}
	return last;
}
