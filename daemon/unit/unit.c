#include "unit/unit.h"

#include <errno.h>
#include <stdlib.h>

#include "core/check.h"

#define UNIT_MAGIC 0x554e4954u

uint64_t unit_array_bytes(const struct layout *l)
{
	uint64_t bytes = l->padded * sizeof(float);

	return (bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN;
}

unsigned unit_state_arrays(const state_unit *rec)
{
	if (rec->optimizer->kind == OPTIM_ADAMW)
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

int unit_new(uint32_t id, state_unit *rec, const struct layout *layout, struct unit **ret)
{
	struct unit *u = calloc(1, sizeof(*u));

	if (!u)
		return -ENOMEM;
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
	CHECK(!u->gathered_ranks && !u->casting && !u->full.slab);
	CHECK(list_empty(&u->waiting) && list_empty(&u->idle));
	u->magic = 0;
	free(u);
	return NULL;
}

bool unit_is_direct(const struct unit *u)
{
	return u->rec->compute_dtype == u->rec->storage_dtype;
}

uint64_t unit_full_bytes(const struct unit *u)
{
	return u->layout.elements * dtype_size(u->rec->compute_dtype);
}

uint64_t unit_full_room(const struct unit *u)
{
	return u->layout.padded * dtype_size(u->rec->compute_dtype);
}

uint64_t unit_gradient_bytes(const struct unit *u)
{
	return u->layout.elements * dtype_size(u->rec->gradient_dtype);
}

uint64_t unit_shard_bytes(const struct unit *u)
{
	return unit_array_bytes(&u->layout) * (2 + unit_state_arrays(u->rec));
}

struct region unit_direct_region(const struct unit *u)
{
	return (struct region){ u->params.slab, u->params.offset, unit_full_bytes(u) };
}
