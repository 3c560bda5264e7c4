#include "unit/layout.h"

bool layout_flat(uint64_t elements, uint32_t ranks, uint32_t multiple, struct layout *ret)
{
	uint64_t shard;

	if (!elements || !ranks || !multiple || elements > LAYOUT_MAX_ELEMENTS)
		return false;
	shard = (elements + ranks - 1) / ranks;
	shard = (shard + multiple - 1) / multiple * multiple;
	if (shard > LAYOUT_MAX_ELEMENTS / ranks)
		return false;
	*ret = (struct layout){ .elements = elements,
				.shard_elements = shard,
				.padded = shard * ranks,
				.ranks = ranks };
	return true;
}

uint64_t layout_begin(const struct layout *l, uint32_t r)
{
	return l->shard_elements * r;
}

uint64_t layout_owned(const struct layout *l, uint32_t r)
{
	uint64_t begin = layout_begin(l, r);
	uint64_t left = begin < l->elements ? l->elements - begin : 0;

	return left < l->shard_elements ? left : l->shard_elements;
}

bool layout_has_sets(const uint16_t *device_of, uint32_t ranks, uint32_t shard_ranks,
		     unsigned devices)
{
	uint32_t replicas = ranks / shard_ranks;

	if (shard_ranks == 1 || replicas < 2 || replicas >= devices || devices % replicas)
		return false;
	for (uint32_t i = 0; i < ranks; i++)
		if (device_of[i] / (devices / replicas) != i / shard_ranks)
			return false;
	return true;
}

unsigned layout_spread(const struct layout *l, unsigned devices)
{
	if (l->ranks == 1 || l->replicas >= devices)
		return 1;
	return l->sets ? devices / l->replicas : devices;
}

uint32_t layout_part_ranks(const struct layout *l, unsigned spread)
{
	return (l->ranks + spread - 1) / spread;
}

uint64_t layout_part(const struct layout *l, unsigned spread)
{
	return layout_part_ranks(l, spread) * l->shard_elements;
}

uint64_t layout_frozen_part(const struct layout *l, unsigned spread)
{
	return layout_part_ranks(l, spread) * l->frozen_shard;
}

uint64_t layout_part_owned(const struct layout *l, unsigned spread, unsigned d)
{
	uint64_t part = layout_part(l, spread), begin = part * d;
	uint64_t left = begin < l->elements ? l->elements - begin : 0;

	return left < part ? left : part;
}

uint64_t layout_full(const struct layout *l, unsigned spread)
{
	if (!l->frozen_shard)
		return l->elements;
	return layout_part(l, spread) * spread +
	       (l->dim0 ? layout_frozen_part(l, spread) * spread : l->frozen);
}

void layout_divide_factors(uint32_t ranks, double *ret_pre, double *ret_post)
{
	uint64_t f = 1;

	while (ranks % f == 0 && (double)ranks / (double)f > (double)f)
		f *= 2;
	*ret_pre = (double)f;
	*ret_post = (double)ranks / (double)f;
}

bool layout_numel(const uint64_t *shape, uint32_t dims, uint64_t *ret)
{
	uint64_t n = 1;

	for (uint32_t i = 0; i < dims; i++) {
		if (!shape[i] || shape[i] > LAYOUT_MAX_ELEMENTS / n)
			return false;
		n *= shape[i];
	}
	*ret = n;
	return true;
}

/* Of the dimensions not taken yet, the one with the smallest stride. */
static uint32_t layout_innermost(const uint64_t *shape, const uint64_t *strides, uint32_t dims,
				 uint64_t taken)
{
	uint32_t least = dims;

	for (uint32_t i = dims; i--;)
		if (shape[i] > 1 && !(taken >> i & 1) &&
		    (least == dims || strides[i] < strides[least]))
			least = i;
	return least;
}

bool layout_dense(const uint64_t *shape, const uint64_t *strides, uint32_t dims, bool *ret_plain)
{
	uint64_t taken = 0, want = 1;
	uint32_t last = dims, i;

	if (dims > 64)
		return false;
	*ret_plain = true;
	while ((i = layout_innermost(shape, strides, dims, taken)) < dims) {
		if (strides[i] != want)
			return false;
		*ret_plain = *ret_plain && i < last;
		last = i;
		taken |= UINT64_C(1) << i;
		want *= shape[i];
	}
	return true;
}
