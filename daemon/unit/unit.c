#include "unit/unit.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"

#define UNIT_MAGIC 0x554e4954u

uint64_t unit_array_bytes(const struct layout *l, unsigned parts)
{
	uint64_t bytes = layout_part(l, parts) * sizeof(float);

	return (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
}

unsigned unit_state_arrays(const state_unit *rec)
{
	if (rec->optimizer->kind == OPTIM_ADAMW || rec->optimizer->kind == OPTIM_ADAM)
		return 2;
	return rec->optimizer->kind == OPTIM_SGD && rec->optimizer->momentum != 0 ? 1 : 0;
}

bool unit_elements(const state_unit *rec, uint64_t *ret)
{
	uint64_t sum = 0, n;

	for (size_t i = 0; i < rec->n_tensors; i++) {
		const state_tensor *t = rec->tensors[i];

		if (!layout_numel(t->shape, (uint32_t)t->n_shape, &n))
			return false;
		sum += n;
		if (sum > LAYOUT_MAX_ELEMENTS)
			return false;
	}
	*ret = sum;
	return sum > 0;
}

bool unit_layout(const state_unit *rec, uint32_t ranks, struct layout *ret)
{
	uint64_t n;

	return unit_elements(rec, &n) && layout_flat(n, ranks, rec->shard_multiple, ret);
}

int unit_new(uint32_t id, state_unit *rec, const struct layout *layout,
	     struct device *const *devices, unsigned n_devices, struct unit **ret)
{
	struct unit *u = calloc(1, sizeof(*u));

	CHECK(n_devices > 0);
	if (!u)
		return -ENOMEM;
	u->parts = calloc(n_devices, sizeof(*u->parts));
	if (!u->parts) {
		free(u);
		return -ENOMEM;
	}
	u->n_parts = n_devices;
	for (unsigned d = 0; d < n_devices; d++) {
		u->parts[d].device = devices[d];
		u->parts[d].begin = layout_part(layout, n_devices) * d;
		u->parts[d].n = layout_part_owned(layout, n_devices, d);
	}
	u->magic = UNIT_MAGIC;
	u->id = id;
	u->rec = rec;
	u->layout = *layout;
	u->version = 1;
	list_init(&u->waiting);
	list_init(&u->idle);
	*ret = u;
	return 0;
}

struct unit *unit_free(struct unit *u)
{
	if (!u)
		return NULL;
	MAGIC_CHECK(u, UNIT_MAGIC);
	CHECK(!u->gathered_ranks && !u->casting && !u->executing && !u->has_full);
	CHECK(list_empty(&u->waiting) && list_empty(&u->idle));
	for (unsigned d = 0; d < u->n_parts; d++)
		reads_deinit(&u->parts[d].reads);
	free(u->parts);
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
	return layout_part(&u->layout, u->n_parts);
}

bool unit_is_direct(const struct unit *u)
{
	return u->n_parts == 1 && u->rec->compute_dtype == u->rec->storage_dtype;
}

uint64_t unit_full_bytes(const struct unit *u)
{
	return u->layout.elements * dtype_size(u->rec->compute_dtype);
}

uint64_t unit_full_room(const struct unit *u)
{
	return unit_part_elements(u) * u->n_parts * dtype_size(u->rec->compute_dtype);
}

uint64_t unit_gradient_bytes(const struct unit *u)
{
	return u->layout.elements * dtype_size(u->rec->gradient_dtype);
}

uint64_t unit_shard_bytes(const struct unit *u)
{
	return unit_array_bytes(&u->layout, u->n_parts) * u->n_parts *
	       (2 + unit_state_arrays(u->rec));
}

struct region unit_direct_region(const struct unit *u)
{
	const struct region *params = &u->parts[0].params;

	CHECK(unit_is_direct(u));
	return (struct region){ params->slab, params->offset, unit_full_bytes(u) };
}
